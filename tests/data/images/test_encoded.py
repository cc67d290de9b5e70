"""Pictures that are decoded while training."""

import io
import os

import numpy as np
import pytest
import torch
from data.images.picture_trees import load, make_tree, noise, refused
from PIL import Image, ImageOps

from utils.augment.crop_flip import CropFlip
from utils.augment.resized_crop import ResizedCrop
from utils.data.images import scanning
from utils.data.images.decode import decode, decode_window, measure
from utils.data.images.image_data import Form
from utils.data.workers import WorkerPool
from utils.errors import UserError

SIZE = 8


def always(tree, **settings):
    return load(tree, decode="always", **{"image_size": SIZE} | settings)


def loader(data, split, **options):
    options = {"batch_size": 4, "device": torch.device("cpu")} | options
    return split.loader(mean=data.mean, std=data.std, **options)


def inputs(loader, epoch=0, start_step=0):
    return torch.cat([batch.inputs.clone() for batch in loader.epoch(epoch, start_step)])


def smooth(height, width, seed=0):
    """A picture whose pixels a JPEG keeps nearly."""
    small = Image.fromarray(noise(4, seed))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def encoded(image, kind="JPEG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.fixture
def photos(tmp_path):
    """Photographs of several sizes, some of which are small."""
    for split, n in (("train", 10), ("test", 3)):
        for label, name in enumerate(("cat", "dog")):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for i in range(n):
                image = smooth(20 + 3 * i, 40 - 2 * i, 100 * label + i)
                (folder / f"{i:02}.jpg").write_bytes(encoded(image, quality=90))
    return tmp_path / "photos"


# ---- equal to decoding once ----------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_pictures_decoded_once(photos, workers):
    once, data = load(photos, image_size=SIZE), always(photos)
    assert (once.mean, once.std, once.classes) == (data.mean, data.std, data.classes)
    augment = {"augment": CropFlip(SIZE, SIZE, padding=2), "shuffle": True, "seed": 3}
    pool = WorkerPool(workers, 4 * SIZE * SIZE * 3, print) if workers else None
    try:
        for epoch in range(2):
            plain = inputs(loader(once, once.train, **augment), epoch)
            assert torch.equal(inputs(loader(data, data.train, pool=pool, **augment), epoch), plain)
        plain = inputs(loader(once, once.test))
        assert torch.equal(inputs(loader(data, data.test, pool=pool)), plain)
    finally:
        if pool is not None:
            pool.close()


def test_parts_and_held_out_pictures(tmp_path):
    tree = make_tree(tmp_path / "pictures", splits=("train",), per_class=8)
    once = load(tree, test_fraction=0.25)
    data = always(tree, test_fraction=0.25)
    assert len(data.test) == 4 and (data.mean, data.std) == (once.mean, once.std)
    part, same = data.train.part(np.array([5, 2, 9])), once.train.part(np.array([5, 2, 9]))
    assert torch.equal(inputs(loader(data, part)), inputs(loader(once, same)))
    assert np.array_equal(part.labels, same.labels)


def test_auto_keeps_decoded_pictures_up_to_a_size(tree, monkeypatch):
    assert not load(tree, decode="auto").train.encoded
    monkeypatch.setattr("utils.data.images.listing.LARGEST_DECODED", 16 * 3 * 64 - 1)
    data = load(tree, decode="auto")
    assert data.train.encoded and "decoded while training" in data.source


# ---- random resized crops ------------------------------------------------------------------------


def test_a_run_goes_on_at_any_step_and_is_the_same_on_any_ranks(photos):
    data = always(photos)
    options = {"augment": ResizedCrop(), "shuffle": True, "seed": 1}
    whole = inputs(loader(data, data.train, **options), 2)
    resumed = inputs(loader(data, data.train, **options), 2, start_step=3)
    assert torch.equal(whole[12:], resumed)
    ranks = [
        loader(data, data.train, batch_size=2, rank=rank, ranks=2, **options).epoch(2)
        for rank in range(2)
    ]
    both = [batch.inputs for pair in zip(*ranks, strict=True) for batch in pair]
    assert torch.equal(torch.cat(both), whole)
    assert not torch.equal(inputs(loader(data, data.train, **options), 3), whole)


@pytest.mark.parametrize("height, width", [(300, 400), (500, 500), (224, 900)])
def test_windows_are_distributed_as_by_rejection(height, width):
    """As in torchvision, which draws area and ratio anew until the window fits."""
    n, rng = 40_000, np.random.default_rng(0)
    crop = ResizedCrop()
    plan = crop.draw(n, rng)
    top, left, h, w = crop.windows(plan, np.tile([height, width], (n, 1))).T
    assert (h >= 1).all() and (w >= 1).all() and top.min() >= 0 and left.min() >= 0
    assert (top + h).max() <= height and (left + w).max() <= width
    area = rng.uniform(0.08, 1, 4 * n) * height * width
    ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3), 4 * n))
    width_of, height_of = np.sqrt(area * ratio), np.sqrt(area / ratio)
    fits = (width_of <= width) & (height_of <= height)
    for ours, theirs in ((w, width_of[fits]), (h, height_of[fits]), (w / h, ratio[fits])):
        for q in (0.1, 0.3, 0.5, 0.7, 0.9):
            assert np.quantile(ours, q) == pytest.approx(np.quantile(theirs, q), rel=0.02)
    assert plan.flip.mean() == pytest.approx(0.5, abs=0.02)
    for place, room in ((top, height - h), (left, width - w)):
        inside = room > 20
        assert (place[inside] / room[inside]).mean() == pytest.approx(0.5, abs=0.02)


