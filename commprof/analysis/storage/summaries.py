"""Summaries of a run: small tables that most answers use. They are evaluated once, when the run has ended.

Each summary is a Parquet file in ``RUN/relations/``. Summaries follow from the records, so they may be deleted at any
time. A summary is valid only while its stamp equals the :func:`fingerprint` of the run.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from commprof.trace.directory import SUMMARIES_DIRECTORY
from commprof.trace.fingerprint import fingerprint
from commprof.trace.tables import write_parquet

_STAMP: Final = b"commprof.fingerprint"
_KEY: Final = b"commprof.key"
_SMALL: Final = 300_000  # runs with at most this number of records get summaries, however short the job was
# The maximum CPU time of a record in ns. 4.3 us were measured for a run in which each record is a row of its own.
_RECORD_NS: Final = 6_000
_SHARE: Final = 0.005  # the share of its duration by which the end of a job may be delayed


def is_affordable(records: int, lasted_ns: int) -> bool:
    """Return whether a job that lasted ``lasted_ns`` ns may wait at its end until ``records`` records are evaluated."""
    return records <= _SMALL or records * _RECORD_NS <= _SHARE * lasted_ns


def keep(path: Path, tables: Mapping[tuple[str, ...], pa.Table], stamp: str) -> None:
    """Write summaries into the directory of the run at ``path``. Either all of them are written, or none.

    Args:
        path: The run directory.
        tables: The summaries by name and columns.
        stamp: The ``inputs`` of the :func:`fingerprint` of the run from which the summaries were evaluated.

    Raises:
        TraceError, OSError: The summaries cannot be written.
    """
    for left in path.glob(f".{SUMMARIES_DIRECTORY}-*"):  # left by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(mkdtemp(prefix=f".{SUMMARIES_DIRECTORY}-", dir=path))
    try:
        folder.chmod(0o755)
        for key, rows in tables.items():
            metadata = {_STAMP: stamp.encode(), _KEY: ",".join(key).encode()}
            write_parquet(folder / f"{key[0]}.parquet", rows, metadata)
        shutil.rmtree(path / SUMMARIES_DIRECTORY, ignore_errors=True)
        folder.rename(path / SUMMARIES_DIRECTORY)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def read(path: Path) -> dict[tuple[str, ...], pa.Table]:
    """Return the summaries of the run at ``path`` by name and columns.

    The result is empty if there are no summaries, or if any of the files is damaged or not valid.
    """
    files = sorted((path / SUMMARIES_DIRECTORY).glob("*.parquet"))
    summaries_by_key: dict[tuple[str, ...], pa.Table] = {}
    stamp = fingerprint(path).inputs.encode() if files else b""
    for file in files:
        try:
            table = pq.read_table(file, partitioning=None)
        except (OSError, ValueError, pa.ArrowException):
            return {}
        metadata = table.schema.metadata or {}
        if metadata.get(_STAMP) != stamp:
            return {}
        summaries_by_key[tuple(metadata[_KEY].decode().split(","))] = table.replace_schema_metadata(None)
    return summaries_by_key
