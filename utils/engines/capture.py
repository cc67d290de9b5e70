"""Captures the work of a GPU with `torch.cuda.graph`, and cleans up after a capture that fails.

What a failed capture leaves behind depends on the version of PyTorch. Up to 2.11 at least,
`torch.cuda.graph` raises before it has restored anything: its stream stays the current one; the
allocator behaves as if the capture were still running (blocks that another stream has used are
never freed, and running out of memory ends in an internal error); and the random generator refuses
to draw, so the next dropout raises. Newer versions restore most of this when the graph is reset.
`_clean_up` works for both, and then draws a random number to check that the process works again.
"""

import contextlib
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import torch

from ..errors import UserError
from .launch_bound import mark_on

AHEAD = 2  # replays by which the host may be ahead of the GPU
WAIT = "called a synchronizing CUDA operation"  # PyTorch's message in its sync debug mode


class CudaRecorder:
    """Captures work of a GPU. All graphs share a memory pool, since none leaves anything in it.

    Ordinary work is assumed to need at most as much memory as it has needed so far.
    """

    # Graphs whose capture has failed. PyTorch 2.11 leaves pointers to them in its allocator of
    # pinned memory, so they must live as long as the process.
    failed: ClassVar[list[torch.cuda.CUDAGraph]] = []

    def __init__(self, device: torch.device):
        self.side = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self._replays: deque[torch.cuda.Event] = deque()

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[None]:
        """The context for running work that is captured later."""
        training = torch.cuda.current_stream(self.side.device)
        self.side.wait_stream(training)
        with torch.cuda.stream(self.side):
            yield
        training.wait_stream(self.side)

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[str]]:
        """Lists the places within it where the host waits for the GPU, which a capture does not
        allow. The work itself runs as usual.

        Uses PyTorch's sync debug mode, set to warn: its errors would end a step half-way, with some
        of the weights changed. Other threads that Python has started, such as the one that writes
        checkpoints, may wait. Autograd's threads, which C++ has started, may not."""
        places: list[str] = []
        mode, own = torch.cuda.get_sync_debug_mode(), threading.current_thread()
        with warnings.catch_warnings():
            show = warnings.showwarning

            def note(message, category, filename, lineno, *rest) -> None:
                thread = threading.current_thread()
                if WAIT not in str(message):
                    show(message, category, filename, lineno, *rest)
                elif thread is own or type(thread) is not threading.Thread:
                    places.append(f"{Path(filename).name}:{lineno}")

            warnings.showwarning = note  # type: ignore[assignment]  # `rest` are the last two
            warnings.filterwarnings("always", message=WAIT)
            warnings.filterwarnings("ignore", message="Synchronization debug mode")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield places
            finally:
                torch.cuda.set_sync_debug_mode(mode)

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Returns a replay function: it repeats the work of function() with the current content of
        the tensors that function() reads. Nothing is computed during the capture.

        Raises:
            RuntimeError: it cannot be captured, or leaves too little memory for ordinary work. The
                process is as it was before.
            UserError: it could not be captured, and the process cannot continue.
        """
        graph, device = torch.cuda.CUDAGraph(), self.side.device
        needed = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        training, failure = torch.cuda.current_stream(device), ""
        try:
            # thread_local: the thread that writes checkpoints may continue meanwhile.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                function()
        except Exception as error:
            failure = _first_line(error)
        if failure:  # not in the handler, whose exception keeps the capture's tensors alive
            self._clean_up(graph, training, failure)
            raise RuntimeError(failure)
        # torch.cuda.graph has emptied the allocator's cache before the capture.
        free, _ = torch.cuda.mem_get_info(device)
        if free < needed:
            raise RuntimeError(
                f"it leaves {free / 1e9:.2f} GB, and an ordinary step, which the last one of an "
                f"epoch is, takes {needed / 1e9:.2f} GB: take a smaller batch"
            )
        return graph.replay

    def _clean_up(
        self, graph: torch.cuda.CUDAGraph, training: torch.cuda.Stream, failure: str
    ) -> None:
        """Restores the process after a failed capture; see the head of this file."""
        device = training.device
        try:
            torch.cuda.set_stream(training)
            graph.reset()
            self.failed.append(graph)
            # The capture's stream has a cuBLAS workspace in the pool, which would keep the pool.
            torch._C._cuda_clearCublasWorkspaces()
            with contextlib.suppress(RuntimeError):  # the pool may have been released already
                torch._C._cuda_endAllocateToPool(device.index, self.pool)
                torch._C._cuda_releasePool(device.index, self.pool)
            # A copy of the generator's state draws the same numbers and belongs to no capture. One
            # copy is used up by the trial draw, the other one stays.
            generator = torch.cuda.default_generators[device.index]
            fresh = generator.clone_state()
            generator.graphsafe_set_state(generator.clone_state())
            torch.rand(1, device=device)
            generator.graphsafe_set_state(fresh)
            torch.cuda.empty_cache()
        except Exception as error:
            raise UserError(
                f"the capture of a CUDA graph failed ({failure}), and PyTorch "
                f"{torch.__version__} cannot go on after it ({_first_line(error)}): start again "
                "with --no_cuda_graphs"
            ) from error

    def keep_pace(self) -> None:
        """To be called after each replay: waits until only AHEAD replays are pending.

        A replay costs the host almost nothing: without this wait it would submit all batches up to
        the next log line at once, and each would take memory until its turn. The GPU still has the
        latest replays to do while the host sleeps here, so it never runs out of work."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.side.device))
        self._replays.append(event)
        if len(self._replays) > AHEAD:
            self._replays.popleft().synchronize()

    def mark(self) -> torch.cuda.Event:
        """An event, with timing, at the end of the work submitted so far."""
        return mark_on(self.side.device)


def _first_line(error: BaseException) -> str:
    """The first line of the original error: because of it, ending the capture fails as well."""
    while error.__context__ is not None and not error.__suppress_context__:
        error = error.__context__
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