def test_the_whole_area_is_the_whole_picture_and_a_long_one_gets_the_nearest_ratio():
    crop = ResizedCrop(area=1)
    plan = crop.draw(50, np.random.default_rng(0))
    assert (crop.windows(plan, np.tile([40, 50], (50, 1))) == [0, 0, 40, 50]).all()
    windows = ResizedCrop().windows(plan, np.tile([10, 1000], (50, 1)))
    assert (windows[:, 2] == 10).all() and (windows[:, 3] == 13).all()


def test_windows_are_cut_out_resized_and_mirrored():
    image = smooth(60, 80)
    file = io.BytesIO(encoded(image, "PNG"))
    window = np.array([10, 20, 40, 30])
    cut = image.crop((20, 10, 50, 50)).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    found = decode_window(file, window, False, SIZE).astype(int)
    assert np.abs(found - np.asarray(cut)).max() <= 1  # PyTorch rounds otherwise than Pillow
    plain, mirrored = (decode_window(file, window, flip, SIZE) for flip in (False, True))
    assert np.array_equal(mirrored, plain[:, ::-1])


@pytest.mark.parametrize("orientation", [*range(1, 9), 0, 9, 300])
def test_windows_lie_in_the_upright_picture(orientation):
    """JPEGs may be decoded at a fraction (here 1/4) of their size, and are turned as their EXIF
    says."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(smooth(96, 160), quality=95, exif=exif.tobytes())
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert measure(io.BytesIO(data), len(data)) == (upright.height, upright.width)
    window = np.array([8, 20, 64, 72])
    cut = upright.crop((20, 8, 92, 72)).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    found = decode_window(io.BytesIO(data), window, False, SIZE)
    assert np.abs(found.astype(int) - np.asarray(cut))[1:-1, 1:-1].max() <= 6


def test_crop_ratio_is_a_larger_resize_and_a_centre_crop():
    image = smooth(64, 80)
    resized = image.resize((40, 32), Image.Resampling.BICUBIC)
    expected = np.asarray(resized.crop((6, 2, 34, 30)))  # 28 / 32 of the shorter side
    found = decode(io.BytesIO(encoded(image, "PNG")), 28, form=Form(crop_ratio=0.875))
    assert np.abs(found.astype(int) - expected).max() <= 1


@pytest.mark.parametrize("mode", ["squash", "letterbox"])
@pytest.mark.parametrize("height, width", [(64, 160), (160, 64)])
def test_windows_of_whole_pictures_in_squares(photos, mode, height, width):
    image, form = smooth(height, width), Form(mode)
    square = decode(io.BytesIO(encoded(image, "PNG")), 160, form)
    for top, left, side in ((0, 0, 160), (40, 30, 100), (100, 80, 60)):
        cut = Image.fromarray(square).crop((left, top, left + side, top + side))
        expected = np.asarray(cut.resize((SIZE, SIZE), Image.Resampling.BICUBIC)).astype(int)
        window = np.array([top, left, side, side])
        found = decode_window(io.BytesIO(encoded(image, "PNG")), window, False, SIZE, form)
        assert np.abs(found - expected).max() <= 2
        jpeg = io.BytesIO(encoded(image, quality=95))  # is decoded at half its size
        difference = np.abs(decode_window(jpeg, window, False, SIZE, form) - expected)
        assert difference.mean() < 4 and difference.max() < 20
    data = always(photos, form=form)
    sizes = data.train.pictures.sizes(np.arange(3))
    assert (sizes[:, 0] == sizes[:, 1]).all() and sizes[0, 0] == 40
    batch = inputs(loader(data, data.train, augment=ResizedCrop(0.5)))
    assert batch.shape == (20, 3, SIZE, SIZE)


# ---- the index -----------------------------------------------------------------------------------


def test_an_index_is_built_once_and_a_changed_file_is_noticed(photos, monkeypatch):
    first = always(photos)
    monkeypatch.setattr(scanning, "measure", None)  # no header is read again
    assert always(photos).fingerprint == first.fingerprint
    monkeypatch.undo()
    path = photos / "train" / "dog" / "03.jpg"
    path.write_bytes(encoded(smooth(30, 30, 77)))
    with pytest.raises(UserError, match=r"03\.jpg was changed after its pictures were indexed"):
        inputs(loader(first, first.train))
    assert always(photos).fingerprint != first.fingerprint


def test_a_touched_file_is_indexed_again_and_the_data_are_the_same(photos):
    first = always(photos)
    os.utime(photos / "train" / "dog" / "03.jpg", ns=(1, 1))
    assert always(photos).fingerprint == first.fingerprint


@pytest.mark.parametrize(
    "content, problem",
    [
        (b"", "it has no bytes"),
        (b"\xff\xd8\xff and no more", "not an image of a known format"),
        (encoded(smooth(40, 40), quality=90)[:-200], "truncated"),
        (encoded(smooth(40, 40), "PNG")[:-200], ""),
        (encoded(Image.new("1", (20_000, 20_000))), "it has 400 million pixels"),
    ],
    ids=["empty", "no picture", "short JPEG", "short PNG", "bomb"],
)  # fmt: skip
def test_what_is_no_picture_is_named_or_left_out(photos, content, problem):
    path = photos / "train" / "cat" / "bad.jpg"
    path.write_bytes(content)
    refused(photos, path, problem, "--on_bad skip", decode="always", image_size=SIZE)
    data = always(photos, on_bad="skip")
    assert data.skipped == 1 and len(data.train) == 20
    assert inputs(loader(data, data.train)).shape[0] == 20


def test_pictures_of_other_modes(photos):
    folder = photos / "train" / "cat"
    gray16 = Image.fromarray((np.arange(400, dtype=np.uint16) * 160).reshape(20, 20))
    for name, image, kind in (
        ("cmyk.jpg", smooth(30, 30).convert("CMYK"), "JPEG"),
        ("palette.png", smooth(30, 30).convert("P"), "PNG"),
        ("gray16.png", gray16, "PNG"),
        ("alpha.webp", smooth(30, 30).convert("RGBA"), "WEBP"),
    ):
        (folder / name).write_bytes(encoded(image, kind))
    once, data = load(photos, image_size=SIZE), always(photos)
    assert torch.equal(inputs(loader(once, once.train)), inputs(loader(data, data.train)))


def test_a_class_that_loses_all_its_pictures(photos):
    for path in (photos / "train" / "dog").iterdir():
        path.write_bytes(b"no picture")
    refused(photos, "is of class 'dog'", decode="always", image_size=SIZE, on_bad="skip")
