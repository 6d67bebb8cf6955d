"""Engines of a run in turn: each asks for what its own config says, in its own steps.

A program may call ``initialize`` again when it has trained, with another number of micro-batches for instance. What such
a call sends belongs to no step: it stands with what is sent before the first one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from commprof.ledger.attribution import Class, Want
from commprof.ledger.demand import COMPLETE, demands
from commprof.ledger.issue import INIT_STEP, Issued, StepKey
from commprof.ledger.lookup import Flags, Numbers, numbers_of, where
from commprof.ledger.request import RecordedRun, Request, request_of
from commprof.schema import Phase

OTHER_MODELS: Final = (
    "the program made several engines, one after the other had trained, and their models have different parameters, of "
    "which the run keeps those of the first"
)
_TOLD: Final = (
    "The program made {count} engines, each after the one before it had trained; they begin at steps {steps}."
)
_END: Final = 1 << 62

Demands = tuple[dict[StepKey, dict[Class, Want]], frozenset[StepKey], list[str]]


class Turn:
    """The part of a run in which one engine trained, as a run of its own, whose first step is 0.

    Args:
        run: all of it.
        after: the last step before this engine was made; -1 for the first engine.
        until: the last step before the next one was made.
        config: of this engine.
    """

    def __init__(self, run: RecordedRun, after: int, until: int, config: Mapping[str, Any]) -> None:
        self._run = run
        self.first, self._until = after + 1, until
        self.path = run.path
        self.health = run.health if until == _END else replace(run.health, state=COMPLETE)
        self.manifest = copy(run.manifest)
        self.manifest.config, self.manifest.effective_config = None, config

    def table(self, name: str) -> pa.Table:
        """A table of the schema: its rows of these steps."""
        return self._own(self._run.table(name))

    def parts(self, name: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Columns of a table of the schema, some rows at a time: those of these steps."""
        if columns is None:
            yield from map(self._own, self._run.parts(name))
            return
        needed = list(dict.fromkeys((*columns, *(["step", "phase"] if name == "collectives" else ["step"]))))
        for part in self._run.parts(name, needed):
            yield self._own(part).select(list(columns))

    def covers(self, key: StepKey) -> bool:
        """Whether step ``key`` of the whole run is one of these."""
        return self.first <= key.step <= self._until

    def _own(self, rows: pa.Table) -> pa.Table:
        if "step" not in rows.column_names:
            return rows
        steps, _ = numbers_of(rows, "step")
        before = steps < 0 if not self.first else np.zeros(len(steps), bool)
        outside = made_anew(rows) if "phase" in rows.column_names else np.zeros(len(steps), bool)
        within = (steps >= self.first) & (steps <= self._until) & ~outside
        kept = within | before
        return _with_steps(rows.filter(pa.array(kept)), np.where(within, steps - self.first, steps)[kept])


def turns_of(run: RecordedRun) -> list[Turn]:
    """The parts of ``run`` in which its engines trained, in order; none where a single one did."""
    told = run.manifest.engines
    if not told or len({entry["attempt"] for entry in run.manifest.ranks}) > 1:
        return []
    ends = [*(each["after"] for each in told[1:]), _END]
    return [Turn(run, each["after"], end, each["config"]) for each, end in zip(told, ends, strict=True)]


def made_anew(rows: pa.Table) -> Flags:
    """Which of ``rows`` were sent by a later call of initialize."""
    initialising = where(rows, ["phase"], lambda phase: phase == Phase.INIT)
    return initialising & (numbers_of(rows, "step")[0] >= 0)


def before_steps(parts: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Records, of which what initialize sent stands before the first step."""
    for part in parts:
        steps, _ = numbers_of(part, "step")
        yield _with_steps(part, np.where(made_anew(part), INIT_STEP, steps))


def demands_in_turn(run: RecordedRun, turns: Sequence[Turn], steps: Issued) -> tuple[Request, Demands]:
    """What each engine of ``run`` asked for, as one request and the demands of all steps.

    Args:
        run: of a single attempt.
        turns: its engines.
        steps: what was issued, with that of initialize before the first step.
    """
    requests = [request_of(turn) for turn in turns]
    told = copy(requests[-1])
    told.source = f"the configs of {len(turns)} engines in turn"
    told.reason = next((each.reason for each in requests if each.reason is not None), None)
    if not all(each["same_model"] for each in run.manifest.engines):
        told.reason = OTHER_MODELS
    if told.reason is not None:
        return told, ({}, frozenset(), [])
    wanted: dict[StepKey, dict[Class, Want]] = {}
    partial: set[StepKey] = set()
    said = [_TOLD.format(count=len(turns), steps=", ".join(str(turn.first) for turn in turns))]
    for turn, request in zip(turns, requests, strict=True):
        own = {
            key._replace(step=key.step - turn.first): messages
            for key, messages in steps.items()
            if turn.covers(key)
        }
        found, stopped, remarks = demands(turn, request, own)
        told.reason = told.reason or request.reason
        for key, classes in found.items():
            if key.step == INIT_STEP:
                _add(wanted.setdefault(key, {}), classes)
            else:
                wanted[key._replace(step=key.step + turn.first)] = classes
        partial |= {key._replace(step=key.step + turn.first) for key in stopped}
        said += [
            f"Of the engine that begins at step {turn.first}, counted from there: {text}" for text in remarks
        ]
    if told.reason is not None:
        return told, ({}, frozenset(), [])
    return told, (wanted, frozenset(partial), said)


def _add(held: dict[Class, Want], more: Mapping[Class, Want]) -> None:
    """Put what one engine sends when it is made to what others do."""
    for kind, want in more.items():
        if kind not in held:
            held[kind] = replace(want)
            continue
        both = held[kind]
        most = (both.most_bytes, want.most_bytes)
        both.count += want.count
        both.payload_bytes += want.payload_bytes
        both.least_bytes += want.least_bytes
        both.exact &= want.exact
        both.estimated |= want.estimated
        both.most_bytes = None if most == (None, None) else sum(each or 0 for each in most)


def _with_steps(rows: pa.Table, steps: Numbers) -> pa.Table:
    at = rows.schema.get_field_index("step")
    field = rows.schema.field(at)
    return rows.set_column(at, field, pa.array(steps, field.type))
