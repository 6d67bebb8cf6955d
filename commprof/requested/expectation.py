"""The expected messages of one purpose, and how rows of them are made and merged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Literal, NamedTuple

from commprof.schema import Op, Purpose, wire_bytes

When = Literal["init", "micro_step", "step"]


class Expectation(NamedTuple):
    """The messages of one purpose.

    Attributes:
        when: what ``count`` and the bytes are for: the start of training, one micro-batch, or one optimizer step.
        purpose: a value of schema.Purpose.
        requested_op: the operation that the config requests.
        issued_op: the operation that the runtime then issues.
        intended_op: the operation that the issued one replaces, where they differ.
        count: messages.
        payload_bytes: sum of their payloads.
        wire_bytes: sum of the mean bytes that each rank sends for them.
        exact: False where ``count`` depends on an unknown order: of arriving gradients, or of modules.
        note: a remark for the report; may be empty.
        bytes_exact: False where the bytes depend on the order in which modules run too, or on what ``estimate`` says.
        least_bytes: lower bound of ``payload_bytes`` over all orders of modules.
        group_size: None for the group of all ranks; else the ranks are split, in order, into groups of this size, and each
            of these sends that.
        groups: instead of ``group_size``, the ranks of each group that sends that; else None.
        most_bytes: upper bound of ``payload_bytes`` where it is an estimate; None without a bound.
        estimate: what the bytes depend on where they are an estimate; empty for the order in which modules run.
        padding_bytes: those of ``payload_bytes`` that carry no data; None where that is not known.
        payloads: bytes of each message; of one with a row for each rank that may differ in length, those of every row.
        arrived: of gradients: how many have arrived when each message is sent; empty where that is not stated.
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
    """Messages that the config and the parameter list determine and no key renames.

    Args:
        when: what they belong to.
        purpose: why they are sent.
        op: what is sent.
        payloads: bytes of each message.
        world_size: ranks among which they are sent.
        note: a remark for the report.
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
    """``rows`` merged to one per purpose and operations, in the order of the first of each."""
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
