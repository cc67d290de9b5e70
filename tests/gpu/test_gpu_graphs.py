"""--cuda_graphs on a GPU: a replayed run is the ordinary one, and the host waits for nothing."""

import pytest
import torch
from toy import history, make_trainer, use_engine

from utils.data.images.loader import Packed
from utils.engines.capture import CudaRecorder
from utils.engines.graphed_step import GraphedStep
from utils.mixup.mixing import Mixing
from utils.training.class_balance import ClassBalance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CUDA = torch.device("cuda", 0)


def graphed(folder, **options):
    trainer = make_trainer(folder, device=CUDA, **options)
    use_engine(trainer)
    return trainer


def mixing(**options):
    return Mixing(alpha=0.5, block=4, height=8, width=8, **options)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lamb", "muon", "madgrad", "ngd"])
def test_a_run_is_the_ordinary_one(tmp_path, optimizer, precision, capsys):
    """Without dropout; in float32 up to the rounding of the learning rate."""
    options = {
        "optimizer": optimizer, "precision": precision, "ema_decay": 0.9, "clip": 1.0,
        "dropout": 0.0, "epochs": 3, "lr": 0.01,
    }  # fmt: skip
    plain = make_trainer(tmp_path / "plain", device=CUDA, **options)
    plain.fit()
    ours = graphed(tmp_path / "ours", **options)
    assert isinstance(ours.steps, GraphedStep)
    ours.fit()
    assert "not used" not in capsys.readouterr().out and ours.steps.holds_memory
    exact = precision == "fp32" and optimizer in ("sgd", "adamw")  # others magnify rounding
    tolerance = 1e-4 if exact else 3e-2
    states = plain.steps.model.state_dict(), ours.steps.model.state_dict()
    states += plain.steps.average.state_dict(), ours.steps.average.state_dict()
    for expected, found in (states[:2], states[2:]):
        for name, tensor in expected.items():
            torch.testing.assert_close(
                found[name],
                tensor,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda m, n=name: f"{n}: {m}",
            )
    lines = [(line["step"], line["split"]) for line in history(tmp_path / "ours")]
    assert lines == [(line["step"], line["split"]) for line in history(tmp_path / "plain")]


def test_a_run_with_class_weights_is_the_ordinary_one(tmp_path, capsys):
    balance = ClassBalance(0.1, torch.tensor([0.2, 1.0, 3.0], device=CUDA), focal_gamma=1.0)
    options = {"balance": balance, "clip": 1.0, "dropout": 0.0, "epochs": 3, "lr": 0.01}
    plain = make_trainer(tmp_path / "plain", device=CUDA, **options)
    plain.fit()
    ours = graphed(tmp_path / "ours", **options)
    ours.fit()
    assert "not used" not in capsys.readouterr().out and ours.steps.holds_memory
    for name, tensor in plain.steps.model.state_dict().items():
        found = ours.steps.model.state_dict()[name]
        torch.testing.assert_close(found, tensor, rtol=1e-4, atol=1e-4)


def test_a_run_that_learns_how_to_mix_is_the_ordinary_one(tmp_path, capsys):
    """With NGD, whose graphs are of two kinds; the steps that learn are ordinary ones."""
    options = {"optimizer": "ngd", "dropout": 0.0, "epochs": 6, "lr": 0.01}

    def learning():
        return mixing(meta_form="policy", clean_samples=4, update_every=3)

    plain = make_trainer(tmp_path / "plain", device=CUDA, mixing=learning(), **options)
    plain.fit()
    ours = graphed(tmp_path / "ours", mixing=learning(), **options)
    ours.fit()
    assert "not used" not in capsys.readouterr().out and len(ours.steps._graphs) == 2
    for one, other in (
        (plain.steps.model.state_dict(), ours.steps.model.state_dict()),
        (plain.steps.meta.state_dict(), ours.steps.meta.state_dict()),
    ):
        for name, tensor in one.items():
            torch.testing.assert_close(other[name], tensor, rtol=3e-2, atol=3e-2)


def test_graphs_are_chosen_where_steps_are_launch_bound(tmp_path, capsys):
    """A toy network's kernels take microseconds each. The choice itself waits for nothing."""
    trainer = make_trainer(tmp_path, device=CUDA, dropout=0.0, epochs=4)
    use_engine(trainer, "auto")
    trainer.fit()
    said = capsys.readouterr().out
    assert said.count("CUDA graphs: used, because launching a step takes ") == 1
    assert trainer.steps.holds_memory and "not used" not in said


def test_graphs_are_not_chosen_where_the_gpu_is_slower(tmp_path, capsys):
    trainer = make_trainer(tmp_path, device=CUDA, dropout=0.0, epochs=4)
    use_engine(trainer, "auto")
    real, cycles = trainer.steps.forward_backward_device, 50_000_000  # about 30 ms

    def slowly(batch):
        torch.cuda._sleep(cycles)
        real(batch)

    trainer.steps.forward_backward_device = slowly
    trainer.fit()
    assert "graphs" not in capsys.readouterr().out and not trainer.steps.holds_memory
    assert "launching a step takes" in trainer.steps.refused


def test_the_choice_waits_for_nothing(tmp_path, capsys):
    trainer = make_trainer(tmp_path, device=CUDA, dropout=0.0)
    use_engine(trainer, "auto")
    trainer.prepare(0)
    trainer.steps.guard.remember()
    for number, batch in enumerate(trainer.loader.epoch(0)):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if number > 0 else "default")
        try:
            trainer.steps.forward_backward(batch)
            trainer.steps.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    used = "CUDA graphs: used" in capsys.readouterr().out
    assert used or trainer.steps.refused  # the choice has been made


