"""`fewhours.fit`: a network and data of one's own, trained by the trainer of the commands."""

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from utils.checkpoints.checkpoint import Checkpoints
from utils.data.batch import AUGMENT_STREAM, random_generator
from utils.data.loader import Loader
from utils.data.splits import stratified_split
from utils.entry import carry_out
from utils.errors import UserError, one_line
from utils.reporting.answers import SampleNames
from utils.runs.resume import load_checkpoint
from utils.runs.run import Run as RunOfTrainer
from utils.runs.train import train
from utils.settings import TrainSettings
from utils.settings.config import changed, fields
from utils.settings.data import DataSettings
from utils.settings.values import canonical_name
from utils.tasks.kinds import Kind
from utils.tasks.mixing import build_mixing
from utils.tasks.task import Task
from utils.to_device import to_device

from .callbacks import Callback, Callbacks
from .run import OTHERS, Run, carried_out, words_of

HELD_OUT = 0.1  # without a val_set and a test_set
# Flags that would need to know more of the data or of the network.
REFUSED = {*fields(DataSettings)} - {"val_fraction"} | OTHERS
REFUSED |= {"pretrained", "freeze_backbone", "unfreeze_epoch", "report", "baseline", "dry_run"}


@dataclass
class Settings(TrainSettings):
    entry = "fewhours.fit"
    task = "samples"
    bf16_helps_cpus, reads_in_workers = True, False
    report: bool = changed(TrainSettings, "report", False)
    baseline: bool = changed(TrainSettings, "baseline", False)


@dataclass(frozen=True)
class Card:
    """See utils/weights/card.py."""

    task: ClassVar[str] = "samples"
    classes: tuple[str, ...]

    @classmethod
    def from_dict(cls, values: dict) -> "Card":
        return cls(tuple(values["classes"]))

    def files(self) -> dict:
        return {}

    def to_dict(self) -> dict:
        return asdict(self)


class Samples:
    """`inputs`, a tensor or a Dataset, and `labels`, (n,) int64, of the argument `name`."""

    def __init__(self, given: Any, name: str):
        if isinstance(given, TensorDataset):
            given = given.tensors
        if isinstance(given, tuple | list) and len(given) == 2:
            self.inputs: Any = _tensor(given[0])
            labels: Any = given[1]
        else:
            self.inputs, labels = given, getattr(given, "targets", None)
            if labels is None or len(labels) != len(given):
                labels = [int(given[i][1]) for i in range(len(given))]
        self.labels = _tensor(labels).numpy()
        whole = np.issubdtype(self.labels.dtype, np.integer) and self.labels.ndim == 1
        if not (whole and len(self.labels) == len(self.inputs) and len(self.labels)):
            raise UserError(
                f"fewhours.fit: {name} is a Dataset of (input, label), or a pair of arrays, inputs "
                "and labels, of the same length, 1 or more; a label is the number of its class"
            )

    def part(self, index: np.ndarray) -> "Samples":
        other, rows = copy.copy(self), index.tolist()
        other.labels = self.labels[index]
        is_tensor = isinstance(self.inputs, Tensor)
        other.inputs = self.inputs[rows] if is_tensor else Subset(self.inputs, rows)
        return other

    def input(self, sample: int) -> Tensor:
        inputs = self.inputs
        return inputs[sample] if isinstance(inputs, Tensor) else _tensor(inputs[sample][0])

    @property
    def fingerprint(self) -> str:
        """Of tensors and labels; what a Dataset returns is not read for it."""
        content = hashlib.sha256(self.labels.astype(np.int64).tobytes())
        if isinstance(self.inputs, Tensor):
            content.update(self.inputs.contiguous().view(torch.uint8).numpy())
        return content.hexdigest()


def _tensor(values: Any) -> Tensor:
    tensor = values.cpu() if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
    return tensor.float() if tensor.dtype == torch.float64 else tensor


