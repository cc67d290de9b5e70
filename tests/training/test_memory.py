"""Out of memory: one line that names a batch that fits, and nothing lost."""

import pytest
import torch
from toy import Classification, Precision, make_trainer, network

from utils.errors import UserError
from utils.training.memory import is_out_of_memory, largest_batch


@pytest.mark.parametrize("failed", [2, 3, 8, 100, 128, 1000])
def test_largest_batch_fits_and_is_no_small_part_of_what_fits(failed):
    for room in range(failed):
        tried = []

        def attempt(n, room=room, tried=tried):
            tried.append(n)
            if n > room:
                raise torch.OutOfMemoryError("no room")

        found = largest_batch(attempt, failed)
        assert found <= room and (found >= 0.6 * room - 1 or room < 2)
        assert (found == 0) == (room == 0)
        assert len(tried) <= 14


def test_other_errors_come_out():
    def attempt(n):
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        largest_batch(attempt, 8)


def test_what_counts_as_out_of_memory():
    said = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    assert is_out_of_memory(RuntimeError(said)) and is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes")) and not is_out_of_memory(ValueError())


class Cramped(Classification):
    """Has room for `room` samples, from step `since` on."""

    def __init__(self, model, room, since=0):
        super().__init__(model, Precision("fp32", torch.device("cpu")))
        self.room, self.since, self.calls = room, since, 0

    def __call__(self, inputs, targets, mixing=None):
        self.calls += 1
        if self.calls > self.since and len(inputs) > self.room:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return super().__call__(inputs, targets)


def test_at_the_start(tmp_path):
    model = network()
    trainer = make_trainer(tmp_path, model=model, objective=Cramped(model, 5), batch_size=10)
    expected = r"out of memory: --batch_size 10 does not fit, --batch_size 5 .*_steps 2 .*2 GiB"
    with pytest.raises(UserError, match=expected):
        trainer.fit()
    assert trainer.saver.store.steps() == []


def test_later_saves_the_last_whole_step(tmp_path):
    model = network()
    trainer = make_trainer(tmp_path, model=model, objective=Cramped(model, 2, since=4))
    with pytest.raises(UserError, match="Step 4 is saved"):
        trainer.fit()
    checkpoint = trainer.saver.store.load()
    assert checkpoint.step == 4
    assert checkpoint.model["1.num_batches_tracked"].item() == 4  # the failed step took it back


def test_nothing_fits(tmp_path):
    model = network()
    trainer = make_trainer(tmp_path, model=model, objective=Cramped(model, 0))
    with pytest.raises(UserError, match="not even one sample fits"):
        trainer.fit()
