"""Mixup, as far as only a GPU can show it; skipped where there is none."""

import pytest
import torch
import torch.nn.functional as F
from test_gpu import run_epoch, run_epoch_without_waiting
from toy import make_trainer, network

from utils.mixup.meta import Pairs, VirtualStep
from utils.mixup.mixing import Mixing
from utils.models.resnet import ResNet
from utils.training.objective import mixed_cross_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def mixing(form=None, **options):
    return Mixing(
        alpha=0.5, cutmix_alpha=1.0, block=4, meta_form=form, clean_samples=4, per_sample=True,
        different_classes=True, height=8, width=8, **options,
    )  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("form", [None, "policy", "sample"])
def test_no_wait_between_log_lines(tmp_path, form, precision):
    trainer = make_trainer(
        tmp_path, device=CUDA, precision=precision, clip=1.0, accumulation=2, ema_decay=0.9,
        mixing=mixing(form), clean_accuracy=True,
    )  # fmt: skip
    run_epoch(trainer, 0)  # sets up memory, kernels and states
    run_epoch_without_waiting(trainer, 1)


@pytest.mark.parametrize("form", [None, "policy", "sample"])
def test_a_gpu_mixes_as_the_cpu_does(tmp_path, form):
    weights = []
    for device in (CPU, CUDA):
        model = network(dropout=0.0)
        trainer = make_trainer(
            tmp_path / device.type, model=model, device=device, epochs=1, mixing=mixing(form)
        )
        trainer.fit()
        weights.append([p.detach().cpu() for p in trainer.steps.model.parameters()])
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("form", ["policy", "sample"])
def test_the_fast_hypergradient_is_the_exact_one(form):
    """Although convolutions may use TF32 by default: a finite difference of such would be noise."""
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"
    torch.manual_seed(0)
    model = ResNet(18, 5, width=8, stem="cifar").to(CUDA, memory_format=torch.channels_last)
    own, other, clean = (
        torch.randn(32, 3, 16, 16).to(CUDA, memory_format=torch.channels_last) for _ in range(3)
    )
    targets, partners, of_clean = torch.randint(0, 5, (3, 32)).to(CUDA)
    lam = torch.rand(32).to(CUDA)
    pairs = Pairs(own, other, targets, partners, lam)
    F.cross_entropy(model(own), targets).backward()  # the gradient of the policy's virtual step
    found = []
    for exact in (False, True):
        virtual = VirtualStep(model, mixed_cross_entropy, exact=exact)
        if form == "policy":
            found += virtual.step_hypergradients(
                [pairs], [lam], len(lam), (clean, of_clean), lr=0.1
            )
        else:
            found.append(virtual.batch_hypergradient(pairs, lam, (clean, of_clean), lr=0.1))
    assert F.cosine_similarity(*found, dim=0) > 0.99


def test_channels_last_stays(tmp_path):
    trainer = make_trainer(tmp_path, device=CUDA, mixing=mixing())
    batch = next(iter(trainer.loader.epoch(0)))
    assert batch.inputs.is_contiguous(memory_format=torch.channels_last)
    assert batch.mix_plan.apply(batch.inputs).is_contiguous(memory_format=torch.channels_last)
