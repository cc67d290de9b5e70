#!/usr/bin/env python3
"""What a step of natural-gradient descent costs, updates of the Fisher matrices included.

    python benchmarks/ngd_step.py
    python benchmarks/ngd_step.py --only step
    python benchmarks/ngd_step.py --only training --device cuda --batch 256 --precision bf16

`step`: the optimizer alone, over the parameters of ResNet-50 and of a Transformer with six layers,
with float32 and with "fast" products, against Muon, fused and foreach SGD, and natural gradient as
PyTorch code for it is usually written (`Usual`, below): tensor after tensor, axis after axis, with
numbers read by the host. They take turns; one turn is one period of updates. "NGD" is the default
form of --ngd, "NGD, plain" that without orthogonal steps, "NGD, paper" that of the usual version,
which is checked to take the same steps.
"products alone" are the matrix products of "NGD" and nothing else.

`training`: forward, backward and step of ResNet-50 on pictures of 32x32, with NGD and with fused
SGD. On a GPU it also runs a period in which PyTorch raises an error wherever the host waits.
"""

import contextlib
import copy
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import parser, ratios, report, side_by_side
from benchmarks.made_up import random_batch
from utils.models.resnet import ResNet
from utils.optim.factory import build_optimizer
from utils.optim.ngd.batch import EARLY_UPDATES
from utils.optim.ngd.fisher import DELTA, default_rank, first_basis
from utils.optim.ngd.optimizer import NGD

PERIOD = 4
MOMENTUM = {"momentum": 0.9, "nesterov": True}
DECAY = 5e-4


class UsualAxis:
    """Online natural gradient of one axis, X - X R'E R in the paper's notation; with host reads."""

    def __init__(self, like: Tensor, axis: int, alpha: float = 4.0, eta: float = 0.1):
        self.axis, self.length, self.alpha, self.eta = axis, like.shape[axis], alpha, eta
        self.rank = min(default_rank(self.length), self.length - 1)
        self.e = None
        self.r = first_basis(self.rank, self.length, device=like.device)
        self.d_plus_rho, self.rho = torch.zeros(self.rank), 0.0  # on the host

    def __call__(self, gradient: Tensor, updating: bool) -> Tensor:
        turned = gradient.transpose(-1, self.axis).contiguous()
        x = turned.view(-1, self.length)
        before = (x * x).sum()
        x_hat = x if self.e is None else x - (x @ self.r.T * self.e) @ self.r
        if updating:
            self.update(x, before.item())
        after = (x_hat * x_hat).sum()
        if after.item() > 0:
            x_hat = x_hat * torch.sqrt(before / after)
        return x_hat.view(turned.shape).transpose(-1, self.axis)

    def update(self, x: Tensor, square: float) -> None:
        rows, rank, length, eta = len(x), self.rank, self.length, self.eta
        product = (x @ self.r.T).T @ x / rows
        shift = eta * DELTA * product.norm().item()
        y = eta * product + self.r * ((1 - eta) * self.d_plus_rho + shift).to(x.device)[:, None]
        c, u = torch.linalg.eigh((y @ y.T).cpu().double())
        root = c.clamp_min(1e-300).sqrt()
        self.r = ((u / root).T.to(x) @ y).contiguous()
        trace = eta * square / rows + shift * length
        trace += (1 - eta) * (self.d_plus_rho.sum().item() + (length - rank) * self.rho)
        self.d_plus_rho = root.float()
        self.rho = max((trace - root.sum().item()) / (length - rank), shift)
        beta0 = self.alpha * (root.sum().item() + (length - rank) * self.rho) / length
        e = 1 - (self.rho + beta0) / (root + beta0)
        self.e = e.to(x)


class Usual(torch.optim.SGD):
    """SGD with momentum (foreach) on gradients that are preconditioned one by one."""

    def __init__(self, params, lr: float):
        super().__init__(params, lr=lr, foreach=True, **MOMENTUM)
        self.axes: dict[Tensor, list[UsualAxis]] = {}
        self.steps = 0

    @torch.no_grad()
    def step(self):
        updating = self.steps < EARLY_UPDATES or self.steps % PERIOD == 0
        self.steps += 1
        kept = {}
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad + DECAY * parameter
            if sum(length > 1 for length in parameter.shape) > 1:
                if parameter not in self.axes:
                    numbers = [k for k, length in enumerate(parameter.shape) if length > 1]
                    self.axes[parameter] = [UsualAxis(parameter, number) for number in numbers]
                for axis in self.axes[parameter]:
                    gradient = axis(gradient, updating)
            kept[parameter], parameter.grad = parameter.grad, gradient
        super().step()
        for parameter, gradient in kept.items():
            parameter.grad = gradient


