"""`--engine ort` without training: a model whose logits ONNX Runtime computes."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from utils.errors import UserError
from utils.inference.export_onnx import TOLERANCE, OnnxSession, close, trace, traceable
from utils.inference.export_samples import PictureSamples, TextSamples
from utils.packed import PackedTokens
from utils.plural import counted

_OTHER_WAY = "leave out --engine ort"


class OnnxModel(nn.Module):
    """Stands in for a model in evaluation: takes its inputs, and ONNX Runtime computes its logits.

    The model itself computes the first batch, too, and a line says how far the probabilities are
    apart.

    Args:
        model: on the CPU; its weights are copied into the graph.
        samples: of its inputs.
        say: called with that line.

    Raises:
        UserError: the model has no ONNX form, ONNX Runtime cannot compute it or, at the first
            batch, gives other answers than PyTorch.
    """

    def __init__(
        self,
        model: nn.Module,
        samples: PictureSamples | TextSamples,
        say: Callable[[str], None],
    ):
        super().__init__()
        self.model, self.samples, self.say = model, samples, say
        plain = traceable(model, _OTHER_WAY)
        try:
            example = samples.prepared(samples.example().numpy()).contiguous()
            proto = trace(plain, example, samples.dynamic_shapes(), "inputs", "logits")
        except UserError as error:
            raise UserError(f"--engine ort: {error}: {_OTHER_WAY}") from error
        self.session = OnnxSession(proto, _OTHER_WAY)
        self.compared = False

    @torch.inference_mode()
    def forward(self, inputs: Tensor | PackedTokens) -> Tensor:
        """(n, channels, height, width) float32, or texts -> logits (n, classes) float32."""
        tensor: Tensor = inputs
        if isinstance(inputs, PackedTokens):
            assert isinstance(self.samples, TextSamples)
            tensor = inputs.padded(self.samples.pad)
        logits = torch.from_numpy(self.session.run(tensor.contiguous().numpy()))
        if not self.compared:
            self._compare(logits.softmax(1).numpy(), self.model(inputs).softmax(1).numpy())
            self.compared = True
        return logits

    def _compare(self, found: np.ndarray, expected: np.ndarray) -> None:
        """Compares probabilities (n, classes) with those of PyTorch."""
        session, what = self.session, self.samples.what
        difference = float(np.abs(found - expected).max())
        if not close(found, expected):
            raise UserError(
                f"--engine ort: on the first {len(found):,} {what} the probabilities of "
                f"{session.engine}, or their logarithms, differ too much from PyTorch's (by "
                f"{difference:.1e}; at most {TOLERANCE:.0e}): {_OTHER_WAY}, or try another version "
                "of onnxruntime"
            )
        self.say(
            f"{session.engine}, {counted(session.threads, 'thread')}: on the first "
            f"{len(found):,} {what} within {difference:.1e} of PyTorch's probabilities"
        )
