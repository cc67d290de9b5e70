"""Image folders: layouts, names, and files that cannot be decoded."""

import errno
import io
import json
import os
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from unicodedata import normalize

import numpy as np
import pytest
from picture_trees import load, make_tree, noise, refused
from PIL import BmpImagePlugin, Image

from utils.data.images import cache as image_cache
from utils.data.images import decode as decode_module
from utils.data.images import decoded, file_formats, listing, scanning

ROOT = Path(__file__).resolve().parents[3]


def test_train_and_test(tree):
    data = load(tree)
    assert data.classes == ["cat", "dog"] and data.val is None and data.skipped == 0
    assert data.train.images.shape == (8, 8, 8, 3) and len(data.test) == 8
    assert data.train.labels.tolist() == [0] * 4 + [1] * 4
    assert np.array_equal(data.train.images[5], noise(8, 5))
    assert np.array_equal(data.test.images[0], noise(8, 8))
    pixels = np.stack([noise(8, seed) for seed in range(8)]).reshape(-1, 3) / 255
    np.testing.assert_allclose(data.mean, pixels.mean(0))
    np.testing.assert_allclose(data.std, pixels.std(0))


def test_val_is_the_test_set_only_where_there_is_no_other(tmp_path):
    three = load(make_tree(tmp_path / "three", ("train", "test", "val")))
    two = load(make_tree(tmp_path / "two", ("train", "val")))
    assert len(three.val) == 8 and not np.array_equal(three.val.images, three.test.images)
    assert two.val is None and len(two.test) == 8


@pytest.mark.parametrize("word", ["valid", "validation"])
def test_other_names_of_val(tmp_path, word):
    """Roboflow and Keras call it so."""
    two = make_tree(tmp_path / "two", ("train", word))
    data = load(two)
    assert data.val_is_test and np.array_equal(data.test.images[0], noise(8, 8))
    refused(two, f"which has {word}/", test_fraction=0.2)
    data = load(make_tree(tmp_path / "three", ("train", word, "test")))
    assert np.array_equal(data.val.images[0], noise(8, 8)) and len(data.test) == 8
    make_tree(two, ("val",))
    refused(two, f"both val/ and {word}/")


def test_a_class_may_be_called_valid(tmp_path):
    root = make_tree(tmp_path / "tickets", ("",), classes=("invalid", "valid"))
    assert load(root, test_fraction=0.5).classes == ["invalid", "valid"]


def shown(split):
    (pictures,) = split.chunks(len(split))
    return pictures


def test_a_fifth_of_a_tree_without_a_test_set_is_held_out_and_said(tmp_path):
    root = make_tree(tmp_path / "pictures", ("train",), per_class=10)
    for place in (root, root / "train"):
        data = load(place)
        assert np.bincount(data.test.labels).tolist() == [2, 2]
        assert "a fifth is held out as test set (--test_fraction" in data.source
        assert load(place, test_fraction=0.2).fingerprint == data.fingerprint


@pytest.mark.parametrize("inner", ["", "images", "unknown", "test"])
def test_a_flat_test_folder_is_for_predictions(tmp_path, inner):
    tree = make_tree(tmp_path / "tree", ("train", "test"))
    alone = make_tree(tmp_path / "alone", ("train",))
    (tree / "flat" / inner).mkdir(parents=True)
    for i, path in enumerate(sorted((tree / "test").glob("*/*"))):
        path.rename(tree / "flat" / inner / f"{i}.png")
    shutil.rmtree(tree / "test")
    (tree / "flat").rename(tree / "test")
    (tree / "test.csv").write_text("image_id\n" + "".join(f"{i}\n" for i in range(8)))
    for settings in ({}, {"test_fraction": 0.25}):
        data = load(tree, **settings)
        assert data.notes[0] == "test/ has no classes: 8 pictures for --predict"
        assert data.fingerprint == load(alone, **settings).fingerprint


