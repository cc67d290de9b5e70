"""How many kernels a pass of fused blocks launches on a GPU, counted on a fake one."""

import pytest
import torch
from fake_cuda import CUDA, fake_cuda
from launches import Launches

from utils.fused import fuse
from utils.models.resnet import ResNet

# Where a test walks through the graph (fake_backward.py), gradients are copied; PyTorch's engine
# hands them on.
COPIES = {"new_empty_strided", "copy_"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.filterwarnings("ignore")  # PyTorch's own, of fake tensors
def test_launches_of_a_forward_and_backward_pass():
    """A convolution's backward pass, which launches two kernels or more, counts as one."""
    with fake_cuda() as gpu:
        model = fuse(ResNet(50, 10), "speed").to(CUDA, memory_format=torch.channels_last)
        x = torch.empty(128, 3, 32, 32, device=CUDA).to(memory_format=torch.channels_last)
        with Launches() as launches:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).float().sum()
            loss.backward()
        kernels = gpu.launches.total()
    counts = {name: count for name, count in launches.counts.items() if name not in COPIES}
    assert counts["_foreach_copy_"] == 1 + 16 + 1  # weights; gradients of a block or the stem
    assert counts["_to_copy"] < 10
    assert sum(counts.values()) + kernels <= 375
