"""Optimizers of pytorch_optimizer that the study compares with those of the toolkit.

`pip install pytorch_optimizer` brings them; nothing but the study needs it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from utils.errors import UserError
from utils.optim.factory import parameter_groups
from utils.optim.table import OPTIMIZERS


@dataclass(frozen=True)
class Other:
    """A class of pytorch_optimizer.

    Attributes:
        name: of the class.
        lr, weight_decay: where its search begins, at batches of 128.
        first_steps: a remark on the time of its first steps, where they take longer.
    """

    name: str
    lr: float
    weight_decay: float
    first_steps: str = ""

    def make(self, model: nn.Module, lr: float, weight_decay: float, **settings) -> Optimizer:
        try:
            import pytorch_optimizer
        except ImportError:
            raise UserError(f"{self.name} needs: pip install pytorch_optimizer") from None
        groups = parameter_groups(model, weight_decay)
        optimizer = getattr(pytorch_optimizer, self.name)(groups, lr=lr, **settings)
        for group in optimizer.param_groups:
            group["base_lr"] = lr
        return optimizer


OTHERS = {
    # Vyas et al., "SOAP" (2024), arXiv:2409.11321, with its authors' rate and decay.
    "soap": Other("SOAP", 3e-3, 0.01),
}

CONTENDERS = {**OPTIMIZERS, **OTHERS}
