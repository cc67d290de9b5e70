"""A training step of every kind on fake CUDA tensors: no tensors of two devices meet, and the host
neither reads from the device nor waits for a copy. Evaluation reads at its end. (What fake tensors
can show, and what not: see fake_cuda.py. tests/gpu has the same on a GPU.)
"""

import contextlib
from unittest.mock import patch

import numpy as np
import pytest
import torch
from fake_backward import run_backward
from fake_cuda import CUDA, Caught, fake_cuda
from toy import loader, make_trainer, network, steps_of, use_engine

from utils.augment.chain import Chain
from utils.augment.crop_flip import CropFlip
from utils.augment.random_erasing import RandomErasing
from utils.data.texts.loader import TextLoader
from utils.engines.launch_bound import TimedSteps
from utils.fused import fuse
from utils.machine.cudnn import prefer_flash_attention
from utils.mixup.mixing import Mixing
from utils.models.resnet import ResNet
from utils.models.transformer import Transformer
from utils.optim.factory import OPTIMIZERS
from utils.optim.ngd import batch as ngd_batch
from utils.training.evaluation import evaluate
from utils.training.objective import Classification, Precision

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: see tests/gpu"),
    pytest.mark.filterwarnings("ignore"),  # PyTorch's own, of fake tensors
]

# The lines that wait for the device: in evaluation, at a log line, and to measure time.
EVALUATED = "loss, correct, samples = exchange.sum(sums).tolist()"
COUNTED = "matrix = counts.reshape(classes, classes).cpu().numpy() if classes else None"
LOGGED = "values = torch.cat([window, self.guard.left_out.double()]).tolist()"
WAITED = "torch.cuda.synchronize(device)"


@pytest.fixture
def gpu():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    prefer_flash_attention()  # as every run does
    with fake_cuda() as gpu:
        yield gpu
    torch.backends.cuda.enable_cudnn_sdp(before)


def take_steps(gpu, trainer, steps=3, epoch=0):
    """As the loop of the trainer does it; the first step, which sets up memory and states, may
    wait."""
    taken = steps_of(trainer, epoch)
    for step in range(steps):
        with gpu.watched() if step else contextlib.nullcontext():
            next(taken)
        gpu.steps += 1
    taken.close()


def mixing(kind, **options):
    """None, or of pictures of 8 x 8; learned kinds update in every step."""
    kinds = {
        "none": None,
        "mixup": {"alpha": 0.5},
        "cutmix": {"alpha": 0.0, "cutmix_alpha": 1.0},
        "policy": {"alpha": 0.5, "learned": "policy", "clean": 4},
        "sample": {"alpha": 0.5, "learned": "sample", "clean": 4},
    }
    chosen = kinds[kind]
    options = {"block": 4, "per_sample": True, "different": True} | options
    return chosen and Mixing(**chosen, **options, height=8, width=8)


