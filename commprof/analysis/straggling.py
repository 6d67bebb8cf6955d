"""Who comes late in a run: the arrivals of its collectives, part by part, and what follows from all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from commprof.analysis import arrivals as arrivals_module
from commprof.analysis.lateness import causes, late_collectives, lateness, worst
from commprof.trace.reader import Scan

MOST_LATE: Final = 200  # collectives that are told one by one
_COLUMNS: Final = (  # what the questions over all arrivals read
    *("attempt", "step", "op", "rank", "members", "lateness_ns", "lateness_error_ns", "error_ns"),
    *("is_last", "certain", "lead_ns", "others_waited_ns", "waiting_ns", "launch_ns", "transfer_ns", "cause"),
)


class Straggling(NamedTuple):
    """Who comes late, in four tables: see :func:`commprof.analysis.api.straggling`."""

    ranks: pd.DataFrame
    lateness: pd.DataFrame
    causes: pd.DataFrame
    collectives: pd.DataFrame


class Collector:
    """Takes the arrivals of whole collectives, part by part, and answers over all of them.

    Several parts are kept in a file in ``directory``, and only their worst collectives in memory.

    Args:
        limit: collectives that are told one by one.
    """

    def __init__(self, directory: Path, limit: int = MOST_LATE) -> None:
        self._file = directory / "arrivals.parquet"
        self._limit = limit
        self._only: pa.Table | None = None
        self._late: pa.Table | None = None
        self._writer: pq.ParquetWriter | None = None
        self._first: int | None = None
        self._last: int | None = None
        self._unknown = 0

    def add(self, arrived: pa.Table) -> None:
        """Take the arrivals of one part. A collective has a number that no other part has."""
        ends = pc.min_max(arrived["arrived_ns"]).as_py()
        if ends["min"] is not None:
            self._first = ends["min"] if self._first is None else min(self._first, ends["min"])
            self._last = ends["max"] if self._last is None else max(self._last, ends["max"])
        self._unknown += arrivals_module.incomparable(arrived)
        late = worst(arrived, self._limit)
        held = [late] if self._late is None else [self._late, late]
        self._late = worst(pa.concat_tables([_plain(each) for each in held]), self._limit)
        rows = _plain(arrived.select(_COLUMNS))
        if self._only is None and self._writer is None:
            self._only = rows
            return
        for each in (self._only, rows):
            if each is not None:
                self._write(each)
        self._only = None

    def _write(self, rows: pa.Table) -> None:
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                self._file,
                rows.schema,
                compression="snappy",
                use_dictionary=["op", "cause"],
                write_statistics=False,
            )
        self._writer.write_table(rows)

    def answer(self) -> Straggling:
        """What follows from all that was taken."""
        arrived: pa.Table | Scan | None = self._only
        if self._writer is not None:
            schema = self._writer.schema
            self._writer.close()
            arrived = Scan((self._file,), schema.empty_table())
        if arrived is None or self._late is None:
            raise ValueError("no part was taken")
        span = 0 if self._first is None or self._last is None else int(self._last - self._first)
        return Straggling(
            arrivals_module.stragglers_among(arrived, span, self._unknown),
            lateness(arrived),
            causes(arrived),
            late_collectives(self._late, self._limit),
        )


@contextmanager
def collector(limit: int = MOST_LATE) -> Iterator[Collector]:
    """A :class:`Collector` whose file goes when the block ends."""
    with TemporaryDirectory(prefix="commprof-", ignore_cleanup_errors=True) as directory:
        yield Collector(Path(directory), limit)


def straggling(parts: Iterable[pa.Table], align: Callable[[pa.Table], pa.Table], limit: int) -> Straggling:
    """The answer over ``parts`` of the records of a run, each of whole collectives.

    Args:
        align: from records to arrivals.
    """
    with collector(limit) as taken:
        for number, arrived in enumerate(map(align, parts)):
            taken.add(apart(arrived, number))
        return taken.answer()


def apart(arrived: pa.Table, part: int) -> pa.Table:
    """``arrived`` with numbers of its collectives that no other part has."""
    if not part:
        return arrived
    place = arrived.column_names.index("collective")
    moved: Any = pc.add(arrived["collective"], pa.scalar(part << 40, pa.int64()))
    return arrived.set_column(place, "collective", moved)


def _plain(rows: pa.Table) -> pa.Table:
    """``rows`` with text as text, so that tables of different values go together."""
    for place, field in enumerate(rows.schema):
        if pa.types.is_dictionary(field.type):
            rows = rows.set_column(place, field.name, rows.column(place).cast(pa.string()))
    return rows
