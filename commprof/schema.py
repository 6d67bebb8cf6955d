"""Every table that commprof writes or reads, declared once.

From these declarations come the binary record of the recorder, the Arrow schemas and Parquet files, the header of
each CSV file, the data dictionary of an export and ``docs/schema.md``. Units are in the names: integers in bytes and
nanoseconds from end to end. ``*_ns`` are CLOCK_MONOTONIC (``time.perf_counter_ns``), one clock for all ranks of a host.

A column is declared here, filled by the recorder or an importer or left null, and never renamed. Standard library only.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from commprof.errors import TraceError

# What a newer version adds is nullable, and says so (``Column.since``): a trace of an older version opens with null there.
SCHEMA_VERSION: Final = 2


class Op(StrEnum):
    """A collective or a point-to-point operation, spelled as in torch.distributed."""

    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"
    GATHER = "gather"
    SCATTER = "scatter"
    SEND = "send"
    RECV = "recv"
    BARRIER = "barrier"


class Phase(StrEnum):
    """What the training was doing when the collective was issued."""

    INIT = "init"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    CHECKPOINT = "checkpoint"
    OTHER = "other"
    EVALUATION = "evaluation"


def after_end(step: int) -> int:
    """The step of a record between the last optimizer step of ``step`` and what the program does then.

    If that is the next step, the record is of this one, which the program has not ended; else of none.
    """
    return -step - 2


class Purpose(StrEnum):
    """Why a collective was issued, as its runtime says. ``docs/frameworks.md`` says what each stands for."""

    PARAMETER_BROADCAST = "parameter_broadcast"
    PARAMETER_GATHER = "parameter_gather"
    GRADIENT_REDUCE = "gradient_reduce"
    GRADIENT_NORM = "gradient_norm"
    OVERFLOW_CHECK = "overflow_check"
    TRACE_CHECK = "trace_check"
    ACTIVATION = "activation"
    PIPELINE = "pipeline"
    CHECKPOINT = "checkpoint"
    METRIC = "metric"
    OTHER = "other"
    BUFFER_BROADCAST = "buffer_broadcast"
    UNUSED_PARAMETERS = "unused_parameters"
    BUCKET_REBUILD = "bucket_rebuild"
    CONTROL = "control"
    OBJECT = "object"
    INPUT = "input"
    EVALUATION = "evaluation"
    PARAMETER_ACCESS = "parameter_access"


class Status(StrEnum):
    """How the call that issued the collective ended."""

    OK = "ok"  # the call returned
    RAISED = "raised"  # the call raised
    INCOMPLETE = "incomplete"  # the process ended, or the file was read, before the call returned


class Layer(StrEnum):
    """Which mechanism saw the collective."""

    PROCESS_GROUP = "process_group"  # methods of torch's ProcessGroup class
    BACKEND = "backend"  # methods of torch's Backend class
    FUNCTIONAL = "functional"  # kernels of _c10d_functional
    C10D = "c10d"  # kernels of c10d
    FRAMEWORK = "framework"  # an operator of a framework's own
    IMPORTED = "imported"  # another tool's trace, which commprof read


# Wrappers of models, as the table ``wrappers`` names them.
WRAPPERS: Final[tuple[str, ...]] = (
    "ddp",
    "fsdp",
    "fully_shard",
    "tensor_parallel",
    "zero_redundancy_optimizer",
)
# Passes of a wrapped model, in their order: forward whose gradients are to be reduced, forward without, forward without
# gradients, backward that reduces gradients, backward that does not.
PASSES: Final[tuple[str, ...]] = ("F", "f", "e", "B", "b")
PASSES_UNKNOWN: Final = "?"

# The binary record holds positions in these, so new members go to the end.
OPS: Final[tuple[str, ...]] = tuple(Op)
PHASES: Final[tuple[str, ...]] = tuple(Phase)
PURPOSES: Final[tuple[str, ...]] = tuple(Purpose)
STATUSES: Final[tuple[str, ...]] = tuple(Status)
LAYERS: Final[tuple[str, ...]] = tuple(Layer)


# How modules are partitioned whose tensors several ranks share. Those of the last two have complete parameters, and work on
# shards of sequences.
CUTS: Final[tuple[str, ...]] = ("column", "column_gathered", "row", "vocabulary", "sequence", "split")


class Source(StrEnum):
    """The place of a ``collectives`` column in the binary trace."""

    RECORD = "record"  # in the record itself
    SIGNATURE = "signature"  # interned: equal in all calls with the same tensors, group and arguments
    TAG = "tag"  # interned: stated by the runtime
    GROUP = "group"  # in the groups table, by pg
    PROCESS = "process"  # in the name and header of the rank's file
    DERIVED = "derived"  # computed from others when the trace is finalised


@dataclass(frozen=True, slots=True)
class Column:
    """One column of one table.

    ``type`` is one of ``int8`` ... ``int64``, ``float64``, ``bool``, ``string``. ``values`` lists a closed set of strings.
    ``since`` is the schema version that added it: a trace of an older version has null there.
    """

    name: str
    type: str
    doc: str
    nullable: bool = False
    unit: str = ""
    values: tuple[str, ...] = ()
    source: Source | None = None
    since: int = 1


@dataclass(frozen=True, slots=True)
class Table:
    """One table: its columns in order, and the columns that identify a row."""

    name: str
    doc: str
    columns: tuple[Column, ...]
    key: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The column names in order."""
        return tuple(column.name for column in self.columns)

    def column(self, name: str) -> Column:
        """The column called ``name``; KeyError when the table has none."""
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(f"table {self.name!r} has no column {name!r}; it has: {', '.join(self.names)}")


_R, _S, _T, _G, _P, _D = (
    Source.RECORD,
    Source.SIGNATURE,
    Source.TAG,
    Source.GROUP,
    Source.PROCESS,
    Source.DERIVED,
)

