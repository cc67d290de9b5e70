"""What training asks of a loader."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol, runtime_checkable

from utils.data.batch import Batch
from utils.mixup.mixing import Mixing


@runtime_checkable
class TrainingLoader(Protocol):
    """Batches of a training split, in an order that (seed, epoch) decides; implemented in
    utils/data/loader.py. Evaluation uses `epoch()` and `samples` alone; --auto_batch calls `resize`
    of its loaders, too.

    An epoch is cut into optimizer steps, which are the same for all ranks; a rank's part of a step
    is cut into micro-batches, whose size can be changed without changing the steps.
    """

    # ---- an epoch -------------------------------------------------------------------------------

    def epoch(self, epoch: int = 0, start_step: int = 0) -> Generator[Batch]:
        """This rank's micro-batches, on the device, from optimizer step `start_step` of it on."""

    @property
    def samples(self) -> int:
        """In an epoch, of all ranks."""

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch, the last of which may be shorter."""

    rank: int  # whose part of the steps it has

    def of_rank(self, rank: int) -> TrainingLoader:
        """The same loader with the part of another rank."""

    step_size: int  # samples in an optimizer step, of all ranks; with --batch_tokens on average
    mixing: Mixing | None  # how samples are mixed with each other

    @property
    def workers(self) -> int:
        """Processes that read ahead; 0: this process reads."""

    # ---- CUDA graphs ----------------------------------------------------------------------------

    def defer(self) -> None:
        """From the next `epoch` on, batches come without their inputs, which `made` adds on the
        device, if the device can do so alone."""

    def made(self, batch: Batch) -> Batch:
        """The batch with its inputs, if they were deferred."""

    # ---- micro-batches --------------------------------------------------------------------------

    batch_size: int  # samples in a micro-batch, without --batch_tokens

    @property
    def batch_flag(self) -> str:
        """The flag that sets `micro_batch`: --batch_size or --batch_tokens."""

    @property
    def micro_batch(self) -> int:
        """Size of a micro-batch, in samples or, with --batch_tokens, in tokens."""

    @property
    def rank_batch(self) -> int:
        """The largest share of an optimizer step that a rank has, in the unit of `micro_batch`."""

    @property
    def accumulation(self) -> int:
        """Micro-batches in an optimizer step, of each rank."""

    def cuts(self) -> list[int]:
        """Sizes that `cut` takes, in the unit of `micro_batch`, the largest first."""

    def cut(self, size: int) -> None:
        """From the next `epoch` on, the same steps are cut into micro-batches of this size."""

    def resize(self, batch_size: int, step_size: int) -> None:
        """From the next `epoch` on, micro-batches and steps have these sizes, in samples."""

    def largest(self) -> int:
        """An n such that no micro-batch of this rank takes more memory than `trial(n)`."""

    def trial(self, n: int) -> Batch:
        """A step of a single micro-batch, of the n samples that take the most memory."""
