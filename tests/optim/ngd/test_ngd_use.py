"""Natural gradient in a user's loop: scalers, autocast, groups, and settings that change."""

import copy
import functools

import pytest
import torch
from ngd_tools import (
    FORMS,
    assert_equal_to_the_bit,
    each_form,
    flat,
    give_gradients,
    tensors,
    train,
    weights,
)
from torch import nn

from utils.optim.ngd.optimizer import NGD

# ---- scalers and skipped steps ------------------------------------------------------------------


@pytest.mark.parametrize("unscale", [False, True], ids=["step_alone", "unscale_first"])
@pytest.mark.parametrize("form", [*FORMS.values(), {"norm": "fixed"}], ids=[*FORMS, "fixed"])
@pytest.mark.parametrize("decoupled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_grad_scaler_of_a_users_own_loop(unscale, decoupled, form):
    """Scaled gradients give the same steps; a step that overflows changes nothing, to the bit."""
    settings = {"weight_decay": 0.1, "decoupled": decoupled} | form
    settings["update_period"] = 1
    # In float32 orthogonal steps may be made in bfloat16, whose rounding can fall to either side.
    dtype = torch.float64 if form.get("orthogonal") else torch.float32
    plain, scaled = weights(dtype=dtype), weights(dtype=dtype)
    expected, ours = NGD(plain, **settings), NGD(scaled, **settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for step in range(14):
        if step in (5, 9, 12):
            before = tensors(ours)
            give_gradients(scaled, step)
            scaled[step % 4].grad.view(-1)[0] = float("inf") if step % 2 else float("nan")
            scaler.scale(torch.ones(()))
            if unscale:
                scaler.unscale_(ours)
            scaler.step(ours)
            scaler.update()
            assert_equal_to_the_bit(tensors(ours), before)
        give_gradients(plain, step)
        expected.step()
        give_gradients(scaled, step, scale=scaler.get_scale())
        scaler.scale(torch.ones(()))  # as scaler.scale(loss).backward() does
        if unscale:
            scaler.unscale_(ours)
        scaler.step(ours)
        scaler.update()
        for one, other in zip(scaled, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert scaler.get_scale() == 1024.0 / 8


@each_form
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 3, 9, 10, 12], ids=lambda n: f"after_{n}")
def test_a_flagged_step_leaves_everything(decoupled, steps, form):
    parameters = weights()
    optimizer = NGD(parameters, weight_decay=0.1, decoupled=decoupled, **form)
    train(optimizer, parameters, range(steps))
    before = tensors(optimizer)
    give_gradients(parameters, 99)
    for parameter in parameters:
        parameter.grad.fill_(float("nan"))
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    if steps:
        assert_equal_to_the_bit(tensors(optimizer), before)
    else:  # state may be created, but not from gradients
        assert_equal_to_the_bit(parameters, weights())
        for state in optimizer.state.values():
            for key in state.keys() - {"step"}:
                assert key.startswith("basis") or not state[key].any()


@functools.cache  # several tests compare with the same steps without a flagged one
def with_a_flagged_step(at: int | None, **settings) -> list[torch.Tensor]:
    """Weights and state after 16 steps, with a flagged one before step `at`."""
    parameters = weights()
    optimizer = NGD(parameters, **settings)
    for step in range(16):
        if step == at:
            give_gradients(parameters, 99, scale=float("inf"))
            optimizer.found_inf = torch.ones(())
            optimizer.step()
        optimizer.found_inf = torch.zeros(())
        train(optimizer, parameters, [step])
    return tensors(optimizer)


@each_form
@pytest.mark.parametrize("at", [0, 12])
@pytest.mark.parametrize("decoupled", [False, True])
def test_a_flagged_step_is_as_if_it_had_not_been(at, decoupled, form):
    settings = {"weight_decay": 0.1, "decoupled": decoupled, "update_period": 1}
    settings |= form
    assert_equal_to_the_bit(
        with_a_flagged_step(at, **settings), with_a_flagged_step(None, **settings)
    )


@pytest.mark.parametrize("at", [5, 12])
def test_a_flagged_step_does_not_count_for_the_update_period(at):
    assert_equal_to_the_bit(with_a_flagged_step(at), with_a_flagged_step(None))


def test_dampening_begins_after_the_first_step_that_counts():
    """As in torch.optim.SGD, the first momentum is the whole gradient."""
    settings = {"dampening": 0.5, "nesterov": False, "update_period": 1}
    assert_equal_to_the_bit(
        with_a_flagged_step(0, **settings), with_a_flagged_step(None, **settings)
    )


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_flag_of_zero_is_no_flag(decoupled):
    runs = []
    for flag in (None, torch.zeros(())):
        parameters = weights(dtype=torch.float64)
        optimizer = NGD(parameters, weight_decay=0.3, decoupled=decoupled)
        optimizer.found_inf = flag
        train(optimizer, parameters, range(15))
        runs.append(parameters)
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


# ---- autocast -----------------------------------------------------------------------------------


def test_a_step_within_autocast_is_one_outside():
    plain, inside = weights(), weights()
    with torch.autocast("cpu", torch.bfloat16):
        train(NGD(inside), inside, range(6))
    train(NGD(plain), plain, range(6))
    assert_equal_to_the_bit(inside, plain)


def test_under_autocast_the_loss_falls_and_fisher_matrices_stay_float32():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4)
    )
    optimizer, losses = NGD(model.parameters(), lr=0.05), []
    inputs, labels = torch.randn(16, 3, 8, 8), torch.arange(16) % 4
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(inputs)
            loss = nn.functional.cross_entropy(outputs, labels)
        assert outputs.dtype == torch.bfloat16
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    kept = tensors(optimizer)
    assert all(each.dtype == torch.float32 and each.isfinite().all() for each in kept)


