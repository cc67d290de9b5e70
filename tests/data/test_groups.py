"""Groups: never in two splits, near the fraction, repeatable; and what looks like groups."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.data.groups import (
    Groups,
    groups_of,
    groups_of_files,
    likely_files,
)
from utils.data.splits import split_off
from utils.data.texts.sources import Texts
from utils.errors import UserError


def groups_for(names) -> Groups:
    return groups_of("--group_column who", {"train": [f"p{name}" for name in names]}, [])["train"]


def split(labels, of, fraction, seed=0):
    """(kept, held out, the note)"""
    groups, classes = groups_for(of), [f"class {i}" for i in range(max(labels) + 1)]
    kept, held_out = groups.hold_out(np.asarray(labels), fraction, seed, classes)
    return kept, held_out, groups.notes[0]


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    samples=st.integers(2, 200),
    groups=st.integers(2, 40),
    classes=st.integers(1, 6),
    fraction=st.floats(0.01, 0.95),
)
def test_no_group_is_in_two_splits_and_every_class_keeps_a_sample(
    seed, samples, groups, classes, fraction
):
    rng = np.random.default_rng(seed)
    of = np.minimum(rng.geometric(2 / groups, samples), groups)  # a few large groups
    labels = rng.integers(0, classes, samples)
    try:
        kept, held_out, _ = split(labels, of, fraction, seed)
    except UserError as error:
        assert "none can be held out" in str(error)
        whole = {of[labels == label][0] for label in labels if len({*of[labels == label]}) == 1}
        assert whole == {*of}  # each has all samples of a class
        return
    assert sorted([*kept, *held_out]) == list(range(samples))
    assert (np.diff(kept) > 0).all() and (np.diff(held_out) > 0).all() and len(held_out)
    assert not {*of[kept]} & {*of[held_out]}
    assert {*labels[kept]} == {*labels}


@pytest.mark.parametrize("fraction", [0.1, 0.15, 0.2, 0.3, 0.5])
def test_sizes_and_classes_are_near_the_fraction(fraction):
    rng = np.random.default_rng(0)
    labels, of = rng.choice(3, 3000, p=[0.7, 0.2, 0.1]), rng.integers(0, 150, 3000)
    _, held_out, note = split(labels, of, fraction)
    share = len(held_out) / 3000
    assert abs(share - fraction) < 0.01
    by_class = np.bincount(labels[held_out]) / np.bincount(labels)
    assert np.abs(by_class - fraction).max() < 0.04
    assert note == (
        f"--group_column who: {len({*of[held_out]})} of 150 groups held out, with "
        f"{len(held_out):,} of 3,000 samples: {100 * share:.1f} %, for a fraction of {fraction:g}"
    )


def test_a_large_group_is_not_held_out_for_a_small_fraction():
    of = np.where(np.arange(1000) < 600, 0, np.arange(1000) % 9 + 1)
    _, held_out, _ = split(np.arange(1000) % 2, of, 0.2)
    assert 0 not in of[held_out] and 150 < len(held_out) < 250


def test_groups_of_one_class_each():
    of = np.arange(3000) % 300
    kept, held_out, note = split(of % 100, of, 0.2)
    assert len({*(of % 100)[kept]}) == 100 and abs(len(held_out) - 600) <= 60
    lacking = 100 - len({*(of % 100)[held_out]})
    assert f"; no sample of {lacking} classes is held out (class " in note


def test_the_seed_decides():
    rng = np.random.default_rng(0)
    labels, of = rng.integers(0, 2, 400), rng.integers(0, 40, 400)
    first, again, other = (split(labels, of, 0.2, seed)[1] for seed in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_many_groups_take_little_time():
    _, held_out, _ = split(np.arange(60_000) % 10, np.arange(60_000) // 3, 0.1)
    assert abs(len(held_out) - 6000) < 60


@pytest.mark.parametrize(
    "labels, of, some",
    [([0, 1] * 5, [7] * 10, "of 1 group (p7)"), ([0, 1] * 5, [0, 1] * 5, "of 2 groups (p0, p1)")],
)
def test_groups_that_cannot_be_divided(labels, of, some):
    with pytest.raises(UserError, match="choose smaller groups") as caught:
        split(labels, of, 0.2)
    assert f"--group_column who: {some} none can be held out" in str(caught.value)


def test_parts_have_the_groups_of_their_samples():
    of = [0, 0, 1, 1, 2] * 4
    texts = Texts([f"{group}" for group in of], np.arange(20) % 2, groups_for(of))
    for part in split_off(texts, 0.3, 0, ["a", "b"]):
        assert part.groups.names.tolist() == [f"p{text}" for text in part.texts]


def test_scikit_learn_is_asked_for(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert groups_of("--group_column x", {"train": None, "test": []}, []) == {}
    with pytest.raises(UserError, match=r"--group_by x needs one more .*install scikit-learn$"):
        groups_of("--group_by x", {"train": ["a", "b"]}, [])


def test_groups_in_two_splits_are_named():
    splits = {"train": ["a", "b", "c", "d", "e", ""], "val": ["x", ""], "test": list("edcax")}
    notes: list[str] = []
    assert groups_of("--group_by folder", splits, notes)["train"].notes is notes
    assert notes == [
        "--group_by folder: groups are in two splits, which flatters the figures: 4 in train and "
        "test (a, c, d, ...); 1 in val and test (x)"
    ]
    assert groups_of("", {"train": ["a"], "test": ["b"]}, [])["test"].notes == []


@pytest.mark.parametrize(
    "by, below_class, groups",
    [
        ("folder", True, ["p1", "p1", "p2"]),
        ("folder", False, ["cat/p1", "dog/p1", "dog/p2/left"]),
        (r"p(\d)/", True, ["1", "1", "2"]),
        (r"p\d", True, ["p1", "p1", "p2"]),
        (r"(left)|$", True, ["cat/p1/3.png", "dog/p1/4.png", "left"]),
    ],
)
def test_groups_of_files(by, below_class, groups):
    paths = ["cat/p1/3.png", "dog/p1/4.png", "dog/p2/left/4.png"]
    assert groups_of_files(paths, by, below_class) == groups


def test_files_without_a_group_are_named_with_what_to_do():
    paths = ["cat/3.png", "dog/p1/4.png", *(f"dog/{n}.png" for n in range(5))]
    for by, remedy in (("folder", "below their class: move them"), (r"(p\d)", "|$ at its end")):
        with pytest.raises(UserError) as caught:
            groups_of_files(paths, by, True)
        told = f"--group_by {by}: 6 of 7 pictures (cat/3.png, dog/0.png, dog/1.png, ...)"
        assert str(caught.value).startswith(told) and remedy in str(caught.value)


SUSPICIOUS = {
    "a patient": "patient{group}_{n:02d}.jpg",
    "an upper case": "Case {group:02d}-{n}.png",
    "a video": "video_{group}/frame{n:04d}.jpg",
    "words between": "person{group}_bacteria_{n}.jpeg",
    "tiles": "slide_{group}.tile{n}.tif",
}


@pytest.mark.parametrize("name", SUSPICIOUS.values(), ids=SUSPICIOUS)
def test_names_that_look_like_groups_are_asked_about(name):
    every = [(group, n, label) for label in (0, 1) for group in range(8) for n in range(3)]
    paths = [f"{'ab'[label]}/{name.format(group=group, n=n)}" for group, n, label in every]
    (line,) = likely_files(paths, 2)
    assert line.startswith(f"files such as {paths[0]} may belong together: --group_by '(")
    groups = groups_of_files(paths, line.split("'")[1], True)
    assert len({*groups}) == 8  # over both classes
    assert groups[:24] == groups[24:] == [groups[group * 3] for group, *_ in every[:24]]
    assert likely_files(paths, 8) == []  # as many as classes


ORDINARY = {
    "the class and a number": "{c}_{n:03d}.jpg",
    "a person in each": "person{n:03d}.jpg",
    "numbers alone": "{n:08d}.png",
    "a class with a number": "{c}{label}_{n}.png",
    "ImageNet's": "n0144076{label}_{n}.JPEG",
    "ImageNet's validation": "ILSVRC2012_val_{n:08d}.JPEG",
    "a camera's": "IMG_202301{day:02d}_{n:06d}.jpg",
    "a messenger's": "IMG-202301{day:02d}-WA{n:04d}.jpg",
}


@pytest.mark.parametrize("name", ORDINARY.values(), ids=ORDINARY)
def test_ordinary_names_are_not(name):
    chosen = [{"c": ("cat", "dog")[n % 2], "label": n % 2, "day": n % 20 + 1} for n in range(120)]
    paths = [f"{n % 2}/{name.format(n=n, **chosen[n])}" for n in range(120)]
    assert likely_files(paths, 2) == []


def test_a_million_names_are_not_all_looked_at(monkeypatch):
    paths = [f"a/{n}.jpg" for n in range(30)] + [f"a/case{n // 3}_{n}.jpg" for n in range(30)]
    assert likely_files(paths, 2)
    monkeypatch.setattr("utils.data.groups.LOOKED_AT", 30)
    assert not likely_files(paths, 2)
