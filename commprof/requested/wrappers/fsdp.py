"""Predicts the messages of FSDP 1 (``FullyShardedDataParallel``) from the arguments and parameters of its units.

A unit flattens its parameters into one tensor, padded to a multiple of the number of ranks. With ``use_orig_params``
each parameter begins at a multiple of 16 bytes. A pass gathers the flat parameter if it is sharded. The parameter is
sharded again after a backward pass. With ``FULL_SHARD`` and ``HYBRID_SHARD`` it is also sharded again after a forward
pass, except for the root.

The gradients of a unit are reduced by a reduce_scatter. With a hybrid strategy, an all_reduce over the replicas
follows. With ``NO_SHARD`` the gradients are reduced by one all_reduce.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from commprof.requested.expectation import Expectation
from commprof.requested.parameters import item_bytes
from commprof.requested.wrappers.arguments import ShardedModel, Wrapper
from commprof.requested.zero.partition import padded
from commprof.schema import Op, Purpose

SHARDED, WHOLE = "S", "U"
State = tuple[str, ...]  # for each unit SHARDED or WHOLE
_FREED_AFTER_FORWARD: Final = ("FULL_SHARD", "HYBRID_SHARD")
_ALIGNMENT_BYTES: Final = 16
_NORM_BYTES: Final = 4  # one fp32
_PASS: Final = re.compile(r"(?P<kind>[FpbkBurEeN])(?P<unit>\d+)?")


@dataclass(frozen=True)
class Fsdp(ShardedModel):
    """The rules for one model."""

    @property
    def unpredicted(self) -> dict[str, str]:
        """The purposes that the rules do not predict, each with the reason."""
        reasons = {}
        if any(unit.arguments.get("comm_hook") for unit in self.units):
            reasons[str(Purpose.GRADIENT_REDUCE)] = "a communication hook decides what is sent"
        # These messages are sent before the recorder sees the wrapper.
        reasons[str(Purpose.PARAMETER_BROADCAST)] = (
            "what sync_module_states broadcasts is not covered by the rules"
        )
        return reasons

    def passes(self, passes: str, state: State | None) -> tuple[list[Expectation], State]:
        """Return the messages of ``passes``, and the state after them.

        Raises:
            RequestedError: a pass is not known.
        """
        states = list(state or (SHARDED,) * len(self.units))
        rows: list[Expectation] = []
        for match in self.matches(passes, _PASS):
            rows += self._ran(match["kind"], int(match["unit"] or 0), states)
        return rows, tuple(states)

    def _ran(self, kind: str, number: int, states: list[str]) -> list[Expectation]:
        unit = self.units[number]
        rows: list[Expectation] = []
        if kind in "Fpu":
            rows = self._gathered(unit, states[number], in_full_precision=kind == "u")
            frees = kind == "F" and number != self._root and _strategy(unit) in _FREED_AFTER_FORWARD
            states[number] = SHARDED if frees else WHOLE
        elif kind in "br" or (kind == "k" and _strategy(unit) in _FREED_AFTER_FORWARD):
            states[number] = SHARDED
        elif kind in "Ee":
            for place, each in enumerate(self.units):
                if kind == "E" or _strategy(each) in _FREED_AFTER_FORWARD:
                    states[place] = SHARDED
        elif kind == "B":
            rows = self._reduced(unit)
        elif kind == "N" and self.speaks(unit.ranks) and any(map(_shards, self.units)):
            rows = unit.sent(Purpose.GRADIENT_NORM, Op.ALL_REDUCE, [_NORM_BYTES])
        return rows

    @property
    def _root(self) -> int | None:
        return next((number for number, unit in enumerate(self.units) if unit.arguments.get("root")), None)

    def _gathered(self, unit: Wrapper, before: str, *, in_full_precision: bool) -> list[Expectation]:
        if before == WHOLE or not _shards(unit) or not self.speaks(unit.ranks):
            return []
        dtype = unit.parameters[0].dtype if in_full_precision else unit.arguments.get("param_dtype")
        size = flat_numel(unit) * item_bytes(dtype or unit.parameters[0].dtype)
        return unit.sent(Purpose.PARAMETER_GATHER, Op.ALL_GATHER, [size])

    def _reduced(self, unit: Wrapper) -> list[Expectation]:
        size = flat_numel(unit) * item_bytes(unit.arguments.get("reduce_dtype") or unit.parameters[0].dtype)
        if not _shards(unit):
            return (
                unit.sent(Purpose.GRADIENT_REDUCE, Op.ALL_REDUCE, [size]) if self.speaks(unit.ranks) else []
            )
        rows = []
        if self.speaks(unit.ranks):
            rows += unit.sent(Purpose.GRADIENT_REDUCE, Op.REDUCE_SCATTER, [size])
        if self.speaks(unit.replicas):
            share = [size // len(unit.ranks)]
            rows += unit.sent(Purpose.GRADIENT_REDUCE, Op.ALL_REDUCE, share, ranks=unit.replicas)
        return rows


def _strategy(unit: Wrapper) -> str:
    return str(unit.arguments.get("sharding_strategy"))


def _shards(unit: Wrapper) -> bool:
    return _strategy(unit) != "NO_SHARD"


def flat_numel(unit: Wrapper) -> int:
    """Return the number of elements of the unit's flat parameter, including padding."""
    aligned = bool(unit.arguments.get("use_orig_params"))
    dtype = unit.arguments.get("param_dtype") or unit.parameters[0].dtype
    multiple = max(_ALIGNMENT_BYTES // item_bytes(dtype), 1) if aligned else 1
    total = 0
    for each in unit.parameters:
        total = padded(total, multiple) + each.numel
    return padded(total, len(unit.ranks)) if aligned or _shards(unit) else total
