"""A trained model as one safetensors file, checked before it takes its name."""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import save as to_bytes
from torch import nn

from utils.errors import UserError
from utils.files import written_aside
from utils.inference.export_samples import SAMPLES, plain_copy, samples_for
from utils.weights.card import ModelCard, TextCard
from utils.weights.files import CARD
from utils.weights.pretrained import fit_weights, load_pretrained


def export_safetensors(
    model: nn.Module, card: ModelCard | TextCard, path: str | Path, architecture: str = ""
) -> str:
    """Writes the weights, with `card` and `architecture` in the one metadata key, `CARD`.

    `load_pretrained` reads the file, and so does every other reader of safetensors. It is loaded
    on the spot into a copy of the model that was emptied before, which must then answer random
    inputs with the same bits. The same weights give the same bytes.

    Returns what was checked. Raises UserError where the file cannot be written.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise UserError(f"{path}: the name of the file must end in .safetensors")
    model = plain_copy(model)
    tensors = {name: tensor.contiguous() for name, tensor in sorted(model.state_dict().items())}
    text = json.dumps({"architecture": architecture} | card.to_dict())
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
                    f"{path}: what was read back answers otherwise than the model; the disk or the "
                    "memory is at fault, try again"
                )
    return f"read back, and equal to the bit on {SAMPLES} random {samples.what}"