# ---- parameters without gradient -----------------------------------------------------------------


def test_parameters_without_gradient_stay_with_their_state():
    parameters = weights()
    optimizer = NGD(parameters, weight_decay=0.1)
    train(optimizer, parameters, range(6))
    resting = [parameters[0], parameters[4]]
    before = [
        [parameter.detach().clone(), *copy.deepcopy(list(optimizer.state[parameter].values()))]
        for parameter in resting
    ]
    for step in range(6, 9):
        give_gradients(parameters, step)
        for parameter in resting:
            parameter.grad = None
        optimizer.step()
    for parameter, (value, *state) in zip(resting, before, strict=True):
        assert torch.equal(parameter, value)
        for one, other in zip(optimizer.state[parameter].values(), state, strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def test_a_step_without_any_gradient_does_nothing():
    parameters = weights()
    optimizer = NGD(parameters)
    optimizer.step()
    assert_equal_to_the_bit(parameters, weights())
    train(optimizer, parameters, range(2))
    optimizer.zero_grad()
    before = tensors(optimizer)
    optimizer.step()
    assert_equal_to_the_bit(tensors(optimizer), before)


def test_an_unfrozen_parameter_starts_afresh():
    """As a backbone that was frozen at first."""
    parameters = weights()
    optimizer = NGD(parameters)
    frozen = parameters[:2]
    for parameter in frozen:
        parameter.requires_grad_(False)
    for step in range(5):
        give_gradients(parameters[2:], step)
        optimizer.step()
    assert_equal_to_the_bit(frozen, weights()[:2])
    assert not any(optimizer.state.get(parameter) for parameter in frozen)
    fresh = weights()[:2]
    alone = NGD(fresh)
    for step in range(5, 20):
        for parameter in frozen:
            parameter.requires_grad_(True)
        give_gradients(parameters, step)
        optimizer.step()
        give_gradients(fresh, step)
        alone.step()
    for one, other in zip(frozen, fresh, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_groups_are_stepped_like_separate_optimizers():
    settings = [
        {"lr": 0.2, "alpha": 1.0, "weight_decay": 0.1, "update_period": 1},
        {"lr": 0.05, "axes": "channels", "momentum": 0.5, "nesterov": False, "dampening": 0.2},
        {"rank": 2, "eta": 0.4, "decoupled": True, "weight_decay": 0.2},
    ]
    together = [weights(seed=seed) for seed in range(3)]
    optimizer = NGD([{"params": together[0], **settings[0]}])
    for parameters, own in zip(together[1:], settings[1:], strict=True):
        optimizer.add_param_group({"params": parameters, **own})
    apart = [weights(seed=seed) for seed in range(3)]
    others = [NGD(parameters, **own) for parameters, own in zip(apart, settings, strict=True)]
    for step in range(20):
        for parameters in together:
            give_gradients(parameters, step)
        optimizer.step()
        for parameters, other in zip(apart, others, strict=True):
            give_gradients(parameters, step)
            other.step()
    for one, other in zip(flat(together), flat(apart), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_group_may_be_added_later():
    old, new, alone = weights(seed=1), weights(seed=2), weights(seed=2)
    optimizer, other = NGD(old), NGD(alone, lr=0.3)
    train(optimizer, old, range(7))
    optimizer.add_param_group({"params": new, "lr": 0.3})
    for step in range(7, 22):
        give_gradients(old, step)
        train(optimizer, new, [step])
        train(other, alone, [step])
    for one, expected in zip(new, alone, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-6)


# ---- settings that change, closures -------------------------------------------------------------


def test_settings_may_change_between_steps():
    """lr and weight decay at every step, others once: as with a saved state and new settings."""
    parameters = weights()
    optimizer = NGD(parameters)
    group = optimizer.param_groups[0]
    changes = {4: {"alpha": 0.5}, 6: {"update_period": 1}, 8: {"momentum": 0.5}, 11: {"eta": 0.5}}
    for step in range(16):
        group["lr"], group["weight_decay"] = 0.1 / (1 + step), 0.01 * step
        group.update(changes.get(step, {}))
        expected = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
        fresh = NGD(expected)
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(fresh, expected, [step])
        train(optimizer, parameters, [step])
        assert_equal_to_the_bit(tensors(optimizer), tensors(fresh))


def test_a_closure_is_called_with_gradients_on():
    plain, closed = weights(), weights()
    optimizers = NGD(plain), NGD(closed)

    def loss_of(parameters):
        return sum((parameter**2).sum() for parameter in parameters)

    def closure():
        optimizers[1].zero_grad()
        loss = loss_of(closed)
        loss.backward()
        return loss

    for _ in range(5):
        optimizers[0].zero_grad()
        loss_of(plain).backward()
        before = loss_of(closed).item()
        optimizers[0].step()
        assert optimizers[1].step(closure).item() == before
    assert_equal_to_the_bit(closed, plain)
    assert optimizers[0].step() is None


def test_a_schedule_and_a_hook_of_pytorch_work_with_it():
    parameters = weights()
    optimizer, called = NGD(parameters, lr=0.1), []
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    for step in range(3):
        train(optimizer, parameters, [step])
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0125) and len(called) == 3


def test_gradients_are_left_as_they_are():
    parameters = weights()
    optimizer = NGD(parameters, weight_decay=0.1)
    for step in range(3):
        give_gradients(parameters, step)
        before = [parameter.grad.clone() for parameter in parameters]
        optimizer.step()
        assert_equal_to_the_bit([parameter.grad for parameter in parameters], before)


@pytest.mark.parametrize("change", [{"alpha": 100.0}, {"eta": 0.9}], ids=str)
def test_alpha_and_eta_may_change_from_step_to_step(change):
    """As in an optimizer that was made with them and loaded the state."""
    changed, made = weights(), weights()
    one = NGD(changed, update_period=1)
    train(one, changed, range(3))
    other = NGD(made, update_period=1)
    train(other, made, range(3))
    one.param_groups[0].update(change)
    state = copy.deepcopy(other.state_dict())
    state["param_groups"][0].update(change)
    other = NGD(made, update_period=1)
    other.load_state_dict(state)
    before = [parameter.detach().clone() for parameter in changed]
    for optimizer, parameters in ((one, changed), (other, made)):
        train(optimizer, parameters, range(3, 6))
    assert_equal_to_the_bit(changed, made)
    plain = weights()
    unchanged = NGD(plain, update_period=1)
    train(unchanged, plain, range(6))
    assert not torch.equal(changed[0], plain[0]) and not torch.equal(changed[0], before[0])


def test_a_state_with_fewer_settings_takes_defaults_for_the_others():
    """As written by an older version."""
    parameters, again = weights(), weights()
    expected, ours = NGD(parameters), NGD(again)
    state = copy.deepcopy(expected.state_dict())
    for name in ("products", "axes", "eta"):
        del state["param_groups"][0][name]
    ours.load_state_dict(state)
    train(expected, parameters, range(2))
    train(ours, again, range(2))
    assert_equal_to_the_bit(again, parameters)
