"""Lists of picture files and their classes: --dataset csv."""

import shutil
from unicodedata import normalize

import numpy as np
import pytest
from data.images.picture_trees import noise
from PIL import Image

from utils.data.images.csv_lists import listed_pictures
from utils.data.images.image_data import PictureRequest
from utils.data.images.sources import load_image_data
from utils.errors import UserError


@pytest.fixture
def folder(tmp_path):
    """Eight pictures in a folder, and no list."""
    (tmp_path / "set" / "images").mkdir(parents=True)
    for i in range(8):
        Image.fromarray(noise(8, i)).save(tmp_path / "set" / "images" / f"{i}.png")
    return tmp_path / "set"


def load(path, **settings):
    settings = {"cache_dir": path.parent / "cache", "workers": 2, "progress": False} | settings
    return load_image_data("csv", PictureRequest(path, **settings))


def refused(path, *parts, **settings):
    with pytest.raises(UserError) as error:
        load(path, **settings)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message, message


def write(path, rows, header="file,label"):
    path.write_text("\n".join([header, *rows] if header else rows) + "\n")


ROWS = [f"images/{i},{'dog' if i % 2 else 'cat'}".replace(",", ".png,") for i in range(8)]


def test_columns_of_lists_without_a_header_are_numbers(folder):
    rows = [f"x,images/{i}.png,{1 + i % 2}" for i in (0, 1, 4, 5)]
    write(folder / "train.csv", rows, header=None)
    write(folder / "test.csv", ["y,images/2.png,1", "y,images/3.png,2"], header=None)
    columns = {"image_column": "2", "label_column": "3"}
    data = load(folder, **columns)
    assert data.train.labels.tolist() == [0, 1, 0, 1] and data.test.labels.tolist() == [0, 1]
    write(folder / "test.csv", ["y,images/2.png", "y,images/3.png"], header=None)
    assert "test.csv has no classes: 2 pictures for --predict" in (
        load(folder, test_fraction=0.5, **columns).notes
    )


def test_numbers_in_a_list_for_a_trained_model_are_the_lines_of_a_file(folder):
    write(folder / "new.csv", ["images/0.png,1", "images/1.png,0"])
    model = {"classes": ["dog", "owl"], "image_size": 8}
    refused(folder / "new.csv", "2 labels that the training pictures do not have", **model)
    (folder / "classes.txt").write_text("owl\ndog\n")
    assert load(folder / "new.csv", **model).test.labels.tolist() == [0, 1]


def test_all_faults_of_lists_are_told_at_once(folder):
    write(folder / "train.csv", [*ROWS, "images/gone.png,cat"])
    write(folder / "test.csv", ["images/0.png,owl", "images/1.png,rat"])
    refused(folder, "2 faults: (1) 1 of 9 pictures", "(2) ", "'owl' in line 2, 'rat' in line 3")


@pytest.mark.parametrize("decode", ["once", "always"])
def test_lists_of_each_split(folder, decode):
    write(folder / "train.csv", ROWS[:4])
    write(folder / "val.csv", ROWS[4:6])
    data = load(folder, decode=decode)
    assert data.classes == ["cat", "dog"] and data.val_is_test and data.name == "csv"
    assert data.train.labels.tolist() == [0, 1, 0, 1] and data.test.labels.tolist() == [0, 1]
    write(folder / "test.csv", ROWS[:1:-1])
    data = load(folder / "train.csv", decode=decode)  # those beside it count, too
    assert len(data.val) == 2 and data.test.labels.tolist() == [1, 0, 1, 0, 1, 0]
    if decode == "once":
        assert np.array_equal(data.test.images, [noise(8, i) for i in range(7, 1, -1)])


@pytest.mark.parametrize("decode", ["once", "always"])
def test_all_of_a_list_is_for_a_trained_model(folder, decode):
    """Also of one beside others; with some of the model's classes, in the model's order."""
    write(folder / "train.csv", ROWS)
    write(folder / "test.csv", ["images/1.png,dog", "images/3.png,dog"])
    model = {"classes": ["eel", "dog", "cat"], "decode": decode}
    data = load(folder / "train.csv", **model)
    assert data.classes == model["classes"] and data.test.labels.tolist() == [2, 1] * 4
    assert load(folder / "test.csv", **model).test.labels.tolist() == [1, 1]
    write(folder / "test.csv", ["images/1.png,dog", "images/3.png,ox", "images/4.png,yak"])
    refused(folder / "test.csv", "2 labels", "'ox' in line 3, 'yak' in line 4", **model)


