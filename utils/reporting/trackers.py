"""TensorBoard, Weights & Biases and MLflow: all receive every record that goes to metrics.jsonl.

A tracker is an object with `log(record)` and `close()`, neither of which ever raises: the first
failure after the start is reported once, and training continues without the tracker.
"""

import contextlib
import math
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from ..errors import UserError, one_line
from ..files import reason, replace_file
from ..machine.packages import left_out

# The packages are imported inside functions: together they take seconds, and most runs use none.

# Keys of a record that say what it belongs to; every other number in it is a figure.
POSITION = {"step", "epoch", "split", "average_over", "model", "event", "samples"}


def figures(record: dict) -> dict[str, float]:
    """The figures of a record under the names of their charts.

    Charts are grouped by the part before the last slash, so that a figure's train, val and test
    charts are beside each other: loss/train_steps (the mean since the last log line), loss/train
    (of the epoch), loss/val, loss/val_average (of the averaged weights), time_share/data. The name
    of lr has no slash.

    Args:
        record: as in metrics.jsonl. Values that are None, not finite or not numbers are left out.
    """
    series = record.get("split", "train")
    if record.get("average_over") == "steps":
        series += "_steps"
    if record.get("model"):
        series += f"_{record['model']}"
    found = {}
    for key, value in record.items():
        if key in POSITION:
            continue
        if isinstance(value, dict):
            found |= {f"{key}/{name}": entry for name, entry in value.items()}
        else:
            found["lr" if key == "lr" else f"{key}/{series}"] = value
    return {tag: float(value) for tag, value in found.items() if _is_figure(value)}


