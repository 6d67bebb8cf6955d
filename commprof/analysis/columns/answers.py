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
    Column("collectives", "int64", "deduplicated collectives; a message counts at its send"),
    Column("records", "int64", "their records on all ranks"),
    Column("payload_bytes", "int64", "payload: S of nccl-tests, summed over the collectives", unit="bytes"),
    padding("int64"),
    Column(
        "wire_bytes",
        "float64",
        "wire, modelled as issued: mean bytes that a rank of the group sends (for a message: the bytes of the "
        "message), summed over the collectives",
        unit="bytes",
    ),
    Column(
        "executed_wire_bytes",
        "float64",
        "modelled wire bytes of the operations that the backend runs, summed like wire_bytes; null if not known",
        True,
        "bytes",
    ),
    between_hosts(),
    Column(
        "host_ns", "int64", "time inside the issuing calls, mean over the ranks of a collective", True, "ns"
    ),
    Column(
        "exposed_ns",
        "int64",
        "exposed time, mean over the ranks of a collective, summed over the collectives; a lower bound if timed is "
        "less than records",
        True,
        "ns",
    ),
    Column("tensors", "int64", "tensors in the collectives"),
    Column(
        "timed",
        "int64",
        "records whose exposed_ns is known; 0 for operations that were recorded as sums only",
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
            "whether the bytes stay within a host, by the hosts of the ranks of the group or of the two ranks of a message; "
            "null if not known",
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
        Column("attempt", "int32", "restart of the job"),
        Column("step", "int32", "training step, from 0"),
        Column("ranks", "int32", "ranks that recorded the step"),
        Column("begin_ns", "int64", "begin of the step, on the clock of the lowest rank's host", unit="ns"),
        Column("end_ns", "int64", "end of the step, on the clock of begin_ns", True, "ns"),
        Column(
            "duration_ns", "int64", "longest over the ranks; null if a rank did not end the step", True, "ns"
        ),
        Column("micro_steps", "int32", "micro-batches in the step"),
        Column("loss", "float64", "mean over the ranks that published a loss", True),
        Column("grad_norm", "float64", "mean over the ranks that published a gradient norm", True),
        Column("loss_scale", "float64", "largest over the ranks", True),
        Column("samples", "float64", "sum over the ranks", True),
        Column("collectives", "int64", "deduplicated collectives, without barriers"),
        Column(
            "payload_bytes", "int64", "payload: S of nccl-tests, summed over the collectives", unit="bytes"
        ),
        padding("int64"),
        Column(
            "wire_bytes",
            "float64",
            "wire, modelled as issued: mean bytes that a rank of the group sends",
            unit="bytes",
        ),
        between_hosts(),
        Column(
            "exposed_ns",
            "int64",
            "exposed_ns of the answer exposure for this step; null if only bounds are known",
            True,
            "ns",
        ),
        Column("exposed_low_ns", "int64", "exposed_low_ns of the answer exposure for this step", True, "ns"),
        Column(
            "exposed_high_ns", "int64", "exposed_high_ns of the answer exposure for this step", True, "ns"
        ),
        Column("cpu_ns", "int64", "CPU time of a rank's process, mean over ranks", True, "ns"),
        Column("rss_bytes", "int64", "resident memory, largest over the ranks", True, "bytes"),
        Column("device_bytes", "int64", "device memory, largest over the ranks", True, "bytes"),
    ),
    key=("attempt", "step"),
)

# The columns that exposure() can be grouped by. Its steps are those in which the time was spent.
EXPOSURE_BY: Final[dict[str, Column]] = {
    **{name: column for name, column in GROUPINGS.items() if name != "span"},
    "step": Column(
        "step",
        "int32",
        "training step in which the time was spent; -1 before the first, null after the last",
        True,
    ),
    **{
        column.name: column
        for column in map(_of_schema, ("rank", "pg_seq", "module", "is_async", "is_p2p", "thread", "layer"))
    },
}

