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
    "Each row describes one collective or point-to-point operation that a rank issued through torch.distributed.",
    (
        Column("rank", "int32", "global rank of the process that issued the operation", source=_P),
        Column("attempt", "int32", "Number of times the job had been restarted, 0 for the first start. The column is needed because elastic launchers reuse rank numbers.", source=_P),
        Column("pid", "int32", "process id", source=_P),
        Column("seq", "int64", "position of the operation in the issue order of its process, counted from 0", source=_D),
        Column("step", "int32", "Training step in which the operation was issued. A step begins when the previous step ends. The value is -1 outside all steps: before the first step, during an evaluation or a checkpoint, and after the last step.", source=_R),
        Column("after_step", "int32", "last training step before the operation, if the operation is outside all steps; null for all other operations", True, source=_D),
        Column("micro_step", "int32", "number of the micro-batch within the step, counted from 0", source=_R),
        Column("phase", "string", "what the training was doing when the operation was issued", values=PHASES, source=_R),
        Column("op", "string", "the operation that was issued", values=OPS, source=_S),
        Column("intended_op", "string", "the operation that the runtime intended, if it issued a different one", True, values=OPS, source=_T),
        Column("api", "string", "outermost torch.distributed function of the call", True, source=_S),
        Column("backend_method", "string", "method of torch's ProcessGroup that was called", source=_S),
        Column("backend", "string", "backend that the group uses for the device of the tensors (gloo, nccl, ...)", True, source=_S),
        Column("device", "string", "device type and index of the tensors (cpu, cuda:0)", True, source=_S),
        Column("reduce_op", "string", "reduction operator (SUM, AVG, MAX, ...)", True, source=_S),
        Column("dtype", "string", "element type of the first tensor (float32, bfloat16, ...)", True, source=_S),
        Column("num_tensors", "int32", "number of input tensors of the call, or of output tensors if the call has no inputs", source=_S),
        Column("sizes", "string", "Shapes of the tensors, written as 4x16. Several shapes are joined by ';', and the output shapes follow '->'.", True, source=_S),
        Column("numel", "int64", "number of elements in the data whose size is payload_bytes", unit="elements", source=_S),
        Column("input_bytes", "int64", "bytes that this rank contributes; 0 if the rank only receives", unit="bytes", source=_S),
        Column("output_bytes", "int64", "bytes of this rank's output buffers", unit="bytes", source=_S),
        Column("payload_bytes", "int64", "S of nccl-tests, the payload of the operation. For an all_gather it is the total output. For a reduce_scatter or an all_to_all it is the total input. For a gather or a scatter it is the root's buffer. For a send or a recv it is the message. For every other operation it is the whole buffer.", unit="bytes", source=_S),
        Column("input_splits", "string", "Number of bytes of this rank's input that go to each rank of the group. The values are in the order of the group and are joined by ','. Null if all values are equal, or if the operation does not divide its input among the ranks. '?' if the sizes are not known.", True, source=_S, since=2),
        Column("output_splits", "string", "Number of bytes of this rank's output that come from each rank of the group. The values are in the order of the group and are joined by ','. Null if all values are equal, or if the output is not divided among the ranks. '?' if the sizes are not known.", True, source=_S, since=2),
        Column("pg", "string", "name of the process group, unique in the job", source=_S),
        Column("pg_seq", "int64", "Position of the operation in the issue order of its group, counted from 0. Collectives are counted separately from point-to-point operations. A collective has the same number on all ranks of the group. A call that raised is not counted. The pg_seq of such a call is -1 - n, where n is the pg_seq of the next call.", source=_R),
        Column("group_desc", "string", "torch's description of the group", True, source=_G),
        Column("group_ranks", "string", "global ranks of the group, written as 0-3 or 0,2", source=_G),
        Column("group_size", "int32", "number of ranks in the group", source=_G),
        Column("group_rank", "int32", "this rank's number within the group", source=_G),
        Column("peer", "int32", "global rank of the root, the destination or the source; -1 if the operation has no peer or accepts any peer", source=_S),
        Column("is_async", "bool", "whether the caller requested a handle (async_op)", source=_S),
        Column("is_p2p", "bool", "whether the operation is a send or a recv", source=_S),
        Column("coalesce_id", "int32", "number shared by all calls of one coalesced block, from its start to the matching end", True, source=_R),
        Column("captured", "bool", "whether the call was issued while a CUDA graph was captured", source=_R),
        Column("replays", "int32", "number of times that the captured graph was replayed", True, source=_R),
        Column("purpose", "string", "why the operation was issued, as reported by the runtime", True, values=PURPOSES, source=_T),
        Column("bucket", "int32", "number of the gradient bucket within the step", True, source=_T),
        Column("bucket_bytes", "int64", "size of the whole gradient bucket in bytes", True, unit="bytes", source=_T),
        Column("padding_bytes", "int64", "number of padding bytes included in payload_bytes, as reported by the runtime", True, unit="bytes", source=_T, since=2),
        Column("owner", "int32", "global rank that keeps the result, as reported by the runtime", True, source=_T),
        Column("parameters", "string", "names of the parameters that the operation sends, joined by ','", True, source=_T),
        Column("module", "string", "qualified name of the module for which the operation was issued", True, source=_T),
        Column("call_site", "string", "first stack frame outside torch.distributed, written as file:line function", True, source=_R),
        Column("thread", "string", "name of the thread that issued the operation", True, source=_R),
        Column("layer", "string", "mechanism that recorded the operation", values=LAYERS, source=_R),
        Column("status", "string", "how the call ended", values=STATUSES, source=_R),
        Column("issue_ns", "int64", "when the call began", unit="ns", source=_R),
        Column("return_ns", "int64", "when the call returned", True, unit="ns", source=_R),
        Column("wait_begin_ns", "int64", "when the program began to wait for the result", True, unit="ns", source=_R),
        Column("wait_end_ns", "int64", "when the program stopped waiting for the result", True, unit="ns", source=_R),
        Column("device_begin_ns", "int64", "When the device began the operation. For an asynchronous operation on a GPU, this is the time when the operation could begin.", True, unit="ns", source=_R),
        Column("device_end_ns", "int64", "When the operation ended, as reported by the device. For a sampled CPU call, the backend reports this time. For an asynchronous operation on a GPU, this is the time when the waiting stream continued.", True, unit="ns", source=_R),
        Column("exposed_ns", "int64", "Exposed time: how long the program was blocked on this operation. For a synchronous operation it lasts from issue_ns to wait_end_ns. For an asynchronous operation it lasts from wait_begin_ns to wait_end_ns. On a GPU it is the time during which the program's stream was blocked, measured with events.", True, unit="ns", source=_R),
    ),
    key=("rank", "attempt", "pid", "seq"),
)

