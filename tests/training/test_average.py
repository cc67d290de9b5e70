"""The moving average: its formula, what it leaves alone, and how it is swapped in."""

import pytest
import torch
from torch import nn
from toy import everything, make_trainer, network

from utils.training.average import Average
from utils.training.guard import Guard


def test_it_equals_its_formula_in_float64():
    model = network()
    Guard(model)
    average = Average(model, 0.9)
    expected = {name: tensor.double() for name, tensor in average.live.items()}
    expected = {name: tensor.clone() for name, tensor in expected.items()}
    good = torch.tensor(False)
    for step in range(30):
        with torch.no_grad():
            for tensor in average.live.values():
                tensor.add_(torch.randn(tensor.shape))
        average.update(average.ema_weight(step), good)
        decay = min(0.9, (1 + step) / (10 + step))
        for name, tensor in average.live.items():
            expected[name] = decay * expected[name] + (1 - decay) * tensor.double()
    for name, tensor in expected.items():
        torch.testing.assert_close(average.mean[name].double(), tensor, rtol=1e-5, atol=1e-5)
    assert any("running_var" in name for name in average.mean)
    assert not any("num_batches" in name for name in average.mean)


def test_buffers_that_the_constructor_makes_are_not_saved():
    """As the masks of a Swin transformer: no plain model could load them."""
    model = network()
    model.register_buffer("mask", torch.ones(3), persistent=False)
    average = Average(model, 0.9)
    assert average.state_dict().keys() == model.state_dict().keys()


def test_shared_tensors_are_averaged_under_all_their_names():
    """A block that is used three times: a checkpoint names its tensors three times."""
    block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model, other = nn.Sequential(block, block, block), nn.Linear(2, 2)
    average = Average(model, 0.5)
    for tensor in average.live.values():
        tensor.data.add_(1.0)
    state = average.state_dict()
    assert state.keys() == model.state_dict().keys()
    for name, mean in average.mean.items():
        for number in "12":
            assert torch.equal(state[number + name[1:]], mean)
    assert not Average(other, 0.5).names_of_shared


def test_a_shared_buffer_that_is_saved_under_its_second_name_alone():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].register_buffer("mask", torch.ones(3), persistent=False)
    model[1].register_buffer("mask", model[0].mask)
    assert Average(model, 0.5).state_dict().keys() == model.state_dict().keys()


def test_a_skipped_step_changes_nothing():
    model = network()
    average = Average(model, 0.5)
    before = {name: tensor.clone() for name, tensor in average.mean.items()}
    for tensor in average.live.values():
        tensor.data.add_(1.0)
    average.update(average.ema_weight(7), torch.tensor(True))
    assert all(torch.equal(average.mean[name], before[name]) for name in before)


def test_applied_swaps_it_in_and_puts_the_weights_back():
    model = network()
    guard = Guard(model)
    average = Average(model, 0.5)
    for tensor in average.live.values():
        tensor.data.add_(1.0)
    live, mean = (
        {name: tensor.clone() for name, tensor in state.state_dict().items()}
        for state in (model, average)
    )
    with average.applied():
        held = model.state_dict()
        assert all(torch.equal(held[name], mean[name]) for name in held)
    assert all(torch.equal(tensor, live[name]) for name, tensor in model.state_dict().items())
    guard.flat[0].add_(1)  # the buffers are still views of the guard's memory
    changed = [not torch.equal(tensor, live[name]) for name, tensor in model.named_buffers()]
    assert any(changed)


def test_with_decay_0_or_constant_weights_it_is_the_weights():
    model = network()
    average = Average(model, 1e-9)
    for tensor in average.live.values():
        tensor.data.add_(1.0)
    average.update(average.ema_weight(10**9), torch.tensor(False))
    for name, tensor in average.live.items():
        torch.testing.assert_close(average.mean[name], tensor)


def test_it_changes_evaluation_and_not_training(tmp_path):
    torch.manual_seed(5)
    plain = make_trainer(tmp_path / "plain")
    plain.fit()
    torch.manual_seed(5)
    averaged = make_trainer(tmp_path / "averaged", ema_decay=0.9)
    averaged.fit()
    ours, expected = everything(averaged), everything(plain)
    assert all(torch.equal(ours[key], expected[key]) for key in expected)
    assert averaged.progress.evaluated["loss"] != plain.progress.evaluated["loss"]


def test_a_checkpoint_holds_weights_and_average(tmp_path):
    trainer = make_trainer(tmp_path, ema_decay=0.9)
    trainer.fit()
    checkpoint = trainer.saver.store.load()
    assert checkpoint.weights is checkpoint.parts["average"]
    for name, tensor in trainer.steps.average.mean.items():
        assert torch.equal(checkpoint.weights[name], tensor)
    for name, tensor in trainer.steps.model.state_dict().items():
        assert torch.equal(checkpoint.model[name], tensor)
    model = network()
    model.load_state_dict(checkpoint.weights)  # it is complete: it loads into a plain model


def test_without_an_average_a_checkpoint_has_none(tmp_path):
    trainer = make_trainer(tmp_path, epochs=1)
    trainer.fit()
    checkpoint = trainer.saver.store.load()
    assert "average" not in checkpoint.parts and checkpoint.weights is checkpoint.model


@pytest.mark.parametrize("where", ["average.safetensors", "SHA256SUMS"])
def test_a_damaged_average_is_noticed(tmp_path, where):
    trainer = make_trainer(tmp_path, ema_decay=0.9, save_steps=4, epochs=1)
    trainer.fit()
    steps = trainer.saver.store.steps()
    path = tmp_path / "checkpoints" / f"step-{steps[-1]:08}" / where
    content = path.read_bytes()
    if where == "SHA256SUMS":  # without the line of the average
        content = b"".join(line for line in content.splitlines(True) if b"average" not in line)
    else:
        content = content[:-1] + bytes([content[-1] ^ 1])
    path.write_bytes(content)
    trainer.saver.store.warn = lambda line: None
    loaded = trainer.saver.store.load()
    assert loaded.step == steps[-2]
