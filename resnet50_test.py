#!/usr/bin/env python3
"""Trains a ResNet on pictures: by default ResNet-50 on CIFAR-10.

python resnet50_test.py
python resnet50_test.py --dataset imagefolder --data_dir my_pictures --depth 18
python resnet50_test.py --resume
"""

import sys
from dataclasses import dataclass

from utils.config import setting
from utils.errors import UserError
from utils.run import Run, run_entry
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
        choices=("cifar", "imagenet"), default_text="cifar for pictures of up to 64 pixels",
    )  # fmt: skip


def train(settings: Settings, origin: dict, signals) -> None:
    model_name = f"resnet{settings.depth}" + (f"w{settings.width}" if settings.width != 64 else "")
    with Run(settings, origin, signals, model_name, settings.dataset) as run:
        import torch  # takes seconds: --help and wrong flags have answered before

        from utils.image_task import load_image_task
        from utils.models.resnet import ResNet
        from utils.training.evaluation import evaluate
        from utils.training.objective import Classification

        task = load_image_task(settings, run.device, run.console)

        stem = settings.stem or ("cifar" if task.image_size <= 64 else "imagenet")
        if settings.batch_size == 1 and task.image_size <= (8 if stem == "cifar" else 32):
            raise UserError(
                f"--batch_size 1: pictures of {task.image_size} pixels end as a single one, and "
                "BatchNorm needs two or more; take a larger batch"
            )
        model = ResNet(settings.depth, len(task.data.classes), settings.width, stem)
        memory_format = torch.channels_last if settings.channels_last else torch.contiguous_format
        model.to(run.device, memory_format=memory_format)
        forward = torch.compile(model) if settings.compile else model
        objective = Classification(forward, run.precision, settings.label_smoothing)

        def measure(loader):
            return evaluate(model, loader.epoch(), run.precision, run.interrupted)

        checkpoint = run.checkpoint(task.data.fingerprint)
        if settings.eval_only:
            run.evaluate_only(model, checkpoint, lambda: measure(task.test))
            return
        trainer = run.trainer(
            model=model,
            objective=objective,
            loader=task.train,
            evaluate=lambda: measure(task.val or task.test),
            eval_split="val" if task.val else "test",
            fingerprint=task.data.fingerprint,
            checkpoint=checkpoint,
        )
        if trainer is not None:
            run.train(trainer, lambda: measure(task.test), **task.sizes)


def main(argv: list[str] | None = None) -> int:
    return run_entry(Settings, train, __doc__.splitlines()[0], argv)


if __name__ == "__main__":
    sys.exit(main())
