"""What runs ask of a kind of task, and the table of kinds. PyTorch is imported with a kind."""

import os
import pkgutil
from collections.abc import Callable, Mapping
from typing import ClassVar

from utils.errors import UserError

# Name of a kind, as its settings give it in `task` -> where it is.
KINDS = {"pictures": "utils.tasks.pictures:Pictures", "texts": "utils.tasks.texts:Texts"}


class Kind:
    """One kind of task with the model that an entry builds for it: base of those in KINDS.

    Args:
        settings: of the entry.
        build: (settings, card) -> the model, on the CPU.
        model_name: for messages.
    """

    card_class: type  # what a model of this kind needs to know of its data
    # Variables that a process of this kind needs, where the user has not set them.
    environment: ClassVar[Mapping[str, str]] = {}

    def __init__(self, settings, build: Callable, model_name: str):
        self.settings, self._build, self.model_name = settings, build, model_name

    def set_environment(self) -> None:
        """For this process, before it computes anything."""
        for name, value in self.environment.items():
            os.environ.setdefault(name, value)

    def card(self, checkpoint):
        """Of the run that the checkpoint is from."""
        try:
            return self.card_class.from_dict(checkpoint.state["settings"]["data"])
        except (KeyError, ValueError) as error:
            raise UserError(
                f"the checkpoint of step {checkpoint.step} does not say what its model was trained "
                f"on ({error}): train it with this version of the toolkit"
            ) from None

    def build_model(self, card):
        """On the CPU, in the memory format that suits it."""
        return self._build(self.settings, card)

    def imagenet_name(self) -> str:
        """torchvision's name of the ImageNet weights that fit the model; UserError: none do."""
        raise UserError(
            f"--pretrained imagenet: those weights are of pictures, and {self.model_name} is not: "
            "name a run or a file"
        )

    def load_task(self, run, card, pretrained):
        """The data set with its splits and loaders, as weights that are there already need it.

        Args:
            run: a `utils.runs.run.Run`; it closes what has to be closed.
            card: of the run that goes on; None at its start.
            pretrained: weights from elsewhere, or None.
        """
        raise NotImplementedError


def kind_of(settings) -> type[Kind]:
    """The kind of task that the settings are of."""
    return pkgutil.resolve_name(KINDS[settings.task])
