"""transformer_test.py, as a user runs it: training, stopping, use, and what is refused."""

import csv
import json
import signal
from itertools import chain
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from quick_runs import raise_in_step
from safetensors.torch import load_file
from tokenizers import Tokenizer

import transformer_test
from utils.data.texts.headlines import open_headlines
from utils.data.texts.sources import TextRequest
from utils.settings.config import parse

pytestmark = pytest.mark.usefixtures("own_folder")

TINY = [
    "--layers", "1", "--dim", "16", "--heads", "2", "--ffn", "16", "--max_len", "24", "--device",
    "cpu", "--threads", "1", "--bs", "16", "--vocab_size", "400", "--cache_dir", "cache",
    "--log_every", "2",
]  # fmt: skip
HEADLINES = ["--dataset", "headlines", "--subset", "200", *TINY]
WORDS = {
    "ant": "small leg hill sugar",
    "bee": "wing honey flower sting",
    "cat": "fur paw milk tail",
}


@pytest.fixture
def run(capfd):
    """run(flags) -> (exit code, output, the line of the error or '')."""

    def start(*arguments) -> tuple[int, str, str]:
        capfd.readouterr()
        code = transformer_test.main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert "Traceback" not in err and "Warning" not in err, err
        assert len(errors) == (code == 2), err
        return code, out, "".join(errors)

    return start


def untrained(flags: list[str]) -> list[str]:
    """The arguments without those of a trained tokenizer."""
    at = flags.index("--vocab_size")
    return flags[:at] + flags[at + 2 :]


def table(path: str) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def rows(count: int, seed: int) -> list[tuple[str, str]]:
    rng = np.random.default_rng(seed)
    labels = [sorted(WORDS)[i % 3] for i in range(count)]
    texts = [
        " ".join(rng.choice(f"the a of {WORDS[name]}".split(), rng.integers(4, 20)))
        for name in labels
    ]
    return list(zip(labels, texts, strict=True))


def write(path: str, content: list) -> str:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(content)
    return path


@pytest.fixture
def own_texts() -> list[str]:
    """Flags for a training file with a header and a test file without."""
    train = write("train.csv", [("animal", "text"), *rows(90, 0)])
    test = write("test.csv", [(text, name) for name, text in rows(30, 1)])
    return ["--dataset", "csv", "--train_file", train, "--test_file", test, *TINY]


def last(folder: str, name: str = "model") -> bytes:
    return (checkpoint(folder) / f"{name}.safetensors").read_bytes()


def checkpoint(folder: str) -> Path:
    return sorted(Path(folder, "checkpoints").glob("step-*"))[-1]


def summary(folder: str) -> dict:
    return json.loads(Path(folder, "summary.json").read_text())


# ---- training ---------------------------------------------------------------------------------


def test_own_texts_are_learned(run, own_texts):
    code, out, error = run(*own_texts, "--epochs", 12, "--lr", "0.01", "--output", "run")
    assert code == 0, error
    assert "train.csv: class in column" in out and "test.csv: class in column" in out
    found = summary("run")
    assert found["status"] == "finished" and found["entry"] == "transformer_test.py"
    assert found["test_samples"] == 30 and found["test_accuracy"] > 95
    assert found["optimizer"] == "adamw" and found["classes"] == 3 and found["skipped_rows"] == 0
    assert sorted(path.name for path in Path("run").iterdir()) == [
        ".lock", "checkpoints", "config.yaml", "curves.png", "evaluated.csv", "log.txt",
        "metrics.jsonl", "report", "report.html", "splits.csv", "summary.json", "tensorboard",
        "tokenizer.json",
    ]  # fmt: skip
    card = json.loads((checkpoint("run") / "state.json").read_text())["settings"]["data"]
    assert card["classes"] == ["ant", "bee", "cat"]
    assert "honey" in Tokenizer.from_str(card["tokenizer"]).get_vocab()
    assert Path("run/tokenizer.json").read_text() == card["tokenizer"]
    code, out, _ = run(*own_texts, "--epochs", 1, "--output", "again")
    assert code == 0 and "memory-mapped from" in out


def test_evaluation_does_not_depend_on_the_batch(run):
    assert run(*HEADLINES, "--max_steps", 3, "--output", "run")[0] == 0
    accuracy = summary("run")["test_accuracy"]
    for batch in (100, 7):
        code, out, _ = run("--resume", "run", "--eval_only", "--bs", batch)
        assert code == 0 and f"test accuracy {accuracy:.2f} % (" in out


