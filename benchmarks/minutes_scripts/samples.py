"""What the contenders' scripts read and write; without any package."""

import csv
from pathlib import Path


def is_texts(folder: Path) -> bool:
    return (folder / "train.csv").exists()


def texts(path: Path) -> tuple[list[str], list[str]]:
    """(texts, classes) of a file whose rows are a class and columns of text."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = [(" ".join(row[1:]), row[0]) for row in csv.reader(file) if row]
    return [text for text, _ in rows], [label for _, label in rows]


def pictures(folder: Path) -> tuple[list[Path], list[str]]:
    """(files, classes) of a folder that has one for each class."""
    files = sorted(path for path in folder.glob("*/*") if path.is_file())
    return files, [path.parent.name for path in files]


def write(output: Path, true, predicted) -> None:
    """Writes evaluated.csv, as a run of this toolkit does."""
    output.mkdir(exist_ok=True)
    with open(output / "evaluated.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("true", "predicted"), *zip(true, predicted, strict=True)])
