"""Groups of pictures and texts: in splits, caches, resumed runs, tuning and messages."""

import re
from pathlib import Path

import numpy as np
import pytest
from data.images.picture_trees import noise
from PIL import Image

from resnet50_test import Settings as PictureSettings
from transformer_test import Settings as TextSettings
from tuning.space_file import UNTUNABLE
from utils.data.images import cache as image_cache
from utils.errors import UserError
from utils.settings.config import parse
from utils.tasks import pictures, texts

PATIENTS = 10


class Lines:
    """A console that keeps its messages."""

    def __init__(self):
        self.said = []

    def say(self, line):
        self.said.append(line)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """In it pictures/ and list/ of 10 patients, each with 1 to 3 pictures of each class, and
    texts.csv of 20 authors, who write texts of different lengths."""
    monkeypatch.chdir(tmp_path)
    rows, seed = ["file,label,patient"], 0
    for label in ("cat", "dog"):
        for patient in range(PATIENTS):
            for n in range(patient % 3 + 1):
                for path in (
                    Path(f"pictures/{label}/p{patient}/{n}.png"),
                    Path(f"list/all/{label}_{patient}_{n}.png"),
                ):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    Image.fromarray(noise(8, seed)).save(path)
                rows.append(f"all/{label}_{patient}_{n}.png,{label},P{patient}")
                seed += 1
    Path("list/train.csv").write_text("\n".join(rows))
    rows = ["text,label,author"]
    for n in range(200):
        rows.append(f"{'fur ' * (n % 20 + 1)},{'ab'[n // 20 % 2]},author {n % 20}")
    Path("texts.csv").write_text("\n".join(rows))


def picture_task(flags: str):
    words = f"--workers 0 --cache_dir cache --batch_size 4 --device cpu {flags}".split()
    settings, _ = parse(PictureSettings, words, "")
    console = Lines()
    return pictures.load_image_task(settings, pictures.torch.device("cpu"), console), console.said


def patients(loader) -> set[int]:
    """Those of the pictures of a loader, by their pixels."""
    place, seed = {}, 0
    for _ in ("cat", "dog"):
        for patient in range(PATIENTS):
            for _ in range(patient % 3 + 1):
                place[noise(8, seed).tobytes()] = patient
                seed += 1
    rows = range(len(loader.labels)) if loader.rows is None else loader.rows
    return {place[np.ascontiguousarray(loader.images[row]).tobytes()] for row in rows}


PICTURES = {
    "folders": "--dataset imagefolder --data_dir pictures --group_by folder",
    "an expression": r"--dataset imagefolder --data_dir pictures --group_by /p(\d)/",
    "a column": "--dataset csv --data_dir list --group_column patient",
    "names in a list": r"--dataset csv --data_dir list --group_by [a-z]+_(\d)_",
}


@pytest.mark.parametrize("flags", PICTURES.values(), ids=PICTURES)
def test_no_patient_is_in_two_splits_of_pictures(place, flags):
    task, said = picture_task(f"{flags} --val_fraction 0.2")
    found = [patients(loader) for loader in (task.train, task.val, task.test)]
    assert sum(map(len, found)) == PATIENTS == len(set.union(*found))
    lines = [line for line in said if "groups held out, with" in line]
    assert "of 10 groups held out, with 8 of 38 samples: 21.1 %, for a fraction of 0.2" in lines[0]
    assert len(lines) == 2 and not any("may belong together" in line for line in said)


def test_a_seed_moves_the_validation_split_alone(place):
    def splits(flags):
        task, _ = picture_task(f"{PICTURES['folders']} --val_fraction 0.2 {flags}")
        return [patients(loader) for loader in (task.train, task.val, task.test)]

    first, again, other = splits(""), splits("--subset 0.5"), splits("--seed 3")
    assert first[1:] == again[1:] and again[0] <= first[0]
    assert other[2] == first[2] and other[1] != first[1]


def test_pictures_decoded_while_training_and_bad_ones(place):
    Path("pictures/cat/p1/0.png").write_bytes(b"none")
    flags = f"{PICTURES['folders']} --val_fraction 0.2 --on_bad skip"
    once, _ = picture_task(flags)
    always, _ = picture_task(f"{flags} --decode always")
    found = [
        [split.groups.names.tolist() for split in (task.data.train, task.data.test)]
        for task in (once, always)
    ]
    assert found[0] == found[1] and not {*found[0][0]} & {*found[0][1]}
    assert sum(map(len, found[0])) == 37 and once.data.fingerprint != always.data.fingerprint


def test_caches_are_shared_and_data_are_told_apart(place, monkeypatch):
    plain, _ = picture_task("--dataset imagefolder --data_dir pictures")
    monkeypatch.setattr(image_cache, "decode_all", None)  # nothing is decoded again
    grouped, _ = picture_task(PICTURES["folders"])
    other, _ = picture_task(r"--dataset imagefolder --data_dir pictures --group_by p\d/\d")
    assert len({task.data.fingerprint for task in (plain, grouped, other)}) == 3


def test_patients_in_given_splits_are_named(place):
    Path("list/test.csv").write_text("file,label,patient\nall/cat_1_0.png,cat,P1\n")
    for flags in (PICTURES["a column"], PICTURES["names in a list"]):
        said = picture_task(flags)[1]
        (line,) = (line for line in said if "groups are in two splits" in line)
        assert "flatters the figures: 1 in train and test (" in line and "held out" not in line


