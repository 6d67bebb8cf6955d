"""Reads the records of a run rank by rank, on one clock, with keys that identify a collective on all its ranks.

Only one rank is in memory at a time, and only some of its records are Python values at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from commprof.align.ranks.collectives import COLUMNS, in_order, matchable, occurrences, streams_of
from commprof.align.ranks.reference_clock import ReferenceClock
from commprof.analysis.api import Run
from commprof.errors import TraceError
from commprof.trace.reader import Scan
from commprof.trace.tables import damaged, open_columns, with_newer

_ENDS: Final = ("return_ns", "wait_end_ns", "device_end_ns")
_KEYS: Final = tuple(dict.fromkeys((*COLUMNS, "pid", "captured")))
_FEWEST_SCANNED: Final = 100_000  # the minimum number of rows of a table that is read file by file
_ROWS_AT_A_TIME: Final = 20_000
NO_PARTNER: Final = -1

Numbers = npt.NDArray[np.int64]


class RankRows(NamedTuple):
    """All records of one rank in one attempt, in order of process and issue.

    ``stream``, ``number`` and ``repetition`` together identify a collective or message. All records of the collective
    or message have equal values of the three, on all ranks.

    Attributes:
        rank: The rank.
        attempt: The attempt.
        table: The records, one row each.
        shift_ns: The offset in ns to add to the times of each row.
        stream: The number of the stream of each row; :data:`NO_PARTNER` if the row cannot have a partner.
        number: The number of the collective or message in its stream, for each row.
        repetition: The number of earlier rows of the rank with the same stream and number, for each row.
    """

    rank: int
    attempt: int
    table: pa.Table
    shift_ns: Numbers
    stream: Numbers
    number: Numbers
    repetition: Numbers

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the records as Python values."""
        for first in range(0, len(self.table), _ROWS_AT_A_TIME):
            yield from self.table.slice(first, _ROWS_AT_A_TIME).to_pylist()


