"""The columns of what is said of settings beside :data:`answers.COMPARISON`: levels, ranks, memory, pairs, advice."""

from __future__ import annotations

from typing import Final

from commprof.analysis.columns.byte_columns import BETWEEN_HOSTS, PER_STEP, between_pairs
from commprof.schema import Column, Table

LEVELS: Final = ("requested", "issued", "executed", "moved")
VERDICTS: Final = ("shorter", "longer", "no measurable difference", "cannot tell")

_LABEL: Final = Column("label", "string", "the setting: the keys that differ, and their values")

# One column, one line.
# fmt: off
REDUCTION_LEVELS: Final = Table(
    "reduction_levels",
    "What each setting asked for, issued, executed and moved to reduce gradients; null, with a reason, where unknown.",
    (
        _LABEL,
        Column("level", "string", "requested, issued, executed or moved", values=LEVELS),
        Column("op", "string", "operation at this level; null where it is not known, and of moved bytes", True),
        Column("intended_op", "string", "operation that the runtime meant, where it issued another", True),
        Column("payload_bytes_per_step", "float64", "payload: S of nccl-tests, of all groups in a step", True, "bytes"),
        Column("wire_bytes_per_step", "float64", "wire, modelled: as in compare", True, "bytes"),
        *PER_STEP,
        Column("moved_bytes", "float64", "moved: sent by the counters of all hosts, all traffic", True, "bytes"),
        Column("moved_over", "string", "what moved_bytes are of: a training step (step), or the whole run (run)", True),
        Column("reason", "string", "why this level is not known, or not comparable", True),
        Column("state", "string", "how the ledgers of the setting stand: closed, mismatch or unknown"),
    ),
)

RANK_BYTES: Final = Table(
    "rank_bytes",
    "What each rank sends and receives in a training step, by where the data comes from and goes to.",
    (
        _LABEL,
        Column("rank", "int32", "global rank"),
        Column("sent_bytes_per_step", "float64", "modelled as issued: bytes that leave it in a step", unit="bytes"),
        Column("received_bytes_per_step", "float64", "modelled as issued: bytes that reach it", unit="bytes"),
        Column("sent_of_mean", "float64", "sent_bytes_per_step, in means over the ranks", True),
        Column("received_of_mean", "float64", "received_bytes_per_step, in means over the ranks", True),
        between_pairs("sent_bytes_per_step", "to ranks on other hosts", f"sent_{BETWEEN_HOSTS}_per_step"),
        between_pairs("received_bytes_per_step", "from ranks on other hosts", f"received_{BETWEEN_HOSTS}_per_step"),
        Column("executed_sent_bytes_per_step", "float64", "of what the backend runs; null: not known", True, "bytes"),
        Column("executed_received_bytes_per_step", "float64", "of what the backend runs; null: not known", True, "bytes"),
        Column("executed_sent_of_mean", "float64", "the same, in means over the ranks", True),
        Column("executed_received_of_mean", "float64", "the same, in means over the ranks", True),
    ),
    key=("label", "rank"),
)

RESOURCES: Final = Table(
    "resources",
    "Memory and speed of each setting: medians over the steps after the first of all repeats, and the largest of all steps.",
    (
        _LABEL,
        Column("rss_bytes", "int64", "resident memory of the largest rank, median over steps", True, "bytes"),
        Column("rss_peak_bytes", "int64", "the same, largest of all steps", True, "bytes"),
        Column("device_bytes", "int64", "device memory of the largest rank, median over steps", True, "bytes"),
        Column("device_peak_bytes", "int64", "the same, largest of all steps", True, "bytes"),
        Column("samples_per_second", "float64", "samples in a step over its time: median of steps, mean of repeats", True),
        Column("samples_low", "float64", "95 % interval over repeats, low end", True),
        Column("samples_high", "float64", "95 % interval over repeats, high end", True),
        Column("samples_from", "string", "where the samples of a step are from: metric, or config (its batch size)", True),
        Column("exposed_ns", "int64", "exposed_ns of exposure_per_step, median of the steps of all repeats", True, "ns"),
        Column("exposed_low_ns", "int64", "exposed_low_ns of exposure_per_step, in the same way", True, "ns"),
        Column("exposed_high_ns", "int64", "exposed_high_ns of exposure_per_step, in the same way", True, "ns"),
        Column("step_ns", "int64", "median of the duration of the same steps", True, "ns"),
        Column("exposed_share", "float64", "exposed_ns over step_ns", True),
    ),
    key=("label",),
)

