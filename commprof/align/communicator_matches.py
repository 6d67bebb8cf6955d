"""The rows of the ``comm_matches`` table: the outcome of the alignment for each communicator of a log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import pyarrow as pa

from commprof.align.alignment_streams import LineStream, LogProcess
from commprof.align.pairing import Pairing
from commprof.align.sequences.edits import Codes
from commprof.trace.tables import table_from_rows

_COUNTED: Final = (
    "matched",
    "missing",
    "extra",
    "ambiguous",
    "ambiguous_records",
    "ambiguous_missing",
    "ambiguous_extra",
)


def comm_matches(
    lines: Sequence[LineStream],
    pairing: Pairing,
    outcomes: Mapping[int, Counter[str]],
    ops: pa.Table,
    torn: Codes,
    generated: bool,
) -> pa.Table:
    """Return one row per communicator, in the order of the log.

    Args:
        lines: The communicators.
        pairing: The group of each communicator, by position in ``lines``.
        outcomes: The number of lines by state, for each communicator.
        ops: The table ``nccl_ops``.
        torn: The rows of ``ops`` that are truncated lines.
        generated: Whether the log is marked as generated.
    """
    torn_of = _torn_of(lines, ops, torn)
    rows = []
    for number, line in enumerate(lines):
        stream = pairing.streams.get(number)
        outcome = outcomes.get(number, Counter())
        rows.append(
            {
                "host": line.process.host,
                "pid": line.process.pid,
                "comm": line.comm,
                "comm_epoch": line.comm_epoch,
                "comm_id": line.comm_id,
                "nranks": line.nranks,
                "rank": None if stream is None else stream.process.rank,
                "pg": None if stream is None else stream.group.pg,
                "group_ranks": None if stream is None else stream.group.pair or stream.group.group_ranks,
                "confidence": pairing.confidence.get(number, "none"),
                "basis": pairing.basis.get(number),
                "reason": pairing.reasons.get(number),
                **{name: outcome[name] for name in _COUNTED},
                "torn": torn_of[number],
                "generated": generated,
            }
        )
    return table_from_rows("comm_matches", rows)


def _torn_of(lines: Sequence[LineStream], ops: pa.Table, torn: Codes) -> Counter[int]:
    """Return the number of truncated lines of each communicator.

    A truncated line counts if it names the communicator. A line without a communicator counts if its process
    has only one.
    """
    of_process: dict[LogProcess, list[int]] = {}
    of_address: dict[tuple[LogProcess, str, int], int] = {}
    for number, line in enumerate(lines):
        of_process.setdefault(line.process, []).append(number)
        of_address[line.process, line.comm, line.comm_epoch] = number
    counts: Counter[int] = Counter()
    for row in ops.select(["host", "pid", "comm", "comm_epoch"]).take(pa.array(torn)).to_pylist():
        process = LogProcess(row["host"], row["pid"])
        only = of_process.get(process, [])
        named = of_address.get((process, row["comm"], row["comm_epoch"]))
        if named is not None:
            counts[named] += 1
        elif row["comm"] is None and len(only) == 1:
            counts[only[0]] += 1
    return counts
