"""vit_test.py: training, resuming, using a model and starting from weights, with our sizes, with a
model of timm and with a class of the user's own."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from soak import of_the_soak

import vit_test
from utils.settings.config import parse

pytestmark = pytest.mark.usefixtures("own_folder")

ENGINE = ["--device", "cpu", "--threads", "1", "--precision", "fp32"]
DATA = ["--dataset", "shapes", "--subset", "64", "--bs", "16", "--epochs", "1"]
SIZES = ["--layers", "2", "--dim", "16", "--heads", "2", "--ffn", "32", "--patch_size", "8"]
VIT = [*DATA, *SIZES, *ENGINE]
# Everything that has a state or draws numbers.
ALL = [
    "--drop_path", "0.2", "--drop_rate", "0.1", "--model_kwargs", "pos_drop_rate=0.1",
    "--layer_decay", "0.7", "--head_lr", "0.01", "--grad_checkpointing", "--mixup", "0.2",
    "--ema_decay", "0.9", "--clip", "1", "--accumulation_steps", "2", "--val_fraction", "0.2",
    "--bs", "8",
]  # fmt: skip
STEPS = 4
OWN_CLASS = """
from torch import nn

class Net(nn.Module):
    HEAD = "answer"

    def __init__(self, classes, width=8):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3, width, 5, 4), nn.Conv2d(width, width, 3)])
        self.answer = nn.Linear(width, classes)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.answer(x.mean((2, 3)))
