"""--auto_batch from the command line: messages, what is kept, and how such a run is resumed."""

import json
import re
from pathlib import Path

import pytest

import transformer_test
from utils.data.images import shapes
from utils.data.texts import headlines
from utils.runs import auto_batch
from utils.training import batch_probe

pytestmark = pytest.mark.usefixtures("own_folder", "small_test_sets")

TINY = [
    "--dataset", "shapes", "--subset", "64", "--depth", "18", "--width", "4", "--device", "cpu",
    "--threads", "1", "--epochs", "1",
]  # fmt: skip
TEXTS = [
    "--dataset", "headlines", "--subset", "60", "--layers", "1", "--dim", "16", "--heads", "2",
    "--ffn", "16", "--max_steps", "3", "--device", "cpu", "--threads", "1",
]  # fmt: skip


@pytest.fixture
def small_test_sets(monkeypatch):
    monkeypatch.setattr(shapes, "TEST_PER_CLASS", 2)
    monkeypatch.setattr(headlines, "TEST_PER_CLASS", 5)


def weights(folder: str) -> bytes:
    return max(Path(folder, "checkpoints").glob("step-*/model.safetensors")).read_bytes()


def summary(folder: str) -> dict:
    return json.loads(Path(folder, "summary.json").read_text())


def losses(folder: str) -> list:
    lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["split"], line["loss"]) for line in lines]


@pytest.fixture
def room_for(monkeypatch):
    """room_for(n): makes micro-batches of at most n samples fit."""

    def limit(n: int) -> None:
        def needed(self, samples: int) -> float:
            return 1e9 * samples / n

        monkeypatch.setattr(batch_probe.CPUProbe, "needed", needed)
        monkeypatch.setattr(auto_batch, "available_memory", lambda: 1e9)

    return limit


def test_a_run_that_fits_is_the_same_to_the_bit(works):
    works(*TINY, "--bs", 16, "--output", "plain")
    said = works(*TINY, "--bs", 16, "--auto_batch", "--output", "probed")
    assert re.search(r"auto_batch: 16 samples a step as 1 micro-batch of 16 \(16 fit in ", said)
    assert "BatchNorm's" not in said
    assert weights("plain") == weights("probed") and losses("plain") == losses("probed")


def test_smaller_micro_batches_keep_the_step(works, room_for):
    works(*TINY, "--bs", 4, "--accumulation_steps", 4, "--output", "by_hand")
    room_for(5)
    said = works(*TINY, "--bs", 16, "--auto_batch", "--output", "probed")
    assert "16 samples a step as 4 micro-batches of 4 (4 fit in 0.8 of 1 GB)" in said
    assert "BatchNorm's statistics are computed over 4 samples instead of 16" in said
    assert weights("by_hand") == weights("probed") and losses("by_hand") == losses("probed")
    found = summary("probed")
    assert (found["micro_batch_size"], found["accumulation_steps"]) == (4, 4)
    assert found["global_batch_size"] == 16
    written = Path("probed/config.yaml").read_text()
    assert "batch_size: 4  # auto_batch" in written and "auto_batch: true  # command" in written


def test_micro_batches_may_be_larger_than_asked_for(works, room_for):
    room_for(8)
    said = works(*TINY, "--bs", 2, "--accumulation_steps", 16, "--auto_batch", "--output", "run")
    assert "32 samples a step as 4 micro-batches of 8" in said


@pytest.mark.slow
def test_a_resumed_run_takes_the_same_size_without_probing(works, room_for, monkeypatch):
    room_for(5)
    flags = [*TINY, "--bs", 16, "--auto_batch", "--epochs", "2", "--save_every", "3"]
    works(*flags, "--output", "whole")
    works(*flags, "--max_steps", "3", "--epochs_for_sched", "2", "--output", "parts")

    def probed(*args, **options):
        raise AssertionError("it is probed again")

    monkeypatch.setattr(auto_batch, "largest_that_fits", probed)
    said = works("--resume", "parts", "--max_steps", "none")
    assert "auto_batch" not in said and "from step 3" in said
    assert weights("whole") == weights("parts")
    assert [each for each in losses("parts") if each[0] == 8] == [
        each for each in losses("whole") if each[0] == 8
    ]
    assert "batch_size: 4  # auto_batch" in Path("parts/config.yaml").read_text()


@pytest.mark.slow
def test_a_resumed_run_keeps_the_size_that_was_found(works, fails, room_for):
    room_for(5)
    works(*TINY, "--bs", 16, "--auto_batch", "--max_steps", "2", "--output", "run")
    assert "was started with 4" in fails("--resume", "run", "--bs", 2, "--max_steps", 3)
    assert "was started with True" in fails("--resume", "run", "--no_auto_batch", "--max_steps", 3)
    works("--resume", "run", "--auto_batch", "--max_steps", 3)
    # The command that started it, given again.
    works(*TINY, "--bs", 16, "--auto_batch", "--max_steps", 4, "--resume", "run")
    assert "batch_size: 4  # auto_batch" in Path("run/config.yaml").read_text()


