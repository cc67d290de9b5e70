"""AG News: 120,000 training and 7,600 test articles of four classes, from two CSV files.

The published columns are class (1 to 4), title and description. Columns are guessed for each file
by itself, so that copies in which title and description are joined work as well.

Zhang, Zhao and LeCun, Character-level Convolutional Networks for Text Classification (2015),
https://arxiv.org/abs/1509.01626.
"""

from __future__ import annotations

import os
from pathlib import Path

from utils.data.download import download, refuse_strange_folder
from utils.data.texts.csv_texts import VERSION, file_sum, notes_of, read_files, to_texts
from utils.data.texts.sources import FILE_FLAGS, TextData, TextRequest, TextSource

CLASSES = ["World", "Sports", "Business", "Sci/Tech"]
FOLDER = "ag_news_csv"
URL = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
# File -> MD5, hexadecimal, as in torchtext (torchtext/datasets/ag_news.py).
PUBLISHED = {
    "train.csv": "b1a00f826fdfbd249f79597b59e1dc12",
    "test.csv": "d52ea96a97a2d943681189a97654912d",
}
INSTEAD = (
    "point --data_dir to a folder with train.csv and test.csv of AG News, take your own texts "
    "with --dataset csv, or the built-in ones with --dataset headlines"
)


def open_ag_news(request: TextRequest) -> TextSource:
    """Looks for each file in `data_dir`/ag_news_csv, then in `data_dir`, and uses it as it is. A
    file that is in neither is downloaded to the former, and its checksum verified.

    Raises:
        UserError: a download failed, or a setting has no effect.
    """
    request.refuse("ag_news", "has its own files", *FILE_FLAGS)
    files = {
        name.partition(".")[0]: _find(request.data_dir, name, checksum)
        for name, checksum in PUBLISHED.items()
    }
    folders = dict.fromkeys(str(path.parent) for path in files.values())
    return TextSource("ag_news", files, VERSION, ", ".join(folders), lambda: _load(request, files))


def _find(data_dir: Path, name: str, checksum: str) -> Path:
    home = data_dir / FOLDER / name
    for path in (home, data_dir / name):
        if os.path.isfile(path):
            return path
    refuse_strange_folder(data_dir, "ag_news")
    download(URL + name, home, checksum, hint=INSTEAD)
    return home


def _load(request: TextRequest, files: dict[str, Path]) -> TextData:
    numbers = tuple(str(number) for number in range(1, len(CLASSES) + 1))
    samples = read_files(request, files, numbers)
    texts = {role: to_texts(part, list(numbers)) for role, part in samples.items()}
    changed = [
        path.name
        for path, checksum in zip(files.values(), PUBLISHED.values(), strict=True)
        if file_sum(path, "md5") != checksum
    ]
    notes = notes_of(samples)
    if changed:
        notes.append(f"{' and '.join(changed)}: not the published file of AG News, used as it is")
    return TextData(
        classes=list(CLASSES),
        train=texts["train"],
        test=texts["test"],
        skipped=sum(len(part.problems) for part in samples.values()),
        notes=notes,
    )
