"""What training asks of a loader."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from utils.data.batch import Batch
from utils.data.draws import Mixing


@runtime_checkable
class TrainingLoader(Protocol):
    """Batches of a training split, in an order that (seed, epoch) decides; see utils/data/loader.py
    for the one that there is. Evaluation asks for `epoch()` and `samples` alone.

    An epoch is cut into optimizer steps, which are the same for all ranks, and a rank's part of a
    step into micro-batches, which it can be cut into anew without changing the steps.
    """

    # ---- an epoch -------------------------------------------------------------------------------

    def epoch(self, epoch: int = 0, start_step: int = 0) -> Iterator[Batch]:
        """This rank's micro-batches, on the device, from optimizer step `start_step` of it on."""

    @property
    def samples(self) -> int:
        """In an epoch, of all ranks."""

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch, the last of which may be shorter."""

    step_size: int  # samples in an optimizer step, of all ranks; with --batch_tokens in the mean
    mixing: Mixing | None  # how samples are mixed with each other

    @property
    def workers(self) -> int:
        """Processes that read for it; 0: this one does."""

    # ---- CUDA graphs ----------------------------------------------------------------------------

    def defer(self) -> None:
        """From the next `epoch` on inputs come unmade, where the device alone can make them."""

    def made(self, batch: Batch) -> Batch:
        """With its inputs, where they were deferred; else as it is."""

    # ---- micro-batches --------------------------------------------------------------------------

    batch_size: int  # samples in a micro-batch, where these are not counted in tokens

    @property
    def batch_flag(self) -> str:
        """By which the user sets `micro_batch`: --batch_size, or --batch_tokens."""

    @property
    def micro_batch(self) -> int:
        """Size of a micro-batch, in samples or, with --batch_tokens, in tokens."""

    @property
    def share(self) -> int:
        """Most of an optimizer step that one rank has, in the unit of `micro_batch`."""

    @property
    def accumulation(self) -> int:
        """Micro-batches in an optimizer step, of each rank."""

    def cuts(self) -> list[int]:
        """Sizes that `cut` takes, in the unit of `micro_batch`, the largest first."""

    def cut(self, size: int) -> None:
        """From the next `epoch` on the same steps have micro-batches of this size."""

    def resize(self, batch_size: int, step_size: int) -> None:
        """From the next `epoch` on there are other steps, too; both in samples."""

    def largest(self) -> int:
        """Samples n such that no micro-batch of this rank takes more memory than `trial(n)`."""

    def trial(self, n: int) -> Batch:
        """A whole step of one micro-batch: the n samples that take the most memory."""
