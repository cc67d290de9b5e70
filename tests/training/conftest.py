import pytest
import torch
from fake_cuda import fake_cuda

from utils.machine.backends import prefer_flash_attention


@pytest.fixture
def gpu():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    prefer_flash_attention()  # as every run does
    with fake_cuda() as gpu:
        yield gpu
    torch.backends.cuda.enable_cudnn_sdp(before)
