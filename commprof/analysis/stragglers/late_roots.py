"""Find stragglers in rooted collectives: a root or a sender that is late by its own delay.

The functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.ranks.rank_arrivals import FROM_ROOT, REAL_WAIT_NS, TO_ROOT
from commprof.analysis.stragglers.late_ranks import Waits, binomial_tail, heaviest, warm_steps

Numbers = npt.NDArray[np.int64]

_CHANCE: Final = 0.01  # the probability that equal ranks arrive in the same order this often
_WORTH: Final = 0.02  # of the time: the lowest cost of a late rank
_NUMBERS: Final = (
    "attempt",
    "step",
    "rank",
    "peer",
    "group_size",
    "awaited_own_ns",
    "awaited_later_ns",
    "own_lead_ns",
)


class LateRoot(NamedTuple):
    """A rank for which other ranks wait in rooted collectives.

    Attributes:
        op: The operation.
        is_root: True if the rank is the root, False if the rank is a sender for which the root waits.
        cost_ns: The time in ns that other ranks waited for the own delay of the rank.
        collectives: The number of collectives, out of ``compared``, in which the rank arrived late by its own
            delay.
    """

    rank: int
    op: str
    is_root: bool
    cost_ns: int
    collectives: int
    compared: int


class RootedCollectives:
    """Collects arrivals of rooted collectives, one partition after another."""

    def __init__(self) -> None:
        self._tables: list[pa.Table] = []

    def add(self, arrived: pa.Table) -> None:
        """Add the rows of the ranks for which others wait."""
        names = [*_NUMBERS, "op", "group_ranks"]
        if arrived["awaited_own_ns"].null_count < len(arrived):
            some = arrived.select(names).filter(arrived["awaited_own_ns"].is_valid())
            texts = [pa.compute.cast(some[name], pa.string()) for name in names[-2:]]
            self._tables.append(pa.table([*(some[name] for name in _NUMBERS), *texts], names=names))

    def __bool__(self) -> bool:
        return bool(self._tables)

    def costs(self, steps: set[int]) -> dict[int, int]:
        """Return the total time that others waited for the own delay of each rank.

        Ranks whose cost is not above chance are included.
        """
        every = self._warm(steps)
        if every is None:
            return {}
        rank, cost = every["rank"].to_numpy(), _beyond_resolution(every["awaited_own_ns"].to_numpy())
        return {each: int(cost[rank == each].sum()) for each in np.unique(rank).tolist()}

    def waits(self, steps: set[int], ranks: Sequence[int]) -> Waits:
        """Return the waits of other ranks for the own delay of ``ranks``."""
        every = self._warm(steps)
        none = np.zeros(0, np.int64)
        if every is None:
            return Waits(*[none] * len(Waits._fields))
        rank, attempt, step, cost = (
            every[name].to_numpy().astype(np.int64) for name in ("rank", "attempt", "step", "awaited_own_ns")
        )
        some = np.isin(rank, ranks)
        cost = _beyond_resolution(cost)[some]
        return Waits(
            rank[some], ((attempt << 32) + step)[some], cost, np.zeros_like(cost), np.zeros_like(cost)
        )

    def _warm(self, steps: set[int]) -> pa.Table | None:
        """Return the rows of ``steps`` without the warm-up steps, or None if no rows were added."""
        if not self._tables:
            return None
        every = pa.concat_tables(self._tables)
        codes = (every["attempt"].to_numpy().astype(np.int64) << 32) + every["step"].to_numpy()
        if steps:
            warm = np.isin(codes, np.array(sorted(warm_steps(steps)), np.int64))
            every = every.filter(pa.array(warm & (every["step"].to_numpy() >= 0)))
        return every

    def late(self, span_ns: int, steps: set[int]) -> list[LateRoot]:
        """Return the ranks whose cost is a large enough part of ``span_ns``, in order of cost.

        Args:
            steps: The steps of the run, each with its attempt as one number. Warm-up steps are not counted.
        """
        every = self._warm(steps)
        if every is None:
            return []
        late_roots = []
        kinds = every.group_by(["op", "group_ranks", "peer"]).aggregate([]).to_pylist()
        for kind in sorted(kinds, key=lambda each: tuple(map(str, each.values()))):
            mine = every
            for name, value in kind.items():
                mine = mine.filter(pc.equal(mine[name], value))
            late_roots += _late_ones(mine, kind["op"], kind["peer"], span_ns)
        costliest: dict[int, LateRoot] = {}
        for late in sorted(late_roots, key=lambda each: (-each.cost_ns, each.rank, each.op)):
            costliest.setdefault(late.rank, late)
        return list(costliest.values())


def _late_ones(rows: pa.Table, op: str, root: int, span_ns: int) -> list[LateRoot]:
    """Return the late ranks in the collectives of one operation, group and root."""
    rank, size, cost, later, lead = (
        pc.fill_null(rows[name], 0).to_numpy()
        for name in ("rank", "group_size", "awaited_own_ns", "awaited_later_ns", "own_lead_ns")
    )
    cost, lead = _beyond_resolution(cost), _beyond_resolution(lead)
    late_roots = []
    for each in np.unique(rank).tolist():
        is_root = each == root
        mine = rank == each
        if is_root != (op in FROM_ROOT):
            continue  # no rank waits for the root of a reduce, which arrives last
        late = mine & (later > 0)
        # Early arrivals compensate late ones, and a root that arrives after its senders also compensates. Therefore
        # only the collectives that cause most of the cost are judged.
        judged = heaviest(np.abs(later) if is_root else lead)
        chance = 0.5 if op in FROM_ROOT else 1 / int(size[0])
        total, net = int(cost[mine].sum()), int(later[mine].sum())
        times = int(late[judged].sum())
        bound = _CHANCE if is_root else _CHANCE * chance  # the bound is for all senders together
        is_beyond_chance = binomial_tail(times, len(judged), chance) < bound
        if min(total, net) >= _WORTH * span_ns and total and is_beyond_chance:
            collectives = times if is_root else int(late.sum())
            late_roots.append(LateRoot(each, op, is_root, total, collectives, len(rows)))
    return late_roots


def _beyond_resolution(waits: Numbers) -> Numbers:
    return np.where(waits >= REAL_WAIT_NS, waits, 0)


__all__ = ["FROM_ROOT", "TO_ROOT", "LateRoot", "RootedCollectives"]
