"""--strategy local, as a user runs it: each entry trains workers, its run changes the strategy when
it is resumed, and can be used."""

import json
from pathlib import Path

import pytest

import resnet50_test
import transformer_test
import vit_test

pytestmark = pytest.mark.usefixtures("own_folder")

COMMON = ["--device", "cpu", "--threads", "1", "--precision", "fp32", "--max_steps", "6"]
PICTURES = ["--dataset", "shapes", "--subset", "64", "--bs", "4", "--epochs", "2", *COMMON]
RUNS = {
    "resnet": (
        resnet50_test,
        [*PICTURES, "--depth", "18", "--width", "2", "--bn_batches", "3", "--ngd", "--mixup",
         "0.2", "--sync_rule", "post_local", "--sync_from", "0.2"],
    ),
    "vit": (
        vit_test,
        [*PICTURES, "--layers", "1", "--dim", "16", "--heads", "2", "--ffn", "32", "--patch_size",
         "8", "--sync_rule", "qsr", "--sync_base", "2", "--ema_decay", "0.9", "--clip", "1"],
    ),
    "text": (
        transformer_test,
        ["--dataset", "headlines", "--subset", "64", "--layers", "1", "--dim", "16", "--heads", "2",
         "--ffn", "16", "--max_len", "16", "--vocab_size", "300", "--bs", "4", "--epochs", "2",
         "--optimizer", "adamw", "--sync_rule", "diloco", "--sync_base", "4", "--optimizer_average",
         "--cache_dir", "cache", *COMMON],
    ),
}  # fmt: skip
AVERAGINGS = {"resnet": 3, "vit": 3, "text": 2}  # of 6 steps


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("resnet", marks=pytest.mark.slow),
        pytest.param("vit", marks=pytest.mark.slow),
        "text",
    ],
)
def test_each_entry_trains_workers(name, capfd):
    entry, flags = RUNS[name]

    def main(*arguments) -> dict:
        assert entry.main(list(map(str, arguments))) == 0, capfd.readouterr().err
        return json.loads(Path("run/summary.json").read_text())

    local = ["--strategy", "local", "--local_workers", 2]
    summary = main(*flags, *local, "--output", "run")
    assert (summary["strategy"], summary["local_workers"]) == ("local", 2)
    assert summary["averagings"] == AVERAGINGS[name]
    said = capfd.readouterr().out
    assert f"{AVERAGINGS[name]} averagings in 6 steps" in said and "of DDP's bytes" in said
    accuracy = summary["test_accuracy"]
    entry.main(["--resume", "run", "--eval_only"])
    assert f"accuracy {accuracy:.2f} %" in capfd.readouterr().out
    # From here on one model, with steps of as many samples; then workers again.
    whole = main("--resume", "run", "--strategy", "ddp", "--max_steps", 8)
    assert (whole["strategy"], whole["steps"], whole["global_batch_size"]) == ("single", 8, 8)
    again = main("--resume", "run", *local, "--max_steps", 10)
    assert (again["strategy"], again["steps"]) == ("local", 10)
    assert "is of one model: 2 workers start from it" in capfd.readouterr().out
