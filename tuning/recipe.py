"""From the base recipe to the settings of a trial, and from the best trial to a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import yaml

from utils.errors import UserError
from utils.optim.entry import LINEAR
from utils.optim.table import OPTIMIZERS
from utils.settings.config import Config, fields

from .halving import Rung
from .space import DIGITS, Space, effective

# Settings counted in epochs (and steps) of the run: they keep their fraction of it.
PARTS_OF_EPOCHS = ("warmup_epochs", "step_epochs", "sync_from")  # fractions are allowed
WHOLE_EPOCHS = ("mixup_off_epoch", "unfreeze_epoch")
# Settings of the machine on which the search ran: no part of the recipe.
OF_THE_PLACE = (
    *("config", "host_config", "output", "cache_dir", "device", "threads", "workers", "save_every"),
    *("trackers", "wandb", "wandb_project", "wandb_entity", "wandb_tags", "log_every"),
)
# Written into the recipe even if they are defaults; and the settings of the model.
WRITTEN = (
    "dataset",
    "epochs",
    "batch_size",
    "optimizer",
    "lr",
    "momentum",
    "weight_decay",
    "sched",
)


class Recipe:
    """The base recipe with what a trial, or the result, changes in it.

    Args:
        space: what is tuned, over the base recipe (`space.raw`).
        rungs: stages of a trial.
        val_fraction: what trials are scored on; None: the data bring their own.
        recipe_batch: of the recipe that is handed over; None: that of the trials.
        subset: of the base recipe, as --subset takes it.

    Raises:
        UserError: these settings cannot be combined.
    """

    def __init__(
        self,
        space: Space,
        rungs: list[Rung],
        val_fraction: float | None,
        recipe_batch: int | None,
        subset: float = 1.0,
    ):
        self.space, self.rungs, self.val_fraction = space, rungs, val_fraction
        self.raw, self.config_class = space.raw, space.config_class
        self.base = self._valid(self.raw)
        self.recipe_batch, self.subset = recipe_batch, subset
        if recipe_batch and getattr(self.base, "batch_tokens", None):
            raise UserError("--recipe_batch_size has no effect with --batch_tokens: leave it out")
        if self.raw.get("warmup_steps") and (rungs[-1].subset > 1) != (subset > 1):
            raise UserError(
                f"--subset {rungs[-1].subset:g}: to shorten the warm-up of "
                f"{self.raw['warmup_steps']} steps, the part of the training data has to be known: "
                "give --subset a fraction, or --warmup_epochs"
            )

    def _tuned(self, values: Mapping, epochs: int) -> dict:
        """The values of a trial as settings of a run of `epochs` epochs."""
        of_epochs = {parameter.name for parameter in self.space.parameters if parameter.of_epochs}
        return {n: round(v * epochs, DIGITS) if n in of_epochs else v for n, v in values.items()}

    def of_trial(self, values: Mapping, rung: Rung, seed: int) -> dict:
        """The settings of a trial's run, for the entry's --config. UserError if they contradict
        each other."""
        base, epochs = self.base, rung.epochs
        settings = {**self.raw, "epochs": epochs, "subset": rung.subset, "seed": seed}
        shorter = epochs / base.epochs
        for name in PARTS_OF_EPOCHS:
            if self.raw.get(name):
                settings[name] = round(self.raw[name] * shorter, DIGITS)
        if self.raw.get("milestones"):
            settings["milestones"] = ",".join(
                f"{float(word) * shorter:.{DIGITS}g}"
                for word in str(self.raw["milestones"]).split(",")
            )
        for name in WHOLE_EPOCHS:
            if self.raw.get(name):
                settings[name] = min(max(1, round(self.raw[name] * shorter)), epochs - 1)
        if self.raw.get("unfreeze_epoch") and not settings["unfreeze_epoch"]:
            # Too short for both: everything trains, as it does for most of a longer run.
            del settings["unfreeze_epoch"]
            settings.pop("freeze_backbone", None)
        if base.plateau_patience:
            # In evaluations: a trial has one after each epoch. Never 0, or one unlucky evaluation
            # would reduce the learning rate.
            patience = base.plateau_patience * max(1, base.eval_every) * shorter
            settings["plateau_patience"] = max(1, round(patience))
        if self.raw.get("warmup_steps"):
            shorter *= rung.subset / self.subset
            settings["warmup_steps"] = max(1, round(self.raw["warmup_steps"] * shorter))
        settings |= self._tuned(values, epochs)
        for name in ("early_stop_patience", "eval_views"):  # without effect in a trial
            settings.pop(name, None)
        if self.val_fraction is not None:
            settings["val_fraction"] = self.val_fraction
        settings |= {"final_test": False, "report": False, "baseline": False}
        settings |= {"checkpoint_hist": 1}
        settings["eval_every"] = 1 if settings.get("sched") == "plateau" else epochs
        return self._checked(settings)

    def handed_over(self, values: Mapping) -> dict:
        """The settings of the recipe with a trial's values ({}: the base itself)."""
        settings = {**self.raw, **self._tuned(values, self.base.epochs)}
        found = self._valid(settings)
        settings |= self._for_batch(found)
        own = [n for n, f in fields(self.config_class).items() if f.metadata["group"] == "model"]
        for name in (*WRITTEN, *own):
            if getattr(found, name) is not None:
                settings.setdefault(name, getattr(found, name))
        for name in OF_THE_PLACE:
            settings.pop(name, None)
        follows = found.sched == "plateau" or found.early_stop_patience is not None
        if (follows or not found.final_test) and self.val_fraction is not None:
            settings.setdefault("val_fraction", self.val_fraction)
        order = list(fields(self.config_class))
        settings = self._checked(settings)
        return dict(sorted(settings.items(), key=lambda item: order.index(item[0])))

    def in_full(self, settings: dict, names: Iterable[str]) -> dict:
        """`settings` with the defaults of those of `names` that it leaves out."""
        made = self._valid(settings)
        return {name: getattr(made, name) for name in names} | settings

    def _valid(self, settings: dict) -> Config:
        """These settings, and defaults for the others. UserError if they contradict each other."""
        made = effective(self.config_class, settings)
        made.validate()
        return made

    def _checked(self, settings: dict) -> dict:
        """Without settings that have no effect with a trial's values; UserError for
        contradictions."""
        made = effective(self.config_class, settings)
        idle = made.without_effect()
        made.validate()
        return {name: value for name, value in settings.items() if name not in idle}

    # ---- the rule of the learning rate ----------------------------------------------------------

    def _linear(self, found: Config) -> bool:
        entry = OPTIMIZERS[found.optimizer]
        return entry.lr_scaling(**entry.values_of(found)) == LINEAR

    def _batch(self, found: Config) -> int:
        """Of the recipe; `found`: the settings of a trial."""
        return self.recipe_batch or found.batch_size

    def _kept_by(self, found: Config) -> str | None:
        """The setting by which the learning rate suits any --batch_size."""
        return next((n for n in ("global_batch", "lr_base_size") if getattr(found, n)), None)

    def _for_batch(self, found: Config) -> dict:
        """The settings that change with the batch of the recipe."""
        size = self._batch(found)
        if size == found.batch_size:
            return {}
        changed: dict = {"batch_size": size}
        if found.global_batch:  # an optimizer step has as many samples as before
            return changed
        ratio = size / found.batch_size
        factor = ratio if self._linear(found) else ratio**0.5
        rates = ["lr", "head_lr", "min_lr", "warmup_lr"]
        if found.lr_base_size:  # the run multiplies --lr and --head_lr by the ratio, not the others
            rates, factor = rates[2:], ratio
        for name in rates:
            if getattr(found, name):
                changed[name] = float(f"{getattr(found, name) * factor:.{DIGITS}g}")
        if found.warmup_steps:
            changed["warmup_steps"] = max(1, round(found.warmup_steps / ratio))
        return changed

    def lr_rule(self, values: Mapping) -> str:
        """How the recipe's learning rate, and what else depends on the batch, follow from the
        trial's, in words."""
        found = self._valid({**self.raw, **self._tuned(values, self.base.epochs)})
        handed = self.handed_over(values)
        others = [
            f"; {name} {getattr(found, name):g} becomes {handed[name]:g}"
            for name in self._for_batch(found)
            if name not in ("lr", "batch_size") and name in handed
        ]
        last = self.rungs[-1]
        part = f"{100 * last.subset:g} %" if last.subset <= 1 else f"{last.subset:,.0f} samples"
        found_on = (
            f"found with {last.epochs} epochs on {part} of the training data, for "
            f"{self.base.epochs} epochs on all of it"
        )
        if self._batch(found) == found.batch_size or (keeper := self._kept_by(found)):
            same = self._batch(found) == found.batch_size
            why = f"the batch of {found.batch_size} is" if same else f"there is --{keeper}"
            return (
                f"lr {found.lr:g} stays unchanged, as {why} "
                f"({found_on}: the shape of the schedule stretches, its peak stays)"
                f"{''.join(others)}"
            )
        rule = (
            "the linear rule (Goyal et al., 2017)"
            if self._linear(found)
            else "the square-root rule (Malladi et al., 2022)"
        )
        return (
            f"lr {found.lr:g} at a batch of {found.batch_size} becomes {handed['lr']:g} at "
            f"{self._batch(found)} by {rule} for {found.optimizer}{''.join(others)}; {found_on}"
        )


def to_yaml(settings: Mapping, head: list[str]) -> str:
    """A recipe below comments."""
    lines = [f"# {line}" for line in head]
    lines += [
        yaml.safe_dump({name: value}, allow_unicode=True, width=1000).strip()
        for name, value in settings.items()
    ]
    return "\n".join(lines) + "\n"


def as_flags(settings: Mapping, beside: Mapping) -> list[str]:
    """The flags that make `settings` of the recipe `beside`."""
    words = []
    for name, value in settings.items():
        if name in OF_THE_PLACE and name != "threads":
            continue
        if name in beside and beside[name] == value:
            continue
        if value is False:
            words.append(f"--no_{name}")
        else:
            words += [f"--{name}", "none" if value is None else f"{value}"]
    return words
