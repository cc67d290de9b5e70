"""A training step of every kind on fake CUDA tensors: no tensors of two devices meet, and the host
neither reads from the device nor waits for a copy. Evaluation reads at its end. (What fake tensors
can show, and what not: see fake_cuda.py. tests/gpu has the same on a GPU.)
"""

import numpy as np
import pytest
import torch
from fake_cuda import CUDA
from launches import Launches
from own_optimizers import OWN
from stand_in_recorder import StandIn
from toy import loader, make_trainer, steps_of, take_steps, use_graphs

from utils.augment.chain import Chain
from utils.augment.crop_flip import CropFlip
from utils.augment.named_policies import parse_policy
from utils.augment.policies import ColourJitter, Operations
from utils.augment.random_erasing import RandomErasing
from utils.augment.resized_crop import DecodedCrop
from utils.data.texts import loader as text_loader
from utils.data.texts.equal_tokens import EqualTokensLoader
from utils.data.texts.loader import TextLoader
from utils.fused import fuse
from utils.measures.measures import Measures
from utils.mixup.mixing import Mixing
from utils.models.resnet import ResNet
from utils.models.transformer import Transformer
from utils.models.vit import ViT
from utils.optim.ngd import batch as ngd_batch
from utils.training.evaluation import evaluate
from utils.training.objective import Classification, Precision

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: see tests/gpu"),
    pytest.mark.filterwarnings("ignore"),  # PyTorch's own, of fake tensors
]

# The lines that wait for the device: in evaluation, at a log line, and to measure time.
EVALUATED = "values = exchange.sum(sums).tolist()"
COUNTED = "counts = {name: exchange.sum(sums).cpu().numpy() for name, sums in self._sums.items()}"
LOGGED = "values = torch.cat([window, self.guard.left_out.double()]).tolist()"
WAITED = "torch.cuda.synchronize(device)"


def mixing(kind, **options):
    """None, or of pictures of 8 x 8; learned kinds update in every step."""
    kinds = {
        "none": None,
        "mixup": {"alpha": 0.5},
        "cutmix": {"alpha": 0.0, "cutmix_alpha": 1.0},
        "policy": {"alpha": 0.5, "meta_form": "policy", "clean_samples": 4},
        "sample": {"alpha": 0.5, "meta_form": "sample", "clean_samples": 4},
    }
    chosen = kinds[kind]
    options = {"block": 4, "per_sample": True, "different_classes": True} | options
    return chosen and Mixing(**chosen, **options, height=8, width=8)


def texts(mixing=None, shuffle=True, n=64, **options):
    """Of three classes, from 2 to 12 tokens, which are no multiple of anything."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 13, n)
    offsets = np.append(0, np.cumsum(lengths))
    tokens = rng.integers(5, 30, offsets[-1]).astype(np.uint16)
    loader_class = EqualTokensLoader if "batch_tokens" in options else TextLoader
    return loader_class(
        tokens, offsets, np.arange(n) % 3, batch_size=4, device=CUDA, max_len=12,
        shuffle=shuffle, bucket_batches=10, mixing=mixing, **options,
    )  # fmt: skip


def text_trainer(
    folder, *, mixup="none", precision="fp32", fused="none", data=None, optimizer="adamw",
    clean_accuracy=False, **model,
):  # fmt: skip
    mixed = mixing(mixup)
    model = {"layers": 1, "dropout": 0.1, "attention_dropout": 0.0} | model
    model = fuse(Transformer(30, 3, dim=16, heads=2, ffn=16, max_len=12, **model), fused)
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


@pytest.mark.parametrize("optimizer", OWN)
def test_every_optimizer(tmp_path, gpu, optimizer):
    trainer = make_trainer(tmp_path, optimizer=optimizer, device=CUDA, clip=1.0)
    take_steps(gpu, trainer, steps=2 if optimizer == "ngd" else 3)
    assert gpu.copies >= 1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("optimizer", OWN)
@pytest.mark.slow
def test_every_optimizer_in_half_precision(tmp_path, gpu, optimizer, precision):
    trainer = make_trainer(
        tmp_path, optimizer=optimizer, precision=precision, device=CUDA, accumulation=2,
        ema_decay=0.9,
    )  # fmt: skip
    take_steps(gpu, trainer, steps=2)


@pytest.mark.parametrize(
    "optimizer",
    [
        n if n in ("sgd", "muon") else pytest.param(n, marks=pytest.mark.slow)
        for n in OWN
        if n != "ngd"
    ],
)
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
        {"ngd_power": 1.0, "ngd_momentum_first": False, "ngd_adam": False},
        {"ngd_products": "fast"},
        {"ngd_orthogonal": True},
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


def watched_recorder(gpu) -> StandIn:
    """Fails where what a graph holds waits, or copies from the host."""
    recorder = StandIn()
    capture = recorder.capture

    def watched(function):
        def checked():
            before = gpu.copies, gpu.copied_back
            with gpu.watched():
                function()
            assert (gpu.copies, gpu.copied_back) == before

        return capture(checked)

    recorder.capture = watched
    return recorder


@pytest.mark.slow
def test_what_graphs_hold(tmp_path, gpu, monkeypatch):
    """Of NGD's two kinds of steps, with a policy that learns in every third one."""
    monkeypatch.setattr(ngd_batch, "EARLY_UPDATES", 1)
    recorder = watched_recorder(gpu)
    trainer = make_trainer(
        tmp_path, optimizer="ngd", device=CUDA, mixing=mixing("policy", update_every=3),
        optimizer_options={"ngd_update_period": 2},
    )  # fmt: skip
    use_graphs(trainer, recorder, rate_dtype=torch.float32)
    for epoch in range(4):
        for _ in steps_of(trainer, epoch):
            gpu.steps += 1
    assert recorder.captured == 2 and recorder.replayed >= 3


