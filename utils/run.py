"""What the entry scripts assemble alike, once: exit codes, folder, engine, the run resumed."""

import atexit
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from utils.config import parse
from utils.distributed.environment import (
    LAUNCH_FOLDER,
    LaunchedAs,
    die_with_launcher,
    launched,
    note_exit_code,
    previous_exit_code,
)
from utils.errors import UserError
from utils.exchange import Exchange
from utils.files import reason
from utils.reporting.console import Console
from utils.reporting.run_folder import RunFolder, SharedFolder, default_path, refuse_run
from utils.settings import TrainSettings
from utils.signals import Signals, Stopped, Stopping

# PyTorch is imported inside the functions that need it: --help and wrong flags answer at once.

# How long a CPU thread that has finished its share spins before it sleeps, in turns of a loop.
# With OpenMP's default a single other busy process makes two training threads wait for each other
# most of the time (see docs/measurements.md).
SPIN_TURNS = "10000"
# How long a process whose peer is gone waits for the launcher to end it.
LOST_PEER_SECONDS = 3.0


def run_entry(config_class, train: Callable, description: str, argv: list[str] | None = None):
    """Runs an entry script; returns its exit code.

    0: done. 2: settings or data that the user can mend, in one line. 130, 143: stopped by a
    signal. Anything else is a bug and keeps its traceback.

    Args:
        train: called as `train(settings, origin, signals)`.
    """
    place = launched()
    if place is not None:
        die_with_launcher()
        code = previous_exit_code()
        if code is not None:  # this process is started again for what a restart cannot mend
            return code
    signals = Signals()
    argv = sys.argv[1:] if argv is None else argv
    os.environ.update(environment_of_entries())
    try:
        settings, origin = parse(config_class, _as_launched(argv, place), description)
        train(settings, origin, signals)
    except UserError as error:
        if note_exit_code(2):  # of processes that train together one says it
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        if place is None or place.rank == 0:
            print(stopped.line, file=sys.stderr)
        return stopped.exit_code
    except Exception as error:
        if place is None or not _is_lost_peer(error):
            raise
        print(f"rank {place.rank}: another process of this run is gone", file=sys.stderr)
        sys.stderr.flush()
        # The launcher is to see the other one's end first, and name it; then it ends this one.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(LOST_PEER_SECONDS)
        os._exit(1)  # what hangs in the group is not waited for
    return 0


