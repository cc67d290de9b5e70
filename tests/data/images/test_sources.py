"""What holds for every source that decodes while training, whole, changed and damaged."""

import io
import os
import struct
import zlib

import numpy as np
import pytest
from data.images.kills import killed_at
from data.images.picture_sources import (
    CLASSES,
    KINDS,
    SHARDS,
    encoded,
    files_of,
    load,
    write_source,
)
from data.images.picture_trees import noise
from PIL import Image
from small_disks import full_disk

from utils.data.images import scanning
from utils.data.images.decode import decode, strict_pillow
from utils.errors import UserError

every_source = pytest.mark.parametrize("kind", KINDS)
every_shard = pytest.mark.parametrize("kind", SHARDS)


@pytest.fixture(autouse=True)
def packages(request):
    if "kind" in request.fixturenames and request.getfixturevalue("kind") == "parquet":
        pytest.importorskip("pyarrow")


def png(seed):
    return encoded(Image.fromarray(noise(8, seed)), "PNG")


SPLITS = {
    "train": [(png(i), i // 4) for i in range(8)],
    "test": [(png(8 + i), i // 2) for i in range(4)],
}  # fmt: skip


def huge_png():
    """A header of 40,000 by 40,000 pixels, and none of them."""
    head = b"IHDR" + struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    crc = struct.pack(">I", zlib.crc32(head))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + crc + png(0)[33:]


def replaced(splits, number, picture):
    """The splits with another training picture."""
    train = list(splits["train"])
    train[number] = (picture, train[number][1])
    return splits | {"train": train}


def refused(kind, folder, **settings):
    with pytest.raises(UserError) as error:
        load(kind, folder, **settings)
    message = str(error.value)
    assert "\n" not in message
    return message


def pictures_of(data, split="train"):
    found = getattr(data, split)
    with strict_pillow():
        return found.pictures.decode(np.arange(len(found)))


def decoded(splits, split="train"):
    return np.stack([decode(io.BytesIO(picture), 8) for picture, _ in splits[split]])


def index_files(cache):
    """{name: content} of the newest index, without what is kept beside it."""
    folder = max(cache.glob("index-*"), key=lambda folder: folder.stat().st_mtime_ns)
    files = (path for ending in ("npy", "json") for path in folder.glob(f"*.{ending}"))
    return {path.name: path.read_bytes() for path in files if "statistics" not in path.name}


# ---- whole ---------------------------------------------------------------------------------------


def special_pictures():
    smooth = Image.fromarray(noise(4)).resize((30, 20), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    gray = Image.fromarray((np.arange(400, dtype=np.uint16) * 160).reshape(20, 20))
    return [
        encoded(smooth.convert("CMYK")),
        encoded(smooth, exif=exif.tobytes()),
        encoded(gray, "PNG"),  # 16 bits
        encoded(smooth.convert("P"), "PNG"),
        encoded(smooth.convert("RGBA"), "WEBP"),
        encoded(smooth, "TIFF"),
    ]


@every_source
def test_pictures_of_all_modes_and_their_classes(kind, tmp_path):
    special = special_pictures()
    splits = SPLITS | {"train": [(picture, i // 3) for i, picture in enumerate(special)]}
    data = load(kind, write_source(kind, tmp_path / kind, splits))
    assert data.classes == list(CLASSES) and data.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.train.encoded and data.name == kind
    for split in ("train", "test"):
        assert np.array_equal(pictures_of(data, split), decoded(splits, split))
    assert data.train.pictures.sizes(np.array([1])).tolist() == [[30, 20]]


def test_all_sources_are_equal(tmp_path):
    pytest.importorskip("pyarrow")
    sets = [load(kind, write_source(kind, tmp_path / kind, SPLITS)) for kind in KINDS]
    assert len({(data.mean, data.std, data.fingerprint) for data in sets}) == 1


@every_source
def test_a_part_becomes_the_test_set(kind, tmp_path):
    folder = write_source(kind, tmp_path / kind, {"train": SPLITS["train"]})
    if kind in ("imagefolder", "csv"):
        assert "a fifth is held out as test set" in load(kind, folder).source
    else:  # the names of shards may be misunderstood
        assert "--test_fraction 0.2" in refused(kind, folder)
    data = load(kind, folder, test_fraction=0.25)
    assert (len(data.train), len(data.test)) == (6, 2)
    write_source(kind, folder, {"test": SPLITS["test"]})
    assert "--test_fraction has no effect" in refused(kind, folder, test_fraction=0.25)


# ---- changed -------------------------------------------------------------------------------------


@every_source
@pytest.mark.parametrize("on_bad", ["error", "skip"])
def test_what_has_changed_is_indexed_again(kind, on_bad, tmp_path):
    before = SPLITS if on_bad == "error" else replaced(SPLITS, 5, b"no picture")
    folder = write_source(kind, tmp_path / kind, before)
    first = load(kind, folder, on_bad=on_bad)
    after = replaced(replaced(before, 1, png(77)), 6, png(78))
    if kind in SHARDS:  # another shard stays
        os.utime(write_source(kind, folder, {"train": after["train"]}))
    else:
        for number, label in ((1, 0), (6, 1)):
            path = folder / "train" / CLASSES[label] / f"{number:03}.jpg"
            path.write_bytes(after["train"][number][0])
    second = load(kind, folder, on_bad=on_bad)
    assert second.fingerprint != first.fingerprint
    assert second.skipped == first.skipped == (on_bad == "skip")
    good = [sample for sample in after["train"] if sample[0] != b"no picture"]
    assert np.array_equal(pictures_of(second), decoded({"train": good}))


@pytest.mark.parametrize("kind", ["imagefolder", "csv"])
def test_files_that_are_added_removed_or_get_another_class(kind, tmp_path):
    folder = write_source(kind, tmp_path / kind, SPLITS)
    load(kind, folder)
    (folder / "train" / "cat" / "001.jpg").unlink()
    (folder / "train" / "cat" / "0000.jpg").write_bytes(png(90))
    (folder / "train" / "cat" / "002.jpg").rename(folder / "train" / "dog" / "002.jpg")
    if kind == "csv":
        rows = [f"train/{name}/{i},{name}\n" for name in CLASSES[::-1]
                for i in sorted(os.listdir(folder / "train" / name))]  # fmt: skip
        rows += ["train/cat/000.jpg,cat\n"]  # twice
        (folder / "train.csv").write_text("file,label\n" + "".join(rows))
    data = load(kind, folder)
    load(kind, folder, cache_dir=tmp_path / "empty")
    assert index_files(tmp_path / "empty") == index_files(tmp_path / "cache")
    assert len(data.train) == 8 + (kind == "csv")


@every_source
def test_an_index_of_other_files_is_not_taken(kind, tmp_path):
    folder = write_source(kind, tmp_path / kind, SPLITS)
    right = load(kind, folder)
    (found,) = (tmp_path / "cache").glob("index-*")
    other = write_source(
        kind, tmp_path / "other", {"train": SPLITS["test"], "test": SPLITS["test"]}
    )
    load(kind, other, cache_dir=tmp_path / "others")
    (wrong,) = (tmp_path / "others").glob("index-*")
    found.rename(tmp_path / "away")
    wrong.rename(found)
    again = load(kind, folder)
    assert again.fingerprint == right.fingerprint
    assert np.array_equal(pictures_of(again), decoded(SPLITS))


# ---- damaged -------------------------------------------------------------------------------------

BAD = {
    "no bytes": (b"", "it has no bytes"),
    "no picture": (b"\xff\xd8\xff and no more", "not an image of a known format"),
    "short JPEG": (encoded(Image.fromarray(noise(40)))[:-200], "truncated"),
    "short PNG": (png(3)[:-60], ""),
    "bomb": (huge_png(), "it has 1,600 million pixels, more than the 89 million that are read"),
    "float pixels": (encoded(Image.new("F", (9, 9)), "TIFF"), "floating-point pixels"),
}


@every_source
@pytest.mark.parametrize("what", BAD)
def test_a_bad_picture_is_named_or_left_out(kind, what, tmp_path):
    content, problem = BAD[what]
    folder = write_source(kind, tmp_path / kind, replaced(SPLITS, 2, content))
    message = refused(kind, folder)
    (name, *_) = files_of(kind, folder) if kind in SHARDS else ["002.jpg"]
    assert str(name) in message and problem in message and "--on_bad skip" in message
    if kind == "parquet":
        assert "row 2" in message
    data = load(kind, folder, on_bad="skip")
    assert data.skipped == 1 and len(data.train) == 7
    kept = SPLITS | {"train": SPLITS["train"][:2] + SPLITS["train"][3:]}
    assert np.array_equal(pictures_of(data), decoded(kept))


@every_shard
@pytest.mark.parametrize("kept", [0, 0.4, 0.8, 0.99])
def test_a_shard_that_was_cut_short(kind, kept, tmp_path):
    folder = write_source(kind, tmp_path / kind, SPLITS)
    (shard,) = files_of(kind, folder)
    length = 8 * 4 * 512 if kind == "tar" else shard.stat().st_size  # it ends with empty blocks
    os.truncate(shard, int(kept * length))
    message = refused(kind, folder, on_bad="skip")
    if kept or kind != "tfrecord":  # which may hold nothing
        assert str(shard) in message and "fetch " in message


@pytest.mark.slow
@every_source
def test_processes_find_the_same_as_threads(kind, tmp_path, monkeypatch):
    folder = write_source(kind, tmp_path / kind, replaced(SPLITS, 2, b"no picture"))
    threads = load(kind, folder, on_bad="skip")
    found = index_files(tmp_path / "cache")
    for path in (tmp_path / "cache").glob("index-*"):
        path.rename(tmp_path / path.name)
    monkeypatch.setattr(scanning, "MANY_BYTES", 0)
    monkeypatch.setattr(scanning, "ThreadPoolExecutor", None)
    processes = load(kind, folder, on_bad="skip")
    assert processes.fingerprint == threads.fingerprint
    assert index_files(tmp_path / "cache") == found


@every_shard
def test_flipped_bits_are_left_out_or_named(kind, tmp_path):
    """Wherever they are: in pictures, labels, or the shard's own structure."""
    folder = write_source(kind, tmp_path / kind, SPLITS)
    (shard,) = files_of(kind, folder)
    content, rng = shard.read_bytes(), np.random.default_rng(0)
    for place in rng.integers(0, 8 * len(content), 12).tolist():
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        shard.write_bytes(changed)
        try:
            data = load(kind, folder, on_bad="skip")
        except UserError as error:
            assert "\n" not in str(error) and "assert" not in str(error)
            continue
        assert len(data.train) + data.skipped == 8
        assert len(pictures_of(data)) == len(data.train)


@every_source
@pytest.mark.parametrize("size", [200, 400])  # within and after the header of an array
def test_a_full_disk(kind, size, tmp_path):
    folder = write_source(kind, tmp_path / kind, SPLITS)
    with full_disk(size):
        message = refused(kind, folder)
    assert "File too large" in message and str(tmp_path / "cache") in message
    left = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert set(left) <= {"lock"}  # it is empty
    assert len(load(kind, folder).train) == 8


@pytest.mark.slow
@every_source
def test_killed_at_any_moment_the_next_run_finds_all_or_nothing(kind, tmp_path):
    folder = write_source(kind, tmp_path / kind, SPLITS)
    expected = load(kind, folder, cache_dir=tmp_path / "whole")
    moment, done = 0, False
    while not done:
        done = killed_at(moment, lambda: load(kind, folder))
        moment += 1
        assert moment < 40
    data = load(kind, folder)
    assert moment > 5 and (data.fingerprint, data.mean) == (expected.fingerprint, expected.mean)
    assert np.array_equal(pictures_of(data), pictures_of(expected))
    names = {path.name.split("-")[0] for path in (tmp_path / "cache").iterdir()}
    assert names <= {"index", "parquet"}
    if kind != "parquet":  # whose index has the time at which it was unpacked
        assert index_files(tmp_path / "cache") == index_files(tmp_path / "whole")
