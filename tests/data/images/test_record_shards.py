"""Shards of encoded pictures: tar and TFRecord, ours and others', whole and damaged."""

import errno
import io
import json
import os
import shutil
import struct
import sys
import tarfile

import numpy as np
import pytest
from data.images.kills import killed_at
from data.images.picture_sources import CLASSES, write_source
from data.images.picture_trees import make_tree, noise
from data.images.test_encoded import encoded, inputs, loader, smooth
from PIL import Image
from small_disks import full_disk

from utils.data.images import pack, scanning, tar, tfrecord
from utils.data.images.image_data import PictureRequest
from utils.data.images.records import File
from utils.data.images.sources import load_image_data
from utils.errors import UserError


@pytest.fixture
def tree(tmp_path):
    return make_tree(tmp_path / "pictures", per_class=6)


def packed(tree, to="tar", shard_bytes=700):
    """The shards of a tree; TFRecords in one for each split."""
    output = tree.parent / to
    if to == "tar":
        pack.pack(tree, output, shard_bytes, progress=False)
    for split in ("train", "test") if to == "tfrecord" else ():
        paths = sorted(tree.glob(f"{split}/*/*"))
        samples = [(path.read_bytes(), CLASSES.index(path.parent.name)) for path in paths]
        write_source(to, output, {split: samples})
    return output


def load(folder, kind, **settings):
    settings = {"cache_dir": folder.parent / "cache", "workers": 2, "progress": False, **settings}
    return load_image_data(kind, PictureRequest(folder, **settings))


def refused(folder, kind, *parts, **settings):
    with pytest.raises(UserError) as error:
        load(folder, kind, **settings)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message, message