"""


@pytest.fixture
def main():
    return vit_test.main


def newest(run: str) -> Path:
    return sorted(Path(run, "checkpoints").glob("step-*"))[-1]


def weights(run: str) -> dict:
    return load_file(newest(run) / "model.safetensors")


def summary(run: str) -> dict:
    return json.loads(Path(run, "summary.json").read_text())


def assert_resumes(works, *flags) -> None:
    """The run, and the run resumed from its last step but one, end with the same bytes."""
    works(*flags, "--save_every", 1, "--checkpoint_hist", 9, "--output", "whole")
    shutil.copytree("whole", "half")
    steps = summary("whole")["steps"]
    shutil.rmtree(f"half/checkpoints/step-{steps:08}")
    shutil.rmtree(f"half/checkpoints/step-{steps - 1:08}")
    assert f"from step {steps - 2}" in works("--resume", "half")
    for file in ("model", "optimizer"):
        saved = [
            Path(run, f"checkpoints/step-{steps:08}", f"{file}.safetensors").read_bytes()
            for run in ("whole", "half")
        ]
        assert saved[0] == saved[1], file


@pytest.mark.parametrize("more", [[], ALL], ids=["plain", "everything"])
def test_a_resumed_run_is_the_whole_run(works, more):
    assert_resumes(works, *VIT, *more)
    assert summary("whole")["model"] == "vit2x16p8"


@pytest.mark.parametrize("optimizer", ["ngd", "lamb", "muon"])
def test_optimizers_with_rates_by_layer_resume(works, optimizer):
    assert_resumes(works, *VIT, "--optimizer", optimizer, "--layer_decay", "0.7")


def test_a_model_of_timm_resumes(works):
    assert_resumes(works, *DATA, *ENGINE, "--model", "test_efficientnet", "--drop_path", "0.1")
    assert summary("half")["model"] == "test_efficientnet"


def test_the_warm_up_is_a_twentieth_of_the_run():
    def epochs(*argv):
        return parse(vit_test.Settings, [*map(str, argv)], "")[0].warmup_epochs

    assert epochs() == 5
    assert epochs("--epochs", 10) == 0.5
    assert epochs("--epochs", 10, "--warmup_epochs", 2) == 2
    assert epochs("--warmup_steps", 10) == epochs("--sched", "onecycle") == 0


@pytest.mark.slow
def test_the_model_is_used(works):
    """Predictions, exports and evaluation against timm's network with the same weights."""
    works(*VIT, "--report", "--output", "first")
    assert Path("first/report/per_class.csv").is_file()
    said = works("--resume", "first", "--eval_only", "--flip_test", "--bs", 7)
    assert f"test accuracy {summary('first')['test_accuracy']:.2f} %" in said
    assert "averaged with mirror images (--eval_views mirror): loss" in said
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save("noise.png")

    sizes = dict(patch_size=8, embed_dim=16, depth=2, num_heads=2, mlp_ratio=2)
    plain = timm.models.VisionTransformer(img_size=32, num_classes=10, **sizes).eval()
    plain.load_state_dict(weights("first"))
    card = json.loads((newest("first") / "state.json").read_text())["settings"]["data"]
    picture = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255  # (1, 3, 32, 32)
    mean, std = (torch.tensor(card[name]).view(1, 3, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        expected, mirrored = (
            plain((each - mean) / std).softmax(1) for each in (picture, picture.flip(3))
        )

    for flag, wanted in (("--no_flip_test", expected), ("--flip_test", (expected + mirrored) / 2)):
        works("--resume", "first", "--predict", "noise.png", flag)
        with open("first/predictions.csv", newline="", encoding="utf-8-sig") as file:
            (row,) = csv.DictReader(file)
        assert row["predicted"] == card["classes"][wanted.argmax()]
        assert float(row["probability"]) == pytest.approx(wanted.max().item(), abs=2e-6)
    works("--resume", "first", "--export", "onnx")
    session = onnxruntime.InferenceSession("first/export/model.onnx")
    (found,) = session.run(["probabilities"], {"images": pixels[None]})
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=1e-5)
    works("--resume", "first", "--export", "safetensors")
    exported, kept = load_file("first/export/model.safetensors"), weights("first")
    assert exported.keys() == kept.keys()
    assert all(torch.equal(exported[name], kept[name]) for name in kept)


def test_what_the_shapes_of_weights_do_not_show(works, fails):
    works(*VIT, "--output", "first")
    given = (*VIT, "--pretrained", "first", "--eval_only")
    assert "trained with --heads 2; give that too" in fails(*given, "--heads", "4")
    line = fails(*given, "--pooling", "mean")
    assert "cls_token" in line and "model: train with --pooling cls (" in line
    works(*VIT, "--pooling", "mean", "--output", "second")
    line = fails(*VIT, "--pretrained", "second")
    assert "cls_token" in line and "model: train with --pooling mean (" in line


def test_faults(works, fails):
    """As in test_faults.py: the loss, a checkpoint, and changes that a resumed run cannot have."""
    works(*VIT, "--save_every", 1, "--output", "run")
    assert "--dim 32" in (line := fails("--resume", "run", "--dim", 32)) and "must keep it" in line
    (newest("run") / "state.json").write_text("{}")
    assert f"step-{STEPS:08} is damaged (state.json" in works("--resume", "run")
    line = fails(*VIT, "--lr", 1e30, "--warmup_epochs", 0, "--output", "other")
    assert (
        "is not finite" in line
        and "(1e+30; take a lower --lr" in line
        and "--on_nonfinite skip" in line
    )


def test_meta_mixup_and_auto(works):
    works(*VIT, "--mixup", "meta", "--output", "policy")
    works(*VIT, "--mixup", "meta", "--meta_exact", "--output", "exact")
    works(*VIT, "--mixup", "meta", "--grad_checkpointing", "--output", "checkpointed")
    for name, tensor in weights("policy").items():
        torch.testing.assert_close(weights("checkpointed")[name], tensor, msg=name)
    works(*VIT, "--mixup", "auto", "--subset", "1.0", "--max_steps", 4, "--output", "auto")


def test_another_head_and_another_size_of_picture(works, fails):
    """From a file under timm's names, of 100 classes and pictures of 64 pixels."""
    sizes = dict(patch_size=8, embed_dim=16, depth=2, num_heads=2, mlp_ratio=2)
    theirs = timm.models.VisionTransformer(img_size=64, num_classes=100, **sizes).state_dict()
    save_file(theirs, "theirs.safetensors")
    flags = [*VIT, "--pretrained", "theirs.safetensors", "--freeze_backbone"]
    out = works(*flags, "--output", "head")
    assert "head of 100 classes replaced by one of 10" in out and "of them trained" in out
    assert torch.equal(weights("head")["norm.weight"], theirs["norm.weight"])
    assert weights("head")["pos_embed"].shape == (1, 17, 16)
    works(*flags, "--unfreeze_epoch", 1, "--epochs", 2, "--output", "both")
    assert not torch.equal(weights("both")["norm.weight"], theirs["norm.weight"])
    assert "does not fit the model" in fails(*flags, "--layers", 3)


def test_a_model_in_the_layout_of_the_hub(works, fails):
    """The run keeps timm's name and the arguments, and goes on without the folder."""
    sizes = dict(patch_size=8, embed_dim=16, depth=1, num_heads=2)
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=5, **sizes)
    folder = Path("folder")
    timm.models.save_for_hf(theirs, str(folder), model_args=sizes, safe_serialization=True)
    model = ["--model", "local-dir:folder", "--model_kwargs", "qkv_bias=true"]
    works(*DATA, *ENGINE, *model, "--pretrained", "--freeze_backbone", "--output", "first")
    assert torch.equal(weights("first")["norm.weight"], theirs.state_dict()["norm.weight"])
    assert summary("first")["model"] == "vit_tiny_patch16_224"
    (folder / "config.json").write_text("{}")
    works("--resume", "first", "--epochs", 2)
    assert "its config.json names no model of timm" in fails(*DATA, *model)
    assert "give --model local-dir:FOLDER" in fails(*DATA, "--model", "hf-hub:no such/model")


