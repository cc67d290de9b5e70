"""The same encoded pictures as each kind of source that decodes while training."""

import contextlib
import io
import json
import tarfile

from utils.data.images import tar
from utils.data.images.image_data import PictureRequest
from utils.data.images.sources import load_image_data

CLASSES = ("cat", "dog")
KINDS = ("imagefolder", "csv", "tar", "tfrecord", "parquet")
SHARDS = ("tar", "tfrecord", "parquet")  # several pictures in a file


def write_source(kind, folder, splits):
    """Writes `splits`, {name: [(picture, label), ...]} ordered by label, as a source."""
    folder.mkdir(exist_ok=True)
    for split, samples in splits.items():
        WRITERS[kind](folder, split, samples)
    return folder


def write_folder(folder, split, samples):
    for number, (picture, label) in enumerate(samples):
        path = folder / split / CLASSES[label] / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture)


def write_csv(folder, split, samples):
    write_folder(folder, split, samples)
    rows = [f"{split}/{CLASSES[label]}/{i:03}.jpg,{CLASSES[label]}" for i, (_, label) in
            enumerate(samples)]  # fmt: skip
    (folder / f"{split}.csv").write_text("\n".join(["file,label", *rows]))


def write_tar(folder, split, samples):
    with tarfile.open(folder / f"{split}-0.tar", "w") as archive:
        for number, (picture, label) in enumerate(samples):
            tar.add_sample(archive, number, "jpg", picture, label)
    (folder / "classes.txt").write_text("\n".join(CLASSES))


def write_tfrecord(folder, split, samples):
    import tfrecord

    with contextlib.closing(tfrecord.TFRecordWriter(str(folder / f"{split}-0.tfrecord"))) as writer:
        for picture, label in samples:
            pairs = {"encoded": (picture, "byte"), "class/label": (label, "int")}
            writer.write({f"image/{name}": value for name, value in pairs.items()})
    (folder / "classes.txt").write_text("\n".join(CLASSES))


def write_parquet(folder, split, samples, rows=3):
    """As the hub has them, `rows` in a row group."""
    import pyarrow
    from pyarrow import parquet

    features = {
        "image": {"_type": "Image"},
        "label": {"names": list(CLASSES), "_type": "ClassLabel"},
    }
    image = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    schema = pyarrow.schema(
        {"image": image, "label": pyarrow.int64()},
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    table = pyarrow.table(
        {
            "image": [{"bytes": picture, "path": None} for picture, _ in samples],
            "label": [label for _, label in samples],
        },
        schema=schema,
    )
    (folder / "data").mkdir(exist_ok=True)
    path = folder / "data" / f"{split}-00000-of-00001.parquet"
    parquet.write_table(table, path, row_group_size=rows)


WRITERS = dict(
    zip(KINDS, (write_folder, write_csv, write_tar, write_tfrecord, write_parquet), strict=True)
)


def files_of(kind, folder):
    """The files that hold the training pictures."""
    ending = {"imagefolder": "jpg", "csv": "jpg"}.get(kind, kind)
    paths = sorted(folder.rglob(f"*.{ending}"))
    return [path for path in paths if "train" in str(path.relative_to(folder))]


def load(kind, folder, **settings):
    settings = {
        "cache_dir": folder.parent / "cache", "workers": 2, "progress": False, "decode": "always",
        "image_size": 8, **settings,
    }  # fmt: skip
    return load_image_data(kind, PictureRequest(folder, **settings))


def encoded(image, kind="JPEG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
