"""The cache of decoded pictures: reused, rebuilt when files change, and never incomplete."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from picture_trees import load, make_tree, noise, refused
from PIL import Image
from small_disks import full_disk, small_disk

from utils.data import cache_folder
from utils.data.images import cache as image_cache
from utils.data.images.image_data import Form, PictureRequest
from utils.data.images.sources import load_image_data

ROOT = Path(__file__).resolve().parents[3]


def test_second_load_decodes_nothing(tree, no_decoding):
    first = load(tree)
    no_decoding()
    second = load(tree)
    assert isinstance(second.train.images, np.memmap) and not second.train.images.flags.writeable
    for name in ("classes", "mean", "std", "fingerprint", "skipped"):
        assert getattr(first, name) == getattr(second, name)
    assert np.array_equal(first.train.images, second.train.images)
    assert np.array_equal(first.test.labels, second.test.labels)
    assert "memory-mapped" in second.source and "decoded" in first.source


def test_the_form_has_caches_of_its_own_and_jpegs_keep_theirs(tree):
    def folder(form):
        return Path(load(tree, form=form, image_size=8).source.split()[-1])

    before, now = Form(transparency="dropped"), Form()
    names = {folder(form).name for form in (before, now, Form("squash"), Form(white_level=4095))}
    assert len(names) == 4
    for path in list(tree.rglob("*.png")):
        Image.open(path).save(path.with_suffix(".jpg"))
        path.unlink()
    assert folder(before) == folder(now) != folder(Form("squash"))
    (folder(now) / "train_origins.npy").unlink()  # as of earlier versions
    for path in folder(now).glob("notes*"):
        path.unlink()
    assert load(tree, image_size=8).notes == []


@pytest.mark.parametrize("change", ["content", "time", "removed", "added", "renamed"])
def test_changed_files_are_decoded_again(tree, change):
    first, path = load(tree), tree / "train" / "cat" / "001.png"
    if change == "content":
        Image.fromarray(noise(8, 77)).save(path)
    elif change == "time":
        os.utime(path, ns=(1, 1))
    elif change == "removed":
        path.unlink()
    elif change == "added":
        Image.fromarray(noise(8, 77)).save(path.with_name("0010.png"))
    else:
        path.rename(path.with_name("009.png"))
    second = load(tree)
    assert "decoded" in second.source
    assert (first.fingerprint == second.fingerprint) == (change == "time")
    assert len(list((tree.parent / "cache").iterdir())) == 2


@pytest.mark.parametrize("damage", ["index", "no index", "truncated", "labels", "version"])
def test_damaged_cache_is_built_again(tree, damage):
    first = load(tree)
    folder = next((tree.parent / "cache").iterdir())
    pictures, index = folder / "train.npy", folder / "index.json"
    if damage == "index":
        index.write_text(index.read_text()[:50])
    elif damage == "no index":
        index.unlink()
    elif damage == "truncated":
        os.truncate(pictures, pictures.stat().st_size - 1)
    elif damage == "labels":
        np.save(folder / "train_labels.npy", np.full(8, 5))
    else:
        index.write_text(index.read_text().replace('"version": 1', '"version": 0'))
    second = load(tree)
    assert "decoded" in second.source and second.fingerprint == first.fingerprint
    assert os.listdir(tree.parent / "cache") == [folder.name]
    assert "memory-mapped" in load(tree).source


def test_two_builders_at_once(tree):
    sets, errors = [], []

    def build():
        try:
            sets.append(load(tree))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len({data.fingerprint for data in sets}) == 1
    assert len(os.listdir(tree.parent / "cache")) == 1


KILLED = """
import os, signal, sys
from utils.data import cache_folder
from utils.data.images import cache as image_cache
from utils.data.images.sources import load_image_data
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
for module in (image_cache, cache_folder):
    if hasattr(module, sys.argv[1]):
        setattr(module, sys.argv[1], kill)
from pathlib import Path
from utils.data.images.image_data import PictureRequest
load_image_data("imagefolder", PictureRequest(Path(sys.argv[2]), Path(sys.argv[3])))
"""


@pytest.mark.parametrize("moment", ["decode_all", "channel_statistics", "put_in_place"])
def test_a_kill_leaves_no_half_cache_and_the_next_run_clears_it_away(tree, moment):
    cache = tree.parent / "cache"
    killed = subprocess.run([sys.executable, "-c", KILLED, moment, tree, cache], cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL
    (left,) = cache.iterdir()
    assert left.name.startswith(".building-")
    (cache / ".building-without-a-lock").mkdir()
    assert "decoded" in load(tree).source
    assert not left.exists() and len(list(cache.iterdir())) == 2


def test_a_living_builder_is_left_alone(tree, tmp_path):
    with cache_folder.temporary_folder(tmp_path / "pictures") as folder:
        cache_folder.remove_abandoned(tmp_path / "pictures")
        assert folder.exists()
    assert not folder.exists()


def test_cache_that_cannot_be_written(tree, tmp_path):
    (tmp_path / "plain").write_text("a file")
    refused(tree, "--cache_dir", "plain", cache_dir=tmp_path / "plain")
    refused(tree, "--cache_dir", "Not a directory", cache_dir=tmp_path / "plain" / "below")


def test_too_little_room_is_said_before_decoding(tree, monkeypatch, no_decoding):
    no_decoding()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1_000_000}))
    refused(tree, "needs 48 MB", "1 MB free", "--cache_dir", "--image_size", image_size=1000)


def test_a_disk_that_fills_up_while_decoding(tree, tmp_path, monkeypatch):
    with small_disk(tmp_path / "disk", "1M") as disk:
        monkeypatch.setattr(image_cache, "require_space", lambda *_: None)
        refused(tree, "No space left on device", "--cache_dir", cache_dir=disk, image_size=500)
        assert not list(disk.iterdir())
        load(tree, cache_dir=disk)


def test_a_full_disk_while_classes_are_written(tmp_path):
    tree = make_tree(tmp_path / "tree", per_class=50)
    with full_disk(800):  # the training pictures, of one pixel each, take half, their classes more
        refused(tree, "File too large", "--cache_dir", image_size=1)


def test_a_read_only_disk(tree, tmp_path):
    with small_disk(tmp_path / "disk", "1M", ",ro") as disk:
        refused(tree, "Read-only file system", "--cache_dir", cache_dir=disk)


def test_a_plain_line_where_there_is_no_terminal(tree, capsys):
    load(tree, progress=True)
    assert capsys.readouterr().err == "decoding 16 pictures to 8x8, once\n"
    load(tree, progress=True)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.real_data
def test_real_pictures(tmp_path, no_decoding):
    if "REAL_DATA" not in os.environ:
        pytest.skip("needs the folder of real images that REAL_DATA names")
    root = Path(os.environ["REAL_DATA"]) / "cifar10-jpeg"
    request = PictureRequest(root, tmp_path, progress=False)
    first = load_image_data("imagefolder", request)
    no_decoding()
    data = load_image_data("imagefolder", request)
    assert "memory-mapped" in data.source and data.fingerprint == first.fingerprint
    assert data.train.images.shape == (50_000, 32, 32, 3)
    assert data.test.images.shape == (10_000, 32, 32, 3)
    assert np.bincount(data.train.labels).tolist() == [5000] * 10
    # The mean of CIFAR-10, which JPEG compression hardly changes.
    np.testing.assert_allclose(data.mean, (0.4914, 0.4822, 0.4465), atol=0.002)
