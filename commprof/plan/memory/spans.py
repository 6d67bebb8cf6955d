"""Data classes for the bytes that a forward and backward pass keeps alive between consecutive gradients."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """The interval between the gradients of two parameters. The first span includes the forward pass.

    Attributes:
        most: The maximum number of bytes alive at once, without parameters and the gradients of earlier spans.
        last: The number of bytes alive at the end of the span, with the gradient that is complete there.
        parameter: The name of the parameter of this gradient. Empty for the last span.
    """

    most: int
    last: int
    parameter: str


class Activations(NamedTuple):
    """The tensors of one forward and backward pass, without parameters and their gradients.

    Attributes:
        spans: The spans in the order of the pass.
        note: The method that determined the spans, as text.
        is_traced: Whether the spans are from a traced pass of the model, so that their order is the order in which
            the gradients became ready.
    """

    spans: tuple[Span, ...]
    note: str
    is_traced: bool = False

    @property
    def most_bytes(self) -> int:
        """The maximum number of bytes that are alive at once."""
        return max(each.most for each in self.spans)

    @property
    def gradient_order(self) -> tuple[str, ...] | None:
        """The names of parameters in the order in which their gradients became ready, or None if it is not known."""
        names = tuple(each.parameter for each in self.spans if each.parameter)
        return names if self.is_traced and len(set(names)) == len(names) else None
