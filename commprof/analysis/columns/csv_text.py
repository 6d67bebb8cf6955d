"""Tables as CSV text: RFC 4180, UTF-8, integers exact, null an empty field, true and false in lower case.

Text is quoted, so that an empty text (``""``) differs from null.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import IO, Any, Final

import pandas as pd
import pyarrow as pa
import pyarrow.csv as pacsv

# pyarrow before 22 cannot end lines with CR LF; its LF is read by everything as well.
_LINE_END: Final[dict[str, Any]] = {"eol": "\r\n"} if hasattr(pacsv.WriteOptions(), "eol") else {}
_ROWS_AT_A_TIME: Final = 65_536


def write_csv(table: pa.Table, out: IO[bytes]) -> None:
    """Write ``table`` to ``out``, some thousand rows at a time."""
    write_csv_parts([table], table.schema, out)


def write_csv_parts(tables: Iterable[pa.Table], schema: pa.Schema, out: IO[bytes]) -> None:
    """Write ``tables`` with ``schema`` as one CSV table."""
    header = io.StringIO()
    csv.writer(header).writerow(schema.names)  # pyarrow would put every name in quotes
    out.write(header.getvalue().encode("utf-8"))
    options = pacsv.WriteOptions(include_header=False, quoting_style="needed", **_LINE_END)
    with pacsv.CSVWriter(out, schema, write_options=options) as writer:
        for part in tables:
            for batch in part.to_batches(max_chunksize=_ROWS_AT_A_TIME):
                # pyarrow 26 writes uninitialized memory for a batch without rows.
                if batch.num_rows:
                    writer.write_batch(batch)


def frame_csv(frame: pd.DataFrame) -> str:
    """``frame`` as CSV text, without its index, in the conventions of an export."""
    out = io.BytesIO()
    write_csv(pa.Table.from_pandas(frame, preserve_index=False), out)
    return out.getvalue().decode("utf-8")