EVERYTHING = [
    *HEADLINES, "--val_fraction", "0.2", "--epochs", "3", "--accumulation_steps", "2",
    "--ngd", "--clip", "1", "--label_smoothing", "0.1", "--ema_decay", "0.9", "--meta_learning",
    "--meta_every", "2", "--meta_batch", "8", "--mixup_prob", "0.9", "--dropout", "0.2",
    "--attention_dropout", "0.1", "--token_dropout", "0.2", "--early_stop_patience", "9",
    "--log_clean_accuracy", "--sched", "constant",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [[], ["--mixup_at", "embeddings", "--pooling", "mean", "--batch_tokens", "300"]]
)
def test_a_resumed_run_ends_with_the_same_bits(run, more):
    flags = list(EVERYTHING)
    if more:
        del flags[flags.index("--bs") : flags.index("--bs") + 2]
    assert run(*flags, *more, "--output", "whole")[0] == 0
    assert run(*flags, *more, "--max_steps", 7, "--output", "run")[0] == 0
    code, out, _ = run("--resume", "run", "--max_steps", "none")
    assert code == 0 and "from step 7" in out
    for name in ("model", "average", "optimizer", "mixup"):
        assert last("run", name) == last("whole", name), name
    keys = ("test_loss", "test_accuracy", "best_val_accuracy", "train_loss", "steps")
    assert [summary("run")[key] for key in keys] == [summary("whole")[key] for key in keys]


def test_a_signal_saves_and_the_run_goes_on(monkeypatch, capfd):
    flags = [*HEADLINES, "--epochs", "2", "--eval_every", "0", "--output", "run"]
    with monkeypatch.context() as patch:
        raise_in_step(patch, 9, signal.SIGTERM)
        assert transformer_test.main(flags) == 143
    assert "saved; resume with --resume" in capfd.readouterr().err
    assert checkpoint("run").name == "step-00000009"
    assert transformer_test.main(["--resume", "run"]) == 0
    assert transformer_test.main([*flags[:-1], "whole"]) == 0
    assert last("run") == last("whole")


def test_a_run_on_unequal_classes_goes_on_with_the_same_bits(run):
    """It stops inside an epoch and between two log lines."""
    counts, texts = {"ant": 70, "bee": 20, "cat": 8}, rows(294, 0)
    content = [[row for row in texts if row[0] == name][:n] for name, n in counts.items()]
    data = write("train.csv", [("animal", "text"), *chain(*content)])
    Path("weights.yaml").write_text("ant: 1\nbee: 2\ncat: 9\n")
    flags = ["--dataset", "csv", "--train_file", data, "--test_fraction", "0.2", *TINY]
    code, out, _ = run(*flags, "--max_steps", 1, "--output", "plain")
    assert code == 0 and "class 'ant' has 56 training samples and class 'cat' 6: " in out
    flags += ["--weighted_sampler", "--cls_weight", "weights.yaml", "--fl_gamma", "1"]
    flags += ["--logit-adjustment", "0.5", "--label_smoothing", "0.1", "--mixup", "0.3"]
    flags += ["--sched", "constant", "--epochs", "3"]
    code, out, _ = run(*flags, "--output", "whole")
    assert code == 0 and "'ant'" not in out and out.count("together they correct too much") == 1
    assert run(*flags, "--max_steps", 7, "--output", "run")[0] == 0
    code, out, _ = run("--resume", "run", "--max_steps", "none")
    assert code == 0 and "from step 7" in out and "too much" not in out
    for name in ("model", "optimizer"):
        assert last("run", name) == last("whole", name), name
    assert summary("run")["train_loss"] == summary("whole")["train_loss"]
    with open("weights.yaml", "a") as file:
        file.write("dog: 1\n")
    assert "there is no class 'dog'" in run("--resume", "run", "--epochs", 4)[2]


