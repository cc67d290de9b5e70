"""Steps whose loss or gradient is not finite have no effect, without a wait for the device.

The verdict stays on the device as a flag: the optimizer's kernels read it (`found_inf`),
BatchNorm's statistics are restored by selection, and the sums for the metrics leave the step out.
The host reads how many such steps there were, and the first of them, when it reads the metrics.
"""

import torch
from torch import Tensor, nn

from ..checkpoints.saver import Saver
from ..distributed.strategies.base import Strategy
from ..errors import UserError
from ..plural import counted
from ..reporting.console import Console
from .progress import LeftOut
from .steps import Steps

# --on_nonfinite skip: so many steps that were not applied stop the run. They are counted at log
# lines; if any step since the last log line was applied, the count starts again at 0.
BARREN_STEPS = 100
# fp16: with a loss scale below this, no scale makes the gradients finite.
SMALLEST_SCALE = 1e-3
# They change their buffers in place, as subclasses may not: the host need not look at each of them.
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
ALIGNMENT = 64  # elements; vectorised kernels need aligned memory


class Guard:
    """Takes back the buffers of steps that are not finite, and counts these steps.

    Args:
        model: its buffers are restored after a bad step. They are moved into one tensor per dtype,
            so that copying and selecting them takes two calls, not two per layer.
        strategy: of the model; brings all ranks to the same verdict.
    """

    def __init__(self, model: nn.Module, strategy: Strategy | None = None):
        self.strategy = strategy or Strategy(model)
        self.parameters = list(self.strategy.parameters.values())
        device = self.parameters[0].device
        self.model, self.flat = model, _flatten_buffers(model)
        self.before = [torch.empty_like(flat) for flat in self.flat]
        self.buffers: list[tuple[dict, str, Tensor]] = []  # see `start`
        self.left_out = torch.tensor(LeftOut(), dtype=torch.int64, device=device)

    def start(self) -> None:
        """To be called before the first step, when all guards of the model are made."""
        self.buffers = [
            (module._buffers, name, buffer)
            for module in self.model.modules()
            if type(module) not in BATCH_NORM
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        ]
        self.remember()

    @torch.no_grad()
    def collect_buffers(self) -> None:
        """After a backward pass. Of buffers that the model has assigned (`self.mean = ...`) instead
        of changed in place, copies the values into the tensors that the run knows, and puts these
        back. A buffer of another shape or type is left to the model."""
        for held, name, buffer in self.buffers:
            assigned = held.get(name)
            if assigned is buffer or assigned is None:
                continue
            if assigned.shape == buffer.shape and assigned.dtype == buffer.dtype:
                held[name] = buffer.copy_(assigned)

    def remember(self) -> None:
        """Copies the buffers; to be called after each step."""
        for before, flat in zip(self.before, self.flat, strict=True):
            before.copy_(flat)

    def gradient_norm(self) -> Tensor:
        """Global L2 norm of the gradient, (); infinite or NaN if any element is."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return self.strategy.norm(torch.nn.utils.get_total_norm(gradients))

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiplies all gradients; `factor` may be () on the device."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if isinstance(factor, Tensor):
            factor = factor.to(gradients[0].dtype)  # a GPU's kernel takes no other
        torch._foreach_mul_(gradients, factor)

    def agree(self, loss: Tensor) -> Tensor:
        """`Strategy.agree` on this rank's loss of the step, (), and on the model's buffers."""
        return self.strategy.agree(loss, [flat for flat in self.flat if flat.is_floating_point()])

    def judge(self, loss: Tensor, norm: Tensor, step: int | Tensor, scaled: bool) -> Tensor:
        """Returns whether this step is bad and must not be applied, () bool, and counts it if so.

        Args:
            step: its number; may be () int64 on the device.
            scaled: there is a loss scaler. In its search for the scale infinite gradients of a
                finite loss are normal, and are counted separately.
        """
        loss_bad = ~torch.isfinite(loss)
        bad = loss_bad | ~torch.isfinite(norm)
        fault = loss_bad if scaled else bad
        # Views of `left_out`, which is thus updated in place.
        count, first, by_scaler = self.left_out.unbind()
        first.copy_(torch.where(fault & (first < 0), step, first))
        count += fault
        by_scaler += bad & ~fault
        return bad

    @staticmethod
    def tell_scaler(scaler: torch.amp.GradScaler, optimizer, norm: Tensor) -> None:
        """GradScaler saw only this rank's gradients, with FSDP only some rows: replaces its verdict
        by that of `norm`, which all ranks share, so that all lower the scale or none. To be called
        between its `unscale_` and its `update`."""
        if not scaler.is_enabled():
            return
        for found_inf in scaler._found_inf_per_device(optimizer).values():
            found_inf.copy_(~torch.isfinite(norm))

    def take_back(self, bad: Tensor) -> None:
        """Restores the buffers if `bad`."""
        for before, flat in zip(self.before, self.flat, strict=True):
            torch.where(bad, before, flat, out=flat)


class OnNonFinite:
    """Reacts to steps that were not applied: stops the run, or reports them.

    Args:
        policy: "stop" or "skip".
        console: where they are reported.
        saver: the error names its last checkpoint.
        is_fp16: the run computes in fp16, whose range is small.
    """

    def __init__(self, policy: str, console: Console, saver: Saver, is_fp16: bool):
        self.policy, self.console, self.saver, self.is_fp16 = policy, console, saver, is_fp16
        self._barren_steps = 0

    def react(self, steps: Steps, before: LeftOut, applied: bool) -> None:
        """Called when the host reads the metrics.

        Args:
            steps: whose progress says what was left out by now.
            before: what was left out when the metrics were read last.
            applied: some steps were applied since then.

        Raises:
            UserError: the run is to stop.
        """
        step, left_out, scale = steps.progress.step, steps.progress.left_out, steps.loss_scale
        if scale is not None and scale < SMALLEST_SCALE:
            raise UserError(
                f"step {step}: no loss scale keeps the fp16 gradients finite; use "
                "--precision bf16 or fp32, or a lower --lr"
            )
        new = left_out.steps - before.steps
        if not new:
            return
        self._barren_steps = 0 if applied else self._barren_steps + new
        if self.policy == "skip" and self._barren_steps < BARREN_STEPS:
            self.console.say(
                f"{steps.left_out_by}{counted(new, 'step')} with a loss or gradient that is not "
                "finite: skipped"
            )
            return
        # `first` is that of the whole run, and not of interest where steps may be left out.
        is_first = before.steps == 0 and self.policy == "stop"
        where = f"step {left_out.first + 1}" if is_first else f"at step {step}"
        self.saver.wait()
        saved = self.saver.store.steps()
        last = f"; the last checkpoint is of step {saved[-1]}" if saved else ""
        group = steps.optimizer.param_groups[0]
        lr = group["base_lr"] / group.get("lr_scale", 1.0)
        if self.policy == "skip":
            what = f"the last {self._barren_steps} steps had a loss or gradient that is not finite"
            remedy = "bad data"
        else:
            what = "the loss or its gradient is not finite; the step was not applied"
            remedy = "bad data; --on_nonfinite skip leaves such steps out"
        fp16 = "fp16 (take --precision bf16), " if self.is_fp16 else ""
        raise UserError(
            f"{where}: {steps.left_out_by}{what}. Likely causes: a learning rate that is too high "
            f"({lr:g}; take a lower --lr, a longer --warmup_epochs, or --clip 1 or less), "
            f"{fp16}{remedy}{last}"
        )


@torch.no_grad()
def _flatten_buffers(model: nn.Module) -> list[Tensor]:
    """Moves the buffers into one tensor per dtype, of which they become views."""
    places: dict[Tensor, list[tuple[nn.Module, str]]] = {}  # modules may share a buffer
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            places.setdefault(buffer, []).append((module, name))
    groups: dict[torch.dtype, list[Tensor]] = {}
    for buffer in places:
        groups.setdefault(buffer.dtype, []).append(buffer)
    flats = []
    for members in groups.values():
        starts = [0]  # multiples of ALIGNMENT
        for buffer in members:
            starts.append(starts[-1] + -(-buffer.numel() // ALIGNMENT) * ALIGNMENT)
        flat = members[0].new_zeros(starts[-1])
        for buffer, start in zip(members, starts, strict=False):
            piece = flat[start : start + buffer.numel()].view(buffer.shape)
            # .data: with a version counter of its own. Otherwise a BatchNorm that counts its batch
            # would seem to have changed an index that another module's backward pass needs.
            view = piece.copy_(buffer).data
            for module, name in places[buffer]:
                module._buffers[name] = view
        flats.append(flat)
    return flats
