"""The requested level of runs with several engines that train one after the other, each with its own config and steps.

A program may call ``initialize`` again after training, for example with a different number of micro-batches. The
messages of such a call belong to no step. They count as sent before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commprof.ledger.records.issued import INIT_STEP, Issued, StepKey
from commprof.ledger.records.precount import by_last_step
from commprof.ledger.records.row_index import Flags, numbers_of, where
from commprof.ledger.requests.demand import COMPLETE, demands, gathers_parameters, wanted_before
from commprof.ledger.requests.message_classes import Class, Want
from commprof.ledger.requests.request import RecordedRun, Request, request_of
from commprof.schema import Op, Phase, Purpose

OTHER_MODELS: Final = (
    "the program made several engines, each after the one before it had trained, and their models have different "
    "parameters, but the run stores only those of the first"
)
_SEVERAL_ENGINES: Final = (
    "The program made {count} engines, each after the one before it had trained; they begin at steps {steps}."
)
_REFERENCE: Final = (
    "an engine that takes no step, such as the reference model of DPO, may have run its model in this step"
)
_IDLE: Final = "{count} of them took no step."
_END: Final = 1 << 62
_OF_A_FORWARD: Final = frozenset(
    {(Purpose.PARAMETER_GATHER, Op.ALL_GATHER), (Purpose.TRACE_CHECK, Op.BROADCAST)}
)

Demands = tuple[dict[StepKey, dict[Class, Want]], frozenset[StepKey], list[str]]


class Turn:
    """The part of a run in which one engine trained, presented as a separate run whose first step is 0.

    Args:
        run: The whole run.
        after: The last step before this engine was created, or -1 for the first engine.
        until: The last step before the next engine was created.
        entry: The entry of this engine in the manifest.
    """

    def __init__(self, run: RecordedRun, after: int, until: int, entry: Mapping[str, Any]) -> None:
        self._run = run
        self.first, self._until = after + 1, until
        self.trains = self.first <= until
        self.path = run.path
        self.health = run.health if until == _END else replace(run.health, state=COMPLETE)
        self.manifest = copy(run.manifest)
        self.manifest.config, self.manifest.effective_config = None, entry["config"]
        self.manifest.construction = entry.get("construction")

    def table(self, name: str) -> pa.Table:
        """Return the rows of table ``name`` in the steps of this engine."""
        return self._own(self._run.table(name))

    def parts(self, name: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the rows of table ``name`` in the steps of this engine, in parts, with only ``columns`` if given."""
        if columns is None:
            yield from map(self._own, self._run.parts(name))
            return
        positions = ["step", "after_step", "phase"] if name == "collectives" else ["step"]
        needed = list(dict.fromkeys((*columns, *positions)))
        for part in self._run.parts(name, needed):
            yield self._own(part).select(list(columns))

    def covers(self, key: StepKey) -> bool:
        """Return whether step ``key`` of the whole run is a step of this engine."""
        return self.first <= key.step <= self._until

    def _own(self, rows: pa.Table) -> pa.Table:
        if "step" not in rows.column_names:
            return rows
        steps, _ = numbers_of(by_last_step(rows), "step")
        before = steps < 0 if not self.first else np.zeros(len(steps), bool)
        anew = made_anew(rows) if "phase" in rows.column_names else np.zeros(len(steps), bool)
        within = (steps >= self.first) & (steps <= self._until) & ~anew
        own_rows = rows.filter(pa.array(within | before))
        for name in ("step", "after_step"):
            if name in own_rows.column_names:
                own = own_rows[name]
                numbered_on = pc.if_else(pc.less(own, 0), own, pc.subtract(own, self.first))
                field = own_rows.schema.field(name)
                own_rows = own_rows.set_column(
                    own_rows.column_names.index(name), field, numbered_on.cast(field.type)
                )
        return own_rows


def turns_of(run: RecordedRun) -> list[Turn]:
    """Return the parts of ``run`` in which its engines trained, in order.

    The list is empty for a single engine, for engines that share steps, and for a run with several attempts.
    """
    engines = run.manifest.engines
    if (
        not engines
        or engines[0].get("share_steps")
        or len({entry["attempt"] for entry in run.manifest.ranks}) > 1
    ):
        return []
    ends = [*(each["after"] for each in engines[1:]), _END]
    return [Turn(run, each["after"], end, each) for each, end in zip(engines, ends, strict=True)]


