"""The end of a round of local steps: every worker takes the mean of all workers' parameters. With
an outer optimizer (DiLoCo) the workers go on from where it steps along the difference that this
mean has made in the round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ...checkpoints.states import optimizer_tensors
from ...checkpoints.worker_rows import by_element
from ...exchange import Exchange
from ...local.optimizer import OuterOptimizer
from ...local.workers import Workers

# {its name in a checkpoint: what the outer optimizer calls it}
OUTER_STATE = {"before": "before", "momentum": "buffers"}


class WorkerMean:
    """Means over the workers, in their order, so that they do not depend on which process trains
    which worker. All methods are collective, and take a worker's tensors by names that all workers
    have, for each worker of this process.

    Args:
        workers: how many there are, and which this process trains.
        exchange: with the other processes.
    """

    def __init__(self, workers: Workers, exchange: Exchange):
        self.workers, self.exchange = workers, exchange

    @torch.no_grad()
    def average_(self, own: Sequence[dict[str, Tensor]], names: Sequence[str]) -> list[Tensor]:
        """Overwrites the tensors of these names with their means over all workers. Needs memory for
        several copies of them while it works.

        Returns:
            for each worker of this process its squared distance from the mean, relative to the
            squared norm of the mean, () float64.
        """
        zero = own[0][names[0]].new_zeros((), dtype=torch.float64)
        distances, norm = [zero] * len(own), zero
        for alike, rows, mean in self._by_dtype(own, names):
            for tensors in own:
                targets = [tensors[name] for name in alike]
                torch._foreach_copy_(targets, _divided(mean, targets))
            distances = [d + _square(row - mean) for d, row in zip(distances, rows, strict=True)]
            norm = norm + _square(mean)
        return [distance / norm for distance in distances]

    @torch.no_grad()
    def means(self, own: Sequence[dict[str, Tensor]], names: Sequence[str]) -> dict[str, Tensor]:
        """New tensors: the means over all workers."""
        found = {}
        for alike, _, mean in self._by_dtype(own, names):
            like = [own[0][name] for name in alike]
            parts = _divided(mean, like)
            for name, tensor, part in zip(alike, like, parts, strict=True):
                found[name] = torch.empty_like(tensor).copy_(part)
        return found

    def rows(self, own: Tensor) -> list[list[float]]:
        """The numbers of all workers, from those of this process's, (own, n). The host waits."""
        counts = self.workers.counts
        padded = own.new_zeros(max(counts), own.shape[1])
        padded[: len(own)] = own
        gathered = torch.stack(self.exchange.gather(padded)).tolist()
        return [row for count, part in zip(counts, gathered, strict=True) for row in part[:count]]

    def _by_dtype(
        self, own: Sequence[dict[str, Tensor]], names: Iterable[str]
    ) -> Iterator[tuple[list[str], Tensor, Tensor]]:
        """For each dtype: (names of its tensors, a row of them for each worker of this process
        (own, n), their mean over all workers (n,))."""
        groups: dict[torch.dtype, list[str]] = {}
        for name in names:
            groups.setdefault(own[0][name].dtype, []).append(name)
        for alike in groups.values():
            rows = torch.stack([torch.cat([t[name].reshape(-1) for name in alike]) for t in own])
            yield alike, rows, self.exchange.sum_rows(rows, self.workers.counts) / self.workers.size


