"""Lines on what is lost of pictures, and on pictures that are in two splits."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from .decode import strict_pillow
from .decoded import kept
from .file_formats import open_image
from .image_data import Form, ImageData

VERSION = 1  # of the lines; part of the name of the file that keeps them
SAMPLE = 200  # pictures that are looked at
FLAT = 16  # of 255: the most that the pixels of a nearly constant picture differ by
FEW = 0.02  # share of constant pictures of which nothing is said
WIDE = 1.5  # ratio of the sides beyond which a crop loses much


def with_notes(data: ImageData, folder: Path, form: Form, skipped: list[str]) -> ImageData:
    """The data set, of DecodedSplit or EncodedSplit, with lines that are kept in the folder of its
    cache, after one on the files left out, `skipped`."""

    def found() -> list[str]:
        train: Any = data.train
        if train.origins is None or train is data.test:  # of an earlier cache; of a trained model
            return []
        others: dict[str, Any] = {"validation": data.val, "test": data.test}
        with strict_pillow():
            notes = _on_looks(train, form)
            for name, split in others.items():
                notes += _on_repeats(name, split, train) if split else []
        return notes

    path = folder / f"notes{VERSION}-{data.fingerprint[:16]}.json"
    first = "; ".join([*skipped[:3], *["..."] * (len(skipped) > 3)])
    left_out = [f"left out by --on_bad skip: {first}"] if skipped else []
    return replace(data, notes=[*left_out, *kept(path, found)])


def _on_looks(train, form: Form) -> list[str]:
    rows = _rows(train)[np.unique(np.linspace(0, len(train) - 1, SAMPLE).astype(int))].tolist()
    flat, different, ratios, notes = [], set(), [1.0], []
    for row in rows:
        pixels = train.picture(row)
        different.add(hash(pixels.tobytes()))
        if int(pixels.max()) - int(pixels.min()) <= FLAT:
            flat.append(train.file(row))
        with contextlib.suppress(Exception), open_image(train.file(row)) as image:
            ratios.append(max(image.size) / min(image.size))
    of_all = f"of {len(rows):,} training pictures that were looked at"
    if len(flat) > FEW * len(rows):
        notes.append(
            f"{len(flat):,} {of_all} come out of one colour or nearly so, such as "
            f"{_name(flat[0])}: if they have 16-bit values, --white_level is the largest of these; "
            "if they are transparent, see --transparency; else look at them"
        )
    elif len(different) <= len(rows) / 2:
        repeats = len(rows) - len(different)
        notes.append(f"{repeats:,} {of_all} come out the same as others: look at them")
    if form.resize_mode == "crop" and (ratio := np.median(ratios)) > WIDE:
        notes.append(
            f"half {of_all} have sides of {ratio:.1f} to 1 or more, and lose "
            f"{100 * (1 - 1 / ratio):.0f} % or more as they are cropped to the centre: "
            "--resize_mode squash or letterbox keeps all"
        )
    return notes


def _on_repeats(name: str, tested, trained) -> list[str]:
    rows, sums = _rows(tested), tested.origins[_rows(tested), 1]
    values, first = np.unique(trained.origins[_rows(trained), 1], return_index=True)
    place = np.searchsorted(values, sums).clip(max=len(values) - 1)
    alike = np.flatnonzero(values[place] == sums)
    step = max(1, len(alike) // SAMPLE)
    pairs = zip(rows[alike], _rows(trained)[first[place[alike]]], strict=True)
    same = [
        " = ".join(dict.fromkeys([_name(tested.file(i)), _name(trained.file(j))]))
        for i, j in itertools.islice(pairs, None, None, step)
        if np.array_equal(tested.picture(i), trained.picture(j))
    ]
    count = f"{'about ' if step > 1 else ''}{len(same) * step:,} of {len(tested):,} {name} pictures"
    files = ", ".join(same[:3] + ["..."] * (len(same) > 3))
    what = f"{count} are training pictures, too, which flatters the figures: {files}"
    return [what] if same else []


def _rows(split) -> np.ndarray:
    return np.arange(len(split)) if split.rows is None else split.rows


def _name(file) -> str:
    return getattr(file, "name", file)
