"""The loader: which samples, in which order, with which pixels."""

import itertools
from contextlib import closing

import numpy as np
import pytest
import torch

from utils.augment.chain import Chain
from utils.augment.crop_flip import CropFlip
from utils.augment.random_erasing import RandomErasing
from utils.augment.resized_crop import DecodedCrop
from utils.data.images.loader import ImageLoader, Normalize, Packed, upload
from utils.data.workers import WorkerPool
from utils.errors import UserError

CPU = torch.device("cpu")
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def pictures(n, height=6, width=8):
    return np.random.default_rng(n).integers(0, 256, (n, height, width, 3), dtype=np.uint8)


def make_loader(n, batch_size, accumulation=1, *, images=None, augment=None, **settings):
    """Labels are positions, so that the targets of a batch tell its samples."""
    images = pictures(n) if images is None else images
    settings = {"shuffle": True, "seed": 3} | settings
    return ImageLoader(
        images, np.arange(n), mean=MEAN, std=STD, batch_size=batch_size, device=CPU,
        accumulation=accumulation, augment=augment, **settings,
    )  # fmt: skip


def visited(batches) -> list[int]:
    return [int(target) for batch in batches for target in batch.targets]


def steps_of(batches) -> list[list]:
    """The micro-batches of each optimizer step."""
    steps = [[]]
    for batch in batches:
        steps[-1].append(batch)
        if batch.ends_step:
            steps.append([])
    assert steps.pop() == []
    return steps


def pixels(loader, epoch=0, start_step=0) -> torch.Tensor:
    return torch.cat([batch.inputs for batch in loader.epoch(epoch, start_step)])


def augmentation():
    return CropFlip(6, 8, padding=2, cutout=2)


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_each_sample_once_an_epoch(accumulation):
    for n, batch_size in itertools.product((1, 2, 3, 7, 8, 9, 13, 24, 25), (1, 2, 3, 4, 8, 30)):
        loader = make_loader(n, batch_size, accumulation)
        step_size = batch_size * accumulation
        batches = list(loader.epoch(0))
        samples = visited(batches)
        # A step of one sample is left out; BatchNorm cannot train on it.
        lone = n > 1 and step_size > 1 and n % step_size == 1
        assert len(samples) == len(set(samples)) == loader.samples == n - lone
        assert lone or set(samples) == set(range(n))
        assert sum(batch.ends_step for batch in batches) == loader.steps_per_epoch
        assert batches[-1].ends_step
        for step in steps_of(batches):
            sizes = [len(batch.targets) for batch in step]
            assert {batch.step_samples for batch in step} == {sum(sizes)}
            assert sum(sizes) == step_size or step[-1] is batches[-1]
            # With larger batches a lone sample joins the micro-batch before it.
            assert len(sizes) <= accumulation and max(sizes) <= batch_size + (accumulation > 1)
            assert min(sizes) > 1 or batch_size == 1 or n == 1


def test_another_sample_is_left_out_each_epoch():
    loader = make_loader(9, 4)
    assert len({frozenset(range(9)) - {*loader.order(epoch)} for epoch in range(10)}) > 1


def test_order_depends_on_seed_and_epoch_alone():
    orders = {
        (seed, epoch): tuple(make_loader(50, 8, seed=seed).order(epoch))
        for seed in (0, 1)
        for epoch in (0, 1, 2)
    }
    assert len(set(orders.values())) == 6
    assert orders[1, 2] == tuple(make_loader(50, 8, seed=1).order(2))
    assert visited(make_loader(50, 7, seed=1).epoch(2)) == list(orders[1, 2])[:49]


class WholePicture(DecodedCrop):
    def windows(self, plan, sizes):
        return np.concatenate([0 * sizes, sizes], 1)


@pytest.mark.parametrize(
    "augment",
    [
        {"augment": Chain(CropFlip(6, 8, padding=0), CropFlip(6, 8, padding=0, flip=0))},
        {"augment": None, "later": Chain(WholePicture())},
    ],
    ids=["augment", "later"],
)
def test_alternate_flips(augment):
    """As drawn once by the samples' indices, then in every other epoch; divided in any way."""
    n, first = 16, np.random.default_rng([3, 3]).integers(2, size=16)
    plain = make_loader(n, n, shuffle=False)
    inputs = pixels(plain)
    for rank, ranks, accumulation in ((0, 1, 1), (0, 2, 2), (1, 2, 2)):
        loader = make_loader(
            n, 2, accumulation, rank=rank, ranks=ranks, alternate_flips=True, **augment
        )
        for epoch, start_step in ((0, 0), (1, 0), (2, 1)):
            for batch in loader.epoch(epoch, start_step):
                for one, sample in zip(batch.inputs, batch.targets, strict=True):
                    mirrored = (first[sample] + epoch) % 2 == 1
                    assert torch.equal(one, inputs[sample].flip(-1) if mirrored else inputs[sample])
    assert 0 < first.sum() < n
    if augment["augment"]:  # the crops are those without it
        one, other = (
            make_loader(n, 4, augment=augmentation(), alternate_flips=alternate)
            for alternate in (False, True)
        )
        same = [torch.equal(a, b) for a, b in zip(pixels(one), pixels(other), strict=True)]
        assert 0 < sum(same) < n