# One column, one line.
# fmt: off
COLLECTIVES: Final = Table(
    "collectives",
    "One row per collective or point-to-point operation that a rank handed to torch.distributed.",
    (
        Column("rank", "int32", "global rank", source=_P),
        Column("attempt", "int32", "restart of the job, counted from 0 (elastic launchers reuse rank numbers)", source=_P),
        Column("pid", "int32", "process id", source=_P),
        Column("seq", "int64", "issue order within the process, counted from 0", source=_D),
        Column("step", "int32", "training step, which begins when the previous step ends; -1 outside all steps: before the first step, in an evaluation or a checkpoint, after the last step", source=_R),
        Column("after_step", "int32", "if the operation is outside all steps: the last training step before it", True, source=_D),
        Column("micro_step", "int32", "micro-batch within the step, counted from 0", source=_R),
        Column("phase", "string", "what the training was doing", values=PHASES, source=_R),
        Column("op", "string", "the operation that was issued", values=OPS, source=_S),
        Column("intended_op", "string", "the operation that the runtime intended, if it issued a different one", True, values=OPS, source=_T),
        Column("api", "string", "outermost torch.distributed function of the call", True, source=_S),
        Column("backend_method", "string", "method of torch's ProcessGroup that was called", source=_S),
        Column("backend", "string", "backend of the group for the tensor's device (gloo, nccl, ...)", True, source=_S),
        Column("device", "string", "device type and index of the tensors (cpu, cuda:0)", True, source=_S),
        Column("reduce_op", "string", "reduction (SUM, AVG, MAX, ...)", True, source=_S),
        Column("dtype", "string", "element type of the first tensor (float32, bfloat16, ...)", True, source=_S),
        Column("num_tensors", "int32", "number of input tensors of the call, or of output tensors if it has no inputs", source=_S),
        Column("sizes", "string", "shapes of the tensors: 4x16; several shapes are joined by ';', and outputs follow '->'", True, source=_S),
        Column("numel", "int64", "number of elements that payload_bytes counts", unit="elements", source=_S),
        Column("input_bytes", "int64", "bytes that this rank contributes; 0 if the rank only receives", unit="bytes", source=_S),
        Column("output_bytes", "int64", "bytes of this rank's output buffers", unit="bytes", source=_S),
        Column("payload_bytes", "int64", "S of nccl-tests: for an all_gather, the total output; for a reduce_scatter or all_to_all, the total input; for a gather or scatter, the root's buffer; for a send or recv, the message; for other operations, the whole buffer", unit="bytes", source=_S),
        Column("input_splits", "string", "bytes of this rank's input that go to each rank of the group, in the group's order, joined by ','; null if these sizes are equal, or if the operation does not divide its input among the ranks; ? if the sizes are not known", True, source=_S, since=2),
        Column("output_splits", "string", "bytes of this rank's output that come from each rank of the group, in the group's order, joined by ','; null if these sizes are equal, or if the output is not divided among the ranks; ? if the sizes are not known", True, source=_S, since=2),
        Column("pg", "string", "name of the process group, unique in the job", source=_S),
        Column("pg_seq", "int64", "issue order within the group, counted from 0; collectives and point-to-point operations are counted separately; equal on all ranks of the group; a call that raised is not counted: its pg_seq is -1 - n, and n is the pg_seq of the next call", source=_R),
        Column("group_desc", "string", "torch's description of the group", True, source=_G),
        Column("group_ranks", "string", "global ranks of the group: 0-3 or 0,2", source=_G),
        Column("group_size", "int32", "ranks in the group", source=_G),
        Column("group_rank", "int32", "this rank's number within the group", source=_G),
        Column("peer", "int32", "global rank of the root, the destination or the source; -1 for no peer or any peer", source=_S),
        Column("is_async", "bool", "whether the caller requested a handle", source=_S),
        Column("is_p2p", "bool", "whether the operation is a send or a recv", source=_S),
        Column("coalesce_id", "int32", "number shared by all calls between one start and the matching end of coalescing", True, source=_R),
        Column("captured", "bool", "whether the call was issued during the capture of a CUDA graph", source=_R),
        Column("replays", "int32", "number of replays of the captured graph", True, source=_R),
        Column("purpose", "string", "why the runtime issued the operation, as stated by the runtime", True, values=PURPOSES, source=_T),
        Column("bucket", "int32", "gradient bucket within the step", True, source=_T),
        Column("bucket_bytes", "int64", "bytes of the whole gradient bucket", True, unit="bytes", source=_T),
        Column("padding_bytes", "int64", "bytes of padding within payload_bytes, as stated by the runtime", True, unit="bytes", source=_T, since=2),
        Column("owner", "int32", "global rank that keeps the result, as stated by the runtime", True, source=_T),
        Column("parameters", "string", "names of the parameters that are sent, joined by ','", True, source=_T),
        Column("module", "string", "qualified name of the module for which the operation is issued", True, source=_T),
        Column("call_site", "string", "first stack frame outside torch.distributed, as file:line function", True, source=_R),
        Column("thread", "string", "name of the issuing thread", True, source=_R),
        Column("layer", "string", "mechanism that recorded the operation", values=LAYERS, source=_R),
        Column("status", "string", "how the call ended", values=STATUSES, source=_R),
        Column("issue_ns", "int64", "when the call began", unit="ns", source=_R),
        Column("return_ns", "int64", "when the call returned", True, unit="ns", source=_R),
        Column("wait_begin_ns", "int64", "when the program began to wait for the result", True, unit="ns", source=_R),
        Column("wait_end_ns", "int64", "when the wait for the result ended", True, unit="ns", source=_R),
        Column("device_begin_ns", "int64", "when the device began the operation; for an asynchronous operation on a GPU, when the operation could begin", True, unit="ns", source=_R),
        Column("device_end_ns", "int64", "when the operation ended, as reported by the device or, for a sample of CPU calls, by the backend; for an asynchronous operation on a GPU, when the waiting stream continued", True, unit="ns", source=_R),
        Column("exposed_ns", "int64", "exposed time, in which the program was blocked on this operation: from issue_ns to wait_end_ns, or from wait_begin_ns to wait_end_ns if the operation is asynchronous; on a GPU, time in which the stream of the program was blocked, measured by events", True, unit="ns", source=_R),
    ),
    key=("rank", "attempt", "pid", "seq"),
)

GROUPS: Final = Table(
    "groups",
    "One row per process group and member rank.",
    (
        Column("rank", "int32", "global rank"),
        Column("attempt", "int32", "restart of the job"),
        Column("pid", "int32", "process id"),
        Column("pg", "string", "name of the process group"),
        Column("group_desc", "string", "torch's description of the group", True),
        Column("group_ranks", "string", "global ranks of the group: 0-3 or 0,2"),
        Column("group_size", "int32", "ranks in the group"),
        Column("group_rank", "int32", "this rank's number within the group"),
        Column("backend", "string", "backends by device: cpu:gloo,cuda:nccl", True),
        Column("unseen", "int64", "number of collectives that the group counted but that have no record", True),
        Column("host", "string", "host name of the rank; traffic between ranks with the same host name stays within the host", True, since=2),
    ),
    key=("rank", "attempt", "pid", "pg"),
)

