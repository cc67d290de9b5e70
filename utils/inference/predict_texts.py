"""Writes what a trained model predicts for texts without a class, as a CSV file."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ..data.texts.loader import TextLoader
from ..data.texts.rows import read_texts
from ..data.texts.sources import TextRequest
from ..data.texts.token_store import TokenSplit, lines_on_losses
from ..data.texts.tokenizer import encode, tokenizer_from_json
from ..reporting.csv_fields import quoted, safe_text
from ..training.objective import Precision
from ..weights.card import TextCard
from .predictions import evaluating, not_a_number, predictions_file

CHUNK = 8192  # texts that are encoded, and sorted by length, at a time


def predict_texts(
    model: nn.Module,
    card: TextCard,
    path: Path,
    request: TextRequest,
    *,
    output_csv: str | Path,
    batch_size: int,
    precision: Precision,
    before_batch: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Writes `output_csv`, in UTF-8, with a row for each row of the file `path`, in its order: the
    number of its line, the text as the model reads it, the most probable class, and the probability
    of every class (0 to 1). These are empty where the row is bad.

    A cell that a spreadsheet would take for a formula gets an apostrophe before it. The output
    appears only when it is complete.

    Args:
        model: on the device of `precision`; PackedTokens -> logits (n, classes).
        path: .csv, .tsv, .jsonl, or .txt with one text a line.
        request: how the file is read, see `read_texts` in utils/data/texts/rows.py.
        before_batch: called before each forward pass; if it raises, no file is written.
        say: is given a line on the columns that are taken, and on bad rows.

    Returns:
        the number of texts.

    Raises:
        UserError: the file or a row of it cannot be used, or an answer is not a number.
    """
    rows = read_texts(path, request, classes=card.classes, line_end=card.line_end, say=say)
    tokenizer, encoded = tokenizer_from_json(card.tokenizer), []
    with evaluating(model), predictions_file(output_csv) as file:
        names = [quoted(safe_text(name)) for name in card.classes]
        file.write(",".join(["line", "text", "class", *names]) + "\n")
        for start in range(0, len(rows), CHUNK):
            chunk = rows[start : start + CHUNK]
            tokens, offsets = encode(tokenizer, [text or "" for _, text in chunk])
            encoded.append(TokenSplit(tokens, offsets, np.zeros(len(chunk), np.int64)))
            loader = TextLoader(
                tokens, offsets, encoded[-1].labels, batch_size=batch_size,
                device=precision.device, max_len=card.max_len,
            )  # fmt: skip
            probabilities = _probabilities(model, loader, precision, before_batch)
            for (line, text), p in zip(chunk, probabilities, strict=True):
                if text is None:
                    file.write(f"{line},,{',' * len(names)}\n")
                    continue
                if np.isnan(p).any():
                    raise not_a_number(f"line {line} of {path}")
                cells = [quoted(safe_text(text)), names[p.argmax()], *(f"{x:.6f}" for x in p)]
                file.write(f"{line},{','.join(cells)}\n")
    splits = {"predicted": encoded}
    for note in lines_on_losses(splits, card.tokenizer, card.max_len, trained=True):
        say(note)
    return sum(text is not None for _, text in rows)


def _probabilities(model, loader: TextLoader, precision: Precision, before_batch) -> np.ndarray:
    """(texts, classes) float32, in the order of the texts, not of the loader."""
    parts = []
    with torch.inference_mode():
        for batch in loader.epoch():
            before_batch()
            with precision.autocast():
                logits = model(batch.inputs)
            parts.append(logits.float().softmax(1))
    found = torch.cat(parts).cpu().numpy()
    probabilities = np.empty_like(found)
    probabilities[loader.order(0)] = found
    return probabilities
