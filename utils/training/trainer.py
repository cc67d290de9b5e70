"""The training loop of all entries.

The host runs ahead of the device. It reads from the device at a log line, before a checkpoint and
at the end of an epoch, and nowhere else (`_read_sums`).
"""

import contextlib
import time
from collections.abc import Callable

import torch
from torch import nn

from utils.checkpoints.checkpoint import Checkpoint
from utils.checkpoints.saver import Saver
from utils.data.batch import Batch
from utils.distributed.strategies.base import Strategy
from utils.launch.signals import Signals, Stopped, Stopping
from utils.machine.cudnn import search_plans
from utils.machine.free_cores import FreeCores
from utils.reporting.console import Console
from utils.reporting.metrics import MetricsLog
from utils.training.average import Average
from utils.training.evaluation import Evaluation
from utils.training.freeze import Freeze
from utils.training.guard import Guard, OnNonFinite
from utils.training.loader import TrainingLoader
from utils.training.memory import peak_memory, within_memory
from utils.training.objective import SUMS, Precision
from utils.training.progress import (
    Clock,
    LeftOut,
    PhaseTimes,
    Progress,
    accuracy_text,
    figures,
)
from utils.training.progress_lines import advise, bar_text, log_text
from utils.training.snapshot import restore, snapshot
from utils.training.stepper import Stepper