_KNOWN: Final = (
    Column("records", "int64", "records"),
    Column("timed", "int64", "records whose exposed_ns is known"),
    Column("sampled", "int64", "records whose end is known from the backend or the device"),
    Column("unwaited", "int64", "asynchronous records without a recorded wait: exposed_ns is not known"),
    Column(
        "bounded",
        "int64",
        "records that C++ waited for in an interval of the table stalls; this interval bounds their exposed time",
    ),
)
_BOUNDS: Final = (
    Column(
        "exposed_low_ns",
        "int64",
        "lower bound of the exposed time; null: not known",
        True,
        "ns",
    ),
    Column(
        "exposed_high_ns",
        "int64",
        "upper bound of the exposed time; null: some records have no bound",
        True,
        "ns",
    ),
)
_OVERLAPPED: Final = (
    Column(
        "overlapped_ns",
        "int64",
        "overlapped time; null unless the backend reported the end of every asynchronous record (sampled)",
        True,
        "ns",
    ),
    Column(
        "overlapped_at_most_ns",
        "int64",
        "upper bound of the time in which at least one operation was under way and the program was blocked on none; "
        "null: some ends are not known",
        True,
        "ns",
    ),
)

EXPOSURE: Final = Table(
    "exposure",
    "Exposed and overlapped communication; means over the participating ranks.",
    (
        Column("ranks", "int64", "ranks with records that belong to the row"),
        *_KNOWN,
        Column(
            "exposed_ns",
            "int64",
            "time in which the program was blocked on at least one of the operations; concurrent waits count once; a "
            "lower bound if timed is less than records; null if only bounds are known (bounded)",
            True,
            "ns",
        ),
        *_BOUNDS,
        Column(
            "summed_ns",
            "int64",
            "sum of exposed_ns of the records; a lower bound if exposed_ns is a lower bound",
            True,
            "ns",
        ),
        *_OVERLAPPED,
        Column(
            "step_ns",
            "int64",
            "duration of the training steps of the row, longest over the ranks",
            True,
            "ns",
        ),
        Column(
            "exposed_share",
            "float64",
            "exposed_ns inside training steps, divided by step_ns; null if exposed_ns is null",
            True,
        ),
    ),
)

EXPOSURE_PER_STEP: Final = Table(
    "exposure_per_step",
    "Exposed and overlapped time of a training step, by purpose: medians over the warm steps of means over the ranks. "
    "Purposes overlap in time; the last row, all, is their union and not their sum.",
    (
        Column(
            "purpose",
            "string",
            "purpose that the runtime tags; null: no tag; all: the union of all purposes",
            True,
        ),
        Column(
            "steps",
            "int64",
            "warm training steps: steps that ended, without the first step of each attempt",
        ),
        *_KNOWN,
        Column(
            "exposed_ns",
            "int64",
            "exposed_ns of the answer exposure, median over the warm steps; a lower bound if timed is less than "
            "records; null if only bounds are known (bounded)",
            True,
            "ns",
        ),
        *_BOUNDS,
        Column("step_ns", "int64", "duration_ns of the steps, median over the warm steps", True, "ns"),
        Column("exposed_share", "float64", "exposed_ns divided by step_ns", True),
        *_OVERLAPPED,
    ),
    key=("purpose",),
)

MOVED: Final = Table(
    "moved",
    "Bytes moved during the run, by host and interface: counters of the whole host, all its processes.",
    (
        Column("host", "string", "host name"),
        Column("kind", "string", "interface, nvlink or pcie"),
        Column("device", "string", "network interface, or a GPU link"),
        Column("sent_bytes", "int64", "moved: counted as sent", unit="bytes"),
        Column("received_bytes", "int64", "moved: counted as received", unit="bytes"),
        Column("seconds", "float64", "time between the first and the last reading", unit="s"),
        Column("readings", "int64", "readings of the counter"),
        Column(
            "left_out",
            "string",
            "the part of the run that the readings of this host do not cover; null: none",
            True,
        ),
    ),
    key=("host", "kind", "device"),
)

_GROUPS: Final = Column("groups", "int64", "process groups of this name and size that issued the operation")

