"""A run: its processes, its folder and its device."""

import contextlib
import os
import tempfile
import time
from pathlib import Path

from ..errors import UserError
from ..exchange import Exchange
from ..files import reason
from ..launch.environment import launched
from ..launch.launchers import gpu_of, read_launch
from ..launch.signals import AgreedSignal, Signals, StoppedBySignal
from ..local.workers import Workers
from ..reporting.console import Console
from ..reporting.run_folder import (
    LOCK_OUTLIVES,
    RunFolder,
    SharedFolder,
    default_path,
    free_path,
    refuse_run,
)
from ..settings import TrainSettings
from ..settings.config import FASTEST, FILE, HOST
from ..training.progress import Progress
from ..training.time_budget import TooShort

# PyTorch is imported inside the functions that need it: --help and wrong flags answer at once.


class Run:
    """Sets up a run: processes, device, precision, console and folder.

    Args:
        settings, origin: as returned by `utils.settings.config.parse`.
        signals: from `run_entry`.
        model, data: names, for the folder and the summary.
        started: `time.monotonic()` when the command began; None: now.
    """

    def __init__(
        self,
        settings: TrainSettings,
        origin: dict,
        signals: Signals,
        model: str,
        data: str,
        started: float | None = None,
    ):
        self.started = time.monotonic() if started is None else started
        self.settings, self.origin, self.signals = settings, origin, signals
        self.model_name, self.data_name = model, data
        # Its rank among the processes that train together; None: it trains alone.
        self.place = launched() if settings.distributed else None
        if settings.distributed and self.place is None and read_launch(os.environ) is None:
            raise UserError(
                "--distributed: the environment names no other processes; start them by "
                f"bash run_distributed.sh {settings.entry} ..., torchrun, srun or mpirun, or leave "
                "the flag out"
            )
        self.console = Console(silent=self.place is not None and self.place.rank > 0)
        self._closing = contextlib.ExitStack()  # what is closed when the run ends
        self._set_up_device()
        self.folder: RunFolder | SharedFolder | None = None  # None unless the run trains
        self.trackers: list = []  # of the Python API, see reporting/trackers.py
        self.progress = Progress()
        # Micro-batches of a step with --batch_tokens, of all processes.
        self.micro_batches: int | None = None
        self._join()
        self.workers = self._divide_steps()
        if settings.action.trains:
            path = Path(settings.output) if settings.output else default_path(model, data)
            if origin["output"] in (FILE, HOST) and settings.resume is None:
                path = free_path(path, os.environ, self.console.say)
            of_first = Path(self.exchange.gather_json(str(path))[0])
            by_host = settings.host_config is not None and settings.output is not None
            self._open_folder(path if by_host else of_first)

    def _open_folder(self, path: Path) -> None:
        settings, source = self.settings, self.resumed_folder()
        if settings.dry_run:
            if source is None:
                refuse_run(path)
            scratch = tempfile.TemporaryDirectory(prefix="dry_run-")
            path = Path(self._closing.enter_context(scratch)) / "run"
        if self.leads:
            resumed = source is not None and same_folder(source, path)
            wait = 0
            if resumed and self.place is not None:
                # The machine of the first process may have died and still seem to hold the lock.
                # Meanwhile the other processes wait at the barrier below, which times out.
                wait = min(LOCK_OUTLIVES, int(60 * settings.dist_timeout))
            self.folder = RunFolder(path, resume=resumed, wait=wait, say=self.console.say)
            self._closing.callback(self.folder.close)
            if not self.folder.locked:
                self.console.say(
                    f"note: the file system of {path} has no locks: start no second run in this "
                    "folder"
                )
        self.exchange.barrier()
        if not self.leads:
            self.folder = SharedFolder(path)
            return
        try:
            self.console.open_log(self.folder.log)
        except OSError as error:
            self._closing.close()
            raise UserError(f"{self.folder.log}: {reason(error)}") from None

    def _join(self) -> None:
        """Joins the process group, if there are other processes."""
        self.exchange: Exchange = Exchange()
        self.agreed_signal = AgreedSignal(self.signals)
        self.watch = None  # a Watch, where there are other processes
        if self.place is None or self.place.world_size == 1:
            return
        from ..distributed.group import Agreement, join, meet
        from ..launch.watch import Watch

        seconds = 60 * self.settings.dist_timeout
        # The watch, which names the missing process, reports before the collectives time out.
        self.exchange = join(self.place, self.device, seconds + 60)
        settings = {} if self.settings.check else vars(self.settings)
        self.place = meet(self.exchange, self.place, self.device, settings)
        os.environ["LOCAL_WORLD_SIZE"] = str(self.place.local_world_size)
        self.watch = Watch(
            self.place.rank,
            self.place.world_size,
            seconds,
            lambda: self.progress.step,
        )
        self.close_at_end(self.watch)
        self.agreed_signal = AgreedSignal(self.signals, Agreement(self.exchange, self.watch))

    def _divide_steps(self) -> Workers:
        """The parts of every training step. With local steps there are as many as the run had at
        its start."""
        settings, exchange = self.settings, self.exchange
        size = exchange.size
        if settings.trains_locally and settings.action.trains:
            size = settings.local_workers or size
            self.change_settings({"local_workers": size})
        return Workers.divide(size, exchange.rank, exchange.size)

    def another_exchange(self) -> Exchange:
        """A second exchange with the same processes, for a background thread."""
        if self.exchange.size == 1:
            return self.exchange
        from ..distributed.group import ProcessExchange, another

        assert isinstance(self.exchange, ProcessExchange)
        return another(self.exchange, 60 * self.settings.dist_timeout)

    @property
    def leads(self) -> bool:
        """Whether this process prints and writes for the whole run."""
        return self.exchange.rank == 0

    def _set_up_device(self) -> None:
        """Chooses device, threads and precision, and seeds PyTorch."""
        # In this import C++ calls Python: an exception raised there would abort the process.
        with self.signals.held():
            import torch

        from ..engines.ort.session import why_missing
        from ..machine.backends import prefer_flash_attention
        from ..machine.cores import usable_cores
        from ..machine.eager_optimizers import eager_optimizers
        from ..machine.free_cores import follow_free_cores
        from ..machine.host_memory import free_memory_as_usual, keep_freed_memory
        from ..training.objective import Precision, resolve_precision, why_slow

        settings = self.settings
        if settings.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: PyTorch finds no GPU here; use --device cpu or auto")
        cuda = torch.cuda.is_available() and settings.device != "cpu"
        if cuda and self.place is not None:
            torch.cuda.set_device(gpu_of(self.place, torch.cuda.device_count()))
        alone = self.place is None and settings.device != "cpu" and settings.action.trains
        if alone and (note := gpu_note(torch.cuda.device_count(), settings.entry)):
            self.console.say(note)
        trains_by_ort = settings.engine == "ort" and settings.action.trains
        if trains_by_ort and (missing := why_missing()):
            raise UserError(f"--engine ort: {missing}")
        if cuda and (trains_by_ort or settings.infers_by_ort):
            raise UserError("--engine ort computes on a CPU, and there is a GPU: add --device cpu")
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        )
        if not cuda and settings.keep_freed_memory and keep_freed_memory():
            self._closing.callback(free_memory_as_usual)
        chosen = settings.threads or "OMP_NUM_THREADS" in os.environ
        if settings.threads:
            torch.set_num_threads(settings.threads)
        elif not chosen and usable_cores() < torch.get_num_threads():  # PyTorch reads no CPU quota
            torch.set_num_threads(usable_cores())
        self.threads = torch.get_num_threads()  # the most that are used
        self.free_cores = None
        fixed = settings.deterministic or settings.compile or settings.engine != "torch"
        if not (cuda or chosen or fixed):
            self.free_cores = follow_free_cores(self.console.say, self.console.log)
        torch.manual_seed(settings.seed)
        prefer_flash_attention()
        if not settings.compile:
            self._closing.enter_context(eager_optimizers())
        if settings.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        if FASTEST in (settings.precision, self.origin["precision"]):
            fastest = resolve_precision(FASTEST, self.device, settings.bf16_helps_cpus)
            text = f"--precision fastest is {fastest} on this {self.device.type.upper()}"
            if settings.precision == FASTEST:
                self.change_settings({"precision": fastest}, FASTEST)
                self.console.say(text)
            elif settings.precision != fastest:
                self.console.say(f"note: {text}; the run keeps {settings.precision}, as it began")
        self.precision = Precision(resolve_precision(settings.precision, self.device), self.device)
        if settings.action.trains and (slow := why_slow(self.precision.name, self.device)):
            self.console.say(f"note: {slow}: --precision fp32 is faster here")

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if isinstance(error, (UserError, StoppedBySignal)):
            self.console.log(str(error))  # why the run ended; run_entry prints it
        trained = self.progress.step > 0 and not isinstance(error, TooShort)
        if isinstance(error, UserError) and self.folder is not None and not trained:
            self.folder.discard()
        self._closing.close()
        self.console.close()
        if kind is None and self.exchange.size > 1:
            from ..distributed.group import leave

            leave()

    def close_at_end(self, resource):
        """Returns `resource`, whose `close()` is called when the run ends."""
        return self._closing.enter_context(contextlib.closing(resource))

    def interrupted(self) -> bool:
        """Whether the run is to stop. Collective."""
        return self.agreed_signal.arrived()

    def change_settings(self, values: dict, origin: str | None = None) -> None:
        """Changes settings, {name: value}, to values that the run has determined itself; nothing
        else changes them.

        Args:
            origin: where the values come from, for config.yaml; None: unchanged.
        """
        for name, value in values.items():
            if getattr(self.settings, name) != value:
                setattr(self.settings, name, value)
                self.origin[name] = origin or self.origin[name]

    def resumed_folder(self) -> Path | None:
        """The folder of the run that --resume names; None without it."""
        if self.settings.resume is None:
            return None
        path = Path(self.settings.resume)
        return path.parent.parent if path.parent.name == "checkpoints" else path

    @property
    def strategy_name(self) -> str:
        """How the processes train together; "single" if one trains alone."""
        together = self.exchange.size > 1 or self.settings.trains_locally
        return self.settings.strategy if together else "single"

    def numerical_environment(self) -> dict:
        """What must be the same for a resumed run to compute the same bits."""
        facts = {"device": self.device.type, "precision": self.precision.name}
        facts["strategy"] = self.strategy_name
        if self.settings.trains_locally:
            facts["local_workers"] = self.workers.size
        else:
            facts["processes"] = self.exchange.size
        return facts | ({"threads": self.threads} if self.device.type == "cpu" else {})


def same_folder(one: Path | None, other: Path) -> bool:
    """Whether both paths lead to the same folder; not if `one` is None."""
    return one is not None and one.resolve() == other.resolve()


def gpu_note(gpus: int, entry: str) -> str:
    """A line where a process alone trains on fewer GPUs than it sees, or on none of those that
    CUDA_VISIBLE_DEVICES names; "" elsewhere."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus > 1:
        return f"note: this is one of {gpus} GPUs; bash run_distributed.sh {entry} ... uses all"
    return f"note: CUDA_VISIBLE_DEVICES={visible} names no GPU" if visible and not gpus else ""
