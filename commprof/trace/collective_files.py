"""Writes the ``collectives`` of one rank as a Parquet file, which is read back and compared before it gets its name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from commprof.errors import TraceError
from commprof.schema import COLLECTIVES
from commprof.trace.rank_files.columns import encoded_schema
from commprof.trace.tables import VERSION_KEY

# Times and numbers that grow from record to record are stored as differences. All other columns repeat their values.
# Exposed times have a few frequent values, so a dictionary takes a fifth less space than differences. A byte stream
# split takes even less, but DuckDB 1.1 does not read it for integers.
_GROWING: Final = (
    "seq",
    "pg_seq",
    "issue_ns",
    "return_ns",
    "wait_begin_ns",
    "wait_end_ns",
    "device_begin_ns",
    "device_end_ns",
)
_REPEATING: Final = [name for name in COLLECTIVES.names if name not in _GROWING]
_TEXTS: Final = [column.name for column in COLLECTIVES.columns if column.type == "string"]
_PARTIAL: Final = ".partial"

Parts = Callable[[], Iterable[pa.Table]]


def write_collectives(file: Path, parts: Parts, metadata: Mapping[bytes, bytes]) -> None:
    """Write ``file`` atomically: the content is read back and compared before the file gets its name.

    Args:
        parts: A function that returns the rows as a sequence of tables of ``encoded_schema``. It is called twice: to
            write the rows, and to compare them with the file.

    Raises:
        TraceError: The file cannot be written, or its content differs from the rows.
    """
    partial = file.with_name(f".{file.name}-{os.getpid()}{_PARTIAL}")
    try:
        file.parent.mkdir(exist_ok=True)
        _write(partial, parts(), metadata)
        check_copy(partial, parts())
        partial.replace(file)
    except (OSError, pa.ArrowException) as error:
        raise TraceError(f"{file} cannot be written: {error}") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _write(path: Path, parts: Iterable[pa.Table], metadata: Mapping[bytes, bytes]) -> None:
    schema = encoded_schema()
    with pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=3,
        use_dictionary=_REPEATING,
        column_encoding=dict.fromkeys(_GROWING, "DELTA_BINARY_PACKED"),
        dictionary_pagesize_limit=4 << 20,
        write_page_checksum=True,
        store_schema=False,  # The Arrow schema would declare texts as dictionaries, which is internal.
    ) as writer:
        for part in parts:
            writer.write_table(part, row_group_size=max(1, len(part)))
        writer.add_key_value_metadata({VERSION_KEY: (schema.metadata or {})[VERSION_KEY], **metadata})
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def check_copy(path: Path, parts: Iterable[pa.Table]) -> None:
    """Read ``path`` back from the disk and compare its rows with ``parts``.

    The binary files are removed after this check, so this copy must be correct.

    Raises:
        TraceError: The rows of the file differ from ``parts``, or the file cannot be read.
    """
    rows = 0
    try:
        with pq.ParquetFile(path, read_dictionary=_TEXTS, page_checksum_verification=True) as file:
            copies = _row_groups(file)
            for part in parts:
                rows += len(part)
                copy = next(copies, None)
                if copy is None or not _are_equal(part, copy):
                    raise TraceError(_differs(path, rows))
            if next(copies, None) is not None:
                raise TraceError(_differs(path, rows))
    except (OSError, pa.ArrowException) as error:
        raise TraceError(f"{_differs(path, rows)} ({error})") from None


def _row_groups(file: pq.ParquetFile) -> Iterator[pa.Table]:
    for group in range(file.num_row_groups):
        yield file.read_row_group(group)


def _are_equal(part: pa.Table, copy: pa.Table) -> bool:
    if part.column_names != copy.column_names or len(part) != len(copy):
        return False
    return all(
        a.equals(b) or a.cast(pa.string()).equals(b.cast(pa.string()))
        if pa.types.is_dictionary(a.type)
        else a.equals(b)
        for a, b in zip(part.columns, copy.columns, strict=True)
    )


def _differs(path: Path, rows: int) -> str:
    return f"{path} does not hold what was written to it (up to row {rows:,}); the binary files are kept. Check the disk"


def remove_partial(directory: Path) -> None:
    """Remove the partial files in ``directory`` that killed commands left. The caller must hold the lock of the run."""
    for partial in directory.glob(f".rank-*{_PARTIAL}"):
        partial.unlink(missing_ok=True)