GROUPS: Final = Table(
    "groups",
    "Each row describes one member rank of one process group.",
    (
        Column("rank", "int32", "global rank of the member"),
        Column("attempt", "int32", "number of times the job had been restarted, 0 for the first start"),
        Column("pid", "int32", "process id"),
        Column("pg", "string", "name of the process group"),
        Column("group_desc", "string", "torch's description of the group", True),
        Column("group_ranks", "string", "global ranks of the group, written as 0-3 or 0,2"),
        Column("group_size", "int32", "number of ranks in the group"),
        Column("group_rank", "int32", "this rank's number within the group"),
        Column("backend", "string", "backend for each device type, written as cpu:gloo,cuda:nccl", True),
        Column("unseen", "int64", "number of collectives that the group's sequence number counts but that have no record", True),
        Column("host", "string", "Host name of the rank. Traffic between two ranks with the same host name stays within the host.", True, since=2),
    ),
    key=("rank", "attempt", "pid", "pg"),
)

BUCKETS: Final = Table(
    "buckets",
    "Each row describes one gradient bucket that one rank flushed. The rows of a step are written "
    "when the next step begins. The rows of the last step are therefore missing if a rank is killed.",
    (
        Column("rank", "int32", "global rank of the process that flushed the bucket"),
        Column("attempt", "int32", "number of times the job had been restarted, 0 for the first start"),
        Column("pid", "int32", "process id"),
        Column("step", "int32", "training step in which the bucket was flushed"),
        Column("micro_step", "int32", "number of the micro-batch within the step"),
        Column("bucket", "int32", "number of the bucket within the step"),
        Column("numel", "int64", "number of elements in the bucket", unit="elements"),
        Column("bytes", "int64", "size of the bucket in its communication dtype", unit="bytes"),
        Column("capacity", "int64", "maximum number of elements that the bucket can have", True, unit="elements"),
        Column("dtype", "string", "element type in which the bucket is sent"),
        Column("owners", "string", "ranks that own a shard of the bucket, in order", True),
        Column("parameters", "string", "names of the parameters in the bucket, in order and joined by ','", True),
        Column("flush_reason", "string", "why the bucket was flushed: full, end_of_backward or oversized", True),
        Column("time_ns", "int64", "when the bucket was flushed", unit="ns"),
    ),
    key=("rank", "attempt", "pid", "step", "micro_step", "bucket"),
)

STALLS: Final = Table(
    "stalls",
    "Each row describes an interval in which C++ code waited for collectives. For example, DistributedDataParallel waits at "
    "the end of a backward pass. Individual waits of C++ code are not recorded. Therefore only bounds of the exposed time are known.",
    (
        Column("rank", "int32", "global rank of the process that waited"),
        Column("attempt", "int32", "number of times the job had been restarted, 0 for the first start"),
        Column("pid", "int32", "process id"),
        Column("step", "int32", "training step in which the process waited"),
        Column("place", "string", "What waited. The value is backward if the reducer waited at the end of a backward pass. Otherwise it is the name of the torch function that waited."),
        Column("since_ns", "int64", "Start of the period in which the awaited collectives were issued. The program waited for all collectives that C++ code issued from since_ns to end_ns.", unit="ns"),
        Column("begin_ns", "int64", "when the program began to wait", unit="ns"),
        Column("end_ns", "int64", "when all collectives that the program waited for were complete", unit="ns"),
        Column("exposed_low_ns", "int64", "Lower bound of the exposed time: how long the thread slept during the interval. Time in which the thread computed or waited for a processor is not included. The value is 0 if a device waited.", unit="ns"),
        Column("exposed_high_ns", "int64", "Upper bound of the exposed time: how long the thread did not run on a processor. If a device waited, this is the duration of the wait on the device.", unit="ns"),
        Column("device_begin_ns", "int64", "when the wait began on the device; null if the thread itself waited", True, "ns"),
        Column("device_end_ns", "int64", "when the wait ended on the device; null if the thread itself waited", True, "ns"),
    ),
    key=("rank", "attempt", "pid", "begin_ns"),
)

