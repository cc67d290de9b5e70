"""Writes what a trained model predicts for texts without a class, as a CSV file."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ..data.texts.loader import TextLoader
from ..data.texts.rows import read_texts
from ..data.texts.sources import TextRequest
from ..data.texts.token_store import TokenSplit, lines_on_losses
from ..data.texts.tokenizer import encode, tokenizer_from_json
from ..measures.outcomes import answers_of
from ..reporting.answers import AnswerTable, table_file
from ..reporting.csv_fields import safe_text
from ..tasks.sample_names import id_headings, ids_of_lines
from ..training.objective import Precision
from ..weights.card import TextCard
from .predictions import not_a_number

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
    id_columns: Sequence[str] = (),
    before_batch: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Writes `output_csv`, in UTF-8, with a row for each row of the file `path`, in its order: the
    number of its line, its cells in `id_columns`, the text after cleaning, and the answer of the
    model (see AnswerTable), which is empty where the row is bad.

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
    ids, no_ids = ids_of_lines(path, id_columns, request.encoding), [""] * len(id_columns)
    tokenizer, encoded = tokenizer_from_json(card.tokenizer), []
    model.eval()
    with table_file(output_csv) as file:
        table = AnswerTable(file, card.classes, ["line", *id_headings(id_columns), "text"])
        for start in range(0, len(rows), CHUNK):
            chunk = rows[start : start + CHUNK]
            tokens, offsets = encode(tokenizer, [text or "" for _, text in chunk])
            encoded.append(TokenSplit(tokens, offsets, np.zeros(len(chunk), np.int64)))
            loader = TextLoader(
                tokens, offsets, encoded[-1].labels, batch_size=batch_size,
                device=precision.device, max_len=card.max_len,
            )  # fmt: skip
            probabilities = _probabilities(model, loader, precision, before_batch)
            for (line, text), classes, p in zip(chunk, *answers_of(probabilities), strict=True):
                cells = [str(line), *ids.get(line, no_ids), safe_text(text or "")]
                if text is None:
                    table.without_answer(cells)
                    continue
                if np.isnan(p).any():
                    raise not_a_number(f"line {line} of {path}")
                table.answer(cells, classes, p)
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