def transformer() -> nn.Module:
    """Six layers of width 512 over a vocabulary of 20,000 for four classes: 29 M parameters."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return nn.ModuleList([nn.Embedding(20_000, 512), encoder, nn.Linear(512, 4)])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-50": lambda: ResNet(50, 10).to(memory_format=torch.channels_last),
    "Transformer, 6 layers": transformer,
}


def optimizers(lr: float) -> dict[str, Callable[[nn.Module], torch.optim.Optimizer]]:
    def of_parameters(kind: Callable, **settings) -> Callable:
        return lambda model: kind(model.parameters(), lr=lr, **settings)

    ngd = partial(
        build_optimizer, "ngd", lr=lr, weight_decay=DECAY, momentum=0.9, ngd_update_period=PERIOD
    )
    paper = {"weight_decay": DECAY, "update_period": PERIOD, **MOMENTUM}
    sgd = {"weight_decay": DECAY, **MOMENTUM}
    return {
        "NGD": ngd,
        "NGD, fast": partial(ngd, ngd_products="fast"),
        "NGD, plain": partial(ngd, ngd_orthogonal=False),
        "NGD, plain, all": partial(ngd, ngd_orthogonal=False, ngd_axes="all"),
        "NGD, paper": of_parameters(NGD, **paper),
        "fused SGD": of_parameters(torch.optim.SGD, fused=True, **sgd),
        "Muon": partial(build_optimizer, "muon", lr=lr, weight_decay=DECAY),
        "foreach SGD": of_parameters(torch.optim.SGD, foreach=True, **sgd),
        "usual NGD": of_parameters(Usual),
    }


class Products(TorchDispatchMode):
    """Notes the matrix products that are computed within it, and repeats them.

    Tensors of one shape in one place are one tensor when repeated: all would not fit into memory.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.tensors = [], {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operation.overloadpacket.__name__ in ("bmm", "mm", "baddbmm", "baddbmm_"):
            own = {name: self._like(name, value) for name, value in kwargs.items()}
            self.calls.append((operation, [*map(self._like, range(len(args)), args)], own))
        return operation(*args, **kwargs)

    def _like(self, place: int | str, value):
        if not isinstance(value, Tensor):
            return value
        key = (place, value.shape, value.stride(), value.dtype)
        if key not in self.tensors:
            self.tensors[key] = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            ).fill_(1e-3)
        return self.tensors[key]

    def repeat(self) -> None:
        for operation, args, kwargs in self.calls:
            operation(*args, **kwargs)


