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
    "how the end was observed: device (by the device), sampled (by the backend), wait (the program's wait "
    "ended), or host (a synchronous call returned)"
)
_VERDICT: Final = (
    "ok; slow or fast (an outlier among the collectives of this operation, group and size); impossible (the "
    "time is not positive, or is shorter than the interval of the ceiling allows); untimed (the time is not "
    "known)"
)

# One column, one line.
# fmt: off
_RATES: Final = (
    Column(
        "algbw_bytes_per_s",
        "float64",
        "algorithm bandwidth (nccl-tests): payload divided by time",
        True,
        "bytes/s",
    ),
    Column(
        "busbw_bytes_per_s",
        "float64",
        "bus bandwidth (nccl-tests): algorithm bandwidth times the factor of the operation",
        True,
        "bytes/s",
    ),
)
_CEILING: Final = (
    Column("ceiling_ns", "int64", "time that the calibration predicts for this payload and group", True, "ns"),
)
_SHARE: Final = Column(
    "ceiling_share",
    "float64",
    "ceiling_ns divided by time_ns; 1 means that the collective reaches the ceiling of the machine",
    True,
)

BANDWIDTH_TIMES: Final = Table(
    "bandwidth_times",
    "Duration and bandwidth of each collective and message. The wait for stragglers does not count.",
    (
        Column(
            "attempt", "int32", "number of times the job had been restarted, 0 for the first start"
        ),
        Column("step", "int32", "training step; -1 outside all steps"),
        *map(_of_schema, ("op", "purpose", "backend", "pg", "group_ranks", "group_size", "dtype")),
        Column("payload_bytes", "int64", "payload (S of nccl-tests)", unit="bytes"),
        Column(
            "error_ns",
            "int64",
            "error bound of time_ns; it comes from comparing the clocks of several hosts",
            True,
            "ns",
        ),
        Column(
            "time_ns",
            "int64",
            "Duration of the transfer. The transfer begins when the last rank that it needs has arrived (on "
            "a device: has begun). Null if the end, or one of the ranks, was not recorded.",
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
    "Bandwidth by operation, group and size. Each row has medians over the collectives with the verdict ok.",
    (
        *map(_of_schema, ("op", "backend", "group_ranks", "group_size")),
        Column("payload_bytes", "int64", "payload (S of nccl-tests)", unit="bytes"),
        Column("collectives", "int64", "number of collectives or messages"),
        Column(
            "timed",
            "int64",
            "collectives with the verdict ok; the medians are computed from these collectives",
        ),
        Column("slow", "int64", "outliers that took longer than the others"),
        Column("fast", "int64", "outliers that took less time than the others"),
        Column(
            "impossible",
            "int64",
            "collectives whose time is not positive, or is below the low end of the interval that the "
            "calibration predicts for it",
        ),
        Column(
            "untimed",
            "int64",
            "collectives without a time, because their end, or one of their ranks, was not recorded",
        ),
        Column(
            "time_source",
            "string",
            "how the ends were observed, as in bandwidth_times; several sources are joined by ', '",
            True,
        ),
        Column("time_ns", "int64", "median time", True, "ns"),
        Column("time_low_ns", "int64", "first quartile of the times", True, "ns"),
        Column("time_high_ns", "int64", "third quartile of the times", True, "ns"),
        *_RATES,
        *_CEILING,
        Column(
            "ceiling_busbw_bytes_per_s",
            "float64",
            "bus bandwidth if the collective took ceiling_ns",
            True,
            "bytes/s",
        ),
        _SHARE,
    ),
    key=("op", "backend", "group_ranks", "payload_bytes"),
)

CEILING: Final = Table(
    "ceiling",
    "The ceiling of a calibration: the fitted curve of each operation, and the measured times from which "
    "the curve was computed.",
    (
        Column("op", "string", "operation; messages have the name send_recv"),
        Column("group_size", "int64", "ranks in the group"),
        Column("payload_bytes", "int64", "payload (S of nccl-tests)", unit="bytes"),
        Column("time_ns", "int64", "predicted time: latency + payload / bandwidth", True, "ns"),
        Column("time_low_ns", "int64", "low end of the 95 % prediction interval", True, "ns"),
        Column("time_high_ns", "int64", "high end of the 95 % prediction interval", True, "ns"),
        Column("busbw_bytes_per_s", "float64", "bus bandwidth at the predicted time", True, "bytes/s"),
        Column(
            "measured_ns",
            "int64",
            "time that was measured for this payload; null if this payload was not measured",
            True,
            "ns",
        ),
        Column(
            "measured_busbw_bytes_per_s",
            "float64",
            "bus bandwidth at the measured time",
            True,
            "bytes/s",
        ),
    ),
    key=("op", "group_size", "payload_bytes"),
)

CEILING_FITS: Final = Table(
    "ceiling_fits",
    "Latency and bandwidth of each operation of a calibration, with 95 % intervals.",
    (
        Column("op", "string", "operation; send_recv is the exchange of messages in both directions at once"),
        Column("sizes", "int64", "number of measured payloads"),
        Column(
            "latency_ns",
            "int64",
            "fitted latency: the part of the time that does not depend on the payload",
            True,
            "ns",
        ),
        Column("latency_low_ns", "int64", "low end of the 95 % interval of latency_ns", True, "ns"),
        Column("latency_high_ns", "int64", "high end of the 95 % interval of latency_ns", True, "ns"),
        Column("busbw_bytes_per_s", "float64", "fitted bus bandwidth of large messages", True, "bytes/s"),
        Column(
            "busbw_low_bytes_per_s",
            "float64",
            "low end of the 95 % interval of busbw_bytes_per_s",
            True,
            "bytes/s",
        ),
        Column(
            "busbw_high_bytes_per_s",
            "float64",
            "high end of the 95 % interval of busbw_bytes_per_s; null if the measured times do not limit it",
            True,
            "bytes/s",
        ),
        Column(
            "residual",
            "float64",
            "robust standard deviation of the relative residuals of the fit; 0.1 means 10 %",
            True,
        ),
        Column(
            "best_busbw_bytes_per_s",
            "float64",
            "largest bus bandwidth that was measured",
            True,
            "bytes/s",
        ),
    ),
    key=("op",),
)

CALIBRATIONS: Final = Table(
    "calibrations",
    "The calibrations in and below a directory, newest first. If a calibration cannot be read, note says "
    "why.",
    (
        Column("name", "string", "path of the file, relative to the directory"),
        Column("path", "string", "path of the file, including the directory"),
        Column("created", "string", "date and time of the calibration", True),
        Column("backend", "string", "gloo or nccl", True),
        Column("device", "string", "cpu or cuda", True),
        Column("dtype", "string", "element type of the measured tensors", True),
        Column("world_size", "int64", "number of ranks", True),
        Column("hosts", "string", "names of the hosts", True),
        Column("ops", "string", "operations that were measured", True),
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
