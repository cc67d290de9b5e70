"""Flags that would help where a phase of an epoch takes too much time, or memory is short."""

from ..machine.backends import is_faster_in_bf16
from ..optim.table import OPTIMIZERS
from ..training.objective import Precision


def phase_advice(settings, precision: Precision, loader) -> dict[str, str]:
    """{phase of a step: advice}, without what the settings already have; see training/log.py."""
    device = precision.device
    advice = {
        "optimizer": f"a larger {loader.batch_flag}, or --accumulation_steps 4, makes fewer "
        "optimizer steps",
        "checkpoint": f"save less often: a longer --save_every than {settings.save_every}",
    }
    if 0 < 2 * settings.eval_every < settings.epochs:
        advice["evaluation"] = f"evaluate less often by --eval_every {2 * settings.eval_every}"
    optimizer = OPTIMIZERS[settings.optimizer]
    if cheaper := optimizer.advice(**optimizer.values_of(settings)):
        advice["optimizer"] += f"; {cheaper}"
    if settings.mixup == "meta" and settings.meta_form == "policy":
        advice["optimizer"] += (
            f"; --meta_every {2 * settings.meta_every} updates the policy of mixing less often"
        )
    if settings.reads_in_workers and loader.features is None:
        advice["data"] = f"read with more processes: --workers {2 * loader.workers or 4}"
    slower = device.type == "cpu" and not settings.bf16_helps_cpus
    fixed = settings.engine == "ort"  # which computes in float32 only
    if precision.name == "fp32" and is_faster_in_bf16(device) and not slower and not fixed:
        advice["forward_backward"] = "this machine may be faster with --precision bf16"
    elif device.type == "cuda" and not _has_or_excludes_compile(settings):
        advice["forward_backward"] = "--compile may shorten it"
    return advice


def memory_advice(settings, device) -> dict[str, str]:
    """{"memory": what else may help where it has run out}."""
    if device.type == "cpu":  # recomputing saves little, as the heap is fragmented
        return {}
    if settings.fused == "memory" or settings.compile or settings.freeze_backbone:
        return {}
    if settings.mixup == "meta" and settings.meta_form == "sample":  # --fused is left out there
        return {}
    return {"memory": "--fused memory takes a third to a half less memory for each sample"}


def _has_or_excludes_compile(settings) -> bool:
    """Whether --compile is given, or a flag that excludes it."""
    return settings.compile or settings.cuda_graphs == "on" or settings.fused != "none"
