"""The contenders of a case, made ready one by one and timed in turn.

Each runs in a process of its own: if one fails, even by an error that ends all GPU work of its
process, the others keep their time and their figures. Between turns it holds model, optimizer and
graphs on the GPU; it allocates the memory of a step when its turn comes.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from benchmarks.budget import Budget, attempt
from benchmarks.cases import Case, Sizes
from benchmarks.child import Child
from benchmarks.common import ratio
from benchmarks.contenders import Ours, Usual, Way
from benchmarks.fused import bytes_of_a_sample
from utils.entry import environment_of_entries
from utils.fused import fuse
from utils.launch.signals import Signals
from utils.machine.host_memory import available_memory, keep_freed_memory
from utils.training.objective import Precision

LEAST_SECONDS = 30  # with less time left, nothing is started
# On a CPU no process is started with less memory left: the kernel might kill another one.
LEAST_MEMORY = 4e9
PLAIN, BEST = "plain loop", "best torch.compile"


class Alone:
    """A contender, alone in its process."""

    def __init__(self, contender: Ours | Usual, device: torch.device):
        self.contender, self.device = contender, device
        self.steps, self.shares = contender.steps, contender.shares

    def turn(self, count: int) -> tuple[float, int | None]:
        """Seconds of `count` steps; on a GPU also their peak memory in bytes, beyond what was
        allocated before. There an untimed step comes first, which allocates."""
        if self.device.type != "cuda":
            return self.steps(count), None
        self.steps(1)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        seconds = self.steps(count)
        return seconds, torch.cuda.max_memory_allocated(self.device) - before

    def rest(self) -> None:
        """Returns this process's cached GPU memory, for the others."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class ChildContender(Child):
    """A process with an `Alone`, whose methods it has here."""

    def steps(self, count: int) -> float:
        return self.call("steps", count)

    def turn(self, count: int) -> tuple[float, int]:
        """On a CPU the peak is the process's so far, beyond what it had before its first step."""
        seconds, peak = self.call("turn", count)
        return seconds, self.peak_rss() if peak is None else peak

    def rest(self) -> None:
        self.call("rest")

    def shares(self) -> dict[str, float]:
        return self.call("shares")


@dataclass
class Runner:
    """A contender that is ready.

    Attributes:
        steps: in a turn.
        seconds: of a turn, about.
    """

    contender: ChildContender
    steps: int
    seconds: float


def compare(
    case: Case, ways: dict[str, Way], sizes: Sizes, options, budget: Budget, folder: Path
) -> dict:
    """The figures of a case. A turn is as many steps as fit into `sizes.turn_seconds`, for each
    contender its own number."""
    left_out, shares = {}, {}
    with ExitStack() as closing:
        ready, first = make_ready(case, ways, sizes, options, budget, folder, left_out, closing)
        speeds, peaks = take_turns(case, ready, options.repetitions, budget, left_out)
        for name in [name for name in speeds if name not in left_out]:
            with attempt(name, LEAST_SECONDS, left_out):
                shares[name] = of_a_step(ready[name].contender.shares())
    best = best_compiled(speeds, ways)
    return {
        "ways": {name: way.what for name, way in ways.items()},
        "left_out": left_out,
        "samples_per_second": speeds,
        "ratios": ratios(speeds, ways, best),
        "best_compile": best,
        "seconds_of_the_first_step": first,
        "shares": shares,
        # A replayed graph allocates nothing: it holds its memory between steps too.
        "peak_bytes": {name: None if ways[name].graphs else peaks[name] for name in speeds},
        "bytes_kept_per_sample": kept(
            case, {name: ways[name] for name in speeds}, options.torch_device, left_out
        ),
    }


def make_ready(
    case: Case,
    ways: dict[str, Way],
    sizes: Sizes,
    options,
    budget: Budget,
    folder: Path,
    left_out: dict[str, str],
    closing: ExitStack,
) -> tuple[dict[str, Runner], dict[str, float]]:
    """The contenders for which there is time, and the seconds of their first steps. `closing` ends
    them."""
    ready, first = {}, {}
    for name, way in ways.items():
        turns = 1.2 * sizes.turn_seconds * options.repetitions * (len(ready) + 1)
        most = budget.left - turns
        if most < (sizes.compile_seconds if way.compiled else LEAST_SECONDS):
            left_out[name] = "no time was left"
            continue
        print(f"  {name}: warming up", flush=True)
        with attempt(name, most, left_out), ExitStack() as own:
            one = contender(case, way, options, folder / name.replace(" ", "_"), own)
            first[name] = one.steps(1)
            one.steps(settling(way, options.torch_device))
            seconds = one.steps(2) / 2
            one.shares()  # resets them: only those of the turns count
            one.rest()
            steps = max(1, round(sizes.turn_seconds / seconds))
            ready[name] = Runner(one, steps, steps * seconds)
            closing.push(own.pop_all())
    return ready, first


