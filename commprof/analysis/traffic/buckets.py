"""Gradient buckets: their contents, fill, flush reason, reduction, and duration."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from commprof.analysis.columns.byte_columns import PADDING
from commprof.analysis.columns.detailed_answers import (
    BUCKET_FLUSHES,
    BUCKET_MEANS,
    BUCKET_OPERATIONS,
    BUCKET_PARAMETERS,
    BUCKETS_PER_STEP,
)
from commprof.analysis.columns.frames import as_declared, from_arrow, from_rows
from commprof.analysis.relations.relation_graph import relation
from commprof.analysis.relations.sql_engine import ask, evaluate
from commprof.analysis.traffic.steady_steps import BESIDE, PARTLY_KNOWN, steady, warm_steps
from commprof.schema import parse_ranks
from commprof.trace.reader import Run, Scan

KEY: Final = ("attempt", "step", "micro_step", "bucket")
# The columns of the operations from which bucket_flushes is computed.
COLUMNS: Final = relation(BUCKET_FLUSHES.name).requested
_FEWEST_SCANNED: Final = 100_000  # rows that the engine reads from the files
_MEAN_KEY: Final = ["micro_step", "bucket", "group_ranks"]
_COUNTS: Final = ["collectives", "payload_bytes"]
_SENT: Final = [*_COUNTS, "wire_bytes"]


class BucketContent(NamedTuple):
    """One bucket.

    ``parameters`` are its parameters, and ``operations`` are the operations of the lowest rank that reduced
    it. Both are in order.
    """

    parameters: pd.DataFrame
    operations: pd.DataFrame


def bucket_flushes(run: Run, operations: pa.Table) -> pa.Table:
    """Return the relation ``bucket_flushes`` of ``run``, in order.

    Args:
        operations: The operations of the run, with at least :data:`COLUMNS`.
    """
    tables = {
        "buckets": run.scan("buckets", _FEWEST_SCANNED),
        "collectives": run.scan("collectives", _FEWEST_SCANNED),
        "aggregates": run.table("aggregates"),
    }
    return in_order(evaluate(BUCKET_FLUSHES.name, tables, known={"operations": operations}))


def in_order(flushes: pa.Table) -> pa.Table:
    """Return buckets in the order of their numbers, and then of the lowest rank of their group.

    Buckets whose group is not known come first.
    """
    texts = flushes["group_ranks"].combine_chunks().dictionary_encode()
    lowest = pa.array([parse_ranks(text)[0] for text in texts.dictionary.to_pylist()], pa.int32())
    placed = flushes.append_column("lowest_rank", pc.fill_null(lowest.take(texts.indices), -1))
    return flushes.take(pc.sort_indices(placed, [(name, "ascending") for name in (*KEY, "lowest_rank")]))


def _names(rows: pd.DataFrame, name: str, key: list[str]) -> pd.DataFrame:
    """Return the values of column ``name`` for each bucket. Several values are joined with commas."""
    some = rows[[*key, name]].dropna(subset=[name]).drop_duplicates().sort_values([*key, name])
    several = some.duplicated(key, keep=False)
    joined = pd.DataFrame(some[several].groupby(key, as_index=False, dropna=False)[name].agg(", ".join))
    return pd.concat([pd.DataFrame(some[~several]), joined], ignore_index=True)


def bucket_means(flushes: pd.DataFrame) -> pd.DataFrame:
    """Return the mean of each bucket of a training step over the steps in which it has its most frequent contents.

    DDP, for example, rebuilds its buckets after the first step. A mean over different buckets would describe
    none of them. A bucket that occurs only in the first step is in no mean step (``steady_steps``). Bytes and
    times exclude the first step of each attempt, which is warm-up, if there are other steps. Bytes are means
    over the steps that send the most frequent amount. If no value has a majority, all steps count.

    Args:
        flushes: The result of :func:`bucket_flushes`.
    """
    steps = flushes[flushes["step"] >= 0]
    is_later = steps["step"] > steps.groupby("attempt")["step"].transform("min")
    steps = _recurring(steps.assign(is_later=is_later)).reset_index(drop=True)
    part = steps[_usual(steps)]
    by = part.groupby(_MEAN_KEY, dropna=False)
    warm = part[part["is_later"] | ~by["is_later"].transform("any")]
    timed, sent = (rows.groupby(_MEAN_KEY, dropna=False) for rows in (warm, warm[_of_most(warm)]))
    means = pd.DataFrame(
        {
            "steps": by.size(),
            **{name: by[name].mean() for name in ("numel", "bytes", "fill")},
            **{name: sent[name].mean() for name in _SENT},
            **{name: sent[name].mean().where(sent[name].count() == sent.size()) for name in PARTLY_KNOWN},
            PADDING: sent[PADDING].mean(),
            "lowest_fill": by["fill"].min(),
            "steady": by.size() == steps.groupby(_MEAN_KEY, dropna=False).size(),
            **{name: timed[name].median().round() for name in ("duration_ns", "exposed_ns")},
        }
    ).reset_index()
    newest = part.drop_duplicates(_MEAN_KEY, keep="last")[[*_MEAN_KEY, "owners", "parameters"]]
    means = means.merge(newest, on=_MEAN_KEY)
    for name in ("op", "intended_op", "flush_reason"):
        means = means.merge(_names(part, name, _MEAN_KEY), on=_MEAN_KEY, how="left")
    return as_declared(means, BUCKET_MEANS.columns)


def _recurring(flushes: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of buckets that recur in training steps. One-off buckets are in no mean."""
    moments = flushes[["attempt", "step"]].drop_duplicates()
    ended_steps = [(int(attempt), int(step)) for attempt, step in moments.itertuples(index=False)]
    warm = pd.DataFrame(warm_steps(ended_steps), columns=["attempt", "step"])
    number = flushes.groupby(_MEAN_KEY, dropna=False).ngroup()
    present = flushes[["attempt", "step"]].assign(number=number).drop_duplicates().merge(warm)["number"]
    times = present.value_counts().reindex(number.unique(), fill_value=0)
    # Buckets in fewer than half of the steps, perhaps in every k-th step.
    rest = set(times.index[2 * times < len(warm)])
    rows = _plain(flushes.assign(number=number)[number.isin(rest)])
    rest -= {row["number"] for row in steady(rows, ["number"], ended_steps).per_step}
    return flushes[~number.isin(rest)]