def end_process(code: int) -> NoReturn:
    """Ends the process of an entry script with this exit code.

    Of processes that train together each ends before Python takes itself apart: threads of
    PyTorch's process groups still run then, and one that comes upon Python aborts the process.
    """
    if launched() is None:
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def environment_of_entries() -> dict[str, str]:
    """Variables that have to be there before PyTorch is imported, where the user has not set
    them."""
    own = {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": SPIN_TURNS}
    own["KINETO_LOG_LEVEL"] = "99"  # the profiler's own chatter on stderr
    return {name: value for name, value in own.items() if name not in os.environ}


def _as_launched(argv: list[str], place: LaunchedAs | None) -> list[str]:
    """The flags of a process that torchrun has started: they include --distributed, and where the
    launcher has started it again, or it joins a run, --resume."""
    if place is None:
        return argv
    words = [part for word in argv for part in word.split("=", 1)]
    if "--distributed" not in words:
        argv = [*argv, "--distributed"]
    if LAUNCH_FOLDER in os.environ and "--output" in words and not {"--resume", "-r"} & {*words}:
        output = words[len(words) - words[::-1].index("--output")]
        if (Path(output) / "config.yaml").is_file():
            argv = [*argv, "--resume", output]
    return argv


def _is_lost_peer(error: Exception) -> bool:
    from utils.distributed.group import is_lost_peer

    return is_lost_peer(error)


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
        self.place = launched() if settings.distributed else None
        if settings.distributed and self.place is None:
            raise UserError(
                "--distributed is for processes that torchrun has started: "
                f"bash run_distributed.sh {settings.entry} ..."
            )
        self.console = Console(silent=self.place is not None and self.place.rank > 0)
        self._set_up_engine()
        self._closing = contextlib.ExitStack()
        self.folder = self.trainer = self.strategy = None  # see build.py, train.py
        self.micro_batches: int | None = None  # of a step with --batch_tokens, all processes'
        self._join()
        if not settings.without_training:
            path = Path(settings.output) if settings.output else default_path(model, data)
            self._open_folder(Path(self.exchange.gather_json(str(path))[0]))

    def _open_folder(self, path: Path) -> None:
        settings, source = self.settings, self.resumed_folder()
        if settings.dry_run:
            if source is None:
                refuse_run(path)
            scratch = tempfile.TemporaryDirectory(prefix="dry_run-")
            path = Path(self._closing.enter_context(scratch)) / "run"
        if self.leads:
            self.folder = RunFolder(path, resume=source is not None and same(source, path))
            self._closing.callback(self.folder.close)
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
        """Forms the group with the other processes of the run, if there are any."""
        self.exchange: Exchange = Exchange()
        self.stopping = Stopping(self.signals)
        if self.place is None or self.place.world_size == 1:
            return
        from utils.distributed.group import Agreement, join, leave
        from utils.distributed.watch import Watch

        seconds = 60 * self.settings.dist_timeout
        # The watch speaks before the collectives give up, which name nobody.
        self.exchange = join(self.place, self.device, seconds + 60)
        watch = Watch(
            self.place.rank,
            self.place.world_size,
            seconds,
            lambda: self.trainer.progress.step if self.trainer else 0,
        )
        self.closing(watch)
        self.stopping = Stopping(self.signals, Agreement(self.exchange, 2, watch))
        self._leave = leave

    def another_exchange(self) -> Exchange:
        """With the same processes, for a thread beside the training."""
        if self.exchange.size == 1:
            return self.exchange
        from utils.distributed.group import another

        return another(self.exchange, 60 * self.settings.dist_timeout)

    @property
    def leads(self) -> bool:
        """Whether this process speaks and writes for all of the run."""
        return self.exchange.rank == 0

    def _set_up_engine(self) -> None:
        # C++ calls Python in this import: an exception there would abort the process.
        with self.signals.held():
            import torch

        from utils.training.cudnn import prefer_flash_attention
        from utils.training.free_cores import follow_free_cores
        from utils.training.host_memory import keep_freed_memory
        from utils.training.objective import Precision, resolve_precision

        settings = self.settings
        if settings.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: PyTorch finds no GPU here; use --device cpu or auto")
        cuda = torch.cuda.is_available() and settings.device != "cpu"
        if cuda and self.place is not None:
            if self.place.local_rank >= torch.cuda.device_count():
                raise UserError(
                    f"process {self.place.local_rank + 1} of this machine has no GPU of its own, "
                    f"there are {torch.cuda.device_count()}: start fewer, or take --device cpu"
                )
            torch.cuda.set_device(self.place.local_rank)
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        )
        if not cuda and settings.keep_freed_memory:
            keep_freed_memory()
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.threads = torch.get_num_threads()  # at most
        chosen = settings.threads or "OMP_NUM_THREADS" in os.environ
        self.free_cores = None
        if not (cuda or chosen or settings.deterministic or settings.compile):
            self.free_cores = follow_free_cores(self.console.say, self.console.log)
        torch.manual_seed(settings.seed)
        prefer_flash_attention()
        if settings.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        self.precision = Precision(resolve_precision(settings.precision, self.device), self.device)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if isinstance(error, (UserError, Stopped)):
            self.console.log(str(error))  # why the run ended; run_entry prints it
        trained = self.trainer is not None and self.trainer.progress.step > 0
        if isinstance(error, UserError) and self.folder is not None and not trained:
            self.folder.discard()
        self._closing.close()
        self.console.close()
        if kind is None and self.exchange.size > 1:
            self._leave()

    def closing(self, thing):
        """`thing`, which is closed when the run ends."""
        return self._closing.enter_context(contextlib.closing(thing))

    def interrupted(self) -> bool:
        """Whether the run is to stop; with many processes to be asked by all of them alike."""
        return self.stopping.asked()

    # ---- resuming -----------------------------------------------------------------------------

    def resumed_folder(self) -> Path | None:
        if self.settings.resume is None:
            return None
        path = Path(self.settings.resume)
        return path.parent.parent if path.parent.name == "checkpoints" else path

    def load_checkpoint(self):
        """The checkpoint to go on from, verified, or None at the start of a run."""
        from utils.training.checkpoint import Checkpoints, DamagedCheckpoint, read_checkpoint

        source, settings = self.resumed_folder(), self.settings
        if source is None:
            return None
        store = Checkpoints(source / "checkpoints", warn=self.console.say)
        path = Path(settings.resume)
        if path.parent.name == "checkpoints":
            newest = f"step-{max(store.steps(), default=0):08}"
            if path.name != newest and self.folder is not None and same(source, self.folder.path):
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
        steps = self.exchange.gather_json(loaded and loaded.step)
        if len(set(steps)) > 1:
            raise UserError(
                f"--resume {source}: not all processes see the same checkpoints (steps {steps}); "
                "the folder must be on a file system that all machines share"
            )
        if loaded is None:
            if settings.without_training:
                raise UserError(f"--{settings.without_training[0]}: {source} has no checkpoint yet")
            self.console.say(f"{source} has no checkpoint yet: the run starts from the beginning")
            return None
        for name, now in self.engine().items():
            saved = loaded.state["settings"].get(name, now)
            if saved != now and not settings.without_training:
                self.console.say(
                    f"note: {name} is {now} now and was {saved} before: results will differ "
                    "in the last bits"
                )
        if not settings.without_training:
            self._keep_step(loaded.state["settings"])
        return loaded

    def _keep_step(self, saved: dict) -> None:
        """Another number of processes changes who computes what of an optimizer step, not its
        samples."""
        settings, before = self.settings, saved.get("micro_batches")
        now = settings.accumulation_steps * self.exchange.size
        if before in (None, now):
            return
        if getattr(settings, "batch_tokens", None) is not None:
            self.micro_batches = before
        elif settings.global_batch is None:
            settings.global_batch = saved["global_batch_size"]
            self.console.say(
                f"an optimizer step keeps its {settings.global_batch} samples (--global_batch), as "
                f"with {saved['processes']} processes"
            )

    def check_data(self, checkpoint, fingerprint: str) -> None:
        """Refuses to go on with other data than the checkpoint's."""
        if (
            checkpoint is not None
            and checkpoint.state["settings"]["data_fingerprint"] != fingerprint
        ):
            raise UserError(
                f"the data of {self.settings.data_dir} is not what the run in "
                f"{self.resumed_folder()} was trained on; bring the old data back, or start a new "
                "run"
            )

    def engine(self) -> dict:
        """What a resumed run must share with the one before to end with the same bits."""
        engine = {"device": self.device.type, "precision": self.precision.name}
        engine["processes"] = self.exchange.size
        return engine | ({"threads": self.threads} if self.device.type == "cpu" else {})


def same(one: Path | None, other: Path) -> bool:
    return one is not None and one.resolve() == other.resolve()
