"""The settings that entries share; an entry adds those of its model (see resnet50_test.py)."""

from dataclasses import dataclass

from utils.config import Config, setting
from utils.data.images import IMAGE_DATASETS
from utils.errors import UserError
from utils.optim.factory import OPTIMIZERS
from utils.optim.schedules import SCHEDULES

DATA, IMAGES, OPTIMIZATION, ENGINE, RUN = (
    "data",
    "images",
    "optimization",
    "engine",
    "run and report",
)


def _by_optimizer(name: str) -> str:
    return ", ".join(f"{getattr(entry, name)} with {key}" for key, entry in OPTIMIZERS.items())


@dataclass
class TrainSettings(Config):
    """What every training run has, whatever it trains on."""

    epochs: int = setting(
        50, "Passes over the training data", group=OPTIMIZATION, low=1, unit="epochs", resume="free"
    )
    batch_size: int = setting(
        128,
        "Samples in a batch of one process",
        group=OPTIMIZATION,
        low=1,
        unit="samples",
        resume="evaluation",
    )
    optimizer: str = setting("sgd", "Optimizer", group=OPTIMIZATION, choices=OPTIMIZERS)
    lr: float | None = setting(
        None,
        "Peak learning rate",
        group=OPTIMIZATION,
        above=0,
        resume="free",
        default_text=_by_optimizer("lr"),
    )
    momentum: float = setting(0.9, "Nesterov momentum of sgd", group=OPTIMIZATION, low=0, below=1)
    weight_decay: float | None = setting(
        None,
        "Weight decay",
        group=OPTIMIZATION,
        low=0,
        default_text=_by_optimizer("weight_decay"),
    )
    decay_all: bool = setting(False, "Weight decay on biases and norms too", group=OPTIMIZATION)
    label_smoothing: float = setting(
        0.0, "Share of the target spread over all classes", group=OPTIMIZATION, low=0, below=1
    )
    clip: float | None = setting(
        None,
        "Scale the gradient down to this global L2 norm",
        group=OPTIMIZATION,
        above=0,
        resume="free",
    )
    accumulation_steps: int = setting(
        1,
        "Batches whose gradients make one optimizer step",
        group=OPTIMIZATION,
        low=1,
        unit="batches",
    )
    sched: str = setting(
        "cosine",
        "Learning-rate schedule after the warm-up, counted in optimizer steps",
        group=OPTIMIZATION,
        choices=SCHEDULES,
    )
    warmup_epochs: float = setting(
        0.0, "Linear warm-up of the learning rate", group=OPTIMIZATION, low=0, unit="epochs"
    )
    warmup_steps: int | None = setting(
        None, "The same in optimizer steps", group=OPTIMIZATION, low=0, unit="steps"
    )
    max_steps: int | None = setting(
        None,
        "Stop after so many optimizer steps, whatever --epochs says; the schedule ends there",
        group=OPTIMIZATION,
        low=1,
        unit="steps",
        resume="free",
    )
    on_nonfinite: str = setting(
        "stop",
        "A step whose loss or gradient is not finite is never applied: stop the run there, "
        "or skip it and count it",
        group=OPTIMIZATION,
        choices=("stop", "skip"),
        resume="free",
    )

    data_dir: str = setting("data", "Folder of the data", group=DATA, resume="free")
    cache_dir: str = setting(
        "data/cache", "Folder of what is decoded once and reused", group=DATA, resume="free"
    )
    subset: float | None = setting(
        None,
        "Train on a part of the training data, the same share of each class: a fraction up "
        "to 1, or a number of samples",
        group=DATA,
        above=0,
    )
    val_fraction: float = setting(
        0.0,
        "Share of the training data held out for validation, the same of each class",
        group=DATA,
        low=0,
        below=1,
    )
    workers: int | None = setting(
        None,
        "Threads that decode files",
        group=DATA,
        low=1,
        unit="threads",
        default_text="one for each core",
        resume="free",
    )

    device: str = setting(
        "auto",
        "Where to compute; auto takes a GPU where there is one",
        group=ENGINE,
        choices=("auto", "cpu", "cuda"),
        resume="free",
    )
    precision: str = setting(
        "auto",
        "Arithmetic of the forward pass; auto: bf16 where the GPU has it, "
        "fp16 with a loss scaler on older ones, fp32 on a CPU",
        group=ENGINE,
        choices=("auto", "fp32", "bf16", "fp16"),
        resume="evaluation",
    )
    compile: bool = setting(
        False,
        "Compile the model with torch.compile; takes minutes at the start on a CPU",
        group=ENGINE,
        resume="free",
    )
    deterministic: bool = setting(
        False, "The same bits on every run on a GPU too, at the price of speed", group=ENGINE
    )
    threads: int | None = setting(
        None,
        "CPU threads for arithmetic",
        group=ENGINE,
        low=1,
        unit="threads",
        default_text="PyTorch's choice",
        resume="free",
    )
    seed: int = setting(
        0,
        "Seed of the weights, the order, the augmentation, and of what is cut from the data",
        group=ENGINE,
        low=0,
        high=2**32 - 1,
    )

    config: str | None = setting(
        None, "YAML file of settings; the command line wins over it", group=RUN, resume="free"
    )
    output: str | None = setting(
        None,
        "Folder of the run",
        group=RUN,
        default_text="runs/<model>-<data>-<time>",
        resume="free",
    )
    resume: str | None = setting(
        None,
        "Go on from the newest checkpoint of a run: its folder, or one checkpoint's; "
        "without a value the newest run",
        group=RUN,
        bare="auto",
        resume="free",
    )
    eval_only: bool = setting(
        False,
        "Evaluate the checkpoint that --resume names on the test set, and stop",
        group=RUN,
        resume="free",
    )
    save_every: str = setting(
        "10m",
        "Time between checkpoints: a number of steps, or minutes with an m",
        group=RUN,
        unit="steps or minutes",
        resume="free",
    )
    checkpoint_hist: int = setting(
        3,
        "Checkpoints kept, the newest ones; the best is kept besides",
        group=RUN,
        low=1,
        unit="checkpoints",
        resume="free",
    )
    eval_every: int = setting(
        1,
        "Epochs between evaluations, on the validation split where there is one, else on the "
        "test set; 0: the test set at the end only",
        group=RUN,
        low=0,
        unit="epochs",
        resume="free",
    )
    log_every: int = setting(
        20,
        "Steps between log lines; only there does the host wait for the device",
        group=RUN,
        low=1,
        unit="steps",
        resume="free",
    )

    def ineffective(self):
        if "momentum" not in OPTIMIZERS[self.optimizer].settings:
            yield "momentum", f"--optimizer {self.optimizer} has none", "optimizer"
        if self.warmup_steps is not None and self.warmup_epochs:
            reason = "--warmup_steps is given; leave one of the two out"
            yield "warmup_epochs", reason, "warmup_steps"
        if self.weight_decay == 0:
            yield "decay_all", "--weight_decay is 0", "weight_decay"
        if self.deterministic and self.device == "cpu":
            yield "deterministic", "runs on a CPU are always deterministic", "device"
        if self.val_fraction and self.eval_every == 0:
            yield "val_fraction", "--eval_every 0 never measures on that split", "eval_every"
        if self.eval_only:
            of_training = ("epochs", "lr", "clip", "max_steps", "on_nonfinite", "save_every")
            for name in (*of_training, "checkpoint_hist", "eval_every", "log_every", "output"):
                yield name, "--eval_only does not train", "eval_only"

    def check(self):
        if self.lr is None:
            self.lr = OPTIMIZERS[self.optimizer].lr
        if self.weight_decay is None:
            self.weight_decay = OPTIMIZERS[self.optimizer].weight_decay
        if self.subset is not None and self.subset > 1 and not float(self.subset).is_integer():
            raise UserError(
                f"--subset {self.subset}: a fraction up to 1, or a whole number of samples"
            )
        if self.eval_only and self.resume is None:
            raise UserError("--eval_only evaluates a checkpoint: name its run with --resume RUN")
        if self.warmup_epochs > self.epochs:
            raise UserError(
                f"--warmup_epochs {self.warmup_epochs} is longer than --epochs {self.epochs}"
            )
        save_interval(self.save_every)