def test_fixed_positions_never_train(works):
    flags = [*VIT, "--positions", "sincos", "--pooling", "mean"]
    works(*flags, "--weight_decay", 0.5, "--output", "first")
    again = [*flags, "--pretrained", "first", "--freeze_backbone", "--unfreeze_epoch", 1]
    works(*again, "--epochs", 2, "--output", "second")
    assert torch.equal(weights("first")["pos_embed"], weights("second")["pos_embed"])


def test_a_class_of_ones_own(works, fails):
    Path("mine.py").write_text(OWN_CLASS)
    flags = [*DATA, *ENGINE, "--model", "mine.py:Net", "--model_kwargs", "width=6"]
    works(*flags, "--layer_decay", 0.5, "--output", "first")
    assert summary("first")["model"] == "Net"
    assert weights("first")["answer.weight"].shape == (10, 6)
    works("--resume", "first", "--epochs", 2)
    assert "there are none" not in fails(*flags, "--pretrained")
    assert "has no method set_grad_checkpointing" in fails(*flags, "--grad_checkpointing")
    assert "--drop_path has no effect" in fails(*flags, "--drop_path", 0.1)
    Path("mine.py").unlink()
    assert "there is no file mine.py" in fails("--resume", "first", "--epochs", 3)


def test_mistakes(fails):
    assert "--fused memory: no module of ViT can be fused" in fails(*VIT, "--fused", "memory")
    assert "--dim 30 is not a multiple of --heads 4" in fails("--dim", 30, "--heads", 4)
    assert "depth: with --model vit --layers decides it" in fails(*VIT, "--model_kwargs", "depth=3")
    assert "no whole patches of 5" in fails(*VIT, "--patch_size", 5)
    assert "has no such model (near: test_vit" in fails(*DATA, *ENGINE, "--model", "test_vitt")
    error = fails(*DATA, "--model", "test_vit", "--dim", 64)
    assert "--dim has no effect: --model test_vit has its own sizes" in error
    error = fails(*VIT, "--pretrained")
    assert "no weights are published for vit2x16p8; there are for the models of" in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "test_vitt"], "has no such model (near: test_vit"),
        (["--model", "missing.py:Net"], "there is no file missing.py"),
        (["--model", "mine.py:Nut"], "mine.py has no nn.Module named Nut; it has Net"),
        (["--model", "mine.py:nn"], "mine.py:nn: nn is no nn.Module"),
        ([*VIT, "--model_kwargs", "depth"], "--model_kwargs depth: write name=value"),
    ],
)
def test_mistakes_in_the_model_are_told_before_data_are_loaded(fails, monkeypatch, flags, message):
    monkeypatch.setattr("utils.tasks.picture_data.load_image_data", None)
    Path("mine.py").write_text(OWN_CLASS)
    assert message in fails(*DATA, *ENGINE, *flags)


def test_list(run):
    code, out, _ = run("--model", "list", "deit3_small")
    assert code == 0 and out.split() == ["deit3_small_patch16_224", "deit3_small_patch16_384"]
    code, _, error = run("--model", "list", "nothing_like_it")
    assert code == 2 and "no model of timm matches 'nothing_like_it'" in error


FAMILIES = [
    "test_vit", "test_vit2", "test_vit_relpos", "test_convnext", "test_efficientnet",
    "test_resnet", "test_nfnet", "test_byobnet", "test_mambaout", "mixer_s32_224",
    "vit_small_patch16_rope_224", "mobilenetv3_small_050",
]  # fmt: skip
# One of each kind: attention with other positions, other norms, gates, no attention at all.
KINDS = ["test_vit_relpos", "test_nfnet", "test_mambaout", "test_efficientnet"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n in KINDS else pytest.param(n, marks=of_the_soak) for n in FAMILIES]
)
def test_families_of_timm(works, name):
    """A few steps, resumed, and export. FSDP: tests/distributed/test_families.py."""
    assert_resumes(works, *DATA, *ENGINE, "--model", name)
    works("--resume", "whole", "--export", "onnx")