BUCKETS: Final = Table(
    "buckets",
    "One row per flushed gradient bucket and rank. The rows of a step are written "
    "when the next step begins, so the rows of the last step are missing if a rank is killed.",
    (
        Column("rank", "int32", "global rank"),
        Column("attempt", "int32", "restart of the job"),
        Column("pid", "int32", "process id"),
        Column("step", "int32", "training step"),
        Column("micro_step", "int32", "micro-batch within the step"),
        Column("bucket", "int32", "number of the bucket within the step"),
        Column("numel", "int64", "elements in the bucket", unit="elements"),
        Column("bytes", "int64", "bytes of the bucket in its communication dtype", unit="bytes"),
        Column("capacity", "int64", "largest number of elements of the bucket", True, unit="elements"),
        Column("dtype", "string", "element type in which the bucket is sent"),
        Column("owners", "string", "ranks that own a shard of the bucket, in order", True),
        Column("parameters", "string", "names of the bucket's parameters in order, joined by ','", True),
        Column("flush_reason", "string", "why the bucket was sent: full, end_of_backward, oversized", True),
        Column("time_ns", "int64", "when the bucket was flushed", unit="ns"),
    ),
    key=("rank", "attempt", "pid", "step", "micro_step", "bucket"),
)

STALLS: Final = Table(
    "stalls",
    "One row per interval in which C++ code waited for collectives, such as DistributedDataParallel at the end of a backward "
    "pass. The single waits of C++ code are not recorded, so only bounds of the exposed time are known.",
    (
        Column("rank", "int32", "global rank"),
        Column("attempt", "int32", "restart of the job"),
        Column("pid", "int32", "process id"),
        Column("step", "int32", "training step"),
        Column("place", "string", "what waited: backward (the reducer, at the end of a backward pass), or the name of torch's function"),
        Column("since_ns", "int64", "start of the period whose collectives the program waited for: it waited for the collectives that C++ issued from since_ns to end_ns", unit="ns"),
        Column("begin_ns", "int64", "when the interval began", unit="ns"),
        Column("end_ns", "int64", "when all collectives that the program waited for were complete", unit="ns"),
        Column("exposed_low_ns", "int64", "lower bound of the exposed time: the thread slept for at least this long in the interval; time in which it computed or waited for a processor is not included; 0 if a device waited", unit="ns"),
        Column("exposed_high_ns", "int64", "upper bound of the exposed time: time in which the thread did not run on a processor; if a device waited, the duration of the wait on the device", unit="ns"),
        Column("device_begin_ns", "int64", "when the wait began on the device; null if the thread itself waited", True, "ns"),
        Column("device_end_ns", "int64", "when the wait ended on the device; null if the thread itself waited", True, "ns"),
    ),
    key=("rank", "attempt", "pid", "begin_ns"),
)

PARAMETERS: Final = Table(
    "parameters",
    "One row per parameter of the model. The rows come from the lowest rank that published its parameters.",
    (
        Column("name", "string", "qualified name"),
        Column("shape", "string", "shape: 64x32"),
        Column("dtype", "string", "element type in the model"),
        Column("numel", "int64", "elements", unit="elements"),
        Column("param_group", "int32", "optimizer parameter group, -1 for none", True),
        Column("requires_grad", "bool", "whether the parameter is trained"),
        Column("module", "string", "qualified name of the owning module", True),
        Column("forward_index", "int32", "position in model.named_parameters()", True),
        Column("cut", "string", "how the module is partitioned over the ranks of the model axis; sequence and split: the parameters are complete, and only the sequences are sharded", True, values=CUTS),
        Column("whole_shape", "string", "shape of the complete parameter, if each rank has only a shard", True),
        Column("stages", "string", "numbers of the pipeline stages that have the parameter, joined by ','; a '+' at the end means that these stages keep their copies equal", True),
        Column("owner_types", "string", "class of the owning module and its base classes, joined by ','; several owners are separated by ';'; a class is also listed with its full name if it only shares its name with a torch.nn class, or if the forward of the module is replaced", True),
        Column("ep_size", "int32", "for a parameter of an expert: number of ranks that share the experts of the layer; null for other parameters", True, since=2),
    ),
    key=("name",),
)

EXPERT_LAYERS: Final = Table(
    "expert_layers",
    "One row per mixture-of-experts layer and rank, written when its engine is created. If a layer has several rows, the last one is valid.",
    (
        Column("rank", "int32", "global rank"),
        Column("attempt", "int32", "restart of the job"),
        Column("pid", "int32", "process id"),
        Column("layer", "string", "qualified name of the module"),
        Column("num_experts", "int32", "number of experts of the layer, on all ranks together"),
        Column("ep_size", "int32", "number of ranks that share the experts; each rank has num_experts / ep_size experts"),
        Column("k", "int32", "experts that the gate chooses for each token"),
        Column("capacity_factor", "float64", "slots of an expert for the tokens of a rank, relative to tokens x k / num_experts, in training", True),
        Column("eval_capacity_factor", "float64", "capacity_factor in an evaluation", True),
        Column("min_capacity", "int64", "least number of slots of an expert for the tokens of a rank", True),
        Column("drop_tokens", "bool", "true: tokens beyond the capacity are dropped; false: the capacity is the token count of the fullest expert", True),
        Column("hidden", "int64", "elements of a token", True, unit="elements"),
        Column("expert_ranks", "string", "global ranks that share the experts with this rank, in the order of the group: 0,1"),
    ),
)

