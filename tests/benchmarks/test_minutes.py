"""The plan of benchmarks.minutes, with a contender whose process is made up."""

import csv
import json
import sys
from pathlib import Path

import pytest

from benchmarks import minutes
from benchmarks.minutes_contenders import CONTENDERS, Contender, Job

ROWS = 400


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Runs the benchmark with a contender that starts in 5 s and takes `each` seconds for a sample,
    `short` times that in up to three epochs; returns the results. `calls` has the epochs and
    samples of each process."""
    for split in ("train", "test"):
        with open(tmp_path / f"{split}.csv", "w", newline="") as file:
            csv.writer(file).writerows([row % 4 + 1, f"text {row}"] for row in range(ROWS))
    calls = []

    def run(each=0.01, most_epochs=1000, unit="samples", short=1, **flags):
        def timed(command, folder: Path, most):
            with open(folder / "data/train.csv", newline="") as file:
                number = len([*csv.reader(file)])
            calls.append((int(command[0]), number))
            (folder / "run").mkdir()
            (folder / "run/evaluated.csv").write_text("true,predicted\na,a\na,b\n")
            seconds = each * calls[-1][0] * number * (short if calls[-1][0] <= 3 else 1)
            return 5 + seconds * (1.5 if calls[-1][0] > 20 else 1)  # which no timing run tells

        contender = Contender(lambda job: [job.epochs], unit, most_epochs=most_epochs)
        monkeypatch.setattr(minutes, "timed", timed)
        monkeypatch.setattr(minutes, "versions", lambda *_: {"torch": "2"})
        monkeypatch.setattr(minutes, "CONTENDERS", {"made up": contender})
        output = tmp_path / "results.jsonl"
        argv = ["--data", "ag_news", "--data_dir", str(tmp_path), "--output", str(output)]
        for name, values in ({"minutes": [1], "seeds": [1]} | flags).items():
            argv += [f"--{name}", *map(str, values)]
        assert minutes.main(argv) == 0
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        return [line for line in lines if "minutes" in line]

    run.calls = calls
    return run


def test_as_many_epochs_as_fit(made_up):
    (line,) = made_up(each=0.01)
    assert (line["epochs"], line["samples"]) == (13, ROWS)  # 5 + 13 * 4 s, of 57
    assert line["seconds"] == 57 and line["accuracy"] == 50
    assert line["machine"] and line["versions"] and line["command"] == "13"


def test_fewer_samples_where_no_epoch_fits(made_up):
    (line,) = made_up(each=0.15)
    assert (line["epochs"], line["samples"]) == (1, 346)  # 5 + 346 * 0.15 s


def test_a_run_that_ends_too_late_is_repeated_with_less(made_up):
    (line,) = made_up(each=0.01, minutes=[3])
    assert made_up.calls[-2] == (41, ROWS) and line["epochs"] < 41
    assert line["seconds"] <= 180


def test_a_run_that_leaves_much_of_the_time_is_repeated_with_more(made_up):
    (line,) = made_up(each=0.03, short=1.5, minutes=[3])
    assert made_up.calls[-2:] == [(9, ROWS), (14, ROWS)]
    assert line["epochs"] == 14 and line["seconds"] == 173


def test_a_repetition_that_ends_too_late_does_not_count(made_up):
    (line,) = made_up(each=0.03, short=2, minutes=[3])
    assert made_up.calls[-2:] == [(6, ROWS), (15, ROWS)]  # 5 + 15 * 12 s
    assert line["epochs"] == 6 and line["seconds"] == 77


def test_what_does_not_fit_has_no_accuracy(made_up):
    (line,) = made_up(each=10)
    assert line["accuracy"] is None and minutes.cell([line]) == "does not fit"


def test_a_contender_with_a_time_of_its_own_gets_all_samples(made_up):
    (line,) = made_up(each=0.1, unit="budget")
    assert (line["amount"], line["samples"]) == (60, ROWS)
    (_, line) = made_up(each=0.1, unit="seconds", minutes=[3])
    assert (line["amount"], line["samples"]) == (141, ROWS)  # of 171; told 15 s, it took 45


def test_only_missing_results_are_measured(made_up):
    made_up(minutes=[1], seeds=[2])
    done = len(made_up.calls)
    lines = made_up(minutes=[1, 3], seeds=[2])
    assert [line["minutes"] for line in lines] == [1, 1, 3, 3]
    assert min(epochs for epochs, _ in made_up.calls[done:]) > 13  # no timing, and none of 1 minute
    done = len(made_up.calls)
    assert made_up(minutes=[1, 3], seeds=[2]) == lines and len(made_up.calls) == done


def test_the_largest_amount_of_use_is_measured_once(made_up):
    lines = made_up(most_epochs=2, minutes=[1, 3])
    assert lines[0]["seconds"] == lines[1]["seconds"] and lines[1]["epochs"] == 2
    assert made_up.calls.count((2, ROWS)) == 2  # the second one timed it


def test_the_table():
    line = {"contender": "timm", "data": "cifar10", "minutes": 3, "seconds": 170.4, "seed": 1}
    line |= {"versions": {"timm": "1.0"}, "machine": {"cpu": "Xeon", "gpu": None}}
    lines = [line | {"accuracy": 60.0}, line | {"accuracy": 62.0, "seconds": 171.0}]
    lines += [line | {"minutes": 1, "accuracy": None, "seconds": None}, {"timing": [[1, 2]]}]
    text = minutes.table(lines)
    assert "| cifar10 | 1 min | 3 min | versions |" in text and text.startswith("cpu Xeon\n")
    assert "| timm | does not fit | 61.0 (60.0 to 62.0), 171 s | timm 1.0 |" in text


def test_a_process_that_fails_or_takes_too_long(tmp_path):
    with pytest.raises(minutes.Failed, match="no such thing"):
        minutes.timed([sys.executable, "-c", "exit('no such thing')"], tmp_path, None)
    slow = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert minutes.timed(slow, tmp_path, 0.2) == 0.2


def test_links_to_pictures(tmp_path):
    for split, number in (("train", 6), ("test", 2)):
        for name in ("cat", "dog"):
            (tmp_path / "own" / split / name).mkdir(parents=True)
            for index in range(number):
                (tmp_path / "own" / split / name / f"{index}.jpg").touch()
    samples = minutes.Samples("cifar10", tmp_path / "own")
    samples.part(tmp_path / "part", 4, seed=1)
    for place in ("train/cat", "test/dog"):
        assert len([*(tmp_path / "part" / place).iterdir()]) == 2


def test_each_contender_has_a_command(tmp_path):
    job = Job("cifar10", tmp_path / "data", 3, 60.0, 1, tmp_path / "run", tmp_path, None)
    for contender in CONTENDERS.values():
        assert str(job.folder) in " ".join(map(str, contender.command(job)))
