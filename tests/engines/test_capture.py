"""What a failed capture leaves behind, on a fake GPU: PyTorch's own `torch.cuda.graph`, and what a
capture uses of its C++ side, imitated as in PyTorch 2.10 and 2.11 ("old") and 2.14 ("new")."""

import _thread
import contextlib
import itertools
import threading
import warnings
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from toy import assert_same, everything, make_trainer, use_graphs

from utils.engines.capture import AHEAD, CudaRecorder
from utils.engines.graphed_step import WARM_UP
from utils.errors import UserError

GPU = torch.device("cuda", 0)
INVALIDATED = "operation failed due to a previous error during capture"


class State:
    def __init__(self, offset=0):
        self.offset, self.capturing = offset, False


class Generator:
    """The default generator. In old versions a capture holds it until that has ended well."""

    def __init__(self, machine, state):
        self.machine, self.state = machine, state

    def clone_state(self):
        return Generator(self.machine, State(self.state.offset))

    def graphsafe_set_state(self, other):
        self.state = other.state

    def draw(self, *size, device=None):
        if self.state.capturing != (self.machine.capturing is not None):
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        self.state.offset += 0 if self.state.capturing else 4  # in a capture: at each replay


class Graph:
    def __init__(self, machine):
        self.machine, self.holds_pool, self.ended = machine, False, False

    def capture_begin(self, pool, capture_error_mode, check_input_liveness=False):
        machine, self.pool = self.machine, pool
        machine.capturing, self.state = self, machine.generator.state
        self.state.capturing = True
        machine.recording.add(pool)
        machine.references[pool] += 1
        self.holds_pool = True

    def capture_end(self):
        machine = self.machine
        machine.capturing = None
        if machine.new:
            machine.recording.remove(self.pool)
            self.state.capturing = False
        if machine.invalid:
            raise RuntimeError(f"CUDA error: {INVALIDATED}\nCUDA kernel errors might be ...")
        machine.recording.discard(self.pool)
        self.state.capturing, self.ended = False, True

    def replay(self):
        raise NotImplementedError

    def reset(self):
        if self.holds_pool and (self.ended or self.machine.new):
            self.machine.release(0, self.pool)
            self.holds_pool = False


class Stream:
    def __init__(self, name):
        self.name, self.device = name, GPU

    def wait_stream(self, other):
        pass


class Machine:
    """Args:
    new: cleans up after itself as PyTorch 2.14 does.
    lasting: the generator stays broken, whatever is done.
    """

    def __init__(self, monkeypatch, new: bool, lasting: bool = False):
        self.new, self.lasting = new, lasting
        self.capturing, self.invalid, self.emptied = None, False, 0
        self.recording, self.references = set(), Counter()
        self.generator = Generator(self, State())
        self.training = self.stream = Stream("training")
        self.mode, self.modes = 0, []
        names, pools = itertools.count(), itertools.count(1)
        cuda = {
            "Stream": lambda device=None: Stream(f"side {next(names)}"),
            "stream": self.on,
            "current_stream": lambda device=None: self.stream,
            "set_stream": lambda stream: setattr(self, "stream", stream),
            "synchronize": lambda device=None: None,
            "empty_cache": self.empty_cache,
            "graph_pool_handle": lambda: (0, next(pools)),
            "CUDAGraph": lambda: Graph(self),
            "max_memory_allocated": lambda device: 0,
            "memory_allocated": lambda device: 0,
            "mem_get_info": lambda device: (1, 1),
            "default_generators": (self.generator,),
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": self.set_mode,
        }
        for name, value in cuda.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release)
        monkeypatch.setattr(torch, "rand", self.rand)
        monkeypatch.setattr(CudaRecorder, "failed", [])

    @contextlib.contextmanager
    def on(self, stream):
        before, self.stream = self.stream, stream
        yield  # as in PyTorch, it is put back only if __exit__ is called at all
        self.stream = before

    def empty_cache(self):
        assert not self.recording, "captures_underway.empty() INTERNAL ASSERT FAILED"
        self.emptied += 1

    def end(self, device, pool):
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def release(self, device, pool):
        self.references[pool] -= 1
        assert self.references[pool] >= 0, "uc >= 0 INTERNAL ASSERT FAILED"

    def rand(self, *size, device):
        if self.lasting:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.generator.draw()

    def set_mode(self, mode):
        self.modes.append(mode)
        self.mode = {"warn": 1}.get(mode, mode)
        warnings.warn("Synchronization debug mode is a prototype feature ...", stacklevel=2)

    def dropout_and_wait(self):
        """Cannot be captured, as the host reads a value."""
        self.generator.draw()
        self.invalid = True
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    def assert_well(self, draws: int):
        assert self.stream is self.training and self.capturing is None
        assert not self.recording and not any(self.references.values())
        before = self.generator.state.offset
        assert before == 4 * draws  # the sequence of random numbers is undisturbed
        self.generator.draw()
        assert self.generator.state.offset == before + 4


@pytest.fixture(params=["old", "new"])
def machine(request, monkeypatch):
    return Machine(monkeypatch, request.param == "new")


def test_the_fake_gpu_breaks_as_pytorch_does(monkeypatch):
    """In an old version, if nothing is cleaned up."""
    machine = Machine(monkeypatch, new=False)
    with (
        pytest.raises(RuntimeError, match=INVALIDATED),
        torch.cuda.graph(torch.cuda.CUDAGraph(), pool=(0, 9)),
    ):
        machine.dropout_and_wait()
    assert machine.stream is not machine.training and machine.recording == {(0, 9)}
    with pytest.raises(RuntimeError, match="outside graph capture"):
        machine.generator.draw()


