"""`--cuda_graphs`: a whole optimizer step as one CUDA graph, captured once and replayed.

GraphedStep takes the steps (see graphed_step.py), with graphs that CudaRecorder captures (see
capture.py). This file says which steps a graph can hold.
"""

from utils.data.loader import Loader
from utils.engines.capture import CudaRecorder
from utils.engines.engine import Engine, RunFacts
from utils.engines.graphed_step import GraphedStep
from utils.optim.table import OPTIMIZERS
from utils.reporting.console import Console
from utils.training.train_step import StepParts


class CudaGraphs(Engine):
    """An Engine for steps that are all alike and in which the host decides nothing. Unless graphs
    were asked for, they are used only if steps are launch-bound."""

    def why_not(self, facts: RunFacts) -> str | None:
        if facts.device.type != "cuda":
            return "there is no GPU"
        if facts.compiled:
            return "--compile makes kernels of its own"
        if facts.texts:
            return "every batch of texts has other lengths"
        if facts.scales_loss:
            return "the loss scaler of fp16 decides on the host; take --precision bf16"
        if facts.processes > 1:
            return "there are several processes"
        if facts.accumulation > 1:
            return "gradients are accumulated over several batches"
        if not facts.capturable:
            names = " or ".join(name for name, entry in OPTIMIZERS.items() if entry.capturable)
            return f"the optimizer counts on the host; take --optimizer {names}, no --lookahead_k"
        if facts.learns_mixing:
            return "--meta_form sample learns from every batch; take --meta_form policy"
        if facts.unfreezes:
            return "--unfreeze_epoch changes what is trained"
        if facts.recomputes:
            return "--grad_checkpointing handles random states on the host"
        if facts.external_model and not self.asked:
            return "a model from elsewhere may decide something on the host"
        return None

    def steps(self, parts: StepParts, loader: Loader, console: Console, advice: str) -> GraphedStep:
        recorder = CudaRecorder(parts.precision.device)
        return GraphedStep(parts, loader, console, recorder, self.asked)
