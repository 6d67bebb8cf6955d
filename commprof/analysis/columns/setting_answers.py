"""The columns of answers about settings beside :data:`answers.COMPARISON`: levels, ranks, memory, pairs, advice."""

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
    "Gradient reduction at the four levels by setting; null, with a reason, if not known.",
    (
        _LABEL,
        Column("level", "string", "requested, issued, executed or moved", values=LEVELS),
        Column("op", "string", "operation at this level; null if not known, and for moved bytes", True),
        Column("intended_op", "string", "intended operation, if the runtime issued another", True),
        Column("payload_bytes_per_step", "float64", "payload: S of nccl-tests, of all groups in a step", True, "bytes"),
        Column("wire_bytes_per_step", "float64", "wire, modelled, as defined in compare", True, "bytes"),
        *PER_STEP,
        Column(
            "moved_bytes",
            "float64",
            "moved: bytes that all hosts sent, by their counters, for all traffic",
            True,
            "bytes",
        ),
        Column("moved_over", "string", "period of moved_bytes: a training step (step), or the whole run (run)", True),
        Column("reason", "string", "why this level is not known, or not comparable", True),
        Column("state", "string", "state of the ledgers of the setting: closed, mismatch or unknown"),
    ),
)

TRAFFIC_LEVELS: Final = Table(
    "traffic_levels",
    "All traffic of a training step at the four levels by setting; null, with a reason, if not known.",
    (
        *REDUCTION_LEVELS.columns,
        Column(
            "reduces",
            "bool",
            "true: gradient reduction; false: other traffic; null: moved bytes, which are of all traffic",
            True,
        ),
        Column(
            "moved_bytes_of_rank",
            "float64",
            "moved_bytes of a step over the ranks of the job; of a whole run, over its steps that ended",
            True,
            "bytes",
        ),
    ),
)

RANK_BYTES: Final = Table(
    "rank_bytes",
    "Bytes that each rank sends and receives in a training step.",
    (
        _LABEL,
        Column("rank", "int32", "global rank"),
        Column(
            "sent_bytes_per_step",
            "float64",
            "modelled as issued: bytes that the rank sends in a step",
            unit="bytes",
        ),
        Column(
            "received_bytes_per_step",
            "float64",
            "modelled as issued: bytes that the rank receives in a step",
            unit="bytes",
        ),
        Column("sent_of_mean", "float64", "sent_bytes_per_step divided by its mean over the ranks", True),
        Column("received_of_mean", "float64", "received_bytes_per_step divided by its mean over the ranks", True),
        between_pairs("sent_bytes_per_step", "to ranks on other hosts", f"sent_{BETWEEN_HOSTS}_per_step"),
        between_pairs("received_bytes_per_step", "from ranks on other hosts", f"received_{BETWEEN_HOSTS}_per_step"),
        Column(
            "executed_sent_bytes_per_step",
            "float64",
            "bytes sent by the executed operations; null: not known",
            True,
            "bytes",
        ),
        Column(
            "executed_received_bytes_per_step",
            "float64",
            "bytes received by the executed operations; null: not known",
            True,
            "bytes",
        ),
        Column("executed_sent_of_mean", "float64", "executed_sent_bytes_per_step over its mean over the ranks", True),
        Column(
            "executed_received_of_mean",
            "float64",
            "executed_received_bytes_per_step over its mean over the ranks",
            True,
        ),
    ),
    key=("label", "rank"),
)

RESOURCES: Final = Table(
    "resources",
    "Memory and speed by setting: medians over the steps of all repeats without the first, and maxima over all steps.",
    (
        _LABEL,
        Column("rss_bytes", "int64", "resident memory of the largest rank, median over steps", True, "bytes"),
        Column("rss_peak_bytes", "int64", "resident memory of the largest rank, maximum over all steps", True, "bytes"),
        Column("device_bytes", "int64", "device memory of the largest rank, median over steps", True, "bytes"),
        Column(
            "device_peak_bytes",
            "int64",
            "device memory of the largest rank, maximum over all steps",
            True,
            "bytes",
        ),
        Column("samples_per_second", "float64", "samples over time, median of steps; at the mean time of repeats", True),
        Column("samples_low", "float64", "95 % interval of samples_per_second over repeats, low end", True),
        Column(
            "samples_high",
            "float64",
            "95 % interval of samples_per_second over repeats, high end; null: no interval",
            True,
        ),
        Column("samples_from", "string", "source of the samples of a step: metric, or config (its batch size)", True),
        Column("exposed_ns", "int64", "exposed_ns of exposure_per_step, median of the steps of all repeats", True, "ns"),
        Column("exposed_low_ns", "int64", "exposed_low_ns of exposure_per_step, median like exposed_ns", True, "ns"),
        Column("exposed_high_ns", "int64", "exposed_high_ns of exposure_per_step, median like exposed_ns", True, "ns"),
        Column("step_ns", "int64", "duration of the step, median of the same steps as exposed_ns", True, "ns"),
        Column("exposed_share", "float64", "exposed_ns over step_ns", True),
    ),
    key=("label",),
)