def members(*pairs):
    """A tar file with these (name, content)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in pairs:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def field(number, content):
    """Of a protobuf message; lengths from 128 on take two bytes."""
    size = len(content)
    length = bytes([size & 127 | 128, size >> 7]) if size > 127 else bytes([size])
    return bytes([number << 3 | 2]) + length + content


def framed(content):
    """A TFRecord."""
    length, check = struct.pack("<Q", len(content)), tfrecord.checksum()
    checks = (struct.pack("<I", check(part)) for part in (length, content))
    return length + next(checks) + content + next(checks)


def png(seed=0):
    return encoded(Image.fromarray(noise(8, seed)), "PNG")


# ---- whole shards --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tar", "tfrecord"])
def test_what_is_packed_is_read_again(tree, kind):
    folder = packed(tree, kind)
    shards = sorted(folder.glob("train-*"))
    if kind == "tar":
        assert len(shards) > 1 and shards[0].name == f"train-00000-of-{len(shards):05}.tar"
    plain = load(tree, "imagefolder", decode="once")
    data = load(folder, kind)
    assert data.classes == plain.classes and len(data.train) == 12 and len(data.test) == 4 * 3

    def pictures(data, split):
        labels = split.labels[:, None].astype(np.float32)
        rows = inputs(loader(data, split)).flatten(1).numpy()
        table = np.concatenate([labels, rows], 1)
        return table[np.lexsort(table.T)]

    for split in ("train", "test"):
        one, other = getattr(plain, split), getattr(data, split)
        assert np.array_equal(pictures(plain, one), pictures(data, other))
    assert (data.mean, data.std) == (plain.mean, plain.std)


def test_a_shard_of_others(tmp_path):
    """Keys with folders and dots, JSON labels, members of other kinds, names that climb out."""
    folder = tmp_path / "shards"
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "000.tar").write_bytes(
        members(
            ("../../a/0.JPG", encoded(smooth(30, 20))),
            ("../../a/0.json", json.dumps({"label": 1}).encode()),
            ("/b/1.png", png(1)),
            ("/b/1.seg.png", b"not looked at"),
            ("/b/1.cls", b"0\n"),
            ("readme", b"text"),
        )
    )
    (folder / "val-0.tar").write_bytes(members(("1.png", png(2)), ("1.cls", b"1")))
    before = sorted(tmp_path.rglob("*"))
    data = load(folder, "tar", cache_dir=tmp_path / "cache", image_size=8)
    assert data.train.labels.tolist() == [1, 0] and data.test.labels.tolist() == [1]
    assert data.train.pictures.sizes(np.arange(2)).tolist() == [[30, 20], [8, 8]]
    assert data.classes == ["0", "1"]
    new = set(tmp_path.rglob("*")) - {*before}
    assert all(path.is_relative_to(tmp_path / "cache") for path in new)


def test_equal_names_in_two_folders_are_two_samples(tmp_path):
    pairs = [(f"{folder}/0.{kind}", content) for label, folder in enumerate("ab")
             for kind, content in (("png", png(label)), ("cls", b"%d" % label))]  # fmt: skip
    (tmp_path / "all.tar").write_bytes(members(*pairs))
    scanned = tar.TarShard([File.at(tmp_path, "all.tar")]).scan(str(tmp_path), thorough=False)
    assert scanned.table["label"].tolist() == [0, 1] and not scanned.bad


def test_pictures_with_rarer_endings_and_hidden_members(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    pairs = []
    for number, ending in enumerate(("jfif", "JP2", "qoi", "png")):
        kind = {"jfif": "JPEG", "JP2": "JPEG2000"}.get(ending, ending)
        picture = encoded(Image.fromarray(noise(8, number)), kind)
        pairs += [(f"{number}.{ending}", picture), (f"._{number}.{ending}", b"of macOS")]
        pairs += [(f"{number}.cls", b"%d" % (number % 2)), ("meta.json", b'{"samples": 4}')]
    for split in ("train", "test"):
        (folder / f"{split}.tar").write_bytes(members(*pairs))
    data = load(folder, "tar")
    assert data.train.labels.tolist() == [0, 1, 0, 1]
    assert np.array_equal(data.test.pictures.decode(np.array([2]))[0], noise(8, 2))


def test_pictures_with_dots_in_their_names_are_counted_one_by_one(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    good = [("1.png", png(1)), ("1.cls", b"0"), ("2.png", png(2)), ("2.cls", b"1")]
    dated = [(f"2026.0{i}.{kind}", content) for i in range(3)
             for kind, content in (("png", png(i)), ("cls", b"0"))]  # fmt: skip
    (folder / "train.tar").write_bytes(members(*good, *dated))
    (folder / "test.tar").write_bytes(members(*good))
    data = load(folder, "tar", on_bad="skip")
    assert data.skipped == 3 and len(data.train) == 2


def test_an_example_of_others_with_labels_from_1(tmp_path):
    """More features than ours, a packed label, and ImageNet's names without an ending."""

    def feature(name, value):
        return field(1, field(1, name) + field(2, value))

    def record(label, seed):
        parts = [
            feature(b"image/height", field(3, b"\x08\x08")),  # not packed
            feature(b"image/class/label", field(3, field(1, bytes([label])))),
            feature(b"image/class/text", field(1, field(1, b"a cat"))),
            feature(b"image/encoded", field(1, field(1, png(seed)))),
        ]
        return framed(field(1, b"".join(parts)))

    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "train-00000-of-00001").write_bytes(record(1, 0) + record(2, 1) + record(2, 2))
    (folder / "validation-00000-of-00001").write_bytes(record(2, 3))
    data = load(folder, "tfrecord")
    assert data.train.labels.tolist() == [0, 1, 1] and data.test.labels.tolist() == [1]
    assert data.classes == ["1", "2"]
    assert np.array_equal(data.test.pictures.decode(np.array([0]))[0], noise(8, 3))
    (folder / "classes.txt").write_text("cat\ndog\n")
    assert load(folder, "tfrecord").classes == ["cat", "dog"]
    (folder / "classes.txt").write_text("crane\ncrane\n")
    assert load(folder, "tfrecord").classes == ["crane (0)", "crane (1)"]


def test_a_shard_that_has_changed_is_indexed_again(tree):
    folder = packed(tree, "tar")
    first = load(folder, "tar")
    shard = next(iter(sorted(folder.glob("train-*"))))
    shard.write_bytes(members(("0.png", png(9)), ("0.cls", b"1")))
    with pytest.raises(UserError, match=f"{shard.name} was changed"):
        inputs(loader(first, first.train))
    assert load(folder, "tar").fingerprint != first.fingerprint


