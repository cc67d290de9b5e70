"""`--strategy ddp`: PyTorch's DistributedDataParallel."""

import contextlib
import inspect

from torch import nn

from utils.distributed.exchange import ProcessExchange
from utils.distributed.strategies.base import Synchronous


class DDP(Synchronous):
    """Every rank has the whole model; gradients are averaged while the backward pass goes on.

    After its first backward pass PyTorch's DistributedDataParallel sorts its buckets anew, by the
    order in which gradients became ready. With three or more ranks that changes the order of
    additions, so a resumed run would differ in the last bits. The trainer therefore runs one pass
    without effect before the first step (`adds_in_order`).
    """

    adds_in_order = False
    exchange: ProcessExchange

    def wrap(self, model: nn.Module, unfreezes: bool = False) -> nn.Module:
        super().wrap(model)
        if unfreezes:
            # `find_unused_parameters`, set below, makes PyTorch keep its buckets in their first
            # order.
            self.adds_in_order = True
        self.wrapped = nn.parallel.DistributedDataParallel(
            model,
            process_group=self.exchange.group,
            **{_sync_buffers(): False},  # they are averaged in every step (see Strategy.agree)
            gradient_as_bucket_view=True,
            find_unused_parameters=unfreezes,
        )
        return self.wrapped

    def substitute(self, module: nn.Module) -> nn.Module:
        self.wrapped.module = module
        return self.wrapped

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if last else self.wrapped.no_sync()


def _sync_buffers() -> str:
    """DistributedDataParallel's name for sending rank 0's buffers to all in every forward pass."""
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
