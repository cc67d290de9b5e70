"""CIFAR-10 from a small imitation of its archive, pickled as Python 2 did."""

import hashlib
import importlib.util
import io
import os
import pickle
import struct
import tarfile
import types
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from utils.data import cifar10
from utils.data.images import load_image_data
from utils.errors import UserError

CLASSES = [f"class {index}" for index in range(10)]
PER_FILE = 20


class Python2Pickler(pickle._Pickler):
    """Writes str and bytes as the 8-bit strings of Python 2, NumPy's old module name, and 0 and 1
    for the flags of a dtype."""

    def save_flag(self, value):
        self.write(pickle.BININT1 + bytes([value]))

    def save_string(self, value):
        data = value if isinstance(value, bytes) else value.encode("latin1")
        self.write(pickle.BINSTRING + struct.pack("<i", len(data)) + data)

    def save_global(self, obj, name=None):
        module = obj.__module__.replace("numpy._core", "numpy.core")
        self.write(f"c{module}\n{obj.__name__}\n".encode())

    dispatch: ClassVar = {
        **pickle._Pickler.dispatch,
        bool: save_flag,
        **dict.fromkeys((str, bytes), save_string),
        **dict.fromkeys((type, types.FunctionType), save_global),
    }


def pickled(content):
    buffer = io.BytesIO()
    Python2Pickler(buffer, protocol=2).dump(content)
    return buffer.getvalue()


def make_files():
    rng = np.random.default_rng(0)
    files = {"batches.meta": pickled({"label_names": CLASSES, "num_vis": 3072})}
    for name in [*cifar10.TRAIN_MD5, *cifar10.TEST_MD5]:
        data = rng.integers(0, 256, (PER_FILE, 3072), dtype=np.uint8)
        labels = rng.integers(0, 10, PER_FILE).tolist()
        names = [f"{index}.png" for index in range(PER_FILE)]
        files[name] = pickled({"data": data, "labels": labels, "filenames": names})
    return files