RESOURCE_USE: Final = Table(
    "resource_use",
    "Resources of a run by training step: memory, processors, and the share of communication in the time.",
    (
        Column("attempt", "int32", "restart of the job"),
        Column("step", "int32", "training step, from 0"),
        Column("duration_ns", "int64", "longest over the ranks; null if a rank did not end the step", True, "ns"),
        Column("rss_bytes", "int64", "resident memory at the end of the step, largest over the ranks", True, "bytes"),
        Column("device_bytes", "int64", "device memory at the end of the step, largest over the ranks", True, "bytes"),
        Column(
            "cores",
            "float64",
            "CPU time of a rank's process divided by the time of the step, mean over ranks",
            True,
        ),
        Column("gpu_share", "float64", "utilisation of the GPUs, mean of the samples in the step (--sample nvml)", True),
        Column(
            "communication_share",
            "float64",
            "exposed_ns of step_times divided by duration_ns; null: only bounds known",
            True,
        ),
        Column("communication_share_low", "float64", "exposed_low_ns of step_times divided by duration_ns", True),
        Column("communication_share_high", "float64", "exposed_high_ns of step_times divided by duration_ns", True),
    ),
    key=("attempt", "step"),
)

STEP_TIME_PAIRS: Final = Table(
    "step_time_pairs",
    "Pairs of settings: whether their step times differ by more than their repeats do.",
    (
        _LABEL,
        Column("other", "string", "the setting that label is compared with"),
        Column("difference_ns", "int64", "step time of other minus that of label", True, "ns"),
        Column("low_ns", "int64", "95 % interval of difference_ns by Welch's t, low end", True, "ns"),
        Column("high_ns", "int64", "95 % interval of difference_ns by Welch's t, high end", True, "ns"),
        Column("probability", "float64", "probability of the difference by chance, with Holm's correction", True),
        Column("verdict", "string", "step time of other relative to that of label", values=VERDICTS),
        Column("reason", "string", "why the verdict is not known", True),
    ),
    key=("label", "other"),
)

ADVICE: Final = Table(
    "advice",
    "The evidence of the advice by setting, in order of wire bytes, smallest first.",
    (
        _LABEL,
        Column("recommended", "bool", "recommended by the rules"),
        Column(
            "wire_bytes_per_step",
            "float64",
            "wire, modelled, as defined in compare, of the operations in wire_of",
            True,
            "bytes",
        ),
        Column(
            "wire_of",
            "string",
            "executed: the operations that the backends run; issued, if those are not known for all settings",
            values=("executed", "issued"),
        ),
        Column(
            "moved_bytes_per_step",
            "float64",
            "moved: bytes that all hosts sent in the run, by their counters, divided by the steps that ended",
            True,
            "bytes",
        ),
        Column("least_bytes", "bool", "true if no setting that counts sends less, within 0.1 %"),
        Column("step_time_ns", "int64", "step time, as defined in compare", True, "ns"),
        Column("not_slower", "bool", "true if no other setting has a measurably shorter step; null if not known", True),
        Column("final_loss", "float64", "final loss, as defined in compare", True),
        Column("repeats", "int64", "runs with this setting"),
        Column("left_out", "string", "why the setting does not count", True),
    ),
    key=("label",),
)
# fmt: on

# By the name of the function in api.py that returns them, or of the part of its answer.
SETTING_ANSWERS: Final[dict[str, Table]] = {
    "reduction_levels": REDUCTION_LEVELS,
    "traffic_levels": TRAFFIC_LEVELS,
    "rank_bytes": RANK_BYTES,
    "resources": RESOURCES,
    "resource_use": RESOURCE_USE,
    "step_time_pairs": STEP_TIME_PAIRS,
    "advice": ADVICE,
}
