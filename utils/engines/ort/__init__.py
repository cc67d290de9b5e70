"""`--engine ort`: forward and backward pass by ONNX Runtime's training core.

The parameters, the loss and the optimizer stay PyTorch's. `module.py` stands in for the model in
training, and compares each new graph with PyTorch; `export.py` writes the graph; `graph.py` is what
autograd sees of it; `session.py` adds the gradient, runs it, and tries it in another process first.

Upstream has ended this part of ONNX Runtime: 1.19.2 is its last version.
"""

from ...errors import UserError


def refusal(reason: str) -> UserError:
    """That ONNX Runtime cannot train a model, and why."""
    return UserError(f"--engine ort: {reason}; take --engine torch")
