"""The issued level: every collective once, from the records, in classes that the ledger can judge."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from commprof.schema import Op

INIT_STEP: Final = -1
_GROUP: Final = ("attempt", "pg", "group_ranks")
_KEPT: Final = (
    *_GROUP,
    "rank",
    "pid",
    "seq",
    "pg_seq",
    "step",
    "op",
    "purpose",
    "group_size",
    "backend",
    "payload_bytes",
    "call_site",
    "status",
)
_CLASS: Final = (
    "attempt",
    "step",
    "purpose",
    "op",
    "group_ranks",
    "group_size",
    "backend",
    "payload_bytes",
    "call_site",
    "status",
    "executed_op",
)


class Message(NamedTuple):
    """What makes two collectives of one step equal for the ledger."""

    purpose: str | None
    op: str
    group_ranks: str
    group_size: int
    backend: str | None
    payload_bytes: int
    call_site: str | None
    status: str
    executed_op: str | None


class StepKey(NamedTuple):
    """One training step of one attempt; step -1 is the time before the first."""

    attempt: int
    step: int


Issued = dict[StepKey, dict[Message, int]]


def once_per_collective(collectives: pa.Table) -> pa.Table:
    """The records of the lowest recorded rank of each group, and every send: each collective once.

    A message counts at its send; a recv counts where no rank recorded a send in the group. The payload of an all_to_all
    may differ between the ranks: it is their mean, rounded.
    """
    table = collectives.select(_KEPT)
    # A join makes every column nullable; all parts must be so to be put together again.
    table = table.cast(pa.schema([field.with_nullable(True) for field in table.schema]))
    if not table.num_rows:
        return table
    shared = table.filter(pc.invert(pc.is_in(table["op"], pa.array([Op.SEND, Op.RECV]))))
    lowest = shared.group_by(list(_GROUP)).aggregate([("rank", "min")])
    first = _with_mean_payload(shared, shared.join(lowest, list(_GROUP), join_type="inner"))
    first = first.filter(pc.equal(first["rank"], first["rank_min"])).select(_KEPT)
    sends = table.filter(pc.equal(table["op"], Op.SEND))
    received = table.filter(pc.equal(table["op"], Op.RECV))
    with_sends = sends.group_by(list(_GROUP)).aggregate([])
    lone = received.join(with_sends, list(_GROUP), join_type="left anti").select(_KEPT)
    return pa.concat_tables([first, sends, lone])


def _with_mean_payload(shared: pa.Table, table: pa.Table) -> pa.Table:
    uneven = shared.filter(pc.equal(shared["op"], Op.ALL_TO_ALL))
    if not uneven.num_rows:
        return table
    key = [*_GROUP, "pg_seq"]
    means = uneven.group_by(key).aggregate([("payload_bytes", "mean")])
    joined = table.join(means, key, join_type="left outer")
    is_mean = pc.and_(pc.equal(joined["op"], Op.ALL_TO_ALL), pc.is_valid(joined["payload_bytes_mean"]))
    mean = pc.cast(pc.round(joined["payload_bytes_mean"]), pa.int64())
    payload = pc.if_else(is_mean, mean, joined["payload_bytes"])
    return joined.set_column(
        joined.schema.get_field_index("payload_bytes"), "payload_bytes", payload
    ).drop_columns(["payload_bytes_mean"])


def issued(once: pa.Table, executed_ops: pa.Array) -> Issued:
    """The messages of each step, counted.

    Args:
        once: :func:`once_per_collective`.
        executed_ops: what the backend ran for each row of ``once``; null where that is not known.
    """
    table = once.append_column("executed_op", executed_ops)
    grouped = table.group_by(list(_CLASS)).aggregate([("seq", "count")])
    steps: Issued = defaultdict(dict)
    for row in grouped.to_pylist():
        key = StepKey(row["attempt"], max(row["step"], INIT_STEP))
        message = Message(*(row[name] for name in Message._fields))
        steps[key][message] = steps[key].get(message, 0) + row["seq_count"]
    return dict(steps)


def issued_by(collectives: pa.Table) -> Issued:
    """The messages of each step from the records alone, without what the backend ran."""
    once = once_per_collective(collectives)
    return issued(once, pa.nulls(once.num_rows, pa.string()))


def disagreements(collectives: pa.Table) -> list[str]:
    """Groups whose recorded members did not issue the same collectives, as sentences."""
    shared = collectives.filter(pc.invert(pc.is_in(collectives["op"], pa.array([Op.SEND, Op.RECV]))))
    counts = shared.group_by([*_GROUP, "rank", "op", "step"]).aggregate([("seq", "count")])
    seen: dict[tuple[Any, ...], dict[int, int]] = defaultdict(dict)
    members: dict[tuple[Any, ...], set[int]] = defaultdict(set)
    for row in counts.to_pylist():
        group = tuple(row[name] for name in _GROUP)
        seen[(*group, row["op"], row["step"])][row["rank"]] = row["seq_count"]
        members[group].add(row["rank"])
    found: dict[tuple[Any, ...], str] = {}
    for key in sorted(seen, key=str):
        group, ranks = key[:3], members[key[:3]]
        per_rank = [seen[key].get(rank, 0) for rank in sorted(ranks)]
        if len(set(per_rank)) > 1 and group not in found:
            found[group] = (
                f"the ranks of group {group[1]} ({group[2]}) did not issue the same: {key[3]} in step {key[4]} "
                f"{', '.join(map(str, per_rank))} times on ranks {', '.join(map(str, sorted(ranks)))}"
            )
    return list(found.values())


def step_text(keys: Iterable[StepKey]) -> str:
    """``init``, ``4`` or ``0-3,7``; of the second attempt ``0-3 (attempt 1)``."""
    parts = []
    by_attempt: dict[int, list[int]] = defaultdict(list)
    for key in sorted(set(keys)):
        by_attempt[key.attempt].append(key.step)
    for attempt, steps in by_attempt.items():
        ranges: list[list[int]] = []
        for step in steps:
            if ranges and step == ranges[-1][1] + 1 and ranges[-1][0] >= 0:
                ranges[-1][1] = step
            else:
                ranges.append([step, step])
        text = ",".join("init" if a < 0 else f"{a}-{b}" if a != b else str(a) for a, b in ranges)
        parts.append(f"{text} (attempt {attempt})" if attempt else text)
    return "; ".join(parts)


def step_list(keys: Iterable[StepKey]) -> str:
    """``Step 4`` or ``Steps 0-3,7``."""
    listed = list(keys)
    return f"{'Step' if len(listed) == 1 else 'Steps'} {step_text(listed)}"