class SampleLoader(Loader):
    """A Dataset is read in this process. For each sample PyTorch's CPU generator, from which random
    transforms draw, is seeded by (seed, epoch, sample), so that resuming is exact."""

    def __init__(self, samples: Samples, **options):
        super().__init__(samples.labels, **options)
        self.samples_of = samples
        self.features = samples.inputs if isinstance(samples.inputs, Tensor) else None

    def _inputs(self, epoch, order, pieces):
        def inputs_at(places) -> Tensor:
            with torch.random.fork_rng([]):
                found = [self._input(epoch, row) for row in order[places].tolist()]
            inputs = torch.stack(found) if found else self.samples_of.input(0)[None][:0]  # a filler
            return to_device(inputs, self.device)

        return (inputs_at(piece.place) for piece in pieces), inputs_at

    def _input(self, epoch: int, row: int) -> Tensor:
        numbers = random_generator(self.seed, AUGMENT_STREAM, epoch, row)
        torch.default_generator.manual_seed(int(numbers.integers(2**63 - 1)))
        return self.samples_of.input(row)


@dataclass(frozen=True)
class SampleTask(Task):
    SKIPPED = "skipped_samples"

    sample: Any = None  # an input

    def usual_sample(self) -> Tensor:
        return torch.zeros_like(self.sample)[None]


class SampleKind(Kind):
    """The kind of task of `fewhours.fit`; besides "train" there is "val", "test" or both."""

    card_class = Card
    data_flags = "train_set, val_set, test_set"

    def __init__(self, settings, model: nn.Module, splits: dict[str, Samples], classes: list[str]):
        super().__init__(settings, lambda *_: model, type(model).__name__)
        self.splits, self.classes = splits, classes

    def load_task(self, run, card, pretrained) -> SampleTask:
        settings, splits = self.settings, dict(self.splits)
        workers, processes = run.workers, run.exchange
        if settings.val_fraction:
            whole, fraction = splits["train"], settings.val_fraction
            parts = stratified_split(whole.labels, fraction, settings.seed, self.classes)
            splits["train"], splits["val"] = map(whole.part, parts)
        size, sample = settings.batch_size, splits["train"].input(0)

        def loader(name: str, step: int, rank: int, ranks: int, **more) -> SampleLoader:
            more |= {"batch_size": size, "step_size": step, "rank": rank, "ranks": ranks}
            return SampleLoader(splits[name], device=run.device, **more)

        mixing = build_mixing(
            settings,
            *(sample.shape[-2:] if sample.ndim == 3 else (1, 1)),
            strength=None,
            workers=workers.size,
            say=run.console.say,
        )
        step = settings.global_batch or size * settings.accumulation_steps * workers.size
        train = loader(
            *("train", step, workers.own[0], workers.size),
            shuffle=True, seed=settings.seed, mixing=mixing,
            by_class=settings.class_sampler == "balanced",
        )  # fmt: skip
        val, test = (
            loader(name, size * processes.size, processes.rank, processes.size)
            if name in splits
            else None
            for name in ("val", "test")
        )
        data = SimpleNamespace(classes=self.classes, skipped=0, synthetic=False, notes=[])
        prints = "".join(split.fingerprint for split in self.splits.values())
        data.fingerprint = hashlib.sha256(prints.encode()).hexdigest()
        names = {name: _numbers(len(split.labels)) for name, split in splits.items()}
        card = Card(tuple(self.classes))
        return SampleTask(data, card, train, test or val, val, names=names, sample=sample)  # type: ignore[arg-type]  # there is one


def _numbers(samples: int) -> SampleNames:
    return SampleNames(["number"], lambda: ([str(number)] for number in range(samples)))