class OneClock:
    """Reads the records of ``run`` by rank, on one clock.

    Times of hosts whose clocks were never compared with the reference are not shifted.

    Args:
        run: The run.
        columns: The columns of ``collectives`` to read.

    Raises:
        TraceError: A file of the run is damaged.
    """

    def __init__(self, run: Run, columns: Sequence[str]) -> None:
        self.run = run
        self._columns = tuple(dict.fromkeys((*columns, *_KEYS)))
        self._clock = ReferenceClock(
            run.table("clocks").to_pylist(),
            run.table("clock_offsets").to_pylist(),
            one_host=len(run.manifest.hosts) < 2,
        )
        self._streams: dict[tuple[Any, ...], int] = {}
        self.processes: set[tuple[int, int, int]] = set()  # rank, attempt, pid
        self.groups: set[tuple[str, str]] = set()  # name and ranks of each group
        self.unknown_clocks = 0  # rows whose clock was never compared with the reference
        self.begin_ns: int | None = None  # the time of the first issue
        self._look()

    def _look(self) -> None:
        """Collect the facts that callers need before the first row, from a few columns of every rank."""
        clocks: set[str] = set()
        for _, _, rows in self._ranks(("rank", "attempt", "pid", "issue_ns", "pg", "group_ranks")):
            identities = rows.group_by(["rank", "attempt", "pid"]).aggregate([]).to_pylist()
            self.processes |= {(row["rank"], row["attempt"], row["pid"]) for row in identities}
            texts = (
                rows.select(["pg", "group_ranks"]).group_by(["pg", "group_ranks"]).aggregate([]).to_pylist()
            )
            self.groups |= {(str(row["pg"]), str(row["group_ranks"])) for row in texts}
        clocks = {self._clock.clock_of(process) for process in self.processes}
        self._is_one = len(clocks) < 2
        for _, _, rows in self._ranks(("rank", "attempt", "pid", "issue_ns")):
            if not len(rows):
                continue
            shift, unknown = self._shift(rows)
            begin = int((rows["issue_ns"].to_numpy() + shift).min())
            self.begin_ns = begin if self.begin_ns is None else min(begin, self.begin_ns)
            self.unknown_clocks += unknown

    def _shift(self, rows: pa.Table) -> tuple[Numbers, int]:
        if self._is_one:
            return np.zeros(len(rows), np.int64), 0
        readings = self._clock.readings(rows)
        return np.where(readings.known, readings.offset_ns, 0), int((~readings.known).sum())

    def shift_at(self, process: tuple[int, int, int], time_ns: int) -> int:
        """Return the offset in ns to add to the time ``time_ns`` of ``process``."""
        measured = None if self._is_one else self._clock.offset(process, np.array([time_ns], np.int64))
        return 0 if measured is None else int(measured.offset_ns[0])

    def ranks(self) -> Iterator[RankRows]:
        """Yield the records of each rank and attempt, in order of rank and attempt."""
        for rank, attempt, rows in self._ranks(self._columns):
            order = np.lexsort((rows["seq"].to_numpy(), rows["pid"].to_numpy()))
            if np.any(np.diff(order) != 1):
                rows = rows.take(pa.array(order))
            shift, _ = self._shift(rows)
            yield RankRows(rank, attempt, rows.select(self._columns), shift, *self._identity(rows))

    def _identity(self, rows: pa.Table) -> tuple[Numbers, Numbers, Numbers]:
        """Return stream, number and repetition of each row, found by counting the records of the rank itself."""
        numbered = rows.select(_KEYS).append_column("place", pa.array(np.arange(len(rows))))
        partners = matchable(numbered)
        place = partners["place"].to_numpy()
        streams = streams_of(partners)
        known = [self._streams.setdefault(name, len(self._streams)) for name in streams.names]
        identity = np.full((3, len(rows)), NO_PARTNER, np.int64)
        identity[0, place] = np.array(known, np.int64)[streams.codes] if len(place) else 0
        identity[1, place] = streams.number
        identity[2, place] = occurrences(partners, streams)
        return identity[0], identity[1], identity[2]

    def _ranks(self, columns: Sequence[str]) -> Iterator[tuple[int, int, pa.Table]]:
        """Yield the rows of each rank and attempt, in order of rank and attempt."""
        collectives = self.run.scan("collectives", _FEWEST_SCANNED)
        files: dict[tuple[int, int], list[Path]] = defaultdict(list)
        if isinstance(collectives, Scan):
            for file in collectives.files:  # rank-00000-<attempt>-<pid>
                _, rank, attempt, *_ = file.stem.split("-")
                files[int(rank), int(attempt)].append(file)
        rest = collectives.rest if isinstance(collectives, Scan) else collectives
        of_rest = _by_rank(rest.select(columns))
        for key in sorted({*files, *of_rest}):
            tables = [_read(file, columns) for file in files[key]] + (
                [of_rest[key]] if key in of_rest else []
            )
            yield *key, pa.concat_tables(_like(table, tables[0].schema) for table in tables)


def _by_rank(rows: pa.Table) -> dict[tuple[int, int], pa.Table]:
    """Return the rows of each rank and attempt."""
    if not len(rows):
        return {}
    rank, attempt = (rows[name].to_numpy().astype(np.int64) for name in ("rank", "attempt"))
    order, starts = in_order((rank, attempt))
    ends = np.append(starts[1:], len(order))
    return {
        (int(rank[order[first]]), int(attempt[order[first]])): rows.take(pa.array(order[first:last]))
        for first, last in zip(starts.tolist(), ends.tolist(), strict=True)
    }


def _read(file: Path, columns: Sequence[str]) -> pa.Table:
    """Read the columns of a file. Strings are dictionary-encoded."""
    try:
        with open_columns(file, "collectives") as opened:
            rows = opened.read(columns=list(columns))
            return with_newer(rows, "collectives", columns).unify_dictionaries()
    except (OSError, pa.ArrowException, ValueError) as error:
        raise TraceError(damaged(file, error)) from None


def _like(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    return rows if rows.schema.equals(schema) else rows.cast(schema)


def end_of(row: Mapping[str, Any]) -> int:
    """Return the last known time of an operation: its issue, return, end of its wait, or end on the device, in ns."""
    return max(int(row[name]) for name in ("issue_ns", *_ENDS) if row[name] is not None)
