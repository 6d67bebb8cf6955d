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
    "The gradient reduction of each setting at the four levels. If a level is not known, its values are "
    "null and a reason is given.",
    (
        _LABEL,
        Column("level", "string", "the level: requested, issued, executed or moved", values=LEVELS),
        Column(
            "op",
            "string",
            "operation at this level; null if the operation is not known, and for the level moved",
            True,
        ),
        Column(
            "intended_op",
            "string",
            "operation that the runtime intended, if it issued a different one",
            True,
        ),
        Column(
            "payload_bytes_per_step",
            "float64",
            "payload (S of nccl-tests) of all groups in a training step",
            True,
            "bytes",
        ),
        Column(
            "wire_bytes_per_step",
            "float64",
            "modelled wire bytes, as defined in the answer compare",
            True,
            "bytes",
        ),
        *PER_STEP,
        Column(
            "moved_bytes",
            "float64",
            "bytes that all hosts sent according to their counters, including all other traffic",
            True,
            "bytes",
        ),
        Column(
            "moved_over",
            "string",
            "what moved_bytes refers to: a training step (step) or the whole run (run)",
            True,
        ),
        Column(
            "reason",
            "string",
            "why this level is not known, or cannot be compared with the others",
            True,
        ),
        Column("state", "string", "state of the ledgers of the setting: closed, mismatch or unknown"),
    ),
)

TRAFFIC_LEVELS: Final = Table(
    "traffic_levels",
    "All traffic in a training step of each setting at the four levels. If a level is not known, its values "
    "are null and a reason is given.",
    (
        *REDUCTION_LEVELS.columns,
        Column(
            "reduces",
            "bool",
            "true for gradient reduction, false for other traffic, null for moved bytes, which include all "
            "traffic",
            True,
        ),
        Column(
            "moved_bytes_of_rank",
            "float64",
            "moved_bytes divided by the number of ranks; if moved_bytes is for the whole run, also divided "
            "by the number of steps that ended",
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
            "bytes that the rank sends in a step, modelled for the operations as issued",
            unit="bytes",
        ),
        Column(
            "received_bytes_per_step",
            "float64",
            "bytes that the rank receives in a step, modelled for the operations as issued",
            unit="bytes",
        ),
        Column(
            "sent_of_mean",
            "float64",
            "sent_bytes_per_step divided by its mean over the ranks; null if the mean is 0",
            True,
        ),
        Column(
            "received_of_mean",
            "float64",
            "received_bytes_per_step divided by its mean over the ranks; null if the mean is 0",
            True,
        ),
        between_pairs("sent_bytes_per_step", "to ranks on other hosts", f"sent_{BETWEEN_HOSTS}_per_step"),
        between_pairs("received_bytes_per_step", "from ranks on other hosts", f"received_{BETWEEN_HOSTS}_per_step"),
        Column(
            "executed_sent_bytes_per_step",
            "float64",
            "bytes that the rank sends in a step, modelled for the operations that the backend runs; null "
            "if these operations are not known",
            True,
            "bytes",
        ),
        Column(
            "executed_received_bytes_per_step",
            "float64",
            "bytes that the rank receives in a step, modelled for the operations that the backend runs; "
            "null if these operations are not known",
            True,
            "bytes",
        ),
        Column(
            "executed_sent_of_mean",
            "float64",
            "executed_sent_bytes_per_step divided by its mean over the ranks",
            True,
        ),
        Column(
            "executed_received_of_mean",
            "float64",
            "executed_received_bytes_per_step divided by its mean over the ranks",
            True,
        ),
    ),
    key=("label", "rank"),
)

RESOURCES: Final = Table(
    "resources",
    "Memory and speed of each setting. Medians are over the steps of all repeats without the first step; "
    "maxima are over all steps.",
    (
        _LABEL,
        Column(
            "rss_bytes",
            "int64",
            "largest resident memory of any rank in a step, median over the steps",
            True,
            "bytes",
        ),
        Column("rss_peak_bytes", "int64", "largest resident memory of any rank in any step", True, "bytes"),
        Column(
            "device_bytes",
            "int64",
            "largest device memory of any rank in a step, median over the steps",
            True,
            "bytes",
        ),
        Column("device_peak_bytes", "int64", "largest device memory of any rank in any step", True, "bytes"),
        Column(
            "samples_per_second",
            "float64",
            "samples per second, median over the steps of a run; for several repeats, 1 divided by their "
            "mean time per sample",
            True,
        ),
        Column(
            "samples_low",
            "float64",
            "low end of the 95 % interval of samples_per_second over the repeats",
            True,
        ),
        Column(
            "samples_high",
            "float64",
            "high end of the 95 % interval of samples_per_second over the repeats; null if there is only one "
            "repeat, or if the interval has no upper limit",
            True,
        ),
        Column(
            "samples_from",
            "string",
            "source of the number of samples in a step: metric, or config (the batch size of the config)",
            True,
        ),
        Column(
            "exposed_ns",
            "int64",
            "exposed_ns as defined in the answer exposure_per_step, median over the steps of all repeats",
            True,
            "ns",
        ),
        Column(
            "exposed_low_ns",
            "int64",
            "exposed_low_ns as defined in the answer exposure_per_step, median over the same steps",
            True,
            "ns",
        ),
        Column(
            "exposed_high_ns",
            "int64",
            "exposed_high_ns as defined in the answer exposure_per_step, median over the same steps",
            True,
            "ns",
        ),
        Column("step_ns", "int64", "duration of the step, median over the same steps", True, "ns"),
        Column("exposed_share", "float64", "exposed_ns divided by step_ns", True),
    ),
    key=("label",),
)

