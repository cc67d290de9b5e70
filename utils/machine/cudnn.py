"""How PyTorch uses cuDNN, which makes an execution plan for each new shape and caches it.

Convolutions (`search_plans`, `trial_plans`): benchmarking all plans of a shape takes seconds and
finds a faster one than cuDNN's heuristics. This pays off for training's full micro-batches, but not
for an epoch's smaller last one, for evaluation, or for the sizes that --auto_batch tries.

Attention (`prefer_flash_attention`): cuDNN's needs a plan for every new sequence length, and making
it takes longer than the attention itself. FlashAttention needs none.
"""

import contextlib
from collections.abc import Iterator

import torch


def search_plans(wanted: bool) -> None:
    """Sets whether convolutions of a new shape, backward passes included, benchmark all plans from
    now on. Shapes that already have a plan keep it, even one from cuDNN's heuristics."""
    torch.backends.cudnn.benchmark = wanted


@contextlib.contextmanager
def trial_plans() -> Iterator[None]:
    """A context in which convolutions use the plans of cuDNN's heuristics, without leaving them in
    the cache for training: PyTorch caches plans of deterministic convolutions separately."""
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before


def prefer_flash_attention() -> None:
    """Disables cuDNN's attention for `scaled_dot_product_attention`, and from PyTorch 2.15 on for
    `varlen_attn`; for earlier versions see `utils.models.transformer.WINDOWS`."""
    torch.backends.cuda.enable_cudnn_sdp(False)
