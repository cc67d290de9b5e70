"""Checkpoints: folders that are whole or not there, and never applied unverified.

    checkpoints/step-00001234/
        model.safetensors      weights and buffers under canonical names
        average.safetensors    their moving average, with --ema_decay
        mixup.safetensors      what was learned about mixing, with --mixup meta
        optimizer.safetensors  optimizer state, `<parameter>/<key>`
        state.json             everything else
        SHA256SUMS             of the files above; `sha256sum -c SHA256SUMS` checks it

A checkpoint is written under a temporary name, flushed to disk and renamed. Nothing in it is a
pickle.
"""

import contextlib
import hashlib
import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from utils.errors import UserError
from utils.files import reason, sync_folder, write_synced
from utils.reporting.metrics import to_json

MODEL, AVERAGE, MIXUP, OPTIMIZER, STATE, SUMS = (
    "model.safetensors",
    "average.safetensors",
    "mixup.safetensors",
    "optimizer.safetensors",
    "state.json",
    "SHA256SUMS",
)
# What the steps themselves leave in a parameter group: the rate of the last one (the schedule sets
# the next), and how many there were.
OF_THE_STEPS = ("lr", "step", "lookahead_step")


class DamagedCheckpoint(Exception):
    """A checkpoint that is not what was written; its text names the file and what is wrong."""


