"""The features of a frozen backbone: those of a sample without augmentation are the same in every
step, so they are computed once, and kept for later runs."""

import contextlib
import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..checkpoints.checkpoint import Checkpoint
from ..data.loader import Loader
from ..data.progress import progress_bar
from ..distributed.strategies.base import Strategy
from ..errors import UserError
from ..files import written_aside
from ..machine.backends import search_plans
from ..machine.host_memory import available_memory
from ..models.parts import heads_of
from ..plural import counted
from ..reporting.console import duration
from ..tasks.task import Task
from ..training.objective import Precision
from .run import Run

NEAR = 0.05  # relative distance up to which kept features are taken for those of the model
FRACTION = 0.25  # the most of the memory of a machine, or of a GPU, that those of a split may take


class NoFeatures(Exception):
    """They do not fit in memory; or (without a message) the model does more after its head, or
    calls it otherwise than with a row for each sample."""


@torch.no_grad()
def features(model: nn.Module, head: str, loader: Loader, precision: Precision) -> Iterator[Tensor]:
    """(n, ...) for each micro-batch: what the head of the model, which is in evaluation mode, is
    called with; of a filler none. Raises NoFeatures."""
    calls = list[tuple]()
    handle = model.get_submodule(head).register_forward_hook(lambda _, *call: calls.append(call))
    search_plans(False)  # the trainer decides again for each of its micro-batches
    try:
        with contextlib.closing(loader.epoch()) as batches:
            for batch in batches:
                with precision.autocast():
                    logits = model(batch.inputs)
                inputs, output = calls.pop() if len(calls) == 1 else ((), None)
                rows = inputs[0] if len(inputs) == 1 and output is logits else None
                if not isinstance(rows, Tensor) or len(rows) != len(logits):
                    raise NoFeatures
                yield rows[:0] if batch.filler else rows
    finally:
        handle.remove()


def with_features(run: Run, task: Task, model: nn.Module, checkpoint: Checkpoint | None) -> Task:
    """The task with loaders of features, which `model` takes from now on; the same task where a
    sample's features vary, or there are none. Collective.

    Args:
        model: frozen; without the weights of `checkpoint` yet. Left in evaluation mode.
    """
    settings, say, exchange, started = run.settings, run.console.say, run.exchange, time.monotonic()
    head, *others = heads_of(model)
    if others or settings.engine == "ort":
        return task
    if flags := " ".join(settings.flags_of_equal_features):
        say(f"note: with {flags} the frozen backbone would compute each sample only once")
        return task
    if checkpoint is not None:
        Strategy(model).load(checkpoint.model)
    model.eval()
    splits = {"train": task.train, "val": task.val, "test": task.test}
    names = {loader: name for name, loader in splits.items() if loader is not None}
    views = {name: loader.in_order(exchange.rank, exchange.size) for loader, name in names.items()}
    path = Path(settings.cache_dir) / f"features-{_key(run, task, model, head, views)}.safetensors"
    kept, found = dict[str, Tensor](), dict[str, Tensor]()
    with contextlib.suppress(OSError, SafetensorError):
        kept = load_file(path)
    total = sum(view.total for view in views.values())
    line = f"computing the features of {counted(total, 'sample')}, once"
    try:
        with progress_bar(run.leads and not kept, line, total=total, unit=" samples") as bar:
            for name, view in views.items():
                parts = features(model, head, view, run.precision)
                with contextlib.closing(parts):
                    found[name] = _whole(run, view, parts, kept.get(name), bar)
    except NoFeatures as error:
        if str(error):
            say(f"note: {error}: the frozen backbone computes each sample in every epoch")
        return task
    how = f"from {path}"
    if any(rows is not kept.get(name) for name, rows in found.items()):
        how = f"computed once, in {duration(time.monotonic() - started)}"
        if run.leads:
            _keep(path, found, say)
    size, megabytes = found["train"][0].numel(), sum(rows.nbytes for rows in found.values()) / 1e6
    each = f"{counted(size, 'number')} each, {megabytes:,.0f} MB"
    say(f"features of {counted(total, 'sample')} {how} ({each})")
    last = model.get_submodule(head)
    model.forward = lambda rows: last(rows)
    made = {}
    for loader, name in names.items():
        rows = found.pop(name)
        free = torch.cuda.mem_get_info(run.device)[0] if run.device.type == "cuda" else 0
        near = rows.to(run.device) if rows.nbytes <= FRACTION * free else rows
        made[loader] = loader.with_features(near)
    val = None if task.val is None else made[task.val]
    return dataclasses.replace(task, train=made[task.train], val=val, test=made[task.test])


def _whole(run: Run, view: Loader, parts: Iterator[Tensor], kept: Tensor | None, bar) -> Tensor:
    """(samples, ...) on the CPU, of the parts of all ranks; `kept` if it is near the first of them.
    Collective."""
    samples, done, first = torch.from_numpy(view.visited()), 0, next(parts)
    shape, near = (view.total, *first.shape[1:]), False
    if kept is not None and kept.shape == shape:
        # The code of the model may have changed, or what else the key does not hold.
        now, before = first.float().cpu(), kept[samples[: len(first)]].float()
        near = bool((now - before).norm() <= NEAR * now.norm())
    needed = math.prod(shape) * first.element_size()
    processes = run.place.local_world_size if run.place else 1
    fits = needed * processes <= FRACTION * available_memory()
    all_near, all_fit = map(all, zip(*run.exchange.gather_json([near, fits]), strict=True))
    if kept is not None and all_near:
        return kept
    if not all_fit:
        raise NoFeatures(f"features of {needed / 1e9:,.0f} GB are too many for the memory")
    found = torch.zeros(shape, dtype=first.dtype)
    for rows in chain([first], parts):
        found[samples[done : done + len(rows)]] = rows.cpu()
        done += len(rows)
        bar.update(run.exchange.size * len(rows))
    return run.exchange.sum(found)


def _key(run: Run, task: Task, model: nn.Module, head: str, views: dict[str, Loader]) -> str:
    """Of what decides over the bits of the features."""
    weights = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not name.startswith(f"{head}."):
            weights.update(name.encode())
            weights.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    # How samples are read, and what the weights do not show of the model.
    groups = ("data", "texts", "model")
    told = (f for f in dataclasses.fields(run.settings) if f.metadata["resume"] == "fixed")
    content = [
        [torch.__version__, run.numerical_environment(), weights.hexdigest()],
        [task.simple_model.identity, task.card.to_dict()],
        [[name, view.batch_size, view.step_size] for name, view in views.items()],
        [str(getattr(run.settings, f.name)) for f in told if f.metadata["group"] in groups],
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def _keep(path: Path, found: dict[str, Tensor], say: Callable[[str], None]) -> None:
    """For later runs. A failure costs no more than a line."""
    try:
        with written_aside(path) as aside:
            save_file(found, aside)
            aside.chmod(0o644)  # safetensors' 0600 would keep a shared cache from others
    except (UserError, SafetensorError) as error:
        say(f"the features are not kept for later runs: {error}")
