"""A backward pass in two halves: first the gradients of the inputs, later the gradients of the weights.

The graph of a forward pass consists of carriers and other nodes. A carrier is a node from which an input can
be reached, and carriers pass gradients to the inputs. The other nodes are weights, and nodes that depend only
on weights.

The first half runs only the carriers. It requests no gradient of a weight, and stores the gradients that
arrive at carriers with weights. The second half starts at these carriers and runs each of them again, but
requests only the gradients of their weights. torch's operations compute only the requested gradients, so
neither half repeats work of the other half.

Functions in Python (torch.autograd.Function) compute all gradients at once. In the first half, the gradients
of their weights are stored. In the second half such a function does not run again, unless its weights are
also used elsewhere.

A hook on a tensor that carries gradients runs in each half, and the result of the first run is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[torch.Tensor | None, ...]
_LEAF: Final = "variable"  # the attribute of an AccumulateGrad node that contains its tensor


def backward_of_inputs(
    ends: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor] | None, inputs: Sequence[torch.Tensor]
) -> WeightGradients:
    """Run the first half of a backward pass, which adds the gradients of ``inputs`` to their ``grad``.

    Args:
        ends: The outputs of the forward pass that require gradients.
        gradients: The gradient of each output, or None for a loss of one element.
        inputs: The inputs, which are leaves. If the outputs depend on no input, all gradients are computed
            here.

    Returns:
        The second half of the backward pass.
    """
    if not ends:
        return WeightGradients([])
    end_gradients = [torch.ones_like(end) for end in ends] if gradients is None else list(gradients)
    graph = _Graph(
        [get_gradient_edge(end) for end in ends], [get_gradient_edge(each).node for each in inputs]
    )
    if not graph.carriers:
        torch.autograd.backward(list(ends), end_gradients)
        return WeightGradients([])
    carried = [
        each
        for each in zip(ends, end_gradients, strict=True)
        if get_gradient_edge(each[0]).node in graph.carriers
    ]
    groups = graph.groups(end_gradients)
    carriers = [each for group in groups for each in group.carriers]
    handles = [handle for each in carriers for handle in each.watch()]
    try:
        torch.autograd.backward(
            [end for end, _ in carried],
            [gradient for _, gradient in carried],
            retain_graph=True,
            inputs=[each for each in inputs if get_gradient_edge(each).node in graph.carriers],
        )
    finally:
        for handle in handles:
            handle.remove()
    return WeightGradients(groups)


class WeightGradients:
    """The second half of a backward pass, which can run once."""

    def __init__(self, groups: list[_Group]) -> None:
        self._groups = groups

    def run(self) -> None:
        """Add the gradients of all weights to their ``grad``."""
        groups, self._groups = self._groups, []
        while groups:
            groups.pop(0).run()


class _Graph:
    """The carriers and weights of an autograd graph.

    Attributes:
        carriers: The nodes from which an input can be reached, including the nodes of the inputs.
    """

    def __init__(self, roots: Sequence[GradientEdge], inputs: Iterable[Node]) -> None:
        self._roots = roots
        self._order = list(_after_children({root.node: None for root in roots}))
        targets = set(inputs)
        self.carriers: set[Node] = set()
        for node in self._order:
            if node in targets or any(child in self.carriers for child, _ in node.next_functions):
                self.carriers.add(node)
        # For each node that is not a carrier, the weights that can be reached from it.
        self._weights: dict[Node, frozenset[Node]] = {}
        for node in self._order:
            if node not in self.carriers:
                below = frozenset[Node]().union(*(self._weights[child] for child, _ in _edges(node)))
                self._weights[node] = below | {node} if _is_weight(node) else below

    def _hanging(self, node: Node) -> frozenset[Node]:
        if node not in self.carriers:
            return self._weights[node]
        hanging = (self._weights[child] for child, _ in _edges(node) if child not in self.carriers)
        return frozenset[Node]().union(*hanging)

    def groups(self, gradients: Sequence[torch.Tensor]) -> list[_Group]:
        """Return the groups of carriers and outputs with weights, in the reverse order of the forward pass.

        Carriers and outputs with a common weight are in the same group.

        Args:
            gradients: The gradients of the roots.
        """
        owners: dict[Node, _Group] = {}
        keepers = self._keepers()
        for node in reversed(self._order):
            weights = self._hanging(node) if node in self.carriers else frozenset()
            if weights:
                sides = [edge for edge in _edges(node) if edge[0] not in self.carriers]
                _add(owners, _Group(weights, [_Carrier(node, sides, keepers[node])]))
        for root, gradient in zip(self._roots, gradients, strict=True):
            if root.node not in self.carriers and self._weights[root.node]:
                _add(owners, _Group(self._weights[root.node], [], [(root, gradient)]))
        return list({id(group): group for group in owners.values()}.values())

    def _keepers(self) -> dict[Node, Node]:
        """Return, for each node, the object that keeps it alive.

        This object is the node itself. For a Python function it is an earlier node, which owns the function.
        """
        keepers = {root.node: root.ownership_token or root.node for root in self._roots}
        for node in reversed(self._order):
            if not _is_in_python(node):
                keepers[node] = node
            for child, _ in _edges(node):
                keepers.setdefault(child, keepers[node])
        return keepers


def _after_children(roots: Iterable[Node]) -> Iterator[Node]:
    """Yield the nodes that can be reached from ``roots``, in post-order: each node after all of its children."""
    visited: set[Node] = set()
    stack: list[tuple[Node, Iterator[tuple[Node, int]]]] = []
    for root in roots:
        if root in visited:
            continue
        visited.add(root)
        stack.append((root, _edges(root)))
        while stack:
            node, children = stack[-1]
            child = next((each for each, _ in children if each not in visited), None)
            if child is None:
                stack.pop()
                yield node
            else:
                visited.add(child)
                stack.append((child, _edges(child)))


def _edges(node: Node) -> Iterator[tuple[Node, int]]:
    """Return the edges along which ``node`` sends gradients, as pairs (receiving node, number of its input)."""
    return ((child, number) for child, number in node.next_functions if child is not None)


def _is_weight(node: Node) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def _is_in_python(node: Node) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction)


class _Carrier:
    """A carrier with weights, and the gradients that it received in the first half.

    Args:
        node: The carrier.
        sides: The edges to nodes from which no input can be reached.
        keeper: The object that keeps the node alive.
    """

    def __init__(self, node: Node, sides: Sequence[tuple[Node, int]], keeper: Node) -> None:
        self.node = node
        self._keeper = keeper
        self._sides = set(sides)
        self._gradients: Gradients = ()
        self._returned: list[tuple[GradientEdge, torch.Tensor]] | None = None

    def watch(self) -> list[Any]:
        """Store the gradients that arrive at the carrier from now on, and return the handles of the hooks."""
        handles = [self.node.register_prehook(self._keep)]
        if _is_in_python(self.node):
            handles.append(self.node.register_hook(self._keep_returned))
        return handles

    def _keep(self, gradients: Gradients) -> None:
        self._gradients = gradients

    def _keep_returned(self, returned: Gradients, arrived: Gradients) -> None:
        pairs = zip(self.node.next_functions, returned, strict=True)
        self._returned = [
            (GradientEdge(*edge), gradient)
            for edge, gradient in pairs
            if edge in self._sides and gradient is not None
        ]

    def starts(self, alone: bool) -> list[tuple[GradientEdge, torch.Tensor]]:
        """Return the edges at which the second half starts, with their gradients.

        Args:
            alone: Whether no other carrier has the same weights.
        """
        if alone and self._returned is not None:
            return self._returned
        return [
            (GradientEdge(self.node, number), gradient)
            for number, gradient in enumerate(self._gradients)
            if gradient is not None
        ]

    def clamp(self) -> Any:
        """Keep the node's stored gradients in the second half, and return the handle of the hook.

        Without the hook, gradients that other carriers send would be added.
        """
        captured = self._gradients
        return self.node.register_prehook(lambda gradients: captured)


@dataclass(slots=True)
class _Group:
    """Weights whose gradients are computed together.

    Attributes:
        weights: The nodes that add to the gradient of a weight.
        carriers: The carriers to which the weights belong.
        loose: The outputs of the forward pass that depend only on weights, with their gradients.
    """

    weights: frozenset[Node]
    carriers: list[_Carrier] = field(default_factory=list)
    loose: list[tuple[GradientEdge, torch.Tensor]] = field(default_factory=list)

    def run(self) -> None:
        alone = len(self.carriers) == 1
        starts = [*self.loose, *(start for each in self.carriers for start in each.starts(alone))]
        if not starts:
            return
        handles = [each.clamp() for each in self.carriers]
        try:
            torch.autograd.backward(
                [edge for edge, _ in starts],
                [gradient for _, gradient in starts],
                # Other groups may need parts of the graph, which is freed with its last reference.
                retain_graph=True,
                inputs=[getattr(node, _LEAF) for node in self.weights],
            )
        finally:
            for handle in handles:
                handle.remove()


def _add(owners: dict[Node, _Group], new: _Group) -> None:
    """Add ``new`` as the group of its weights. Groups that already have some of these weights are merged into it."""
    for each in {id(owners[weight]): owners[weight] for weight in new.weights if weight in owners}.values():
        new = _Group(each.weights | new.weights, each.carriers + new.carriers, each.loose + new.loose)
    owners.update(dict.fromkeys(new.weights, new))
