"""Tasks of pictures: splits without copies, and the processes that read them."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data.images.picture_trees import make_tree
from data.images.records import records_of
from data.worker_helpers import worker_processes

import vit_test
from utils.augment.chain import Chain
from utils.augment.crop_flip import CropFlip
from utils.augment.policies import Operations
from utils.augment.random_erasing import RandomErasing
from utils.augment.resized_crop import DecodedCrop, ResizedCrop
from utils.data.images.dali import DaliReader
from utils.data.images.records import RecordReader
from utils.data.images.sources import load_image_data
from utils.errors import UserError
from utils.settings import ImageSettings
from utils.settings.config import parse
from utils.tasks import picture_data, picture_loaders, pictures
from utils.tasks.pictures import Pictures, load_image_task
from utils.weights.card import ModelCard
from utils.weights.pretrained import Pretrained


class Lines:
    """A console that keeps its messages."""

    def __init__(self):
        self.said = []

    def say(self, line):
        self.said.append(line)


@pytest.fixture
def load(tmp_path):
    make_tree(tmp_path / "pictures", per_class=12)
    tasks = []

    def load_task(**flags):
        settings = ImageSettings()
        chosen = {
            "dataset": "imagefolder",
            "data_dir": str(tmp_path / "pictures"),
            "cache_dir": str(tmp_path / "cache"),
            "batch_size": 4,
            "crop_padding": 2,
            "hflip": 0.5,
            "workers": 0,
        }
        for name, value in (chosen | flags).items():
            assert hasattr(settings, name)
            setattr(settings, name, value)
        tasks.append(load_image_task(settings, torch.device("cpu"), Lines()))
        return tasks[-1]

    yield load_task
    for task in tasks:
        task.close()
        task.close()


def batches(task) -> list:
    loaders = [task.train, task.train, task.test, *([task.val] if task.val else [])]
    return [
        tensor
        for epoch, loader in enumerate(loaders)
        for batch in loader.epoch(epoch)
        for tensor in (batch.inputs, batch.targets)
    ]


@pytest.mark.parametrize(
    "flags", [{}, {"val_fraction": 0.25, "random_erasing": 0.5, "alternate_flips": True}], ids=str
)
def test_workers_change_nothing(load, flags):
    plain, task = load(**flags), load(**flags, workers=2)
    assert plain.pool is None and task.pool.workers == 2 and not worker_processes()
    assert plain.data.fingerprint == task.data.fingerprint
    for one, other in zip(batches(task), batches(plain), strict=True):
        assert torch.equal(one, other)
    assert len(worker_processes()) == 2
    task.close()
    assert not worker_processes()


def test_parts_are_rows_of_one_map(load):
    whole, task = load(), load(val_fraction=0.25, subset=0.5)
    assert (task.train.samples, task.val.samples) == (9 - 1, 6)  # one of 9 is left out (9 = 2 * 4)
    assert np.intersect1d(task.train.rows, task.val.rows).size == 0
    for loader in (task.train, task.val):
        assert loader.images.data_ptr() == task.train.images.data_ptr()
        labels = whole.data.train.labels[loader.rows]
        assert loader.labels.tolist() == labels.tolist()
    pixels = torch.cat([batch.inputs for batch in task.val.epoch()])
    expected = torch.from_numpy(task.data.train.images[task.val.rows])
    assert torch.equal(pixels, task.val.normalize(expected))


def test_another_kind_of_split_needs_no_change_elsewhere(load, monkeypatch):
    """Pictures that are decoded on demand make the same batches."""

    def load_records(*arguments, **options):
        data = load_image_data(*arguments, **options)
        splits = {name: records_of(getattr(data, name)) for name in ("train", "test")}
        return dataclasses.replace(data, **splits)

    flags = {"val_fraction": 0.25, "subset": 0.5, "random_erasing": 0.5, "mixup": "fixed"}
    decoded = load(**flags)
    monkeypatch.setattr(picture_data, "load_image_data", load_records)
    records = load(**flags, workers=None)
    assert records.pool is None and records.summary_entries == decoded.summary_entries
    for one, other in zip(batches(records), batches(decoded), strict=True):
        assert torch.equal(one, other)
    records.resize_evaluation(batch_size=2, ranks=1)
    assert {len(batch.targets) for batch in records.test.epoch()} == {2}


def test_workers_are_used_by_default_if_the_set_exceeds_half_of_the_memory(load, monkeypatch):
    size = 24 * 8 * 8 * 3
    monkeypatch.setattr(picture_loaders, "usable_cores", lambda: 3)
    for memory, val_fraction, workers in (
        (2 * size, 0, None),
        (2 * size - 1, 0, 3),
        (2 * size - 1, 0.25, None),  # the training split is smaller
        (float("inf"), 0, None),
    ):
        monkeypatch.setattr(picture_loaders, "available_memory", lambda memory=memory: memory)
        pool = load(workers=None, val_fraction=val_fraction).pool
        assert (pool and pool.workers) == workers
    monkeypatch.setattr(picture_loaders, "available_memory", lambda: 1)
    monkeypatch.setattr(picture_loaders, "usable_cores", lambda: 64)
    assert load(workers=None).pool.workers == picture_loaders.AUTOMATIC_WORKERS
    assert load(workers=0).pool is None
    # A set in memory needs no workers, whatever its size.
    assert load(workers=None, dataset="shapes", subset=20).pool is None


def test_random_erasing_comes_after_the_crop_in_the_mean_colour(load):
    assert isinstance(load().train.augment, CropFlip)
    task = load(random_erasing=0.3)
    augment = task.train.augment
    assert isinstance(augment, Chain) and augment.parts[1].probability == 0.3
    colour = augment.parts[1].colour
    assert colour.tolist() == [round(255 * mean) for mean in task.data.mean]
    filled = np.broadcast_to(colour, (1, 8, 8, 3)).copy()
    assert task.train.normalize(torch.from_numpy(filled)).abs().max() < 0.01
    assert task.test.augment is None


def test_pictures_can_be_decoded_while_training(load, monkeypatch):
    flags = {"val_fraction": 0.25, "subset": 0.5, "random_erasing": 0.5, "mixup": "fixed"}
    once, always = load(**flags), load(**flags, decode="always")
    assert always.data.train.encoded and always.summary_entries == once.summary_entries
    for one, other in zip(batches(always), batches(once), strict=True):
        assert torch.equal(one, other)
    monkeypatch.setattr(picture_loaders, "usable_cores", lambda: 6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # ranks that share the cores
    pool = load(decode="always", workers=None).pool
    assert (pool.workers, pool._ranks) == (3, 2)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_resized_crops(load, workers):
    flags = {"decode": "always", "crop": "resized", "cutout": 3, "random_erasing": 0.5}
    flags |= {"alternate_flips": True}
    task, same = load(**flags), load(**flags, workers=workers)
    augment = task.train.augment
    kinds = [type(part) for part in augment.parts]
    assert kinds == [ResizedCrop, CropFlip, RandomErasing]
    assert (augment.parts[1].padding, augment.parts[1].flip) == (0, 0)
    for one, other in zip(batches(task), batches(same), strict=True):
        assert torch.equal(one, other)


def test_operations_come_between_the_crop_and_what_hides_parts(load):
    flags = {"auto_augment": "rand-m9-mstd0.5-inc1", "cutout": 3, "random_erasing": 0.5}
    task = load(**flags)
    assert isinstance(task.train.augment, CropFlip) and task.train.augment.cutout == 0
    parts = task.train.later.parts
    assert [type(part) for part in parts] == [Operations, CropFlip, RandomErasing]
    assert (parts[1].padding, parts[1].flip, parts[1].cutout) == (0, 0, 3)
    assert parts[0].fill.tolist() == pytest.approx([255 * mean for mean in task.data.mean])
    assert task.test.augment is task.test.later is None
    encoded = load(**flags, decode="always")  # the decoder crops, all else is the same
    assert encoded.train._reader.augment == task.train.augment
    for one, other in zip(batches(encoded), batches(task), strict=True):
        assert torch.equal(one, other)
    jitter = load(auto_augment="3a").train.later.parts[0]
    assert [type(policy).__name__ for policy in jitter.policies] == ["OneOf", "ColourJitter"]
    assert len(load(auto_augment="3a", color_jitter="0").train.later.parts[0].policies) == 1
    assert load(color_jitter="0.4").train.later.parts[0].fill is None
    # Beside other policies a recipe's jitter counts for nothing, as with timm.
    other = load(auto_augment="ta_wide", color_jitter="0.4").train.later.parts[0]
    assert len(other.policies) == 1 and other.fill is None


@pytest.mark.slow
def test_operations_with_workers(load):
    flags = {"auto_augment": "ra", "decode": "always", "crop": "resized", "ra_reps": 2}
    for one, other in zip(batches(load(**flags)), batches(load(**flags, workers=1)), strict=True):
        assert torch.equal(one, other)


def test_decoded_pictures_are_cropped_and_resized_on_the_device(load):
    flags = {"random_erasing": 0.5, "alternate_flips": True}
    task = load(decode="once", crop="resized", crop_area=0.3, **flags)
    assert task.train.augment is None
    assert [type(part) for part in task.train.later.parts] == [DecodedCrop, RandomErasing]
    assert task.train.later.parts[0] == DecodedCrop(0.3, 0.5)
    assert next(iter(task.train.epoch())).inputs.shape[2:] == task.data.train.shape[:2]


def test_another_size_for_evaluation(load):
    flags = {"decode": "always", "image_size": 8, "val_fraction": 0.25, "ra_reps": 3}
    task, same = load(**flags, eval_size=12), load(**flags, eval_size=8)
    shapes = [
        next(iter(each.epoch())).inputs.shape[2:] for each in (task.train, task.val, task.test)
    ]
    assert shapes == [(8, 8), (12, 12), (12, 12)]
    assert (task.card.height, task.card.width) == (12, 12) and same.card.height == 8
    assert task.usual_sample().shape == (1, 3, 8, 8)
    for one, other in zip(task.train.epoch(1), same.train.epoch(1), strict=True):
        assert torch.equal(one.inputs, other.inputs)
    assert task.train.repeats == 3 and task.val.repeats == 1
    largest = picture_loaders.largest_batch
    assert largest(4, task.data.train, task.data.test) == largest(4, task.data.test)


def test_more_copies_than_an_optimizer_step_has_samples(load):
    """An earlier run with them can still be resumed or measured."""
    assert load(ra_reps=8, accumulation_steps=2).train.repeats == 8
    for flags in ({}, {"global_batch": 4, "accumulation_steps": 2}):
        with pytest.raises(UserError, match=r"--ra_reps 5: .* has 4 samples: take at most 4$"):
            load(ra_reps=5, **flags)
    with pytest.raises(UserError, match=r"take at most 20$"):
        load(ra_reps=21, batch_size=64, subset=20)
    assert load(ra_reps=5, resume="run").train.repeats == 5
    assert load(ra_reps=5, eval_only=True).train.repeats == 5


@pytest.mark.parametrize("heads", [None, 2])
def test_heads_that_weights_do_not_show_are_told(monkeypatch, heads):
    monkeypatch.setattr(pictures, "load_image_task", lambda *arguments: arguments)
    run = SimpleNamespace(
        console=Lines(), close_at_end=list, device=None, exchange=None, workers=None
    )
    card = heads and ModelCard(("a",), (0.5,), (0.5,), 8, 8, 1, heads)
    settings, _ = parse(vit_test.Settings, ["--dim", "8", "--heads", "2"], "")
    note = "note: these weights do not show their number of heads; --heads 2 is used"
    kind = Pictures(settings, None, "vit")
    kind.load_task(run, None, Pretrained({}, "weights.pth", card=card))
    assert run.console.said == ([] if heads else [note])
    settings.model = "test_vit"  # of timm, with its own number
    kind.load_task(run, None, Pretrained({}, "weights.pth"))
    settings.model = "vit"
    kind.load_task(run, None, None)
    assert run.console.said == ([] if heads else [note])


def test_dali_that_is_missing_is_named_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    settings = ImageSettings()
    settings.loader, settings.data_dir = "dali", str(tmp_path / "absent")
    with pytest.raises(UserError, match=r"--loader dali.*requirements-dali\.txt"):
        load_image_task(settings, torch.device("cuda"), Lines())


def test_dali_decodes_on_the_gpu_and_workers_on_a_cpu(load):
    task = load(loader="dali", decode="always", workers=3)
    assert task.pool.workers == 3
    assert all(type(one._reader) is RecordReader for one in (task.train, task.test))
    settings, console = ImageSettings(), Lines()
    settings.loader, settings.workers = "dali", 3
    splits = task.data.train, task.data.test
    picture_loaders._decoding(settings, *splits, torch.device("cpu"), console)[0].close()
    assert console.said == ["note: --loader dali is for NVIDIA GPUs: on a CPU the workers decode"]
    pool, options = picture_loaders._decoding(settings, *splits, torch.device("cuda", 1), console)
    reader = options["reader"](task.data.train.pictures, None)
    assert pool is None and isinstance(reader, DaliReader)
    assert (reader.device, reader.threads) == (1, 3)


def test_dali_needs_pictures_that_are_decoded_while_training():
    chosen = ["--dataset", "imagefolder", "--loader", "dali"]
    assert parse(ImageSettings, chosen, "")[0].decode == "always"
    with pytest.raises(UserError, match="--loader dali needs --decode always"):
        parse(ImageSettings, [*chosen, "--decode", "once"], "")
    said = []
    assert parse(ImageSettings, ["--loader", "dali"], "", said.append)[0].loader == "workers"
    assert len(said) == 1 and "--loader" in said[0]
