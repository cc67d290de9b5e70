"""Settings of transformer_test.py drawn at random (see random_settings.py)."""

import contextlib
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from quick_runs import handlers_put_back, quick
from random_settings import FEW, MANY, OPTIONS, OWN_PARTS, REPEATABLE, Space, few_curves, flags

from transformer_test import Settings, main

TEXTS = Space(
    Settings,
    main,
    base={
        "max_steps": 2, "layers": 1, "dim": 8, "heads": 2, "ffn": 8, "device": "cpu", "threads": 1,
        "batch_size": 8, "output": "run", "train_file": "train.csv", "cache_dir": "cache",
        "log_every": 1, "vocab_size": 300, "max_len": 16,
    },
    # Files with and without a test set of their own, sets that are not there or need no files.
    data=[
        {"dataset": "csv", "test_file": "test.tsv"},
        {"dataset": "csv", "test_fraction": 0.3},
        {"dataset": "ag_news", "data_dir": "run"},
        {"dataset": "headlines", "subset": 40},
    ],
    own_values={
        "data_dir": [".", "nowhere"],
        "pretrained": ["trained", "trained/checkpoints", "weights.pth", "nowhere", "train.csv"],
        "predict": ["test.tsv", "new.txt", "nowhere", "weights.pth"],
        "eval_data": ["test.tsv", "new.txt", "nowhere"],
        "test_file": ["test.tsv", "train.csv", "weights.pth"],
        "val_file": ["test.tsv", "nowhere.csv"],
        "id_columns": ["text", "1,2", "nothing", ","],
        "text_columns": ["text", "2", "1,2", "nothing", ","],
        "label_column": ["animal", "1", "9"],
        "group_column": ["animal", "author", "3", "nothing"],
        "tokenizer": ["bpe", "unigram", "basic_english", "weights.pth", "nowhere"],
        "vocab": ["new.txt", "vocab.txt", "nowhere"],
        "batch_tokens": [1, 40, 4000],
        "model": ["transformer", "no/such/folder", "trained"],
        "lora": [1, 4],
    },
    needed={"dataset", "layers", "dim", "heads", "ffn", "device", "threads", "cache_dir"},
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with files of texts and a trained run; the tests run in it."""
    folder = tmp_path_factory.mktemp("random texts")
    rows = [("cat", "fur and a paw"), ("dog", "barks at a bone in the night")]
    lines = [f"{animal},{text},author{n % 7}\n" for n, (animal, text) in enumerate(rows * 12)]
    (folder / "train.csv").write_text("".join(["animal,text,author\n", *lines]))
    (folder / "test.tsv").write_text("".join(f"{b} now\t{a}\n" for a, b in rows * 4))
    (folder / "new.txt").write_text("a bone\n")
    (folder / "vocab.txt").write_text("<unk>\na\nbone\n")
    (folder / "weights.pth").write_bytes(b"no weights\0")
    (folder / "classes.yaml").write_text("cat: 1\ndog: 0.25")
    (folder / "own_parts.py").write_text(OWN_PARTS)
    (folder / "classes.csv").write_text("class,weight\ncat,0\ndog,3")
    (folder / "labels.csv").write_text("file,line,label\ntrain.csv,3,cat\n")
    with contextlib.chdir(folder), handlers_put_back():
        assert main(flags(TEXTS.base | TEXTS.data[0] | {"output": "trained"})) == 0
        assert Path("trained/summary.json").is_file()
        shutil.copytree("trained", "kept")
        yield folder


@settings(max_examples=FEW, derandomize=True, **OPTIONS)
@given(TEXTS.random())
def test_a_run_works_or_says_why_not(place, chosen):
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        TEXTS.check(chosen)


@pytest.mark.slow
@settings(max_examples=MANY, derandomize=REPEATABLE, **OPTIONS)
@given(TEXTS.random())
def test_many_runs_work_or_say_why_not(place, chosen):
    with few_curves():
        TEXTS.check(chosen)


def test_every_setting_can_be_drawn():
    for name in TEXTS.drawn:
        TEXTS.values(name)