def test_a_failed_capture_leaves_nothing(machine):
    recorder = CudaRecorder(GPU)
    machine.generator.draw()
    with pytest.raises(RuntimeError) as caught:
        recorder.capture(machine.dropout_and_wait)
    # One line of the first error, not of those that follow from it.
    assert str(caught.value) == "CUDA error: operation not permitted when stream is capturing"
    machine.assert_well(draws=1)
    assert len(CudaRecorder.failed) == 1 and machine.emptied == 2


@pytest.mark.parametrize("error", [ValueError("no kernel\nfor it"), AssertionError()])
def test_any_error_during_a_capture_is_cleaned_up(machine, error):
    """Even if the capture itself ends without one."""

    def fails():
        machine.generator.draw()
        raise error

    with pytest.raises(RuntimeError, match="no kernel$" if str(error) else "AssertionError"):
        CudaRecorder(GPU).capture(fails)
    machine.assert_well(draws=0)


def test_a_capture_that_works_is_left_alone(machine):
    recorder = CudaRecorder(GPU)
    replay = recorder.capture(machine.generator.draw)
    assert replay.__self__.ended and machine.references[recorder.pool] == 1
    assert machine.stream is machine.training and not CudaRecorder.failed


def test_a_process_that_stays_broken_is_reported(monkeypatch):
    machine = Machine(monkeypatch, new=True, lasting=True)
    with pytest.raises(UserError) as caught:
        CudaRecorder(GPU).capture(machine.dropout_and_wait)
    assert "--no_cuda_graphs" in str(caught.value) and "illegal memory" in str(caught.value)
    assert "not permitted when stream is capturing" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_goes_on_after_a_failed_capture(tmp_path, machine, capsys):
    """To the bit, as without an attempted graph."""
    plain = make_trainer(tmp_path / "plain", ema_decay=0.9)
    plain.fit()
    ours = make_trainer(tmp_path / "ours", ema_decay=0.9)
    use_graphs(ours, CudaRecorder(GPU))
    made = ours.loader.made

    def fails_in_a_capture(batch):
        return made(batch) if machine.capturing is None else machine.dropout_and_wait()

    ours.loader.made = fails_in_a_capture
    ours.fit()
    said = capsys.readouterr().out
    assert said.count("--cuda_graphs: not used, because the capture failed (CUDA error: op") == 1
    machine.assert_well(draws=0)
    assert_same(everything(ours), everything(plain))


def wait_for_the_device():
    """Warns as PyTorch does in sync debug mode "warn"."""
    warnings.warn("called a synchronizing CUDA operation (Triggered internally ...)", stacklevel=2)


def test_waits_are_noted_and_nothing_else_is(machine):
    recorder = CudaRecorder(GPU)
    machine.mode = 2
    with warnings.catch_warnings(record=True) as shown, recorder.watched() as places:
        warnings.simplefilter("always")
        assert machine.mode == 1
        wait_for_the_device()
        wait_for_the_device()
        saver = threading.Thread(target=wait_for_the_device)
        saver.start()
        saver.join()
        warnings.warn("something else", stacklevel=2)
    assert len(places) == 2 and all(place.startswith("test_capture.py:") for place in places)
    assert machine.mode == 2
    assert not any("synchronizing" in str(warning.message) for warning in shown)


def test_waits_in_threads_of_autograd_are_noted(machine):
    """Python code in a backward pass on a GPU runs in threads that C++ has started."""
    done = threading.Event()

    def backward():
        wait_for_the_device()
        done.set()

    with CudaRecorder(GPU).watched() as places:
        _thread.start_new_thread(backward, ())
        assert done.wait(60)
    assert len(places) == 1


def test_the_mode_is_put_back_after_an_error(machine):
    with pytest.raises(ValueError), CudaRecorder(GPU).watched():
        raise ValueError
    assert machine.mode == 0 and machine.modes == ["warn", 0]


def test_the_last_warm_up_step_is_watched(tmp_path, machine, capsys):
    """If the host waits in it, graphs are given up before a capture, and the step counts."""
    plain = make_trainer(tmp_path / "plain")
    plain.fit()
    capsys.readouterr()
    ours, watched = make_trainer(tmp_path / "ours"), []
    use_graphs(ours, CudaRecorder(GPU))
    update = ours.steps.update_device

    def waits(step, ema_weight):
        watched.append(machine.mode)
        if machine.mode:
            wait_for_the_device()
        update(step, ema_weight)

    ours.steps.update_device = waits
    ours.fit()
    said = capsys.readouterr().out
    assert watched[:5] == [0] * (WARM_UP - 1) + [1] + [0] * (5 - WARM_UP) and sum(watched) == 1
    assert said.count("not used, because the host waits for the GPU within a step (test_") == 1
    assert not CudaRecorder.failed and machine.emptied == 0
    assert_same(everything(ours), everything(plain))


def test_the_host_is_two_replays_ahead(machine, monkeypatch):
    log = []

    def event(blocking):
        number = len([what for what, _ in log if what == "record"])
        return SimpleNamespace(
            record=lambda stream: log.append(("record", number)),
            synchronize=lambda: log.append(("wait", number)),
        )

    monkeypatch.setattr(torch.cuda, "Event", event)
    recorder = CudaRecorder(GPU)
    for _ in range(5):
        recorder.keep_pace()
    assert [number for what, number in log if what == "wait"] == [0, 1, 2]
    assert log.index(("wait", 0)) == log.index(("record", AHEAD)) + 1
