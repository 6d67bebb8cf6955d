"""What a forward and backward pass keeps alive, from one parameter's gradient to the next."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """The time between the gradients of two parameters; the first span includes the forward pass.

    Attributes:
        most: most bytes alive at once, without parameters and the gradients of earlier spans.
        last: bytes alive at the end, with the gradient that is then complete.
        parameter: whose gradient that is; empty for the last span.
    """

    most: int
    last: int
    parameter: str


class Activations(NamedTuple):
    """The tensors of one forward and backward pass, without parameters and their gradients.

    Attributes:
        spans: in the order of the pass.
        note: how they were found.
        is_traced: whether the gradients became ready in the order of the spans, in a pass of the model itself.
    """

    spans: tuple[Span, ...]
    note: str
    is_traced: bool = False

    @property
    def most_bytes(self) -> int:
        """Most bytes that are alive at once."""
        return max(each.most for each in self.spans)

    @property
    def gradient_order(self) -> tuple[str, ...] | None:
        """Names of parameters in the order in which their gradients became ready; None where no pass shows it."""
        names = tuple(each.parameter for each in self.spans if each.parameter)
        return names if self.is_traced and len(set(names)) == len(names) else None
