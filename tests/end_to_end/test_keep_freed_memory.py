"""--keep_freed_memory from the command line, and the note on --fused memory on a CPU."""

import pytest

from resnet50_test import Settings
from utils.machine import host_memory
from utils.settings.config import parse

pytestmark = pytest.mark.usefixtures("own_folder")
TINY = [
    "--dataset", "shapes", "--subset", "32", "--depth", "18", "--width", "4", "--device", "cpu",
    "--threads", "1", "--bs", "16", "--max_steps", "1",
]  # fmt: skip


def test_it_is_on_by_default_and_can_be_switched_off(works, monkeypatch):
    told = []
    monkeypatch.setattr(host_memory, "keep_freed_memory", lambda: told.append("kept"))
    works(*TINY, "--no_keep_freed_memory", "--output", "without")
    assert told == []
    works(*TINY, "--output", "with")
    assert told == ["kept"]


def test_it_has_no_effect_on_a_gpu():
    said = []
    parse(Settings, [*TINY, "--device", "cuda", "--no_keep_freed_memory"], "", said.append)
    assert [line.split(":")[1] for line in said] == [" --keep_freed_memory has no effect"]


def test_a_note_says_that_fused_memory_is_for_gpus(works):
    note = "note: --fused memory is for GPUs"
    assert note in works(*TINY, "--fused", "memory", "--output", "run")
    assert note not in works("--resume", "run", "--eval_only")
    assert note not in works(*TINY, "--fused", "speed", "--output", "other")
