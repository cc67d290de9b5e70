"""What an entry can do: the table of actions. utils/entry.py carries them out, --predict and
--export by way of utils/inference/use_model.py."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

# Settings without effect if nothing is trained.
OF_TRAINING = (
    *("epochs", "lr", "clip", "max_steps", "epochs_for_sched", "early_stop_patience"),
    *("steps_per_epoch", "time_budget"),
    *("auto_batch", "compile", "cuda_graphs"),
    *("on_nonfinite", "save_every", "checkpoint_hist", "eval_every", "eval_on_start"),
    *("log_every", "output", "checkpoint", "baseline", "trackers"),
    *("wandb", "wandb_project", "wandb_entity", "wandb_tags", "dry_run", "profile", "final_test"),
)
NO_REPORT = {"report": "it belongs to training and --eval_only"}
# Settings of the run that --resume names which only training keeps: with other actions they have
# their defaults unless they are given again.
KEPT_BY_TRAINING = ("engine",)
# Likewise, which only actions that read its data keep: they say nothing about another file.
KEPT_WITH_DATA = ("header", "image_dir", "id_columns", "labels")


@dataclass(frozen=True)
class Action:
    """
    Attributes:
        name: of the setting that asks for it; training itself has none.
        trains: it trains, from the start or from a checkpoint of `--resume`; the others create no
            run folder.
        needs_run: it needs a trained model, which --resume names.
        takes_weights: --pretrained may name its weights, instead of a run.
        needs_data: it reads the data set of the run; the others need only the checkpoint.
        many_processes: it can be done by several processes at once.
        uses: settings of OF_TRAINING that it uses without training.
        options: settings that belong to it alone.
        implied_by: likewise, which ask for it, too.
        without_effect: {setting: why it has no effect with this action}, beside OF_TRAINING for
            an action that does not train.
    """

    name: str
    trains: bool = False
    needs_data: bool = True
    many_processes: bool = False
    needs_run: bool = True
    takes_weights: bool = False
    uses: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    implied_by: tuple[str, ...] = ()
    without_effect: Mapping[str, str] = field(default_factory=dict)

    def asked_for(self, settings: Mapping) -> bool:
        return self is TRAIN or any(settings.get(n) for n in (self.name, *self.implied_by))

    def ineffective(self) -> Iterator[tuple[str | tuple[str, ...], str, str]]:
        """As `Config.ineffective`."""
        if not self.trains:
            without = tuple(name for name in OF_TRAINING if name not in self.uses)
            yield without, f"--{self.name} does not train", self.name
        for name, reason in self.without_effect.items():
            yield name, reason, self.name


TRAIN = Action("train", trains=True, many_processes=True, needs_run=False)
# If several are asked for, the first one is done.
ACTIONS = (
    Action(
        "check",
        needs_data=False,
        many_processes=True,
        needs_run=False,
        uses=("output",),
        without_effect={
            "report": "--check evaluates nothing",
            "engine": "--check tries PyTorch alone",
        },
    ),
    Action("eval_only", many_processes=True, takes_weights=True, implied_by=("eval_data",)),
    Action("predict", needs_data=False, options=("predictions",), without_effect=NO_REPORT),
    Action(
        "export",
        needs_data=False,
        without_effect=NO_REPORT | {"engine": "--export only writes the model"},
    ),
    Action(
        "dry_run",
        trains=True,
        needs_run=False,
        without_effect=dict.fromkeys(
            ("wandb", "trackers", "profile", "report", "checkpoint", "baseline"),
            "--dry_run stops after a few steps",
        ),
    ),
    TRAIN,
)


def asked_for(settings: Mapping) -> list[Action]:
    """The actions that the settings ask for; the last one is always TRAIN."""
    return [action for action in ACTIONS if action.asked_for(settings)]
