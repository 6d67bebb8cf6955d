"""Arrow schemas and Parquet files of the tables of the schema, and functions that read and write them."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError:  # pragma: no cover - depends on the installation
    from commprof.errors import MissingExtraError

    raise MissingExtraError("pyarrow", "analysis", "to read a run") from None

from commprof.errors import SchemaError, TraceError
from commprof.schema import SCHEMA_VERSION, TABLES

_TYPES: Final[dict[str, Any]] = {
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "string": pa.string(),
}
_PART_ROWS: Final = 65_536
_COLUMN_PART_ROWS: Final = 262_144
_BUFFER_BYTES: Final = 1 << 16
VERSION_KEY: Final = b"commprof.schema_version"


@cache
def arrow_schema(table: str) -> pa.Schema:
    """Return the Arrow schema of ``table``.

    Raises:
        TraceError: There is no such table.
    """
    declared = TABLES.get(table)
    if declared is None:
        raise TraceError(f"there is no table {table!r}; the tables are: {', '.join(TABLES)}")
    return pa.schema(
        [pa.field(column.name, _TYPES[column.type], nullable=column.nullable) for column in declared.columns],
        metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()},
    )


def empty_table(table: str) -> pa.Table:
    """Return ``table`` without rows."""
    return arrow_schema(table).empty_table()


def table_from_rows(table: str, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Convert ``rows`` (mappings) to ``table``. Missing columns become null, and unknown keys are left out.

    Raises:
        TraceError: A value does not fit its column.
        SchemaError: A value of a column that must not be null is missing.
    """
    schema = arrow_schema(table)
    rows = list(rows)
    columns = []
    for item in schema:
        values = [row.get(item.name) for row in rows]
        try:
            columns.append(pa.array(values, item.type))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise TraceError(f"table {table}, column {item.name}: {error}") from None
    return conform(table, pa.table(columns, names=schema.names))


def conform(table: str, arrow: pa.Table) -> pa.Table:
    """Return ``arrow`` with the columns, order and types of ``table``. Missing nullable columns become null.

    Raises:
        SchemaError: A required column is missing or has nulls, a column cannot be converted, or ``arrow`` has an
            unknown or repeated column.
    """
    schema = arrow_schema(table)
    names = arrow.column_names  # pyarrow creates a new list at each access.
    extra = [name for name in names if name not in schema.names]
    if extra:
        raise SchemaError(
            f"table {table} does not have column(s) {', '.join(extra)}; it has: {', '.join(schema.names)}"
        )
    if len(set(names)) < len(names):
        raise SchemaError(f"table {table} has a column twice: {', '.join(arrow.column_names)}")
    columns = []
    for item in schema:
        if item.name not in names:
            if not item.nullable:
                raise SchemaError(f"table {table} lacks column {item.name}, which every row must have")
            columns.append(pa.nulls(len(arrow), item.type))
            continue
        column = arrow.column(item.name)
        try:
            column = column.cast(item.type) if column.type != item.type else column
        except (pa.ArrowException, ValueError) as error:
            raise SchemaError(
                f"table {table}, column {item.name}: {column.type} does not convert to {item.type} ({error})"
            ) from None
        if not item.nullable and column.null_count:
            raise SchemaError(
                f"table {table}, column {item.name} has {column.null_count} nulls; it must have none"
            )
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)


def write_table(run: str | os.PathLike[str], name: str, table: pa.Table) -> Path:
    """Check ``table`` against the schema and write it atomically as table ``name`` of run directory ``run``.

    Returns:
        The path of the file.

    Raises:
        SchemaError: The table does not fit the schema.
        TraceError: The directory cannot be written to.
    """
    path = Path(run) / f"{name}.parquet"
    write_parquet(path, conform(name, table))
    return path


def read_table(run: str | os.PathLike[str], name: str) -> pa.Table:
    """Read table ``name`` of run directory ``run``. The result has no rows if there is no such file.

    Raises:
        TraceError: The file is damaged.
        SchemaError: A newer version wrote the file.
    """
    path = Path(run) / f"{name}.parquet"
    return read_parquet(path, name) if path.exists() else empty_table(name)


def write_parquet(path: Path, table: pa.Table, metadata: Mapping[bytes, bytes] | None = None) -> None:
    """Write one Parquet file atomically, through a temporary file in the same directory.

    Raises:
        TraceError: The file cannot be written.
    """
    if metadata:
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), **metadata})
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    strings = [item.name for item in table.schema if pa.types.is_string(item.type)]
    deltas = {
        item.name: "DELTA_BINARY_PACKED" for item in table.schema if item.type in (pa.int64(), pa.int32())
    }
    try:
        path.parent.mkdir(exist_ok=True)
        pq.write_table(
            table,
            temporary,
            compression="zstd",
            compression_level=3,
            use_dictionary=strings,
            column_encoding=deltas,
            write_page_checksum=True,
        )
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
    except (OSError, pa.ArrowException) as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise TraceError(f"{path} cannot be written: {error}") from None


def read_parquet(path: Path, name: str) -> pa.Table:
    """Read one Parquet file as table ``name``, with the metadata of the file.

    Raises:
        TraceError: The file is damaged.
        SchemaError: A newer version wrote the file.
    """
    try:
        _check_regular(path)
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            metadata = file.schema_arrow.metadata or {}
            check_version(path, metadata)
            arrow = file.read()
        arrow.validate(full=True)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise TraceError(damaged(path, error)) from None
    return _conforming(path, name, arrow).replace_schema_metadata(metadata)


