"""From inputs and targets to a loss, and to the sums from which metrics are computed."""

import math
import platform
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..fused.cross_entropy import fused_cross_entropy
from ..machine.backends import X86, is_faster_in_bf16
from .class_balance import ClassBalance

# Names of the sums over samples.
SUMS = ("loss", "correct", "samples")
# Further sums where samples may be mixed. `correct` then counts lambda for a sample's own class and
# 1 - lambda for its partner's. `larger_lambda` is the sum of the larger of lambda and 1 - lambda.
MIXED_SUMS = ("larger_lambda", "mixed", "clean_correct", "clean_samples")
WEIGHT = "weight"  # a further sum where classes have weights: those of the samples
CLEAN_FRACTION = 1 / 8  # of each batch that --log_clean_accuracy also evaluates unmixed


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


def resolve_precision(name: str, device: torch.device, bf16_helps_cpus: bool = True) -> str:
    """The precision that --precision `name` means on this device. For "auto": bf16 on a GPU that
    computes in it, fp16 on an older one, fp32 on a CPU. "fastest" differs on CPUs that are faster
    in bf16, if that helps the model there."""
    if name not in ("auto", "fastest"):
        return name
    if device.type == "cuda":
        return "bf16" if is_faster_in_bf16(device) else "fp16"
    helps = name == "fastest" and bf16_helps_cpus and is_faster_in_bf16(device)
    return "bf16" if helps else "fp32"


def why_slow(name: str, device: torch.device) -> str:
    """Why this precision is slower than float32 on this device; "": it is not, or nobody knows."""
    if device.type != "cpu" or name == "fp32":
        return ""
    if platform.machine() not in X86:
        return ""
    if name == "fp16" and not torch.cpu._is_amx_fp16_supported():
        return "fp16 takes many times as long as float32 on this CPU"
    if name == "bf16" and not torch.cpu._is_avx512_bf16_supported():
        return "bf16 takes about twice as long as float32 on this CPU, which only emulates it"
    return ""


