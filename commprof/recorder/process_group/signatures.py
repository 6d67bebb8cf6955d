"""Signatures: the values that are equal in all calls with the same tensors, group and arguments, described once.

``freeze`` returns a key of a call's arguments that contains no tensor. ``describe`` returns the columns of such calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

import torch
from torch._C._distributed_c10d import ReduceOp

from commprof.recorder.process.journal import Journal
from commprof.recorder.process_group.groups import Group
from commprof.recorder.process_group.methods import Method, Shape
from commprof.schema import UNKNOWN_SPLITS, Op, format_splits

_MISSING: Final = object()
_OPTION_NAMES: Final = ("reduceOp", "rootRank", "rootTensor", "asyncOp")
# Methods with one tensor for each rank of the group, and methods that divide a single tensor by rows.
_INPUT_LISTS: Final = frozenset({"alltoall", "reduce_scatter", "scatter"})
_OUTPUT_LISTS: Final = frozenset({"alltoall", "allgather", "gather"})
_SPLIT_BY_ROWS: Final = frozenset({"alltoall_base", "all_to_all_single"})
# The most calls of methods that divide by rows in one table. Thousands of keys that never recur would cost more than
# they save, because Python visits each key at every garbage collection.
_MOST_SPLITS: Final = 1000
_MODULES_OF_TORCH: Final = ("torch.distributed.distributed_c10d", "torch._C._distributed_c10d")
_REDUCTION: Final = ReduceOp
_REDUCTION_NUMBER: Final = type(ReduceOp.SUM)
_MOST_CLASSES: Final = 1000
_INTEGERS: Final = {int}
_MOST_TEMPLATES: Final = 1000
MOST_CALLS: Final = 20_000


class Planned:
    """A tensor that the collective itself will create, with a given shape and the dtype and device of ``like``."""

    __slots__ = ("device", "dtype", "is_cpu", "shape")

    def __init__(self, shape: tuple[int, ...], like: torch.Tensor) -> None:
        self.shape = shape
        self.dtype = like.dtype
        self.device = like.device
        self.is_cpu = like.is_cpu

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Return the bytes of one element."""
        return self.dtype.itemsize


class CallOptions(NamedTuple):
    """The options of a call that has none of torch's options objects."""

    reduction: str | None
    root: int | None  # group rank
    is_async: bool


def freeze(value: Any) -> Any:
    """Return a hashable key for an argument. It is equal for calls with equal signatures, and contains no tensor."""
    kind = type(value)
    return (FREEZERS.get(kind) or _freezer(kind))(value)


def _freezer(kind: type) -> Callable[[Any], Any]:
    """Return the freezer of a class, and cache it, because the search takes longer than the rest of a record."""
    freezer: Callable[[Any], Any]
    if issubclass(kind, (torch.Tensor, Planned)):
        freezer = freeze_tensor
    elif issubclass(kind, (list, tuple)):
        freezer = _freeze_sequence
    elif kind is type(None) or issubclass(kind, (int, bool, str, float)):
        freezer = _itself
    elif hasattr(kind, "tolist"):
        freezer = _freeze_array  # an array of numpy, which may contain splits
    elif kind.__module__ not in _MODULES_OF_TORCH:
        freezer = _freeze_anything  # the values of the class may differ in the options that they have
    elif kind is _REDUCTION:
        freezer = _freeze_reduction
    elif kind is _REDUCTION_NUMBER:
        freezer = _freeze_reduction_number
    elif any(hasattr(kind, name) for name in _OPTION_NAMES):
        freezer = _options_freezer(kind.__name__, [name for name in _OPTION_NAMES if hasattr(kind, name)])
    else:
        freezer = _freeze_anything
    if len(FREEZERS) < _MOST_CLASSES:
        FREEZERS[kind] = freezer
    return freezer


def freeze_tensor(value: torch.Tensor | Planned) -> Any:
    """Return the key of a tensor.

    ``is_cpu`` is tested first, because most tensors are on the CPU. ``device`` creates an object that is slow to hash.
    """
    return value.shape, value.dtype, value.is_cpu or value.device


def _freeze_sequence(value: Sequence[Any]) -> Any:
    if value and type(value[0]) is int and _are_numbers(value):
        return tuple(value)
    return tuple([(FREEZERS.get(type(item)) or _freezer(type(item)))(item) for item in value])


def _are_numbers(values: Sequence[Any]) -> bool:
    """Return whether all values are of type int, which is the usual case for splits."""
    return set(map(type, values)) == _INTEGERS


def _freeze_array(value: Any) -> Any:
    return freeze(value.tolist())


def _itself(value: Any) -> Any:
    return value


def _freeze_reduction(value: Any) -> Any:
    return "ReduceOp", hash(value)  # equal to ``value.op.value``, which takes ten times as long


