"""Gradient buckets: what each holds, how full it was, why it was sent, how it was reduced, and how long that took."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

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

_KEY: Final = ["attempt", "step", "micro_step", "bucket"]
COLUMNS: Final = (*_KEY, "op", "intended_op", "purpose")  # of the operations that bucket_flushes asks for
_SENT: Final = ["collectives", "payload_bytes", "wire_bytes"]


class BucketContent(NamedTuple):
    """One bucket: its ``parameters``, and the ``operations`` of the lowest rank that reduced it, both in order."""

    parameters: pd.DataFrame
    operations: pd.DataFrame


def flushed(buckets: pa.Table, collectives: pa.Table | Scan) -> pa.Table:
    """One row per bucket, without what reduced it (``queries/buckets.sql``)."""
    return ask("buckets", {"buckets": buckets, "collectives": collectives})


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


def _names(by: pd.DataFrame, name: str) -> pd.DataFrame:
    """The values of column ``name`` for each bucket, joined where there are several."""
    some = by[[*_KEY, name]].dropna(subset=[name]).drop_duplicates().sort_values([*_KEY, name])
    several = some.duplicated(_KEY, keep=False)
    joined = pd.DataFrame(some[several].groupby(_KEY, as_index=False)[name].agg(", ".join))
    return pd.concat([pd.DataFrame(some[~several]), joined], ignore_index=True)


def _distinct(values: pd.Series[Any]) -> str | None:
    return ", ".join(sorted({str(value) for value in values.dropna()})) or None


def bucket_means(found: pd.DataFrame) -> pd.DataFrame:
    """The buckets of a training step, each the mean over the steps in which it holds what it holds in most of them.

    DDP, for one, builds its buckets anew after the first step: a mean over different buckets would be that of none.
    Times leave out the first step of each attempt, which warms up, where there are others.

    Args:
        found: what :func:`bucket_flushes` gives.
    """
    steps = found[found["step"] >= 0]
    first = steps.groupby("attempt")["step"].transform("min")
    rows = []
    for _, every in steps.groupby(["micro_step", "bucket"]):
        part = _usual(every)
        later = part[part["step"] > first[part.index]]
        timed = later if len(later) else part
        newest = part.iloc[-1]
        rows.append(
            {
                "micro_step": int(newest["micro_step"]),
                "bucket": int(newest["bucket"]),
                "steps": len(part),
                **{name: float(part[name].mean()) for name in ("numel", "bytes", *_SENT)},
                "fill": _mean(part["fill"]),
                "lowest_fill": None if part["fill"].isna().all() else float(part["fill"].min()),
                **{name: _distinct(part[name]) for name in ("op", "intended_op", "flush_reason")},
                **{name: _text(newest[name]) for name in ("owners", "parameters")},
                "steady": len(part) == len(every),
                "duration_ns": _median(timed["duration_ns"]),
                "exposed_ns": _median(timed["exposed_ns"]),
            }
        )
    return from_rows(rows, BUCKET_MEANS.columns)


def _usual(part: pd.DataFrame) -> pd.DataFrame:
    """Those of the rows that hold the same as most of them; as the newest, where that is a tie."""
    contents = part.groupby(["numel", "parameters"], dropna=False).ngroup()
    counts = contents.value_counts()
    most = set(counts[counts == counts.max()].index)
    chosen = next(one for one in reversed(contents.tolist()) if one in most)
    return part[contents == chosen]


def _text(value: Any) -> str | None:
    return None if pd.isna(value) else str(value)


def _mean(values: pd.Series[Any]) -> float | None:
    return None if values.isna().all() else float(values.mean())


def _median(values: pd.Series[Any]) -> int | None:
    return None if values.isna().all() else round(float(values.median()))


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