def fit(
    model: nn.Module,
    train_set: Any,
    val_set: Any = None,
    test_set: Any = None,
    *,
    classes: Sequence[str] | None = None,
    time: str | None = None,
    callbacks: Sequence[Callback] = (),
    **flags: Any,
) -> Run:
    """Trains a network of your own, in place, on data of your own.

    It is at the end in evaluation mode, with the weights that the run's result is about: the best
    on the validation split, or without one the last, or their average.

    Args:
        model: inputs (n, ...) -> logits (n, classes).
        train_set: a Dataset that returns (input, label), or a pair of arrays or tensors: inputs,
            (n, ...), and labels, (n,), whole numbers from 0 on.
        val_set: decides which weights are best; None: a tenth of `train_set`, or as `val_fraction`
            says (transformed alike), unless there is a `test_set`.
        test_set: is measured at the end alone, or without a validation split after each epoch.
        classes: their names; None: those of `train_set.classes`, or numbers.
        time: for everything, such as "10m"; None: as `epochs` says.
        callbacks, flags: as of `fewhours.train`; `resume` goes on with a run of the same model and
            data.

    Raises:
        UserError: a flag or the data are wrong.
    """
    if name := next((name for name in flags if canonical_name(name) in REFUSED), None):
        raise UserError(f"fewhours.fit has no {name}: it is for what the commands read")
    given = {"train": train_set, "val": val_set, "test": test_set}
    splits = {name: Samples(one, f"{name}_set") for name, one in given.items() if one is not None}
    if val_set is not None and flags.get("val_fraction"):
        raise UserError("fewhours.fit: val_set and val_fraction both tell what is validated on")
    if val_set is None and test_set is None and "resume" not in flags:
        flags.setdefault("val_fraction", HELD_OUT)
    if test_set is None:
        flags["final_test"] = False
    names = _classes(model, splits, classes or getattr(train_set, "classes", None))
    place = next((p.device for p in model.parameters()), None)
    words = words_of(({"time": time} if time else {}) | flags)

    def carry(words: list[str], signals, started: float, began) -> int:
        def act(settings, origin, signals) -> None:
            is_pair, model_name = isinstance(train_set, tuple | list), type(model).__name__
            data = "arrays" if is_pair else type(train_set).__name__
            if settings.mixup == "auto":
                raise UserError("fewhours.fit has no --mixup auto; --mixup 0.2 mixes")
            with RunOfTrainer(settings, origin, signals, model_name, data, started) as run:
                began(run)
                train(run, SampleKind(settings, model, splits, names), load_checkpoint(run))

        return carry_out(Settings, act, "fewhours.fit", words, signals)

    told = Callbacks(callbacks)
    try:
        folder = carried_out(carry, words, told)
    finally:
        model.to(place).eval()
    assert folder is not None
    if (checkpoint := Checkpoints(folder / "checkpoints").model(flags.get("use"))) is not None:
        model.load_state_dict(checkpoint.weights, strict=False)
    told.end(run := Run(folder))
    return run


def _classes(
    model: nn.Module, splits: dict[str, Samples], names: Sequence[str] | None
) -> list[str]:
    """Names of the classes, as many as the model's answer has. Raises UserError if that, or a
    label, does not fit."""
    sample, trains = splits["train"].input(0)[None], model.training
    place = next((p.device for p in model.parameters()), "cpu")
    try:
        with torch.no_grad():
            answer = model.eval()(sample.to(place))
        (_, count) = answer.shape
    except Exception as error:
        shape = tuple(sample.shape)
        raise UserError(
            f"fewhours.fit: the model has to answer inputs {shape} of {sample.dtype} with logits "
            f"(1, classes): {one_line(error, 300)}"
        ) from error
    finally:
        model.train(trains)
    for name, split in splits.items():
        low, high = split.labels.min(), split.labels.max()
        if low < 0 or high >= count:
            raise UserError(
                f"fewhours.fit: {name}_set has labels from {low} to {high}, and the model answers "
                f"with {count} classes, 0 to {count - 1}"
            )
    return [*map(str, names if names is not None and len(names) == count else range(count))]
