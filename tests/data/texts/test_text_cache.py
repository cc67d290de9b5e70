"""The cache of token ids: found again, rebuilt, never half written, and of the right texts."""

import contextlib
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from small_disks import small_disk

from utils.data.splits import stratified_split, stratified_subset
from utils.data.texts import cache as text_cache
from utils.data.texts import csv_texts, tokenizer_request
from utils.data.texts.cache import load_tokenized
from utils.data.texts.headlines import CLASSES, write_split
from utils.data.texts.sources import TextRequest, open_text_data
from utils.data.texts.token_store import VERSION as STORE_VERSION
from utils.data.texts.token_store import TokenSplit, lines_on_losses
from utils.data.texts.tokenizer import encode, tokenizer_from_json, train_tokenizer
from utils.data.texts.tokenizer_request import TokenizerRequest
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
SMALL = TokenizerRequest(vocab_size=400)


@pytest.fixture
def files(tmp_path):
    """Files of 80 training and 20 test texts."""
    for name, seed, per_class in (("train", 0, 20), ("test", 1, 5)):
        split = write_split(per_class, np.random.default_rng(seed))
        rows = [
            f'{CLASSES[label]},"{text}"\n'
            for text, label in zip(split.texts, split.labels, strict=True)
        ]
        (tmp_path / f"{name}.csv").write_text("".join(rows))
    return tmp_path


OF_REQUEST = {field.name for field in fields(TextRequest)}


def load(folder, dataset="csv", tokenizer=None, cache_dir=None, **settings):
    """`settings` are those of a TextRequest and of `load_tokenized`."""
    asked = {name: settings.pop(name) for name in OF_REQUEST & settings.keys()}
    return load_tokenized(
        dataset,
        request(folder, **asked) if dataset == "csv" else TextRequest(folder),
        tokenizer or SMALL,
        cache_dir=cache_dir or folder / "cache",
        **settings,
    )


def request(folder, **settings):
    files = {"train_file": folder / "train.csv"}
    if "test_fraction" not in settings:
        files["test_file"] = folder / "test.csv"
    return TextRequest(folder, **files | settings)


def cached(folder):
    return sorted((folder / "cache").iterdir())


@pytest.fixture
def no_parsing(monkeypatch):
    def refuse():
        monkeypatch.setattr(csv_texts, "read_samples", None)
        monkeypatch.setattr(text_cache, "encode", None)
        monkeypatch.setattr(tokenizer_request, "train_tokenizer", None)

    return refuse


def assert_same(one, two):
    for name in (
        "name", "classes", "tokenizer_json", "pad_id", "cls_id", "vocab_size", "fingerprint",
        "synthetic", "skipped", "notes",
    ):  # fmt: skip
        assert getattr(one, name) == getattr(two, name), name
    assert one.splits.keys() == two.splits.keys()
    for name, split in one.splits.items():
        for array in ("tokens", "offsets", "labels"):
            assert np.array_equal(getattr(split, array), getattr(two.splits[name], array))


def test_validation_texts_that_are_also_trained_on(files):
    train = files / "train.csv"
    assert not any("held out" in note for note in load(files, val_fraction=0.25).notes)
    train.write_text(train.read_text() * 2)
    notes = load(files, val_fraction=0.25).notes
    assert notes == load(files, val_fraction=0.25).notes  # from the cache
    assert any("the validation texts held out: " in note for note in notes)


def test_the_ids_are_those_of_the_texts(files):
    data = load(files)
    source = open_text_data("csv", request(files)).load()
    tokenizer = train_tokenizer(source.train.texts, vocab_size=400)
    assert data.tokenizer_json == tokenizer.to_str()
    for split, expected in ((data.train, source.train), (data.test, source.test)):
        tokens, offsets = encode(tokenizer_from_json(data.tokenizer_json), expected.texts)
        assert np.array_equal(split.tokens, tokens) and np.array_equal(split.offsets, offsets)
        assert np.array_equal(split.labels, expected.labels) and len(split) == len(expected)
        assert split.lengths.tolist() == np.diff(offsets).tolist()
        assert split.lengths.dtype == np.int64
    assert data.classes == CLASSES and data.val is None and (data.pad_id, data.cls_id) == (0, 2)


