"""The interface of a kind of task, and the table of kinds. Resolving a kind imports PyTorch."""

import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from ..errors import UserError
from ..place import resolve

# Name of a kind (attribute `task` of its settings) -> "module:class".
KINDS = {"pictures": "utils.tasks.pictures:Pictures", "texts": "utils.tasks.texts:Texts"}


class Kind:
    """A kind of task, with the model that an entry builds for it. Base of the classes in KINDS.

    Args:
        settings: of the entry.
        build: (settings, card) -> the model, on the CPU.
        model_name: for messages.
    """

    card_class: Any  # of the card: what a model needs to know of its data
    data_flags = "--data_dir, --labels"  # those that name the data
    predicts_folders = False  # --predict takes a folder, too
    # Environment variables to set unless the user has set them.
    environment: ClassVar[Mapping[str, str]] = {}

    def __init__(self, settings, build: Callable, model_name: str):
        self.settings, self._build, self.model_name = settings, build, model_name

    def set_environment(self) -> None:
        """Sets the variables of `environment`. To be called before PyTorch computes anything."""
        for name, value in self.environment.items():
            os.environ.setdefault(name, value)

    def card(self, checkpoint):
        """The card in a checkpoint."""
        try:
            return self.card_class.from_dict(checkpoint.run_info["data"])
        except (KeyError, ValueError) as error:
            raise UserError(
                f"the checkpoint of step {checkpoint.step} does not say what its model was trained "
                f"on ({error}): train it with this version of the toolkit"
            ) from None

    def build_model(self, card):
        """The entry's model, on the CPU, in the memory format of this kind."""
        return self._build(self.settings, card)

    def load_published(self, say: Callable):
        """The published weights that fit the model, a `Pretrained`; UserError if there are none.

        Args:
            say: is given a line before a download.
        """
        raise UserError(
            f"--pretrained {self.settings.pretrained}: weights are published for pictures "
            "only; give a file of weights or the folder of a run"
        )

    def check_pretrained(self, pretrained) -> None:
        """UserError if the weights, a `Pretrained`, are of a model for another kind of task."""
        if pretrained.card is not None and pretrained.card.task != self.settings.task:
            raise UserError(
                f"--pretrained {self.settings.pretrained}: its model is for "
                f"{pretrained.card.task}; give weights of one for {self.settings.task}"
            )

    def load_task(self, run, card, pretrained):
        """A Task: the data set with its splits and loaders.

        Args:
            run: a `utils.runs.run.Run`, which closes the task if necessary.
            card: of the resumed run, whose normalisation or tokenizer is kept; None for a new run.
            pretrained: a `Pretrained`, whose normalisation or tokenizer is kept; or None.
        """
        raise NotImplementedError


def kind_of(settings) -> type[Kind]:
    """The kind of task of these settings."""
    return resolve(KINDS[settings.task])
