"""Batches with NVIDIA DALI, as on a GPU but on the CPU."""

from functools import partial

import torch
from dali_pictures import load, make_photos

from utils.augment.chain import Chain
from utils.augment.random_erasing import RandomErasing
from utils.augment.resized_crop import ResizedCrop
from utils.data.images.dali import DaliReader

SIZE, BATCH = 32, 4
CPU = torch.device("cpu")


def loader(data, split, **options):
    options = {"batch_size": BATCH, "device": CPU} | options
    return split.loader(mean=data.mean, std=data.std, **options)


def training(**options):
    return {"augment": ResizedCrop(), "shuffle": True, "seed": 3} | options


def test_batches_are_those_of_the_workers_but_for_a_few_levels(tmp_path):
    """Pictures in their places, with the plans of their places."""
    data = load(make_photos(tmp_path / "photos"))
    reader = partial(DaliReader, device=None, threads=2)
    erased = Chain(ResizedCrop(), RandomErasing(SIZE, SIZE, 0.5, (10, 20, 30)))
    for options in (training(augment=erased), {}):
        ours = loader(data, data.train, reader=reader, **options)
        plain = loader(data, data.train, **options)
        for one, other in zip(ours.epoch(1, 2), plain.epoch(1, 2), strict=True):
            assert torch.equal(one.targets, other.targets)
            apart = (one.inputs - other.inputs).abs() * torch.tensor(data.std)[:, None, None] * 255
            assert apart.mean() < 0.5 and apart.max() < 6.5
