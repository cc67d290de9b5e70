"""The built-in texts: the same on every machine, and learnable."""

from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from data.texts.sum_of_texts import sum_of

from utils.data.texts.headlines import CLASSES, POOLS, write_split
from utils.data.texts.sources import TextRequest, open_text_data

NOWHERE = Path("nowhere")


@pytest.fixture(scope="module")
def headlines():
    return open_text_data("headlines", TextRequest(NOWHERE)).load()


def test_form(headlines):
    assert headlines.synthetic and headlines.val is None and headlines.skipped == 0
    assert headlines.classes == sorted(headlines.classes) and len(headlines.classes) == 4
    assert np.bincount(headlines.train.labels).tolist() == [1000] * 4
    assert np.bincount(headlines.test.labels).tolist() == [250] * 4
    words = np.array([len(text.split()) for text in headlines.train.texts])
    assert words.min() >= 5 and 50 <= words.max() <= 70
    assert np.percentile(words, 10) < 10 and np.percentile(words, 90) > 35


def test_the_same_texts_on_every_machine(headlines):
    """Pinned: other texts would change what a resumed run is trained on."""
    assert sum_of(headlines) == "bd64b68d1376de810eb53e45c2da031a1b9af2be161326ed368970f266e46f11"


def test_no_test_text_is_in_the_training_split(headlines):
    train = set(headlines.train.texts)
    assert len(train) > 3950 and not train & set(headlines.test.texts)


def test_every_topic_word_belongs_to_one_pair_of_classes():
    words = [word for pool in POOLS for word in pool.split()]
    assert len(words) == len(set(words)) and len(POOLS) == len(list(combinations(CLASSES, 2)))


def test_no_single_word_tells_the_class_but_a_few_do(headlines):
    def words(text):
        return set(text.lower().replace(".", "").replace(":", "").split())

    counts = {label: Counter() for label in range(4)}
    for text, label in zip(headlines.train.texts, headlines.train.labels, strict=True):
        counts[int(label)].update(words(text))
    vocabulary = sorted(set().union(*counts.values()))
    table = np.array([[counts[label][word] for label in range(4)] for word in vocabulary])
    often = table[table.sum(1) >= 20]
    assert (often.max(1) / often.sum(1)).max() < 0.7

    # Naive Bayes: the words are all that a good model needs.
    weights = np.log((table + 0.1) / (table.sum(0) + 0.1 * len(table)))
    place = {word: index for index, word in enumerate(vocabulary)}
    predicted = [
        weights[[place[word] for word in words(text) if word in place]].sum(0).argmax()
        for text in headlines.test.texts
    ]
    assert (np.array(predicted) == headlines.test.labels).mean() > 0.95


def test_the_generator_determines_the_texts():
    one, two = (write_split(3, np.random.default_rng(7)) for _ in range(2))
    assert one.texts == two.texts and one.labels.tolist() == two.labels.tolist()
    assert one.texts != write_split(3, np.random.default_rng(8)).texts
