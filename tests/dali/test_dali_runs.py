"""Batches and whole runs with NVIDIA DALI on a CPU: those of --loader workers, to the bit."""

import json
from functools import partial
from multiprocessing import active_children, get_context

import pytest
import torch
from dali_pictures import load, make_photos
from safetensors.torch import load_file

from resnet50_test import main
from utils.augment.chain import Chain
from utils.augment.crop_flip import CropFlip
from utils.augment.random_erasing import RandomErasing
from utils.augment.resized_crop import ResizedCrop
from utils.data.images.dali import DaliGpuReader, DaliReader
from utils.data.workers import WorkerPool
from utils.errors import UserError

SIZE, BATCH = 32, 4
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("pictures") / "photos")


@pytest.fixture(scope="module")
def data(root):
    return load(root)


@pytest.fixture(scope="module")
def pool():
    """Two workers for all tests: each imports DALI and PyTorch."""
    said = []
    pool = WorkerPool(2, BATCH * SIZE * SIZE * 3, said.append)
    pool.said = said
    yield pool
    pool.close()


def loader(data, split, **options):
    options = {"batch_size": BATCH, "device": CPU} | options
    return split.loader(mean=data.mean, std=data.std, **options)


def assert_same(batches, expected):
    count = 0
    for one, other in zip(batches, expected, strict=True):
        assert torch.equal(one.inputs, other.inputs) and torch.equal(one.targets, other.targets)
        assert one[2:] == other[2:]
        count += 1
    assert count


def training(**options):
    return {"augment": ResizedCrop(), "shuffle": True, "seed": 3} | options


def workers():
    return [p for p in active_children() if isinstance(p, get_context("spawn").Process)]


def test_batches_are_those_of_the_other_decoder(data, pool):
    """Also from any step on, for evaluation, with each kind of augmentation and killed workers."""
    erased = Chain(ResizedCrop(), RandomErasing(SIZE, SIZE, 0.5, (10, 20, 30)))
    padded = CropFlip(SIZE, SIZE, padding=2)
    for options in (training(), training(augment=erased), training(augment=padded), {}):
        split = data.train if options else data.test
        ours = loader(data, split, reader=DaliReader, pool=pool, **options)
        plain = loader(data, split, **options)
        for epoch, start_step in ((0, 0), (1, 3)) if options else ((0, 0),):
            assert_same(ours.epoch(epoch, start_step), plain.epoch(epoch, start_step))
    ours = loader(data, data.train, reader=DaliReader, pool=pool, **training())
    batches = []
    for step, batch in enumerate(ours.epoch(5)):
        batches.append(batch)
        if step == 1:
            workers()[0].kill()
    assert_same(batches, loader(data, data.train, **training()).epoch(5))
    assert all("SIGKILL" in line and "no batch is lost" in line for line in pool.said)


def test_batches_are_the_same_on_two_ranks_and_without_workers(data):
    plain = loader(data, data.train, reader=DaliReader, batch_size=2 * BATCH, **training())
    assert_same(
        plain.epoch(2), loader(data, data.train, batch_size=2 * BATCH, **training()).epoch(2)
    )
    ranks = [
        loader(data, data.train, reader=DaliReader, rank=rank, ranks=2, **training()).epoch(2)
        for rank in range(2)
    ]
    for whole, *parts in zip(plain.epoch(2), *ranks, strict=True):
        assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
        assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)


def test_the_loader_takes_what_a_gpu_would_decode(data):
    """DaliGpuReader, on the CPU: pictures in their places, with the plans of their places."""
    reader = partial(DaliGpuReader, device=None, threads=2)
    erased = Chain(ResizedCrop(), RandomErasing(SIZE, SIZE, 0.5, (10, 20, 30)))
    for options in (training(augment=erased), {}):
        ours = loader(data, data.train, reader=reader, **options)
        plain = loader(data, data.train, **options)
        for one, other in zip(ours.epoch(1, 2), plain.epoch(1, 2), strict=True):
            assert torch.equal(one.targets, other.targets)
            apart = (one.inputs - other.inputs).abs() * torch.tensor(data.std)[:, None, None] * 255
            assert apart.mean() < 0.5 and apart.max() < 6.5


def test_a_damaged_picture_ends_the_run_in_one_line(tmp_path, pool, capfd):
    """DALI itself would print more."""
    from test_dali_decoding import damage, no_jpeg

    data = load(make_photos(tmp_path / "photos"))
    damage(data.train.pictures, 9, no_jpeg)
    with pytest.raises(UserError, match=r"\.jpg is not a readable picture"):
        list(loader(data, data.train, reader=DaliReader, pool=pool, **training()).epoch())
    said = capfd.readouterr()
    assert said.out == said.err == ""


# ---- runs ----------------------------------------------------------------------------------------


def run(root, output, *flags) -> int:
    """Without workers, which would have to start in every run."""
    settings = {
        "dataset": "imagefolder", "data_dir": root, "cache_dir": root.parent / "cache",
        "image_size": SIZE, "crop": "resized", "depth": 18, "width": 4, "batch_size": BATCH,
        "epochs": 2, "output": output, "device": "cpu", "workers": 0, "sched": "constant",
    }  # fmt: skip
    given = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    return main([*given, "--no_report", *map(str, flags)])


def weights(output):
    last = sorted((output / "checkpoints").iterdir())[-1]
    return load_file(last / "model.safetensors")


def assert_equal_weights(one, other):
    one, other = weights(one), weights(other)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_is_resumed_at_any_step_and_equals_one_without_dali(root, tmp_path):
    dali = ["--loader", "dali"]
    assert run(root, tmp_path / "plain") == 0
    assert run(root, tmp_path / "whole", *dali) == 0
    assert run(root, tmp_path / "parts", *dali, "--max_steps", 4) == 0
    assert main(["--resume", str(tmp_path / "parts"), "--max_steps", "none"]) == 0
    assert_equal_weights(tmp_path / "whole", tmp_path / "plain")
    assert_equal_weights(tmp_path / "parts", tmp_path / "whole")
    summaries = [
        json.loads((tmp_path / name / "summary.json").read_text()) for name in ("plain", "whole")
    ]
    assert summaries[0]["test_loss"] == summaries[1]["test_loss"]
    assert summaries[0]["steps"] == summaries[1]["steps"] == 12


def test_what_is_evaluated_later_needs_no_dali(root, tmp_path, capsys, monkeypatch):
    assert run(root, tmp_path / "run", "--loader", "dali", "--epochs", 1) == 0
    flags = ["--eval_only", "--resume", str(tmp_path / "run")]
    assert main([*flags, "--loader", "workers"]) == 0
    assert main([*flags]) == 0
    assert main(["--resume", str(tmp_path / "run"), "--loader", "workers"]) == 2
    assert "--loader" in capsys.readouterr().err
