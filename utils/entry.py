"""From a command line to an exit code: what all entry scripts do alike."""

import atexit
import contextlib
import functools
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from .errors import UserError, one_line
from .launch.environment import (
    LAUNCH_RUN,
    LaunchedAs,
    command_start,
    die_with_launcher,
    launched,
    leave_launch,
    note_exit_code,
    previous_exit_code,
    set_environment,
)
from .launch.flags import check_launch_flags, take_launch_flags, use_launch_flags
from .launch.signals import Signals, StoppedBySignal
from .machine.packages import left_out, mendable
from .runs.run import Run
from .settings import TrainSettings
from .settings.config import fields, parse
from .tasks.kinds import KINDS, kind_of

# PyTorch is imported inside the functions that need it: --help and wrong flags answer at once.

# How long a CPU thread that has finished its part spins before it sleeps, in turns of a loop.
# With OpenMP's default a single other busy process makes two training threads wait for each other
# most of the time (see benchmarks/results/busy_machine.md).
SPIN_TURNS = "10000"
# How long a process whose peer is gone waits for the launcher to end it.
LOST_PEER_SECONDS = 3.0


def run_entry(config_class, act: Callable, description: str, argv: list[str] | None = None):
    """Runs an entry script; returns its exit code.

    0: done. 1: a check of --check has failed. 2: a mistake in settings or data, told in one line.
    129, 130, 143: stopped by a signal. Anything else is a bug and keeps its traceback; where
    another process of the run is gone, a line says so.

    Args:
        act: called as `act(settings, origin, signals)`, where `origin` says of each setting where
            it comes from; returns an exit code, or None for 0.
    """
    argv = sys.argv[1:] if argv is None else argv
    os.environ.update(environment_of_entries())
    signals = Signals()
    try:
        return carry_out(config_class, act, description, argv, signals)
    except StoppedBySignal as stopped:
        place = _place()
        if place is None or place.rank == 0:
            with contextlib.suppress(OSError):  # a terminal that is closed
                print(stopped.line, file=sys.stderr, flush=True)
        return stopped.exit_code
    except Exception as error:
        if (told := mendable(error)) is not None:
            if note_exit_code(2):  # one of the launched processes says it
                print(f"error: {one_line(told)}", file=sys.stderr)
            return 2
        if (place := _place()) is None:
            raise
        from .distributed.group import is_lost_peer

        if not is_lost_peer(error):
            raise
        print(lost_peer_line(place.rank, error), file=sys.stderr, flush=True)
        # Waits until the launcher has seen the other process end, and names that one; it then ends
        # this one by SIGTERM.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(LOST_PEER_SECONDS)
        os._exit(1)  # without waiting for what hangs in the process group