@pytest.mark.parametrize("below", ["", "train"])
def test_a_single_tree_is_divided(tmp_path, no_decoding, monkeypatch, below):
    root = tmp_path / "pictures"
    make_tree(root, (below,), per_class=10)
    data = load(root, test_fraction=0.3)
    no_decoding()  # one cache serves every division
    other = load(root, test_fraction=0.4)
    monkeypatch.setattr(listing, "channel_statistics", None)  # they are kept, too
    again = load(root, test_fraction=0.3)
    assert (again.mean, again.std) == (data.mean, data.std) != (other.mean, other.std)
    assert np.bincount(data.train.labels).tolist() == [7, 7]
    assert np.bincount(data.test.labels).tolist() == [3, 3]
    assert data.fingerprint == again.fingerprint != other.fingerprint
    assert np.array_equal(shown(data.test), shown(again.test))
    assert len(other.test) == 8
    together = {picture.tobytes() for picture in [*shown(data.train), *shown(data.test)]}
    assert together == {noise(8, seed).tobytes() for seed in range(20)}
    # Neither part is a copy: both are rows of one cache.
    assert isinstance(data.train.images, np.memmap) and data.train.images is data.test.images
    pixels = shown(data.train).reshape(-1, 3) / 255
    np.testing.assert_allclose(data.mean, pixels.mean(0))
    np.testing.assert_allclose(data.std, pixels.std(0))


def test_the_cache_of_a_divided_tree_may_be_read_only(tmp_path, monkeypatch):
    root = make_tree(tmp_path / "pictures", ("",), per_class=10)
    load(root, test_fraction=0.3)

    def refuse(path, content):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(decoded, "replace_file", refuse)
    pixels = shown(load(root, test_fraction=0.4).train).reshape(-1, 3) / 255
    np.testing.assert_allclose(load(root, test_fraction=0.4).mean, pixels.mean(0))


@pytest.mark.parametrize("decode", ["once", "always"])
@pytest.mark.parametrize("splits", [("",), ("test",), ("train", "test"), ("train", "valid")])
def test_all_of_a_tree_is_for_a_trained_model(tmp_path, splits, decode):
    """With some of the model's classes, in the model's order."""
    root = make_tree(tmp_path / "new", splits)
    model = {"classes": ["eel", "dog", "cat"], "decode": decode, "image_size": 8}
    data = load(root, **model)
    assert data.classes == model["classes"] and data.val is None
    assert data.test.labels.tolist() == ([2] * 4 + [1] * 4) * len(splits)
    counts = ", ".join(f"8 pictures of {split}/" for split in splits)
    assert data.notes == ([f"measured are {counts}"] if splits[0] else [])
    refused(root, "2 classes that the training pictures", "('cat', 'dog')", classes=["eel", "ox"])


def test_a_trained_model_may_have_a_class_called_train(tmp_path):
    names = ["cat", "dog", "train"]
    root = make_tree(tmp_path / "new", ("train",), classes=names)
    assert len(load(root, classes=names).test) == 12  # of the folders in train/
    flat = make_tree(tmp_path / "flat", ("",), classes=names)
    assert load(flat, classes=names).test.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    make_tree(flat, ("val",), classes=("cat",))
    refused(flat, "has the class 'cat' beside val/", classes=names)


def test_a_single_class_and_pictures_without_one_beside_a_trained_model(tmp_path):
    root = make_tree(tmp_path / "new", ("val",), classes=("cat",))
    (root / "test").mkdir()
    shutil.copy(root / "val" / "cat" / "000.png", root / "test")
    data = load(root, classes=["cat", "dog"])
    assert data.test.labels.tolist() == [0] * 4
    assert data.notes == [
        "measured are 4 pictures of val/, none of test/, whose classes are not known"
    ]
    refused(root / "test", "no class folders", "move the folder away", classes=["cat", "dog"])


def test_a_cache_inside_the_tree_is_no_class(tmp_path):
    root = make_tree(tmp_path, ("",))
    for _ in range(2):
        data = load(root, test_fraction=0.5, cache_dir=root / "cache")
        assert data.classes == ["cat", "dog"]


def test_a_class_may_be_called_train(tmp_path):
    root = make_tree(tmp_path / "vehicles", ("",), classes=("bus", "train"))
    assert load(root, test_fraction=0.5).classes == ["bus", "train"]


