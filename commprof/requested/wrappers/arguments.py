"""The arguments of torch's wrappers, which are the input of the rules for DistributedDataParallel and FSDP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, NamedTuple

from commprof.requested.errors import RequestedError
from commprof.requested.expectation import Expectation, When, row
from commprof.requested.parameters import item_bytes
from commprof.schema import Op, Purpose

FORWARD: Final = "F"  # a forward pass whose gradients will be reduced
FORWARD_ALONE: Final = "f"  # a forward pass whose gradients will not be reduced
NO_GRADIENTS: Final = "e"  # a forward pass without gradients
BACKWARD: Final = "B"  # a backward pass that reduces gradients
BACKWARD_ALONE: Final = "b"  # a backward pass that does not reduce gradients
DISTRIBUTED: Final = "what the program itself distributes (distribute_tensor) is not covered by the rules"


class Tensor(NamedTuple):
    """A parameter or a buffer of a wrapped model.

    Attributes:
        name: The qualified name.
        extents: The full shape.
        dtype: The element type.
        trained: Whether the tensor gets gradients.
    """

    name: str
    extents: tuple[int, ...]
    dtype: str
    trained: bool

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.extents)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.numel * item_bytes(self.dtype)


@dataclass(frozen=True)
class Wrapper:
    """One wrapped model, or one unit of it.

    Attributes:
        kind: A value of ``schema.WRAPPERS``.
        unit: The name of the wrapped module.
        ranks: The ranks that reduce or shard together.
        parameters: The parameters, in the order of the wrapper.
        buffers: The buffers, in the order of the wrapper.
        replicas: The ranks that have the same shard. It is empty if there is only one copy.
        arguments: The arguments of the wrapper by name.
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
        """Return messages of the wrapper's group, or of ``ranks``. Without payloads the list is empty."""
        group = ranks or self.ranks
        if not payloads:
            return []
        return [row(when, purpose, op, payloads, len(group), note)._replace(groups=(group,), exact=exact)]


@dataclass(frozen=True)
class ShardedModel:
    """The common base of the rules for FSDP 1 and FSDP 2: the units of one model, as one rank published them.

    Attributes:
        units: The wrapper of each unit.
        rank: The rank that published the units. It counts the messages of a group only if it is the group's first rank.
    """

    units: tuple[Wrapper, ...]
    rank: int

    @property
    def wrapper(self) -> Wrapper:
        """The first unit."""
        return self.units[0]

    def construction(self) -> list[Expectation]:
        """Return the messages at construction. The rules cover none."""
        return []

    def speaks(self, ranks: Sequence[int]) -> bool:
        """Return whether this rank counts the messages of the group of ``ranks``."""
        return bool(ranks) and min(ranks) == self.rank

    def matches(self, passes: str, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
        """Yield the match of each pass in ``passes`` by :func:`matches`. The group ``unit`` is the number of a unit."""
        return matches(passes, pattern, "which passes a model of FSDP ran", len(self.units))


def matches(
    passes: str, pattern: re.Pattern[str], subject: str, units: int | None = None
) -> Iterator[re.Match[str]]:
    """Yield the match of each pass in ``passes``.

    Args:
        passes: The text that lists the passes in order.
        pattern: The pattern of one pass.
        subject: The subject of the error message if a pass does not match.
        units: The number of units, if the pattern has a group ``unit``.

    Raises:
        RequestedError: a pass is not known.
    """
    at = 0
    while at < len(passes):
        match = pattern.match(passes, at)
        if match is None or (units is not None and int(match["unit"] or 0) >= units):
            raise RequestedError(f"{subject} is not known: {passes[at : at + 20]!r}")
        yield match
        at = match.end()


def tensors_of(text: str) -> tuple[Tensor, ...]:
    """Return the tensors in a JSON list, in which each entry has name, shape, element type, and whether it is trained.

    Raises:
        RequestedError: the text is not such a list.
    """
    try:
        listed = [
            Tensor(str(n), tuple(map(int, shape)), str(d), bool(t)) for n, shape, d, t in json.loads(text)
        ]
    except (TypeError, ValueError) as error:
        raise RequestedError(
            f"the tensors of a wrapper are {text[:80]!r}, expected a JSON list: {error}"
        ) from error
    if any(extent < 0 for each in listed for extent in each.extents):
        raise RequestedError(f"a tensor of a wrapper has a negative extent: {text[:80]!r}")
    return tuple(listed)


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of a wrapper from their JSON text.

    Raises:
        RequestedError: the text is not a JSON object.
    """
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise RequestedError(
            f"the arguments of a wrapper are {text[:80]!r}, expected a JSON object: {error}"
        ) from error
    if not isinstance(arguments, dict):
        raise RequestedError(f"the arguments of a wrapper are {text[:80]!r}, expected a JSON object")
    return arguments