def _freeze_reduction_number(value: Any) -> Any:
    return "ReduceOp", value.value


def _options_freezer(name: str, options: Sequence[str]) -> Callable[[Any], Any]:
    plain = [option for option in options if option != "reduceOp"]  # numbers and flags
    if plain == ["asyncOp"] == options:
        return lambda value: (name, value.asyncOp)
    if plain == ["asyncOp"]:
        return lambda value: (name, hash(value.reduceOp), value.asyncOp)  # see _freeze_reduction
    values_of = attrgetter(*plain)
    if plain == options:
        return lambda value: (name, values_of(value))
    return lambda value: (name, hash(value.reduceOp), values_of(value))


def _freeze_anything(value: Any) -> Any:
    values = [getattr(value, name, _MISSING) for name in _OPTION_NAMES]
    options = tuple([None if each is _MISSING else freeze(each) for each in values])
    if any(each is not _MISSING for each in values):
        return type(value).__name__, options
    return type(value).__name__, _reduce_op_name(value)


# The freezers by class. The compiled wrappers use this table, too.
FREEZERS: Final[dict[type, Callable[[Any], Any]]] = {}


class _Buffers(NamedTuple):
    """A list of tensors, with sums over the tensors."""

    tensors: list[torch.Tensor | Planned]

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    @property
    def numel(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors)

    @property
    def sizes(self) -> str:
        return ";".join(_shape_text(tensor) for tensor in self.tensors)


class _Call(NamedTuple):
    """The arguments of one call, sorted by their meaning."""

    outputs: _Buffers
    inputs: _Buffers
    root: int | None  # the group rank of the root or of the peer
    reduce_op: str | None
    is_async: bool
    output_rows: Any = None  # a sequence of int: the rows received from each rank of the group
    input_rows: Any = None  # a sequence of int: the rows sent to each rank of the group


