"""The loader of texts: which texts, in which order, and how alike in length."""

import itertools
import sys

import numpy as np
import pytest
import torch

from utils.data.texts.equal_tokens import EqualTokensLoader, even_borders
from utils.data.texts.loader import SIZES, TextLoader, few_sizes
from utils.errors import UserError
from utils.mixup.mixing import Mixing
from utils.packed import pack

CPU = torch.device("cpu")


def texts(n, longest=30, seed=0):
    """(tokens, offsets) of n texts: the first token of a text is its number, the rest is random."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(1.5, 0.8, n).astype(np.int64) + 1, longest)
    offsets = np.append(0, np.cumsum(lengths))
    tokens = rng.integers(1, 60000, offsets[-1]).astype(np.int32)
    tokens[offsets[:-1]] = np.arange(n)
    return tokens, offsets


def make_loader(n, batch_size=4, accumulation=1, *, data=None, batch_tokens=None, **settings):
    """Labels are the numbers of the texts, so that the targets of a batch tell which it holds."""
    tokens, offsets = data or texts(n)
    settings = {"shuffle": True, "seed": 3, "max_len": 12, "bucket_batches": 10} | settings
    settings |= {"batch_size": batch_size, "accumulation": accumulation, "device": CPU}
    if batch_tokens is None:
        return TextLoader(tokens, offsets, np.arange(n), **settings)
    return EqualTokensLoader(tokens, offsets, np.arange(n), batch_tokens=batch_tokens, **settings)


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


def check_texts(batch, tokens, offsets, max_len):
    """The inputs of a batch are the texts that its targets name."""
    inputs = batch.inputs
    assert inputs.samples == len(batch.targets)
    assert inputs.borders.tolist() == inputs.offsets.tolist()
    grid = torch.zeros(inputs.samples * inputs.longest, dtype=torch.int64)
    grid[inputs.place] = inputs.ids
    longest = 0
    for number, (sample, row) in enumerate(
        zip(batch.targets.tolist(), grid.view(inputs.samples, -1).tolist(), strict=True)
    ):
        own = tokens[offsets[sample] : offsets[sample + 1]][:max_len].tolist()
        begin, end = inputs.offsets[number : number + 2].tolist()
        assert inputs.ids[begin:end].tolist() == own
        assert row == own + [0] * (inputs.longest - len(own))
        longest = max(longest, len(own))
    assert inputs.longest == longest


def same(one, other) -> bool:
    """Whether two batches are of the same texts, mixed alike."""
    pairs = list(zip(one.tensors(), other.tensors(), strict=True))
    alike = one.inputs.longest == other.inputs.longest and one[2:4] == other[2:4]
    return alike and all(torch.equal(a, b) for a, b in pairs)


# ---- which samples --------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_each_sample_once_an_epoch(accumulation):
    for n, batch_size in itertools.product((1, 2, 3, 7, 9, 13, 24, 25, 130), (1, 2, 4, 30)):
        loader = make_loader(n, batch_size, accumulation)
        step_size = batch_size * accumulation
        batches = list(loader.epoch(0))
        samples = visited(batches)
        lone = n > 1 and step_size > 1 and n % step_size == 1
        assert len(samples) == len(set(samples)) == loader.samples == n - lone
        assert samples == list(loader.order(0))
        assert sum(batch.ends_step for batch in batches) == loader.steps_per_epoch
        for step in steps_of(batches):
            sizes = [len(batch.targets) for batch in step]
            assert {batch.step_samples for batch in step} == {sum(sizes)}
            assert sum(sizes) == step_size or step[-1] is batches[-1]
            assert len(sizes) <= accumulation and max(sizes) <= batch_size + (accumulation > 1)


def test_batches_hold_the_texts_cut_to_max_len(tmp_path):
    tokens, offsets = texts(40)
    assert np.diff(offsets).max() > 12
    np.save(tmp_path / "tokens.npy", tokens)
    mapped = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    for data in ((tokens, offsets), (mapped, offsets), (tokens.astype(np.uint16), offsets)):
        for batch in make_loader(40, 8, 2, data=data).epoch(1):
            assert batch.inputs.ids.dtype == batch.inputs.place.dtype == torch.int64
            assert batch.inputs.offsets.dtype == torch.int32
            check_texts(batch, data[0], offsets, 12)


@pytest.mark.parametrize("batch_size", [1, 4, 9, 100])
@pytest.mark.parametrize("batch_tokens", [None, 25])
def test_evaluation_counts_each_once_and_goes_from_long_to_short(batch_size, batch_tokens):
    loader = make_loader(90, batch_size, shuffle=False, batch_tokens=batch_tokens)
    samples = visited(loader.epoch())
    assert samples == visited(loader.epoch(5)) == loader.order(0).tolist()
    assert sorted(samples) == list(range(90))
    lengths = loader.lengths[samples]
    assert (np.diff(lengths) <= 0).all()
    predicted, result = np.array(samples) * 10, np.empty(90, np.int64)
    result[loader.order(0)] = predicted
    assert result.tolist() == list(range(0, 900, 10))


# ---- in which order -------------------------------------------------------------------------


@pytest.mark.parametrize("batch_tokens", [None, 40])
def test_order_depends_on_seed_and_epoch_alone(batch_tokens):
    def order(seed, epoch, **others):
        settings = {"batch_tokens": batch_tokens, "seed": seed} | others
        return tuple(make_loader(200, **settings).order(epoch))

    orders = {(seed, epoch): order(seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)}
    assert len(set(orders.values())) == 6
    used = make_loader(200, seed=1, batch_tokens=batch_tokens)
    for epoch in (2, 0, 1, 2):
        list(used.epoch(epoch))
        assert tuple(used.order(epoch)) == orders[1, epoch]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("batch_tokens", [None, 40])
def test_start_step_continues_exactly(accumulation, batch_tokens):
    mixing = Mixing(alpha=0.4, block=2, meta_form="policy", clean_samples=3, update_every=2)
    settings = {"batch_tokens": batch_tokens, "mixing": mixing}
    loader = make_loader(99, 4, accumulation, **settings)
    whole = list(loader.epoch(1))
    ends = [index + 1 for index, batch in enumerate(whole) if batch.ends_step]
    assert len(ends) == loader.steps_per_epoch > 3
    for step, begin in enumerate([0, *ends]):
        rest = list(make_loader(99, 4, accumulation, **settings).epoch(1, start_step=step))
        assert len(rest) == len(whole) - begin
        assert all(map(same, rest, whole[begin:]))


@pytest.mark.parametrize(("batch_size", "accumulation"), [(4, 2), (2, 4), (1, 8), (3, 3)])
@pytest.mark.parametrize("n", [130, 129, 25, 8, 5])
def test_accumulation_trains_on_what_the_large_batch_has(n, batch_size, accumulation):
    micro = make_loader(n, batch_size, accumulation)
    large = make_loader(n, batch_size * accumulation)
    assert micro.samples == large.samples and micro.steps_per_epoch == large.steps_per_epoch
    for parts, whole in zip(steps_of(micro.epoch(2)), large.epoch(2), strict=True):
        assert visited(parts) == visited([whole])
        assert torch.equal(torch.cat([part.inputs.ids for part in parts]), whole.inputs.ids)
        assert {part.step_samples for part in parts} == {whole.step_samples}


def test_the_texts_of_a_step_are_of_similar_lengths():
    """There would be little padding, and yet every epoch has other steps, in another order."""
    data = texts(8000, longest=200)
    plain = make_loader(8000, 32, data=data, max_len=200, bucket_batches=1)  # steps of random texts
    loader = make_loader(8000, 32, data=data, max_len=200, bucket_batches=60)
    assert plain.padding() > 0.7 and loader.padding() < 0.12
    measured = [loader.lengths[batch.targets.numpy()] for batch in loader.epoch(0)]
    total = sum(len(lengths) * lengths.max() for lengths in measured)
    assert loader.padding() == pytest.approx(1 - loader.lengths.sum() / total)
    means = np.array([lengths.mean() for lengths in measured])
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.3  # the steps are shuffled
    for lengths in (each for each in measured if np.ptp(each) > 1):
        assert not (np.diff(lengths) >= 0).all() and not (np.diff(lengths) <= 0).all()
    first = {frozenset(visited([batch])) for batch in loader.epoch(0)}
    again = {frozenset(visited([batch])) for batch in loader.epoch(1)}
    assert not first & again


def test_the_texts_that_are_left_over_are_of_all_lengths():
    """They make up the last, smaller step of an epoch."""
    loader = make_loader(407, 10)
    lengths = [loader.lengths[loader.order(epoch)[400:]] for epoch in range(100)]
    assert np.mean(lengths) == pytest.approx(loader.lengths.mean(), rel=0.1)


# ---- steps of equally many tokens -----------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("shuffle", [True, False])
def test_steps_of_equal_tokens(accumulation, shuffle):
    for n, batch_tokens in itertools.product((2, 50, 999), (20, 100, 10**6)):
        loader = make_loader(n, 7, accumulation, batch_tokens=batch_tokens, shuffle=shuffle)
        total = int(loader.lengths.sum())
        steps = -(-total // (batch_tokens * accumulation))
        for epoch in range(3):
            batches = list(loader.epoch(epoch))
            made = steps_of(batches)
            assert len(made) == steps == loader.steps_per_epoch
            assert sorted(visited(batches)) == list(range(n)) and loader.samples == n
            sizes = [sum(len(batch.targets) for batch in step) for step in made]
            assert sizes == [step[0].step_samples for step in made] and min(sizes) >= 2
            for step in made:
                assert len(step) <= accumulation
                counts = [len(batch.targets) for batch in step]
                assert max(counts) - min(counts) <= 2
                tokens = sum(len(batch.inputs.ids) for batch in step)
                assert abs(tokens - total / steps) <= 2 * loader.max_len
    assert loader.step_size == round(n / steps)


def test_micro_batches_of_tokens_hold_whole_blocks_of_the_mixing():
    mixing = Mixing(alpha=0.4, block=8)
    loader = make_loader(999, 7, 3, batch_tokens=100, mixing=mixing)
    for step in steps_of(loader.epoch(0)):
        for batch in step[:-1]:
            assert len(batch.targets) % 8 == 0
        for batch in step:
            n = len(batch.targets)
            assert sorted(batch.mix_plan.partner.tolist()) == list(range(n))


def test_fewer_batch_tokens_than_a_text_has_are_refused():
    with pytest.raises(UserError, match="--batch_tokens 2 is less than a text has"):
        make_loader(50, batch_tokens=2)


@pytest.mark.parametrize(
    ("lengths", "steps"),
    [([1] * 10, 5), ([1] * 5, 4), ([100, 1, 1, 1], 2), ([1, 1, 1, 100], 2), ([9, 1, 1, 9], 4),
     ([1, 1, 1, 100, 1, 1, 1, 1, 1, 1], 5), ([5], 1)],
)  # fmt: skip
def test_borders_leave_no_step_empty(lengths, steps):
    borders = even_borders(np.array(lengths), steps)
    assert borders[0] == 0 and borders[-1] == len(lengths) and len(borders) == steps + 1
    assert np.diff(borders).min() >= (2 if 2 * steps <= len(lengths) else 1)


# ---- mixing, and what a batch is made of ----------------------------------------------------


@pytest.mark.parametrize("batch_tokens", [None, 60])
def test_mixing_plans_and_clean_samples(batch_tokens):
    mixing = Mixing(alpha=0.4, block=4, meta_form="sample", clean_samples=6)
    loader = make_loader(130, 8, 2, batch_tokens=batch_tokens, mixing=mixing)
    for step in steps_of(loader.epoch(1)):
        own = set(visited(step))
        for batch in step:
            n = len(batch.targets)
            assert batch.mix_plan.partner.shape == batch.mix_plan.lam.shape == (n,)
            inputs, targets = batch.clean
            assert inputs.samples == len(targets) == 6 and not own & set(targets.tolist())
            tokens, offsets = texts(130)
            check_texts(batch._replace(inputs=inputs, targets=targets), tokens, offsets, 12)
            found = {id(tensor) for tensor in batch.tensors()}
            parts = (batch.inputs.ids, batch.inputs.place, batch.inputs.offsets, batch.targets)
            parts += (batch.mix_plan.lam, inputs.ids, inputs.offsets, targets)
            assert found >= {id(part) for part in parts}


def test_a_step_mixes_alike_with_any_accumulation():
    plans = []
    for batch_size, accumulation in ((16, 1), (8, 2), (4, 4)):
        mixing = Mixing(alpha=0.4, block=4, per_sample=True)
        loader = make_loader(130, batch_size, accumulation, mixing=mixing)
        plans.append([])
        for step in steps_of(loader.epoch(0)):
            firsts = np.cumsum([0] + [len(batch.targets) for batch in step]).tolist()
            partner = [b.mix_plan.partner + f for b, f in zip(step, firsts[:-1], strict=True)]
            plans[-1] += [torch.cat(partner), torch.cat([b.mix_plan.lam for b in step])]
    for other in plans[1:]:
        assert all(map(torch.equal, plans[0], other))


def test_wrong_data_are_refused():
    tokens, offsets = texts(5)
    with pytest.raises(ValueError, match="4 labels, but 5 texts"):
        TextLoader(tokens, offsets, np.arange(4), batch_size=2, device=CPU, max_len=9)
    offsets[2] = offsets[3]
    with pytest.raises(ValueError, match="without tokens"):
        make_loader(5, data=(tokens, offsets))


def test_the_first_texts_of_a_batch():
    [batch] = make_loader(6, 6).epoch(0)
    whole = batch.inputs
    for k in (1, 3, 6, 9):
        part, n = whole.first(k), min(k, 6)
        tokens = int(whole.offsets[n])
        assert part.samples == n and part.longest == whole.longest
        assert part.offsets.tolist() == part.borders.tolist() == whole.offsets[: n + 1].tolist()
        assert torch.equal(part.ids, whole.ids[:tokens])
        assert torch.equal(part.place, whole.place[:tokens])


def test_few_sizes():
    assert few_sizes(np.array([7, 3, 4, 7, 3, 4]), 2).tolist() == [4, 7]
    assert few_sizes(np.array([7, 3, 4, 7, 3, 4]), 5).tolist() == [3, 4, 7]
    assert few_sizes(np.array([2]), 5).tolist() == [2]


def test_batches_that_suit_graphs_have_few_sizes():
    """Fillers follow the texts of each whole batch; on average less than an eighth of its
    tokens."""
    lengths = np.random.default_rng(0).lognormal(3.7, 0.4, 6005).astype(np.int64) + 1
    data = np.arange(lengths.sum()) % 99, np.append(0, np.cumsum(lengths))
    plain, filled = (make_loader(6005, 32, data=data, max_len=128) for _ in range(2))
    filled.suit_graphs()
    shapes, tokens, real, whole = set(), 0, 0, 0
    for epoch in range(3):
        for expected, batch in zip(plain.epoch(epoch), filled.epoch(epoch), strict=True):
            own, inputs = expected.inputs, batch.inputs
            assert torch.equal(batch.targets, expected.targets)
            assert inputs.samples == own.samples and not own.fillers
            assert torch.equal(inputs.padded(0)[:, : own.longest], own.padded(0))
            assert not inputs.padded(0)[:, own.longest :].any()
            if inputs.fillers:
                assert inputs.borders is None and len(batch.targets) == 32
                shapes.add((len(inputs.ids), len(inputs.offsets), inputs.longest))
                assert 1 <= inputs.offsets.diff().min() <= inputs.offsets.diff().max()
                assert inputs.offsets.diff().max() <= inputs.longest
                tokens, real, whole = tokens + len(inputs.ids), real + len(own.ids), whole + 1
    assert len(shapes) <= SIZES and whole >= 0.98 * 3 * (6005 // 32)
    assert tokens < 1.125 * real
    filled.suit_graphs(False)
    assert not any(batch.inputs.fillers for batch in filled.epoch(0))


def test_a_batch_is_made_without_a_loop_over_texts():
    """As many lines of Python for 256 texts as for 16."""

    def lines_of(texts: int) -> int:
        rng = np.random.default_rng(0)
        lengths = rng.integers(20, 70, texts)
        starts, tokens = np.cumsum(lengths) - lengths, rng.integers(0, 30000, lengths.sum())
        count = 0

        def trace(frame, event, argument):
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            pack(tokens.astype(np.uint16), starts, lengths, CPU)
        finally:
            sys.settrace(before)
        return count

    lines_of(16)  # the first call may import
    assert lines_of(16) == lines_of(256)