def test_names_are_asked_about_where_something_is_held_out(place):
    def renamed(text):
        return re.sub(r"(cat|dog)_(\d)_", r"case\2_\1", text)

    for path in Path("list/all").iterdir():
        path.rename(path.with_name(renamed(path.name)))
    Path("list/train.csv").write_text(renamed(Path("list/train.csv").read_text()))

    def asks(flags=""):
        said = picture_task(f"--dataset csv --data_dir list {flags}")[1]
        return sum("may belong together: --group_by '(case[ _-]?\\d+)'" in line for line in said)

    assert asks() == 1
    assert asks("--group_by folder/|$") == asks("--group_column patient") == 0
    Path("list/test.csv").write_text(Path("list/train.csv").read_text())
    assert asks() == 0 and asks("--val_fraction 0.2") == 1


@pytest.mark.parametrize(
    "flags, told",
    [
        ("--dataset csv --data_dir list --group_column patiemt", "it has file, label, patient"),
        ("--dataset csv --data_dir list --group_column 9", "it has file, label, patient"),
        ("--dataset csv --data_dir list --group_by folder", "of 1 group (all) none can be"),
        ("--dataset csv --data_dir list --group_by folder --group_column 3", "leave one of them"),
        ("--dataset imagefolder --data_dir pictures --group_by (p", "not a regular expression"),
        ("--dataset imagefolder --data_dir pictures --groups x", "38 of 38 pictures (cat/p0/0.png"),
        ("--dataset imagefolder --data_dir pictures --group_column 1", "it is for lists"),
        ("--dataset shapes --group_by folder", "it is for your own pictures"),
        ("--dataset tar --group_by folder", "it is for your own pictures, each in a file"),
        ("--eval_data pictures --resume run --group_by folder", "nothing is held out"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(place, flags, told):
    Path("run").mkdir()
    Path("run/config.yaml").write_text("")
    with pytest.raises(UserError) as caught:
        picture_task(flags)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_patient_is_refused(place):
    text = Path("list/train.csv").read_text()
    Path("list/train.csv").write_text(text.replace("P3", ""))
    with pytest.raises(UserError, match=r"line 8 has no group \(--group_column\): correct"):
        picture_task(PICTURES["a column"])


def text_task(flags: str):
    base = "--dataset csv --train_file texts.csv --vocab_size 300 --batch_size 8 --cache_dir cache"
    settings, _ = parse(TextSettings, f"{base} --device cpu {flags}".split(), "")
    console = Lines()
    return texts.load_text_task(settings, pictures.torch.device("cpu"), console), console.said


def test_no_author_is_in_two_splits_of_texts_nor_in_those_of_the_cache(place):
    flags = "--test_fraction 0.2 --val_fraction 0.25 --group_column author"
    for again in (False, True):
        task, said = text_task(flags)
        assert again == ("memory-mapped" in said[-1])
        found = [{*split.lengths} for split in (task.data.train, task.data.val, task.data.test)]
        assert [*map(len, found)] == [12, 4, 4] and len(set.union(*found)) == 20
        told = "--group_column author: 4 of 20 groups held out, with 40 of 200 samples: 20.0 %"
        assert any(line.startswith(told) for line in said)


def test_authors_in_given_splits_are_named(place):
    Path("test.csv").write_text(Path("texts.csv").read_text())
    said = text_task("--test_file test.csv --group_column author")[1]
    assert any("20 in train and test (author 0, author 1, author 10, ...)" in line for line in said)


def test_texts_without_an_author_are_bad_rows(place):
    text = Path("texts.csv").read_text()
    Path("texts.csv").write_text(text.replace(",author 7\n", ",\n"))
    flags = "--test_fraction 0.2 --group_column author"
    with pytest.raises(UserError, match=r"line 9 has no group \(--group_column\)"):
        text_task(flags)
    said = text_task(f"{flags} --on_bad skip")[1]
    assert any("10 bad rows left out" in line for line in said)
    Path("test.csv").write_text("text,label\nfur,a\nbone,b\n")  # needs no authors
    text_task("--group_column author --test_file test.csv --on_bad skip")
    for column, told in (
        ("autor", "it has text, label, author"),
        ("label", "without all samples of"),
    ):
        with pytest.raises(UserError, match=told):
            text_task(f"--test_fraction 0.2 --group_column {column} --on_bad skip")


@pytest.mark.slow
def test_a_resumed_run_has_the_same_splits(place, run_resnet, monkeypatch):
    load, found = pictures.load_splits, []

    def recorded(*args):
        splits = load(*args)
        every = (splits.train, splits.val, splits.data.test)
        found.append([split.rows.tolist() for split in every])
        return splits

    monkeypatch.setattr(pictures, "load_splits", recorded)
    flags = f"{PICTURES['folders']} --val_fraction 0.2 --bs 4 --depth 18 --width 4 --workers 0"
    flags += " --cache_dir cache --device cpu --threads 1 --sched constant --seed 4294967295"
    assert run_resnet(f"{flags} --output run --max_steps 1") == 0
    assert run_resnet("--resume run --max_steps 2") == 0
    assert run_resnet("--resume run --group_by x") == 2
    assert found[0] == found[1] and len(found) == 2


def test_a_search_keeps_to_the_groups():
    assert {"group_by", "group_column"} <= UNTUNABLE.keys()