def test_what_graphs_of_texts_hold(tmp_path, gpu, monkeypatch):
    """Attention over packed rows, texts mixed inside the model, in whatever order the two sizes
    come."""
    monkeypatch.setattr(text_loader, "SIZES", 2)
    recorder = watched_recorder(gpu)
    trainer = text_trainer(
        tmp_path, precision="bf16", fused="speed", mixup="mixup", clean_accuracy=True
    )
    use_graphs(trainer, recorder, rate_dtype=torch.float32)
    for _ in steps_of(trainer, 0):
        gpu.steps += 1
    assert "aten._flash_attention_forward" in gpu.operations
    assert recorder.captured == 2 and recorder.replayed >= 3


# ---- pictures --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "precision", ["bf16", "fp16", pytest.param("fp32", marks=pytest.mark.slow)]
)
def test_all_that_a_step_can_have(tmp_path, gpu, precision):
    """Accumulation, clipping, the average, a frozen backbone and its thaw, label smoothing (which
    toy.py always has) and a look at a part of the batch unmixed."""
    trainer = make_trainer(
        tmp_path, device=CUDA, precision=precision, accumulation=2, clip=1.0, ema_decay=0.9,
        freeze_until=1, mixing=mixing("mixup"), clean_accuracy=True,
    )  # fmt: skip
    frozen = trainer.steps.model[0].weight
    take_steps(gpu, trainer)
    assert not frozen.requires_grad
    take_steps(gpu, trainer, epoch=1)
    assert frozen.requires_grad


@pytest.mark.slow
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
    data.suit_graphs()  # as for CUDA graphs
    with gpu.watched():
        for batch in data.epoch(1):
            trainer.forward_backward(data.made(batch))


@pytest.mark.slow
def test_operations_on_pictures(tmp_path, gpu):
    """Windows that are resized, RandAugment and jitter; nothing is left to `made`."""
    data = loader(device=CUDA, augment=False)
    drawing = [parse_policy("rand-m9-mstd0.5-inc1").make(8, 8), ColourJitter((0.4, 0.4, 0.4, 0.1))]
    data.later = Chain(
        DecodedCrop(), Operations(drawing, (1, 2, 3)), RandomErasing(8, 8, 0.5, (1, 2, 3))
    )
    trainer = make_trainer(tmp_path, data=data, device=CUDA)
    take_steps(gpu, trainer)
    data.suit_graphs()
    with gpu.watched():
        for batch in data.epoch(1):
            assert data.made(batch) is batch


@pytest.mark.parametrize("fused", ["none", "memory", "speed"])
def test_resnet(tmp_path, gpu, fused):
    trainer = picture_trainer(tmp_path, 18, fused=fused, precision="bf16", mixup="mixup")
    take_steps(gpu, trainer, steps=2)
    kernels = {"_affine", "_moments", "_gradient_sums", "_input_gradient", "_mixed_cross_entropy"}
    assert gpu.launches.keys() == (kernels if fused != "none" else set())


# Every depth and every mixup with every `fused`, and with each other.
RESNETS = [
    (depth, fused, mixup)
    for i, depth in enumerate((18, 50))
    for j, fused in enumerate(("none", "memory", "speed"))
    for k, mixup in enumerate(("none", "cutmix", "policy", "sample"))
    if (i + j + k) % 2 == 0
]


@pytest.mark.parametrize(("depth", "fused", "mixup"), RESNETS)
@pytest.mark.slow
def test_every_resnet(tmp_path, gpu, depth, fused, mixup):
    trainer = picture_trainer(
        tmp_path, depth, fused=fused, mixup=mixup, precision="bf16", optimizer="adamw"
    )
    take_steps(gpu, trainer, steps=2)


