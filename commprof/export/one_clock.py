"""The records of a run rank by rank, on one clock, with keys that identify the same collective on other ranks.

Only one rank is in memory at a time, and only some of its records as Python values.
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
_FEWEST_SCANNED: Final = 100_000  # rows of a table that is read file by file
_ROWS_AT_A_TIME: Final = 20_000
NO_PARTNER: Final = -1

Numbers = npt.NDArray[np.int64]


class RankRows(NamedTuple):
    """All records of one rank in one attempt, in order of process and issue.

    ``shift_ns`` is the offset to add to a row's times. ``stream``, ``number`` and ``repetition`` together are equal in all
    records of one collective or message, on all ranks; the stream is :data:`NO_PARTNER` if a row can have no partner.
    """

    rank: int
    attempt: int
    table: pa.Table
    shift_ns: Numbers
    stream: Numbers
    number: Numbers
    repetition: Numbers

    def rows(self) -> Iterator[dict[str, Any]]:
        """The records as Python values."""
        for first in range(0, len(self.table), _ROWS_AT_A_TIME):
            yield from self.table.slice(first, _ROWS_AT_A_TIME).to_pylist()


class OneClock:
    """The records of ``run`` by rank. Times of hosts whose clocks were never compared are not shifted.

    Args:
        columns: the columns of ``collectives`` to read.

    Raises:
        TraceError: a file of the run is damaged.
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
        self.groups: set[tuple[str, str]] = set()  # name and ranks
        self.unknown_clocks = 0  # rows whose clock was never compared with the reference
        self.begin_ns: int | None = None  # the first issue
        self._look()

    def _look(self) -> None:
        """Collect the facts that are needed before the first row, from a few columns of every rank."""
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
        """The offset to add to a time of ``process``."""
        measured = None if self._is_one else self._clock.offset(process, np.array([time_ns], np.int64))
        return 0 if measured is None else int(measured.offset_ns[0])

    def ranks(self) -> Iterator[RankRows]:
        """The ranks in order, each with its attempts in order."""
        for rank, attempt, rows in self._ranks(self._columns):
            order = np.lexsort((rows["seq"].to_numpy(), rows["pid"].to_numpy()))
            if np.any(np.diff(order) != 1):
                rows = rows.take(pa.array(order))
            shift, _ = self._shift(rows)
            yield RankRows(rank, attempt, rows.select(self._columns), shift, *self._identity(rows))

    def _identity(self, rows: pa.Table) -> tuple[Numbers, Numbers, Numbers]:
        """The collective or message of each row, by counting the records of its own rank."""
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
        """The rows of each rank and attempt, in their order."""
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
    """The rows of each rank and attempt."""
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
    """The columns of a file, with texts dictionary-encoded."""
    try:
        with open_columns(file, "collectives") as opened:
            rows = opened.read(columns=list(columns))
            return with_newer(rows, "collectives", columns).unify_dictionaries()
    except (OSError, pa.ArrowException, ValueError) as error:
        raise TraceError(damaged(file, error)) from None


def _like(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    return rows if rows.schema.equals(schema) else rows.cast(schema)


def end_of(row: Mapping[str, Any]) -> int:
    """The last known time of an operation: its return, the end of its wait, or the end on the device."""
    return max(int(row[name]) for name in ("issue_ns", *_ENDS) if row[name] is not None)