class Trainer:
    """Trains a model; can be stopped and resumed at any step.

    Args:
        model: on its device; never a compiled wrapper (the objective may hold one).
        objective: (inputs, targets, mixing) -> summed loss, sums; its attribute `sums` names them
            if they are not SUMS (see training/objective.py).
        optimizer: honours `found_inf` (see optim/factory.py).
        schedule: `apply(optimizer, step)` sets the learning rate at the beginning of a step,
            `observe(loss)` receives the loss on the validation split.
        loader: of the training split.
        precision: its loss scaler is used around the backward pass.
        total_steps: optimizer steps of the whole run.
        evaluate: () -> Evaluation, or None when interrupted; called at the end of epochs.
        eval_split: the split that `evaluate` measures: "val", which decides the best step, or
            "test".
        eval_every: epochs between evaluations; 0: none.
        saver: where and how often checkpoints are saved.
        clip: maximal global L2 norm of the gradient; None: unlimited.
        on_nonfinite: "stop" or "skip", when a loss or gradient is not finite.
        log_every: steps between log lines.
        average: moving average of the weights, which is evaluated in their place; None: none.
        freeze: which part of the model trains in which epoch; None: all of it.
        early_stop_patience: evaluations on "val" without a better accuracy after which training
            stops; None: never.
        advice: {phase: what to do}, printed once if that phase takes much of an epoch's time.
        profiler: `step()` is called after every optimizer step.
        meta: learns how samples are mixed: `choose(batch, lr)` returns the mixing plan of a
            micro-batch; `update(bad, lr)` is called when the weights' `grad` holds the gradient of
            the step (see mixup/meta.py). None: lambda is drawn.
        saved_settings: stored in every checkpoint.
        console, metrics, signals: of the run.
        strategy: how the model is spread over processes; None: a single process.
        stopping: whether to stop, agreed by all ranks; None: by `signals` alone.
        free_cores: `look()` adjusts the number of threads after every optimizer step; None: it
            stays.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        objective: Callable,
        optimizer: torch.optim.Optimizer,
        schedule,
        loader: TrainingLoader,
        precision: Precision,
        total_steps: int,
        evaluate: Callable[[], Evaluation | None],
        eval_split: str,
        eval_every: int,
        console: Console,
        metrics: MetricsLog,
        saver: Saver,
        signals: Signals,
        guard: Guard,
        clip: float | None = None,
        on_nonfinite: str = "stop",
        log_every: int = 20,
        average: Average | None = None,
        freeze: Freeze | None = None,
        early_stop_patience: int | None = None,
        advice: dict[str, str] | None = None,
        profiler=None,
        meta=None,
        saved_settings: dict | None = None,
        strategy: Strategy | None = None,
        stopping: Stopping | None = None,
        free_cores: FreeCores | None = None,
    ):
        self.strategy = strategy or Strategy.of(model)
        self.exchange = self.strategy.exchange
        self.model, self.objective, self.optimizer = model, objective, optimizer
        self.schedule, self.loader, self.precision = schedule, loader, precision
        self.scaler = precision.scaler()
        self.guard, self.average, self.freeze, self.meta = guard, average, freeze, meta
        self.total_steps, self.clip = total_steps, clip
        self.on_nonfinite = OnNonFinite(on_nonfinite, console, saver)
        self.log_every = log_every
        searches = (
            precision.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()
        )
        self.searched_samples = loader.largest() if searches else None
        self.evaluate, self.eval_split, self.eval_every = evaluate, eval_split, eval_every
        self.early_stop_patience = early_stop_patience
        self.console, self.metrics, self.signals = console, metrics, signals
        self.stopping = stopping or Stopping(signals)
        self.saver, self.saved_settings = saver, saved_settings or {}
        self.advice, self.profiler, self.free_cores = dict(advice or {}), profiler, free_cores
        self.sum_names = getattr(objective, "sums", SUMS)
        self.progress = Progress(epoch_sums=self._no_sums())
        device = precision.device
        self.times = PhaseTimes(device)
        self.step_sums = torch.tensor(self._no_sums(), dtype=torch.float64, device=device)
        self.window = torch.zeros_like(self.step_sums)
        self.stepper: Stepper = self
        self.settling = False  # see Stepper; these steps are all alike
        self.updating = False
        self.started_step = 0  # at which this process began
        self.seconds_first_step = 0.0  # in this process, with compilation
        self.started = time.monotonic()
        self._seconds_before = 0.0  # in earlier processes of the run

    # ---- one step ---------------------------------------------------------------------------

    def forward_backward(self, batch: Batch) -> None:
        # Before anything reads the learning rate. All micro-batches of a step set the same one.
        self.schedule.apply(self.optimizer, self.progress.step)
        self.forward_backward_device(batch)

    def forward_backward_device(self, batch: Batch) -> None:
        """Device part of `forward_backward`; the learning rate is set already."""
        self._search_plans(batch)
        mixing = batch.mixing
        if self.meta is not None:
            mixing = self.meta.choose(batch, self.learning_rate)
        with self.strategy.micro_batch(batch.ends_step):
            loss, sums = self.objective(batch.inputs, batch.targets, mixing)
            # Gradients are averaged over the ranks. Scaled by their number, the result is the
            # gradient of the mean loss over the samples of the step.
            mean = loss / (batch.step_samples / self.exchange.size)
            self.scaler.scale(mean * 0 if batch.filler else mean).backward()
        if not batch.filler:
            self.step_sums += sums

    def _search_plans(self, batch: Batch) -> None:
        """Lets cuDNN search for the fastest plans in whole micro-batches only (see
        machine/cudnn.py)."""
        if self.searched_samples is not None:
            search_plans(len(batch.targets) == self.searched_samples)

    def update(self) -> None:
        self.begin_update()
        step = self.progress.step
        self.update_device(step, self.average.ema_weight(step) if self.average else 0.0)
        self.end_update()

    def begin_update(self) -> None:
        """Weights, optimizer and average are of different steps from here to `end_update`."""
        self.updating = True

    def end_update(self) -> None:
        self.progress.step += 1
        self.updating = False

    def update_device(self, step: int | torch.Tensor, ema_weight: float | torch.Tensor) -> None:
        """Device part of `update`; `step` and `ema_weight` come from the host."""
        self.strategy.collect_gradients()
        self.scaler.unscale_(self.optimizer)
        norm, loss = self.guard.gradient_norm(), self.guard.agree(self.step_sums[0])
        bad = self.guard.judge(loss, norm, step, self.scaler.is_enabled())
        if self.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.guard.parameters, self.clip, norm)
        if self.meta is not None:
            self.meta.update(bad, self.learning_rate)
        self.optimizer.found_inf = bad.float()
        self.optimizer.step()
        self.strategy.drop_gradients()
        self.scaler.update()
        self.guard.take_back(bad)
        self.strategy.after_step(self.learning_rate, bad)
        if self.average is not None:
            self.average.update(ema_weight, bad)
        self.window += torch.where(bad, 0.0, self.step_sums)
        self.step_sums.zero_()
        self.guard.remember()

    def free_memory(self) -> str:
        """See Stepper; ordinary steps hold nothing extra."""
        return ""

    def delegate_steps(self, stepper: Stepper) -> None:
        """From now on `stepper` takes the steps: that of an engine, or the Trainer itself again."""
        self.stepper = stepper

    # ---- the loop ---------------------------------------------------------------------------

    def fit(self) -> Progress:
        """Trains to the end. Raises Stopped on a signal, UserError when it cannot go on."""
        return within_memory(self, self._fit)

    def _fit(self) -> Progress:
        progress = self.progress
        self.signals.defer()
        self.strategy.drop_gradients()
        self.started_step = progress.step
        self.saver.start(progress.step)
        self.guard.remember()
        if not self.strategy.adds_in_order:
            self._settle()
        self._started_seconds = progress.seconds_training
        self.console.start_bar(
            self.samples_until(self.total_steps), self.samples_until(progress.step)
        )
        try:
            while not progress.stopped_early and (
                progress.step < self.total_steps or self._end_is_due()
            ):
                if not self._end_is_due():
                    self._train_to_epoch_end()
                self._end_epoch()
                if self.stopping.signum is not None and progress.step < self.total_steps:
                    self._stop()
        finally:
            self.console.end_bar()
            self.saver.wait()
        return progress

    def _settle(self) -> None:
        """A forward and backward pass without effect, which settles the order in which DDP adds
        gradients (see `Strategy.adds_in_order`)."""
        device = self.precision.device
        self.prepare(0)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            batch = self.loader.made(next(iter(self.loader.epoch(0))))
            self._search_plans(batch)
            loss, _ = self.objective(batch.inputs, batch.targets, batch.mixing)
            (loss * 0).backward()
        self.strategy.drop_gradients()
        self.guard.take_back(torch.ones((), dtype=torch.bool, device=device))

    def prepare(self, epoch: int) -> None:
        """Sets training mode for the part of the model that trains in `epoch`."""
        self.model.train()
        if self.freeze is not None:
            self.freeze.apply(epoch)

    def _train_to_epoch_end(self) -> None:
        progress, epoch_steps = self.progress, self.loader.steps_per_epoch
        epoch, start_step = divmod(progress.step, epoch_steps)
        self.prepare(epoch)
        if self.freeze is not None and start_step == 0 and epoch == self.freeze.until:
            self._say_unfrozen(epoch)
        clock, times = Clock(progress, self.precision.device), self.times
        times.mark("other")
        for batch in self.loader.epoch(epoch, start_step):
            times.mark("data")
            self.stepper.forward_backward(batch)
            times.mark("forward_backward")
            if not batch.ends_step:
                continue
            self.stepper.update()
            times.mark("optimizer")
            clock.samples += batch.step_samples
            self.console.advance(batch.step_samples)
            if progress.step == self.started_step + 1:
                self.seconds_first_step = clock.first_step()
                self._show(self._read_sums())
            if self.profiler is not None:
                self.profiler.step()
                times.mark("other")  # the profiler may have written its trace
            if self.free_cores is not None:
                self.free_cores.look()
            if progress.step % self.log_every == 0:
                self._log_window(clock)
            if progress.step % epoch_steps == 0 or progress.step >= self.total_steps:
                break
            due = self._save_is_due()
            if self.stopping.signum is not None:
                clock.pause()
                self._stop()
            if due:
                clock.pause()
                self.save()
                clock.resume()
        self._log_window(clock)
        clock.pause()

    def _save_is_due(self) -> bool:
        """Whether a checkpoint is due, agreed by all ranks; also updates `stopping`. An interval in
        steps is known to all; one in seconds is measured by rank 0, whose answer arrives a step
        later."""
        saver, step = self.saver, self.progress.step
        by_steps = saver.every_steps is not None
        due = self.stopping.ask(not by_steps and self.exchange.rank == 0 and saver.is_due(step))
        if by_steps:
            return saver.is_due(step)
        return due and step > saver.saved_step + 1  # otherwise the answer is older than the save

    def _end_is_due(self) -> bool:
        """An epoch or the run has ended, and `_end_epoch` has not been carried out for it."""
        step = self.progress.step
        at_end = step % self.loader.steps_per_epoch == 0 or step >= self.total_steps
        return 0 < step != self.progress.ended_step and at_end

    def _end_epoch(self) -> None:
        """Figures of the epoch, evaluation, best step, checkpoint. Done again from its start after
        an interruption, so it changes `progress` only when nothing can interrupt it any more."""
        progress = self.progress
        finished = progress.step >= self.total_steps
        epochs_done = progress.step / self.loader.steps_per_epoch
        train = figures(dict(zip(self.sum_names, progress.epoch_sums, strict=True)))
        evaluation = None
        due = self.eval_every and (finished or round(epochs_done) % self.eval_every == 0)
        self.times.mark("other")
        if due:
            self.strategy.make_equal()
            with self.evaluated_weights():
                evaluation = self.evaluate()
            self.times.mark("evaluation")
            if evaluation is None:
                self.stopping.ask()
                self._stop()
        progress.ended_step, progress.train = progress.step, train
        progress.epoch_sums = self._no_sums()
        position = {"step": progress.step, "epoch": epochs_done}
        time_share = self.times.shares()
        self.metrics.write(
            **position, split="train", average_over="epoch", **train, lr=self.learning_rate,
            samples_per_second=self.samples_per_second, time_share=time_share,
            peak_memory_bytes=peak_memory(self.precision.device),
        )  # fmt: skip
        line = f"epoch {epochs_done:g}: train loss {train['loss']:.4f}, {accuracy_text(train)}"
        best = False
        if evaluation is not None:
            progress.evaluated = position | {"split": self.eval_split} | evaluation.figures
            self.metrics.write(**progress.evaluated)
            line += f"; {self.eval_split} loss {evaluation.loss:.4f}, "
            line += f"accuracy {evaluation.accuracy:.2f} %"
            if self.eval_split == "val":
                best, note = self._judge(evaluation, epochs_done)
                line += note
        self.console.say(line)
        advise(self.advice, time_share, self.console.say)
        if self._save_is_due() or finished or best or progress.stopped_early:
            self.save(final=finished or progress.stopped_early)

    def _judge(self, evaluation: Evaluation, epochs_done: float) -> tuple[bool, str]:
        """(whether the accuracy is the best so far, a note for the log line)."""
        progress, note = self.progress, ""
        best = (
            progress.best_val_accuracy is None or evaluation.accuracy > progress.best_val_accuracy
        )
        progress.since_best = 0 if best else progress.since_best + 1
        if best:
            progress.best_step, progress.best_epoch = progress.step, epochs_done
            progress.best_val_accuracy = evaluation.accuracy
            note = " (best)"
        if self.schedule.observe(evaluation.loss):
            note += "; no lower loss: the learning rate falls"
        if self._patience_is_over():
            progress.stopped_early = True
            note += f"; no better accuracy for {progress.since_best} evaluations: stopped early"
        return best, note

    def _patience_is_over(self) -> bool:
        patience = self.early_stop_patience
        return patience is not None and self.progress.since_best >= patience

    def evaluated_weights(self) -> contextlib.AbstractContextManager:
        """Within it the model holds the weights to evaluate: the average if there is one."""
        return contextlib.nullcontext() if self.average is None else self.average.applied()

    # ---- what the host reads and prints ---------------------------------------------------------

    def _no_sums(self) -> list[float]:
        return [0.0] * len(self.sum_names)

    def _read_sums(self) -> dict[str, float]:
        """The objective's sums since the last log line, by name; acts on steps that were left out.
        Here alone the host waits for the device."""
        window = self.exchange.sum(self.window)
        values = torch.cat([window, self.guard.left_out.double()]).tolist()
        sums = dict(zip(self.sum_names, values, strict=False))
        left_out = LeftOut(*map(int, values[len(sums) :]))
        self.on_nonfinite.check_scale(self.scaler, self.progress.step)
        new, self.progress.left_out = left_out.steps - self.progress.left_out.steps, left_out
        if new:
            self.on_nonfinite.judge(new, left_out.first, sums["samples"] > 0, self.optimizer)
        return sums

    def _log_window(self, clock: Clock) -> None:
        sums = self._read_sums()
        self.window.zero_()
        progress = self.progress
        if sums["samples"] == 0:  # an epoch that ended on a log line, or only skipped steps
            return
        progress.epoch_sums = [
            a + b for a, b in zip(progress.epoch_sums, sums.values(), strict=True)
        ]
        mean, speed = figures(sums), clock.lap()
        self.times.read()
        self.saver.poll()
        epoch = progress.step / self.loader.steps_per_epoch
        self.metrics.write(
            step=progress.step, epoch=epoch, split="train", average_over="steps", **mean,
            lr=self.learning_rate, samples_per_second=round(speed, 1),
            skipped_steps=progress.left_out.steps + progress.left_out.by_scaler,
        )  # fmt: skip
        self._show(sums, speed)

    def _show(self, sums: dict[str, float], speed: float | None = None) -> None:
        """Beside the bar, or as a plain line now and then."""
        if self.console.live:
            text = bar_text(sums)
        else:
            step = self.progress.step
            left = self.samples_until(self.total_steps) - self.samples_until(step)
            text = log_text(sums, step / self.loader.steps_per_epoch, left, speed)
        self.console.progress(text)

    def _say_unfrozen(self, epoch: int) -> None:
        self.metrics.write(
            step=self.progress.step, epoch=float(epoch), split="event", event="unfrozen"
        )
        self.console.say(f"after {epoch} epochs: from here on all layers train")

    @property
    def samples_per_second(self) -> float | None:
        """In this process, without its first step, which sets up memory and compiles."""
        if self.progress.step == self.started_step:  # nothing was left to do
            seconds = self.progress.seconds_training
            return self.samples_until(self.progress.step) / seconds if seconds else None
        first = self.started_step + 1
        samples = self.samples_until(self.progress.step) - self.samples_until(first)
        seconds = self.progress.seconds_training - self._started_seconds - self.seconds_first_step
        return samples / seconds if samples and seconds > 0 else None

    @property
    def seconds_total(self) -> float:
        """Of the run, over all its processes so far."""
        return self._seconds_before + time.monotonic() - self.started

    @property
    def learning_rate(self) -> float:
        """Of the current step, or of the last one."""
        return self.optimizer.param_groups[0]["lr"]

    def samples_until(self, step: int) -> int:
        """Samples in the first `step` steps."""
        epochs, rest = divmod(step, self.loader.steps_per_epoch)
        return epochs * self.loader.samples + min(rest * self.loader.step_size, self.loader.samples)

    # ---- saving and resuming ------------------------------------------------------------------

    def save(self, final: bool = False) -> None:
        """Saves a checkpoint of this step; `final`: waits until it is on disk (see Saver)."""
        self.times.mark("other")
        self.strategy.make_equal()
        self.progress.window_sums = list(self._read_sums().values())
        self.progress.seconds_total = self.seconds_total
        self.saver.save(snapshot(self), self.progress.best_step, final)
        self.times.mark("checkpoint")

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restores model, optimizer, random states and position."""
        self.progress = restore(self, checkpoint)
        self.progress.stopped_early = self._patience_is_over()
        self._seconds_before = self.progress.seconds_total
        device = self.precision.device
        if self.exchange.rank == 0:  # they are sums over all ranks
            self.window.copy_(torch.tensor(self.progress.window_sums, dtype=torch.float64))
        self.guard.left_out = torch.tensor(self.progress.left_out, device=device)

    def _stop(self) -> None:
        self.save(final=True)
        raise Stopped(
            self.stopping.signum,
            f"stopped after step {self.progress.step} and saved; go on with "
            f"--resume {self.run_folder}",
        )

    @property
    def run_folder(self):
        return self.saver.store.folder.parent