@pytest.mark.parametrize("accumulation", [1, 3])
def test_start_step_continues_exactly(accumulation):
    loader = make_loader(29, 4, accumulation, augment=augmentation())
    whole = list(loader.epoch(1))
    ends = [index + 1 for index, batch in enumerate(whole) if batch.ends_step]
    for step, begin in enumerate([0, *ends]):
        rest = list(loader.epoch(1, start_step=step))
        assert len(rest) == len(whole) - begin
        for one, other in zip(rest, whole[begin:], strict=True):
            assert torch.equal(one.inputs, other.inputs)
            assert torch.equal(one.targets, other.targets)
            assert one[2:] == other[2:]


@pytest.mark.parametrize(("batch_size", "accumulation"), [(4, 2), (2, 4), (1, 8), (8, 1), (3, 3)])
@pytest.mark.parametrize("n", [30, 29, 25, 8, 5])
def test_accumulation_trains_on_what_the_large_batch_has(n, batch_size, accumulation):
    micro = make_loader(n, batch_size, accumulation, augment=augmentation())
    large = make_loader(n, batch_size * accumulation, augment=augmentation())
    assert micro.samples == large.samples and micro.steps_per_epoch == large.steps_per_epoch
    assert micro.step_size == large.step_size
    assert torch.equal(pixels(micro, epoch=2), pixels(large, epoch=2))
    for parts, whole in zip(steps_of(micro.epoch(2)), large.epoch(2), strict=True):
        assert visited(parts) == visited([whole])
        assert {part.step_samples for part in parts} == {whole.step_samples}


def test_augmentation_differs_between_epochs_and_steps():
    """The same picture over and over: only the augmentation tells the batches apart."""
    same = np.repeat(pictures(1), 32, axis=0)
    loader = make_loader(32, 8, images=same, augment=augmentation())
    batches = [batch.inputs for epoch in (0, 1) for batch in loader.epoch(epoch)]
    assert not any(map(torch.equal, batches, batches[1:]))
    again = [batch.inputs for epoch in (0, 1) for batch in loader.epoch(epoch)]
    assert all(map(torch.equal, batches, again))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("channels_last", [True, False])
def test_normalize_against_float64(channels, channels_last):
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 7, channels), dtype=np.uint8)
    mean, std = MEAN[:channels], STD[:channels]
    result = Normalize(mean, std, 7, CPU, channels_last)(torch.from_numpy(images))
    expected = (images.astype(np.float64) / 255 - mean) / std
    assert result.dtype == torch.float32 and result.shape == (5, channels, 4, 7)
    np.testing.assert_allclose(result, expected.transpose(0, 3, 1, 2), rtol=0, atol=1e-6)
    order = torch.channels_last if channels_last else torch.contiguous_format
    assert result.is_contiguous(memory_format=order)


def test_a_channel_of_one_value_stays_finite():
    images = torch.full((2, 4, 4, 3), 77, dtype=torch.uint8)
    result = Normalize((77 / 255,) * 3, (0.0, 0.1, 0.0), 4, CPU)(images)
    assert result.abs().max() < 1e-5


