"""A task: a data set with its splits and loaders."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sized

    import numpy as np
    from torch import Tensor

    from ..data.loader import HoldOut, Loader
    from ..mixup.auto import AutoStrength
    from ..reporting.answers import SampleNames


@dataclass(frozen=True)
class AutoSplit:
    """The training samples whose losses --mixup auto compares.

    Attributes:
        held_out, trained: (m,) int64 each, indices into the training split, with the same classes
            but for rounding.
        strength: of mixing, set by that comparison.
        hold_out: given to the training loader, which leaves those samples out.
    """

    held_out: np.ndarray
    trained: np.ndarray
    strength: AutoStrength
    hold_out: HoldOut


@dataclass(frozen=True)
class Task:
    """A data set with its splits made, and a loader for each of them.

    Attributes:
        data: the data set: `classes`, `skipped`, `synthetic`, `fingerprint`, ...
        card: what must be known of the data set to use a model that was trained on it.
        val: None if there is no validation split; `test` itself if there is no test set.
        auto: what --mixup auto compares; None without it.
        held_out, trained: loaders of the samples that it compares.
        names: what names the samples of each split, "train", "val" and "test".
        simple_model: the baseline of such data, one of simple_models.py.
    """

    SKIPPED: ClassVar[str]  # what the summary calls the samples left out by --on_bad skip
    # Meta-mixup's policy learns from all pairs of a step, not from --meta_batch of them.
    learns_from_all_pairs: ClassVar[bool] = False

    data: Any
    card: Any
    train: Loader
    test: Loader
    val: Loader | None
    auto: AutoSplit | None = None
    held_out: Loader | None = None
    trained: Loader | None = None
    names: Mapping[str, SampleNames] = field(default_factory=dict)
    simple_model: Any = None

    def resize_evaluation(self, batch_size: int, ranks: int) -> None:
        """Changes the batches of the loaders that evaluate.

        Args:
            batch_size: samples in a batch of one rank.
        """
        for loader in filter(None, (self.test, self.val, self.held_out, self.trained)):
            loader.resize(batch_size, batch_size * ranks)

    @property
    def summary_entries(self) -> dict:
        """What the summary says of the data."""
        entries = {
            "classes": len(self.data.classes),
            self.SKIPPED: self.data.skipped,
            "synthetic": self.data.synthetic,
        }
        entries |= self.further_entries()
        return entries | ({} if self.val is None else {"val_samples": self.val.samples})

    def further_entries(self) -> dict:
        return {}

    def usual_sample(self) -> Tensor:
        """A sample without content, of the usual size in training, as the model takes it."""
        raise NotImplementedError


def counts_text(samples: str, train: Sized | None, val: Sized | None, test: Sized | None) -> str:
    """ "600 training, 60 validation, 100 test pictures", without the splits that are None.

    Args:
        samples: "pictures" or "texts".
    """
    splits = {"training": train, "validation": val, "test": test}
    counts = [f"{len(split):,} {name}" for name, split in splits.items() if split is not None]
    return f"{', '.join(counts)} {samples}"