def test_the_default_tokenizer_suits_the_texts(files):
    plain = load(files, tokenizer=replace(SMALL, name="auto"))
    assert plain.fingerprint == load(files).fingerprint and plain.notes == load(files).notes
    for path in files.glob("*.csv"):
        path.write_text(path.read_text().replace("a", "\u0101"))
    names = ("auto", "bpe_unicode", "auto")
    data, named, again = (load(files, tokenizer=replace(SMALL, name=name)) for name in names)
    assert data.tokenizer_json == named.tokenizer_json
    [note] = [note for note in data.notes if "bpe_unicode is taken" in note]
    assert "wordpiece would lose" in note and note in again.notes  # from the cache
    assert any("bpe_unicode suits these texts better" in note for note in load(files).notes)


def test_texts_that_are_equal_after_cleaning_are_counted(files):
    with open(files / "train.csv", "a") as file:
        file.writelines(f"sports,see http://a.b/{i} now\n" for i in range(10))
    [note] = [note for note in load(files).notes if "after cleaning" in note]
    assert note.startswith("note: train.csv: ") and "--no_clean_text" in note
    assert not any("after cleaning" in note for note in load(files, clean=False).notes)


def test_what_is_lost_is_said():
    def split(*lengths, unknown=0):
        tokens = np.full(sum(lengths), 5, np.uint16)
        tokens[:unknown] = 1
        labels = np.zeros(len(lengths), np.int64)
        return [TokenSplit(tokens, np.append(0, np.cumsum(lengths)), labels)]

    def lines(max_len=24, **splits):
        return lines_on_losses(splits, text, max_len)

    text = train_tokenizer(["a b"], vocab_size=300).to_str()
    small = split(*[20] * 199, 30, unknown=30)  # half a percent of the texts, less of the tokens
    assert lines(train=small) == []
    test = split(*[21] * 96, 40, 50, 60, 70, unknown=107)
    assert lines(train=small, test=test) == [
        "note: unknown tokens (test 5.0 %): --tokenizer bpe_unicode knows every character",
        "note: texts cut by --max_len 24 (test 4.0 %): --max_len 70 would hold 99 % of all texts "
        "whole",
    ]
    assert lines(70, test=test)[1:] == []
    [line] = lines(predicted=[*split(9), *split(2048)])
    assert line.endswith("--max_len 2048, the most, holds 50 % of all texts whole")


def test_second_load_parses_nothing(files, no_parsing):
    first = load(files, val_fraction=0.2)
    no_parsing()
    second = load(files, val_fraction=0.2)
    assert_same(first, second)
    for split in second.splits.values():
        assert isinstance(split.tokens, np.memmap) and not split.tokens.flags.writeable
    assert "memory-mapped" in second.source and "encoded into" in first.source
    (files / "train.csv").touch()
    assert "memory-mapped" in load(files, val_fraction=0.2).source


def test_the_tokenizer_sees_the_chosen_training_texts_alone(files, monkeypatch):
    seen = []

    def watch(texts, **settings):
        seen.extend(texts)
        return train_tokenizer(texts, **settings)

    monkeypatch.setattr(tokenizer_request, "train_tokenizer", watch)
    data = load(files, val_fraction=0.25, subset=0.5, seed=3)
    whole = open_text_data("csv", request(files)).load().train
    chosen, held_out = stratified_split(whole.labels, 0.25, 3)
    chosen = chosen[stratified_subset(whole.labels[chosen], 0.5, 3)]
    assert seen == [whole.texts[i] for i in chosen] and len(seen) == 30
    assert data.train.labels.tolist() == whole.labels[chosen].tolist()
    assert data.val.labels.tolist() == whole.labels[held_out].tolist()
    assert len(data.test) == 20


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer": replace(SMALL, name="bpe")},
        {"tokenizer": replace(SMALL, vocab_size=350)},
        {"tokenizer": replace(SMALL, lowercase=False)},
        {"clean": False},
        {"on_bad": "skip"},
        {"max_bad": 0.5},
        {"encoding": "cp1252"},
        {"header": False},
        {"subset": 40},
        {"val_fraction": 0.1},
        {"text_columns": ("2",)},
        {"label_column": "1"},
        {"test_fraction": 0.2},
        {"val_file": "test.csv"},
    ],
)
def test_each_setting_has_a_cache_of_its_own(files, settings):
    load(files)
    if "val_file" in settings:
        settings = {"val_file": files / "test.csv"}
    second = load(files, **settings)
    assert "encoded into" in second.source and len(cached(files)) == 2
    assert_same(second, load(files, **settings))


