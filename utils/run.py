"""What the entry scripts assemble alike, once: exit codes, folder, engine, trainer, report."""

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from utils.config import parse, to_yaml
from utils.errors import UserError
from utils.files import reason, replace_file
from utils.reporting.console import Console, duration
from utils.reporting.metrics import MetricsLog
from utils.reporting.run_folder import RunFolder, default_path
from utils.settings import TrainSettings, save_interval
from utils.signals import Signals, Stopped

# PyTorch is imported inside the functions that need it: --help and wrong flags answer at once.

# How long a CPU thread that has finished its share spins before it sleeps, in turns of a loop.
# With OpenMP's default a single other busy process makes two training threads wait for each other
# most of the time (see docs/measurements.md).
SPIN_TURNS = "10000"


def run_entry(config_class, train: Callable, description: str, argv: list[str] | None = None):
    """Runs an entry script; returns its exit code.

    0: done. 2: settings or data that the user can mend, in one line. 130, 143: stopped by a
    signal. Anything else is a bug and keeps its traceback.

    Args:
        train: called as `train(settings, origin, signals)`.
    """
    signals = Signals()
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_TURNS)  # read when PyTorch is imported
    try:
        settings, origin = parse(config_class, sys.argv[1:] if argv is None else argv, description)
        train(settings, origin, signals)
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(stopped.line, file=sys.stderr)
        return stopped.exit_code
    return 0