def test_layouts_of_shards(tmp_path, capsys):
    folder = tmp_path / "shards"
    folder.mkdir()
    refused(folder, "tar", "there are no tar shards")
    samples = [(f"{i}.{kind}", content) for i in range(8)
               for kind, content in (("png", png(i)), ("cls", str(i % 2).encode()))]  # fmt: skip
    (folder / "all.tar").write_bytes(members(*samples))
    refused(folder, "tar", "--test_fraction 0.2")
    assert len(load(folder, "tar", test_fraction=0.25, progress=True).test) == 2
    assert capsys.readouterr().err.startswith("indexing 1 file (0 MB), once")
    (folder / "val-0.tar").write_bytes(members(("1.png", png(2)), ("1.cls", b"5")))
    refused(folder, "tar", "all.tar does not tell its split")
    (folder / "all.tar").rename(folder / "train.tar")
    refused(folder, "tar", "label 5", "2 classes")
    refused(folder, "tar", "--test_fraction has no effect", test_fraction=0.5)


# ---- damaged ones --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tar", "tfrecord"])
@pytest.mark.parametrize("kept", [0.4, 0.8, 1])
def test_a_shard_that_was_cut_short(tree, kind, kept):
    folder = packed(tree, kind, shard_bytes=10**6)
    shard = next(folder.glob("train-*"))
    content = shard.read_bytes()
    # A tar file, of two members of two blocks for each picture, ends with empty blocks.
    length = 12 * 4 * 512 if kind == "tar" else len(content) - 1
    shard.write_bytes(content[: int(kept * length)])
    refused(folder, kind, shard, "fetch ", on_bad="skip")


def test_a_flipped_bit_of_a_tfrecord(tree):
    folder = packed(tree, "tfrecord", shard_bytes=10**6)
    shard = next(folder.glob("train-*"))
    content = bytearray(shard.read_bytes())
    content[100] ^= 4
    shard.write_bytes(content)
    refused(folder, "tfrecord", shard, "record at byte 0", "its checksum is wrong")
    data = load(folder, "tfrecord", on_bad="skip")
    assert data.skipped == 1 and len(data.train) == 11
    content[3] ^= 1  # of the first length
    shard.write_bytes(content)
    refused(folder, "tfrecord", shard, "is not a TFRecord", on_bad="skip")


def test_a_flipped_bit_of_a_header_does_not_end_a_tar_file(tree):
    folder = packed(tree, "tar", shard_bytes=10**6)
    shard = next(folder.glob("train-*"))
    content = bytearray(shard.read_bytes())
    third = 2 * 4 * 512  # after two samples of two members of two blocks each
    content[third + 5] ^= 1
    shard.write_bytes(content)
    refused(folder, "tar", shard, f"is damaged at byte {third}", on_bad="skip")


@pytest.mark.parametrize(
    "pairs, problem",
    [
        ([("7.png", b""), ("7.cls", b"0")], "it has no bytes"),
        ([("7.png", b"not one"), ("7.cls", b"0")], "not an image of a known format"),
        ([("7.jpg", encoded(smooth(40, 40))[:-99]), ("7.cls", b"0")], "truncated"),
        ([("7.png", png())], "it has no .cls"),
        ([("7.png", png()), ("7.cls", b"cat")], "no label"),
        ([("7.png", png()), ("7.json", b'{"label": -1}')], "no label"),
        ([("7.png", png()), ("7.json", b"{")], "Expecting"),
        ([("7.v2.png", png()), ("7.v2.cls", b"1")], "has a dot before the ending (.v2.png)"),
        ([("7.heic", b"not read"), ("7.cls", b"1")], "no picture of a known format"),
        ([("7.heic", b"not read"), ("7.json", b'{"label": 1}')], "no picture of a known format"),
    ],
)  # fmt: skip
def test_a_bad_member_is_named_or_left_out(tmp_path, pairs, problem):
    folder = tmp_path / "shards"
    folder.mkdir()
    good = [("1.png", png(1)), ("1.cls", b"0"), ("2.png", png(2)), ("2.cls", b"1")]
    (folder / "train.tar").write_bytes(members(*good, *pairs))
    (folder / "test.tar").write_bytes(members(*good))
    refused(folder, "tar", folder / "train.tar", "member '7'", problem)
    data = load(folder, "tar", on_bad="skip")
    assert data.skipped == 1 and len(data.train) == 2


