"""The arguments of model wrappers: the input of the rules for DistributedDataParallel and FSDP."""

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

FORWARD: Final = "F"  # whose gradients are to be reduced
FORWARD_ALONE: Final = "f"  # whose gradients stay where they are
NO_GRADIENTS: Final = "e"
BACKWARD: Final = "B"  # that reduces gradients
BACKWARD_ALONE: Final = "b"
DISTRIBUTED: Final = "what the program itself distributes (distribute_tensor) is not covered by the rules"


class Tensor(NamedTuple):
    """A parameter or a buffer of a wrapped model.

    Attributes:
        name: qualified name.
        extents: its full shape.
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
        kind: a value of ``schema.WRAPPERS``.
        unit: name of the module that it wraps.
        ranks: that reduce or shard together.
        replicas: ranks that hold the same shard; empty where there is one copy.
        arguments: by name.
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
        """Messages of its group, or of ``ranks``; empty without payloads."""
        group = ranks or self.ranks
        if not payloads:
            return []
        return [row(when, purpose, op, payloads, len(group), note)._replace(groups=(group,), exact=exact)]


@dataclass(frozen=True)
class ShardedModel:
    """What the rules of both FSDPs share: the units of one model, as one of its ranks published them.

    Attributes:
        units: the wrapper of each.
        rank: counts messages of the groups whose first rank it is.
    """

    units: tuple[Wrapper, ...]
    rank: int

    @property
    def wrapper(self) -> Wrapper:
        """The first unit."""
        return self.units[0]

    def construction(self) -> list[Expectation]:
        """Messages at construction: none that the rules cover."""
        return []

    def speaks(self, ranks: Sequence[int]) -> bool:
        """Whether this rank counts the messages of the group of ``ranks``."""
        return bool(ranks) and min(ranks) == self.rank

    def matches(self, passes: str, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
        """Each of ``passes``, whose group ``unit`` is the number of a unit: see :func:`matches`."""
        return matches(passes, pattern, "which passes a model of FSDP ran", len(self.units))


def matches(
    passes: str, pattern: re.Pattern[str], subject: str, units: int | None = None
) -> Iterator[re.Match[str]]:
    """Each of ``passes``, as ``pattern`` matches it.

    Args:
        passes: what ran, one after the other.
        pattern: of one of them.
        subject: what is not known where one does not match.
        units: how many there are, where the pattern has a group ``unit``.

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
    """The tensors that a JSON text lists, each as name, shape, element type, and whether it is trained.

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
    """The arguments of a wrapper, of their JSON text.

    Raises:
        RequestedError: the text is no JSON object.
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
