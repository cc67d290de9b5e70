"""The Vision Transformer against timm's and torchvision's, and its sizes."""

import math

import pytest
import timm
import torch
import torchvision
from timm.models import VisionTransformer

from utils.models.vit import ViT, vit_weights

SMALL = {"layers": 2, "dim": 32, "heads": 2, "ffn": 64}


def torchvision_vit(size: int = 32, patch: int = 8) -> torchvision.models.VisionTransformer:
    """A small one, whose head does not start at 0."""
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(size, patch, 2, 2, 32, 64, num_classes=5)
    torch.nn.init.normal_(model.heads.head.weight)
    return model.eval()


def test_weights_of_torchvision_give_its_logits():
    theirs, x = torchvision_vit(), torch.randn(3, 3, 32, 32)
    ours = ViT(5, 32, 32, patch=8, **SMALL).eval()
    ours.load_state_dict(ours.convert_weights(theirs.state_dict()))
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-5)


def test_weights_of_timm_give_its_logits():
    torch.manual_seed(0)
    theirs = timm.create_model("test_vit", num_classes=5, img_size=32).eval()
    block = theirs.blocks[0]
    ours = ViT(
        5, 32, 32, patch=16, layers=len(theirs.blocks), dim=theirs.embed_dim,
        heads=block.attn.num_heads, ffn=block.mlp.fc1.out_features,
    ).eval()  # fmt: skip
    torch.nn.init.normal_(theirs.head.weight)
    ours.load_state_dict(ours.convert_weights(theirs.state_dict()))
    x = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("source", ["timm", "torchvision"])
def test_positions_are_resampled_for_other_pictures(source):
    theirs = ViT(5, 32, 32, patch=8, **SMALL) if source == "timm" else torchvision_vit()
    ours = ViT(5, 64, 48, patch=8, **SMALL)
    tensors = vit_weights(ours, theirs.state_dict())
    ours.load_state_dict(tensors)
    assert tensors["pos_embed"].shape == (1, 1 + 8 * 6, 32)
    own = theirs.state_dict()["pos_embed" if source == "timm" else "encoder.pos_embedding"]
    assert torch.equal(tensors["pos_embed"][:, 0], own[:, 0])  # the class token's stays
    assert ours(torch.randn(2, 3, 64, 48)).shape == (2, 5)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_fixed_positions_are_the_sines_and_cosines(pooling):
    """Vaswani et al. (2017), section 3.5, for rows and columns, half of the width each."""
    model = ViT(5, 12, 20, patch=4, **SMALL, positions="sincos", pooling=pooling)
    fixed = model.pos_embed[0, -15:].view(3, 5, 32)
    assert not model.pos_embed.requires_grad
    assert model.pos_embed.shape[1] == 15 + (pooling == "cls")
    assert pooling == "mean" or not model.pos_embed[0, 0].any()
    quarter = 8
    values = [[set() for _ in range(5)] for _ in range(3)]
    for row in range(3):
        for column in range(5):
            for place in (row, column):
                for i in range(quarter):
                    angle = place / 10_000 ** (i / quarter)
                    values[row][column] |= {round(math.sin(angle), 4), round(math.cos(angle), 4)}
            found = {round(v, 4) for v in fixed[row, column].tolist()}
            near = [min(abs(a - b) for b in values[row][column]) for a in found]
            assert max(near) < 2e-4
    assert len({tuple(patch.tolist()) for patch in fixed.flatten(0, 1)}) == 15  # all are different


def test_fixed_positions_stay_with_weights_for_other_pictures():
    theirs = ViT(5, 32, 32, patch=8, **SMALL, positions="sincos", pooling="mean")
    ours = ViT(5, 64, 64, patch=8, **SMALL, positions="sincos", pooling="mean")
    assert torch.equal(ours.convert_weights(theirs.state_dict())["pos_embed"], ours.pos_embed)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("vit_base_patch32_224", 88_224_232),
        ("vit_base_patch16_224", 86_567_656),
        ("vit_large_patch32_224", 306_535_400),
    ],
)
def test_number_of_parameters(name, parameters):
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=1000)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_feed_forward_layers_have_the_width_that_is_asked_for(monkeypatch):
    """timm takes a ratio instead, and rounds its product with `dim` down: 391 for 88 and 392."""
    block = ViT(layers=1, dim=88, heads=2, ffn=392).blocks[0]
    assert block.mlp.fc1.out_features == block.mlp.fc2.in_features == 392
    ratios = []
    monkeypatch.setattr(
        VisionTransformer, "__init__", lambda self, **sizes: ratios.append(sizes["mlp_ratio"])
    )
    for dim in range(4, 1025, 4):
        widths = [*range(1, 100), *range(dim, 8 * dim, max(1, dim // 8)), 392, 3072, 65535]
        ratios.clear()
        for ffn in widths:
            ViT(dim=dim, heads=1, ffn=ffn)
        assert [int(dim * ratio) for ratio in ratios] == widths


def test_sizes_that_do_not_fit():
    for wrong, said in (
        ({"height": 33}, "32x33 pixels are no whole patches of 4"),
        ({"dim": 33, "heads": 2}, "33 is not a multiple of 2"),
        ({"dim": 30, "positions": "sincos"}, "a multiple of 4, not 30"),
        ({"pooling": "max"}, "pooling must be one of"),
        ({"positions": "none"}, "positions must be one of"),
    ):
        with pytest.raises(ValueError, match=said):
            ViT(**wrong)
