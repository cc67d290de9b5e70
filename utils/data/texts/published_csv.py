"""AG News, DBpedia, Yelp, Yahoo Answers and Amazon, from the CSV files as they were published.

Each is a folder with train.csv and test.csv, without a header row: the class, a number from 1, and
then the text in one or more columns. In reviews and answers the end of a line is written as the two
characters \\n. AG News is downloaded where it is missing; the others are too large for that.

Zhang, Zhao and LeCun, Character-level Convolutional Networks for Text Classification (2015),
https://arxiv.org/abs/1509.01626.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from utils.data.download import download, refuse_strange_folder
from utils.data.texts.csv_texts import VERSION, notes_of, read_files, to_texts
from utils.data.texts.files import file_sum
from utils.data.texts.sources import TextData, TextRequest, TextSource
from utils.errors import UserError

URL = "https://s3.amazonaws.com/fast-ai-nlp/"
FILES = ("train.csv", "test.csv")
AG_NEWS_URL = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
# File -> MD5, hexadecimal, as in torchtext (torchtext/datasets/ag_news.py).
AG_NEWS_SUMS = {
    "train.csv": "b1a00f826fdfbd249f79597b59e1dc12",
    "test.csv": "d52ea96a97a2d943681189a97654912d",
}
INSTEAD = (
    "point --data_dir to a folder with train.csv and test.csv of AG News, take your own texts "
    "with --dataset csv, or the built-in ones with --dataset headlines"
)


@dataclass(frozen=True)
class Published:
    """A published data set.

    `texts` is the number of columns with text; None: columns are guessed for each file by itself.
    `escaped` says whether the end of a line is written as \\n.
    """

    folder: str
    classes: tuple[str, ...]
    texts: int | None
    escaped: bool = True


STARS = ("1 star", *(f"{stars} stars" for stars in range(2, 6)))
POLARITY = ("negative", "positive")
PUBLISHED = {
    # There are copies in which title and description are joined.
    "ag_news": Published(
        "ag_news_csv", ("World", "Sports", "Business", "Sci/Tech"), texts=None, escaped=False
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
    """Looks for train.csv and test.csv in the published folder in `data_dir`, then in `data_dir`.

    Raises:
        UserError: they are missing, or a download failed.
    """
    find = _find_ag_news if name == "ag_news" else _find
    files = {path.stem: path for path in find(name, request.data_dir)}
    folders = dict.fromkeys(str(path.parent) for path in files.values())
    return TextSource(name, files, VERSION, ", ".join(folders), lambda: _load(name, request, files))


def _find_ag_news(name: str, data_dir: Path) -> list[Path]:
    """A file that is in neither folder is downloaded to the former, and its checksum verified."""
    files = []
    for file, checksum in AG_NEWS_SUMS.items():
        home = data_dir / PUBLISHED[name].folder / file
        files.append(next(filter(os.path.isfile, (home, data_dir / file)), home))
        if not os.path.isfile(files[-1]):
            refuse_strange_folder(data_dir, name)
            download(AG_NEWS_URL + file, home, checksum, hint=INSTEAD)
    return files


def _find(name: str, data_dir: Path) -> list[Path]:
    published = PUBLISHED[name].folder
    home = data_dir / published
    for folder in (home, data_dir):
        files = [folder / file for file in FILES]
        if all(file.is_file() for file in files):
            return files
    for end in (".tar.gz", ".tgz"):
        archive = data_dir / (published + end)
        if archive.is_file():
            raise UserError(f"{archive} is still packed: tar -xzf {archive} -C {data_dir}")
    raise UserError(
        f"{home} does not have {' and '.join(FILES)} of {name}: fetch {URL}{published}.tgz, unpack "
        f"it in {data_dir}, or give --data_dir the folder that has {published}/"
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
    sums = AG_NEWS_SUMS if name == "ag_news" else {}
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