class Classification:
    """Cross-entropy over classes.

    Args:
        model: inputs -> logits (n, classes); may be compiled.
        precision: of the forward pass; the loss is computed in float32.
        label_smoothing: fraction of the target that is spread evenly over all classes, 0 to 1:
            Szegedy et al., "Rethinking the Inception architecture" (2016), section 7.
        counts_mixing: batches may be mixed, so the sums are SUMS + MIXED_SUMS.
        clean_accuracy: also evaluate CLEAN_FRACTION of each batch unmixed, in evaluation mode.
        mixes_inside: the model itself mixes: the mixing plan is its second argument.
        fused: the loss reads the logits once, and keeps less for the backward pass.
        balance: the loss for classes that are not equal; it then takes the place of the usual one,
            also of the fused one. With weights there is one more of the sums, WEIGHT.
    """

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        label_smoothing: float = 0.0,
        counts_mixing: bool = False,
        clean_accuracy: bool = False,
        mixes_inside: bool = False,
        fused: bool = False,
        balance: ClassBalance | None = None,
    ):
        self.model, self.precision, self.label_smoothing = model, precision, label_smoothing
        self.sums: tuple[str, ...] = SUMS + MIXED_SUMS if counts_mixing else SUMS
        self.clean_accuracy, self.mixes_inside = clean_accuracy, mixes_inside
        self.fused, self.balance = fused, balance
        if balance is not None and balance.weights is not None:
            self.sums += (WEIGHT,)

    def __call__(
        self, inputs: Tensor, targets: Tensor, mix_plan=None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One forward pass, mixed or not.

        Args:
            inputs: (n, ...), or a tuple of another form with `first(k)`, its first k samples (see
                utils/packed.py).
            targets: (n,) int64.
            mix_plan: None, or how the batch is mixed: a MixPlan (see utils/mixup/mixing.py).
        Returns:
            the loss summed over the samples (), and each of `self.sums`, () float64, detached.
        """
        logits = self.logits(inputs, mix_plan)
        loss = self.losses(logits, targets, mix_plan).sum()
        sums = classification_sums(loss, logits, targets)
        if self.sums is SUMS:
            return loss, sums
        sums = dict.fromkeys(self.sums, torch.zeros_like(sums["samples"])) | sums
        if mix_plan is not None:
            sums |= mixed_sums(logits, targets, mix_plan)
        if self.balance is not None and self.balance.weights is not None:
            weights = self.balance.sample_weights(targets, *mixed_with(targets, mix_plan))
            sums[WEIGHT] = weights.detach().double().sum()
        if self.clean_accuracy:
            sums |= self._clean_sums(inputs, targets)
        return loss, sums

    def logits(self, inputs: Tensor, mix_plan=None) -> Tensor:
        """(n, ...) -> (n, classes)."""
        plan_for_model = () if mix_plan is None or not self.mixes_inside else (mix_plan,)
        if mix_plan is not None and not plan_for_model:
            inputs = mix_plan.apply(inputs)
        with self.precision.autocast():
            return self.model(inputs, *plan_for_model)

    def losses(self, logits: Tensor, targets: Tensor, mix_plan=None) -> Tensor:
        """(n, classes), (n,) -> the loss of each sample (n,)."""
        mixed, smoothing = mixed_with(targets, mix_plan), self.label_smoothing
        if self.balance is not None:
            return self.balance.losses(logits, targets, *mixed)
        if self.fused and (mix_plan is None or not mix_plan.lam.requires_grad):
            partners, lam = mixed or (targets, torch.ones((), device=targets.device))
            return fused_cross_entropy(logits, targets, partners, lam, smoothing)
        if mix_plan is None:
            logits = in_float32(logits)
            return F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
        return mixed_cross_entropy(logits, targets, mixed[0], mixed[1], smoothing)

    def _clean_sums(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Those of the unmixed part; without gradients, random numbers or an update of BatchNorm's
        statistics."""
        count = math.ceil(len(targets) * CLEAN_FRACTION)
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        with torch.no_grad():
            logits = self.logits(first_samples(inputs, count))
        for module in training:
            module.training = True
        correct = (logits.argmax(1) == targets[:count]).sum()
        samples = torch.full_like(correct, len(logits))
        return {"clean_correct": correct.double(), "clean_samples": samples.double()}


def mixed_with(targets: Tensor, mix_plan) -> tuple[Tensor, ...]:
    """(classes of the partners, lambda), (n,) each; () if nothing is mixed."""
    return () if mix_plan is None else (targets[mix_plan.partner], mix_plan.lam)


def first_samples(inputs, k: int):
    """The first k samples of a tensor (n, ...), or of an object with a method `first(k)`."""
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
    log_p = F.log_softmax(in_float32(logits), 1)
    lam = lam.to(log_p.dtype)
    own = F.nll_loss(log_p, targets, reduction="none")
    other = F.nll_loss(log_p, partners, reduction="none")
    losses = lam * own + (1 - lam) * other
    if label_smoothing:
        even = label_smoothing / logits.shape[1]
        losses = (1 - label_smoothing) * losses - log_p.sum(1) * even
    return losses


def stacked(sums: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    """The sums of these names, in their order: (len(names),) float64."""
    return torch.stack([sums[name] for name in names])


def classification_sums(loss: Tensor, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The summed loss, the samples whose largest logit is the target's, and all samples."""
    correct = (logits.detach().argmax(1) == targets).sum()
    samples = torch.full_like(correct, len(targets))
    values = loss.detach().double(), correct.double(), samples.double()
    return dict(zip(SUMS, values, strict=True))


def mixed_sums(logits: Tensor, targets: Tensor, mix_plan) -> dict[str, Tensor]:
    """`correct` of mixed samples; and of those that have another one as partner the number, and the
    sum of the larger of lambda and 1 - lambda."""
    lam, guess = mix_plan.lam.detach().double(), logits.detach().argmax(1)
    correct = lam * (guess == targets) + (1 - lam) * (guess == targets[mix_plan.partner])
    mixed = mix_plan.partner != torch.arange(len(targets), device=targets.device)
    larger_lambda = (torch.maximum(lam, 1 - lam) * mixed).sum()
    return {
        "correct": correct.sum(),
        "larger_lambda": larger_lambda,
        "mixed": mixed.sum().double(),
    }


def figures(sums: Mapping[str, float]) -> dict:
    """Means from an objective's sums by name; accuracies in per cent.

    With SUMS alone they are `loss` and `accuracy`. With MIXED_SUMS the accuracy is weighted by
    lambda and called `accuracy_weighted`. `lambda` is there where samples were mixed: the mean of
    the larger of lambda and 1 - lambda. `accuracy_clean` is there where unmixed samples were
    evaluated. With WEIGHT the loss is the weighted mean.
    """
    mixed = "mixed" in sums
    accuracy, samples = "accuracy_weighted" if mixed else "accuracy", sums["samples"]
    if not samples:
        return {"loss": float("nan"), accuracy: float("nan")}
    loss = sums["loss"] / (sums.get(WEIGHT, samples) or math.nan)
    result = {"loss": loss, accuracy: 100 * sums["correct"] / samples}
    if mixed and sums["mixed"]:
        result["lambda"] = sums["larger_lambda"] / sums["mixed"]
    if mixed and sums["clean_samples"]:
        result["accuracy_clean"] = 100 * sums["clean_correct"] / sums["clean_samples"]
    return result


def in_float32(tensor: Tensor) -> Tensor:
    """Half precision in float32; anything else as it is."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