PARAMETERS: Final = Table(
    "parameters",
    "Each row describes one parameter of the model. The rows come from the lowest rank that published its parameters.",
    (
        Column("name", "string", "qualified name of the parameter"),
        Column("shape", "string", "shape of the parameter, written as 64x32"),
        Column("dtype", "string", "element type of the parameter in the model"),
        Column("numel", "int64", "number of elements in the parameter", unit="elements"),
        Column("param_group", "int32", "number of the optimizer's parameter group that contains the parameter; -1 if no group contains it", True),
        Column("requires_grad", "bool", "whether the parameter is trained"),
        Column("module", "string", "qualified name of the module that owns the parameter", True),
        Column("forward_index", "int32", "position of the parameter in model.named_parameters()", True),
        Column("cut", "string", "How the module is partitioned over the ranks of the model axis. If the value is sequence or split, the parameters are complete and only the sequences are sharded", True, values=CUTS),
        Column("whole_shape", "string", "shape of the complete parameter, if each rank has only a shard of it", True),
        Column("stages", "string", "Numbers of the pipeline stages that have the parameter, joined by ','. A '+' at the end means that these stages keep their copies equal.", True),
        Column("owner_types", "string", "Class of the owning module and the base classes of this class, joined by ','. Several owners are separated by ';'. A class is also listed with its full name in two cases. In the first case, torch.nn has a different class with the same name. In the second case, the class is that of the owning module, and the module's forward method is replaced.", True),
        Column("ep_size", "int32", "number of ranks that share the experts of the layer, for a parameter of an expert; null for all other parameters", True, since=2),
    ),
    key=("name",),
)

EXPERT_LAYERS: Final = Table(
    "expert_layers",
    "Each row describes one mixture-of-experts layer on one rank. The row is written when the layer's engine is created. If a layer has several rows on a rank, the last row is valid.",
    (
        Column("rank", "int32", "global rank of the process that created the layer's engine"),
        Column("attempt", "int32", "number of times the job had been restarted, 0 for the first start"),
        Column("pid", "int32", "process id"),
        Column("layer", "string", "qualified name of the layer's module"),
        Column("num_experts", "int32", "number of experts of the layer, summed over all ranks"),
        Column("ep_size", "int32", "Number of ranks that share the experts of the layer. Each of these ranks has num_experts / ep_size experts."),
        Column("k", "int32", "number of experts that the gate chooses for each token"),
        Column("capacity_factor", "float64", "Capacity factor in training. It sets how many slots an expert has for the tokens of a rank, relative to tokens x k / num_experts.", True),
        Column("eval_capacity_factor", "float64", "capacity factor in an evaluation", True),
        Column("min_capacity", "int64", "minimum number of slots that an expert has for the tokens of a rank", True),
        Column("drop_tokens", "bool", "If true, tokens beyond the capacity are dropped. If false, the capacity is the token count of the fullest expert.", True),
        Column("hidden", "int64", "number of elements in a token (the hidden size)", True, unit="elements"),
        Column("expert_ranks", "string", "global ranks that share the experts with this rank, in the order of the group, written as 0,1"),
    ),
)

EXPERT_LOADS: Final = Table(
    "expert_loads",
    "Each row states how many tokens of one rank chose one expert, in one forward pass of a mixture-of-experts layer.",
    (
        Column("rank", "int32", "global rank whose tokens the row counts"),
        Column("attempt", "int32", "number of times the job had been restarted, 0 for the first start"),
        Column("pid", "int32", "process id"),
        Column("step", "int32", "training step of the forward pass; -1 outside all steps"),
        Column("after_step", "int32", "last training step before the forward pass, if the pass is outside all steps", True),
        Column("micro_step", "int32", "number of the micro-batch within the step, counted from 0"),
        Column("phase", "string", "What the training was doing. The value is backward if activation checkpointing repeated the forward pass", values=PHASES),
        Column("call", "int32", "number of this forward pass of the layer within the micro-batch and phase, counted from 0"),
        Column("layer", "string", "qualified name of the layer's module"),
        Column("expert", "int32", "number of the expert among all experts of the layer"),
        Column("tokens", "int64", "number of tokens that chose the expert, including tokens that were dropped later"),
        Column("dropped", "int64", "number of these tokens that exceeded the capacity of the expert"),
        Column("capacity", "int64", "number of slots that the expert has for the tokens of this rank"),
        Column("sent", "int64", "number of this rank's tokens that reached the gate"),
        Column("time_ns", "int64", "when the layer ran", unit="ns"),
    ),
    key=("rank", "attempt", "pid", "step", "after_step", "micro_step", "phase", "call", "layer", "expert"),
)

WRAPPED: Final = Table(
    "wrappers",
    "Each row contains the arguments of one model wrapper (DistributedDataParallel, FSDP, tensor parallelism or ZeroRedundancyOptimizer). If several rows of a process have the same number, the last row is valid.",
    (
        Column("rank", "int32", "global rank of the process that created the wrapper"),
        Column("attempt", "int32", "number of times the job had been restarted, 0 for the first start"),
        Column("pid", "int32", "process id"),
        Column("number", "int32", "number of the wrapper within its process, in the order of creation"),
        Column("wrapper", "string", "kind of the wrapper", values=WRAPPERS),
        Column("unit", "string", "qualified name of the wrapped module within the model"),
        Column("group_ranks", "string", "global ranks that reduce or shard together"),
        Column("replica_ranks", "string", "global ranks that have the same shard", True),
        Column("arguments", "string", "arguments of the wrapper as JSON, including default values"),
        Column("parameters", "string", "name, shape and element type of each parameter, and whether the parameter is trained, as JSON"),
        Column("buffers", "string", "name, shape and element type of each buffer, as JSON"),
        Column("step", "int32", "training step in which the wrapper was created or changed; -1 before the first step"),
        Column("time_ns", "int64", "when the wrapper was created or changed", unit="ns"),
    ),
    key=("rank", "attempt", "pid", "number", "time_ns"),
)

