"""The settings that entries share; an entry adds those of its model (see resnet50_test.py).

A file for each group of flags, in the order of `--help` from the last base to the first.
"""

from dataclasses import dataclass

from utils.settings.data import DataSettings
from utils.settings.engine import EngineSettings
from utils.settings.images import PictureSettings
from utils.settings.mixing import MixingSettings
from utils.settings.optimization import OptimizationSettings
from utils.settings.run import RunSettings
from utils.settings.transfer import TransferSettings


@dataclass
class TrainSettings(
    RunSettings,
    EngineSettings,
    DataSettings,
    TransferSettings,
    MixingSettings,
    OptimizationSettings,
):
    """What every training run has, whatever it trains on."""


@dataclass
class ImageSettings(PictureSettings, TrainSettings):
    """What training on pictures adds."""
