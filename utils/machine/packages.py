"""Which packages are installed, and what the missing ones are for.

Where an optional one is missing, what a flag asks for is refused at the start (`require`), and what
nobody asked for is left out with a note (`left_out`).
"""

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


# Those without which nothing trains: `dependencies` in pyproject.toml. Its extras have the others.
NEEDED = (
    Package("torch", "torch", "everything"),
    Package("torchvision", "torchvision", "pictures"),
    Package("numpy", "numpy", "data"),
    Package("pillow", "PIL", "pictures"),
    Package("pyyaml", "yaml", "recipes"),
    Package("safetensors", "safetensors", "checkpoints"),
    Package("tqdm", "tqdm", "the progress bar"),
    Package("tokenizers", "tokenizers", "texts"),
    Package("timm", "timm", "the networks of vit_test.py"),
    Package("jinja2", "jinja2", "pages, as compare.html"),
)
OPTIONAL = (
    Package("matplotlib", "matplotlib", "plots"),
    Package("tensorboard", "tensorboard", "TensorBoard"),
    Package("optuna", "optuna", "tuning"),
    Package("huggingface_hub", "huggingface_hub", "weights from the Hugging Face hub"),
    Package("transformers", "transformers", "transformer_test.py --model NAME|FOLDER"),
    Package("peft", "peft", "--lora"),
    Package("wandb", "wandb", "--wandb"),
    Package("mlflow", "mlflow", "--trackers mlflow"),
    Package("onnx", "onnx", "--export onnx and --engine ort"),
    Package("onnxscript", "onnxscript", "--export onnx and --engine ort"),
    Package("onnxruntime", "onnxruntime", "--engine ort and the check of --export onnx"),
    Package("pyarrow", "pyarrow", "--dataset parquet"),
    Package("google-crc32c", "google_crc32c", "--dataset tfrecord"),
    Package("scikit-learn", "sklearn", "AUROC, average precision, --group_by and --group_column"),
    Package("cleanlab", "cleanlab", "doubtful labels in report.html and labels_to_check.csv"),
    Package("pi-heif", "pi_heif", "HEIC pictures"),
    Package("simplejpeg", "simplejpeg", "decoding JPEGs faster"),
)
# On a GPU these matter, too.
OF_GPUS = (
    Package("nvidia-ml-py", "pynvml", "use, power and memory of the GPU in the log"),
    Package("triton", "triton", "the kernels of --fused; PyTorch for CUDA brings it"),
)


def is_installed(name: str) -> bool:
    """Whether the package of OPTIONAL with this name can be found; it is not imported."""
    (package,) = (package for package in OPTIONAL if package.name == name)
    return importlib.util.find_spec(package.module) is not None


def require(flag: str, *names: str) -> None:
    """Raises UserError if one of these packages of OPTIONAL is missing, which `flag` needs."""
    missing = [name for name in names if not is_installed(name)]
    if missing:
        count = "one more package" if len(missing) == 1 else f"{len(missing)} more packages"
        raise UserError(f"{flag} needs {count}: pip install {' '.join(missing)}")


def left_out(name: str, what: str) -> str:
    """The note that `what`, which no flag asks for, is left out because this package of OPTIONAL is
    missing; "" if it is installed."""
    if is_installed(name):
        return ""
    return f"note: {what} are left out, as {name} is not installed: pip install {name}"


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
    """The error for the user if a package of these tables could not be imported."""
    module = error.name if isinstance(error, ModuleNotFoundError) else None
    for package in (*NEEDED, *OPTIONAL):
        if package.module == (module or "").partition(".")[0]:
            wanted = "-r requirements.txt" if package in NEEDED else package.name
            return UserError(f"{package.name} is not installed: python -m pip install {wanted}")
    return None


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
