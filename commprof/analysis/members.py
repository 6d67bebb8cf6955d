"""Each collective once, out of the records of all its ranks: what they agree on, and what they have together. Pure.

The members of a collective share attempt, pg, group_ranks and pg_seq. group_ranks is part of the identity because disjoint
groups may carry one name. A rank takes part in a collective once: where a name was used again after its group was destroyed,
and the numbers began anew, the how manieth time a rank gives a number tells the two apart.

What the ranks must agree on is taken from the lowest rank; a tag from any rank that carries it. This is no SQL: records in
the order of their collectives are added up in arrays in a small part of the time that an engine takes to find their groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.collectives import in_order, repetitions
from commprof.align.distinct import numbered
from commprof.align.row_groups import Groups
from commprof.analysis.pairwise import Exchanges, exchanges, pair_rows
from commprof.analysis.text_numbers import ranked

Numbers: TypeAlias = npt.NDArray[np.int64]

_OF_LOWEST: Final = ("step", "micro_step", "phase", "op", "device", "api", "call_site")
_GREATEST: Final = (
    *("after_step", "intended_op", "purpose", "bucket", "owner", "dtype", "reduce_op"),
    *("backend", "group_desc", "group_size"),
)
_LEAST: Final = -(1 << 63)  # in the place of null
_OF_PAIRS: Final = ("sender", "receiver", "sent_bytes")
_MEASURES: Final = frozenset(
    {"records", "tensors", "largest_bytes", "mean_bytes", "host_ns", "exposed_ns", "timed", "collectives"}
)


def agreed(rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    """One row for each collective of ``rows``, which are no messages; further rows have the bytes of unequal all_to_alls.

    A collective of :mod:`commprof.analysis.pairwise` has ``sent_bytes`` 0. Those of all collectives that are alike in their
    columns stand in a row for each pair of ranks, with sender, receiver and ``sent_bytes``, where ``collectives`` and all
    other measures are 0. Where a record does not say to whom it sent, sender and receiver are -1.

    Columns: attempt, pg, group_ranks, op, group_size, backend and those of ``columns`` that are known of a collective (the
    others are null); root; records, tensors, largest_bytes and mean_bytes (payload), host_ns and exposed_ns (means), timed
    (of how many exposed_ns is known), collectives, sender, receiver, sent_bytes.
    """
    members = _Members(rows)
    found = {name: members.of_lowest(name) for name in ("attempt", "pg", "group_ranks")}
    for names, of in ((_OF_LOWEST, members.of_lowest), (_GREATEST, members.greatest)):
        for name in names:
            wanted = name in columns or name in ("op", "group_size", "backend")
            found[name] = of(name) if wanted else pa.nulls(len(members.groups.starts))
    host, _ = members.mean(pc.subtract(rows["return_ns"], rows["issue_ns"]))
    exposed, timed = members.mean(rows["exposed_ns"])
    kinds = pa.table({name: column for name, column in found.items() if not pa.types.is_null(column.type)})
    count = len(members.groups.starts)
    found |= {
        "root": members.of_lowest("peer"),
        "records": pa.array(members.groups.lengths),
        "tensors": members.greatest("num_tensors"),
        "largest_bytes": members.greatest("payload_bytes"),
        "mean_bytes": members.mean(rows["payload_bytes"])[0],
        "host_ns": host,
        "exposed_ns": exposed,
        "timed": pa.array(timed),
        "collectives": pa.array(np.ones(count, np.int64)),
        **{name: pa.nulls(count, pa.int64()) for name in _OF_PAIRS},
    }
    once = pa.table(found)
    exchanged = exchanges(rows, members.order, members.groups.starts, members.groups.lengths)
    return _by_pairs(once, kinds, exchanged) if exchanged else once


def _by_pairs(once: pa.Table, kinds: pa.Table, exchanged: Sequence[Exchanges]) -> pa.Table:
    """``once`` with the bytes of ``exchanged`` in rows of their own."""
    sender, sent = (np.full(len(once), _LEAST) for _ in range(2))
    for one in exchanged:
        known = ~np.isnan(one.sent).any(axis=(1, 2))
        sent[one.places[known]] = 0
        sender[one.places[~known]] = -1
    of_pairs = dict(zip(_OF_PAIRS, (sender, sender, sent), strict=True))
    pairs = pair_rows(exchanged, kinds)
    rows = once.take(pa.array(pairs.places))
    own = dict(zip(_OF_PAIRS, pairs[1:], strict=True))
    for place, (name, kind) in enumerate(zip(rows.column_names, rows.schema.types, strict=True)):
        if name in own:
            rows = rows.set_column(place, name, pa.array(own[name]))
            once = once.set_column(place, name, pa.array(of_pairs[name], mask=of_pairs[name] == _LEAST))
        elif name in _MEASURES:
            rows = rows.set_column(place, name, pa.array(np.zeros(len(rows)), kind))
    return pa.concat_tables([once, rows])


class _Members:
    """Records by collective: ``order`` puts them in that of their collectives and ranks."""

    def __init__(self, rows: pa.Table) -> None:
        self._rows = rows
        group, _ = numbered(rows.select(["attempt", "pg", "group_ranks"]))
        number, rank = (rows[name].to_numpy().astype(np.int64, copy=False) for name in ("pg_seq", "rank"))
        keys = [group, number]
        self.order, starts = in_order((*keys, rank))
        if len(starts) < len(rows):
            keys.append(repetitions((group, number, rank), rows))
            self.order, _ = in_order((*keys, rank))
        self.groups = Groups(*(key[self.order] for key in keys))

    def of_lowest(self, name: str) -> pa.Array:
        """What the lowest rank says that says anything."""
        column, place = _whole(self._rows[name]), self.groups.starts
        if column.null_count:
            known = column.is_valid().to_numpy(zero_copy_only=False)[self.order]
            places = np.where(known, np.arange(len(known)), len(known) - 1)
            place = self.groups.reduced(np.minimum, places)
        return column.take(pa.array(self.order[place]))

    def greatest(self, name: str) -> pa.Array:
        """The greatest number, or last text, that any rank says."""
        column = _whole(self._rows[name])
        is_text = pa.types.is_dictionary(column.type) or pa.types.is_string(column.type)
        if is_text:
            texts = ranked(self._rows[name])
            column = texts.indices
        found = self.groups.reduced(np.maximum, _numbers(column, _LEAST)[self.order])
        numbers = pa.array(found, mask=found == _LEAST)
        if is_text:
            return pa.DictionaryArray.from_arrays(numbers.cast(pa.int32()), texts.dictionary)
        return numbers.cast(column.type)

    def mean(self, column: pa.ChunkedArray) -> tuple[pa.Array, Numbers]:
        """The mean of those that are known, and how many are."""
        values = _whole(column)
        counts = self.groups.lengths
        if values.null_count:
            known = values.is_valid().to_numpy(zero_copy_only=False)[self.order].astype(np.int64)
            counts = self.groups.reduced(np.add, known)
        # As doubles, which cannot overflow; they are exact as long as a sum is below 2**53.
        sums = self.groups.reduced(np.add, _numbers(values, 0)[self.order].astype(np.float64))
        return pa.array(sums / np.maximum(counts, 1), mask=counts == 0), counts


def _whole(column: pa.ChunkedArray) -> pa.Array:
    whole = column.unify_dictionaries().combine_chunks()
    return whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole


def _numbers(column: pa.Array, value: int) -> Numbers:
    """``column`` with ``value`` in the place of null."""
    filled = pc.fill_null(column.cast(pa.int64()), value) if column.null_count else column
    numbers: Numbers = filled.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return numbers
