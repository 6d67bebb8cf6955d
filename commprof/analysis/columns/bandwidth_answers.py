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
    "source of its end: device, sampled (the backend), wait (of the program), host (the return of a synchronous "
    "call)"
)
_VERDICT: Final = (
    "ok; slow or fast: an outlier for its operation, group and size; impossible: no time, or less than the interval of "
    "the ceiling allows; untimed"
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
_SHARE: Final = Column(
    "ceiling_share", "float64", "ceiling_ns divided by time_ns: 1 is the ceiling of the machine", True
)

BANDWIDTH_TIMES: Final = Table(
    "bandwidth_times",
    "Duration and bandwidth of each collective and message, without the wait for stragglers.",
    (
        Column("attempt", "int32", "restart of the job"),
        Column("step", "int32", "training step; -1 before the first"),
        *map(_of_schema, ("op", "purpose", "backend", "pg", "group_ranks", "group_size", "dtype")),
        Column("payload_bytes", "int64", "payload: S of nccl-tests", unit="bytes"),
        Column("error_ns", "int64", "error bound of time_ns, from the clocks of several hosts", True, "ns"),
        Column(
            "time_ns",
            "int64",
            "time from when data could flow to the end; null if the end was not recorded",
            True,
            "ns",
        ),
        Column("time_source", "string", _SOURCE, True, values=TIME_SOURCES),
        *_RATES,
        *_CEILING,
        _SHARE,
        Column("verdict", "string", _VERDICT, values=VERDICTS),
    ),
)

BANDWIDTH: Final = Table(
    "bandwidth",
    "Bandwidth by operation, group and size: medians of the collectives that are ok.",
    (
        *map(_of_schema, ("op", "backend", "group_ranks", "group_size")),
        Column("payload_bytes", "int64", "payload: S of nccl-tests", unit="bytes"),
        Column("collectives", "int64", "collectives or messages"),
        Column("timed", "int64", "collectives with verdict ok, from which the medians are computed"),
        Column("slow", "int64", "outliers that took longer"),
        Column("fast", "int64", "outliers that took less time"),
        Column(
            "impossible",
            "int64",
            "collectives with no time, or with less time than the interval of the ceiling allows",
        ),
        Column("untimed", "int64", "collectives whose end was not recorded"),
        Column("time_source", "string", "source of the ends of the collectives", True),
        Column("time_ns", "int64", "median time", True, "ns"),
        Column("time_low_ns", "int64", "first quartile", True, "ns"),
        Column("time_high_ns", "int64", "third quartile", True, "ns"),
        *_RATES,
        *_CEILING,
        Column("ceiling_busbw_bytes_per_s", "float64", "bus bandwidth at ceiling_ns", True, "bytes/s"),
        _SHARE,
    ),
    key=("op", "backend", "group_ranks", "payload_bytes"),
)

CEILING: Final = Table(
    "ceiling",
    "The ceiling by a calibration: the fitted curve of each operation, and the times that it was fitted to.",
    (
        Column("op", "string", "operation; send_recv: messages"),
        Column("group_size", "int64", "ranks in the group"),
        Column("payload_bytes", "int64", "payload: S of nccl-tests", unit="bytes"),
        Column("time_ns", "int64", "predicted time: latency + payload / bandwidth", True, "ns"),
        Column("time_low_ns", "int64", "95 % interval of one more measurement, low end", True, "ns"),
        Column("time_high_ns", "int64", "95 % interval of one more measurement, high end", True, "ns"),
        Column("busbw_bytes_per_s", "float64", "bus bandwidth of the predicted time", True, "bytes/s"),
        Column("measured_ns", "int64", "measured time at this payload", True, "ns"),
        Column("measured_busbw_bytes_per_s", "float64", "bus bandwidth of measured_ns", True, "bytes/s"),
    ),
    key=("op", "group_size", "payload_bytes"),
)

CEILING_FITS: Final = Table(
    "ceiling_fits",
    "Latency and bandwidth of each operation of a calibration, with 95 % intervals.",
    (
        Column("op", "string", "operation; send_recv: messages in both directions at once"),
        Column("sizes", "int64", "number of measured payloads"),
        Column("latency_ns", "int64", "time of the smallest message", True, "ns"),
        Column("latency_low_ns", "int64", "95 % interval of latency_ns, low end", True, "ns"),
        Column("latency_high_ns", "int64", "95 % interval of latency_ns, high end", True, "ns"),
        Column("busbw_bytes_per_s", "float64", "bus bandwidth of large messages", True, "bytes/s"),
        Column("busbw_low_bytes_per_s", "float64", "95 % interval of busbw_bytes_per_s, low end", True, "bytes/s"),
        Column(
            "busbw_high_bytes_per_s",
            "float64",
            "95 % interval of busbw_bytes_per_s, high end; null: no bound",
            True,
            "bytes/s",
        ),
        Column("residual", "float64", "robust standard deviation of the relative residuals", True),
        Column("best_busbw_bytes_per_s", "float64", "the largest measured bus bandwidth", True, "bytes/s"),
    ),
    key=("op",),
)

CALIBRATIONS: Final = Table(
    "calibrations",
    "The calibrations below a directory, newest first; one that cannot be read is listed with the reason.",
    (
        Column("name", "string", "path below the directory"),
        Column("path", "string", "path of the file"),
        Column("created", "string", "date and time", True),
        Column("backend", "string", "gloo or nccl", True),
        Column("device", "string", "cpu or cuda", True),
        Column("dtype", "string", "element type", True),
        Column("world_size", "int64", "ranks", True),
        Column("hosts", "string", "names of the hosts", True),
        Column("ops", "string", "measured operations", True),
        Column("note", "string", "why the calibration cannot be read", True),
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
