"""PyTorch's backward pass without its engine, which asks the driver of a GPU for streams."""

from collections import Counter

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


def run_backward(
    outputs, gradients, keep_graph, create_graph, inputs, *_, accumulate_grad: bool, **__
):
    """Replaces the engine behind torch.autograd.backward and grad, without hooks, streams and
    threads: calls each node of the graph when all its gradients have arrived."""
    with torch.set_grad_enabled(create_graph):
        return _walk(outputs, gradients, inputs, accumulate_grad)


def _walk(outputs, gradients, inputs, accumulate: bool):
    roots = [_edge(output) for output in outputs]
    wanted = [_edge(each) for each in inputs]
    nodes = _needed({node for node, _ in roots}, {node for node, _ in wanted})
    waits_for = Counter(
        follower for node in nodes for follower, _ in node.next_functions if follower in nodes
    )
    arrived: dict = {node: {} for node in nodes}  # {output of the forward pass: gradient}
    for (node, number), gradient in zip(roots, gradients, strict=True):
        _arrive(arrived, node, number, gradient)
    found, ready = {}, [node for node in nodes if not waits_for[node]]
    while ready:
        node = ready.pop()
        own = arrived.pop(node)
        found |= {(node, number): own.get(number) for at, number in wanted if at is node}
        results = _call(node, own, not wanted or accumulate)
        for (follower, number), gradient in zip(node.next_functions, results, strict=True):
            if follower not in nodes:
                continue
            if gradient is not None:
                _arrive(arrived, follower, number, gradient)
            waits_for[follower] -= 1
            if not waits_for[follower]:
                ready.append(follower)
    return tuple(found.get(edge) for edge in wanted)


def _edge(output: Tensor | GradientEdge) -> tuple:
    edge = get_gradient_edge(output) if isinstance(output, Tensor) else output
    return edge.node, edge.output_nr


def _needed(roots: set, wanted: set) -> dict:
    """The nodes on paths from `roots` to `wanted`; all of them if nothing is wanted."""
    before: dict = {root: [] for root in roots}  # for each node, those that hand it gradients
    stack = list(roots)
    while stack:
        node = stack.pop()
        for follower, _ in node.next_functions:
            if follower is None:
                continue
            if follower not in before:
                before[follower] = []
                stack.append(follower)
            before[follower].append(node)
    if not wanted:
        return before
    needed, stack = {}, [node for node in wanted if node in before]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed[node] = None
            stack += before[node]
    return needed


def _arrive(arrived: dict, node, number: int, gradient: Tensor) -> None:
    """Adds a gradient to those that have arrived there, in shape and dtype of the forward pass."""
    made = node._input_metadata[number]
    if gradient.shape != made.shape:
        gradient = gradient.sum_to_size(made.shape)
    if gradient.dtype != made.dtype:
        gradient = gradient.to(made.dtype)
    if gradient.device != made.device:
        name = node.name()
        raise AssertionError(f"{name}: a gradient on {gradient.device} of one on {made.device}")
    before = arrived[node].get(number)
    arrived[node][number] = gradient if before is None else before + gradient


def _call(node, gradients: dict, accumulate: bool) -> tuple:
    """The node's results: a gradient for each of `node.next_functions`."""
    if not gradients or (not node.next_functions and not accumulate):
        return (None,) * len(node.next_functions)
    given = [gradients.get(number) for number in range(len(node._input_metadata))]
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        results = node(*given)
        return results if isinstance(results, tuple) else (results,)
    for number, made in enumerate(node._input_metadata):
        if given[number] is None:
            given[number] = torch.zeros(made.shape, dtype=made.dtype, device=made.device)
    results = node.apply(*given)
    results = results if isinstance(results, tuple) else (results,)
    # It has a result for every argument of `forward`, tensor or not.
    results = (r for r, needs in zip(results, node.needs_input_grad, strict=False) if needs)
    return tuple(next(results) if follower else None for follower, _ in node.next_functions)
