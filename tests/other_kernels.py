#!/usr/bin/env python3
"""Runs the numerical tests with the kernels that PyTorch and oneDNN take on other CPUs.

    python tests/other_kernels.py              under two limits below this CPU's own
    python tests/other_kernels.py --all        under every limit, one after the other
    python tests/other_kernels.py -- tests     these tests instead

A limit above what the CPU has changes nothing, so what was really used is printed.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Tests of processes and of what they send, whose arithmetic other tests cover, and of fake tensors,
# which have none.
LEFT_OUT = ("distributed/test_rank_faults", "distributed/test_node_faults", "distributed/test_soak")
LEFT_OUT += ("distributed/test_exchange", "distributed/test_counts")
LEFT_OUT += ("training/test_fake_cuda", "training/test_fake_device", "optim/ngd/test_ngd_launches")
NUMERICAL = ["tests/fused", "tests/optim", "tests/training", "tests/distributed"]
NUMERICAL += [f"--ignore=tests/{name}.py" for name in LEFT_OUT]
ATEN, ONEDNN = "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"
PAIRS = [{ATEN: "default", ONEDNN: "AVX2"}, {ATEN: "avx2", ONEDNN: "AVX512_CORE"}]
EVERY = [{ATEN: value} for value in ("default", "avx2")]
EVERY += [{ONEDNN: value} for value in ("AVX2", "AVX512_CORE", "AVX512_CORE_BF16")]
# A convolution, for which oneDNN prints its instruction set.
PROBE = """
import torch
print("kernels of PyTorch:", torch.backends.cpu.get_cpu_capability())
torch.nn.functional.conv2d(torch.ones(16, 8, 8, 8), torch.ones(8, 8, 3, 3).requires_grad_())
"""


def used(limits: dict[str, str]) -> str:
    """The instruction sets that PyTorch and oneDNN use under these limits."""
    text = subprocess.run(
        [sys.executable, "-c", PROBE], env=os.environ | limits | {"ONEDNN_VERBOSE": "1"},
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    ours = re.search("kernels of PyTorch: (.*)", text)
    onednn = re.search(r"cpu,isa:([^,\n]*)", text)
    return f"PyTorch {ours[1]}, oneDNN {onednn[1] if onednn else 'none'}"


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--all", action="store_true", help="under every limit, one at a time")
    words.add_argument("tests", nargs="*", default=NUMERICAL, help="what pytest is given")
    given = words.parse_args()
    done, failed = {(own := used({})): "the CPU's own"}, []
    print(f"the CPU's own: {own}", flush=True)
    for number, limits in enumerate(EVERY if given.all else PAIRS):
        name, kernels = " ".join(f"{k}={v}" for k, v in limits.items()), used(limits)
        print(f"{name}: {kernels}", flush=True)
        if kernels in done:
            print(f"  left out, the same as {done[kernels]}", flush=True)
            continue
        done[kernels] = name
        pytest = [sys.executable, "-m", "pytest", "-n", "auto", "--dist", "loadfile"]
        # Processes only add what the first limit has seen.
        once = set() if given.all or number == 0 else {"tests/distributed"}
        tests = [path for path in given.tests if path not in once]
        code = subprocess.run(
            [*pytest, "-m", "not slow", *tests], cwd=ROOT, env=os.environ | limits
        ).returncode
        failed += [name] if code else []
    for name in failed:
        print(f"failed under {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
