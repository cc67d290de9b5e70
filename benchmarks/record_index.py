#!/usr/bin/env python3
"""Indexing: seconds until encoded pictures are ready, at the first start and at later ones.

    python benchmarks/record_index.py
    python benchmarks/record_index.py --records 1000000 --kinds tar --workers 8

JPEGs of 32x32 pixels, of which a thousand differ, in ten shards or a file each; all are in the page
cache. The times are those of `load_image_data` with --decode always, so they include listing the
files, the mean and standard deviation of 4,096 pictures, and unpacking Parquet files.
"""

import contextlib
import io
import json
import shutil
import statistics
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import in_words, machine, parser
from utils.data.images.image_data import PictureRequest
from utils.data.images.sources import load_image_data
from utils.data.images.tar import add_sample

KINDS = ("imagefolder", "csv", "tar", "tfrecord", "parquet")
SHARDS, CLASSES, DIFFERENT = 10, 100, 1000


def pictures() -> list[bytes]:
    rng, found = np.random.default_rng(0), []
    for _ in range(DIFFERENT):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(file, "JPEG")
        found.append(file.getvalue())
    return found


def write(kind: str, folder: Path, split: str, samples: list[tuple[bytes, int]]) -> None:
    """A data set's split; `samples` are pictures and labels."""
    if kind in ("imagefolder", "csv"):
        names = [f"{split}/{label:03}/{i:07}.jpg" for i, (_, label) in enumerate(samples)]
        for name, (picture, _) in zip(names, samples, strict=True):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(picture)
        if kind == "csv":
            rows = [f"{name},{label}" for name, (_, label) in zip(names, samples, strict=True)]
            (folder / f"{split}.csv").write_text("\n".join(["file,label", *rows]))
        return
    for number in range(SHARDS):
        part = samples[number::SHARDS]
        path = folder / f"{split}-{number:05}-of-{SHARDS:05}.{kind}"
        if kind == "tar":
            with tarfile.open(path, "w") as archive:
                for i, (picture, label) in enumerate(part):
                    add_sample(archive, i, "jpg", picture, label)
        elif kind == "tfrecord":
            from tfrecord import TFRecordWriter

            with contextlib.closing(TFRecordWriter(str(path))) as writer:
                for picture, label in part:
                    features = {"encoded": (picture, "byte"), "class/label": (label, "int")}
                    writer.write({f"image/{name}": value for name, value in features.items()})
        else:
            from pyarrow import parquet, table

            images, labels = zip(*part, strict=True)
            parquet.write_table(table({"image": images, "label": labels}), path, row_group_size=100)


def main() -> None:
    flags = parser(__doc__, repetitions=3, threads=None)
    flags.add_argument("--records", type=int, default=100_000, help="pictures (default: 100000)")
    flags.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    flags.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, help="(default: all)")
    options = flags.parse_args()
    found, encoded = {}, pictures()
    samples = [(encoded[i % DIFFERENT], i % CLASSES) for i in range(options.records)]
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as place:
            folder, cache = Path(place) / "set", Path(place) / "cache"
            folder.mkdir()
            write(kind, folder, "train", samples)
            write(kind, folder, "test", samples[:CLASSES])

            def seconds(kind=kind, folder=folder, cache=cache) -> float:
                started = time.perf_counter()
                request = PictureRequest(
                    folder, cache, 32, decode="always", workers=options.workers, progress=False
                )
                load_image_data(kind, request)
                return time.perf_counter() - started

            times = {"first start": [], "later": []}
            for _ in range(options.repetitions):
                shutil.rmtree(cache, ignore_errors=True)
                times["first start"].append(seconds())
                times["later"].append(seconds())
            found[kind] = times
            medians = [f"{name} {statistics.median(times[name]):.2f} s" for name in times]
            print(f"{kind}, {options.records:,} records: {', '.join(medians)}", flush=True)
    print(in_words(machine() | {"workers": options.workers}))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "seconds": found}, indent=1))


if __name__ == "__main__":
    main()
