"""What buckets hold, put together in arrays, against the same told row by row."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commprof.analysis.bucket_contents import KEY, described
from commprof.trace.tables import table_from_rows

HELD = ("numel", "bytes", "capacity", "dtype", "owners", "parameters", "flush_reason", "time_ns")

rows = st.lists(
    st.fixed_dictionaries(
        {
            **{name: st.integers(0, 2) for name in (*KEY, "rank")},
            "numel": st.integers(1, 2),
            "bytes": st.just(8),
            "capacity": st.sampled_from([None, 0, 4]),
            "dtype": st.sampled_from(["float32", "float16"]),
            "owners": st.sampled_from([None, "0", "1"]),
            "parameters": st.sampled_from([None, "a", "b"]),
            "flush_reason": st.sampled_from([None, "full"]),
            "time_ns": st.integers(0, 1 << 60),
        }
    ),
    max_size=30,
    unique_by=lambda row: tuple(row[name] for name in (*KEY, "rank")),
)


def told_row_by_row(given):
    found = {}
    for row in sorted(given, key=lambda row: tuple(row[name] for name in (*KEY, "rank"))):
        found.setdefault(tuple(row[name] for name in KEY), []).append(row)
    for key, members in found.items():
        said = {name: [row[name] for row in members if row[name] is not None] for name in HELD}
        yield dict(zip(KEY, key, strict=True)) | {
            **{name: values[0] if values else None for name, values in said.items()},
            "ranks": len(members),
            "alike": len(set(said["numel"])) < 2 and len(set(said["parameters"])) < 2,
        }


@pytest.mark.parametrize("in_pieces", [True, False])
@settings(deadline=None, max_examples=30)
@given(rows)
def test_each_bucket_is_told_once_with_what_the_lowest_rank_says(in_pieces, given):
    table = table_from_rows("buckets", [row | {"pid": 100 + row["rank"]} for row in given])
    halves = [table.slice(0, len(table) // 2), table.slice(len(table) // 2)]
    pieces = [
        pa.table({name: column.dictionary_encode() if pa.types.is_string(column.type) else column
                  for name, column in zip(half.column_names, half.columns, strict=True)})
        for half in halves
    ]  # fmt: skip
    whole = pa.concat_tables(pieces) if in_pieces else table
    assert described(whole.column).to_pylist() == list(told_row_by_row(given))
