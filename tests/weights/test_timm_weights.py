"""Weights for timm's models: from files, folders of the Hugging Face hub, and the hub's cache."""

import json
import sys

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed
from weight_tools import fitted, refused

from utils.errors import UserError
from utils.models.vit import ViT
from utils.weights.card import ModelCard
from utils.weights.pretrained import Pretrained, fit_weights, load_pretrained
from utils.weights.published import load_timm

NAME = "test_vit"  # timm has published weights for it, and it is small
REPOSITORY = f"timm/{NAME}.r160_in1k"
CONFIG = {"architecture": NAME, "pretrained_cfg": {"mean": [0.1, 0.2, 0.3], "std": [0.4] * 3}}


def model(classes: int = 5, size: int = 32, channels: int = 3):
    return timm.create_model(NAME, num_classes=classes, img_size=size, in_chans=channels)


@pytest.fixture(scope="module")
def published() -> dict:
    """What timm would have published: 1,000 classes, pictures of 160 pixels."""
    torch.manual_seed(0)
    tensors = model(1000, 160).state_dict()
    return {name: torch.randn_like(tensor) for name, tensor in tensors.items()}


def in_the_cache(folder, published, monkeypatch, commit="0" * 40):
    """The hub's cache with these weights; returns the model's folder in it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    place = folder / f"models--{REPOSITORY.replace('/', '--')}"
    snapshot = place / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    save_file(published, snapshot / "model.safetensors")
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    return place


def test_the_package_of_the_hub_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError) as told:
        load_timm(NAME)
    assert str(told.value) == "--pretrained needs one more package: pip install huggingface_hub"


def test_published_weights_come_from_the_cache_without_a_network(tmp_path, published, monkeypatch):
    place = in_the_cache(tmp_path, published, monkeypatch)
    said = []
    loaded = load_timm(NAME, said.append)
    assert said == [] and loaded.source_text == f"timm's weights {NAME}.r160_in1k"
    assert loaded.mean == (0.5, 0.5, 0.5)
    net = model()
    fit_weights(net, loaded, said.append)
    assert [line.rpartition(": ")[2] for line in said] == [
        "head of 1000 classes replaced by one of 5"
    ]
    assert torch.equal(net.blocks[0].norm1.weight, published["blocks.0.norm1.weight"])
    assert net.pos_embed.shape != published["pos_embed"].shape  # resampled
    for folder in (place, *(place / "snapshots").iterdir()):
        other = load_pretrained(folder)
        assert torch.equal(other.tensors["pos_embed"], published["pos_embed"])
        assert other.mean == (0.1, 0.2, 0.3)


def test_without_a_network_one_line_says_what_to_fetch_and_where_to_put_it(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def offline(*_, **__):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    said = []
    weights = load_timm(NAME, said.append)
    assert said == []
    with pytest.raises(UserError) as error:
        _ = weights.tensors
    assert said == [f"fetching {REPOSITORY} from the Hugging Face hub"]
    for part in (
        f"cannot fetch {REPOSITORY} (Name or service not known)",
        f"https://huggingface.co/{REPOSITORY}/resolve/main/model.safetensors",
        f"copy the folder models--timm--{NAME}.r160_in1k into {tmp_path}",
    ):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_names_without_weights():
    with pytest.raises(UserError, match=r"no weights for vit_base_patch16_224\.nothing; there are"):
        load_timm("vit_base_patch16_224.nothing")


@pytest.mark.parametrize("nest", [None, "model", "state_dict"])
def test_files(tmp_path, published, nest):
    path = tmp_path / "weights.pth"
    torch.save({nest: published} if nest else published, path)
    net = model()
    assert "head of 1000 classes" in fitted(net, path)[0]
    assert torch.equal(net.norm.weight, published["norm.weight"])


def test_gray_pictures(tmp_path, published):
    save_file(published, tmp_path / "weights.safetensors")
    net = model(channels=1)
    assert any(
        "summed over its 3 colours" in line
        for line in fitted(net, tmp_path / "weights.safetensors")
    )


@pytest.mark.parametrize(
    "name", ["test_convnext", "test_efficientnet", "test_resnet", "test_nfnet"]
)
def test_other_families(tmp_path, name):
    torch.manual_seed(0)
    theirs = timm.create_model(name, num_classes=7).eval()
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    same, other = (timm.create_model(name, num_classes=classes).eval() for classes in (7, 3))
    assert fitted(same, tmp_path / "weights.safetensors") == []
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(same(x), theirs(x))
    assert (
        "head of 7 classes replaced by one of 3"
        in fitted(other, tmp_path / "weights.safetensors")[0]
    )


def test_two_heads(tmp_path):
    """A distilled transformer."""
    make = {"embed_dim": 16, "depth": 1, "num_heads": 1, "img_size": 32}
    name = "deit_tiny_distilled_patch16_224"
    save_file(
        timm.create_model(name, num_classes=7, **make).state_dict(),
        tmp_path / "weights.safetensors",
    )
    net = timm.create_model(name, num_classes=3, **make)
    assert len(fitted(net, tmp_path / "weights.safetensors")) == 2


def our_vit(height: int, width: int, classes: int = 5, **more) -> ViT:
    return ViT(classes, height, width, patch=16, layers=1, dim=16, heads=2, ffn=32, **more)


def timm_vit(height: int, width: int, classes: int = 5):
    return timm.create_model(NAME, num_classes=classes, img_size=(height, width))


def of_run(model, height: int, width: int) -> Pretrained:
    card = ModelCard(("a", "b", "c", "d", "e"), (0.5,) * 3, (0.5,) * 3, height, width, 3)
    return Pretrained(model.state_dict(), "run", card=card)


@pytest.mark.parametrize("make", [our_vit, timm_vit])
@pytest.mark.parametrize("classes", [5, 3])  # with 3 the head is replaced
@pytest.mark.parametrize("size", [(64, 256), (256, 256), (128, 128), (256, 64)])
def test_positions_of_pictures_that_are_not_square(make, size, classes):
    """As many patches, 64, may have another grid."""
    theirs, ours = make(64, 256), make(*size, classes)
    fit_weights(ours, of_run(theirs, 64, 256), lambda line: None)
    grid = size[0] // 16, size[1] // 16
    expected = resample_abs_pos_embed(theirs.pos_embed, grid, (4, 16))
    assert torch.equal(ours.pos_embed, expected)


def test_positions_of_a_grid_with_as_many_patches_as_timm_assumes():
    """224 x 224 pixels also have 196 patches of 16."""
    theirs, ours = our_vit(112, 448), our_vit(112, 448, classes=3)
    fit_weights(ours, of_run(theirs, 112, 448), lambda line: None)
    assert torch.equal(ours.pos_embed, theirs.pos_embed)


def test_fixed_positions_of_another_grid_stay():
    theirs, ours = (our_vit(*size, positions="sincos") for size in ((64, 256), (128, 128)))
    before = ours.pos_embed.clone()
    fit_weights(ours, of_run(theirs, 64, 256))
    assert torch.equal(ours.pos_embed, before)


def test_weights_of_another_size_are_refused(tmp_path, published):
    save_file(published, tmp_path / "weights.safetensors")
    refused(
        tmp_path / "weights.safetensors", "does not fit the model", "same architecture",
        model=ViT(layers=2, dim=32, heads=2, ffn=64),
    )  # fmt: skip


def test_damaged_folders(tmp_path, published):
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "has config.json, but none of model.safetensors, pytorch_model.bin")
    save_file(published, tmp_path / "model.safetensors")
    assert load_pretrained(tmp_path).mean is None
    (tmp_path / "config.json").write_text("[")
    refused(tmp_path, "config.json is damaged: download it again")
