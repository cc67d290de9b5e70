"""How much memory a run took, and which batch size would have fitted."""

from collections.abc import Callable

import torch

from ..data.loader import Loader
from ..errors import UserError, one_line
from ..machine.backends import trial_plans
from ..machine.host_memory import peak_rss
from .objective import first_samples
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


def largest_batch(attempt: Callable[[int], None], failed: int) -> int:
    """The largest batch below `failed` that is likely to fit; 0 if not even one sample does.

    Halves n until `attempt(n)` (a forward and backward pass over n samples) succeeds, then bisects
    upwards twice. A tenth is kept free, as memory gets fragmented in a long run.
    """

    def fits(n: int) -> bool:
        return succeeds(lambda: attempt(n))

    low, high = failed // 2, failed
    while low >= 1 and not fits(low):
        low, high = low // 2, low
    for _ in range(2):
        middle = (low + high) // 2
        if not low < middle < high:
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return max(low - low // 10, min(low, 1))


def within_memory(
    work: Callable,
    *,
    steps: Steps,
    loader: Loader,
    advice: str | None,
    save: Callable[[], str],
):
    """Calls work(); if it runs out of memory, raises UserError with a batch that fits.

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
    exchange = steps.exchange
    if exchange.size > 1:  # the other ranks wait: nothing can be tried or saved
        half = loader.micro_batch // 2
        raise UserError(
            f"out of memory in process {exchange.rank} of {exchange.size}: "
            f"{_flag(loader)} does not fit, {_instead(loader, half)} ({reason})"
        )
    # Outside the exception handler, which keeps the tensors of the failed step alive.
    remedy = steps.free_memory()
    saved = save()
    steps.optimizer.zero_grad(set_to_none=True)
    fits = _batch_that_fits(steps.objective, steps.optimizer, loader)
    if steps.meta is not None:  # its passes were not tried
        fits += "; or a smaller --meta_batch"
    if remedy:
        fits += f"; or {remedy}"
    if advice is not None:
        fits += f"; or {advice}"
    raise UserError(f"out of memory: {fits}.{saved} ({reason})")


def _batch_that_fits(objective, optimizer, loader: Loader) -> str:
    """Tries smaller batches; returns what the user can do."""
    try:
        batch = loader.made(next(iter(loader.epoch(0, 0))))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return f"no batch of {_flag(loader)} can be made; take a smaller one"

    def attempt(n: int) -> None:
        loss, _ = objective(first_samples(batch.inputs, n), batch.targets[:n])
        loss.backward()
        optimizer.zero_grad(set_to_none=True)

    fits = largest_batch(attempt, len(batch.targets))
    optimizer.zero_grad(set_to_none=True)
    if not fits:
        return "not even one sample fits; take a smaller model or smaller inputs"
    if loader.batch_flag == "--batch_tokens":
        fits = loader.micro_batch * fits // len(batch.targets)
    return f"{_flag(loader)} does not fit, {_instead(loader, fits)}"


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
        f"{name} {size} is likely to; {keep} keeps the optimizer step the same{note}; "
        "--auto_batch finds a batch that fits"
    )


def _flag(loader: Loader) -> str:
    """The flag that sets the size of its micro-batches, with its value."""
    return f"{loader.batch_flag} {loader.micro_batch}"