class Run:
    """One run: its folder, console, device and arithmetic.

    Args:
        settings, origin: as `utils.config.parse` gives them.
        signals: from `run_entry`.
        model, data: names, for the folder and the summary.
    """

    def __init__(self, settings: TrainSettings, origin: dict, signals: Signals, model, data):
        self.started = time.monotonic()
        self.settings, self.origin, self.signals = settings, origin, signals
        self.model_name, self.data_name = model, data
        self.console = Console()
        self._set_up_engine()
        self.folder = None
        if not settings.eval_only:
            path = Path(settings.output) if settings.output else default_path(model, data)
            source = self._resumed_folder()
            self.folder = RunFolder(path, resume=source is not None and _same(source, path))
            try:
                self.console.open_log(self.folder.log)
            except OSError as error:
                self.folder.close()
                raise UserError(f"{self.folder.log}: {reason(error)}") from None

    def _set_up_engine(self) -> None:
        import torch

        from utils.training.objective import Precision, resolve_precision

        settings = self.settings
        if settings.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: PyTorch finds no GPU here; use --device cpu or auto")
        cuda = torch.cuda.is_available() and settings.device != "cpu"
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        )
        if settings.threads:
            torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed)
        torch.backends.cudnn.benchmark = not settings.deterministic
        if settings.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        self.precision = Precision(resolve_precision(settings.precision, self.device), self.device)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if isinstance(error, (UserError, Stopped)):
            self.console.log(str(error))  # why the run ended; run_entry prints it
        self.console.close()
        if self.folder is not None:
            self.folder.close()

    # ---- resuming -----------------------------------------------------------------------------

    def _resumed_folder(self) -> Path | None:
        if self.settings.resume is None:
            return None
        path = Path(self.settings.resume)
        return path.parent.parent if path.parent.name == "checkpoints" else path

    def checkpoint(self, fingerprint: str):
        """The checkpoint to go on from, verified, or None at the start of a run.

        Args:
            fingerprint: of the data; another one than the checkpoint's is refused.
        """
        from utils.training.checkpoint import Checkpoints, DamagedCheckpoint, read_checkpoint

        source, settings = self._resumed_folder(), self.settings
        if source is None:
            return None
        store = Checkpoints(source / "checkpoints", warn=self.console.say)
        path = Path(settings.resume)
        if path.parent.name == "checkpoints":
            newest = f"step-{max(store.steps(), default=0):08}"
            if path.name != newest and self.folder is not None and _same(source, self.folder.path):
                raise UserError(
                    f"--resume {path} is not the newest checkpoint of its run: give --output for a "
                    "folder of its own, or leave it out and resume the run"
                )
            try:
                loaded = read_checkpoint(path)
            except DamagedCheckpoint as error:
                raise UserError(f"--resume {path} is damaged ({error}): try {source}") from None
        else:
            loaded = store.load()
        if loaded is None:
            if settings.eval_only:
                raise UserError(f"--eval_only: {source} has no checkpoint yet")
            self.console.say(f"{source} has no checkpoint yet: the run starts from the beginning")
            return None
        saved = loaded.state["settings"]
        if saved["data_fingerprint"] != fingerprint:
            raise UserError(
                f"the data of {settings.data_dir} is not what the run in {source} was trained on; "
                "bring the old data back, or start a new run"
            )
        for name, now in self._engine().items():
            if saved[name] != now and not settings.eval_only:
                self.console.say(
                    f"note: {name} is {now} now and was {saved[name]} before: results will differ "
                    "in the last bits"
                )
        return loaded

    def _engine(self) -> dict:
        """What a resumed run must share with the one before to end with the same bits."""
        engine = {"device": self.device.type, "precision": self.precision.name}
        return engine | ({"threads": self.threads} if self.device.type == "cpu" else {})

    def evaluate_only(self, model, checkpoint, test: Callable) -> None:
        """Measures the weights of a checkpoint on the test set; the run stays as it is."""
        model.load_state_dict(checkpoint.model)
        result = test()
        self.console.say(
            f"step {checkpoint.step}: test loss {result.loss:.4f}, test accuracy "
            f"{result.accuracy:.2f} % on {result.samples:,} pictures"
        )

    # ---- training -----------------------------------------------------------------------------

    def interrupted(self) -> bool:
        return self.signals.received is not None

    @property
    def threads(self) -> int:
        import torch

        return torch.get_num_threads()

    def trainer(self, *, model, objective, loader, evaluate, eval_split, fingerprint, checkpoint):
        """A Trainer with everything that the settings say, put back to `checkpoint`.

        Returns None, and says so, where the run is finished already.
        """
        from utils.optim.factory import build_optimizer
        from utils.optim.schedules import Schedule
        from utils.training.checkpoint import Checkpoints
        from utils.training.trainer import Trainer

        settings, folder = self.settings, self.folder
        total_steps, limit = settings.epochs * loader.steps_per_epoch, "--epochs"
        if settings.max_steps is not None and settings.max_steps < total_steps:
            total_steps, limit = settings.max_steps, "--max_steps"
        if checkpoint is not None and self._is_finished(checkpoint.step, total_steps, limit):
            return None
        warmup_steps = settings.warmup_steps
        if warmup_steps is None:
            warmup_steps = round(settings.warmup_epochs * loader.steps_per_epoch)
        if warmup_steps >= total_steps:
            self.console.say(f"note: the warm-up ({warmup_steps} steps) takes the whole run")
        try:
            text = f"# {settings.entry}\n{to_yaml(settings, self.origin)}"
            replace_file(folder.config, text.encode(errors="surrogateescape"))
            source = self._resumed_folder()
            if checkpoint is not None and not _same(source, folder.path):
                shutil.copyfile(source / "metrics.jsonl", folder.metrics)
            metrics = MetricsLog(folder.metrics, warn=self.console.say)
            metrics.cut(checkpoint.state["metrics_bytes"] if checkpoint else 0)
        except OSError as error:
            raise UserError(f"--output {folder.path}: {reason(error)}") from None
        save_steps, save_seconds = save_interval(settings.save_every)
        trainer = Trainer(
            model=model,
            objective=objective,
            optimizer=build_optimizer(
                settings.optimizer,
                model,
                lr=settings.lr,
                weight_decay=settings.weight_decay,
                momentum=settings.momentum,
                decay_all=settings.decay_all,
            ),
            schedule=Schedule(settings.sched, total_steps, warmup_steps),
            loader=loader,
            precision=self.precision,
            total_steps=total_steps,
            evaluate=evaluate,
            eval_split=eval_split,
            eval_every=settings.eval_every,
            console=self.console,
            metrics=metrics,
            checkpoints=Checkpoints(
                folder.checkpoints, keep=settings.checkpoint_hist, warn=self.console.say
            ),
            signals=self.signals,
            save_steps=save_steps,
            save_seconds=save_seconds,
            clip=settings.clip,
            on_nonfinite=settings.on_nonfinite,
            log_every=settings.log_every,
            saved_settings={
                "entry": settings.entry,
                "data_fingerprint": fingerprint,
                "threads": self.threads,
                **self._engine(),
            },
        )
        trainer.started = self.started
        if checkpoint is not None:
            trainer.restore(checkpoint)
        return trainer

    def _is_finished(self, step: int, total_steps: int, limit: str) -> bool:
        """Whether the resumed run, which is at `step`, has nothing left to do; says so."""
        path = self.folder.path
        if step > total_steps:
            raise UserError(
                f"the run in {self.settings.resume} has done {step} steps and {limit} asks for "
                f"{total_steps}: give more, or start a new run with --output"
            )
        try:
            summary = json.loads(self.folder.summary.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        if step < total_steps or summary.get("status") != "finished":
            return False
        self.console.say(
            f"this run is finished: {summary['epochs']:g} epochs, test accuracy "
            f"{summary['test_accuracy']:.2f} % in {path}; a larger {limit} goes on with it"
        )
        return True

    def train(self, trainer, test: Callable, **sizes) -> None:
        """Trains to the end, measures on the test set, and reports.

        Args:
            test: () -> Evaluation, on the whole test set.
            sizes: what the summary says about the data besides.
        """
        from utils.report import write_report

        resumed = f", from step {trainer.progress.step}" if trainer.progress.step else ""
        parameters = sum(p.numel() for p in trainer.model.parameters())
        self.console.say(
            f"{self.model_name} ({parameters / 1e6:.2f} M parameters) on {self.data_name} "
            f"({trainer.loader.samples:,} pictures), {self.device.type} {self.precision.name}, "
            f"batch {trainer.loader.step_size}, {trainer.total_steps} steps{resumed}; "
            f"run folder {self.folder.path}"
        )
        try:
            progress = trainer.fit()
        except Stopped:
            write_report(self, trainer, "interrupted", None, sizes)
            raise
        at_end = progress.evaluated or {}
        if at_end.get("split") == "test" and at_end["step"] == progress.step:
            figures = {key: at_end[key] for key in ("loss", "accuracy", "samples")}
        else:
            self.console.say("measuring on the test set")
            figures = asdict(self._test(trainer, test, sizes))
            epoch = progress.step / trainer.loader.steps_per_epoch
            trainer.metrics.write(step=progress.step, epoch=epoch, split="test", **figures)
        write_report(self, trainer, "finished", figures, sizes)
        finite = figures["loss"] is not None and math.isfinite(figures["loss"])
        self.console.say(
            f"test accuracy {figures['accuracy']:.2f} % on {figures['samples']:,} pictures"
            f"{'' if finite else ' (the loss is not finite)'}, after "
            f"{duration(progress.seconds_training)} of training: {self.folder.path}"
        )

    def _test(self, trainer, test: Callable, sizes: dict):
        """The final evaluation; when a signal stops it, the finished training is saved already."""
        from utils.report import write_report

        result = test()
        if result is None:
            write_report(self, trainer, "interrupted", None, sizes)
            raise Stopped(
                self.signals.received,
                "stopped before the last evaluation, all steps are saved; go on with "
                f"--resume {self.folder.path}",
            )
        return result


def _same(one: Path | None, other: Path) -> bool:
    return one is not None and one.resolve() == other.resolve()
