"""The parts of a classifier: its head, its blocks, and how deep each parameter lies.

A model may say of itself `HEAD`, the name of the layer that gives the logits (or a tuple of names),
and `BLOCKS`, the names of its lists of blocks, from input to output. For timm's models both follow
from timm's own conventions, for others from the modules.
"""

from __future__ import annotations

from torch import nn

from utils.errors import UserError


def heads_of(model: nn.Module) -> tuple[str, ...]:
    """Names of the layers that depend on the classes: a transfer to others starts them anew. Mostly
    one; a distilled transformer of timm has two.

    Raises:
        UserError: none can be found.
    """
    head = getattr(model, "HEAD", None) or getattr(model, "pretrained_cfg", {}).get("classifier")
    if head is None:
        head = next(
            (n for n, m in reversed([*model.named_modules()]) if type(m) is nn.Linear), None
        )
    if not head:
        raise UserError(
            f"{type(model).__name__} has no attribute HEAD, the name of its last layer, and no "
            "nn.Linear to take for it: set HEAD"
        )
    return (head,) if isinstance(head, str) else tuple(head)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks between stem and head, from input to output. FSDP gathers the weights of one at a
    time."""
    if hasattr(model, "BLOCKS"):
        return [block for name in model.BLOCKS for block in model.get_submodule(name)]
    if hasattr(model, "group_matcher"):
        return _blocks_of_timm(model)
    lists = [m for m in model.children() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    return [
        block for members in lists for block in members if any(True for _ in block.parameters())
    ]


def depths_of(model: nn.Module) -> dict[str, int]:
    """How deep each parameter lies, by name: 0 for the stem, one more for each block, and one more
    than the last block's for whatever follows, the head included."""
    if not hasattr(model, "BLOCKS") and hasattr(model, "group_matcher"):
        return _depths_in_timm(model)
    blocks = blocks_of(model)
    last = len(blocks) + 1
    of = {p: number + 1 for number, block in enumerate(blocks) for p in block.parameters()}
    of |= {p: last for name in heads_of(model) for p in model.get_submodule(name).parameters()}
    depths, after = {}, False
    for name, parameter in model.named_parameters():  # in the order of the modules
        after = after or 0 < of.get(parameter, 0) < last
        depths[name] = of.get(parameter, last if after else 0)
    return depths


def _depths_in_timm(model: nn.Module) -> dict[str, int]:
    from timm.models import group_parameters

    return group_parameters(model, model.group_matcher(coarse=False), reverse=True)


def _blocks_of_timm(model: nn.Module) -> list[nn.Module]:
    """For each depth between stem and head the largest module that lies there as a whole."""
    depths = _depths_in_timm(model)
    largest: dict[int, tuple[int, nn.Module]] = {}

    def look(module: nn.Module, prefix: str) -> None:
        names = [prefix + name for name, _ in module.named_parameters()]
        found = {depths[name] for name in names if name in depths}
        if len(found) > 1:
            for name, child in module.named_children():
                look(child, f"{prefix}{name}.")
        elif found:
            depth, size = found.pop(), sum(p.numel() for p in module.parameters())
            if size > largest.get(depth, (0, module))[0]:
                largest[depth] = size, module

    look(model, "")
    return [block for _, (_, block) in sorted(largest.items())[1:-1]]
