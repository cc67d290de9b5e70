"""How a model is spread over processes: not at all, whole on each (DDP), or divided (FSDP).

The trainer and what it hands on know a model's parameters by `parameters`, ordinary tensors on
this rank's device, and never the wrapper. With FSDP these are the rows of each parameter that the
rank holds: they share memory with PyTorch's own DTensors, which only this module sees, so that
every optimizer that works element by element works as it is (torch.distributed has no fused SGD
for DTensors), and NGD, which needs whole matrices, asks the `Exchange` for them.
"""

import contextlib
import copy
import inspect

import torch
from torch import Tensor, nn

from utils.distributed.exchange import Rows
from utils.errors import UserError
from utils.exchange import Exchange


class Single:
    """One process: the model as it is. The other strategies change what differs.

    Attributes:
        model: with its canonical names.
        parameters: {name: what the optimizer steps}.
        divided: whether these are parts.
        adds_in_order: whether gradients are added in the same order in every step from the first
            one (see DDP).
        skeleton: the model whole, to be called with other weights (torch.func.functional_call).
    """

    divided, adds_in_order = False, True

    def __init__(self, exchange: Exchange | None = None):
        self.exchange = exchange or Exchange()

    def wrap(self, model: nn.Module, unfreezes: bool = False) -> nn.Module:
        """What the objective calls in place of `model`, which is on its device already.

        Args:
            unfreezes: parameters that need no gradient now will do so later.
        """
        self.model = self.skeleton = model
        self.parameters = dict(model.named_parameters())
        return model

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager:
        """Around forward and backward of one; gradients are exchanged in the last one of a step,
        and after it are sums over all ranks divided by their number."""
        return contextlib.nullcontext()

    def collect_gradients(self) -> None:
        """After the backward passes of a step: the gradients are in `parameters`."""

    def drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def norm(self, norm: Tensor) -> Tensor:
        """Of the whole gradient, from that of this rank's, ()."""
        return norm

    def own(self, parameter: Tensor) -> Tensor:
        """What the optimizer steps in place of a parameter of `model`."""
        return parameter

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers under their canonical names, as this rank holds them."""
        return self.model.state_dict()

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Puts whole tensors into the model.

        Raises:
            UserError: they are of another model; nothing is changed.
        """
        own, exchange = self.tensors() | self.parameters, self.exchange
        shapes = {name: tuple(exchange.shape(tensor)) for name, tensor in own.items()}
        wrong = [f"{name} is missing" for name in own if name not in tensors]
        wrong += [f"there is no {name} in the model" for name in tensors if name not in own]
        wrong += [
            f"{name} is {tuple(tensors[name].shape)}, in the model {shape}"
            for name, shape in shapes.items()
            if name in tensors and tuple(tensors[name].shape) != shape
        ]
        if wrong:
            more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise UserError(f"the checkpoint does not fit the model: {'; '.join(wrong[:3])}{more}")
        for name, tensor in own.items():
            tensor.copy_(exchange.part(tensor, tensors[name]))
        self.weights_changed()

    def weights_changed(self) -> None:
        """To be called after the weights were written to by others than the optimizer."""

    # ---- what meta-mixup calls the skeleton with (see ModelTensors in mixup/meta.py) ----

    def weights(self) -> dict[str, Tensor]:
        """All parameters, whole; `requires_grad` tells which ones train."""
        return dict(self.parameters)

    def gradients(self) -> dict[str, Tensor]:
        """Whole, of those that have one."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def buffers(self) -> dict[str, Tensor]:
        return dict(self.model.named_buffers())


class DDP(Single):
    """Every rank has the whole model; gradients are averaged while the backward pass goes on.

    After its first backward pass PyTorch's DistributedDataParallel sorts its buckets by the order
    in which gradients came. From three ranks on that changes the order in which numbers are added,
    so a resumed run would differ in the last bits: the trainer does one pass for nothing before
    the first step (`adds_in_order`).
    """

    adds_in_order = False

    def wrap(self, model: nn.Module, unfreezes: bool = False) -> nn.Module:
        super().wrap(model)
        if unfreezes:
            # Parameters that take part later belong to the buckets from the start: then these are
            # never sorted anew.
            self.adds_in_order = True
        self.wrapped = nn.parallel.DistributedDataParallel(
            model,
            process_group=self.exchange.group,
            **{_sync_buffers(): False},  # they are averaged in every step (see Guard.agree)
            gradient_as_bucket_view=True,
            find_unused_parameters=unfreezes,
        )
        return self.wrapped

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if last else self.wrapped.no_sync()


class FSDP(Single):
    """Every rank holds some rows of each parameter, of its gradient and of the optimizer's state;
    a layer's weights are gathered when it is their turn (FSDP2, `fully_shard`)."""

    divided = True

    def wrap(self, model: nn.Module, unfreezes: bool = False) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if unfreezes:
            raise UserError("--unfreeze_epoch: --strategy fsdp cannot thaw a model; take ddp")
        device = next(model.parameters()).device.type
        self.skeleton = copy.deepcopy(model).to("meta")
        model.to(memory_format=torch.contiguous_format)  # it divides no other parameters
        mesh = init_device_mesh(device, (self.exchange.size,))
        for unit in _units(model):
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.model, self.parameters, self._of = model, {}, {}
        for name, parameter in model.named_parameters():
            local = parameter.to_local().detach()
            own = nn.Parameter(local, requires_grad=parameter.requires_grad)
            start = min(-(-len(parameter) // self.exchange.size) * self.exchange.rank,
                        len(parameter))  # fmt: skip
            self.exchange.divide(own, Rows(parameter.shape, start, start + len(local)))
            self.parameters[name] = self._of[parameter] = own
        return model

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager:
        self.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def collect_gradients(self) -> None:
        for parameter, own in self._of.items():
            own.grad = None if parameter.grad is None else parameter.grad.to_local()

    def drop_gradients(self) -> None:
        super().drop_gradients()
        for parameter in self._of:
            parameter.grad = None

    def norm(self, norm: Tensor) -> Tensor:
        return self.exchange.sum(norm.square()).sqrt()

    def own(self, parameter: Tensor) -> Tensor:
        return self._of[parameter]

    def tensors(self) -> dict[str, Tensor]:
        return self.parameters | dict(self.model.named_buffers())

    def weights_changed(self) -> None:
        # Its outermost layers stay whole from the end of a forward pass to the backward pass,
        # which an evaluation does not have.
        self.model.reshard()

    def weights(self) -> dict[str, Tensor]:
        whole = self.exchange.whole
        return {
            name: whole(part, part.detach()).requires_grad_(part.requires_grad)
            for name, part in self.parameters.items()
        }

    def gradients(self) -> dict[str, Tensor]:
        parts = super().gradients()
        return {
            name: self.exchange.whole(self.parameters[name], part) for name, part in parts.items()
        }


def _sync_buffers() -> str:
    """DistributedDataParallel's name for sending rank 0's buffers to all in every forward pass."""
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"


def build_strategy(name: str, exchange: Exchange) -> Single:
    """`name`: ddp or fsdp; no effect where `exchange` is of a process alone."""
    kinds = {"ddp": DDP, "fsdp": FSDP}
    return kinds[name](exchange) if exchange.size > 1 else Single(exchange)


def _units(model: nn.Module) -> list[nn.Module]:
    """What is gathered at once: the members of the model's lists and sequences of layers."""
    lists = [m for m in model.children() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    return [unit for layers in lists for unit in layers if any(True for _ in unit.parameters())]
