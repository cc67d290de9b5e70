"""Export to safetensors. The file is read back before it gets its final name."""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from ..errors import UserError
from ..files import written_aside
from ..weights.card import ModelCard, TextCard
from ..weights.files import CARD
from ..weights.pretrained import fit_weights, load_pretrained
from .export_samples import SAMPLES, plain_copy, samples_for


def export_safetensors(
    model: nn.Module,
    card: ModelCard | TextCard,
    path: Path,
    architecture: str = "",
    weights: str = "",
) -> str:
    """Writes the weights. One metadata key, `CARD`, has as JSON `card`, `architecture`, and
    `weights`, which says which ones they are.

    `load_pretrained` and any other reader of safetensors can read the file. As a check it is
    loaded into a copy of the model whose weights were set to zero; for random inputs the copy must
    give the same outputs to the bit. The same weights give the same bytes.

    Returns:
        the outcome of the check, in one line.

    Raises:
        UserError: the file cannot be written, or the check fails.
    """
    model = plain_copy(model)
    tensors = _apart(model.state_dict())
    text = json.dumps({"architecture": architecture, "weights": weights} | card.to_dict())
    with written_aside(path) as aside:
        aside.write_bytes(to_bytes(tensors, metadata={CARD: text}))
        restored = copy.deepcopy(model)
        for tensor in restored.state_dict().values():
            tensor.zero_()
        fit_weights(restored, load_pretrained(aside))
        samples = samples_for(card)
        inputs = samples.prepared(samples.random())
        with torch.inference_mode():
            if not torch.equal(model(inputs), restored(inputs)):
                raise UserError(
                    f"{path}: the weights read back give other outputs than the model; the disk or "
                    "the memory is at fault, try again"
                )
    return f"read back, and equal to the bit on {SAMPLES} random {samples.what}"


def _apart(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous, sorted by name, and with a copy where tensors share memory, as tied weights do:
    the file has every name."""
    tensors, seen = {}, set()
    for name, tensor in sorted(state.items()):
        tensor = tensor.contiguous()
        memory = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return tensors
