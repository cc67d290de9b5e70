"""The folders of a data set from the Hugging Face hub: one for each configuration of the set.

    data_dir/data/train-00000-of-00002.parquet      a set without configurations
    data_dir/default/train-00000-of-00002.parquet   the configuration "default"
    data_dir/default/train/0000.parquet             likewise, converted by the hub
    data_dir/default/partial-train/0000.parquet     likewise; the beginning of a large set

A configuration is a variant of the set, such as a selection of its classes.
"""

from pathlib import Path

from utils.data.images.split_names import first_word
from utils.errors import UserError

NAMED = 5  # configurations in a message


def configuration_folder(root: Path) -> Path:
    """`root`, or the folder in it that has the folders of the splits.

    Raises:
        UserError: there are several configurations.
    """
    files = [path.relative_to(root).parts for path in _parquet_files(root)]
    if any(len(parts) == 1 or first_word(parts[0]) for parts in files):
        return root
    names = sorted({parts[0] for parts in files})
    if len(names) > 1:
        more = ", ..." if len(names) > NAMED else ""
        raise UserError(
            f"{root} has {len(names)} configurations of a data set ({', '.join(names[:NAMED])}"
            f"{more}): give the folder of one, as in --data_dir {root / names[0]}"
        )
    if any(len(parts) == 3 for parts in files):
        return configuration_folder(root / names[0])
    return root


def is_partial(name: str) -> bool:
    """Whether a file, by its path, is of a split that the hub has converted only in part."""
    return any(part.startswith("partial-") for part in Path(name).parts)


def _parquet_files(root: Path) -> list[Path]:
    """Those in the folder and in two levels of folders below it, without hidden ones."""
    paths = [path for depth in ("*", "*/*", "*/*/*") for path in root.glob(f"{depth}.parquet")]
    return [
        path for path in paths if not any(p.startswith(".") for p in path.relative_to(root).parts)
    ]