def test_columns_are_told_and_another_encoding_is_asked_for(folder):
    (folder / "images" / "0.png").rename(folder / "images" / "ö.png")
    rows = [ROWS[0].replace("0", "ö"), *ROWS[1:]]
    (folder / "any.csv").write_bytes("\n".join(["file,label", *rows]).encode("cp1252"))
    refused(folder / "any.csv", "line 2 is not UTF-8", "'images/ö.png,cat'", test_fraction=0.25)
    data = load(folder / "any.csv", test_fraction=0.25, encoding="cp1252")
    assert len(data.train) == 6 and data.skipped == 0
    told = "any.csv with files in column 1 (file) and classes in 2 (label), read as cp1252"
    assert told in data.source


@pytest.mark.parametrize("word", ["valid", "validation"])
def test_other_names_of_val(folder, word):
    write(folder / "train.csv", ROWS[:4])
    write(folder / f"{word}.csv", ROWS[4:6])
    assert load(folder).val_is_test
    write(folder / "test.csv", ROWS[6:])
    data = load(folder / "train.csv")
    assert len(data.val) == 2 and len(data.test) == 2
    write(folder / "val.tsv", ROWS[4:6])
    refused(folder, f"both val.tsv and {word}.csv")


def test_a_test_list_without_labels(folder):
    """As of a competition."""
    write(folder / "train.csv", ROWS[:4])
    write(folder / "test.csv", ["images/6.png", "images/7.png"], "image_id")
    note = "test.csv has no classes: 2 pictures for --predict"
    for settings in ({}, {"test_fraction": 0.5}):  # a part of the others is held out
        data = load(folder, **settings)
        assert (len(data.train), len(data.test), data.notes[0]) == (2, 2, note)
    (folder / "test.csv").unlink()
    assert load(folder).fingerprint == load(folder, test_fraction=0.2).fingerprint
    for rows in (["images/6.png,", "images/7.png,"], ["images/6.png,3", "images/7.png,4"]):
        write(folder / "test.csv", rows, "file,label" if rows[0].endswith(",") else "file,width")
        assert load(folder).notes[0] == note
    write(folder / "val.csv", ROWS[4:6])
    data = load(folder)
    assert data.val_is_test and len(data.test) == 2 and data.notes[0] == note
    write(folder / "val.csv", ["images/6.png"], "image_id")
    refused(folder, "val.csv has the columns image_id", "with --label_column")


@pytest.mark.parametrize(
    "files, names, header, settings",
    [
        ("train/{i}.png", "{i}", "id,breed", {}),
        ("train_images/a.{i}.v2.{e}", "a.{i}.v2", "image_id,label", {}),  # endings of several kinds
        ("train/train/{i}.png", "{i}.png", "Image,Id", {}),  # as archives are unpacked
        ("images/{i}.PNG", "{i}.png", "file,label", {}),
        ("images/{i}.png", r"C:\Users\me\images\{i}.png", "path,label", {}),
        ("part_{k}/{i}.png", "/input/all/{i}.png", "path,label", {}),  # of another machine
        ("a/{i}.png", "{i}", "key,kind,site", {"image_column": "1", "label_column": "kind"}),
        ("a/{i}.png", "{i}", "key,kind,site", {"image_dir": "a", "label_column": "2"}),
        ("../a/{i}.png", "{i}.png", "file,label", {"image_dir": "../a"}),
    ],
)
def test_pictures_and_columns_are_found_where_there_is_no_doubt(
    folder, files, names, header, settings
):
    (folder / "test").mkdir()
    for i in range(8):
        path = folder / files.format(i=i, k=i % 2, e=["png", "PNG", "bmp"][i % 3])
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(noise(8, i))
        picture.save(path)
        picture.save(folder / "test" / path.name)  # not of this list
    for path in (folder / "images").glob("*.png"):
        if not files.startswith("images/{i}.png"):
            path.unlink()
    site = ",s" * header.count("site")
    write(folder / "train.csv", [f"{names.format(i=i)},c{i % 2}{site}" for i in range(8)], header)
    data = load(folder, **settings)
    assert data.classes == ["c0", "c1"] and (len(data.train), len(data.test)) == (6, 2)
    assert any("is taken for" in note for note in data.notes) or "image_dir" in settings
    write(folder / "test.csv", [names.format(i=3)], header.split(",")[0])
    assert load(folder, **settings).fingerprint == data.fingerprint


