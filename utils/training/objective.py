"""What a batch is worth: from inputs to a loss and the sums that the metrics are made of."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Sums over samples, in this order, as one float64 tensor of shape (3,) on the device.
SUMS = ("loss", "correct", "samples")


class Precision:
    """How the forward pass is computed: fp32, or under autocast in bf16 or fp16."""

    DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # noqa: RUF012

    def __init__(self, name: str, device: torch.device):
        self.name, self.device = name, device

    def autocast(self):
        return torch.autocast(
            self.device.type, dtype=self.DTYPES[self.name], enabled=self.name != "fp32"
        )

    def scaler(self) -> torch.amp.GradScaler:
        """Scales the loss with fp16, whose small gradients would be lost; else does nothing."""
        return torch.amp.GradScaler(self.device.type, enabled=self.name == "fp16")


def resolve_precision(name: str, device: torch.device) -> str:
    """ "auto": bf16 where the GPU computes in it, fp16 on older ones, fp32 on a CPU."""
    if name != "auto":
        return name
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


class Classification:
    """Cross-entropy over classes.

    Args:
        model: inputs -> logits (n, classes); may be compiled.
        precision: of the forward pass; the loss is computed in float32.
        label_smoothing: share of the target spread evenly over all classes, 0 to 1: Szegedy et
            al., "Rethinking the Inception architecture" (2016), section 7.
    """

    def __init__(self, model: nn.Module, precision: Precision, label_smoothing: float = 0.0):
        self.model, self.precision, self.label_smoothing = model, precision, label_smoothing

    def __call__(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(n, ...), (n,) -> loss summed over the samples (), and SUMS (3,), detached."""
        with self.precision.autocast():
            logits = self.model(inputs)
        loss = F.cross_entropy(
            _full(logits), targets, reduction="sum", label_smoothing=self.label_smoothing
        )
        return loss, classification_sums(loss, logits, targets)


def classification_sums(loss: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """(summed loss, samples whose largest logit is the target's, samples): (3,) float64."""
    correct = (logits.detach().argmax(1) == targets).sum()
    samples = torch.full_like(correct, len(targets))
    return torch.stack([loss.detach().double(), correct.double(), samples.double()])


def _full(logits: Tensor) -> Tensor:
    """Half-precision logits in float32; float32 and float64 as they are."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
