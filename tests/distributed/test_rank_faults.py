"""Whatever happens to a process of a run, nothing is lost: the run goes on by itself, ends with the
same bits, and its messages say what has happened."""

import pytest
from distributed.faulty import (
    BATCH,
    IMAGES,
    TEXTS,
    Runs,
    end,
    epoch_order,
    fault,
    random_kills,
)
from soak import of_the_soak

slow, only_in_the_soak = of_the_soak
EPOCHS = ["--epochs", 2]
STEPS = 26  # of two epochs of two processes
# Killed in a step, and between two files of a checkpoint. At the second start the first rank comes
# late: the other one must not take it for its predecessor.
KILLS = [fault("backward", 6), fault("writing", 14, rank=0, start=1)]
LATE = fault("beginning", 1, rank=0, start=1, do="wait")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = Runs(tmp_path_factory.mktemp("faults"))
    yield runs
    runs.close()


@pytest.fixture(scope="module")
def reference(runs):
    """The name of a run of two processes (DDP) without faults."""
    assert runs.train([*IMAGES, *EPOCHS], name="reference") == (0, "")
    assert runs.losses("reference")[-1][0] == STEPS
    return "reference"


@slow
@only_in_the_soak
def test_a_run_loses_nothing(runs):
    """A process is killed, the next launch is ended by a signal, one process goes on alone: one
    after the other, of which the tests below have one each."""
    stop = fault("forward", 7, start=1, do="end the launch")
    code, err = runs.train([*IMAGES, *EPOCHS], name="both", faults=[KILLS[0], stop])
    assert code == 143, err
    assert err.count("was killed by SIGKILL") == 1
    assert "and saved; resume with --resume both" in err.splitlines()[-1]
    assert len(runs.notes("both", "fault")) == 2 and runs.left("both") == []
    runs.check_redone("both")
    code, err = end(runs.start_alone("--resume", "both", name="both"))
    assert code == 0, err
    assert runs.order("both") == epoch_order(0, 2 * BATCH) + epoch_order(1, 2 * BATCH)
    assert [step for step, _ in runs.losses("both")] == list(range(1, STEPS + 1))


@slow
def test_a_run_survives_its_ranks(runs, reference):
    code, err = runs.train(
        [*IMAGES, *EPOCHS], name="killed", faults=[*KILLS, LATE], MAX_RESTARTS="2"
    )
    assert code == 0, err
    assert len(runs.notes("killed", "fault")) == 3
    assert err.count("was killed by SIGKILL") == 2
    runs.check_equal("killed", reference)
    print("steps done again:", runs.check_redone("killed"))
    assert runs.left("killed") == []


@slow
def test_a_run_that_is_stopped_is_saved_and_goes_on(runs, reference):
    stop = fault("forward", 9, do="end the launch")  # the first pass belongs to no step
    code, err = runs.train([*IMAGES, *EPOCHS], name="stopped", faults=[stop])
    assert code == 143
    assert err.count("\n") == 1 and "and saved; resume with --resume stopped" in err
    notes = runs.notes("stopped")
    asked = next(index for index, note in enumerate(notes) if "fault" in note)
    before, last = (
        max(note["step"] for note in some if "step" in note) for some in (notes[:asked], notes)
    )
    saved = runs.notes("stopped", "saved")[-1]
    assert saved["saved"] == last + 1 and f"after step {last + 1} " in err
    assert last <= before + 2  # the ranks agree during the next step where to stop
    assert runs.left("stopped") == [] and not any((runs.folder / "tmp").glob("launch-*"))
    assert runs.run("--resume", "stopped", name="stopped") == (0, "")
    runs.check_equal("stopped", reference)


@slow
def test_the_error_of_a_rank_that_fails_is_printed_once(runs):
    wrong = [fault("backward", 3, do="fail")]
    code, err = runs.train([*IMAGES, *EPOCHS], name="failed", faults=wrong, MAX_RESTARTS="0")
    assert code == 1
    lines = [line.removeprefix("[rank1]: ") for line in err.splitlines()]  # PyTorch's own mark
    assert lines.count("RuntimeError: a fault of this rank's own") == 1
    assert err.count("Traceback") == 1
    start = lines.index("Traceback (most recent call last):")
    length = lines.index("RuntimeError: a fault of this rank's own") - start + 1
    others = lines[:start] + lines[start + length :]
    assert others[-1].startswith("error: rank 1 on ") and "ended with exit code 1" in others[-1]
    assert len(others) <= 2, others  # one line of the other rank, one of the launcher
    assert runs.left("failed") == []


@slow
def test_wrong_data_is_reported_once(runs):
    (runs.folder / "empty").mkdir()
    flags = ["--dataset", "imagefolder", "--data_dir", "empty", "--device", "cpu"]
    code, err = runs.train(flags, name="no data")
    assert code == 2
    assert err.startswith("error: ") and err.count("\n") == 1
    assert {note["start"] for note in runs.notes("no data")} == {0}
    assert not (runs.folder / "no data").exists()