RESOURCE_USE: Final = Table(
    "resource_use",
    "What a run used in each training step: memory, processors, and the share of the time that went into communication.",
    (
        Column("attempt", "int32", "restart of the job"),
        Column("step", "int32", "training step, from 0"),
        Column("duration_ns", "int64", "longest over the ranks; null where a rank never ended it", True, "ns"),
        Column("rss_bytes", "int64", "resident memory when it ended, largest over the ranks", True, "bytes"),
        Column("device_bytes", "int64", "device memory when it ended, largest over the ranks", True, "bytes"),
        Column("cores", "float64", "CPU time of a rank's process over the time of the step, mean over ranks", True),
        Column("gpu_share", "float64", "utilisation of the GPUs, mean of the samples in it (--sample nvml)", True),
        Column("communication_share", "float64", "exposed_ns of step_times over duration_ns; null: only bounds known", True),
        Column("communication_share_low", "float64", "exposed_low_ns of step_times over duration_ns", True),
        Column("communication_share_high", "float64", "exposed_high_ns of step_times over duration_ns", True),
    ),
    key=("attempt", "step"),
)

STEP_TIME_PAIRS: Final = Table(
    "step_time_pairs",
    "Each two settings: whether the step time of the second differs from that of the first by more than their repeats do.",
    (
        _LABEL,
        Column("other", "string", "the setting that it is compared with"),
        Column("difference_ns", "int64", "step time of other less that of label", True, "ns"),
        Column("low_ns", "int64", "95 % interval of difference_ns by Welch's t, low end", True, "ns"),
        Column("high_ns", "int64", "95 % interval of difference_ns by Welch's t, high end", True, "ns"),
        Column("probability", "float64", "of such a difference by chance, by Holm's correction for all pairs", True),
        Column("verdict", "string", "step time of other beside that of label", values=VERDICTS),
        Column("reason", "string", "why it cannot be told", True),
    ),
    key=("label", "other"),
)

ADVICE: Final = Table(
    "advice",
    "What the advice weighs of each setting, the least wire bytes first.",
    (
        _LABEL,
        Column("recommended", "bool", "to be set, by the rules"),
        Column("wire_bytes_per_step", "float64", "wire, modelled: as in compare, of wire_of", True, "bytes"),
        Column(
            "wire_of",
            "string",
            "executed: of what the backends run; issued, where that is not known of all settings",
            values=("executed", "issued"),
        ),
        Column(
            "moved_bytes_per_step",
            "float64",
            "moved: what the counters of all hosts saw sent in the whole run, over its whole steps",
            True,
            "bytes",
        ),
        Column("least_bytes", "bool", "none of those that count sends less, within 0.1 %"),
        Column("step_time_ns", "int64", "as in compare", True, "ns"),
        Column("not_slower", "bool", "no other has a measurably shorter step; null where that cannot be told", True),
        Column("final_loss", "float64", "as in compare", True),
        Column("repeats", "int64", "runs with this setting"),
        Column("left_out", "string", "why it does not count", True),
    ),
    key=("label",),
)
# fmt: on

# By the name of the function in api.py that gives them, or of the part of its answer.
SETTING_ANSWERS: Final[dict[str, Table]] = {
    "reduction_levels": REDUCTION_LEVELS,
    "rank_bytes": RANK_BYTES,
    "resources": RESOURCES,
    "resource_use": RESOURCE_USE,
    "step_time_pairs": STEP_TIME_PAIRS,
    "advice": ADVICE,
}
