"""The messages of optimizers that exchange signs instead of gradients (zero_runtime's 1-bit Adam, 1-bit Lamb, 0/1 Adam).

A step is of one of three kinds: it sends full gradients, as at stage 0; or the signs of what the optimizer computes from
them; or nothing. Source: Tang et al. (arXiv:2102.02888), Li et al. (arXiv:2104.06069), Lu et al. (arXiv:2202.06009).

The signs of N numbers, with an fp32 magnitude for every 2,048 of them, go to every rank in one all_gather on two ranks. On
n > 2 ranks each rank gets the signs of its n-th of the numbers by an all_to_all, and all gather the signs of the means; an
n-th is ceil(N / n) numbers, rounded up to blocks of 2,048.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from commprof.requested.communication.compression import BLOCK, sign_bytes
from commprof.requested.config_keys import count, section
from commprof.requested.errors import UnsupportedError
from commprof.requested.expectation import Expectation, row
from commprof.requested.parameters import Parameter, trained_groups
from commprof.requested.zero.partition import padded
from commprof.schema import Op, Purpose

ONE_BIT: Final = ("onebitadam", "onebitlamb")
ZERO_ONE: Final = "zerooneadam"
NAMES: Final = (*ONE_BIT, ZERO_ONE)
_FREEZE: Final = 100_000
Kind = Literal["whole", "signs", "nothing"]


def kind_of_step(config: Mapping[str, Any], step: int) -> Kind:
    """What optimizer step ``step``, from 0, of a config with one of :data:`NAMES` sends.

    Steps that are skipped because a gradient overflowed do not count: the next one has their number.

    Raises:
        RequestedError: an argument of the optimizer is not a number.
    """
    params = section(section(config, "optimizer"), "params")
    if str(section(config, "optimizer").get("type")).lower() in ONE_BIT:
        return "whole" if step < _number(params, "freeze_step", _FREEZE) else "signs"
    frozen = _number(params, "var_freeze_step", _FREEZE)
    if step < frozen:
        return "whole" if _measured(step + 1, _number(params, "var_update_scaler", 16)) else "signs"
    after = step + 1 - frozen
    doublings = (after - 1) // _number(params, "local_step_scaler", 32_678)
    most = _number(params, "local_step_clipper", 16)
    apart = most if doublings >= most.bit_length() else min(2**doublings, most)
    return "nothing" if after % apart else "signs"


def steady_step(config: Mapping[str, Any]) -> int:
    """The first step with messages after the second moment is frozen."""
    params = section(section(config, "optimizer"), "params")
    zero_one = str(section(config, "optimizer").get("type")).lower() == ZERO_ONE
    return _number(params, "var_freeze_step" if zero_one else "freeze_step", _FREEZE)


def _number(params: Mapping[str, Any], name: str, default: int) -> int:
    return count(params, f"optimizer.params.{name}", default, least=1) or default


def _measured(number: int, each: int) -> bool:
    """Whether step ``number``, from 1, is among those 1, 2, 4, ... apart, ``each`` of every distance."""
    last, distance = 0, 1
    while last < number:
        first = padded(last + 1, distance)
        last = first + (each - 1) * distance
        if first <= number <= last:
            return number % distance == 0
        distance *= 2
    return False


def sign_messages(parameters: Sequence[Parameter], world_size: int) -> list[Expectation]:
    """The messages that send means as signs, in a step that sends them."""
    numel = sum(each.numel for group in trained_groups(parameters) for each in group)
    if world_size == 1 or not numel:
        return []
    share = numel if world_size == 2 else padded(-(-numel // world_size), BLOCK)
    payload = world_size * sign_bytes(share)
    note = "the optimizer has the ranks exchange signs of what it computes from the gradients"
    gathered = row("step", Purpose.GRADIENT_REDUCE, Op.ALL_GATHER, [payload], world_size, note)
    gathered = gathered._replace(padding_bytes=None)
    messages = [gathered._replace(requested_op=str(Op.ALL_REDUCE), intended_op=str(Op.ALL_REDUCE))]
    if world_size > 2:
        sent = row("step", Purpose.GRADIENT_REDUCE, Op.ALL_TO_ALL, [payload], world_size, note)
        sent = sent._replace(padding_bytes=None)
        messages.insert(0, sent._replace(requested_op=str(Op.ALL_REDUCE), intended_op=str(Op.REDUCE_SCATTER)))
    return messages


def refuse_unknown(config: Mapping[str, Any], stage: int) -> None:
    """Raise UnsupportedError where an optimizer of :data:`NAMES` is refused by the runtime."""
    kind = section(config, "optimizer").get("type")
    if stage:
        raise UnsupportedError("optimizer.type", kind, "it works at stage 0 only")
