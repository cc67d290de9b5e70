"""An entry script is this: the settings of a model, the model and its name."""

from dataclasses import dataclass

from utils.entry import Entry, end_process
from utils.setting import setting
from utils.settings import ImageSettings


@dataclass
class Settings(ImageSettings):
    entry = "third_entry.py"

    hidden: int = setting(8, "Width of the hidden layer", group="model", low=1)


def build_model(settings: Settings, card):
    from tests.third_model import Perceptron

    pixels = card.channels * card.height * card.width
    return Perceptron(pixels, settings.hidden, len(card.classes))


def model_name(settings: Settings) -> str:
    return f"perceptron{settings.hidden}"


main = Entry(Settings, build_model, model_name, __doc__).main

if __name__ == "__main__":
    end_process(main())