WRAPPER_PASSES: Final = Table(
    "wrapper_passes",
    "Each row contains the passes that a wrapped model ran in a step. A step has a row only if its passes differ from the passes of the previous step.",
    (
        Column("rank", "int32", "global rank of the process that ran the passes"),
        Column("attempt", "int32", "number of times the job had been restarted, 0 for the first start"),
        Column("pid", "int32", "process id"),
        Column("number", "int32", "number of the wrapper within its process"),
        Column("step", "int32", "first training step that ran these passes; -1 before the first step"),
        Column("passes", "string", "One letter for each pass, in order. F is a forward pass whose gradients are reduced later. f is a forward pass whose gradients are not reduced. e is a forward pass without gradients. B is a backward pass that reduces gradients. b is a backward pass that does not reduce gradients. ? means that the passes are not known. docs/verify.md explains the letters of FSDP, tensor parallelism and ZeroRedundancyOptimizer."),
    ),
    key=("rank", "attempt", "pid", "number", "step"),
)

STEPS: Final = Table(
    "steps",
    "Each row describes one training step on one rank.",
    (
        Column("rank", "int32", "global rank of the process that ran the step"),
        Column("attempt", "int32", "number of times the job had been restarted, 0 for the first start"),
        Column("pid", "int32", "process id"),
        Column("step", "int32", "number of the training step"),
        Column("begin_ns", "int64", "When the step began. A step begins when the previous step ends. If an evaluation or a checkpoint followed the previous step, the step begins when this evaluation or checkpoint ends.", unit="ns"),
        Column("end_ns", "int64", "When the last optimizer step of the training step ended. If the program marks its steps, this is the time when the next step began.", True, unit="ns"),
        Column("outside_ns", "int64", "total time of evaluations and checkpoints between begin_ns and end_ns; this time does not count as part of the step", True, unit="ns"),
        Column("micro_steps", "int32", "number of micro-batches in the step"),
        Column("loss", "float64", "last value of the metric loss in the step", True),
        Column("grad_norm", "float64", "last value of the metric grad_norm in the step", True),
        Column("loss_scale", "float64", "last value of the metric loss_scale in the step", True),
        Column("samples", "float64", "sum of the values of the metric samples in the step", True),
        Column("rss_bytes", "int64", "resident memory of the process when the step ended", True, unit="bytes"),
        Column("device_bytes", "int64", "allocated device memory when the step ended", True, unit="bytes"),
        Column("cpu_ns", "int64", "CPU time that all threads of the process used in the step", True, unit="ns"),
    ),
    key=("rank", "attempt", "pid", "step"),
)

OUTSIDE_STEPS: Final = Table(
    "outside_steps",
    "Each row describes an interval outside the training steps. Each rank has one row for each evaluation, one row for each checkpoint, and one row for the rest of the run after the last step.",
    (
        Column("rank", "int32", "global rank of the process"),
        Column("attempt", "int32", "number of times the job had been restarted, 0 for the first start"),
        Column("pid", "int32", "process id"),
        Column("phase", "string", "Kind of the interval: evaluation, checkpoint, or other. The value other is the rest of the run after the last step", values=PHASES),
        Column("after_step", "int32", "last training step before this interval", True),
        Column("begin_ns", "int64", "when the interval began, which is the end of the step, evaluation or checkpoint before it", unit="ns"),
        Column("end_ns", "int64", "When the last pass of the interval ended, or the last collective after this pass. For the rest of the run, this is the time when recording ended.", True, unit="ns"),
        Column("passes", "int32", "Number of forward passes in an evaluation, or of calls that save a checkpoint. The value is 0 if only other ranks evaluated or saved."),
    ),
    key=("rank", "attempt", "pid", "begin_ns", "phase"),
)

METRICS: Final = Table(
    "metrics",
    "Each row contains one metric value that the program published. The rows are in the order of publication.",
    (
        Column("rank", "int32", "global rank of the process that published the value"),
        Column("attempt", "int32", "number of times the job had been restarted, 0 for the first start"),
        Column("pid", "int32", "process id"),
        Column("step", "int32", "training step in which the value was published"),
        Column("name", "string", "name of the metric"),
        Column("value", "float64", "value of the metric"),
        Column("time_ns", "int64", "when the value was published", unit="ns"),
    ),
)

