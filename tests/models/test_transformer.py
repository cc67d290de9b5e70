"""The Transformer: equal to PyTorch's layers, independent of padding, mixing at the right layer."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_transformer import SIZES, WAYS, model, packed, padded, texts
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from utils.mixup.hypergradient import exact_hypergradient
from utils.mixup.mixing import MixPlan
from utils.models.transformer import Transformer


def theirs(ours: Transformer, layer: int) -> nn.TransformerEncoderLayer:
    """PyTorch's layer with the same weights."""
    dim, ffn = ours.head.in_features, ours.layers[layer].fc1.out_features
    made = nn.TransformerEncoderLayer(
        dim, 4, ffn, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    ).to(ours.head.weight.dtype)
    mine = ours.layers[layer]
    pairs = {
        made.self_attn.in_proj_weight: mine.attention.qkv.weight,
        made.self_attn.in_proj_bias: mine.attention.qkv.bias,
    }
    modules = (made.self_attn.out_proj, made.linear1, made.linear2, made.norm1, made.norm2)
    equals = (mine.attention.out, mine.fc1, mine.fc2, mine.norm1, mine.norm2)
    for a, b in zip(modules, equals, strict=True):
        pairs |= {a.weight: b.weight, a.bias: b.bias}
    for copied, original in pairs.items():
        copied.data.copy_(original.data)
    return made


def reference(ours: Transformer, ids: torch.Tensor, layers, lam=None, partner=None):
    """The whole model built from PyTorch's layers, on the padded layout."""
    real = ids != 0
    x = ours.tokens.weight[ids] + ours.positions.weight[: ids.shape[1]]
    if lam is not None and ours.mixup_at == "embeddings":
        x = x * real[:, :, None]
        x = lam[:, None, None] * x + (1 - lam)[:, None, None] * x[partner]
        real = real | real[partner]
    for layer in layers:
        x = layer(x, src_key_padding_mask=~real)
    x = F.layer_norm(x, x.shape[-1:], ours.norm.weight, ours.norm.bias)
    mean = (x * real[:, :, None]).sum(1) / real.sum(1)[:, None]
    x = x[:, 0] if ours.pooling == "cls" else mean
    if lam is not None and ours.mixup_at == "sentence":
        x = lam[:, None] * x + (1 - lam)[:, None] * x[partner]
    return x @ ours.head.weight.T + ours.head.bias


