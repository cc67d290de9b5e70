"""benchmarks/gpu_kernels.py, as far as no GPU is needed."""

import pytest

pytest.importorskip("triton")

from benchmarks import gpu_kernels
from utils.fused.kernels import image_kernels


def test_a_form_is_the_file_with_other_constants(tmp_path):
    made = [gpu_kernels.kernels_of(form, tmp_path) for form in gpu_kernels.FORMS]
    found = [(m.TILE, m.STAGES.value, m.OPTIONS["num_warps"], m.PROGRAMS) for m in made]
    assert found == gpu_kernels.FORMS
    k = image_kernels
    in_use = k.TILE, k.STAGES.value, k.OPTIONS["num_warps"], k.PROGRAMS
    assert gpu_kernels.FORMS[0] == in_use
