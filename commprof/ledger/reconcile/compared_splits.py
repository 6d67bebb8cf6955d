"""Compares the splits of all_to_alls between ranks: each rank must send the size that the receiver expects.

One pass over all records sums hashes of the sent sizes and subtracts hashes of the expected sizes. The sum is 0 if the
sizes agree. Only the records of sums that are not 0 are read again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.ranks.agreement import Difference, IssuedCall, call_of
from commprof.align.ranks.collectives import repetitions
from commprof.align.ranks.stated_splits import first_unequal_split
from commprof.ledger.records.precount import GROUP, Group
from commprof.ledger.records.row_index import Flags, Numbers, combinations, numbers_of, where
from commprof.ledger.requests.request import RecordedRun, recorded_ranks
from commprof.schema import COLLECTIVES, Layer, Op, Status, parse_ranks, parse_splits

_STATE: Final = ("captured", "status", "layer")
_SIZES: Final = ("input_bytes", "output_bytes", "input_splits", "output_splits")
COLUMNS: Final = (*GROUP, "op", *_STATE, "rank", "pg_seq", *_SIZES)
_SHOWN: Final = (
    *COLUMNS,
    "seq",
    "issue_ns",
    "payload_bytes",
    "dtype",
    "reduce_op",
    "peer",
    "backend",
    "step",
    "after_step",
    "module",
    "purpose",
    "call_site",
)
_UNKNOWN: Final = -1
_PAIRS: Final = 1 << 12  # number of pairs of ranks whose sizes are in one sum
_MOST_BLOCKS: Final = 64  # number of sums of a group whose records are read again in one pass
_WEIGHTS: Final = tuple(
    np.uint64(odd) for odd in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
)

Sums: TypeAlias = npt.NDArray[np.uint64]


class Splits:
    """The sizes that the ranks of each group send to each other in all_to_alls, as sums of hashes.

    Records are added in parts.

    Args:
        run: The run whose records will be added.
    """

    def __init__(self, run: RecordedRun) -> None:
        self._recorded = recorded_ranks(run)
        self._has_splits = run.manifest.schema_version >= COLLECTIVES.column("input_splits").since
        self._sums: dict[Group, dict[int, int]] = defaultdict(lambda: defaultdict(int))

    def add(self, part: pa.Table) -> None:
        """Add the records in ``part``, with the columns :data:`COLUMNS`."""
        rows = self._exchanges(part)
        if not len(rows):
            return
        number = rows["pg_seq"].to_numpy()
        for (attempt, pg, group_ranks, rank), places in combinations(rows, [*GROUP, "rank"]):
            members = np.array(parse_ranks(group_ranks), np.int64)
            others = np.flatnonzero(np.isin(members, list(self._recorded[attempt])))
            me = np.flatnonzero(members == rank)
            mine, numbers = rows.take(pa.array(places)), number[places].astype(np.int64)
            sent = _sizes(mine, "input", len(members))[:, others]
            expected = _sizes(mine, "output", len(members))[:, others]
            sums = _sum(numbers, me, others, sent) - _sum(numbers, others, me, expected)
            blocks = numbers // _block(len(members))
            starts = np.flatnonzero(np.append(True, blocks[1:] != blocks[:-1]))
            of_group = self._sums[attempt, pg, group_ranks]
            for block, total in zip(
                blocks[starts].tolist(), np.add.reduceat(sums, starts).tolist(), strict=True
            ):
                of_group[block] = (of_group[block] + total) % (1 << 64)

    def differences(self, run: RecordedRun) -> list[Difference]:
        """Return the first all_to_all of each group in which a sent size differs from the size that is expected.

        Args:
            run: The run whose records were added.
        """
        open_blocks = {
            group: blocks
            for group, sums in self._sums.items()
            if (blocks := sorted(block for block, total in sums.items() if total))
        }
        differences: list[Difference] = []
        while open_blocks:
            near = {group: set(blocks[:_MOST_BLOCKS]) for group, blocks in open_blocks.items()}
            for group, calls in self._calls(run, near).items():
                difference = _first_of_lives(group, calls)
                if difference is not None:
                    differences.append(difference)
                    open_blocks[group] = []
            open_blocks = {
                group: rest for group, blocks in open_blocks.items() if (rest := blocks[_MOST_BLOCKS:])
            }
        return differences

    def _exchanges(self, part: pa.Table) -> pa.Table:
        """Return the all_to_alls of ``part`` whose splits are known."""
        if not self._has_splits:
            return part.slice(0, 0)
        rows = part.filter(pa.array(where(part, ["op"], lambda op: op == Op.ALL_TO_ALL)))
        return rows.filter(pa.array(where(rows, _STATE, _has_run)))

    def _calls(
        self, run: RecordedRun, blocks: Mapping[Group, set[int]]
    ) -> dict[Group, dict[tuple[int, int], dict[int, IssuedCall]]]:
        """Return the all_to_alls of ``blocks``: the call of each rank by group, and by life and number in the group.

        If a group name is used again, the new group has a new life.
        """
        tables: dict[Group, list[pa.Table]] = {group: [] for group in blocks}
        for part in run.parts("collectives", _SHOWN):
            rows = self._exchanges(part)
            for group, places in combinations(rows, GROUP):
                if group in blocks:
                    of_block = rows["pg_seq"].to_numpy()[places] // _block(len(parse_ranks(group[2])))
                    tables[group].append(rows.take(pa.array(places[np.isin(of_block, list(blocks[group]))])))
        return {group: _by_life(of_group) for group, of_group in tables.items()}


def _has_run(captured: bool, status: str, layer: str) -> bool:
    return not captured and status != Status.RAISED and layer != Layer.IMPORTED


def _by_life(tables: list[pa.Table]) -> dict[tuple[int, int], dict[int, IssuedCall]]:
    calls: dict[tuple[int, int], dict[int, IssuedCall]] = defaultdict(dict)
    rows = pa.concat_tables(tables)
    number, rank = (numbers_of(rows, name)[0] for name in ("pg_seq", "rank"))
    lives = repetitions((rank, number), rows).tolist() if len(rows) else []
    for life, row in zip(lives, rows.to_pylist(), strict=True):
        calls[life, row["pg_seq"]][row["rank"]] = call_of(row, row["pg_seq"])
    return calls


def _first_of_lives(
    group: Group, calls: Mapping[tuple[int, int], Mapping[int, IssuedCall]]
) -> Difference | None:
    _, pg, group_ranks = group
    for life in sorted({life for life, _ in calls}):
        of_life = {number: ranks for (other, number), ranks in calls.items() if other == life}
        difference = first_unequal_split(pg, group_ranks, of_life)
        if difference is not None:
            return difference
    return None


def _block(ranks: int) -> int:
    """Return the number of collectives whose sizes are in one sum, for a group with this number of ranks."""
    return max(1, _PAIRS // ranks**2)


def _sizes(rows: pa.Table, side: str, ranks: int) -> Numbers:
    """Return the bytes for each rank of the group in each record, with shape (records, ranks).

    A size that is not known is :data:`_UNKNOWN`.
    """
    size, known = numbers_of(rows, f"{side}_bytes")
    sizes = np.repeat(np.where(known & (size % ranks == 0), size // ranks, _UNKNOWN)[:, None], ranks, axis=1)
    texts = rows[f"{side}_splits"].combine_chunks()
    if texts.null_count < len(texts):
        has_text: Flags = texts.is_valid().to_numpy(zero_copy_only=False)
        texts = texts.drop_null()
        if not pa.types.is_dictionary(texts.type):
            texts = texts.dictionary_encode()
        codes, first = np.unique(texts.indices.to_numpy(zero_copy_only=False), return_inverse=True)
        sizes[has_text] = _parsed(texts.dictionary.take(pa.array(codes)), ranks)[first]
    return sizes


def _parsed(texts: pa.Array, ranks: int) -> Numbers:
    lists = pc.split_pattern(texts, ",")
    try:
        values = lists.flatten().cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid:
        values = np.empty(0, np.int64)
    if len(values) == len(texts) * ranks and (pc.list_value_length(lists).to_numpy() == ranks).all():
        sizes: Numbers = values.reshape(len(texts), ranks)
        return sizes
    unknown = (_UNKNOWN,) * ranks
    return np.array([parse_splits(text, ranks) or unknown for text in texts.to_pylist()], np.int64)


def _sum(numbers: Numbers, sender: Numbers, receiver: Numbers, sizes: Numbers) -> Sums:
    """Return for each record the sum modulo 2**64 of hashes of its sizes, its number, and both ranks."""
    mixed = sizes.astype(np.uint64) * _WEIGHTS[0] + numbers.astype(np.uint64)[:, None] * _WEIGHTS[1]
    mixed += sender.astype(np.uint64) * _WEIGHTS[2] + receiver.astype(np.uint64) * _WEIGHTS[3]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _WEIGHTS[1]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _WEIGHTS[2]
    mixed ^= mixed >> np.uint64(31)
    mixed[sizes == _UNKNOWN] = 0
    total: Sums = mixed.sum(axis=1, dtype=np.uint64)
    return total