def test_augmentation_is_in_the_graph(tmp_path):
    trainer = graphed(tmp_path, epochs=2)
    made, captured = trainer.loader.made, []

    def watched(batch):
        if torch.cuda.is_current_stream_capturing():
            captured.append(batch.inputs)
        return made(batch)

    trainer.loader.made = watched
    trainer.fit()
    (inputs,) = captured
    assert isinstance(inputs, Packed) and inputs.choices.is_cuda


def test_other_random_numbers_in_every_replay(tmp_path):
    """By dropout, at the same weights and batch."""
    trainer = graphed(tmp_path, dropout=0.5, lr=1e-30)
    trainer.prepare(0)
    trainer.steps.guard.remember()
    batch, losses = next(iter(trainer.loader.epoch(0))), []
    for _ in range(8):
        before = trainer.steps.window.clone()
        trainer.steps.forward_backward(batch)
        trainer.steps.update()
        losses.append((trainer.steps.window - before)[0].item())
    assert trainer.steps.holds_memory and len(set(losses)) > 4


@pytest.mark.parametrize("mixed", [None, mixing(), mixing(cutmix_alpha=1.0)])
def test_no_wait_in_replayed_steps(tmp_path, mixed):
    trainer = graphed(tmp_path, clip=1.0, ema_decay=0.9, mixing=mixed)
    for epoch in range(4):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if epoch == 3 else "default")
        try:
            trainer.prepare(epoch)
            trainer.steps.guard.remember()
            for batch in trainer.loader.epoch(epoch):
                trainer.steps.forward_backward(batch)
                trainer.steps.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert trainer.steps.holds_memory and not trainer.steps.refused


def test_a_step_that_is_not_finite_leaves_no_trace_in_a_replay(tmp_path):
    trainer = graphed(tmp_path, ema_decay=0.9)
    trainer.prepare(0)
    trainer.steps.guard.remember()
    for batch in list(trainer.loader.epoch(0))[:5]:
        trainer.steps.forward_backward(batch)
        trainer.steps.update()
    before = {name: tensor.clone() for name, tensor in trainer.steps.model.state_dict().items()}
    trainer.loader.normalize.shift.fill_(float("nan"))  # read in the graph, as the augmentation is
    trainer.steps.forward_backward(batch)
    trainer.steps.update()
    for name, tensor in trainer.steps.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert trainer.steps.guard.left_out.tolist() == [1, 5, 0]


def test_a_step_that_waits_is_found_before_a_capture(tmp_path, capsys):
    """A host read after the backward pass, and one in a thread of autograd."""
    failed = len(CudaRecorder.failed)
    trainer = graphed(tmp_path, epochs=2)
    real = trainer.steps.forward_backward_device

    def reads(batch):
        real(batch)
        trainer.steps.step_sums.sum().item()

    def hook(gradient):
        gradient.sum().item()

    trainer.steps.forward_backward_device = reads
    trainer.steps.model[-1].weight.register_hook(hook)
    trainer.fit()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "waits for" in line]
    assert "because the host waits for the GPU within a step (" in line
    assert line.count("test_gpu_graphs.py:") == 2
    assert trainer.progress.step == trainer.plan.total_steps
    assert len(CudaRecorder.failed) == failed
    assert torch.cuda.get_sync_debug_mode() == 0


def test_a_capture_that_fails_leaves_an_ordinary_run(tmp_path, capsys):
    """The host reads a value in the capture alone. The random numbers are those of an ordinary run,
    and memory is given back."""
    failed, runs = len(CudaRecorder.failed), []  # what is in the list must live on
    for name in ("plain", "ours"):
        make = graphed if name == "ours" else make_trainer
        options = {} if name == "ours" else {"device": CUDA}
        trainer = make(tmp_path / name, epochs=2, dropout=0.5, **options)
        real = trainer.steps.forward_backward_device

        def reads(batch, trainer=trainer, real=real):
            real(batch)
            if torch.cuda.is_current_stream_capturing():
                trainer.steps.step_sums.sum().item()

        trainer.steps.forward_backward_device = reads
        torch.cuda.manual_seed(3)
        training = torch.cuda.current_stream()
        trainer.fit()
        assert torch.cuda.current_stream() == training
        runs.append((trainer, torch.cuda.get_rng_state()))
    (plain, state), (ours, same_state) = runs
    assert capsys.readouterr().out.count("not used, because the capture failed (") == 1
    assert len(CudaRecorder.failed) == failed + 1 and ours.progress.step == ours.plan.total_steps
    assert torch.equal(state, same_state)
    for name, tensor in plain.steps.model.state_dict().items():
        torch.testing.assert_close(
            ours.steps.model.state_dict()[name], tensor, rtol=1e-4, atol=1e-4
        )
    # If the allocator still took part in a capture, this would be an internal error.
    torch.cuda.empty_cache()


def test_a_capture_after_one_that_failed(tmp_path):
    """As by another trainer in the same process."""
    recorder = CudaRecorder(CUDA)
    value = torch.ones(8, device=CUDA)
    with pytest.raises(RuntimeError):
        recorder.capture(lambda: torch.nn.functional.dropout(value).sum().item())
    replay = CudaRecorder(CUDA).capture(lambda: value.mul_(2))
    replay()
    assert value.tolist() == [2.0] * 8


def test_checkpoints_and_resume(tmp_path):
    first = graphed(tmp_path, optimizer="adamw", ema_decay=0.9, save_steps=5, epochs=2)
    first.fit()
    again = graphed(tmp_path, optimizer="adamw", ema_decay=0.9, epochs=3)
    again.restore(again.saver.store.load())
    assert again.fit().step == again.plan.total_steps and again.steps.holds_memory
    assert isinstance(again.steps.recorder, CudaRecorder)
