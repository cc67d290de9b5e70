"""What a batch is worth: from inputs to a loss and the sums that the metrics are made of."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.fused.cross_entropy import fused_cross_entropy

# Sums over samples, in this order, as one float64 tensor of shape (3,) on the device.
SUMS = ("loss", "correct", "samples")
# What follows them where samples are mixed. `correct` then counts a sample's own class by lambda
# and its partner's by 1 - lambda.
MIXED_SUMS = ("larger_share", "mixed", "clean_correct", "clean_samples")
# --log_clean_accuracy: one sample in so many is looked at unmixed, too.
CLEAN_PART = 8


class Precision:
    """How the forward pass is computed: fp32, or under autocast in bf16 or fp16."""

    DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # noqa: RUF012

    def __init__(self, name: str, device: torch.device):
        self.name, self.device = name, device

    def autocast(self):
        return torch.autocast(
            self.device.type, dtype=self.DTYPES[self.name], enabled=self.name != "fp32"
        )

    @property
    def scales_loss(self) -> bool:
        """The scaler is in use."""
        return self.name == "fp16"

    def scaler(self) -> torch.amp.GradScaler:
        """Scales the loss with fp16, whose small gradients would be lost; else does nothing."""
        return torch.amp.GradScaler(self.device.type, enabled=self.scales_loss)


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
        mixing: batches may come mixed; the sums are then SUMS + MIXED_SUMS.
        clean_accuracy: look at a part of each batch unmixed, too, in evaluation mode.
        mixes_inside: the model mixes by itself: it is called with the plan as second argument.
        fused: the loss of mixed batches keeps less and passes over the logits once.
    """

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        label_smoothing: float = 0.0,
        mixing: bool = False,
        clean_accuracy: bool = False,
        mixes_inside: bool = False,
        fused: bool = False,
    ):
        self.model, self.precision, self.label_smoothing = model, precision, label_smoothing
        self.sums = SUMS + MIXED_SUMS if mixing else SUMS
        self.clean_accuracy, self.mixes_inside = clean_accuracy, mixes_inside
        self.fused = fused

    def __call__(self, inputs: Tensor, targets: Tensor, mixing=None) -> tuple[Tensor, Tensor]:
        """One forward pass, mixed or not.

        Args:
            inputs: (n, ...), or a tuple of another form with `first(k)`, its first k samples (see
                utils/packed.py).
            targets: (n,) int64.
            mixing: None, or how the batch is mixed: `apply(inputs)` -> inputs, `partner` (n,)
                int64 and `lam` (n,) (see utils/mixup/mixing.py).
        Returns:
            the loss summed over the samples (), and the sums (len(self.sums),) float64, detached.
        """
        logits = self.logits(inputs, mixing)
        loss = self.losses(logits, targets, mixing).sum()
        if self.sums is SUMS:
            return loss, classification_sums(loss, logits, targets)
        sums = mixed_sums(loss, logits, targets, mixing)
        return loss, torch.cat([sums, self._clean_sums(inputs, targets)])

    def logits(self, inputs: Tensor, mixing=None) -> Tensor:
        """(n, ...) -> (n, classes)."""
        inside = () if mixing is None or not self.mixes_inside else (mixing,)
        if mixing is not None and not inside:
            inputs = mixing.apply(inputs)
        with self.precision.autocast():
            return self.model(inputs, *inside)

    def losses(self, logits: Tensor, targets: Tensor, mixing=None) -> Tensor:
        """(n, classes), (n,) -> the loss of each sample (n,)."""
        if mixing is None:
            return F.cross_entropy(
                _full(logits), targets, reduction="none", label_smoothing=self.label_smoothing
            )
        of_mixed = mixed_cross_entropy
        if self.fused and not mixing.lam.requires_grad:
            of_mixed = fused_cross_entropy
        return of_mixed(logits, targets, targets[mixing.partner], mixing.lam, self.label_smoothing)

    def _clean_sums(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """(correct, samples) of the unmixed part, (2,) float64; nothing trains or is counted by
        BatchNorm, and no random number is drawn."""
        if not self.clean_accuracy:
            return torch.zeros(2, dtype=torch.float64, device=targets.device)
        part = -(-len(targets) // CLEAN_PART)
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        with torch.no_grad():
            logits = self.logits(first_samples(inputs, part))
        for module in training:
            module.training = True
        correct = (logits.argmax(1) == targets[:part]).sum()
        return torch.stack([correct, torch.full_like(correct, len(logits))]).double()


def first_samples(inputs, k: int):
    """The first k samples of a tensor (n, ...), or of what has a method `first` for it."""
    return inputs[:k] if isinstance(inputs, Tensor) else inputs.first(k)


def mixed_cross_entropy(
    logits: Tensor, targets: Tensor, partners: Tensor, lam: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """-sum_c q_c log p_c, q = (1 - s) (lam [c = target] + (1 - lam) [c = partner]) + s / classes.

    Both targets from one log-softmax. lam = 1 is F.cross_entropy, to the bit.

    Args:
        logits: (n, classes).
        targets, partners: (n,) int64.
        lam: (n,), 0 to 1; differentiable.
        label_smoothing: s, 0 to 1.
    Returns:
        (n,)
    """
    log_p = F.log_softmax(_full(logits), 1)
    lam = lam.to(log_p.dtype)
    own = F.nll_loss(log_p, targets, reduction="none")
    other = F.nll_loss(log_p, partners, reduction="none")
    losses = lam * own + (1 - lam) * other
    if label_smoothing:
        even = label_smoothing / logits.shape[1]
        losses = (1 - label_smoothing) * losses - log_p.sum(1) * even
    return losses


def classification_sums(loss: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """(summed loss, samples whose largest logit is the target's, samples): (3,) float64."""
    correct = (logits.detach().argmax(1) == targets).sum()
    samples = torch.full_like(correct, len(targets))
    return torch.stack([loss.detach().double(), correct.double(), samples.double()])


def mixed_sums(loss: Tensor, logits: Tensor, targets: Tensor, mixing) -> Tensor:
    """SUMS and (sum of the larger of lambda and 1 - lambda, number) over the samples that have
    another one as partner: (5,) float64."""
    sums = classification_sums(loss, logits, targets)
    if mixing is None:
        return torch.cat([sums, sums.new_zeros(2)])
    lam, hit = mixing.lam.detach().double(), logits.detach().argmax(1)
    sums[1] = (lam * (hit == targets) + (1 - lam) * (hit == targets[mixing.partner])).sum()
    mixed = mixing.partner != torch.arange(len(targets), device=targets.device)
    share = (torch.maximum(lam, 1 - lam) * mixed).sum()
    return torch.cat([sums, torch.stack([share, mixed.sum().double()])])


def _full(logits: Tensor) -> Tensor:
    """Half-precision logits in float32; float32 and float64 as they are."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
