"""Compute the bandwidth of collectives and the ceiling of the machine, by the definitions of nccl-tests.

:mod:`commprof.analysis.time.transfers` and ``docs/calibration.md`` define the times and list what is left
out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from commprof.analysis.columns.bandwidth_answers import (
    BANDWIDTH,
    BANDWIDTH_TIMES,
    CALIBRATIONS,
    CEILING,
    CEILING_FITS,
)
from commprof.analysis.columns.frames import TEXT, from_arrow, from_rows
from commprof.calibration.bandwidths import bus_factor
from commprof.calibration.file import read_calibration
from commprof.calibration.results import Calibration
from commprof.errors import CommprofError
from commprof.schema import Op

OK: Final = "ok"
SLOW: Final = "slow"
FAST: Final = "fast"
IMPOSSIBLE: Final = "impossible"
UNTIMED: Final = "untimed"

# A time is an outlier if the modified z-score of its logarithm is beyond this (Iglewicz and Hoaglin, 1993).
_OUTLYING: Final = 3.5
_LEAST_COLLECTIVES: Final = 8  # the fewest collectives of a bin in which outliers are searched
_SIGMA_OF_MAD: Final = 1.4826
_BIN: Final = ["op", "backend", "group_ranks", "group_size", "payload_bytes"]
_CURVE_POINTS: Final = 49
FILE_PATTERN: Final = "calibration*.json"

Floats = npt.NDArray[np.float64]


class Bandwidths(NamedTuple):
    """The bandwidth by size, and of each individual collective."""

    sizes: pd.DataFrame
    collectives: pd.DataFrame


def bandwidths(times: pa.Table, calibration: Calibration | None, hosts: Sequence[str] = ()) -> Bandwidths:
    """Return the bandwidth of each collective, and the typical bandwidth by operation, group and size.

    Args:
        times: See :func:`commprof.analysis.time.transfers.timed`.
        calibration: The calibration that defines the ceiling, or None.
        hosts: The hosts of the run.
    """
    collectives = from_arrow(times, BANDWIDTH_TIMES.columns[:13])
    collectives = _with_verdicts(_with_ceilings(_with_rates(collectives), calibration))
    sizes = _by_size(collectives)
    sizes.attrs["notes"] = notes(sizes, calibration, hosts)
    return Bandwidths(sizes, collectives)


def _with_rates(times: pd.DataFrame) -> pd.DataFrame:
    seconds = times["time_ns"].astype("float64").to_numpy(na_value=np.nan) / 1e9
    with np.errstate(divide="ignore", invalid="ignore"):
        algbw = np.where(seconds > 0, times["payload_bytes"].to_numpy() / seconds, np.nan)
    factors = _factors(times)
    return times.assign(algbw_bytes_per_s=algbw, busbw_bytes_per_s=algbw * factors)


def _factors(frame: pd.DataFrame) -> Floats:
    """Return the factor from algorithm bandwidth to bus bandwidth for each row, or NaN if there is none."""
    kinds, kind = _kinds(frame, ["op", "group_size"])
    factors = [bus_factor(op, size) for op, size in kinds]
    return np.array([np.nan if factor is None else factor for factor in factors], np.float64)[kind]


def _with_ceilings(frame: pd.DataFrame, calibration: Calibration | None) -> pd.DataFrame:
    """Return ``frame`` with the time at the ceiling and the lower limit of its interval."""
    kinds, kind = _kinds(frame, ["op", "backend", "group_size", "payload_bytes"])
    time, low = np.full(len(kinds), np.nan), np.full(len(kinds), np.nan)
    same = np.zeros(len(kinds), bool)
    ceilings = None if calibration is None else calibration.ceilings()
    for place, (op, backend, group_size, payload) in enumerate(kinds):
        if calibration is None or ceilings is None or backend != calibration.backend:
            continue
        predicted = ceilings.predict(op, payload, group_size)
        if predicted is not None:
            time[place], low[place] = predicted.time_ns, predicted.low_ns
            # send_recv was calibrated in both directions at once, so a message in one direction may be faster.
            same[place] = group_size == calibration.world_size and op != Op.SEND
    return frame.assign(ceiling_ns=time[kind], ceiling_low_ns=low[kind], is_calibrated=same[kind])


def _kinds(frame: pd.DataFrame, names: list[str]) -> tuple[list[tuple[Any, ...]], npt.NDArray[np.int64]]:
    """Return the distinct combinations of the columns ``names`` and the number of the combination of each row."""
    distinct = frame[names].drop_duplicates()
    numbers = frame.groupby(names, dropna=False, sort=False).ngroup()
    which: npt.NDArray[np.int64] = np.asarray(numbers, np.int64)
    return list(distinct.itertuples(index=False, name=None)), which


def _with_verdicts(times: pd.DataFrame) -> pd.DataFrame:
    """Add the column ``verdict``, which indicates which times represent the machine.

    Impossible times are marked before outliers are searched.
    """
    took = np.asarray(times["time_ns"].astype("float64"), np.float64)
    error = times["error_ns"].astype("float64").to_numpy(na_value=0.0)
    verdict = np.full(len(times), OK, dtype=object)
    too_fast = times["is_calibrated"].to_numpy() & (took + error < times["ceiling_low_ns"].to_numpy())
    impossible = (took <= 0) | too_fast
    usable = ~np.isnan(took) & ~impossible
    score = _scores(times, took, usable)
    verdict[score > _OUTLYING] = SLOW
    verdict[score < -_OUTLYING] = FAST
    verdict[impossible] = IMPOSSIBLE
    verdict[np.isnan(took)] = UNTIMED
    share = np.where(took > 0, times["ceiling_ns"].to_numpy() / np.where(took > 0, took, 1.0), np.nan)
    marked = times.assign(
        ceiling_ns=pd.Series(np.rint(times["ceiling_ns"]), index=times.index, dtype="Int64"),
        ceiling_share=share,
        verdict=pd.Series(verdict, index=times.index, dtype=TEXT),
    )
    return marked[list(BANDWIDTH_TIMES.names)]


def _scores(times: pd.DataFrame, took: Floats, usable: npt.NDArray[np.bool_]) -> Floats:
    """Return the distance of the logarithm of each usable time from the median of its bin.

    The distance is in robust standard deviations.
    """
    score = np.zeros(len(times))
    if not usable.any():
        return score
    part = times.loc[usable, _BIN].assign(log=np.log(took[usable]))
    groups = part.groupby(_BIN, dropna=False, sort=False)["log"]
    away = part["log"] - groups.transform("median")
    part = part.assign(away=away.abs())
    spread = part.groupby(_BIN, dropna=False, sort=False)["away"].transform("median") * _SIGMA_OF_MAD
    is_comparable = (groups.transform("size") >= _LEAST_COLLECTIVES) & (spread > 0)
    score[usable] = np.where(is_comparable, away / spread.where(spread > 0, 1.0), 0.0)
    return score


def _by_size(times: pd.DataFrame) -> pd.DataFrame:
    number = np.asarray(times.groupby(_BIN, dropna=False, sort=True).ngroup(), np.int64)
    order = np.argsort(number, kind="stable")
    bins = np.split(order, np.flatnonzero(np.diff(number[order])) + 1) if len(order) else []
    took = np.asarray(times["time_ns"].astype("float64"), np.float64)
    verdict, source = times["verdict"].to_numpy(object), times["time_source"].to_numpy(object)
    firsts = times[[*_BIN, "ceiling_ns"]].iloc[[int(rows[0]) for rows in bins]].to_dict("records")
    return from_rows(
        (
            _of_bin(
                {str(name): value for name, value in first.items()}, took[rows], verdict[rows], source[rows]
            )
            for first, rows in zip(firsts, bins, strict=True)
        ),
        BANDWIDTH.columns,
    )


def _of_bin(first: dict[str, Any], took: Floats, verdict: Any, source: Any) -> dict[str, Any]:
    """Return the row of one operation, group and size.

    Args:
        first: The row of the first collective of the bin.
    """
    ceiling, payload = first.pop("ceiling_ns"), int(first["payload_bytes"])
    good = verdict == OK
    row = first | {name: int((verdict == name).sum()) for name in (SLOW, FAST, IMPOSSIBLE, UNTIMED)}
    row |= {"collectives": len(took), "timed": int(good.sum())}
    factor = bus_factor(row["op"], int(row["group_size"])) or np.nan
    if not pd.isna(ceiling):
        row |= {"ceiling_ns": ceiling, "ceiling_busbw_bytes_per_s": payload / ceiling * 1e9 * factor}
    if good.any():
        low, middle, high = np.quantile(took[good], [0.25, 0.5, 0.75]).tolist()
        algbw = payload / middle * 1e9
        row |= {
            "time_source": ", ".join(sorted({str(one) for one in source[good] if not pd.isna(one)})),
            "time_ns": round(middle),
            "time_low_ns": round(low),
            "time_high_ns": round(high),
            "algbw_bytes_per_s": algbw,
            "busbw_bytes_per_s": algbw * factor,
            "ceiling_share": None if pd.isna(ceiling) else ceiling / round(middle),
        }
    return row


def notes(sizes: pd.DataFrame, calibration: Calibration | None, hosts: Sequence[str]) -> list[str]:
    """Return sentences about the limits of the times and of the ceiling."""
    sentences = []
    untimed, total = int(sizes["untimed"].sum()), int(sizes["collectives"].sum())
    if untimed:
        sentences.append(
            f"{untimed:,} of {total:,} collectives have no time: their end was not observed (asynchronous ones that were "
            "not waited for, GPUs without events), or a rank of them was not recorded."
        )
    if calibration is None:
        return sentences
    others = sorted(set(sizes["backend"].dropna()) - {calibration.backend})
    if others:
        sentences.append(
            f"The calibration is for {calibration.backend}: it has no ceiling for {', '.join(others)}."
        )
    if hosts and set(hosts) != set(calibration.hosts):
        sentences.append(
            f"The calibration was made on {_few(calibration.hosts)}, the run on {_few(sorted(hosts))}: if these "
            "machines or their links differ, so does the ceiling."
        )
    scaled = sorted(set(sizes.loc[sizes["op"] != Op.SEND, "group_size"]) - {calibration.world_size})
    if scaled and sizes["ceiling_ns"].notna().any():
        sentences.append(
            f"The calibration has {calibration.world_size} ranks. Groups of {', '.join(map(str, scaled))} are "
            "compared with the "
            "same bus bandwidth and latency, but times below that ceiling are not reported as impossible."
        )
    impossible, timed = int(sizes["impossible"].sum()), total - untimed
    if impossible * 5 > timed > 0:
        sentences.append(
            f"{100 * impossible / timed:.0f} % of the times are shorter than the ceiling allows: it was measured on a busy "
            "machine, or is of another one. Calibrate again."
        )
    return sentences


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def ceiling(
    calibration: Calibration, group_size: int | None = None, low: int | None = None, high: int | None = None
) -> pd.DataFrame:
    """Return the curves of a calibration and the times to which they were fitted.

    Args:
        group_size: The number of ranks of the groups to compare. Default: the world size of the calibration.
        low, high: The smallest and largest payload in bytes. Default: the measured range.
    """
    ranks = calibration.world_size if group_size is None else group_size
    ceilings, rows = calibration.ceilings(), []
    for op, timings in calibration.timings.items():
        factor = bus_factor(op, ranks)
        if factor is None:
            continue
        measured = {t.payload_bytes: t.time_ns for t in timings} if ranks == calibration.world_size else {}
        ends = [t.payload_bytes for t in timings]
        first, last = min([*ends, low or ends[0]]), max([*ends, high or ends[-1]])
        curve = {round(size) for size in np.geomspace(first, last, _CURVE_POINTS)}
        for size in sorted(curve | set(measured)):
            predicted = ceilings.predict(op, size, ranks)
            row = {"op": op, "group_size": ranks, "payload_bytes": size}
            if predicted is not None:
                row |= {
                    "time_ns": round(predicted.time_ns),
                    "time_low_ns": round(predicted.low_ns),
                    "time_high_ns": round(predicted.high_ns),
                    "busbw_bytes_per_s": size / predicted.time_ns * 1e9 * factor,
                }
            if size in measured:
                row |= {
                    "measured_ns": measured[size],
                    "measured_busbw_bytes_per_s": size / measured[size] * 1e9 * factor,
                }
            rows.append(row)
    return from_rows(rows, CEILING.columns)


def ceiling_fits(calibration: Calibration) -> pd.DataFrame:
    """Return the latency and the bandwidth of each operation, with intervals."""
    fits, rows = calibration.fits(), []
    for op, timings in calibration.timings.items():
        factor = bus_factor(op, calibration.world_size) or np.nan
        best = max(timing.payload_bytes / timing.time_ns for timing in timings) * 1e9 * factor
        row: dict[str, Any] = {"op": op, "sizes": len(timings), "best_busbw_bytes_per_s": best}
        if op in fits:
            fit = fits[op]
            alpha, beta = fit.alpha_interval(), fit.beta_interval()
            row |= {
                "latency_ns": round(fit.alpha_ns),
                "latency_low_ns": round(alpha.low or 0.0),
                "latency_high_ns": round(alpha.high or 0.0),
                "busbw_bytes_per_s": fit.beta_bytes_per_s * factor,
                "busbw_low_bytes_per_s": (beta.low or 0.0) * factor,
                "busbw_high_bytes_per_s": None if beta.high is None else beta.high * factor,
                "residual": fit.residual,
            }
        rows.append(row)
    return from_rows(rows, CEILING_FITS.columns)


def calibrations_below(directory: Path) -> pd.DataFrame:
    """Return the files ``calibration*.json`` in ``directory`` and its subdirectories, newest first.

    Links that lead out of the directory are ignored.
    """
    rows = []
    base = directory.resolve()
    for path in sorted(directory.rglob(FILE_PATTERN)):
        if not (path.is_file() and path.resolve().is_relative_to(base)):
            continue
        row = {"name": str(path.relative_to(directory)), "path": str(path)}
        try:
            calibration = read_calibration(path)
        except CommprofError as error:
            rows.append(row | {"note": str(error)})
            continue
        fields = {
            name: getattr(calibration, name)
            for name in ("created", "backend", "device", "dtype", "world_size")
        }
        rows.append(
            row | fields | {"hosts": ", ".join(calibration.hosts), "ops": ", ".join(calibration.timings)}
        )
    rows.sort(key=lambda row: str(row.get("created", "")), reverse=True)
    return from_rows(rows, CALIBRATIONS.columns)
