"""Cards: what must be known to use a trained classifier; kept in its checkpoints and exports."""

import math
from dataclasses import asdict, dataclass
from typing import ClassVar

from ..reporting.run_folder import TOKENIZER


@dataclass(frozen=True)
class ModelCard:
    """The card of a classifier of pictures: the names of its outputs, and the form of its inputs.

    `mean` and `std` are per channel, of pixels scaled to 0..1; `height` and `width` are in pixels.
    `heads` are those of our ViT, as the shapes of its weights do not show them; `form` is how files
    become pictures (utils/data/images/image_data.py), which exports are told. None: unknown.
    Raises ValueError for values that no model can have.
    """

    task: ClassVar[str] = "pictures"  # see utils/tasks/kinds.py
    classes: tuple[str, ...]  # in the order of the logits
    mean: tuple[float, ...]
    std: tuple[float, ...]
    height: int
    width: int
    channels: int  # 3: RGB, 1: gray
    heads: int | None = None
    form: dict | None = None

    def __post_init__(self) -> None:
        if not self.classes or not all(isinstance(name, str) for name in self.classes):
            raise ValueError("classes must be one name or more")
        for name in ("height", "width", "channels"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.channels not in (1, 3):
            raise ValueError(f"channels must be 1 or 3, not {self.channels}")
        for name in ("mean", "std"):
            values = getattr(self, name)
            numbers = all(isinstance(v, (int, float)) and math.isfinite(v) for v in values)
            if len(values) != self.channels or not numbers:
                raise ValueError(f"{name} must be one finite number for each channel")

    @classmethod
    def from_dict(cls, values: dict) -> "ModelCard":
        """From `to_dict`, or run_info["data"] of a checkpoint; other keys are ignored.

        Raises ValueError, which says what is missing or wrong.
        """
        try:
            lists = {name: values[name] for name in ("classes", "mean", "std")}
            numbers = {name: values[name] for name in ("height", "width", "channels")}
        except KeyError as error:
            raise ValueError(f"{error.args[0]} is missing") from None
        except TypeError:
            raise ValueError("not a JSON object") from None
        for name, entries in lists.items():
            if not isinstance(entries, (list, tuple)):
                raise ValueError(f"{name} must be a list, not {entries!r}")
        tuples: dict = {name: tuple(entries) for name, entries in lists.items()}
        return cls(**tuples, **numbers, heads=values.get("heads"), form=values.get("form"))

    def normalisation(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """(mean, std), or None if the model takes pictures of another number of channels."""
        return (self.mean, self.std) if channels == self.channels else None

    @property
    def picture_size(self) -> tuple[int, int]:
        """(height, width)."""
        return self.height, self.width

    def files(self) -> dict[str, tuple[bytes, str]]:
        """What other programs need beside the weights: {name: (content, what it is)}."""
        return {}

    def to_dict(self) -> dict:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class TextCard:
    """The card of a classifier of texts: the names of its outputs, and the form of its inputs.

    `tokenizer` is the JSON of the `tokenizers` library, `clean` whether texts are cleaned before
    they are tokenized (utils/data/texts/clean.py), `max_len` the most tokens that are read of a
    text. `heads` and `pooling` are settings of the model that the shapes of its weights do not
    show; None: unknown. `encoder` is what a model is built by that is not the Transformer here
    (utils/weights/encoders.py). `line_end` is how the files of the data set write the end of a
    line within a text, which cleaning takes for a space; None: as it is. Raises ValueError for
    values that no model can have.
    """

    task: ClassVar[str] = "texts"
    mean: ClassVar[None] = None  # these are of pictures
    std: ClassVar[None] = None
    picture_size: ClassVar[None] = None
    classes: tuple[str, ...]  # in the order of the logits
    tokenizer: str
    clean: bool
    max_len: int
    heads: int | None = None
    pooling: str | None = None
    line_end: str | None = None
    encoder: dict | None = None

    def __post_init__(self) -> None:
        if not self.classes or not all(isinstance(name, str) for name in self.classes):
            raise ValueError("classes must be one name or more")
        if not isinstance(self.tokenizer, str) or not isinstance(self.clean, bool):
            raise ValueError("tokenizer must be a string and clean true or false")
        if not isinstance(self.max_len, int) or self.max_len < 1:
            raise ValueError(f"max_len must be at least 1, not {self.max_len!r}")

    @classmethod
    def from_dict(cls, values: dict) -> "TextCard":
        """From `to_dict`; other keys are ignored. Raises ValueError."""
        try:
            classes, *others = (values[n] for n in ("classes", "tokenizer", "clean", "max_len"))
            optional = (values.get(name) for name in ("heads", "pooling", "line_end", "encoder"))
            return cls(tuple(classes), *others, *optional)
        except KeyError as error:
            raise ValueError(f"{error.args[0]} is missing") from None
        except TypeError:
            raise ValueError("not a JSON object with a list of classes") from None

    def files(self) -> dict[str, tuple[bytes, str]]:
        what = "the tokenizer, for the `tokenizers` library"
        return {TOKENIZER: (self.tokenizer.encode(), what)}

    def to_dict(self) -> dict:
        """For JSON."""
        return asdict(self)


def card_of(values: dict) -> ModelCard | TextCard:
    """The card of either kind whose `to_dict` gave `values`. Raises ValueError."""
    kind = TextCard if isinstance(values, dict) and "tokenizer" in values else ModelCard
    return kind.from_dict(values)
