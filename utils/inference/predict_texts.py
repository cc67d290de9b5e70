"""What a trained model says of texts that nobody has labelled: a CSV file with a row for each."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from utils.data.texts.loader import TextLoader
from utils.data.texts.rows import read_texts
from utils.data.texts.tokenizer import encode, tokenizer_from_json
from utils.errors import UserError
from utils.files import written_aside
from utils.inference.predict_pictures import quoted, safe_text
from utils.training.objective import Precision
from utils.weights.card import TextCard

CHUNK = 8192  # texts that are encoded at a time, and sorted by length


def predict_texts(
    model: nn.Module,
    card: TextCard,
    path: str | Path,
    *,
    output_csv: str | Path,
    text_columns: Sequence[str] | None = None,
    batch_size: int,
    precision: Precision,
    device: torch.device,
    on_bad: str = "error",
    interrupted: Callable[[], bool] = lambda: False,
) -> int | None:
    """Writes a row for each text of a file, in its order: the number of its line, the text as the
    model reads it, the most probable class and the probability of every class (0 to 1).

    UTF-8; what a spreadsheet would take for a formula has an apostrophe before it. The file is
    there when all is done, or not at all.

    Args:
        model: on `device`; PackedTokens -> logits (n, classes).
        path: .csv, .tsv, .jsonl, or .txt with a text a line (utils/data/texts/rows.py).
        text_columns: None: guessed.
        on_bad: "error" or "skip", for rows without a text.
        interrupted: asked before every batch.

    Returns:
        the number of texts; None when `interrupted()` turned true: no file is written then.

    Raises:
        UserError: the file or a row of it cannot be used, or an answer is not a number.
    """
    rows = read_texts(path, text_columns or (), on_bad, card.clean, card.classes)
    tokenizer = tokenizer_from_json(card.tokenizer)
    training = model.training
    model.eval()
    try:
        with (
            written_aside(output_csv) as aside,
            open(aside, "w", encoding="utf-8", errors="backslashreplace", newline="") as file,
        ):
            names = [quoted(safe_text(name)) for name in card.classes]
            file.write(",".join(["line", "text", "class", *names]) + "\n")
            for start in range(0, len(rows), CHUNK):
                chunk = rows[start : start + CHUNK]
                tokens, offsets = encode(
                    tokenizer, [text for _, text in chunk], max_tokens=card.max_len
                )
                loader = TextLoader(
                    tokens, offsets, np.zeros(len(chunk), np.int64), batch_size=batch_size,
                    device=device, max_len=card.max_len,
                )  # fmt: skip
                probabilities = np.empty((len(chunk), len(card.classes)), np.float32)
                answers = _answers(model, loader, precision, interrupted)
                if answers is None:
                    raise _Interrupted
                probabilities[loader.order(0)] = answers
                for (line, text), p in zip(chunk, probabilities, strict=True):
                    if np.isnan(p).any():
                        raise UserError(
                            f"the model's answer to line {line} of {path} is not a number: try "
                            "--precision fp32, or another checkpoint"
                        )
                    cells = [quoted(safe_text(text)), names[p.argmax()], *(f"{x:.6f}" for x in p)]
                    file.write(f"{line},{','.join(cells)}\n")
    except _Interrupted:
        return None
    finally:
        model.train(training)
    return len(rows)


class _Interrupted(Exception):
    """Leaves the blocks in which a file is being written."""


def _answers(model, loader, precision: Precision, interrupted) -> np.ndarray | None:
    """(texts, classes), probabilities in the loader's order."""
    parts = []
    with torch.inference_mode():
        for batch in loader.epoch():
            if interrupted():
                return None
            with precision.autocast():
                logits = model(batch.inputs)
            parts.append(logits.float().softmax(1))
    return torch.cat(parts).cpu().numpy()
