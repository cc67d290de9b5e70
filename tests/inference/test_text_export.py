"""The program for ONNX in docs/text.md answers as --predict does, with any tokenizer."""

import csv
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from toy import CPU

from utils.data.texts.basic_english import load_vocabulary
from utils.data.texts.sources import TextRequest
from utils.data.texts.tokenizer import (
    pad_id,
    tokenizer_from_json,
    train_tokenizer,
    vocabulary_size,
)
from utils.inference.export_onnx import export_onnx
from utils.inference.predict_texts import predict_texts
from utils.models.transformer import Transformer
from utils.training.objective import Precision
from utils.weights.card import TextCard

PAGE = Path(__file__).parents[2] / "docs" / "text.md"
TEXTS = ["hello world", "a [MASK] [PAD] [CLS] </s> hello", "world", "hello a world " * 9]


def trained() -> Tokenizer:
    return train_tokenizer(TEXTS[:1] * 9, vocab_size=300)


def vocabulary() -> Tokenizer:
    Path("vocab.txt").write_text("<unk>\n<pad>\nhello\nworld\na")
    return load_vocabulary(Path("vocab.txt"))


def of_others() -> Tokenizer:
    """It would add tokens at the beginning and the end of a text."""
    words = ["<s>", "</s>", "<unk>", "<pad>", "hello", "world"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(words[:4])
    tokenizer.post_processor = processors.BertProcessing(("</s>", 1), ("<s>", 0))
    return tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("make", [trained, vocabulary, of_others])
def test_the_program_answers_as_predict_does(tmp_path, monkeypatch, capsys, make):
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    tokenizer = tokenizer_from_json(make().to_str())
    torch.manual_seed(0)
    size = vocabulary_size(tokenizer)
    model = Transformer(size, 2, 1, 16, 2, 16, max_len=12, pad=pad_id(tokenizer)).eval()
    torch.nn.init.normal_(model.tokens.weight)
    torch.nn.init.normal_(model.head.weight)
    card = TextCard(("no", "yes"), tokenizer.to_str(), False, 12)
    folder = Path("runs/my_texts/export")
    export_onnx(model, card, folder / "model.onnx")
    (folder / "tokenizer.json").write_text(card.tokenizer)
    program = re.search(r"^```python\n(import json.*?)^```", PAGE.read_text(), re.M | re.S)[1]
    exec(re.sub(r"texts = .*", f"texts = {TEXTS}", program), {})
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    Path("new.txt").write_text("\n".join(TEXTS))
    predict_texts(
        model, card, Path("new.txt"), TextRequest(Path(), clean=card.clean), output_csv="out.csv",
        batch_size=2, precision=Precision("fp32", CPU),
    )  # fmt: skip
    with open("out.csv", newline="", encoding="utf-8-sig") as file:
        answers = list(csv.DictReader(file))
    assert [answer["predicted"] for answer in answers] == [name for name, _ in said]
    for answer, (name, probability) in zip(answers, said, strict=True):
        assert float(probability) == pytest.approx(float(answer[f"p_{name}"]), abs=2e-6)
    assert len({probability for _, probability in said}) == len(TEXTS)