@pytest.mark.parametrize("batch_size", [1, 3, 4, 5, 9, 100])
def test_evaluation_keeps_the_order_and_counts_each_once(batch_size):
    loader = make_loader(9, batch_size, shuffle=False)
    assert visited(loader.epoch()) == visited(loader.epoch(5)) == list(range(9))
    assert loader.samples == 9 and loader.steps_per_epoch == -(-9 // batch_size)
    expected = (pictures(9).astype(np.float64) / 255 - MEAN) / STD
    np.testing.assert_allclose(pixels(loader), expected.transpose(0, 3, 1, 2), atol=1e-6)


@pytest.mark.parametrize("n", [9, 12])
def test_the_last_step_may_be_left_out_if_it_is_not_whole(n):
    steps = {"batch_size": 2, "accumulation": 2, "drop_last": True}
    loader = make_loader(n, shuffle=True, **steps)
    epochs = [visited(loader.epoch(epoch)) for epoch in range(9)]
    assert loader.samples == 4 * loader.steps_per_epoch == n // 4 * 4
    assert {len({*epoch}) for epoch in epochs} == {loader.samples}
    assert {*itertools.chain(*epochs)} == {*range(n)}
    assert all(batch.step_samples == 4 for batch in loader.epoch())
    assert make_loader(n, shuffle=False, **steps).samples == n
    with pytest.raises(UserError, match="--drop_last would skip all 3 training samples"):
        make_loader(3, shuffle=True, **steps)


def test_the_set_may_be_a_read_only_memory_map(tmp_path):
    """And no augmentation writes into it: with padding 0 the flip and the hole work in place."""
    file = tmp_path / "images.npy"
    np.save(file, pictures(10))
    content = file.read_bytes()
    mapped = np.load(file, mmap_mode="r")
    augment = CropFlip(6, 8, padding=0, flip=1, cutout=3)
    from_file = make_loader(10, 4, images=mapped, augment=augment)
    from_memory = make_loader(10, 4, augment=augment)
    for _ in range(2):
        assert torch.equal(pixels(from_file), pixels(from_memory))
    assert file.read_bytes() == content


@pytest.mark.parametrize("rows", [None, [7, 0, 3, 8, 1]])
def test_only_the_rows_of_a_split_go_to_a_device(rows):
    """On a GPU; the same copy here, in pieces of five pictures."""
    images = pictures(10, height=1024, width=1024)  # 3 MiB each, 16 MiB at a time
    rows = None if rows is None else np.array(rows)
    resident = upload(images, rows, CPU)
    assert np.array_equal(resident, images if rows is None else images[rows])


def test_rows_are_visited_as_a_copy_of_them_would_be():
    images, rows = pictures(30), np.random.default_rng(0).permutation(30)[:21]
    of_rows = ImageLoader(
        images, np.arange(21), mean=MEAN, std=STD, batch_size=4, device=CPU, rows=rows,
        accumulation=2, augment=augmentation(), shuffle=True, seed=3,
    )  # fmt: skip
    copied = make_loader(21, 4, 2, images=images[rows], augment=augmentation())
    assert of_rows.samples == copied.samples == 21 and of_rows.steps_per_epoch == 3
    for ours, expected in zip(of_rows.epoch(1), copied.epoch(1), strict=True):
        assert torch.equal(ours.inputs, expected.inputs)
        assert torch.equal(ours.targets, expected.targets) and ours[2:] == expected[2:]


AUGMENTATIONS = {
    "none": None,
    "crop and flip": augmentation(),
    "and erasing": Chain(augmentation(), RandomErasing(6, 8, 0.5, (10, 20, 30))),
}


@pytest.mark.parametrize("name", AUGMENTATIONS)
@pytest.mark.parametrize("rows", [None, np.random.default_rng(0).permutation(30)[:21]])
def test_deferred_batches_are_made_to_the_bit(name, rows):
    """From the packed choices, with the operations of a device: masks and one gather."""
    n = 30 if rows is None else 21
    plain, deferred = (
        ImageLoader(
            pictures(30), np.arange(n), mean=MEAN, std=STD, batch_size=4, device=CPU, rows=rows,
            augment=AUGMENTATIONS[name], shuffle=True, seed=3,
        )
        for _ in range(2)
    )  # fmt: skip
    deferred.suit_graphs()
    for expected, ours in zip(plain.epoch(1, 2), deferred.epoch(1, 2), strict=True):
        assert isinstance(ours.inputs, Packed) and ours.inputs.choices.shape[1] == len(ours.targets)
        made = deferred.made(ours)
        assert torch.equal(made.inputs, expected.inputs)
        assert torch.equal(made.targets, expected.targets) and made[2:] == expected[2:]
        assert plain.made(expected) is expected


def test_what_processes_read_is_not_deferred(tmp_path):
    np.save(tmp_path / "pictures.npy", pictures(8))
    mapped = np.load(tmp_path / "pictures.npy", mmap_mode="r")
    with closing(WorkerPool(1, 4 * mapped[0].nbytes, warn=print)) as pool:
        loader = make_loader(8, 4, images=mapped, pool=pool)
        loader.suit_graphs()
        assert all(isinstance(batch.inputs, torch.Tensor) for batch in loader.epoch(0))


def test_a_device_with_a_number_is_the_same_device():
    """cuda:0 and cuda, here cpu:0 and cpu: nothing is copied between them, or pinned."""
    rng = np.random.default_rng(0)
    loader = ImageLoader(
        rng.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8),
        np.arange(6) % 2,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        batch_size=4,
        device=torch.device("cpu", 0),
    )
    assert sum(len(batch.targets) for batch in loader.epoch()) == 6
