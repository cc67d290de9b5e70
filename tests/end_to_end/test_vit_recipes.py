"""The recipes of vit_test.py for ImageNet: their model, their rate, and one of their steps."""

from pathlib import Path

import numpy as np
import pytest
import torch

import vit_test
from utils.data.steps import Steps
from utils.runs.optimization import schedule_maker
from utils.settings.config import parse
from utils.weights.card import ModelCard

RECIPES = Path(__file__).parents[2] / "recipes"
IMAGENET = ModelCard(tuple(map(str, range(1000))), (0.5,) * 3, (0.5,) * 3, 224, 224, 3)
PARAMETERS = {"b32": 88_224_232, "b16": 86_567_656, "l32": 306_535_400, "s16": 21_974_632}


def settings_of(name: str):
    return parse(vit_test.Settings, ["--config", str(RECIPES / f"vit_{name}_imagenet.yaml")], "")[0]


@pytest.mark.parametrize("name", PARAMETERS)
def test_model(name):
    settings = settings_of(name)
    with torch.device("meta"):
        model = vit_test.build_model(settings, IMAGENET)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == PARAMETERS[name]
    rates = {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)}
    assert rates == ({0.0} if name == "s16" else {0.0, 0.1})
    if name != "s16":
        assert model.pos_drop.p == model.blocks[3].mlp.drop1.p == 0.1
        assert model.blocks[3].attn.proj_drop.p == 0.1 and model.head_drop.p == 0.0


@pytest.mark.parametrize("name", ["b32", "b16", "l32"])
def test_they_differ_by_their_model_alone(name):
    settings, first = vars(settings_of(name)), vars(settings_of("b32"))
    differ = {key for key in settings if settings[key] != first[key]} - {"config", "model"}
    assert not differ
    assert (settings["lr"], settings["weight_decay"], settings["clip"]) == (0.018, 0.1, 1)
    assert (settings["global_batch"], settings["batch_size"]) == (32_768, 256)
    assert settings["decay_all"] and not settings["lamb_bias_correction"]
    assert settings["precision"] == "fp16" and settings["label_smoothing"] == 0
    assert (settings["mixup"], settings["alpha"], settings["mixup_mode"]) == ("fixed", 0.2, "block")
    assert settings["mixup_block"] is None  # a micro-batch


@pytest.mark.parametrize("name", ["b32", "b16", "l32"])
def test_rate_of_every_epoch(name):
    """In steps of 32,768 of ImageNet's 1,281,167 pictures."""
    settings = settings_of(name)
    steps = Steps(
        1_281_167, batch_size=settings.batch_size, step_size=settings.global_batch, shuffle=True,
        mixing=None, drop_last=settings.drop_last,
    ).steps_per_epoch  # fmt: skip
    total = settings.epochs * steps
    assert (steps, total) == (39, 11_700)
    schedule = schedule_maker(settings, settings.lr, steps)(total)
    for epoch in range(300):
        expected = (epoch + 1) / 151 if epoch < 150 else (300 - epoch) / 150
        for step in (0, steps - 1):
            assert schedule.factor(epoch * steps + step) == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("own_folder")
def test_one_step_of_32_768_pictures_on_small_ones(monkeypatch):
    """Pictures of 8 pixels and a small model: 128 micro-batches of 256 make a step."""
    monkeypatch.setattr("utils.data.images.shapes.TRAIN_PER_CLASS", 3_277)
    monkeypatch.setattr(
        "utils.data.images.shapes.draw",
        lambda name, n, rng: rng.integers(0, 256, (n, 32, 32, 3), np.uint8),
    )
    sizes = "--model vit --layers 1 --dim 8 --heads 1 --ffn 8 --patch_size 16 --crop_padding 4"
    recipe = (RECIPES / "vit_b32_imagenet.yaml").read_text()
    for line in ("image_size: 224", "crop: resized", "crop_ratio: 0.875"):  # of imagefolder alone
        recipe = recipe.replace(line, "")
    Path("recipe.yaml").write_text(recipe)
    flags = [
        "--config", "recipe.yaml", "--dataset", "shapes", *sizes.split(),
        "--max_steps", 1, "--precision", "bf16", "--device", "cpu",
        "--threads", 1, "--output", "run",
    ]  # fmt: skip
    assert vit_test.main([str(flag) for flag in flags]) == 0
    log = Path("run/log.txt").read_text()
    assert "32,768 samples a step, 1 step;" in log
