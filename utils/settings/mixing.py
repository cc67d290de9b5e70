"""Flags of mixup, CutMix and meta-mixup."""

from dataclasses import dataclass
from functools import partial

from ..errors import UserError
from ..setting import setting
from .config import Config

overfitting_flag = partial(setting, group="against overfitting")
# Flags that every kind of mixing reads, and those that both forms of meta-mixup read.
ALWAYS = ("mixup_prob", "mixup_off_epoch", "mixup_inter", "mixup_block", "log_clean_accuracy")
META = ("meta_form", "meta_batch", "meta_lr", "meta_exact")
# Defaults of --meta_lr, by --meta_form.
META_LR = {"policy": 0.05, "sample": 0.1}


@dataclass
class MixingSettings(Config):
    mixup: str = overfitting_flag(
        "none",
        "Train on weighted averages of two samples, with weights lambda and 1 - lambda. fixed: "
        "lambda from Beta(alpha, alpha), and a number is short for fixed with that --alpha; auto: "
        "mixes more as overfitting grows, without an alpha; meta: a learned distribution (try auto "
        "first)",
        choices=("none", "fixed", "auto", "meta"),
    )
    alpha: float = overfitting_flag(
        0.2,
        "lambda is drawn from Beta(alpha, alpha): near 0 hardly anything is mixed, 1 is "
        "uniform; with meta the learning starts there (--meta_form policy: at the nearest value "
        "from 1/55 to 55)",
        above=0,
        high=100,
    )
    cutmix_alpha: float = overfitting_flag(
        0.0,
        "CutMix: paste a box from another picture, its area drawn from Beta(a, a), where a is this "
        "value (times the strength with --mixup auto); 1 is usual, 0 turns it off. Together with "
        "--mixup, each step uses one of the two",
        low=0,
        high=100,
    )
    mixup_mode: str | None = overfitting_flag(
        None,
        "Draw one lambda for all samples of an optimizer step, one for each block of "
        "--mixup_block, which by default is a micro-batch, or one for each sample",
        choices=("batch", "block", "sample"),
        default_text="batch; sample with --meta_form sample",
    )
    mixup_prob: float = overfitting_flag(
        1.0,
        "Probability that a step is mixed (with --mixup_mode block or sample: that a block or a "
        "sample is)",
        above=0, high=1,
    )  # fmt: skip
    mixup_off_epoch: int = overfitting_flag(
        0, "Stop mixing at this epoch, counted from 0; 0: never", low=0, unit="epoch"
    )
    mixup_inter: bool = overfitting_flag(False, "Mix only pairs of different classes")
    mixup_block: int | None = overfitting_flag(
        None,
        "Samples are mixed within blocks of this size, which divides --batch_size. With the "
        "same block the pairs are the same for any --accumulation_steps",
        low=2,
        unit="samples",
        default_text="--batch_size",
    )
    log_clean_accuracy: bool = overfitting_flag(
        False,
        "Also measure the training accuracy on an eighth of each batch without mixing; takes "
        "about 4 % of a step",
        resume="free",
    )
    meta_form: str = overfitting_flag(
        "policy",
        "What meta learns: a distribution of lambda for each pair of classes, or the lambda "
        "of every single pair of samples, at several times the cost",
        choices=("policy", "sample"),
    )
    meta_every: int = overfitting_flag(
        20,
        "Steps between two updates of meta's policy; where such a step is not mixed "
        "(--mixup_prob), or mixed by CutMix, that update is left out",
        low=1, unit="steps",
    )  # fmt: skip
    meta_batch: int = overfitting_flag(
        64,
        "Samples of the clean batch that meta learns from, and pairs of the mixed batch that "
        "it uses",
        low=2,
        unit="samples",
    )
    meta_lr: float | None = overfitting_flag(
        None,
        "Learning rate of meta: of the policy's Adam, or the step size of a single lambda",
        above=0,
        high=10,
        default_text=", ".join(f"{rate:g} with {form}" for form, rate in META_LR.items()),
    )
    meta_decay: float = overfitting_flag(
        2.0,
        "Pull of the policy of meta-mixup towards its initial values: each update removes this "
        "times --meta_lr of the distance to them",
        low=0,
        high=10,
    )
    meta_exact: bool = overfitting_flag(
        False,
        "Differentiate meta's virtual step exactly, by a second backward pass, instead of by a "
        "finite difference",
    )

    def ineffective(self):
        yield from super().ineffective()
        if self.mixup == "none":
            yield "alpha", "only --mixup fixed and meta take it", "mixup"
        if self.batch_tokens is not None:
            reason = "--batch_tokens decides how many texts a batch has, and a block is a batch"
            yield "mixup_block", reason, "batch_tokens"
        if self.mixup == "auto":
            yield "alpha", "--mixup auto finds its own", "mixup"
        if self.mixing_name == "none":
            reason = "nothing is mixed without --mixup or --cutmix_alpha"
            yield ("mixup_mode", *ALWAYS), reason, "mixup"
        if self.mixup != "meta":
            reason = "nothing is learned without --mixup meta"
            yield ("meta_every", "meta_decay", *META), reason, "mixup"
        elif self.meta_form == "sample":
            reason = "--meta_form sample learns anew in every step"
            yield ("meta_every", "meta_decay"), reason, "meta_form"
            if not self.cutmix_alpha:
                yield "mixup_mode", "--meta_form sample has a lambda for each sample", "meta_form"

    def validate(self):
        super().validate()
        if self.mixup_mode is None and "mixup_mode" not in self.without_effect():
            per_sample = self.mixup == "meta" and self.meta_form == "sample"
            self.mixup_mode = "sample" if per_sample else "batch"
        if self.meta_lr is None and self.mixup == "meta":
            self.meta_lr = META_LR[self.meta_form]
        if self.mixup_off_epoch >= self.epochs:
            raise UserError(
                f"--mixup_off_epoch {self.mixup_off_epoch} is not reached in --epochs "
                f"{self.epochs}: leave it out, or take an earlier one"
            )
        if self.action.trains:
            self._check_block()

    def _check_block(self):
        if self.mixup_block is not None and self.batch_size % self.mixup_block:
            raise UserError(
                f"--batch_size {self.batch_size} is not a multiple of --mixup_block "
                f"{self.mixup_block}: a block must not be cut"
            )
        lone = self.batch_size == 1 and self.batch_tokens is None
        # A run from before there was this check can still be resumed: it mixes nothing.
        if lone and self.mixing_name != "none" and self.resume is None:
            raise UserError(
                f"--batch_size 1 mixes nothing ({self.mixing_name}): a sample needs a partner in "
                "its micro-batch; take --batch_size 2 or more"
            )

    @property
    def mixing_name(self) -> str:
        """What is mixed, for the summary: none, fixed, auto, meta, cutmix, "fixed, cutmix", ..."""
        ways = [] if self.mixup == "none" else [self.mixup]
        return ", ".join(ways + (["cutmix"] if self.cutmix_alpha else [])) or "none"
