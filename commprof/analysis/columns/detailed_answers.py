"""The columns of the answers about pairs of ranks, buckets, lateness and alignments: see ``answers.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from commprof import schema
from commprof.align.ranks.rank_arrivals import CAUSES
from commprof.analysis.columns.byte_columns import between_hosts, between_pairs, padding
from commprof.schema import Column, Table


def _of(table: Table, name: str, **changes: Any) -> Column:
    return replace(table.column(name), source=None, **changes)


# The columns that matrix() can be grouped by.
MATRIX_BY: Final[dict[str, Column]] = {
    name: _of(schema.COLLECTIVES, name) for name in ("step", "phase", "op", "intended_op", "purpose", "pg")
}

# One column, one line.
# fmt: off
MATRIX: Final = Table(
    "matrix",
    "The bytes that each rank sends to every other rank.",
    (
        Column("sender", "int32", "global rank of the sender"),
        Column("receiver", "int32", "global rank of the receiver"),
        Column(
            "wire_bytes",
            "float64",
            "wire bytes, modelled for the operations as issued; for sends, the bytes as recorded",
            unit="bytes",
        ),
        Column(
            "message_bytes",
            "int64",
            "the part of wire_bytes that comes from sends; these bytes are recorded, not modelled",
            unit="bytes",
        ),
        Column(
            "executed_wire_bytes",
            "float64",
            "modelled wire bytes of the operations that the backend runs; null if these operations are not "
            "known",
            True,
            "bytes",
        ),
        between_pairs("wire_bytes"),
    ),
    key=("sender", "receiver"),
)

OWNERS: Final = Table(
    "owners",
    "One row per rank: the reduce operations whose result the rank owns, and the bytes that the rank "
    "receives.",
    (
        Column("rank", "int32", "global rank"),
        Column("collectives", "int64", "number of reduce operations whose root is this rank"),
        Column(
            "payload_bytes",
            "int64",
            "payload (S of nccl-tests) of these reduce operations",
            unit="bytes",
        ),
        padding("int64"),
        Column(
            "received_bytes",
            "int64",
            "modelled wire bytes that the other ranks send to this rank",
            unit="bytes",
        ),
        between_pairs("received_bytes", "from ranks on other hosts"),
    ),
    key=("rank",),
)

ONE_OFFS: Final = Table(
    "one_offs",
    "One-off traffic: what single training steps send in addition to the recurring traffic. No value per "
    "step includes it.",
    (
        *(_of(schema.COLLECTIVES, name) for name in ("attempt", "step", "purpose", "op", "intended_op")),
        *(_of(schema.COLLECTIVES, name) for name in ("group_desc", "group_ranks", "group_size")),
        Column(
            "collectives",
            "int64",
            "collectives that the step issued in addition to the recurring ones; a message counts at its "
            "send",
        ),
        Column(
            "payload_bytes",
            "int64",
            "payload (S of nccl-tests) of these additional collectives",
            unit="bytes",
        ),
        padding(),
        Column(
            "wire_bytes",
            "float64",
            "modelled wire bytes of these additional collectives, defined as the wire_bytes of traffic(run)",
            unit="bytes",
        ),
        Column(
            "executed_wire_bytes",
            "float64",
            "modelled wire bytes of the operations that the backend runs; null if these operations are not "
            "known",
            True,
            "bytes",
        ),
        between_hosts(),
    ),
    key=("attempt", "step", "purpose", "op", "intended_op", "group_desc", "group_ranks"),
)

UNTAGGED: Final = Table(
    "untagged",
    "Call sites that issue collectives without a purpose, sorted by payload, largest first.",
    (
        *(_of(schema.COLLECTIVES, name) for name in ("phase", "op", "api", "call_site")),
        Column("collectives", "int64", "deduplicated collectives; a message counts at its send"),
        Column("records", "int64", "records of these collectives on all ranks"),
        Column(
            "payload_bytes",
            "int64",
            "payload (S of nccl-tests), summed over these collectives",
            unit="bytes",
        ),
        padding("int64"),
        Column(
            "wire_bytes",
            "float64",
            "wire bytes, modelled for the operations as issued, as defined in the answer traffic",
            unit="bytes",
        ),
        between_hosts(),
    ),
)

ALGORITHMS: Final = Table(
    "algorithms",
    "The choices of NCCL for each operation, group and size, from a log that is aligned with the records.",
    (
        *(_of(schema.COLLECTIVES, name) for name in ("op", "group_desc", "group_ranks", "group_size")),
        Column("payload_bytes", "int64", "payload (S of nccl-tests)", unit="bytes"),
        Column(
            "algorithm",
            "string",
            "the algorithm, under NCCL's name: TREE, RING, COLLNET_DIRECT, COLLNET_CHAIN, NVLS, NVLS_TREE "
            "or PAT",
        ),
        Column("protocol", "string", "the protocol, under NCCL's name: LL, LL128 or SIMPLE", True),
        Column(
            "channels",
            "int32",
            "number of channels that the kernel uses (Inspector), or that NCCL may use (NCCL log)",
            True,
        ),
        Column("collectives", "int64", "collectives that have at least one record with this choice"),
        Column(
            "records",
            "int64",
            "records with this choice; most NCCL versions print the choice on one rank only",
        ),
        Column(
            "time_ns",
            "int64",
            "median time of these records on the device; this time includes the wait for stragglers",
            True,
            "ns",
        ),
        Column(
            "algbw_bytes_per_s",
            "float64",
            "algorithm bandwidth (nccl-tests) at time_ns",
            True,
            "bytes/s",
        ),
        Column("busbw_bytes_per_s", "float64", "bus bandwidth (nccl-tests) at time_ns", True, "bytes/s"),
    ),
    key=("op", "group_desc", "group_ranks", "payload_bytes", "algorithm", "protocol", "channels"),
)

_BUCKET: Final = tuple(_of(schema.BUCKETS, name) for name in ("attempt", "step", "micro_step", "bucket"))
_GROUP: Final = Column(
    "group_ranks",
    "string",
    "ranks that reduce the bucket together; null if no record of these ranks names a bucket",
    True,
)
_EXECUTED: Final = Column(
    "executed_wire_bytes",
    "float64",
    "modelled wire bytes of the operations that the backend runs; null if these operations are not known",
    True,
    "bytes",
)
_REDUCED: Final = (
    Column(
        "op",
        "string",
        "operations that reduced the bucket, joined by ', '; null if no such operation is recorded",
        True,
    ),
    Column(
        "intended_op",
        "string",
        "operations that the runtime intended, if it issued different ones",
        True,
    ),
)

BUCKET_FLUSHES: Final = Table(
    "bucket_flushes",
    "One row per gradient bucket and group of ranks that reduce the bucket together.",
    (
        *_BUCKET,
        _GROUP,
        *(_of(schema.BUCKETS, name) for name in ("numel", "bytes", "capacity")),
        Column(
            "fill",
            "float64",
            "numel divided by capacity; above 1 if a single gradient is larger than a bucket",
            True,
        ),
        *(_of(schema.BUCKETS, name) for name in ("dtype", "owners", "parameters", "flush_reason")),
        Column("ranks", "int64", "number of ranks that flushed the bucket"),
        Column(
            "alike",
            "bool",
            "true if the bucket has the same number of elements and the same parameters on all of these "
            "ranks",
        ),
        _of(schema.BUCKETS, "time_ns"),
        *_REDUCED,
        Column(
            "collectives",
            "int64",
            "deduplicated collectives that reduced the bucket; null if only sums were recorded",
            True,
        ),
        Column(
            "payload_bytes",
            "int64",
            "payload (S of nccl-tests) of these collectives; null if collectives is null",
            True,
            "bytes",
        ),
        padding("int64"),
        Column(
            "wire_bytes",
            "float64",
            "modelled wire bytes of the operations as issued: the mean number of bytes that a rank sends to "
            "reduce the bucket",
            True,
            "bytes",
        ),
        _EXECUTED,
        between_hosts(),
        Column(
            "duration_ns",
            "int64",
            "time from the issue of the bucket's first collective to the last known end of its collectives; "
            "mean over the ranks",
            True,
            "ns",
        ),
        Column(
            "exposed_ns",
            "int64",
            "sum of exposed_ns over those collectives of the bucket for which it is known; mean over the "
            "ranks",
            True,
            "ns",
        ),
    ),
    key=("attempt", "step", "micro_step", "bucket", "group_ranks"),
)

BUCKET_STEPS: Final = Table(
    "bucket_steps",
    "The gradient buckets of each step, summed by the reason for the flush.",
    (
        Column("step", "int32", "training step; -1 outside all steps"),
        _of(schema.BUCKETS, "flush_reason"),
        Column("buckets", "int64", "number of buckets"),
        Column("bytes", "int64", "bytes of these buckets in their communication dtype", unit="bytes"),
        Column(
            "collectives",
            "int64",
            "deduplicated collectives that reduced these buckets; null if only sums were recorded",
            True,
        ),
        Column(
            "payload_bytes",
            "int64",
            "payload (S of nccl-tests) of these collectives; null if collectives is null",
            True,
            "bytes",
        ),
        padding("int64"),
        Column(
            "wire_bytes",
            "float64",
            "modelled wire bytes of the operations as issued: the mean number of bytes that a rank sends to "
            "reduce these buckets",
            True,
            "bytes",
        ),
        _EXECUTED,
        between_hosts(),
        Column(
            "unlike",
            "int64",
            "number of buckets whose elements or parameters differ between the ranks of a group",
        ),
        Column("first_micro_step", "int32", "lowest micro-batch number among these buckets"),
        Column("last_micro_step", "int32", "highest micro-batch number among these buckets"),
    ),
    key=("step", "flush_reason"),
)

BUCKETS_PER_STEP: Final = Table(
    "buckets_per_step",
    "The gradient buckets of a training step by the reason for the flush, according to the rules for values "
    "of a step.",
    (
        _of(schema.BUCKETS, "flush_reason"),
        Column(
            "every",
            "int64",
            "k if these buckets occur in every k-th step; null if the interval is irregular",
            True,
        ),
        Column("buckets", "float64", "number of buckets in a step"),
        Column("bytes", "float64", "bytes of these buckets in their communication dtype", unit="bytes"),
        Column(
            "collectives",
            "float64",
            "deduplicated collectives that reduced these buckets; null if only sums were recorded",
            True,
        ),
        Column(
            "payload_bytes",
            "float64",
            "payload (S of nccl-tests) of these collectives; null if collectives is null",
            True,
            "bytes",
        ),
        padding(),
        Column(
            "wire_bytes",
            "float64",
            "modelled wire bytes of the operations as issued: the mean number of bytes that a rank sends to "
            "reduce these buckets",
            True,
            "bytes",
        ),
        _EXECUTED,
        between_hosts(),
    ),
    key=("flush_reason",),
)

BUCKET_MEANS: Final = Table(
    "bucket_means",
    "The gradient buckets of a mean training step.",
    (
        *_BUCKET[2:],
        _GROUP,
        Column("steps", "int64", "number of training steps in which the bucket has these contents"),
        Column("numel", "float64", "mean number of elements in the bucket", unit="elements"),
        Column(
            "bytes",
            "float64",
            "mean number of bytes of the bucket in its communication dtype",
            unit="bytes",
        ),
        Column("fill", "float64", "mean of numel divided by capacity", True),
        Column("lowest_fill", "float64", "lowest value of numel divided by capacity", True),
        *(_of(schema.BUCKETS, name) for name in ("owners", "parameters")),
        Column(
            "flush_reason",
            "string",
            "why the bucket was sent; if the reason differs between steps, all reasons are joined by ', '",
            True,
        ),
        Column(
            "steady",
            "bool",
            "true if all buckets with this number have the same contents in all steps",
        ),
        *_REDUCED,
        Column(
            "collectives",
            "float64",
            "mean number of collectives that reduced the bucket; null if only sums were recorded",
            True,
        ),
        Column(
            "payload_bytes",
            "float64",
            "mean payload (S of nccl-tests) of these collectives; null if collectives is null",
            True,
            "bytes",
        ),
        padding(),
        Column(
            "wire_bytes",
            "float64",
            "modelled wire bytes of the operations as issued: the mean number of bytes that a rank sends to "
            "reduce the bucket",
            True,
            "bytes",
        ),
        _EXECUTED,
        between_hosts(),
        Column(
            "duration_ns",
            "int64",
            "median of duration_ns of bucket_flushes, without the first step of each attempt",
            True,
            "ns",
        ),
        Column(
            "exposed_ns",
            "int64",
            "median of exposed_ns of bucket_flushes, without the first step of each attempt",
            True,
            "ns",
        ),
    ),
    key=("micro_step", "bucket", "group_ranks"),
)

BUCKET_PARAMETERS: Final = Table(
    "bucket_parameters",
    "The parameters of one bucket, in order.",
    (
        _of(schema.PARAMETERS, "name"),
        *(_of(schema.PARAMETERS, name, nullable=True) for name in ("shape", "dtype", "numel")),
        Column(
            "first_element",
            "int64",
            "position of the parameter's first element in the bucket; null if the sizes do not add up to "
            "the size of the bucket",
            True,
            "elements",
        ),
    ),
)

BUCKET_OPERATIONS: Final = Table(
    "bucket_operations",
    "The collectives that reduced one bucket, in order of issue, on the lowest rank that issued any of them.",
    (
        *(_of(schema.COLLECTIVES, name) for name in ("rank", "pid", "seq", "op", "intended_op", "owner", "dtype")),
        *(_of(schema.COLLECTIVES, name) for name in ("reduce_op", "numel", "payload_bytes")),
        *(_of(schema.COLLECTIVES, name) for name in ("padding_bytes", "pg", "group_ranks", "module")),
        Column(
            "first_element",
            "int64",
            "position of the collective's first element in the bucket; null if the sizes do not add up to "
            "the size of the bucket",
            True,
            "elements",
        ),
        _of(schema.COLLECTIVES, "issue_ns"),
        Column(
            "duration_ns",
            "int64",
            "time from issue_ns to the last known end of the collective on this rank",
            unit="ns",
        ),
        _of(schema.COLLECTIVES, "exposed_ns"),
    ),
    key=("rank", "pid", "seq"),
)
LATENESS: Final = Table(
    "lateness",
    "Lateness of each rank: quantiles over the collectives and messages whose arrivals can be compared.",
    (
        _of(schema.COLLECTIVES, "rank"),
        Column(
            "collectives",
            "int64",
            "collectives and messages that several ranks recorded on comparable clocks",
        ),
        Column("p5_ns", "int64", "5th percentile of the lateness", unit="ns"),
        Column("p25_ns", "int64", "25th percentile of the lateness", unit="ns"),
        Column("median_ns", "int64", "median lateness", unit="ns"),
        Column("p75_ns", "int64", "75th percentile of the lateness", unit="ns"),
        Column("p95_ns", "int64", "95th percentile of the lateness", unit="ns"),
        Column("highest_ns", "int64", "largest lateness", unit="ns"),
        Column(
            "error_ns",
            "int64",
            "median error bound of the lateness; 0 if the ranks share one clock",
            unit="ns",
        ),
    ),
    key=("rank",),
)

LATENESS_OF_STEPS: Final = Table(
    "lateness_of_steps",
    "Lateness of each rank in each training step. If there are more than 250 steps, each row describes a "
    "range of steps.",
    (
        _of(schema.COLLECTIVES, "rank"),
        _of(schema.COLLECTIVES, "attempt"),
        Column("step", "int32", "training step; for a range of steps, the first step of the range"),
        Column("steps", "int64", "number of training steps in the range"),
        Column(
            "is_warm",
            "bool",
            "true if the verdict uses the step; the verdict excludes the first step of each attempt",
        ),
        Column(
            "lateness_ns",
            "int64",
            "largest lateness of the rank in the step, without messages; for a range, the mean over its "
            "steps",
            True,
            "ns",
        ),
        Column(
            "collectives",
            "int64",
            "number of collectives in these steps, as defined in the answer stragglers",
        ),
        Column(
            "last",
            "int64",
            "how often the rank was last in these steps, as defined in the answer stragglers",
        ),
        Column(
            "expected_last",
            "float64",
            "how often the rank would be last in these steps if all ranks were equal",
        ),
        Column(
            "others_waited_own_ns",
            "int64",
            "time that the other ranks waited because of this rank's own delay, as the verdict counts it",
            unit="ns",
        ),
        Column(
            "others_waited_inherited_ns",
            "int64",
            "time that the other ranks waited because of this rank's inherited delay",
            unit="ns",
        ),
        Column(
            "others_waited_unknown_ns",
            "int64",
            "time that the other ranks waited because of this rank's delays of unknown cause",
            unit="ns",
        ),
    ),
    key=("attempt", "step", "rank"),
)

WAITING_CAUSES: Final = Table(
    "waiting_causes",
    "How often each cause took the longest for a rank in its collectives, if it took longer than the clock "
    "error.",
    (
        _of(schema.COLLECTIVES, "rank"),
        Column("cause", "string", "cause, as defined in the answer arrivals", values=CAUSES),
        Column("collectives", "int64", "collectives and messages in which this cause took the longest"),
        Column(
            "of_collectives",
            "int64",
            "all collectives and messages of the rank whose arrivals can be compared",
        ),
        Column(
            "time_ns",
            "int64",
            "sum of waiting_ns, launch_ns or transfer_ns, depending on the cause, over the collectives and "
            "messages of this row",
            unit="ns",
        ),
    ),
    key=("rank", "cause"),
)

LATE_COLLECTIVES: Final = Table(
    "late_collectives",
    "The collectives and messages with the largest arrival skew.",
    (
        *(_of(schema.COLLECTIVES, name) for name in ("attempt", "step", "op", "purpose", "pg", "group_ranks")),
        Column("pg_seq", "int64", "issue order within the group; null for messages", True),
        Column("members", "int64", "number of ranks whose records were found"),
        Column(
            "spread_ns",
            "int64",
            "arrival skew: time from the first arrival to the last arrival",
            unit="ns",
        ),
        Column("error_ns", "int64", "error bound of spread_ns", unit="ns"),
        Column("last_rank", "int32", "rank that arrived last; null if not all ranks were recorded", True),
        Column(
            "certain",
            "bool",
            "true if the last rank arrived after all other ranks by more than the clock error",
        ),
        Column("pid", "int32", "process id of the rank that arrived last"),
        Column("seq", "int64", "position of the operation in the issue order of this process"),
        Column("lead_ns", "int64", "time in which only the last rank was missing", True, "ns"),
        Column(
            "others_waited_ns",
            "int64",
            "exposed time of the other ranks while only the last rank was missing; mean over these ranks",
            True,
            "ns",
        ),
        Column("waiting_ns", "int64", "longest time from a rank's arrival to the last arrival", True, "ns"),
        Column(
            "launch_ns",
            "int64",
            "time from the last arrival until all devices had begun the operation",
            True,
            "ns",
        ),
        Column(
            "transfer_ns",
            "int64",
            "time from the end of launch_ns until the last of the ranks had its result. Ranks whose time of "
            "the result is not known are left out",
            True,
            "ns",
        ),
        Column(
            "cause",
            "string",
            "value of cause in the answer arrivals for the rank with the longest waiting_ns, launch_ns or "
            "transfer_ns",
            True,
            values=CAUSES,
        ),
        Column(
            "begin_ns",
            "int64",
            "time of the first arrival, on the clock of rank 0's host",
            unit="ns",
        ),
        Column(
            "end_ns",
            "int64",
            "last known end of the operation, on the clock of rank 0's host",
            unit="ns",
        ),
    ),
)
_OF_LOG: Final = (
    Column(
        "rank",
        "int32",
        "global rank of the record; for a line without a record, the rank of the process that printed the "
        "line",
        True,
    ),
    Column(
        "pg",
        "string",
        "process group of the record; for a line without a record, the process group of its communicator",
        True,
    ),
)

ALIGNED: Final = Table(
    "aligned",
    "Records and NCCL lines side by side, in the order of the log.",
    (
        *_OF_LOG,
        Column(
            "position",
            "int64",
            "position of the row among the rows of its rank and group, counted from 0",
        ),
        *(_of(schema.MATCHES, name) for name in ("state", "op", "attempt", "record_pid", "seq", "part", "parts")),
        *(_of(schema.COLLECTIVES, name, nullable=True) for name in ("step", "purpose")),
        Column("record_dtype", "string", "element type of the record", True),
        *(_of(schema.MATCHES, name) for name in ("record_bytes", "line_bytes")),
        Column("line_dtype", "string", "element type, as printed in the line", True),
        Column("elements", "int64", "number of elements (count), as printed in the line", True, "elements"),
        Column("opcount", "int64", "opCount, as printed in the line", True),
        *(_of(schema.MATCHES, name) for name in ("comm", "file", "line", "reason")),
    ),
)

ALIGNMENT_COUNTS: Final = Table(
    "alignment_counts",
    "The number of records and lines in each state.",
    (
        *_OF_LOG,
        *(_of(schema.MATCHES, name) for name in ("op", "state")),
        Column("lines", "int64", "number of rows of the alignment with these values"),
    ),
    key=("rank", "pg", "op", "state"),
)

DIVERGENCES: Final = Table(
    "divergences",
    "Where the records and the log lines of each rank and group first differ.",
    (
        *_OF_LOG,
        Column("matched_before", "int64", "number of matched pairs before the first difference"),
        *(_of(schema.MATCHES, name) for name in ("state", "op", "seq", "file", "line", "reason")),
    ),
    key=("rank", "pg"),
)

TOPOLOGY: Final = Table(
    "topology",
    "The rings and trees of the communicators in an NCCL log, as pairs of ranks that a channel connects.",
    (
        Column(
            "communicator",
            "string",
            "commId of the communicator; if the log has no commId, the address of the communicator and its "
            "process",
        ),
        Column("pg", "string", "process group of the communicator", True),
        Column("kind", "string", "whether the pair belongs to a ring or a tree", values=("ring", "tree")),
        Column("channel", "int32", "number of the channel; for a tree, the number of the tree"),
        Column(
            "from_rank",
            "int32",
            "rank within the communicator: the sender in a ring, or the parent in a tree",
        ),
        Column(
            "to_rank",
            "int32",
            "rank within the communicator: the receiver in a ring, or the child in a tree",
        ),
    ),
)
# fmt: on

DETAILED_ANSWERS: Final[dict[str, Table]] = {
    "matrix": MATRIX,
    "owners": OWNERS,
    "one_offs": ONE_OFFS,
    "untagged": UNTAGGED,
    "algorithms": ALGORITHMS,
    "bucket_flushes": BUCKET_FLUSHES,
    "bucket_means": BUCKET_MEANS,
    "bucket_steps": BUCKET_STEPS,
    "buckets_per_step": BUCKETS_PER_STEP,
    "bucket_parameters": BUCKET_PARAMETERS,
    "bucket_operations": BUCKET_OPERATIONS,
    "lateness": LATENESS,
    "lateness_of_steps": LATENESS_OF_STEPS,
    "waiting_causes": WAITING_CAUSES,
    "late_collectives": LATE_COLLECTIVES,
    "aligned": ALIGNED,
    "alignment_counts": ALIGNMENT_COUNTS,
    "divergences": DIVERGENCES,
    "topology": TOPOLOGY,
}
