"""BatchNorm's running statistics, estimated anew for a mean of several models.

The mean of the models' own statistics is not right for their mean weights: Izmailov et al.,
"Averaging Weights Leads to Wider Optima and Better Generalization" (2018), arXiv:1803.05407,
section 3.2. Gu et al., arXiv:2310.14423, do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...data.loader import Loader
from ...exchange import Exchange
from ...local.workers import Workers
from ...machine.backends import search_plans


class NormStatistics:
    """Estimates the running statistics of a model's BatchNorms.

    Args:
        model: its BatchNorms have running statistics.
        logits: (inputs, mixing plan) -> logits: a forward pass of `model`.
        loaders: of the training split, for each worker of this process.
        batches: micro-batches from which the statistics are estimated, of all workers.
        workers: which of them this process has.
        exchange: with the other processes.
    """

    def __init__(
        self,
        model: nn.Module,
        logits: Callable,
        loaders: Sequence[Loader],
        batches: int,
        workers: Workers,
        exchange: Exchange,
    ):
        self.model, self.logits, self.loaders = model, logits, loaders
        self.batches, self.workers, self.exchange = batches, workers, exchange

    @torch.no_grad()
    def estimate(self, step: int) -> None:
        """Overwrites the running statistics by the plain mean over micro-batches of the epoch of
        this step, augmented and mixed as in training. Statistics of frozen BatchNorms stay.
        Collective."""
        norms = [module for module in self.model.modules() if _is_trained(module)]
        if not norms:
            return
        training = {module: module.training for module in self.model.modules()}
        momentum = [norm.momentum for norm in norms]
        counts = [norm.num_batches_tracked.clone() for norm in norms]
        running = _running(norms)
        before = torch.cat(running).double()
        search_plans(False)  # as in an evaluation
        self.model.eval()  # no dropout
        for norm in norms:
            norm.train()
            norm.momentum = 1.0  # the statistics become those of the batch
        try:
            rows = torch.stack([self._sums(norms, loader, step) for loader in self.loaders])
        finally:
            for norm, value, count in zip(norms, momentum, counts, strict=True):
                norm.momentum = value
                norm.num_batches_tracked.copy_(count)
            for module, mode in training.items():
                module.training = mode
        total = self.exchange.sum_rows(rows, self.workers.counts)
        # In a tiny epoch some workers have no samples, and so perhaps those that were to take part.
        means = torch.where(total[-1] > 0, total[:-1] / total[-1], before)
        for values, mean in zip(running, means.split(list(map(len, running))), strict=True):
            values.copy_(mean)

    def _sums(self, norms: list[nn.Module], loader: Loader, step: int) -> Tensor:
        """The sums over micro-batches of one worker, and at the end how many they were."""
        number, running = loader.rank, _running(norms)
        whole, rest = divmod(self.batches, self.workers.size)
        sums = running[0].new_zeros(sum(map(len, running)) + 1, dtype=torch.float64)
        for values in running:
            values.zero_()  # a value that is not finite would stay
        epoch = max(0, step - 1) // loader.steps_per_epoch
        batches = (batch for batch in loader.epoch(epoch) if not batch.filler)
        for batch in islice(batches, whole + (number < rest)):
            self.logits(batch.inputs, batch.mix_plan)
            sums += torch.cat([*running, torch.ones_like(running[0][:1])]).double()
        return sums


def _is_trained(module: nn.Module) -> bool:
    if not isinstance(module, _BatchNorm) or module.running_mean is None:
        return False
    return module.weight is None or module.weight.requires_grad


def _running(norms: list[nn.Module]) -> list[Tensor]:
    return [values for norm in norms for values in (norm.running_mean, norm.running_var)]