@pytest.mark.parametrize("file", ["train.csv", "test.csv", "classes.txt"])
def test_changed_files_are_read_again(files, file):
    first = load(files)
    with open(files / file, "a") as handle:
        handle.write("sports,one more text\n")
    second = load(files)
    assert "encoded into" in second.source
    assert (second.fingerprint != first.fingerprint) is (file != "classes.txt")


def test_the_seed_counts_only_where_something_is_drawn(files):
    load(files, seed=1)
    assert "memory-mapped" in load(files, seed=2).source
    one, two = (load(files, seed=seed, val_fraction=0.25) for seed in (1, 2))
    assert one.fingerprint != two.fingerprint
    load(files, seed=1, test_fraction=0.25)  # no seed changes the test set
    assert "memory-mapped" in load(files, seed=2, test_fraction=0.25).source


def test_a_published_tokenizer(files):
    (files / "mine").mkdir()
    path = files / "mine" / "tokenizer.json"
    path.write_text(train_tokenizer(["other texts altogether"], kind="bpe").to_str())
    data = load(files, tokenizer=TokenizerRequest(str(path)))
    assert "memory-mapped" in load(files, tokenizer=TokenizerRequest(str(files / "mine"))).source
    assert data.tokenizer_json == path.read_text()
    path.write_text(train_tokenizer(["yet other texts"], kind="bpe").to_str())
    assert "encoded into" in load(files, tokenizer=TokenizerRequest(str(path))).source


def test_built_in_texts(tmp_path):
    data = load(tmp_path, "headlines", TokenizerRequest(vocab_size=1000))
    assert data.synthetic and len(data.train) == 4000 and len(data.test) == 1000
    assert "memory-mapped" in load(tmp_path, "headlines", TokenizerRequest(vocab_size=1000)).source


def test_texts_that_are_cut_off_are_noted(files, monkeypatch):
    monkeypatch.setattr(text_cache, "MAX_TOKENS", 16)
    data = load(files)
    assert data.train.lengths.max() == 16 and "cut off at 16 tokens" in data.notes[-1]


@pytest.mark.parametrize(
    "damage",
    ["index", "no index", "version", "truncated", "flipped", "labels", "tokenizer", "classes"],
)
def test_damaged_cache_is_built_again(files, damage):
    first = load(files)
    (folder,) = cached(files)
    tokens, index = folder / "train_tokens.npy", folder / "index.json"
    if damage == "index":
        index.write_text(index.read_text()[:50])
    elif damage == "no index":
        index.unlink()
    elif damage == "version":
        now = f'"version": {STORE_VERSION}'
        assert now in index.read_text()
        index.write_text(index.read_text().replace(now, '"version": 0'))
    elif damage == "classes":
        index.write_text(index.read_text().replace('"sports"', '"sport"'))
    elif damage == "truncated":
        os.truncate(tokens, tokens.stat().st_size - 1)
    elif damage == "flipped":
        content = bytearray(tokens.read_bytes())
        content[-5] ^= 1
        tokens.write_bytes(content)
    elif damage == "labels":
        np.save(folder / "test_labels.npy", np.zeros(20, np.int64))
    else:
        (folder / "tokenizer.json").write_bytes(b"\xff")
    second = load(files)
    assert "encoded into" in second.source
    assert_same(second, load(files, cache_dir=files / "elsewhere"))
    assert second.fingerprint == first.fingerprint
    assert cached(files) == [folder] and "memory-mapped" in load(files).source