EXPERT_LOADS: Final = Table(
    "expert_loads",
    "One row per forward pass of a layer of experts, rank and expert: how many tokens of the rank chose the expert.",
    (
        Column("rank", "int32", "global rank of the tokens"),
        Column("attempt", "int32", "restart of the job"),
        Column("pid", "int32", "process id"),
        Column("step", "int32", "training step; -1 outside all steps"),
        Column("after_step", "int32", "outside all steps: the last training step before the forward pass", True),
        Column("micro_step", "int32", "micro-batch within the step, counted from 0"),
        Column("phase", "string", "what the training was doing; backward if activation checkpointing repeated the forward pass", values=PHASES),
        Column("call", "int32", "number of the forward pass of the layer within this micro-batch and phase, counted from 0"),
        Column("layer", "string", "qualified name of the module"),
        Column("expert", "int32", "number of the expert among all experts of the layer"),
        Column("tokens", "int64", "tokens that chose the expert, including those that were dropped later"),
        Column("dropped", "int64", "how many of these tokens were beyond the capacity"),
        Column("capacity", "int64", "slots of the expert for the tokens of this rank"),
        Column("sent", "int64", "tokens of the rank that the gate saw"),
        Column("time_ns", "int64", "when the layer ran", unit="ns"),
    ),
    key=("rank", "attempt", "pid", "step", "after_step", "micro_step", "phase", "call", "layer", "expert"),
)

WRAPPED: Final = Table(
    "wrappers",
    "Arguments of model wrappers (DistributedDataParallel, FSDP, tensor parallelism, ZeroRedundancyOptimizer). If several rows have the same number, the last one is valid.",
    (
        Column("rank", "int32", "global rank"),
        Column("attempt", "int32", "restart of the job"),
        Column("pid", "int32", "process id"),
        Column("number", "int32", "number of the wrapper within its process, in order of creation"),
        Column("wrapper", "string", "which wrapper it is", values=WRAPPERS),
        Column("unit", "string", "qualified name, within the model, of the wrapped module"),
        Column("group_ranks", "string", "ranks that reduce or shard together"),
        Column("replica_ranks", "string", "ranks that hold the same shard", True),
        Column("arguments", "string", "arguments of the wrapper, including default values, as JSON"),
        Column("parameters", "string", "for each parameter its name, shape and element type, and whether it is trained, as JSON"),
        Column("buffers", "string", "the same of its buffers, as JSON"),
        Column("step", "int32", "training step in which the wrapper was created or changed; -1 before the first step"),
        Column("time_ns", "int64", "when the wrapper was created or changed", unit="ns"),
    ),
    key=("rank", "attempt", "pid", "number", "time_ns"),
)

WRAPPER_PASSES: Final = Table(
    "wrapper_passes",
    "Passes that a wrapped model ran in a step. A step has a row only if its passes differ from those of the step before.",
    (
        Column("rank", "int32", "global rank"),
        Column("attempt", "int32", "restart of the job"),
        Column("pid", "int32", "process id"),
        Column("number", "int32", "number of the wrapper within its process"),
        Column("step", "int32", "first step that ran these passes; -1 before the first step"),
        Column("passes", "string", "one letter for each pass, in order. F: forward pass whose gradients are to be reduced. f: forward pass whose gradients are not to be reduced. e: forward pass without gradients. B: backward pass that reduces gradients. b: backward pass that does not reduce gradients. ?: not known. docs/verify.md explains the letters of FSDP, tensor parallelism and ZeroRedundancyOptimizer"),
    ),
    key=("rank", "attempt", "pid", "number", "step"),
)

STEPS: Final = Table(
    "steps",
    "One row per training step and rank.",
    (
        Column("rank", "int32", "global rank"),
        Column("attempt", "int32", "restart of the job"),
        Column("pid", "int32", "process id"),
        Column("step", "int32", "training step"),
        Column("begin_ns", "int64", "when the step began: at the end of the previous step, or at the end of the evaluation or checkpoint that followed the previous step", unit="ns"),
        Column("end_ns", "int64", "when the last optimizer step of the training step ended; if the program marks the steps, when the next step began", True, unit="ns"),
        Column("outside_ns", "int64", "time of evaluations and checkpoints between begin_ns and end_ns; this time is not part of the step", True, unit="ns"),
        Column("micro_steps", "int32", "micro-batches in the step"),
        Column("loss", "float64", "metric loss (last value in the step)", True),
        Column("grad_norm", "float64", "metric grad_norm (last value in the step)", True),
        Column("loss_scale", "float64", "metric loss_scale (last value in the step)", True),
        Column("samples", "float64", "metric samples (sum over the step)", True),
        Column("rss_bytes", "int64", "resident memory of the process when the step ended", True, unit="bytes"),
        Column("device_bytes", "int64", "device memory allocated when the step ended", True, unit="bytes"),
        Column("cpu_ns", "int64", "CPU time of the process in the step, all threads", True, unit="ns"),
    ),
    key=("rank", "attempt", "pid", "step"),
)

OUTSIDE_STEPS: Final = Table(
    "outside_steps",
    "Time outside the training steps. Each rank has one row for each evaluation, one for each checkpoint, and one for the rest of the run after the last step.",
    (
        Column("rank", "int32", "global rank"),
        Column("attempt", "int32", "restart of the job"),
        Column("pid", "int32", "process id"),
        Column("phase", "string", "evaluation, checkpoint, or other (the rest of the run after the last step)", values=PHASES),
        Column("after_step", "int32", "the last training step before this interval", True),
        Column("begin_ns", "int64", "when the interval began: at the end of the step, evaluation or checkpoint before it", unit="ns"),
        Column("end_ns", "int64", "when the last pass of the interval, or the last collective after this pass, ended; for the rest of the run, when recording ended", True, unit="ns"),
        Column("passes", "int32", "number of forward passes, or of calls that save a checkpoint; 0 if only other ranks evaluated or saved"),
    ),
    key=("rank", "attempt", "pid", "begin_ns", "phase"),
)

METRICS: Final = Table(
    "metrics",
    "Numbers that the program published, in order.",
    (
        Column("rank", "int32", "global rank"),
        Column("attempt", "int32", "restart of the job"),
        Column("pid", "int32", "process id"),
        Column("step", "int32", "training step"),
        Column("name", "string", "name of the metric"),
        Column("value", "float64", "value of the metric"),
        Column("time_ns", "int64", "when the value was published", unit="ns"),
    ),
)

