"""The messages of optimizers that exchange signs, not gradients (zero_runtime's 1-bit Adam, 1-bit Lamb, 0/1 Adam).

There are three kinds of steps. A step sends full gradients, as at stage 0, or the signs of values that the optimizer
computes from gradients, or nothing. Source: Tang et al. (arXiv:2102.02888), Li et al. (arXiv:2104.06069), Lu et al.
(arXiv:2202.06009).

The signs of N numbers include an fp32 magnitude for every 2,048 numbers. On two ranks, one all_gather sends them to
every rank. On n > 2 ranks, each rank first receives the signs of its n-th of the numbers by an all_to_all. All ranks
then gather the signs of the means. An n-th is ceil(N / n) numbers, rounded up to blocks of 2,048.
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
    """Return the kind of optimizer step ``step``, counted from 0. The optimizer must be one of :data:`NAMES`.

    Steps that are skipped because a gradient overflowed do not count, so the next step has the number of the skipped
    step.

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
    """Return the number of the first step with messages after the second moment is frozen."""
    params = section(section(config, "optimizer"), "params")
    zero_one = str(section(config, "optimizer").get("type")).lower() == ZERO_ONE
    return _number(params, "var_freeze_step" if zero_one else "freeze_step", _FREEZE)


def _number(params: Mapping[str, Any], name: str, default: int) -> int:
    return count(params, f"optimizer.params.{name}", default, least=1) or default


def _measured(number: int, each: int) -> bool:
    """Return whether step ``number``, counted from 1, sends full gradients to update the second moment.

    These steps are first 1 step apart, then 2, 4 and so on. There are ``each`` such steps for every distance.
    """
    last, distance = 0, 1
    while last < number:
        first = padded(last + 1, distance)
        last = first + (each - 1) * distance
        if first <= number <= last:
            return number % distance == 0
        distance *= 2
    return False


def sign_messages(parameters: Sequence[Parameter], world_size: int) -> list[Expectation]:
    """Return the messages of a step that sends signs."""
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
    """Raise UnsupportedError if the runtime refuses an optimizer of :data:`NAMES` at this ``stage``."""
    kind = section(config, "optimizer").get("type")
    if stage:
        raise UnsupportedError("optimizer.type", kind, "it works at stage 0 only")
