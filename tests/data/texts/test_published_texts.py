"""DBpedia, Yelp, Yahoo Answers, Amazon and IMDB, from small imitations of what is published."""

import csv

import numpy as np
import pytest
from data.texts.sum_of_texts import sum_of

from utils.data.texts import published_csv
from utils.data.texts.cache import load_tokenized
from utils.data.texts.sources import TextRequest, open_text_data
from utils.data.texts.tokenizer_request import TokenizerRequest
from utils.errors import UserError

CSV_SETS = {name: one for name, one in published_csv.PUBLISHED.items() if one.texts is not None}


def load(name, folder, **settings):
    return open_text_data(name, TextRequest(folder, **settings)).load()


def refused(name, folder, *parts, **settings):
    with pytest.raises(UserError) as error:
        load(name, folder, **settings)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def write_csv(folder, published, per_class=3):
    """Two files as published: every field quoted, a " in it doubled, a line's end as \\n."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in published_csv.FILES:
        with open(folder / name, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
            for number in range(per_class * len(published.classes)):
                texts = [f'{name} no. {number}, "column" {i}\\nend' for i in range(published.texts)]
                if number == 1 and published.texts > 1:
                    texts[0] = ""  # as titles and questions may be
                writer.writerow([number % len(published.classes) + 1, *texts])
    return folder


@pytest.mark.parametrize("name", CSV_SETS)
def test_csv_sets(name, tmp_path):
    published = CSV_SETS[name]
    write_csv(tmp_path / published.folder, published)
    data = load(name, tmp_path)
    classes = len(published.classes)
    assert data.classes == list(published.classes) and not data.skipped
    assert len(data.notes) == 2 and all("class in column 1, text" in note for note in data.notes)
    assert data.train.labels.tolist() == [*range(classes)] * 3
    columns = [
        f'train.csv no. 0, "column" {i}{" end" if published.escaped else " nend"}'
        for i in range(published.texts)
    ]
    assert data.train.texts[0] == " ".join(columns)
    raw = load(name, tmp_path, clean=False)
    assert raw.train.texts[0].startswith('train.csv no. 0, "column" 0\\nend')
    inside = load(name, tmp_path / published.folder)
    assert sum_of(inside) == sum_of(data) != sum_of(raw)


def test_the_published_classes():
    assert {name: (len(one.classes), one.texts) for name, one in CSV_SETS.items()} == {
        "dbpedia": (14, 2), "yahoo_answers": (10, 3), "yelp_polarity": (2, 1), "yelp_full": (5, 1),
        "amazon_polarity": (2, 2), "amazon_full": (5, 2),
    }  # fmt: skip


def test_a_missing_or_packed_or_wrong_copy(tmp_path):
    refused("dbpedia", tmp_path, "train.csv and test.csv", "dbpedia_csv.tgz", f"it in {tmp_path}")
    (tmp_path / "dbpedia_csv.tar.gz").touch()
    refused("dbpedia", tmp_path, "still packed", f"tar -xzf {tmp_path}/dbpedia_csv.tar.gz")
    six_stars = published_csv.Published("six", tuple("123456"), texts=1)
    write_csv(tmp_path / "yelp_review_full_csv", six_stars)
    refused("yelp_full", tmp_path, "train.csv: line 6 has the class '6'")


# IMDB


def write_imdb(folder):
    """Reviews as published: unlabelled ones, and others' files, lie beside them."""
    for split in ("train", "test"):
        for name in ("pos", "neg", "unsup"):
            (folder / split / name).mkdir(parents=True)
            for number in (0, 10, 9):
                text = f"{split} {name} {number}<br /><br />Is caf\u00e9."
                (folder / split / name / f"{number}_7.txt").write_text(text, encoding="utf-8")
        (folder / split / "urls_pos.txt").write_text("http://x\n")
    return folder


def test_imdb(tmp_path):
    folder = write_imdb(tmp_path / "aclImdb")
    data = load("imdb", tmp_path)
    assert data.classes == ["neg", "pos"] and not data.notes
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1] == data.test.labels.tolist()
    assert data.train.texts[:3] == [f"train neg {number} Is caf\u00e9." for number in (0, 9, 10)]
    assert sum_of(load("imdb", folder)) == sum_of(data)
    assert open_text_data("imdb", TextRequest(tmp_path)).description == str(folder)
    raw = load("imdb", tmp_path, clean=False)
    assert raw.test.texts[0] == "test neg 0<br /><br />Is caf\u00e9."


def test_imdb_with_a_bad_review(tmp_path):
    folder = write_imdb(tmp_path / "aclImdb")
    (folder / "test/pos/9_7.txt").write_bytes(b"caf\xe9")
    refused("imdb", tmp_path, "test/pos/9_7.txt is not UTF-8", "--on_bad skip")
    (folder / "test/pos/10_7.txt").write_text("train pos 0<br /><br />Is caf\u00e9.")
    data = load("imdb", tmp_path, on_bad="skip")
    assert data.skipped == 1 and len(data.test) == 5
    assert "1 review left out: test/pos/9_7.txt is not UTF-8" in data.notes[0]
    assert "the test reviews: 1 of 5 texts are in the training data" in data.notes[1]


def test_imdb_missing_or_incomplete(tmp_path):
    refused("imdb", tmp_path, "has no aclImdb/", "https://ai.stanford.edu", "tar -xzf")
    folder = write_imdb(tmp_path / "aclImdb")
    for path in (folder / "test/neg").iterdir():
        path.unlink()
    refused("imdb", tmp_path, "test/neg has no reviews")


def test_the_cache_knows_every_review(tmp_path):
    folder = write_imdb(tmp_path / "aclImdb")

    def encoded():
        return load_tokenized(
            "imdb",
            TextRequest(tmp_path),
            TokenizerRequest("basic_english"),
            cache_dir=tmp_path / "cache",
        )

    first = encoded()
    assert "memory-mapped" in encoded().source and len(first.train) == 6
    (folder / "train/pos/9_7.txt").write_text("another review, as long")
    assert "encoded into" in encoded().source
    assert np.array_equal(first.train.labels, encoded().train.labels)