def contender(case: Case, way: Way, options, folder: Path, closing: ExitStack) -> ChildContender:
    """Ready to take steps."""
    if options.torch_device.type == "cpu" and available_memory() < LEAST_MEMORY:
        raise MemoryError(f"less than {LEAST_MEMORY / 1e9:.0f} GB of memory are left")
    made = partial(alone, case.rebuild, way, options, folder)
    child = ChildContender(made, environment_of_entries() if way.ours else None)
    closing.callback(child.close)
    return child


def alone(rebuild: Callable[[], Case], way: Way, options, folder: Path) -> Alone:
    """In a process of its own."""
    if options.threads:
        torch.set_num_threads(options.threads)
    if way.keeps:
        keep_freed_memory()
    return Alone(in_this_process(rebuild(), way, options, folder), options.torch_device)


def in_this_process(case: Case, way: Way, options, folder: Path) -> Ours | Usual:
    device = options.torch_device
    if way.ours:
        return Ours(way, case.model, case.loader(), case.rule, device, folder, signals())
    ahead = 2 * options.workers  # a DataLoader's default
    return Usual(way, case.model, case.usual(), case.batch, case.rule, device, ahead)


@cache
def signals() -> Signals:
    """One for the whole process."""
    return Signals()


def settling(way: Way, device: torch.device) -> int:
    """Steps between the first one and the timed ones. A graph is captured in the fourth step, and
    the first batches of other lengths are compiled anew."""
    return 8 if way.compiled or device.type == "cuda" else 1


def take_turns(
    case: Case, ready: dict[str, Runner], turns: int, budget: Budget, left_out: dict[str, str]
) -> tuple[dict[str, list[float]], dict[str, int | None]]:
    """Samples per second in each turn, and the last peak in bytes. A contender that fails takes no
    further turns; its turns so far count."""
    speeds, peaks = {name: [] for name in ready}, dict.fromkeys(ready)
    for repetition in range(turns):
        if repetition and budget.left < LEAST_SECONDS:
            break
        still = [name for name in ready if name not in left_out]
        for name in still if repetition % 2 == 0 else reversed(still):
            runner = ready[name]
            with attempt(name, LEAST_SECONDS + 4 * runner.seconds, left_out):
                seconds, peaks[name] = runner.contender.turn(runner.steps)
                runner.contender.rest()
                speeds[name].append(runner.steps * case.batch / seconds)
        print(f"  turn {repetition + 1} of {turns}", flush=True)
    return {name: values for name, values in speeds.items() if values}, peaks


def best_compiled(speeds: dict[str, list[float]], ways: dict[str, Way]) -> str | None:
    """The fastest of the usual loops through torch.compile; None: there is none."""
    usual = [name for name in speeds if ways[name].compiled and not ways[name].ours]
    return max(usual, key=lambda name: statistics.median(speeds[name]), default=None)


def ratios(speeds: dict[str, list[float]], ways: dict[str, Way], best: str | None) -> dict:
    """Ratios of speeds: of all to the plain loop, of ours to the best torch.compile, where these
    have figures; over the turns that both took."""

    def over(name: str, baseline: str) -> dict:
        turns = min(len(speeds[name]), len(speeds[baseline]))
        both = {each: speeds[each][:turns] for each in (name, baseline)}
        return ratio(both, name, baseline)

    found = {}
    if PLAIN in speeds:
        found |= {f"{name} / {PLAIN}": over(name, PLAIN) for name in speeds if name != PLAIN}
    if best is not None:
        found |= {f"{name} / {BEST}": over(name, best) for name in speeds if ways[name].ours}
    return found


def of_a_step(shares: dict[str, float]) -> dict[str, float]:
    """Fractions of a step, without the time between turns."""
    step = {name: shares.get(name, 0.0) for name in ("data", "forward_backward", "optimizer")}
    total = sum(step.values())
    return {name: round(share / total, 3) for name, share in step.items()} if total else step


def kept(
    case: Case, ways: dict[str, Way], device: torch.device, left_out: dict[str, str]
) -> dict[str, float]:
    """Bytes that autograd keeps for one sample's backward pass, in loops that are not compiled."""
    found = {}
    for name, way in ways.items():
        if way.compiled or name in left_out:
            continue
        with attempt(name, LEAST_SECONDS, left_out):
            found[name] = kept_by(case, way, device)
    return found


def kept_by(case: Case, way: Way, device: torch.device) -> float:
    memory = torch.channels_last if way.channels_last else torch.contiguous_format
    model = copy.deepcopy(case.model).to(device, memory_format=memory).train()
    fuse(model, way.fused)
    precision = Precision(way.precision, device)

    def forward(n: int) -> torch.Tensor:
        with precision.autocast():
            return model(case.inputs(n).to(device))

    return bytes_of_a_sample(model, forward)
