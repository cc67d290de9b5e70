"""How PyTorch uses cuDNN, which makes a plan for every new shape and keeps it.

Convolutions (`search_plans`, `trial_plans`): to try all plans of a shape takes seconds and finds a
faster one than cuDNN would choose unasked. That pays for the whole micro-batches of training, and
neither for the smaller last one of an epoch, nor for evaluation, nor for the sizes that
--auto_batch tries.

Attention (`prefer_flash_attention`): that of cuDNN needs a plan for every new length of the texts,
which takes longer than the attention itself. FlashAttention needs none.
"""

import contextlib
from collections.abc import Iterator

import torch


def search_plans(wanted: bool) -> None:
    """From here on, whether convolutions of a new shape try all plans, in backward passes too. A
    shape keeps its plan: one that cuDNN has chosen unasked is not searched for later."""
    torch.backends.cudnn.benchmark = wanted


@contextlib.contextmanager
def trial_plans() -> Iterator[None]:
    """Within it convolutions take the plans that cuDNN chooses unasked, and training does not find
    them later: PyTorch keeps those of deterministic convolutions apart from the others."""
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before


def prefer_flash_attention() -> None:
    """`scaled_dot_product_attention` leaves cuDNN out, and from PyTorch 2.15 on `varlen_attn` does,
    too; for earlier versions see `utils.models.transformer.WINDOWS`."""
    torch.backends.cuda.enable_cudnn_sdp(False)
