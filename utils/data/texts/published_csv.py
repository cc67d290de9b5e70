"""DBpedia, Yelp, Yahoo Answers and Amazon, from the CSV files as they were published.

Each is a folder with train.csv and test.csv, without a header row: the class, a number from 1, and
then the text in one or more columns. In reviews and answers the end of a line is written as the two
characters \\n.

Zhang, Zhao and LeCun, Character-level Convolutional Networks for Text Classification (2015),
https://arxiv.org/abs/1509.01626.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from utils.data.texts.csv_texts import VERSION, notes_of, read_files, to_texts
from utils.data.texts.sources import FILE_FLAGS, TextData, TextRequest, TextSource
from utils.errors import UserError

URL = "https://s3.amazonaws.com/fast-ai-nlp/"
FILES = ("train.csv", "test.csv")


@dataclass(frozen=True)
class Published:
    """A published data set.

    `texts` is the number of columns with text, `escaped` says whether the end of a line is written
    as \\n.
    """

    name: str
    folder: str
    classes: tuple[str, ...]
    texts: int
    escaped: bool = True


STARS = ("1 star", *(f"{stars} stars" for stars in range(2, 6)))
POLARITY = ("negative", "positive")
DBPEDIA = Published(
    "dbpedia",
    "dbpedia_csv",
    (
        "Company", "EducationalInstitution", "Artist", "Athlete", "OfficeHolder",
        "MeanOfTransportation", "Building", "NaturalPlace", "Village", "Animal", "Plant", "Album",
        "Film", "WrittenWork",
    ),
    texts=2,
    escaped=False,
)  # fmt: skip
YAHOO_ANSWERS = Published(
    "yahoo_answers",
    "yahoo_answers_csv",
    (
        "Society & Culture", "Science & Mathematics", "Health", "Education & Reference",
        "Computers & Internet", "Sports", "Business & Finance", "Entertainment & Music",
        "Family & Relationships", "Politics & Government",
    ),
    texts=3,
)  # fmt: skip
YELP_POLARITY = Published("yelp_polarity", "yelp_review_polarity_csv", POLARITY, texts=1)
YELP_FULL = Published("yelp_full", "yelp_review_full_csv", STARS, texts=1)
AMAZON_POLARITY = Published("amazon_polarity", "amazon_review_polarity_csv", POLARITY, texts=2)
AMAZON_FULL = Published("amazon_full", "amazon_review_full_csv", STARS, texts=2)
ALL = (DBPEDIA, YAHOO_ANSWERS, YELP_POLARITY, YELP_FULL, AMAZON_POLARITY, AMAZON_FULL)
ESCAPED = "\\n"


def line_end_of(dataset: str) -> str | None:
    """How the files of --dataset write the end of a line within a text; None: as it is."""
    escaped = any(published.name == dataset and published.escaped for published in ALL)
    return ESCAPED if escaped else None


def open_published(published: Published, request: TextRequest) -> TextSource:
    """Looks for train.csv and test.csv in `data_dir`/`published.folder`, then in `data_dir`.

    Raises:
        UserError: they are missing, or a setting has no effect.
    """
    request.refuse(published.name, "has its own files", *FILE_FLAGS)
    folder = _find(published, request.data_dir)
    files = {name.partition(".")[0]: folder / name for name in FILES}
    return TextSource(
        published.name, files, VERSION, str(folder), lambda: _load(published, request, files)
    )


open_dbpedia = partial(open_published, DBPEDIA)
open_yahoo_answers = partial(open_published, YAHOO_ANSWERS)
open_yelp_polarity = partial(open_published, YELP_POLARITY)
open_yelp_full = partial(open_published, YELP_FULL)
open_amazon_polarity = partial(open_published, AMAZON_POLARITY)
open_amazon_full = partial(open_published, AMAZON_FULL)


def _find(published: Published, data_dir: Path) -> Path:
    home = data_dir / published.folder
    for folder in (home, data_dir):
        if all((folder / name).is_file() for name in FILES):
            return folder
    for end in (".tar.gz", ".tgz"):
        archive = data_dir / (published.folder + end)
        if archive.is_file():
            raise UserError(f"{archive} is still packed: tar -xzf {archive} -C {data_dir}")
    raise UserError(
        f"{home} does not have {' and '.join(FILES)} of {published.name}: fetch "
        f"{URL}{published.folder}.tgz, unpack it in {data_dir}, or give --data_dir the folder that "
        f"has {published.folder}/"
    )


def _load(published: Published, request: TextRequest, files: dict[str, Path]) -> TextData:
    columns = tuple(str(number) for number in range(2, published.texts + 2))
    request = dataclasses.replace(request, text_columns=columns, label_column="1")
    numbers = [str(number) for number in range(1, len(published.classes) + 1)]
    line_end = line_end_of(published.name)
    samples = read_files(request, files, tuple(numbers), line_end)
    texts = {role: to_texts(part, numbers) for role, part in samples.items()}
    return TextData(
        classes=list(published.classes),
        train=texts["train"],
        test=texts["test"],
        skipped=sum(len(part.problems) for part in samples.values()),
        notes=notes_of(samples),
    )