def test_a_list_to_be_predicted_has_a_row_for_each_of_its_rows(folder):
    (folder / "test").mkdir()
    for i in (3, 4):
        (folder / "images" / f"{i}.png").rename(folder / "test" / f"{i}.png")
    write(folder / "test.csv", ["4", "9", ",", "3.png", "4", "3,x,y"], "image_id")
    asked = {"image_column": None, "image_dir": None, "encoding": None}
    with pytest.raises(UserError, match="such as '9' in line 3: add them"):
        listed_pictures(folder / "test.csv", "error", **asked, note=print)
    notes = []
    names, paths = listed_pictures(folder / "test.csv", "skip", **asked, note=notes.append)
    assert names == ["4", "9", "", "3.png", "4", ""] and len(notes) == 2
    assert [paths[i] for i in (0, 3, 4)] == [f"{folder}/test/{i}.png" for i in (4, 3, 4)]
    write(folder / "sample_submission.csv", ["3,0.5,0.5", "4,0.5,0.5"], "id,cat,dog")
    names, paths = listed_pictures(folder / "sample_submission.csv", "error", **asked, note=print)
    assert names == ["3", "4"] and paths == [f"{folder}/test/{i}.png" for i in (3, 4)]


def test_what_is_in_doubt_is_asked(folder):
    write(folder / "train.csv", [f"{i},{'ab'[i % 2]}" for i in range(8)])
    shutil.copytree(folder / "images", folder / "small")
    refused(folder, "line 2: 0 may be images/0.png or small/0.png", "--image_dir")
    whole = load(folder, image_dir="images")
    (folder / "images" / "3.bmp").write_bytes((folder / "images" / "3.png").read_bytes())
    refused(folder, "line 5: 3 may be images/3.bmp or images/3.png", image_dir="images")
    assert load(folder, image_dir="small").fingerprint == whole.fingerprint
    refused(folder, "--image_dir nothing: there is no such folder", image_dir="nothing")
    refused(folder, "no column 'kind' (--label_column): it has file, label", label_column="kind")
    write(folder / "train.csv", [f"{i},u{i},{i // 4}" for i in range(8)], "key,url,fold")
    refused(folder, "columns key, url, fold: name that of the pictures' files with --image_column")
    settings = {"image_dir": "small", "image_column": "key"}
    refused(folder, "name that of the classes with --label_column", **settings)
    assert load(folder, **settings, label_column="fold").classes == ["0", "1"]


def test_classes_in_several_columns_and_captions_are_no_classes(folder):
    rows = [
        f"images/{i}.png,{int(i % 3 == 0)},{int(i % 3 == 1)},{int(i % 3 == 2)}" for i in range(8)
    ]
    write(folder / "train.csv", rows, "image_id,healthy,rust,scab")
    refused(folder, "classes in several columns", "df[['healthy', 'rust', 'scab']].idxmax(axis=1)")
    write(folder / "train.csv", [f"images/{i}.png,a picture {i}" for i in range(8)], "file,caption")
    refused(folder, "columns file, caption: name that of the classes with --label_column")


def test_a_list_that_is_named(folder):
    write(folder / "any.csv", ROWS)
    data = load(folder / "any.csv", test_fraction=0.25)
    assert (len(data.train), len(data.test)) == (6, 2)
    assert "a fifth is held out as test set" in load(folder / "any.csv").source
    refused(folder, "has no train.csv")
    refused(folder / "nothing.csv", "nothing.csv is not there")


@pytest.mark.parametrize(
    "name, header, row",
    [
        ("train.csv", "id;Label;extra;Image_Path", "7;{label};x,y;images/{i}.png"),
        ("train.tsv", "class id\tfilename\tclass_name", "{i}\timages/{i}.png\t{label}"),
        ("train.csv", '"label","image"', '"{label}","images/{i}.png"'),
        ("train.csv", None, "images/{i}.png,{label}"),
        ("train.csv", None, "{label} , images/{i}.png"),
        ("train.csv", "path,category", "{folder}/images/{i}.png,{label}"),  # absolute
    ],
)
def test_columns_and_delimiters(folder, name, header, row):
    names = ["a cat", "dog"]
    rows = [row.format(i=i, label=names[i % 2], folder=folder) for i in range(8)]
    write(folder / name, rows, header)
    write(folder / "test.csv", ROWS[:1], "file,label")
    refused(folder, "test.csv has 1 label", "'cat' in line 2")
    write(folder / "test.csv", ["images/3.png,a cat"], "file,label")
    data = load(folder)
    assert data.classes == names and data.train.labels.tolist() == [0, 1] * 4
    assert np.array_equal(data.train.images, [noise(8, i) for i in range(8)])


def test_numbers_are_sorted_as_such_and_may_have_names(folder):
    write(folder / "train.csv", [f"images/{i}.png,{(2, 10)[i % 2]}" for i in range(6)])
    write(folder / "test.csv", ["images/7.png,10"])
    assert load(folder).classes == ["2", "10"]
    (folder / "classes.txt").write_text("".join(f"class {i}\n" for i in range(11)))
    data = load(folder)
    assert data.classes == ["class 2", "class 10"] and data.test.labels.tolist() == [1]


