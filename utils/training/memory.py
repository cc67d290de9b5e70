"""Memory: how much a run took, and which batch would have fitted."""

import resource
from collections.abc import Callable

import torch

from utils.errors import UserError


def peak_memory(device: torch.device) -> int:
    """Bytes: of the GPU's allocator, or of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def largest_batch(attempt: Callable[[int], None], failed: int) -> int:
    """The largest batch below `failed` that is likely to fit; 0 if not even one sample does.

    Halves until `attempt(n)` (a forward and backward pass over n samples) succeeds, then tries
    half-way up twice; a tenth is kept free, as memory gets fragmented in a long run.
    """

    def fits(n: int) -> bool:
        try:
            attempt(n)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            fitted = False
        else:
            fitted = True
        if torch.cuda.is_available():  # outside the handler, which holds the failed pass
            torch.cuda.empty_cache()
        return fitted

    low, high = failed // 2, failed
    while low >= 1 and not fits(low):
        low, high = low // 2, low
    for _ in range(2):
        middle = (low + high) // 2
        if not low < middle < high:
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return max(low - low // 10, min(low, 1))


def out_of_memory(trainer, reason: str) -> UserError:
    """What a Trainer stops with after a step that did not fit; that step leaves nothing behind."""
    trainer.guard.take_back(torch.ones((), dtype=torch.bool, device=trainer.precision.device))
    trainer.optimizer.zero_grad(set_to_none=True)
    trainer.step_sums.zero_()
    saved = ""
    if trainer.progress.step > 0:
        trainer.save(final=True)
        saved = (
            f" Step {trainer.progress.step} is saved; a resumed run keeps its batch size, so go on "
            f"in a new one with --pretrained {trainer.run_folder}."
        )
    fits = _batch_that_fits(trainer.objective, trainer.optimizer, trainer.loader)
    return UserError(f"out of memory: {fits}.{saved} ({reason})")


def _batch_that_fits(objective, optimizer, loader) -> str:
    """What to do, by trying smaller batches."""
    batch = next(iter(loader.epoch(0, 0)))

    def attempt(n: int) -> None:
        loss, _ = objective(batch.inputs[:n], batch.targets[:n])
        loss.backward()
        optimizer.zero_grad(set_to_none=True)

    fits = largest_batch(attempt, len(batch.inputs))
    optimizer.zero_grad(set_to_none=True)
    if not fits:
        return "not even one sample fits; take a smaller model or smaller inputs"
    steps = -(-loader.step_size // fits)
    return (
        f"--batch_size {loader.batch_size} does not fit, --batch_size {fits} is likely to, with "
        f"--accumulation_steps {steps} for about the same optimizer step"
    )
