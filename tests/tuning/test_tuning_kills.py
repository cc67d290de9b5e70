"""A search that is killed or shared: nothing is lost or repeated."""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
from finished_studies import SHORT, ends, results, wait_for_trace
from patience import PATIENCE
from soak import of_the_soak

KILLS = 8 if "SOAK" in os.environ else 5


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, task.read_text().split())
    return found


def let_it_run(process, trace, rng) -> None:
    """Returns at a random moment of the search's progress, whatever the speed of the machine."""

    def length():
        return trace.stat().st_size if trace.exists() else 0

    target = length() + rng.randrange(60)  # up to four starts and ends of runs
    while process.poll() is None and length() < target:
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.4))


def kill_and_go_on(start, tmp_path, rng, jobs="1", children_too=False):
    """Kills the search at random moments until it ends by itself; returns the number of kills."""
    for kills in range(KILLS + 1):
        process = start(*SHORT, "--jobs", jobs, env={"FAKE_SECONDS": "0.2"})
        if kills < KILLS:
            let_it_run(process, tmp_path / "trace", rng)
        if kills == KILLS or process.poll() is not None:
            break
        its = children(process.pid) if children_too else []
        process.kill()
        for child in its:
            with contextlib.suppress(ProcessLookupError):  # it had ended already
                os.kill(child, signal.SIGKILL)
        process.communicate()
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    return kills


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=of_the_soak)])
def test_a_search_killed_at_random_moments(start, tmp_path, reference, seed):
    """Nothing is lost or repeated: every run ends once, and the study is the undisturbed one."""
    assert kill_and_go_on(start, tmp_path, random.Random(seed)) >= 2
    assert results(tmp_path / "study") == results(reference[0])
    assert set(ends(tmp_path).values()) == {1}
    recipe = (tmp_path / "study" / "best.yaml").read_text()
    assert recipe == (reference[0] / "best.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [2, *(pytest.param(seed, marks=of_the_soak) for seed in (3, 4, 5))]
)
def test_a_search_killed_with_its_runs(start, tmp_path, reference, seed):
    """As by a power cut."""
    kill_and_go_on(start, tmp_path, random.Random(seed), children_too=True)
    assert results(tmp_path / "study") == results(reference[0])


@pytest.mark.slow
def test_a_search_killed_with_two_jobs(start, tmp_path):
    kill_and_go_on(start, tmp_path, random.Random(9), jobs="2")
    found = results(tmp_path / "study")
    assert set(found) == {str(number) for number in range(7)}
    assert set(ends(tmp_path).values()) == {1}


@pytest.mark.slow
def test_two_processes_share_a_study(start, tmp_path):
    words = ["--trials", "4", "--confirm", "1"]
    both = [start(*words, env={"FAKE_SECONDS": "0.1"}) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err
        assert "recipe: " in out
    assert set(results(tmp_path / "study")) == {str(number) for number in range(4)}
    assert set(ends(tmp_path).values()) == {1}


@pytest.mark.slow
def test_an_orphan_is_taken_over_by_the_other_process(start, tmp_path):
    """One of two processes is killed; the other one goes on with its trial."""
    one = start(*SHORT, env={"FAKE_HOLD": "0000/rung2"})
    wait_for_trace(tmp_path, "hold")
    other = start(*SHORT)
    wait_for_trace(tmp_path, "start 0001/rung0")
    one.kill()
    one.communicate()
    _, err = other.communicate(timeout=PATIENCE)
    assert other.returncode == 0, err
    assert set(results(tmp_path / "study")) == {str(number) for number in range(7)}
    assert set(ends(tmp_path).values()) == {1}
    lines = (tmp_path / "trace").read_text().splitlines()
    starts = [line.split() for line in lines if "start" in line]
    assert any(int(step) > 0 for _, _, step in starts)  # in the middle of its run