def write_archive(path, files, *, extra=()):
    with tarfile.open(path, "w:gz") as archive:
        for member, data in extra:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for name, data in files.items():
            member = tarfile.TarInfo(f"{cifar10.FOLDER}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def pin(monkeypatch, files, archive=None):
    """Put the sums of `files` and `archive` where those of the published ones stand."""
    for table in ("TRAIN_MD5", "TEST_MD5", "META_MD5"):
        sums = {name: hashlib.md5(files[name]).hexdigest() for name in getattr(cifar10, table)}
        monkeypatch.setattr(cifar10, table, sums)
    if archive is not None:
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        monkeypatch.setattr(cifar10, "ARCHIVE_SHA256", digest)


@pytest.fixture
def no_network(monkeypatch):
    def refuse(url, path, sha256, *, hint):
        raise UserError(f"no network; {hint}")

    monkeypatch.setattr(cifar10, "download", refuse)


def load(folder):
    return load_image_data("cifar10", data_dir=folder, cache_dir=folder / "cache")


def test_archive_folder_and_files_are_the_same_data(tmp_path, monkeypatch, no_network):
    files = make_files()
    archive = tmp_path / "a" / cifar10.ARCHIVE_NAME
    unpacked, flat = tmp_path / "b" / cifar10.FOLDER, tmp_path / "c"
    for folder in (archive.parent, unpacked, flat):
        folder.mkdir(parents=True)
    write_archive(archive, files)
    for name, data in files.items():
        (unpacked / name).write_bytes(data)
        (flat / name).write_bytes(data)
    pin(monkeypatch, files, archive)
    sets = [load(tmp_path / name) for name in "abc"]
    for data in sets:
        assert data.classes == CLASSES and not data.synthetic
        assert data.train.images.shape == (5 * PER_FILE, 32, 32, 3)
        assert data.test.images.shape == (PER_FILE, 32, 32, 3)
        assert data.fingerprint == sets[0].fingerprint
        assert np.array_equal(data.train.images, sets[0].train.images)
        assert np.array_equal(data.test.labels, sets[0].test.labels)
    # Pixel (row, column) of plane c is at c * 1024 + row * 32 + column of the published rows.
    third = cifar10.ArrayUnpickler(io.BytesIO(files["data_batch_3"]), encoding="latin1").load()
    row = third["data"][5]
    picture = sets[0].train.images[2 * PER_FILE + 5]
    assert picture[7, 11].tolist() == [row[c * 1024 + 7 * 32 + 11] for c in range(3)]
    assert sets[0].train.labels[2 * PER_FILE + 5] == third["labels"][5]
    # Nothing was unpacked, nothing left behind.
    assert os.listdir(archive.parent) == [cifar10.ARCHIVE_NAME]


def test_the_published_sums():
    assert len(cifar10.ARCHIVE_SHA256) == 64
    sums = [*cifar10.TRAIN_MD5.values(), *cifar10.TEST_MD5.values(), *cifar10.META_MD5.values()]
    assert len(set(sums)) == 7 and all(len(value) == 32 for value in sums)
    spec = importlib.util.find_spec("torchvision")  # found, not imported, which takes seconds
    if spec is None:
        pytest.skip("needs torchvision to compare the sums with")
    source = Path(spec.origin).parent.joinpath("datasets", "cifar.py").read_text(encoding="utf-8")
    for name, value in {**cifar10.TRAIN_MD5, **cifar10.TEST_MD5}.items():
        assert f'["{name}", "{value}"]' in source
    assert all(value in source for value in (*sums, cifar10.ARCHIVE_URL))


def test_absent_it_is_downloaded(tmp_path, monkeypatch):
    files = make_files()

    def fetch(url, path, sha256, *, hint):
        assert url.startswith("https://") and sha256 == cifar10.ARCHIVE_SHA256
        path.parent.mkdir()
        write_archive(path, files)
        pin(monkeypatch, files, path)

    pin(monkeypatch, files)
    monkeypatch.setattr(cifar10, "download", fetch)
    assert len(load(tmp_path / "new").train) == 5 * PER_FILE


def assert_names_the_ways_out(message):
    assert "\n" not in message
    for way in ("--data_dir", "--dataset imagefolder", "--dataset shapes"):
        assert way in message


def test_without_network_the_ways_out_are_named(tmp_path, no_network):
    with pytest.raises(UserError) as error:
        load(tmp_path)
    assert_names_the_ways_out(str(error.value))


@pytest.mark.parametrize("damage", ["truncated", "bit", "empty", "not an archive"])
@pytest.mark.parametrize("sum_is_right", [False, True])
def test_broken_archive(tmp_path, monkeypatch, damage, sum_is_right):
    files, archive = make_files(), tmp_path / cifar10.ARCHIVE_NAME
    write_archive(archive, files)
    pin(monkeypatch, files, archive)
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    whole = archive.read_bytes()
    broken = {"truncated": whole[: len(whole) // 2], "bit": data, "empty": b""}
    archive.write_bytes(broken.get(damage, b"<html>Please log in</html>" * 99))
    if sum_is_right:  # what lies behind the first check holds, too
        pin(monkeypatch, files, archive)
    with pytest.raises(UserError, match="delete it to download it again") as error:
        load(tmp_path)
    assert str(archive) in str(error.value)
    assert_names_the_ways_out(str(error.value))


def test_changed_file_is_never_unpickled(tmp_path, monkeypatch, no_network):
    files = make_files()
    pin(monkeypatch, files)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "data_batch_2").write_bytes(files["data_batch_2"][:-1] + b"!")
    with pytest.raises(UserError, match="data_batch_2 was changed") as error:
        load(tmp_path)
    assert_names_the_ways_out(str(error.value))


class Hostile:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("function", [os.mkdir, eval, getattr, np.load])
def test_hostile_pickle_with_the_right_sum_is_refused(tmp_path, monkeypatch, function, no_network):
    trace = tmp_path / "trace"
    argument = f"__import__('os').mkdir({str(trace)!r})" if function is eval else str(trace)
    files = make_files()
    files["data_batch_1"] = pickle.dumps({"data": Hostile(function, argument), "labels": [0]})
    archive = tmp_path / cifar10.ARCHIVE_NAME
    write_archive(archive, files)
    pin(monkeypatch, files, archive)
    with pytest.raises(UserError, match="refused to load"):
        load(tmp_path)
    assert not trace.exists()


def member(name, kind=tarfile.REGTYPE, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_other_members_are_left_alone(tmp_path, monkeypatch):
    files, archive = make_files(), tmp_path / "in" / cifar10.ARCHIVE_NAME
    archive.parent.mkdir()
    inside = cifar10.FOLDER
    extra = [
        (member("../outside"), b"x"),
        (member("/absolute-name-of-a-test"), b"x"),
        (member(f"{inside}/../../outside"), b"x"),
        (member(f"{inside}/link", tarfile.SYMTYPE, "/etc/passwd"), b""),
        (member(f"{inside}/pipe", tarfile.FIFOTYPE), b""),
    ]
    write_archive(archive, files, extra=extra)
    pin(monkeypatch, files, archive)
    assert len(load(archive.parent).train) == 5 * PER_FILE
    assert os.listdir(tmp_path) == ["in"]
    assert os.listdir(archive.parent) == [cifar10.ARCHIVE_NAME]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_a_link_in_place_of_a_file_is_refused(tmp_path, monkeypatch, kind):
    files, archive = make_files(), tmp_path / cifar10.ARCHIVE_NAME
    link = member(f"{cifar10.FOLDER}/test_batch", kind, "/etc/passwd")
    kept = {name: data for name, data in files.items() if name != "test_batch"}
    write_archive(archive, kept, extra=[(link, b"")])
    pin(monkeypatch, files, archive)
    with pytest.raises(UserError, match="no regular file"):
        load(tmp_path)


def test_a_missing_and_an_oversized_member(tmp_path, monkeypatch):
    files, archive = make_files(), tmp_path / cifar10.ARCHIVE_NAME
    write_archive(archive, {name: files[name] for name in list(files)[:-1]})
    pin(monkeypatch, files, archive)
    with pytest.raises(UserError, match="test_batch is missing"):
        load(tmp_path)
    monkeypatch.setattr(cifar10, "MAX_FILE_BYTES", 10_000)
    with pytest.raises(UserError, match="too large"):
        load(tmp_path)
    monkeypatch.setattr(cifar10, "MAX_FILE_BYTES", 1 << 20)
    monkeypatch.setattr(cifar10, "MAX_ARCHIVE_BYTES", 100_000)
    with pytest.raises(UserError, match="too large"):
        load(tmp_path)