# ---- use --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_predictions_and_exports_answer_as_the_model_does(run, own_texts):
    assert run(*own_texts, "--epochs", 2, "--lr", "0.01", "--output", "run")[0] == 0
    new = ["honey and a flower", "=milk(1)", "", "the small hill"]
    Path("new.txt").write_text("\n".join(new))
    code, out, _ = run("--resume", "run", "--predict", "new.txt")
    assert code == 0 and "3 predictions: run/predictions.csv" in out
    answers = table("run/predictions.csv")
    assert [row["line"] for row in answers] == ["1", "2", "4"]
    assert [row["text"] for row in answers] == [new[0], "'=milk(1)", new[3]]
    # A row for each row; the middle one is how pandas writes a missing text.
    Path("new.csv").write_bytes('text\n"honey – wing"\n""\npaw\n'.encode("cp1252"))
    again = ("--resume", "run", "--predict", "new.csv", "--predictions", "new.out.csv")
    assert "--encoding cp1252; the line reads '\"honey – wing\"'" in run(*again)[2]
    assert "line 3 has no text" in run(*again, "--encoding", "cp1252")[2]
    said = run(*again, "--encoding", "cp1252", "--on_bad", "skip")[1]
    assert "1 bad row without a class, in line 3" in said and "2 predictions" in said
    rows_out = [line.split(",") for line in Path("new.out.csv").read_text().splitlines()]
    assert [len(row) for row in rows_out] == [7] * 4 and rows_out[2] == ["3", *[""] * 6]
    assert run("--resume", "run", "--export", "onnx")[0] == 0
    tokenizer = Tokenizer.from_file("run/export/tokenizer.json")
    session = onnxruntime.InferenceSession("run/export/model.onnx")
    classes = ["ant", "bee", "cat"]
    for row, text in zip(answers, [new[0], new[1], new[3]], strict=True):
        ids = tokenizer.encode(text).ids
        padded = np.array([ids + [tokenizer.token_to_id("[PAD]")] * 3])
        (expected,) = session.run(None, {"ids": padded})[0]
        found = [float(row[f"p_{name}"]) for name in classes]
        np.testing.assert_allclose(found, expected, atol=2e-6)
        assert row["predicted"] == classes[expected.argmax()]
    assert run("--resume", "run", "--export", "safetensors")[0] == 0
    exported, kept = (
        load_file("run/export/model.safetensors"),
        load_file(checkpoint("run") / "model.safetensors"),
    )
    assert all(torch.equal(exported[name], kept[name]) for name in kept)
    # Weights come with their tokenizer; a head for other classes is a new one.
    assert "their own tokenizer" in run(*HEADLINES, "--pretrained", "run")[2]
    again = ("--config", "run/config.yaml", "--pretrained", "run", "--eval_only")
    assert run(*again)[0] == 0
    assert "were trained with --clean_text; give that too" in run(*again, "--no_clean_text")[2]
    for source in ("run", "run/export/model.safetensors"):
        for name, other in (("heads", "4"), ("pooling", "mean")):
            code, _, error = run(
                *untrained(HEADLINES), "--pretrained", source, f"--{name}", other,
                "--output", "nothing",
            )  # fmt: skip
            assert code == 2 and f"were trained with --{name} " in error
        code, out, error = run(
            *untrained(HEADLINES), "--pretrained", source, "--freeze_backbone", "--max_steps", 2,
            "--output", f"next-{len(source)}",
        )  # fmt: skip
        assert code == 0, error
        assert "head of 3 classes replaced by one of 4" in out
        trained = load_file(checkpoint(f"next-{len(source)}") / "model.safetensors")
        same = [torch.equal(trained[name], kept[name]) for name in kept if "head" not in name]
        assert all(same) and len(same) > 5


def test_each_row_that_is_evaluated_is_listed(run):
    """With its line, the columns that are asked for, and the answers that --predict gives."""
    lines = [(f"n{i}", *row) for i, row in enumerate(rows(60, 0))]
    write("all.csv", [("id", "animal", "text"), *lines[:30], ("n", "", "bad"), *lines[30:]])
    flags = ["--dataset", "csv", "--train_file", "all.csv", "--test_fraction", 0.2, *TINY]
    flags += ["--val_fraction", 0.2, "--on_bad", "skip", "--id_columns", "id"]
    assert run(*flags, "--max_steps", 3, "--output", "run")[0] == 0
    evaluated, found = table("run/evaluated.csv"), summary("run")
    splits = {row["id"]: row["split"] for row in table("run/splits.csv")}
    assert sorted(splits.values()) == ["test"] * 12 + ["train"] * 38 + ["val"] * 10
    assert {row["id"] for row in evaluated} == {id for id in splits if splits[id] == "test"}
    right = [row["true"] == row["predicted"] for row in evaluated]
    assert 100 * np.mean(right) == pytest.approx(found["model_test_accuracy"])
    losses = [float(row["loss"]) for row in evaluated]
    assert np.mean(losses) == pytest.approx(found["best_test_loss"], abs=1e-5)
    for row in evaluated:
        place = int(row["id"][1:])
        assert int(row["line"]) == place + 2 + (place >= 30)
        assert (row["text"], row["true"]) == (lines[place][2], lines[place][1])
    ids = ("--id_columns", "id,text", "--on_bad", "skip")
    assert run("--resume", "run", "--predict", "all.csv", *ids)[0] == 0
    predicted = {row["line"]: row for row in table("run/predictions.csv")}
    for row in evaluated:
        other = predicted[row["line"]]
        assert (other["predicted"], other["id"]) == (row["predicted"], row["id"])
        assert other["text_in_file"] == row["text"]
        assert float(other["p_bee"]) == pytest.approx(float(row["p_bee"]), abs=3e-6)
    # Flags of the run that another file cannot follow are not asked of it.
    Path("new.txt").write_text("honey\n")
    assert run("--resume", "run", "--predict", "new.txt")[0] == 0
    assert run("--resume", "run", "--predict", "all.csv", "--on_bad", "skip")[0] == 0
    code, _, error = run(*flags[:-1], "name", "--output", "other")
    assert code == 2 and "has no column 'name' (--id_columns): it has id, animal, text" in error


