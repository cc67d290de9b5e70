"""Exported models give the same outputs elsewhere; if they do not, no file is left."""

import json
import os
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from toy import network

from utils.data.images.loader import Normalize
from utils.errors import UserError
from utils.files import written_aside
from utils.inference import export_onnx as export_module
from utils.inference import onnx_model
from utils.inference.export_onnx import export_onnx
from utils.inference.export_safetensors import export_safetensors
from utils.inference.onnx_model import close, trace
from utils.models.resnet import ResNet
from utils.weights.card import ModelCard
from utils.weights.pretrained import fit_weights, load_pretrained

CLASSES = ("cat", "dog", "émeu")
CARD = ModelCard(CLASSES, (0.4, 0.5, 0.6), (0.2, 0.3, 0.0), 8, 8, 3)


def resnet(depth=18, width=4, stem="cifar", side=8, channels_last=False) -> ResNet:
    """BatchNorm statistics are those of random pictures, so that outputs depend on the picture."""
    torch.manual_seed(0)
    model = ResNet(depth, 3, width, stem)
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    for module in norms:
        module.momentum = 1.0  # the next batch alone determines the statistics
    with torch.no_grad():
        model(torch.randn(8, 3, side, side))
    for module in norms:
        module.momentum = 0.1
    return model.to(memory_format=torch.channels_last) if channels_last else model


def pictures(n, side=8, channels=3) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (n, side, side, channels), dtype=np.uint8)


def probabilities(model, card, images) -> np.ndarray:
    normalize = Normalize(card.mean, card.std, card.width, torch.device("cpu"))
    with torch.inference_mode():
        return model.eval()(normalize(torch.from_numpy(images))).softmax(1).numpy()


def refused(function, *args, says) -> None:
    with pytest.raises(UserError, match=says) as error:
        function(*args)
    assert "\n" not in str(error.value)


# ---- safetensors ------------------------------------------------------------------------------


@pytest.mark.parametrize("channels_last", [False, True])
def test_safetensors_round_trip(tmp_path, channels_last):
    model = resnet(channels_last=channels_last).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path = tmp_path / "new folder" / "model.safetensors"
    said = export_safetensors(model, CARD, path, "resnet18w4")
    assert "equal to the bit" in said
    assert os.listdir(path.parent) == [path.name] and model.training
    other = ResNet(18, 3, 4)
    loaded = load_pretrained(path)
    fit_weights(other, loaded)
    assert (loaded.mean, loaded.std) == (CARD.mean, CARD.std)
    for state in (model.state_dict(), other.state_dict()):
        assert all(torch.equal(state[name], tensor) for name, tensor in before.items())


class Tied(torch.nn.Module):
    """Two layers have the same weights, and two buffers overlap."""

    def __init__(self):
        super().__init__()
        self.one, self.other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.other.weight = self.one.weight
        steps = torch.arange(4.0)
        self.register_buffer("first", steps[:3])
        self.register_buffer("last", steps[1:])

    def forward(self, x):
        return self.other(self.one(x.mean((2, 3)) * self.first) + self.last)


def test_safetensors_of_tied_weights_have_every_name(tmp_path):
    torch.manual_seed(0)
    model, other, path = Tied(), Tied(), tmp_path / "model.safetensors"
    assert "equal to the bit" in export_safetensors(model, CARD, path)
    loaded = load_pretrained(path)
    assert loaded.tensors.keys() == model.state_dict().keys()
    fit_weights(other, loaded)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)


def test_safetensors_metadata_is_one_key_and_bytes_are_reproducible(tmp_path):
    contents = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.safetensors"
        export_safetensors(resnet(), CARD, path, "resnet18w4")
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert list(metadata) == ["model_card"]
    saved = json.loads(metadata["model_card"])
    assert saved["architecture"] == "resnet18w4" and ModelCard.from_dict(saved) == CARD


def test_safetensors_that_read_back_otherwise_are_not_left(tmp_path, monkeypatch):
    def forget(model, pretrained):
        fit_weights(model, pretrained)
        model[0].weight.data += 1

    monkeypatch.setattr("utils.inference.export_safetensors.fit_weights", forget)
    path = tmp_path / "model.safetensors"
    model = network()
    model.HEAD = "7"
    refused(export_safetensors, model, CARD, path, "toy", says="give other outputs")
    assert os.listdir(tmp_path) == []


def test_files_that_cannot_be_written(tmp_path):
    (tmp_path / "m.safetensors").mkdir()
    refused(
        export_safetensors,
        network(),
        CARD,
        tmp_path / "m.safetensors",
        "toy",
        says="and is not a file",
    )
    path = tmp_path / "file"
    path.write_bytes(b"")
    path = path / "m.safetensors"
    refused(export_safetensors, network(), CARD, path, "toy", says="cannot write .*m.safetensors")


def test_written_aside_keeps_the_old_file_whatever_happens(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), written_aside(path) as aside:
        aside.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]
    with written_aside(path) as aside:
        aside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["file"]


# ---- ONNX -------------------------------------------------------------------------------------


class Tiny(torch.nn.Module):
    """A model that is traced in less than a second."""

    def __init__(self, channels=3):
        super().__init__()
        torch.manual_seed(0)
        self.fc = torch.nn.Linear(channels, 3)

    def forward(self, x):
        return self.fc(x.mean((2, 3)))


