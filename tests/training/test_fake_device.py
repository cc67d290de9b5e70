"""The fake CUDA device itself (tests/fake_cuda.py): what it catches and what not, and that its
backward passes equal PyTorch's."""

import contextlib
from unittest.mock import patch

import numpy as np
import pytest
import torch
from fake_backward import run_backward
from fake_cuda import CUDA, Caught
from toy import make_trainer, network, take_steps

from utils.fused import fuse
from utils.models.resnet import ResNet
from utils.training.objective import Classification, Precision

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: see tests/gpu"),
    pytest.mark.filterwarnings("ignore"),  # PyTorch's own, of fake tensors
]

# ---- what is caught, and what is not ---------------------------------------------------------


def half(n=4):
    return torch.ones(n, dtype=torch.bool, device=CUDA)


WAITS = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool(x.sum() > 0),
    "if": lambda x: 1 if x.isfinite().all() else 0,
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "equal": lambda x: torch.equal(x, x),
    "mask": lambda x: x[half()],
    "mask set to a tensor": lambda x: x.__setitem__(half(), torch.ones(4, 3, device=CUDA)),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.ones(4, device=CUDA).long(), 0),
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.T),
    "inverse": lambda x: torch.linalg.inv(x @ x.T),
    "eigh": lambda x: torch.linalg.eigh(x @ x.T),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "event": lambda x: torch.cuda.current_stream().record_event().synchronize(),
}
COPIES = {
    "blocking": lambda x: torch.ones(4).pin_memory().to(CUDA),
    "pageable": lambda x: torch.ones(4).to(CUDA, non_blocking=True),
    "copy_": lambda x: x.copy_(torch.ones(4, 3)),
    "copy_ of pageable memory": lambda x: x.copy_(torch.ones(4, 3), non_blocking=True),
    "to pageable memory": lambda x: torch.ones(4, 3).copy_(x, non_blocking=True),
    "foreach": lambda x: torch._foreach_copy_([x], [torch.ones(4, 3)]),
    "tensor": lambda x: torch.tensor([1.0, 2.0], device=CUDA),
    "tensor of one number": lambda x: torch.tensor(1.0, device=CUDA),
    "as_tensor": lambda x: torch.as_tensor(np.ones(3), device=CUDA),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "index of the CPU": lambda x: x[torch.tensor([0, 1])],
    "index of numbers": lambda x: x[[0, 1]],
    "index of NumPy": lambda x: x[np.array([0, 1])],
    "index set to a number": lambda x: x.index_put_(
        (torch.arange(2, device=CUDA),), torch.ones(())
    ),
    "read too early": lambda x: x.sum().to("cpu", non_blocking=True).item(),
    "used too early": lambda x: x.to("cpu", non_blocking=True) + 1,
}
MISMATCHES = {
    "sum": lambda x: x + torch.ones(4, 3),
    "product": lambda x: torch.ones(2, 4) @ x,
    "where": lambda x: torch.where(torch.ones(4, 3) > 0, x, x),
    "foreach on two devices": lambda x: torch._foreach_add([x], [torch.ones(4, 3)]),
    "fused": lambda x: torch._fused_sgd_(
        [x], [x], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False,
        maximize=False, is_first_step=False, found_inf=torch.zeros(()),
    ),
}  # fmt: skip
HARMLESS = {
    "nothing": lambda x: None,
    "masked_fill": lambda x: x.masked_fill(half()[:, None], 0.0),
    "mask set to a number": lambda x: x.__setitem__(half(), 0.0),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "numbers": lambda x: x * 2 + torch.tensor(1.0) + torch.full((), 3.0, device=CUDA),
    "index": lambda x: x[torch.arange(2, device=CUDA)] + x[0] + x[1:3, 1].sum(),
    "set to a number": lambda x: x[0].fill_(1.0),
    "pinned": lambda x: torch.ones(4).pin_memory().to(CUDA, non_blocking=True),
    "to pinned memory": lambda x: x.to("cpu", non_blocking=True),
    "cholesky_ex": lambda x: torch.linalg.cholesky_ex(x @ x.T),
    "wait of a stream": lambda x: torch.cuda.Stream().wait_event(
        torch.cuda.current_stream().record_event()
    ),
    "read of the CPU": lambda x: torch.ones(()).item() + torch.ones(3).sum().item(),
}


class Does(Classification):
    """Does something with a tensor on the device, from the second step on."""

    deed, calls = None, 0

    def __call__(self, inputs, targets, mixing=None):
        self.calls += 1
        if self.calls > 1:
            self.deed(torch.ones(4, 3, device=CUDA))
        return super().__call__(inputs, targets, mixing)