@pytest.mark.parametrize("kind", ["tar", "tfrecord"])
def test_an_error_that_may_pass_leaves_no_record_out(tree, monkeypatch, kind):
    folder = packed(tree, kind)

    def failing(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(scanning, "measure", failing)
    for on_bad in ("skip", "error"):
        refused(folder, kind, "cannot read", "Input/output error", on_bad=on_bad)
    monkeypatch.undo()
    for on_bad in ("skip", "error"):
        data = load(folder, kind, on_bad=on_bad)
        assert (len(data.train), data.skipped) == (12, 0)


def test_no_record_makes_the_reader_of_examples_fail_otherwise():
    """Whatever the bytes are: a picture and a label, or a ValueError."""
    pairs = ((b"image/encoded", 1, b"picture"), (b"image/class/label", 3, b"\xac\x02"))
    parts = [field(1, field(1, name) + field(2, field(n, field(1, v)))) for name, n, v in pairs]
    whole = field(1, b"".join(parts))
    start, end, label = tfrecord.find_picture(whole)
    assert (whole[start:end], label) == (b"picture", 300)
    rng = np.random.default_rng(0)
    for _ in range(2000):
        broken = bytearray(whole[: rng.integers(0, len(whole) + 1)])
        for place in rng.integers(0, max(1, len(broken)), 3):
            broken[place : place + 1] = bytes([rng.integers(0, 256)])
        try:
            start, end, _ = tfrecord.find_picture(bytes(broken))
        except ValueError:
            continue
        assert 0 <= start <= end <= len(broken)


def test_the_package_for_checksums_is_asked_for(tree, monkeypatch):
    folder = packed(tree, "tfrecord")
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    refused(folder, "tfrecord", "--dataset tfrecord", "pip install google-crc32c")


# ---- packing -------------------------------------------------------------------------------------


def test_packing_that_is_killed_at_any_moment_leaves_all_or_nothing(tree):
    def contents(folder):
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}

    whole, folder = contents(packed(tree, shard_bytes=2000)), tree.parent / "tar"
    moment, done = 0, False
    while not done:
        shutil.rmtree(folder, ignore_errors=True)
        done = killed_at(moment, lambda: packed(tree, shard_bytes=2000))
        assert not folder.exists() or contents(folder) == whole
        moment += 1
        assert moment < 60
    assert moment > 3 and [path.name for path in tree.parent.iterdir() if path != tree] == ["tar"]


def test_packing_on_a_full_disk(tree):
    with full_disk(1000), pytest.raises(UserError, match=r"cannot write .*tar: File too large"):
        packed(tree, shard_bytes=1500)
    assert [path.name for path in tree.parent.iterdir()] == ["pictures"]
    assert len(load(packed(tree, shard_bytes=1500), "tar").train) == 12


@pytest.mark.parametrize("word", ["valid", "validation"])
def test_a_validation_split_of_another_name_is_packed(tree, word):
    (tree / "test").rename(tree / word)
    data = load(packed(tree, "tar"), "tar")
    assert data.val_is_test and (len(data.train), len(data.test)) == (12, 12)


def test_a_test_folder_without_classes_is_not_packed(tree, capsys):
    make_tree(tree, ("val",), per_class=2)
    for path in list((tree / "test").glob("*/*")):
        path.rename(tree / "test" / f"{path.parent.name}{path.name}")
    for path in (tree / "test").glob("*/"):
        path.rmdir()
    output = tree.parent / "out"
    assert pack.main([str(tree), "--output", str(output)]) == 0
    assert "note: test/ has no classes: 12 pictures for --predict" in capsys.readouterr().out
    assert len(load(output, "tar").test) == 4


def test_a_class_whose_name_is_not_utf_8_is_packed(tmp_path):
    tree = make_tree(tmp_path / "pictures", classes=("a", os.fsdecode(b"caf\xe9")))
    assert load(packed(tree, "tar"), "tar").classes == ["a", "caf\\udce9"]


def test_packing_stops_at_an_error_that_may_pass(tree, monkeypatch):
    def failing(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(pack, "measure", failing)
    with pytest.raises(UserError, match=r"cannot read .*png: Input/output error"):
        pack.pack(tree, tree.parent / "out", 10**6, "skip", progress=False)


def test_what_cannot_be_packed(tree, capsys):
    arguments = [str(tree), "--output"]
    full = tree.parent / "full"
    full.mkdir()
    (full / "file").touch()
    assert pack.main([*arguments, str(full)]) == 2
    assert "is not empty" in capsys.readouterr().err
    bad = tree / "train" / "cat" / "bad.png"
    bad.write_bytes(png()[:-40])
    output = tree.parent / "out"
    assert pack.main([*arguments, str(output)]) == 2
    assert str(bad) in capsys.readouterr().err
    assert pack.main([*arguments, str(output), "--on_bad", "skip"]) == 0
    assert "1 bad file left out" in capsys.readouterr().out
    assert len(load(output, "tar").train) == 12
