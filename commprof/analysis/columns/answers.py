"""The columns of every answer, declared like the tables of the schema: type, unit, and which byte measure it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from commprof import schema
from commprof.align.ranks.arrivals import CAUSES
from commprof.analysis.columns import byte_columns
from commprof.analysis.columns.bandwidth_answers import BANDWIDTH_ANSWERS
from commprof.analysis.columns.byte_columns import between_hosts, padding
from commprof.analysis.columns.detailed_answers import DETAILED_ANSWERS
from commprof.analysis.columns.setting_answers import SETTING_ANSWERS
from commprof.schema import Column, Table

_MEASURES: Final = (
    Column("collectives", "int64", "collectives, each counted once; a message is counted at its send"),
    Column("records", "int64", "records of all ranks behind them"),
    Column("payload_bytes", "int64", "payload: S of nccl-tests, summed over the collectives", unit="bytes"),
    padding("int64"),
    Column(
        "wire_bytes",
        "float64",
        "wire, modelled as issued: mean bytes that a rank of the group sends, a message its bytes, over the collectives",
        unit="bytes",
    ),
    Column(
        "executed_wire_bytes",
        "float64",
        "wire, modelled, of what the backend runs for them, in the same way; null where that is not known",
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
        "time that the program stood still, mean over the ranks of a collective, added up; at least, where timed is less "
        "than records",
        True,
        "ns",
    ),
    Column("tensors", "int64", "tensors in the collectives"),
    Column("timed", "int64", "records whose exposed_ns is known; 0 of what was kept as sums only"),
)


def _of_schema(name: str, **changes: Any) -> Column:
    return replace(schema.COLLECTIVES.column(name), source=None, **changes)


# What traffic() can be asked by.
GROUPINGS: Final[dict[str, Column]] = {
    column.name: column
    for column in (
        *map(_of_schema, ("attempt", "step", "after_step")),
        _of_schema("micro_step", nullable=True),  # sums (--aggregate) are of whole steps
        *map(_of_schema, ("phase", "op", "intended_op", "purpose")),
        *map(_of_schema, ("bucket", "owner", "dtype", "reduce_op", "backend", "device")),
        *map(_of_schema, ("pg", "group_desc", "group_ranks", "group_size", "api", "call_site")),
        Column(
            "span",
            "string",
            "whether the bytes stay within a host: by the hosts of the ranks of the group, or of the two ranks of a "
            "message; null where they are not known",
            True,
            values=("within_host", "between_hosts"),
        ),
    )
}

TRAFFIC: Final = Table(
    "traffic", "Operations, bytes and times for each combination of the columns asked for.", _MEASURES
)

STEP_TIMES: Final = Table(
    "step_times",
    "One row per training step and attempt.",
    (
        Column("attempt", "int32", "restart of the job"),
        Column("step", "int32", "training step, from 0"),
        Column("ranks", "int32", "ranks that recorded the step"),
        Column("begin_ns", "int64", "the step began, on the clock of the lowest rank's host", unit="ns"),
        Column("end_ns", "int64", "the step ended, on the same clock", True, "ns"),
        Column(
            "duration_ns", "int64", "longest over the ranks; null where a rank never ended it", True, "ns"
        ),
        Column("micro_steps", "int32", "micro-batches in the step"),
        Column("loss", "float64", "mean over the ranks that published it", True),
        Column("grad_norm", "float64", "mean over the ranks that published it", True),
        Column("loss_scale", "float64", "largest over the ranks", True),
        Column("samples", "float64", "sum over the ranks", True),
        Column("collectives", "int64", "collectives, each counted once, without barriers"),
        Column("payload_bytes", "int64", "payload: S of nccl-tests, summed over them", unit="bytes"),
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
            "exposed_ns of exposure in this step; null where only bounds are known",
            True,
            "ns",
        ),
        Column("exposed_low_ns", "int64", "exposed_low_ns of exposure in this step", True, "ns"),
        Column("exposed_high_ns", "int64", "exposed_high_ns of exposure in this step", True, "ns"),
        Column("cpu_ns", "int64", "CPU time of a rank's process, mean over ranks", True, "ns"),
        Column("rss_bytes", "int64", "resident memory, largest over the ranks", True, "bytes"),
        Column("device_bytes", "int64", "device memory, largest over the ranks", True, "bytes"),
    ),
    key=("attempt", "step"),
)

# What exposure() can be asked by. Its steps are those that the time was spent in.
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
    Column("timed", "int64", "of these exposed_ns is known"),
    Column("sampled", "int64", "of these the end is known from the backend or the device itself"),
    Column("unwaited", "int64", "asynchronous, and no wait for them was seen: exposed_ns is not known"),
    Column("bounded", "int64", "of these C++ waited in an interval of stalls, which bounds what they cost"),
)
_BOUNDS: Final = (
    Column(
        "exposed_low_ns",
        "int64",
        "the program was blocked on them at least so long; null: not known",
        True,
        "ns",
    ),
    Column("exposed_high_ns", "int64", "at most so long; null: of some nothing bounds it", True, "ns"),
)
_OVERLAPPED: Final = (
    Column(
        "overlapped_ns",
        "int64",
        "overlapped time, where the backend told the end of every asynchronous record (sampled); else null",
        True,
        "ns",
    ),
    Column(
        "overlapped_at_most_ns",
        "int64",
        "at least one was under way, as far as is known, while the program was blocked on none: at most so long; null: of "
        "some the end is not known",
        True,
        "ns",
    ),
)

EXPOSURE: Final = Table(
    "exposure",
    "What collectives cost the program in time, and what they hid behind its work; means over the ranks with part in it.",
    (
        Column("ranks", "int64", "ranks that have such records"),
        *_KNOWN,
        Column(
            "exposed_ns",
            "int64",
            "time in which the program was blocked on at least one of them, a moment once; at least, where timed is less "
            "than records; null where only bounds are known (bounded)",
            True,
            "ns",
        ),
        *_BOUNDS,
        Column(
            "summed_ns", "int64", "exposed_ns of the records, added up; at least, as exposed_ns", True, "ns"
        ),
        *_OVERLAPPED,
        Column(
            "step_ns", "int64", "time of the training steps of the row, longest over the ranks", True, "ns"
        ),
        Column(
            "exposed_share",
            "float64",
            "exposed_ns inside of training steps, over step_ns; null where exposed_ns is",
            True,
        ),
    ),
)

EXPOSURE_PER_STEP: Final = Table(
    "exposure_per_step",
    "Exposed and overlapped time of a training step, by purpose: medians over the warm steps of means over the ranks. "
    "Purposes overlap in time; the last row, all, is their union and not their sum.",
    (
        Column("purpose", "string", "why, as the runtime says; null where it does not; all", True),
        Column(
            "steps",
            "int64",
            "training steps behind the row: those that ended, without the first of each attempt",
        ),
        *_KNOWN,
        Column(
            "exposed_ns",
            "int64",
            "median over these steps of exposed_ns of exposure; at least, where timed is less than records; null where only "
            "bounds are known (bounded)",
            True,
            "ns",
        ),
        *_BOUNDS,
        Column("step_ns", "int64", "median over the same steps of their duration_ns", True, "ns"),
        Column("exposed_share", "float64", "exposed_ns over step_ns", True),
        *_OVERLAPPED,
    ),
    key=("purpose",),
)

MOVED: Final = Table(
    "moved",
    "What the counters of each host and interface moved during the run: the whole host, all its processes.",
    (
        Column("host", "string", "host name"),
        Column("kind", "string", "interface, nvlink or pcie"),
        Column("device", "string", "network interface, or a GPU link"),
        Column("sent_bytes", "int64", "moved: counted as sent", unit="bytes"),
        Column("received_bytes", "int64", "moved: counted as received", unit="bytes"),
        Column("seconds", "float64", "between the first and the last reading", unit="s"),
        Column("readings", "int64", "readings of the counter"),
        Column(
            "left_out",
            "string",
            "what of the run the readings of this host do not cover; null: nothing",
            True,
        ),
    ),
    key=("host", "kind", "device"),
)

_GROUPS: Final = Column("groups", "int64", "groups of this name and size that issued it")

STEP_TOTALS: Final = Table(
    "step_totals",
    "What the whole training steps sent together.",
    (
        *map(_of_schema, ("op", "intended_op", "purpose", "group_desc", "group_size")),
        _GROUPS,
        Column(
            "collectives", "float64", "mean of the warm steps times the steps, each collective counted once"
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
            "wire, modelled, of what the backend runs for them",
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
        "wire, modelled, of what the backend runs in a training step; null where that is not known",
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
    "One row per setting; repeats merged. The keys that differ stand after the label.",
    (
        Column("label", "string", "the setting: the keys that differ, and their values"),
        Column("requested_op", "string", "operations that the config asks for to reduce gradients", True),
        Column("requested_reason", "string", "why requested_op is null", True),
        Column(
            "issued_op", "string", "operations issued to reduce gradients, the most wire bytes first", True
        ),
        Column("issued_reason", "string", "why issued_op lists more than what reduces gradients", True),
        Column("intended_op", "string", "operations that the runtime meant, where it issued others", True),
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
            "wire, modelled, of the gradient reduction in a step",
            True,
            "bytes",
        ),
        *(
            Column(f"wire_{op}", "float64", f"wire, modelled, of issued {op} in a step", True, "bytes")
            for op in WIRE_OPS
        ),
        Column(
            "step_time_ns",
            "int64",
            "median step time without the first step; over repeats, the mean of their medians",
            True,
            "ns",
        ),
        Column("step_time_low_ns", "int64", "95 % interval of step_time_ns, low end", True, "ns"),
        Column("step_time_high_ns", "int64", "95 % interval of step_time_ns, high end", True, "ns"),
        Column("interval_over", "string", "what the interval is over: repeats or steps", True),
        Column(
            "final_loss", "float64", "loss of the last step that has one, mean over ranks and repeats", True
        ),
        Column("steps", "int64", "whole training steps behind the row"),
        Column("repeats", "int64", "runs with this setting"),
        Column("runs", "string", "their names"),
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
        Column("started_realtime_ns", "int64", "when it began", True, "ns"),
        Column("script", "string", "what ran", True),
        Column("world_size", "int64", "ranks", True),
        Column("backend", "string", "backends of its groups", True),
        Column("records", "int64", "records", True),
        Column("lost", "int64", "records lost", True),
        Column("unseen", "int64", "collectives issued unseen", True),
        Column("steps", "int64", "training steps", True),
        Column("setting", "string", "sweep point, or the ZeRO keys of its config", True),
        Column("finalised", "bool", "its files are Parquet"),
        Column("note", "string", "why something is missing", True),
    ),
    key=("path",),
)

REQUESTED: Final = Table(
    "requested",
    "What the config should send, from its words and the parameters alone.",
    (
        Column("when", "string", "how often: init, micro_step or step"),
        Column("purpose", "string", "why"),
        Column("requested_op", "string", "the operation that the config asks for"),
        Column("issued_op", "string", "the operation that the rules then send"),
        Column("intended_op", "string", "the operation that this one stands for", True),
        Column("count", "int64", "how many of them"),
        Column("payload_bytes", "int64", "payload: S of nccl-tests, of all of them", unit="bytes"),
        Column(
            "wire_bytes",
            "float64",
            "wire, modelled as issued: mean bytes that a rank of the group sends",
            unit="bytes",
        ),
        Column("exact", "bool", "false where count needs the order in which gradients arrived"),
        Column("note", "string", "what a reader should know"),
    ),
)

# One column, one line.
# fmt: off
ARRIVALS: Final = Table(
    "arrivals",
    "When each rank came to each collective, on the clock of rank 0's host: one row per collective or message and rank.",
    (
        Column("attempt", "int32", "restart of the job"),
        Column("collective", "int64", "equal in all rows of one collective, or of one message"),
        *map(_of_schema, ("step", "op", "purpose", "pg", "group_ranks", "group_size")),
        Column("pg_seq", "int64", "issue order within the group; null for messages, which pair by their order", True),
        *map(_of_schema, ("is_p2p", "peer")),
        Column("members", "int64", "ranks whose records were found"),
        *map(_of_schema, ("rank", "pid", "seq")),
        Column("arrived_ns", "int64", "the rank issued it; null where its clock was never compared", True, "ns"),
        Column("error_ns", "int64", "arrived_ns is wrong by this at most", True, "ns"),
        Column("lateness_ns", "int64", "after the first rank", True, "ns"),
        Column("lateness_error_ns", "int64", "lateness_ns is wrong by this at most; 0 on one clock", True, "ns"),
        Column("from_median_ns", "int64", "after the median of the ranks (before it: negative)", True, "ns"),
        Column("is_last", "bool", "it came last; null where not all ranks were recorded or compared", True),
        Column("certain", "bool", "the last one: that it came last is beyond the error of the clocks", True),
        Column("lead_ns", "int64", "the last one: after the last but one, so that only this rank was missing", True, "ns"),
        Column("waiting_ns", "int64", "from this arrival to the last", True, "ns"),
        Column("launch_ns", "int64", "from the last arrival until all devices had begun", True, "ns"),
        Column("transfer_ns", "int64", "from then until this rank had its result, as far as its end is known", True, "ns"),
        Column("waited_ns", "int64", "time that this rank stood still while only the last one was missing", True, "ns"),
        Column("others_waited_ns", "int64", "the last one: mean of waited_ns over the others", True, "ns"),
        Column("cause", "string", "what took longest for this rank, where it is beyond the error", True, values=CAUSES),
        Column("own_delay_ns", "int64", "of lateness_ns: by its own time; null where waits were not recorded", True, "ns"),
        Column("inherited_ns", "int64", "of lateness_ns the rest: collectives or messages before held it", True, "ns"),
        Column("others_waited_own_ns", "int64", "the last one: of others_waited_ns the part for its own time", True, "ns"),
    ),
    key=("collective", "rank"),
)

STRAGGLERS: Final = Table(
    "stragglers",
    "How often each rank was the last to come where all wait for all, and what the others waited for it.",
    (
        Column("rank", "int32", "global rank"),
        Column("collectives", "int64", "collectives that it took part in, recorded and comparable on all ranks"),
        Column("last", "int64", "of these it was the last to come, beyond the error of the clocks"),
        Column("within_bound", "int64", "of these it was the last, but by less than the clocks may be wrong"),
        Column("expected_last", "float64", "how often it would be last if all ranks were alike"),
        Column("mean_lateness_ns", "int64", "after the first rank, mean", unit="ns"),
        Column("median_lateness_ns", "int64", "after the first rank, median", unit="ns"),
        Column("error_ns", "int64", "its times are wrong by this at most, median", unit="ns"),
        Column("lead_ns", "int64", "time in which it alone was missing, in all", unit="ns"),
        Column("others_waited_ns", "int64", "time that the others stood still for it alone, their mean, in all", True, "ns"),
        Column("others_waited_per_step_ns", "int64", "the same for a training step", True, "ns"),
        Column("others_waited_own_ns", "int64", "of others_waited_ns for its own time, where that is known", True, "ns"),
        Column("others_waited_inherited_ns", "int64", "the rest where that is known: it was held longer before", True, "ns"),
        Column("stands_out", "bool", "it was last much more often than if all ranks were alike, and than chance explains"),
    ),
    key=("rank",),
)

_ON_THE_CLOCK: Final = (
    Column("begin_ns", "int64", "issued, on the clock of rank 0's host", unit="ns"),
    Column("end_ns", "int64", "the last that is known of it: returned, waited for, or done on the device", unit="ns"),
)

RECORDS: Final = Table(
    "records",
    "The records of all ranks in order of time: the columns of collectives, and their span on one clock.",
    (*_ON_THE_CLOCK, *(_of_schema(name) for name in schema.COLLECTIVES.names)),
    key=schema.COLLECTIVES.key,
)

TIMELINE_BARS: Final = Table(
    "timeline_bars",
    "The records in a window of time.",
    (
        *_ON_THE_CLOCK,
        Column("exposed_begin_ns", "int64", "from here the program stood still for it, not before its begin", True, "ns"),
        Column("exposed_end_ns", "int64", "until here", True, "ns"),
        Column("lane", "int64", "number of its group in the window, the largest group first"),
        Column("level", "int64", "place within the lane: those that overlap differ, as far as there are four at most"),
        *map(_of_schema, ("rank", "attempt", "pid", "seq", "step", "micro_step", "phase", "op", "intended_op", "purpose")),
        *map(_of_schema, ("bucket", "parameters", "module", "pg", "group_desc", "group_ranks", "group_size")),
        *map(_of_schema, ("pg_seq", "peer", "payload_bytes", "dtype", "is_async", "status", "call_site", "exposed_ns")),
    ),
    key=schema.COLLECTIVES.key,
)

DENSITY: Final = Table(
    "density",
    "How busy each rank was in each bin of a window of time, by operation, and by group where ranks have several; only "
    "what is not 0.",
    (
        _of_schema("rank"),
        Column("lane", "int64", "number of the group within the rank, the largest first; 0 where groups are not told apart"),
        replace(_of_schema("pg"), nullable=True),  # of several groups null, as the two that follow
        _of_schema("group_desc"),
        replace(_of_schema("group_ranks"), nullable=True),
        Column("begin_ns", "int64", "the bin begins, on the clock of rank 0's host", unit="ns"),
        Column("end_ns", "int64", "the bin ends", unit="ns"),
        _of_schema("op"),
        Column("busy_ns", "int64", "time in which it was under way; a moment counts once, for what began first", unit="ns"),
        Column("busy_share", "float64", "part of the bin"),
        Column("exposed_ns", "int64", "time in which the program stood still for it; a moment counts once", unit="ns"),
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
        Column("name", "string", "the step, or the phase"),
        Column("begin_ns", "int64", "the step began; the first record of the phase", unit="ns"),
        Column("end_ns", "int64", "the step ended; the last record of the phase", unit="ns"),
    ),
)

PARTNERS: Final = Table(
    "partners",
    "One collective or message on all ranks that recorded it.",
    (
        *map(_of_schema, ("rank", "attempt", "pid", "seq", "op")),
        *_ON_THE_CLOCK,
        Column("lateness_ns", "int64", "issued after the first rank", unit="ns"),
        Column("own_delay_ns", "int64", "of it by its own time; null where waits were not recorded", True, "ns"),
        Column("inherited_ns", "int64", "of it the rest: collectives or messages before held it", True, "ns"),
        _of_schema("exposed_ns"),
    ),
    key=schema.COLLECTIVES.key,
)
# fmt: on

# By the name of the function in api.py that gives them.
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
    **SETTING_ANSWERS,
}
