"""metrics.jsonl: whole lines only, whatever the disk does."""

import json
import math

import pytest
from small_disks import full_disk

from utils.reporting.metrics import MetricsLog, read_metrics


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_lines_are_json_objects(path):
    log = MetricsLog(path)
    log.write(step=1, split="train", loss=0.5, accuracy=None)
    log.write(step=2, split="tëst", loss=1e-300)
    log.close()
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == read_metrics(path)
    assert read_metrics(path) == [
        {"step": 1, "split": "train", "loss": 0.5, "accuracy": None},
        {"step": 2, "split": "tëst", "loss": 1e-300},
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_hold_becomes_null(path, value):
    log = MetricsLog(path)
    log.write(step=1, loss=value)
    assert path.read_text() == '{"step": 1, "loss": null}\n'


def test_cut_drops_what_came_after_a_position(path):
    log = MetricsLog(path)
    log.write(step=1)
    position = log.position()
    assert position == path.stat().st_size
    log.write(step=2)
    log.write(step=3)
    log.close()

    resumed = MetricsLog(path)
    resumed.cut(position)
    assert resumed.read() == [{"step": 1}]
    resumed.write(step=2, again=True)
    assert resumed.read() == [{"step": 1}, {"step": 2, "again": True}]
    resumed.cut(0)
    assert path.stat().st_size == resumed.position() == 0


def test_cut_removes_half_a_line_left_by_a_kill(path):
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    log = MetricsLog(path)
    log.cut(12)
    log.write(step=2)
    assert log.read() == [{"step": 1}, {"step": 2}]


def test_cut_beyond_the_end_changes_nothing(path):
    log = MetricsLog(path)
    log.write(step=1)
    log.cut(10_000)
    log.write(step=2)
    assert log.read() == [{"step": 1}, {"step": 2}]


def test_full_disk_delays_lines_and_loses_none(path):
    warnings = []
    log = MetricsLog(path, warn=warnings.append)
    log.write(step=1)
    with full_disk(20):  # room for half of the second line
        log.write(step=2)
        log.write(step=3)
        assert log.read() == [{"step": 1}]
    assert len(warnings) == 1 and "until there is room again" in warnings[0]
    log.write(step=4)
    assert [record["step"] for record in log.read()] == [1, 2, 3, 4]


def test_full_disk_at_a_checkpoint_leaves_no_half_line(path):
    log = MetricsLog(path, warn=lambda line: None)
    log.write(step=1)
    with full_disk(20):
        log.write(step=2)
        with pytest.raises(OSError):
            log.position()
        assert log.read() == [{"step": 1}]
    assert log.position() == path.stat().st_size
    assert [record["step"] for record in log.read()] == [1, 2]
