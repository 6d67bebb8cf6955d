"""Derives the messages of each step from the sums of a run that aggregated its records.

For all calls of a step with the same purpose, operation and group, a rank records only their number and total bytes.
Here these calls count as messages of (nearly) equal size. Their number and total bytes are exact, but single sizes and
call sites are not known. Collectives are counted at the rank with the most calls, and a message is counted at its send.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.sequences.group_ids import numbered
from commprof.ledger.records import backends
from commprof.ledger.records.issued import Issued, Message, by_step
from commprof.ledger.records.precount import WITHIN_MODELS, by_last_step
from commprof.ledger.records.row_index import combinations, where
from commprof.ledger.records.sendings import Sums
from commprof.schema import Op, Phase, Status

_PHASES_OF_A_PASS: Final = (Phase.FORWARD, Phase.EVALUATION, Phase.OTHER)
_SHORT: Final = {"calls": "calls", "payload_bytes": "bytes"}


class _Sum(NamedTuple):
    """The sums of one kind of calls over all ranks of their group: the maximum over the ranks, and the total."""

    phase: str
    op: str
    purpose: str | None
    pg: str
    group_ranks: str
    group_size: int
    is_before: bool  # whether the calls were issued before the first step
    calls_max: int
    calls_sum: int
    bytes_max: int
    bytes_sum: int
    ranks: int


_KIND: Final = ("attempt", "step", *_Sum._fields[:6])
_GROUP: Final = ("attempt", "pg", "group_ranks")


def backends_of(aggregates: pa.Table, groups: pa.Table) -> dict[str, str]:
    """Return the backend of each process group that has sums. Groups with several backends are left out."""
    named: dict[str, set[str]] = defaultdict(set)
    for row in groups.select(["pg", "backend"]).to_pylist():
        named[row["pg"]] |= {part.rpartition(":")[2] for part in str(row["backend"] or "").split(",")}
    with_sums = set(aggregates["pg"].to_pylist())
    return {
        pg: min(names) for pg, names in named.items() if pg in with_sums and len(names) == 1 and all(names)
    }


def with_sums(issued: Issued, aggregates: pa.Table, of_group: Mapping[str, str]) -> Issued:
    """Add the messages of ``aggregates`` to ``issued``, and return the result.

    Args:
        issued: The messages of each step.
        aggregates: The rows of the ``aggregates`` table.
        of_group: The backend of each group for which the backend is known.
    """
    if not len(aggregates):
        return issued
    aggregates = by_last_step(aggregates)
    summed = _issued(_over_ranks(aggregates), of_group)
    if not issued:
        return summed
    known: dict[tuple[int, int], dict[Message, int]] = {}
    together: Issued = {}
    nothing: dict[Message, int] = {}
    for key in sorted({*issued, *summed}):
        records, sums = issued.get(key, nothing), summed.get(key, nothing)
        alike = id(records), id(sums)
        if alike not in known:
            known[alike] = dict(Counter(records) + Counter(sums))
        together[key] = known[alike]
    return together


def sums_of(aggregates: pa.Table, of_group: Mapping[str, str]) -> Sums:
    """Return ``aggregates``, separated into sums within steps and sums outside of steps."""
    is_outside = pc.is_valid(aggregates["after_step"])
    in_steps, outside = aggregates.filter(pc.invert(is_outside)), aggregates.filter(is_outside)
    return Sums(with_sums({}, in_steps, of_group), with_sums({}, outside, of_group))


def _over_ranks(aggregates: pa.Table) -> pa.Table:
    """Combine the sums of all ranks: one row for each attempt, step and kind.

    A recv counts only if no rank of the group recorded sends.
    """
    kinds = [key for key, _ in combinations(aggregates, [*_GROUP, "op"])]
    sending = {key[:-1] for key in kinds if key[-1] == Op.SEND}
    counts = where(
        aggregates,
        [*_GROUP, "op"],
        lambda *key: key[-1] != Op.RECV or key[:-1] not in sending,
    )
    of_rank = (
        aggregates.filter(pa.array(counts))
        .group_by([*_KIND, "rank"])
        .aggregate([("calls", "sum"), ("payload_bytes", "sum")])
    )
    measures = [(f"{name}_sum", how) for name in ("calls", "payload_bytes") for how in ("max", "sum")]
    totals = of_rank.group_by(list(_KIND)).aggregate([*measures, ([], "count_all")])
    names = {
        f"{name}_sum_{how}": f"{short}_{how}" for name, short in _SHORT.items() for how in ("max", "sum")
    }
    names["count_all"] = "ranks"
    totals = totals.rename_columns([names.get(name, name) for name in totals.column_names])
    return totals.append_column("is_before", pc.less(totals["step"], 0))


def _issued(sums: pa.Table, of_group: Mapping[str, str]) -> Issued:
    codes, first = numbered(sums.select(list(_Sum._fields)))
    messages: dict[Message, int] = {}
    entries = []
    distinct = sums.select(list(_Sum._fields)).take(pa.array(first)).to_pylist()
    for code, row in enumerate(distinct):
        rows = np.flatnonzero(codes == code)
        for message, count in _messages(_Sum(**row), of_group.get(row["pg"])).items():
            entries.append((rows, messages.setdefault(message, len(messages)), count))
    rows = np.concatenate([rows for rows, _, _ in entries] or [np.empty(0, np.int64)])
    lengths = [len(rows) for rows, _, _ in entries]
    counted = sums.select(["attempt", "step"]).take(pa.array(rows))
    for name, place in (("message", 1), ("count_all_sum", 2)):
        values = np.repeat(np.array([entry[place] for entry in entries], np.int64), lengths)
        counted = counted.append_column(name, pa.array(values))
    return dict(by_step(counted, list(messages)))


def _messages(total: _Sum, backend: str | None) -> Counter[Message]:
    """Return one message for each call. The total bytes are divided evenly between the messages."""
    if total.op in (Op.SEND, Op.RECV):
        calls, size = total.calls_sum, total.bytes_sum
    else:
        calls, size = total.calls_max, total.bytes_max
        if total.op == Op.ALL_TO_ALL:
            size = round(total.bytes_sum / total.ranks)
    if not calls:
        return Counter()
    each, larger = divmod(size, calls)
    outside = (total.is_before and total.phase in _PHASES_OF_A_PASS) or total.phase == Phase.EVALUATION
    inference = total.phase == Phase.OTHER and total.purpose in WITHIN_MODELS
    message = Message(
        purpose=total.purpose,
        op=total.op,
        group_ranks=total.group_ranks,
        group_size=total.group_size,
        backend=backend,
        payload_bytes=each,
        call_site=None,
        status=str(Status.OK),
        executed_op=backends.execution(total.op, 0, 2).op if backends.known(backend) else None,
        in_evaluation=outside or inference,
    )
    counts = Counter({message: calls - larger})
    counts[message._replace(payload_bytes=each + 1)] += larger
    return +counts
