"""The parts of a classifier: its head, its blocks, and how deep each parameter lies.

A model may say of itself `HEAD`, the name of the layer that gives the logits (or a tuple of names),
and `BLOCKS`, the names of its lists of blocks, from input to output. For timm's models both follow
from timm's own conventions, for others from the modules.
"""

from __future__ import annotations

import contextlib

from torch import nn

from ..errors import UserError


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
    return _blocks_in_lists(model)


def depths_of(model: nn.Module) -> dict[str, int]:
    """How deep each parameter lies, by name: 0 for the stem, one more for each block, and one more
    than the last block's for whatever follows, the head included."""
    if not hasattr(model, "BLOCKS"):
        if hasattr(model, "group_matcher"):
            return _depths_in_timm(model)
        if _is_of_timm(model):  # as timm does it: by the order of the parameters
            from timm.optim import auto_group_layers

            return auto_group_layers(model)
    blocks = blocks_of(model)
    last = len(blocks) + 1
    of = {p: number + 1 for number, block in enumerate(blocks) for p in block.parameters()}
    of |= {p: last for name in heads_of(model) for p in model.get_submodule(name).parameters()}
    depths, after = {}, False
    for name, parameter in model.named_parameters():  # in the order of the modules
        after = after or 0 < of.get(parameter, 0) < last
        depths[name] = of.get(parameter, last if after else 0)
    return depths


def _blocks_in_lists(model: nn.Module) -> list[nn.Module]:
    """The members of the model's lists of modules. A list with the head in it, such as a classifier
    of several layers, counts only if there is no other."""
    of_head = set()
    with contextlib.suppress(UserError, AttributeError):  # no head, or a HEAD that is not there
        of_head = {p for name in heads_of(model) for p in model.get_submodule(name).parameters()}

    def before_head(modules) -> list[nn.Module]:
        own = ((module, {*module.parameters()}) for module in modules)
        return [module for module, owned in own if owned and owned.isdisjoint(of_head)]

    lists = [m for m in model.children() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    return [b for members in before_head(lists) or lists for b in before_head(members)]


def _is_of_timm(model: nn.Module) -> bool:
    """Whether timm has made the model, and has told where its head is."""
    of_package = type(model).__module__.startswith("timm.")
    return of_package and bool(getattr(model, "pretrained_cfg", {}).get("classifier"))


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
