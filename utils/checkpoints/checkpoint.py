"""Checkpoints: folders that are complete or absent, and verified before they are used.

    checkpoints/step-00001234/
        model.safetensors      weights and buffers under canonical names
        average.safetensors    their moving average, with --ema_decay
        mixup.safetensors      what was learned about mixing, with --mixup meta
        workers.safetensors    each worker's own weights and optimizer, with --strategy local; the
                               model is then their mean, and optimizer.safetensors empty
        outer.safetensors      the outer optimizer, with --sync_rule diloco
        optimizer.safetensors  optimizer state, `<parameter>/<key>`
        state.json             everything else
        SHA256SUMS             of the files above; `sha256sum -c SHA256SUMS` checks it

If the model is sharded, each rank has its own files for weights, average and optimizer (see
shards.py). A checkpoint is written under a temporary name, flushed to disk and renamed. Nothing in
it is a pickle, as the metadata of torch.distributed.checkpoint are.
"""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType

import torch
from safetensors import SafetensorError
from safetensors.torch import save as to_bytes
from torch import Tensor

from ..errors import UserError
from ..exchange import Exchange
from ..files import file_sum, reason, sums_text, sync_folder, write_files, write_synced
from ..reporting.metrics import to_json
from .shards import PARTS, Rows, file_names, read_part, shard_name, together

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
STATE, SUMS = "state.json", "SHA256SUMS"
FORMAT = 1  # of state.json
# The key in state.json of `Checkpoint.run_info`. These are not the run's settings, which are in
# config.yaml; the key stays so that old checkpoints can be read, and new ones by older versions.
RUN_INFO = "settings"
# Errors that say a checkpoint is incomplete. After any other one it may well be whole, and must not
# be taken for damaged: an older one would take its place, and it would be deleted.
INCOMPLETE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
# What parsing raises for content that no `save` has written, though its sums are right.
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


class DamagedCheckpoint(Exception):
    """A checkpoint differs from what was written; the text names the file and the problem."""