def products_alone(optimizer: torch.optim.Optimizer, device: torch.device) -> Callable:
    """() -> steps per second over one period, if they were their matrix products alone."""
    with Products() as products:
        for _ in range(PERIOD):
            optimizer.step()

    def run() -> float:
        synchronize(device)
        started = time.perf_counter()
        products.repeat()
        synchronize(device)
        return PERIOD / (time.perf_counter() - started)

    return run


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def with_gradients(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy of the model with gradients of low rank and noise, as real ones are."""
    generator = torch.Generator().manual_seed(0)
    model = copy.deepcopy(model).to(device)
    for parameter in model.parameters():
        rows = parameter.shape[0]
        noise = torch.randn(parameter.shape, generator=generator) * 1e-4
        some = torch.randn(8, parameter[0].numel(), generator=generator) * 1e-3
        low = torch.randn(rows, 8, generator=generator) @ some
        parameter.grad = torch.empty_like(parameter).copy_(noise + low.view(parameter.shape))
    return model


def time_steps(make: Callable, model: nn.Module, device: torch.device) -> Callable:
    """() -> steps per second over one period of updates."""
    optimizer = make(with_gradients(model, device))
    for _ in range(EARLY_UPDATES + 2):
        optimizer.step()

    def run() -> float:
        synchronize(device)
        started = time.perf_counter()
        for _ in range(PERIOD):
            optimizer.step()
        synchronize(device)
        return PERIOD / (time.perf_counter() - started)

    run.optimizer = optimizer
    return run


def check_same(model: nn.Module, device: torch.device) -> float:
    """Largest relative difference of the weights after 14 steps of ours and the usual version."""
    made = []
    for name in ("NGD, paper", "usual NGD"):
        stepped = with_gradients(model, device)
        optimizer = optimizers(0.1)[name](stepped)
        for _ in range(14):
            optimizer.step()
        made.append(stepped.parameters())
    return max(
        ((a - b).norm() / b.norm()).item() for a, b in zip(*made, strict=True) if b.norm() > 0
    )


def state_bytes(optimizer, key: Callable[[str], bool]) -> int:
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for name, value in state.items()
        if key(name) and isinstance(value, Tensor)
    )


def measure_steps(device: torch.device, repetitions: int) -> dict:
    results = {}
    for case, make_model in MODELS.items():
        torch.manual_seed(0)
        model = make_model()
        difference = check_same(model, device)
        assert difference < 1e-3, f"{case}: the usual version differs by {difference}"
        runs = {name: time_steps(make, model, device) for name, make in optimizers(1e-6).items()}
        ngd = runs["NGD"].optimizer
        runs["products alone"] = products_alone(ngd, device)
        weights = sum(p.nbytes for p in model.parameters()) / 1e6
        fisher = state_bytes(ngd, lambda name: name.startswith(("basis", "spectrum", "rest"))) / 1e6
        multipliers = sum(axis.multiplier.nbytes for b in ngd._batches for axis in b.axes) / 1e6
        working = sum(each.nbytes for each in ngd._workspaces) / 1e6
        print(
            f"{case}: weights {weights:.0f} MB, momentum the same, Fisher matrices {fisher:.0f} MB "
            f"(in checkpoints) and {multipliers:.0f} MB (for multiplying), working memory "
            f"{working:.0f} MB; after 14 steps the usual version differs by {difference:.1e}"
        )
        figures = side_by_side(runs, repetitions)
        pairs = [("NGD", name) for name in runs if name != "NGD"]
        pairs += [("NGD, fast", "usual NGD"), ("NGD, paper", "usual NGD")]
        pairs += [("NGD, plain", "Muon"), ("NGD, plain", "NGD, plain, all")]
        results[case] = {
            "steps_per_second": figures,
            "megabytes": {
                "weights": weights, "fisher": fisher, "multipliers": multipliers,
                "working": working,
            },
            "ratios": ratios(figures, *pairs),
        }  # fmt: skip
    return results


def measure_training(device: torch.device, repetitions: int, batch: int, precision: str) -> dict:
    torch.manual_seed(0)
    inputs = random_batch(batch).to(device)
    targets = torch.randint(0, 10, (batch,), device=device)
    autocast = contextlib.nullcontext()
    if precision == "bf16":
        autocast = torch.autocast(device.type, torch.bfloat16)
    ours = "NGD" if precision == "fp32" else "NGD, fast"  # as the entries have it
    steps = PERIOD * (8 if device.type == "cuda" else 1)

    def training(name: str) -> Callable:
        model = MODELS["ResNet-50"]().to(device)
        optimizer = optimizers(1e-3)[name](model)

        def run(steps: int = steps) -> float:
            synchronize(device)
            started = time.perf_counter()
            for _ in range(steps):
                with autocast:
                    loss = F.cross_entropy(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            synchronize(device)
            return steps * batch / (time.perf_counter() - started)

        with autocast:
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        for _ in range(EARLY_UPDATES + 2):  # past the steps that all update
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run(PERIOD)
        if name == ours and device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
            synchronize_mode_steps(run)
        return run

    def synchronize_mode_steps(run: Callable) -> None:
        """No host wait in a whole period; the mode's error ends the benchmark."""
        global synchronize
        wait, synchronize = synchronize, lambda device: None
        try:
            run(PERIOD)
        finally:
            synchronize = wait
            torch.cuda.set_sync_debug_mode("default")
        print("no host wait in a period of NGD's training steps")

    figures = side_by_side({name: training(name) for name in (ours, "fused SGD")}, repetitions)
    return {
        f"ResNet-50, batch {batch}, {precision}": {
            "samples_per_second": figures,
            "ratios": ratios(figures, ("fused SGD", ours)),
        }
    }


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--only", choices=("step", "training"), help="one part (default: both)")
    flags.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    flags.add_argument("--batch", type=int, default=128, help="of `training` (default: 128)")
    flags.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    options = flags.parse_args()
    torch.set_num_threads(options.threads)
    device, results = torch.device(options.device), {}
    if options.only != "training":
        results |= measure_steps(device, options.repetitions)
    if options.only != "step":
        results |= measure_training(
            device, max(2, options.repetitions // 2), options.batch, options.precision
        )
    report("NGD: steps updates included", results, options.json)


if __name__ == "__main__":
    main()
