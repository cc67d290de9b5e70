"""Meta-mixup: lambda is chosen so that a step on mixed samples lowers the loss on clean ones.

MetaMixUp: Mai, Hu, Chen, Shen and Shen (2019), arXiv:1908.10059; the derivative is in
hypergradient.py. Two forms, alike to the trainer: `PolicyMixup` trains a policy (policy.py)
every few steps, `SampleMixup` chooses a lambda for every pair anew, as the paper does.

The virtual step is one of plain gradient descent at the present learning rate, whatever the
optimizer. It is taken by copies: BatchNorm's statistics, random states, gradients and the
optimizer are as they were.

With several processes the policy looks at pairs of all of them. Each has some of the pairs and of
the clean samples; the gradient of the clean loss and that of the policy are added up over them, so
that the policy is the same on all, and the one of a single process with the same step.
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from utils.exchange import Exchange
from utils.mixup.hypergradient import (
    Weights,
    exact_hypergradient,
    exact_product,
    fast_hypergradient,
    fast_product,
    gradient_at,
)
from utils.mixup.mixing import MixPlan, mix_pairs
from utils.mixup.policy import MixupPolicy
from utils.model_tensors import ModelTensors

Clean = tuple[Tensor | tuple, Tensor]  # inputs and targets


class Pairs(NamedTuple):
    """Samples and their partners, before they are mixed. Where the model mixes by itself, a whole
    micro-batch, in which the partners are."""

    own: Tensor | tuple  # (m, ...), or what the model takes
    other: Tensor | None  # (m, ...); None: the model mixes
    targets: Tensor  # (m,) int64
    partners: Tensor  # (m,) int64, the partners' classes
    lam: Tensor  # (m,) as in the plan
    plan: MixPlan | None = None  # where the model mixes


class VirtualStep:
    """The hypergradient of a model's lambda.

    Args:
        model: never a compiled wrapper. It is called with all its tensors replaced, and may lie on
            the meta device where `tensors` come from elsewhere.
        losses: (logits, targets, partners' targets, lambda) -> (n,).
        autocast: () -> context of the forward pass of the clean samples; that of the mixed ones is
            in the weights' own precision (see hypergradient.py).
        exact: by double backward.
        exchange: with the other ranks.
        tensors: of the model, or of the one that it is a copy of; None: the model's own.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
        autocast: Callable = contextlib.nullcontext,
        exact: bool = False,
        exchange: Exchange | None = None,
        tensors: ModelTensors | None = None,
    ):
        self.model, self.losses, self.autocast, self.exact = model, losses, autocast, exact
        self.exchange = exchange or Exchange()
        self.tensors = tensors or ModelTensors(model)

    def of_batch(self, pairs: Pairs, lam: Tensor, clean: Clean, lr: float) -> Tensor:
        """d (mean loss on the clean batch after a virtual step on these pairs) / d lam, (m,).
        Each rank's own: nothing is exchanged."""
        weights = self.tensors.weights()
        names = [name for name, weight in weights.items() if weight.requires_grad]
        call = self._call(weights, names)

        def clean_loss(at: Weights) -> Tensor:
            return self._clean_losses(call, at, clean).mean()

        def mixed(at: Weights, lam: Tensor) -> Tensor:
            return self._mixed_losses(call, at, pairs, lam).mean()

        find = exact_hypergradient if self.exact else fast_hypergradient
        return find(mixed, clean_loss, [weights[name] for name in names], lam, lr)

    def of_step(
        self, pieces: list[Pairs], lams: list[Tensor], total: int, clean: Clean, lr: float
    ) -> list[Tensor]:
        """The same after the step along the gradient of the whole optimizer step, which is known;
        collective.

        Args:
            pieces: of this rank, one at a time through the model; one may have no pairs.
            lams: of each.
            total: pairs of all pieces and ranks, over which the mixed loss is a mean.
            clean: this rank's share of the clean batch, which may be empty.
        Returns:
            d clean loss / d lam of each piece.
        """
        weights, gradients = self.tensors.weights(), self.tensors.gradients()
        call = self._call(weights, list(gradients))
        now = [weights[name].detach() for name in gradients]
        ahead = torch._foreach_sub(now, list(gradients.values()), alpha=lr)
        v = self._clean_gradient(call, ahead, clean)
        product = exact_product if self.exact else fast_product

        def of_piece(pairs: Pairs, lam: Tensor) -> Tensor:
            if pairs.plan is not None and not len(lam):  # no text; of pictures BatchNorm waits
                return torch.zeros_like(lam)

            def mixed(at: Weights, lam: Tensor) -> Tensor:
                return self._mixed_losses(call, at, pairs, lam).sum() / total

            return -lr * product(mixed, now, v, lam)

        return [of_piece(*each) for each in zip(pieces, lams, strict=True)]

    def _clean_gradient(self, call: Callable, at: Weights, clean: Clean) -> Weights:
        """Of the mean loss over the clean samples of all ranks."""
        inputs, targets = clean
        if len(targets) or isinstance(inputs, Tensor):
            # Even without a picture: BatchNorm over all ranks waits for this one.
            own = gradient_at(lambda at: self._clean_losses(call, at, clean).sum(), at)
        else:
            own = [torch.zeros_like(weight) for weight in at]
        count = at[0].new_full((), len(targets))
        *gradient, count = summed(self.exchange, [*own, count])
        return [part / count for part in gradient]

    def _clean_losses(self, call: Callable, at: Weights, clean: Clean) -> Tensor:
        inputs, targets = clean
        ones = torch.ones(len(targets), device=targets.device)
        return self.losses(call(at, self.autocast, inputs), targets, targets, ones)

    def _mixed_losses(self, call: Callable, at: Weights, pairs: Pairs, lam: Tensor) -> Tensor:
        if pairs.plan is None:
            inputs = (mix_pairs(pairs.own, pairs.other, lam),)
        else:
            inputs = (pairs.own, pairs.plan.with_lam(lam))
        found = call(at, contextlib.nullcontext, *inputs)
        return self.losses(found, pairs.targets, pairs.partners, lam)

    def _call(self, weights: dict[str, Tensor], names: list[str]) -> Callable[..., Tensor]:
        """(other weights under `names`, context, inputs) -> logits. The model counts in copies of
        its buffers, and every call draws the same random numbers, which dropout at both ends of a
        difference must do."""
        kept, of_model = {n: w.detach() for n, w in weights.items()}, self.tensors.buffers()

        def logits(at: Weights, context: Callable, *inputs) -> Tensor:
            buffers = {name: buffer.clone() for name, buffer in of_model.items()}
            tensors = kept | dict(zip(names, at, strict=True)) | buffers
            device = inputs[0].device
            devices = [device] if device.type == "cuda" else []
            with torch.random.fork_rng(devices), context():
                return functional_call(self.model, tensors, inputs)

        return logits


