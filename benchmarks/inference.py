#!/usr/bin/env python3
"""The model call of --predict by ONNX Runtime (--engine ort), against PyTorch, in fp32 on a CPU.

    python benchmarks/inference.py

Each calls the same model with the same batches in a process of its own, in turns, after the export.
"""

import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.child import Child
from benchmarks.common import parser, ratios, report, side_by_side
from benchmarks.made_up import CPU, MEAN, STD, lengths_like_news, texts
from utils.data.texts.loader import TextLoader
from utils.entry import environment_of_entries
from utils.inference.export_samples import PictureSamples, TextSamples
from utils.inference.onnx_model import OnnxModel
from utils.machine.host_memory import keep_freed_memory
from utils.models.resnet import ResNet
from utils.models.transformer import Transformer
from utils.weights.card import ModelCard

SECONDS = 2.0  # of a turn, at least
BATCHES = {"ResNet-50, 224 pixels": 16, "Transformer, news": 64}
SIDE, VOCABULARY, MAX_LEN = 224, 20_000, 256


class Predicting:
    """A model with random weights, and batches for it."""

    def __init__(self, engine: str, case: str, threads: int):
        keep_freed_memory()  # as the entry scripts do
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        n, rng = BATCHES[case], np.random.default_rng(0)
        if case.startswith("ResNet"):
            model = ResNet(50, 10, stem="imagenet").to(memory_format=torch.channels_last).eval()
            self.inputs = [torch.randn(n, 3, SIDE, SIDE).to(memory_format=torch.channels_last)]
            samples = PictureSamples(ModelCard(tuple("0123456789"), MEAN, STD, SIDE, SIDE, 3))
        else:
            model = Transformer(VOCABULARY, 4, 4, 256, 4, 512, MAX_LEN).eval()
            made = texts(lengths_like_news(8 * n, MAX_LEN, rng), VOCABULARY, rng)
            loader = TextLoader(*made, batch_size=n, device=CPU, max_len=MAX_LEN)
            self.inputs = [batch.inputs for batch in loader.epoch()]
            samples = TextSamples(VOCABULARY, 0, MAX_LEN)
        self.model = OnnxModel(model, samples, print) if engine == "ort" else model

    @torch.inference_mode()
    def turn(self) -> float:
        """Samples per second."""
        started, samples = time.perf_counter(), 0
        while time.perf_counter() - started < SECONDS:
            samples += sum(len(self.model(inputs)) for inputs in self.inputs)
        return samples / (time.perf_counter() - started)


def main() -> None:
    options, results, names = parser(__doc__).parse_args(), {}, ("ort", "torch")
    for case, batch in BATCHES.items():
        made = {name: partial(Predicting, name, case, options.threads) for name in names}
        children = {name: Child(make, environment_of_entries()) for name, make in made.items()}
        runs = {name: partial(child.call, "turn") for name, child in children.items()}
        speeds = side_by_side(runs, options.repetitions)
        for child in children.values():
            child.close()
        case = f"{case}, batch {batch}"
        results[case] = {"samples_per_second": speeds, "ratios": ratios(speeds, names)}
    report("ONNX Runtime against PyTorch", results, options.json, threads=options.threads)


if __name__ == "__main__":
    main()