def texts(mixing=None, shuffle=True, n=64, **options):
    """Of three classes, from 2 to 12 tokens, which are no multiple of anything."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 13, n)
    offsets = np.append(0, np.cumsum(lengths))
    tokens = rng.integers(5, 30, offsets[-1]).astype(np.uint16)
    return TextLoader(
        tokens, offsets, np.arange(n) % 3, batch_size=4, device=CUDA, max_len=12,
        shuffle=shuffle, bucket_batches=10, mixing=mixing, **options,
    )  # fmt: skip


def text_trainer(
    folder, *, mixup="none", precision="fp32", fused="none", data=None, optimizer="adamw",
    clean_accuracy=False, **model,
):  # fmt: skip
    mixed = mixing(mixup)
    model = {"dropout": 0.1, "attention_dropout": 0.0} | model
    model = fuse(Transformer(30, 3, layers=2, dim=16, heads=2, ffn=16, max_len=12, **model), fused)
    objective = Classification(
        model.to(CUDA), Precision(precision, CUDA), 0.1, mixed is not None, clean_accuracy,
        mixes_inside=True, fused=fused != "none",
    )  # fmt: skip
    return make_trainer(
        folder, model=model, data=texts(mixed, **data or {}), objective=objective,
        optimizer=optimizer, precision=precision, mixing=mixed, device=CUDA, clip=1.0,
    )  # fmt: skip


def picture_trainer(folder, depth, *, mixup="none", precision="fp32", fused="none", **options):
    mixed = mixing(mixup)
    model = ResNet(depth, classes=3, width=8, drop_path=0.1)
    model = fuse(model, fused).to(CUDA, memory_format=torch.channels_last)
    objective = Classification(
        model, Precision(precision, CUDA), 0.1, mixed is not None, fused=fused != "none"
    )
    return make_trainer(
        folder, model=model, objective=objective, mixing=mixed, precision=precision, device=CUDA,
        **options,
    )  # fmt: skip


# ---- optimizers ------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(tmp_path, gpu, optimizer):
    trainer = make_trainer(tmp_path, optimizer=optimizer, device=CUDA, clip=1.0)
    take_steps(gpu, trainer, steps=2 if optimizer == "ngd" else 3)
    assert gpu.copies >= 1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.slow
def test_every_optimizer_in_half_precision(tmp_path, gpu, optimizer, precision):
    trainer = make_trainer(
        tmp_path, optimizer=optimizer, precision=precision, device=CUDA, accumulation=2,
        ema_decay=0.9,
    )  # fmt: skip
    take_steps(gpu, trainer, steps=2)


@pytest.mark.parametrize("optimizer", [n for n in OPTIMIZERS if n != "ngd"])
def test_lookahead(tmp_path, gpu, optimizer):
    options = {"lookahead_k": 2}  # the watched steps have one with a synchronisation
    trainer = make_trainer(
        tmp_path, optimizer=optimizer, device=CUDA, optimizer_options=options, accumulation=2
    )
    take_steps(gpu, trainer)


@pytest.mark.parametrize(
    "options",
    [
        {"ngd_norm": "gradient"},
        {"ngd_products": "fast"},
        {"ngd_axes": "channels", "ngd_rank": 2},
        {"lookahead_k": 2},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.slow
def test_ngd(tmp_path, gpu, options, monkeypatch):
    """A step without an update of the Fisher matrices, and one with it."""
    monkeypatch.setattr(ngd_batch, "EARLY_UPDATES", 1)
    options = options | {"ngd_update_period": 2}
    trainer = make_trainer(tmp_path, optimizer="ngd", device=CUDA, optimizer_options=options)
    take_steps(gpu, trainer, steps=3)


# ---- pictures --------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_all_that_a_step_can_have(tmp_path, gpu, precision):
    """Accumulation, clipping, the average, a frozen backbone and its thaw, label smoothing (which
    toy.py always has) and a look at a part of the batch unmixed."""
    trainer = make_trainer(
        tmp_path, device=CUDA, precision=precision, accumulation=2, clip=1.0, ema_decay=0.9,
        freeze_until=1, mixing=mixing("mixup"), clean_accuracy=True,
    )  # fmt: skip
    frozen = trainer.model[0].weight
    take_steps(gpu, trainer)
    assert not frozen.requires_grad
    take_steps(gpu, trainer, epoch=1)
    assert frozen.requires_grad


@pytest.mark.parametrize("kind", ["mixup", "cutmix", "policy", "sample"])
def test_every_mixup(tmp_path, gpu, kind):
    trainer = make_trainer(tmp_path, device=CUDA, accumulation=2, mixing=mixing(kind))
    take_steps(gpu, trainer)


@pytest.mark.parametrize("resident", [True, False], ids=["on the device", "in host memory"])
def test_pictures(tmp_path, gpu, resident):
    """Cropped, mirrored, with holes and erased rectangles; evaluation is without."""
    gpu.free_memory = 1 << 36 if resident else 0
    augment = CropFlip(8, 8, padding=1, cutout=3)
    if resident:  # painted over in host memory it needs the values of what was drawn
        augment = Chain(augment, RandomErasing(8, 8, 0.5, (1, 2, 3)))
    data = loader(device=CUDA, augment=False)
    data.augment = augment
    assert (data.images.device == CUDA) == resident
    trainer = make_trainer(tmp_path, data=data, device=CUDA)
    take_steps(gpu, trainer)
    data.defer()  # as for CUDA graphs
    with gpu.watched():
        for batch in data.epoch(1):
            trainer.forward_backward(data.made(batch))


@pytest.mark.parametrize("fused", ["none", "memory", "speed"])
def test_resnet(tmp_path, gpu, fused):
    trainer = picture_trainer(tmp_path, 18, fused=fused, precision="bf16", mixup="mixup")
    take_steps(gpu, trainer, steps=2)
    kernels = {"_affine", "_moments", "_numbers", "_gradient_sums", "_input_gradient"}
    kernels.add("_mixed_cross_entropy")
    assert gpu.launches.keys() == (kernels if fused != "none" else set())


@pytest.mark.parametrize("mixup", ["none", "cutmix", "policy", "sample"])
@pytest.mark.parametrize("fused", ["none", "memory", "speed"])
@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.slow
def test_every_resnet(tmp_path, gpu, depth, fused, mixup):
    trainer = picture_trainer(
        tmp_path, depth, fused=fused, mixup=mixup, precision="bf16", optimizer="adamw"
    )
    take_steps(gpu, trainer, steps=2)


# ---- texts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", ["none", "speed"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_transformer(tmp_path, gpu, precision, fused):
    """Padded attention in fp32; in bf16 attention over packed rows."""
    data = {"accumulation": 2}
    trainer = text_trainer(tmp_path, precision=precision, fused=fused, mixup="mixup", data=data)
    take_steps(gpu, trainer)
    assert ("torch_attn._varlen_attn" in gpu.operations) == (precision == "bf16")
    assert bool(gpu.launches) == (fused != "none")


@pytest.mark.parametrize(
    "options",
    [
        {"attention_dropout": 0.1},
        {"pooling": "mean", "mixup_at": "embeddings", "mixup": "mixup"},
        {"token_dropout": 0.1, "data": {"batch_tokens": 30, "accumulation": 2}},
        {"mixup": "policy", "clean_accuracy": True},
        {"mixup": "sample", "data": {"batch_tokens": 30}},
    ],
    ids=lambda options: "-".join(options),
)
def test_other_texts(tmp_path, gpu, options):
    take_steps(gpu, text_trainer(tmp_path, precision="bf16", **options), steps=2)


@pytest.mark.parametrize("mixup", ["none", "mixup", "policy", "sample"])
@pytest.mark.parametrize("at", ["sentence", "embeddings"])
@pytest.mark.parametrize("fused", ["none", "memory", "speed"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.slow
def test_every_text(tmp_path, gpu, precision, fused, at, mixup):
    data = {"batch_tokens": 30, "accumulation": 2}
    trainer = text_trainer(
        tmp_path, precision=precision, fused=fused, mixup=mixup, mixup_at=at, data=data,
        clean_accuracy=True,
    )  # fmt: skip
    take_steps(gpu, trainer, steps=2)


# ---- the loop, evaluation --------------------------------------------------------------------


@pytest.mark.parametrize("timed", [False, True], ids=["plain", "launches timed"])
def test_the_loop_reads_at_its_log_lines_alone(tmp_path, gpu, timed):
    trainer = make_trainer(tmp_path, device=CUDA, log_every=3, ema_decay=0.9, on_nonfinite="skip")
    if timed:
        use_engine(trainer, "off")
        assert isinstance(trainer.stepper, TimedSteps)
    trainer.guard.remember()
    trainer.strategy.drop_gradients()
    update = trainer.update

    def counted():
        update()
        gpu.steps += 1

    trainer.update = counted
    with gpu.watched(allowed=(LOGGED, WAITED)):
        trainer._train_to_epoch_end()
    assert trainer.progress.step == 6 and trainer.stepper is trainer
    # The first step is shown, and timed.
    assert {*gpu.reads} == {(step, line) for step in (1, 3, 6) for line in (LOGGED, WAITED)}


@pytest.mark.parametrize("of_texts", [False, True], ids=["pictures", "texts"])
def test_evaluation_reads_at_its_end(tmp_path, gpu, of_texts):
    if of_texts:
        trainer, test = text_trainer(tmp_path, precision="bf16"), texts(shuffle=False)
    else:
        trainer = make_trainer(tmp_path, device=CUDA, ema_decay=0.9)
        test = loader(5, n=12, augment=False, shuffle=False, device=CUDA)
    with gpu.watched(allowed=(EVALUATED, COUNTED)), trainer.evaluated_weights():
        found = evaluate(trainer.model, test.epoch(), trainer.precision, classes=3)
    assert found.confusion.shape == (3, 3)
    assert gpu.reads == [(0, EVALUATED)] * 3 + [(0, COUNTED)]  # three numbers and a matrix


def test_the_pass_that_counts_for_nothing(tmp_path, gpu):
    trainer = make_trainer(tmp_path, device=CUDA)
    trainer.guard.remember()
    with gpu.watched():
        trainer._settle()


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
    """Does something with a tensor that is on the device, from the second step on."""

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


@pytest.mark.parametrize("deed", WAITS | COPIES | MISMATCHES)
def test_what_would_hold_up_the_host_or_fail_is_caught(tmp_path, gpu, deed):
    with pytest.raises(Caught, match=r"tests/training/test_fake_cuda.py:\d+ \(<lambda>\)"):
        step_with(tmp_path, gpu, (WAITS | COPIES | MISMATCHES)[deed])


@pytest.mark.parametrize("deed", HARMLESS)
def test_what_does_not_wait_is_not_caught(tmp_path, gpu, deed):
    step_with(tmp_path, gpu, HARMLESS[deed])


@pytest.mark.parametrize("deed", ["item", "bool", "cpu", "mask", "inverse", "blocking", "pageable"])
def test_a_wait_in_evaluation_is_caught(gpu, deed):
    x = torch.ones(4, 3, device=CUDA)
    with gpu.watched(), torch.inference_mode(), pytest.raises(Caught):
        (WAITS | COPIES)[deed](x)


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


# ---- what stands for PyTorch's engine --------------------------------------------------------


def stand_in():
    return patch.object(torch.autograd, "_engine_run_backward", run_backward)


def gradients(fused: str, engine) -> list:
    """Of a ResNet on the CPU, in half precision, of two backward passes."""
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
    """Of leaves and of what lies between, of unused tensors, and of a gradient."""
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