def carry_out(
    config_class, act: Callable, description: str, argv: list[str], signals: Signals
) -> int:
    """As `run_entry`, but raises what that tells the user."""
    argv, launch_flags = take_launch_flags(argv, fields(config_class))
    use_launch_flags(launch_flags, argv)
    place = launched()
    if place is not None:
        die_with_launcher()
        code = previous_exit_code()
        if code is not None:  # a worker has ended this launch for good: a restart ends alike
            return code
    is_first = place is None or place.rank == 0
    say = functools.partial(print, flush=True) if is_first else lambda line: None
    settings, origin = parse(config_class, _as_launched(argv, place), description, say)
    if place is not None and not settings.distributed:
        leave_launch()
        place = None
    if place is not None:
        set_environment(place)
    line = check_launch_flags(launch_flags, place, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if line:
        say(line)
    action = settings.action
    reports = "report" not in action.without_effect and (action.trains or settings.report)
    if reports and (note := left_out("matplotlib", "plots")):
        say(note)
    return act(settings, origin, signals) or 0


def lost_peer_line(rank: int, error: Exception) -> str:
    """For the error of a collective, whose cause only its text may tell: an interface that does
    not exist, a firewall, a GPU without memory."""
    cause = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return f"rank {rank}: another process of this run is gone, or cannot be reached: {cause}"


@dataclass(frozen=True)
class Entry:
    """What an entry script gives. It is checked here, when the script is imported.

    Args:
        settings: a dataclass; its base class, ImageSettings or TextSettings, says for which kind of
            task the model is, and its `entry` is the script's name.
        build_model: (settings, card) -> the model, on the CPU.
        model_name: (settings) -> its name, for messages, the run's folder and the summary.
        text: the script's docstring, a line and examples, which --help shows; None: it has none,
            and --help shows its name.
        check_model: (settings) -> None; raises UserError for mistakes that can be found before the
            data are loaded, which may take long.

    Raises:
        TypeError: something is missing.
    """

    settings: type[TrainSettings]
    build_model: Callable
    model_name: Callable
    text: str | None
    check_model: Callable = lambda settings: None

    def __post_init__(self) -> None:
        for name, words in (
            ("build_model", "settings, card"),
            ("model_name", "settings"),
            ("check_model", "settings"),
        ):
            try:
                inspect.signature(getattr(self, name)).bind(*words.split(", "))
            except TypeError:
                raise TypeError(f"{name} of an entry is called with ({words})") from None
        own = vars(self.settings)
        if "__dataclass_fields__" not in own or not str(own.get("entry")).endswith(".py"):
            raise TypeError(
                "settings of an entry are a @dataclass with the script's name as `entry`"
            )
        if getattr(self.settings, "task", None) not in KINDS:
            raise TypeError("settings of an entry derive from ImageSettings or TextSettings")

    def main(self, argv: list[str] | None = None, started: float | None = None) -> int:
        """Does what the command line asks for; returns the exit code. `started`:
        `time.monotonic()` when the command began; None: with this process, or now if `argv` is
        given."""
        if started is None:
            started = command_start() if argv is None else time.monotonic()
        act = functools.partial(self._act, started, lambda run: None)
        return run_entry(self.settings, act, self.text or self.settings.entry, argv)

    def carry_out(
        self, argv: list[str], signals: Signals, started: float, began: Callable[[Run], None]
    ) -> int:
        """As `main`, but raises what that tells the user; `began` is called with the run before it
        trains."""
        act = functools.partial(self._act, started, began)
        return carry_out(self.settings, act, self.text or self.settings.entry, argv, signals)

    def _act(
        self, started: float, began: Callable, settings, origin: dict, signals: Signals
    ) -> int | None:
        if settings.check:
            with signals.held():  # imports PyTorch, see Run
                from .check.run_check import run_check
            return run_check(settings, origin, signals)
        name = self.model_name(settings)
        with Run(settings, origin, signals, name, settings.dataset, started) as run:
            from .runs.resume import load_checkpoint

            began(run)
            kind = kind_of(settings)(settings, self.build_model, name)
            kind.set_environment()
            self.check_model(settings)
            checkpoint = load_checkpoint(run)
            if settings.action.trains:
                from .inference.use_model import check_copy, copy_model
                from .runs.train import train

                copies = settings.checkpoint and not settings.dry_run and run.leads
                if copies:
                    check_copy(settings.checkpoint)
                train(run, kind, checkpoint)
                if copies:
                    copy_model(run, kind)
            elif settings.action.needs_data:
                from .inference.use_model import evaluate_only

                evaluate_only(run, kind, checkpoint)
            else:
                from .inference.use_model import use_model

                use_model(run, kind, checkpoint)
        return None


def print_lines(lines: Callable[[], list[str]]) -> int:
    """Prints what `lines()` returns; returns the exit code: 2 for what the user can mend."""
    try:
        print("\n".join(lines()), flush=True)
    except (UserError, ModuleNotFoundError) as error:
        print(f"error: {mendable(error) or error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, wants no more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    return 0


def end_process(code: int) -> NoReturn:
    """Ends the process of an entry script with this exit code.

    A launched process ends without Python's own shutdown: threads of PyTorch's process groups still
    run then, and one that calls into Python would abort the process.
    """
    if _place() is None:
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
    """The flags of a process that was launched with others: they include --distributed, unless the
    user says otherwise, and where run_distributed.sh has started it again, or it joins a run,
    --resume."""
    if place is None:
        return argv
    flags = {word.split("=", 1)[0] for word in argv}
    if not {"--distributed", "--no_distributed", "--no-distributed"} & flags:
        argv = [*argv, "--distributed"]
    run = os.environ.get(LAUNCH_RUN)
    if run is not None and (Path(run) / "config.yaml").is_file():
        argv = [*argv, "--resume", run]  # the last --resume counts
    return argv


def _place() -> LaunchedAs | None:
    try:
        return launched()
    except UserError:
        return None