def step_with(folder, gpu, deed):
    model = network(norm=False).to(CUDA)
    objective = Does(model, Precision("fp32", CUDA), 0.1)
    objective.deed = deed
    trainer = make_trainer(folder, model=model, objective=objective, device=CUDA)
    take_steps(gpu, trainer, steps=2)


CAUGHT = WAITS | COPIES | MISMATCHES
IN_THIS_FILE = r"tests/training/test_fake_device.py:\d+ \(<lambda>\)"


@pytest.mark.parametrize("deed", CAUGHT)
def test_what_would_make_the_host_wait_or_fail_is_caught(gpu, deed):
    """In training and in evaluation, each of which has its modes of autograd."""
    for mode in (contextlib.nullcontext(), torch.inference_mode()):
        x = torch.ones(4, 3, device=CUDA)
        with gpu.watched(), mode, pytest.raises(Caught, match=IN_THIS_FILE):
            CAUGHT[deed](x)


@pytest.mark.parametrize("deed", ["item", "mask", "inverse", "pageable", "sum", "fused"])
def test_it_is_caught_in_a_step_of_training(tmp_path, gpu, deed):
    with pytest.raises(Caught, match=IN_THIS_FILE):
        step_with(tmp_path, gpu, CAUGHT[deed])


@pytest.mark.parametrize("deed", HARMLESS)
def test_what_does_not_wait_is_not_caught(gpu, deed):
    x = torch.ones(4, 3, device=CUDA)
    with gpu.watched():
        HARMLESS[deed](x)


def test_it_is_not_caught_in_a_step_of_training(tmp_path, gpu):
    step_with(tmp_path, gpu, lambda x: [deed(x) for deed in HARMLESS.values()])


def test_a_wait_in_the_backward_pass_is_caught(tmp_path, gpu):
    class Read(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.sum().item()

    x = torch.ones(3, device=CUDA, requires_grad=True)
    with gpu.watched(), pytest.raises(Caught, match=r"\(backward\): return grad \* grad"):
        Read.apply(x * 2).sum().backward()


def test_a_kernel_with_a_tensor_of_the_cpu_is_caught(gpu):
    layer_kernels = pytest.importorskip("utils.fused.kernels.layer_kernels")
    x, mask = torch.ones(4, 8, device=CUDA), torch.ones(4, 8, dtype=torch.uint8)
    layer_kernels.gelu_dropped(x, mask.to(CUDA), 2.0)
    with gpu.watched(), pytest.raises(Caught, match="_gelu_dropped is given a tensor of the CPU"):
        layer_kernels.gelu_dropped(x, mask, 2.0)


def test_a_flag_may_be_read_one_step_late(gpu):
    flag = torch.zeros((), device=CUDA)
    with gpu.watched():
        pinned = torch.empty((), pin_memory=True).copy_(flag, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        gpu.steps += 1
        with pytest.raises(Caught, match="pinned memory is read"):
            bool(pinned)
        event.synchronize()
        assert not pinned


# ---- in place of PyTorch's engine ------------------------------------------------------------


def stand_in():
    return patch.object(torch.autograd, "_engine_run_backward", run_backward)


def gradients(fused: str, engine) -> list:
    """Gradients of two backward passes of a ResNet, on the CPU in half precision."""
    torch.manual_seed(0)
    model, x = fuse(ResNet(18, classes=3, width=4), fused), torch.randn(4, 3, 8, 8)
    x.requires_grad_()
    with engine:
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = model(x)
            y.float().square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("fused", ["none", "memory"])
def test_backward_is_that_of_pytorch(fused):
    expected = gradients(fused, contextlib.nullcontext())
    for own, gradient in zip(gradients(fused, stand_in()), expected, strict=True):
        torch.testing.assert_close(own, gradient, rtol=2e-2, atol=2e-2 * gradient.abs().max())


def test_grad_is_that_of_pytorch():
    """For leaves, intermediate and unused tensors, and for a gradient."""
    a, b, unused = (torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def found():
        middle = (a @ b + b[0]).tanh()
        y = (middle.exp() * middle + a).sum()
        first = torch.autograd.grad(
            y, [a, middle, unused, b], create_graph=True, materialize_grads=True
        )
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [a, b])
        return *first, *second

    expected = found()
    with stand_in():
        for own, gradient in zip(found(), expected, strict=True):
            torch.testing.assert_close(own, gradient)
