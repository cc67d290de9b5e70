"""The features of a frozen backbone, which a sample without augmentation has alike in every step:
computed once, and kept for later runs."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..checkpoints.checkpoint import Checkpoint
from ..data.images.loader import GPU_FRACTION
from ..data.loader import Loader
from ..data.progress import progress_bar
from ..distributed.strategies.base import Strategy
from ..errors import UserError
from ..files import written_aside
from ..machine.backends import search_plans
from ..models.parts import heads_of
from ..plural import counted
from ..reporting.console import duration
from ..tasks.task import Task
from ..training.objective import Precision
from .run import Run

VERSION = 1  # of how features are computed; part of every key
NEAR = 0.05  # relative distance of the same features in other batches, or on another device


class HeadNotLast(Exception):
    """The model does more after its head, or calls it otherwise than with a row for each sample."""


class Backbone:
    """A model up to its only head; on its device, with its weights, in evaluation mode."""

    def __init__(self, model: nn.Module, precision: Precision):
        (self.name,) = heads_of(model)
        self.model, self.precision = model, precision

    @torch.no_grad()
    def features(self, loader: Loader) -> Iterator[Tensor]:
        """(n, ...) for each micro-batch: what the head is called with; of a filler none. Raises
        HeadNotLast."""
        calls, head = list[tuple](), self.model.get_submodule(self.name)
        handle = head.register_forward_hook(lambda _, inputs, output: calls.append((inputs, output)))
        search_plans(False)  # the trainer decides again for each of its micro-batches
        try:
            with closing(loader.epoch()) as batches:
                for batch in batches:
                    with self.precision.autocast():
                        logits = self.model(batch.inputs)
                    inputs, output = calls.pop() if len(calls) == 1 else ((), None)
                    rows = inputs[0] if len(inputs) == 1 and output is logits else None
                    if not isinstance(rows, Tensor) or len(rows) != len(logits):
                        raise HeadNotLast
                    yield rows[:0] if batch.filler else rows
        finally:
            handle.remove()

    def digest(self) -> str:
        """SHA-256 of the weights."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            if not name.startswith(f"{self.name}."):
                digest.update(name.encode())
                digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    def leave_out(self) -> None:
        """From now on the model takes features instead of samples."""
        head = self.model.get_submodule(self.name)
        self.model.forward = lambda features: head(features)


def with_features(run: Run, task: Task, model: nn.Module, checkpoint: Checkpoint | None) -> Task:
    """The task with loaders of features, which `model` takes from now on; the same task where a
    sample's features vary, or the head does not come last. Collective.

    Args:
        model: on its device, with a frozen backbone; without the weights of `checkpoint` yet. Left in
            evaluation mode.
    """
    settings, say = run.settings, run.console.say
    if len(heads_of(model)) != 1 or settings.engine == "ort":
        return task
    if flags := settings.flags_of_equal_features:
        say(
            f"note: {' '.join(flags)} would let the frozen backbone compute each sample once, not "
            "in every epoch"
        )
        return task
    if checkpoint is not None:
        Strategy(model).load(checkpoint.model)
    model.eval()
    backbone, started = Backbone(model, run.precision), time.monotonic()
    loaders = {"train": task.train, "val": task.val, "test": task.test}
    if task.val is task.test:
        del loaders["test"]
    views = {
        name: loader.in_order(run.exchange.rank, run.exchange.size)
        for name, loader in loaders.items()
        if loader is not None
    }
    path = Path(settings.cache_dir) / f"features-{_key(run, task, backbone, views)}.safetensors"
    kept, found = _read(path), dict[str, Tensor]()
    total = sum(view.total for view in views.values())
    line = f"computing the features of {counted(total, 'sample')}, once"
    try:
        with progress_bar(run.leads and not kept, line, total=total, unit=" samples") as bar:
            for name, view in views.items():
                found[name] = _features(run, backbone, view, kept.get(name), bar.update)
    except HeadNotLast:
        return task
    computed = any(rows is not kept.get(name) for name, rows in found.items())
    if computed and run.leads:
        _keep(path, found, say)
    first, nbytes = found["train"], sum(rows.nbytes for rows in found.values())
    how = f"computed once, in {duration(time.monotonic() - started)}" if computed else f"from {path}"
    say(
        f"features of {counted(total, 'sample')} {how} "
        f"({first[0].numel():,} numbers each, {nbytes / 1e6:,.0f} MB)"
    )
    backbone.leave_out()
    found = {name: _nearer(rows, run.device) for name, rows in found.items()}
    test = found.get("test", found.get("val"))
    return dataclasses.replace(
        task,
        train=task.train.with_features(found["train"]),
        val=task.val and task.val.with_features(found["val"]),
        test=task.test.with_features(test),
    )


def _features(
    run: Run,
    backbone: Backbone,
    view: Loader,
    kept: Tensor | None,
    count: Callable[[int], object],
) -> Tensor:
    """(samples, ...) on the CPU: `kept` if those of the first batch are near it, else of all samples.
    Collective."""
    exchange, samples, done = run.exchange, torch.from_numpy(view.visited()), 0
    parts = backbone.features(view)
    with closing(parts):
        rows: Tensor | None = next(parts)
        # The code of the model may have changed, or something else that the key does not hold.
        near = False
        if kept is not None and kept.shape == (view.total, *rows.shape[1:]):
            now, before = rows.float().cpu(), kept[samples[: len(rows)]].float()
            near = bool((now - before).norm() <= NEAR * now.norm())
        if all(exchange.gather_json(near)):
            return kept
        found = torch.zeros(view.total, *rows.shape[1:], dtype=rows.dtype)
        while rows is not None:
            found[samples[done : done + len(rows)]] = rows.cpu()
            done += len(rows)
            count(exchange.size * len(rows))
            rows = next(parts, None)
    return exchange.sum(found)


def _nearer(rows: Tensor, device: torch.device) -> Tensor:
    """On the device, if they take at most a quarter of its free memory."""
    if device.type == "cuda" and rows.nbytes <= GPU_FRACTION * torch.cuda.mem_get_info(device)[0]:
        return rows.to(device)
    return rows


def _key(run: Run, task: Task, backbone: Backbone, views: dict[str, Loader]) -> str:
    """Of what decides over the bits of the features."""
    settings = run.settings
    fields = [field for field in dataclasses.fields(settings) if field.metadata["resume"] == "fixed"]
    content = [
        [VERSION, torch.__version__, run.numerical_environment(), backbone.digest()],
        [task.simple_model.identity, task.card.to_dict()],
        [[name, view.batch_size, view.step_size] for name, view in views.items()],
        # How pictures and texts are read, and what the weights do not show of the model.
        [str(getattr(settings, field.name)) for field in fields
         if field.metadata["group"] in ("data", "texts", "model")],
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError):
        return {}


def _keep(path: Path, found: dict[str, Tensor], say: Callable[[str], None]) -> None:
    """For later runs. A failure costs no more than a line."""
    try:
        with written_aside(path) as aside:
            save_file(found, aside)
            aside.chmod(0o644)  # safetensors' 0600 would keep a shared cache from others
    except (UserError, SafetensorError) as error:
        say(f"the features are not kept for later runs: {error}")
