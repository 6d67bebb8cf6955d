"""Which operation each printed choice of an algorithm belongs to: NCCL names neither it nor its communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commprof.trace.tables import conform

_THREAD: Final = ("file", "host", "pid", "tid")


def attribute_tuning(tuning: pa.Table, ops: pa.Table) -> pa.Table:
    """``tuning`` with ``comm`` and ``op_line`` filled where order and bytes leave no choice.

    A thread prints the COLL lines of one launch, then the choices for them: so its lines fall into runs, of operations
    followed by choices. Within a run a choice belongs to the operation of its name and bytes. Bytes are those of the
    whole collective where a time is printed (up to 2.23), else those of one rank's count. Only rank 0 of a communicator
    prints choices, except for symmetric kernels. Where several operations fit, their communicator is known if they
    share one, and the operation is not.

    Args:
        tuning: table ``nccl_tuning``.
        ops: table ``nccl_ops`` of the same logs.
    """
    calls = ops.filter(
        pc.and_(pc.equal(ops["kind"], "coll"), pc.and_(pc.equal(ops["state"], "whole"), _collective(ops)))
    )
    if tuning.num_rows == 0 or calls.num_rows == 0:
        return tuning
    choice_runs, call_runs = _runs(tuning, calls)
    choices = pa.table(
        {
            "run": choice_runs,
            "op": tuning["op"],
            "bytes": tuning["bytes"],
            "row": np.arange(tuning.num_rows),
        }
    )
    whole = tuning["predicted_us"].is_valid()
    every_rank = pc.and_(pc.invert(whole), pc.is_null(tuning["protocol"]))
    named = tuning["op"].is_valid()
    rank_zero = pc.fill_null(pc.equal(calls["rank"], 0), True)
    comm = calls["comm"].combine_chunks().dictionary_encode()
    owners = np.full(tuning.num_rows, -1, np.int64)
    lines = np.full(tuning.num_rows, -1, np.int64)
    for size, of_size in (("message_bytes", whole), ("bytes", pc.invert(whole))):
        candidates = pa.table(
            {
                "run": call_runs,
                "op": calls["op"],
                "bytes": calls[size],
                "comm": comm.indices.cast(pa.int64()),
                "line": calls["line"],
            }
        )
        for keys, of_name in ((["run", "op", "bytes"], named), (["run", "bytes"], pc.invert(named))):
            for ranks, of_rank in ((None, every_rank), (rank_zero, pc.invert(every_rank))):
                wanted = choices.filter(pc.and_(of_size, pc.and_(of_name, of_rank)))
                if wanted.num_rows:
                    eligible = candidates if ranks is None else candidates.filter(ranks)
                    _pair(wanted, eligible, keys, owners, lines)
    owner = pa.array(np.where(owners < 0, 0, owners), mask=owners < 0)
    return conform(
        "nccl_tuning",
        tuning.drop_columns(["comm", "op_line"])
        .append_column("comm", comm.dictionary.take(owner))
        .append_column("op_line", pa.array(lines, mask=lines < 0)),
    )


def _collective(ops: pa.Table) -> pa.ChunkedArray:
    """Messages between two ranks are never tuned."""
    return pc.invert(pc.is_in(ops["op"], value_set=pa.array(["send", "recv"])))


def _runs(tuning: pa.Table, calls: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """The run of each choice and of each operation: numbers that are equal within one run of one thread."""
    names = [*_THREAD, "line"]
    keys = pa.concat_tables([pa.table([table[name] for name in names], names) for table in (calls, tuning)])
    thread = _codes(keys)
    is_choice = np.arange(keys.num_rows) >= calls.num_rows
    order = np.lexsort((is_choice, keys["line"].to_numpy(), thread))
    sorted_thread, sorted_choice = thread[order], is_choice[order]
    begins = np.ones(keys.num_rows, bool)
    begins[1:] = (sorted_thread[1:] != sorted_thread[:-1]) | (sorted_choice[:-1] & ~sorted_choice[1:])
    run = np.empty(keys.num_rows, np.int64)
    run[order] = np.cumsum(begins)
    return run[calls.num_rows :], run[: calls.num_rows]


def _codes(keys: pa.Table) -> np.ndarray:
    """One number per thread of the log."""
    codes = np.zeros(keys.num_rows, np.int64)
    for name in _THREAD:
        column = keys[name].combine_chunks().dictionary_encode()
        mixed = codes * (len(column.dictionary) + 1) + pc.fill_null(column.indices, -1).to_numpy() + 1
        codes = np.unique(mixed, return_inverse=True)[1].astype(np.int64)
    return codes


def _pair(
    choices: pa.Table, calls: pa.Table, keys: Sequence[str], owners: np.ndarray, lines: np.ndarray
) -> None:
    """Fill ``owners`` (communicator) and ``lines`` (of the operation) at the rows of ``choices`` that they are known for."""
    fitting = calls.group_by(list(keys)).aggregate(
        [("line", "count"), ("line", "min"), ("comm", "min"), ("comm", "max")]
    )
    competing = choices.group_by(list(keys)).aggregate([("row", "count")])
    pairs = choices.join(fitting, list(keys), join_type="inner").join(
        competing, list(keys), join_type="inner"
    )
    known = pairs.filter(
        pc.and_(
            pc.equal(pairs["comm_min"], pairs["comm_max"]),
            pc.less_equal(pairs["row_count"], pairs["line_count"]),
        )
    )
    owners[known["row"].to_numpy()] = known["comm_min"].to_numpy()
    single = known.filter(pc.equal(known["line_count"], 1))
    lines[single["row"].to_numpy()] = single["line_min"].to_numpy()
