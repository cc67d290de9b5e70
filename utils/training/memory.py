"""How much memory a run took, and what to do where it has run out."""

from collections.abc import Callable

import torch

from ..data.loader import Loader
from ..errors import UserError, one_line
from ..machine.backends import trial_plans
from ..machine.host_memory import peak_rss
from .steps import Steps

# Messages of libraries below PyTorch, which surface as plain RuntimeErrors.
OUT_OF_MEMORY = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # no memory for its handle
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "unable to find an engine to execute this computation",  # cuDNN: none fits in the free memory
    "CUSOLVER_STATUS_ALLOC_FAILED",
)


def peak_memory(device: torch.device) -> int:
    """Bytes: of the GPU's allocator, or of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_rss()


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)


def succeeds(attempt: Callable[[], None]) -> bool:
    """Runs `attempt`; False if it ran out of memory, which is then freed."""
    try:
        with trial_plans():
            attempt()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        fitted = False
    else:
        fitted = True
    if torch.cuda.is_available():  # outside the handler, which keeps the failed pass alive
        torch.cuda.empty_cache()
    return fitted


def within_memory(
    work: Callable,
    *,
    steps: Steps,
    loader: Loader,
    advice: str | None,
    save: Callable[[], str],
):
    """Calls work(); if it runs out of memory, raises UserError, which names half of the batch.

    Args:
        steps: with which `work` trains.
        advice: which other flags save memory; None: none do.
        save: saves the last whole step, if it is to be saved; returns a note.
    """
    try:
        return work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = one_line(error)
    # Outside the exception handler, which keeps the tensors of the failed step alive.
    exchange, half = steps.exchange, _instead(loader, loader.micro_batch // 2)
    what = f"{loader.batch_flag} {loader.micro_batch} does not fit, {half}"
    if exchange.size > 1:  # the other ranks wait: nothing can be saved
        raise UserError(
            f"out of memory in process {exchange.rank} of {exchange.size}: {what} ({reason})"
        )
    ways = [what, "a smaller --meta_batch" if steps.meta else "", steps.free_memory(), advice]
    raise UserError(f"out of memory: {'; or '.join(filter(None, ways))}.{save()} ({reason})")


def _instead(loader: Loader, most: int) -> str:
    """Flags that keep the optimizer step with micro-batches of at most `most` samples, or
    tokens."""
    name = loader.batch_flag
    size = next((size for size in loader.cuts() if size <= most), None)
    if size is None:
        return "and no smaller size is possible; take a smaller model or smaller inputs"
    count = -(-loader.rank_batch // size)
    keep, note = f"--accumulation_steps {count}", " (not needed with --global_batch)"
    if name == "--batch_size" and size * count != loader.rank_batch:
        keep, note = f"--global_batch {loader.step_size}", ""
    return (
        f"{name} {size} may; {keep} keeps the optimizer step the same{note}; "
        "--auto_batch finds a batch that fits"
    )
