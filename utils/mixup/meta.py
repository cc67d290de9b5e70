"""Meta-mixup: lambda is chosen so that a step on mixed samples lowers the loss on clean ones.

MetaMixUp: Mai, Hu, Chen, Shen and Shen (2019), arXiv:1908.10059; the derivative is in
hypergradient.py. Two forms with the same interface: `PolicyMixup` trains a policy (policy.py) every
few steps, `SampleMixup` optimizes each pair's lambda in every step, as in the paper.

The virtual step is plain gradient descent at the current learning rate, whatever the optimizer. It
works on copies: BatchNorm's statistics, random states, gradients and optimizer do not change.

With several processes each holds some of the pairs and of the clean samples. The gradients of the
clean loss and of the policy are summed over the ranks, so that all ranks have the same policy, and
the same as a single process with the same global batch.
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..exchange import Exchange
from ..model_tensors import ModelTensors
from .hypergradient import (
    Weights,
    exact_hypergradient,
    exact_product,
    fast_hypergradient,
    fast_product,
    gradient_at,
)
from .mixing import MixPlan, mix_pairs
from .policy import MixupPolicy

CleanBatch = tuple[Tensor | tuple, Tensor]  # inputs and targets


class Pairs(NamedTuple):
    """m samples and their partners, before mixing. Where the model itself mixes, a whole
    micro-batch, which contains the partners."""

    own: Tensor | tuple  # (m, ...), or the model's inputs where it mixes
    other: Tensor | None  # (m, ...), the partners; None where the model mixes
    targets: Tensor  # (m,) int64
    partners: Tensor  # (m,) int64, the partners' classes
    lam: Tensor  # (m,) as in the plan
    plan: MixPlan | None = None  # where the model mixes


class VirtualStep:
    """Hypergradients of a model: d clean loss / d lambda through one virtual step.

    Args:
        model: not compiled. It is called with all its tensors replaced, so with `tensors` from
            another model it may be on the meta device.
        losses: (logits, targets, partners' targets, lambda) -> (n,).
        autocast: () -> context for the forward pass of the clean samples; the mixed samples are
            computed in the weights' precision (see hypergradient.py).
        exact: by double backward instead of a finite difference.
        exchange: with the other ranks.
        tensors: used in place of the model's own; None: the model's own.
        checkpointed: the model's gradient checkpointing is on.
        weigh: (targets, partners' targets, lambda) -> (n,): the weights that `losses` contain,
            linear in lambda. A mean then divides by their sum. None: by the number of samples.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
        autocast: Callable = contextlib.nullcontext,
        exact: bool = False,
        exchange: Exchange | None = None,
        tensors: ModelTensors | None = None,
        checkpointed: bool = False,
        weigh: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    ):
        self.model, self.losses, self.autocast, self.exact = model, losses, autocast, exact
        self.exchange = exchange or Exchange()
        self.tensors = tensors or ModelTensors(model)
        self.checkpointed, self.weigh = checkpointed, weigh

    def batch_hypergradient(
        self, pairs: Pairs, lam: Tensor, clean: CleanBatch, lr: float
    ) -> Tensor:
        """d (mean loss on the clean batch after a virtual step on these pairs) / d lam, (m,). Uses
        this rank's samples alone: nothing is exchanged."""
        weights = self.tensors.weights()
        names = [name for name, weight in weights.items() if weight.requires_grad]
        call = self._call(weights, names)

        def clean_loss(at: Weights) -> Tensor:
            return self._mean(self._clean_losses(call, at, clean), *unmixed(clean[1]))

        def mixed(at: Weights, lam: Tensor) -> Tensor:
            losses = self._mixed_losses(call, at, pairs, lam)
            return self._mean(losses, pairs.targets, pairs.partners, lam)

        hypergradient = exact_hypergradient if self.exact else fast_hypergradient
        return hypergradient(mixed, clean_loss, [weights[name] for name in names], lam, lr)

    def step_hypergradients(
        self, pieces: list[Pairs], lams: list[Tensor], total: int, clean: CleanBatch, lr: float
    ) -> list[Tensor]:
        """d (mean loss on the clean batch) / d lam after a virtual step along the gradient of the
        whole optimizer step, which the parameters already have. Collective.

        Args:
            pieces: this rank's pairs in groups that fit through the model; a piece may be empty.
            lams: one (m,) for each piece.
            total: number of pairs of all pieces and ranks, over which the mixed loss is averaged.
            clean: this rank's part of the clean batch, which may be empty.
        Returns:
            for each piece, (m,).
        """
        weights, gradients = self.tensors.weights(), self.tensors.gradients()
        call = self._call(weights, list(gradients))
        current = [weights[name].detach() for name in gradients]
        stepped = torch._foreach_sub(current, list(gradients.values()), alpha=lr)
        v = self._clean_gradient(call, stepped, clean)
        product = exact_product if self.exact else fast_product
        divisor: Tensor | int = total
        if self.weigh is not None:
            given = zip(pieces, lams, strict=True)
            own = [self.weigh(pairs.targets, pairs.partners, lam).sum() for pairs, lam in given]
            divisor = self.exchange.sum(torch.stack(own).sum())
            # Where lambda makes the divisor larger, it makes the whole gradient smaller.
            along = sum((a * b).sum() for a, b in zip(v, gradients.values(), strict=True))

        def piece_gradient(pairs: Pairs, lam: Tensor) -> Tensor:
            # Only texts: models of images run even on 0 samples, since BatchNorm over all ranks is
            # collective.
            if pairs.plan is not None and not len(lam):
                return torch.zeros_like(lam)

            def mixed(at: Weights, lam: Tensor) -> Tensor:
                return self._mixed_losses(call, at, pairs, lam).sum() / divisor

            slope = product(mixed, current, v, lam)
            if self.weigh is not None:
                targets, partners, ones = pairs.targets, pairs.partners, torch.ones_like(lam)
                rise = self.weigh(targets, partners, ones) - self.weigh(partners, targets, ones)
                slope = slope - along * rise / divisor
            return -lr * slope

        return [piece_gradient(*each) for each in zip(pieces, lams, strict=True)]

    def _clean_gradient(self, call: Callable, at: Weights, clean: CleanBatch) -> Weights:
        """Gradient of the mean loss over the clean samples of all ranks."""
        inputs, targets = clean
        if len(targets) or isinstance(inputs, Tensor):
            # Even on 0 images, since BatchNorm over all ranks is collective.
            local = gradient_at(lambda at: self._clean_losses(call, at, clean).sum(), at)
        else:
            local = [torch.zeros_like(weight) for weight in at]
        count = at[0].new_full((), len(targets))
        if self.weigh is not None:
            count = self.weigh(*unmixed(targets)).sum().to(count.dtype)
        *gradient, count = sum_over_ranks(self.exchange, [*local, count])
        return [part / count for part in gradient]

    def _clean_losses(self, call: Callable, at: Weights, clean: CleanBatch) -> Tensor:
        inputs, targets = clean
        return self.losses(call(at, self.autocast, inputs), *unmixed(targets))

    def _mean(self, losses: Tensor, targets: Tensor, partners: Tensor, lam: Tensor) -> Tensor:
        if self.weigh is None:
            return losses.mean()
        return losses.sum() / self.weigh(targets, partners, lam).sum()

    def _mixed_losses(self, call: Callable, at: Weights, pairs: Pairs, lam: Tensor) -> Tensor:
        if pairs.plan is None:
            inputs: tuple = (mix_pairs(pairs.own, pairs.other, lam),)
        else:
            inputs = (pairs.own, pairs.plan.with_lam(lam))
        logits = call(at, contextlib.nullcontext, *inputs)
        return self.losses(logits, pairs.targets, pairs.partners, lam)

    def _call(self, weights: dict[str, Tensor], names: list[str]) -> Callable[..., Tensor]:
        """Returns a function (weights that replace those under `names`, context, inputs) -> logits.

        It works on copies of the buffers. Every call draws the same random numbers, so that dropout
        is the same at both ends of a finite difference. Gradient checkpointing is off: it would run
        blocks again in the backward pass, when the model has its own tensors back."""
        constants = {name: weight.detach() for name, weight in weights.items()}
        model_buffers = self.tensors.buffers()

        def logits(at: Weights, context: Callable, *inputs) -> Tensor:
            buffers = {name: buffer.clone() for name, buffer in model_buffers.items()}
            tensors = constants | dict(zip(names, at, strict=True)) | buffers
            device = inputs[0].device
            devices = [device] if device.type == "cuda" else []
            if self.checkpointed:
                self.model.set_grad_checkpointing(False)
            try:
                with torch.random.fork_rng(devices), context():
                    return functional_call(self.model, tensors, inputs)
            finally:
                if self.checkpointed:
                    self.model.set_grad_checkpointing(True)

        return logits


class PolicyMixup:
    """Lambda from a policy on the model's device, which is updated in the steps whose batches have
    clean samples; `virtual` computes the hypergradients."""

    def __init__(self, policy: MixupPolicy, virtual: VirtualStep):
        self.policy, self.virtual = policy, virtual
        self._pieces: list[Pairs] = []  # of the step's micro-batches so far
        self._total = 0  # pairs used for the step's update, of all ranks
        self._clean: CleanBatch | None = None

    def choose(self, batch, lr: float) -> MixPlan | None:
        """The micro-batch's plan with its lambda filled in. The clean samples come with the last
        micro-batch of a step that updates the policy."""
        plan = batch.mix_plan
        if plan is None or not plan.lam_pending:
            return plan
        if plan.update_pairs is not None:
            self._pieces.append(pairs_of(batch, plan.update_pairs))
            mixed_by_model = self._pieces[-1].plan is not None
            self._total = batch.step_samples if mixed_by_model else plan.update_total
            self._clean = batch.clean
        with torch.no_grad():
            lam = self.policy(batch.targets, batch.targets[plan.partner], plan.lam)
        return plan.with_lam(lam)

    def update(self, bad: Tensor, lr: float) -> None:
        """Updates the policy, where the step has clean samples. Called between the step's backward
        pass and its update.

        Args:
            bad: () bool on the device, the same on all ranks; where true, the policy stays as it
                is.
            lr: the step's learning rate.
        """
        if self._clean is None:
            return
        pieces, clean, self._pieces, self._clean = self._pieces, self._clean, [], None
        if pieces[0].plan is None:
            pieces = [Pairs(*map(torch.cat, list(zip(*pieces, strict=True))[:-1]))]
        lams = [self.policy(piece.targets, piece.partners, piece.lam) for piece in pieces]
        detached = [lam.detach() for lam in lams]
        hypergradients = self.virtual.step_hypergradients(pieces, detached, self._total, clean, lr)
        self.policy.update(
            torch.cat(lams), torch.cat(hypergradients), bad, exchange=self.virtual.exchange
        )

    def mean_lambda(self) -> Tensor:
        """(classes, classes), see MixupPolicy."""
        return self.policy.mean_lambda()

    def state_dict(self) -> dict[str, Tensor]:
        return self.policy.saved_tensors()

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        self.policy.load_tensors(tensors)


class SampleMixup:
    """A lambda for every pair: from a random start, one step down the hypergradient. Has no state.

    Args:
        step: root mean square of the changes of lambda in a micro-batch. The hypergradient has no
            natural scale, so a learning rate would mean nothing.
    """

    def __init__(self, virtual: VirtualStep, step: float):
        self.virtual, self.step = virtual, step

    def choose(self, batch, lr: float) -> MixPlan | None:
        """The micro-batch's plan with its lambda filled in."""
        plan = batch.mix_plan
        if plan is None or not plan.lam_pending:
            return plan
        hypergradient = self.virtual.batch_hypergradient(pairs_of(batch), plan.lam, batch.clean, lr)
        return plan.with_lam(descend(plan.lam, hypergradient, self.step))

    def update(self, bad: Tensor, lr: float) -> None:
        pass

    def mean_lambda(self) -> None:
        return None

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        pass


def unmixed(targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(targets, partners' targets, lambda) of samples that are not mixed, (n,) each."""
    return targets, targets, torch.ones(len(targets), device=targets.device)


def descend(lam: Tensor, hypergradient: Tensor, step: float) -> Tensor:
    """lam - step * g / rms(g), clamped to [0, 1]; lam itself if g is 0 or not finite. All (n,)."""
    rms = hypergradient.square().mean().sqrt()
    usable = torch.isfinite(rms) & (rms > 0)
    moved = (lam - step * hypergradient / rms).clamp(0, 1)
    return torch.where(usable, moved, lam)


def sum_over_ranks(exchange: Exchange, tensors: list[Tensor]) -> list[Tensor]:
    """Sums each tensor over the ranks, in one collective per dtype."""
    if exchange.size == 1:
        return tensors
    result = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = exchange.sum(torch.cat([tensors[i].flatten() for i in places]))
        parts = flat.split([tensors[i].numel() for i in places])
        for i, part in zip(places, parts, strict=True):
            result[i] = part.view(tensors[i].shape)
    return result


def pairs_of(batch, places: Tensor | slice = slice(None)) -> Pairs:
    """The pairs at `places`, (m,) int64, of the micro-batch; all of them for texts, since the model
    mixes these and needs the partners, wherever they are."""
    plan, inputs, targets = batch.mix_plan, batch.inputs, batch.targets
    if not isinstance(inputs, Tensor):
        return Pairs(inputs, None, targets, targets[plan.partner], plan.lam, plan)
    partner = plan.partner[places]
    own, lam = inputs[places], plan.lam[places]
    return Pairs(own, inputs[partner], targets[places], targets[partner], lam)