@pytest.mark.parametrize("lengths", [[5, 9, 1, 12, 3], [7, 7, 7], [1], [1, 1]])
@pytest.mark.parametrize(("pooling", "mixup_at"), WAYS)
def test_equals_pytorchs_layers_and_their_gradients(lengths, pooling, mixup_at):
    ours = model(dtype=torch.float64, pooling=pooling, mixup_at=mixup_at)
    samples, n = texts(lengths), len(lengths)
    partner = torch.arange(n).roll(1)
    for lam in (None, torch.linspace(0.1, 0.8, n, dtype=torch.float64)):
        mixing = None if lam is None else MixPlan(partner, lam)
        other = copy.deepcopy(ours)
        layers = [theirs(other, index) for index in range(2)]
        expected = reference(other, padded(samples), layers, lam, partner)
        weight = torch.randn(n, 3, dtype=torch.float64)
        (expected * weight).sum().backward()
        for inputs in (packed(samples), padded(samples), padded(samples, extra=12 - max(lengths))):
            ours.zero_grad()
            logits = ours(inputs, mixing)
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
            (logits * weight).sum().backward()
            for name in ("tokens", "positions", "norm", "head"):
                a, b = getattr(ours, name).weight.grad, getattr(other, name).weight.grad
                torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
            for mine, their in zip(ours.layers, layers, strict=True):
                grads = [p.grad for p in mine.parameters()]
                named = dict(their.named_parameters())
                order = ("norm1", "self_attn.in_proj_", "self_attn.out_proj")
                order += ("norm2", "linear1", "linear2")
                for index, name in enumerate(order):
                    dot = "" if name.endswith("_") else "."
                    for offset, kind in enumerate(("weight", "bias")):
                        torch.testing.assert_close(
                            grads[2 * index + offset], named[f"{name}{dot}{kind}"].grad,
                            rtol=0, atol=1e-10,
                        )  # fmt: skip


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_text_has_the_same_logits_in_any_batch(pooling):
    ours, samples = model(pooling=pooling), texts([4, 12, 1, 7, 7, 2])
    alone = torch.cat([ours(packed([ids])) for ids in samples])
    turned = samples[::-1]
    batches = [(packed(samples), alone), (packed(turned), alone.flip(0))]
    batches += [(padded(samples), alone), (padded(samples[3:], 5), alone[3:])]
    batches += [(packed(samples).first(4), alone[:4]), (packed(samples).first(9), alone)]
    for inputs, expected in batches:
        torch.testing.assert_close(ours(inputs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("pooling", "mixup_at"), WAYS)
def test_padding_changes_nothing(pooling, mixup_at):
    """Neither the padding's embedding nor its positions."""
    ours, samples = model(pooling=pooling, mixup_at=mixup_at), texts([3, 8, 1, 5])
    plan = MixPlan(torch.tensor([1, 0, 3, 2]), torch.tensor([0.3, 0.9, 0.5, 0.2]))
    for inputs in (packed(samples), padded(samples)):
        for mixing in (None, plan):
            before = ours(inputs, mixing)
            changed = copy.deepcopy(ours)
            changed.tokens.weight.data[0] += 100
            changed.positions.weight.data[8:] -= 100
            assert torch.equal(changed(inputs, mixing), before)
            loss = changed(inputs, mixing).square().sum()
            loss.backward()
            assert not changed.tokens.weight.grad[0].any()
            assert not changed.positions.weight.grad[8:].any()


@pytest.mark.parametrize(("pooling", "mixup_at"), WAYS)
def test_lambda_1_does_not_mix_and_lambda_0_gives_the_partner(pooling, mixup_at):
    ours, inputs = model(pooling=pooling, mixup_at=mixup_at), packed(texts([3, 8, 1, 5, 2]))
    partner, plain = torch.tensor([1, 3, 4, 0, 2]), ours(inputs)
    own = ours(inputs, MixPlan(partner, torch.ones(5)))
    other = ours(inputs, MixPlan(partner, torch.zeros(5)))
    if mixup_at == "sentence":
        assert torch.equal(own, plain)
    torch.testing.assert_close(own, plain, rtol=0, atol=1e-6)
    torch.testing.assert_close(other, plain[partner], rtol=0, atol=1e-6)
    themselves = ours(inputs, MixPlan(torch.arange(5), torch.full((5,), 0.3)))
    torch.testing.assert_close(themselves, plain, rtol=0, atol=1e-6)


def test_sentences_are_mixed_before_the_classifier():
    """The classifier is linear, so the logits are mixed alike."""
    ours, inputs = model(), packed(texts([3, 8, 1, 5]))
    partner, lam = torch.tensor([2, 0, 1, 3]), torch.tensor([0.25, 0.5, 0.75, 0.1])
    plain = ours(inputs)
    expected = lam[:, None] * plain + (1 - lam)[:, None] * plain[partner]
    torch.testing.assert_close(ours(inputs, MixPlan(partner, lam)), expected)


@pytest.mark.parametrize(("pooling", "mixup_at"), WAYS)
def test_gradients_are_finite_and_lambda_has_one(pooling, mixup_at):
    ours = model(pooling=pooling, mixup_at=mixup_at, dropout=0.3).train()
    inputs = packed(texts([1, 1, 9, 1, 2]))
    lam = torch.tensor([0.5, 1.0, 0.0, 0.7, 0.2], requires_grad=True)
    ours(inputs, MixPlan(torch.tensor([1, 2, 4, 2, 0]), lam)).square().sum().backward()
    for parameter in (lam, *ours.parameters()):
        assert torch.isfinite(parameter.grad).all()
    assert lam.grad[3:].all()


@pytest.mark.slow
@pytest.mark.parametrize("mixup_at", ["sentence", "embeddings"])
def test_gradients_equal_finite_differences(mixup_at):
    ours = model(dtype=torch.float64, layers=1, dim=8, heads=2, ffn=8, mixup_at=mixup_at)
    inputs = packed(texts([2, 1, 3]))
    names = [name for name, _ in ours.named_parameters()]

    def logits(lam, *weights):
        plan = MixPlan(torch.tensor([2, 0, 1]), lam)
        weights = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(ours, weights, (inputs, plan)).square().sum()

    lam = torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64, requires_grad=True)
    chosen = [p.detach().requires_grad_("tokens" not in n) for n, p in ours.named_parameters()]
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradcheck(logits, (lam, *chosen))


@pytest.mark.parametrize("mixup_at", ["sentence", "embeddings"])
def test_the_exact_hypergradient_equals_finite_differences(mixup_at):
    ours = model(dtype=torch.float64, mixup_at=mixup_at)
    inputs, clean = packed(texts([4, 7, 2])), packed(texts([3, 5], seed=1))
    names = [name for name, _ in ours.named_parameters()]

    def logits(weights, inputs, *plan):
        weights = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(ours, weights, (inputs, *plan))

    def mixed(weights, lam):
        plan = MixPlan(torch.tensor([1, 2, 0]), lam)
        return logits(weights, inputs, plan).logsumexp(1).sum()

    def clean_loss(weights):
        return logits(weights, clean)[:, 0].square().sum()

    def stepped(lam):
        weights = [p.detach().requires_grad_() for p in ours.parameters()]
        gradient = torch.autograd.grad(mixed(weights, lam), weights)
        return clean_loss([w - 0.1 * g for w, g in zip(weights, gradient, strict=True)])

    lam = torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64)
    got = exact_hypergradient(mixed, clean_loss, list(ours.parameters()), lam, 0.1)
    for index in range(3):
        nudge = torch.zeros(3, dtype=torch.float64)
        nudge[index] = 1e-5
        expected = (stepped(lam + nudge) - stepped(lam - nudge)) / 2e-5
        torch.testing.assert_close(got[index], expected, rtol=1e-5, atol=1e-9)


