"""Flags of the data that pictures and texts share."""

from dataclasses import dataclass
from functools import partial

from ..data.texts.encodings import BY_ROW
from ..errors import UserError
from ..setting import setting
from .config import Config

data_flag = partial(setting, group="data")


@dataclass
class DataSettings(Config):
    # Every kind of task has its own; it stands here for --help, where it comes first.
    dataset: str = data_flag("", "Data set")
    data_dir: str = data_flag("data", "Folder of the data", resume="free", essential=True)
    cache_dir: str = data_flag(
        "data/cache",
        "Folder for decoded or unpacked pictures, indices, encoded texts, features and the figures "
        "of baselines, which later runs reuse",
        resume="free",
    )
    subset: float | None = data_flag(
        None,
        "Train on a part of the training data, stratified by class: a fraction up to 1, or a "
        "number of samples",
        above=0,
    )
    val_fraction: float = data_flag(
        0.0,
        "Fraction of the training data that is held out for validation, stratified by class",
        low=0,
        below=1,
    )
    group_column: str | None = data_flag(
        None,
        "Column of your tables and lists, by name or number from 1, that tells which samples "
        "belong together, such as patient or author: --val_fraction and --test_fraction keep them "
        "in one split",
        essential=True,
    )
    # As `dataset`.
    test_fraction: float | None = data_flag(None, "Fraction for the test set")
    encoding: str | None = data_flag(
        None,
        "Encoding of your tables and lists that are not UTF-8, nor UTF-16 with a byte order mark",
        resume="free", before=BY_ROW,
        default_text="asked for where one is needed, with the two likeliest",
    )  # fmt: skip
    labels: str | None = data_flag(
        None,
        "Table of samples with labels that you have corrected, such as labels_to_check.csv of a "
        "run; samples without a label in it are left out", resume="free", essential=True,
    )  # fmt: skip
    workers: int | None = data_flag(
        None,
        "Worker processes, which decode pictures while training or read a data set too large for "
        "memory, and threads that decode pictures before training; 0: no worker processes",
        low=0,
        unit="processes",
        default_text="as many as cores: up to 16 to decode while training; up to 4 to read decoded "
        "pictures that are larger than half of the free memory; else 0",
        resume="free",
    )

    def ineffective(self):
        yield from super().ineffective()
        if self.eval_data:
            given = filter(vars(self).get, ("data_dir", "train_file", "test_file", "val_file"))
            yield tuple(given), "--eval_data names the data", "eval_data"
        if self.eval_data or self.predict:
            names = [name for name in ("group_column", "group_by") if name in vars(self)]
            yield names, "nothing is held out", "eval_data" if self.eval_data else "predict"
            yield () if self.eval_data else "labels", "--predict needs no classes", "predict"
        if self.val_fraction and self.eval_every == 0:
            yield "val_fraction", "--eval_every 0 never measures on that split", "eval_every"

    def validate(self):
        super().validate()
        try:
            b"".decode("utf-8" if self.encoding in (None, BY_ROW) else self.encoding)
        except LookupError:
            known = "cp1252, cp1251, gb18030, shift_jis, utf-16-le"
            raise UserError(f"--encoding {self.encoding}: unknown; there are {known} ...") from None
        check_subset(self.subset)


def check_subset(subset: float | None) -> None:
    """Raises UserError if this value of --subset is neither a fraction nor a whole number."""
    if subset is not None and subset > 1 and not float(subset).is_integer():
        raise UserError(f"--subset {subset}: a fraction up to 1, or a whole number of samples")