def test_nested_folders_links_and_files_to_ignore(tree):
    cat = tree / "train" / "cat"
    (cat / "more" / "still more").mkdir(parents=True)
    Image.fromarray(noise(8, 99)).save(cat / "more" / "still more" / "deep.png")
    (cat / "more" / "loop").symlink_to(cat)
    elsewhere = tree.parent / "elsewhere"
    elsewhere.mkdir()
    Image.fromarray(noise(8, 98)).save(elsewhere / "linked.png")
    (elsewhere / "back").symlink_to(cat)
    (cat / "zz").symlink_to(elsewhere)
    for name in (".hidden.png", "Thumbs.db", "desktop.ini", ".DS_Store", "notes.txt", "a.jpg.part"):
        (cat / name).write_text("no picture")
    (tree / "train" / "README.txt").write_text("beside the classes")
    (tree / "train" / ".ipynb_checkpoints").mkdir()
    data = load(tree)
    assert data.classes == ["cat", "dog"] and data.train.labels.tolist() == [0] * 6 + [1] * 4
    assert np.array_equal(data.train.images[4], noise(8, 99))  # more/... < zz/...
    assert np.array_equal(data.train.images[5], noise(8, 98))
    assert data.skipped == 0 and data.notes == [
        "6 files passed over, which are no pictures by their names: cat/.DS_Store, ..."
    ]


def test_a_picture_needs_no_ending(tree):
    Image.fromarray(noise(8, 1)).save(tree / "train" / "cat" / "zz", format="png")
    data = load(tree)
    assert len(data.train.labels) == 9 and data.notes == []
    (tree / "train" / "dog" / "zz").write_text("no ending that says that it is no picture")
    refused(tree, "zz", "not a readable picture")


HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(500)


def test_pictures_in_formats_that_are_not_read_are_named(tree):
    cat = tree / "train" / "cat"
    for name, content in {"a.HEIC": HEIC, "b.heic": HEIC, "c.NEF": b"raw", "d.txt": b""}.items():
        (cat / name).write_bytes(content)
    assert load(tree).notes == [
        "4 files passed over, which are no pictures by their names: cat/a.HEIC, ...; 2 .heic (pip "
        "install pi-heif, or convert to JPEG); 1 .nef (convert to JPEG or PNG)"
    ]
    for path in cat.glob("*.png"):
        path.unlink()
    refused(tree, cat, "no picture that can be read: 2 .heic (pip install pi-heif")
    (cat / "named as a.jpg").write_bytes(HEIC)
    refused(tree, "named as a.jpg is not a readable picture (not an image of a known format")


@pytest.mark.parametrize("decode", ["once", "always"])
def test_heic_is_read_where_its_package_is_installed(tree, monkeypatch, decode):
    class Package(ModuleType):
        @staticmethod
        def register_heif_opener():
            Image.register_open("HEIF", lambda *_: BmpImagePlugin.BmpImageFile(io.BytesIO(bmp)))

    package = Package("pi_heif")
    package.__spec__ = ModuleSpec("pi_heif", None)
    monkeypatch.setitem(sys.modules, "pi_heif", package)
    file_formats.picture_endings.cache_clear()
    file_formats._known_formats.cache_clear()
    file = io.BytesIO()
    Image.fromarray(noise(8, 5)).save(file, "BMP")
    bmp = file.getvalue()
    (tree / "train" / "cat" / "zz.HEIC").write_bytes(HEIC)
    try:
        data = load(tree, decode=decode, image_size=8)
        split = data.train.part(np.array([4]))
        assert np.array_equal(split.picture(split.rows[0]), noise(8, 5)) and data.notes == []
    finally:
        del Image.OPEN["HEIF"]
        Image.ID.remove("HEIF")
        (
            file_formats.picture_endings.cache_clear(),
            file_formats._known_formats.cache_clear(),
        )


def test_two_unicode_forms_of_a_name_are_one_class(tree):
    for split, form in (("train", "NFC"), ("train", "NFD"), ("test", "NFD")):
        folder = tree / split / normalize(form, "café")
        folder.mkdir()
        Image.fromarray(noise(8, 50 + len(str(folder)))).save(folder / "1.png")
    data = load(tree)
    assert data.classes == [normalize("NFC", "café"), "cat", "dog"]
    assert data.train.labels.tolist() == [0] * 2 + [1] * 4 + [2] * 4
    assert data.test.labels.tolist() == [0] + [1] * 4 + [2] * 4
    assert "the class 'café' is written in two Unicode forms" in data.notes[0]
    shutil.rmtree(tree / "train" / normalize("NFC", "café"))
    assert load(tree).classes == [normalize("NFD", "café"), "cat", "dog"]  # as before


