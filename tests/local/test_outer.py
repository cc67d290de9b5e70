"""The outer optimizer against PyTorch's SGD, to the bit where the arithmetic is the same."""

import pytest
import torch

from utils.local.outer import OuterOptimizer


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), ()]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def moved(now, seed: int) -> None:
    """Stands for a round of local steps and the averaging."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in now:
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.3, 0.0)])
def test_the_steps_are_those_of_sgd_along_the_difference(lr, momentum):
    ours, theirs = parameters(), parameters()
    outer = OuterOptimizer(ours, lr, momentum)
    sgd = torch.optim.SGD(theirs, lr, momentum, nesterov=momentum > 0)
    for seed in range(5):
        moved(ours, seed)
        for p, now in zip(theirs, ours, strict=True):
            p.grad = p.detach() - now.detach()
        outer.step()
        sgd.step()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_rate_one_without_momentum_is_the_mean():
    ours = [p.double() for p in parameters()]
    outer = OuterOptimizer(ours, lr=1.0, momentum=0.0)
    moved(ours, 1)
    mean = [p.detach().clone() for p in ours]
    outer.step()
    torch.testing.assert_close(ours, mean, rtol=1e-12, atol=1e-12)


def test_resumed_steps_are_equal():
    ours, resumed = parameters(), parameters()
    outer = OuterOptimizer(ours)
    moved(ours, 0)
    outer.step()
    other = OuterOptimizer(resumed)
    other.load_state_dict(outer.state_dict())
    with torch.no_grad():
        for p, now in zip(resumed, ours, strict=True):
            p.copy_(now)
    for now, optimizer in ((ours, outer), (resumed, other)):
        moved(now, 1)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, resumed, strict=True))


def test_states_of_other_parameters_and_wrong_values_are_refused():
    with pytest.raises(ValueError, match="other parameters"):
        OuterOptimizer(parameters()).load_state_dict(OuterOptimizer(parameters()[:2]).state_dict())
    for wrong in ({"lr": 0.0}, {"momentum": 1.0}):
        with pytest.raises(ValueError, match="momentum in"):
            OuterOptimizer(parameters(), **wrong)
