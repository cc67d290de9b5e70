"""How well the GPUs are used: their own figures, MFU and GPU hours, for the log and the summary.

Model FLOPs utilization as in Chowdhery et al., "PaLM" (2022), arXiv:2204.02311, appendix B: the
operations that the model needs in forward and backward pass, not those that are spent on it (as on
recomputed activations, mixing or the optimizer), over those that the GPU could do in this time.
"""

import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

SECONDS = 1.0  # between two readings of the GPU
LARGEST = ("gpu_memory_bytes",)  # of these the largest reading counts, of others the mean
FIGURES = ("mfu", "gpu_use", "gpu_power_watts", "gpu_memory_bytes", "gpu_hours")
# A backward pass computes two gradients for each product of the forward pass.
PASSES = 3
# Operations per second of dense matrix products in half precision with float32 sums, by NVIDIA's
# data sheets (where these give the figure for sparse matrices: half of it). By a part of the name
# that PyTorch gives the GPU; the first that fits counts.
PEAKS = (
    ("B200", 2250e12),  # Blackwell B200 data sheet (HGX): 36 PFLOP/s sparse for 8
    ("GH200", 989e12),  # GH200 data sheet
    ("H200 NVL", 835e12),  # H200 data sheet
    ("H200", 989e12),
    ("H100 PCIe", 756e12),  # H100 data sheet
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A100", 312e12),  # A100 data sheet
    ("A30", 165e12),  # A30 data sheet
    ("A40", 149.7e12),  # A40 data sheet
    ("A10G", None),  # not the A10; NVIDIA publishes no figure
    ("A10", 125e12),  # A10 data sheet
    ("L40S", 362e12),  # L40S data sheet
    ("L40", 181e12),  # L40 data sheet
    ("L4", 121e12),  # L4 data sheet
    ("RTX 5090", 209.5e12),  # Blackwell architecture white paper, with float32 sums
    ("RTX 4090", 165.2e12),  # Ada architecture white paper, with float32 sums
    ("RTX 3090", 71e12),  # GA102 architecture white paper, with float32 sums
    ("V100-SXM", 125e12),  # V100 data sheet
    ("V100-PCIE", 112e12),
    ("T4", 65e12),  # T4 data sheet
)


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


def peak_of(name: str, precision: str) -> float | None:
    """Operations per second of a GPU. None where it is not known: for float32, which is computed in
    several ways, and for a GPU that PEAKS lacks.

    Args:
        name: as torch.cuda.get_device_name has it.
        precision: of the matrix products: "bf16", "fp16" or "fp32".
    """
    if precision == "fp32" or "Laptop" in name:  # a laptop's has the same name and another power
        return None
    words = name.replace("-", " ").split()
    return next((peak for part, peak in PEAKS if _names(part, name, words)), None)


def _names(part: str, name: str, words: list[str]) -> bool:
    """Whether `part` is in the name as whole words: "L4" is not in "NVIDIA L40"."""
    sought = part.split()
    whole = any(words[i : i + len(sought)] == sought for i in range(len(words)))
    return whole or ("-" in part and part in name)


def forward_flops(model: nn.Module, sample: Tensor) -> int | None:
    """Operations of a forward pass, a product and a sum counting as two; of matrix products,
    convolutions and attention alone. Nothing is computed. None if the model, which is on the CPU,
    cannot be traced."""
    training = model.training
    model.eval()  # without dropout, so that no random number is drawn
    try:
        # Attention as matrix products, since not all fused kinds are counted.
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, sdpa_kernel(SDPBackend.MATH):
            tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            tensors = {name: fake.from_tensor(tensor) for name, tensor in tensors.items()}
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                functional_call(model, tensors, (fake.from_tensor(sample),))
        return counter.get_total_flops()
    except Exception:  # a model of the user's or of timm may do anything
        return None
    finally:
        model.train(training)