@dataclass
class Checkpoint:
    """What one step left: tensors (once read or copied, on the CPU) and a JSON object."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict
    average: dict[str, Tensor] | None = None  # of the weights, where the run keeps one
    mixup: dict[str, Tensor] | None = None  # what was learned about mixing, likewise

    @property
    def weights(self) -> dict[str, Tensor]:
        """What is evaluated and used: the average where there is one."""
        return self.model if self.average is None else self.average

    def copy(self) -> "Checkpoint":
        """Of the tensors, on the CPU: the run can go on while the copy is written."""
        parts = ("model", "optimizer", "average", "mixup")
        tensors = {part: getattr(self, part) for part in parts}
        return replace(self, **{part: t and _plain(t) for part, t in tensors.items()})


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: made when the first one is written.
        keep: how many of the newest ones stay; the best one stays besides.
        warn: told, in a line, what was damaged or could not be done.
    """

    def __init__(self, folder: Path, *, keep: int = 3, warn=print):
        self.folder, self.keep, self.warn = Path(folder), keep, warn

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, oldest first, whole or not."""
        found = {_step(path) for path in self.folder.glob("step-*") if path.is_dir()}
        return sorted(found - {-1})  # -1: a name that is not ours

    def save(self, checkpoint: Checkpoint, best_step: int | None = None) -> Path:
        """Writes one (a copy: see `Checkpoint.copy`) durably, then drops the oldest beyond `keep`.
        Raises OSError.

        Whatever fails, and whenever the process is killed, the checkpoints before are intact.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        final = self._path(checkpoint.step)
        aside = self.folder / f".writing-{final.name}"
        self._clean()
        try:
            aside.mkdir()
            contents = {
                MODEL: to_bytes(checkpoint.model),
                OPTIMIZER: to_bytes(checkpoint.optimizer),
                STATE: to_json(checkpoint.state, indent=1).encode(),
            }
            for name, part in ((AVERAGE, checkpoint.average), (MIXUP, checkpoint.mixup)):
                if part is not None:
                    contents[name] = to_bytes(part)
            sums = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
            for name, content in (contents | {SUMS: _sums_text(sums)}).items():
                write_synced(aside / name, content)
            sync_folder(aside)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        if final.exists():  # the same step again, after an evaluation: never without either
            old = self._old(checkpoint.step)
            shutil.rmtree(old, ignore_errors=True)
            os.rename(final, old)
        os.rename(aside, final)
        sync_folder(self.folder)
        self._prune(checkpoint.step, best_step)
        return final

    def adopt(self, other: Path, step: int) -> None:
        """Copies the checkpoint of `step` from another run's folder, if it is there. A damaged
        one is copied as it is: it is verified before it is used. Raises OSError."""
        final = self._path(step)
        if final.exists() or not (other / final.name).is_dir():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clean()
        aside = self.folder / f".writing-{final.name}"
        aside.mkdir()
        for path in (other / final.name).iterdir():
            write_synced(aside / path.name, path.read_bytes())
        sync_folder(aside)
        os.rename(aside, final)
        sync_folder(self.folder)

    def load(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; says which damaged ones it passed over.

        Returns None where there is none at all. Raises UserError where all are damaged.
        """
        steps = self.steps()
        for step in reversed(steps):
            # A kill between two renames can leave the same step under its other name only.
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

    def _prune(self, newest: int, best_step: int | None) -> None:
        """Drops what is neither among the newest nor the best. Steps after `newest` are damaged
        ones that the run fell back behind; a folder that cannot be dropped is left for later."""
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
                    os.rename(path, aside)  # half deleted, it must not look like a damaged one
                shutil.rmtree(aside, ignore_errors=True)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08}"

    def _old(self, step: int) -> Path:
        """Where a checkpoint waits while it is replaced by another one of the same step."""
        return self.folder / f"step-{step:08}.old"

    def _clean(self) -> None:
        """Removes what a killed process left half written or half deleted."""
        for path in [*self.folder.glob(".writing-*"), *self.folder.glob(".dropping-*")]:
            shutil.rmtree(path, ignore_errors=True)


def read_checkpoint(path: Path) -> Checkpoint:
    """Verifies every byte of a checkpoint, then reads it. Raises DamagedCheckpoint."""
    path = Path(path)
    try:
        names = [MODEL, OPTIMIZER, STATE]
        listed = (path / SUMS).read_bytes()
        names += [n for n in (AVERAGE, MIXUP) if (path / n).exists() or n.encode() in listed]
        sums = {name: _file_sum(path / name) for name in names}
        written = (path / SUMS).read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(f"{Path(error.filename or path).name}: {reason(error)}") from None
    if written != _sums_text(sums):
        wrong = [name for name in names if f"{sums[name]}  {name}".encode() not in written]
        raise DamagedCheckpoint(f"{', '.join(wrong) or SUMS}: the content does not match its sum")
    try:
        state = json.loads((path / STATE).read_bytes())
        average, mixup = (
            load_file(path / name) if name in names else None for name in (AVERAGE, MIXUP)
        )
        model, optimizer = load_file(path / MODEL), load_file(path / OPTIMIZER)
        return Checkpoint(_step(path), model, optimizer, state, average, mixup)
    except (OSError, ValueError, SafetensorError) as error:
        raise DamagedCheckpoint(str(error)) from None


def optimizer_tensors(optimizer, names: dict[Tensor, str]) -> tuple[dict[str, Tensor], dict]:
    """Optimizer state as tensors under canonical names, and the rest as JSON.

    Args:
        names: the canonical name of each parameter.
    Returns:
        ({"<parameter>/<key>": tensor}, {"groups": [...], "values": {"<parameter>/<key>": number}})
    """
    saved = optimizer.state_dict()  # parameters are numbers there
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    own = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    name_of = dict(zip(numbers, own, strict=True))
    tensors, values = {}, {}
    for number, state in saved["state"].items():
        for key, value in state.items():
            target = tensors if isinstance(value, Tensor) else values
            target[f"{name_of[number]}/{key}"] = value
    groups = [
        {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items()}  # a count of steps
        | {"params": [name_of[number] for number in group["params"]]}
        for group in saved["param_groups"]
    ]
    return tensors, {"groups": groups, "values": values}


@torch.no_grad()
def restore_optimizer(
    optimizer, names: dict[Tensor, str], tensors: dict[str, Tensor], rest: dict
) -> None:
    """The inverse of `optimizer_tensors`, into an optimizer made with the same settings, by its
    own `load_state_dict`. Of the groups' settings, the present ones count.

    State of the shape of its parameter takes that parameter's memory format, as the optimizer
    would have made it.

    Raises:
        UserError: the groups or the parameters are not those of the checkpoint.
    """
    parameters = {name: parameter for parameter, name in names.items()}
    if [group["params"] for group in rest["groups"]] != [
        [names[p] for p in group["params"]] for group in optimizer.param_groups
    ]:
        raise UserError("the checkpoint's optimizer has other parameters than this run's")
    number_of, groups = {}, []
    for group, saved in zip(optimizer.param_groups, rest["groups"], strict=True):
        first = len(number_of)
        number_of |= {name: first + i for i, name in enumerate(saved["params"])}
        kept = {key: saved[key] for key in OF_THE_STEPS if key in saved}
        groups.append(group | kept | {"params": [number_of[name] for name in saved["params"]]})
    state: dict[int, dict] = {}
    for key, value in [*tensors.items(), *rest["values"].items()]:
        name, _, entry = key.rpartition("/")
        parameter = parameters[name]
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        elif isinstance(value, Tensor):
            value = value.clone()  # the checkpoint's own is not to change
        state.setdefault(number_of[name], {})[entry] = value
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU that share no memory with anything, sorted by name."""
    return {
        name: tensors[name].detach().cpu().clone(memory_format=torch.contiguous_format)
        for name in sorted(tensors)
    }


def _step(path: Path) -> int:
    digits = path.name.removeprefix("step-").removesuffix(".old")
    return int(digits) if digits.isdecimal() else -1


def _file_sum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sums_text(sums: dict[str, str]) -> bytes:
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())).encode()