def made_anew(rows: pa.Table) -> Flags:
    """Return which of ``rows`` were sent by a repeated call of ``initialize`` after training had begun."""
    initialising = where(rows, ["phase"], lambda phase: phase == Phase.INIT)
    return initialising & (numbers_of(by_last_step(rows), "step")[0] >= 0)


def before_steps(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield ``tables``, where records of repeated calls of ``initialize`` are moved before the first step."""
    for part in tables:
        anew = pa.array(made_anew(part))
        for name, at in (("step", INIT_STEP), ("after_step", None)):
            if name in part.column_names:
                field = part.schema.field(name)
                moved = pc.if_else(anew, pa.scalar(at, field.type), part[name])
                part = part.set_column(part.column_names.index(name), field, moved)
        yield part


def demands_in_turn(
    run: RecordedRun, turns: Sequence[Turn], steps: Issued
) -> tuple[Request, Demands, list[Request]]:
    """Return a joint request of all engines of ``run``, the expected messages of all steps, and each engine's request.

    Args:
        run: A run with a single attempt.
        turns: The parts of the run in which its engines trained.
        steps: The issued messages. Messages of ``initialize`` are before the first step.
    """
    requests = [request_of(turn) for turn in turns]
    joint = copy(requests[-1])
    joint.source = f"the configs of {len(turns)} engines in turn"
    joint.reason = next((each.reason for each in requests if each.reason is not None), None)
    if not all(each["same_model"] for each in run.manifest.engines):
        joint.reason = OTHER_MODELS
    if joint.reason is not None:
        return joint, ({}, frozenset(), []), []
    wanted: dict[StepKey, dict[Class, Want]] = {}
    partial: set[StepKey] = set()
    before: set[StepKey] = set()
    turns_text = _SEVERAL_ENGINES.format(
        count=len(turns), steps=", ".join(str(turn.first) for turn in turns if turn.trains)
    )
    idle = sum(not turn.trains for turn in turns)
    sentences = [f"{turns_text} {_IDLE.format(count=idle)}" if idle else turns_text]
    for turn, request in zip(turns, requests, strict=True):
        own = {
            key._replace(step=key.step - turn.first): messages
            for key, messages in steps.items()
            if turn.covers(key)
        }
        preceding = steps.get(StepKey(0, turn.first - 1), {})
        own_wanted, stopped, remarks = demands(turn, request, own, preceding)
        joint.reason = joint.reason or request.reason
        before = {key for key in own_wanted if key.step == INIT_STEP}
        wanted |= {
            key._replace(step=key.step + turn.first): classes
            for key, classes in own_wanted.items()
            if key not in before
        }
        partial |= {key._replace(step=key.step + turn.first) for key in stopped}
        sentences += [
            f"Of the engine that begins at step {turn.first}, counted from there: {text}" for text in remarks
        ]
    if joint.reason is not None:
        return joint, ({}, frozenset(), []), []
    if idle and any(gathers_parameters(each) for each in requests):
        _doubt_more(wanted)
    for key in before:
        wanted[key], notes = wanted_before(requests, key, steps.get(key, {}))
        sentences += [f"{note[0].upper()}{note[1:]}." for note in notes]
    return joint, (wanted, frozenset(partial), sentences), requests


def _doubt_more(wanted: dict[StepKey, dict[Class, Want]]) -> None:
    """Mark a surplus of messages of forward passes at stage 3 as doubtful, because an idle engine may have sent it."""
    kinds = {kind for wants in wanted.values() for kind in wants if (kind.purpose, kind.op) in _OF_A_FORWARD}
    known: dict[int, dict[Class, Want]] = {}  # Steps with equal expectations share one value.
    for key, wants in wanted.items():
        if id(wants) not in known:
            doubted = {kind: replace(wants.get(kind) or Want(kind.op), others=_REFERENCE) for kind in kinds}
            known[id(wants)] = wants | doubted
        wanted[key] = known[id(wants)]
