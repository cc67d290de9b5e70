"""Local steps (`--strategy local`): workers that step by themselves, and average their parameters
at the end of each round. When a round ends is decided in utils/local/rules.py.

A process trains its workers in turn, over one model. Each worker is a TrainStep with its own
optimizer, guard, loss scaler, moving average and random state; when its turn comes, the model's
tensors are pointed at its memory. All that workers exchange is exchanged here, always in the order
of workers, so that results do not depend on which process trains which worker.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.states import random_states, restore_random_states
from ...checkpoints.worker_rows import as_one_model, of_worker, of_workers
from ...data.batch import Batch
from ...data.loader import Loader
from ...distributed.strategies.base import Strategy
from ...exchange import Exchange
from ...local.optimizer import OuterOptimizer
from ...local.rules import SyncRule, simulate
from ...local.workers import Workers
from ...plural import counted
from ..guard import Guard
from ..progress import LeftOut, Progress
from ..steps import Steps
from ..train_step import StepParts, TrainStep
from .averaging import Averaging, WorkerMean
from .in_turn import in_turn
from .norm_statistics import NormStatistics
from .rounds import Rounds, amount_text, averagings_text, lengths_text

# In a short last step a few workers may have all samples, as blocks that are mixed are never cut.
# They step by at most so many times the mean gradient of their samples.
MOST = 2.0


@dataclass
class Worker:
    """A worker of this process, and what is its own."""

    number: int  # among all workers of the run, from 0
    step: TrainStep  # takes its optimizer steps; as a process alone does
    # Its parameters and buffers by name: the memory that the model uses in its turn.
    tensors: dict[str, Tensor]
    # From the mean at the last averaging, squared, relative to the squared norm of the mean; ()
    # float64.
    distance: Tensor
    random: dict | None = None  # its random states, outside its turn


@dataclass(frozen=True)
class Mean:
    """The mean of the workers, by the names of `Worker.tensors`."""

    model: dict[str, Tensor]  # parameters and buffers
    average: dict[str, Tensor] | None  # the same of the moving average; None: there is none

    @property
    def evaluated(self) -> dict[str, Tensor]:
        return self.model if self.average is None else self.average


class LocalSteps(Steps):
    """Takes the optimizer steps of this process's workers.

    Args:
        strategy: of a single process, with the model.
        make_parts: (guard, progress) -> the parts of a worker's TrainStep, over that model.
        workers: how many there are, and which this process trains.
        loaders: of the workers that this process trains, from `loaders_of`.
        exchange: with the other processes.
        rule: when they average.
        averages_state, make_outer: `with_state` and `make_outer` of Averaging.
        progress: of the run.
        seed: worker w draws its dropout with seed + w.
        statistics: estimates BatchNorm's statistics for the mean of the workers; None: they are
            averaged.
        say: prints a line.
    """

    def __init__(
        self,
        *,
        strategy: Strategy,
        make_parts: Callable[[Guard, Progress], StepParts],
        workers: Workers,
        loaders: Sequence[Loader],
        exchange: Exchange,
        rule: SyncRule,
        progress: Progress,
        seed: int,
        statistics: NormStatistics | None = None,
        averages_state: bool = False,
        make_outer: Callable[[Iterable[Tensor]], OuterOptimizer] | None = None,
        say: Callable[[str], None] = print,
    ):
        self.strategy, self.workers, self.exchange = strategy, workers, exchange
        self.rule, self.progress, self.seed = rule, progress, seed
        self.loaders, self.statistics, self.say = loaders, statistics, say
        self.model, self.rounds = strategy.model, Rounds()
        self._over_workers = WorkerMean(workers, exchange)
        self.own = self._make_workers(make_parts)
        self.averaging = Averaging(
            self._over_workers,
            strategy.parameters,
            [worker.tensors for worker in self.own],
            [worker.step.optimizer for worker in self.own],
            averages_state,
            make_outer,
        )
        self.active = self.own[-1]
        self.turn_to(self.own[0])
        first = self.active.step
        self.objective, self.optimizer = first.objective, first.optimizer
        self.schedule, self.precision = first.schedule, first.precision
        self.sum_names = first.sum_names
        self._pending = False  # the active worker has passes whose update is to come
        self._samples, self._share = 0, 0.0  # in these passes, and what each worker would have
        self._mean: Mean | None = None  # of this step
        # As of the last `read_sums`:
        self._left_out = [0] * workers.size  # steps of each worker
        self.left_out_by = ""  # names those that had left out further ones
        self.distance = 0.0  # of the workers from their mean, relative, root mean square
        self._loss_scale: float | None = None  # the smallest

    def _make_workers(self, make_parts: Callable[[Guard, Progress], StepParts]) -> list[Worker]:
        parameters = self.strategy.parameters
        # First all guards, as each moves the model's buffers into memory of its own.
        guards, buffers = [], []
        for _ in self.workers.own:
            guards.append(Guard(self.model, self.strategy))
            named = self.model.named_buffers()
            buffers.append({name: buffer.detach() for name, buffer in named})
        self._live = parameters | dict(self.model.named_buffers())
        made, random = [], None
        for number, guard, own in zip(self.workers.own, guards, buffers, strict=True):
            weights = {name: parameter.detach() for name, parameter in parameters.items()}
            if made:
                weights = {name: weight.clone() for name, weight in weights.items()}
            step = TrainStep(make_parts(guard, Progress()))
            distance = step.window.new_zeros(())
            made.append(Worker(number, step, weights | own, distance))
            random = random or random_states()
        # The first worker of the run goes on as a process alone does, the others with their seeds.
        for worker in made:
            if worker.number > 0:
                torch.manual_seed(self.seed + worker.number)
                random = random_states()
            worker.random = random
        restore_random_states(made[-1].random)
        return made

    # ---- a step ---------------------------------------------------------------------------------

    def batches(self, loader: Loader, epoch: int, start_step: int = 0) -> Generator[Batch]:
        """Those of `loaders`, which were made from `loader`."""
        return in_turn(self.loaders, epoch, start_step)

    def largest(self, loader: Loader) -> int:
        return max(each.largest() for each in self.loaders)

    def start(self) -> None:
        for worker in self.own:
            worker.step.start()

    def forward_backward(self, batch: Batch) -> None:
        """Forward and backward pass of a micro-batch. If it is the first one of another worker, the
        update of the worker before it comes first."""
        self._mean = None
        if self.own[batch.worker] is not self.active:
            self._finish_turn()
            self.turn_to(self.own[batch.worker])
        # The loss of a worker is that of the mean over its samples, if it has 1 / workers of the
        # step. So the mean of the workers' gradients is DDP's, in short steps, too (but see MOST).
        self._share = batch.step_samples / self.workers.size
        if not batch.filler:
            self._samples += len(batch.targets)
        self._pending = True
        mine = batch._replace(step_samples=self._share)  # type: ignore[arg-type]  # a fraction
        self.active.step.forward_backward(mine)
        if self.rounds.end is None:  # the learning rate of the round's first step is now known
            step = self.progress.step
            self.rounds.length = self.rule.round_length(step, self.learning_rate)
            self.rounds.end = step + self.rounds.length

    def update(self) -> None:
        self._finish_turn()
        self.rounds.equal = self.workers.size == 1
        self.progress.step += 1
        if self.progress.step >= min(self.rounds.end, self.rule.total_steps):
            self._average()
        self.updating = False

    def _finish_turn(self) -> None:
        if self._pending:
            self.updating = True
            if self._samples > MOST * self._share:
                self.active.step.guard.scale_gradients(MOST * self._share / self._samples)
            self.active.step.update()
            self._pending, self._samples = False, 0

    def turn_to(self, worker: Worker) -> None:
        """Points the model at the worker's memory."""
        if len(self.own) == 1:
            return
        self.active.random = random_states()
        self.active = worker
        restore_random_states(worker.random)
        self._point_at(worker.tensors)

    @torch.no_grad()
    def _point_at(self, tensors: dict[str, Tensor]) -> None:
        for name, live in self._live.items():
            live.data = tensors[name]

    @contextlib.contextmanager
    def holding(self, tensors: dict[str, Tensor]) -> Iterator[None]:
        """A context in which the model has these tensors, by the names of `Worker.tensors`."""
        self._point_at(tensors)
        try:
            yield
        finally:
            self._point_at(self.active.tensors)

    def take_back(self) -> None:
        self.active.step.take_back()
        self._pending = False

    @property
    def learning_rate(self) -> float:
        return self.active.step.learning_rate

    # ---- the mean -------------------------------------------------------------------------------

    @torch.no_grad()
    def _average(self) -> None:
        """Ends a round."""
        distances, sent = self.averaging()
        self.rounds.averagings += 1
        self.rounds.sent += sent
        self.rounds.end, self.rounds.equal = None, True
        for worker, distance in zip(self.own, distances, strict=False):
            worker.distance.copy_(distance)

    def mean(self) -> Mean:
        """The mean of the workers as they are; collective."""
        if self._mean is None:
            self._mean = self._compute_mean()
        return self._mean

    def _compute_mean(self) -> Mean:
        own = [worker.tensors for worker in self.own]
        averages = [w.step.average.mean for w in self.own if w.step.average is not None]
        if self.workers.size == 1:
            return Mean(own[0], own[0] | averages[0] if averages else None)
        parameters, equal = self.strategy.parameters, self.rounds.equal
        # What is equal stays as it is: a mean would be rounded.
        names = [name for name, p in parameters.items() if p.requires_grad and not equal]
        names += [
            name for name, t in own[0].items() if name not in parameters and t.is_floating_point()
        ]
        model, average = own[0] | self._over_workers.means(own, names), None
        if averages:
            frozen = {name for name, p in parameters.items() if not p.requires_grad}
            trained = [name for name in averages[0] if name not in frozen]
            average = model | averages[0] | self._over_workers.means(averages, trained)
        mean = Mean(model, average)
        if self.statistics is not None:
            with self.holding(mean.evaluated):
                self.statistics.estimate(self.progress.step)
        return mean

    @contextlib.contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """Within it the model holds the mean of the workers, or of their moving averages."""
        with self.holding(self.mean().evaluated):
            yield

    # ---- what the host reads --------------------------------------------------------------------

    def read_sums(self) -> tuple[dict[str, float], LeftOut]:
        """The sums are of all workers."""
        of_workers = []
        for worker in self.own:
            step, distance = worker.step, worker.distance.view(1)
            values = [step.window, step.guard.left_out.double(), distance]
            if (scale := step.loss_scale) is not None:
                values.append(distance.new_tensor([scale]))
            of_workers.append(torch.cat(values))
        count = len(self.sum_names)
        rows = self._over_workers.rows(torch.stack(of_workers))  # [worker][value]
        sums = dict(zip(self.sum_names, map(math.fsum, zip(*rows, strict=True)), strict=False))
        left_out = [LeftOut(*map(int, row[count : count + 3])) for row in rows]
        self.distance = math.sqrt(math.fsum(row[count + 3] for row in rows) / len(rows))
        self._loss_scale = None if scale is None else min(row[-1] for row in rows)
        steps = [each.steps for each in left_out]
        new = [i + 1 for i, n in enumerate(steps) if n > self._left_out[i]]
        numbers = ", ".join(map(str, new))
        self.left_out_by = f"worker{'s' * (len(new) > 1)} {numbers} of {len(rows)}: " * bool(new)
        self._left_out = steps
        firsts = [each.first for each in left_out if each.first >= 0]
        by_scaler = sum(each.by_scaler for each in left_out)
        return sums, LeftOut(sum(steps), min(firsts, default=-1), by_scaler)

    def clear_window(self) -> None:
        for worker in self.own:
            worker.step.clear_window()

    @property
    def loss_scale(self) -> float | None:
        return self._loss_scale

    def figures(self) -> dict:
        """Of the last `read_sums`."""
        return {
            "averagings": self.rounds.averagings,
            "round_steps": self.rounds.length,
            "worker_distance": self.distance,
            "sent_of_ddp": self.rounds.sent_of_ddp(self.progress.step),
        }

    def note(self) -> str:
        rounds, sent = self.rounds, 100 * self.rounds.sent_of_ddp(self.progress.step)
        note = f"; {counted(rounds.averagings, 'averaging')}, H {rounds.length:,}, "
        note += f"{sent:.1f} % of DDP's bytes"
        if self.distance:
            note += f", workers {100 * self.distance:.2g} % from their mean"
        return note

    def summary(self) -> str:
        rounds, step = self.rounds, self.progress.step
        steps = step - rounds.first_step
        return averagings_text(rounds.averagings, steps, rounds.sent_of_ddp(step))

    def forecast(self) -> list[str]:
        """Averagings, and what they send."""
        peak = self.optimizer.param_groups[0]
        peak = peak["base_lr"] / peak.get("lr_scale", 1.0)
        lengths = simulate(self.rule, lambda step: peak * self.schedule.factor(step))
        trained = sum(p.nbytes for p in self.strategy.parameters.values() if p.requires_grad)
        state = sum(t.nbytes for t in self.averaging.averaged_state()[0].values())
        relative = 1 + state / trained  # what an averaging sends, relative to a step of DDP
        total, size = self.rule.total_steps, self.workers.size
        plateau = self.schedule.name == "plateau" and self.rule.name == "qsr"
        note = "; more where plateau lowers the learning rate" if plateau else ""
        share = relative * (len(lengths) / total)
        lines = [
            f"  local steps    {averagings_text(len(lengths), total, share)}",
            f"                 ({lengths_text(lengths)}{note})",
        ]
        if size > 1:
            # In an averaging, as in a step of DDP. The ends of a chain send less, the others more.
            sent = 2 * (size - 1) / size * trained
            ours, ddp = amount_text(sent * relative * len(lengths)), amount_text(sent * total)
            lines.append(
                f"                 {size} processes with a worker each would each send, on "
                f"average, {ours}; with ddp {ddp}"
            )
        return lines

    def summary_entries(self) -> dict:
        return {
            "local_workers": self.workers.size,
            "sync_rule": self.rule.name,
            "averagings": self.rounds.averagings,
            "sent_of_ddp": self.rounds.sent_of_ddp(self.progress.step),
        }

    # ---- checkpoints ----------------------------------------------------------------------------

    def snapshot(self) -> Checkpoint:
        """Also inside a round. Rank 0 adds the mean to what each process has of its workers."""
        mean = self.mean()
        saved = of_workers([self._snapshot(w) for w in self.own], self.workers, self.exchange)
        saved.state |= {"progress": asdict(self.progress), "local": asdict(self.rounds)}
        if self.exchange.rank == 0:
            with self.holding(mean.model):
                saved.parts["model"] = self.strategy.tensors()
            outer = self.averaging.state_dict()
            if outer is not None:
                saved.parts["outer"] = outer
            if mean.average is not None:
                with self.holding(mean.average):
                    saved.parts["average"] = self.strategy.tensors()
        return saved

    def _snapshot(self, worker: Worker) -> Checkpoint:
        """What a worker has of its own, as `of_workers` takes it."""
        step = worker.step
        with self.holding(worker.tensors):
            saved = step.snapshot()
        if step.average is not None:
            saved.parts["average"] = step.average.mean
        saved.state |= {
            "window": dict(zip(step.sum_names, step.window.tolist(), strict=True)),
            "left_out": step.guard.left_out.tolist(),
            "distance": worker.distance.item(),
        }
        if worker is not self.active:
            saved.state["random"] = [worker.random]
        return saved

    def restore(self, checkpoint: Checkpoint) -> None:
        """From a checkpoint of another strategy, or of another number of workers, all workers start
        equal, from its model."""
        state, size, step = checkpoint.state, self.workers.size, checkpoint.step
        saved, rounds = state.get("workers", []), state.get("local", {})
        same = len(saved) == size
        checkpoint = checkpoint if same else as_one_model(checkpoint)
        self.progress.load(state["progress"])
        self.averaging.load_state_dict(checkpoint.parts.get("outer"), checkpoint.model)
        for worker in reversed(self.own):
            self.turn_to(worker)
            torch.manual_seed(self.seed + worker.number)  # for a worker without random states
            own = of_worker(checkpoint, worker.number, size)
            worker.step.restore(own, worker.number)
            worker.distance.fill_(saved[worker.number]["distance"] if same else 0)
        self._mean = None
        if rounds:  # older checkpoints lack `sent`: it was 1 for each averaging
            rounds = {"sent": float(rounds["averagings"])} | rounds
        if same:
            self.rounds, self._left_out = Rounds(**rounds), [each["left_out"][0] for each in saved]
        else:
            kept = {k: v for k, v in rounds.items() if k in ("averagings", "sent", "first_step")}
            self.rounds = Rounds(**{"first_step": step} | kept)
            self._left_out = [self.progress.left_out.steps] + [0] * (size - 1)
            source = f"the mean of {counted(len(saved), 'worker')}" if saved else "one model"
            starts = "starts" if size == 1 else "start"
            self.say(f"step {step} is of {source}: {counted(size, 'worker')} {starts} from it")
