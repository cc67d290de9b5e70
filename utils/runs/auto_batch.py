"""`--auto_batch`: the largest micro-batches that fit, with the optimizer step unchanged."""

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ..distributed.strategies.base import Strategy
from ..errors import UserError
from ..machine.host_memory import available_memory, hand_back_freed_memory
from ..settings.config import PROBED
from ..tasks.mixing import build_meta
from ..tasks.task import Task
from ..training.batch_probe import Found, largest_that_fits
from ..training.controls import Freeze
from ..training.objective import Classification, Precision
from .advice import memory_advice
from .optimization import build_optimizer_of
from .run import Run


def choose_micro_batch(
    run: Run, model, objective: Classification, freeze: Freeze | None, task: Task
) -> None:
    """Cuts the optimizer step of the settings into the largest micro-batches that fit, changes the
    settings accordingly, and prints a line.

    Args:
        model: on its device, fused, not yet spread by a strategy.
        objective: of that model.
        freeze: which part of it trains in which epoch.
        task: whose loaders are changed.

    Raises:
        UserError: nothing fits; on all ranks.
    """
    settings, loader = run.settings, task.train
    model.train()
    if freeze is not None and freeze.until is None:
        freeze.apply(0)
    processes = run.place.local_world_size if run.place else 1
    asked_size, asked_block = loader.micro_batch, getattr(loader.mixing, "block", None)
    with run.signals.held():  # imports PyTorch's compiler, where C++ calls Python
        found = largest_that_fits(
            model,
            loader,
            passes=_passes(settings, run.precision, model, objective, len(task.card.classes)),
            build_optimizer=lambda: build_optimizer_of(settings, run.precision, model, settings.lr),
            averaged=settings.ema_decay is not None,
            available=_available(settings, run.device, processes),
            exchange=run.exchange,
        )
    if found.size is None:
        raise UserError(_nothing_fits(settings, run.device, found))
    if min(asked_size, found.size) >= loader.rank_batch:  # the step was one micro-batch already
        loader.cut(asked_size)
    # A resumed run takes the result from the settings, without probing.
    run.change_settings(_changes(settings, loader, run.exchange.size), PROBED)
    task.resize_evaluation(settings.batch_size, run.exchange.size)
    _print_result(run, loader, found, asked_size, asked_block, model)


def _passes(settings, precision: Precision, model, objective: Classification, classes: int):
    """The passes of the trainer's step, one after the other, for `largest_that_fits`."""
    strategy, lr = Strategy(model), settings.lr

    def passes(batch):
        # A new one each time, as a failed pass leaves it incomplete.
        meta = build_meta(settings, classes, strategy, precision, balance=objective.balance)
        mix_plan = batch.mix_plan if meta is None else meta.choose(batch, lr)
        yield
        loss, _ = objective(batch.inputs, batch.targets, mix_plan)
        (loss / batch.step_samples).backward()
        yield
        if meta is not None:
            meta.update(torch.ones((), dtype=torch.bool, device=precision.device), lr)
        yield

    return passes


def _available(settings, device: torch.device, processes: int) -> float:
    """Bytes that this process may use on its device. GPU: what is free or reserved by PyTorch; half
    of that if CUDA graphs were asked for, which keep the memory of a step. CPU: this process's part
    of the available memory, which the `processes` of this machine share."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        whole = float(free + torch.cuda.memory_reserved(device))
        return whole / 2 if settings.cuda_graphs == "on" else whole
    hand_back_freed_memory()  # freed after loading the data; else it counts as used
    return available_memory() / processes


def _changes(settings, loader, ranks: int) -> dict:
    """What is different now in the settings, {name: value}."""
    size, count = loader.micro_batch, loader.accumulation
    changed = {loader.batch_flag.removeprefix("--"): size}
    if settings.global_batch is None:
        changed["accumulation_steps"] = count
        if settings.batch_tokens is None and size * count * ranks != loader.step_size:
            changed |= {"accumulation_steps": 1, "global_batch": loader.step_size}
    block = getattr(loader.mixing, "block", None)
    if block is not None and block != (
        settings.mixup_block or changed.get("batch_size", settings.batch_size)
    ):
        changed["mixup_block"] = block
    return changed


def _print_result(
    run: Run, loader, found: Found, asked_size: int, asked_block: int | None, model
) -> None:
    ranks, count = run.exchange.size, loader.accumulation
    size, asked = min(loader.micro_batch, loader.rank_batch), min(asked_size, loader.rank_batch)
    step, unit = loader.step_size, "samples"
    if run.settings.batch_tokens is not None:
        step, unit = loader.rank_batch * ranks, "tokens"
    each = " in each process" if ranks > 1 else ""
    line = (
        f"auto_batch: {step:,} {unit} a step as {count} micro-batch{'es' * (count > 1)} of "
        f"{size:,}{each} ({size:,} fit in {_gb(found.needed)} of {_gb(found.available)} GB)"
    )
    norms = any(isinstance(module, _BatchNorm) and module.training for module in model.modules())
    if norms and size != asked:
        line += f"; BatchNorm's statistics are computed over {size:,} samples instead of {asked:,}"
    block = getattr(loader.mixing, "block", None)
    if block != asked_block:
        line += f"; samples are mixed within blocks of {block} instead of {asked_block}"
    run.console.say(line)


def _nothing_fits(settings, device: torch.device, found: Found) -> str:
    ways = "take a smaller model or smaller inputs, or --precision bf16"
    ways += "".join(f", or: {advice}" for advice in memory_advice(settings, device).values())
    return (
        f"--auto_batch: not even the smallest micro-batch fits into the "
        f"{_gb(found.available)} GB that there are: {ways}"
    )


def _gb(number: float) -> str:
    return f"{number / 1e9:.3g}"
