"""Out of memory: one line that names half of the batch, and nothing lost."""

import errno
from types import SimpleNamespace

import pytest
import torch
from toy import Classification, Precision, loader, make_trainer, network

from utils.errors import UserError
from utils.runs.advice import memory_advice
from utils.training.memory import is_out_of_memory, succeeds


def test_other_errors_are_raised():
    def attempt():
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        succeeds(attempt)


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "GET was unable to find an engine to execute this computation",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    ],
)
def test_messages_of_libraries_count_as_out_of_memory(said):
    assert is_out_of_memory(RuntimeError(said))

    def attempt():
        raise RuntimeError(said)

    assert not succeeds(attempt) and succeeds(lambda: None)


def test_which_exceptions_count_as_out_of_memory():
    said = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    assert is_out_of_memory(RuntimeError(said)) and is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes")) and not is_out_of_memory(ValueError())


class Cramped(Classification):
    """Runs out of memory with more than `room` samples, after `since` calls."""

    def __init__(self, model, room, since=0):
        super().__init__(model, Precision("fp32", torch.device("cpu")))
        self.room, self.since, self.calls = room, since, 0

    def __call__(self, inputs, targets, mixing=None):
        self.calls += 1
        if self.calls > self.since and len(inputs) > self.room:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return super().__call__(inputs, targets)


def test_at_the_start_half_of_the_batch_is_named(tmp_path):
    model = network()
    trainer = make_trainer(tmp_path, model=model, objective=Cramped(model, 5), batch_size=10)
    expected = r"out of memory: --batch_size 10 does not fit, --batch_size 5 .*_steps 2 .*2 GiB"
    with pytest.raises(UserError, match=expected):
        trainer.fit()
    assert trainer.saver.store.steps() == []


@pytest.mark.parametrize("remedy", ["add --sparing: it keeps a step besides", ""])
def test_memory_of_an_engine_is_freed_and_its_remedy_named(tmp_path, remedy):
    model, freed = network(), []
    trainer = make_trainer(tmp_path, model=model, objective=Cramped(model, 2, since=4))

    def free_memory():
        freed.append(trainer.steps.objective.calls)
        return remedy

    trainer.steps.free_memory = free_memory
    with pytest.raises(UserError) as caught:
        trainer.fit()
    assert freed == [5]
    assert (f"; or {remedy}" in str(caught.value)) == bool(remedy)


def test_later_the_last_whole_step_is_saved(tmp_path):
    model = network()
    trainer = make_trainer(tmp_path, model=model, objective=Cramped(model, 2, since=4))
    with pytest.raises(UserError, match="Step 4 is saved"):
        trainer.fit()
    checkpoint = trainer.saver.store.load()
    assert checkpoint.step == 4
    assert checkpoint.model["1.num_batches_tracked"].item() == 4  # the failed step was taken back


def test_a_full_disk_does_not_hide_that_memory_ran_out(tmp_path, monkeypatch):
    model = network()
    trainer = make_trainer(tmp_path, model=model, objective=Cramped(model, 2, since=4))

    def write(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("utils.checkpoints.checkpoint.write_files", write)
    expected = (
        r"^out of memory: --batch_size 4 does not fit, .*\. Not saved: .*step 4: No space left"
    )
    with pytest.raises(UserError, match=expected):
        trainer.fit()
    assert trainer.saver.store.steps() == []


def test_advice_names_what_helps_in_that_run():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    kept = {"fused": "none", "compile": False, "freeze_backbone": False, "mixup": "none"}
    assert "--fused memory" in memory_advice(SimpleNamespace(**kept), cuda)["memory"]
    assert memory_advice(SimpleNamespace(**kept), cpu) == {}
    for other in ({"fused": "memory"}, {"compile": True}, {"freeze_backbone": True}):
        assert memory_advice(SimpleNamespace(**kept | other), cuda) == {}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((8, 1), "--batch_size 8 does not fit, --batch_size 4 may; "
                 "--accumulation_steps 2 keeps the optimizer step the same"),
        ((6, 2), "--batch_size 6 does not fit, --batch_size 3 may; "
                 "--accumulation_steps 4 keeps the optimizer step the same"),
        ((7, 1), "--batch_size 7 does not fit, --batch_size 2 may; "
                 "--global_batch 14 keeps the optimizer step the same"),
        ((2, 1), "--batch_size 2 does not fit, and no smaller size is possible"),
    ],
)  # fmt: skip
def test_one_of_many_processes_names_half_of_its_batch(tmp_path, flags, expected):
    data = loader(*flags, rank=1, ranks=2)
    model = network()
    trainer = make_trainer(tmp_path, model=model, data=data, objective=Cramped(model, 0))
    trainer.steps.exchange = SimpleNamespace(rank=1, size=2)
    with pytest.raises(UserError, match="out of memory in process 1 of 2: ") as error:
        trainer.within_memory(lambda: trainer.forward_backward(next(iter(data.epoch()))))
    assert expected in str(error.value)
