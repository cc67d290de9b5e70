"""The line of a process that trains alone on fewer GPUs than its user may expect."""

import pytest

from utils.runs.run import gpu_note

ONE_OF = "note: this is one of {} GPUs; bash run_distributed.sh vit_test.py ... uses all"


@pytest.mark.parametrize(
    ("gpus", "visible", "said"),
    [
        (4, None, ONE_OF.format(4)),
        (2, "0,1", ONE_OF.format(2)),
        (0, "7", "note: CUDA_VISIBLE_DEVICES=7 names no GPU"),
        # A machine without a GPU, GPUs that are hidden, and the only one.
        (0, None, ""),
        (0, "", ""),
        (1, None, ""),
        (1, "3", ""),
    ],
)
def test_gpus_that_are_not_used_are_told(monkeypatch, gpus, visible, said):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_note(gpus, "vit_test.py") == said
