"""What is said of weights that do not fit a model of texts."""

from types import SimpleNamespace

import pytest
import torch
from weight_tools import CARD, resnet

from utils.errors import UserError
from utils.models.transformer import Transformer
from utils.tasks.kinds import Kind
from utils.weights.card import ModelCard, TextCard
from utils.weights.pretrained import Pretrained, fit_weights

SIZES = {"layers": 2, "dim": 8, "heads": 2, "ffn": 16, "max_len": 12}


def refused(tensors, words: str) -> None:
    with pytest.raises(UserError) as error:
        fit_weights(Transformer(30, 2, **SIZES), Pretrained(tensors, "them"))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"layers": 3}, "train with --layers 3"),
        ({"dim": 16}, "train with --dim 16"),
        ({"ffn": 8, "max_len": 24}, "train with --ffn 8 --max_len 24"),
    ],
)
def test_the_flags_that_would_make_them_fit(changes, flags):
    refused(Transformer(30, 2, **SIZES | changes).state_dict(), flags)


def test_weights_of_another_vocabulary_or_architecture():
    other = Transformer(40, 2, **SIZES).state_dict()
    refused(other, "train with the tokenizer of these weights (--tokenizer)")
    refused(resnet().state_dict(), "no model here has its architecture")
    refused({"tokens.weight": torch.ones(3)}, "no model here has its architecture")


def test_weights_for_another_kind_of_task():
    pictures, texts = ModelCard.from_dict(CARD), TextCard(("a", "b"), "{}", True, 9)
    for card, task in ((pictures, "texts"), (texts, "pictures")):
        for own in (task, card.task, None):
            settings = SimpleNamespace(task=own or task, pretrained="runs/it")
            kind = Kind(settings, None, "it")
            source = Pretrained({}, "it", card=card if own else None)
            if own == task:
                with pytest.raises(UserError, match=f"is for {card.task}; .* one for {task}"):
                    kind.check_pretrained(source)
            else:
                kind.check_pretrained(source)
