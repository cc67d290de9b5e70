"""The Vision Transformer in sizes of one's own: timm's, with timm's names, so that weights move
freely between there and here.

Dosovitskiy et al., "An image is worth 16x16 words" (2021), arXiv:2010.11929. Fixed positions and
mean pooling as in Beyer, Zhai and Kolesnikov, "Better plain ViT baselines for ImageNet-1k" (2022),
arXiv:2205.01580.
"""

import math
import re
from collections.abc import Callable

from timm.layers import build_sincos2d_pos_embed, resample_abs_pos_embed
from timm.models import VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn

POSITIONS = ("learned", "sincos")
POOLINGS = ("cls", "mean")
# torchvision's names -> timm's.
FROM_TORCHVISION = [
    (r"^class_token$", "cls_token"),
    (r"^conv_proj\.", "patch_embed.proj."),
    (r"^encoder\.pos_embedding$", "pos_embed"),
    (r"^encoder\.ln\.", "norm."),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.ln_1\.", r"blocks.\1.norm1."),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.ln_2\.", r"blocks.\1.norm2."),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.self_attention\.in_proj_", r"blocks.\1.attn.qkv."),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.self_attention\.out_proj\.", r"blocks.\1.attn.proj."),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.mlp\.(?:0|linear_1)\.", r"blocks.\1.mlp.fc1."),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.mlp\.(?:3|linear_2)\.", r"blocks.\1.mlp.fc2."),
    (r"^heads\.head\.", "head."),
]


class ViT(VisionTransformer):
    """(n, channels, height, width) -> logits (n, classes).

    Args:
        classes: number of logits.
        height, width, channels: of the pictures, which consist of whole patches.
        patch: side of a patch in pixels.
        layers: number of blocks.
        dim: width of a token's representation, a multiple of `heads`.
        heads: attention heads.
        ffn: hidden width of the feed-forward layers.
        pooling: what the classifier reads: "cls", an additional token, or "mean", over all patches.
        positions: "learned" or "sincos", fixed sines and cosines of row and column.
        more: further arguments of timm's VisionTransformer, such as `drop_rate`.

    Raises:
        ValueError: the sizes do not fit each other.
    """

    HEAD = "head"

    def __init__(
        self,
        classes: int = 10,
        height: int = 32,
        width: int = 32,
        channels: int = 3,
        patch: int = 4,
        layers: int = 9,
        dim: int = 192,
        heads: int = 3,
        ffn: int = 768,
        pooling: str = "cls",
        positions: str = "learned",
        **more,
    ):
        if pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {POOLINGS}, not {pooling!r}")
        if positions not in POSITIONS:
            raise ValueError(f"positions must be one of {POSITIONS}, not {positions!r}")
        if height % patch or width % patch:
            raise ValueError(f"pictures of {width}x{height} pixels are no whole patches of {patch}")
        if dim % heads:
            raise ValueError(f"dim must be a multiple of heads: {dim} is not a multiple of {heads}")
        if positions == "sincos" and dim % 4:
            raise ValueError(f"sincos positions need a dim that is a multiple of 4, not {dim}")
        own = {"global_pool": "token" if pooling == "cls" else "avg", "fc_norm": False}
        own |= {"class_token": pooling == "cls"}
        super().__init__(
            **own | more,
            img_size=(height, width),
            patch_size=patch,
            in_chans=channels,
            num_classes=classes,
            embed_dim=dim,
            depth=layers,
            num_heads=heads,
            mlp_ratio=(ffn + 0.5) / dim,  # timm rounds ratio * dim down
        )
        if positions == "sincos":
            fixed = build_sincos2d_pos_embed([height // patch, width // patch], dim)
            self.pos_embed.requires_grad_(False)
            self.pos_embed.zero_()
            self.pos_embed[0, -len(fixed) :] = fixed  # (patches, dim); the class token has none

    def convert_weights(
        self, tensors: dict[str, Tensor], size: tuple[int, int] | None = None
    ) -> dict[str, Tensor]:
        """`vit_weights`; fixed positions stay those of this model."""
        tensors = vit_weights(self, tensors, size)
        return tensors if self.pos_embed.requires_grad else tensors | {"pos_embed": self.pos_embed}

    def flags_for(self, tensors: dict[str, Tensor]) -> list[str]:
        """The flag by which the model would have, or not have, a class token as `tensors` do; empty
        if that is not the difference."""
        if ("cls_token" in tensors) == self.has_class_token:
            return []
        return ["--pooling mean"] if self.has_class_token else ["--pooling cls"]


def vit_weights(
    model: VisionTransformer, tensors: dict[str, Tensor], size: tuple[int, int] | None = None
) -> dict[str, Tensor]:
    """Weights of a ViT by timm, torchvision or others that timm knows, as `model` takes them:
    under timm's names, positions and patches resampled to its pictures' and patches' size.

    Args:
        size: (height, width) of the pictures that the weights were trained with; None: what timm
            takes it for, mostly a square.
    """
    if "encoder.pos_embedding" in tensors:
        tensors = {_from_torchvision(name): tensor for name, tensor in tensors.items()}
    if "pos_embed" in tensors and ("cls_token" in tensors) != model.has_class_token:
        return tensors  # of another pooling: they do not fit
    converted = by_timm(checkpoint_filter_fn, tensors, model)
    needed = {"pos_embed", "patch_embed.proj.weight"}
    if size is None or model.pos_embed is None or not needed <= tensors.keys():
        return converted
    patch = tensors["patch_embed.proj.weight"].shape[-2:]
    before, now = (size[0] // patch[0], size[1] // patch[1]), model.patch_embed.grid_size
    prefix = model.pos_embed.shape[1] - math.prod(now)  # tokens beside the patches
    if tensors["pos_embed"].shape[1] != prefix + math.prod(before):
        return converted
    positions = resample_abs_pos_embed(tensors["pos_embed"], now, before, prefix)
    return converted | {"pos_embed": positions}


def by_timm(convert: Callable, tensors: dict[str, Tensor], *model: nn.Module) -> dict[str, Tensor]:
    """What a function of timm makes of weights; themselves where it fails, as with weights of
    another architecture."""
    try:
        return convert(tensors, *model)
    except (RuntimeError, KeyError, ValueError, AssertionError):
        return tensors


def _from_torchvision(name: str) -> str:
    for pattern, ours in FROM_TORCHVISION:
        name, found = re.subn(pattern, ours, name)
        if found:
            break
    return name