def vit() -> ViT:
    """With all that drops something."""
    return ViT(
        3, 8, 8, patch=4, layers=2, dim=32, heads=2, ffn=32, drop_rate=0.1, pos_drop_rate=0.1,
        drop_path_rate=0.1,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mixup", ["none", "mixup", "policy"])
def test_vit(tmp_path, gpu, mixup):
    """With rates by layer."""
    trainer = make_trainer(
        tmp_path, model=vit(), mixing=mixing(mixup), precision="bf16", device=CUDA, clip=1.0,
        optimizer="lamb", layer_decay=0.7,
    )  # fmt: skip
    take_steps(gpu, trainer, steps=2)


# ---- texts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "fused"),
    [
        ("fp32", "none"),
        ("bf16", "speed"),
        pytest.param("fp32", "speed", marks=pytest.mark.slow),
        pytest.param("bf16", "none", marks=pytest.mark.slow),
    ],
)
def test_transformer(tmp_path, gpu, precision, fused):
    """Padded attention in fp32; in bf16 attention over packed rows."""
    data = {"accumulation": 2}
    trainer = text_trainer(
        tmp_path, precision=precision, fused=fused, mixup="mixup", data=data, layers=2
    )
    take_steps(gpu, trainer)
    assert ("aten._flash_attention_forward" in gpu.operations) == (precision == "bf16")
    assert bool(gpu.launches) == (fused != "none")


@pytest.mark.parametrize(("fused", "most"), [("none", 342), ("speed", 272)])
def test_launches_of_packed_texts(tmp_path, gpu, fused, most):
    """Of 6 layers, forward and backward; they were 435 and 415 with a cast for each weight, a mask
    for each dropout and varlen_attn."""
    steps = text_trainer(tmp_path, precision="bf16", fused=fused, layers=6).steps
    batch = next(texts().epoch(0))
    with Launches() as launches:
        loss, _ = steps.objective(batch.inputs, batch.targets)
        torch.autograd.grad(loss, list(steps.model.parameters()))
    assert launches.counts.total() + gpu.launches.total() <= most


@pytest.mark.slow
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


# Every two of these values, and every `at` with every mixup in every precision and every `fused`.
TEXTS = [
    (precision, fused, at, mixup)
    for i, precision in enumerate(("fp32", "bf16", "fp16"))
    for j, fused in enumerate(("none", "memory", "speed"))
    for k, at in enumerate(("sentence", "embeddings"))
    for n, mixup in enumerate(("none", "mixup", "policy", "sample"))
    if (i + j + k + n) % 3 == 0
]


@pytest.mark.parametrize(("precision", "fused", "at", "mixup"), TEXTS)
@pytest.mark.slow
def test_every_text(tmp_path, gpu, precision, fused, at, mixup):
    data = {"batch_tokens": 30, "accumulation": 2}
    trainer = text_trainer(
        tmp_path, precision=precision, fused=fused, mixup=mixup, mixup_at=at, data=data,
        clean_accuracy=True,
    )  # fmt: skip
    take_steps(gpu, trainer, steps=2)


# ---- the loop, evaluation --------------------------------------------------------------------


def test_the_loop_reads_at_its_log_lines_alone(tmp_path, gpu):
    trainer = make_trainer(tmp_path, device=CUDA, log_every=3, ema_decay=0.9, on_nonfinite="skip")
    trainer.steps.start()
    update = trainer.update

    def counted():
        update()
        gpu.steps += 1

    trainer.update = counted
    with gpu.watched(allowed=(LOGGED, WAITED)):
        trainer.train_to_epoch_end()
    assert trainer.progress.step == 6
    # The first step is shown, and timed.
    assert {*gpu.reads} == {(step, line) for step in (1, 3, 6) for line in (LOGGED, WAITED)}


@pytest.mark.parametrize("what", ["pictures", "views of pictures", "vit", "texts"])
def test_evaluation_reads_at_its_end(tmp_path, gpu, what):
    views = "both" if what == "views of pictures" else "none"
    if what == "texts":
        trainer, test = text_trainer(tmp_path, precision="bf16"), texts(shuffle=False)
    else:
        model = vit() if what == "vit" else None
        trainer = make_trainer(tmp_path, model=model, device=CUDA, ema_decay=0.9)
        test = loader(5, n=12, augment=False, shuffle=False, device=CUDA)
    with gpu.watched(allowed=(EVALUATED, COUNTED)), trainer.steps.evaluated_weights():
        found = evaluate(
            trainer.steps.model,
            test.epoch(),
            trainer.steps.precision,
            measures=Measures(3, ["f1_macro"]),
            views=views,
        )
    assert found.counts["confusions"].shape == (3, 3)
    numbers = 6  # three sums of the pictures and of their views, beside a matrix
    assert gpu.reads == [(0, EVALUATED)] * numbers + [(0, COUNTED)]


def test_the_pass_that_counts_for_nothing(tmp_path, gpu):
    trainer = make_trainer(tmp_path, device=CUDA)
    trainer.steps.start()
    with gpu.watched():
        trainer.settle_order()
