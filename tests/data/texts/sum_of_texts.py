"""Whether two data sets are the same, in one number."""

import hashlib
import json

from utils.data.texts.sources import TextData


def sum_of(data: TextData) -> str:
    """SHA-256 (hexadecimal) over class names and each split's name, size, labels and texts."""
    digest = hashlib.sha256(json.dumps(data.classes).encode())
    for name, split in (("train", data.train), ("test", data.test), ("val", data.val)):
        if split is None:
            continue
        digest.update(json.dumps([name, len(split)]).encode())
        digest.update(split.labels.astype("<i8").tobytes())
        for text in split.texts:
            content = text.encode()
            digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()