NCCL_OPS: Final = Table(
    "nccl_ops",
    "One row per COLL or CALL message of an NCCL log. Several messages can share a line, so (file, line) does not identify a row.",
    (
        Column("rank", "int32", "rank within the communicator", True),
        Column("global_rank", "int32", "rank in the job; null if it cannot be determined", True),
        Column("rank_reason", "string", "why rank or global_rank is null", True),
        Column("comm", "string", "communicator pointer", True),
        Column("comm_id", "string", "commId: the same on all ranks of the communicator", True),
        Column("comm_epoch", "int32", "number of earlier uses of the pointer in the process", True),
        Column("op", "string", "operation, spelled as in collectives", values=OPS),
        Column("kind", "string", "which of NCCL's two lines the row comes from: coll or call", values=("coll", "call")),
        Column("count", "int64", "count as printed", True, unit="elements"),
        Column("dtype", "string", "element type as printed", True),
        Column("bytes", "int64", "count x size of the datatype, as printed", True, unit="bytes"),
        Column("message_bytes", "int64", "bytes of the whole collective, defined like payload_bytes of a record", True, unit="bytes"),
        Column("reduce_op", "string", "reduction as printed", True),
        Column("root", "int32", "root within the communicator, for broadcast, reduce, gather, scatter", True),
        Column("peer", "int32", "peer within the communicator, for send and recv", True),
        Column("opcount", "int64", "opCount as printed (hexadecimal in the log)", True),
        Column("nranks", "int32", "ranks in the communicator", True),
        Column("stream", "string", "stream pointer", True),
        Column("host", "string", "host as printed; null if the line is truncated at its start", True),
        Column("pid", "int32", "process id as printed", True),
        Column("tid", "int32", "thread id as printed", True),
        Column("device", "int32", "CUDA device as printed", True),
        Column("version", "string", "NCCL version, from the banner or inferred", True),
        Column("file", "string", "log file"),
        Column("line", "int64", "line number within it, from 1"),
        Column("state", "string", "whole, or torn (truncated or interleaved)", values=("whole", "torn")),
        Column("twin_line", "int64", "NCCL prints a COLL line and a CALL line for one call; twin_line is the line number of the other line", True),
        Column("launch", "int64", "number shared by the operations of one thread between ncclGroupStart and ncclGroupEnd; needs CALL lines", True),
    ),
)

NCCL_COMMUNICATORS: Final = Table(
    "nccl_communicators",
    "One row per use of one communicator address in one process of an NCCL log.",
    (
        Column("host", "string", "host as printed"),
        Column("pid", "int32", "process id as printed"),
        Column("comm", "string", "communicator pointer"),
        Column("comm_epoch", "int32", "number of earlier uses of the pointer in the process"),
        Column("comm_id", "string", "commId: the same on all ranks of the communicator", True),
        Column("family", "int32", "number shared by the members of one communicator of the job; null if the members are not known", True),
        Column("rank", "int32", "rank within the communicator", True),
        Column("nranks", "int32", "ranks in the communicator", True),
        Column("global_rank", "int32", "rank in the job; null if it cannot be determined", True),
        Column("cuda_device", "int32", "CUDA device of the communicator", True),
        Column("parent", "string", "pointer of the communicator from which this communicator was split", True),
        Column("color", "int32", "color of the split", True),
        Column("pg", "string", "process group, as named in torch's own log line", True),
        Column("pg_description", "string", "torch's description of the process group", True),
        Column("operations", "int64", "number of complete operation lines (COLL and CALL)"),
        Column("ended", "string", "how the communicator ended: destroy or abort; null if no line reports it", True),
        Column("version", "string", "NCCL version, from the banner or inferred", True),
        Column("reason", "string", "why rank, family or global_rank is null", True),
        Column("file", "string", "log file of the first line that names the communicator"),
        Column("line", "int64", "number of this line in the file, from 1"),
    ),
)

# The lines of topology and tuning name no communicator: comm and comm_epoch are that of the initialisation (or, with
# connections made late, of the operation) that the same process was in, and null where that is not certain.
NCCL_RINGS: Final = Table(
    "nccl_rings",
    "One row per ring line of an NCCL log. A line contains the whole ring (printed by rank 0), or one rank with its neighbors.",
    (
        Column("host", "string", "host as printed"),
        Column("pid", "int32", "process id as printed"),
        Column("comm", "string", "communicator pointer", True),
        Column("comm_epoch", "int32", "number of earlier uses of the pointer in the process", True),
        Column("channel", "int32", "channel"),
        Column("channels", "int32", "total number of channels", True),
        Column("ranks", "string", "ranks in ring order, separated by spaces", True),
        Column("rank", "int32", "the rank whose neighbors the line contains", True),
        Column("previous", "int32", "rank from which this rank receives", True),
        Column("next", "int32", "rank to which this rank sends", True),
        Column("file", "string", "log file"),
        Column("line", "int64", "line number within it, from 1"),
    ),
)

NCCL_TREES: Final = Table(
    "nccl_trees",
    "One row per tree and rank of an NCCL log.",
    (
        Column("host", "string", "host as printed"),
        Column("pid", "int32", "process id as printed"),
        Column("comm", "string", "communicator pointer", True),
        Column("comm_epoch", "int32", "number of earlier uses of the pointer in the process", True),
        Column("tree", "int32", "number of the tree (the channel)"),
        Column("rank", "int32", "rank within the communicator"),
        Column("parent", "int32", "parent rank in the tree; null at the root", True),
        Column("children", "string", "child ranks in the tree, separated by spaces"),
        Column("file", "string", "log file"),
        Column("line", "int64", "line number within it, from 1"),
    ),
)

NCCL_LINKS: Final = Table(
    "nccl_links",
    "One row per channel, pair of ranks and transport of an NCCL log, as one process printed it.",
    (
        Column("host", "string", "host as printed"),
        Column("pid", "int32", "process id as printed"),
        Column("comm", "string", "communicator pointer", True),
        Column("comm_epoch", "int32", "number of earlier uses of the pointer in the process", True),
        Column("channel", "int32", "channel"),
        Column("connection", "int32", "connection index within the channel", True),
        Column("from_rank", "int32", "sending rank within the communicator"),
        Column("to_rank", "int32", "receiving rank within the communicator"),
        Column("from_device", "string", "device of the sender as printed: bus id (hexadecimal) up to NCCL 2.18.1, NVML index in later versions", True),
        Column("to_device", "string", "device of the receiver as printed", True),
        Column("transport", "string", "as printed: P2P/CUMEM/read, SHM/direct/direct, NET/IB/0/GDRDMA"),
        Column("kind", "string", "first word of transport: P2P, SHM, NET, COLLNET, ..."),
        Column("direction", "string", "whether the line describes the sending or the receiving end; null if the line does not tell", True, values=("send", "receive")),
        Column("lines", "int64", "number of lines with the same content"),
        Column("file", "string", "log file of the first of these lines"),
        Column("line", "int64", "line number of the first of these lines, from 1"),
    ),
)