def test_a_run_is_evaluated_on_all_of_another_table(run, own_texts):
    assert run(*own_texts, "--max_steps", 2, "--output", "run")[0] == 0
    of_run = run("--resume", "run", "--eval_only")[1].splitlines()[-1].replace("test ", "")
    assert run("--resume", "run", "--eval_data", "test.csv", "--report")[1].splitlines()[-1] == (
        f"{of_run} of test.csv"
    )
    assert Path("run/report/eval-test.csv/per_class.csv").is_file()
    write("two.csv", [("text", "kind"), *((text, name) for name, text in rows(9, 2) if name < "c")])
    out = run("--resume", "run", "--eval_data", "two.csv", "--label_column", "kind")[1]
    assert "two.csv has no samples of 1 of the 3 classes, such as 'cat'" in out
    assert ") on 6 samples of two.csv" in out
    write("more.csv", [("text", "kind"), ("a fur", "cat"), ("a tail", "dog"), ("a leg", "ox")])
    more = ("--resume", "run", "--eval_data", "more.csv", "--label_column", "kind")
    code, _, error = run(*more)
    assert code == 2 and "(all) of class 'dog'" in error and "(all) of class 'ox'" in error
    assert ") on 1 sample of more.csv" in run(*more, "--on_bad", "skip", "--max_bad", "1")[1]


def test_a_vocabulary_file_is_kept_with_the_run(run, own_texts):
    words = sorted(" ".join(WORDS.values()).split())
    vocabulary = Path(write("vocab.txt", [[word] for word in ["<unk>", *words]]))
    flags = [*untrained(own_texts), "--tokenizer", "basic_english", "--vocab", str(vocabulary)]
    code, out, _ = run(*flags, "--max_steps", 3, "--output", "run")
    assert code == 0 and "note: unknown tokens (train " in out and "texts cut" not in out
    assert "note: unknown tokens (train " in run(*flags, "--dry_run")[1]  # from the cache
    tokenizer = Tokenizer.from_file("run/tokenizer.json")
    assert tokenizer.encode("A Wing, honey").tokens == ["[CLS]", "<unk>", "wing", "<unk>", "honey"]
    vocabulary.unlink()
    assert run("--resume", "run", "--max_steps", 5, "--cache_dir", "another")[0] == 0
    Path("new.txt").write_text("honey and a flower\n" + "honey " * 30)
    code, out, _ = run("--resume", "run", "--predict", "new.txt")
    assert code == 0 and "note: unknown tokens (predicted 5.9 %)\n" in out
    assert "note: texts cut by --max_len 24 (predicted 50.0 %)\n" in out  # no flag changes that
    assert Tokenizer.from_file("run/tokenizer.json").to_str() == tokenizer.to_str()


def test_dry_run_and_report(run):
    code, out, _ = run(*HEADLINES, "--dry_run")
    assert code == 0 and "dry run: no run was kept" in out and not Path("runs").exists()
    code, out, _ = run(*HEADLINES, "--max_steps", 2, "--report", "--output", "run")
    assert code == 0 and Path("run/report/per_class.csv").is_file()
    data = "headlines: 200 training, 100 test texts of 4 classes from built-in synthetic data, "
    assert data in out and "16 samples a step, 2 steps; run folder run" in out


