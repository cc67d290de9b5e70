"""The loop: every entry trains with this one.

The host runs ahead of the device. It reads from it at a log line, before a checkpoint and at the
end of an epoch, and nowhere else (`_read_sums`).
"""

import time
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import nn

from utils.errors import UserError
from utils.files import reason
from utils.reporting.console import Console, duration
from utils.reporting.metrics import MetricsLog
from utils.signals import Signals, Stopped
from utils.training.checkpoint import (
    Checkpoint,
    Checkpoints,
    optimizer_tensors,
    restore_optimizer,
)
from utils.training.evaluation import Evaluation
from utils.training.guard import Guard
from utils.training.objective import Precision
from utils.training.progress import Clock, Progress, figures
from utils.training.random_state import random_states, restore_random_states

# fp16: a loss scale below this means that no scale makes the gradients finite.
SMALLEST_SCALE = 1e-3
# --on_nonfinite skip: after so many steps on end that could not be applied, the run is stopped.
BARREN_STEPS = 100


class Trainer:
    """Trains a model, and can be stopped and resumed at any step.

    Args:
        model: on its device; never a compiled wrapper (the objective may hold one).
        objective: (inputs, targets) -> summed loss, sums (see training/objective.py).
        optimizer: honours `found_inf` (see optim/factory.py).
        schedule: `apply(optimizer, step)` sets the learning rate of a step.
        loader: `epoch(epoch, start_step)` yields batches, `steps_per_epoch` is their number.
        precision: its scaler is used around backward.
        total_steps: optimizer steps of the whole run.
        evaluate: () -> Evaluation or None when interrupted; called at the end of epochs.
        eval_split: what `evaluate` measures: "val", by which the best step is kept, or "test".
        eval_every: epochs between evaluations; 0 for none.
        clip: largest global L2 norm of the gradient; None for any.
        on_nonfinite: "stop" or "skip", when a loss or gradient is not finite.
        log_every: steps between log lines.
        checkpoints, save_steps, save_seconds: where and how often to save; either interval.
        saved_settings: goes into every checkpoint.
        console, metrics, signals: of the run.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        objective: Callable,
        optimizer: torch.optim.Optimizer,
        schedule,
        loader,
        precision: Precision,
        total_steps: int,
        evaluate: Callable[[], Evaluation | None],
        eval_split: str,
        eval_every: int,
        console: Console,
        metrics: MetricsLog,
        checkpoints: Checkpoints,
        signals: Signals,
        save_steps: int | None = None,
        save_seconds: float | None = None,
        clip: float | None = None,
        on_nonfinite: str = "stop",
        log_every: int = 20,
        saved_settings: dict | None = None,
    ):
        self.model, self.objective, self.optimizer = model, objective, optimizer
        self.schedule, self.loader, self.precision = schedule, loader, precision
        self.scaler = precision.scaler()
        self.guard = Guard(model)
        self.total_steps, self.clip = total_steps, clip
        self.on_nonfinite, self.log_every = on_nonfinite, log_every
        self.evaluate, self.eval_split, self.eval_every = evaluate, eval_split, eval_every
        self.console, self.metrics, self.signals = console, metrics, signals
        self.checkpoints, self.saved_settings = checkpoints, saved_settings or {}
        self.save_steps, self.save_seconds = save_steps, save_seconds
        self.progress = Progress()
        device = precision.device
        self.step_sums = torch.zeros(3, dtype=torch.float64, device=device)
        self.window = torch.zeros(3, dtype=torch.float64, device=device)
        self.started_step = 0  # of this process
        self.seconds_first_step = 0.0  # of this process; compiling is in it
        self._last_save = self.started = time.monotonic()
        self._saved_step = self._barren_steps = 0
        self._seconds_before = 0.0  # of the processes before this one

    # ---- one step ---------------------------------------------------------------------------

    def forward_backward(self, batch) -> None:
        loss, sums = self.objective(batch.inputs, batch.targets)
        self.scaler.scale(loss / batch.step_samples).backward()
        self.step_sums += sums

    def update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        norm = self.guard.gradient_norm()
        bad = self.guard.judge(
            self.step_sums[0], norm, self.progress.step, self.scaler.is_enabled()
        )
        if self.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.guard.parameters, self.clip, norm)
        self.schedule.apply(self.optimizer, self.progress.step)
        self.optimizer.found_inf = bad.float()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.update()
        self.guard.take_back(bad)
        self.window += torch.where(bad, 0.0, self.step_sums)
        self.step_sums.zero_()
        self.progress.step += 1

    # ---- the loop ---------------------------------------------------------------------------

    def fit(self) -> Progress:
        """Trains to the end. Raises Stopped on a signal, UserError when it cannot go on."""
        progress = self.progress
        self.signals.defer()
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        self.started_step = self._saved_step = progress.step
        self._started_seconds = progress.seconds_training
        self._last_save = time.monotonic()
        self.console.start_bar(
            self.samples_until(self.total_steps), self.samples_until(progress.step)
        )
        try:
            while progress.step < self.total_steps or self._end_is_due():
                if not self._end_is_due():
                    self._train_to_epoch_end()
                self._end_epoch()
                if self.signals.received is not None and progress.step < self.total_steps:
                    self._stop()
        finally:
            self.console.end_bar()
        return progress

    def _train_to_epoch_end(self) -> None:
        progress, epoch_steps = self.progress, self.loader.steps_per_epoch
        epoch, start_step = divmod(progress.step, epoch_steps)
        clock = Clock(progress, self.precision.device)
        self.guard.remember()
        for batch in self.loader.epoch(epoch, start_step):
            self.forward_backward(batch)
            if not batch.ends_step:
                continue
            self.update()
            clock.samples += batch.step_samples
            self.console.advance(batch.step_samples)
            if progress.step == self.started_step + 1:
                self.seconds_first_step = clock.first_step()
                self._show(self._read_sums())
            if progress.step % self.log_every == 0:
                self._log_window(clock)
            if progress.step % epoch_steps == 0 or progress.step >= self.total_steps:
                break
            if self.signals.received is not None:
                clock.pause()
                self._stop()
            if self._save_is_due():
                clock.pause()
                self.save()
                clock.resume()
            self.guard.remember()
        self._log_window(clock)
        clock.pause()

    def _end_is_due(self) -> bool:
        """An epoch is over, or the run, and its end has not been carried out yet."""
        step = self.progress.step
        at_end = step % self.loader.steps_per_epoch == 0 or step >= self.total_steps
        return 0 < step != self.progress.ended_step and at_end

    def _end_epoch(self) -> None:
        """Figures of the epoch, evaluation, best step, checkpoint. Repeated after an interruption
        from its start, so it changes `progress` only once nothing can interrupt it."""
        progress = self.progress
        finished = progress.step >= self.total_steps
        epochs_done = progress.step / self.loader.steps_per_epoch
        train = figures(progress.epoch_sums)
        evaluation = None
        due = self.eval_every and (finished or round(epochs_done) % self.eval_every == 0)
        if due:
            evaluation = self.evaluate()
            if evaluation is None:
                self._stop()
        progress.ended_step, progress.train = progress.step, train
        progress.epoch_sums = [0.0, 0.0, 0.0]
        position = {"step": progress.step, "epoch": epochs_done}
        self.metrics.write(
            **position, split="train", average_over="epoch", **train, lr=self.learning_rate
        )
        line = f"epoch {epochs_done:g}: train loss {train['loss']:.4f}, "
        line += f"accuracy {train['accuracy']:.2f} %"
        best = False
        if evaluation is not None:
            progress.evaluated = position | {"split": self.eval_split} | asdict(evaluation)
            self.metrics.write(**progress.evaluated)
            line += f"; {self.eval_split} loss {evaluation.loss:.4f}, "
            line += f"accuracy {evaluation.accuracy:.2f} %"
            best = self.eval_split == "val" and (
                progress.best_val_accuracy is None
                or evaluation.accuracy > progress.best_val_accuracy
            )
            if best:
                progress.best_step, progress.best_epoch = progress.step, epochs_done
                progress.best_val_accuracy = evaluation.accuracy
                line += " (best)"
        self.console.say(line)
        if finished or best or self._save_is_due():
            self.save(final=finished)

    # ---- what the host reads, and says --------------------------------------------------------

    def _read_sums(self) -> list[float]:
        """The sums since the last call and what was left out: the one place of waiting."""
        values = torch.cat([self.window, self.guard.left_out.double()]).tolist()
        sums, left_out = values[:3], [int(value) for value in values[3:]]
        self._judge_left_out(left_out, sums)
        return sums

    def _log_window(self, clock: Clock) -> None:
        sums = self._read_sums()
        self.window.zero_()
        progress = self.progress
        if sums[2] == 0:  # an epoch that ended on a log line, or nothing but skipped steps
            return
        progress.epoch_sums = [a + b for a, b in zip(progress.epoch_sums, sums, strict=True)]
        mean, speed = figures(sums), clock.lap()
        epoch = progress.step / self.loader.steps_per_epoch
        self.metrics.write(
            step=progress.step, epoch=epoch, split="train", average_over="steps", **mean,
            lr=self.learning_rate, samples_per_second=round(speed, 1),
            skipped_steps=progress.left_out[0] + progress.left_out[2],
        )  # fmt: skip
        self._show(sums, speed)

    def _show(self, sums: list[float], speed: float | None = None) -> None:
        """Loss and accuracy beside the bar, or as a plain line now and then."""
        progress, mean = self.progress, figures(sums)
        text = f"loss {mean['loss']:.3f}, {mean['accuracy']:.1f} %"
        if not self.console.live:
            epoch = progress.step / self.loader.steps_per_epoch
            text = f"epoch {epoch:.2f}: train loss {mean['loss']:.4f}, "
            text += f"accuracy {mean['accuracy']:.2f} %"
        if speed and not self.console.live:
            left = self.samples_until(self.total_steps) - self.samples_until(progress.step)
            text += f", {speed:,.0f} samples/s, {duration(left / speed)} left"
        self.console.progress(text)

    def _judge_left_out(self, left_out: list[int], sums: list[float]) -> None:
        new = left_out[0] - self.progress.left_out[0]
        self.progress.left_out = left_out
        if self.scaler.is_enabled() and self.scaler.get_scale() < SMALLEST_SCALE:
            raise UserError(
                f"step {self.progress.step}: no loss scale keeps the fp16 gradients finite; use "
                "--precision bf16 or fp32, or a lower --lr"
            )
        if not new:
            return
        first = left_out[1]
        self._barren_steps = 0 if sums[2] else self._barren_steps + new
        if self.on_nonfinite == "skip" and self._barren_steps < BARREN_STEPS:
            self.console.say(f"{new} step(s) with a loss or gradient that is not finite: skipped")
            return
        saved = self.checkpoints.steps()
        last = f"; the last checkpoint is of step {saved[-1]}" if saved else ""
        lr = self.optimizer.param_groups[0]["base_lr"]
        raise UserError(
            f"step {first + 1}: the loss or its gradient is not finite; the step was not applied. "
            f"Likely causes: a learning rate that is too high (--lr {lr:g}: lower it, add "
            "--warmup_epochs or --clip 1), fp16 (take --precision bf16), bad data; "
            f"--on_nonfinite skip leaves such steps out{last}"
        )

    @property
    def samples_per_second(self) -> float | None:
        """Of this process, without its first step, in which memory is set up and code compiled."""
        if self.progress.step == self.started_step:  # nothing was left to do
            seconds = self.progress.seconds_training
            return self.samples_until(self.progress.step) / seconds if seconds else None
        first = self.started_step + 1
        samples = self.samples_until(self.progress.step) - self.samples_until(first)
        seconds = self.progress.seconds_training - self._started_seconds - self.seconds_first_step
        return samples / seconds if samples and seconds > 0 else None

    @property
    def seconds_total(self) -> float:
        """Of all processes of this run."""
        return self._seconds_before + time.monotonic() - self.started

    @property
    def learning_rate(self) -> float:
        """Of the last step."""
        return self.optimizer.param_groups[0]["lr"]

    def samples_until(self, step: int) -> int:
        """Samples that the first `step` steps train on."""
        epochs, rest = divmod(step, self.loader.steps_per_epoch)
        return epochs * self.loader.samples + min(rest * self.loader.step_size, self.loader.samples)

    # ---- saving and resuming ------------------------------------------------------------------

    def _save_is_due(self) -> bool:
        if self.save_steps is not None:
            return self.progress.step - self._saved_step >= self.save_steps
        return time.monotonic() - self._last_save >= (self.save_seconds or float("inf"))

    def save(self, final: bool = False) -> None:
        """Writes a checkpoint of the present step. A disk that is full is said, and tried again
        when the next one is due; only the last checkpoint must succeed."""
        sums = self._read_sums()
        progress = self.progress
        progress.window_sums, progress.seconds_total = sums, self.seconds_total
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        tensors, optimizer = optimizer_tensors(self.optimizer, names)
        self._last_save, self._saved_step = time.monotonic(), progress.step
        try:
            state = {
                "format": 1,
                "progress": asdict(progress),
                "optimizer": optimizer,
                "scaler": self.scaler.state_dict(),
                "random": random_states(),
                "settings": self.saved_settings,
                "metrics_bytes": self.metrics.position(),
            }
            checkpoint = Checkpoint(progress.step, self.model.state_dict(), tensors, state)
            self.checkpoints.save(checkpoint, progress.best_step)
        except OSError as error:
            before = [step for step in self.checkpoints.steps() if step < progress.step]
            last = f"that of step {before[-1]} is intact" if before else "there is none before it"
            line = f"no checkpoint of step {progress.step}: {reason(error)}; {last}"
            if final:
                raise UserError(f"{line}; make room and --resume {self._run_folder()}") from None
            self.console.say(f"{line}; the run goes on and tries again")

    def restore(self, checkpoint: Checkpoint) -> None:
        """Puts model, optimizer, random states and position back to where they were saved."""
        try:
            self.model.load_state_dict(checkpoint.model)
        except RuntimeError as error:
            detail = " ".join(str(error).split())
            raise UserError(f"the checkpoint does not fit the model: {detail}") from None
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        state = checkpoint.state
        restore_optimizer(self.optimizer, names, checkpoint.optimizer, state["optimizer"])
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        restore_random_states(state["random"])
        self.progress = Progress(**state["progress"])
        self._seconds_before = self.progress.seconds_total
        device = self.precision.device
        self.window.copy_(torch.tensor(self.progress.window_sums, dtype=torch.float64))
        self.guard.left_out = torch.tensor(self.progress.left_out, device=device)

    def _stop(self) -> None:
        self.save(final=True)
        raise Stopped(
            self.signals.received,
            f"stopped after step {self.progress.step} and saved; go on with "
            f"--resume {self._run_folder()}",
        )

    def _run_folder(self):
        return self.checkpoints.folder.parent
