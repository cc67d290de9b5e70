#!/usr/bin/env python3
"""Augmentation of batches: ours against torchvision's transforms (v2), picture by picture.

    python benchmarks/augmentation.py
    python benchmarks/augmentation.py --batch 256 --side 64 --threads 2 --repetitions 9

Random resized crop and flip (bicubic, antialiased, area 0.08 to 1) and RandAugment (2 operations,
magnitude 9 of 30, bilinear) of decoded pictures of smooth noise, each alone and both. torchvision's
transforms are called once for each picture, on PIL images and on tensors (uint8), in this process;
ours once for the batch, drawing included. The ratio is that to the faster of these two.
"""

import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import parser, ratios, report, side_by_side
from utils.augment.chain import Chain
from utils.augment.named_policies import parse_policy
from utils.augment.policies import Operations
from utils.augment.resized_crop import DecodedCrop


def pictures(count: int, side: int) -> np.ndarray:
    """(count, side, side, 3) uint8."""
    noise = np.random.default_rng(0).integers(0, 256, (count, side // 8, side // 8, 3), np.uint8)
    resized = [
        Image.fromarray(each).resize((side, side), Image.Resampling.BICUBIC) for each in noise
    ]
    return np.stack([np.asarray(each) for each in resized])


def cases(side: int) -> dict:
    """{case: (torchvision's transform of a picture, our augmentation of a batch)}."""
    crop = v2.RandomResizedCrop(side, interpolation=InterpolationMode.BICUBIC, antialias=True)
    crop_and_flip = v2.Compose([crop, v2.RandomHorizontalFlip()])
    operations = v2.RandAugment(2, 9, interpolation=InterpolationMode.BILINEAR)
    ours = DecodedCrop(), Operations([parse_policy("ra").make(side, side)])
    return {
        "resized crop": (crop_and_flip, Chain(ours[0])),
        "RandAugment": (operations, Chain(ours[1])),
        "both": (v2.Compose([crop_and_flip, operations]), Chain(*ours)),
    }


def main() -> None:
    flags = parser(__doc__, repetitions=7)
    flags.add_argument("--batch", type=int, default=256, help="pictures (default: 256)")
    flags.add_argument("--side", type=int, default=64, help="pixels (default: 64)")
    options = flags.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    arrays = pictures(options.batch, options.side)
    images = torch.from_numpy(arrays)
    pil = [Image.fromarray(array) for array in arrays]
    tensors = [image.permute(2, 0, 1).contiguous() for image in images]

    def one_by_one(transform, samples) -> float:
        started = time.perf_counter()
        for sample in samples:
            transform(sample)
        return options.batch / (time.perf_counter() - started)

    def at_once(augmentation) -> float:
        started = time.perf_counter()
        augmentation.apply(images, augmentation.draw(options.batch, generator))
        return options.batch / (time.perf_counter() - started)

    results = {}
    for name, (transform, augmentation) in cases(options.side).items():
        figures = side_by_side(
            {
                "ours": lambda augmentation=augmentation: at_once(augmentation),
                "PIL": lambda transform=transform: one_by_one(transform, pil),
                "tensors": lambda transform=transform: one_by_one(transform, tensors),
            },
            options.repetitions,
        )
        faster = max(("PIL", "tensors"), key=lambda each: statistics.median(figures[each]))
        results[name] = {"samples_per_second": figures, "ratios": ratios(figures, ("ours", faster))}
    size = f"{options.batch} pictures of {options.side}x{options.side}"
    report(f"augmentation: {size}", results, options.json)


if __name__ == "__main__":
    main()
