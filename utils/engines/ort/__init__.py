"""`--engine ort`: forward and backward pass by ONNX Runtime's training core.

The parameters, the loss and the optimizer stay PyTorch's. `module.py` stands in for the model in
training, `export.py` writes its graph, `session.py` adds the gradient and runs it, `checks.py`
compares it with PyTorch, after `rehearsal.py` has tried it in a process of its own.

Upstream has ended this part of ONNX Runtime: 1.19.2 is its last version.
"""