NCCL_TUNING: Final = Table(
    "nccl_tuning",
    "One row per operation whose algorithm NCCL printed (2.20 and newer, rank 0 of the communicator in most versions).",
    (
        Column("host", "string", "host as printed"),
        Column("pid", "int32", "process id as printed"),
        Column("tid", "int32", "thread id as printed"),
        Column("comm", "string", "communicator pointer of the operation; null unless order and bytes determine it", True),
        Column("op", "string", "operation; null where the version does not print it", True, values=OPS),
        Column("bytes", "int64", "bytes as printed: up to NCCL 2.23, bytes of the whole operation; in later versions, bytes of one rank's part", unit="bytes"),
        Column("algorithm", "string", "TREE, RING, COLLNET_DIRECT, COLLNET_CHAIN, NVLS, NVLS_TREE, PAT, or the kernel as printed", True),
        Column("protocol", "string", "LL, LL128, SIMPLE", True),
        Column("first_channel", "int32", "first channel that the operation may use", True),
        Column("last_channel", "int32", "last channel that the operation may use", True),
        Column("predicted_us", "float64", "time predicted by NCCL's model (not measured)", True, unit="us"),
        Column("op_line", "int64", "line number of the operation's COLL line; null unless order and bytes determine the line", True),
        Column("file", "string", "log file"),
        Column("line", "int64", "line number within it, from 1"),
    ),
)

NCCL_ALGORITHMS: Final = Table(
    "nccl_algorithms",
    "One row per record whose algorithm a log of the NCCL Inspector states (version 4.2 of its format and newer).",
    (
        Column("rank", "int32", "global rank"),
        Column("attempt", "int32", "restart of the job"),
        Column("pid", "int32", "process id"),
        Column("seq", "int64", "seq of the record"),
        Column("algorithm", "string", "as written: TREE, RING, COLLNET_DIRECT, COLLNET_CHAIN, NVLS, NVLS_TREE, PAT"),
        Column("protocol", "string", "as written: LL, LL128, SIMPLE", True),
        Column("channels", "int32", "number of channels of the operation's kernel; recorded only if the log is verbose", True),
    ),
    key=("rank", "attempt", "pid", "seq"),
)

NCCL_MESSAGES: Final = Table(
    "nccl_messages",
    "Warnings in an NCCL log, and the traces of the errors that caused the warnings.",
    (
        Column("host", "string", "host as printed"),
        Column("pid", "int32", "process id as printed"),
        Column("tid", "int32", "thread id as printed"),
        Column("device", "int32", "CUDA device as printed", True),
        Column("level", "string", "warn, abort, or trace (a file.cc:NNN -> R line)", values=("warn", "abort", "trace")),
        Column("source", "string", "file:line in NCCL's source", True),
        Column("function", "string", "function in NCCL's source (2.30.7 and newer)", True),
        Column("result", "int32", "ncclResult of a trace", True),
        Column("text", "string", "the message"),
        Column("file", "string", "log file"),
        Column("line", "int64", "line number within it, from 1"),
    ),
)

MATCHES: Final = Table(
    "matches",
    "Records and their NCCL lines: one row per pair, and one row per record or line without a partner.",
    (
        Column("state", "string", "matched; missing (a record without a line); extra (a line without a record); ambiguous (a record or a line with several equal partners); torn (a truncated or interleaved line)", values=("matched", "missing", "extra", "ambiguous", "torn")),
        Column("rank", "int32", "global rank of the record", True),
        Column("attempt", "int32", "restart of the job", True),
        Column("record_pid", "int32", "process of the record", True),
        Column("seq", "int64", "seq of the record", True),
        Column("pg", "string", "process group of the record", True),
        Column("comm", "string", "communicator of the line", True),
        Column("comm_id", "string", "commId of the line", True),
        Column("op", "string", "operation", values=OPS),
        Column("record_bytes", "int64", "payload_bytes of the record", True, unit="bytes"),
        Column("line_bytes", "int64", "message_bytes of the line", True, unit="bytes"),
        Column("file", "string", "log file of the line", True),
        Column("line", "int64", "line number within this file", True),
        Column("reason", "string", "why the record or line has no partner", True),
        Column("part", "int32", "index of this line among the lines that NCCL prints for the record, from 0", True),
        Column("parts", "int32", "number of lines that NCCL prints for the record", True),
        Column("host", "string", "host of the line", True),
        Column("line_pid", "int32", "process of the line", True),
        Column("comm_epoch", "int32", "which use of the communicator pointer, counted from 0", True),
    ),
)

COMM_MATCHES: Final = Table(
    "comm_matches",
    "One row per communicator of an NCCL log. A row contains the process group of the communicator, and counts of matched and unmatched lines.",
    (
        Column("host", "string", "host as printed"),
        Column("pid", "int32", "process id as printed"),
        Column("comm", "string", "communicator pointer"),
        Column("comm_epoch", "int32", "which use of the pointer, counted from 0"),
        Column("comm_id", "string", "commId: the same on all ranks of the communicator", True),
        Column("nranks", "int32", "ranks in the communicator", True),
        Column("rank", "int32", "global rank of the process", True),
        Column("pg", "string", "process group", True),
        Column("group_ranks", "string", "global ranks of the group", True),
        Column("confidence", "string", "certain: torch's log lines or the ranks determine the group; likely: the operations determine the group; none: no group was found", values=("certain", "likely", "none")),
        Column("basis", "string", "evidence that assigns the communicator to the group", True),
        Column("reason", "string", "why the communicator is not assigned to a group", True),
        Column("matched", "int64", "lines with a record"),
        Column("missing", "int64", "expected lines that the log does not contain"),
        Column("extra", "int64", "lines without a record"),
        Column("ambiguous", "int64", "lines with several equal records"),
        Column("torn", "int64", "truncated or interleaved lines of the process that name this communicator or can only belong to it"),
        Column("ambiguous_records", "int64", "records with several equal lines", True),
        Column("ambiguous_missing", "int64", "lower bound on how many of the ambiguous records have no line", True),
        Column("ambiguous_extra", "int64", "lower bound on how many of the ambiguous lines have no record", True),
        Column("generated", "bool", "whether the log states that it was generated, and so is not the output of NCCL", True),
    ),
)

