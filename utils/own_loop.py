"""For a training loop of your own: what scripts copy from each other."""

import math
import random

import numpy as np
import torch


def same_seeds(seed: int) -> None:
    """Seeds Python, NumPy and PyTorch (the CPU and all GPUs), and lets cuDNN take only kernels that
    give the same result each time. To be called before the model is made."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


class EarlyStopping:
    """Says when the validation loss has not fallen for `patience` evaluations (1 or more) by more
    than `delta`: `if stopping(val_loss): break`. Several processes must give it the same loss;
    `verbose` prints how many have passed.

    Attributes: `best`, the lowest loss, infinite at first (one that is not a number is never
    lower); `counter`, evaluations since then; `early_stop`, what the last call has returned.
    """

    def __init__(self, patience: int = 7, verbose: bool = False, delta: float = 0.0):
        if patience < 1 or not delta >= 0:
            raise ValueError(f"patience is 1 or more, delta 0 or more; not {patience}, {delta}")
        self.patience, self.verbose, self.delta = patience, verbose, delta
        self.best, self.counter, self.early_stop = math.inf, 0, False

    def __call__(self, val_loss: float, model: object = None) -> bool:
        """Counts an evaluation; returns whether to stop. `counter` is 0 after the best one.
        TypeError: a model is given, as to classes that save it."""
        if model is not None:
            raise TypeError("no model is saved: leave it out, and save it where counter is 0")
        is_better = float(val_loss) < self.best - self.delta
        self.best = float(val_loss) if is_better else self.best
        self.counter = 0 if is_better else self.counter + 1
        if self.verbose and not is_better:
            print(f"early stopping: {self.counter} of {self.patience}", flush=True)
        self.early_stop = self.counter >= self.patience
        return self.early_stop