def test_trees_that_cannot_be_used(tree, tmp_path):
    refused(tmp_path / "nowhere", "nowhere", "--data_dir", "train/<class>/")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no class folders")
    refused(tree, "--test_fraction has no effect", test_fraction=0.1)
    refused(make_tree(tmp_path / "one", classes=("cat",)), "pictures of one class alone, 'cat'")
    refused(make_tree(tmp_path / "no train", ("test",)), "no train/")
    (tree / "test" / "owl").mkdir()
    refused(tree, "owl", "training pictures do not have")
    (tree / "train" / "owl").mkdir()
    refused(tree, tree / "train" / "owl", "has no pictures")


def test_all_faults_of_a_tree_are_told_at_once(tree):
    for name in ("train/owl", "train/rat", "test/crow"):
        (tree / name).mkdir()
    owl, rat, crow = (tree / "train" / "owl", tree / "train" / "rat", "test has 1 class that")
    empty = (f"{owl} has no pictures", f"{rat} has no pictures")
    refused(tree, "3 faults: (1) ", *empty, "(3) ", crow, "'crow'")
    shutil.rmtree(tree / "train" / "cat")
    (tree / "train" / "dog" / "000.png").rename(tree / "train" / "loose.png")
    (tree / "train" / "dog" / "001.png").write_text("no picture")
    told = ("1 picture beside", "such as loose.png", "one class alone, 'dog'", "001.png is not a")
    refused(tree, "6 faults", *told)


@pytest.mark.parametrize("decode", ["auto", "always"])
def test_all_bad_files_are_told_at_once(tree, decode):
    for path in (bad := sorted((tree / "train" / "cat").iterdir())):  # the whole class
        path.write_text("no picture")
    refused(tree, "4 ", "cannot be read: ", *bad, "(not an image", "--on_bad skip", decode=decode)
    for number in range(7):
        (tree / "train" / "dog" / f"{number}.png").write_text("no picture")
    refused(tree, "11 ", "format), ...: remove them", decode=decode)


def test_class_of_one_cannot_be_divided(tmp_path):
    root = make_tree(tmp_path / "pictures", ("",))
    (root / "owl").mkdir()
    Image.fromarray(noise()).save(root / "owl" / "only.png")
    refused(root, "class 'owl' has only one sample", test_fraction=0.5)


def test_common_small_size_is_kept_and_others_become_224(tmp_path):
    assert load(make_tree(tmp_path / "small", side=12)).train.images.shape[1:] == (12, 12, 3)
    mixed = make_tree(tmp_path / "mixed", ("train",), side=12)
    make_tree(mixed, ("test",), side=9)
    assert load(mixed).test.images.shape[1:] == (12, 12, 3)
    big = make_tree(tmp_path / "big", side=65, per_class=1)
    assert load(big).train.images.shape[1:] == (224, 224, 3)
    assert load(big, image_size=5).train.images.shape[1:] == (5, 5, 3)


def spoil(path, kind):
    if kind == "text":
        path.write_text("this is no picture")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "truncated":
        Image.fromarray(noise(32)).save(path)
        path.write_bytes(path.read_bytes()[:-500])
    elif kind == "bomb":
        Image.new("1", (1000, 1000)).save(path)
    elif kind == "float":
        Image.fromarray(np.ones((8, 8), np.float32)).save(path, format="tiff")
    elif kind == "postscript":  # Pillow would start another program to read it
        Image.fromarray(noise()).save(path, format="eps")
    elif kind == "broken link":
        path.symlink_to("nowhere.png")
    elif kind == "pipe":
        os.mkfifo(path)


@pytest.mark.parametrize(
    "kind",
    ["text", "empty", "truncated", "bomb", "float", "postscript", "broken link", "pipe"],
)
def test_bad_file_is_named_or_skipped(tree, monkeypatch, kind):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 600_000)  # Pillow only warns of the bomb then
    bad = tree / "train" / "cat" / "001 bad.png"
    spoil(bad, kind)
    refused(tree, bad, "not a readable picture", "--on_bad skip")
    data = load(tree, on_bad="skip")
    assert data.skipped == 1
    assert data.train.images.shape == (8, 8, 8, 3)
    assert data.train.labels.tolist() == [0] * 4 + [1] * 4
    assert np.array_equal(data.train.images[2], noise(8, 2))
    (index,) = (tree.parent / "cache").glob("*/index.json")
    assert str(bad) in json.loads(index.read_text())["skipped_first"][0]
    # With that cache, a run without --on_bad skip still reports the file.
    refused(tree, bad, "has 1 file that cannot be decoded", "--on_bad skip")
    assert load(tree, on_bad="skip").skipped == 1