NCCL_OPS: Final = Table(
    "nccl_ops",
    "Each row describes one COLL or CALL message of an NCCL log. Several messages can share one line, so the columns file and line do not identify a row.",
    (
        Column("rank", "int32", "rank of the process within the communicator", True),
        Column("global_rank", "int32", "rank in the job; null if it cannot be determined", True),
        Column("rank_reason", "string", "why rank or global_rank is null", True),
        Column("comm", "string", "pointer of the communicator", True),
        Column("comm_id", "string", "commId that NCCL prints; it is the same on all ranks of the communicator", True),
        Column("comm_epoch", "int32", "number of communicators that used this pointer earlier in the process", True),
        Column("op", "string", "operation, spelled as in the table collectives", values=OPS),
        Column("kind", "string", "whether the row comes from a COLL line or a CALL line", values=("coll", "call")),
        Column("count", "int64", "element count, as printed in the log", True, unit="elements"),
        Column("dtype", "string", "element type, as printed in the log", True),
        Column("bytes", "int64", "count multiplied by the size of the element type; both values are as printed in the log", True, unit="bytes"),
        Column("message_bytes", "int64", "bytes of the whole collective, defined like payload_bytes in the table collectives", True, unit="bytes"),
        Column("reduce_op", "string", "reduction operator, as printed in the log", True),
        Column("root", "int32", "root within the communicator; only for broadcast, reduce, gather and scatter", True),
        Column("peer", "int32", "peer within the communicator; only for send and recv", True),
        Column("opcount", "int64", "opCount of the line, which the log prints as a hexadecimal number", True),
        Column("nranks", "int32", "number of ranks in the communicator", True),
        Column("stream", "string", "pointer of the CUDA stream", True),
        Column("host", "string", "host name, as printed in the log; null if the beginning of the line is missing", True),
        Column("pid", "int32", "process id, as printed in the log", True),
        Column("tid", "int32", "thread id, as printed in the log", True),
        Column("device", "int32", "CUDA device, as printed in the log", True),
        Column("version", "string", "NCCL version, read from the banner or inferred", True),
        Column("file", "string", "name of the log file"),
        Column("line", "int64", "line number within the log file, counted from 1"),
        Column("state", "string", "whether the line is whole or torn; a torn line is truncated or interleaved", values=("whole", "torn")),
        Column("twin_line", "int64", "NCCL prints a COLL line and a CALL line for one call. This column contains the line number of the other line.", True),
        Column("launch", "int64", "Number shared by all operations that one thread issued between ncclGroupStart and ncclGroupEnd. The number is only known if the log has CALL lines.", True),
    ),
)

NCCL_COMMUNICATORS: Final = Table(
    "nccl_communicators",
    "Each row describes one communicator in one process of an NCCL log. If a process reuses the address of a communicator for a new one, the new communicator has its own row.",
    (
        Column("host", "string", "host name, as printed in the log"),
        Column("pid", "int32", "process id, as printed in the log"),
        Column("comm", "string", "pointer of the communicator"),
        Column("comm_epoch", "int32", "number of communicators that used this pointer earlier in the process"),
        Column("comm_id", "string", "commId that NCCL prints; it is the same on all ranks of the communicator", True),
        Column("family", "int32", "number shared by all entries that describe one communicator of the job; null if the members of the communicator are not known", True),
        Column("rank", "int32", "rank of the process within the communicator", True),
        Column("nranks", "int32", "number of ranks in the communicator", True),
        Column("global_rank", "int32", "rank in the job; null if it cannot be determined", True),
        Column("cuda_device", "int32", "CUDA device that the communicator uses", True),
        Column("parent", "string", "pointer of the communicator that was split to create this communicator", True),
        Column("color", "int32", "color that was passed to the split", True),
        Column("pg", "string", "name of the process group, as printed in torch's own log line", True),
        Column("pg_description", "string", "torch's description of the process group", True),
        Column("operations", "int64", "number of complete operation lines, COLL and CALL together"),
        Column("ended", "string", "how the communicator ended: destroy or abort; null if no line of the log reports it", True),
        Column("version", "string", "NCCL version, read from the banner or inferred", True),
        Column("reason", "string", "why rank, family or global_rank is null", True),
        Column("file", "string", "name of the log file with the first line that names the communicator"),
        Column("line", "int64", "number of this line within the log file, counted from 1"),
    ),
)

# The lines of topology and tuning name no communicator: comm and comm_epoch are that of the initialisation (or, with
# connections made late, of the operation) that the same process was in, and null where that is not certain.
NCCL_RINGS: Final = Table(
    "nccl_rings",
    "Each row describes one line of an NCCL log that describes a ring. Such a line contains either the whole ring, which rank 0 prints, or one rank with its neighbors.",
    (
        Column("host", "string", "host name, as printed in the log"),
        Column("pid", "int32", "process id, as printed in the log"),
        Column("comm", "string", "pointer of the communicator", True),
        Column("comm_epoch", "int32", "number of communicators that used this pointer earlier in the process", True),
        Column("channel", "int32", "number of the channel"),
        Column("channels", "int32", "total number of channels", True),
        Column("ranks", "string", "ranks of the ring in ring order, separated by spaces", True),
        Column("rank", "int32", "rank whose neighbors the line contains", True),
        Column("previous", "int32", "rank from which this rank receives", True),
        Column("next", "int32", "rank to which this rank sends", True),
        Column("file", "string", "name of the log file"),
        Column("line", "int64", "line number within the log file, counted from 1"),
    ),
)

NCCL_TREES: Final = Table(
    "nccl_trees",
    "Each row describes the position of one rank in one tree, as printed in an NCCL log.",
    (
        Column("host", "string", "host name, as printed in the log"),
        Column("pid", "int32", "process id, as printed in the log"),
        Column("comm", "string", "pointer of the communicator", True),
        Column("comm_epoch", "int32", "number of communicators that used this pointer earlier in the process", True),
        Column("tree", "int32", "number of the tree, which is the number of its channel"),
        Column("rank", "int32", "rank within the communicator"),
        Column("parent", "int32", "parent of this rank in the tree; null if this rank is the root", True),
        Column("children", "string", "children of this rank in the tree, separated by spaces"),
        Column("file", "string", "name of the log file"),
        Column("line", "int64", "line number within the log file, counted from 1"),
    ),
)

