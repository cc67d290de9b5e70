"""The training loop of all entries.

The host runs ahead of the device. It waits for the device after the first step, at log lines and
before a checkpoint (`_read_sums`), in every evaluation, up to 8 times in a run with `--mixup auto`
(`control_mixing`), and some 50 times in a run with `--time_budget` (`_follow`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.saver import Saver
from ..data.batch import Batch
from ..data.loader import Loader
from ..errors import UserError
from ..launch.signals import AgreedSignal, StoppedBySignal
from ..machine.backends import search_plans
from ..measures.table import MEASURES, Measure
from ..plural import counted
from .controls import Freeze, MixingControl
from .evaluation import Evaluation
from .guard import OnNonFinite
from .log import TrainingLog
from .memory import peak_memory, within_memory
from .objective import figures
from .progress import Progress
from .progressive_resizing import ProgressiveResizing
from .steps import Steps
from .time_budget import Look, Timing, TooShort
from .times import Clock, PhaseTimes


@dataclass
class TrainingPlan:
    """How long a run trains, and what it does when."""

    total_steps: int  # optimizer steps of the whole run; with a time budget at most, until it plans
    limit: str = "--epochs"  # the flag that sets `total_steps`
    most_steps: int = 0  # the most that a time budget plans
    eval_split: str = "test"  # what is evaluated: "val", which decides the best step, or "test"
    eval_every: int = 1  # epochs between evaluations; 0: none
    eval_on_start: bool = False  # evaluate before the first step, too
    resizing: ProgressiveResizing | None = None  # of training pictures; None: full size always
    log_every: int = 20  # steps between log lines
    # Evaluations on "val" without better weights or a lower loss after which training stops; None:
    # never.
    early_stop_patience: int | None = None
    # What makes weights better, and what the schedule is told; None: the accuracy, while the
    # schedule is told the loss.
    best_by: Measure | None = None
    on_nonfinite: str = "stop"  # or "skip", when a loss or gradient is not finite


class Trainer:
    """Trains a model; can be stopped and resumed at any step.

    Args:
        steps: takes the optimizer steps, and holds the model and all else that they change.
        loader: of the training split.
        plan: how long, and what when.
        evaluate: whether this is the run's last one -> Evaluation, or None if `agreed_signal`
            interrupted it; called at the end of epochs.
        log: writes lines and records.
        saver: where and how often checkpoints are saved.
        agreed_signal: the signal on which all ranks stop.
        freeze: which part of the model trains in which epoch; None: all of it.
        mixing_control: adjusts how strongly samples are mixed; None: that is fixed.
        clock: made when the process began; None: now.
        timing: with a time budget, which plans how many steps are taken; None: without.
        enter: called with what this process does from now on (see Watch.enter); None: nobody
            wants to know.
    """

    def __init__(
        self,
        *,
        steps: Steps,
        loader: Loader,
        plan: TrainingPlan,
        evaluate: Callable[[bool], Evaluation | None],
        log: TrainingLog,
        saver: Saver,
        agreed_signal: AgreedSignal,
        freeze: Freeze | None = None,
        mixing_control: MixingControl | None = None,
        clock: Clock | None = None,
        timing: Timing | None = None,
        enter: Callable[[str], None] | None = None,
    ):
        self.steps, device = steps, steps.precision.device
        self.loader, self.plan, self.evaluate, self.freeze = loader, plan, evaluate, freeze
        self.log, self.saver, self.agreed_signal = log, saver, agreed_signal
        self.mixing_control = mixing_control
        self.enter = enter or (lambda phase: None)
        self.progress = steps.progress
        self.progress.epoch_sums = self._no_sums()
        self.evaluation: Evaluation | None = None  # the last one of this process
        self.clock, self.times = clock or Clock(self.progress, device), PhaseTimes(device)
        self.timing, self.time_budget = timing, None if timing is None else timing.budget
        self.on_nonfinite = OnNonFinite(
            plan.on_nonfinite, log.console, saver, steps.precision.name == "fp16"
        )
        searches = device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()
        # Samples of the micro-batches for which cuDNN searches plans; None: it does not.
        self.searched_samples = steps.largest(loader) if searches else None

    # ---- one step ---------------------------------------------------------------------------

    def forward_backward(self, batch: Batch) -> None:
        self._search_plans(batch)
        self.steps.forward_backward(batch)

    def update(self) -> None:
        self.steps.update()

    def _search_plans(self, batch: Batch) -> None:
        """Lets cuDNN search for the fastest plans in whole micro-batches only (see
        machine/backends.py)."""
        if self.searched_samples is not None:
            search_plans(len(batch.targets) == self.searched_samples)

    # ---- the loop ---------------------------------------------------------------------------

    def fit(self, after_step: Sequence[Callable[[], None]] = ()) -> Progress:
        """Trains to the end; calls `after_step` after every optimizer step. Raises StoppedBySignal
        on a signal, UserError when it cannot go on."""
        return self.within_memory(lambda: self._fit(after_step))

    def within_memory(self, work: Callable, save: bool = True):
        """`within_memory` of memory.py. `save`: the last complete step is then saved, too."""
        return within_memory(
            work,
            steps=self.steps,
            loader=self.loader,
            advice=self.log.advice.get("memory"),
            save=self._save_last_step if save else lambda: "",
        )

    def _fit(self, after_step: Sequence[Callable[[], None]]) -> Progress:
        progress, console, plan = self.progress, self.log.console, self.plan
        self.agreed_signal.signals.defer()
        self.steps.start()
        self.clock.begin()
        self.saver.start(progress.step)
        if not self.steps.strategy.adds_in_order:
            self.settle_order()
        if plan.eval_on_start and progress.step == 0:
            self._evaluate_start()
        console.start_bar(self.samples_until(plan.total_steps), self.samples_until(progress.step))
        try:
            while not progress.stopped_early and (
                progress.step < plan.total_steps or self._end_is_due()
            ):
                if not self._end_is_due():  # due at once where a run was stopped in an evaluation
                    self.train_to_epoch_end(after_step)
                self._end_epoch()
                if self.agreed_signal.signum is not None and progress.step < plan.total_steps:
                    self._stop()
        finally:
            console.end_bar()
            self.enter("finishing")
            self.saver.wait()
        return progress

    def settle_order(self) -> None:
        """Runs a pass without effect: in its first pass DDP settles the order in which it adds
        gradients (see `Strategy.adds_in_order`)."""
        device = self.steps.precision.device
        self.prepare(0)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            self.enter("loading")
            batch = self.loader.made(next(iter(self.loader.epoch(0))))
            self.enter("computing")
            self._search_plans(batch)
            self.steps.pass_without_effect(batch)

    def _evaluate_start(self) -> None:
        """If a signal interrupts it, the loop stops after its first step."""
        evaluation = self._evaluate()
        if evaluation is not None:
            split, text = self.plan.eval_split, evaluation.in_words()
            self.log.metrics.write(**self._position(), split=split, **evaluation.figures)
            text = f"{split} loss {evaluation.loss:.4f}, {text}"
            self.log.console.say(f"before the first step: {text}")

    def _evaluate(self, is_last: bool = False) -> Evaluation | None:
        self.enter("evaluating")
        start = self.clock.seconds_total
        self.steps.strategy.make_equal()
        with self.steps.evaluated_weights():
            evaluation = self.evaluate(is_last)
        self.times.mark("evaluation")
        if self.time_budget is not None:
            self.time_budget.evaluated(self.clock.seconds_total - start)
        return evaluation

    def prepare(self, epoch: int) -> None:
        """Sets training mode for the part of the model that trains in `epoch`."""
        self.steps.model.train()
        if self.freeze is not None:
            self.freeze.apply(epoch)

    def train_to_epoch_end(self, after_step: Sequence[Callable[[], None]] = ()) -> None:
        progress, clock, times = self.progress, self.clock, self.times
        plan, steps_per_epoch = self.plan, self.loader.steps_per_epoch
        epoch, start_step = divmod(progress.step, steps_per_epoch)
        self.prepare(epoch)
        if self.freeze is not None and start_step == 0 and epoch == self.freeze.until:
            self.log.unfrozen(progress.step, epoch)
        clock.begin_epoch()
        times.mark("other")
        self.enter("loading")
        for batch in self.steps.batches(self.loader, epoch, start_step):
            times.mark("data")
            self.enter("computing")
            if plan.resizing is not None:
                batch = plan.resizing(batch, epoch)
            self.forward_backward(batch)
            times.mark("forward_backward")
            if not batch.ends_step:
                self.enter("loading")
                continue
            self.update()
            times.mark("optimizer")
            clock.samples += batch.step_samples
            self.log.console.advance(batch.step_samples)
            if progress.step == clock.started_step + 1:
                clock.end_first_step()
                self._show(self._read_sums())
            if self.mixing_control is not None:
                self.control_mixing(epoch)
            for call in after_step:
                call()
                times.mark("other")  # a profiler may have written its trace
            if self.timing is not None and self.timing.budget.is_due(progress.step):
                self._follow(self.timing, epoch)
            if progress.step % plan.log_every == 0:
                self._log_window()
            if progress.step % steps_per_epoch == 0 or progress.step >= plan.total_steps:
                break
            stop, save_is_due = self._agree_on_stop_and_save()
            if stop:
                clock.pause()
                self._stop()
            if save_is_due:
                clock.pause()
                self.save()
                clock.resume()
            if self.agreed_signal.ends:
                self._end_early()
                break
            self.enter("loading")
        self._log_window()
        clock.pause()

    def control_mixing(self, epoch: int) -> None:
        """Measures how far the model overfits, where that is due, and mixes accordingly."""
        assert self.mixing_control is not None
        reading = self.mixing_control.after_step(self.progress.step)
        if reading is not None:
            self.log.metrics.write(
                **self._position(), split="mixing", gap=reading.gap, strength=reading.strength
            )
            self.prepare(epoch)  # the evaluation has changed the mode of what is frozen, too
            self.times.mark("evaluation")

    def _follow(self, timing: Timing, epoch: int) -> None:
        """Plans how many steps there are time for, or corrects the plan. Collective."""
        progress, budget = self.progress, timing.budget
        self.clock.pause()

        def agreed_look() -> Look:
            look = budget.look(progress.step, self.steps.settling)
            return Look(*self.steps.exchange.gather_json(look)[0])

        look = agreed_look()
        if look.estimates:
            start = self.clock.seconds_total
            estimate = timing.evaluation_seconds()
            budget.evaluated(estimate, self.clock.seconds_total - start)
            self.prepare(epoch)  # the evaluation has changed the mode of what is frozen, too
            look = agreed_look()
        if look.refusal:
            raise TooShort(look.refusal)
        budget.take(look)
        if look.plan is not None:
            new = budget.plans[-1]
            _, self.plan.total_steps, self.plan.eval_every = new
            progress.time_plan = [list(plan) for plan in budget.plans]
            self.steps.schedule = timing.changed(self.steps.schedule)
            end = self.samples_until(new.total_steps)
            self.log.planned(self._position(), new, end, look.line)
        if look.rehearses:  # a resumed run goes on with the plan
            start = self.clock.seconds_total
            self.save(phase="other")  # no advice on --save_every follows from it
            self.saver.wait()
            saved = self.clock.seconds_total
            timing.rehearse_report()
            budget.rehearsed(saved - start, self.clock.seconds_total - saved)
        self.times.mark("other")
        self.clock.resume()

    def _agree_on_stop_and_save(self) -> tuple[bool, bool]:
        """(whether a signal has asked the run to stop, whether a checkpoint is due), the same on
        all ranks. Collective: one exchange answers both, so every rank must call this after the
        same steps.

        With --save_every in steps or epochs each rank knows by itself whether a checkpoint is due.
        In minutes rank 0 decides; with several ranks its answer, like a signal, arrives one call
        later.
        """
        saver, step = self.saver, self.progress.step
        if saver.every_steps is not None:
            self.agreed_signal.poll()
            save_is_due = saver.is_due(step)
        else:
            is_over = self.steps.exchange.rank == 0 and saver.is_due(step)
            # An answer that arrives in the step after a save was sent before that save: ignored.
            save_is_due = self.agreed_signal.poll(is_over) and step > saver.saved_step + 1
        return self.agreed_signal.signum is not None, save_is_due

    def _end_is_due(self) -> bool:
        """Whether an epoch or the run has ended and `_end_epoch` has not yet been called for it."""
        step = self.progress.step
        at_end = step % self.loader.steps_per_epoch == 0 or step >= self.plan.total_steps
        return at_end and step > 0 and step != self.progress.ended_step

    def _end_epoch(self) -> None:
        """Figures of the epoch, evaluation, best step, checkpoint. If the evaluation is
        interrupted, a resumed run does all of this again; so `progress` is changed only after
        it."""
        progress, plan, steps, log = self.progress, self.plan, self.steps, self.log
        finished, at = progress.step >= plan.total_steps, self._position()
        train, evaluation = figures(self._no_sums() | progress.epoch_sums), None
        self.times.mark("other")
        if plan.eval_every and (finished or round(at["epoch"]) % plan.eval_every == 0):
            evaluation = self._evaluate(finished)
            if evaluation is None:
                self._stop()
        progress.ended_step, progress.train = progress.step, train
        if progress.step % self.loader.steps_per_epoch == 0:
            progress.epoch_sums = self._no_sums()  # else a longer run completes this epoch
        time_share = self.times.fractions()
        log.metrics.write(
            **at, split="train", average_over="epoch", **train, lr=steps.learning_rate,
            samples_per_second=self.samples_per_second, time_share=time_share,
            peak_memory_bytes=peak_memory(steps.precision.device),
        )  # fmt: skip
        best, note = False, ""
        if evaluation is not None:
            progress.evaluated = at | {"split": plan.eval_split} | evaluation.figures
            log.metrics.write(**progress.evaluated)
            self.evaluation = evaluation
            if plan.eval_split == "val":
                best, note = self._update_best(evaluation, at["epoch"])
        log.say_epoch(at["epoch"], train, plan.eval_split, evaluation, note + steps.note())
        steps_per_epoch = self.loader.steps_per_epoch
        start_of_epoch = (progress.step - 1) // steps_per_epoch * steps_per_epoch
        if self.clock.started_step <= start_of_epoch:  # this process has trained all of it
            log.advise(time_share, is_last=finished)
        _, save_is_due = self._agree_on_stop_and_save()  # collective, so never skipped
        if self.agreed_signal.ends and not finished and evaluation is not None:
            self._end_early()  # without an evaluation: after the next step
        if save_is_due or finished or best or progress.stopped_early:
            self.save(final=finished or progress.stopped_early)

    def _update_best(self, evaluation: Evaluation, epochs_done: float) -> tuple[bool, str]:
        """(whether these weights are the best so far, a note for the log line)."""
        progress, by, note = self.progress, self.plan.best_by, ""
        decides = by or MEASURES["accuracy"]
        loss, value = evaluation.loss, evaluation.figures[decides.name]
        best, falls = progress.take_validation(evaluation.accuracy, loss, decides, value)
        progress.since_best = 0 if best or falls else progress.since_best + 1
        if best:
            progress.best_step, progress.best_epoch = progress.step, epochs_done
            note = " (best)"
        observed = loss if by is None or by.name == "loss" else 100 - by.score(value)
        if self.steps.schedule.observe(observed):
            followed = by or MEASURES["loss"]
            note += f"; no {followed.better_text}: the learning rate falls"
        if self._stops_early():
            progress.stopped_early = True
            evaluations = counted(progress.since_best, "evaluation")
            better = "" if decides.name == "loss" else f"{decides.better_text} or "
            note += f"; no {better}lower loss for {evaluations}: stopped early"
        return best, note

    def _end_early(self) -> None:
        """Makes this step the last one."""
        self.progress.stopped_early, self.plan.total_steps = True, self.progress.step

    def _stops_early(self) -> bool:
        """Whether patience is over while steps are left."""
        progress, patience = self.progress, self.plan.early_stop_patience
        is_over = patience is not None and progress.since_best >= patience
        return is_over and progress.step < self.plan.total_steps

    # ---- what the host reads ----------------------------------------------------------------

    def _no_sums(self) -> dict[str, float]:
        return dict.fromkeys(self.steps.sum_names, 0.0)

    def _read_sums(self) -> dict[str, float]:
        """The objective's sums since the last log line, by name; acts on steps that were left
        out."""
        before = self.progress.left_out
        sums, self.progress.left_out = self.steps.read_sums()
        self.on_nonfinite.react(self.steps, before, applied=sums["samples"] > 0)
        return sums

    def _log_window(self) -> None:
        progress, steps, sums = self.progress, self.steps, self._read_sums()
        steps.clear_window()
        if sums["samples"] == 0:  # an epoch that ended on a log line, or only skipped steps
            return
        for name, value in sums.items():
            progress.epoch_sums[name] = progress.epoch_sums.get(name, 0.0) + value
        speed = self.clock.lap()
        self.times.read()
        self.saver.poll()
        hardware, left_out = self.log.hardware.figures(speed), progress.left_out
        self.log.metrics.write(
            **self._position(), split="train", average_over="steps", **figures(sums),
            lr=steps.learning_rate, samples_per_second=round(speed, 1),
            skipped_steps=left_out.steps + left_out.by_scaler, **steps.figures(), **hardware,
        )  # fmt: skip
        self._show(sums, speed, hardware)

    def _show(self, sums, speed: float | None = None, hardware: dict | None = None) -> None:
        left = self.samples_until(self.plan.total_steps) - self.samples_until(self.progress.step)
        if self.time_budget is not None and not self.time_budget.plans:
            speed = None  # with which the time that is left would be shown
        self.log.show(sums, self._position()["epoch"], left, speed, hardware)

    def _position(self) -> dict:
        """{"step", "epoch"} of a record in the metrics."""
        step = self.progress.step
        return {"step": step, "epoch": step / self.loader.steps_per_epoch}

    @property
    def samples_per_second(self) -> float | None:
        """The speed of this process so far, its first step excluded."""
        return self.clock.speed(self.samples_until)

    def samples_until(self, step: int) -> int:
        """Samples in the first `step` steps."""
        epochs, rest = divmod(step, self.loader.steps_per_epoch)
        return epochs * self.loader.samples + min(rest * self.loader.step_size, self.loader.samples)

    # ---- saving and resuming ------------------------------------------------------------------

    def save(self, final: bool = False, phase: str = "checkpoint") -> None:
        """Saves a checkpoint of this step; `final`: waits until it is on disk (see Saver). `phase`:
        whose time it is."""
        self.times.mark("other")
        self.enter("saving")
        self.steps.strategy.make_equal()
        self.progress.window_sums = self._read_sums()
        self.progress.seconds_total = self.clock.seconds_total
        self.progress.gpu_seconds = self.clock.gpu_seconds
        if self.mixing_control is not None:
            self.progress.mixing = self.mixing_control.state_dict()
        self.saver.save(self.steps.snapshot(), self.progress.best_step, final)
        self.times.mark(phase)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restores model, optimizer, random states and position."""
        self.steps.restore(checkpoint)
        if self.mixing_control is not None and self.progress.mixing is not None:
            self.mixing_control.load_state_dict(self.progress.mixing, self.progress.step)
        self.progress.stopped_early = self._stops_early()
        self.clock.resumed()

    def _save_last_step(self) -> str:
        """After a failure: saves the last whole step, if possible; returns a note on it."""
        step = self.progress.step
        if step == 0:
            return ""
        if self.steps.updating:  # it failed half-way: only the last checkpoint is whole
            saved = self.saver.store.steps()
            if not saved:
                return ""
            step = saved[-1]
        else:
            self.steps.take_back()
            try:
                self.save(final=True)
            except UserError as error:  # it must not hide the failure before it
                return f" Not saved: {error}."
        return (
            f" Step {step} is saved. A resumed run would keep the batch size that does not fit: "
            f"start a new one with --pretrained {self.saver.run_folder}."
        )

    def _stop(self) -> None:
        assert self.agreed_signal.signum is not None
        self.save(final=True)
        raise StoppedBySignal(
            self.agreed_signal.signum,
            f"stopped after step {self.progress.step} and saved; resume with "
            f"--resume {self.saver.run_folder}",
        )
