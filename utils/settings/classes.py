"""Flags for classes of very different numbers of samples, or of different importance."""

from dataclasses import dataclass

from ..errors import UserError
from .config import Config
from .mixing import overfitting_flag

# Values of --class_weights that the counts of the classes decide; any other one is a file.
BY_COUNT = ("balanced", "sqrt")


@dataclass
class ClassSettings(Config):
    class_weights: str | None = overfitting_flag(
        None,
        "Weight of each class in the training loss, which is then the weighted mean over an "
        "optimizer step. balanced: inversely proportional to the training samples of the class; "
        "sqrt: to their square root; or a .yaml file of each class's name and weight",
        default_text="all weigh the same",
    )
    class_sampler: str = overfitting_flag(
        "none",
        "balanced: draw the samples of an epoch, as many as before, with replacement and every "
        "class with the same probability",
        choices=("none", "balanced"),
    )
    focal_gamma: float = overfitting_flag(
        0.0,
        "Focal loss: multiply the loss of a sample by (1 - p)^gamma, where p is the probability of "
        "its class, so that samples that are right already count less; 2 is usual, 0 turns it off",
        low=0, high=100,
    )  # fmt: skip
    logit_adjustment: float = overfitting_flag(
        0.0,
        "In the training loss alone, add to each logit this times the logarithm of its class's "
        "fraction of the training samples; 1 is usual, 0 turns it off",
        low=0, high=100,
    )  # fmt: skip
    loss: str | None = overfitting_flag(
        None,
        "Training loss of your own, FILE.py:NAME: a function of the logits (samples, classes) and "
        "the classes (samples,) that returns the loss of each sample",
        default_text="cross-entropy",
    )

    def ineffective(self):
        yield from super().ineffective()
        if self.loss is not None:
            names = ("class_weights", "focal_gamma", "logit_adjustment", "label_smoothing")
            yield names, "--loss takes its place", "loss"

    def validate(self):
        super().validate()
        name = self.class_weights
        is_known = name is None or name in BY_COUNT or name.lower().endswith((".yaml", ".yml"))
        if self.action.trains and not is_known:
            raise UserError(
                f"--class_weights {name}: give balanced, sqrt, or a .yaml file with a line for "
                "each class, as in cat: 2.5"
            )

    @property
    def corrections_by_count(self) -> list[str]:
        """The flags, as far as they are on, that make up for how many samples classes have."""
        given = {
            "--class_sampler": self.class_sampler != "none",
            "--class_weights": self.class_weights in BY_COUNT,
            "--logit_adjustment": self.logit_adjustment > 0,
        }
        return [flag for flag, is_on in given.items() if is_on]