def _is_figure(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class _Tracker:
    """Sends figures; reports the first failure, and is silent from then on."""

    name: str

    def __init__(self, warn):
        self._warn, self._works = warn, True
        self._ends: list[Callable[[], object]] = []  # what `close` calls

    def _send(self, values: dict[str, float], record: dict) -> None:
        raise NotImplementedError

    def log(self, record: dict) -> None:
        values = figures(record)
        if self._works and values:
            with self._guarded():
                self._send(values, record)

    def close(self) -> None:
        for end in self._ends:
            with self._guarded():
                end()
        self._ends, self._works = [], False

    @contextlib.contextmanager
    def _guarded(self):
        try:
            yield
        except Exception as error:  # the package may raise anything
            if self._works:
                self._works = False
                why = reason(error) if isinstance(error, OSError) else one_line(error).rstrip(".")
                self._warn(f"{self.name}: {why}; training continues without it")


class TensorBoard(_Tracker):
    """Event files that `tensorboard --logdir` shows, even while the run is going on.

    Each record is written at once, so that a killed run loses none. Not by PyTorch's SummaryWriter,
    whose thread prints a traceback into the progress bar when the disk is full.

    Args:
        folder: created if missing; it gets one event file for each start of the run.
        purge_step: on resume, the first step that is trained now: TensorBoard drops the records of
            this step and later ones from the earlier files.
        warn: called with a line, once, if the events cannot be written, or the package is missing.
    """

    def __init__(self, folder: Path, purge_step: int | None = None, warn=print):
        super().__init__(warn)
        folder = Path(folder)
        self.name = str(folder)
        if note := left_out("tensorboard", "files for TensorBoard"):
            self._works = False
            warn(note)
            return
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        with self._guarded():
            folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads the files of a folder in the order of their names.
            starts = sum(1 for _ in folder.iterdir())
            name = f"{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{starts}"
            file = open(folder / f"events.out.tfevents.{name}", "wb")  # noqa: SIM115
            self._writer = RecordWriter(file)
            self._ends = [self._writer.close]
            self._write(file_version="brain.Event:2")
            if purge_step is not None:
                self._write(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def _send(self, values: dict[str, float], record: dict) -> None:
        # One event for the whole record: an event for each value costs three times as much.
        summary = self._summary(
            value=[{"tag": tag, "simple_value": value} for tag, value in values.items()]
        )
        self._write(step=record["step"], summary=summary)

    def _write(self, **event) -> None:
        self._writer.write(self._event(wall_time=time.time(), **event).SerializeToString())
        self._writer.flush()


# Options of wandb.Settings, so that only the figures and settings of the run leave the machine.
# Options that the installed version lacks are left out (0.31 has all of them).
PRIVATE = {
    "save_code": False,
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "console": "off",  # log.txt has the lines of the console
    "label_disable": True,  # reads the program's source for labels
    "sagemaker_disable": True,
    "symlink": False,
    "sync_tensorboard": False,
    "x_disable_machine_info": True,
    "x_disable_meta": True,  # command line, host, user, system
    "x_disable_stats": True,  # use of CPU, GPU, disk and network
    "x_save_requirements": False,
    # wandb fills these in if they are None.
    "docker": "",
    "email": "",
    "host": "",
    "program": "",
    "program_abspath": "",
    "program_relpath": "",
    "username": "",
    "x_executable": "",
}
# In seconds: how long a server that does not answer may delay the start and the end of a run.
LIMITS = {"init_timeout": 30.0, "login_timeout": 5.0, "finish_timeout": 60.0}


# For MLflow: nothing is sent to its developers, and a silent server delays a run for half a minute.
MLFLOW = {
    "DISABLE_TELEMETRY": "true",
    "HTTP_REQUEST_TIMEOUT": "10",
    "HTTP_REQUEST_MAX_RETRIES": "2",
}


class Wandb(_Tracker):
    """A run at Weights & Biases, or in offline mode its files, for `wandb sync` later.

    Sends the figures and the settings, and nothing about the code, the machine, the user, the
    command line or the environment. Of a setting that is an absolute path, only the last part is
    sent. Some facts that wandb adds cannot be turned off: its own version, Python's,
    "linux-x86_64", and which well-known packages are imported.

    Args:
        folder: of the run. wandb's files go to its subfolder wandb/; wandb/run_id keeps the run's
            ID there, so that a resumed run continues under the same one.
        mode: "online" or "offline".
        entity: the user or team whose project it is; None: that of the login.
        project, name, tags: as the web page shows them; without a name wandb makes one up.
        settings: of the run.
        warn: called with a line, once, if a record cannot be logged.

    Raises:
        UserError: the package is missing, nobody is logged in, the server cannot be reached, or
            a name is refused.
    """

    name = "wandb"

    def __init__(self, folder: Path, *, mode: str, project: str, name: str | None = None,
                 entity: str | None = None, tags=(), settings: dict | None = None,
                 warn=print):  # fmt: skip
        super().__init__(warn)
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # no crash reports to wandb's developers
        import wandb

        try:
            identity = run_id(folder)
            options = wandb_options(wandb.Settings, PRIVATE | LIMITS | {"silent": True})
            with _no_questions():
                wandb.setup(settings=wandb.Settings(**options))
                self._run = wandb.init(
                    mode=mode,
                    project=project,
                    entity=entity,
                    name=name,
                    tags=list(tags) or None,
                    dir=str(folder),
                    id=identity,
                    resume="allow",
                    config={key: _public(value) for key, value in (settings or {}).items()},
                    settings=wandb.Settings(**options),
                )
                # A resumed run repeats steps, which wandb's own count of steps would refuse.
                self._run.define_metric("step", hidden=True)
                self._run.define_metric("*", step_metric="step")
        except Exception as error:  # any of wandb's: no login, no network, a bad name
            why = reason(error) if isinstance(error, OSError) else one_line(error).rstrip(".")
            way_out = "fix that, or use --wandb disabled"
            if mode == "online":
                way_out = "fix that, run `wandb login`, or use --wandb offline"
            with contextlib.suppress(Exception):
                wandb.teardown()
            raise UserError(f"--wandb {mode}: {why}; {way_out}") from None
        self._ends = [self._run.finish, wandb.teardown]  # the second one ends wandb's process

    def _send(self, values: dict[str, float], record: dict) -> None:
        position = {key: record[key] for key in ("step", "epoch") if key in record}
        self._run.log(values | position)


class Mlflow(_Tracker):
    """A run of MLflow, where MLFLOW_TRACKING_URI says, else where MLflow keeps runs by itself, in
    the experiment MLFLOW_EXPERIMENT_NAME, else "fewhours". It gets the settings as parameters.

    mlflow_run_id in `folder`, the run's, keeps the ID under which a resumed run continues. Raises
    UserError if the package fails, or the server cannot be reached.
    """

    name = "mlflow"

    def __init__(self, folder: Path, settings: dict, warn=print):
        super().__init__(warn)
        for key, value in MLFLOW.items():
            os.environ.setdefault(f"MLFLOW_{key}", value)
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param

            client, place, self._metric = MlflowClient(), folder / "mlflow_run_id", Metric
            if place.is_file():
                self._id = place.read_text(encoding="ascii").strip()
                client.update_run(self._id, "RUNNING")
            else:
                name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fewhours")
                found = client.get_experiment_by_name(name)
                experiment = found.experiment_id if found else client.create_experiment(name)
                self._id = client.create_run(experiment, run_name=folder.name).info.run_id
                params = [Param(key, str(_public(value))) for key, value in settings.items()]
                client.log_batch(self._id, params=params)
                replace_file(place, f"{self._id}\n".encode())
        except Exception as error:  # any of MLflow's
            raise UserError(f"--trackers mlflow: {one_line(error, 300)}") from None
        self._client, self._ends = client, [lambda: client.set_terminated(self._id)]

    def _send(self, values: dict[str, float], record: dict) -> None:
        now = int(1000 * time.time())
        metrics = [self._metric(key, value, now, record["step"]) for key, value in values.items()]
        self._client.log_batch(self._id, metrics)


def wandb_mode(mode: str, say=print) -> str:
    """The mode of a run with --wandb `mode`: the environment variable WANDB_MODE may turn online
    into offline, and both into disabled; a line says so."""
    modes = ("online", "offline", "disabled")
    wanted = os.environ.get("WANDB_MODE", "").strip().lower()
    wanted = "offline" if wanted == "dryrun" else wanted  # its old name
    if wanted not in modes or modes.index(wanted) <= modes.index(mode):
        return mode
    say(f"note: --wandb {wanted}, as WANDB_MODE says")
    return wanted


def run_id(folder: Path) -> str:
    """The ID of the run in this folder, created at the first call. Raises OSError."""
    path = Path(folder) / "wandb" / "run_id"
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(encoding="ascii").strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    identity = uuid.uuid4().hex[:12]
    replace_file(path, f"{identity}\n".encode())
    return identity


def wandb_options(settings_class, options: dict) -> dict:
    """The options that this version of wandb.Settings has."""
    return {key: value for key, value in options.items() if key in settings_class.model_fields}


@contextlib.contextmanager
def _no_questions():
    """Hides the terminal: if nobody is logged in, wandb then raises an error instead of asking."""
    terminal = sys.stdin
    with open(os.devnull) as empty:
        sys.stdin = empty
        try:
            yield
        finally:
            sys.stdin = terminal


def _public(value):
    """A setting in a form that wandb accepts, without folders of this machine."""
    if isinstance(value, dict):
        return {str(key): _public(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_public(entry) for entry in value]
    if isinstance(value, (str, Path)):
        path = os.path.expanduser(value)
        return os.path.basename(os.path.normpath(path)) if os.path.isabs(path) else str(value)
    return value
