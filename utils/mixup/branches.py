"""Holds fixed which branch a piecewise function takes, such as a ReLU or a max-pooling."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class Piecewise:
    """A function of PyTorch that takes one of several branches, for each element.

    Args:
        names: of its arguments after the input.
        branches: (x, its other arguments) -> which ones it takes, a tensor without a gradient;
            None: its result says so.
        value: (x, taken, its other arguments) -> the result by the branches `taken`. It is used at
            both ends of a finite difference, which would divide any difference in rounding by its
            small step: PyTorch's hardswish, for example, rounds 1 / 6 to float32.
    """

    names: tuple[str, ...]
    branches: Callable[..., Tensor] | None
    value: Callable[..., Tensor]


class Branches(TorchFunctionMode):
    """A context that records on first use which branches the functions in RULES take, for each
    element. On later uses they take the recorded branches, in the same order.

    So a finite difference of gradients sees the slope within the branches and no jump between them.
    """

    def __init__(self):
        super().__init__()
        self.taken: list[Tensor] = []
        self.next: Iterator[Tensor] | None = None  # None while recording

    def __enter__(self):
        self.next = iter(self.taken) if self.taken else None
        return super().__enter__()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        rule = RULES.get(func)
        if rule is None:
            return func(*args, **kwargs)
        given = dict(zip(("input", *rule.names), args, strict=False)) | kwargs
        x, in_place = given.pop("input"), given.pop("inplace", func in IN_PLACE)
        if self.next is not None:
            taken = next(self.next)
        elif rule.branches is None:
            result = func(*args, **kwargs)
            self.taken.append(result.detach())
            return result
        else:
            taken = rule.branches(x.detach(), **given)
            self.taken.append(taken)
        result = rule.value(x.clone() if in_place else x, taken, **given)
        return x.copy_(result) if in_place else result


def _regions(x: Tensor, low: float, high: float) -> Tensor:
    """int8: 0 up to `low`, 1 between, 2 from `high` on."""
    return (x > low).to(torch.int8) + (x >= high)


def _choose(taken: Tensor, below, between, above) -> Tensor:
    return torch.where(taken == 1, between, torch.where(taken == 0, below, above))


def _clipped(x, taken, min_val=-1.0, max_val=1.0):
    return _choose(taken, x.new_tensor(min_val), x, x.new_tensor(max_val))


def _prelu(x, taken, weight):
    slope = weight.view(-1, *[1] * (x.dim() - 2)) if x.dim() > 1 else weight
    return torch.where(taken, x, slope * x)


def _at_places(x, taken, *args, **kwargs):
    return x.flatten(-2).gather(-1, taken.flatten(-2)).view(taken.shape)


def _places_of_maxima(x, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, **_):
    return F.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode, True)[1]


# ReLU's own backward pass computes the value: its first argument where the second is above 0, else
# 0. Its result is what autograd keeps anyway.
RELU = Piecewise(
    ("inplace",), None, lambda x, taken: torch.ops.aten.threshold_backward(x, taken, 0)
)
HARDTANH = Piecewise(
    ("min_val", "max_val", "inplace"),
    lambda x, min_val=-1.0, max_val=1.0: _regions(x, min_val, max_val),
    _clipped,
)
RELU6 = Piecewise(
    ("inplace",),
    lambda x: _regions(x, 0, 6),
    lambda x, taken: _clipped(x, taken, 0.0, 6.0),
)
LEAKY_RELU = Piecewise(
    ("negative_slope", "inplace"),
    lambda x, negative_slope=0.01: x > 0,
    lambda x, taken, negative_slope=0.01: torch.where(taken, x, negative_slope * x),
)
PRELU = Piecewise(("weight",), lambda x, weight: x > 0, _prelu)
HARDSIGMOID = Piecewise(
    ("inplace",),
    lambda x: _regions(x, -3, 3),
    lambda x, taken: _choose(taken, x.new_tensor(0.0), x / 6 + 0.5, x.new_tensor(1.0)),
)
HARDSWISH = Piecewise(
    ("inplace",),
    lambda x: _regions(x, -3, 3),
    lambda x, taken: _choose(taken, x.new_tensor(0.0), x.square() / 6 + x / 2, x),
)
MAX_POOL2D = Piecewise(
    ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"),
    _places_of_maxima,
    _at_places,
)
ADAPTIVE_MAX_POOL2D = Piecewise(
    ("output_size", "return_indices"),
    lambda x, output_size, **_: F.adaptive_max_pool2d(x, output_size, True)[1],
    _at_places,
)

IN_PLACE = {torch.relu_, Tensor.relu_, F.relu_}
RULES: dict[Callable, Piecewise] = {
    **dict.fromkeys((torch.relu, Tensor.relu, F.relu, *IN_PLACE), RELU),
    F.relu6: RELU6,
    F.hardtanh: HARDTANH,
    F.leaky_relu: LEAKY_RELU,
    **dict.fromkeys((F.prelu, torch.prelu), PRELU),
    F.hardsigmoid: HARDSIGMOID,
    F.hardswish: HARDSWISH,
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), MAX_POOL2D),
    F.adaptive_max_pool2d: ADAPTIVE_MAX_POOL2D,
}