NCCL_LINKS: Final = Table(
    "nccl_links",
    "Each row describes the transport that one channel uses between two ranks, as one process printed it in an NCCL log.",
    (
        Column("host", "string", "host name, as printed in the log"),
        Column("pid", "int32", "process id, as printed in the log"),
        Column("comm", "string", "pointer of the communicator", True),
        Column("comm_epoch", "int32", "number of communicators that used this pointer earlier in the process", True),
        Column("channel", "int32", "number of the channel"),
        Column("connection", "int32", "index of the connection within the channel", True),
        Column("from_rank", "int32", "rank of the sender within the communicator"),
        Column("to_rank", "int32", "rank of the receiver within the communicator"),
        Column("from_device", "string", "Device of the sender, as printed in the log. NCCL up to version 2.18.1 prints a hexadecimal bus id. Later versions print an NVML index.", True),
        Column("to_device", "string", "device of the receiver, as printed in the log", True),
        Column("transport", "string", "transport, as printed in the log, for example P2P/CUMEM/read, SHM/direct/direct or NET/IB/0/GDRDMA"),
        Column("kind", "string", "first word of the column transport: P2P, SHM, NET, COLLNET, ..."),
        Column("direction", "string", "whether the line describes the sending end or the receiving end; null if the line does not state it", True, values=("send", "receive")),
        Column("lines", "int64", "number of log lines with the same content"),
        Column("file", "string", "name of the log file with the first of these lines"),
        Column("line", "int64", "number of the first of these lines within its log file, counted from 1"),
    ),
)

NCCL_TUNING: Final = Table(
    "nccl_tuning",
    "Each row describes one operation whose algorithm NCCL printed in its log. NCCL 2.20 and newer print the algorithm. In most versions, only rank 0 of the communicator prints it.",
    (
        Column("host", "string", "host name, as printed in the log"),
        Column("pid", "int32", "process id, as printed in the log"),
        Column("tid", "int32", "thread id, as printed in the log"),
        Column("comm", "string", "pointer of the operation's communicator; null unless the order and the bytes of the lines determine it", True),
        Column("op", "string", "operation; null if this version of NCCL does not print it", True, values=OPS),
        Column("bytes", "int64", "Bytes, as printed in the log. NCCL up to version 2.23 prints the bytes of the whole operation. Later versions print the bytes of one rank's part.", unit="bytes"),
        Column("algorithm", "string", "algorithm: TREE, RING, COLLNET_DIRECT, COLLNET_CHAIN, NVLS, NVLS_TREE, PAT, or the name of the kernel as printed in the log", True),
        Column("protocol", "string", "protocol: LL, LL128 or SIMPLE", True),
        Column("first_channel", "int32", "number of the first channel that the operation may use", True),
        Column("last_channel", "int32", "number of the last channel that the operation may use", True),
        Column("predicted_us", "float64", "time that NCCL's model predicts; this time is not measured", True, unit="us"),
        Column("op_line", "int64", "line number of the operation's COLL line; null unless the order and the bytes of the lines determine it", True),
        Column("file", "string", "name of the log file"),
        Column("line", "int64", "line number within the log file, counted from 1"),
    ),
)

NCCL_ALGORITHMS: Final = Table(
    "nccl_algorithms",
    "Each row contains the algorithm of one recorded operation, read from a log of the NCCL Inspector. The log contains the algorithm in version 4.2 and newer of its format.",
    (
        Column("rank", "int32", "global rank of the process that issued the operation"),
        Column("attempt", "int32", "number of times the job had been restarted, 0 for the first start"),
        Column("pid", "int32", "process id"),
        Column("seq", "int64", "value of seq in the operation's record"),
        Column("algorithm", "string", "algorithm, as written in the log: TREE, RING, COLLNET_DIRECT, COLLNET_CHAIN, NVLS, NVLS_TREE or PAT"),
        Column("protocol", "string", "protocol, as written in the log: LL, LL128 or SIMPLE", True),
        Column("channels", "int32", "number of channels that the operation's kernel uses; recorded only if the log is verbose", True),
    ),
    key=("rank", "attempt", "pid", "seq"),
)

NCCL_MESSAGES: Final = Table(
    "nccl_messages",
    "Each row contains one warning of an NCCL log, or one trace line of the error that caused a warning.",
    (
        Column("host", "string", "host name, as printed in the log"),
        Column("pid", "int32", "process id, as printed in the log"),
        Column("tid", "int32", "thread id, as printed in the log"),
        Column("device", "int32", "CUDA device, as printed in the log", True),
        Column("level", "string", "Kind of the message. A trace is a line of the form file.cc:NNN -> R", values=("warn", "abort", "trace")),
        Column("source", "string", "position in NCCL's source code, written as file:line", True),
        Column("function", "string", "name of the function in NCCL's source code; printed by NCCL 2.30.7 and newer", True),
        Column("result", "int32", "ncclResult code that a trace line reports", True),
        Column("text", "string", "text of the message"),
        Column("file", "string", "name of the log file"),
        Column("line", "int64", "line number within the log file, counted from 1"),
    ),
)

