"""A first pass over all records of a run, which determines how each record is counted.

A collective counts at the lowest recorded rank of its group, and a message counts at its send. A recv counts only if no
rank of the group recorded a send. The payload of an all_to_all may differ between the ranks, so the rounded mean
counts. With unequal splits, the bytes that a rank keeps for itself may differ too, and they are summed separately.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commprof.ledger.records.row_index import Flags, Lookup, Numbers, combinations, numbers_of, where
from commprof.schema import Op, Phase, Purpose, parse_splits

Group: TypeAlias = tuple[Any, ...]

GROUP: Final = ("attempt", "pg", "group_ranks")
WITHIN_MODELS: Final = frozenset({Purpose.ACTIVATION, Purpose.PIPELINE})
_PROCESS: Final = ("rank", "attempt", "pid")
DEFAULT_GROUP: Final = "default_pg"
# Purposes that a script may use in its own groups.
_OF_SCRIPTS: Final = frozenset(
    {None, Purpose.METRIC, Purpose.CHECKPOINT, Purpose.OTHER, Purpose.CONTROL, Purpose.OBJECT}
)
_PASSES: Final = frozenset({Phase.FORWARD, Phase.BACKWARD})
_KNOWN, _NOT_KNOWN = 1, 2  # whether the splits are known; the largest value of all ranks counts
COLUMNS: Final = (
    *GROUP,
    "group_desc",
    "rank",
    "pid",
    "seq",
    "pg_seq",
    "step",
    "after_step",
    "phase",
    "op",
    "purpose",
    "backend",
    "payload_bytes",
    "group_size",
    "group_rank",
    "input_splits",
    "output_splits",
)


def by_last_step(part: pa.Table) -> pa.Table:
    """Return ``part``, where a record between steps gets the number of the step before, as the rules expect."""
    if "after_step" not in part.column_names:
        return part
    step = pc.coalesce(part["after_step"], part["step"])
    return part.set_column(part.column_names.index("step"), "step", step)


class Survey:
    """The properties of all records of a run that are needed to count each record."""

    def __init__(self) -> None:
        self.records = 0
        self.backends: set[str] = set()
        self._speakers: dict[Group, int] = {}
        self._with_sends: set[Group] = set()
        self._of_runtime: set[Group] = set()
        self._has_default = False  # whether records of the default group were found
        self._first_of_passes, self._last_of_optimizer = Lookup(np.minimum), Lookup(np.maximum)
        self._uneven_bytes, self._uneven_ranks = Lookup(np.add), Lookup(np.add)
        self._uneven_own_bytes, self._splits = Lookup(np.add), Lookup(np.maximum)

    def add(self, part: pa.Table) -> None:
        """Add the records in ``part``, with the columns :data:`COLUMNS`."""
        part = by_last_step(part)
        self.records += len(part)
        self.backends |= {str(name) for (name,), _ in combinations(part, ["backend"]) if name}
        for (*group, rank, op), _ in combinations(part, [*GROUP, "rank", "op"]):
            self._take_in(tuple(group), rank, op)
        for (*group, name, purpose), _ in combinations(part, [*GROUP, "group_desc", "purpose"]):
            self._has_default |= name == DEFAULT_GROUP
            if name == DEFAULT_GROUP or purpose not in _OF_SCRIPTS:
                self._of_runtime.add(tuple(group))
        in_optimizer = part.filter(pa.array(where(part, ["phase"], lambda phase: phase == Phase.OPTIMIZER)))
        self._last_of_optimizer.add(in_optimizer, _PROCESS, "step", numbers_of(in_optimizer, "seq")[0])
        in_passes = part.filter(pa.array(where(part, ["phase"], lambda phase: phase in _PASSES)))
        self._first_of_passes.add(in_passes, _PROCESS, "step", numbers_of(in_passes, "seq")[0])
        uneven = part.filter(pa.array(where(part, ["op"], lambda op: op == Op.ALL_TO_ALL)))
        self._uneven_bytes.add(uneven, GROUP, "pg_seq", numbers_of(uneven, "payload_bytes")[0])
        self._uneven_ranks.add(uneven, GROUP, "pg_seq", np.ones(len(uneven), np.int64))
        own_bytes, splits = _own_bytes(uneven)
        self._uneven_own_bytes.add(uneven, GROUP, "pg_seq", own_bytes)
        if splits.any():
            self._splits.add(uneven, GROUP, "pg_seq", splits)

    def _take_in(self, group: Group, rank: int, op: str) -> None:
        if op == Op.SEND:
            self._with_sends.add(group)
        elif op != Op.RECV:
            self._speakers[group] = min(rank, self._speakers.get(group, rank))

    def counts(self, part: pa.Table) -> Flags:
        """Return which records of ``part`` count for their collective or message."""

        def counts_once(*key: Any) -> bool:
            *group, rank, op = key
            if op in (Op.SEND, Op.RECV):
                return op == Op.SEND or tuple(group) not in self._with_sends
            return bool(self._speakers.get(tuple(group)) == rank)

        return where(part, [*GROUP, "rank", "op"], counts_once)

    def in_evaluation(self, rows: pa.Table) -> Flags:
        """Return whether each of ``rows`` was issued by an evaluation, according to the order of phases on its rank.

        Messages within a model (``WITHIN_MODELS``) outside of forward and backward passes count as evaluation without
        regard to this order. An access to parameters counts as evaluation from the end of one step until a pass of the
        next step sends something. ``rows`` must also have the column ``purpose``.
        """
        forward = where(rows, ["phase"], lambda phase: phase in (Phase.FORWARD, Phase.OTHER))
        last, has_last = self._last_of_optimizer.find(rows, _PROCESS, "step")
        ended = has_last & (numbers_of(rows, "seq")[0] > last)
        inference = where(
            rows,
            ["phase", "purpose"],
            lambda phase, purpose: phase == Phase.OTHER and purpose in WITHIN_MODELS,
        )
        named = where(rows, ["phase"], lambda phase: phase == Phase.EVALUATION)
        first, has_first = self._first_of_passes.find(rows, _PROCESS, "step")
        is_before = where(rows, ["phase"], lambda phase: phase == Phase.OTHER)
        is_before &= ~(has_first & (numbers_of(rows, "seq")[0] > first))
        if "after_step" in rows.column_names:
            is_before |= rows["after_step"].is_valid().to_numpy()
        named |= is_before & where(rows, ["purpose"], lambda purpose: purpose == Purpose.PARAMETER_ACCESS)
        return named | inference | forward & (ended | (numbers_of(rows, "step")[0] < 0))

    def in_group_of_script(self, rows: pa.Table) -> Flags:
        """Return whether each of ``rows`` was issued in a group that only the script uses, and not the config.

        Such a group is not the default group, and none of its records has a purpose of training.
        """
        return where(rows, list(GROUP), lambda *group: self._has_default and group not in self._of_runtime)

    def payload_bytes(self, rows: pa.Table) -> Numbers:
        """Return the payload in bytes of the collective or message of each of ``rows``."""
        own, _ = numbers_of(rows, "payload_bytes")
        uneven = where(rows, ["op"], lambda op: op == Op.ALL_TO_ALL)
        if not uneven.any():
            return own
        total, known = self._uneven_bytes.find(rows, GROUP, "pg_seq")
        ranks, _ = self._uneven_ranks.find(rows, GROUP, "pg_seq")
        mean = np.rint(total / np.maximum(ranks, 1)).astype(np.int64)
        return np.where(uneven & known, mean, own)

    def exchanged_bytes(self, rows: pa.Table) -> pa.Array:
        """Return the bytes that all ranks together send to other ranks, for each all_to_all with splits in ``rows``.

        The value is null for all other rows, and if a rank of the group has no record or its splits are not known.
        """
        splits, known = self._splits.find(rows, GROUP, "pg_seq")
        uneven = known & (splits == _KNOWN) & where(rows, ["op"], lambda op: op == Op.ALL_TO_ALL)
        if not uneven.any():
            return pa.nulls(len(rows), pa.int64())
        total, own_bytes, ranks = (
            lookup.find(rows, GROUP, "pg_seq")[0]
            for lookup in (self._uneven_bytes, self._uneven_own_bytes, self._uneven_ranks)
        )
        uneven &= ranks == numbers_of(rows, "group_size")[0]
        return pa.array(total - own_bytes, mask=~uneven)


def _own_bytes(rows: pa.Table) -> tuple[Numbers, Numbers]:
    """Return the bytes that the rank of each of ``rows`` (all_to_alls) keeps of its own input, and a state.

    The state is :data:`_KNOWN`, :data:`_NOT_KNOWN`, or 0 if the row has no splits.
    """
    sizes, _ = numbers_of(rows, "payload_bytes")
    own_bytes = sizes // np.maximum(numbers_of(rows, "group_size")[0], 1)
    splits_state = np.zeros(len(rows), np.int64)
    columns = ["input_splits", "output_splits"]
    if all(rows[name].null_count == len(rows) for name in columns):
        return own_bytes, splits_state
    for (own, size, *splits), places in combinations(rows, ["group_rank", "group_size", *columns]):
        # Both splits contain the rank's own chunk. An input without splits has equal chunks, which are set above.
        if not any(splits):
            continue
        sizes_of_ranks = (
            None if splits[0] is None else next(filter(None, (_parsed(text, size) for text in splits)), None)
        )
        splits_state[places] = _KNOWN if splits[0] is None or sizes_of_ranks is not None else _NOT_KNOWN
        if sizes_of_ranks is not None and 0 <= own < size:
            own_bytes[places] = sizes_of_ranks[own]
    return own_bytes, splits_state


def _parsed(text: str | None, group_size: int) -> tuple[int, ...] | None:
    return None if text is None else parse_splits(text, group_size)


def survey_of(tables: Iterable[pa.Table]) -> Survey:
    """Return the survey of all records in ``tables``."""
    survey = Survey()
    for part in tables:
        survey.add(part)
    return survey