def test_a_step_smaller_than_the_batch_is_kept(works):
    flags = [*TINY, "--global_batch", 8, "--bs", 16]
    works(*flags, "--output", "plain")
    said = works(*flags, "--auto_batch", "--output", "probed")
    assert "8 samples a step as 1 micro-batch of 8" in said and "BatchNorm's" not in said
    assert weights("plain") == weights("probed") and losses("plain") == losses("probed")


@pytest.mark.slow
def test_a_prime_step_is_kept_by_the_global_batch(works, room_for):
    room_for(6)
    said = works(*TINY, "--bs", 13, "--auto_batch", "--output", "run")
    assert "13 samples a step as 4 micro-batches of 4" in said
    assert summary("run")["global_batch_size"] == 13
    assert "global_batch: 13  # auto_batch" in Path("run/config.yaml").read_text()
    works("--resume", "run", "--epochs", 2)


@pytest.mark.slow
def test_mixing_keeps_its_blocks_where_they_fit(works, room_for):
    room_for(8)
    mixed = [*TINY, "--mixup", "1", "--auto_batch"]
    said = works(*mixed, "--bs", 4, "--accumulation_steps", 4, "--output", "larger")
    assert "as 2 micro-batches of 8" in said and "blocks" not in said
    assert "mixup_block: 4  # auto_batch" in Path("larger/config.yaml").read_text()
    said = works(*mixed, "--bs", 16, "--output", "smaller")
    assert "samples are mixed within blocks of 8 instead of 16" in said
    works("--resume", "smaller", "--epochs", 2)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["policy", "sample"])
def test_meta_mixup_is_probed_with_its_own_batch(works, form):
    flags = ["--mixup", "meta", "--meta_form", form, "--meta_batch", "8"]
    flags += ["--meta_every", "2"] if form == "policy" else []
    works(*TINY, "--bs", 16, *flags, "--output", "plain")
    works(*TINY, "--bs", 16, *flags, "--auto_batch", "--output", "probed")
    assert weights("plain") == weights("probed") and losses("plain") == losses("probed")


def test_it_is_an_error_if_nothing_fits(fails, room_for):
    room_for(1)
    line = fails(*TINY, "--bs", 16, "--auto_batch", "--output", "run")
    assert "not even the smallest micro-batch fits into the 1 GB" in line
    assert line.endswith("or --precision bf16") and not Path("run").exists()


@pytest.mark.slow
def test_no_warning_about_statistics_of_a_frozen_backbone(works, room_for):
    works(*TINY, "--bs", 16, "--output", "run")
    room_for(4)
    flags = ["--pretrained", "run", "--freeze_backbone", "--auto_batch", "--bs", 16]
    said = works(*TINY, *flags, "--output", "head")
    assert "4 micro-batches of 4" in said and "BatchNorm's" not in said


@pytest.mark.slow
def test_a_larger_limit_gives_larger_micro_batches(works, monkeypatch):
    """With real limits, between what the probe counts for two sizes."""
    sizes = []
    for megabytes in (455, 460, 475, 520):
        monkeypatch.setattr(auto_batch, "available_memory", lambda mb=megabytes: 1e6 * mb)
        works(*TINY, "--bs", 32, "--auto_batch", "--max_steps", 1, "--output", f"run{megabytes}")
        sizes.append(summary(f"run{megabytes}")["micro_batch_size"])
    assert sizes == sorted(sizes) and sizes[0] < 32 == sizes[-1]


def of_texts(*flags) -> None:
    assert transformer_test.main([str(flag) for flag in (*TEXTS, *flags)]) == 0


def test_texts_are_cut_by_samples_or_by_tokens(room_for, capfd):
    room_for(5)
    of_texts("--bs", 16, "--auto_batch", "--output", "samples")
    said = capfd.readouterr().out
    assert "16 samples a step as 4 micro-batches of 4" in said and "BatchNorm" not in said
    room_for(2)
    of_texts("--batch_tokens", 256, "--auto_batch", "--output", "tokens")
    said = capfd.readouterr().out
    found = summary("tokens")
    assert f"256 tokens a step as {found['accumulation_steps']} micro-batches of" in said
    assert found["micro_batch_size"] * found["accumulation_steps"] == 256
    of_texts(
        "--batch_tokens", found["micro_batch_size"],
        "--accumulation_steps", found["accumulation_steps"], "--output", "by_hand",
    )  # fmt: skip
    assert weights("tokens") == weights("by_hand") and losses("tokens") == losses("by_hand")


def test_texts_that_fit_are_the_same_to_the_bit():
    for flags in (["--bs", 16], ["--batch_tokens", 256, "--mixup", 1]):
        of_texts(*flags, "--output", f"plain{flags[0]}")
        of_texts(*flags, "--auto_batch", "--output", f"probed{flags[0]}")
        assert weights(f"plain{flags[0]}") == weights(f"probed{flags[0]}")
