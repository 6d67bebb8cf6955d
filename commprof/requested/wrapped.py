"""What wrappers of models are given: the input of the rules for DistributedDataParallel and FSDP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, NamedTuple

from commprof.requested.errors import RequestedError
from commprof.requested.expectation import Expectation, When, row
from commprof.requested.parameters import item_bytes
from commprof.schema import Op, Purpose

FORWARD: Final = "F"  # whose gradients are to be reduced
FORWARD_ALONE: Final = "f"  # whose gradients stay where they are
NO_GRADIENTS: Final = "e"
BACKWARD: Final = "B"  # that reduces gradients
BACKWARD_ALONE: Final = "b"
UNKNOWN: Final = "?"


class Tensor(NamedTuple):
    """A parameter or a buffer of a wrapped model.

    Attributes:
        name: qualified name.
        extents: its whole shape.
        dtype: element type.
        trained: whether it gets gradients.
    """

    name: str
    extents: tuple[int, ...]
    dtype: str
    trained: bool

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.extents)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.numel * item_bytes(self.dtype)


@dataclass(frozen=True)
class Wrapper:
    """One wrapped model, or one unit of it.

    Attributes:
        kind: a word of ``schema.WRAPPERS``.
        unit: name of the module that it wraps.
        ranks: that reduce or shard together.
        replicas: ranks that hold the same shard; empty where there is one copy.
        arguments: that it was given.
        parameters: in its order.
        buffers: likewise.
    """

    kind: str
    unit: str
    ranks: tuple[int, ...]
    parameters: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...] = ()
    replicas: tuple[int, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def trained(self) -> tuple[Tensor, ...]:
        """The parameters that get gradients."""
        return tuple(each for each in self.parameters if each.trained)

    def sent(
        self,
        purpose: Purpose,
        op: Op,
        payloads: Sequence[int],
        when: When = "step",
        ranks: tuple[int, ...] = (),
        *,
        exact: bool = True,
        note: str = "",
    ) -> list[Expectation]:
        """Messages of its group, or of ``ranks``; none where there are none."""
        group = ranks or self.ranks
        if not payloads:
            return []
        return [row(when, purpose, op, payloads, len(group), note)._replace(groups=(group,), exact=exact)]


def tensors_of(text: str) -> tuple[Tensor, ...]:
    """The tensors that a JSON text lists, each as name, shape, element type, and whether it is trained.

    Raises:
        RequestedError: the text is not such a list.
    """
    try:
        listed = [
            Tensor(str(n), tuple(map(int, shape)), str(d), bool(t)) for n, shape, d, t in json.loads(text)
        ]
    except (TypeError, ValueError) as error:
        raise RequestedError(f"the tensors of a wrapper are said to be {text[:80]!r}: {error}") from error
    if any(extent < 0 for each in listed for extent in each.extents):
        raise RequestedError(f"a tensor of a wrapper has a negative extent: {text[:80]!r}")
    return tuple(listed)


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a wrapper, of their JSON text.

    Raises:
        RequestedError: the text is no JSON object.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise RequestedError(f"the arguments of a wrapper are said to be {text[:80]!r}: {error}") from error
    if not isinstance(found, dict):
        raise RequestedError(
            f"the arguments of a wrapper are said to be {text[:80]!r}, expected a JSON object"
        )
    return found