def test_names_that_are_alike_get_their_numbers(folder):
    write(folder / "train.csv", [f"images/{i}.png,{(0, 3, 4)[i % 3]}" for i in range(6)])
    write(folder / "test.csv", ["images/7.png,4"])
    (folder / "classes.txt").write_text("crane\nmaillot\nmaillot\nox\ncrane\n")
    assert load(folder).classes == ["crane (0)", "ox", "crane (4)"]


@pytest.mark.parametrize("decode", ["once", "always"])
def test_a_file_that_is_listed_twice(folder, decode):
    """No picture gets into both splits; in a training list repeats may be meant."""
    write(folder / "any.csv", [*ROWS, *ROWS, f"./{ROWS[0]}", f"{folder}/{ROWS[1]}"])
    data = load(folder / "any.csv", test_fraction=0.25, decode=decode)
    assert (len(data.train), len(data.test)) == (6, 2)
    assert "without 10 repeated lines of any.csv" in data.source
    write(folder / "any.csv", ROWS)
    alone = load(folder / "any.csv", test_fraction=0.25, decode=decode)
    assert alone.fingerprint == data.fingerprint and "repeated" not in alone.source
    write(folder / "train.csv", [*ROWS[:4], ROWS[1]])
    write(folder / "test.csv", [*ROWS[4:], ROWS[4]])
    data = load(folder, decode=decode)
    assert data.train.labels.tolist() == [0, 1, 0, 1, 1] and len(data.test) == 5
    assert "with 1 repeated line of train.csv" in data.source


def test_another_class_of_the_same_file_is_noticed(folder):
    write(folder / "test.csv", ROWS)
    for decode in ("once", "always"):
        write(folder / "train.csv", ROWS)
        first = load(folder, decode=decode)
        write(folder / "train.csv", [*ROWS[:7], "images/7.png,cat"])
        second = load(folder, decode=decode)
        assert second.fingerprint != first.fingerprint and second.train.labels[7] == 0


@pytest.mark.parametrize(
    "rows, header, problem",
    [
        ([], "file,label", "lists no pictures"),
        ([], None, "is empty: give a file with a row for each picture"),
        (["images/1.png,cat", "images/2.png"], "file,label", "line 3 has 1 columns"),
        (["images/1.png,cat", "images/2.png,"], "file,label", "line 3 has no label"),
        ([",cat"], "file,label", "line 2 has no file"),
        (['"images/1.png,cat'], "file,label", "line 2 has a quote that is never closed"),
        (["images/1.png,cat"], "file,label", "has only the class 'cat'"),
        (["x.png,cat", "y.png,dog"], "file,label", "2 of 2 pictures of"),
        ([f"{300 * 'w'},cat"], None, "name that of the pictures' files with --image_column"),
        (ROWS, "file,label,", "line 1 has 3 columns"),
        (["images/1.png,cat"], "where,what,why", "has the columns where, what, why: name that of"),
        (["images/1.png,cat", "a\0b,dog"], "file,label", "a b"),
        (
            [*ROWS[:2], "images/../images/0.png,dog", "images/0,dog"],
            "file,label",
            "4 give images/../images/0.png the labels 'cat' and 'dog', and 1 other line likewise",
        ),
    ],
)
def test_what_is_wrong_with_a_list(folder, rows, header, problem):
    write(folder / "train.csv", rows, header)
    if not rows and not header:
        (folder / "train.csv").write_text("")
    refused(folder, folder, problem, test_fraction=0.5)


def test_a_file_that_is_not_there_is_a_bad_picture(folder):
    write(folder / "train.csv", [*ROWS, "images/9.png,cat", "images,cat"])
    write(folder / "test.csv", ROWS[:2])
    for decode in ("once", "always"):
        missing = "1 of 10 pictures of", "such as 'images/9.png' in line 10"
        refused(folder, *missing, "--on_bad skip", decode=decode)
        data = load(folder, decode=decode, on_bad="skip")
        assert missing[1] in data.notes[0]
        assert data.skipped == 2 and len(data.train) == 8


def test_two_unicode_forms_of_a_label_are_one_class(folder):
    forms = [normalize(form, "café") for form in ("NFC", "NFD")]
    rows = [f"images/{i}.png,{[*forms, 'bar'][i % 3]}" for i in range(6)]
    write(folder / "train.csv", rows)
    write(folder / "test.csv", [f"images/6.png,{forms[1]}"])
    data = load(folder)
    assert data.classes == ["bar", forms[0]] and data.train.labels.tolist() == [1, 1, 0] * 2
    assert data.test.labels.tolist() == [1] and "two Unicode forms" in data.notes[0]
    write(folder / "train.csv", [row for row in rows if forms[0] not in row])
    assert load(folder).classes == ["bar", forms[1]]  # as before
