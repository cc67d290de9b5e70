"""Classifiers on encoders of transformers: packed texts give what the library gives for each."""

import numpy as np
import pytest
import small_encoders
import torch
from fake_cuda import fake_cuda

from utils.models.encoder import Encoder, StaticEmbeddings, StaticEncoder, add_adapters, with_end
from utils.packed import pack

END, CPU = 199, torch.device("cpu")
LENGTHS = np.array([5, 1, 20, 3])


def texts(pad: int = 0):
    """(PackedTokens, the ids of each text, and the same as a padded grid)."""
    generator = np.random.default_rng(0)
    ids = [generator.integers(4, 190, length) for length in LENGTHS]
    starts = np.cumsum([0, *LENGTHS[:-1]])
    grid = np.full((len(ids), LENGTHS.max()), pad)
    for row, own in zip(grid, ids, strict=True):
        row[: len(own)] = own
    return pack(np.concatenate(ids), starts, LENGTHS, CPU), ids, torch.from_numpy(grid)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize(
    ("kind", "packs"),
    [
        *((kind, True) for kind in ("bert", "roberta", "distilbert", "modernbert")),
        *((kind, False) for kind in ("mpnet", "deberta-v2")),
    ],
)
def test_equals_each_text_alone(kind, packs, pooling):
    pad = small_encoders.FURTHER[kind].get("pad_token_id", 0)
    backbone = small_encoders.model(kind)
    with torch.no_grad():
        alone = [
            backbone(input_ids=torch.tensor([[*own, END]])).last_hidden_state[0]
            for own in texts(pad)[1]
        ]
    expected = torch.stack([x[0] if pooling == "cls" else x.mean(0) for x in alone])
    model = Encoder(backbone, 3, max_len=40, pooling=pooling, pad=pad, end=END).eval()
    assert (model.first_position is not None) == packs
    packed, _, grid = texts(pad)
    with torch.no_grad():
        for inputs in (packed, grid):
            torch.testing.assert_close(model.features(inputs), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["bert", "modernbert", "mpnet"])
def test_no_wait_on_a_gpu(kind):
    pad = small_encoders.FURTHER[kind].get("pad_token_id", 0)
    model = Encoder(small_encoders.model(kind), 3, max_len=40, pad=pad, end=END)
    lengths = np.array(LENGTHS)
    with fake_cuda() as gpu:
        device = torch.device("cuda", 0)
        batch = pack(np.arange(lengths.sum()) + 5, np.cumsum([0, *lengths[:-1]]), lengths, device)
        model.to(device)
        with gpu.watched(), torch.autocast("cuda", torch.bfloat16):
            model(batch).float().sum().backward()


def test_gradients_are_those_of_a_padded_batch():
    model = Encoder(small_encoders.model("bert"), 3, max_len=40, end=END).eval()
    packed, _, grid = texts()
    model.first_position, position = None, model.first_position
    model.backbone.config._attn_implementation = "eager"
    model.features(grid).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in model.backbone.named_parameters()}
    model.zero_grad()
    model.first_position, model.backbone.config._attn_implementation = position, "packed"
    model.features(packed).square().sum().backward()
    for name, parameter in model.backbone.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-4, rtol=1e-3)


def test_the_end_follows_each_text():
    packed, ids, _ = texts()
    found = with_end(packed, END)
    assert found.padded(-1)[1].tolist() == [ids[1][0], END] + [-1] * 19
    expected = [value for own in ids for value in (*own, END)]
    assert found.ids.tolist() == expected and found.longest == 21
    assert found.offsets.tolist() == found.borders.tolist() == [0, 6, 8, 29, 33]


def test_adapters_start_without_effect_and_are_trained_alone():
    model = Encoder(small_encoders.model("bert"), 3, max_len=40, end=END).eval()
    packed, before = texts()[0], {n: t.clone() for n, t in model.state_dict().items()}
    assert not model(packed).any()  # nor does the head, which knows nothing yet
    expected = model.features(packed)
    add_adapters(model, 2)
    torch.testing.assert_close(model.features(packed), expected)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {"head.weight", "head.bias"} < trained
    assert all("lora_" in name for name in trained - {"head.weight", "head.bias"})
    converted = model.convert_weights(before)
    assert converted.keys() == model.state_dict().keys()
    assert model.convert_weights(converted) is converted
    assert model.flags_for(converted) == ["--lora 2"]


@pytest.mark.parametrize("normalize", [False, True])
def test_static_embeddings(normalize):
    """The mean over a text's tokens but the first and unknown ones, by row and weight."""
    torch.manual_seed(0)
    table = StaticEmbeddings([50, 4], mapping=[200], weights=[200], normalize=normalize)
    table.mapping.copy_(torch.arange(200) % 50)
    with torch.no_grad():
        table.weights.uniform_(0.5, 2)
    model = StaticEncoder(table, 3, 0.0, pad=0, unknown=7)
    packed, ids, grid = texts()
    expected = torch.zeros(len(ids), 4)
    for row, own in enumerate(ids):
        kept = [token for token in own[1:] if token != 7]
        for token in kept:
            expected[row] += table.embeddings[token % 50] * table.weights[token] / len(kept)
    if normalize:
        expected = torch.nn.functional.normalize(expected, eps=1e-6)
    for inputs in (packed, grid):
        torch.testing.assert_close(model.features(inputs), expected)
