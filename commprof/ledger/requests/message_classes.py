"""Classes of messages, and the expectation for each class in one step.

A class is a purpose, an operation and a group. Expected and issued messages are compared class by class.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from commprof.requested.expectation import Expectation
from commprof.schema import Purpose, format_ranks


class Class(NamedTuple):
    """The purpose, the operation and the group of the messages that one expectation covers."""

    purpose: str | None
    op: str
    group_ranks: str


@dataclass
class Want:
    """The messages of one class that the rules expect in one step."""

    requested_op: str
    count: int = 0
    payload_bytes: int = 0
    exact: bool = True
    least_bytes: int = 0
    estimated: bool = False  # whether the bytes are an estimate
    most_bytes: float = 0  # upper bound of the estimate
    estimate: str = ""  # what the estimate depends on, if this is not the order of modules
    in_each_pass: bool = False  # whether every forward pass, also of an evaluation, gathers parameters
    least_of_a_pass: int = 0  # lower bound of the bytes that such a forward pass gathers
    kept_bytes: int = 0  # bytes of parameters that are gathered at the end of the step and stay gathered
    others: str = ""  # other senders of this class, because of which a surplus cannot be judged


def wants(expectations: Iterable[Expectation], world_size: int) -> dict[Class, Want]:
    """Sum the expectations of one step by class."""
    by_class: dict[Class, Want] = {}
    for row, ranks in ((each, ranks) for each in expectations for ranks in _groups(each, world_size)):
        want = by_class.setdefault(Class(row.purpose, row.issued_op, ranks), Want(row.requested_op))
        want.count += row.count
        want.payload_bytes += row.payload_bytes
        want.exact &= row.exact
        want.least_bytes += row.least_bytes
        if row.bytes_exact or row.most_bytes is not None:
            want.most_bytes += row.payload_bytes if row.most_bytes is None else row.most_bytes
        else:
            want.most_bytes = math.inf
        want.estimate = want.estimate or row.estimate
        want.estimated |= not row.bytes_exact
        if row.purpose == Purpose.PARAMETER_GATHER and row.when == "micro_step":
            least = min(row.least_bytes, want.least_of_a_pass) if want.in_each_pass else row.least_bytes
            want.in_each_pass, want.least_of_a_pass = True, least
        elif row.purpose == Purpose.PARAMETER_GATHER and row.when == "step":
            want.kept_bytes += row.payload_bytes
    return by_class


def _groups(row: Expectation, world_size: int) -> list[str]:
    if row.groups is not None:
        return [format_ranks(list(each)) for each in row.groups]
    size = row.group_size or world_size
    return [format_ranks(list(range(first, first + size))) for first in range(0, world_size, size)]