class PolicyMixup:
    """Lambda from a policy, which is updated in the steps whose batches bring clean samples.

    Args:
        policy: on the model's device.
        virtual: of the model.
    """

    def __init__(self, policy: MixupPolicy, virtual: VirtualStep):
        self.policy, self.virtual = policy, virtual
        self._pieces: list[Pairs] = []  # of the micro-batches of a step
        self._total = 0  # pairs that are looked at in the step, by all ranks
        self._clean: Clean | None = None

    def choose(self, batch, lr: float) -> MixPlan | None:
        """The plan of a micro-batch, with its lambda. The batch has inputs, targets, mixing, clean
        and step_samples; the last one of a step that is looked at has the clean samples."""
        plan = batch.mixing
        if plan is None or not plan.learned:
            return plan
        if plan.looked_at is not None:
            self._pieces.append(_pairs(batch, plan.looked_at))
            inside = self._pieces[-1].plan is not None
            self._total = batch.step_samples if inside else plan.pairs
            self._clean = batch.clean
        with torch.no_grad():
            lam = self.policy(batch.targets, batch.targets[plan.partner], plan.lam)
        return plan.with_lam(lam)

    def update(self, bad: Tensor, lr: float) -> None:
        """After the backward pass of a step and before its update, at its learning rate; `bad`,
        () bool on the device and the same on all ranks, leaves the policy as it is."""
        if self._clean is None:
            return
        pieces, clean, self._pieces, self._clean = self._pieces, self._clean, [], None
        if pieces[0].plan is None:
            pieces = [Pairs(*map(torch.cat, list(zip(*pieces, strict=True))[:-1]))]
        lams = [self.policy(piece.targets, piece.partners, piece.lam) for piece in pieces]
        now = [lam.detach() for lam in lams]
        hypergradients = self.virtual.of_step(pieces, now, self._total, clean, lr)
        self.policy.update(
            torch.cat(lams), torch.cat(hypergradients), bad, exchange=self.virtual.exchange
        )

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
        downhill = self.virtual.of_batch(_pairs(batch), plan.lam, batch.clean, lr)
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


def summed(exchange: Exchange, tensors: list[Tensor]) -> list[Tensor]:
    """Each of the tensors over the ranks, in one collective for each dtype."""
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


def _pairs(batch, places: Tensor | slice = slice(None)) -> Pairs:
    """Those at (m,) int64 `places` of the micro-batch. Of texts always all: the model finds the
    partners, wherever they are."""
    plan, inputs, targets = batch.mixing, batch.inputs, batch.targets
    if not isinstance(inputs, Tensor):
        return Pairs(inputs, None, targets, targets[plan.partner], plan.lam, plan)
    partner = plan.partner[places]
    own, lam = inputs[places], plan.lam[places]
    return Pairs(own, inputs[partner], targets[places], targets[partner], lam)
