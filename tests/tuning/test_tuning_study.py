"""A whole search over an entry that takes milliseconds: its report, a stop, failures."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from finished_studies import SHORT, ends, results, rows, wait_for_trace
from patience import PATIENCE
from small_disks import small_disk

import resnet50_test
from tuning.runner import Runner
from utils.errors import UserError
from utils.plural import counted
from utils.runs.optimization import learning_rate
from utils.settings.config import parse

HERE = Path(__file__).parent


@pytest.mark.slow
def test_files_of_a_search(reference):
    folder, said = reference
    for name in ("best.yaml", "trials.csv", "report.json", "history.png", "slices.png",
                 "learning_rate.png", "log.txt", "study.yaml"):  # fmt: skip
        assert (folder / name).stat().st_size, name
    found = rows(folder)
    assert all((row["state"] == "failed") == (float(row["lr"]) > 0.9) for row in found)
    assert {row["trial"] for row in found} == {str(number) for number in range(7)}
    default = next(row for row in found if row["trial"] == "0")
    assert default["state"] == "complete" and float(default["lr"]) == 0.1
    assert [path.name for path in (folder / "trials" / "0000").glob("rung?")] == ["rung2"]
    best = max(
        (row for row in found if row["state"] == "complete"), key=lambda r: float(r["score"])
    )
    assert found[0] == best
    assert f"best {float(best['score']):.2f} %" in said and "rank" in said
    report = json.loads((folder / "report.json").read_text())
    assert (report["handed_over"] != 0) == (report["difference"] > 0)
    assert not list(folder.glob("trials/*/*/checkpoints"))


@pytest.mark.slow
def test_a_trial_has_one_line(reference):
    """Without a terminal, whatever the number of its stages; the log has a line for each stage. A
    new best has a line of its own."""
    folder, said = reference
    stages = {path.name: len([*path.glob("rung?")]) for path in (folder / "trials").iterdir()}
    assert max(stages.values()) == 3
    numbers = re.findall(r"^\[\d/7\] trial (\d+) \(", said, re.MULTILINE)
    assert sorted(numbers) == [str(number) for number in range(7)]
    log = (folder / "log.txt").read_text()
    assert len(re.findall(r" trial \d+ \(lr[^;\n]*\): ", log)) == sum(stages.values())
    assert said.count("note: the first stage") == 1
    told = re.findall(r"best (\S+) % \(", said)
    assert told[-1] == f"{float(rows(folder)[0]['score']):.2f}"


@pytest.mark.slow
def test_the_recipe_reproduces_its_score(reference, tmp_path):
    """The command in its header gives the same result to the bit."""
    folder, _ = reference
    head = (folder / "best.yaml").read_text().splitlines()
    command = next(line for line in head if line.startswith("#   python "))
    words = shlex.split(command.removeprefix("#   python fake_entry.py"))
    words[words.index("best.yaml")] = str(folder / "best.yaml")
    words += ["--output", str(tmp_path / "again")]
    subprocess.run([sys.executable, str(HERE / "fake_entry.py"), *words], check=True,
                   env=os.environ | {"PYTHONPATH": str(HERE.parents[1])})  # fmt: skip
    again = json.loads((tmp_path / "again" / "metrics.jsonl").read_text())
    number = str(json.loads((folder / "report.json").read_text())["handed_over"])
    (score,) = (row["score"] for row in rows(folder) if row["trial"] == number)
    assert again["accuracy"] == float(score)
    recipe = yaml.safe_load((folder / "best.yaml").read_text())
    assert recipe["epochs"] == 50 and "subset" not in recipe and "val_fraction" not in recipe


@pytest.mark.slow
def test_the_same_command_again_trains_nothing(reference, tmp_path):
    folder, _ = reference
    before = results(folder)
    words = ["--dataset", "shapes", "--device", "cpu", "--jobs", "1", "--output", str(folder)]
    done = subprocess.run(
        [sys.executable, str(HERE / "fake_tuning.py"), *words, *SHORT], text=True, timeout=PATIENCE,
        env=os.environ | {"FAKE_TRACE": str(tmp_path / "trace")}, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0 and not (tmp_path / "trace").exists()
    assert results(folder) == before


@pytest.mark.slow
def test_a_finished_run_is_not_trained_again(reference):
    """As when a search was killed between the end of a run and its record."""
    folder, _ = reference
    finished = next(folder.rglob("summary.json")).parent
    outcome = Runner(Path("nothing.py"), 1, []).run(finished, {}, 0, -1)
    assert outcome.failure is None and outcome.score > 0


@pytest.mark.slow
def test_a_search_killed_and_then_stopped_by_a_signal(start, tmp_path, reference):
    """Nothing is lost or repeated: every run ends once, and the study is the undisturbed one."""
    process = start(*SHORT, env={"FAKE_HOLD": "0001/rung0"})
    wait_for_trace(tmp_path, "hold 0001")
    process.kill()
    process.communicate()
    process = start(*SHORT, env={"FAKE_HOLD": "0004/rung0"})
    wait_for_trace(tmp_path, "hold 0004")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM
    (line,) = err.strip().splitlines()
    assert "the same command continues it" in line
    process = start(*SHORT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert results(tmp_path / "study") == results(reference[0])
    assert set(ends(tmp_path).values()) == {1}
    recipe = (tmp_path / "study" / "best.yaml").read_text()
    assert recipe == (reference[0] / "best.yaml").read_text()


@pytest.mark.slow
def test_a_search_ends_when_its_time_is_up(search, tmp_path):
    words, env = ["--trials", "100", "--timeout", "8s"], {"FAKE_CLOCK": "", "FAKE_SECONDS": "0.3"}
    code, out, err = search(*words, env=env)
    assert code == 0, err
    assert len(rows(tmp_path / "study")) < 100
    assert "recipe: " in out
    first = results(tmp_path / "study")
    code, out, err = search(*words, env=env)
    assert code == 0 and set(first) <= set(results(tmp_path / "study"))


@pytest.mark.slow
def test_when_time_is_up_one_trial_is_trained_to_the_end(search, tmp_path):
    """The best of a few first stages, for which there was time, is compared with the default."""
    words = ["--trials", "100", "--timeout", "10s", "--confirm", "1"]
    code, out, err = search(*words, env={"FAKE_CLOCK": "", "FAKE_SECONDS": "0.3"})
    assert code == 0, err
    complete = [row for row in rows(tmp_path / "study") if row["state"] == "complete"]
    assert len(complete) >= 2, out
    assert "recipe: " in out


@pytest.mark.slow
def test_failed_trials_do_not_end_the_search(search, tmp_path):
    """One that diverged, ran out of memory or met a bug is recorded with the reason."""
    space = tmp_path / "space.yaml"
    space.write_text("lr: {low: 0.6, high: 2.0, scale: log, default: 0.6}\n")
    trials = 14  # more than the table shows
    code, _, err = search(
        "--space", space, "--trials", trials, "--sampler", "random", "--confirm", "0",
        "--crash_above", "1.7", "--memory_above", "1.4", "--early_above", "1.15",
    )  # fmt: skip
    assert code == 0, err
    failures = [row["failure"] for row in rows(tmp_path / "study") if row["state"] == "failed"]
    assert any("not finite" in why for why in failures)
    assert any("killed by signal 9, perhaps for lack of memory" in why for why in failures)
    assert any("exit code 1: RuntimeError: a bug" in why for why in failures)
    assert any("CUDA is out of memory" in why for why in failures)
    assert all(
        row["state"] != "failed" or float(row["lr"]) > 0.9 for row in rows(tmp_path / "study")
    )


@pytest.mark.parametrize("flag", [["--min_lr", "0.01"], ["--warmup_lr", "0.01"]])
def test_a_rate_below_the_schedules_lowest_fails_its_trial_alone(tmp_path, monkeypatch, flag):
    """With --lr_base_size the run alone knows that it is."""
    flags = ["--lr_base_size", "256", "--batch_size", "64", "--lr", "0.02", "--warmup_epochs", "1"]
    settings, _ = parse(resnet50_test.Settings, [*flags, *flag], "")
    with pytest.raises(UserError) as error:
        learning_rate(settings, 64, print)
    runner = Runner(Path("nothing.py"), 1, [])
    monkeypatch.setattr(runner, "_start", lambda *_: (2, f"error: {error.value}\n"))
    outcome = runner.run(tmp_path / "rung0", {}, 0, -1)
    assert outcome.failure == f"{flag[0]} 0.01 is above this learning rate, 0.005"


@pytest.mark.slow
def test_a_search_ends_if_every_trial_fails(search):
    code, _, err = search("--lr", "0.95", "--trials", "9")
    assert code == 2 and err.startswith("error: all 3 trials have failed, the last one: step 3")


def test_a_fault_that_is_no_trials_own_ends_the_search(search, tmp_path):
    """A full disk: one line, and the trial has not failed but is continued later."""
    code, _, err = search("--trials", "4", "--out_of_disk")
    assert code == 2 and err.count("\n") == 1 and "No space left on device" in err
    assert not (tmp_path / "study" / "trials.csv").exists()


@pytest.mark.slow
def test_a_full_disk_of_the_search_ends_it(search, tmp_path, start):
    with small_disk(tmp_path / "small", "300k") as folder:
        words = ["--trials", "2", "--confirm", "0", "--output", folder / "study"]
        (folder / "filler").write_bytes(b"0" * 200_000)
        code, _, err = search(*words)
        assert code == 2 and err.count("\n") == 1 and "No space left" in err, err
        (folder / "filler").unlink()
        subprocess.run(["mount", "-o", "remount,size=20m", str(folder)], check=True)
        code, _, err = search(*words)
        assert code == 0, err
        assert set(results(folder / "study")) == {"0", "1"}


@pytest.mark.slow
def test_a_truncated_journal_is_completed_from_the_runs(search, tmp_path, reference):
    code, _, err = search(*SHORT)
    assert code == 0, err
    journal = tmp_path / "study" / "journal.jsonl"
    content = journal.read_bytes()
    journal.write_bytes(content[: int(len(content) * 0.6)])
    (tmp_path / "trace").unlink()
    code, _, err = search(*SHORT)
    assert code == 0, err
    assert results(tmp_path / "study") == results(reference[0])
    assert not (tmp_path / "trace").exists()  # all runs were there, and none was trained


@pytest.mark.slow
def test_other_settings_are_refused_by_name(search, tmp_path, refuse, reference):
    folder, _ = reference
    for flags, name in (
        (["--lr", "0.2"], "lr: "),
        (["--seed", "1"], "seed: "),
        (["--epochs", "4"], "trial_epochs: "),
        (["--subset", "0.3"], "trial_subset: "),
        (["--sampler", "random"], "sampler: "),
        (["--depth", "34"], "depth: "),
        (["--params", "lr"], "space of label_smoothing: "),
    ):
        line = refuse("--output", folder, *flags)
        assert line.startswith(f"error: {name}the study in {folder} was started with"), line
    longer = shutil.copytree(folder, tmp_path / "longer")  # others read the reference
    code, _, err = search("--output", longer, "--trials", "8", "--confirm", "1")
    assert code == 0, err
    assert len(rows(longer)) == 8


@pytest.mark.slow
def test_a_best_value_at_the_edge_is_noted_and_the_default_may_win(search, tmp_path):
    space = tmp_path / "space.yaml"
    space.write_text("lr: {low: 0.3, high: 0.305, scale: log, default: 0.3, grid: [0.3, 0.305]}\n")
    code, out, err = search("--space", space, "--trials", "3", "--confirm", "0")
    assert code == 0, err
    assert "border of its range" in out or "the default recipe" in out
    assert "within noise" in out or "best.yaml is the default recipe" in out
    space.write_text("lr: {low: 0.3, high: 0.8, scale: log, default: 0.3}\n")
    code, out, err = search("--space", space, "--trials", "3", "--output", tmp_path / "other")
    assert code == 0 and "best.yaml is the default recipe: no trial is better" in out
    head = (tmp_path / "other" / "best.yaml").read_text()
    assert head.startswith("# The default recipe of a search") and "lr: 0.3\n" in head


@pytest.mark.slow
def test_jobs_share_the_cores(search, tmp_path):
    cores = len(os.sched_getaffinity(0))
    code, out, err = search("--trials", "3", "--jobs", "2", "--confirm", "0")
    assert code == 0, err
    each = counted(max(1, cores // 2), "CPU thread")
    assert f"2 at once with {each} each" in out
    config = yaml.safe_load((tmp_path / "study/trials/0001/rung0/config.yaml").read_text())
    assert config["threads"] == max(1, cores // 2)


def test_a_search_can_be_started_from_any_folder(tmp_path):
    for name in ("resnet50", "transformer"):
        script = HERE.parents[1] / "tuning" / f"{name}_tuning.sh"
        done = subprocess.run(
            ["bash", str(script), "--trials", "0"], cwd=tmp_path, capture_output=True, text=True,
            env=os.environ | {"PYTHON": sys.executable},
        )  # fmt: skip
        assert done.returncode == 2 and done.stderr.startswith("error: --trials: '0'")
