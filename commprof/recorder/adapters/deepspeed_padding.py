"""Determines the padding of DeepSpeed's messages: elements without data that make all shards equally long.

Note [padding]: DeepSpeed requests a gather in one function and issues it in another, which may issue several
messages. So the wrapper of the first function notes the expected messages. The wrapper of the second function
matches its message with the expected ones, in the order in which DeepSpeed gathers. It compares the buffer
(stages 1 and 2), or the number of elements of this rank's shard (stage 3). The padding of a message without a
match is not known. Quantized messages are left out, because their elements are not the elements of the
parameters. Muon's exchanges are also left out.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import distributed

from commprof import hooks
from commprof.recorder.adapters.patching import Patches
from commprof.schema import Purpose

_COMM: Final = "deepspeed.comm"
_STAGE_1_2: Final = "deepspeed.runtime.zero.stage_1_and_2"
_BF16: Final = "deepspeed.runtime.bf16_optimizer"
_STAGE_3: Final = "deepspeed.runtime.zero.stage3"
_PARAMETERS: Final = "deepspeed.runtime.zero.partition_parameters"
_COORDINATOR: Final = "deepspeed.runtime.zero.partitioned_param_coordinator"
_FETCHER: Final = "PartitionedParameterCoordinator"
PADDED: Final = frozenset({_COMM, _STAGE_1_2, _BF16, _STAGE_3, _PARAMETERS, _COORDINATOR})  # modules

Call = Callable[..., Any]
Args = Sequence[Any]
Kwargs = Mapping[str, Any]


class _Shard(NamedTuple):
    """A parameter that is about to be gathered.

    Attributes:
        numel: The number of elements of this rank's shard.
        secondary: The number of elements of the secondary shard (hpZ), which is a shard within a subset of the
            ranks. Equal to ``numel`` if there is no secondary shard.
        unpadded_numel: The number of elements of the whole parameter without padding.
        dtype: The dtype of the shard.
    """

    numel: int
    secondary: int
    unpadded_numel: int
    dtype: torch.dtype | None


class _Expected:
    """The messages that are expected next.

    Args:
        flat: The flat buffers that are gathered, each with the number of parameter elements in it.
        shards: The shards in the order in which they are gathered. The shards in one list may be sent in one
            message.
    """

    def __init__(
        self, flat: Iterable[tuple[torch.Tensor, int]] = (), shards: Iterable[list[_Shard]] = ()
    ) -> None:
        self._flat = list(flat)
        self._shards = [each for each in shards if each]

    def unpadded_numel(self, output: torch.Tensor | None, sent: torch.Tensor) -> int | None:
        """Return the number of parameter elements in the message to which this rank contributes ``sent``.

        The matched shards are removed from the expected messages. The result is None if no expected message matches.
        """
        for buffer, numel in self._flat:
            if buffer is output:
                return numel
        if not sent.is_floating_point():
            return None
        for place, shards in enumerate(self._shards):
            for together in (shards, [each for each in shards if each.dtype == sent.dtype], shards[:1]):
                if together and sent.numel() in (
                    sum(each.numel for each in together),
                    sum(each.secondary for each in together),
                ):
                    gone = {id(each) for each in together}
                    self._shards[place] = [each for each in shards if id(each) not in gone]
                    self._shards = [each for each in self._shards if each]
                    return sum(each.unpadded_numel for each in together)
        return None


class Paddings:
    """Tags messages with their padding.

    Args:
        on_fault: A function that is called with each exception of the recorder's own code.
    """

    def __init__(self, on_fault: Callable[[Exception], None]) -> None:
        self._on_fault = on_fault
        self._thread = threading.local()
        self._numels: weakref.WeakKeyDictionary[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()

    def wrap(self, module: ModuleType, patches: Patches) -> None:
        """Wrap the functions of ``module`` that request gathers, and the functions that issue them."""
        for name, path, read in (
            (_STAGE_1_2, "DeepSpeedZeroOptimizer.step", self._groups_of),
            (_STAGE_1_2, "DeepSpeedZeroOptimizer.update_lp_params", self._groups_of),
            (_BF16, "BF16_Optimizer.update_lp_params", self._groups_of),
            (_COORDINATOR, f"{_FETCHER}._{_FETCHER}__all_gather_params_", _fetched),
            (_PARAMETERS, "Init._allgather_param", _gathered_one),
            (_PARAMETERS, "Init._allgather_params", _gathered_together),
            (_PARAMETERS, "Init._allgather_params_coalesced", _gathered),
            (_PARAMETERS, "Init._allgather_params_sequential", _gathered),
            (_STAGE_3, "DeepSpeedZeroOptimizer_Stage3._fp32_state_allgather", _gathered_state),
        ):
            if module.__name__ == name:
                patches.wrap(module, path, partial(self._expecting, read=read))
        for name, path, message in (
            (_COMM, "all_gather_into_tensor", _output_and_input),
            (_COMM, "all_gather", _outputs_and_input),
            (_PARAMETERS, "_dist_allgather_fn", _input_and_output),
        ):
            if module.__name__ == name:
                patches.wrap(module, path, partial(self._sending, message=message))
        if module.__name__ == _STAGE_3:
            patches.wrap(module, "reduce_scatter_coalesced", self._scattering)

    def _expecting(self, original: Call, read: Callable[[Args, Kwargs], _Expected | None]) -> Call:
        """Wrap a function that requests gathers. ``read`` returns the expected messages for its arguments."""

        def gather(*args: Any, **kwargs: Any) -> Any:
            thread = self._thread
            outer = getattr(thread, "expected", None)
            thread.expected = self._try(read, args, kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                thread.expected = outer

        return gather

    def _sending(
        self, original: Call, message: Callable[[Args, Kwargs], tuple[list[torch.Tensor], torch.Tensor]]
    ) -> Call:
        """Wrap a function that issues one gather. ``message`` returns its outputs and its input."""

        def padding_bytes(args: Args, kwargs: Kwargs) -> int | None:
            outputs, sent = message(args, kwargs)
            unpadded_numel = self._thread.expected.unpadded_numel(
                outputs[0] if len(outputs) == 1 else None, sent
            )
            numel = sum(each.numel() for each in outputs)
            return None if unpadded_numel is None else (numel - unpadded_numel) * sent.element_size()

        def send(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._thread, "expected", None) is None:
                return original(*args, **kwargs)
            return self._padded(original, padding_bytes, args, kwargs)

        return send

    def _scattering(self, original: Call) -> Call:
        """Wrap ``reduce_scatter_coalesced``, which pads each tensor to a multiple of the number of ranks."""

        def padding_bytes(args: Args, kwargs: Kwargs) -> int:
            tensors = args[0] if args else kwargs["tensors"]
            ranks = distributed.get_world_size(args[1] if len(args) > 1 else kwargs.get("group"))
            return sum(-each.numel() % ranks for each in tensors) * tensors[0].element_size()

        def scatter(*args: Any, **kwargs: Any) -> Any:
            return self._padded(original, padding_bytes, args, kwargs)

        return scatter

    def _padded(
        self, original: Call, padding_bytes: Callable[[Args, Kwargs], int | None], args: Args, kwargs: Kwargs
    ) -> Any:
        """Call ``original``, which issues one collective, under the current tag with the padding added."""
        padding = self._try(padding_bytes, args, kwargs)
        if not padding or padding < 0:
            return original(*args, **kwargs)
        with with_padding(hooks.current_tag() or _GATHER, padding):
            return original(*args, **kwargs)

    def _groups_of(self, args: Args, kwargs: Kwargs) -> _Expected:
        """Return the flat buffers of an optimizer of stage 1 or 2, one for each parameter group."""
        optimizer = args[0]
        kind = "bit16" if hasattr(optimizer, "bit16_groups_flat") else "bf16"
        numels = self._numels.get(optimizer)
        if numels is None:
            groups = getattr(optimizer, f"{kind}_groups")
            numels = self._numels[optimizer] = tuple(sum(p.numel() for p in group) for group in groups)
        return _Expected(flat=zip(getattr(optimizer, f"{kind}_groups_flat"), numels, strict=True))

    def _try(self, read: Callable[[Args, Kwargs], Any], args: Args, kwargs: Kwargs) -> Any:
        """Return the result of ``read``; None if it raised. The exception never reaches the training."""
        try:
            return read(args, kwargs)
        except Exception as error:
            self._on_fault(error)
            return None


_GATHER: Final = hooks.tag(Purpose.PARAMETER_GATHER.value)


def with_padding(tag: hooks.tag, padding_bytes: int) -> hooks.tag:
    """Return ``tag`` with a number of padding bytes added."""
    return _padded_tag(
        tag.purpose,
        tag.bucket,
        tag.owner,
        tag.parameters,
        tag.intended_op,
        tag.bucket_bytes,
        tag.module,
        padding_bytes,
    )


# The tags are cached, because the same messages recur in every step. A reused tag is cheaper for the recorder.
@lru_cache(maxsize=4096)
def _padded_tag(*fields: Any) -> hooks.tag:
    return hooks.tag(*fields)


def gradient_padding(optimizer: Any, gradients: Iterable[Any]) -> int:
    """Return the number of padding elements in ``gradients``.

    There is padding if BF16_Optimizer reduces flat buffers that are longer than its parameter groups.
    """
    flat = getattr(optimizer, "fp32_groups_gradients_flat", ())
    groups = {
        id(buffer): group for buffer, group in zip(flat, getattr(optimizer, "bf16_groups", ()), strict=False)
    }
    return sum(
        each.numel() - sum(parameter.numel() for parameter in groups[id(each)])
        for each in gradients
        if id(each) in groups
    )


def _shards(parameters: Iterable[Any]) -> list[_Shard] | None:
    """Return the shards of ``parameters``; None if any shard is quantized."""
    shards = []
    for parameter in parameters:
        own = parameter.ds_tensor
        if hasattr(own, "ds_quant_scale"):
            return None
        secondary = getattr(parameter, "ds_secondary_tensor", None)
        numel = int(own.ds_numel)
        within = numel if secondary is None else int(secondary.numel())
        shards.append(_Shard(numel, within, int(parameter.ds_numel), own.dtype))
    return shards


def _fetched(args: Args, kwargs: Kwargs) -> _Expected | None:
    """Return the messages that the coordinator of stage 3 gathers.

    The coordinator gathers all parameters that are not available. Parameters with a secondary shard are first.
    """
    _, parameters, *rest = args
    if kwargs.get("quantize", rest[1] if len(rest) > 1 else False):
        return None
    lists: dict[tuple[bool, int], list[Any]] = {}
    for parameter in parameters:
        if parameter.ds_status.name == "NOT_AVAILABLE":
            is_primary = getattr(parameter, "ds_secondary_tensor", None) is None
            lists.setdefault((is_primary, id(parameter.ds_process_group)), []).append(parameter)
    ordered = sorted(lists.items(), key=lambda item: item[0][0])
    shards = [_shards(sorted(each, key=lambda parameter: parameter.ds_id)) for _, each in ordered]
    known = [each for each in shards if each is not None]
    return _Expected(shards=known) if len(known) == len(shards) else None


def _gathered(args: Args, kwargs: Kwargs) -> _Expected | None:
    """Return the messages in which a method of ``Init`` gathers parameters, one message for each parameter."""
    parameters, quantizes = kwargs.get("param_list", args[1] if len(args) > 1 else ()), args[3:4]
    shards = None if kwargs.get("quantize", quantizes and quantizes[0]) else _shards(parameters)
    return None if shards is None else _Expected(shards=([each] for each in shards))


def _gathered_together(args: Args, kwargs: Kwargs) -> _Expected | None:
    """Return the single message in which a method of ``Init`` gathers several parameters."""
    shards = _shards(kwargs.get("param_list", args[1] if len(args) > 1 else ()))
    return None if shards is None else _Expected(shards=[shards])


def _gathered_one(args: Args, kwargs: Kwargs) -> _Expected | None:
    shards = _shards([kwargs.get("param", args[1] if len(args) > 1 else None)])
    return None if shards is None else _Expected(shards=[shards])


def _gathered_state(args: Args, kwargs: Kwargs) -> _Expected:
    """Return the message in which an optimizer state is gathered, in the same way as its parameter."""
    names = ("param", "fp32_state_partition")
    parameter, state = (args[n] if n < len(args) else kwargs[name] for n, name in enumerate(names, 1))
    return _Expected(shards=[[_Shard(state.numel(), state.numel(), int(parameter.ds_numel), state.dtype)]])


def _output_and_input(args: Args, kwargs: Kwargs) -> tuple[list[torch.Tensor], torch.Tensor]:
    output, sent = _two(args, kwargs, ("output_tensor", "tensor"))
    return [output], sent


def _outputs_and_input(args: Args, kwargs: Kwargs) -> tuple[list[torch.Tensor], torch.Tensor]:
    outputs, sent = _two(args, kwargs, ("tensor_list", "tensor"))
    return list(outputs), sent


def _input_and_output(args: Args, kwargs: Kwargs) -> tuple[list[torch.Tensor], torch.Tensor]:
    sent, output = _two(args, kwargs, ("input_tensor", "output_tensor"))
    return [output], sent


def _two(args: Args, kwargs: Kwargs, names: tuple[str, str]) -> Iterator[Any]:
    return (args[n] if n < len(args) else kwargs[name] for n, name in enumerate(names))