def save_interval(text: str) -> tuple[int | None, float | None]:
    """ "500" -> (500 steps, None); "10m" -> (None, 600.0 seconds)."""
    number, minutes = (text[:-1], True) if text.endswith("m") else (text, False)
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf") or (not minutes and not value.is_integer()):
        raise UserError(f"--save_every {text}: a number of steps such as 500, or minutes as in 10m")
    return (None, value * 60) if minutes else (int(value), None)


@dataclass
class ImageSettings(TrainSettings):
    """What training on pictures adds."""

    dataset: str = setting(
        "cifar10",
        "Data set; imagefolder is a tree of your own with a folder for each class, "
        "shapes is synthetic and needs no files",
        group=IMAGES,
        choices=IMAGE_DATASETS,
    )
    image_size: int | None = setting(
        None,
        "Side of the pictures of an imagefolder, resized and centre-cropped",
        group=IMAGES,
        low=8,
        unit="pixels",
        default_text="that of the files if they are alike and small, else 224",
    )
    test_fraction: float | None = setting(
        None,
        "Share of an imagefolder without a test/ or val/ folder that becomes the test set",
        group=IMAGES,
        above=0,
        below=1,
    )
    on_bad: str = setting(
        "error",
        "A file that is no image: stop, or skip and count it",
        group=IMAGES,
        choices=("error", "skip"),
    )
    crop_padding: int = setting(
        4,
        "Random crop after padding every side by this much; 0: none",
        group=IMAGES,
        low=0,
        unit="pixels",
    )
    padding_mode: str = setting(
        "zeros",
        "What the padding holds: black, or the image's mirror",
        group=IMAGES,
        choices=("zeros", "reflect"),
    )
    hflip: float = setting(0.5, "Probability of the mirror image", group=IMAGES, low=0, high=1)
    cutout: int = setting(
        0,
        "Side of a blank square on every training picture; 0: none",
        group=IMAGES,
        low=0,
        unit="pixels",
    )
    channels_last: bool = setting(
        True, "Keep the channels of a pixel together in memory: faster convolutions", group=ENGINE
    )

    def ineffective(self):
        yield from super().ineffective()
        if self.dataset != "imagefolder":
            own = f"--dataset {self.dataset} brings its own pictures; it belongs to imagefolder"
            names = ("image_size", "test_fraction", "on_bad", "cache_dir", "workers")
            yield from ((name, own, "dataset") for name in names)
        if self.dataset == "shapes":
            reason = "--dataset shapes is built in and reads no files"
            yield "data_dir", reason, "dataset"
        if self.crop_padding == 0:
            yield "padding_mode", "--crop_padding is 0", "crop_padding"
