"""The figures of a complete study, and the table of them."""

import statistics

from benchmarks.studies import markdown, paired
from benchmarks.study.others import CONTENDERS
from benchmarks.study.plan import Case, Plan, Results, epochs_to_target, final_runs, search


def summarize(
    cases: list[Case],
    plan: Plan,
    results: Results,
    speeds: dict[int, dict[str, list[float]]],
    samples: int,
) -> list[dict]:
    """One entry for each batch size. The first optimizer is the baseline: its mean accuracy at
    the full length is the target, and speeds are taken relative to it.

    Args:
        speeds: batch size -> label -> samples per second of each turn (see side_by_side).
        samples: in an epoch.
    """
    return [
        _batch([case for case in cases if case.batch == batch], plan, results, speed, samples)
        for batch, speed in speeds.items()
    ]


def _batch(cases: list[Case], plan: Plan, results: Results, speed, samples: int) -> dict:
    found = {case.optimizer.label: _case(case, plan, results) for case in cases}
    baseline = cases[0].optimizer.label
    target = found[baseline]["lengths"][-1]["mean"]
    epoch_seconds = samples / statistics.median(speed[baseline])
    for label, figures in found.items():
        # Turns are compared with their neighbours of the baseline: the machine's speed drifts.
        pairs = zip(speed[baseline], speed[label], strict=True)
        cost = statistics.median(base / own for base, own in pairs)
        figures["time_per_epoch_relative"] = cost
        figures["seconds_per_epoch"] = cost * epoch_seconds
        epochs, note = _reach(figures["lengths"], target)
        figures["epochs_to_target"], figures["target"] = epochs, note
        figures["seconds_to_target"] = epochs and epochs * cost * epoch_seconds
    return {
        "batch": cases[0].batch,
        "baseline": baseline,
        "target_accuracy": target,
        "samples_per_second": speed,
        "optimizers": found,
    }


def _case(case: Case, plan: Plan, results: Results) -> dict:
    tuning = search(case, plan, results)
    best = tuning.best(results)
    finals = final_runs(case, plan, best)
    lengths = []
    for epochs in plan.lengths:
        accuracies = [results[run].accuracy for run in finals if run.epochs == epochs]
        lost = accuracies.count(None)  # one run that diverged leaves no mean of all seeds
        lengths.append(
            {
                "epochs": epochs,
                "mean": None if lost else statistics.mean(accuracies),
                "min": None if lost else min(accuracies),
                "max": None if lost else max(accuracies),
                "accuracies": accuracies,
                "diverged": lost,
            }
        )
    return {
        "optimizer": case.optimizer.name,
        "settings": dict(case.optimizer.settings),
        "lr": best.lr,
        "weight_decay": best.weight_decay,
        "lr_at_edge": tuning.lr_at_edge,
        "decay_at_edge": tuning.decay_at_edge,
        "tuning_val_accuracy": results[best].accuracy,
        "lr_trials": _trials(tuning.lr_trials, results),
        "weight_decay_trials": _trials(tuning.decay_trials, results),
        "lengths": lengths,
    }


def _trials(runs, results: Results) -> list[dict]:
    return [
        {"lr": run.lr, "weight_decay": run.weight_decay, "val_accuracy": results[run].accuracy}
        for run in runs
    ]


def _reach(lengths: list[dict], target: float | None) -> tuple[float | None, str]:
    known = [length for length in lengths if length["mean"] is not None]
    if target is None or not known:
        return None, "no target" if target is None else "not reached"
    return epochs_to_target([k["epochs"] for k in known], [k["mean"] for k in known], target)


# ---- the table --------------------------------------------------------------------------------


def table(summary: dict) -> str:
    """Markdown: one table for each batch size, and what it takes to read it."""
    parts = [f"# {summary['title']}\n\n{summary['conditions']}\n"]
    for batch in summary["batches"]:
        parts.append(_batch_table(batch))
    return "\n".join(parts)


def _batch_table(batch: dict) -> str:
    optimizers, baseline = batch["optimizers"], batch["baseline"]
    lengths = [length["epochs"] for length in optimizers[baseline]["lengths"]]
    target = batch["target_accuracy"]
    goal = "no target" if target is None else f"{target:.2f} %"
    head = ["optimizer", "lr", "weight decay", *(f"{epochs:g} epochs" for epochs in lengths)]
    head += [f"epochs to {goal}", "s per epoch", f"time per epoch / {baseline}", f"s to {goal}"]
    rows = []
    for label, figures in optimizers.items():
        edge = "*" if figures["lr_at_edge"] else ""
        decay_edge = "*" if figures["decay_at_edge"] else ""
        row = [label, f"{figures['lr']:g}{edge}", f"{figures['weight_decay']:g}{decay_edge}"]
        row += [_accuracy(length) for length in figures["lengths"]]
        row += [_amount(figures, "epochs_to_target"), f"{figures['seconds_per_epoch']:.3g}"]
        row += [f"{figures['time_per_epoch_relative']:.2f}"]
        rows.append([*row, _amount(figures, "seconds_to_target")])
    text = f"## Batch {batch['batch']}\n\n{markdown(head, rows)}"
    if any(one["lr_at_edge"] or one["decay_at_edge"] for one in optimizers.values()):
        text += "\n\\* the highest or lowest value tried: a better one may lie beyond.\n"
    for name in dict.fromkeys(figures["optimizer"] for figures in optimizers.values()):
        if CONTENDERS[name].first_steps:
            text += f"\nNot in the seconds: {CONTENDERS[name].first_steps}.\n"
    return text + differences(batch)


def differences(batch: dict) -> str:
    """Accuracies minus those of the baseline with the same seed: means and 95 % intervals."""
    optimizers, baseline = batch["optimizers"], batch["baseline"]
    base = optimizers[baseline]
    if len(optimizers) < 2 or len(base["lengths"][0]["accuracies"]) < 2:
        return ""
    head = [f"minus {baseline}", *(f"{length['epochs']:g} epochs" for length in base["lengths"])]
    rows = [
        [label, *map(_difference, figures["lengths"], base["lengths"])]
        for label, figures in optimizers.items()
        if label != baseline
    ]
    return f"\n{markdown(head, rows)}"


def _difference(length: dict, base: dict) -> str:
    if length["diverged"] or base["diverged"]:
        return "diverged"
    found = paired(length["accuracies"], base["accuracies"])
    return f"{found['mean']:+.2f} ± {found['half']:.2f}"


def _accuracy(length: dict) -> str:
    if length["diverged"]:
        return f"{length['diverged']} of {len(length['accuracies'])} diverged"
    return f"{length['mean']:.2f} ({length['min']:.2f} to {length['max']:.2f})"


def _amount(figures: dict, key: str) -> str:
    if figures[key] is None:
        return figures["target"]
    return ("at most " if figures["target"] == "at most" else "") + f"{figures[key]:.3g}"
