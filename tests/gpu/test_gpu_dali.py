"""Pictures that NVIDIA DALI decodes on a GPU are those of the CPU, within a few levels."""

import io
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from utils.augment.resized_crop import ResizedCrop
from utils.data.images.dali import DaliReader
from utils.data.images.image_data import PictureRequest
from utils.data.images.sources import load_image_data

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
SIZE = 32


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    for index in range(24):
        height, width = rng.integers(40, 90, 2).tolist()
        coarse = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        file = io.BytesIO()
        image.save(file, "PNG" if index == 5 else "JPEG")
        path = tmp_path / "photos" / "train" / ("cat", "dog")[index % 2] / f"{index:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.getvalue())
    request = PictureRequest(
        tmp_path / "photos", tmp_path / "cache", SIZE, decode="always", test_fraction=0.2,
        progress=False,
    )  # fmt: skip
    return load_image_data("imagefolder", request)


@pytest.mark.parametrize("training", [True, False])
def test_batches_are_those_of_the_cpu(data, training):
    pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI (requirements-dali.txt)")
    options = {"mean": data.mean, "std": data.std, "batch_size": 4}
    options |= {"augment": ResizedCrop(), "shuffle": True, "seed": 3} if training else {}
    reader = partial(DaliReader, device=0, threads=2)
    ours = data.train.loader(reader=reader, device=CUDA, **options)
    plain = data.train.loader(device=CPU, **options)
    levels = 255 * torch.tensor(data.std)[:, None, None]
    for one, other in zip(ours.epoch(1, 2), plain.epoch(1, 2), strict=True):
        assert one.inputs.is_cuda and torch.equal(one.targets.cpu(), other.targets)
        apart = (one.inputs.cpu() - other.inputs).abs() * levels
        assert apart.mean() < 1 and apart.max() < 16