FLIGHT: Final = Table(
    "flight",
    "Entries in the Flight Recorder of torch in each rank when recording ended. The Flight Recorder is the backend's own list, and keeps only the newest entries.",
    (
        Column("rank", "int32", "global rank"),
        Column("attempt", "int32", "restart of the job"),
        Column("pid", "int32", "process id"),
        Column("pg", "string", "name of the process group"),
        Column("group_desc", "string", "torch's description of the group", True),
        Column("seq", "int64", "the backend's own number of the collective, or of the message if is_p2p is true"),
        Column("op_id", "int64", "number within the group; collectives and messages are counted together", True),
        Column("is_p2p", "bool", "whether the operation is a send or a recv"),
        Column("name", "string", "name of the operation in the backend: gloo:all_reduce"),
        Column("op", "string", "the operation that this name denotes", True, values=OPS),
        Column("input_bytes", "int64", "bytes of the operation's inputs", True, unit="bytes"),
        Column("output_bytes", "int64", "bytes of the operation's outputs", True, unit="bytes"),
        Column("state", "string", "state reported by the backend: scheduled, started, completed", True),
        Column("time_realtime_ns", "int64", "when the entry was made, CLOCK_REALTIME", True, unit="ns"),
    ),
)

LOOPBACK: Final = "lo"  # the interface through which the processes of a host reach each other

WIRE: Final = Table(
    "wire",
    "Readings of the machine's own counters, at intervals.",
    (
        Column("host", "string", "host name"),
        Column("device", "string", "network interface, or a GPU link"),
        Column("kind", "string", "kind of device: interface, nvlink or pcie", values=("interface", "nvlink", "pcie")),
        Column("time_ns", "int64", "when the counter was read", unit="ns"),
        Column("sent_bytes", "int64", "bytes sent since the counter began", unit="bytes"),
        Column("received_bytes", "int64", "bytes received since the counter began", unit="bytes"),
        Column("step", "int32", "the training step that had just ended; -1 if the first step was about to begin; null for a reading at intervals", True),
        Column("sent_packets", "int64", "packets sent since the counter began; sent_bytes includes their headers", True),
        Column("resent_segments", "int64", "TCP segments that the host has retransmitted since the counter began, on all interfaces together", True),
        Column("queued_bytes", "int64", "unacknowledged bytes in the send buffers of the TCP sockets; device lo: bytes for this host itself; other devices: bytes for other hosts; null if not read", True, unit="bytes", since=2),
    ),
    key=("host", "device", "time_ns"),
)

SAMPLES: Final = Table(
    "samples",
    "Readings of samplers (GPU, CPU stacks), at intervals.",
    (
        Column("host", "string", "host name"),
        Column("source", "string", "what was sampled: nvml, py-spy, proc"),
        Column("device", "string", "device that was sampled", True),
        Column("name", "string", "name of the sampled quantity"),
        Column("value", "float64", "value of the quantity"),
        Column("time_ns", "int64", "when the value was read", unit="ns"),
    ),
)

CLOCKS: Final = Table(
    "clocks",
    "Pairs of readings of the monotonic and the real-time clock. Each rank reads the clocks when it starts, every minute and when it ends.",
    (
        Column("rank", "int32", "global rank"),
        Column("attempt", "int32", "restart of the job"),
        Column("pid", "int32", "process id"),
        Column("host", "string", "host name"),
        Column("monotonic_ns", "int64", "CLOCK_MONOTONIC", unit="ns"),
        Column("realtime_ns", "int64", "CLOCK_REALTIME at the same moment", unit="ns"),
        Column("uncertainty_ns", "int64", "longest possible time between the readings of the two clocks", unit="ns"),
        Column("clock", "string", "identifier of the clock (kernel boot and time namespace): processes with the same value read the same clock", True),
    ),
)

CLOCK_OFFSETS: Final = Table(
    "clock_offsets",
    "Offset of the monotonic clock of each host from the clock of rank 0, measured by message exchanges at the start and the end of the run.",
    (
        Column("rank", "int32", "global rank that measured"),
        Column("attempt", "int32", "restart of the job"),
        Column("pid", "int32", "process id"),
        Column("host", "string", "host name"),
        Column("reference_rank", "int32", "rank whose clock is the reference"),
        Column("time_ns", "int64", "when the offset was measured, on this rank's own clock", unit="ns"),
        Column("offset_ns", "int64", "add this to a time of this rank to get the time of the reference clock", unit="ns"),
        Column("error_ns", "int64", "largest possible difference between offset_ns and the true offset", unit="ns"),
        Column("exchanges", "int32", "number of message exchanges in the measurement"),
    ),
    key=("rank", "attempt", "pid", "time_ns"),
)

AGGREGATES: Final = Table(
    "aggregates",
    "Sums over the collectives of a step, recorded instead of rows in collectives. --aggregate records sums for all steps; --max-size records sums once 80 % of the limit is used.",
    (
        Column("rank", "int32", "global rank"),
        Column("attempt", "int32", "restart of the job"),
        Column("pid", "int32", "process id"),
        Column("step", "int32", "training step; -1 outside all steps"),
        Column("after_step", "int32", "outside all steps: the last training step before the operations", True, since=2),
        Column("phase", "string", "what the training was doing", values=PHASES),
        Column("op", "string", "the operation that was issued", values=OPS),
        Column("intended_op", "string", "the operation that the runtime intended, if it issued a different one", True, values=OPS),
        Column("purpose", "string", "why the runtime issued the operations, as stated by the runtime", True, values=PURPOSES),
        Column("pg", "string", "name of the process group"),
        Column("group_ranks", "string", "global ranks of the group: 0-3 or 0,2"),
        Column("group_size", "int32", "ranks in the group"),
        Column("is_p2p", "bool", "whether the operation is a send or a recv"),
        Column("calls", "int64", "number of collectives that this rank issued"),
        Column("payload_bytes", "int64", "sum of payload_bytes over these collectives", unit="bytes"),
        Column("input_bytes", "int64", "sum of input_bytes over these collectives", unit="bytes"),
        Column("output_bytes", "int64", "sum of output_bytes over these collectives", unit="bytes"),
        Column("host_ns", "int64", "sum of return_ns - issue_ns over these collectives", unit="ns"),
        Column("exposed_ns", "int64", "sum of exposed_ns over these collectives", True, unit="ns"),
    ),
)

