"""Compare the relation of bucket contents with a plain computation row by row."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from commprof.analysis.relations.sql_engine import evaluate
from commprof.analysis.traffic.bucket_groups import bucket_groups
from commprof.schema import Purpose, parse_ranks
from commprof.trace.tables import arrow_schema, table_from_rows
from support.sample import examples

KEY = ("attempt", "step", "micro_step", "bucket")

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

# Ranks 0 and 1 reduce together, and rank 2 alone. Attempt 2 has no entry.
REDUCING = [(attempt, text) for attempt in (0, 1) for text in ("0-1", "2")]
TEXTS = {(attempt, rank): ("0-1", "2")[rank // 2] for attempt in (0, 1) for rank in range(3)}


def told_row_by_row(given):
    found = {}
    for row in sorted(given, key=lambda row: tuple(row[name] for name in (*KEY, "rank"))):
        text = TEXTS.get((row["attempt"], row["rank"]))
        found.setdefault((*(row[name] for name in KEY), text), []).append(row)
    for (*key, text), members in found.items():
        said = {name: [row[name] for row in members if row[name] is not None] for name in HELD}
        yield dict(zip(KEY, key, strict=True)) | {
            "group_ranks": text,
            **{name: values[0] if values else None for name, values in said.items()},
            "ranks": len(members),
            "alike": len(set(said["numel"])) < 2 and len(set(said["parameters"])) < 2,
        }


@settings(deadline=None, max_examples=examples(60))
@given(rows)
def test_each_bucket_is_told_once_with_what_the_lowest_rank_says(given):
    records = [
        {
            "attempt": attempt,
            "rank": rank,
            "group_ranks": text,
            "bucket": 0,
            "purpose": Purpose.GRADIENT_REDUCE,
        }
        for attempt, text in REDUCING
        for rank in parse_ranks(text)
    ]
    tables = {
        "buckets": table_from_rows("buckets", [row | {"pid": 100 + row["rank"]} for row in given]),
        "collectives": pa.Table.from_pylist(records, arrow_schema("collectives")),
    }
    found = {identity(row): row for row in evaluate("bucket_contents", tables).to_pylist()}
    assert found == {identity(row): row for row in told_row_by_row(given)}


def identity(row):
    return tuple(row[name] for name in (*KEY, "group_ranks"))


def test_groups_that_share_a_rank_reduce_together():
    """The run has two stages. In the first attempt each stage reduces along two axes of 2 x 2 ranks.

    In the second attempt there are only pairs.
    """
    stages = [(0, text) for text in ("0-1", "2-3", "0,2", "1,3", "4-5", "6-7", "4,6", "5,7")]
    pairs = [*stages, (1, "0-1"), (1, "2-3")]
    found = bucket_groups(
        pa.table({"attempt": [pair[0] for pair in pairs], "group_ranks": [pair[1] for pair in pairs]})
    )
    told = {(row["attempt"], row["rank"]): row["group_ranks"] for row in found.to_pylist()}
    assert told == {(0, rank): "0-3" if rank < 4 else "4-7" for rank in range(8)} | {
        (1, rank): "0-1" if rank < 2 else "2-3" for rank in range(4)
    }