def test_builders_at_once(files):
    with ThreadPoolExecutor(4) as pool:
        sets = list(pool.map(load, [files] * 4))
    assert len({data.fingerprint for data in sets}) == 1 and len(cached(files)) == 1


KILLED = """
import os, signal, sys
from pathlib import Path
from utils.data import cache_folder
from utils.data.texts import token_store
from utils.data.texts.cache import load_tokenized
from utils.data.texts.sources import TextRequest
from utils.data.texts.tokenizer_request import TokenizerRequest
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
for module in (token_store, cache_folder):
    if hasattr(module, sys.argv[1]):
        setattr(module, sys.argv[1], kill)
folder = Path(sys.argv[2])
files = TextRequest(folder, train_file=folder / "train.csv", test_file=folder / "test.csv")
tokenizer = TokenizerRequest(vocab_size=400)
load_tokenized("csv", files, tokenizer, cache_dir=folder / "cache")
"""


@pytest.mark.parametrize("moment", ["write_synced", "put_in_place"])
def test_a_kill_leaves_no_half_cache_and_the_next_run_clears_it_away(files, moment):
    killed = subprocess.run([sys.executable, "-c", KILLED, moment, files], cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL
    (left,) = cached(files)
    assert left.name.startswith(".building-")
    assert "encoded into" in load(files).source
    assert not left.exists() and len(cached(files)) == 1


def test_a_cache_that_cannot_be_written_is_no_error(files):
    expected = load(files)
    (files / "plain").write_text("a file")
    for cache in (files / "plain", files / "plain" / "below"):
        data = load(files, cache_dir=cache)
        assert data.fingerprint == expected.fingerprint and "mapped" not in data.source
        assert "--cache_dir" in data.notes[-1] and "\n" not in data.notes[-1]


@pytest.mark.parametrize("disk", ["full", "ro"])
def test_a_disk_that_is_full_or_read_only(files, disk):
    size, options = ("40k", "") if disk == "full" else ("1M", ",ro")
    with small_disk(files / "disk", size, options) as folder:
        data = load(files, cache_dir=folder, val_fraction=0.1)
        assert "--cache_dir" in data.notes[-1] and len(data.train) == 72
        assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"tokenizer": TokenizerRequest("words")}, "unigram, basic_english, or the path"),
        ({"tokenizer": TokenizerRequest("gone.json")}, "gone.json is not there: --tokenizer takes"),
        (
            {"tokenizer": TokenizerRequest("google/bert-base-uncased")},
            "https://huggingface.co/google/bert-base-uncased/resolve/main/tokenizer.json, and give",
        ),
        ({"val_fraction": 1.0}, "must lie between 0 and 1"),
        ({"val_fraction": 0.1, "val_file": Path("train2.csv")}, "--val_fraction has no effect"),
        ({"subset": 0.001}, "--subset"),
        ({"subset": 10.5}, "whole number"),
        ({"test_file": Path("gone.csv")}, "gone.csv is not there"),
    ],
)
def test_settings_that_are_refused(files, settings, part):
    with pytest.raises(UserError) as error:
        load(files, **settings)
    assert part in str(error.value) and "\n" not in str(error.value)
    with contextlib.suppress(FileNotFoundError):
        assert not cached(files)


@pytest.mark.real_data
def test_real_texts(real_texts, tmp_path, no_parsing):
    settings = {"cache_dir": tmp_path, "val_fraction": 0.1}
    first = load(real_texts, "ag_news", TokenizerRequest(vocab_size=8000), **settings)
    no_parsing()
    data = load(real_texts, "ag_news", TokenizerRequest(vocab_size=8000), **settings)
    assert_same(first, data)
    assert data.vocab_size == 8000 and len(data.test) == 7600
    unknown = np.mean(np.asarray(data.test.tokens) == 1)
    assert unknown < 1e-3 and 20 < data.test.lengths.mean() < 80
