"""AG News, DBpedia, Yelp, Yahoo Answers and Amazon, from the CSV files as they were published.

Each is a folder with train.csv and test.csv, without a header row: the class, a number from 1, and
then the text in one or more columns. In reviews and answers the end of a line is written as the two
characters \\n. AG News is downloaded where it is missing; the others are too large for that.

Zhang, Zhao and LeCun, Character-level Convolutional Networks for Text Classification (2015),
https://arxiv.org/abs/1509.01626.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...errors import UserError
from ..download import download, refuse_strange_folder
from .csv_texts import VERSION, notes_of, read_files, to_texts
from .files import file_sum
from .sources import TextData, TextRequest, TextSource

URL = "https://s3.amazonaws.com/fast-ai-nlp/"
FILES = ("train.csv", "test.csv")
INSTEAD = (
    "point --data_dir to a folder with train.csv and test.csv of AG News, take your own texts "
    "with --dataset csv, or the built-in ones with --dataset headlines"
)


@dataclass(frozen=True)
class Published:
    """A published data set.

    `texts` is the number of columns with text; None: columns are guessed for each file by itself.
    `escaped` says whether the end of a line is written as \\n. `url` is where its files are
    downloaded from; None: they are too large. `sums`: file -> MD5, hexadecimal, if they are.
    """

    folder: str
    classes: tuple[str, ...]
    texts: int | None
    escaped: bool = True
    url: str | None = None
    sums: Mapping[str, str] = field(default_factory=dict)


STARS = ("1 star", *(f"{stars} stars" for stars in range(2, 6)))
POLARITY = ("negative", "positive")
PUBLISHED = {
    # There are copies in which title and description are joined.
    "ag_news": Published(
        "ag_news_csv",
        ("World", "Sports", "Business", "Sci/Tech"),
        texts=None,
        escaped=False,
        url="https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/",
        sums={  # as in torchtext (torchtext/datasets/ag_news.py)
            "train.csv": "b1a00f826fdfbd249f79597b59e1dc12",
            "test.csv": "d52ea96a97a2d943681189a97654912d",
        },
    ),
    "dbpedia": Published(
        "dbpedia_csv",
        (
            "Company", "EducationalInstitution", "Artist", "Athlete", "OfficeHolder",
            "MeanOfTransportation", "Building", "NaturalPlace", "Village", "Animal", "Plant",
            "Album", "Film", "WrittenWork",
        ),
        texts=2,
        escaped=False,
    ),
    "yahoo_answers": Published(
        "yahoo_answers_csv",
        (
            "Society & Culture", "Science & Mathematics", "Health", "Education & Reference",
            "Computers & Internet", "Sports", "Business & Finance", "Entertainment & Music",
            "Family & Relationships", "Politics & Government",
        ),
        texts=3,
    ),
    "yelp_polarity": Published("yelp_review_polarity_csv", POLARITY, texts=1),
    "yelp_full": Published("yelp_review_full_csv", STARS, texts=1),
    "amazon_polarity": Published("amazon_review_polarity_csv", POLARITY, texts=2),
    "amazon_full": Published("amazon_review_full_csv", STARS, texts=2),
}  # fmt: skip
ESCAPED = "\\n"


def line_end_of(dataset: str) -> str | None:
    """How the files of --dataset write the end of a line within a text; None: as it is."""
    return ESCAPED if dataset in PUBLISHED and PUBLISHED[dataset].escaped else None


def open_published(name: str, request: TextRequest) -> TextSource:
    """Looks for train.csv and test.csv as `_find` does.

    Raises:
        UserError: they are missing, or a download failed.
    """
    files = {path.stem: path for path in _find(name, request.data_dir)}
    folders = dict.fromkeys(str(path.parent) for path in files.values())
    return TextSource(name, files, VERSION, ", ".join(folders), lambda: _load(name, request, files))


def _find(name: str, data_dir: Path) -> list[Path]:
    """Finds each file in its published folder or in `data_dir`; downloads a missing one to the
    published folder and verifies its checksum."""
    published = PUBLISHED[name]
    home = data_dir / published.folder
    files = []
    for file in FILES:
        there = [path for path in (home / file, data_dir / file) if path.is_file()]
        if not there:
            if published.url is None:
                raise _missing(name, data_dir)
            refuse_strange_folder(data_dir, name)
            download(published.url + file, home / file, published.sums[file], hint=INSTEAD)
        files.append(there[0] if there else home / file)
    return files


def _missing(name: str, data_dir: Path) -> UserError:
    """That the files are not there, and what to do."""
    published = PUBLISHED[name].folder
    for end in (".tar.gz", ".tgz"):
        archive = data_dir / (published + end)
        if archive.is_file():
            return UserError(f"{archive} is still packed: tar -xzf {archive} -C {data_dir}")
    return UserError(
        f"{data_dir / published} does not have {' and '.join(FILES)} of {name}: fetch "
        f"{URL}{published}.tgz, unpack it in {data_dir}, or give --data_dir the folder that has "
        f"{published}/"
    )


def _load(name: str, request: TextRequest, files: dict[str, Path]) -> TextData:
    published = PUBLISHED[name]
    if published.texts is not None:
        columns = tuple(str(number) for number in range(2, published.texts + 2))
        request = replace(request, text_columns=columns, label_column="1")
    numbers = [str(number) for number in range(1, len(published.classes) + 1)]
    samples = read_files(request, files, tuple(numbers), line_end_of(name))
    texts = {role: to_texts(part, numbers) for role, part in samples.items()}
    notes = notes_of(samples)
    sums = published.sums
    changed = [file for file in sums if file_sum(files[Path(file).stem], "md5") != sums[file]]
    if changed:
        notes.append(f"{' and '.join(changed)}: not the published file of AG News, used as it is")
    return TextData(
        classes=list(published.classes),
        train=texts["train"],
        test=texts["test"],
        skipped=sum(len(part.problems) for part in samples.values()),
        notes=notes,
    )
