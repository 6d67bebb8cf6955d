"""The expected messages of one purpose, with functions that create and merge such rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Literal, NamedTuple

from commprof.schema import Op, Purpose, wire_bytes

When = Literal["init", "micro_step", "step"]


class Expectation(NamedTuple):
    """The expected messages of one purpose.

    Attributes:
        when: The period that ``count`` and the bytes refer to: the start of training, one micro-batch, or one step.
        purpose: A value of schema.Purpose.
        requested_op: The operation that the config requests.
        issued_op: The operation that the runtime issues.
        intended_op: The operation that the issued operation replaces, or None if it replaces nothing.
        count: The number of messages.
        payload_bytes: The sum of the payloads of the messages.
        wire_bytes: The modelled bytes that each rank sends on average for all messages together.
        exact: False if ``count`` depends on an unknown order of gradients or modules.
        note: A remark for the report, which may be empty.
        bytes_exact: False if the bytes depend on an unknown order of the modules, or on the quantity in ``estimate``.
        least_bytes: The lower bound of ``payload_bytes`` over all orders of modules.
        group_size: The size of the groups that send these messages, or None for the group of all ranks. The ranks are
            divided in order into groups of this size, and every group sends the messages.
        groups: The ranks of each group that sends these messages, as an alternative to ``group_size``, or None.
        most_bytes: The upper bound of ``payload_bytes`` if it is an estimate, or None without a bound.
        estimate: The quantity that estimated bytes depend on. It is empty for the order in which modules run.
        padding_bytes: The part of ``payload_bytes`` that contains no data, or None if it is not known.
        payloads: The bytes of each message. A message whose rows may differ in length has the bytes of every rank's
            row.
        arrived: For gradients, how many gradients have arrived when each message is sent. It is empty if not stated.
    """

    when: When
    purpose: str
    requested_op: str
    issued_op: str
    intended_op: str | None
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls on a record
    payload_bytes: int
    wire_bytes: float
    exact: bool
    note: str
    bytes_exact: bool = True
    least_bytes: int = 0
    group_size: int | None = None
    groups: tuple[tuple[int, ...], ...] | None = None
    most_bytes: int | None = None
    estimate: str = ""
    padding_bytes: int | None = 0
    payloads: tuple[tuple[int, ...], ...] = ()
    arrived: tuple[int, ...] = ()


def row(
    when: When, purpose: Purpose, op: Op, payloads: Sequence[int], world_size: int, note: str = ""
) -> Expectation:
    """Return an exact expectation whose requested and issued operation are both ``op``.

    Args:
        when: The period in which the messages are sent.
        purpose: The purpose of the messages.
        op: The operation.
        payloads: The bytes of each message.
        world_size: The number of ranks of the group.
        note: A remark for the report.
    """
    total = sum(payloads)
    wire = wire_bytes(op, total, world_size)
    return Expectation(
        when,
        str(purpose),
        str(op),
        str(op),
        None,
        len(payloads),
        total,
        wire,
        True,
        note,
        least_bytes=total,
        payloads=tuple((each,) for each in payloads),
    )


def summed(rows: Iterable[Expectation], when: When) -> list[Expectation]:
    """Return ``rows`` merged into one row per purpose, operations and groups, in the order of first occurrence."""
    alike: dict[tuple[object, ...], list[Expectation]] = {}
    for each in rows:
        key = (
            each.purpose,
            each.requested_op,
            each.issued_op,
            each.intended_op,
            each.group_size,
            each.groups,
        )
        alike.setdefault(key, []).append(each)
    return [_merged(together, when) for together in alike.values()]


def _merged(rows: Sequence[Expectation], when: When) -> Expectation:
    if len(rows) == 1:
        return rows[0]._replace(when=when)
    padding = [each.padding_bytes for each in rows]
    return rows[0]._replace(
        when=when,
        count=sum(each.count for each in rows),
        payload_bytes=sum(each.payload_bytes for each in rows),
        wire_bytes=sum(each.wire_bytes for each in rows),
        exact=all(each.exact for each in rows),
        bytes_exact=all(each.bytes_exact for each in rows),
        least_bytes=sum(each.least_bytes for each in rows),
        most_bytes=_most(rows),
        padding_bytes=None if None in padding else sum(each or 0 for each in padding),
        payloads=tuple(chain.from_iterable(each.payloads for each in rows)),
        arrived=tuple(chain.from_iterable(each.arrived for each in rows)),
        note="; ".join(dict.fromkeys(each.note for each in rows if each.note)),
    )


def _most(rows: Sequence[Expectation]) -> int | None:
    if all(each.most_bytes is None for each in rows):
        return None
    return sum(each.payload_bytes if each.most_bytes is None else each.most_bytes for each in rows)
