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
    "Bytes that each rank sends to each other rank.",
    (
        Column("sender", "int32", "global rank that sends"),
        Column("receiver", "int32", "global rank that receives"),
        Column("wire_bytes", "float64", "wire, modelled as issued; bytes of sends as recorded", unit="bytes"),
        Column("message_bytes", "int64", "the part of wire_bytes that sends have, as recorded", unit="bytes"),
        Column(
            "executed_wire_bytes",
            "float64",
            "wire of executed operations, modelled; null: not known",
            True,
            "bytes",
        ),
        between_pairs("wire_bytes"),
    ),
    key=("sender", "receiver"),
)

OWNERS: Final = Table(
    "owners",
    "Reduces to one owner: what each rank owns and receives.",
    (
        Column("rank", "int32", "global rank"),
        Column("collectives", "int64", "reduce operations to this rank"),
        Column("payload_bytes", "int64", "payload: S of nccl-tests, of these operations", unit="bytes"),
        padding("int64"),
        Column("received_bytes", "int64", "wire, modelled: bytes that the other ranks send to this rank", unit="bytes"),
        between_pairs("received_bytes", "from ranks on other hosts"),
    ),
    key=("rank",),
)

ONE_OFFS: Final = Table(
    "one_offs",
    "One-offs: what single training steps sent beyond the recurring traffic. They are in no value per step.",
    (
        *(_of(schema.COLLECTIVES, name) for name in ("attempt", "step", "purpose", "op", "intended_op")),
        *(_of(schema.COLLECTIVES, name) for name in ("group_desc", "group_ranks", "group_size")),
        Column("collectives", "int64", "collectives in addition to those of each step; a message counts at its send"),
        Column("payload_bytes", "int64", "payload: S of nccl-tests, in addition to that of each step", unit="bytes"),
        padding(),
        Column("wire_bytes", "float64", "wire, modelled as in traffic, in addition to that of each step", unit="bytes"),
        Column(
            "executed_wire_bytes",
            "float64",
            "wire of executed operations, modelled; null: not known",
            True,
            "bytes",
        ),
        between_hosts(),
    ),
    key=("attempt", "step", "purpose", "op", "intended_op", "group_desc", "group_ranks"),
)

UNTAGGED: Final = Table(
    "untagged",
    "Call sites of collectives without a purpose, in order of payload, largest first.",
    (
        *(_of(schema.COLLECTIVES, name) for name in ("phase", "op", "api", "call_site")),
        Column("collectives", "int64", "deduplicated collectives; a message counts at its send"),
        Column("records", "int64", "their records on all ranks"),
        Column("payload_bytes", "int64", "payload: S of nccl-tests, summed over the collectives", unit="bytes"),
        padding("int64"),
        Column("wire_bytes", "float64", "wire, modelled as issued, as defined in traffic", unit="bytes"),
        between_hosts(),
    ),
)

ALGORITHMS: Final = Table(
    "algorithms",
    "NCCL's choices by operation, group and size, from a log that is aligned with the records.",
    (
        *(_of(schema.COLLECTIVES, name) for name in ("op", "group_desc", "group_ranks", "group_size")),
        Column("payload_bytes", "int64", "payload: S of nccl-tests", unit="bytes"),
        Column("algorithm", "string", "as NCCL names it: TREE, RING, COLLNET_DIRECT, COLLNET_CHAIN, NVLS, NVLS_TREE, PAT"),
        Column("protocol", "string", "as NCCL names it: LL, LL128, SIMPLE", True),
        Column(
            "channels",
            "int32",
            "channels of the kernel (Inspector), or channels that NCCL may use (NCCL log)",
            True,
        ),
        Column("collectives", "int64", "collectives of which at least one record has this choice"),
        Column("records", "int64", "records with this choice: most NCCL versions print the choice on one rank"),
        Column("time_ns", "int64", "median time of these records on the device, with waits for stragglers", True, "ns"),
        Column("algbw_bytes_per_s", "float64", "algorithm bandwidth (nccl-tests) of that time", True, "bytes/s"),
        Column("busbw_bytes_per_s", "float64", "bus bandwidth (nccl-tests) of that time", True, "bytes/s"),
    ),
    key=("op", "group_desc", "group_ranks", "payload_bytes", "algorithm", "protocol", "channels"),
)