def answers(path, images) -> np.ndarray:
    session = pytest.importorskip("onnxruntime").InferenceSession(
        str(path), providers=["CPUExecutionProvider"]
    )
    assert [i.name for i in session.get_inputs()] == ["images"]
    assert [o.name for o in session.get_outputs()] == ["probabilities"]
    return session.run(None, {"images": images})[0]


def needs_onnx(function):
    missing = [name for name in ("onnx", "onnxscript") if not _installed(name)]
    return pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")(function)


def _installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


@pytest.mark.slow
@needs_onnx
@pytest.mark.parametrize(
    ("depth", "width", "stem", "side", "channels_last"),
    [
        (18, 4, "cifar", 8, True),  # with SlicedConv1x1
        pytest.param(18, 16, "imagenet", 64, False, marks=pytest.mark.slow),
        pytest.param(50, 4, "imagenet", 64, True, marks=pytest.mark.slow),
        pytest.param(50, 64, "cifar", 32, False, marks=pytest.mark.slow),
    ],
)
def test_resnets_as_onnx(tmp_path, capfd, depth, width, stem, side, channels_last):
    model = resnet(depth, width, stem, side, channels_last).train()
    card = ModelCard(CLASSES, CARD.mean, CARD.std, side, side, 3)
    path = tmp_path / "new folder" / "model.onnx"
    random_state = torch.get_rng_state()
    said = export_onnx(model, card, path, "resnet")
    assert "graph valid; on 5 random pictures" in said and "\n" not in said
    assert os.listdir(path.parent) == ["model.onnx"]  # no second file
    assert model.training and torch.equal(random_state, torch.get_rng_state())
    assert capfd.readouterr() == ("", "")
    for n in (1, 7):
        images = pictures(n, side)
        expected = probabilities(model, card, images)
        assert expected.std(0).max() > 1e-3 or n == 1  # the pictures matter
        np.testing.assert_allclose(answers(path, images), expected, atol=1e-5)


@pytest.mark.slow
@needs_onnx
def test_onnx_of_gray_pictures_with_metadata_and_no_paths(tmp_path):
    import onnx

    card = ModelCard(CLASSES, (0.5,), (0.25,), 8, 8, 1, form={"resize_mode": "squash"})
    model, path = Tiny(channels=1), tmp_path / "model.onnx"
    export_onnx(model, card, path, "tiny")
    images = pictures(3, channels=1)
    np.testing.assert_allclose(answers(path, images), probabilities(model, card, images), atol=1e-6)
    proto = onnx.load(path)
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    assert metadata.pop("architecture") == "tiny" and metadata.pop("weights") == ""
    assert {key: json.loads(value) for key, value in metadata.items()} == {
        "classes": list(CLASSES), "mean": [0.5], "std": [0.25],
        "form": {"resize_mode": "squash"},
    }  # fmt: skip
    content = path.read_bytes()
    assert b".py" not in content and os.path.dirname(__file__).encode() not in content
    shape = proto.graph.input[0].type.tensor_type.shape.dim
    assert shape[0].dim_param == "batch" and [d.dim_value for d in shape][1:] == [8, 8, 1]


@pytest.mark.slow
@needs_onnx
def test_onnx_without_onnx_runtime(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    said = export_onnx(Tiny(), CARD, tmp_path / "a.onnx")
    assert said == "graph valid; not run: pip install onnxruntime to have its answers compared"
    assert os.listdir(tmp_path) == ["a.onnx"]


@pytest.mark.slow
@needs_onnx
def test_onnx_that_answers_otherwise_is_not_left(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    export_onnx(Tiny(), CARD, path)
    before = path.read_bytes()

    def wrong(graph, *others):
        graph.model.fc.bias.data[0] += 1e-2
        proto = trace(graph, *others)
        graph.model.fc.bias.data[0] -= 1e-2
        return proto

    monkeypatch.setattr(export_module, "trace", wrong)
    refused(
        export_onnx, Tiny(), CARD, path, says="differ too much from PyTorch's .*no file is left"
    )
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["model.onnx"]


def test_certainty_does_not_hide_differences():
    certain = np.array([[1.0, 1e-20, 1e-36]], np.float32)
    assert close(certain, certain)
    assert close(np.array([[1.0, 1.05e-20, 0]], np.float32), certain)
    assert not close(np.array([[1.0, 1e-15, 1e-36]], np.float32), certain)
    assert not close(np.array([[0.9998, 1e-20, 1e-36]], np.float32), certain)
    assert not close(np.array([[np.nan, 1e-20, 1e-36]], np.float32), certain)


@needs_onnx
def test_onnx_graph_that_is_not_valid(tmp_path, monkeypatch):

    def broken(*arguments):
        proto = trace(*arguments)
        proto.graph.node[0].op_type = "NoSuchOperator"
        return proto

    monkeypatch.setattr(export_module, "trace", broken)
    refused(export_onnx, Tiny(), CARD, tmp_path / "m.onnx", says="NoSuchOperator.*safetensors")
    assert os.listdir(tmp_path) == []


@needs_onnx
def test_model_that_has_no_graph(tmp_path):
    class Branches(Tiny):
        def forward(self, x):
            return super().forward(x) if x.sum().item() > 0 else x.mean((2, 3))

    refused(export_onnx, Branches(), CARD, tmp_path / "m.onnx", says="cannot be exported to ONNX")
    assert os.listdir(tmp_path) == []


@needs_onnx
def test_model_beyond_two_gigabytes(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_model, "ONNX_BYTES", 10)
    refused(export_onnx, Tiny(), CARD, tmp_path / "m.onnx", says="an ONNX file holds 2 GB")
