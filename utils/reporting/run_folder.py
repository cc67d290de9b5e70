"""The folder of a run: found, created, and locked against a second run."""

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import UserError
from ..files import reason

RUNS = Path("runs")
TOKENIZER = "tokenizer.json"
REPORT = "report"  # subfolder for --report
EVALUATED, TO_CHECK, PAGE = "evaluated.csv", "labels_to_check.csv", "report.html"
# What flock raises where the file system has no locks.
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
# Seconds, for NFS: it may remember for 30 to 60 that a folder was absent, and it keeps the locks of
# a machine that has died for about 90.
APPEARS_WITHIN, LOCK_OUTLIVES = 60, 120


def find_run(resume: str, output: str | None, entry: str) -> Path:
    """The folder of the run that `--resume` refers to.

    Args:
        resume: "auto", a run's folder, or the folder of one of its checkpoints.
        output: the value of `--output`, where "auto" looks first.
        entry: name of the entry script; "auto" takes its newest run below runs/.
    """
    if resume != "auto":
        path = Path(resume)
        if not path.is_dir():
            raise UserError(
                f"--resume {resume}: no such folder; name a run's folder, as in {RUNS}/…"
            )
        return path.parent.parent if path.parent.name == "checkpoints" else path
    if output is not None:
        if not (Path(output) / "config.yaml").is_file():
            raise UserError(
                f"--resume: {output} holds no run; leave --resume out to start one there"
            )
        return Path(output)
    configs = sorted(RUNS.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime)
    for config in reversed(configs):
        if config.read_text(encoding="utf-8").startswith(f"# {entry}\n"):
            return config.parent
    raise UserError(
        f"--resume: there is no run of {entry} below {RUNS}/; name one: --resume FOLDER"
    )


class RunFolder:
    """A folder locked by one process, with a kernel lock that ends with the process. `locked` is
    False where the file system has no locks.

    Args:
        path: the folder; created with its parents if missing.
        resume: it may contain a run already.
        wait: seconds to wait for a process that has locked it.
        say: called with a line before the wait.

    Raises:
        UserError: it cannot be written, another process has locked it, or it contains a run and
            `resume` is false.
    """

    def __init__(
        self,
        path: Path,
        *,
        resume: bool = False,
        wait: int = 0,
        say: Callable[[str], None] = print,
    ):
        self.path, self._wait, self._say = Path(path), wait, say
        try:
            os.fsencode(path).decode("utf-8")
        except UnicodeDecodeError:  # safetensors could not read what is written there
            raise UserError(
                f"--output {str(path)!a}: the folder's name is not UTF-8; choose another one"
            ) from None
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.summary = self.path / "summary.json"
        self.curves = self.path / "curves.png"
        self.policy = self.path / "mixup_policy.png"
        self.tokenizer = self.path / TOKENIZER
        self.log = self.path / "log.txt"
        self.tensorboard = self.path / "tensorboard"
        self.report = self.path / REPORT
        self.evaluated = self.path / EVALUATED
        self.labels_to_check = self.path / TO_CHECK
        self.page = self.path / PAGE
        self.splits = self.path / "splits.csv"
        self.trace = self.path / "trace.json.gz"
        self.checkpoints = self.path / "checkpoints"
        self.made, self.locked = not self.path.exists(), True
        self._hold(resume)

    def _hold(self, resume: bool) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            refuse_file(self.path)
            raise UserError(
                f"--output {self.path}: {reason(error)}; choose a folder that can be written"
            ) from None
        for second in range(self._wait + 1):
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in WITHOUT_LOCKS:
                    self.locked = False
                    break
            if second == self._wait:
                os.close(self._lock)
                raise UserError(
                    f"--output {self.path}: another run is using this folder; wait for it to end, "
                    "or choose another one"
                )
            if second == 0:
                self._say(
                    f"{self.path} is locked, perhaps by a machine that has died: trying again for "
                    f"{self._wait} s"
                )
            time.sleep(1)
        self._take(resume)

    def _take(self, resume: bool) -> None:
        try:
            if not resume:
                refuse_run(self.path)
            elif self.checkpoints.is_dir() and not os.access(
                self.checkpoints, os.R_OK | os.W_OK | os.X_OK
            ):
                raise UserError(
                    f"{self.checkpoints} cannot be read and written: change its permissions"
                )
        except UserError:
            os.close(self._lock)
            raise

    def discard(self) -> None:
        """To be called after a failure before the first step: the folder no longer counts as a run,
        unless an earlier start of the run has left a checkpoint."""
        if not any(self.checkpoints.glob("step-*")):
            self.config.unlink(missing_ok=True)

    def close(self) -> None:
        """Unlocks the folder; removes it if it was created in vain."""
        if self.made and not self.config.exists():
            for path in (self.log, self.metrics, self.tokenizer, self.splits):
                path.unlink(missing_ok=True)
            for name in (".lock", "mlflow_run_id"):
                (self.path / name).unlink(missing_ok=True)
            for path in (self.tensorboard, self.path / "wandb"):
                shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):  # other files in it are not ours
                self.path.rmdir()
        os.close(self._lock)


class SharedFolder(RunFolder):
    """The same folder for the other processes of the run, which do not lock it.

    Raises:
        UserError: this process does not see the folder.
    """

    def _hold(self, resume: bool) -> None:
        for _ in range(APPEARS_WITHIN):
            if self.path.exists():
                return
            time.sleep(1)
            with contextlib.suppress(OSError):
                # Opening the folder above makes NFS ask the server what has changed in it.
                os.listdir(next(above for above in self.path.parents if above.exists()))
        if not self.path.exists():
            raise UserError(
                f"--output {self.path}: not every machine sees this folder; it must be on a file "
                "system that all of them share"
            )

    def discard(self) -> None:
        pass

    def close(self) -> None:
        pass


def refuse_run(path: Path) -> None:
    """Raises UserError if the folder contains a run."""
    if (Path(path) / "config.yaml").exists():
        raise UserError(
            f"--output {path} already holds a run: resume it with --resume {path}, or choose "
            f"another folder, such as --output {path}-2"
        )


def refuse_file(path: Path) -> None:
    """Raises UserError if the path, or what it is below, is a file or a link to nothing."""
    for part in (path, *path.parents):
        if part.is_dir():
            return
        name = path if part == path else f"{path}: {part}"
        if part.exists():
            raise UserError(f"--output {name} is a file, not a folder; choose another one")
        if part.is_symlink():
            raise UserError(
                f"--output {name} is a link to {os.readlink(part)}, which does not exist; create "
                "that folder, or choose another one"
            )


def default_path(model: str, data: str) -> Path:
    """runs/<model>-<data>-<time>, with a number appended if that exists."""
    name = f"{model}-{data}-{time.strftime('%Y%m%d-%H%M%S')}"
    return numbered(RUNS / name, Path.exists)


def free_path(path: Path, environ: Mapping[str, str], say: Callable[[str], None]) -> Path:
    """The folder of a new run that a recipe names, with a number if `path` holds a run, which `say`
    is told; as it is where a job is started again, by torchrun or from Slurm's queue."""
    again = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    if any(environ.get(name, "0") not in ("", "0") for name in again):
        return path
    free = numbered(path, lambda one: (one / "config.yaml").exists())
    if free != path:
        say(f"note: {path} already holds a run, so this one is in {free}")
    return free


def numbered(path: Path, is_taken: Callable[[Path], bool]) -> Path:
    """The path, or if it is taken the first of path-2, path-3, ... that is not."""
    free, number = path, 1
    while is_taken(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free
