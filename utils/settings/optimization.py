"""Flags of the optimizer, its schedule, and what is kept of the weights."""

import itertools
from dataclasses import dataclass

from ..errors import UserError
from ..measures.table import canonical_name
from ..optim.adamw import betas_of
from ..optim.entry import optimizer_flag
from ..optim.schedules import LENGTH_INDEPENDENT, SCHEDULES
from ..optim.table import OPTIMIZERS
from .config import Config
from .mixing import overfitting_flag

# The optimizers' own flags, as base classes: a dataclass takes the fields of its last base first.
OWN_FLAGS = [*dict.fromkeys(entry.flags for entry in OPTIMIZERS.values() if entry.own)][::-1]


def _by_optimizer(name: str) -> str:
    values = {key: getattr(entry, name) for key, entry in OPTIMIZERS.items()}
    text = ", ".join(f"{v:g} with {key}" for key, v in values.items() if v is not None)
    if name == "lr":
        others = {key: entry.lr_of_transformers for key, entry in OPTIMIZERS.items()}
        where = "in transformer_test.py and vit_test.py"
        text += "".join(f"; {v:g} with {key} {where}" for key, v in others.items() if v)
    return text


def _without_nesterov() -> str:
    """Optimizers whose momentum is not Nesterov's."""
    with_momentum = {k: entry for k, entry in OPTIMIZERS.items() if entry.momentum is not None}
    return " and ".join(name for name, entry in with_momentum.items() if not entry.nesterov)


def _clips() -> str:
    clips = {name: entry.clip for name, entry in OPTIMIZERS.items() if entry.clip is not None}
    return "".join(["0", *(f"; {clip:g} with {name}" for name, clip in clips.items())])


@dataclass
class RateSettings(Config):
    """The flags that `--help` lists before the optimizers' own."""

    epochs: int = optimizer_flag(
        50, "Passes over the training data", low=1, unit="epochs", resume="free"
    )
    batch_size: int = optimizer_flag(
        128, "Samples in a batch of one process", low=1, unit="samples", resume="evaluation"
    )
    optimizer: str = optimizer_flag("sgd", "Optimizer", choices=OPTIMIZERS, or_own=True)
    lr: float | None = optimizer_flag(
        None, "Peak learning rate", above=0, resume="free", default_text=_by_optimizer("lr")
    )
    momentum: float | None = optimizer_flag(
        None,
        f"Nesterov momentum; plain with {_without_nesterov()}",
        low=0,
        below=1,
        default_text=_by_optimizer("momentum"),
    )
    weight_decay: float | None = optimizer_flag(
        None, "Weight decay", low=0, default_text=_by_optimizer("weight_decay")
    )
    decay_all: bool = optimizer_flag(
        False, "Weight decay also on biases, normalisation layers and embeddings"
    )


