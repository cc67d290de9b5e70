"""How well the GPUs are used: their own figures, MFU and GPU hours, for the log and the summary."""

import threading
from collections.abc import Callable, Mapping

from .flops import PASSES

SECONDS = 1.0  # between two readings of the GPU
LARGEST = ("gpu_memory_bytes",)  # of these the largest reading counts, of others the mean
FIGURES = ("mfu", "gpu_use", "gpu_power_watts", "gpu_memory_bytes", "gpu_hours")


class Hardware:
    """Figures of the GPUs of a run; none on a CPU.

    A thread reads the figures of this process's GPU every SECONDS, so that training never waits for
    them.

    Args:
        read: () -> {figure: its present value}; None: there is no GPU, or nobody tells.
        gpus: that the run now has.
        gpu_seconds: () -> the time that the run has taken, summed over its GPUs.
        flops: operations of a forward pass over a sample; None: unknown.
        peak: operations per second of a GPU; None: unknown.
    """

    def __init__(
        self,
        read: Callable[[], dict[str, float]] | None = None,
        gpus: int = 0,
        gpu_seconds: Callable[[], float] = lambda: 0.0,
        flops: float | None = None,
        peak: float | None = None,
    ):
        self._gpus, self._gpu_seconds = gpus, gpu_seconds
        self._work = PASSES * flops / (peak * gpus) if flops and peak and gpus else None
        self._since_line, self._in_all = Readings(), Readings()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = None
        if read is not None:
            self._thread = threading.Thread(None, self._watch, "gpu", (read,), daemon=True)
            self._thread.start()

    def figures(self, speed: float | None) -> dict[str, float]:
        """Since the last call; what is not known is left out. `speed`: samples per second of the
        whole run."""
        with self._lock:
            found = self._since_line.take()
        return self._with_run(found, speed)

    def summary(self, speed: float | None) -> dict[str, float | None]:
        """All FIGURES, of this start of the run (GPU hours: of all starts); None for what is not
        known."""
        with self._lock:
            found = self._in_all.values()
        return dict.fromkeys(FIGURES) | self._with_run(found, speed)

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(5)

    def _with_run(self, found: dict[str, float], speed: float | None) -> dict[str, float]:
        found = {name: round(value, 1) for name, value in found.items()}
        if self._work is not None and speed:
            found["mfu"] = round(100 * self._work * speed, 2)
        if self._gpus:
            found["gpu_hours"] = round(self._gpu_seconds() / 3600, 4)
        return found

    def _watch(self, read: Callable[[], dict[str, float]]) -> None:
        while not self._closed.is_set():
            reading = read()
            with self._lock:
                self._since_line.add(reading)
                self._in_all.add(reading)
            self._closed.wait(SECONDS)


class Readings:
    """Readings of some figures, as their mean or largest."""

    def __init__(self):
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, reading: dict[str, float]) -> None:
        for name, value in reading.items():
            if name in LARGEST:
                value, count = max(value, self._sums.get(name, value)), 1
            else:
                value, count = value + self._sums.get(name, 0.0), self._counts.get(name, 0) + 1
            self._sums[name], self._counts[name] = value, count

    def values(self) -> dict[str, float]:
        return {name: total / self._counts[name] for name, total in self._sums.items()}

    def take(self) -> dict[str, float]:
        """The values; from then on only later readings count."""
        found = self.values()
        self._sums, self._counts = {}, {}
        return found


def hardware_text(figures: Mapping[str, float]) -> str:
    """For a log line: ", MFU 41.0 %, GPU 97 %, 612 W, 64.0 GB"; "" without figures."""
    forms = {
        "mfu": lambda value: f"MFU {value:.1f} %",
        "gpu_use": lambda value: f"GPU {value:.0f} %",
        "gpu_power_watts": lambda value: f"{value:.0f} W",
        "gpu_memory_bytes": lambda value: f"{value / 1e9:.1f} GB",
    }
    return "".join(f", {form(figures[name])}" for name, form in forms.items() if name in figures)