class Averaging:
    """Ends a round: makes the workers equal.

    Args:
        over_workers: computes the means.
        parameters: of the model, by name.
        own: those of each worker of this process; all workers are equal now.
        optimizers: of each worker of this process.
        with_state: optimizer state that has a number for each element of a parameter is averaged,
            too: momentum and Adam's moments. Counters, and what belongs to a whole parameter, as
            NGD's Fisher matrices do, stay with their worker.
        make_outer: makes the outer optimizer of a worker's parameters; None: there is none.
    """

    def __init__(
        self,
        over_workers: WorkerMean,
        parameters: dict[str, Tensor],
        own: Sequence[dict[str, Tensor]],
        optimizers: Sequence[torch.optim.Optimizer],
        with_state: bool = False,
        make_outer: Callable[[Iterable[Tensor]], OuterOptimizer] | None = None,
    ):
        self.over_workers, self.parameters = over_workers, parameters
        self.own = [{name: tensors[name] for name in parameters} for tensors in own]
        self.optimizers, self.with_state = optimizers, with_state
        # Every process takes the same outer step, in the memory of its first worker.
        self.outer = make_outer(self.own[0].values()) if make_outer is not None else None
        # Optimizer state at the last averaging: that of each worker here, and what all workers had.
        self._own_names: list[list[str]] | None = None
        self._state_names: list[str] = []

    @torch.no_grad()
    def __call__(self) -> tuple[list[Tensor], float]:
        """Ends a round. Collective.

        Returns:
            (for each worker of this process its squared distance from the mean, relative to the
            squared norm of the mean, () float64; what was averaged, relative to the parameters)
        """
        trained = [name for name, p in self.parameters.items() if p.requires_grad]
        distances, relative_size = [], 1.0
        if self.over_workers.workers.size > 1:
            distances = self.over_workers.average_(self.own, trained)
            if self.with_state:
                count = sum(self.parameters[name].nbytes for name in trained)
                relative_size += self._average_state() / count
        if self.outer is not None:
            self.outer.step()
            first, *others = self.own
            for tensors in others:
                torch._foreach_copy_(list(tensors.values()), list(first.values()))
        return distances, relative_size

    def averaged_state(self) -> list[dict[str, Tensor]]:
        """What is averaged of the optimizers, of each worker of this process, by
        `<parameter>/<key>`."""
        if not self.with_state:
            return [{} for _ in self.optimizers]
        names = {parameter: name for name, parameter in self.parameters.items()}
        states = [optimizer_tensors(optimizer, names)[0] for optimizer in self.optimizers]
        return [by_element(state, self.parameters) for state in states]

    def _average_state(self) -> int:
        """Returns its size in bytes. A worker that has left out all steps so far may have no state
        yet: what not all workers have is not averaged."""
        states = self.averaged_state()
        self._agree_on_state([sorted(state) for state in states])
        means = self.over_workers.means(states, self._state_names)
        for state in states:
            for name, mean in means.items():
                state[name].copy_(mean)
        return sum(mean.nbytes for mean in means.values())

    def _agree_on_state(self, own: list[list[str]]) -> None:
        """Finds the names that all workers have, if those of any worker have changed since the last
        call. `own`: of each worker of this process, sorted, since their order depends on when a
        worker took its first step."""
        exchange, changed = self.over_workers.exchange, own != self._own_names
        if exchange.sum(torch.tensor(float(changed))) == 0:
            return
        workers = [set(names) for part in exchange.gather_json(own) for names in part]
        self._own_names, self._state_names = own, sorted(set.intersection(*workers))

    # ---- checkpoints ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor] | None:
        """Of the outer optimizer, by `before/<parameter>` and `momentum/<parameter>`, equal in all
        processes; None: there is none."""
        if self.outer is None:
            return None
        state = self.outer.state_dict()
        return {
            f"{saved}/{name}": tensor
            for saved, key in OUTER_STATE.items()
            for name, tensor in zip(self.parameters, state[key], strict=True)
        }

    def load_state_dict(self, state: dict[str, Tensor] | None, model: dict[str, Tensor]) -> None:
        """Restores `state_dict`. If the checkpoint has none (None), the outer optimizer starts at
        the checkpoint's model."""
        if self.outer is None:
            return
        if state is None:
            state = {f"before/{name}": model[name] for name in self.parameters}
            state |= {f"momentum/{name}": torch.zeros_like(model[name]) for name in self.parameters}
        self.outer.load_state_dict(
            {
                key: [state[f"{saved}/{name}"] for name in self.parameters]
                for saved, key in OUTER_STATE.items()
            }
        )


def _divided(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The parts of `flat`, (n,), with the shapes of these tensors."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _square(values: Tensor) -> Tensor:
    """The squared norm of (n,), () float64."""
    return values.norm().double().square()
