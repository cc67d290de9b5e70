"""CIFAR-10 and CIFAR-100 from small imitations of their archives."""

import hashlib
import importlib.util
import io
import os
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from cifar_imitation import PER_FILE, Imitation, fingerprint

from utils.data.images import cifar
from utils.data.images.image_data import PictureRequest
from utils.data.images.sources import load_image_data
from utils.errors import UserError


@pytest.fixture(params=["cifar10", "cifar100"])
def imitation(request, monkeypatch):
    return Imitation(request.param, monkeypatch)


def test_archive_folder_and_files_are_the_same_data(imitation, tmp_path, no_network):
    imitation.write_files(tmp_path / "unpacked" / imitation.folder)
    imitation.write_files(tmp_path / "flat")
    imitation.pin(imitation.write_archive(tmp_path / "packed"))
    sets = [imitation.load(tmp_path / name) for name in ("packed", "unpacked", "flat")]
    train_files = len(imitation.real.train)
    for data in sets:
        assert data.name == imitation.name
        assert data.classes == imitation.classes and not data.synthetic
        assert data.train.images.shape == (train_files * PER_FILE, 32, 32, 3)
        assert data.test.images.shape == (PER_FILE, 32, 32, 3)
        assert data.fingerprint == fingerprint(cifar.PUBLISHED[data.name].checksums)
        assert np.array_equal(data.train.images, sets[0].train.images)
        assert np.array_equal(data.test.labels, sets[0].test.labels)
    # Pixel (row, column) of plane c is at c * 1024 + row * 32 + column of the published rows.
    content = io.BytesIO(imitation.files[imitation.train_file])
    last = cifar.ArrayUnpickler(content, encoding="latin1").load()
    row = last["data"][5]
    picture = sets[0].train.images[5 - PER_FILE]
    assert picture[7, 11].tolist() == [row[c * 1024 + 7 * 32 + 11] for c in range(3)]
    assert sets[0].train.labels[5 - PER_FILE] == last[imitation.real.labels][5]
    # Nothing was unpacked or left behind.
    assert os.listdir(tmp_path / "packed") == [imitation.archive]


def test_both_in_one_folder_are_told_apart(tmp_path, monkeypatch, no_network):
    imitations = [Imitation(name, monkeypatch) for name in ("cifar10", "cifar100")]
    for imitation in imitations:
        imitation.write_files(tmp_path)
        imitation.pin()
    sets = [imitation.load(tmp_path) for imitation in imitations]
    assert [len(data.classes) for data in sets] == [10, 100]
    assert sets[0].fingerprint != sets[1].fingerprint


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_the_published_sums(name):
    published = cifar.PUBLISHED[name]
    sums = published.checksums
    assert len(published.sha256) == 64 and all(len(value) == 32 for value in sums.values())
    assert len(set(sums.values())) == {"cifar10": 7, "cifar100": 3}[name]
    spec = importlib.util.find_spec("torchvision")  # importing it would take seconds
    if spec is None:
        pytest.skip("needs torchvision to compare the sums with")
    source = Path(spec.origin).parent.joinpath("datasets", "cifar.py").read_text(encoding="utf-8")
    for file, value in {**published.train, **published.test}.items():
        assert f'["{file}", "{value}"]' in source
    ((meta, value),) = published.meta.items()
    for part in (meta, value, published.class_names, published.url, published.folder):
        assert f'"{part}"' in source


def test_the_fingerprint_of_cifar10_stays():
    """Runs from before CIFAR-100 was added can be resumed only if it stays."""
    assert fingerprint(cifar.PUBLISHED["cifar10"].checksums) == (
        "f1c51809828e6c098a2e14d9748984bdf9d03fea0ff743faaf58350938aed564"
    )


def test_absent_it_is_downloaded(imitation, tmp_path, monkeypatch):
    archive = imitation.write_archive(tmp_path)
    imitation.pin(archive)
    calls = []

    def fetch(url, path, checksum, *, hint):
        assert checksum == hashlib.sha256(archive.read_bytes()).hexdigest()
        calls.append((url, path))
        path.parent.mkdir()
        shutil.copy(archive, path)

    monkeypatch.setattr(cifar, "download", fetch)
    for _ in range(2):
        assert len(imitation.load(tmp_path / "new").test) == PER_FILE
    assert calls == [(imitation.real.url, tmp_path / "new" / imitation.archive)]
    assert imitation.real.url.startswith("https://")


def assert_names_the_ways_out(message):
    assert "\n" not in message
    for way in ("--data_dir", "--dataset imagefolder", "--dataset shapes"):
        assert way in message


def test_without_network_the_ways_out_are_named(imitation, tmp_path, no_network):
    with pytest.raises(UserError) as error:
        imitation.load(tmp_path)
    assert_names_the_ways_out(str(error.value))


@pytest.mark.parametrize("damage", ["truncated", "bit", "empty", "not an archive"])
def test_broken_archive(imitation, tmp_path, damage):
    archive = imitation.write_archive(tmp_path)
    imitation.pin(archive)
    whole = archive.read_bytes()
    bit = bytearray(whole)
    bit[len(whole) // 2] ^= 1
    broken = {"truncated": whole[: len(whole) // 2], "bit": bit, "empty": b""}
    archive.write_bytes(broken.get(damage, b"<html>Please log in</html>" * 99))
    with pytest.raises(UserError, match="delete it to download it again") as error:
        imitation.load(tmp_path)
    assert str(archive) in str(error.value)
    assert_names_the_ways_out(str(error.value))


def test_changed_file_is_never_unpickled(imitation, tmp_path, no_network):
    imitation.pin()
    imitation.write_files(tmp_path)
    changed = tmp_path / imitation.train_file
    changed.write_bytes(changed.read_bytes()[:-1] + b"!")
    with pytest.raises(UserError, match=f"{imitation.train_file} was changed") as error:
        imitation.load(tmp_path)
    assert_names_the_ways_out(str(error.value))


class Hostile:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("function", [os.mkdir, eval, getattr, np.load])
def test_hostile_pickle_with_the_right_sum_is_refused(imitation, tmp_path, function):
    trace = tmp_path / "trace"
    argument = f"__import__('os').mkdir({str(trace)!r})" if function is eval else str(trace)
    hostile = pickle.dumps({"data": Hostile(function, argument), imitation.real.labels: [0]})
    imitation.files[imitation.train_file] = hostile
    imitation.pin(imitation.write_archive(tmp_path))
    with pytest.raises(pickle.UnpicklingError, match="refused to load"):
        imitation.load(tmp_path)
    assert not trace.exists()


def member(name, kind=tarfile.REGTYPE, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_other_members_are_left_alone(imitation, tmp_path):
    inside = imitation.folder
    extra = [
        (member("../outside"), b"x"),
        (member("/absolute-name-of-a-test"), b"x"),
        (member(f"{inside}/../../outside"), b"x"),
        (member(f"{inside}/link", tarfile.SYMTYPE, "/etc/passwd"), b""),
        (member(f"{inside}/pipe", tarfile.FIFOTYPE), b""),
    ]
    imitation.pin(imitation.write_archive(tmp_path / "in", extra=extra))
    assert len(imitation.load(tmp_path / "in").test) == PER_FILE
    assert os.listdir(tmp_path) == ["in"]
    assert os.listdir(tmp_path / "in") == [imitation.archive]


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_a_test_fraction_is_refused(name, tmp_path):
    folders = {"data_dir": tmp_path, "cache_dir": tmp_path}
    with pytest.raises(UserError, match=f"--test_fraction has no effect on --dataset {name}"):
        load_image_data(name, PictureRequest(**folders, test_fraction=0.5))
