"""What buckets hold, put together in arrays, against the same told row by row."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commprof.analysis.bucket_contents import GROUP, KEY, described
from commprof.analysis.bucket_groups import UNKNOWN, bucket_groups
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

# Ranks 0 and 1 reduce together, and rank 2 by itself; of attempt 2 nothing is known.
REDUCING = [(attempt, text) for attempt in (0, 1) for text in ("0-1", "2")]
NUMBERS = {(attempt, rank): rank // 2 for attempt in (0, 1) for rank in range(3)}


def told_row_by_row(given):
    found = {}
    for row in sorted(given, key=lambda row: tuple(row[name] for name in (*KEY, "rank"))):
        number = NUMBERS.get((row["attempt"], row["rank"]), UNKNOWN)
        found.setdefault((*(row[name] for name in KEY), number), []).append(row)
    for (*key, number), members in sorted(found.items()):
        said = {name: [row[name] for row in members if row[name] is not None] for name in HELD}
        yield dict(zip(KEY, key, strict=True)) | {
            GROUP: number,
            "group_ranks": None if number == UNKNOWN else ("0-1", "2")[number],
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
    assert described(whole.column, bucket_groups(REDUCING)).to_pylist() == list(told_row_by_row(given))


def test_groups_that_share_a_rank_reduce_together():
    """Two stages, each reduced along two axes of 2 x 2 ranks; in the second attempt there are pairs only."""
    stages = [(0, text) for text in ("0-1", "2-3", "0,2", "1,3", "4-5", "6-7", "4,6", "5,7")]
    found = bucket_groups([*stages, (1, "0-1"), (1, "2-3")])
    assert found.texts == ("0-1", "0-3", "2-3", "4-7")
    assert [found.number_of(0, text) for text in ("2-3", "1,3", "5,7")] == [1, 1, 3]
    assert [found.number_of(1, text) for text in ("0-1", "2-3", "4-7")] == [0, 2, UNKNOWN]
    attempts, ranks = (np.array(values) for values in ((0, 0, 1, 1, 2), (3, 6, 3, 6, 0)))
    numbers = found.numbers(attempts, ranks)
    assert numbers.tolist() == [1, 3, 2, UNKNOWN, UNKNOWN]
    assert found.texts_of(numbers).to_pylist() == ["0-3", "4-7", "2-3", None, None]
