"""train.py: which entry's command line stands for what it is given."""

import importlib
import inspect
import shlex
import sys
from pathlib import Path

import pytest
from PIL import Image

import tuning.entry
from utils.launch import launcher
from utils.machine import backends
from utils.settings.config import COMMAND_LINE, FILE, fields, parse
from utils.start import command, rules
from utils.start.facts import Facts
from utils.start.rules import ALL, RULES, Machine, chosen, kind_of

ENTRIES = ("resnet50_test", "transformer_test", "vit_test")


@pytest.fixture
def stands_for(monkeypatch, tmp_path):
    """stands_for(text) -> the entry and its words, which train.py would start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rules, "find_encoder", lambda english: None)  # without a network
    monkeypatch.setattr(rules, "is_on_hub", lambda name: False)
    started = []
    for name in ENTRIES:
        entry = importlib.import_module(name)
        inspect.signature(entry.main).bind([], 0.0)
        monkeypatch.setattr(entry, "main", lambda words, _, n=name: started.append((n, words)) or 7)

    def run(text: str) -> tuple[str, list[str]]:
        assert command.main(shlex.split(text), "Trains.") == 7
        return started.pop()

    return run


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_pictures(stands_for, capsys):
    entry, words = stands_for("shapes --batch-size 7 --epochs 3")
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(
        "the pictures of shapes: 5,000 to train on and 1,000 to test on, 32 pix"
    )
    assert said[0].endswith("in 10 classes, each of 500") and "of all it learns most" in said[1]
    assert said[-1] == f"python {entry}.py {shlex.join(words)}"
    assert entry == "resnet50_test" and words[-4:] == ["--batch-size", "7", "--epochs", "3"]
    assert value(words, "--dataset") == "shapes" and value(words, "--optimizer") == "muon"
    assert value(words, "--depth") == "8" and value(words, "--width") == "32"
    assert "--batch_size" not in words and "--time_budget" not in words


def test_texts_without_a_test_set(stands_for, capsys):
    rows = [f"{name},the {name} is here {i}" for i in range(20) for name in ("cat", "dog")]
    for name in ("pets.csv", "more.csv"):
        Path(name).write_text("\n".join(["label,text", *rows]))
    entry, words = stands_for("pets.csv --label_column label")
    assert entry == "transformer_test" and value(words, "--train_file") == "pets.csv"
    assert value(words, "--test_fraction") == "0.2" and value(words, "--time_budget") == "10m"
    assert value(words, "--batch_size") == "16"
    assert "note: with so few texts an encoder" in capsys.readouterr().out
    assert "--test_fraction" not in stands_for("pets.csv --test_file more.csv --epochs 1")[1]


def test_texts_with_an_encoder(stands_for, monkeypatch, capsys):
    """Where one can be had: trained as far as there is time, in the language of the texts."""
    rows = [f"{name},the {name} is in the house of a man {i}" for i in range(200) for name in "ab"]
    Path("pets.csv").write_text("\n".join(["label,text", *rows]))
    asked = []
    monkeypatch.setattr(rules, "find_encoder", lambda english: asked.append(english) or "own/one")
    words = stands_for("pets.csv --device cpu")[1]
    assert value(words, "--model") == "own/one" and value(words, "--pretrained") == "published"
    assert value(words, "--epochs") == "10" and value(words, "--time_budget") == "10m"
    assert {"--layers", "--freeze_backbone"}.isdisjoint(words) and asked == [True]
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    words = stands_for("pets.csv --device cpu --time 3s")[1]
    assert "--freeze_backbone" in words and "--lr" not in words
    assert "--model" not in stands_for("pets.csv --device cpu --time 1s")[1]
    with monkeypatch.context() as many:
        many.setattr(rules, "FEW", 100)
        assert "--model" not in stands_for("pets.csv --device cpu --time 3s")[1]
    assert "--model" not in stands_for("pets.csv --device cpu --layers 2")[1]
    assert (
        "note: with so few texts an encoder" not in capsys.readouterr().out.split("--layers 2")[1]
    )
    words = stands_for("pets.csv --model own/other --max_steps 3")[1]
    assert value(words, "--model") == "own/other" and "--epochs" not in words
    rows = [f"{name},das Tier ist im Haus eines Mannes {i}" for i in range(9) for name in "ab"]
    Path("pets.csv").write_text("\n".join(["label,text", *rows]))
    stands_for("pets.csv")
    assert asked[-1] is False


def test_pictures_with_a_network(stands_for, monkeypatch, capsys):
    """Where one can be had, and reads all pictures in time."""
    for name in ("cat", "dog"):
        for number in range(5):
            Path("photos", name).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (300, 200)).save(Path("photos", name, f"{number}.png"))
    photos = "photos --device cpu --workers 0"
    stands_for(photos)
    assert "note: with so few or large" in capsys.readouterr().out
    stands_for(f"{photos} --width 16")
    assert "note: with so few or large" not in capsys.readouterr().out
    monkeypatch.setattr(rules, "is_on_hub", lambda name: name.startswith("timm/"))
    entry, words = stands_for(photos)
    assert entry == "vit_test" and value(words, "--pretrained") == "published"
    assert "--freeze_backbone" in words and value(words, "--image_size") == "128"
    settings, _ = parse(importlib.import_module(entry).Settings, words, "")
    assert not settings.flags_of_equal_features
    for flags in ("--width 16", "--depth 18", "--model resnet18"):
        assert stands_for(f"{photos} {flags}")[0] == "resnet50_test"
    words = stands_for(f"{photos} --model vit_tiny_patch16_224 --pretrained")[1]
    assert value(words, "--optimizer") == "adamw" and "--freeze_backbone" not in words
    assert "--depth" in stands_for(f"{photos} --time 0.01s")[1]  # no time to read them


@pytest.mark.parametrize(
    ("train", "seconds", "speed", "width", "batch"),
    [
        (50_000, 60, 1, 24, 125), (50_000, 300, 1, 32, 250), (50_000, 600, 1, 48, 500),
        (50_000, 300, 2, 48, 500), (5000, 60, 1, 32, 128), (600, 60, 1, 32, 32),
        (10**6, None, 1, 48, 500),
    ],
)  # fmt: skip
def test_a_network_is_as_wide_as_there_is_time_for(train, seconds, speed, width, batch):
    facts, machine = Facts(train, 10, {"a": 1}, 32), Machine(False, 2, seconds, speed)
    flags = [own for own, _ in chosen("pictures on a CPU", facts, machine, ())]
    assert [own["width"] for own in flags if "width" in own] == [width]
    assert [own["batch_size"] for own in flags if "batch_size" in own] == [batch]


def test_with_plenty_of_time_a_resnet_is_trained(monkeypatch, stands_for):
    many = Facts(50_000, 10_000, {"a": 1}, 32)
    for seconds, kind in ((1249, ""), (1251, "for long "), (None, "")):
        machine = Machine(False, 2, seconds, 2)
        assert kind_of("pictures", many, machine, (), False)[0] == f"pictures {kind}on a CPU"
    few = Facts(20_000, 10_000, {"a": 1}, 32)
    assert kind_of("pictures", few, Machine(False, 2, 1e6), (), False)[0] == "pictures on a CPU"
    monkeypatch.setattr(rules, "kind_of", lambda *_: ("pictures for long on a CPU", {}))
    words = stands_for("shapes --device cpu --hflip 0")[1]
    assert (value(words, "--depth"), value(words, "--width")) == ("18", "32")
    assert value(words, "--batch_size") == "250" and value(words, "--random_erasing") == "0.5"
    assert value(words, "--precision") == "fastest" and "--alternate_flips" not in words
    assert "--width" not in stands_for("shapes --device cpu --width 16")[1][:-2]


@pytest.mark.parametrize(("is_faster", "amx", "speed"), [(1, 0, 2), (1, 1, 1), (0, 0, 1)])
def test_a_cpu_with_fast_bf16_has_twice_the_speed(monkeypatch, stands_for, is_faster, amx, speed):
    monkeypatch.setattr(backends, "is_faster_in_bf16", lambda device: bool(is_faster))
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: bool(amx))
    assert Machine.here("cpu").speed == speed and Machine.here("cpu", 1, "fp32").speed == 1
    assert value(stands_for("shapes --device cpu")[1], "--precision") == "fastest"
    assert "--precision" not in stands_for("shapes --device cpu --engine ort")[1]


def test_what_the_user_gives_wins(stands_for):
    words = stands_for("shapes --ngd --max_steps 5")[1]
    assert {"--optimizer", "--lr", "--time_budget"}.isdisjoint(words)
    for flags in (
        *("--hflip 0", "--crop resized", "--mixup auto", "--optimizer sgd", "--width 16"),
        *("--fp16", "--amp", "--precision fp32"),
    ):
        entry, words = stands_for(f"shapes --device cpu {flags}")
        noted: list[str] = []
        parse(importlib.import_module(entry).Settings, words, "", noted.append)
        assert noted == []
    words = stands_for("shapes --lr 0.5 --time 1m")[1]
    assert value(words, "--lr") == "0.5" and "--optimizer" not in words


def test_flags_alone_are_those_of_the_manual(stands_for, capsys):
    flags = ["--epochs", "50", "--batch_size", "64"]
    entry, words = stands_for(shlex.join(flags))
    assert entry == "resnet50_test" and words[2:] == flags
    said = capsys.readouterr().out
    assert said.startswith("no data are named") and said.count("\n") == 1
    assert said.endswith(f": python {entry}.py {shlex.join(words)}\n")
    settings, _ = parse(importlib.import_module(entry).Settings, words, "")
    assert (settings.lr, settings.batch_size, settings.freeze_backbone) == (0.001, 64, True)


def test_what_says_all_leaves_no_choice(stands_for, capsys):
    Path("recipe.yaml").write_text("label_smoothing: 0.3")
    assert stands_for("shapes --config recipe.yaml")[1] == [
        "--dataset", "shapes", "--config", "recipe.yaml",
    ]  # fmt: skip
    assert capsys.readouterr().out == ""
    for flag in ("--mixup auto", "--strategy local --sync_base 2"):  # they go with no time
        assert "--time_budget" not in stands_for(f"shapes {flag}")[1]


def test_many_processes_start_the_entry(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setattr("sys.argv", list(sys.argv))
    words = ["train.py", "shapes", "--max_steps", "3", "--device", "cpu"]
    job, plan, _ = launcher.prepare(words, {"NPROC": "2"})
    assert job.script.name == "resnet50_test.py" and plan.processes == 2
    assert value(job.flags, "--depth") == "8" and "--distributed" in job.flags


def test_large_pictures_are_not_decoded_before_their_size_is_chosen(stands_for):
    for name in ("cat", "dog"):
        for number in range(5):
            Path("photos", name).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (300, 200)).save(Path("photos", name, f"{number}.png"))
    _, words = stands_for("photos --device cpu --workers 0")
    assert value(words, "--image_size") == "64"
    assert [path.name.split("-")[0] for path in Path("data/cache").iterdir()] == ["index"]


def test_a_model(stands_for):
    entry, words = stands_for("shapes --model resnet34")
    assert entry == "resnet50_test" and value(words, "--depth") == "34" and "--width" not in words
    entry, words = stands_for("shapes --model=vit_tiny_patch16_224 --epochs 2")
    assert (
        entry == "vit_test" and "--depth" not in words and "--model=vit_tiny_patch16_224" in words
    )


def test_a_run_goes_on_by_its_entry(stands_for):
    for name in ENTRIES:
        folder = Path("runs", name)
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(f"# {name}.py\nseed: 0\n")
        assert stands_for(f"--resume {folder} --predict x") == (
            name, ["--resume", str(folder), "--predict", "x"],
        )  # fmt: skip
        assert stands_for("-r") == (name, ["-r"])  # the newest


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("'' --epochs 3", "the first word names the data"),
        ("--epochs 3 --time 1h", "the first word names the data"),
        ("--resume", "--resume: there is no run below runs/"),
        ("--resume nowhere", "no such folder"),
        ("nowhere", "no such folder or file"),
        ("shapes --epocs 3", "unknown flag --epocs, did you mean --epochs?"),
    ],
)
def test_mistakes_are_one_line(text, told, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert command.main(shlex.split(text), "Trains.") == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and said.err.count("\n") == 1 and told in said.err


def test_help(capsys):
    assert command.main(["--help"], "Trains.\n\npython train.py x\n") == 0
    said = capsys.readouterr().out
    assert said.startswith("Trains.\n\npython train.py x") and "resnet50_test.py --help" in said
    assert command.main([], "Trains.") == 2
    capsys.readouterr()
    assert command.main(["--version"], "Trains.") == 0
    assert capsys.readouterr().out.startswith("train.py ")


def test_rules_set_what_entries_have():
    """Each number of samples has one rule of each kind."""
    entries = {"texts": "transformer_test", "encoders": "transformer_test", "features": "vit_test"}
    for kind, of_kind in RULES.items():
        entry = entries.get(kind, "resnet50_test")
        known = fields(importlib.import_module(entry).Settings)
        assert {name for rule in of_kind for name in rule.flags} <= known.keys()
        for train in (1, 1000, 1001, 8000, 50_000, 10**7, ALL):
            facts = Facts(train, 10, {"a": 1}, 300)
            for machine in (Machine(gpu=False, seconds=60.0), Machine(gpu=True)):
                names = [name for own, _ in chosen(kind, facts, machine, ()) for name in own]
                assert len(names) == len({*names})
                has = "max_len" if kind == "encoders" else "batch_size"
                assert has in names
                of_cpu = kind.startswith("pictures") and not machine.gpu
                assert ("image_size" in names) == (of_cpu or kind == "features")


def test_a_search_starts_from_what_is_chosen(tmp_path, monkeypatch, capsys):
    """What is chosen may be tuned, and what the user gives is not."""
    monkeypatch.chdir(tmp_path)
    searched = []

    def read(target, argv, program):
        settings, origin = parse(target.search_class, argv, "")
        searched.append((target, settings, origin))
        return 7

    monkeypatch.setattr(tuning.entry, "search", read)
    words = "train shapes --device cpu --label_smoothing 0.3 --epochs 2 --timeout 5m"
    assert tuning.entry.main(words.split()) == 7
    [(target, settings, origin)] = searched
    assert target.script.name == "resnet50_test.py"
    assert (settings.depth, settings.muon_normalize) == (8, True)
    assert (settings.epochs, settings.trial_epochs, settings.timeout) == (50, 2, "5m")
    assert (origin["lr"], origin["label_smoothing"]) == (FILE, COMMAND_LINE)
    assert settings.time_budget is None and "--label_smoothing" not in capsys.readouterr().out
    monkeypatch.undo()
    for words in ("train --help", "train shapes --help lr"):
        assert tuning.entry.main(words.split()) == 0
        assert "train_tuning.sh DATA" in capsys.readouterr().out
    for words in ("train", "train --trials 3", "train nowhere", "train shapes --time 5m"):
        assert tuning.entry.main(words.split()) == 2
        assert capsys.readouterr().err.startswith("error: ")