_BUCKET: Final = tuple(_of(schema.BUCKETS, name) for name in ("attempt", "step", "micro_step", "bucket"))
_GROUP: Final = Column(
    "group_ranks", "string", "ranks that reduce the bucket together; null if no record has its number", True
)
_EXECUTED: Final = Column(
    "executed_wire_bytes", "float64", "modelled wire bytes of the executed operations; null: not known", True, "bytes"
)
_REDUCED: Final = (
    Column("op", "string", "operations that reduced the bucket, joined by ', '; null if none is recorded", True),
    Column("intended_op", "string", "intended operations, if the runtime issued others", True),
)

BUCKET_FLUSHES: Final = Table(
    "bucket_flushes",
    "The gradient buckets, one row for all ranks that reduce it together.",
    (
        *_BUCKET,
        _GROUP,
        *(_of(schema.BUCKETS, name) for name in ("numel", "bytes", "capacity")),
        Column("fill", "float64", "numel over capacity; above 1 for a gradient larger than a bucket", True),
        *(_of(schema.BUCKETS, name) for name in ("dtype", "owners", "parameters", "flush_reason")),
        Column("ranks", "int64", "ranks that flushed the bucket"),
        Column("alike", "bool", "true if the bucket has equal elements and parameters on all these ranks"),
        _of(schema.BUCKETS, "time_ns"),
        *_REDUCED,
        Column("collectives", "int64", "deduplicated collectives that reduced it; null: only sums were recorded", True),
        Column("payload_bytes", "int64", "payload (S) of these operations; null if collectives is null", True, "bytes"),
        padding("int64"),
        Column("wire_bytes", "float64", "wire, modelled as issued: mean bytes that a rank sends for it", True, "bytes"),
        _EXECUTED,
        between_hosts(),
        Column(
            "duration_ns",
            "int64",
            "time from its first collective to its last known end, mean over ranks",
            True,
            "ns",
        ),
        Column("exposed_ns", "int64", "sum of the known exposed_ns of its collectives, mean over ranks", True, "ns"),
    ),
    key=("attempt", "step", "micro_step", "bucket", "group_ranks"),
)

BUCKET_STEPS: Final = Table(
    "bucket_steps",
    "The gradient buckets of each step, summed by the reason of the flush.",
    (
        Column("step", "int32", "training step; -1 before the first"),
        _of(schema.BUCKETS, "flush_reason"),
        Column("buckets", "int64", "buckets"),
        Column("bytes", "int64", "bytes of the buckets in their communication type", unit="bytes"),
        Column("collectives", "int64", "deduplicated collectives that reduced them; null: only sums were recorded", True),
        Column("payload_bytes", "int64", "payload (S) of these operations; null if collectives is null", True, "bytes"),
        padding("int64"),
        Column("wire_bytes", "float64", "wire, modelled as issued: mean bytes that a rank sends for them", True, "bytes"),
        _EXECUTED,
        between_hosts(),
        Column("unlike", "int64", "buckets whose elements or parameters differ between the ranks of a group"),
        Column("first_micro_step", "int32", "lowest micro-batch of the buckets"),
        Column("last_micro_step", "int32", "highest micro-batch of the buckets"),
    ),
    key=("step", "flush_reason"),
)

BUCKETS_PER_STEP: Final = Table(
    "buckets_per_step",
    "The gradient buckets of a training step by the reason of the flush, by the rule for values per step.",
    (
        _of(schema.BUCKETS, "flush_reason"),
        Column("every", "int64", "k if every k-th step has these buckets; null: irregular", True),
        Column("buckets", "float64", "buckets of a step"),
        Column("bytes", "float64", "bytes of the buckets in their communication type", unit="bytes"),
        Column("collectives", "float64", "deduplicated collectives that reduced them; null: only sums were recorded", True),
        Column("payload_bytes", "float64", "payload (S) of these operations; null if collectives is null", True, "bytes"),
        padding(),
        Column("wire_bytes", "float64", "wire, modelled as issued: mean bytes that a rank sends for them", True, "bytes"),
        _EXECUTED,
        between_hosts(),
    ),
    key=("flush_reason",),
)