def _conforming(path: Path, name: str, arrow: pa.Table) -> pa.Table:
    """Return ``arrow``, read from ``path``, as :func:`conform` converts it. An error message names ``path``."""
    try:
        return conform(name, arrow)
    except SchemaError as error:
        raise SchemaError(
            f"{path} cannot be read: {error}. Read it with the commprof that wrote it, or copy it again from there"
        ) from None


def parquet_parts(path: Path, name: str) -> Iterator[pa.Table]:
    """Yield the rows of one Parquet file as table ``name``, at most 65,536 rows at a time.

    Raises:
        TraceError: The file is damaged.
        SchemaError: A newer version wrote the file.
    """
    try:
        _check_regular(path)
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            check_version(path, file.schema_arrow.metadata or {})
            for batch in file.iter_batches(batch_size=_PART_ROWS):
                batch.validate(full=True)
                yield _conforming(path, name, pa.table(batch))
    except (OSError, pa.ArrowException, ValueError) as error:
        raise TraceError(damaged(path, error)) from None


def read_columns(path: Path, columns: Sequence[str]) -> pa.Table:
    """Read some columns of one file of ``collectives``. Texts are dictionary-encoded.

    :func:`version_of` must return a version for the file.

    Raises:
        TraceError: The file is damaged.
    """
    try:
        with open_columns(path, "collectives") as file:
            return with_newer(file.read(columns=list(columns)), "collectives", columns)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise TraceError(damaged(path, error)) from None


def column_parts(
    path: Path, name: str, columns: Sequence[str], rows: int = _COLUMN_PART_ROWS
) -> Iterator[pa.Table]:
    """Yield some columns of one file of table ``name``, ``rows`` rows at a time. Texts are dictionary-encoded.

    :func:`version_of` must return a version for the file.

    Raises:
        TraceError: The file is damaged.
    """
    try:
        _check_regular(path)
        # One buffer per column avoids loading the whole file.
        with open_columns(path, name, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
            for batch in file.iter_batches(batch_size=rows, columns=list(columns)):
                batch.validate(full=True)
                yield with_newer(pa.table(batch), name, columns)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise TraceError(damaged(path, error)) from None


def with_newer(rows: pa.Table, name: str, columns: Sequence[str]) -> pa.Table:
    """Return ``columns`` of ``rows``. Columns of table ``name`` that ``rows`` lacks are null.

    An older version of commprof did not write these columns. A text column that is added is dictionary-encoded.
    """
    schema = arrow_schema(name)
    for missing in [column for column in columns if column not in rows.column_names]:
        kind = schema.field(missing).type
        kind = pa.dictionary(pa.int32(), kind) if pa.types.is_string(kind) else kind
        rows = rows.append_column(missing, pa.nulls(len(rows), kind))
    return rows.select(list(columns))


def open_columns(path: Path, name: str, **options: Any) -> pq.ParquetFile:
    """Open one Parquet file of table ``name``, of any schema version, with dictionary-encoded texts."""
    about = pq.read_metadata(path)
    present = set(about.schema.names)
    texts = [
        column.name for column in TABLES[name].columns if column.type == "string" and column.name in present
    ]
    return pq.ParquetFile(
        path, metadata=about, read_dictionary=texts, page_checksum_verification=True, **options
    )


def read_metadata(path: Path) -> dict[bytes, bytes]:
    """Return the metadata of one Parquet file. The result is empty if there is no such file.

    Raises:
        TraceError: The file is damaged.
    """
    try:
        _check_regular(path)
        return dict(pq.read_schema(path).metadata or {})
    except FileNotFoundError:
        return {}
    except (OSError, pa.ArrowException, ValueError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from None


def count_rows(path: Path) -> int:
    """Return the number of rows that the metadata of one Parquet file states.

    Raises:
        TraceError: The file is damaged.
    """
    try:
        _check_regular(path)
        return int(pq.read_metadata(path).num_rows)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from None


def version_of(path: Path, name: str) -> int | None:
    """Return the schema version whose table ``name`` has exactly the columns of one Parquet file.

    None means that no version has these columns, so the file must be converted. A file of an older version lacks
    columns, see :func:`with_newer`.

    Raises:
        TraceError: The file is damaged.
        SchemaError: A newer version wrote the file.
    """
    try:
        _check_regular(path)
        stored_schema = pq.read_schema(path)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from None
    version = check_version(path, stored_schema.metadata or {})
    declared = zip(arrow_schema(name), TABLES[name].columns, strict=True)
    expected = [(item.name, item.type) for item, column in declared if column.since <= version]
    return version if [(item.name, item.type) for item in stored_schema] == expected else None


def _check_regular(path: Path) -> None:
    """Raise OSError if ``path`` is not a regular file, because reading a pipe could block forever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def check_version(path: Path, metadata: Mapping[bytes, bytes]) -> int:
    """Return the schema version in ``metadata`` of file ``path``, or the current version if there is none.

    Raises:
        SchemaError: The version is newer than the current version.
    """
    text = metadata.get(VERSION_KEY, b"")
    version = int(text) if text.isdigit() else SCHEMA_VERSION
    if version > SCHEMA_VERSION:
        raise SchemaError(
            f"{path} was written with schema version {version}; this commprof reads versions up to {SCHEMA_VERSION}. "
            "Install a newer commprof to read it"
        )
    return version


def damaged(path: Path, error: Exception) -> str:
    """Return an error message for a Parquet file that Arrow cannot read.

    The message has one line, while the messages of Arrow may have several lines.
    """
    reason = " ".join(str(error).split()).rstrip(". ")
    return f"{path} cannot be read: {reason}. It is damaged or not a Parquet file; copy it again from where it was made"
