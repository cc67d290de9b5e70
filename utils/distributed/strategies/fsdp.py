"""`--strategy fsdp`: PyTorch's FSDP2 (`fully_shard`).

`parameters` are the rows of each parameter that the rank holds. They share memory with PyTorch's
own DTensors, which only this module sees, so that every optimizer that works element by element
works as it is (torch.distributed has no fused SGD for DTensors), and NGD, which needs whole
matrices, asks the `Exchange` for them.
"""

import contextlib
import copy

import torch
from torch import Tensor, nn

from ...errors import UserError
from ...exchange import Rows
from ...model_tensors import names_of_shared
from ...models.parts import blocks_of
from ..exchange import ProcessExchange
from .base import Synchronous, saved_buffers


class FSDP(Synchronous):
    """Every rank holds some rows of each parameter, of its gradient and of the optimizer's state;
    a layer's weights are gathered when it is their turn (FSDP2, `fully_shard`)."""

    divided = True
    exchange: ProcessExchange

    def __init__(self, model: nn.Module, exchange: ProcessExchange, unfreezes: bool = False):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        assert not unfreezes, "the settings refuse it"
        for name, first_name in names_of_shared(model).items():
            raise UserError(
                f"--strategy fsdp cannot divide a model with shared weights ({first_name} is also "
                f"{name}): take --strategy ddp"
            )
        device = next(model.parameters()).device.type
        skeleton = copy.deepcopy(model).to("meta")
        model.to(memory_format=torch.contiguous_format)  # fully_shard takes no other
        mesh = init_device_mesh(device, (exchange.size,))
        for unit in blocks_of(model):
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
        super().__init__(model, exchange, unfreezes)
        self.skeleton = skeleton
        self._rows_of = {}  # parameter of the model, a DTensor -> this rank's rows of it
        for parameter in self.parameters.values():
            local = parameter.to_local().detach()
            rows = nn.Parameter(local, requires_grad=parameter.requires_grad)
            start = min(-(-len(parameter) // exchange.size) * exchange.rank, len(parameter))
            exchange.divide(rows, Rows(parameter.shape, start, start + len(local)))
            self._rows_of[parameter] = rows
        self.parameters = {name: self._rows_of[p] for name, p in self.parameters.items()}

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager:
        self.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def collect_gradients(self) -> None:
        for parameter, rows in self._rows_of.items():
            rows.grad = None if parameter.grad is None else parameter.grad.to_local()

    def drop_gradients(self) -> None:
        super().drop_gradients()
        for parameter in self._rows_of:
            parameter.grad = None

    def norm(self, rank_norm: Tensor) -> Tensor:
        return self.exchange.sum(rank_norm.square()).sqrt()

    def optimized_tensor(self, parameter: Tensor) -> Tensor:
        return self._rows_of[parameter]

    def tensors(self) -> dict[str, Tensor]:
        return self.parameters | saved_buffers(self.model)

    def weights_changed(self) -> None:
        # FSDP keeps the outermost layers whole from the forward to the backward pass. After an
        # evaluation, which has no backward pass, they would be out of date.
        self.model.reshard()

    def weights(self) -> dict[str, Tensor]:
        whole = self.exchange.whole
        return {
            name: whole(part, part.detach()).requires_grad_(part.requires_grad)
            for name, part in self.parameters.items()
        }

    def gradients(self) -> dict[str, Tensor]:
        whole = self.exchange.whole
        return {
            name: whole(part, part.grad)
            for name, part in self.parameters.items()
            if part.grad is not None
        }
