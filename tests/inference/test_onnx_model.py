"""`--engine ort` without training: ONNX Runtime computes the logits, and everything else is as with
PyTorch."""

import csv
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from models.small_transformer import model as transformer
from models.small_transformer import packed, texts
from quick_runs import handlers_put_back

import resnet50_test
import transformer_test
import vit_test
from utils.errors import UserError
from utils.inference import onnx_model
from utils.inference.export_samples import PictureSamples, TextSamples
from utils.inference.onnx_model import OnnxModel, OnnxSession
from utils.weights.card import ModelCard

PICTURES = PictureSamples(
    ModelCard(("cat", "dog", "emu"), (0.4, 0.5, 0.6), (0.2, 0.3, 0.1), 8, 8, 3)
)
ATOL = 1e-5  # of logits; those of the tests are below 10


class Tiny(torch.nn.Module):
    """A model that is traced in less than a second."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = torch.nn.Linear(3, 3)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.fc(x.mean((2, 3))))


def inputs_of(n: int) -> torch.Tensor:
    """In the memory order of the loader."""
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, 8, 8, 3, generator=generator).permute(0, 3, 1, 2)


@pytest.fixture(scope="module")
def session() -> OnnxSession:
    return OnnxModel(Tiny(), PICTURES, print).session


@pytest.fixture
def tiny(session, monkeypatch):
    """(an OnnxModel, the Tiny in it, a list of what it says), without another export."""
    monkeypatch.setattr(onnx_model, "trace", lambda *arguments: None)
    monkeypatch.setattr(onnx_model, "OnnxSession", lambda *arguments: session)
    said, model = [], Tiny().eval()
    return OnnxModel(model, PICTURES, said.append), model, said


# ---- the model --------------------------------------------------------------------------------


@pytest.mark.slow
def test_logits_of_pictures_are_those_of_pytorch(tiny):
    ours, model, said = tiny
    with torch.inference_mode():
        for n in (3, 1, 7):
            torch.testing.assert_close(ours(inputs_of(n)), model(inputs_of(n)), rtol=0, atol=ATOL)
    (line,) = said  # on the first batch alone
    pattern = r"ONNX Runtime [\d.]+, 1 thread: on the first 3 pictures within (\S+) of PyTorch's"
    assert float(re.match(pattern, line)[1]) < 1e-6


def test_other_answers_than_pytorchs_are_refused(tiny):
    ours, model, _ = tiny
    model.fc.bias.data[0] += 1e-2  # the graph has the old one
    with pytest.raises(UserError) as caught:
        ours(inputs_of(2))
    text = str(caught.value)
    assert "on the first 2 pictures" in text and "differ too much from PyTorch's (by " in text
    assert "at most 1e-04" in text and "leave out --engine ort" in text and "\n" not in text


def test_an_input_that_the_graph_does_not_take(tiny):
    with pytest.raises(UserError, match=r"ONNX Runtime .* refuses the graph .*leave out"):
        tiny[0](torch.zeros(2, 1, 8, 8))


@pytest.mark.slow
def test_logits_of_texts_of_any_number_and_length():
    model = transformer(layers=1, dropout=0.5, token_dropout=0.1)
    ours = OnnxModel(model, TextSamples(50, 0, 12), lambda line: None).eval()
    with torch.inference_mode():
        for lengths in ([12, 3, 1], [1], [2, 2], [5, 4, 3, 9, 1, 1, 12]):
            batch = packed(texts(lengths))
            torch.testing.assert_close(ours(batch), model(batch), rtol=0, atol=ATOL)


def test_texts_side_by_side():
    padded = packed(texts([3, 1, 2])).padded(7)
    ids = texts([3, 1, 2])
    assert padded.tolist() == [ids[0], [*ids[1], 7, 7], [*ids[2], 7]]
    assert padded.dtype == torch.int64


def test_an_operator_that_onnx_runtime_has_not_is_named():
    for domain, operator in (("", "NoSuchOperator"), ("own", "Own"), ("", "Exp")):  # no bf16 Exp
        with pytest.raises(
            UserError, match=f"cannot compute the operator {operator} on a CPU"
        ) as e:
            OnnxSession(bf16_graph(domain, operator), "take another way")
        assert str(e.value).endswith("): take another way") and "\n" not in str(e.value)


def bf16_graph(domain: str, operator: str):
    """y = operator(x)."""
    value, bf16 = onnx.helper.make_tensor_value_info, onnx.TensorProto.BFLOAT16
    node = onnx.helper.make_node(operator, ["x"], ["y"], domain=domain)
    ends = [value("x", bf16, [1])], [value("y", bf16, [1])]
    graph = onnx.helper.make_graph([node], "graph", *ends)
    sets = [onnx.helper.make_opsetid(*each) for each in {"": 18, domain or "other": 1}.items()]
    return onnx.helper.make_model(graph, opset_imports=sets, ir_version=10)


def test_a_model_without_a_graph(monkeypatch):
    def refuse(*arguments):
        raise UserError("this model cannot be exported")

    monkeypatch.setattr(onnx_model, "trace", refuse)
    with pytest.raises(
        UserError, match=r"^--engine ort: .* cannot be exported: leave out --engine"
    ):
        OnnxModel(Tiny(), PICTURES, print)
    monkeypatch.setattr(onnx_model, "ONNX_BYTES", 10)
    with pytest.raises(UserError, match="an ONNX file holds 2 GB: leave out --engine ort"):
        OnnxModel(Tiny(), PICTURES, print)


# ---- whole runs -------------------------------------------------------------------------------


def test_a_gpu_is_refused(monkeypatch, run_resnet, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run_resnet("--dataset shapes --eval_only --pretrained x.pth --engine ort") == 2
    assert "and there is a GPU: add --device cpu" in capsys.readouterr().err


TINY = "--device cpu --threads 1 -b 32 --eval_every 0 --max_steps 3 --output run"
ENTRIES = {
    # Averaged weights; BatchNorm with running statistics.
    "resnet": (
        resnet50_test,
        f"--dataset shapes --depth 18 --width 4 --lr 0.01 --ema_decay 0.5 {TINY}",
        "--eval_views both",
    ),
    "vit": (
        vit_test,
        f"--dataset shapes --layers 2 --dim 16 --heads 2 --ffn 32 --grad_checkpointing {TINY}",
        "--flip_test",
    ),
    "transformer": (
        transformer_test,
        "--dataset headlines --layers 2 --dim 16 --heads 2 --ffn 16 --vocab_size 400 "
        f"--dropout 0.1 --fused speed --cache_dir cache {TINY}",
        "",
    ),
}


def new_files(entry) -> str:
    """Writes what --predict takes; returns its path."""
    if entry is transformer_test:
        lines = ["gold", "a tax on oil and the coach of a team", "the match", "shares fall " * 9]
        Path("new.txt").write_text("\n".join(lines * 11))
        return "new.txt"
    from PIL import Image

    Path("new").mkdir()
    for i in range(35):
        pixels = np.random.default_rng(i).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(f"new/{i}.png")
    return "new"


def cells(path: str) -> tuple[list[list[str]], np.ndarray]:
    """The words of a CSV file of predictions, and its probabilities."""
    with open(path, newline="", encoding="utf-8") as file:
        _, *rows = csv.reader(file)
    numbers = [[float(c) for c in row if re.fullmatch(r"\d+\.\d{6}", c)] for row in rows]
    words = [[c for c in row if not re.fullmatch(r"\d+\.\d{6}", c)] for row in rows]
    return words, np.array(numbers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRIES)
def test_metrics_and_predictions_are_those_of_pytorch(name, run_resnet, capsys):
    entry, train, options = ENTRIES[name]

    def run(text: str) -> list[str]:
        capsys.readouterr()
        with handlers_put_back():
            assert entry.main(text.split()) == 0
        return capsys.readouterr().out.splitlines()

    run(train)
    use = "--resume run --engine"
    of_torch = run(f"{use} torch --eval_only {options}")
    counts = [*Path("run/report").glob("[cp]*.csv")]
    answers = [*Path("run/report").glob("evaluated.csv")]
    report, answered = [path.read_bytes() for path in counts], [*map(cells, answers)]
    of_ort = run(f"{use} ort --eval_only {options}")
    assert [path.read_bytes() for path in counts] == report
    assert len(counts) == 2 * len(answers) == 2
    for (words, numbers), (words_of_ort, numbers_of_ort) in zip(
        answered, map(cells, answers), strict=True
    ):
        assert words_of_ort == words
        np.testing.assert_allclose(numbers_of_ort, numbers, rtol=0, atol=1e-5)
    added = [line for line in of_ort if line not in of_torch]
    assert len(added) == 1 and added[0].startswith("ONNX Runtime ")
    assert [line for line in of_ort if line not in added] == of_torch
    views = options * ("flip" in options or "views" in options)
    new = new_files(entry)
    run(f"{use} torch --predict {new} --predictions torch.csv {views}")
    run(f"{use} ort --predict {new} --predictions ort.csv {views} -b 8")
    words, numbers = cells("torch.csv")
    words_of_ort, numbers_of_ort = cells("ort.csv")
    assert words_of_ort == words and len(words) > 32
    np.testing.assert_allclose(numbers_of_ort, numbers, rtol=0, atol=1e-5)