@dataclass
class Checkpoint:
    """The state after a step: tensors (on the CPU once copied or read) and a JSON object.

    If each rank writes a part of it, it holds what this rank has to write, and `rows` says which
    tensors are rows of larger ones. A checkpoint that was read always has whole tensors.
    """

    step: int
    state: dict
    # By part, of PARTS: "model" and "optimizer" always (the latter empty with --strategy local),
    # the others where the run has them.
    parts: dict[str, dict[str, Tensor]]
    # By part and tensor; only rank 0 writes the parts that are not there. None: rank 0 writes all.
    rows: dict[str, dict[str, Rows]] | None = None

    @property
    def model(self) -> dict[str, Tensor]:
        return self.parts["model"]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights to evaluate and use: the average if there is one."""
        return self.parts.get("average", self.model)

    @property
    def run_info(self) -> dict:
        """What must be known of the run to resume it or to use the model: its data, the size of a
        step, the device and so on (see utils/runs/make_trainer.py)."""
        return self.state.get(RUN_INFO) or {}

    def copy(self) -> "Checkpoint":
        """Copies the tensors to the CPU, contiguous, sorted by name and without shared memory, so
        that training can continue while they are written."""
        copies = {
            part: {
                name: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
                for name, tensor in sorted(tensors.items())
            }
            for part, tensors in self.parts.items()
        }
        return replace(self, parts=copies)


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: created with the first checkpoint.
        keep: how many of the newest are kept, in addition to the best one.
        warn: called with a line about what was damaged or could not be done.
    """

    def __init__(self, folder: Path, *, keep: int = 3, warn=print):
        self.folder, self.keep, self.warn = Path(folder), keep, warn
        self._best_step: int | None = None  # the last best one that was written

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, damaged or not, the oldest first."""
        found = {_step(path) for path in self.folder.glob("step-*") if path.is_dir()}
        return sorted(found - {-1})  # -1: not the name of a checkpoint

    def save(
        self,
        checkpoint: Checkpoint,
        best_step: int | None = None,
        exchange: Exchange | None = None,
        ready: Callable[[], None] = lambda: None,
    ) -> Path:
        """Writes a checkpoint (a copy: see `Checkpoint.copy`) durably, then deletes the oldest ones
        beyond `keep`. Whatever fails, and whenever the process is killed, earlier checkpoints stay
        intact.

        Args:
            exchange: if each rank writes its rows: with the others, which see the same folder;
                collective. None: this process writes all.
            ready: called on rank 0 before anything is written; may raise OSError.

        Raises:
            OSError: on every rank, if writing fails on any; nothing is left behind.
            RuntimeError: another rank has died; the next `save` removes what is left behind.
        """
        exchange = exchange or Exchange()
        first, step, rows = exchange.rank == 0, checkpoint.step, checkpoint.rows or {}
        files, places = {}, {}
        for part, tensors in checkpoint.parts.items():
            if part in rows:
                file = shard_name(part, exchange.rank, exchange.size)
                own, files[file] = rows[part], tensors
                places[file] = {name: own[name].to_json() for name in tensors if name in own}
            elif first:
                files[f"{part}.safetensors"] = tensors
        aside = self._aside(step)

        def begin() -> None:
            if first:
                ready()
                self._begin(step)

        def write() -> list[dict]:
            contents = ((name, to_bytes(tensors)) for name, tensors in files.items())
            return [write_files(aside, contents), places]  # one content at a time in memory

        def finish() -> None:
            if first:
                sums, shards = ({k: v for d in dicts for k, v in d.items()} for dicts in written)
                state = checkpoint.state | ({"shards": shards} if rows else {})
                self._finish(aside, step, state, sums, best_step)

        try:
            together(exchange, begin)
            written = zip(*together(exchange, write), strict=True)
            together(exchange, finish)
        except OSError:
            if first:
                shutil.rmtree(aside, ignore_errors=True)
            raise
        return self._path(step)

    def _begin(self, step: int) -> Path:
        """A new folder to write into."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clean()
        aside = self._aside(step)
        aside.mkdir()
        return aside

    def _finish(
        self, aside: Path, step: int, state: dict, sums: dict[str, str], best_step: int | None
    ) -> None:
        """Writes the last two files, flushes all to disk, renames the folder to its final name, and
        deletes the oldest checkpoints beyond `keep`; `sums`: of the other files."""
        sums = sums | write_files(aside, [(STATE, to_json(state, indent=1).encode())])
        write_synced(aside / SUMS, sums_text(sums))
        sync_folder(aside)
        final = self._path(step)
        if final.exists():  # the same step again, after an evaluation: one of them always exists
            old = self._old(step)
            shutil.rmtree(old, ignore_errors=True)
            os.rename(final, old)
        os.rename(aside, final)
        sync_folder(self.folder)
        # One that could not be written, as the disk was full, leaves the best one before it.
        if best_step is not None and self.path(best_step).is_dir():
            self._best_step = best_step
        elif best_step is not None and self._best_step is None:  # the run was resumed since
            self._best_step = self.existing_best(best_step, step)
        self._prune(step, self._best_step)

    def existing_best(self, best_step: int | None, newest: int) -> int | None:
        """`best_step` if it has a checkpoint. If it could not be written: the newest step up to
        `newest` that has one and was the best when it was saved; None if there is none."""
        if best_step is None or self.path(best_step).is_dir():
            return best_step
        older = [step for step in self.steps() if step <= newest and self._best_as_of(step) == step]
        return max(older, default=None)

    def best_of_run(self) -> int | None:
        """The best step on the validation split, as the newest checkpoint says; None: not known."""
        newest = max(self.steps(), default=0)
        return self.existing_best(self._best_as_of(newest), newest)

    def _best_as_of(self, step: int) -> int | None:
        """The best step when the checkpoint of `step` was saved; None: not known."""
        try:
            return json.loads((self.path(step) / STATE).read_bytes())["progress"]["best_step"]
        except (OSError, *MALFORMED):
            return None

    def adopt(self, other: Path, step: int) -> None:
        """Copies the checkpoint of `step` from another run's folder, if there is one. It is
        verified when it is used, not here. Raises OSError."""
        final, source = self._path(step), Checkpoints(other).path(step)
        if final.exists() or not source.is_dir():
            return
        aside = self._begin(step)
        try:
            for path in source.iterdir():
                write_synced(aside / path.name, path.read_bytes())
            sync_folder(aside)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        os.rename(aside, final)
        sync_folder(self.folder)

    def load(self) -> Checkpoint | None:
        """The newest checkpoint that is not damaged; a line names the damaged ones after it.

        Returns None if there are no checkpoints. Raises UserError if all are damaged.
        """
        steps = self.steps()
        for step in reversed(steps):
            # A kill between two renames can leave the step under its other name only.
            for path in (self._path(step), self._old(step)):
                if not path.is_dir():
                    continue
                try:
                    return read_checkpoint(path)
                except DamagedCheckpoint as error:
                    self.warn(
                        f"checkpoint {path} is damaged ({error}); falling back to the one before"
                    )
        if steps:
            raise UserError(f"all checkpoints in {self.folder} are damaged: start a new run")
        return None

    def model(self, use: str | None = None) -> Checkpoint | None:
        """The checkpoint whose weights are the model of the run: the best on the validation split,
        or, without one or with `use` "last", the newest. UserError: `use` is "best" and there is
        none; else as of `load`."""
        newest = self.load()
        if newest is None or use == "last":
            return newest
        best = self.existing_best(self._best_as_of(newest.step), newest.step)
        if best is None and use == "best":
            raise UserError(
                f"--use best: no checkpoint of {self.folder.parent} is the best on a validation "
                "split: leave it out"
            )
        if best is None or best == newest.step:
            return newest
        try:
            return read_checkpoint(self.path(best))
        except DamagedCheckpoint as error:
            self.warn(
                f"note: the best checkpoint, {self.path(best)}, is damaged ({error}): the last "
                "weights are used"
            )
            return newest

    def _prune(self, newest: int, best_step: int | None) -> None:
        """Deletes all but the newest and the best. Steps after `newest` are damaged ones, before
        which the run was resumed. A folder that cannot be deleted is tried again next time."""
        steps = self.steps()
        kept = [step for step in steps if step <= newest][-self.keep :]
        for step in steps:
            path, old = self._path(step), self._old(step)
            doomed = [path, old]
            if step in kept or step == best_step:
                doomed = [old] if path.exists() else []
            for path in doomed:
                aside = self.folder / f".dropping-{path.name}"
                with contextlib.suppress(OSError):
                    os.rename(path, aside)  # half deleted, it would look like a damaged checkpoint
                shutil.rmtree(aside, ignore_errors=True)

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is, if there is one: a kill between two renames can leave
        it under its other name only."""
        path, old = self._path(step), self._old(step)
        return old if old.is_dir() and not path.is_dir() else path

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08}"

    def _aside(self, step: int) -> Path:
        return self.folder / f".writing-{self._path(step).name}"

    def _old(self, step: int) -> Path:
        """Where a checkpoint is kept while another one of the same step replaces it."""
        return self.folder / f"step-{step:08}.old"

    def _clean(self) -> None:
        """Removes what a killed process left incomplete."""
        for path in [*self.folder.glob(".writing-*"), *self.folder.glob(".dropping-*")]:
            shutil.rmtree(path, ignore_errors=True)


def read_checkpoint(path: Path) -> Checkpoint:
    """Verifies and reads a checkpoint.

    Raises:
        DamagedCheckpoint: it is not what was written.
        UserError: it cannot be read at the moment; it may well be whole.
    """
    path = Path(path)
    try:
        written = (path / SUMS).read_bytes()
        names = {STATE} | file_names(path, written)
        if not any(".rank-" in name for name in names):
            names |= {MODEL, OPTIMIZER}
        sums = {name: file_sum(path / name) for name in sorted(names)}
    except OSError as error:
        if error.errno in INCOMPLETE:
            name = Path(error.filename or path).name
            raise DamagedCheckpoint(f"{name}: {reason(error)}") from None
        raise _unreadable(path, error) from None
    if written != sums_text(sums):
        wrong = [name for name in sums if f"{sums[name]}  {name}".encode() not in written]
        raise DamagedCheckpoint(f"{', '.join(wrong) or SUMS}: the content does not match its sum")
    try:
        state = _state((path / STATE).read_bytes())
        shards = state.pop("shards", {})  # holds for these files, not for later checkpoints
        there = {name.partition(".")[0] for name in names}
        parts = {p: read_part(path, p, names, shards) for p in PARTS if p in there}
        return Checkpoint(_step(path), state, parts)
    except OSError as error:  # all files were read a moment ago
        raise _unreadable(path, error) from None
    except (*MALFORMED, SafetensorError) as error:
        raise DamagedCheckpoint(f"malformed: {error}") from None


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{error.filename or path}: {reason(error)}; try again when it can be read")


def _state(content: bytes) -> dict:
    """Parses state.json. Raises one of `MALFORMED`."""
    state = json.loads(content)
    if not isinstance(state, dict):
        raise ValueError(f"{STATE} is no object")
    for key in ("shards", "progress", RUN_INFO):
        if not isinstance(state.get(key), (dict, NoneType)):
            raise ValueError(f"{STATE}: {key} is no object")
    return state


def _step(path: Path) -> int:
    digits = path.name.removeprefix("step-").removesuffix(".old")
    return int(digits) if digits.isdecimal() else -1