STEP_TOTALS: Final = Table(
    "step_totals",
    "Sums over the training steps that ended.",
    (
        *map(_of_schema, ("op", "intended_op", "purpose", "group_desc", "group_size")),
        _GROUPS,
        Column(
            "collectives",
            "float64",
            "deduplicated collectives: mean of the warm steps times the number of steps",
        ),
        Column("payload_bytes", "float64", "payload: S of nccl-tests, summed over them", unit="bytes"),
        padding(),
        Column(
            "wire_bytes",
            "float64",
            "wire, modelled as issued: mean bytes that a rank of the job sends",
            unit="bytes",
        ),
        Column(
            "executed_wire_bytes",
            "float64",
            "modelled wire bytes of what the backend runs for them",
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
        "collectives of all groups in a training step, without barriers",
        True,
    ),
    Column(
        "payload_bytes_per_step",
        "float64",
        "payload: S of nccl-tests, of all groups in a training step",
        True,
        "bytes",
    ),
    Column(
        "wire_bytes_per_step",
        "float64",
        "wire, modelled as issued: bytes that a rank of the job sends in a training step, mean over all its ranks",
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
    "Bytes of a training step by setting and operation.",
    (
        Column("label", "string", "the setting"),
        *map(_of_schema, ("op", "intended_op", "purpose")),
        *_PER_STEP,
    ),
    key=("label", "op", "intended_op", "purpose"),
)

TRAFFIC_BY_GROUP: Final = Table(
    "traffic_by_group",
    "Bytes of a training step by setting, kind of group and operation.",
    (
        Column("label", "string", "the setting"),
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
    "One row per setting, repeats merged. The keys that differ follow the label.",
    (
        Column("label", "string", "the setting: the keys that differ, and their values"),
        Column(
            "requested_op",
            "string",
            "operations that the config, DDP or FSDP requests to reduce gradients",
            True,
        ),
        Column("requested_reason", "string", "why requested_op is null", True),
        Column("issued_op", "string", "operations issued to reduce gradients, in order of wire bytes", True),
        Column("issued_reason", "string", "why issued_op lists more than gradient reductions", True),
        Column("intended_op", "string", "intended operations, if the runtime issued others", True),
        *_PER_STEP,
        Column(
            "gradient_payload_bytes_per_step",
            "float64",
            "payload of the gradient reduction in a step",
            True,
            "bytes",
        ),
        Column(
            "gradient_wire_bytes_per_step",
            "float64",
            "modelled wire bytes of the gradient reduction in a step",
            True,
            "bytes",
        ),
        *(
            Column(
                f"wire_{op}", "float64", f"modelled wire bytes of the issued {op} in a step", True, "bytes"
            )
            for op in WIRE_OPS
        ),
        Column(
            "step_time_ns",
            "int64",
            "median step time without the first step; for several repeats, the mean of their medians",
            True,
            "ns",
        ),
        Column("step_time_low_ns", "int64", "95 % interval of step_time_ns, low end", True, "ns"),
        Column("step_time_high_ns", "int64", "95 % interval of step_time_ns, high end", True, "ns"),
        Column("interval_over", "string", "basis of the interval: repeats or steps", True),
        Column(
            "final_loss", "float64", "loss of the last step with a loss, mean over ranks and repeats", True
        ),
        Column("steps", "int64", "training steps that ended"),
        Column("repeats", "int64", "runs with this setting"),
        Column("runs", "string", "names of these runs"),
    ),
    key=("label",),
)

RUNS: Final = Table(
    "runs",
    "One row per run below a directory, newest first.",
    (
        Column("name", "string", "name of the run directory"),
        Column("path", "string", "run directory"),
        Column("state", "string", "running, complete, failed, killed, unknown or unreadable"),
        Column("started_realtime_ns", "int64", "when the run started", True, "ns"),
        Column("script", "string", "training script", True),
        Column("world_size", "int64", "ranks", True),
        Column("backend", "string", "backends of the process groups", True),
        Column("records", "int64", "records", True),
        Column("summed", "int64", "collectives of which only sums were recorded", True),
        Column("lost", "int64", "dropped records", True),
        Column("unseen", "int64", "unseen collectives", True),
        Column("steps", "int64", "training steps", True),
        Column("setting", "string", "sweep point, or the ZeRO keys of its config", True),
        Column("sweep", "string", "name of the sweep that the run belongs to", True),
        Column("wall_ns", "int64", "how long the run took", True, "ns"),
        Column("finalised", "bool", "true if the files of the run are Parquet files"),
        Column("note", "string", "why a value is missing", True),
    ),
    key=("path",),
)

REQUESTED: Final = Table(
    "requested",
    "What the config should send, predicted from its keys and the parameters.",
    (
        Column("when", "string", "how often: init, micro_step or step"),
        Column("purpose", "string", "purpose"),
        Column("requested_op", "string", "the operation that the config requests"),
        Column("issued_op", "string", "the operation that a runtime issues, by the rules of commprof"),
        Column("intended_op", "string", "the operation that issued_op replaces", True),
        Column("count", "int64", "number of operations"),
        Column(
            "payload_bytes", "int64", "payload: S of nccl-tests, summed over these operations", unit="bytes"
        ),
        Column(
            "wire_bytes",
            "float64",
            "wire, modelled as issued: mean bytes that a rank of the group sends",
            unit="bytes",
        ),
        Column("exact", "bool", "false if count depends on the order in which gradients arrived"),
        Column("note", "string", "limits of the prediction"),
    ),
)

# One column, one line.
# fmt: off
ARRIVALS: Final = Table(
    "arrivals",
    "Arrivals on the clock of rank 0's host: one row per collective or message and rank.",
    (
        Column("attempt", "int32", "restart of the job"),
        Column("collective", "int64", "equal in all rows of one collective, or of one message"),
        *map(_of_schema, ("step", "op", "purpose", "pg", "group_ranks", "group_size")),
        Column(
            "pg_seq",
            "int64",
            "issue order within the group; null for messages, which are paired by their order",
            True,
        ),
        *map(_of_schema, ("is_p2p", "peer")),
        Column("members", "int64", "ranks whose records were found"),
        *map(_of_schema, ("rank", "pid", "seq")),
        Column(
            "arrived_ns",
            "int64",
            "when the rank issued the operation; null if the clock of the rank was never compared",
            True,
            "ns",
        ),
        Column("error_ns", "int64", "error bound of arrived_ns", True, "ns"),
        Column("lateness_ns", "int64", "time from the arrival of the first rank to this arrival", True, "ns"),
        Column("lateness_error_ns", "int64", "error bound of lateness_ns; 0 on one clock", True, "ns"),
        Column(
            "from_median_ns",
            "int64",
            "time from the median arrival to this arrival; negative if this arrival is earlier",
            True,
            "ns",
        ),
        Column(
            "is_last",
            "bool",
            "true if this rank arrived last; null if not all ranks were recorded or comparable",
            True,
        ),
        Column("certain", "bool", "last rank: true if it was last by more than the clock error", True),
        Column(
            "lead_ns",
            "int64",
            "last rank: time after the arrival of the second last rank, in which only the last was missing",
            True,
            "ns",
        ),
        Column("waiting_ns", "int64", "time from this arrival to the last arrival", True, "ns"),
        Column("launch_ns", "int64", "time from the last arrival until all devices had begun", True, "ns"),
        Column(
            "transfer_ns",
            "int64",
            "time from the end of launch_ns until this rank had its result, if that end is known",
            True,
            "ns",
        ),
        Column("waited_ns", "int64", "exposed time of this rank while only the last rank was missing", True, "ns"),
        Column("others_waited_ns", "int64", "last rank: mean of waited_ns over the other ranks", True, "ns"),
        Column(
            "cause",
            "string",
            "what took longest for this rank, if it took longer than the error",
            True,
            values=CAUSES,
        ),
        Column("own_delay_ns", "int64", "own delay, a part of lateness_ns; null if waits were not recorded", True, "ns"),
        Column("inherited_ns", "int64", "inherited delay, the rest of lateness_ns", True, "ns"),
        Column(
            "others_waited_own_ns",
            "int64",
            "last rank: the part of others_waited_ns that its own delay caused",
            True,
            "ns",
        ),
    ),
    key=("collective", "rank"),
)

STRAGGLERS: Final = Table(
    "stragglers",
    "How often each rank arrives last in collectives in which every rank waits for every other, and how long the "
    "others wait for it.",
    (
        Column("rank", "int32", "global rank"),
        Column("collectives", "int64", "collectives of the rank that all members recorded on comparable clocks"),
        Column("last", "int64", "collectives in which the rank was last by more than the clock error"),
        Column("within_bound", "int64", "collectives in which the rank was last by no more than the clock error"),
        Column("expected_last", "float64", "how often the rank would be last if all ranks were equal"),
        Column("mean_lateness_ns", "int64", "mean lateness", unit="ns"),
        Column("median_lateness_ns", "int64", "median lateness", unit="ns"),
        Column("error_ns", "int64", "error bound of the times of the rank, median", unit="ns"),
        Column("lead_ns", "int64", "total time in which only this rank was missing", unit="ns"),
        Column(
            "others_waited_ns",
            "int64",
            "mean exposed time of the other ranks while only this rank was missing, summed",
            True,
            "ns",
        ),
        Column("others_waited_per_step_ns", "int64", "others_waited_ns per training step", True, "ns"),
        Column(
            "others_waited_own_ns",
            "int64",
            "part of others_waited_ns that its own delay caused, if known",
            True,
            "ns",
        ),
        Column(
            "others_waited_inherited_ns",
            "int64",
            "part of others_waited_ns that its inherited delay caused, if known",
            True,
            "ns",
        ),
        Column(
            "stands_out",
            "bool",
            "true if it was last much more often than equal ranks would be, and more often than by chance",
        ),
    ),
    key=("rank",),
)

_ON_THE_CLOCK: Final = (
    Column("begin_ns", "int64", "when the operation was issued, on the clock of rank 0's host", unit="ns"),
    Column("end_ns", "int64", "last known time: return of the call, end of the wait, or end on the device", unit="ns"),
)

RECORDS: Final = Table(
    "records",
    "The records of all ranks in order of time: the columns of collectives, and begin and end on one clock.",
    (*_ON_THE_CLOCK, *(_of_schema(name) for name in schema.COLLECTIVES.names)),
    key=schema.COLLECTIVES.key,
)

TIMELINE_BARS: Final = Table(
    "timeline_bars",
    "The records in a window of time.",
    (
        *_ON_THE_CLOCK,
        Column("exposed_begin_ns", "int64", "begin of the exposed time of the record, not before begin_ns", True, "ns"),
        Column("exposed_end_ns", "int64", "end of the exposed time of the record", True, "ns"),
        Column("lane", "int64", "number of the process group in the window, in order of size, largest first"),
        Column("level", "int64", "level within the lane: overlapping bars have different levels, up to four"),
        *map(_of_schema, ("rank", "attempt", "pid", "seq", "step", "micro_step", "phase", "op", "intended_op", "purpose")),
        *map(_of_schema, ("bucket", "parameters", "module", "pg", "group_desc", "group_ranks", "group_size")),
        *map(_of_schema, ("pg_seq", "peer", "payload_bytes", "dtype", "is_async", "status", "call_site", "exposed_ns")),
    ),
    key=schema.COLLECTIVES.key,
)

DENSITY: Final = Table(
    "density",
    "How busy each rank was in each bin of a window of time, by operation, and by group if ranks have several; only "
    "values above 0.",
    (
        _of_schema("rank"),
        Column(
            "lane",
            "int64",
            "number of the group within the rank, largest first; 0 if groups are not distinguished",
        ),
        replace(_of_schema("pg"), nullable=True),  # null for several groups, like the next two columns
        _of_schema("group_desc"),
        replace(_of_schema("group_ranks"), nullable=True),
        Column("begin_ns", "int64", "begin of the bin, on the clock of rank 0's host", unit="ns"),
        Column("end_ns", "int64", "end of the bin", unit="ns"),
        _of_schema("op"),
        Column(
            "busy_ns",
            "int64",
            "time in which op was under way; concurrent time counts once, for the operation issued first",
            unit="ns",
        ),
        Column("busy_share", "float64", "busy_ns divided by the length of the bin"),
        Column("exposed_ns", "int64", "exposed time; concurrent waits count once", unit="ns"),
    ),
    key=("rank", "lane", "begin_ns", "op"),
)

BANDS: Final = Table(
    "bands",
    "Steps and phases of the lowest rank in a window of time.",
    (
        Column("kind", "string", "step or phase", values=("step", "phase")),
        *map(_of_schema, ("attempt", "step")),
        replace(_of_schema("micro_step"), nullable=True),
        Column("name", "string", "name of the step or phase"),
        Column("begin_ns", "int64", "begin of the step, or of the first record of the phase", unit="ns"),
        Column("end_ns", "int64", "end of the step, or of the last record of the phase", unit="ns"),
    ),
)

PARTNERS: Final = Table(
    "partners",
    "One collective or message on all ranks that recorded it.",
    (
        *map(_of_schema, ("rank", "attempt", "pid", "seq", "op")),
        *_ON_THE_CLOCK,
        Column("lateness_ns", "int64", "time from the arrival of the first rank to this arrival", unit="ns"),
        Column("own_delay_ns", "int64", "own delay, a part of lateness_ns; null if waits were not recorded", True, "ns"),
        Column("inherited_ns", "int64", "inherited delay, the rest of lateness_ns", True, "ns"),
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