# ---- what is refused, in one line ---------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--dim", "10", "--heads", "4"], "not a multiple of --heads"),
        (["--cutmix_alpha", "1"], "pastes boxes of pictures"),
        (["--train_file", "x.csv"], "the flag is for csv"),
        (["--tokenizer", "bpe", "--vocab_size", "9"], "--vocab_size"),
        (["--crop_padding", "2"], "unknown flag --crop_padding"),
        (["--pretrained", "imagenet"], "imagenet"),
    ],
)
def test_unsuitable_flags_are_refused(run, flags, words):
    code, _, error = run(*HEADLINES, *flags)
    assert code == 2 and words in error, error


def test_harmless_flags_are_left_out_with_a_line():
    said = []
    argv = [*map(str, HEADLINES), "--batch_tokens", "400", "--workers", "2"]
    settings, _ = parse(
        transformer_test.Settings, [*argv, "--mixup_at", "embeddings"], "", said.append
    )
    assert (settings.workers, settings.batch_tokens) == (None, 400)
    words = ["encoded once", "nothing is mixed", "--batch_tokens takes its place"]
    assert all(any(word in line for line in said) for word in words) and len(said) == 3


def test_the_columns_of_a_file_to_predict_may_be_named_in_any_run():
    for flags, named in (({}, True), ({"predict": "new.csv"}, False)):
        settings = transformer_test.Settings(dataset="headlines", **flags)
        without_effect = settings.without_effect()
        assert "train_file" in without_effect and ("text_columns" in without_effect) == named


def test_unsuitable_texts_are_refused(run, own_texts, monkeypatch):
    assert "needs --train_file" in run("--dataset", "csv", *TINY)[2]
    error = run(*untrained(HEADLINES), "--tokenizer", "word")[2]
    assert "unigram, basic_english, or the path" in error
    assert run(*own_texts, "--max_steps", 2, "--epochs", 9, "--output", "run")[0] == 0
    for name, bad, words in (
        ("train.csv", ("bee",), "line 92"), ("test.csv", ("honey", "wasp"), "wasp"),
        ("test.csv", ("", "bee"), "has no text"),
    ):  # fmt: skip
        before = Path(name).read_text()
        with open(name, "a", newline="") as file:
            csv.writer(file).writerow(bad)
        code, _, error = run(*own_texts, "--max_steps", 1)
        assert code == 2 and name in error and words in error and "--on_bad skip" in error
        flags = ["--on_bad", "skip", "--max_steps", 1, "--output", f"skipped {words}"]
        assert run(*own_texts, *flags)[0] == 0
        assert summary(f"skipped {words}")["skipped_rows"] == 1
        Path(name).write_text(before)
    write("train.csv", [("animal", "text"), *rows(93, 5)])
    code, _, error = run("--resume", "run", "--max_steps", 4)
    assert code == 2 and "these are not the data that the run in run was trained on" in error


def test_a_test_file_takes_the_place_of_a_recipes_fraction(run, own_texts):
    Path("recipe.yaml").write_text("test_fraction: 0.5")
    output = ["--max_steps", 1, "--output", "given"]
    assert run("--config", "recipe.yaml", *own_texts, *output)[0] == 0
    assert (summary("given")["train_samples"], summary("given")["test_samples"]) == (90, 30)


def test_a_missing_network_is_reported(run, monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    code, _, error = run("--data_dir", "empty", *TINY)
    assert code == 2
    for flag in ("--data_dir", "--dataset csv", "--dataset headlines"):
        assert flag in error


def test_headlines_need_no_file(run):
    texts = open_headlines("headlines", TextRequest(Path("nowhere"))).load()
    assert texts.synthetic and len(texts.classes) == 4


@pytest.mark.slow
def test_what_an_earlier_end_has_told_is_not_told_again(run):
    """A run that goes on has no page and no answers until it ends again."""
    assert run(*HEADLINES, "--epochs", 1, "--output", "run")[0] == 0
    assert {"evaluated.csv", "report.html"} <= {path.name for path in Path("run").iterdir()}
    with pytest.MonkeyPatch.context() as patch:
        raise_in_step(patch, 2, signal.SIGTERM)
        assert run("--resume", "run", "--epochs", 2)[0] == 143
    assert not {"evaluated.csv", "report.html"} & {path.name for path in Path("run").iterdir()}
    assert run("--resume", "run")[0] == 0
    right = [row["true"] == row["predicted"] for row in table("run/evaluated.csv")]
    assert 100 * np.mean(right) == pytest.approx(summary("run")["test_accuracy"])
