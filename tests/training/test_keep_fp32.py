"""--keep_fp32: the named modules compute in float32 under autocast, also compiled and sharded."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from utils.distributed.strategies.base import build_strategy
from utils.errors import UserError
from utils.exchange import Exchange
from utils.models.transformer import Transformer
from utils.runs.prepare import forward
from utils.training.keep_fp32 import keep_in_float32, names_of_modules, refuse_uncalled
from utils.training.objective import Precision

CPU = torch.device("cpu")


class Seen(nn.Linear):
    """Notes the dtypes of its input and output."""

    def forward(self, x):
        y = super().forward(x)
        self.dtypes = x.dtype, y.dtype
        return y


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Seen(6, 8), nn.Sequential(Seen(8, 8), nn.ReLU(), Seen(8, 8)), Seen(8, 4))


def dtypes_of(model, called=None) -> list[tuple]:
    with torch.autocast("cpu", torch.bfloat16):
        (called or model)(torch.ones(3, 6)).float().sum().backward()
    return [module.dtypes for module in model.modules() if isinstance(module, Seen)]


HALF, FULL = torch.bfloat16, torch.float32


def test_named_modules_and_their_parts_compute_in_float32():
    model = small_model()
    names = [name for name, _ in model.named_parameters()]
    assert dtypes_of(model) == [(FULL, HALF), (HALF, HALF), (HALF, HALF), (HALF, HALF)]
    keep_in_float32(model, ["1", "1"], CPU)
    assert dtypes_of(model) == [(FULL, HALF), (FULL, FULL), (FULL, FULL), (FULL, HALF)]
    assert [name for name, _ in model.named_parameters()] == names
    assert type(model[1]).__name__ == "Sequential" and isinstance(model[1], nn.Sequential)
    copied = copy.deepcopy(model)
    assert dtypes_of(copied)[1] == (FULL, FULL) and copied[1][0] is not model[1][0]


def test_the_result_is_that_of_float32():
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    keep_in_float32(model, ["1"], CPU)
    x = torch.randn(3, 6)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model[0](x)
        y = model(x)
    plain = nn.functional.linear(hidden.float(), model[1].weight, model[1].bias)
    assert y.dtype == torch.float32 and torch.equal(y, plain)
    y.sum().backward()
    assert torch.equal(model[1].weight.grad, hidden.detach().float().sum(0).expand(4, 8))


def test_without_autocast_nothing_changes():
    model, kept = small_model(), small_model()
    keep_in_float32(kept, ["0", "1"], CPU)
    x = torch.randn(3, 6)
    assert torch.equal(model(x), kept(x))


@pytest.mark.slow  # the compiler is imported
def test_compiled_it_is_the_same():
    model = small_model()
    keep_in_float32(model, ["2"], CPU)
    x = torch.randn(3, 6)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        compiled = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert compiled.dtype == torch.float32 and torch.equal(compiled, expected)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_with_fsdp(one_rank):
    model = small_model()
    keep_in_float32(model, ["1.0"], CPU)
    wrapped = build_strategy("fsdp", model, Exchange()).called
    # The module after the kept one gets float32, and computes in bfloat16.
    expected = [(FULL, HALF), (FULL, FULL), (FULL, HALF), (HALF, HALF)]
    assert dtypes_of(wrapped) == expected


def test_patterns_name_modules():
    model = Transformer(9, 3, layers=2, dim=8, heads=2, ffn=8)
    assert names_of_modules(model, ["head"]) == ["head"]
    assert names_of_modules(model, ["layers.*.norm1", "head"]) == [
        "layers.0.norm1", "layers.1.norm1", "head",
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"layer.0.norm1: .* layers.0.norm1"):
        names_of_modules(model, ["layer.0.norm1"])
    with pytest.raises(UserError, match="no such module"):
        names_of_modules(model, ["*.nothing"])


def test_whether_modules_are_called_is_found_without_reading_data():
    """A batch that is read before --auto_batch would fix the size of the workers' batches."""
    model, task = small_model(), SimpleNamespace(usual_sample=lambda: torch.ones(1, 6))
    precision = Precision("fp32", CPU)
    model[1].eval()
    refuse_uncalled(model, ["1.0"], lambda: forward(model, task.usual_sample(), precision))
    assert model[0].training and not model[1].training


def test_a_module_that_is_not_called_is_refused():
    model = Transformer(9, 3, layers=2, dim=8, heads=2, ffn=8).eval()

    def forward():
        model(torch.tensor([[1, 2, 3]]))

    refuse_uncalled(model, ["head", "layers.0", "layers.0.attention.qkv"], forward)
    for name in ("layers", "layers.1.attention.qkv"):
        with pytest.raises(UserError, match=f"--keep_fp32 {name}: .* without calling it"):
            refuse_uncalled(model, ["head", name], forward)
    assert not model.head._forward_pre_hooks
