"""The issued level: every collective once, from the records, in classes that the ledger can judge."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from commprof.schema import Op, Phase

INIT_STEP: Final = -1
# Members of these may hold buffers of different sizes.
_UNEVEN: Final = frozenset({Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER})
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
    "in_evaluation",
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
    "in_evaluation",
)


class Message(NamedTuple):
    """What makes two collectives of one step equal for the ledger.

    ``in_evaluation``: issued in a forward pass after the optimizer had run, or before the first step.
    """

    purpose: str | None
    op: str
    group_ranks: str
    group_size: int
    backend: str | None
    payload_bytes: int
    call_site: str | None
    status: str
    executed_op: str | None
    in_evaluation: bool = False


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
    table = _with_evaluations(collectives).select(_KEPT)
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


def _with_evaluations(collectives: pa.Table) -> pa.Table:
    """``collectives`` and whether each was issued by an evaluation, judged by its rank's own order of phases."""
    step = ["rank", "attempt", "pid", "step"]
    in_optimizer = collectives.filter(pc.equal(collectives["phase"], Phase.OPTIMIZER))
    last = in_optimizer.group_by(step).aggregate([("seq", "max")])
    columns = collectives.select([*step, "seq", "phase"]).append_column(
        "row", pa.array(range(collectives.num_rows), pa.int64())
    )
    columns = columns.cast(pa.schema([field.with_nullable(True) for field in columns.schema]))
    joined = columns.join(last, step, join_type="left outer").sort_by("row")
    forward = pc.is_in(joined["phase"], pa.array([Phase.FORWARD, Phase.OTHER]))
    ended = pc.fill_null(pc.greater(joined["seq"], joined["seq_max"]), False)
    outside = pc.or_(ended, pc.less(joined["step"], 0))
    return collectives.append_column("in_evaluation", pc.and_(forward, outside))


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
    """Groups whose recorded members did not issue the same collectives, or other bytes of them, as sentences."""
    shared = collectives.filter(pc.invert(pc.is_in(collectives["op"], pa.array([Op.SEND, Op.RECV]))))
    sums = shared.group_by([*_GROUP, "rank", "op", "step"]).aggregate(
        [("seq", "count"), ("payload_bytes", "sum")]
    )
    seen: dict[tuple[Any, ...], dict[int, tuple[int, int]]] = defaultdict(dict)
    members: dict[tuple[Any, ...], set[int]] = defaultdict(set)
    for row in sums.to_pylist():
        group = tuple(row[name] for name in _GROUP)
        seen[(*group, row["op"], row["step"])][row["rank"]] = row["seq_count"], row["payload_bytes_sum"]
        members[group].add(row["rank"])
    found: dict[tuple[Any, ...], str] = {}
    for key in sorted(seen, key=str):
        ranks = sorted(members[key[:3]])
        counts, sizes = zip(*(seen[key].get(rank, (0, 0)) for rank in ranks), strict=True)
        differing = (
            _of_ranks("{} times", counts) or (key[3] not in _UNEVEN and _of_ranks("{} bytes", sizes)) or ""
        )
        if differing and key[:3] not in found:
            found[key[:3]] = (
                f"the ranks of group {key[1]} ({key[2]}) did not issue the same: {key[3]} "
                f"{'before the first step' if key[4] < 0 else f'in step {key[4]}'}: {differing} "
                f"on ranks {', '.join(map(str, ranks))}"
            )
    return list(found.values())


def _of_ranks(unit: str, values: Sequence[int]) -> str:
    """``values`` with their unit where they differ; nothing where they are all the same."""
    return unit.format(", ".join(f"{value:,}" for value in values)) if len(set(values)) > 1 else ""


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
    """``Step 4`` or ``Steps 0-3,7``; ``Before the first step``."""
    listed = set(keys)
    if listed == {StepKey(0, INIT_STEP)}:
        return "Before the first step"
    return f"{'Step' if len(listed) == 1 else 'Steps'} {step_text(listed)}"
