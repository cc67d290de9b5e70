"""What `make same` counts as a difference. (The runs themselves take minutes.)"""

import json

import pytest
import same


@pytest.mark.parametrize("text, other", [
    ("after 0:13 of training", "after 2:01 of training"),
    ("2026-11-22 21:47:24 epoch 1", "2027-01-02 03:04:05 epoch 1"),
    ("loss 2.5, 1,300 samples/s", "loss 2.5, 9.5 samples/s"),
    ("took 3.5 s", "took 12 s"),
])  # fmt: skip
def test_times_and_speeds_are_no_difference(text, other):
    assert same.masked(text) == same.masked(other)


@pytest.mark.parametrize("text, other", [
    ("loss 2.5000", "loss 2.5001"),
    ("error: --lr has no effect", "error: --lr has effect"),
    ("test accuracy 11.40 % on 1,000 samples", "test accuracy 11.40 % on 1,001 samples"),
    ("12 steps", "13 steps"),
])  # fmt: skip
def test_results_and_messages_are_differences(text, other):
    assert same.masked(text) != same.masked(other)


def test_what_is_measured_is_left_out_of_json(tmp_path):
    record = {
        "loss": 1.5,
        "samples_per_second": 20.0,
        "time_share": {"data": 0.5},
        "list": [{"b": 1}],
    }
    for name in ("a.json", "a.jsonl"):
        (tmp_path / name).write_text(json.dumps(record))
        assert json.loads(same.text_of(tmp_path / name)) == {"loss": 1.5, "list": [{"b": 1}]}


def test_one_bit_of_a_weight_is_a_difference(tmp_path):
    path = tmp_path / "model.safetensors"
    sums = set()
    for data in (b"01", b"00"):
        path.write_bytes(data)
        sums.add(same.text_of(path))
    assert len(sums) == 2


def test_a_difference_is_found_shown_and_may_be_declared():
    before = {"sgd": {"1 stdout": "a\nb", "gone": "x", "same": "y"}}
    now = {"sgd": {"1 stdout": "a\nc", "same": "y", "new": "z"}}
    differences, meant = same.compare(before, now, [])
    assert [text.split(":")[1].strip() for text in differences] == ["1 stdout", "gone", "new"]
    assert "-b" in differences[0] and "+c" in differences[0] and not meant
    differences, meant = same.compare(before, now, [("s*", "gone", "moved"), ("s*", "n*", "moved")])
    assert len(differences) == 1 and meant[0].endswith("gone: differs as declared: moved")


def test_every_case_is_a_command_of_the_project():
    for commands in same.CASES.values():
        for command in commands:
            scripts = [word for word in command.split() if word.endswith((".py", ".sh"))]
            assert (same.ROOT / scripts[0]).is_file()


def test_declared_differences_have_a_reason():
    assert all(len(row) == 3 and all(row) for row in same.declared())
