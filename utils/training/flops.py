"""How many operations a model needs for a sample, and how many its GPU could do.

Model FLOPs utilization as in Chowdhery et al., "PaLM" (2022), arXiv:2204.02311, appendix B: the
operations that the model needs in forward and backward pass, not those that are spent on it (as on
recomputed activations, mixing or the optimizer), over those that the GPU could do in this time.
"""

import re

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

# A backward pass computes two gradients for each product of the forward pass.
PASSES = 3
# Operations per second of dense matrix products in half precision with float32 sums, by NVIDIA's
# data sheets (where these give the figure for sparse matrices: half of it). By whole words of the
# name that PyTorch gives the GPU, as a regular expression; the first that fits counts.
PEAKS = (
    ("B200", 2250e12),  # Blackwell B200 data sheet (HGX): 36 PFLOP/s sparse for 8
    ("GH200", 989e12),  # GH200 data sheet
    ("H200 NVL", 835e12),  # H200 data sheet
    ("H200", 989e12),
    ("H100 PCIe", 756e12),  # H100 data sheet
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A100", 312e12),  # A100 data sheet
    ("A30", 165e12),  # A30 data sheet
    ("A40", 149.7e12),  # A40 data sheet
    ("A10G", None),  # not the A10; NVIDIA publishes no figure
    ("A10", 125e12),  # A10 data sheet
    ("L40S", 362e12),  # L40S data sheet
    ("L40", 181e12),  # L40 data sheet
    ("L4", 121e12),  # L4 data sheet
    ("RTX 5090", 209.5e12),  # Blackwell architecture white paper, with float32 sums
    ("RTX 4090", 165.2e12),  # Ada architecture white paper, with float32 sums
    ("RTX 3090", 71e12),  # GA102 architecture white paper, with float32 sums
    (r"V100-SXM\d", 125e12),  # V100 data sheet
    ("V100-PCIE", 112e12),
    ("T4", 65e12),  # T4 data sheet
)


def peak_of(name: str, precision: str) -> float | None:
    """Operations per second of a GPU. None where it is not known: for float32, which is computed in
    several ways, and for a GPU that PEAKS lacks.

    Args:
        name: as torch.cuda.get_device_name has it.
        precision: of the matrix products: "bf16", "fp16" or "fp32".
    """
    if precision == "fp32" or "Laptop" in name:  # a laptop's has the same name and another power
        return None
    return next((peak for part, peak in PEAKS if re.search(rf"\b{part}\b", name)), None)


def forward_flops(model: nn.Module, sample: Tensor) -> int | None:
    """Operations of a forward pass, a product and a sum counting as two; of matrix products,
    convolutions and attention alone. Nothing is computed. None if the model, which is on the CPU,
    cannot be traced."""
    training = model.training
    model.eval()  # without dropout, so that no random number is drawn
    try:
        # Attention as matrix products, since not all fused kinds are counted.
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, sdpa_kernel(SDPBackend.MATH):
            tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            tensors = {name: fake.from_tensor(tensor) for name, tensor in tensors.items()}
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                functional_call(model, tensors, (fake.from_tensor(sample),))
        return counter.get_total_flops()
    except Exception:  # a model of the user's or of timm may do anything
        return None
    finally:
        model.train(training)
