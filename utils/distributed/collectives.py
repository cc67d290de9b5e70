"""How fast the collectives between the ranks are."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .exchange import ProcessExchange

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "broadcast")
SMALL = 1024  # bytes, by which the latency is measured
FIRST = 1 << 20  # bytes, from whose time the size for the bandwidth follows
LARGEST = {"cuda": 1 << 28, "cpu": 1 << 24}  # bytes
CALL_SECONDS = 0.2  # a call with the large size takes at most about this long
TOTAL_SECONDS = 1.0  # of all measured calls with one size
WARM_UP, MOST_CALLS = 3, 50


@dataclass(frozen=True)
class Timing:
    """How fast a collective is.

    Attributes:
        name: one of COLLECTIVES.
        latency: seconds of a call with SMALL bytes.
        size: bytes of the large tensor: that which every rank has in the end or, of
            reduce-scatter, at the start.
        seconds: of a call with it.
        bandwidth: bytes per second; see `bus_bandwidth`.
    """

    name: str
    latency: float
    size: int
    seconds: float
    bandwidth: float


def bus_bandwidth(name: str, size: int, seconds: float, ranks: int) -> float:
    """Bytes per second that each rank's link carries in one direction, whatever the number of
    ranks, if the ranks form a ring. A ring sends (n - 1) / n of the tensor to the next rank for
    all-gather and reduce-scatter, twice that for all-reduce, and all of it for broadcast
    (nccl-tests, doc/PERFORMANCE.md).
    """
    part = (ranks - 1) / ranks
    factor = {"all-reduce": 2 * part, "all-gather": part, "reduce-scatter": part, "broadcast": 1}
    return factor[name] * size / seconds


def measure(exchange: ProcessExchange, device: torch.device, name: str) -> Timing:
    """Times one collective. Collective; all ranks get the same result.

    Args:
        device: of the tensors: its backend is measured.
    """

    def seconds_of(size: int, most_calls: int = MOST_CALLS) -> float:
        call = _call(exchange, device, name, size)
        once = _time(exchange, device, call, WARM_UP)
        calls = min(max(int(TOTAL_SECONDS / once), WARM_UP), most_calls)
        return _time(exchange, device, call, calls)

    latency, first = seconds_of(SMALL), seconds_of(FIRST, WARM_UP)
    size = FIRST
    while size < LARGEST[device.type] and first * 2 * size / FIRST <= CALL_SECONDS:
        size *= 2
    seconds = seconds_of(size)
    return Timing(name, latency, size, seconds, bus_bandwidth(name, size, seconds, exchange.size))


def _call(exchange: ProcessExchange, device: torch.device, name: str, size: int) -> Callable:
    """A function without arguments that does the collective once, on float32."""
    group, part = exchange.group, max(size // 4 // exchange.size, 1)
    whole = torch.zeros(part * exchange.size, device=device)
    own = torch.zeros(part, device=device)
    # PyTorch 2.14 has new names for them.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls = {
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "all-gather": lambda: all_gather(whole, own, group=group),
        "reduce-scatter": lambda: reduce_scatter(own, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, group=group, group_src=0),
    }
    return calls[name]


def _time(exchange: ProcessExchange, device: torch.device, call: Callable, calls: int) -> float:
    """Seconds of each of so many calls, on the rank for which they take longest."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    call()  # the first one may set up connections
    wait()
    exchange.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    elapsed = (time.perf_counter() - start) / calls
    return max(exchange.gather_json(elapsed))