PASSING = [
    PermissionError(errno.EACCES, "Permission denied"),
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.EMFILE, "Too many open files"),
]


@pytest.mark.parametrize("error", PASSING, ids=repr)
@pytest.mark.parametrize("decode", ["once", "always"])
def test_an_error_that_may_pass_leaves_no_picture_out(tree, monkeypatch, decode, error):
    path = tree / "train" / "cat" / "001.png"
    module, name = (decode_module, "decode") if decode == "once" else (scanning, "measure")
    working = getattr(module, name)

    def failing(source, *rest):
        if path.samefile(getattr(source, "name", source)):
            raise error
        return working(source, *rest)

    monkeypatch.setattr(module, name, failing)
    for on_bad in ("skip", "error"):
        refused(tree, f"cannot read {path}: {error.strerror}", decode=decode, on_bad=on_bad)
    monkeypatch.undo()
    for on_bad in ("skip", "error"):
        data = load(tree, decode=decode, on_bad=on_bad)
        assert (len(data.train), data.skipped) == (8, 0)


def test_a_place_that_no_file_has_is_the_fault_of_the_picture(tree, monkeypatch):
    """A damaged TIFF may name one."""
    working = decode_module.decode

    def failing(path, *rest):
        if path.endswith("train/cat/001.png"):
            raise OSError(errno.EINVAL, "Invalid argument")
        return working(path, *rest)

    monkeypatch.setattr(decode_module, "decode", failing)
    assert load(tree, on_bad="skip").skipped == 1


def test_nothing_readable_left(tree):
    for path in (tree / "train" / "cat").iterdir():
        path.write_text("no picture")
    refused(tree, "no readable picture is left in class 'cat'", on_bad="skip")
    assert not list((tree.parent / "cache").iterdir())


def test_many_files_in_several_chunks(tmp_path, monkeypatch):
    root = make_tree(tmp_path / "pictures", per_class=20, side=4)
    bad = [root / "train" / "cat" / f"{index:03}.png" for index in (0, 3, 4, 5, 19)]
    for path in bad:
        path.write_text("no picture")
    chunks = image_cache.decode_all
    monkeypatch.setattr(
        image_cache, "decode_all", lambda paths, size, *_: in_threes(chunks, paths, size)
    )
    data = load(root, on_bad="skip", image_size=4)
    assert data.skipped == 5 and len(data.train) == 35
    kept = [seed for seed in range(40) if seed not in (0, 3, 4, 5, 19)]
    assert np.array_equal(data.train.images, np.stack([noise(4, seed) for seed in kept]))
    refused(root, bad[0], image_size=4)


def in_threes(decode_all, paths, size):
    for start in range(0, len(paths), 3):
        yield from decode_all(paths[start : start + 3], size, 2)


def test_order_does_not_depend_on_the_number_of_threads(tmp_path):
    root = make_tree(tmp_path / "pictures", per_class=300, side=4)
    sets = [load(root, workers=workers, cache_dir=tmp_path / f"{workers}") for workers in (1, 7)]
    assert sets[0].fingerprint == sets[1].fingerprint


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_spaces_and_other_letters_in_names(tmp_path, locale):
    root = make_tree(
        tmp_path / "Bilder für später 图片", classes=("groß e Katze", "犬"), per_class=1
    )
    os.rename(
        os.fsencode(root / "train" / "犬" / "000.png"),
        os.fsencode(root / "train" / "犬") + b"/\xff not UTF-8.png",
    )
    (root / "train" / "犬" / "schlecht ü.png").write_text("no picture")
    code = (
        "import sys; from pathlib import Path;"
        "from utils.data.images.sources import PictureRequest, load_image_data;"
        "request = PictureRequest(Path(sys.argv[1]), Path(sys.argv[2]), on_bad='skip');"
        "data = load_image_data('imagefolder', request);"
        "print(data.classes, len(data.train), data.skipped, data.source)"
    )
    environment = {**os.environ, "LC_ALL": locale, "PYTHONPATH": str(ROOT)}
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", code, root, tmp_path / "Ablage ü"],
            env=environment,
            capture_output=True,
        )
        assert run.returncode == 0, run.stderr.decode()
        assert "['groß e Katze', '犬'] 2 1" in run.stdout.decode()
