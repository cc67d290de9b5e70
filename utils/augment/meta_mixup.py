"""Meta-mixup: lambda is chosen so that a step on mixed samples lowers the loss on clean ones.

MetaMixUp: Mai, Hu, Chen, Shen and Shen (2019), arXiv:1908.10059; the derivative is in
hypergradient.py. Two forms, alike to the trainer: `PolicyMixup` trains a policy (mixup_policy.py)
every few steps, `SampleMixup` chooses a lambda for every pair anew, as the paper does.

The virtual step is one of plain gradient descent at the present learning rate, whatever the
optimizer. It is taken by copies: BatchNorm's statistics, random states, gradients and the
optimizer are as they were.
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from utils.augment.hypergradient import Weights, exact_hypergradient, fast_hypergradient
from utils.augment.mixup import MixPlan, mix_pairs
from utils.augment.mixup_policy import MixupPolicy


class Pairs(NamedTuple):
    """The first samples of a micro-batch and their partners, before they are mixed. Where the
    model mixes by itself, the whole micro-batch, in which the partners are."""

    own: Tensor  # (m, ...), or what the model takes
    other: Tensor | None  # (m, ...); None: the model mixes
    targets: Tensor  # (m,) int64
    partners: Tensor  # (m,) int64, the partners' classes
    lam: Tensor  # (m,) as in the plan
    plan: MixPlan | None = None  # where the model mixes


class VirtualStep:
    """The hypergradient of a model's lambda.

    Args:
        model: never a compiled wrapper.
        losses: (logits, targets, partners' targets, lambda) -> (n,).
        autocast: () -> context of the forward pass of the clean samples; that of the mixed ones is
            in the weights' own precision (see hypergradient.py).
        exact: by double backward.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
        autocast: Callable = contextlib.nullcontext,
        exact: bool = False,
    ):
        self.model, self.losses, self.autocast, self.exact = model, losses, autocast, exact

    def hypergradient(
        self, pairs: Pairs, lam: Tensor, clean: tuple[Tensor, Tensor], lr: float, known: bool
    ) -> Tensor:
        """d (mean loss on the clean batch after the virtual step) / d lam, (m,).

        Args:
            clean: inputs and targets.
            known: the gradient of the mixed batch, these pairs among others, is in the weights'
                `grad`: the fast form steps along it.
        """
        weights = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if known:
            weights = {name: p for name, p in weights.items() if p.grad is not None}
        inputs, targets = clean
        ones = torch.ones_like(targets, dtype=lam.dtype)

        def logits(at: Weights, context: Callable, *inputs) -> Tensor:
            return self._logits(dict(zip(weights, at, strict=True)), context, *inputs)

        def mixed(at: Weights, lam: Tensor) -> Tensor:
            if pairs.plan is None:
                inputs = (mix_pairs(pairs.own, pairs.other, lam),)
            else:
                inputs = (pairs.own, pairs.plan.with_lam(lam))
            found = logits(at, contextlib.nullcontext, *inputs)
            return self.losses(found, pairs.targets, pairs.partners, lam).mean()

        def clean_loss(at: Weights) -> Tensor:
            found = logits(at, self.autocast, inputs)
            return self.losses(found, targets, targets, ones).mean()

        now = list(weights.values())
        if self.exact:
            return exact_hypergradient(mixed, clean_loss, now, lam, lr)
        gradient = [p.grad for p in now] if known else None
        return fast_hypergradient(mixed, clean_loss, now, lam, lr, gradient)

    def _logits(self, weights: dict[str, Tensor], context: Callable, *inputs) -> Tensor:
        """Of the model with other weights. It counts in copies of its buffers, and every call
        draws the same random numbers, which dropout at both ends of a difference must do."""
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        device = inputs[0].device
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), context():
            return functional_call(self.model, weights | buffers, inputs)


class PolicyMixup:
    """Lambda from a policy, which is updated where a batch brings clean samples.

    Args:
        policy: on the model's device.
        virtual: of the model.
        size: pairs of the step that an update looks at, its first ones; of texts, all.
    """

    def __init__(self, policy: MixupPolicy, virtual: VirtualStep, size: int):
        self.policy, self.virtual, self.size = policy, virtual, size
        self._next: tuple[Pairs, tuple[Tensor, Tensor]] | None = None

    def choose(self, batch, lr: float) -> MixPlan | None:
        """The plan of a micro-batch (inputs, targets, mixing, clean), with its lambda."""
        plan = batch.mixing
        if plan is None or not plan.learned:
            return plan
        if batch.clean is not None:
            self._next = _pairs(batch, self.size), batch.clean
        with torch.no_grad():
            lam = self.policy(batch.targets, batch.targets[plan.partner], plan.lam)
        return plan.with_lam(lam)

    def update(self, bad: Tensor, lr: float) -> None:
        """After the backward pass of a step and before its update, at its learning rate; `bad`,
        () bool on the device, leaves the policy as it is."""
        if self._next is None:
            return
        (pairs, clean), self._next = self._next, None
        lam = self.policy(pairs.targets, pairs.partners, pairs.lam)
        hypergradient = self.virtual.hypergradient(pairs, lam.detach(), clean, lr, known=True)
        self.policy.update(lam, hypergradient, bad)

    def mean_lambda(self) -> Tensor:
        """(classes, classes): what it learned, see MixupPolicy."""
        return self.policy.mean_lambda()

    def state_dict(self) -> dict[str, Tensor]:
        return self.policy.saved_tensors()

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        self.policy.load_tensors(tensors)


class SampleMixup:
    """Every pair's own lambda: from a random start one step down the hypergradient, then the real
    step with it. It remembers nothing.

    Args:
        virtual: of the model.
        step: root mean square of the steps of the lambdas of a micro-batch: the hypergradient has
            no scale that a learning rate could be told for.
    """

    def __init__(self, virtual: VirtualStep, step: float):
        self.virtual, self.step = virtual, step

    def choose(self, batch, lr: float) -> MixPlan | None:
        """The plan of a micro-batch, with its lambda."""
        plan = batch.mixing
        if plan is None or not plan.learned:
            return plan
        pairs = _pairs(batch, len(batch.targets))
        downhill = self.virtual.hypergradient(pairs, plan.lam, batch.clean, lr, known=False)
        return plan.with_lam(chosen(plan.lam, downhill, self.step))

    def update(self, bad: Tensor, lr: float) -> None:
        pass

    def mean_lambda(self) -> None:
        return None

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        pass


def chosen(lam: Tensor, hypergradient: Tensor, step: float) -> Tensor:
    """lam - step * g / rms(g), cut off at 0 and 1; lam where g is 0 or not finite. All (n,)."""
    size = hypergradient.square().mean().sqrt()
    usable = torch.isfinite(size) & (size > 0)
    moved = (lam - step * hypergradient / size).clamp(0, 1)
    return torch.where(usable, moved, lam)


def _pairs(batch, size: int) -> Pairs:
    plan, inputs, targets = batch.mixing, batch.inputs, batch.targets
    if not isinstance(inputs, Tensor):  # the model finds the partners, wherever they are
        return Pairs(inputs, None, targets, targets[plan.partner], plan.lam, plan)
    partner = plan.partner[:size]
    return Pairs(inputs[:size], inputs[partner], targets[:size], targets[partner], plan.lam[:size])