BUCKET_MEANS: Final = Table(
    "bucket_means",
    "The buckets of a mean training step.",
    (
        *_BUCKET[2:],
        _GROUP,
        Column("steps", "int64", "training steps in which the bucket has these contents"),
        Column("numel", "float64", "elements, mean", unit="elements"),
        Column("bytes", "float64", "bytes of the bucket in its communication type, mean", unit="bytes"),
        Column("fill", "float64", "numel over capacity, mean", True),
        Column("lowest_fill", "float64", "the lowest fill", True),
        *(_of(schema.BUCKETS, name) for name in ("owners", "parameters")),
        Column("flush_reason", "string", "reason of the flush, joined by ', ' if steps differ", True),
        Column("steady", "bool", "true if the contents are equal in all steps with a bucket of this number"),
        *_REDUCED,
        Column("collectives", "float64", "collectives that reduced it, mean; null: only sums were recorded", True),
        Column("payload_bytes", "float64", "payload: S of nccl-tests, of these, mean; null: as collectives", True, "bytes"),
        padding(),
        Column("wire_bytes", "float64", "wire, modelled as issued: mean bytes that a rank sends for it", True, "bytes"),
        _EXECUTED,
        between_hosts(),
        Column("duration_ns", "int64", "duration_ns of bucket_flushes, median without the first step", True, "ns"),
        Column("exposed_ns", "int64", "exposed_ns of bucket_flushes, median without the first step", True, "ns"),
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
            "its position in the bucket; null if the sizes do not add up",
            True,
            "elements",
        ),
    ),
)

BUCKET_OPERATIONS: Final = Table(
    "bucket_operations",
    "The collectives that reduced one bucket, on the lowest rank that issued any, in order of issue.",
    (
        *(_of(schema.COLLECTIVES, name) for name in ("rank", "pid", "seq", "op", "intended_op", "owner", "dtype")),
        *(_of(schema.COLLECTIVES, name) for name in ("reduce_op", "numel", "payload_bytes")),
        *(_of(schema.COLLECTIVES, name) for name in ("padding_bytes", "pg", "group_ranks", "module")),
        Column("first_element", "int64", "its position in the bucket; null if the sizes do not add up", True, "elements"),
        _of(schema.COLLECTIVES, "issue_ns"),
        Column("duration_ns", "int64", "time from issue_ns to the last known end on this rank", unit="ns"),
        _of(schema.COLLECTIVES, "exposed_ns"),
    ),
    key=("rank", "pid", "seq"),
)
LATENESS: Final = Table(
    "lateness",
    "Lateness by rank: quantiles over the comparable collectives and messages.",
    (
        _of(schema.COLLECTIVES, "rank"),
        Column("collectives", "int64", "collectives and messages of several recorded ranks on comparable clocks"),
        Column("p5_ns", "int64", "5th percentile of the lateness", unit="ns"),
        Column("p25_ns", "int64", "25th percentile", unit="ns"),
        Column("median_ns", "int64", "median", unit="ns"),
        Column("p75_ns", "int64", "75th percentile", unit="ns"),
        Column("p95_ns", "int64", "95th percentile", unit="ns"),
        Column("highest_ns", "int64", "maximum", unit="ns"),
        Column("error_ns", "int64", "error bound of a lateness, median; 0 on one clock", unit="ns"),
    ),
    key=("rank",),
)

LATENESS_OF_STEPS: Final = Table(
    "lateness_of_steps",
    "Lateness by rank and training step; by rank and range of steps if there are more than 250.",
    (
        _of(schema.COLLECTIVES, "rank"),
        _of(schema.COLLECTIVES, "attempt"),
        Column("step", "int32", "training step, the first of the range"),
        Column("steps", "int64", "training steps of the range"),
        Column("is_warm", "bool", "true if the verdict uses the step: it is not the first of its attempt"),
        Column("lateness_ns", "int64", "largest lateness in the step, without messages; mean over the range", True, "ns"),
        Column("collectives", "int64", "as defined in stragglers"),
        Column("last", "int64", "as defined in stragglers"),
        Column("expected_last", "float64", "as defined in stragglers"),
        Column(
            "others_waited_own_ns",
            "int64",
            "wait of the others that its own delay caused, as the verdict counts",
            unit="ns",
        ),
        Column("others_waited_inherited_ns", "int64", "wait of the others that its inherited delay caused", unit="ns"),
        Column(
            "others_waited_unknown_ns",
            "int64",
            "wait of the others that its delays of unknown cause caused",
            unit="ns",
        ),
    ),
    key=("attempt", "step", "rank"),
)

