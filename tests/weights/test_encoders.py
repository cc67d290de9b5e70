"""Encoders in folders and on the hub: what is read of them, and what is refused."""

import json
from pathlib import Path

import huggingface_hub
import pytest
import small_encoders
import torch
from transformers import AutoModel

from utils.data.texts.tokenizer import end_id, tokenizer_from_json
from utils.errors import UserError
from utils.weights.card import TextCard
from utils.weights.encoders import build_encoder, read_encoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return small_encoders.write_encoder(tmp_path_factory.mktemp("encoder") / "bert")


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change(folder: Path, **values) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return str(folder)


def test_what_is_read(folder):
    files = read_encoder(str(folder))
    assert (files.pooling, files.source) == ("mean", str(folder))
    tokenizer = tokenizer_from_json(files.tokenizer)
    assert tokenizer.id_to_token(end_id(tokenizer)) == "[SEP]"
    theirs = AutoModel.from_pretrained(folder).state_dict()
    for name, tensor in files.weights().items():
        assert torch.equal(tensor, theirs[name.removeprefix("backbone.")])
    card = TextCard(("a", "b"), files.tokenizer, True, 20, pooling="cls", encoder=files.card)
    again = TextCard.from_dict(json.loads(json.dumps(card.to_dict())))
    model = build_encoder(again, dropout=0.1, attention_dropout=0.2, lora=None)
    assert files.weights().keys() == model.state_dict().keys() - {"head.weight", "head.bias"}
    assert model.backbone.config.attention_probs_dropout_prob == 0.2 and model.pooling == "cls"


def test_pooling_of_a_sentence_transformer(copy):
    (copy / "1_Pooling").mkdir()
    (copy / "1_Pooling/config.json").write_text('{"pooling_mode_cls_token": true}')
    assert read_encoder(str(copy)).pooling == "cls"


def test_a_text_that_is_too_long(folder):
    files = read_encoder(str(folder))
    card = TextCard(("a", "b"), files.tokenizer, True, 64, pooling="mean", encoder=files.card)
    with pytest.raises(UserError, match="--max_len 64: this encoder reads at most 63 tokens"):
        build_encoder(card, dropout=0, attention_dropout=0, lora=None)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"architectures": ["BertLMHeadModel"], "is_decoder": True}, "writes texts"),
        ({"architectures": ["GPT2ForCausalLM"], "model_type": "gpt2"}, "writes texts"),
        (
            {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "score"}},
            "rerankers",
        ),
        ({"model_type": "own", "auto_map": {"AutoModel": "own.Own"}}, "code of its own"),
        ({"model_type": "no_such"}, "no_such"),
        ({"model_type": "clip", "hidden_size": None}, "no encoder of texts alone"),
    ],
)
def test_models_that_do_not_fit_are_refused(copy, values, words):
    with pytest.raises(UserError, match=words):
        read_encoder(change(copy, **values))


def test_a_head_of_its_own_is_told(copy):
    said = []
    read_encoder(change(copy, architectures=["BertForSequenceClassification"]), said.append)
    assert len(said) == 1 and "head of its own" in said[0]


def test_files_that_are_missing_or_damaged(copy):
    weights = (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickles are not read"):
        read_encoder(str(copy))
    weights.rename(copy / "model.safetensors")
    (copy / "config.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        read_encoder(str(copy))
    (copy / "config.json").unlink()
    with pytest.raises(UserError, match="has no config"):
        read_encoder(str(copy))


def test_missing_weights_are_told(copy):
    files = read_encoder(change(copy, num_hidden_layers=3))
    with pytest.raises(UserError, match="16 of its weights are not in"):
        files.weights()


def test_the_hub(folder, monkeypatch, tmp_path):
    """The cache is asked first; a revision is pinned; without a network a line says what to do."""
    snapshot = tmp_path / "snapshots" / "abc123"
    snapshot.parent.mkdir()
    snapshot.symlink_to(folder)
    asked = []

    def download(repo_id, revision, allow_patterns, local_files_only=False):
        asked.append((repo_id, revision, local_files_only))
        if repo_id == "own/cached":
            return str(snapshot)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert read_encoder("own/cached@v1").source == "own/cached@v1@abc123"
    assert asked == [("own/cached", "v1", True)]
    with pytest.raises(UserError, match=r"no network.*hf download own/other --local-dir FOLDER"):
        read_encoder("own/other", lambda line: None)
    with pytest.raises(UserError, match="no such folder"):
        read_encoder("no/such/folder")


def test_a_static_table(tmp_path):
    files = read_encoder(str(small_encoders.write_static(tmp_path / "static")))
    card = TextCard(("a", "b"), files.tokenizer, True, 20, pooling="mean", encoder=files.card)
    model = build_encoder(card, dropout=0, attention_dropout=0, lora=None)
    assert files.weights().keys() == {"backbone.embeddings"}
    model.load_state_dict(files.weights() | dict(list(model.state_dict().items())[-2:]))
