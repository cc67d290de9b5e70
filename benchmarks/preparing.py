#!/usr/bin/env python3
"""What each way to keep a large set of pictures takes before its first step.

    python benchmarks/preparing.py
    python benchmarks/preparing.py --pictures 500000 --workers 16

The pictures are hard links to 600 JPEGs, 224 to 500 pixels a side, all in the page cache. For files
in class folders: indexing them, decoding all of them once to 224 pixels, and packing them into tar
shards and TFRecords; for these shards and for a Parquet file: indexing, which verifies the
checksums of TFRecords and unpacks Parquet files. Indexing decodes 4,096 pictures, for their mean
and standard deviation.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import in_words, machine, parser
from benchmarks.encoded import SIDE, write_tree
from utils.data.images.image_data import PictureRequest
from utils.data.images.pack import pack
from utils.data.images.sources import load_image_data

DIFFERENT, SHARD_BYTES = 600, 256_000_000


def write_parquet(tree: Path, folder: Path) -> None:
    """Both splits of `tree`, a file each, in groups of 100 rows as on the Hugging Face hub."""
    from pyarrow import parquet, table

    for split in ("train", "test"):
        files = sorted((tree / split).glob("*/*.jpg"))
        columns = {
            "image": [path.read_bytes() for path in files],
            "label": [int(path.parent.name.removeprefix("class")) for path in files],
        }
        parquet.write_table(table(columns), folder / f"{split}.parquet", row_group_size=100)


def main() -> None:
    flags = parser(__doc__, repetitions=3, threads=None)
    flags.add_argument("--pictures", type=int, default=50_000, help="(default: 50,000)")
    flags.add_argument("--workers", type=int, default=2, help="threads (default: 2)")
    options = flags.parse_args()
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        tree, parquet = root / "pictures", root / "parquet"
        write_tree(tree, options.pictures, DIFFERENT)
        parquet.mkdir()
        write_parquet(tree, parquet)

        def timed(name: str, work: Callable, *arguments, **settings) -> None:
            started = time.perf_counter()
            work(*arguments, **settings)
            seconds.setdefault(name, []).append(time.perf_counter() - started)

        for _ in range(options.repetitions):
            with tempfile.TemporaryDirectory(dir=place) as fresh:
                out, cache = Path(fresh) / "tar", Path(fresh) / "cache"

                def load(kind: str, folder: Path, cache=cache, **settings) -> None:
                    settings |= {"workers": options.workers, "progress": False}
                    load_image_data(kind, PictureRequest(folder, cache, SIDE, **settings))

                timed("index of files", load, "imagefolder", tree, decode="always")
                timed("decoded once", load, "imagefolder", tree, decode="once")
                timed("packing to tar", pack, tree, out, SHARD_BYTES, progress=False)
                timed("index of tar", load, "tar", out, decode="always")
                timed("index of parquet", load, "parquet", parquet, decode="always")
    for name, times in seconds.items():
        print(f"{name}: {statistics.median(times):.1f} s")
    print(f"{options.pictures:,} pictures")
    print(in_words(machine() | {"workers": options.workers}))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "seconds": seconds}, indent=1))


if __name__ == "__main__":
    main()
