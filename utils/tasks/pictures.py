"""The task of pictures. Its data are in picture_data.py, its loaders in picture_loaders.py."""

from dataclasses import asdict, replace

import torch

from ..data.images.dali import require_dali
from ..errors import UserError
from ..exchange import Exchange
from ..local.workers import Workers
from ..reporting.console import Console
from ..settings import ImageSettings
from ..settings.transfer import OF_TORCHVISION
from ..weights.card import ModelCard
from ..weights.pretrained import Pretrained
from ..weights.published import load_imagenet, load_timm
from .kinds import Kind
from .picture_data import load_splits
from .picture_loaders import ImageTask, make_loaders


def load_image_task(
    settings: ImageSettings,
    device: torch.device,
    console: Console,
    source=None,
    exchange: Exchange | None = None,
    workers: Workers | None = None,
) -> ImageTask:
    """Loads the data set, splits it and makes the loaders, all as `settings` say.

    Args:
        source: the ModelCard or Pretrained that came with the weights; pictures are normalised by
            its mean and standard deviation. None, or one without these: by those of the data set.
        exchange: with the other ranks; None: a single process.
        workers: among whom training steps are divided; None: the ranks.
    """
    if settings.loader == "dali" and device.type == "cuda":
        require_dali()  # before anything is read
    exchange = exchange or Exchange()
    workers = workers or Workers.divide(exchange.size, exchange.rank, exchange.size)
    splits = load_splits(settings, console, exchange, source)
    data, channels = splits.data, splits.train.shape[2]
    mean, std = (source and source.normalisation(channels)) or (data.mean, data.std)
    shape = data.test.shape  # as the model is used
    card = ModelCard(tuple(data.classes), mean, std, *shape, settings.heads_of_vit)
    return make_loaders(settings, splits, card, device, console, exchange, workers)


class Pictures(Kind):
    """The kind of task whose samples are pictures."""

    card_class = ModelCard
    predicts_folders = True

    def card(self, checkpoint) -> ModelCard:
        """The card in a checkpoint, with how files become pictures, as the settings say."""
        return replace(super().card(checkpoint), form=asdict(self.settings.form))

    def build_model(self, card: ModelCard):
        last = self.settings.channels_last
        memory_format = torch.channels_last if last else torch.contiguous_format
        return super().build_model(card).to(memory_format=memory_format)

    def load_published(self, say) -> Pretrained:
        settings = self.settings
        if settings.published_weights is None:
            where = settings.published_for
            way_out = f"there are for {where}" if where else "give a run or a file"
            raise UserError(
                f"--pretrained {settings.pretrained}: no weights are published for "
                f"{self.model_name}; {way_out}"
            )
        library, name = settings.published_weights
        if library == "timm":
            if OF_TORCHVISION.fullmatch(settings.pretrained):
                raise UserError(
                    f"--pretrained {settings.pretrained} is a name of torchvision's weights, and "
                    f"those of {name} are timm's: --pretrained published"
                )
            return load_timm(name, say)
        return load_imagenet(name, settings.pretrained, None if settings.action.trains else say)

    def load_task(self, run, card, pretrained) -> ImageTask:
        ours = self.settings.heads_of_vit
        theirs = pretrained and pretrained.card and pretrained.card.heads
        if ours is not None and theirs not in (None, ours):
            raise UserError(
                f"--pretrained {self.settings.pretrained}: its weights were trained with --heads "
                f"{theirs}; give that too"
            )
        if ours is not None and pretrained and theirs is None:
            run.console.say(
                f"note: these weights do not show their number of heads; --heads {ours} is used"
            )
        return run.close_at_end(
            load_image_task(
                self.settings,
                run.device,
                run.console,
                card or pretrained,
                run.exchange,
                run.workers,
            )
        )