@slow
def test_a_wrong_file_is_reported_once(runs):
    for split in ("train", "test"):
        for name in ("cats", "dogs"):
            folder = runs.folder / "pictures" / split / name
            folder.mkdir(parents=True)
            for number in range(4):
                (folder / f"{number}.png").write_text("no picture")
    flags = ["--dataset", "imagefolder", "--data_dir", "pictures", "--device", "cpu"]
    code, err = runs.train(flags, name="bad file")
    assert code == 2
    errors = [line for line in err.splitlines() if not line.startswith("decoding ")]
    assert len(errors) == 1 and errors[0].startswith("error: ") and ".png" in errors[0]
    assert {note["start"] for note in runs.notes("bad file")} == {0}


@slow
@pytest.mark.parametrize("restarts", (pytest.param(0, marks=of_the_soak), 1))
def test_a_rank_that_stops_is_named(runs, reference, restarts):
    name = f"asleep {restarts}"
    code, err = runs.train(
        [*IMAGES, *EPOCHS, "--dist_timeout", 0.5], name=name,
        faults=[fault("backward", 8, do="stop")], MAX_RESTARTS=str(restarts), PACE="0.7",
    )  # fmt: skip
    line = "error: no step for 30 s (--dist_timeout): no response from rank 1 (last step 6) of 2 "
    assert err.splitlines()[0].startswith(line)
    assert err.count("(--dist_timeout)") == 1
    stopped = runs.notes(name, "fault")[0]["time"]
    if restarts == 0:
        assert code == 1
        return
    assert code == 0, err
    again = min(note["time"] for note in runs.notes(name, "pid") if note["start"] == 1)
    print("started again after", again - stopped, "s")
    runs.check_equal(name, reference)


@slow
@pytest.mark.parametrize(
    ("entry", "strategy", "size"),
    [
        pytest.param("images", "fsdp", 2, marks=of_the_soak),
        pytest.param("images", "ddp", 4, marks=of_the_soak),
        pytest.param("texts", "ddp", 2, marks=of_the_soak),
        ("texts", "fsdp", 2),
        pytest.param("texts", "fsdp", 4, marks=of_the_soak),
        pytest.param("images", "local", 2, marks=of_the_soak),
    ],
)
def test_random_kills(runs, entry, strategy, size):
    run_random_kills(runs, entry, strategy, size, seed=1, kills=2)


def run_random_kills(runs, entry, strategy, size, seed: int, kills: int) -> int:
    """Trains a run with up to this many kills; returns how many there were."""
    steps = 20 + 4 * kills  # enough for most kills to come before the end
    flags = [*(IMAGES if entry == "images" else TEXTS), "--strategy", strategy]
    flags += ["--max_steps", steps, "--epochs", -(-steps // (200 // (BATCH * size)))]
    environ = {"NPROC": str(size)}
    if entry == "texts":
        environ["ENTRY"] = "transformer_test"
    well, name = f"well {entry} {strategy} {size}", f"{entry} {strategy} {size} seed {seed}"
    if not (runs.folder / well).exists():
        code, err = runs.train(flags, name=well, **environ)
        assert code == 0, err
    faults = random_kills(seed, kills, size, local=strategy == "local")
    code, err = runs.train(flags, name=name, faults=faults, MAX_RESTARTS=str(kills), **environ)
    assert code == 0, err
    runs.check_equal(name, well)
    count = len(runs.notes(name, "fault"))
    again = runs.check_redone(name)
    print(f"{name}: {count} kills, at most {again} steps done again", flush=True)
    assert runs.left(name) == []
    return count


@slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([], id="kept"),
        pytest.param(["--global_batch", 2 * BATCH], id="given", marks=of_the_soak),
    ],
)
def test_a_run_goes_on_at_another_size(runs, flags):
    """DDP with two processes, FSDP with four, one process without the launcher."""
    name = f"sizes {len(flags)}"
    stop = [fault("forward", 6, do="end the launch")]
    assert runs.train([*IMAGES, *EPOCHS, *flags], name=name, faults=stop)[0] == 143
    again = ["--resume", name, "--strategy", "fsdp"]
    assert runs.run(*again, name=name, faults=stop, NPROC="4")[0] == 143
    code, err = end(runs.start_alone("--resume", name, name=name))
    assert code == 0, err
    assert runs.order(name) == epoch_order(0, 2 * BATCH) + epoch_order(1, 2 * BATCH)
    assert runs.summary(name)["global_batch_size"] == 2 * BATCH
    assert runs.summary(name)["world_size"] == 1
    assert [step for step, _ in runs.losses(name)] == list(range(1, STEPS + 1))