MATCHES: Final = Table(
    "matches",
    "This table matches records with lines of the NCCL log. Each matched pair has one row. Each record without a line, and each line without a record, also has one row.",
    (
        Column("state", "string", "State of the row. matched: a record and its line. missing: a record without a line. extra: a line without a record. ambiguous: a record or a line that several partners match equally well. torn: a truncated or interleaved line", values=("matched", "missing", "extra", "ambiguous", "torn")),
        Column("rank", "int32", "global rank of the record", True),
        Column("attempt", "int32", "number of times the job had been restarted, 0 for the first start", True),
        Column("record_pid", "int32", "process id of the record", True),
        Column("seq", "int64", "value of seq in the record", True),
        Column("pg", "string", "process group of the record", True),
        Column("comm", "string", "pointer of the communicator that the line names", True),
        Column("comm_id", "string", "commId of the line's communicator", True),
        Column("op", "string", "operation of the record or the line", values=OPS),
        Column("record_bytes", "int64", "value of payload_bytes in the record", True, unit="bytes"),
        Column("line_bytes", "int64", "value of message_bytes in the row of the table nccl_ops for this line", True, unit="bytes"),
        Column("file", "string", "log file that contains the line", True),
        Column("line", "int64", "line number within this file, counted from 1", True),
        Column("reason", "string", "why the record or line has no partner", True),
        Column("part", "int32", "index of this line among the lines that NCCL prints for the record, from 0", True),
        Column("parts", "int32", "number of lines that NCCL prints for the record", True),
        Column("host", "string", "host name in the line", True),
        Column("line_pid", "int32", "process id in the line", True),
        Column("comm_epoch", "int32", "number of communicators that used this pointer earlier in the process", True),
    ),
)

COMM_MATCHES: Final = Table(
    "comm_matches",
    "Each row describes one communicator of an NCCL log. It contains the communicator's process group, and the numbers of matched and unmatched lines.",
    (
        Column("host", "string", "host name, as printed in the log"),
        Column("pid", "int32", "process id, as printed in the log"),
        Column("comm", "string", "pointer of the communicator"),
        Column("comm_epoch", "int32", "number of communicators that used this pointer earlier in the process"),
        Column("comm_id", "string", "commId that NCCL prints; it is the same on all ranks of the communicator", True),
        Column("nranks", "int32", "number of ranks in the communicator", True),
        Column("rank", "int32", "global rank of the process", True),
        Column("pg", "string", "name of the process group that the communicator belongs to", True),
        Column("group_ranks", "string", "global ranks of this process group", True),
        Column("confidence", "string", "Confidence of the assignment. certain: torch's log lines or the ranks determine the group. likely: the operations determine the group. none: no group was found", values=("certain", "likely", "none")),
        Column("basis", "string", "evidence by which the communicator is assigned to the group", True),
        Column("reason", "string", "why the communicator is not assigned to a group", True),
        Column("matched", "int64", "number of log lines that have a record"),
        Column("missing", "int64", "number of expected lines that the log does not contain"),
        Column("extra", "int64", "number of log lines that have no record"),
        Column("ambiguous", "int64", "number of log lines that match several equal records"),
        Column("torn", "int64", "number of truncated or interleaved lines of the process that name this communicator, or that can only belong to it"),
        Column("ambiguous_records", "int64", "number of records that match several equal log lines", True),
        Column("ambiguous_missing", "int64", "lower bound on the number of ambiguous records that have no line", True),
        Column("ambiguous_extra", "int64", "lower bound on the number of ambiguous lines that have no record", True),
        Column("generated", "bool", "whether the log itself states that it was generated, which means that NCCL did not write it", True),
    ),
)

FLIGHT: Final = Table(
    "flight",
    "Each row is an entry that torch's Flight Recorder had on a rank when recording ended. The Flight Recorder is the list of operations that the backend itself keeps. It contains only the newest operations.",
    (
        Column("rank", "int32", "global rank of the process"),
        Column("attempt", "int32", "number of times the job had been restarted, 0 for the first start"),
        Column("pid", "int32", "process id"),
        Column("pg", "string", "name of the process group"),
        Column("group_desc", "string", "torch's description of the group", True),
        Column("seq", "int64", "number that the backend gave to the collective, or to the message if is_p2p is true"),
        Column("op_id", "int64", "number of the operation within the group, with collectives and messages counted together", True),
        Column("is_p2p", "bool", "whether the operation is a send or a recv"),
        Column("name", "string", "name of the operation in the backend, for example gloo:all_reduce"),
        Column("op", "string", "the operation that this name denotes", True, values=OPS),
        Column("input_bytes", "int64", "bytes of the operation's inputs", True, unit="bytes"),
        Column("output_bytes", "int64", "bytes of the operation's outputs", True, unit="bytes"),
        Column("state", "string", "state that the backend reported: scheduled, started or completed", True),
        Column("time_realtime_ns", "int64", "when the entry was created, according to CLOCK_REALTIME", True, unit="ns"),
    ),
)

LOOPBACK: Final = "lo"  # the interface through which the processes of a host reach each other

WIRE: Final = Table(
    "wire",
    "Each row contains one reading of a traffic counter of the machine. The counters are read at regular intervals. One process of each host also reads them at the boundaries of training steps.",
    (
        Column("host", "string", "host name"),
        Column("device", "string", "name of the network interface or the GPU link"),
        Column("kind", "string", "kind of the device", values=("interface", "nvlink", "pcie")),
        Column("time_ns", "int64", "when the counter was read", unit="ns"),
        Column("sent_bytes", "int64", "number of bytes sent since the counter started", unit="bytes"),
        Column("received_bytes", "int64", "number of bytes received since the counter started", unit="bytes"),
        Column("step", "int32", "Training step that had just ended when the counter was read. The value is -1 if the first step was about to begin. It is null if the counter was read at a sampling interval.", True),
        Column("sent_packets", "int64", "number of packets sent since the counter started; sent_bytes includes the headers of these packets", True),
        Column("resent_segments", "int64", "number of TCP segments that the host has retransmitted since the counter started, summed over all interfaces", True),
        Column("queued_bytes", "int64", "Number of unacknowledged bytes in the send buffers of the TCP sockets. For the device lo, these are the bytes that are sent to this host itself. For all other devices, these are the bytes that are sent to other hosts. Null if the buffers were not read.", True, unit="bytes", since=2),
    ),
    key=("host", "device", "time_ns"),
)

