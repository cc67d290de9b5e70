"""From which checkpoint a run goes on, or takes its weights, and what has to be as before."""

import json
from collections.abc import Callable
from pathlib import Path

from ..checkpoints.checkpoint import (
    STATE,
    Checkpoint,
    Checkpoints,
    DamagedCheckpoint,
    read_checkpoint,
)
from ..errors import UserError
from ..exchange import Exchange
from ..plural import counted
from ..training.trainer import TrainingPlan
from ..user_files import contents
from .run import Run, same_folder


def load_checkpoint(run: Run) -> Checkpoint | None:
    """The verified checkpoint to resume from, or None at the start of a run."""
    source, settings = run.resumed_folder(), run.settings
    if source is None:
        return None
    store = Checkpoints(source / "checkpoints", warn=run.console.say)
    path = Path(str(settings.resume))
    if path.parent.name == "checkpoints":
        newest = store.path(max(store.steps(), default=0))
        if (
            path.name != newest.name
            and run.folder is not None
            and same_folder(source, run.folder.path)
        ):
            raise UserError(
                f"--resume {path} is not the newest checkpoint of its run: add --output to go "
                f"on from it in a new folder, or --resume {source} to go on from the newest"
            )
        try:
            loaded = read_checkpoint(path)
        except DamagedCheckpoint as error:
            raise UserError(f"--resume {path} is damaged ({error}): try {source}") from None
    else:
        loaded = store.load() if settings.action.trains else store.model(settings.use)
    steps = run.exchange.gather_json(loaded and loaded.step)
    if len(set(steps)) > 1:
        raise UserError(
            f"--resume {source}: not all processes see the same checkpoints (steps {steps}); "
            "the folder must be on a file system that all machines share"
        )
    if loaded is None:
        if not settings.action.trains:
            raise UserError(f"--{settings.action.name}: {source} has no checkpoint yet")
        run.console.say(f"{source} has no checkpoint yet: the run starts from the beginning")
        return None
    for name, now in run.numerical_environment().items():
        saved = loaded.run_info.get(name, now)
        if saved != now and settings.action.trains:
            run.console.say(
                f"note: {name} is {now} now and was {saved} before: the result will "
                "not be the same to the bit"
            )
    if settings.action.trains:
        saved_files = loaded.run_info.get("own_files", {})
        for place, content in contents(vars(settings)).items():
            if saved_files.get(place, content) != content:
                run.console.say(f"note: the file of {place} has changed since the run was saved")
        _keep_samples_per_step(run, loaded.run_info)
        _look_for_best(loaded, store, run.exchange, run.console.say)
    return loaded


def _look_for_best(
    checkpoint: Checkpoint, store: Checkpoints, exchange: Exchange, say: Callable[[str], None]
) -> None:
    """If the best checkpoint so far is gone, the best one before it that is still there takes
    its place; without one, the best one is counted anew. Collective."""
    progress = checkpoint.state["progress"]
    best = progress["best_step"]
    if best in (None, checkpoint.step):
        return
    found = exchange.gather_json(store.existing_best(best, checkpoint.step))[0]
    if found == best:
        return
    before, place = {}, "the best one is counted anew from here on"
    if found is not None:
        before = json.loads((store.path(found) / STATE).read_bytes())["progress"]
        place = f"{store.path(found)} is the best one now"
    for name in ("best_step", "best_epoch", "best_val_accuracy", "best_val_loss", "best_val_value"):
        progress[name] = before.get(name)
    say(f"note: the best checkpoint, {store.path(best)}, is gone: {place}")


def _keep_samples_per_step(run: Run, saved: dict) -> None:
    """Keeps the number of samples of an optimizer step if the run is resumed with another
    number of processes."""
    settings, before = run.settings, saved.get("micro_batches")
    now = settings.accumulation_steps * run.workers.size
    if before in (None, now):
        return
    if settings.batch_tokens is not None:
        run.micro_batches = before
    elif settings.global_batch is None:
        run.change_settings({"global_batch": saved["global_batch_size"]})
        run.console.say(
            f"an optimizer step keeps its {settings.global_batch} samples (--global_batch), as "
            f"with {_dividers(saved)}"
        )


