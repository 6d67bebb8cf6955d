"""The contents of one rank's file: tensors, whose keys state their meaning, and scalars in the header.

====================================  ============================================================================
key                                   tensor
====================================  ============================================================================
``value/<start>/<name>``              elements from <start> of parameter <name>: of its fp32 master if it is trained
``state.<state>/<start>/<name>``      the same elements of one tensor of the optimizer's state
``whole.<state>/0/<name>``            a complete state tensor whose shape differs from the parameter's
``buffer/<name>``                     a persistent buffer
``random/<generator>``                the state of a random generator
``residual/<name>``                   the residual of gradient compression of parameter <name> on this rank
``json/<number>``                     a tensor inside client state, options or the state of a schedule
====================================  ============================================================================

Exactly one rank writes each element of each parameter: the rank whose optimizer updates the element. If all
ranks have the complete parameter, the rank that has the fewest elements to write so far writes it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from commprof import hooks
from zero_runtime.checkpoint.files import random_state
from zero_runtime.checkpoint.files.tensor_file import Entry, as_bytes, entry_of
from zero_runtime.checkpoint.files.values import Encoder
from zero_runtime.checkpoint.training import Training, buffers, parameters, whole_shape
from zero_runtime.comm import DataParallelGroup
from zero_runtime.experts.expert_parameters import group_of, is_expert
from zero_runtime.optimizer_step.fragments import NumberTensor, Stored
from zero_runtime.sharding.shards import Shard, shard_of

METADATA: Final = "zero_runtime"
_CHECKPOINT: Final = hooks.tag("checkpoint")


def entries(training: Training, excluded: Iterable[str]) -> tuple[list[Entry], dict[str, str]]:
    """Return this rank's tensors and the metadata of its file, without the ``excluded`` parameters.

    Raises:
        CheckpointError: A checkpoint cannot store one of the state values.
    """
    rank = training.group.rank
    writers = _writers(training)
    collected: list[Entry] = []
    scalars: dict[str, list[str]] = {}
    if training.optimizer is not None:
        for fragment in training.optimizer.stored():
            if fragment.numel and (training.sharded or writers[fragment.name] == rank):
                collected += _fragment_entries(fragment)
                scalars.setdefault(_scalars_text(fragment), []).append(fragment.name)
    trained, left_out = training.trained, set(excluded)
    for name, parameter in parameters(training).items():
        if name not in trained and name not in left_out:
            collected += _parameter_entries(name, parameter, training.group.rank, writers[name])
    collected += [
        entry_of(f"random/{name}", state)
        for name, state in random_state.collect(training.group.device).items()
    ]
    layout = None
    if training.residuals is not None:
        collected += [
            entry_of(f"residual/{name}", each) for name, each in training.residuals.stored().items()
        ]
        layout = training.residuals.layout._asdict()
    scalar_groups = [
        {"parameters": names, "scalars": json.loads(text)} for text, names in scalars.items() if text != "{}"
    ]
    content = {
        "rank": rank,
        "world_size": training.group.world_size,
        "scalars": scalar_groups,
        **({} if layout is None else {"residuals": layout}),
    }
    return collected, {METADATA: json.dumps(content)}


def buffer_entries(module: torch.nn.Module, group: DataParallelGroup) -> list[Entry]:
    """Return the entries of this rank's buffers. Ranks other than 0 write buffers only if theirs differ from rank 0's.

    If the model has buffers, this function issues one broadcast of 8 bytes.
    """
    named = buffers(module)
    if not named:
        return []
    crc = 0
    for buffer in named.values():
        crc = zlib.crc32(as_bytes(buffer), crc)
    agreed = torch.tensor([crc], dtype=torch.int64, device=group.device)
    group.broadcast(agreed, 0, why=_CHECKPOINT)
    if group.rank != 0 and int(agreed.item()) == crc:
        return []
    return [entry_of(f"buffer/{name}", buffer) for name, buffer in named.items()]


def _writers(training: Training) -> dict[str, int]:
    """Return, for each parameter of this rank, the rank that writes it if several ranks have the complete parameter."""
    loads = [0] * training.group.world_size
    writers = {}
    for name, parameter in parameters(training).items():
        if is_expert(parameter):
            writers[name] = training.group.global_ranks.index(
                training.experts[group_of(parameter)].data.global_ranks[0]
            )
            continue
        writers[name] = loads.index(min(loads))
        loads[writers[name]] += torch.Size(whole_shape(parameter)).numel()
    return writers


def _fragment_entries(fragment: Stored) -> list[Entry]:
    place = f"{fragment.start}/{fragment.name}"
    shape = (fragment.numel,)
    return [
        Entry(f"value/{place}", fragment.master.dtype, shape, fragment.master.read),
        *(
            Entry(f"state.{name}/{place}", each.dtype, shape, each.read)
            for name, each in fragment.state.items()
        ),
        *(entry_of(f"whole.{name}/0/{fragment.name}", tensor) for name, tensor in fragment.whole.items()),
    ]


def _parameter_entries(name: str, parameter: torch.nn.Parameter, rank: int, writer: int) -> list[Entry]:
    """Return the entries of a parameter that no optimizer updates.

    If the parameter is sharded, each rank writes its shard. Otherwise one rank writes the complete parameter.
    """
    shard = shard_of(parameter)
    if shard is None:
        if rank != writer or parameter.numel() == 0:
            return []
        return [entry_of(f"value/0/{name}", parameter, (parameter.numel(),))]
    start = rank * shard.slice_numel
    numel = min(shard.slice_numel, shard.numel - start)
    if numel <= 0:
        return []
    return [Entry(f"value/{start}/{name}", shard.dtype, (numel,), lambda: _own_shard(shard, numel))]


def _own_shard(shard: Shard, numel: int) -> torch.Tensor:
    with shard.lent() as shard_values:
        return shard_values.narrow(0, 0, numel)


def _scalars_text(fragment: Stored) -> str:
    encoder = Encoder()
    encoded: Mapping[str, Any] = {
        name: {
            "value": encoder.encode(f"state {name!r} of {fragment.name}", value.value),
            "dtype": str(value.dtype).removeprefix("torch."),
            **({"shape": list(value.shape)} if value.shape else {}),
        }
        if isinstance(value, NumberTensor)
        else {"value": encoder.encode(f"state {name!r} of {fragment.name}", value)}
        for name, value in fragment.scalars.items()
    }
    return json.dumps(encoded)
