"""`--strategy ddp`: PyTorch's DistributedDataParallel."""

import contextlib
import inspect

from torch import nn

from ..exchange import ProcessExchange
from .base import Synchronous


class DDP(Synchronous):
    """Every rank has the whole model; gradients are averaged while the backward pass goes on.

    After its first backward pass PyTorch's DistributedDataParallel sorts its buckets anew, by the
    order in which gradients became ready. With three or more ranks that changes the order of
    additions, so a resumed run would differ in the last bits. The trainer therefore runs one pass
    without effect before the first step (`adds_in_order`).
    """

    adds_in_order = False
    exchange: ProcessExchange

    def __init__(self, model: nn.Module, exchange: ProcessExchange, unfreezes: bool = False):
        super().__init__(model, exchange, unfreezes)
        if unfreezes:
            # `find_unused_parameters`, set below, makes PyTorch keep its buckets in their first
            # order.
            self.adds_in_order = True
        self.called = nn.parallel.DistributedDataParallel(
            model,
            process_group=exchange.group,
            **{_sync_buffers(): False},  # they are averaged in every step (see Strategy.agree)
            gradient_as_bucket_view=True,
            find_unused_parameters=unfreezes,
        )

    def substitute(self, module: nn.Module) -> nn.Module:
        self.called.module = module
        return self.called

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if last else self.called.no_sync()


def _sync_buffers() -> str:
    """DistributedDataParallel's name for sending rank 0's buffers to all in every forward pass."""
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