@dataclass
class OptimizationSettings(*OWN_FLAGS, RateSettings):  # type: ignore[misc]  # bases from a table
    lookahead_k: int | None = optimizer_flag(
        None,
        "Lookahead around the optimizer: steps between two updates of its slow weights; 5 is usual",
        low=1,
        unit="steps",
    )
    lookahead_alpha: float = optimizer_flag(
        0.5,
        "Fraction of the way to the fast weights that Lookahead's slow weights take",
        above=0,
        high=1,
    )
    label_smoothing: float = overfitting_flag(
        0.0, "Fraction of the target that is spread evenly over all classes", low=0, below=1
    )
    clip: float | None = optimizer_flag(
        None,
        "Scale the gradient down to this global L2 norm if it is larger; 0 or none: never",
        low=0,
        default_text=_clips(),
        resume="free",
    )
    accumulation_steps: int = optimizer_flag(
        1,
        "Micro-batches per process whose gradients are accumulated for one optimizer step",
        low=1,
        unit="micro-batches",
    )
    auto_batch: bool = optimizer_flag(
        False,
        "Find the largest micro-batches that fit into memory, and accumulate as many as an "
        "optimizer step of the same number of samples needs",
    )
    sched: str = optimizer_flag(
        "cosine",
        "Learning-rate schedule after the warm-up, in optimizer steps; onecycle has its own "
        "warm-up, plateau follows the loss on the validation split",
        choices=SCHEDULES,
        or_own=True,
    )
    warmup_epochs: float = optimizer_flag(
        0.0, "Linear warm-up of the learning rate", low=0, unit="epochs"
    )
    warmup_steps: int | None = optimizer_flag(
        None, "The warm-up in optimizer steps, instead of --warmup_epochs", low=0, unit="steps"
    )
    warmup_ratio: float | None = optimizer_flag(
        None, "The warm-up as a fraction of the schedule, instead of --warmup_epochs", low=0, high=1
    )
    warmup_lr: float | None = optimizer_flag(
        None,
        "Learning rate of the first step of the warm-up",
        low=0,
        default_text="--lr divided by the steps of the warm-up",
    )
    sched_per_epoch: bool = optimizer_flag(
        False, "Update the learning rate once per epoch instead of at every step"
    )
    min_lr: float = optimizer_flag(0.0, "Final learning rate of cosine, linear and plateau", low=0)
    gamma: float = optimizer_flag(
        0.1, "Factor by which step, multistep and plateau reduce the learning rate", above=0, high=1
    )
    step_epochs: float | None = optimizer_flag(
        None,
        "Epochs between two reductions by step",
        above=0,
        unit="epochs",
        default_text="a third of the schedule",
    )
    milestones: str | None = optimizer_flag(
        None,
        "Epochs at which multistep reduces the learning rate, as in 30,60,80",
        many=True,
        unit="epochs",
        default_text="a half and three quarters of the schedule",
    )
    plateau_patience: int = optimizer_flag(
        5,
        "Evaluations without a lower loss after which plateau reduces the learning rate",
        low=0,
        unit="evaluations",
    )
    epochs_for_sched: int | None = optimizer_flag(
        None,
        "Epochs that the schedule spans: more than --epochs to train only the first part of a "
        "longer schedule, fewer to train the last epochs at the lowest learning rate",
        low=1,
        unit="epochs",
        default_text="--epochs",
        resume="free",
    )
    max_steps: int | None = optimizer_flag(
        None,
        "Stop after this many optimizer steps, if --epochs does not end the run before; the "
        "schedule also ends there, unless --epochs_for_sched says where",
        low=1,
        unit="steps",
        resume="free",
    )
    steps_per_epoch: int | None = optimizer_flag(
        None,
        "Steps that an epoch is to have: if the data make another number, the run does not start; "
        "for pictures it switches --drop_last on",
        low=1,
        unit="steps",
        resume="free",
    )
    ema_decay: float | None = optimizer_flag(
        None,
        "Keep an exponential moving average of the weights, with this decay per step, and "
        "evaluate it; checkpoints also contain the weights themselves",
        above=0,
        below=1,
    )
    early_stop_patience: int | None = optimizer_flag(
        None,
        "Stop after this many evaluations on the validation split without better ones (--best_by) "
        "and without a lower loss",
        low=1,
        unit="evaluations",
        resume="free",
    )
    best_by: str | None = optimizer_flag(
        None,
        "What makes weights the best on the validation split, and what early stopping and --sched "
        "plateau follow: accuracy, loss, or another measure (see --metrics); where it is equal the "
        "lower loss decides",
        default_text="accuracy, but plateau follows the loss",
    )
    on_nonfinite: str = optimizer_flag(
        "stop",
        "What to do at a step whose loss or gradient is not finite, which is never applied: "
        "stop the run, or skip the step and count it",
        choices=("stop", "skip"),
        resume="free",
    )

    def ineffective(self):
        yield from super().ineffective()
        own = ["momentum", *(name for entry in OPTIMIZERS.values() for name in entry.own)]
        unused = [name for name in own if name not in OPTIMIZERS[self.optimizer].settings]
        yield unused, f"--optimizer {self.optimizer} does not use it", "optimizer"
        if self.optimizer == "ngd":
            entry = OPTIMIZERS["ngd"]
            values = entry.values_of(self)
            if not (values | entry.own_defaults(**values))["ngd_adam"]:
                cause = "ngd_norm" if self.ngd_adam is None else "ngd_adam"
                yield "adam_lr_scale", "without --ngd_adam nothing is left to Adam", cause
        if self.lookahead_k is None:
            yield "lookahead_alpha", "there is no Lookahead without --lookahead_k", "lookahead_k"
        if self.warmup_steps is not None:
            reason = "--warmup_steps takes its place"
            yield "warmup_ratio", reason, "warmup_steps"
            if self.warmup_epochs:
                yield "warmup_epochs", reason, "warmup_steps"
        elif self.warmup_ratio is not None and self.warmup_epochs:
            yield "warmup_epochs", "--warmup_ratio takes its place", "warmup_ratio"
        if self.weight_decay == 0:
            yield "decay_all", "--weight_decay is 0", "weight_decay"
        used = (*self.schedule_flags, "warmup")
        for name in itertools.chain(*SCHEDULES.values()):
            if name not in used:
                users = ", ".join(sched for sched, names in SCHEDULES.items() if name in names)
                reason = f"--sched {self.sched} does not use it, which is for --sched {users}"
                yield name, reason, "sched"
        if "warmup" not in self.schedule_flags:
            flags = ("warmup_epochs", "warmup_steps", "warmup_ratio", "warmup_lr")
            yield flags, f"--sched {self.sched} has its own warm-up", "sched"
        if not self.warms_up:
            yield "warmup_lr", "there is no warm-up without --warmup_epochs", "warmup_epochs"
        if self.sched == "onecycle":
            yield "sched_per_epoch", "--sched onecycle changes in every step", "sched"
        if not (self.schedule_depends_on_length or self.warmup_follows_length):
            given = {"step": " with --step_epochs", "multistep": " with --milestones"}
            reason = f"--sched {self.sched}{given.get(self.sched, '')} does not depend on it"
            yield "epochs_for_sched", reason, "sched"

    def validate(self):
        super().validate()
        if self.best_by is not None:
            self.best_by = canonical_name(self.best_by, "--best_by")
        entry = OPTIMIZERS[self.optimizer]
        own = entry.own_defaults(**entry.values_of(self))
        defaults = self.usual_rates() | own
        for name, value in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.lr is None:
            raise UserError(f"--optimizer {self.optimizer} has no usual learning rate: give --lr")
        if self.clip is None:
            self.clip = entry.clip
        if self.lr_base_size is None:
            self.refuse_low_peak(self.lr, f"--lr {self.lr}")
        flag = "epochs_for_sched" if self.epochs_for_sched else "epochs"
        by_epochs = self.warms_up and self.warmup_steps is None and self.warmup_ratio is None
        if by_epochs and self.warmup_epochs > getattr(self, flag):
            raise UserError(
                f"--warmup_epochs {self.warmup_epochs} is longer than --{flag} "
                f"{getattr(self, flag)}"
            )
        milestone_epochs(self.milestones)
        betas_of(self.betas)

    def usual_rates(self) -> dict[str, float | None]:
        """The optimizer's defaults of learning rate, weight decay and momentum, for this kind of
        task."""
        entry = OPTIMIZERS[self.optimizer]
        return entry.defaults(self.is_transformer, **entry.values_of(self))

    def refuse_low_peak(self, peak: float, name: str) -> None:
        """Raises UserError if a schedule that begins or ends elsewhere would run backwards.

        Args:
            peak: the highest learning rate.
            name: what it is called in the message.
        """
        if "min_lr" in self.schedule_flags and self.min_lr > peak:
            raise UserError(f"--min_lr {self.min_lr} is above {name}")
        if self.warms_up and (self.warmup_lr or 0) > peak:
            raise UserError(f"--warmup_lr {self.warmup_lr} is above {name}")

    @property
    def warms_up(self) -> bool:
        lengths = (self.warmup_steps, self.warmup_ratio, self.warmup_epochs)  # the first counts
        length = next((each for each in lengths if each is not None), None)
        return "warmup" in self.schedule_flags and length != 0  # None: the entry decides

    @property
    def warmup_follows_length(self) -> bool:
        """Whether the warm-up is a fraction of the schedule. An entry whose `warmup_epochs` is None
        by default takes a fraction, too."""
        by_fraction = self.warmup_ratio is not None or self.warmup_epochs is None
        return "warmup" in self.schedule_flags and self.warmup_steps is None and by_fraction

    @property
    def schedule_flags(self) -> tuple[str, ...]:
        """What has an effect with --sched; "warmup" stands for the flags of the warm-up."""
        return SCHEDULES.get(self.sched, ("warmup",))  # a function of the user's

    @property
    def schedule_depends_on_length(self) -> bool:
        """Whether the learning rate after the warm-up depends on the number of epochs."""
        fixed = {"step": self.step_epochs, "multistep": self.milestones}
        return self.sched not in LENGTH_INDEPENDENT and fixed.get(self.sched) is None


def milestone_epochs(text: str | None) -> list[float] | None:
    """ "30,60" -> [30.0, 60.0]."""
    if text is None:
        return None
    try:
        epochs = [float(word) for word in str(text).split(",")]
    except ValueError:
        epochs = []
    if not epochs or epochs != sorted(set(epochs)) or not 0 < epochs[0] <= epochs[-1] < 1e9:
        raise UserError(f"--milestones {text}: give epochs above 0 in rising order, as in 30,60,80")
    return epochs
