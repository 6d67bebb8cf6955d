"""Predicts the memory of the training states on a rank, and the traffic between device, host and disk in a step.

The prediction uses rules, as for the messages, and runs nothing. Activations and the program itself need more memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from commprof.requested.auto_values import decide
from commprof.requested.communication.compression import read_compression
from commprof.requested.config_keys import flag, section
from commprof.requested.configuration import Configuration, read_configuration, zero_section
from commprof.requested.errors import RequestedError
from commprof.requested.memory.offload import Offload, read_offload
from commprof.requested.parameters import Parameter, check_parameters, ep_sizes, in_model_order, item_bytes
from commprof.requested.support import optimizer_type
from commprof.requested.zero.gather_configuration import read_gather_configuration
from commprof.requested.zero.gathering import persistent_parameters
from commprof.requested.zero.parameter_blocks import gathered_blocks, gathered_with_gradients
from commprof.requested.zero.partition import lay_out
from commprof.requested.zero.zero_stages import micro_steps

# The number of fp32 numbers that an optimizer keeps for each element of a parameter.
_STATES: Final[Mapping[str, int]] = {
    **dict.fromkeys(
        ("adam", "adamw", "lamb", "nadam", "radam", "adamax", "fusedadam", "cpuadam", "muadam", "muadamw"), 2
    ),
    **dict.fromkeys(("adagrad", "lion", "rmsprop", "muon"), 1),
    "adadelta": 2,
}
_WIDE: Final = 4  # bytes of an fp32 number
_FILED_SHARE: Final = 8  # buffers have room for 1 / 8 of the elements in files
_FILED_LEAST: Final = 2**22
_CHUNK: Final = 2**22  # with nvme, the most elements in a chunk that is in memory for an optimizer update
_SHARE: Final = 64
_SMALLEST: Final = 2**18
_BUCKETS_UNDER_WAY: Final = 2  # if reductions overlap with the backward pass


class Holding(NamedTuple):
    """The memory that one rank needs for one kind of data, in bytes.

    Attributes:
        what: The kind of data: ``parameters``, ``secondary shards``, ``gathered parameters``, ``updated shards``,
            ``gradients``, ``reduced gradients``, ``left-over gradients``, ``momentum before compression``,
            ``gradient buckets``, ``masters``, ``optimizer states``, ``buffers of files`` or, for DeepSpeed,
            ``offloaded gradients``.
        device: The bytes on the accelerator. On a machine without an accelerator, these bytes are in host memory too.
        host: The bytes in host memory.
        disk: The bytes in files.
        note: A remark for the report, which may be empty.
    """

    what: str
    device: int
    host: int = 0
    disk: int = 0
    note: str = ""


class Movement(NamedTuple):
    """The bytes of one kind of data that move between two places of one rank in each optimizer step.

    Attributes:
        what: The kind of data, as in a Holding.
        source: ``device``, ``host`` or ``disk``.
        target: ``device``, ``host`` or ``disk``.
        num_bytes: The bytes in one step.
    """

    what: str
    source: str
    target: str
    num_bytes: int


class _Sizes(NamedTuple):
    """The sizes that the rules depend on.

    Attributes:
        numel: The number of elements of all parameters.
        share: The number of elements of one rank's shards, including padding. Without partitioning it is ``numel``.
        chunk: The number of elements of the largest chunk of a flat buffer, or 0 if no buffer has several chunks.
        item: The bytes of an element in the model.
        master: The bytes of an element of the master copy, or 0 if the optimizer updates the parameter itself.
        state: The bytes of the optimizer states per element.
        gradient: The bytes of an element of an accumulated gradient.
        block: The number of elements of the largest block that stage 3 gathers and reduces by one message, or 0 if
            stage 3 gathers by modules.
    """

    numel: int
    share: int
    chunk: int
    item: int
    master: int
    state: int
    gradient: int
    block: int


def holdings(
    config: Mapping[str, Any], parameters: Sequence[Parameter], world_size: int, backend: str = "nccl"
) -> list[Holding]:
    """Return the memory of the rank that needs the most while it trains with ``config``.

    Args:
        config: The config file as DeepSpeed reads it.
        parameters: All parameters of the model. If the config names no element type, each parameter has its own type.
        world_size: The number of ranks that train on different data.
        backend: The backend of the process group. ``gloo`` means CPUs. There, buffers stay allocated, and a
            reduce_scatter is an all_to_all. Also with ``offload_optimizer``, fp32 parameters are their own masters.

    Raises:
        RequestedError: the config or the parameters cannot be used as they are.
    """
    check_parameters(parameters)
    config = decide(config, parameters, world_size, backend).config
    by_type: dict[str, list[Parameter]] = {}
    named = read_configuration(config).model_dtype
    for parameter in parameters:
        by_type.setdefault(named or parameter.dtype, []).append(parameter)
    listed = [each for own in by_type.values() for each in _of_one_type(config, own, world_size, backend)]
    if len(by_type) == 1:
        return listed
    totals: dict[str, Holding] = {}
    for each in listed:
        sums = totals.get(each.what, Holding(each.what, 0, note=each.note))
        totals[each.what] = sums._replace(
            device=sums.device + each.device, host=sums.host + each.host, disk=sums.disk + each.disk
        )
    return list(totals.values())


def _of_one_type(
    config: Mapping[str, Any], parameters: Sequence[Parameter], world_size: int, backend: str
) -> list[Holding]:
    configuration, offload, sizes = _read(config, parameters, world_size, backend)
    listed = _parameters(config, configuration, offload, sizes, parameters, world_size)
    if sizes.chunk or configuration.quantises_weights:
        listed.append(Holding("updated shards", sizes.share * sizes.item, note="before they are shared"))
    listed += _gradients(config, configuration, sizes, backend, micro_steps(config, world_size) > 1)
    away = round(sizes.share * offload.ratio) if offload.optimizer != "none" else 0
    for what, item in (("masters", sizes.master), ("optimizer states", sizes.state)):
        there = away * item
        listed.append(
            Holding(
                what,
                sizes.share * item - there,
                there if offload.optimizer == "cpu" else 0,
                there if offload.optimizer == "nvme" else 0,
                _state_note(config) if what == "optimizer states" else "",
            )
        )
    gathering = read_gather_configuration(zero_section(config))
    ahead = min(gathering.prefetch_bucket_size, gathering.max_live_parameters) // world_size
    buffers = _buffers(offload, sizes, ahead)
    if buffers:
        listed.append(Holding("buffers of files", 0, buffers))
    return [each for each in listed if each.device or each.host or each.disk]


def movements(
    config: Mapping[str, Any], parameters: Sequence[Parameter], world_size: int, gathered_bytes: int
) -> list[Movement]:
    """Return the traffic of one rank between device, host and disk in each step.

    Args:
        config, parameters, world_size: The same as for :func:`holdings`.
        gathered_bytes: The payload bytes of all messages that gather parameters in a step (stage 3).

    Raises:
        RequestedError: the config or the parameters cannot be used as they are.
    """
    _, offload, sizes = _read(config, parameters, world_size)
    listed = []
    if offload.parameters != "none":
        sent = gathered_bytes // world_size  # each message consists of one shard of every rank
        in_files = _in_files(offload, sizes.share)
        if in_files:
            updated = 0 if sizes.master else in_files * sizes.item
            listed.append(
                Movement("parameters", "disk", "host", sent * in_files // max(sizes.share, 1) + updated)
            )
            listed.append(Movement("parameters", "host", "disk", in_files * sizes.item))
        listed.append(Movement("parameters", "host", "device", sent))
        if offload.optimizer == "none":
            listed.append(Movement("parameters", "device", "host", sizes.share * sizes.item))
    if offload.optimizer != "none":
        away = round(sizes.share * offload.ratio)
        if offload.optimizer == "nvme":
            for what, item in (("masters", sizes.master), ("optimizer states", sizes.state)):
                listed += [
                    Movement(what, "disk", "host", away * item),
                    Movement(what, "host", "disk", away * item),
                ]
        listed.append(Movement("gradients", "device", "host", away * sizes.gradient))
        if offload.parameters == "none":
            listed.append(Movement("parameters", "host", "device", away * sizes.item))
    return [each for each in listed if each.num_bytes]


def _read(
    config: Mapping[str, Any], parameters: Sequence[Parameter], world_size: int, backend: str = "nccl"
) -> tuple[Configuration, Offload, _Sizes]:
    if world_size < 1:
        raise RequestedError(f"the world size is {world_size}; expected 1 or more")
    check_parameters(parameters)
    configuration = read_configuration(config)
    offload = read_offload(zero_section(config), configuration.stage)
    numel = share = sum(parameter.numel for parameter in parameters)
    chunk = block = 0
    if configuration.stage == 3:
        share = sum(-(-parameter.numel // world_size) for parameter in parameters)
        blocks = gathered_blocks(parameters, read_gather_configuration(zero_section(config)))
        block = max((sum(each.numel for each in members) for members in blocks), default=0)
    elif configuration.partitions:
        by_size = {
            size: [each for each in parameters if each.ep_size == size] for size in ep_sizes(parameters)
        }
        layout = lay_out(
            list(by_size.values()),
            world_size,
            configuration.model_dtype,
            round_robin=configuration.round_robin_gradients,
            align_parameters=configuration.parameter_alignment,
            bucket_size=configuration.reduce_bucket_size
            if configuration.reduces_chunks and set(by_size) <= {None}
            else None,
        )
        share = sum(each.shard_numel for each in layout.groups)
        chunk = max((each.chunk_numel for each in layout.groups if each.chunks > 1), default=0)
    dtype = parameters[0].dtype if parameters else "float32"
    item = item_bytes(configuration.model_dtype or dtype)
    # If the config names no element type, the optimizer updates the parameters themselves at stage 0.
    in_place = configuration.stage == 0 and configuration.model_dtype is None
    wide = item if in_place or _narrow_masters(config) else _WIDE
    # A parameter with the element size of a master needs no master. With offload_param, this is true only for
    # parameters in files, which are read for their update. Parameters in host memory need a master.
    apart = offload.parameters != "none" and not _in_files(offload, share)
    stays = offload.optimizer == "none" or (offload.optimizer == "cpu" and backend == "gloo")
    own = item == wide and stays and not apart
    accumulation = configuration.accumulation_dtype
    gradient = item_bytes(accumulation) if accumulation else item
    return (
        configuration,
        offload,
        _Sizes(numel, share, chunk, item, 0 if own else wide, wide * _states(config), gradient, block),
    )


def _narrow_masters(config: Mapping[str, Any]) -> bool:
    """Return whether the optimizer updates the 16-bit parameters themselves, without fp32 masters."""
    name = "bf16" if "bf16" in config or "bfloat16" not in config else "bfloat16"
    return flag(section(config, name), f"{name}.bf16_master_weights_and_grads", False)


def _states(config: Mapping[str, Any]) -> int:
    kind = optimizer_type(config)
    if kind == "sgd":
        compression = read_compression(config)
        if compression is not None and compression.corrects_momentum:
            return 0  # the momentum of each rank's own gradients replaces this state
        block = config["optimizer"].get("params") or {}
        return 1 if isinstance(block, Mapping) and block.get("momentum") else 0
    return _STATES.get(kind, 2)


def _state_note(config: Mapping[str, Any]) -> str:
    kind = optimizer_type(config)
    return (
        ""
        if kind in _STATES or kind == "sgd"
        else "those of Adam: the config names no optimizer that is known here"
    )


def _parameters(
    config: Mapping[str, Any],
    configuration: Configuration,
    offload: Offload,
    sizes: _Sizes,
    parameters: Sequence[Parameter],
    world_size: int,
) -> list[Holding]:
    if configuration.stage != 3:
        return [Holding("parameters", sizes.numel * sizes.item, note="whole on every rank")]
    in_files = _in_files(offload, sizes.share)
    shard_bytes = (sizes.share - in_files) * sizes.item
    on_device = offload.parameters == "none"
    shards = Holding(
        "parameters", shard_bytes if on_device else 0, 0 if on_device else shard_bytes, in_files * sizes.item
    )
    gathering = read_gather_configuration(zero_section(config))
    of_shards = [shards]
    if 1 < gathering.secondary_size <= world_size:
        secondary = sizes.share * world_size // gathering.secondary_size * sizes.item
        places = (secondary, 0) if on_device else (0, secondary)
        note = "of the parameters that this step has gathered and released: at most, until the optimizer step ends"
        of_shards.append(Holding("secondary shards", *places, note=note))
    listed = in_model_order(parameters)
    note = "at most, while modules use them"
    if sizes.block:
        blocks = gathered_blocks(listed, gathering)
        numel = max(gathered_with_gradients(listed, blocks, gathering).values())
        note += f": {len(blocks)} blocks, each gathered by one message, {sizes.block * sizes.item:,} bytes at most"
        return [*of_shards, Holding("gathered parameters", numel * sizes.item, note=note)]
    persistent = sum(each.numel for each in persistent_parameters(listed, gathering))
    largest = max((each.numel for each in listed), default=0)
    # Parameters that are used again soon stay gathered, and prefetching stops at max_live_parameters elements.
    limit = max(gathering.max_live_parameters, gathering.max_reuse_distance) + largest + persistent
    gathered_numel = min(sizes.numel, limit)
    if gathered_numel == sizes.numel:
        note += (
            ": all of the model, since stage3_max_reuse_distance and stage3_max_live_parameters allow as much"
        )
    return [*of_shards, Holding("gathered parameters", gathered_numel * sizes.item, note=note)]


def _gradients(
    config: Mapping[str, Any], configuration: Configuration, sizes: _Sizes, backend: str, accumulates: bool
) -> list[Holding]:
    if configuration.stage >= 2 and not configuration.reduces_every_micro_step and accumulates:
        note = "whole on every rank until the last micro-batch of a step"
        listed = [
            Holding("gradients", sizes.numel * sizes.gradient, note=note),
            Holding("reduced gradients", sizes.share * sizes.gradient),
        ]
    elif configuration.stage < 2:
        listed = [
            Holding("gradients", sizes.numel * sizes.item, note="whole on every rank until they are reduced")
        ]
        if configuration.partitions:
            reduced = sizes.numel if configuration.reduces_flat_groups else sizes.share
            listed.append(Holding("reduced gradients", reduced * sizes.gradient))
    else:
        listed = [Holding("gradients", sizes.share * sizes.gradient)]
    compression = configuration.compression
    if compression is not None and compression.error_feedback:
        left = Holding("left-over gradients", sizes.numel * _WIDE, note="what compression has not sent yet")
        listed.append(left)
        if compression.corrects_momentum:
            note = "the momentum of SGD, of this rank's own gradients"
            listed.append(Holding("momentum before compression", sizes.numel * _WIDE, note=note))
    buckets = _bucket_bytes(config, configuration, sizes, backend)
    return [*listed, Holding("gradient buckets", buckets, note="at most, in the backward pass")]


def _bucket_bytes(
    config: Mapping[str, Any], configuration: Configuration, sizes: _Sizes, backend: str
) -> int:
    """Return the most bytes that the buffers of gradient buckets need at once."""
    sent_item = item_bytes(configuration.communication_dtype)
    if configuration.reduces_whole_in_buckets:
        # A bucket is a copy while it is sent. Then its buffer contains the gradients. A copy in another element type
        # stays until the sum arrives.
        bucket = min(configuration.reduce_bucket_size, sizes.numel) * sizes.item
        return bucket + (sizes.numel * sent_item if sent_item != sizes.item else 0)
    if not configuration.partitions:
        # The buffers contain all gradients, and a copy of all gradients if they are sent in another element type.
        return sizes.numel * (sizes.item + (sent_item if sent_item != sizes.item else 0))
    if configuration.reduces_flat_groups:
        same = configuration.communication_dtype == configuration.accumulation_dtype
        return 0 if same else sizes.numel * sent_item
    numel = min(configuration.reduce_bucket_size, sizes.numel)
    overlaps = reduces_beside_backward(config)
    if configuration.reduces_chunks or sizes.block:
        # One buffer is being filled, and one or two are being sent. A buffer that is being sent needs a second buffer
        # for the received data, unless only a shard is received. A third chunk may be sent at the same time, but only
        # after the peak, when the activations of the last layers are already freed.
        sent = _BUCKETS_UNDER_WAY if overlaps and not sizes.block else 1
        arrives = configuration.reduce_scatter_on(backend) != "native"
        return (sizes.block or sizes.chunk or numel) * sent_item * (1 + sent * (1 + arrives))
    if not overlaps:
        return numel * sizes.item
    # Two buffers are used in turn. On CPUs both stay allocated even if a step has only one bucket.
    filled = _BUCKETS_UNDER_WAY if backend == "gloo" else -(-sizes.numel // max(numel, 1))
    return numel * sizes.item * min(_BUCKETS_UNDER_WAY, filled)


def reduces_beside_backward(config: Mapping[str, Any]) -> bool:
    """Return whether the reduction of gradient buckets overlaps with the backward pass."""
    configuration = read_configuration(config)
    if configuration.reduces_whole_in_buckets:
        return True
    if not configuration.partitions or configuration.reduces_flat_groups:
        return False
    if zero_section(config).get("overlap_comm") is None:
        # This default exists only in zero_runtime, for a reduction that DeepSpeed does not have.
        return configuration.overlap_comm or (
            configuration.stage == 2 and configuration.reduction == "reduce_scatter"
        )
    return configuration.overlap_comm


def _in_files(offload: Offload, share: int) -> int:
    """Return how many elements of a rank's ``share`` are in files."""
    return max(share - offload.max_in_cpu, 0) if offload.parameters == "nvme" else 0


def _buffers(offload: Offload, sizes: _Sizes, ahead: int) -> int:
    """Return the bytes of the buffers for files. ``ahead`` elements of a rank's shards are prefetched at once."""
    filed = _in_files(offload, sizes.share)
    needed = min(offload.buffers, max(filed // _FILED_SHARE, ahead, _FILED_LEAST), filed) * sizes.item
    if offload.optimizer == "nvme":
        chunk = min(max(sizes.share // _SHARE, _SMALLEST), _CHUNK, sizes.share)
        needed += offload.optimizer_buffers * chunk * (sizes.master + sizes.state + _WIDE)
    return needed
