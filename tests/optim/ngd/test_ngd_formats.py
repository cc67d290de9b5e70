"""Natural gradient: weights of any dtype, shape and memory format, and parts of tensors."""

import pytest
import torch
from flags_of_a_gpu import flags_as_on_a_gpu
from ngd_tools import (
    FORMS,
    assert_equal_to_the_bit,
    flat,
    give_gradients,
    saved_and_read,
    tensors,
    train,
    weights,
)
from torch import nn

from utils.checkpoints.states import optimizer_tensors, restore_optimizer
from utils.optim.ngd import optimizer as ngd
from utils.optim.ngd.optimizer import NGD


def is_channels_last(tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("gradients_channels_last", [False, True])
def test_channels_last_is_contiguous_to_rounding(gradients_channels_last):
    plain, last = weights(), weights()
    for parameter in last:
        if parameter.ndim == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    optimizers = [NGD(each, weight_decay=0.1) for each in (plain, last)]
    for step in range(15):
        for parameters in (plain, last):
            give_gradients(parameters, step)
        for parameter in last:
            if parameter.ndim == 4:
                order = torch.channels_last if gradients_channels_last else torch.contiguous_format
                parameter.grad = parameter.grad.contiguous(memory_format=order)
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(last, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert is_channels_last(last[0])
    assert is_channels_last(optimizers[1].state[last[0]]["momentum_buffer"])


def test_a_state_of_contiguous_weights_can_be_loaded_for_channels_last_ones():
    plain, last = weights(), weights()
    optimizer = NGD(plain)
    train(optimizer, plain, range(5))
    for parameter, value in zip(last, plain, strict=True):
        parameter.data = value.detach().clone()
        if parameter.ndim == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    other = NGD(last)
    other.load_state_dict(saved_and_read(optimizer.state_dict()))
    train(optimizer, plain, range(5, 12))
    train(other, last, range(5, 12))
    for one, expected in zip(last, plain, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-5)


def test_weights_that_become_channels_last_between_steps():
    plain, moved = weights(), weights()
    optimizers = NGD(plain), NGD(moved)
    for step in range(6):
        if step == 3:
            for parameter in moved[:3]:
                parameter.data = parameter.data.to(memory_format=torch.channels_last)
        for optimizer, parameters in zip(optimizers, (plain, moved), strict=True):
            train(optimizer, parameters, [step])
    for one, other in zip(moved, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def momentum_is_right(dtype) -> bool:
    """Whether PyTorch's fused SGD on a CPU is right: not in half precision before torch 2.12."""
    found = []
    for fused in (False, True):
        weight = nn.Parameter(torch.linspace(-1, 1, 40).to(dtype))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=fused)
        for _ in range(3):
            weight.grad = torch.linspace(1, 2, 40).to(dtype)
            optimizer.step()
        found.append(weight.detach().float())
    return torch.allclose(*found, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fisher_matrices_of_short_floats_are_float32(dtype):
    """And stay so, to the bit, in a loaded state, which PyTorch casts to the parameters' dtype."""
    if not momentum_is_right(dtype):
        pytest.skip("this PyTorch's fused SGD is wrong in half precision on a CPU")
    parameters = weights(dtype=dtype)
    optimizer = NGD(parameters, lr=0.01)
    train(optimizer, parameters, range(6))
    again = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    loaded = NGD(again)
    loaded.load_state_dict(saved_and_read(optimizer.state_dict()))
    for of, own in ((optimizer, parameters), (loaded, again)):
        for parameter in own:
            for key, value in of.state[parameter].items():
                short = key == "momentum_buffer"
                assert key == "step" or value.dtype == (dtype if short else torch.float32), key
    assert_equal_to_the_bit(tensors(loaded), tensors(optimizer))
    train(optimizer, parameters, range(6, 16))
    train(loaded, again, range(6, 16))
    assert_equal_to_the_bit(tensors(loaded), tensors(optimizer))
    exact = weights(dtype=dtype)
    exact = [nn.Parameter(parameter.detach().float()) for parameter in exact]
    train(NGD(exact, lr=0.01), exact, range(16))
    for one, other in zip(parameters, exact, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0.05, atol=0.05)


def test_several_dtypes_may_be_stepped_at_once():
    kinds = (torch.float32, torch.bfloat16, torch.float64)
    together = [weights(dtype=dtype) for dtype in kinds]
    apart = [weights(dtype=dtype) for dtype in kinds]
    optimizer = NGD(flat(together), lr=0.01)
    others = [NGD(each, lr=0.01) for each in apart]
    for step in range(14):
        for one, other in zip(together, apart, strict=True):
            give_gradients(one, step)
            give_gradients(other, step)
        optimizer.step()
        for other in others:
            other.step()
    for one, other in zip(flat(together), flat(apart), strict=True):
        assert one.dtype == other.dtype
        tolerance = 1e-2 if one.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (4, 0, 3), (5, 1), (1, 1, 6, 1)])
def test_shapes_without_fisher_matrices(shape):
    parameters = weights([shape, (4, 3)])
    optimizer = NGD(parameters)
    train(optimizer, parameters, range(5))
    assert not [key for key in optimizer.state[parameters[0]] if key.startswith("basis")]
    assert parameters[1].isfinite().all()


def test_transposed_weights_are_stepped_as_contiguous_ones():
    start = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    plain, transposed = nn.Parameter(start.clone()), nn.Parameter(start.T.contiguous().T)
    for parameter in (plain, transposed):
        train(NGD([parameter], weight_decay=0.1), [parameter], range(5))
    assert transposed.stride() == (1, 6)
    torch.testing.assert_close(transposed, plain)


# Views that leave out elements of a larger tensor.
VIEWS = {
    "columns": lambda: torch.randn(6, 9)[:, 2:6],
    "every second": lambda: torch.randn(10, 5, 2)[..., 0],
    "rows, transposed": lambda: torch.randn(4, 12).T[::3],
    "kernels": lambda: torch.randn(3, 4, 8, 6).permute(3, 2, 0, 1)[..., 1:3],
    "kernels, transposed": lambda: torch.randn(6, 8, 3, 7)[..., ::3].transpose(0, 1),
    "vector": lambda: torch.randn(6, 9)[:, 8],
}
SETTINGS = {
    "momentum": {"weight_decay": 0.1},
    "no momentum": {"momentum": 0.0, "nesterov": False},
    "fixed norm, decoupled": {"norm": "fixed", "weight_decay": 0.1, "decoupled": True},
    "heavy ball, dampened": {"nesterov": False, "dampening": 0.3, "norm": "fixed"},
    "momentum first": {"weight_decay": 0.1, **FORMS["root"]},
    "adam": {"weight_decay": 0.1, "decoupled": True, **FORMS["adam"]},
}


def part_of_a_larger_one(view: str, dtype=torch.float32) -> tuple[nn.Parameter, torch.Tensor]:
    """(view, its memory): all other elements are NaN, which must have no effect."""
    torch.manual_seed(3)
    part = VIEWS[view]()
    memory = torch.full((part.untyped_storage().nbytes() // 4,), float("nan"), dtype=dtype)
    placed = memory.as_strided(part.shape, part.stride(), part.storage_offset())
    return nn.Parameter(placed.copy_(part)), memory


# Every view with every settings, and each of these with either way of stepping and either dtype.
PARTS = [
    (view, settings, (torch.float32, torch.bfloat16)[(i // 2 + j // 2) % 2])
    for i, view in enumerate(VIEWS)
    for j, settings in enumerate(SETTINGS)
]


@pytest.mark.parametrize(("view", "settings", "dtype"), PARTS, ids=str)
def test_weights_that_are_a_part_of_a_larger_tensor(view, settings, dtype):
    """Stepped like a contiguous copy, beside others of that shape; nothing else is written.
    PyTorch's fused kernel assumes dense weights."""
    if not momentum_is_right(dtype):
        pytest.skip("this PyTorch's fused SGD is wrong in half precision on a CPU")
    part, memory = part_of_a_larger_one(view, dtype)
    assert not part.is_contiguous() and memory.isnan().any()
    beside = torch.randn(part.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    alone = nn.Parameter(part.detach().contiguous())
    left_out = memory.isnan()
    groups = [[nn.Parameter(beside.clone()), one] for one in (part, alone)]
    optimizers = [NGD(group, **SETTINGS[settings]) for group in groups]
    for step in range(13):
        for group, optimizer in zip(groups, optimizers, strict=True):
            give_gradients(group, step)
            if step == 12:  # a gradient may be such a view, too
                gradient = part_of_a_larger_one(view, dtype)[0].detach()
                group[1].grad = gradient if group[1] is part else gradient.contiguous()
            optimizer.step()
        assert_equal_to_the_bit(tensors(optimizers[0]), tensors(optimizers[1]))
    assert torch.equal(memory.isnan(), left_out)


def test_two_parts_of_one_tensor():
    whole = torch.randn(5, 4, 2, generator=torch.Generator().manual_seed(0))
    apart = [nn.Parameter(whole[..., i].clone()) for i in range(2)]
    parts = [nn.Parameter(whole[..., i]) for i in range(2)]
    for parameters in (apart, parts):
        train(NGD(parameters), parameters, range(5))
    assert torch.equal(whole, torch.stack([one.detach() for one in apart], -1))


@pytest.mark.parametrize("view", ["columns", "vector"])
@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_flags_of_a_step_reach_a_part_of_a_larger_tensor(view, found_inf):
    """The loss scale and a skipped step, in the kernels as on a GPU."""
    part, memory = part_of_a_larger_one(view)
    alone = nn.Parameter(part.detach().contiguous())
    before, found = memory.clone(), []
    for parameter in (part, alone):
        optimizer = NGD([parameter], weight_decay=0.1, decoupled=True)
        train(optimizer, [parameter], range(2))
        give_gradients([parameter], 2, scale=8.0)
        optimizer.found_inf, optimizer.grad_scale = torch.tensor(found_inf), torch.tensor(8.0)
        earlier = parameter.detach().clone()
        with flags_as_on_a_gpu(ngd):
            optimizer.step()
        assert torch.equal(parameter, earlier) == (found_inf == 1.0)
        found.append(tensors(optimizer))
    assert_equal_to_the_bit(*found)
    assert torch.equal(memory.isnan(), before.isnan())


@pytest.mark.parametrize("view", ["kernels", "vector"])
def test_the_state_of_a_part_of_a_larger_tensor_is_saved(view):
    """And can be loaded for such a part or a contiguous copy, also from a checkpoint."""
    part, _ = part_of_a_larger_one(view)
    optimizer = NGD([part])
    train(optimizer, [part], range(7))
    assert optimizer.state[part]["momentum_buffer"].is_contiguous()
    others = [part_of_a_larger_one(view)[0] for _ in range(2)]
    others.append(nn.Parameter(part.detach().contiguous()))
    loaded = [NGD([other]) for other in others]
    for other in others:
        other.data.copy_(part)
    restore_optimizer(loaded[0], {others[0]: "p"}, *optimizer_tensors(optimizer, {part: "p"}))
    for other in loaded[1:]:
        other.load_state_dict(saved_and_read(optimizer.state_dict()))
    for each, parameter in zip((optimizer, *loaded), (part, *others), strict=True):
        train(each, [parameter], range(7, 15))
    for other in loaded:
        assert_equal_to_the_bit(tensors(other), tensors(optimizer))


@pytest.mark.parametrize("shape", [(3,), (4, 3)])
def test_elements_that_are_one_in_memory_are_refused(shape):
    """As torch.optim.SGD refuses them; nothing is written."""
    memory = torch.zeros(*shape[:-1], 1)
    for optimizer_class in (NGD, torch.optim.SGD):
        parameter = nn.Parameter(memory.expand(shape))
        give_gradients([parameter], 0)
        with pytest.raises(RuntimeError, match="clone"):
            optimizer_class([parameter]).step()
    assert not memory.any()