def check_data(run: Run, checkpoint: Checkpoint | None, fingerprint: str, flags: str) -> None:
    """Raises UserError if the data are not those of the other processes, or not those of the
    checkpoint. `flags`: those that name them."""
    if run.exchange.size > 1:
        from ..distributed.group import agree_on_data

        agree_on_data(run.exchange, fingerprint, flags)
    if checkpoint is not None and checkpoint.run_info["data_fingerprint"] != fingerprint:
        folder, trains = run.resumed_folder(), run.settings.action.trains
        evaluate = f"evaluate on other data by --resume {folder} --eval_data PATH"
        raise UserError(
            f"these are not the data that the run in {folder} was trained on; name the old data "
            f"({flags}), or {'start a new run' if trains else evaluate}"
        )


def is_finished(run: Run, checkpoint: Checkpoint, plan: TrainingPlan) -> bool:
    """Whether the resumed run has nothing left to do; prints a line if so. UserError if it has done
    more than it is asked for."""
    step, path = checkpoint.step, run.folder.path
    total_steps, limit = plan.total_steps, plan.limit
    if step > total_steps:
        store, earlier = Checkpoints(run.resumed_folder() / "checkpoints"), ""
        if steps := [saved for saved in store.steps() if saved <= total_steps]:
            earlier = f" resume from an earlier checkpoint (--resume {store.path(steps[-1])}"
            earlier += " --output FOLDER),"
        raise UserError(
            f"the run in {run.settings.resume} has done {counted(step, 'step')} and {limit} asks "
            f"for {total_steps:,}: raise {limit},{earlier} or leave --resume out to start a new run"
        )
    try:
        summary = json.loads(run.folder.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    patience, since = run.settings.early_stop_patience, checkpoint.state["progress"]["since_best"]
    stopped_early = patience is not None and since >= patience
    if summary.get("status") not in ("finished", "stopped_early"):
        return False
    if summary["steps"] != step:  # it was extended since, and killed before its test
        return False
    if step < total_steps and not stopped_early:
        return False
    settings, more = run.settings, ""
    accuracy = summary.get("model_test_accuracy") or summary["test_accuracy"]
    if settings.final_test and accuracy is None:  # --no_final_test was given before
        return False
    if step < total_steps:
        state, limit = "has stopped early", "--early_stop_patience"
    else:
        state = "is finished"
        limit = "--epochs, with --time_budget none" if settings.time_budget else limit
        limit += " and --early_stop_patience" if stopped_early else ""
    if accuracy is None:
        if not getattr(settings, "val_is_validation", False):  # else there is no test set
            more = f"; to measure it on the test set: --resume {path} --final_test"
    elif settings.report and not run.folder.page.exists():
        more = f"; to write its report: --resume {path} --eval_only --report"
    elif settings.eval_views not in ("none", _measured_views(summary)):
        views = f"--eval_views {settings.eval_views}"
        more = f"; --resume {path} --eval_only {views} measures that, too"
    result = "not tested" if accuracy is None else f"test accuracy {accuracy:.2f} %"
    epochs = counted(round(float(summary["epochs"]), 2), "epoch")
    run.console.say(
        f"this run {state}: {epochs}, {result} in {path}; "
        f"to train longer give a larger {limit}{more}"
    )
    return True


def _measured_views(summary: dict) -> str | None:
    return summary.get("eval_views", "mirror" if "flip_test_accuracy" in summary else None)


def which_weights(checkpoint: Checkpoint, folder: Path) -> str:
    """What weights a checkpoint of the run in `folder` holds: "step 40, averaged weights, ..."."""
    averaged = "" if "average" not in checkpoint.parts else ", averaged weights"
    text = f"step {checkpoint.step}{averaged}"
    store = Checkpoints(folder / "checkpoints")
    best = store.best_of_run()
    if best == checkpoint.step:
        return f"{text}, best on the validation split"
    last = ", the last weights" if checkpoint.step == max(store.steps(), default=0) else ""
    better = "" if best is None else f" (best on the validation split: step {best})"
    return f"{text}{last}{better}"


def _dividers(saved: dict) -> str:
    """Into how many parts each step of a saved run was divided."""
    if "local_workers" in saved:
        return counted(saved["local_workers"], "worker")
    return counted(saved["processes"], "process")
