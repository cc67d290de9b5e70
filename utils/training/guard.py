"""A step whose loss or gradient is not finite leaves no trace, and costs no wait.

The verdict stays on the device as a flag: the optimizer's kernels read it there (`found_inf`),
BatchNorm's statistics are taken back by selection, and the sums of the metrics leave the step out.
The host reads how many there were, and when, where it reads the metrics anyway.
"""

import torch
from torch import Tensor, nn

from utils.checkpoints.saver import Saver
from utils.distributed.strategies.base import Strategy
from utils.errors import UserError
from utils.reporting.console import Console
from utils.training.progress import LeftOut

# --on_nonfinite skip: after so many steps on end that could not be applied, the run is stopped.
BARREN_STEPS = 100
# fp16: a loss scale below this means that no scale makes the gradients finite.
SMALLEST_SCALE = 1e-3
ALIGNMENT = 64  # elements; vectorised kernels want memory that starts on a round address


class Guard:
    """Args:
    model: whose buffers are put back; they are moved into one piece of memory for each dtype,
        so that copying and selecting them takes two calls, not two for each layer.
    strategy: the parameters, and the other ranks, which must come to the same verdict.
    """

    def __init__(self, model: nn.Module, strategy: Strategy | None = None):
        self.strategy = strategy or Strategy.of(model)
        self.parameters = list(self.strategy.parameters.values())
        device = self.parameters[0].device
        self.flat = _flatten_buffers(model)
        self.before = [torch.empty_like(flat) for flat in self.flat]
        self.left_out = torch.tensor(LeftOut(), dtype=torch.int64, device=device)

    def remember(self) -> None:
        """Before the first step, and after each."""
        for before, flat in zip(self.before, self.flat, strict=True):
            before.copy_(flat)

    def gradient_norm(self) -> Tensor:
        """Global L2 norm of the gradient, (); infinite or NaN where any of it is."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return self.strategy.norm(torch.nn.utils.get_total_norm(gradients))

    def agree(self, loss: Tensor) -> Tensor:
        """The loss of a step over all ranks, (), from that of this one; the model's buffers become
        what the strategy makes of those of all ranks."""
        return self.strategy.agree(loss, [flat for flat in self.flat if flat.is_floating_point()])

    def judge(self, loss: Tensor, norm: Tensor, step: int | Tensor, scaled: bool) -> Tensor:
        """() bool: leave this step out. With a loss scaler (`scaled`) an infinite gradient of a
        finite loss is its ordinary way to find the scale, and is counted apart. `step` may be
        () int64 on the device."""
        loss_bad = ~torch.isfinite(loss)
        bad = loss_bad | ~torch.isfinite(norm)
        fault = loss_bad if scaled else bad
        count, first, by_scaler = self.left_out.unbind()
        first.copy_(torch.where(fault & (first < 0), step, first))
        count += fault
        by_scaler += bad & ~fault
        return bad

    def take_back(self, bad: Tensor) -> None:
        """Puts the buffers back where `bad`."""
        for before, flat in zip(self.before, self.flat, strict=True):
            torch.where(bad, before, flat, out=flat)


class OnNonFinite:
    """What is done about steps that were left out: the run is stopped, or goes on without them.

    Args:
        policy: "stop" or "skip".
        console, saver: where it is said; whose last checkpoint is named.
    """

    def __init__(self, policy: str, console: Console, saver: Saver):
        self.policy, self.console, self.saver = policy, console, saver
        self._barren_steps = 0

    def check_scale(self, scaler: torch.amp.GradScaler, step: int) -> None:
        """Raises UserError where fp16 has come to its end."""
        if scaler.is_enabled() and scaler.get_scale() < SMALLEST_SCALE:
            raise UserError(
                f"step {step}: no loss scale keeps the fp16 gradients finite; use "
                "--precision bf16 or fp32, or a lower --lr"
            )

    def judge(self, new: int, first: int, others: bool, optimizer) -> None:
        """Told where the host reads the metrics that `new` steps were left out since the last
        time, the `first` ever, and whether `others` were applied. Raises UserError."""
        self._barren_steps = 0 if others else self._barren_steps + new
        if self.policy == "skip" and self._barren_steps < BARREN_STEPS:
            self.console.say(f"{new} step(s) with a loss or gradient that is not finite: skipped")
            return
        self.saver.wait()
        saved = self.saver.store.steps()
        last = f"; the last checkpoint is of step {saved[-1]}" if saved else ""
        lr = optimizer.param_groups[0]["base_lr"]
        raise UserError(
            f"step {first + 1}: the loss or its gradient is not finite; the step was not applied. "
            f"Likely causes: a learning rate that is too high (--lr {lr:g}: lower it, add "
            "--warmup_epochs or --clip 1), fp16 (take --precision bf16), bad data; "
            f"--on_nonfinite skip leaves such steps out{last}"
        )


@torch.no_grad()
def _flatten_buffers(model: nn.Module) -> list[Tensor]:
    """Moves the buffers into one tensor for each dtype, of which they become views."""
    groups: dict[torch.dtype, list[tuple[nn.Module, str, Tensor]]] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            groups.setdefault(buffer.dtype, []).append((module, name, buffer))
    flats = []
    for members in groups.values():
        starts = [0]  # each piece on a border of ALIGNMENT elements, as it was by itself
        for _, _, buffer in members:
            starts.append(starts[-1] + -(-buffer.numel() // ALIGNMENT) * ALIGNMENT)
        flat = members[0][2].new_zeros(starts[-1])
        for (module, name, buffer), start in zip(members, starts, strict=False):
            piece = flat[start : start + buffer.numel()].view(buffer.shape)
            module._buffers[name] = piece.copy_(buffer)
        flats.append(flat)
    return flats