SAMPLES: Final = Table(
    "samples",
    "Each row contains one value that a sampler read from a GPU or from CPU stacks. Samplers read values at regular intervals.",
    (
        Column("host", "string", "host name"),
        Column("source", "string", "sampler that read the value: nvml, py-spy or proc"),
        Column("device", "string", "device that the sampler read", True),
        Column("name", "string", "name of the sampled quantity"),
        Column("value", "float64", "value of the quantity"),
        Column("time_ns", "int64", "when the value was read", unit="ns"),
    ),
)

CLOCKS: Final = Table(
    "clocks",
    "Each row contains a reading of the monotonic clock together with a reading of the real-time clock. Each rank reads the clocks when it starts, once a minute, and when it ends.",
    (
        Column("rank", "int32", "global rank of the process that read the clocks"),
        Column("attempt", "int32", "number of times the job had been restarted, 0 for the first start"),
        Column("pid", "int32", "process id"),
        Column("host", "string", "host name"),
        Column("monotonic_ns", "int64", "reading of CLOCK_MONOTONIC", unit="ns"),
        Column("realtime_ns", "int64", "reading of CLOCK_REALTIME at the same time", unit="ns"),
        Column("uncertainty_ns", "int64", "maximum time between the readings of the two clocks", unit="ns"),
        Column("clock", "string", "Identifier of the clock, which consists of the kernel's boot and the time namespace. Processes with the same value read the same clock.", True),
    ),
)

CLOCK_OFFSETS: Final = Table(
    "clock_offsets",
    "Each row contains the offset between the monotonic clock of a host and the clock of rank 0. The offset is measured by message exchanges at the start and at the end of the run.",
    (
        Column("rank", "int32", "global rank that measured the offset"),
        Column("attempt", "int32", "number of times the job had been restarted, 0 for the first start"),
        Column("pid", "int32", "process id"),
        Column("host", "string", "host name"),
        Column("reference_rank", "int32", "global rank whose clock is the reference"),
        Column("time_ns", "int64", "when the offset was measured, according to the clock of this rank", unit="ns"),
        Column("offset_ns", "int64", "offset to add to a time of this rank to get the time of the reference clock", unit="ns"),
        Column("error_ns", "int64", "maximum difference between offset_ns and the true offset", unit="ns"),
        Column("exchanges", "int32", "number of message exchanges that the measurement used"),
    ),
    key=("rank", "attempt", "pid", "time_ns"),
)

AGGREGATES: Final = Table(
    "aggregates",
    "Each row contains sums over operations of a step. The sums are recorded instead of rows in the table collectives. With --aggregate, commprof records sums for all steps. With --max-size, it records sums after 80 % of the size limit has been used.",
    (
        Column("rank", "int32", "global rank of the process that issued the operations"),
        Column("attempt", "int32", "number of times the job had been restarted, 0 for the first start"),
        Column("pid", "int32", "process id"),
        Column("step", "int32", "training step of the operations; -1 outside all steps"),
        Column("after_step", "int32", "last training step before the operations, if the operations are outside all steps", True, since=2),
        Column("phase", "string", "what the training was doing when the operations were issued", values=PHASES),
        Column("op", "string", "the operation that was issued", values=OPS),
        Column("intended_op", "string", "the operation that the runtime intended, if it issued a different one", True, values=OPS),
        Column("purpose", "string", "why the operations were issued, as reported by the runtime", True, values=PURPOSES),
        Column("pg", "string", "name of the process group"),
        Column("group_ranks", "string", "global ranks of the group, written as 0-3 or 0,2"),
        Column("group_size", "int32", "number of ranks in the group"),
        Column("is_p2p", "bool", "whether the operation is a send or a recv"),
        Column("calls", "int64", "number of operations that this rank issued"),
        Column("payload_bytes", "int64", "sum of payload_bytes over these operations", unit="bytes"),
        Column("input_bytes", "int64", "sum of input_bytes over these operations", unit="bytes"),
        Column("output_bytes", "int64", "sum of output_bytes over these operations", unit="bytes"),
        Column("host_ns", "int64", "sum of return_ns - issue_ns over these operations", unit="ns"),
        Column("exposed_ns", "int64", "sum of exposed_ns over these operations", True, unit="ns"),
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
        return Field(name, "B", "index of the value in the column's list of values")
    if column.type == "bool":
        return Field(name, "B", "1 for true, 0 for false")
    if column.type == "string":
        return Field(name, "I", "number of the interned string; 0 for null")
    return Field(
        name,
        _CODES[column.type],
        "value of the column; 0 for null" if column.nullable else "value of the column",
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
    Field("tag", "I", "number of the interned tag; 0 if there is no tag"),
    *map(_field_of, ("call_site", "thread", "step", "micro_step", "coalesce_id", "replays")),
    *map(_field_of, ("phase", "layer", "status", "captured")),
    Field(
        "commit",
        "I",
        "the constant COMMIT (0x434F4D4D), which is written last and marks the record as complete",
    ),
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