RESOURCE_USE: Final = Table(
    "resource_use",
    "Resources of a run in each training step: memory, processors, and the share of communication in the "
    "step time.",
    (
        Column(
            "attempt", "int32", "number of times the job had been restarted, 0 for the first start"
        ),
        Column("step", "int32", "training step, from 0"),
        Column(
            "duration_ns",
            "int64",
            "longest duration of the step on any rank; null if a rank did not end the step",
            True,
            "ns",
        ),
        Column(
            "rss_bytes",
            "int64",
            "largest resident memory of any rank at the end of the step",
            True,
            "bytes",
        ),
        Column(
            "device_bytes",
            "int64",
            "largest device memory of any rank at the end of the step",
            True,
            "bytes",
        ),
        Column(
            "cores",
            "float64",
            "CPU time of a rank's process divided by the duration of the step, mean over the ranks",
            True,
        ),
        Column(
            "gpu_share",
            "float64",
            "utilization of the GPUs, mean of the samples taken during the step (--sample nvml); 1 means "
            "100 %",
            True,
        ),
        Column(
            "communication_share",
            "float64",
            "exposed_ns of the answer step_times divided by duration_ns; null if only bounds are known",
            True,
        ),
        Column(
            "communication_share_low",
            "float64",
            "exposed_low_ns of the answer step_times divided by duration_ns",
            True,
        ),
        Column(
            "communication_share_high",
            "float64",
            "exposed_high_ns of the answer step_times divided by duration_ns",
            True,
        ),
    ),
    key=("attempt", "step"),
)

STEP_TIME_PAIRS: Final = Table(
    "step_time_pairs",
    "One row per pair of settings: whether their step times differ by more than those of repeats of one "
    "setting.",
    (
        _LABEL,
        Column("other", "string", "the other setting of the pair"),
        Column(
            "difference_ns",
            "int64",
            "step time of the other setting minus the step time of the setting in label",
            True,
            "ns",
        ),
        Column("low_ns", "int64", "low end of the 95 % interval of difference_ns (Welch's t)", True, "ns"),
        Column("high_ns", "int64", "high end of the 95 % interval of difference_ns (Welch's t)", True, "ns"),
        Column(
            "probability",
            "float64",
            "probability (p value) of such a difference by chance alone, with Holm's correction",
            True,
        ),
        Column(
            "verdict",
            "string",
            "whether the other setting has a shorter or a longer step time than the setting in label",
            values=VERDICTS,
        ),
        Column("reason", "string", "why the verdict is not known", True),
    ),
    key=("label", "other"),
)

ADVICE: Final = Table(
    "advice",
    "The evidence for the advice: one row per setting, with the least wire bytes first.",
    (
        _LABEL,
        Column("recommended", "bool", "true if the rules recommend the setting"),
        Column(
            "wire_bytes_per_step",
            "float64",
            "modelled wire bytes of the operations that wire_of names, as defined in the answer compare",
            True,
            "bytes",
        ),
        Column(
            "wire_of",
            "string",
            "executed (the operations that the backends run); issued if the executed operations are not "
            "known for all settings",
            values=("executed", "issued"),
        ),
        Column(
            "moved_bytes_per_step",
            "float64",
            "bytes that all hosts sent in the run according to their counters, divided by the number of "
            "steps that ended",
            True,
            "bytes",
        ),
        Column(
            "least_bytes",
            "bool",
            "true if no setting that counts sends less, apart from differences of up to 0.1 %",
        ),
        Column("step_time_ns", "int64", "step time, as defined in the answer compare", True, "ns"),
        Column(
            "not_slower",
            "bool",
            "true if no other setting has a measurably shorter step; null if this is not known",
            True,
        ),
        Column("final_loss", "float64", "final loss, as defined in the answer compare", True),
        Column("repeats", "int64", "number of runs with this setting"),
        Column("left_out", "string", "why the setting does not count; null if it counts", True),
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
