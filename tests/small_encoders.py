"""Small encoders in the folders that transformers writes, with random weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

from utils.data.texts.headlines import open_headlines
from utils.data.texts.sources import TextRequest

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 64,
}  # fmt: skip
# As the libraries' own folders of these architectures have them.
FURTHER = {
    "bert": {},
    "roberta": {"pad_token_id": 1},
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "modernbert": {
        "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2,
        "sep_token_id": 3, "local_attention": 8, "global_attn_every_n_layers": 2,
    },
    "mpnet": {"pad_token_id": 1},
    "deberta-v2": {
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
    },
}  # fmt: skip


def tokenizer(pad: int = 0) -> Tokenizer:
    """WordPiece with the words of the synthetic headlines and letters, [CLS] before a text and
    [SEP] after it."""
    texts = open_headlines("headlines", TextRequest(Path())).load().train.texts
    words = sorted({word.lower() for text in texts for word in text.split() if word.isalpha()})
    special = ["[UNK]", "[CLS]", "[SEP]"]
    special.insert(pad, "[PAD]")
    letters = [mark + chr(code) for code in range(97, 123) for mark in ("", "##")]
    entries = dict.fromkeys([*special, *letters, *words])
    made = Tokenizer(models.WordPiece({w: i for i, w in enumerate(entries)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(name, special.index(name)) for name in ("[CLS]", "[SEP]")],
    )
    return made


def model(kind: str, vocabulary: int = 200, **further):
    """An encoder of transformers, in evaluation mode; weights large enough to matter."""
    config = AutoConfig.for_model(
        kind, **({"vocab_size": vocabulary} | SIZES | FURTHER[kind] | further)
    )
    torch.manual_seed(0)
    made = AutoModel.from_config(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    return made


def write_encoder(folder: Path, kind: str = "bert", **further) -> Path:
    """A folder with an encoder and its tokenizer."""
    pad = FURTHER[kind].get("pad_token_id", 0)
    own = tokenizer(pad)
    model(kind, own.get_vocab_size(), **further).save_pretrained(folder)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=own, **names).save_pretrained(folder)
    return folder


def write_static(folder: Path, width: int = 8) -> Path:
    """A folder in Model2Vec's format."""
    own = tokenizer()
    own.post_processor = None
    folder.mkdir()
    own.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    save_file(
        {"embeddings": torch.randn(own.get_vocab_size(), width)}, folder / "model.safetensors"
    )
    config = {"model_type": "model2vec", "hidden_dim": width, "normalize": True}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