def describe(method: Method, group: Group, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of ``collectives`` whose source is the signature, except ``api``.

    Args:
        method: The method that was called.
        group: The process group.
        args: The positional arguments after the process group.
        kwargs: The keyword arguments.
    """
    call = _sort_arguments(method, args, kwargs)
    is_root = call.root is not None and call.root == group.rank
    sizes = _measure(method.op, call, is_root, group.size)
    first = next(iter(call.inputs.tensors or call.outputs.tensors), None)
    device = None if first is None else str(first.device)
    return {
        "op": str(method.op),
        "backend_method": method.name,
        "backend": group.backend_for(None if first is None else first.device.type),
        "device": device,
        "reduce_op": call.reduce_op,
        "dtype": None if first is None else str(first.dtype).removeprefix("torch."),
        "num_tensors": len(call.inputs.tensors) or len(call.outputs.tensors),
        "sizes": _sizes_text(method, call),
        "numel": sizes.numel,
        "input_bytes": sizes.input_bytes,
        "output_bytes": sizes.output_bytes,
        "payload_bytes": sizes.payload_bytes,
        "input_splits": _splits(call.inputs, call.input_rows, method.name in _INPUT_LISTS, group.size),
        "output_splits": _splits(call.outputs, call.output_rows, method.name in _OUTPUT_LISTS, group.size),
        "pg": group.name,
        "peer": group.global_rank(call.root),
        "is_async": call.is_async,
        "is_p2p": method.is_p2p,
    }


def _sort_arguments(method: Method, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Call:
    if method.shape is Shape.NONE:
        empty = _Buffers([])
        options = kwargs.get("opts", args[0] if args else None)
        asked = options.is_async if isinstance(options, CallOptions) else getattr(options, "asyncOp", True)
        return _Call(empty, empty, None, None, bool(asked) and not method.blocks)
    tensor_arguments = 2 if method.shape is Shape.OUTPUTS_INPUTS else 1
    buffers = [_Buffers(_flatten(value)) for value in args[:tensor_arguments]]
    rest = list(args[tensor_arguments:])
    outputs, inputs = (
        [*buffers, _Buffers([]), _Buffers([])][:2]
        if tensor_arguments == 2
        else (buffers * 2 or [_Buffers([])] * 2)
    )
    for name, value in kwargs.items():
        if name.startswith("output") and "split" not in name:
            outputs = _Buffers(_flatten(value))
        elif name.startswith("input") and "split" not in name:
            inputs = _Buffers(_flatten(value))
        elif name in ("tensor", "tensors"):
            outputs = inputs = _Buffers(_flatten(value))
    root, reduce_op, is_async = _scalars(method, rest, kwargs)
    output_rows, input_rows = _split_rows(method, rest, kwargs)
    return _Call(outputs, inputs, root, reduce_op, is_async, output_rows, input_rows)


def _split_rows(method: Method, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the numbers of rows received from and sent to each rank; None for a list that the call does not have."""
    if method.name not in _SPLIT_BY_ROWS:
        return None, None
    row_counts = [value for value in rest[:2] if not isinstance(value, CallOptions)]
    output_rows, input_rows = [*row_counts, None, None][:2]
    return kwargs.get("output_split_sizes", output_rows), kwargs.get("input_split_sizes", input_rows)


def _splits(buffers: _Buffers, rows: Any, is_list: bool, group_size: int) -> str | None:
    """Return the bytes for each rank of the group as text; None if the call has no such parts, or all are equal."""
    tensors = buffers.tensors
    if rows is not None:
        if any(isinstance(count, torch.Tensor) for count in rows):
            return UNKNOWN_SPLITS  # reading the tensors may wait for their device
        (tensor,) = tensors
        row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
        return format_splits([int(count) * row_bytes for count in rows])
    if is_list and len(tensors) == group_size:
        return format_splits([tensor.numel() * tensor.element_size() for tensor in tensors])
    return None


def _scalars(
    method: Method, rest: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[int | None, str | None, bool]:
    """Return the root, the reduction, and whether the call requests a handle, from the arguments after the tensors."""
    if method.shape is Shape.ANY_PEER:
        return None, None, True
    if method.shape is Shape.PEER:
        peer = next((value for value in rest if isinstance(value, int)), None)
        return kwargs.get("dstRank", kwargs.get("srcRank", peer)), None, True
    root: int | None = kwargs.get("root")
    reduce_op: str | None = None
    is_async = True
    takes_root = method.op in (Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER)
    for value in (*rest, *(kwargs[name] for name in ("opts", "op") if name in kwargs)):
        if isinstance(value, CallOptions):
            reduce_op, root, is_async = value
        elif hasattr(value, "asyncOp"):
            is_async = bool(value.asyncOp)
            root = getattr(value, "rootRank", root)
            reduce_op = _reduce_op_name(getattr(value, "reduceOp", None))
        elif isinstance(value, int) and takes_root and root is None:
            root = value
        elif _reduce_op_name(value) is not None:
            reduce_op = _reduce_op_name(value)
    if reduce_op is None and method.op in (Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER):
        reduce_op = "SUM"  # torch's default
    if not takes_root:
        return None, reduce_op, is_async
    return (0 if root is None else int(root)), reduce_op, is_async


class _Sizes(NamedTuple):
    numel: int
    input_bytes: int
    output_bytes: int
    payload_bytes: int


def _measure(op: Op, call: _Call, is_root: bool, group_size: int) -> _Sizes:
    """Return elements and bytes by the conventions of the schema; the payload is S as in nccl-tests."""
    inputs, outputs = call.inputs, call.outputs
    match op:
        case Op.ALL_REDUCE | Op.REDUCE:
            return _Sizes(inputs.numel, inputs.bytes, inputs.bytes, inputs.bytes)
        case Op.BROADCAST:
            return _Sizes(inputs.numel, inputs.bytes if is_root else 0, inputs.bytes, inputs.bytes)
        case Op.ALL_GATHER:
            return _Sizes(outputs.numel, inputs.bytes, outputs.bytes, outputs.bytes)
        case Op.REDUCE_SCATTER | Op.ALL_TO_ALL:
            return _Sizes(inputs.numel, inputs.bytes, outputs.bytes, inputs.bytes)
        case Op.GATHER:
            total = inputs.bytes * group_size
            return _Sizes(inputs.numel * group_size, inputs.bytes, outputs.bytes if is_root else 0, total)
        case Op.SCATTER:
            total = outputs.bytes * group_size
            return _Sizes(outputs.numel * group_size, inputs.bytes if is_root else 0, outputs.bytes, total)
        case Op.SEND:
            return _Sizes(inputs.numel, inputs.bytes, 0, inputs.bytes)
        case Op.RECV:
            return _Sizes(outputs.numel, 0, outputs.bytes, outputs.bytes)
        case _:
            return _Sizes(0, 0, 0, 0)


def _flatten(value: Any) -> list[torch.Tensor | Planned]:
    if isinstance(value, (torch.Tensor, Planned)):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _flatten(item)]
    return []


def _is_sparse(tensor: torch.Tensor | Planned) -> bool:
    return getattr(tensor, "layout", torch.strided) is not torch.strided


def _shape_text(tensor: torch.Tensor | Planned) -> str:
    return "x".join(map(str, tensor.shape)) or "()"


def _sizes_text(method: Method, call: _Call) -> str | None:
    if method.shape is Shape.NONE:
        return None
    if method.shape is Shape.OUTPUTS_INPUTS:
        return f"{call.inputs.sizes}->{call.outputs.sizes}"
    return call.inputs.sizes


def _reduce_op_name(value: Any) -> str | None:
    """Return the name of a reduction, for example ``SUM``; None if ``value`` is not a reduction.

    The value may be ``ReduceOp.SUM``, the ReduceOp of an options object, or a value of the enum.
    """
    kind = getattr(value, "op", value)
    name = getattr(kind, "name", None)
    return name if isinstance(name, str) and name.isupper() else None


def most_known(method: Method) -> int:
    """Return the most different calls of ``method`` that a table may contain."""
    return _MOST_SPLITS if method.name in _SPLIT_BY_ROWS else MOST_CALLS


class _Template(NamedTuple):
    """The common values of calls that differ only in the numbers of rows received from and sent to each rank."""

    signature: int  # the number of the first call's signature
    line: str  # the common part of the lines of these calls
    row_bytes: tuple[int, int]  # the bytes of a row of the output, and of a row of the input
    timing: tuple[str, bool] | None  # the device and ``is_async``, for device times; None on the CPU


class Signer:
    """Returns the number of each call's signature, and writes the signature when it first appears.

    Note [splits that never repeat]: a mixture of experts sends different splits in each call. To describe such a call
    and to intern the description takes 50 us or more. For an all_to_all_single with splits, the signer therefore
    writes only the numbers of rows, and the number of a signature that contains all other values. The reader computes
    the rest (``commprof.trace.rank_files.splits``).

    Args:
        journal: The journal that receives the signatures.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._templates: dict[Any, _Template] = {}
        self._has_noted_sparse = False

    def sign(
        self, method: Method, group: Group, args: Sequence[Any], kwargs: Mapping[str, Any], frozen: Any = None
    ) -> int:
        """Return the number of a call's signature.

        Args:
            method: The method that was called.
            group: The process group.
            args: The positional arguments after the process group.
            kwargs: The keyword arguments.
            frozen: The result of ``freeze(args)``, if the caller has already computed it.
        """
        if method.name not in _SPLIT_BY_ROWS or kwargs or len(args) < _WITH_SPLITS:
            return self._describe(method, group, args, kwargs)[0]
        output_rows, input_rows = args[2], args[3]
        if type(output_rows) is not list or type(input_rows) is not list:
            return self._describe(method, group, args, kwargs)[0]
        frozen = frozen or freeze(args)
        of_output, of_input = frozen[0], frozen[1]
        output_shape, input_shape = of_output[0], of_input[0]
        key = (
            method.name,
            group.name,
            output_shape[1:],
            input_shape[1:],
            of_output[1:],
            of_input[1:],
            frozen[_WITH_SPLITS:],
        )
        template = self._templates.get(key)
        if template is None or not _are_numbers(output_rows + input_rows):
            number, timing = self._describe(method, group, args, kwargs)
            if template is None and len(self._templates) < _MOST_TEMPLATES and output_shape and input_shape:
                self._templates[key] = _template(number, args[0], args[1], timing)
            return number
        signature, line, row_bytes, timing = template
        number = self._journal.add_signature(
            signature,
            f'{line}{output_shape[0]},{input_shape[0]}],"splits":[{output_rows!r},{input_rows!r}]}}\n',
            input_shape[0] * row_bytes[1],
            output_shape[0] * row_bytes[0],
        )
        if timing is not None:
            self._journal.device_times.learn(number, *timing)
        return number

    def _describe(
        self, method: Method, group: Group, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[int, tuple[str, bool] | None]:
        journal = self._journal
        row = describe(method, group, args, kwargs)
        if not self._has_noted_sparse and any(map(_is_sparse, _flatten([*args, *kwargs.values()]))):
            self._has_noted_sparse = True
            journal.note(
                f"sparse tensors are counted with the bytes of dense ones of their shape (first: {row['op']} of "
                f"{row['sizes']} {row['dtype']}): what is sent depends on their values"
            )
        number = journal.intern("signature", row)
        if row["device"] in (None, "cpu"):
            return number, None
        group.accelerated = True
        journal.look_closer(group)
        timing = row["device"], row["is_async"]
        journal.device_times.learn(number, *timing)
        return number, timing


_WITH_SPLITS: Final = 4  # the number of arguments with splits: output, input, output rows and input rows


def _template(number: int, output: Any, input_: Any, timing: tuple[str, bool] | None) -> _Template:
    shapes = [list(each.shape[1:]) for each in (output, input_)]
    sizes = [math.prod(each.shape[1:]) * each.element_size() for each in (output, input_)]
    line = f'"like":{number},"row_shapes":{shapes},"row_bytes":{sizes},"rows":['
    return _Template(number, line, (sizes[0], sizes[1]), timing)