WAITING_CAUSES: Final = Table(
    "waiting_causes",
    "What took longest for each rank in its collectives, if beyond the clock error.",
    (
        _of(schema.COLLECTIVES, "rank"),
        Column("cause", "string", "cause, as defined in arrivals", values=CAUSES),
        Column("collectives", "int64", "collectives and messages in which this cause took longest"),
        Column("of_collectives", "int64", "comparable collectives and messages"),
        Column("time_ns", "int64", "sum of waiting_ns, launch_ns or transfer_ns of these operations", unit="ns"),
    ),
    key=("rank", "cause"),
)

LATE_COLLECTIVES: Final = Table(
    "late_collectives",
    "The collectives and messages with the largest arrival skew.",
    (
        *(_of(schema.COLLECTIVES, name) for name in ("attempt", "step", "op", "purpose", "pg", "group_ranks")),
        Column("pg_seq", "int64", "issue order within the group; null for messages", True),
        Column("members", "int64", "ranks whose records were found"),
        Column("spread_ns", "int64", "arrival skew: from the first arrival to the last", unit="ns"),
        Column("error_ns", "int64", "error bound of spread_ns", unit="ns"),
        Column("last_rank", "int32", "last rank; null if not all ranks were recorded", True),
        Column("certain", "bool", "true if the last rank was last by more than the error"),
        Column("pid", "int32", "process id of the last record"),
        Column("seq", "int64", "issue order of the last record within its process"),
        Column("lead_ns", "int64", "time in which only the last rank was missing", True, "ns"),
        Column("others_waited_ns", "int64", "mean exposed time of the others while only it was missing", True, "ns"),
        Column("waiting_ns", "int64", "the longest wait of a rank for the last", True, "ns"),
        Column("launch_ns", "int64", "time from the last arrival until all devices had begun", True, "ns"),
        Column("transfer_ns", "int64", "time from the end of launch_ns to the last result, if known", True, "ns"),
        Column("cause", "string", "what took longest, for the rank that took longest", True, values=CAUSES),
        Column("begin_ns", "int64", "the first arrival, on the clock of arrivals", unit="ns"),
        Column("end_ns", "int64", "the last known end, on the clock of arrivals", unit="ns"),
    ),
)
_OF_LOG: Final = (
    Column("rank", "int32", "global rank, of the record or of the process of the line", True),
    Column("pg", "string", "process group, of the record or of the communicator of the line", True),
)

ALIGNED: Final = Table(
    "aligned",
    "Records and NCCL lines side by side, in the order of the log.",
    (
        *_OF_LOG,
        Column("position", "int64", "position within the rank and group, from 0"),
        *(_of(schema.MATCHES, name) for name in ("state", "op", "attempt", "record_pid", "seq", "part", "parts")),
        *(_of(schema.COLLECTIVES, name, nullable=True) for name in ("step", "purpose")),
        Column("record_dtype", "string", "element type of the record", True),
        *(_of(schema.MATCHES, name) for name in ("record_bytes", "line_bytes")),
        Column("line_dtype", "string", "element type as printed", True),
        Column("elements", "int64", "count as printed", True, "elements"),
        Column("opcount", "int64", "opCount as printed", True),
        *(_of(schema.MATCHES, name) for name in ("comm", "file", "line", "reason")),
    ),
)

ALIGNMENT_COUNTS: Final = Table(
    "alignment_counts",
    "Records and lines by state.",
    (
        *_OF_LOG,
        *(_of(schema.MATCHES, name) for name in ("op", "state")),
        Column("lines", "int64", "rows of matches"),
    ),
    key=("rank", "pg", "op", "state"),
)

DIVERGENCES: Final = Table(
    "divergences",
    "The first divergence of records and lines of each rank and group.",
    (
        *_OF_LOG,
        Column("matched_before", "int64", "matched pairs before the divergence"),
        *(_of(schema.MATCHES, name) for name in ("state", "op", "seq", "file", "line", "reason")),
    ),
    key=("rank", "pg"),
)

TOPOLOGY: Final = Table(
    "topology",
    "The rings and trees of the communicators of an NCCL log: pairs of ranks that a channel connects.",
    (
        Column("communicator", "string", "commId of the communicator; without a commId, its address and process"),
        Column("pg", "string", "process group of the communicator", True),
        Column("kind", "string", "ring or tree", values=("ring", "tree")),
        Column("channel", "int32", "channel, or number of the tree"),
        Column("from_rank", "int32", "rank within the communicator: the sender in a ring, the parent in a tree"),
        Column("to_rank", "int32", "rank within the communicator: the receiver in a ring, the child in a tree"),
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
