"""Online natural-gradient descent."""

from __future__ import annotations

from itertools import zip_longest

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...exchange import Exchange
from ...machine.backends import float32_products
from ..found_inf import is_on_host
from ..multi_tensor import Flags, is_expanded, loss_of
from .batch import AdamParameters, Batch, is_plain, kind_of
from .batched_fisher import FISHER, AxisBatch, renew_multipliers_, update_
from .shares import Shares, shares_of
from .stack import Stack, in_stacks

AXES = ("patch", "kernel", "all", "channels")
NORMS = ("gradient", "fixed")
PRODUCTS = ("float32", "fast")
POWERS = (1.0, 0.5)


class NGD(Optimizer):
    """Natural gradients with momentum, in the paper's form or one that trains better.

    The gradient of a weight is multiplied by a power of the inverse of a Fisher matrix, which is
    the scatter of past gradients, so that directions in which gradients are large and noisy are
    slowed down and the others count for more; then it is scaled, to its own norm or a fixed one
    (`norm`). The Fisher matrix is a Kronecker product of one matrix for each axis of the tensor
    (output channels, input channels, rows and columns of a kernel), each a multiple of the identity
    plus a part of low rank, which makes a step cost a few matrix products. Source: Povey, Zhang and
    Khudanpur, "Parallel training of DNNs with natural gradient and parameter averaging" (2015),
    arXiv:1410.7455; `fisher.py` has the equations. Parameters with fewer than two axes longer than
    1 (biases, the scales of norms) have no Fisher matrix.

    The defaults are the paper's: SGD with momentum of natural gradients.

        g = gradient + weight_decay * p         or, decoupled: p = (1 - lr * weight_decay) * p
        g = |g| * direction of (G_1^-1 x G_2^-1 x ...) g
        b = momentum * b + (1 - dampening) * g
        p = p - lr * (g + momentum * b)         or, without nesterov: p = p - lr * b

    With `momentum_first` it is the momentum of plain gradients that is preconditioned, so that no
    noisy step is scaled to full length before it is averaged with others, and each step has the
    length that `norm` says. With power=0.5, alpha=0.01, norm="fixed", decoupled=True and `adam` for
    what has no Fisher matrix this is what --ngd trains with; `build_optimizer("ngd", model, lr=...,
    weight_decay=...)` of utils/optim/factory.py makes it, groups included.

        g = gradient + weight_decay * p         or, decoupled, as above
        b = momentum * b + (1 - dampening) * g
        g = g + momentum * b                    or, without nesterov: g = b
        p = p - lr * |g| * direction of (G_1^-power x G_2^-power x ...) g

    It is used like torch.optim.SGD, and with alpha -> infinity it is SGD. The host never waits for
    a GPU in a step. Attributes that PyTorch's own fused optimizers honour are honoured: with
    `found_inf`, a float tensor (), 1, parameters and state stay as they are; gradients are divided
    by `grad_scale` (so torch.amp.GradScaler works without a wait).

    State, a tensor each: `momentum_buffer`, of the parameter's shape and dtype, and for each axis
    k `basis_k` (r, D), `spectrum_k` (r, r) and `rest_k` (), float32 (float64 for float64
    parameters); and `step`, an int: its steps so far, which time the updates of the Fisher
    matrices. (On a GPU skipped steps count, too, since the host does not know of them.) Groups with
    `adam` have the state of torch.optim.AdamW, see `AdamParameters`.

    Over several ranks, all of which step the same parameters with the same reduced gradients, each
    rank computes about 1 / N of the updates of Fisher matrices and sends them to the others
    (`shares.py`): all have the same state at all times, and take the steps that one process
    would. Of a parameter that is divided by rows (FSDP), of its gradient and of its
    `momentum_buffer`, each rank has its rows; Fisher matrices, directions and norms are
    those of whole tensors, which are in memory for one batch of parameters at a time.

    Args:
        params: parameters or groups, as of any optimizer; all settings may differ by group.
        lr: step size.
        momentum, nesterov, dampening: as in torch.optim.SGD.
        weight_decay: weight_decay * p is added to the gradient before that is preconditioned.
        decoupled: p shrinks by lr * weight_decay of itself instead.
        alpha: damping: the multiple of its mean diagonal that is added to a Fisher matrix.
            Larger is nearer to SGD.
        rank: of the part of low rank, below the axis's length D; None: min((D + 1) // 2, 80).
        update_period: steps between two updates of the Fisher matrices, after the first ten.
        eta: weight of the newest gradient in their running mean, in (0, 1].
        axes: "all"; "kernel", in which all positions of a kernel (rows, columns) are one axis;
            "patch", in which these and the input channels are one, as in K-FAC (Grosse and Martens,
            "A Kronecker-factored approximate Fisher matrix for convolution layers" (2016),
            arXiv:1602.01407); or "channels", the first two alone (output and input).
        norm: "gradient": a step is as long as the gradient (times lr), the paper's choice; biases
            and the like take plain momentum. "fixed": 0.2 lr is the root mean square of every
            tensor's step before momentum, whatever the gradient's size, so that lr means what it
            means to AdamW and Muon, and weight decay is better decoupled.
        power: of the inverse of each axis's matrix: 1, the paper's, or 1/2, which holds long axes
            down less and takes a smaller alpha, such as .01 (see fisher.py).
        momentum_first: momentum comes before the Fisher matrices, not after them; their scatter is
            then that of the averaged gradients.
        adam: all parameters of the group take AdamW's steps, with its `lr` and
            `weight_decay`: for embeddings, norms and biases.
        orthogonal: natural gradients of matrices, which with axes "patch" kernels are, too, are
            orthogonalised as in Muon (`orthogonalize_` of muon_steps.py), then scaled to `norm`.
        products: precision of the factors in products with gradients: "float32", or "fast", that of
            matrix units (TF32 on a GPU, bfloat16 on a CPU that has them), summed in float32.
            Gradients that were computed in bfloat16 are no more precise than that.
        exchange: the other ranks. A copy by pickle or deepcopy is for a single process.

    Raises:
        ValueError: a setting is out of range.
        RuntimeError: in `step`, a gradient is sparse or complex, elements of a parameter share
            memory (`expand`), or the state is of another `rank`.

    A parameter may be a view that leaves out elements of a larger tensor: it is stepped in a copy,
    which is kept, and the others are not written. Its `momentum_buffer` is contiguous.

    State is restored by `load_state_dict`. Whenever other parameters have gradients than in the
    step before, tensors are stacked anew, at about the cost of an update of the matrices.
    """

    _step_supports_amp_scaling = True  # tells GradScaler to hand over found_inf and grad_scale
    _exchange = Exchange()
    captured = False  # with step_kind and count_step: CountsOnHost of engines/graphed_step.py

    def __init__(
        self,
        params,
        lr: float = 0.1,
        momentum: float = 0.9,
        nesterov: bool = True,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        alpha: float = 4.0,
        rank: int | None = None,
        update_period: int = 4,
        eta: float = 0.1,
        axes: str = "all",
        norm: str = "gradient",
        power: float = 1.0,
        momentum_first: bool = False,
        adam: bool = False,
        orthogonal: bool = False,
        products: str = "float32",
        exchange: Exchange | None = None,
    ):
        settings = {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "dampening": dampening,
            "weight_decay": weight_decay, "decoupled": decoupled, "alpha": alpha, "rank": rank,
            "update_period": update_period, "eta": eta, "axes": axes, "norm": norm,
            "power": power, "momentum_first": momentum_first, "adam": adam,
            "orthogonal": orthogonal, "products": products,
        }  # fmt: skip
        self._exchange = exchange or Exchange()
        self._batches: list[Batch] = []
        self._stacks: list[Stack] = []
        self._adams: list[AdamParameters] = []
        self._shares: list[Shares] = []
        self._signature: tuple | None = None
        self._held: list[Tensor] = []  # the tensors of the state after `_gather`
        super().__init__(params, settings)

    def add_param_group(self, param_group: dict) -> None:
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # of another optimizer, or of an older version of this
            for name in self.defaults.keys() - {"differentiable"}:  # PyTorch's own
                group.setdefault(name, self.defaults[name])
        self._batches, self._stacks, self._adams, self._signature = [], [], [], None

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        # PyTorch has given all of it the dtype of its parameter; Fisher matrices have their own.
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(saved, own, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if name.startswith(FISHER):
                    kind = kind_of(parameter)
                    self.state[parameter][name] = value.to(**kind)

    @torch.no_grad()
    def step(self, closure=None):
        """One step. `closure`: zeroes the gradients, computes the loss and returns it."""
        loss = loss_of(closure)
        flag = getattr(self, "found_inf", None)
        if flag is not None and is_on_host(flag) and flag:
            return loss
        parameters = (p for group in self.param_groups for p in group["params"])
        device = next((p.device.type for p in parameters), "cpu")
        # The same results under autocast, and whatever precision the process has set for products.
        with torch.autocast(device, enabled=False), float32_products("float32"):
            self._step()
        if not self.captured:
            self.count_step()
        return loss

    @property
    def step_kind(self) -> tuple:
        """Which batches update their Fisher matrices, and which have momentum."""
        return tuple((batch.updates_now, batch.step > 0) for batch in self._batches)

    def count_step(self) -> None:
        for batch in self._batches:
            batch.step += 1
            for parameter in batch.parameters:
                self.state[parameter]["step"] = batch.step

    def _step(self) -> None:
        self._gather()
        stepped: list[AdamParameters | Stack] = [*self._adams, *self._stacks]
        for parameters in stepped:
            parameters.step_(Flags.of(self, parameters.device))
        due: dict[tuple, list[Batch]] = {}
        for batch in self._batches:
            if batch.updates_now and not batch.is_plain:
                due.setdefault(batch.together, []).append(batch)
        for (device, *_), batches in due.items():
            axes = [axis for batch in batches for axis in batch.axes if axis.is_ours]
            update_(axes, Flags.of(self, device).left_out)
        for shares in self._shares:
            if shares.updates_now:
                shares.exchange_()

    def _gather(self) -> None:
        """Rebuilds the batches if parameters, settings or state are not those of the last step."""
        present, settings = [], []
        for number, group in enumerate(self.param_groups):
            settings.append([group["momentum"] > 0] + [group[name] for name in _OF_BATCHES])
            present += [(number, p) for p in group["params"] if p.grad is not None]
        signature = [(number, id(p), p.stride()) for number, p in present], settings
        if signature == self._signature and all(
            one is other for one, other in zip_longest(self._held, self._tensors_of(present))
        ):
            if any([batch.follow_settings() for batch in self._batches]):
                self._renew_multipliers()
            return
        members: dict[tuple, list[Tensor]] = {}
        adams: dict[tuple, list[Tensor]] = {}
        for number, parameter in present:
            if parameter.grad.is_sparse or parameter.is_complex():
                raise RuntimeError("NGD takes dense, real gradients only")
            if is_expanded(parameter):
                raise RuntimeError(
                    "NGD cannot step a parameter whose elements share memory, as after expand(): "
                    "give it a copy of its own (clone)"
                )
            if self.param_groups[number]["adam"]:
                adams.setdefault((number, parameter.device, parameter.dtype), []).append(parameter)
                continue
            step = self.state[parameter].get("step", 0)
            shape, divided = self._exchange.shape(parameter), self._exchange.is_divided(parameter)
            if is_plain(shape, self.param_groups[number]):
                shape = None
            kind = (number, parameter.device, parameter.dtype, shape, divided, step)
            members.setdefault(kind, []).append(parameter)
        self._batches = [
            Batch(self.param_groups[kind[0]], parameters, self.state, kind[-1], self._exchange)
            for kind, parameters in members.items()
        ]
        self._adams = [
            AdamParameters(self.param_groups[kind[0]], parameters, self.state)
            for kind, parameters in adams.items()
        ]
        self._shares = shares_of(self._batches, self._exchange)
        self._renew_multipliers()
        # Memory for the stacked gradients of one stack after another, before and after a product;
        # kept, since fresh memory is slow.
        self._stacks, self._workspaces = [], []
        kinds: dict[tuple, list[Batch]] = {}
        for batch in self._batches:
            kinds.setdefault((batch.device, batch.dtype), []).append(batch)
        for (device, dtype), batches in kinds.items():
            stacks = in_stacks(batches)
            sizes = (max(sum(b.sizes[i] for b in stack) for stack in stacks) for i in (0, 1))
            pair = [torch.empty(size, device=device, dtype=dtype) for size in sizes]
            self._workspaces += pair
            self._stacks += [Stack(stack, self.state, *pair) for stack in stacks]
        self._signature, self._held = signature, self._tensors_of(present)

    def _tensors_of(self, present: list[tuple[int, Tensor]]) -> list[Tensor]:
        of_each = (self.state[parameter].values() for _, parameter in present)
        return [value for values in of_each for value in values if isinstance(value, Tensor)]

    def _renew_multipliers(self) -> None:
        """As the updates do, those together that update together: on a GPU the rounding of a matrix
        depends on how many are multiplied at once, and a resumed run would be another one."""
        together: dict[tuple, list[AxisBatch]] = {}
        for batch in self._batches:
            together.setdefault(batch.together, []).extend(batch.axes)
        for axes in together.values():
            renew_multipliers_(axes)


def _whole(value) -> bool:
    return isinstance(value, int) and value >= 1


def _check(settings: dict) -> None:
    wrong = [
        f"{name} {settings[name]} is not {meaning}"
        for name, (holds, meaning) in _SETTINGS.items()
        if not holds(settings[name])
    ]
    if settings["nesterov"] and (settings["momentum"] == 0 or settings["dampening"] != 0):
        wrong.append("nesterov needs a momentum above 0 and no dampening; or give nesterov=False")
    if wrong:
        raise ValueError(f"NGD: {wrong[0]}")


def _is_bool(value) -> bool:
    return isinstance(value, bool)


# The settings of a group, and what each may be.
_SETTINGS = {
    "lr": (lambda value: value >= 0, "0 or more"),
    "momentum": (lambda value: 0 <= value < 1, "from 0 to below 1"),
    "nesterov": (_is_bool, "true or false"),
    "dampening": (lambda value: 0 <= value <= 1, "from 0 to 1"),
    "weight_decay": (lambda value: value >= 0, "0 or more"),
    "decoupled": (_is_bool, "true or false"),
    "alpha": (lambda value: 0 < value < float("inf"), "above 0 and finite"),
    "rank": (lambda value: value is None or _whole(value), "a whole number above 0, or None"),
    "update_period": (_whole, "a whole number above 0"),
    "eta": (lambda value: 0 < value <= 1, "above 0, up to 1"),
    "axes": (lambda value: value in AXES, f"one of {', '.join(AXES)}"),
    "norm": (lambda value: value in NORMS, f"one of {', '.join(NORMS)}"),
    "power": (lambda value: value in POWERS, "1 or 0.5"),
    "momentum_first": (_is_bool, "true or false"),
    "adam": (_is_bool, "true or false"),
    "orthogonal": (_is_bool, "true or false"),
    "products": (lambda value: value in PRODUCTS, f"one of {', '.join(PRODUCTS)}"),
}
# Settings on which batches depend: they are rebuilt if one changes.
_OF_BATCHES = (
    "rank", "axes", "norm", "power", "momentum_first", "adam", "orthogonal", "update_period",
)  # fmt: skip