def _usual(steps: pd.DataFrame) -> pd.Series[Any]:
    """Return which rows have the contents that their bucket has most often.

    In a tie, the contents of the newest row are chosen.
    """
    content = steps.groupby([*_MEAN_KEY, "numel", "parameters"], dropna=False).ngroup()
    kinds = steps[_MEAN_KEY].assign(content=content, place=range(len(steps)))
    counted = kinds.groupby([*_MEAN_KEY, "content"], as_index=False, dropna=False).agg(
        rows=("place", "size"), newest=("place", "max")
    )
    chosen = counted.sort_values(["rows", "newest"]).drop_duplicates(_MEAN_KEY, keep="last")["content"]
    return content.isin(chosen)


def _of_most(warm: pd.DataFrame) -> pd.Series[bool]:
    """Return which rows send the same amount as most rows of their bucket.

    If a bucket has no majority, all its rows are chosen.
    """
    rows = warm.groupby(_MEAN_KEY, dropna=False)["bucket"].transform("size")
    alike = warm.groupby([*_MEAN_KEY, *_COUNTS], dropna=False)["bucket"].transform("size")
    of_most = 2 * alike > rows
    return of_most | ~of_most.groupby([warm[name] for name in _MEAN_KEY], dropna=False).transform("any")


def per_step(of_steps: pd.DataFrame, times: pd.DataFrame) -> pd.DataFrame:
    """Return the buckets of a training step by flush reason (:mod:`commprof.analysis.traffic.steady_steps`).

    Args:
        of_steps: The buckets of each attempt and step, summed by flush reason.
        times: The training steps, with the columns attempt, step and duration_ns.
    """
    ended = times.loc[times["duration_ns"].notna(), ["attempt", "step"]]
    last = ended.groupby("attempt")["step"].max().to_dict()
    described = set(zip(of_steps["attempt"].tolist(), of_steps["step"].tolist(), strict=True))
    # A rank writes the buckets of a step when the next step begins. The buckets of the last step of a killed run are
    # therefore missing.
    ended_steps = [
        (int(attempt), int(step))
        for attempt, step in ended.itertuples(index=False)
        if step < last[attempt] or (attempt, step) in described
    ]
    rows = steady(_plain(of_steps), ["flush_reason"], ended_steps, ("buckets", "bytes", *BESIDE)).per_step
    rows.sort(key=lambda row: (-row["buckets"], str(row["flush_reason"])))
    return from_rows(rows, BUCKETS_PER_STEP.columns)


def _plain(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of ``frame`` with None for null."""
    return [
        {str(name): None if pd.isna(value) else value for name, value in row.items()}
        for row in frame.to_dict("records")
    ]


def _text(value: Any) -> str | None:
    return None if pd.isna(value) else str(value)


def content(bucket: pd.Series[Any], parameters: pa.Table, collectives: pa.Table | Scan) -> BucketContent:
    """Return the contents of one bucket and its reduction.

    Args:
        bucket: The row of the bucket in the result of :func:`bucket_flushes`.
    """
    return BucketContent(_parameters(bucket, parameters), _operations(bucket, collectives))


def _parameters(bucket: pd.Series[Any], parameters: pa.Table) -> pd.DataFrame:
    names = str(bucket["parameters"]).split(",") if _text(bucket["parameters"]) else []
    known = {row["name"]: row for row in parameters.to_pylist()}
    rows, begin = [], 0
    for name in names:
        published = known.get(name, {})
        rows.append(
            {
                "name": name,
                "shape": published.get("shape"),
                "dtype": published.get("dtype"),
                "numel": published.get("numel"),
                "first_element": begin,
            }
        )
        begin += published.get("numel") or 0
    if begin != bucket["numel"] or any(row["numel"] is None for row in rows):
        # The bucket contains shards of parameters, padding, or parameters whose sizes were not published. The position
        # of its parameters is therefore not certain.
        for row in rows:
            row["first_element"] = None
    return from_rows(rows, BUCKET_PARAMETERS.columns)


def _operations(bucket: pd.Series[Any], collectives: pa.Table | Scan) -> pd.DataFrame:
    ranks = _text(bucket["group_ranks"])
    members = pa.table({"rank": pa.array(parse_ranks(ranks) if ranks else [], pa.int32())})
    answer = ask(
        "bucket_operations",
        {"collectives": collectives, "members": members},
        **{name: str(int(bucket[name])) for name in KEY},
    )
    numels = answer["numel"].to_pylist()
    begins = [sum(numels[:i]) for i in range(len(numels))]
    exact = bool(numels) and sum(numels) == bucket["numel"]
    answer = answer.append_column(
        "first_element", pa.array(begins if exact else [None] * len(begins), pa.int64())
    )
    return from_arrow(answer.take(pc.sort_indices(answer["seq"])), BUCKET_OPERATIONS.columns)
