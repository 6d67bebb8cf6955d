"""The columns of all answers, declared like the tables of the schema: type, unit, and byte measure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from commprof import schema
from commprof.align.ranks.rank_arrivals import CAUSES
from commprof.analysis.columns import byte_columns
from commprof.analysis.columns.bandwidth_answers import BANDWIDTH_ANSWERS
from commprof.analysis.columns.byte_columns import between_hosts, padding
from commprof.analysis.columns.detailed_answers import DETAILED_ANSWERS
from commprof.analysis.columns.expert_answers import EXPERT_ANSWERS
from commprof.analysis.columns.setting_answers import SETTING_ANSWERS
from commprof.schema import Column, Table

_MEASURES: Final = (
    Column("collectives", "int64", "number of deduplicated collectives; a message counts at its send"),
    Column("records", "int64", "number of records of these collectives, from all ranks"),
    Column("payload_bytes", "int64", "payload (S of nccl-tests), summed over the collectives", unit="bytes"),
    padding("int64"),
    Column(
        "wire_bytes",
        "float64",
        "modelled wire bytes of the operations as issued, summed over the collectives. For a collective, "
        "this is the mean number of bytes that a rank of the group sends. For a message, it is the size of "
        "the message",
        unit="bytes",
    ),
    Column(
        "executed_wire_bytes",
        "float64",
        "modelled wire bytes of the operations that the backend runs, summed in the same way as wire_bytes; "
        "null if not known",
        True,
        "bytes",
    ),
    between_hosts(),
    Column(
        "host_ns",
        "int64",
        "time inside the issuing calls: the mean over the ranks of each collective, summed over the "
        "collectives",
        True,
        "ns",
    ),
    Column(
        "exposed_ns",
        "int64",
        "exposed time: the mean over the ranks of each collective, summed over the collectives. It is a "
        "lower bound if timed is less than records",
        True,
        "ns",
    ),
    Column("tensors", "int64", "number of tensors in the collectives"),
    Column(
        "timed",
        "int64",
        "number of records whose exposed_ns is known. It is 0 for operations of which only sums were "
        "recorded",
    ),
)


def _of_schema(name: str, **changes: Any) -> Column:
    return replace(schema.COLLECTIVES.column(name), source=None, **changes)


# The columns that traffic() can be grouped by.
GROUPINGS: Final[dict[str, Column]] = {
    column.name: column
    for column in (
        *map(_of_schema, ("attempt", "step", "after_step")),
        _of_schema("micro_step", nullable=True),  # null in sums (--aggregate), which are of steps
        *map(_of_schema, ("phase", "op", "intended_op", "purpose")),
        *map(_of_schema, ("bucket", "owner", "dtype", "reduce_op", "backend", "device")),
        *map(_of_schema, ("pg", "group_desc", "group_ranks", "group_size", "api", "call_site")),
        Column(
            "span",
            "string",
            "whether the bytes stay within a host. For a message, this depends on the hosts of its two "
            "ranks. For other operations, it depends on the hosts of all ranks of the group. It is null if "
            "these hosts are not known",
            True,
            values=("within_host", "between_hosts"),
        ),
    )
}

TRAFFIC: Final = Table(
    "traffic", "Operations, bytes and times for each combination of the requested columns.", _MEASURES
)

STEP_TIMES: Final = Table(
    "step_times",
    "One row per training step and attempt.",
    (
        Column(
            "attempt",
            "int32",
            "number of the attempt, counted from 0; each restart of the job begins a new attempt",
        ),
        Column("step", "int32", "number of the training step, counted from 0"),
        Column("ranks", "int32", "number of ranks that recorded the step"),
        Column(
            "begin_ns",
            "int64",
            "time at which the step began on the lowest rank, on the clock of this rank's host",
            unit="ns",
        ),
        Column(
            "end_ns",
            "int64",
            "time at which the step ended on the lowest rank, on the same clock as begin_ns",
            True,
            "ns",
        ),
        Column(
            "duration_ns",
            "int64",
            "duration of the step on the slowest rank; null if the step did not end on every rank",
            True,
            "ns",
        ),
        Column("micro_steps", "int32", "number of micro-batches in the step"),
        Column("loss", "float64", "mean loss over the ranks that published a loss", True),
        Column(
            "grad_norm", "float64", "mean gradient norm over the ranks that published a gradient norm", True
        ),
        Column("loss_scale", "float64", "largest loss scale of any rank", True),
        Column("samples", "float64", "number of samples, summed over the ranks", True),
        Column("collectives", "int64", "number of deduplicated collectives, without barriers"),
        Column(
            "payload_bytes", "int64", "payload (S of nccl-tests), summed over the collectives", unit="bytes"
        ),
        padding("int64"),
        Column(
            "wire_bytes",
            "float64",
            "modelled wire bytes of the operations as issued: the mean number of bytes that a rank of the "
            "group sends",
            unit="bytes",
        ),
        between_hosts(),
        Column(
            "exposed_ns",
            "int64",
            "exposed_ns of this step, as returned by exposure; null if only bounds are known",
            True,
            "ns",
        ),
        Column("exposed_low_ns", "int64", "exposed_low_ns of this step, as returned by exposure", True, "ns"),
        Column(
            "exposed_high_ns", "int64", "exposed_high_ns of this step, as returned by exposure", True, "ns"
        ),
        Column("cpu_ns", "int64", "CPU time of a rank's process, as a mean over the ranks", True, "ns"),
        Column("rss_bytes", "int64", "largest resident memory of any rank", True, "bytes"),
        Column("device_bytes", "int64", "largest device memory of any rank", True, "bytes"),
    ),
    key=("attempt", "step"),
)

# The columns that exposure() can be grouped by. Its steps are those in which the time was spent.
EXPOSURE_BY: Final[dict[str, Column]] = {
    **{name: column for name, column in GROUPINGS.items() if name != "span"},
    "step": Column(
        "step",
        "int32",
        "training step in which the time was spent; -1 before the first step, null after the last step",
        True,
    ),
    **{
        column.name: column
        for column in map(_of_schema, ("rank", "pg_seq", "module", "is_async", "is_p2p", "thread", "layer"))
    },
}

_KNOWN: Final = (
    Column("records", "int64", "number of records"),
    Column("timed", "int64", "number of records whose exposed_ns is known"),
    Column("sampled", "int64", "number of records whose end is known from the backend or from the device"),
    Column(
        "unwaited",
        "int64",
        "number of asynchronous records for which no wait was recorded. Their exposed_ns is not known",
    ),
    Column(
        "bounded",
        "int64",
        "number of records of operations that C++ code waited for. For such a wait, only an interval in the "
        "table stalls is known. This interval gives bounds for the exposed time",
    ),
)
_BOUNDS: Final = (
    Column("exposed_low_ns", "int64", "lower bound of the exposed time; null if not known", True, "ns"),
    Column(
        "exposed_high_ns",
        "int64",
        "upper bound of the exposed time; null if some records have no bound",
        True,
        "ns",
    ),
)
_OVERLAPPED: Final = (
    Column(
        "overlapped_ns",
        "int64",
        "overlapped time. It is null if the end of a record is not known, or if the end of an asynchronous "
        "record is known only from its wait and not from the backend (see sampled). For operations on "
        "devices, use overlapped_at_most_ns",
        True,
        "ns",
    ),
    Column(
        "overlapped_at_most_ns",
        "int64",
        "upper bound of the time during which at least one operation was under way and the program was not "
        "blocked on any operation; null if the end of some operations is not known",
        True,
        "ns",
    ),
)

EXPOSURE: Final = Table(
    "exposure",
    "Exposed and overlapped communication, as means over the participating ranks.",
    (
        Column(
            "ranks",
            "int64",
            "number of ranks that have records with the values of this row, in this step or another step",
        ),
        *_KNOWN,
        Column(
            "exposed_ns",
            "int64",
            "time during which the program was blocked on at least one of the operations. Concurrent waits "
            "count once. It is a lower bound if timed is less than records, and null if only bounds are "
            "known (see bounded)",
            True,
            "ns",
        ),
        *_BOUNDS,
        Column(
            "summed_ns",
            "int64",
            "sum of the exposed_ns values of the single records, divided by ranks. It is a lower bound if "
            "exposed_ns is a lower bound",
            True,
            "ns",
        ),
        *_OVERLAPPED,
        Column(
            "step_ns",
            "int64",
            "duration of the row's training steps, each measured on its slowest rank",
            True,
            "ns",
        ),
        Column(
            "exposed_share",
            "float64",
            "the part of exposed_ns that is inside training steps, divided by step_ns; null if exposed_ns "
            "is null",
            True,
        ),
    ),
)

EXPOSURE_PER_STEP: Final = Table(
    "exposure_per_step",
    "Exposed and overlapped time of a training step, by purpose. Each value is a mean over the ranks in "
    "each step, and then a median over the warm steps. Purposes can overlap in time. The last row has the "
    "purpose all. It is the union of the purposes and not their sum.",
    (
        Column(
            "purpose",
            "string",
            "purpose as tagged by the runtime; null for operations without a tag. The last row has the "
            "value all, which stands for the union of all purposes",
            True,
        ),
        Column(
            "steps",
            "int64",
            "number of warm training steps. These are the steps that ended, without the first step of each "
            "attempt",
        ),
        *_KNOWN,
        Column(
            "exposed_ns",
            "int64",
            "exposed time of a training step, as a mean over all ranks of the step and a median over the warm "
            "steps. It is a lower bound if timed is less than records, and null if only bounds are known (see "
            "bounded)",
            True,
            "ns",
        ),
        *_BOUNDS,
        Column(
            "step_ns", "int64", "duration_ns of a training step, as a median over the warm steps", True, "ns"
        ),
        Column("exposed_share", "float64", "exposed_ns divided by step_ns", True),
        *_OVERLAPPED,
    ),
    key=("purpose",),
)

MOVED: Final = Table(
    "moved",
    "Bytes moved during the run, by host and interface. The counters cover the whole host with all its "
    "processes.",
    (
        Column("host", "string", "name of the host"),
        Column("kind", "string", "kind of the device: interface, nvlink or pcie"),
        Column("device", "string", "name of the network interface or the GPU link"),
        Column("sent_bytes", "int64", "moved bytes that the device counted as sent", unit="bytes"),
        Column("received_bytes", "int64", "moved bytes that the device counted as received", unit="bytes"),
        Column("seconds", "float64", "time between the first and the last reading", unit="s"),
        Column("readings", "int64", "number of readings of the counter"),
        Column(
            "left_out",
            "string",
            "the part of the run that the readings of this host do not cover; null if they cover the whole "
            "run",
            True,
        ),
    ),
    key=("host", "kind", "device"),
)

_GROUPS: Final = Column(
    "groups", "int64", "number of process groups of this name and size that issued the operation"
)

STEP_TOTALS: Final = Table(
    "step_totals",
    "Sums over the training steps that ended.",
    (
        *map(_of_schema, ("op", "intended_op", "purpose", "group_desc", "group_size")),
        _GROUPS,
        Column(
            "collectives",
            "float64",
            "number of deduplicated collectives: the mean over the warm steps, multiplied by the number of "
            "steps",
        ),
        Column(
            "payload_bytes",
            "float64",
            "payload (S of nccl-tests), summed over these collectives",
            unit="bytes",
        ),
        padding(),
        Column(
            "wire_bytes",
            "float64",
            "modelled wire bytes of the operations as issued: the mean number of bytes that a rank of the "
            "job sends",
            unit="bytes",
        ),
        Column(
            "executed_wire_bytes",
            "float64",
            "modelled wire bytes of the operations that the backend runs for these collectives",
            True,
            "bytes",
        ),
        between_hosts(),
    ),
)

_PER_STEP: Final = (
    Column(
        "collectives_per_step",
        "float64",
        "number of collectives of all groups in a training step, without barriers",
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
        "modelled wire bytes of the operations as issued: the bytes that a rank of the job sends in a "
        "training step, as a mean over all ranks of the job",
        True,
        "bytes",
    ),
    Column(
        "executed_wire_bytes_per_step",
        "float64",
        "modelled wire bytes of the operations that the backend runs in a training step; null if not known",
        True,
        "bytes",
    ),
    *byte_columns.PER_STEP,
)

TRAFFIC_BY_SETTING: Final = Table(
    "traffic_by_setting",
    "Bytes of a training step for each setting and operation.",
    (
        Column("label", "string", "the setting: the keys that differ, and their values"),
        *map(_of_schema, ("op", "intended_op", "purpose")),
        *_PER_STEP,
    ),
    key=("label", "op", "intended_op", "purpose"),
)

TRAFFIC_BY_GROUP: Final = Table(
    "traffic_by_group",
    "Bytes of a training step for each setting, kind of group and operation.",
    (
        Column("label", "string", "the setting: the keys that differ, and their values"),
        *map(_of_schema, ("group_desc", "group_size")),
        _GROUPS,
        *map(_of_schema, ("op", "intended_op")),
        *_PER_STEP,
    ),
    key=("label", "group_desc", "group_size", "op", "intended_op"),
)

WIRE_OPS: Final = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "all_to_all",
    "gather",
    "scatter",
    "send",
)

COMPARISON: Final = Table(
    "comparison",
    "One row per setting, with its repeats merged. The keys that differ follow the label.",
    (
        Column("label", "string", "the setting: the keys that differ, and their values"),
        Column(
            "requested_op",
            "string",
            "the operations that the config, DDP or FSDP requests for gradient reduction",
            True,
        ),
        Column("requested_reason", "string", "the reason why requested_op is null", True),
        Column(
            "issued_op",
            "string",
            "the operations that were issued for gradient reduction, in descending order of wire bytes",
            True,
        ),
        Column(
            "issued_reason",
            "string",
            "the reason why issued_op also lists operations other than gradient reductions",
            True,
        ),
        Column(
            "intended_op",
            "string",
            "the operations that the runtime intended, if it issued different ones",
            True,
        ),
        *_PER_STEP,
        Column(
            "gradient_payload_bytes_per_step",
            "float64",
            "payload of the gradient reduction in a training step",
            True,
            "bytes",
        ),
        Column(
            "gradient_wire_bytes_per_step",
            "float64",
            "modelled wire bytes of the gradient reduction in a training step",
            True,
            "bytes",
        ),
        *(
            Column(
                f"wire_{op}",
                "float64",
                f"modelled wire bytes of the {op} operations that are issued in a training step",
                True,
                "bytes",
            )
            for op in WIRE_OPS
        ),
        Column(
            "step_time_ns",
            "int64",
            "median step time without the first step. For several repeats, it is the mean of their medians",
            True,
            "ns",
        ),
        Column("step_time_low_ns", "int64", "lower end of the 95 % interval of step_time_ns", True, "ns"),
        Column("step_time_high_ns", "int64", "upper end of the 95 % interval of step_time_ns", True, "ns"),
        Column("interval_over", "string", "what the interval was computed over: repeats or steps", True),
        Column(
            "final_loss",
            "float64",
            "loss of the last step that has a loss, as a mean over the ranks and repeats",
            True,
        ),
        Column("steps", "int64", "number of training steps that ended, summed over the repeats"),
        Column("repeats", "int64", "number of runs with this setting"),
        Column("runs", "string", "names of these runs"),
    ),
    key=("label",),
)

RUNS: Final = Table(
    "runs",
    "One row for each run below a directory. The newest run comes first.",
    (
        Column("name", "string", "path of the run directory, relative to the searched directory"),
        Column("path", "string", "path of the run directory"),
        Column(
            "state", "string", "state of the run: running, complete, failed, killed, unknown or unreadable"
        ),
        Column("started_realtime_ns", "int64", "time at which the run started", True, "ns"),
        Column("script", "string", "name of the training script", True),
        Column("world_size", "int64", "number of ranks", True),
        Column("backend", "string", "backends of the process groups", True),
        Column("records", "int64", "number of records", True),
        Column("summed", "int64", "number of collectives of which only sums were recorded", True),
        Column("lost", "int64", "number of dropped records", True),
        Column("unseen", "int64", "number of unseen collectives", True),
        Column("steps", "int64", "number of training steps", True),
        Column(
            "setting",
            "string",
            "sweep point of the run, or the stage and the reduction keys of its config",
            True,
        ),
        Column("sweep", "string", "name of the sweep that the run belongs to", True),
        Column("wall_ns", "int64", "duration of the run", True, "ns"),
        Column("finalised", "bool", "true if the files of the run are Parquet files"),
        Column("note", "string", "notes on the health of the run, or why the run cannot be read", True),
    ),
    key=("path",),
)

REQUESTED: Final = Table(
    "requested",
    "What the config should send, predicted from its keys and the parameters.",
    (
        Column(
            "when",
            "string",
            "how often the operations are issued: at initialization (init), in each micro-batch "
            "(micro_step) or in each training step (step)",
        ),
        Column("purpose", "string", "purpose of the operations"),
        Column("requested_op", "string", "the operation that the config requests"),
        Column(
            "issued_op", "string", "the operation that a runtime issues, according to the rules of commprof"
        ),
        Column("intended_op", "string", "the operation that issued_op replaces", True),
        Column("count", "int64", "number of operations"),
        Column(
            "payload_bytes", "int64", "payload (S of nccl-tests), summed over these operations", unit="bytes"
        ),
        Column(
            "wire_bytes",
            "float64",
            "modelled wire bytes of the operations as issued: the mean number of bytes that a rank of the "
            "group sends",
            unit="bytes",
        ),
        Column("exact", "bool", "false if count depends on the order in which the gradients arrived"),
        Column("note", "string", "limits of the prediction"),
    ),
)

# One column, one line.
# fmt: off
ARRIVALS: Final = Table(
    "arrivals",
    "Arrivals on the clock of rank 0's host. Each collective or message has one row per rank.",
    (
        Column(
            "attempt",
            "int32",
            "number of the attempt, counted from 0; each restart of the job begins a new attempt",
        ),
        Column(
            "collective",
            "int64",
            "number of the collective or message. All rows of one collective or message have the same number",
        ),
        *map(_of_schema, ("step", "op", "purpose", "pg", "group_ranks", "group_size")),
        Column(
            "pg_seq",
            "int64",
            "position of the operation in the issue order of the group; null for messages, because a send "
            "and its recv are paired by their order",
            True,
        ),
        *map(_of_schema, ("is_p2p", "peer")),
        Column("members", "int64", "number of ranks whose records of this collective or message were found"),
        *map(_of_schema, ("rank", "pid", "seq")),
        Column(
            "arrived_ns",
            "int64",
            "time at which the rank issued the operation; null if the rank's clock was never compared with "
            "the clock of rank 0's host and the ranks of the collective do not share one clock",
            True,
            "ns",
        ),
        Column("error_ns", "int64", "error bound of arrived_ns", True, "ns"),
        Column(
            "lateness_ns",
            "int64",
            "time from the arrival of the first rank to the arrival of this rank",
            True,
            "ns",
        ),
        Column(
            "lateness_error_ns",
            "int64",
            "error bound of lateness_ns; 0 if the two ranks share one clock",
            True,
            "ns",
        ),
        Column(
            "from_median_ns",
            "int64",
            "time from the median arrival to the arrival of this rank; negative if this rank arrived before "
            "the median",
            True,
            "ns",
        ),
        Column(
            "is_last",
            "bool",
            "true if this rank arrived last; null if some ranks were not recorded or their clocks cannot be "
            "compared",
            True,
        ),
        Column(
            "certain",
            "bool",
            "only for the last rank: true if it arrived last by more than the clock error",
            True,
        ),
        Column(
            "lead_ns",
            "int64",
            "only for the last rank: time from the arrival of the second-to-last rank to the arrival of "
            "this rank. During this time, only this rank was missing",
            True,
            "ns",
        ),
        Column(
            "waiting_ns",
            "int64",
            "time from the arrival of this rank to the arrival of the last rank",
            True,
            "ns",
        ),
        Column(
            "launch_ns",
            "int64",
            "time from the arrival of the last rank until the operation had begun on all devices",
            True,
            "ns",
        ),
        Column(
            "transfer_ns",
            "int64",
            "time from the end of launch_ns until this rank had its result. If launch_ns is not known, the "
            "time begins with the arrival of the last rank. It is null if the time of the result is not "
            "known",
            True,
            "ns",
        ),
        Column(
            "waited_ns", "int64", "exposed time of this rank while only the last rank was missing", True, "ns"
        ),
        Column(
            "others_waited_ns",
            "int64",
            "only for the last rank: mean of waited_ns over the other ranks",
            True,
            "ns",
        ),
        Column(
            "cause",
            "string",
            "which of waiting_ns, launch_ns and transfer_ns is the longest for this rank: late_arrival, "
            "late_launch or slow_transfer; null if none of them is longer than the clock error, or if the "
            "records of some ranks are missing",
            True,
            values=CAUSES,
        ),
        Column(
            "own_delay_ns",
            "int64",
            "the part of lateness_ns that is the rank's own delay; null if waits were not recorded",
            True,
            "ns",
        ),
        Column("inherited_ns", "int64", "the rest of lateness_ns, which is inherited delay", True, "ns"),
        Column(
            "others_waited_own_ns",
            "int64",
            "only for the last rank: the part of others_waited_ns that was caused by the rank's own delay",
            True,
            "ns",
        ),
    ),
    key=("collective", "rank"),
)

STRAGGLERS: Final = Table(
    "stragglers",
    "How often each rank arrives last, and how long the others wait for it. This covers only collectives in "
    "which every rank waits for every other rank.",
    (
        Column("rank", "int32", "global rank"),
        Column(
            "collectives",
            "int64",
            "number of the rank's collectives that all members recorded on comparable clocks",
        ),
        Column(
            "last",
            "int64",
            "number of collectives in which the rank arrived last by more than the clock error",
        ),
        Column(
            "within_bound",
            "int64",
            "number of collectives in which the rank arrived last by no more than the clock error",
        ),
        Column(
            "expected_last",
            "float64",
            "number of collectives in which the rank would be expected to arrive last if all ranks were "
            "equal",
        ),
        Column("mean_lateness_ns", "int64", "mean lateness of the rank", unit="ns"),
        Column("median_lateness_ns", "int64", "median lateness of the rank", unit="ns"),
        Column("error_ns", "int64", "median error bound of the rank's times", unit="ns"),
        Column("lead_ns", "int64", "total time during which only this rank was missing", unit="ns"),
        Column(
            "others_waited_ns",
            "int64",
            "exposed time of the other ranks while only this rank was missing: the mean over the other "
            "ranks, summed over the collectives",
            True,
            "ns",
        ),
        Column(
            "others_waited_per_step_ns",
            "int64",
            "the part of others_waited_ns inside training steps, divided by the number of training steps "
            "with a counted collective",
            True,
            "ns",
        ),
        Column(
            "others_waited_own_ns",
            "int64",
            "the part of others_waited_ns that was caused by the rank's own delay; null if not known",
            True,
            "ns",
        ),
        Column(
            "others_waited_inherited_ns",
            "int64",
            "the part of others_waited_ns that was caused by the rank's inherited delay; null if not known",
            True,
            "ns",
        ),
        Column(
            "stands_out",
            "bool",
            "true if the rank arrived last much more often than expected_last, and more often than chance "
            "explains",
        ),
    ),
    key=("rank",),
)

_ON_THE_CLOCK: Final = (
    Column(
        "begin_ns",
        "int64",
        "time at which the operation was issued, on the clock of rank 0's host",
        unit="ns",
    ),
    Column(
        "end_ns",
        "int64",
        "last known time of the operation: the return of the call, the end of the wait, or the end on the "
        "device",
        unit="ns",
    ),
)

RECORDS: Final = Table(
    "records",
    "The records of all ranks in order of time. The columns are those of the table collectives. In "
    "addition, each record has a begin and an end on one clock.",
    (*_ON_THE_CLOCK, *(_of_schema(name) for name in schema.COLLECTIVES.names)),
    key=schema.COLLECTIVES.key,
)

TIMELINE_BARS: Final = Table(
    "timeline_bars",
    "The records in a window of time.",
    (
        *_ON_THE_CLOCK,
        Column(
            "exposed_begin_ns",
            "int64",
            "time at which the exposed time of the record begins, never before begin_ns",
            True,
            "ns",
        ),
        Column("exposed_end_ns", "int64", "time at which the exposed time of the record ends", True, "ns"),
        Column(
            "lane",
            "int64",
            "number of the process group in the window. The groups are numbered by size, largest first",
        ),
        Column(
            "level",
            "int64",
            "level of the bar within the lane. Overlapping bars have different levels. There are at most "
            "four levels",
        ),
        *map(_of_schema, ("rank", "attempt", "pid", "seq", "step", "micro_step", "phase", "op", "intended_op", "purpose")),
        *map(_of_schema, ("bucket", "parameters", "module", "pg", "group_desc", "group_ranks", "group_size")),
        *map(_of_schema, ("pg_seq", "peer", "payload_bytes", "dtype", "is_async", "status", "call_site", "exposed_ns")),
    ),
    key=schema.COLLECTIVES.key,
)

DENSITY: Final = Table(
    "density",
    "How busy each rank was in each bin of a window of time. There is one row per operation. If ranks have "
    "several groups, there is one row per operation and group. Only values above 0 are included.",
    (
        _of_schema("rank"),
        Column(
            "lane",
            "int64",
            "number of the group within the rank. The groups are numbered by size, largest first. The "
            "number is 0 if groups are not distinguished",
        ),
        replace(_of_schema("pg"), nullable=True),  # null for several groups, like the next two columns
        _of_schema("group_desc"),
        replace(_of_schema("group_ranks"), nullable=True),
        Column("begin_ns", "int64", "start of the bin, on the clock of rank 0's host", unit="ns"),
        Column("end_ns", "int64", "end of the bin", unit="ns"),
        _of_schema("op"),
        Column(
            "busy_ns",
            "int64",
            "time during which op was under way. Concurrent time counts once, for the operation that was "
            "issued first",
            unit="ns",
        ),
        Column("busy_share", "float64", "busy_ns divided by the length of the bin"),
        Column("exposed_ns", "int64", "exposed time. Concurrent waits count once", unit="ns"),
    ),
    key=("rank", "lane", "begin_ns", "op"),
)

BANDS: Final = Table(
    "bands",
    "The steps and phases of the lowest rank in a window of time.",
    (
        Column("kind", "string", "what the row describes: a step or a phase", values=("step", "phase")),
        *map(_of_schema, ("attempt", "step")),
        replace(_of_schema("micro_step"), nullable=True),
        Column("name", "string", "name of the step or phase"),
        Column("begin_ns", "int64", "start of the step, or of the first record of the phase", unit="ns"),
        Column("end_ns", "int64", "end of the step, or of the last record of the phase", unit="ns"),
    ),
)

PARTNERS: Final = Table(
    "partners",
    "One collective or message, on all ranks that recorded it.",
    (
        *map(_of_schema, ("rank", "attempt", "pid", "seq", "op")),
        *_ON_THE_CLOCK,
        Column(
            "lateness_ns",
            "int64",
            "time from the arrival of the first rank to the arrival of this rank",
            unit="ns",
        ),
        Column(
            "own_delay_ns",
            "int64",
            "the part of lateness_ns that is the rank's own delay; null if waits were not recorded",
            True,
            "ns",
        ),
        Column("inherited_ns", "int64", "the rest of lateness_ns, which is inherited delay", True, "ns"),
        _of_schema("exposed_ns"),
    ),
    key=schema.COLLECTIVES.key,
)
# fmt: on

# By the name of the function in api.py that returns them.
ANSWERS: Final[dict[str, Table]] = {
    "traffic": TRAFFIC,
    "step_times": STEP_TIMES,
    "moved": MOVED,
    "compare": COMPARISON,
    "traffic_by_setting": TRAFFIC_BY_SETTING,
    "traffic_by_group": TRAFFIC_BY_GROUP,
    "find_runs": RUNS,
    "requested": REQUESTED,
    "exposure": EXPOSURE,
    "exposure_per_step": EXPOSURE_PER_STEP,
    "arrivals": ARRIVALS,
    "stragglers": STRAGGLERS,
    "records": RECORDS,
    "timeline_bars": TIMELINE_BARS,
    "density": DENSITY,
    "bands": BANDS,
    "partners": PARTNERS,
    **DETAILED_ANSWERS,
    **BANDWIDTH_ANSWERS,
    **EXPERT_ANSWERS,
    **SETTING_ANSWERS,
}
