"""Which packages are installed, and what the missing ones are for."""

import importlib.util
from typing import NamedTuple

from ..errors import UserError
from ..files import denial


class Package(NamedTuple):
    """
    Attributes:
        name: for pip.
        module: that is imported.
        purpose: what it is for.
    """

    name: str
    module: str
    purpose: str


# Those of requirements.txt without which nothing trains.
NEEDED = (
    Package("torch", "torch", "everything"),
    Package("torchvision", "torchvision", "pictures"),
    Package("numpy", "numpy", "data"),
    Package("pillow", "PIL", "pictures"),
    Package("pyyaml", "yaml", "recipes"),
    Package("safetensors", "safetensors", "checkpoints"),
    Package("tqdm", "tqdm", "the progress bar"),
    Package("matplotlib", "matplotlib", "curves"),
    Package("tensorboard", "tensorboard", "TensorBoard"),
    Package("tokenizers", "tokenizers", "texts"),
    Package("timm", "timm", "the networks of vit_test.py"),
    Package("huggingface_hub", "huggingface_hub", "weights from the Hugging Face hub"),
)
# Those of --engine ort without training.
OF_ONNX = (
    Package("onnx", "onnx", "--export onnx and --engine ort"),
    Package("onnxscript", "onnxscript", "--export onnx and --engine ort"),
    Package("onnxruntime", "onnxruntime", "--engine ort and the check of --export onnx"),
)
OPTIONAL = (
    Package("optuna", "optuna", "tuning"),
    Package("scikit-learn", "sklearn", "--group_by and --group_column"),
    Package("wandb", "wandb", "--wandb"),
    *OF_ONNX,
    Package("pyarrow", "pyarrow", "--dataset parquet"),
    Package("google-crc32c", "google_crc32c", "--dataset tfrecord"),
    Package("simplejpeg", "simplejpeg", "decoding JPEGs faster"),
)
# On a GPU these matter, too.
OF_GPUS = (
    Package("nvidia-ml-py", "pynvml", "use, power and memory of the GPU in the log"),
    Package("triton", "triton", "the kernels of --fused; PyTorch for CUDA brings it"),
)


def installed(packages: tuple[Package, ...]) -> dict[str, str | None]:
    """{package: its version, or None if it is missing}."""
    found = {}
    for package in packages:
        there = importlib.util.find_spec(package.module) is not None
        found[package.name] = (version_of(package.name) or "unknown version") if there else None
    return found


def mendable(error: Exception) -> UserError | None:
    """The error for the user if it is something to mend: a setting, the data, permissions, a
    package that is missing; None: a fault of the program."""
    if isinstance(error, UserError):
        return error
    return denial(error) if isinstance(error, OSError) else not_installed(error)


def not_installed(error: Exception) -> UserError | None:
    """The error for the user if a package of requirements.txt could not be imported."""
    module = error.name if isinstance(error, ModuleNotFoundError) else None
    names = {package.module: package.name for package in (*NEEDED, *OPTIONAL[:2])}
    name, command = names.get((module or "").partition(".")[0]), "pip install -r requirements.txt"
    return UserError(f"{name} is not installed: python -m {command}") if name else None


def version_of(package: str) -> str | None:
    from importlib import metadata  # slow to import, and all entries import this module

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def missing_text(packages: tuple[Package, ...]) -> str:
    """What is missing of them and what for, with the command that installs it; "" if nothing is."""
    there = installed(packages)
    missing = [package for package in packages if there[package.name] is None]
    if not missing:
        return ""
    each = "; ".join(f"{package.name} for {package.purpose}" for package in missing)
    return f"missing: {each}: pip install {' '.join(package.name for package in missing)}"
