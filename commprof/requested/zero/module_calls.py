"""Predicts which messages each module call of a micro-batch at stage 3 issues, waits for and prefetches.

The calls are in the order that the rules assume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from commprof.requested.configuration import read_configuration, zero_section
from commprof.requested.parameters import Parameter, in_model_order
from commprof.requested.zero.flat_stages import Runtime
from commprof.requested.zero.gather_configuration import GatherConfiguration, read_gather_configuration
from commprof.requested.zero.gathering import gathers_of, persistent_parameters
from commprof.requested.zero.modules import module_tree, training_visits
from commprof.requested.zero.parameter_blocks import gathered_blocks
from commprof.requested.zero.sharded import gather_messages, used_parameters
from commprof.requested.zero.unpartitioned import unpartitioned


class GatherMessage(NamedTuple):
    """A message that gathers parameters among all ranks, within a forward or backward pass."""

    op: str
    payload_bytes: int


class ModuleCall(NamedTuple):
    """The event that a module is entered in a forward or backward pass.

    Attributes:
        parameters: The module's own parameters.
        forward: Whether the call belongs to the forward pass, not to the backward pass.
        own: The numbers of the messages that the call first issues, for its own parameters.
        waits: The numbers of the messages that the call then waits for, which it or earlier calls issued.
        ahead: The numbers of the messages that the call issues last, for later modules.
    """

    parameters: tuple[Parameter, ...]
    forward: bool
    own: tuple[int, ...]
    waits: tuple[int, ...]
    ahead: tuple[int, ...]


class ModuleCalls(NamedTuple):
    """The module calls of a micro-batch, with the messages that they refer to by position.

    Attributes:
        messages: The messages that gather parameters.
        calls: The module calls in order.
        unknown: The config key that prevents the prediction of calls, or an empty string if the calls are predicted.
        gathering: The settings of stage 3 if the calls are not predicted, or None.
    """

    messages: tuple[GatherMessage, ...]
    calls: tuple[ModuleCall, ...]
    unknown: str = ""
    gathering: GatherConfiguration | None = None


def module_calls(
    config: Mapping[str, Any],
    parameters: Sequence[Parameter],
    world_size: int,
    gradient_order: Sequence[str] | None,
    micro_steps: int,
    iteration: int,
    runtime: Runtime,
) -> ModuleCalls:
    """Return the module calls of micro-batch number ``iteration``.

    The arguments are those of ``zero_stages.expected``. If parameters are gathered by blocks or in groups of fewer
    ranks, the result contains no calls, but the key that is the reason.

    Raises:
        RequestedError: the config cannot be read.
    """
    configuration, zero = read_configuration(config), zero_section(config)
    gathering = read_gather_configuration(zero)
    if runtime == "deepspeed":
        configuration = configuration.as_deepspeed_reads()
    unpartitioned_names = unpartitioned(zero, parameters) if runtime == "zero_runtime" else frozenset()
    used = used_parameters(parameters, gradient_order)
    # These two keys gather in groups of fewer ranks, or in other units than modules.
    if 1 < gathering.secondary_size < world_size:
        return ModuleCalls((), (), "zero_hpz_partition_size", gathering)
    if runtime == "zero_runtime" and gathered_blocks(used, gathering, unpartitioned_names):
        return ModuleCalls((), (), "stage3_gather_unit", gathering)
    persistent = {
        each.name
        for each in persistent_parameters(in_model_order(parameters), gathering, unpartitioned_names)
    }
    gathers = gathers_of(
        used,
        gathering,
        persistent & {each.name for each in used},
        micro_steps,
        iteration,
        unpartitioned_names,
    )
    messages: list[GatherMessage] = []
    issued: dict[tuple[int, bool], list[int]] = {}
    waiting: list[tuple[set[str], list[int]]] = []
    by_call: dict[int, list[tuple[set[str], list[int]]]] = {}
    for gather in gathers.gathers:
        sent = gather_messages(gathers._replace(gathers=(gather,)), configuration, gathering, world_size)
        sizes = [GatherMessage(str(each.op), size) for each in sent for size in each.payloads]
        numbers = list(range(len(messages), len(messages) + len(sizes)))
        messages += sizes
        issued.setdefault((gather.call, gather.ahead), []).extend(numbers)
        by_call.setdefault(gather.call, []).append(({each.name for each in gather.parameters}, numbers))
    calls: list[ModuleCall] = []
    entered = [each for each in training_visits(module_tree(used, gathering.is_leaf)) if each.enters]
    # A message that was sent ahead is awaited by the first module that uses one of its parameters.
    for number, visit in enumerate(entered):
        waiting += by_call.get(number, [])
        names = {each.name for each in visit.module.parameters}
        due = [each for each in waiting if each[0] & names]
        waiting = [each for each in waiting if not each[0] & names]
        calls.append(
            ModuleCall(
                visit.module.parameters,
                visit.forward,
                tuple(issued.get((number, False), ())),
                tuple(index for _, numbers in due for index in numbers),
                tuple(issued.get((number, True), ())),
            )
        )
    return ModuleCalls(tuple(messages), tuple(calls))
