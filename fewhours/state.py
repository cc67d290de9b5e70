"""Leaves the process as it was before a run in it."""

import contextlib
import functools
import gc
import os
import signal
import sys
from collections.abc import Iterator

from utils.entry import environment_of_entries

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)


@contextlib.contextmanager
def process_left_as_it_was() -> Iterator[None]:
    """A context for a run: at its end signal handlers, environment variables, `sys.path`, PyTorch's
    threads, random state and switches are what they were."""
    handlers = {n: signal.getsignal(n) for n in _SIGNALS}
    unraisable, path, environment = sys.unraisablehook, [*sys.path], {**os.environ}
    _say_what_is_too_late()
    os.environ.update(environment_of_entries())
    import torch

    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    random_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    plans, attention = cudnn.benchmark, cuda.cudnn_sdp_enabled()
    try:
        yield
    finally:
        gc.collect()  # model, optimizer and threads, which refer to each other
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        sys.unraisablehook, sys.path[:] = unraisable, path
        for name in {*os.environ} - {*environment}:
            del os.environ[name]
        os.environ.update(environment)
        torch.set_num_threads(threads)
        torch.set_rng_state(random)
        if random_cuda:
            torch.cuda.set_rng_state_all(random_cuda)
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)
        cudnn.benchmark = plans
        cuda.enable_cudnn_sdp(attention)


@functools.cache  # at the first call in a process, which imports PyTorch
def _say_what_is_too_late() -> None:
    torch, spin = sys.modules.get("torch"), environment_of_entries().get("GOMP_SPINCOUNT")
    if torch is not None and spin and not torch.cuda.is_available():
        print(
            "note: PyTorch was imported before the first call of fewhours: where other programs "
            f"use the CPU, training is faster if Python starts with GOMP_SPINCOUNT={spin}",
            flush=True,
        )
