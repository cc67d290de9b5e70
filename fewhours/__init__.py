"""Trains classifiers of pictures and texts, from a laptop's CPU to many nodes of GPUs.

import fewhours
run = fewhours.train("my_pictures", time="10m")
run.accuracy, run.report
run.predict("new_pictures")
"""

import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
if (CHECKOUT / "utils" / "place.py").is_file() and str(CHECKOUT) not in sys.path:
    sys.path.append(str(CHECKOUT))  # an editable installation

from utils import __version__  # noqa: E402
from utils.errors import UserError  # noqa: E402

from .callbacks import Callback, StopTraining  # noqa: E402
from .ensemble import Ensemble  # noqa: E402
from .run import Run, load, train  # noqa: E402

__all__ = [
    "Callback", "Ensemble", "Run", "StopTraining", "UserError", "__version__",
    "fit", "load", "train",
]  # fmt: skip


def __getattr__(name: str):
    if name == "fit":  # imports PyTorch
        from .own_data import fit

        return fit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
