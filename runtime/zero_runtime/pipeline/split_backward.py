"""A backward pass in two halves: the gradients of the inputs first, and those of the weights whenever there is time.

The graph of a forward pass falls into nodes from which an input can be reached, which carry gradients to the inputs, and the
rest, which hangs on them: the weights, and what is computed of weights alone. The first half runs the carriers alone, asked
for no weight's gradient, and keeps the gradients that arrive at those with something hanging on them. The second half
starts there, and runs what hangs: each carrier again, but asked for the gradients of its weights alone. Operations of torch
compute only what they are asked for, so that neither half repeats the work of the other. Functions in Python
(torch.autograd.Function) compute everything at once: what they return for the weights is kept, and they do not run again,
unless their weights are used elsewhere too.

A hook on a tensor that carries gradients runs in each half; what it returned in the first one counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[torch.Tensor | None, ...]
_LEAF: Final = "variable"  # what a node that adds to a gradient calls the tensor


def backward_of_inputs(
    ends: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor] | None, inputs: Sequence[torch.Tensor]
) -> WeightGradients:
    """The first half: add the gradients of ``inputs`` to their ``grad``.

    Args:
        ends: of the forward pass, all with a gradient.
        gradients: of each of them; None for a loss of one element.
        inputs: leaves. Where the ends depend on none of them there are no halves: all gradients are computed here.

    Returns:
        The second half.
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
    """The second half of a backward pass, which may be run once."""

    def __init__(self, groups: list[_Group]) -> None:
        self._groups = groups

    def run(self) -> None:
        """Add the gradients of all weights to their ``grad``."""
        groups, self._groups = self._groups, []
        while groups:
            groups.pop(0).run()


class _Graph:
    """What hangs together in a graph.

    Attributes:
        carriers: nodes from which an input can be reached, the inputs' own included.
    """

    def __init__(self, roots: Sequence[GradientEdge], inputs: Iterable[Node]) -> None:
        self._roots = roots
        self._order = list(_after_children({root.node: None for root in roots}))
        targets = set(inputs)
        self.carriers: set[Node] = set()
        for node in self._order:
            if node in targets or any(child in self.carriers for child, _ in node.next_functions):
                self.carriers.add(node)
        # The weights that hang on a node which is no carrier.
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
        """Carriers and ends with weights, those with a weight in common together, the last of the forward pass first.

        Args:
            gradients: of the roots.
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
        """What to hold so that a node stays: itself, or what leads to it, since that alone owns a function in Python."""
        keepers = {root.node: root.ownership_token or root.node for root in self._roots}
        for node in reversed(self._order):
            if not _is_in_python(node):
                keepers[node] = node
            for child, _ in _edges(node):
                keepers.setdefault(child, keepers[node])
        return keepers


def _after_children(roots: Iterable[Node]) -> Iterator[Node]:
    """The nodes that can be reached from ``roots``, each after all that it leads to."""
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
    """Where ``node`` sends gradients: (node, number among what that one receives)."""
    return ((child, number) for child, number in node.next_functions if child is not None)


def _is_weight(node: Node) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def _is_in_python(node: Node) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction)


class _Carrier:
    """A carrier with weights, and what it got in the first half.

    Args:
        node: the carrier.
        sides: where it sends gradients that no input needs.
        keeper: what keeps it alive.
    """

    def __init__(self, node: Node, sides: Sequence[tuple[Node, int]], keeper: Node) -> None:
        self.node = node
        self._keeper = keeper
        self._sides = set(sides)
        self._gradients: Gradients = ()
        self._returned: list[tuple[GradientEdge, torch.Tensor]] | None = None

    def watch(self) -> list[Any]:
        """Keep what arrives from now on. Returns the handles of the hooks."""
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
        """Where the second half starts, and with which gradients.

        Args:
            alone: whether no other carrier has the same weights.
        """
        if alone and self._returned is not None:
            return self._returned
        return [
            (GradientEdge(self.node, number), gradient)
            for number, gradient in enumerate(self._gradients)
            if gradient is not None
        ]

    def clamp(self) -> Any:
        """Let the node have what it had, whatever another carrier of the second half sends it. Returns the hook's handle."""
        captured = self._gradients
        return self.node.register_prehook(lambda gradients: captured)


@dataclass(slots=True)
class _Group:
    """Weights whose gradients are computed together.

    Attributes:
        weights: nodes that add to a gradient.
        carriers: the carriers that they hang on.
        loose: ends of the forward pass that depend on weights alone, with their gradients.
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
                retain_graph=True,  # of which other groups may need a part; it goes when nobody holds it
                inputs=[getattr(node, _LEAF) for node in self.weights],
            )
        finally:
            for handle in handles:
                handle.remove()


def _add(owners: dict[Node, _Group], new: _Group) -> None:
    """Note ``new`` as the group of its weights, made one with all groups that have some of them already."""
    for each in {id(owners[weight]): owners[weight] for weight in new.weights if weight in owners}.values():
        new = _Group(each.weights | new.weights, each.carriers + new.carriers, each.loose + new.loose)
    owners.update(dict.fromkeys(new.weights, new))
