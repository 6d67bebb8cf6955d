"""Attributes each printed choice of an algorithm to an operation.

NCCL prints a choice without its operation line and without its communicator.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from commprof.nccl.tables.arrow_columns import as_arrow, codes_of, is_null, numbers_of, taken
from commprof.trace.tables import conform

_THREAD: Final = ("file", "host", "pid", "tid")
_NONE: Final = -(2**31)
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class _Keys(NamedTuple):
    """The keys that a choice and its operation line share, as columns: the run of lines, the operation, and bytes."""

    run: Numbers
    op: Numbers
    size: Numbers

    def filter(self, chosen: Flags | Numbers) -> _Keys:
        return _Keys(*(column[chosen] for column in self))


def attribute_tuning(tuning: pa.Table, ops: pa.Table) -> pa.Table:
    """Return ``tuning`` with ``comm`` and ``op_line`` filled if order and bytes are unambiguous.

    A thread prints the COLL lines of one launch, and then the choices for these operations. The lines of a thread
    therefore form runs of operations followed by choices. Within a run, a choice belongs to the operation with the same
    name and bytes. Choices with a printed time (up to 2.23) have the bytes of the whole collective. Other choices have
    the bytes of one rank's count. Only rank 0 of a communicator prints choices, except for symmetric kernels. If
    several operations match, ``op_line`` stays null, and ``comm`` is filled if they share a communicator.

    Args:
        tuning: The table ``nccl_tuning``.
        ops: The table ``nccl_ops`` of the same logs.
    """
    if tuning.num_rows == 0 or ops.num_rows == 0:
        return tuning
    chosen = _has(ops, "kind", {"coll"}) & _has(ops, "state", {"whole"}) & ~_has(ops, "op", {"send", "recv"})
    if not chosen.any():
        return tuning
    choice_runs, call_runs = _runs(tuning, ops, chosen)
    names, op = _shared_codes(tuning["op"], ops["op"], chosen)
    of_whole_collective = ~is_null(tuning["predicted_us"])
    every_rank = ~of_whole_collective & is_null(tuning["protocol"])
    rank_zero = np.isin(numbers_of(ops["rank"], 0)[chosen], [0])
    comm, communicators = codes_of(ops["comm"])
    comm, line = comm[chosen], numbers_of(ops["line"], _NONE)[chosen]
    choices = _Keys(choice_runs, names, numbers_of(tuning["bytes"], _NONE))
    owners = np.full(tuning.num_rows, -1, np.int64)
    lines = np.full(tuning.num_rows, -1, np.int64)
    for column, of_size in (("message_bytes", of_whole_collective), ("bytes", ~of_whole_collective)):
        size = numbers_of(ops[column], _NONE)[chosen]
        calls = _Keys(call_runs, op, size)
        # A call with unknown bytes matches no choice.
        for is_named, of_name in ((True, names >= 0), (False, names < 0)):
            for any_rank, of_rank in ((True, every_rank), (False, ~every_rank)):
                wanted = np.flatnonzero(of_size & of_name & of_rank)
                eligible = (size != _NONE) & (rank_zero | any_rank)
                if len(wanted) and eligible.any():
                    owner, place = _pair(
                        choices.filter(wanted),
                        calls.filter(eligible),
                        comm[eligible],
                        line[eligible],
                        is_named,
                    )
                    owners[wanted], lines[wanted] = owner, place
    return conform(
        "nccl_tuning",
        tuning.drop_columns(["comm", "op_line"])
        .append_column("comm", taken(communicators, pa.string(), owners))
        .append_column("op_line", as_arrow(lines, pa.int64(), lines < 0)),
    )


def _has(ops: pa.Table, name: str, values: set[str]) -> Flags:
    """Return for each row whether column ``name`` has one of ``values``."""
    codes, texts = codes_of(ops[name])
    return np.array([*(text in values for text in texts), False], bool)[codes]


def _shared_codes(
    of_choices: pa.ChunkedArray, of_calls: pa.ChunkedArray, chosen: Flags
) -> tuple[Numbers, Numbers]:
    """Return a column of both tables as numbers. Equal values have equal numbers in both tables.

    Null is -1 for strings and ``_NONE`` for integers.
    """
    if not pa.types.is_integer(of_choices.type):
        (codes, texts), (others, more) = codes_of(of_choices), codes_of(of_calls)
        place = {text: number for number, text in enumerate(dict.fromkeys([*texts, *more]))}
        known, known_more = (np.array([*(place[text] for text in t), -1], np.int64) for t in (texts, more))
        return known[codes], known_more[others][chosen]
    return numbers_of(of_choices, _NONE), numbers_of(of_calls, _NONE)[chosen]


def _runs(tuning: pa.Table, ops: pa.Table, chosen: Flags) -> tuple[Numbers, Numbers]:
    """Return the number of the run of each choice and of each chosen operation.

    A run is a sequence of operations and the choices that follow them, in one thread.
    """
    num_calls = int(chosen.sum())
    thread = np.zeros(num_calls + tuning.num_rows, np.int64)
    for name in _THREAD:
        choices, calls = _shared_codes(tuning[name], ops[name], chosen)
        thread = _mixed(thread, np.concatenate([calls, choices]))
    line = np.concatenate([numbers_of(ops["line"], _NONE)[chosen], numbers_of(tuning["line"], _NONE)])
    is_choice = np.arange(len(thread)) >= num_calls
    order = np.lexsort((is_choice, line, thread))
    sorted_thread, sorted_choice = thread[order], is_choice[order]
    begins = np.ones(len(thread), bool)
    begins[1:] = (sorted_thread[1:] != sorted_thread[:-1]) | (sorted_choice[:-1] & ~sorted_choice[1:])
    run = np.empty(len(thread), np.int64)
    run[order] = np.cumsum(begins)
    return run[num_calls:], run[:num_calls]


def _mixed(codes: Numbers, values: Numbers) -> Numbers:
    """Return one number for each pair of a code and a value, from 0 on."""
    distinct, number = np.unique(values, return_inverse=True)
    if len(distinct) == 1:
        return codes
    mixed: Numbers = np.unique(codes * len(distinct) + number, return_inverse=True)[1].astype(np.int64)
    return mixed


def _pair(
    choices: _Keys, calls: _Keys, comm: Numbers, line: Numbers, by_name: bool
) -> tuple[Numbers, Numbers]:
    """Return the communicator and the line of the operation of each choice; -1 for unknown values.

    Args:
        choices: The choices to attribute.
        calls: The candidate operations.
        comm: The number of the communicator of each candidate.
        line: The line of each candidate.
        by_name: Whether the choices name the operation.
    """
    number = len(choices.run)
    key = _mixed(np.concatenate([choices.run, calls.run]), np.concatenate([choices.size, calls.size]))
    if by_name:
        key = _mixed(key, np.concatenate([choices.op, calls.op]))
    wanted, offered = key[:number], key[number:]
    groups = int(key.max()) + 1
    competing, fitting = np.bincount(wanted, minlength=groups), np.bincount(offered, minlength=groups)
    lowest, highest = np.full(groups, comm.max()), np.full(groups, -1)
    np.minimum.at(lowest, offered, comm)
    np.maximum.at(highest, offered, comm)
    is_known = (lowest == highest) & (competing <= fitting) & (fitting > 0)
    first = np.full(groups, -1)
    first[offered] = line
    owner = np.where(is_known, lowest, -1)[wanted]
    return owner, np.where(is_known & (fitting == 1), first, -1)[wanted]