# fmt: on
TABLES: Final[dict[str, Table]] = {
    table.name: table
    for table in (
        COLLECTIVES,
        GROUPS,
        BUCKETS,
        STALLS,
        PARAMETERS,
        EXPERT_LAYERS,
        EXPERT_LOADS,
        WRAPPED,
        WRAPPER_PASSES,
        STEPS,
        OUTSIDE_STEPS,
        METRICS,
        NCCL_OPS,
        NCCL_COMMUNICATORS,
        NCCL_RINGS,
        NCCL_TREES,
        NCCL_LINKS,
        NCCL_TUNING,
        NCCL_ALGORITHMS,
        NCCL_MESSAGES,
        MATCHES,
        COMM_MATCHES,
        FLIGHT,
        WIRE,
        SAMPLES,
        CLOCKS,
        CLOCK_OFFSETS,
        AGGREGATES,
    )
}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of the binary record: its name, its ``struct`` code and what it holds."""

    name: str
    code: str
    doc: str

    @property
    def size(self) -> int:
        """Bytes of the field."""
        return struct.calcsize("<" + self.code)


_CODES: Final = {"int8": "b", "int16": "h", "int32": "i", "int64": "q", "float64": "d"}


def _field_of(name: str) -> Field:
    """The field of the record that holds column ``name`` of ``collectives``."""
    column = COLLECTIVES.column(name)
    if column.values:
        return Field(name, "B", "position in the values of the column")
    if column.type == "bool":
        return Field(name, "B", "1 for true, 0 for false")
    if column.type == "string":
        return Field(name, "I", "number of the interned text, 0 for null")
    return Field(
        name,
        _CODES[column.type],
        "value of the column, 0 for null" if column.nullable else "value of the column",
    )


# The fields in the order of the file. Most are columns of ``collectives``: their type says how they are stored and decoded.
# ``commit`` comes last, so that it is written last: a record without it is torn and is not counted.
RECORD_FIELDS: Final[tuple[Field, ...]] = (
    *map(
        _field_of,
        ("issue_ns", "return_ns", "wait_begin_ns", "wait_end_ns", "device_begin_ns", "device_end_ns"),
    ),
    *map(_field_of, ("exposed_ns", "pg_seq")),
    Field("signature", "I", "number of the interned signature"),
    Field("tag", "I", "number of the interned tag, 0 for none"),
    *map(_field_of, ("call_site", "thread", "step", "micro_step", "coalesce_id", "replays")),
    *map(_field_of, ("phase", "layer", "status", "captured")),
    Field("commit", "I", "the constant COMMIT (0x434F4D4D) if the record is complete"),
)
RECORD: Final = struct.Struct("<" + "".join(field.code for field in RECORD_FIELDS))
COMMIT: Final = 0x434F4D4D


def record_offset(name: str) -> int:
    """Byte offset of field ``name`` within the binary record."""
    offset = 0
    for field in RECORD_FIELDS:
        if field.name == name:
            return offset
        offset += field.size
    raise KeyError(name)


def format_ranks(ranks: tuple[int, ...] | list[int]) -> str:
    """Global ranks as text: ``0-3`` for a run of neighbours, else ``0,2``.

    >>> format_ranks([0, 1, 2, 3]), format_ranks([0, 2]), format_ranks([5])
    ('0-3', '0,2', '5')
    """
    ranks = tuple(ranks)
    if len(ranks) > 1 and ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


_MOST_RANKS: Final = 10_000_000  # of a group; more is damage


def parse_ranks(text: str) -> tuple[int, ...]:
    """The inverse of :func:`format_ranks`.

    Raises:
        TraceError: the text is of a damaged trace.

    >>> parse_ranks("0-3"), parse_ranks("0,2")
    ((0, 1, 2, 3), (0, 2))
    """
    try:
        if "-" in text:
            first, last = map(int, text.split("-"))
            if last - first < _MOST_RANKS:
                return tuple(range(first, last + 1))
        else:
            return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        pass
    raise TraceError(
        f"group_ranks is {text[:100]!a}, expected the ranks of a group, such as 0-3 or 0,2: the trace is damaged"
    )


UNKNOWN_SPLITS: Final = "?"  # they were given as tensors, which the recorder does not read
_MOST_SPLIT_BYTES: Final = 1 << 50  # more is damage


def format_splits(sizes: Sequence[int]) -> str | None:
    """Bytes for each rank of a group as text; None where all are equal.

    >>> format_splits([8, 0, 24]), format_splits([8, 8])
    ('8,0,24', None)
    """
    return None if len(set(sizes)) < 2 else ",".join(map(str, sizes))


def parse_splits(text: str, group_size: int) -> tuple[int, ...] | None:
    """The inverse of :func:`format_splits`; None where ``text`` has no sizes for ``group_size`` ranks.

    >>> parse_splits("8,0,24", 3), parse_splits("8,x", 2)
    ((8, 0, 24), None)
    """
    try:
        sizes = tuple(map(int, text.split(",")))
    except ValueError:
        return None
    is_whole = len(sizes) == group_size and min(sizes) >= 0 and max(sizes) <= _MOST_SPLIT_BYTES
    return sizes if is_whole else None


def wire_bytes(op: str, payload_bytes: int, group_size: int) -> float:
    """Mean bytes that each rank of a group of ``group_size`` sends for ``op``, in the bandwidth-optimal model.

    all_reduce 2(n-1)/n S; reduce, broadcast, all_gather, reduce_scatter, all_to_all (n-1)/n S; gather, scatter
    (n-1)/n^2 S, since n-1 pieces of S/n cross in all; send S; recv and barrier 0. S is ``payload_bytes``. Source:
    nccl-tests, doc/PERFORMANCE.md (the bus bandwidth factors of the rooted operations are stated there per link; here it
    is the mean over the ranks).
    """
    if op == Op.SEND:
        return float(payload_bytes)
    if op in (Op.RECV, Op.BARRIER) or group_size < 2:
        return 0.0
    factor = (group_size - 1) / group_size
    if op == Op.ALL_REDUCE:
        factor *= 2
    elif op in (Op.GATHER, Op.SCATTER):
        factor /= group_size
    return factor * payload_bytes
