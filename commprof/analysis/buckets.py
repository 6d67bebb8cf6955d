"""Gradient buckets: what each holds, how full it was, why it was sent, how it was reduced, and how long that took."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from commprof.analysis.bucket_contents import KEY, described
from commprof.analysis.detailed_answers import (
    BUCKET_FLUSHES,
    BUCKET_MEANS,
    BUCKET_OPERATIONS,
    BUCKET_PARAMETERS,
)
from commprof.analysis.engine import ask
from commprof.analysis.frames import as_declared, from_arrow, from_rows
from commprof.analysis.traffic import traffic
from commprof.schema import Purpose
from commprof.trace.reader import Scan

_KEY: Final = list(KEY)
COLUMNS: Final = (*_KEY, "op", "intended_op", "purpose")  # of the operations that bucket_flushes asks for
_MEAN_KEY: Final = ["micro_step", "bucket"]
_SENT: Final = ["collectives", "payload_bytes", "wire_bytes"]


class BucketContent(NamedTuple):
    """One bucket: its ``parameters``, and the ``operations`` of the lowest rank that reduced it, both in order."""

    parameters: pd.DataFrame
    operations: pd.DataFrame


def flushed(buckets: pa.Table, collectives: pa.Table | Scan) -> pa.Table:
    """One row per bucket, without what reduced it (``queries/buckets.sql``)."""
    return ask("buckets", {"described": described(buckets.column), "collectives": collectives})


def bucket_flushes(flushed: pa.Table, operations: pa.Table) -> pd.DataFrame:
    """One row per bucket, with what reduced it.

    Args:
        flushed: see :func:`flushed`.
        operations: with :data:`COLUMNS`; those of other purposes or of no bucket count not.
    """
    found = from_arrow(
        flushed,
        [column for column in BUCKET_FLUSHES.columns if column.name not in ("op", "intended_op", *_SENT)],
    )
    by = traffic(operations, COLUMNS)
    by = by[by["bucket"].notna() & (by["purpose"] == Purpose.GRADIENT_REDUCE)]
    sums = by.groupby(_KEY, as_index=False)[_SENT].sum()
    joined = found.merge(sums, on=_KEY, how="left")
    for name in ("op", "intended_op"):
        joined = joined.merge(_names(by, name), on=_KEY, how="left")
    for name in _SENT:
        joined[name] = joined[name].fillna(0)
    return as_declared(joined, BUCKET_FLUSHES.columns)


def _names(rows: pd.DataFrame, name: str, key: list[str] = _KEY) -> pd.DataFrame:
    """The values of column ``name`` for each bucket, joined where there are several."""
    some = rows[[*key, name]].dropna(subset=[name]).drop_duplicates().sort_values([*key, name])
    several = some.duplicated(key, keep=False)
    joined = pd.DataFrame(some[several].groupby(key, as_index=False)[name].agg(", ".join))
    return pd.concat([pd.DataFrame(some[~several]), joined], ignore_index=True)


def bucket_means(found: pd.DataFrame) -> pd.DataFrame:
    """The buckets of a training step, each the mean over the steps in which it holds what it holds in most of them.

    DDP, for one, builds its buckets anew after the first step: a mean over different buckets would be that of none.
    Times leave out the first step of each attempt, which warms up, where there are others.

    Args:
        found: what :func:`bucket_flushes` gives.
    """
    steps = found[found["step"] >= 0].reset_index(drop=True)
    is_later = steps["step"] > steps.groupby("attempt")["step"].transform("min")
    part = steps[_usual(steps)].assign(is_later=is_later)
    by = part.groupby(_MEAN_KEY)
    timed = part[part["is_later"] | ~by["is_later"].transform("any")].groupby(_MEAN_KEY)
    means = pd.DataFrame(
        {
            "steps": by.size(),
            **{name: by[name].mean() for name in ("numel", "bytes", "fill", *_SENT)},
            "lowest_fill": by["fill"].min(),
            "steady": by.size() == steps.groupby(_MEAN_KEY).size(),
            **{name: timed[name].median().round() for name in ("duration_ns", "exposed_ns")},
        }
    ).reset_index()
    newest = part.drop_duplicates(_MEAN_KEY, keep="last")[[*_MEAN_KEY, "owners", "parameters"]]
    means = means.merge(newest, on=_MEAN_KEY)
    for name in ("op", "intended_op", "flush_reason"):
        means = means.merge(_names(part, name, _MEAN_KEY), on=_MEAN_KEY, how="left")
    return as_declared(means, BUCKET_MEANS.columns)


def _usual(steps: pd.DataFrame) -> pd.Series[Any]:
    """Which rows hold what most rows of their bucket do; what the newest of such holds, where that is a tie."""
    content = steps.groupby([*_MEAN_KEY, "numel", "parameters"], dropna=False).ngroup()
    kinds = steps[_MEAN_KEY].assign(content=content, place=range(len(steps)))
    counted = kinds.groupby([*_MEAN_KEY, "content"], as_index=False).agg(
        rows=("place", "size"), newest=("place", "max")
    )
    chosen = counted.sort_values(["rows", "newest"]).drop_duplicates(_MEAN_KEY, keep="last")["content"]
    return content.isin(chosen)


def _text(value: Any) -> str | None:
    return None if pd.isna(value) else str(value)


def content(bucket: pd.Series[Any], parameters: pa.Table, collectives: pa.Table | Scan) -> BucketContent:
    """What one bucket holds and how it was reduced.

    Args:
        bucket: its row of :func:`bucket_flushes`.
    """
    return BucketContent(_parameters(bucket, parameters), _operations(bucket, collectives))


def _parameters(bucket: pd.Series[Any], parameters: pa.Table) -> pd.DataFrame:
    names = str(bucket["parameters"]).split(",") if _text(bucket["parameters"]) else []
    known = {row["name"]: row for row in parameters.to_pylist()}
    rows, begin = [], 0
    for name in names:
        said = known.get(name, {})
        rows.append(
            {
                "name": name,
                "shape": said.get("shape"),
                "dtype": said.get("dtype"),
                "numel": said.get("numel"),
                "first_element": begin,
            }
        )
        begin += said.get("numel") or 0
    if begin != bucket["numel"] or any(row["numel"] is None for row in rows):
        for row in rows:  # slices of parameters, padding, or names that nobody published: no place is certain
            row["first_element"] = None
    return from_rows(rows, BUCKET_PARAMETERS.columns)


def _operations(bucket: pd.Series[Any], collectives: pa.Table | Scan) -> pd.DataFrame:
    answer = ask(
        "bucket_operations",
        {"collectives": collectives},
        **{name: str(int(bucket[name])) for name in _KEY},
    )
    numels = answer["numel"].to_pylist()
    begins = [sum(numels[:i]) for i in range(len(numels))]
    exact = bool(numels) and sum(numels) == bucket["numel"]
    answer = answer.append_column(
        "first_element", pa.array(begins if exact else [None] * len(begins), pa.int64())
    )
    return from_arrow(answer.take(pc.sort_indices(answer["seq"])), BUCKET_OPERATIONS.columns)
