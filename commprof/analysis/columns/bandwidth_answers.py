"""The columns of the answers about bandwidth."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from commprof import schema
from commprof.schema import Column, Table

TIME_SOURCES: Final = ("device", "sampled", "wait", "host")
VERDICTS: Final = ("ok", "slow", "fast", "impossible", "untimed")


def _of_schema(name: str) -> Column:
    return replace(schema.COLLECTIVES.column(name), source=None)


_SOURCE: Final = (
    "what said that it had ended: device, sampled (the backend itself), wait (of the program), host (the return of a "
    "synchronous call)"
)
_VERDICT: Final = (
    "ok; slow or fast: an outlier among those of its operation, group and size; impossible: no time, or less than the "
    "ceiling's interval allows; untimed"
)

# One column, one line.
# fmt: off
_RATES: Final = (
    Column("algbw_bytes_per_s", "float64", "algorithm bandwidth (nccl-tests): payload over time", True, "bytes/s"),
    Column("busbw_bytes_per_s", "float64", "bus bandwidth: algbw times the factor of nccl-tests", True, "bytes/s"),
)
_CEILING: Final = (
    Column("ceiling_ns", "int64", "time that the calibration predicts for this payload and group", True, "ns"),
)
_SHARE: Final = Column("ceiling_share", "float64", "ceiling_ns over time_ns: 1 is all that the machine can reach", True)

BANDWIDTH_TIMES: Final = Table(
    "bandwidth_times",
    "How long each collective and message took, without the wait for late ranks, and what bandwidth that is.",
    (
        Column("attempt", "int32", "restart of the job"),
        Column("step", "int32", "training step; -1 before the first"),
        *map(_of_schema, ("op", "purpose", "backend", "pg", "group_ranks", "group_size", "dtype")),
        Column("payload_bytes", "int64", "payload: S of nccl-tests", unit="bytes"),
        Column("error_ns", "int64", "time_ns is wrong by this at most, for the clocks of several hosts", True, "ns"),
        Column("time_ns", "int64", "from when it could begin until it had ended; null where nobody saw that", True, "ns"),
        Column("time_source", "string", _SOURCE, True, values=TIME_SOURCES),
        *_RATES,
        *_CEILING,
        _SHARE,
        Column("verdict", "string", _VERDICT, values=VERDICTS),
    ),
)

BANDWIDTH: Final = Table(
    "bandwidth",
    "What the collectives of one operation, group and size reached: medians of those that are ok.",
    (
        *map(_of_schema, ("op", "backend", "group_ranks", "group_size")),
        Column("payload_bytes", "int64", "payload: S of nccl-tests", unit="bytes"),
        Column("collectives", "int64", "collectives or messages"),
        Column("timed", "int64", "of these ok: what the times are medians of"),
        Column("slow", "int64", "of these outliers that took longer"),
        Column("fast", "int64", "of these outliers that took shorter"),
        Column("impossible", "int64", "of these no time, or less than the ceiling's interval allows"),
        Column("untimed", "int64", "of these nobody saw the end"),
        Column("time_source", "string", "what said that they had ended", True),
        Column("time_ns", "int64", "median time", True, "ns"),
        Column("time_low_ns", "int64", "first quartile", True, "ns"),
        Column("time_high_ns", "int64", "third quartile", True, "ns"),
        *_RATES,
        *_CEILING,
        Column("ceiling_busbw_bytes_per_s", "float64", "bus bandwidth of that time", True, "bytes/s"),
        _SHARE,
    ),
    key=("op", "backend", "group_ranks", "payload_bytes"),
)

CEILING: Final = Table(
    "ceiling",
    "What a machine can reach by a calibration: the fitted curve of each operation, and the times that it was fitted to.",
    (
        Column("op", "string", "operation; send_recv: messages"),
        Column("group_size", "int64", "ranks in the group"),
        Column("payload_bytes", "int64", "payload: S of nccl-tests", unit="bytes"),
        Column("time_ns", "int64", "predicted time: latency + payload / bandwidth", True, "ns"),
        Column("time_low_ns", "int64", "95 % interval of one more measurement, low end", True, "ns"),
        Column("time_high_ns", "int64", "95 % interval of one more measurement, high end", True, "ns"),
        Column("busbw_bytes_per_s", "float64", "bus bandwidth of the predicted time", True, "bytes/s"),
        Column("measured_ns", "int64", "time that was measured at this payload", True, "ns"),
        Column("measured_busbw_bytes_per_s", "float64", "bus bandwidth of that", True, "bytes/s"),
    ),
    key=("op", "group_size", "payload_bytes"),
)

CEILING_FITS: Final = Table(
    "ceiling_fits",
    "Latency and bandwidth of each operation of a calibration, with 95 % intervals.",
    (
        Column("op", "string", "operation; send_recv: messages, both ways at once"),
        Column("sizes", "int64", "payloads that were measured"),
        Column("latency_ns", "int64", "time of the smallest message", True, "ns"),
        Column("latency_low_ns", "int64", "its interval, low end", True, "ns"),
        Column("latency_high_ns", "int64", "its interval, high end", True, "ns"),
        Column("busbw_bytes_per_s", "float64", "bus bandwidth of large messages", True, "bytes/s"),
        Column("busbw_low_bytes_per_s", "float64", "its interval, low end", True, "bytes/s"),
        Column("busbw_high_bytes_per_s", "float64", "its interval, high end; null: not bounded", True, "bytes/s"),
        Column("residual", "float64", "robust standard deviation of the relative residuals", True),
        Column("best_busbw_bytes_per_s", "float64", "the largest that was measured", True, "bytes/s"),
    ),
    key=("op",),
)

CALIBRATIONS: Final = Table(
    "calibrations",
    "The calibrations below a directory, newest first; one that cannot be read is listed with the reason.",
    (
        Column("name", "string", "path below the directory"),
        Column("path", "string", "file"),
        Column("created", "string", "date and time", True),
        Column("backend", "string", "gloo or nccl", True),
        Column("device", "string", "cpu or cuda", True),
        Column("dtype", "string", "element type", True),
        Column("world_size", "int64", "ranks", True),
        Column("hosts", "string", "their names", True),
        Column("ops", "string", "operations that were measured", True),
        Column("note", "string", "why it cannot be read", True),
    ),
    key=("path",),
)
# fmt: on

BANDWIDTH_ANSWERS: Final[dict[str, Table]] = {
    "bandwidth": BANDWIDTH,
    "bandwidth_times": BANDWIDTH_TIMES,
    "ceiling": CEILING,
    "ceiling_fits": CEILING_FITS,
    "calibrations": CALIBRATIONS,
}
