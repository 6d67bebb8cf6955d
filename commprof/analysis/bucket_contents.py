"""What gradient buckets hold: each bucket once, out of the rows of all ranks that flushed it. Pure.

This is no SQL: the numbers of a bucket become one number that is put in order, and every other column is looked at by
itself. So a table of millions of rows is never held whole, nor the text of any row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.collectives import in_order
from commprof.align.row_groups import Groups
from commprof.analysis.bucket_groups import BucketGroups
from commprof.analysis.text_numbers import encoded_text

Numbers = npt.NDArray[np.int64]

KEY: Final = ("attempt", "step", "micro_step", "bucket")
GROUP: Final = "group_number"  # of those that :func:`commprof.analysis.bucket_groups.bucket_groups` tells
_HELD: Final = ("numel", "bytes", "capacity", "dtype", "owners", "parameters", "flush_reason", "time_ns")
_ALIKE: Final = ("numel", "parameters")


def described(column: Callable[[str], pa.ChunkedArray], bucket_groups: BucketGroups) -> pa.Table:
    """One row per bucket and group of ranks that reduce it, in order of :data:`KEY` and of these groups.

    Args:
        column: gives a column of the table ``buckets`` by its name; text may be numbers into its distinct values.
        bucket_groups: which ranks reduce buckets together.

    Returns:
        :data:`KEY`, :data:`GROUP` and the ``group_ranks`` of that number; what the lowest of these ranks says that says
        anything: numel, bytes, capacity, dtype, owners, parameters, flush_reason, time_ns; ``ranks`` of the group that
        flushed it; ``alike``: it has equal elements and parameters on all of them.
    """
    keys = {name: _whole(column(name)).to_numpy().astype(np.int64) for name in (*KEY, "rank")}
    keys[GROUP] = bucket_groups.numbers(keys["attempt"], keys["rank"])
    order, _ = in_order([keys[name] for name in (*KEY, GROUP, "rank")])
    groups = Groups(*(keys[name][order] for name in (*KEY, GROUP)))
    found = {name: pa.array(keys[name][order[groups.starts]].astype(np.int32)) for name in (*KEY, GROUP)}
    found["group_ranks"] = bucket_groups.texts_of(keys[GROUP][order[groups.starts]])
    del keys
    alike = np.ones(len(groups.starts), bool)
    for name in _HELD:
        values = _whole(column(name)).take(pa.array(order))
        found[name] = values.take(pa.array(_first_known(values, groups)))
        if name in _ALIKE:
            alike &= _are_equal(values, groups)
    found |= {"ranks": pa.array(groups.lengths), "alike": pa.array(alike)}
    return pa.table(found)


def _first_known(values: pa.Array, groups: Groups) -> Numbers:
    """The row of each group that is the first to say anything; its first where none does."""
    if not values.null_count:
        return groups.starts
    known = values.is_valid().to_numpy(zero_copy_only=False)
    places: Numbers = groups.reduced(np.minimum, np.where(known, np.arange(len(known)), len(known)))
    return np.where(places < len(known), places, groups.starts)


def _are_equal(values: pa.Array, groups: Groups) -> npt.NDArray[np.bool_]:
    """Whether what the rows of a group say is one value; those that say nothing count not."""
    numbers = values.indices if pa.types.is_dictionary(values.type) else values
    known = numbers.is_valid().to_numpy(zero_copy_only=False)
    plain = pc.fill_null(numbers, 0).to_numpy(zero_copy_only=False)
    first = plain[_first_known(values, groups)]
    equal: npt.NDArray[np.bool_] = groups.reduced(np.logical_and, ~known | (plain == groups.spread(first)))
    return equal


def _whole(column: pa.ChunkedArray) -> pa.Array:
    """A column in one piece, text as numbers into its distinct values."""
    is_text = pa.types.is_string(column.type) or pa.types.is_dictionary(column.type)
    return encoded_text(column) if is_text else column.combine_chunks()
