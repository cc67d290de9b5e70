"""Holds fixed which branch a piecewise function takes, such as a ReLU or a max-pooling."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# A rule calls `func` and returns (its result, what the result says about the branch taken) if
# `taken` is None; else it computes the result by the branches in `taken`, whatever x is.
Rule = Callable[..., tuple[Tensor, Tensor]]


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
        if self.next is not None:
            return rule(func, next(self.next), *args, **kwargs)[0]
        result, taken = rule(func, None, *args, **kwargs)
        self.taken.append(taken.detach())
        return result


# Where possible `taken` is the result or the input, which autograd keeps anyway.


def _relu(func, taken, x, inplace=False):
    if taken is None:
        result = func(x, inplace) if func is F.relu else func(x)
        return result, result
    # ReLU's backward: the first argument where the second is above 0, else 0.
    return torch.ops.aten.threshold_backward(x, taken, 0), taken


def _hardtanh(func, taken, x, min_val=-1.0, max_val=1.0, inplace=False):
    if taken is None:
        result = F.hardtanh(x, min_val, max_val, inplace)
        return result, result
    return torch.where((min_val < taken) & (taken < max_val), x, taken), taken


def _relu6(func, taken, x, inplace=False):
    return _hardtanh(func, taken, x, 0.0, 6.0, inplace)


def _leaky_relu(func, taken, x, negative_slope=0.01, inplace=False):
    if taken is None:
        taken = x > 0
        return func(x, negative_slope, inplace), taken
    return torch.where(taken, x, negative_slope * x), taken


def _prelu(func, taken, x, weight):
    if taken is None:
        return func(x, weight), x
    ones = [1] * (x.dim() - 2)
    slope = weight.view(-1, *ones) if x.dim() > 1 else weight
    return torch.where(taken > 0, x, slope * x), taken


# The next two compute alike whether `taken` is None or not: PyTorch rounds 1 / 6 to float32, and a
# finite difference would divide that error by its small step.


def _hardsigmoid(func, taken, x, inplace=False):
    if taken is None:
        taken = F.hardsigmoid(x.detach())
    return torch.where((taken > 0) & (taken < 1), x / 6 + 0.5, taken), taken


def _hardswish(func, taken, x, inplace=False):
    taken = x if taken is None else taken
    middle = x * (x + 3) / 6
    return torch.where(taken < -3, 0 * x, torch.where(taken < 3, middle, x)), taken


def _max_pool2d(
    func, taken, x, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False,
    return_indices=False,
):  # fmt: skip
    if taken is None:
        return F.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode, True)
    return x.flatten(-2).gather(-1, taken.flatten(-2)).view(taken.shape), taken


def _adaptive_max_pool2d(func, taken, x, output_size, return_indices=False):
    if taken is None:
        return F.adaptive_max_pool2d(x, output_size, True)
    return x.flatten(-2).gather(-1, taken.flatten(-2)).view(taken.shape), taken


RULES: dict[Callable, Rule] = {
    **dict.fromkeys((torch.relu, Tensor.relu, F.relu, torch.relu_, Tensor.relu_, F.relu_), _relu),
    F.relu6: _relu6,
    F.hardtanh: _hardtanh,
    F.leaky_relu: _leaky_relu,
    **dict.fromkeys((F.prelu, torch.prelu), _prelu),
    F.hardsigmoid: _hardsigmoid,
    F.hardswish: _hardswish,
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), _max_pool2d),
    F.adaptive_max_pool2d: _adaptive_max_pool2d,
}