def test_a_dropped_token_keeps_its_position():
    """A dropped token leaves no information, and the others are scaled by 1 / (1 - rate)."""
    ours, inputs = model(token_dropout=0.5).train(), packed(texts([40, 7]))
    seen = ours.embed_tokens(inputs.ids)
    dropped = (seen == 0).all(1)
    assert 8 < dropped.sum() < 40
    expected = torch.where(dropped[:, None], 0.0, 2 * ours.tokens(inputs.ids))
    torch.testing.assert_close(seen, expected)
    assert torch.equal(ours.eval().embed_tokens(inputs.ids), ours.tokens(inputs.ids))


def test_dropout_only_in_training():
    ours, inputs = model(dropout=0.5), packed(texts([4, 9, 1]))
    assert not torch.equal(ours(inputs), ours(inputs))
    ours.eval()
    assert torch.equal(ours(inputs), ours(inputs))
    torch.testing.assert_close(ours(inputs), model(dropout=0.0)(inputs))
    still = model(dropout=0.0).train()
    assert torch.equal(still(inputs), still(inputs))


def test_it_computes_in_half_precision_under_autocast():
    ours, inputs = model().eval(), packed(texts([4, 9, 1]))
    with torch.autocast("cpu", torch.bfloat16):
        logits = ours(inputs)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), ours(inputs), rtol=0, atol=0.1)


def test_it_can_be_copied_saved_and_made_without_memory():
    ours, inputs = model(), packed(texts([4, 9, 1]))
    with torch.device("meta"):
        empty = Transformer(**SIZES, dropout=0.0)
    assert all(p.is_meta for p in empty.parameters())
    again = empty.to_empty(device="cpu")
    again.load_state_dict(ours.state_dict())
    for other in (again, copy.deepcopy(ours)):
        assert torch.equal(other(inputs), ours(inputs))
    assert not list(ours.buffers())


def test_initial_predictions_are_near_uniform():
    """And all parameters have gradients."""
    torch.manual_seed(0)
    ours = Transformer(1000, 4, layers=6, dim=64, heads=4, ffn=128, max_len=64, dropout=0.0)
    samples = packed(texts([20, 40, 64, 7] * 4))
    loss = F.cross_entropy(ours(samples), torch.arange(16) % 4)
    assert abs(loss - np.log(4)) < 0.1
    loss.backward()
    assert all(p.grad.any() for p in ours.parameters())


def test_a_model_learns():
    """It learns to tell which of two words is in a text."""
    torch.manual_seed(0)
    ours = Transformer(20, 2, layers=1, dim=16, heads=2, ffn=32, max_len=8, dropout=0.0)
    optimizer, rng = torch.optim.AdamW(ours.parameters(), lr=5e-3), np.random.default_rng(0)
    for _ in range(60):
        samples = [[1, *rng.integers(4, 20, rng.integers(1, 6))] for _ in range(32)]
        targets = rng.integers(0, 2, 32)
        for ids, target in zip(samples, targets, strict=True):
            ids.append(2 + int(target))
        logits = ours(packed(samples))
        loss = F.cross_entropy(logits, torch.from_numpy(targets))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": 18}, "multiple of heads"),
        ({"pooling": "max"}, "pooling"),
        ({"mixup_at": "input"}, "mixup_at"),
        ({"dropout": 1.0}, "dropout"),
        ({"attention_dropout": -0.1}, "dropout"),
        ({"token_dropout": 1.5}, "dropout"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Transformer(**(SIZES | settings))


def test_too_long_a_text_is_refused():
    for inputs in (packed(texts([3, 13])), padded(texts([13, 2]))):
        with pytest.raises(ValueError, match="13 tokens, but max_len is 12"):
            model()(inputs)


@pytest.mark.slow
def test_exports_to_onnx_with_any_number_and_length(tmp_path):
    """With the mean of the tokens; with the first one: tests/inference/test_onnx_model.py."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    ours = model(pooling="mean").eval()
    n, length = (torch.export.Dim(name, max=most) for name, most in (("n", 1 << 16), ("l", 12)))
    path = tmp_path / "model.onnx"
    torch.onnx.export(
        ours, (padded(texts([3, 5])),), path, dynamo=True, verbose=False,
        dynamic_shapes=({0: n, 1: length},),
    )  # fmt: skip
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    for lengths in ([3, 5], [1], [12, 1, 7, 4], [2, 2]):
        inputs = padded(texts(lengths, seed=3))
        (logits,) = session.run(None, {name: inputs.numpy()})
        expected = ours(inputs).detach().numpy()
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
