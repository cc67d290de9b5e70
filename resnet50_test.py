#!/usr/bin/env python3
"""Trains a ResNet on pictures: by default ResNet-50 on CIFAR-10.

python resnet50_test.py
python resnet50_test.py --dataset imagefolder --data_dir my_pictures --depth 18
python resnet50_test.py --resume
python resnet50_test.py --resume runs/my_run --predict new_pictures
"""

from dataclasses import dataclass

from utils.entry import end_process, run_entry
from utils.errors import UserError
from utils.runs.run import Run
from utils.setting import setting
from utils.settings import ImageSettings

MODEL = "model"  # heading in --help


@dataclass
class Settings(ImageSettings):
    """The settings of this entry: those of every run on pictures, and those of a ResNet."""

    entry = "resnet50_test.py"

    depth: int = setting(
        50, "Layers: 18 and 34 are of basic blocks, the others of bottlenecks", group=MODEL,
        choices=(18, 34, 50, 101, 152),
    )  # fmt: skip
    width: int = setting(
        64, "Channels of the first stage; the later ones have 2, 4 and 8 times as many",
        group=MODEL, low=1, unit="channels",
    )  # fmt: skip
    stem: str | None = setting(
        None, "First layers: cifar keeps the resolution, imagenet divides it by 4", group=MODEL,
        choices=("cifar", "imagenet"),
        default_text="cifar for pictures of up to 64 pixels without --pretrained imagenet",
    )  # fmt: skip

    zero_init_residual: bool = setting(
        False, "The last BatchNorm of each block starts at 0, so that blocks start as shortcuts",
        group=MODEL,
    )  # fmt: skip
    drop_path: float = setting(
        0.0, "Stochastic depth: probability that the last block is skipped, less for earlier ones",
        group=MODEL, low=0, below=1,
    )  # fmt: skip


def build_model(settings: Settings, card):
    """The ResNet for the pictures and classes of `card` (a ModelCard), on the CPU."""
    from utils.models.resnet import ResNet

    size = max(card.height, card.width)
    # Published ImageNet weights belong to the imagenet stem, whatever the pictures' size.
    imagenet = size > 64 or settings.pretrained == "imagenet"
    stem = settings.stem or ("imagenet" if imagenet else "cifar")
    frozen = settings.freeze_backbone and settings.unfreeze_epoch is None
    lone = [name for name in ("batch_size", "global_batch") if getattr(settings, name) == 1]
    trains = settings.action.trains and not frozen
    if lone and trains and size <= (8 if stem == "cifar" else 32):
        raise UserError(
            f"--{lone[0]} 1: pictures of {size} pixels end as a single one, and BatchNorm needs "
            "two or more; take a larger batch"
        )
    return ResNet(
        settings.depth,
        len(card.classes),
        settings.width,
        stem,
        channels=card.channels,
        zero_init_residual=settings.zero_init_residual,
        drop_path=settings.drop_path,
    )


def train(settings: Settings, origin: dict, signals) -> None:
    model_name = f"resnet{settings.depth}"
    model_name += f"w{settings.width}" if settings.width != 64 else ""
    with Run(settings, origin, signals, model_name, settings.dataset) as run:
        import torch  # takes seconds: --help and wrong flags have answered before

        from utils.inference.use_model import model_card, predict_pictures, use_model
        from utils.runs.train_classifier import train_classifier
        from utils.tasks.pictures import load_image_task
        from utils.weights.pretrained import load_pretrained

        memory_format = torch.channels_last if settings.channels_last else torch.contiguous_format
        checkpoint = run.load_checkpoint()
        if settings.predict or settings.export:
            card = model_card(checkpoint)
            model = build_model(settings, card).to(run.device, memory_format=memory_format)
            use_model(run, model, checkpoint, card, predict_pictures)
            return

        pretrained = None
        if settings.pretrained and checkpoint is None:
            pretrained = load_pretrained(settings.pretrained, model_name, run.console.say)
            run.console.say(f"weights from {pretrained.source_text}")
        source = model_card(checkpoint) if checkpoint else pretrained
        task = run.closing(load_image_task(settings, run.device, run.console, source, run.exchange))
        run.check_data(checkpoint, task.data.fingerprint)

        model = build_model(settings, task.card).to(memory_format=memory_format)
        train_classifier(run, model, task, checkpoint, pretrained)


def main(argv: list[str] | None = None) -> int:
    return run_entry(Settings, train, __doc__.splitlines()[0], argv)


if __name__ == "__main__":
    end_process(main())
