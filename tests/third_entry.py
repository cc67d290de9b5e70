"""An entry script is this: the settings of a model, the model and its name."""

from dataclasses import dataclass

from utils.entry import end_process, run_model
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


def main(argv: list[str] | None = None) -> int:
    return run_model(Settings, build_model, model_name, __doc__, argv)


if __name__ == "__main__":
    end_process(main())
