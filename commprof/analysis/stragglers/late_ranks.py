"""Which ranks come late by their own time: who came last, collective by collective, and what that proves. Pure."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.ranks.arrivals import REAL_WAIT_NS

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

_WORTH: Final = 0.02  # of the time: a culprit costs so much at least
_MOST_OF_IT: Final = 0.8  # of the waiting: that is where culprits are looked for
_HIDDEN_BESIDE: Final = 0.1  # of the delay of the rank that hides it
_CHANCE: Final = 0.01  # that among equal ranks any looks like a culprit
_FEWEST: Final = 3  # times that are enough of a rank that alone makes most of the waiting, where that is
_MUCH: Final = 0.05  # of the time
_EXACT: Final = 300  # events up to which the binomial tail is added up
_TOGETHER: Final = 0.5  # of the lead of the last but one: with a smaller one the last came together with it
_MORE: Final = 1.25  # times as often as among equal ranks
_TURNS: Final = 0.05  # of the time that ranks cost who are late in turn

_NUMBERS: Final = (
    *(
        "attempt",
        "step",
        "rank",
        "second_rank",
        "members",
        "lateness_error_ns",
        "lateness_ns",
        "own_delay_ns",
        "lead_ns",
        "others_waited_ns",
    ),
    *("others_waited_own_ns", "own_lead_ns", "elsewhere_lead_ns"),
    *("second_lead_ns", "second_own_lead_ns", "second_waited_ns"),
)
_FLAGS: Final = {"is_timed": "others_waited_ns", "is_known": "own_lead_ns"}


class LateRank(NamedTuple):
    """A rank that comes late by its own time.

    Attributes:
        cost_ns: what the others waited for its own time alone; of a hidden one what they would wait without the others.
        collectives: of the compared ones, those in which it cost most of that; ``steps``: in how many steps.
        is_hidden: another rank comes later still.
        is_seen: the waits of the others were recorded; without, the cost is the time that it alone was missing.
    """

    rank: int
    cost_ns: int
    collectives: int
    steps: int
    is_hidden: bool
    is_seen: bool


class Findings(NamedTuple):
    """What the last ranks of all collectives say, without warm-up.

    Attributes:
        late: the ranks that come late by themselves, the costliest first.
        compared: collectives; ``steps``: the training steps of the run, 0 where it has none.
        own_ns: what all waited for the own time of whoever was last; ``turns``: of that by rank, where ranks take turns.
        inherited: by rank, what the others waited for it because the collective before had ended late for it.
        elsewhere: by rank, what they waited because waits in other groups or for messages had held it longer.
        untold: by rank, the waits of which none of this can be told: some wait was not recorded.
        share: which part of the collectives of the steps were compared.
    """

    late: list[LateRank]
    compared: int
    steps: int
    own_ns: int
    turns: dict[int, int]
    inherited: dict[int, int]
    elsewhere: dict[int, int]
    untold: dict[int, int]
    share: float = 1.0


class LastRanks:
    """Takes the rows of those who came last, part by part.

    Attributes:
        steps: of the run, each with its attempt as one number.
    """

    def __init__(self) -> None:
        self._batches: list[dict[str, Numbers]] = []
        self.steps: set[int] = set()

    def add(self, arrived: pa.Table, rows: Numbers) -> None:
        """Take ``rows`` of arrivals: of collectives in which all wait for all, the ranks that came last."""
        last = np.flatnonzero(pc.fill_null(arrived["is_last"], False).to_numpy())
        attempt, step = (arrived[name].to_numpy()[last].astype(np.int64) for name in ("attempt", "step"))
        self.steps.update(np.unique(((attempt << 32) + step)[step >= 0]).tolist())
        taken = arrived.select(_NUMBERS).take(pa.array(rows))
        part = {name: pc.fill_null(taken[name], 0).to_numpy().astype(np.int64) for name in _NUMBERS}
        part |= {flag: taken[name].is_valid().to_numpy().astype(np.int64) for flag, name in _FLAGS.items()}
        certain = pc.fill_null(arrived["certain"].take(pa.array(rows)), False).to_numpy()
        # Which of two ranks was last need not be certain where it is that all others came before them.
        is_told = certain | ((part["members"] > 2) & (part["second_lead_ns"] > part["lateness_error_ns"]))
        part["is_certain"] = certain.astype(np.int64)
        part = {name: values[is_told] for name, values in part.items()}
        self._batches.append(part)

    def findings(self, span_ns: int, least_share: float = 0.0) -> Findings:
        """What follows from all of them, in a run of ``span_ns``.

        Args:
            least_share: of a rank by chance. Where roots hold ranks, these cannot come late: few are left who can.
        """
        events = _Events(self._batches)
        steps = warm_steps(self.steps)
        warm = events.of(steps)
        cost = np.where(events.is_timed, events["others_waited_own_ns"], events["own_lead_ns"])
        waited = np.where(events.is_timed, events["others_waited_ns"], events["lead_ns"])
        cost, waited = (np.where(events.is_certain, each, 0).astype(np.int64) for each in (cost, waited))
        known, untold = warm & events.is_known, warm & ~events.is_known
        late, own_ns, turns = _late_ranks(events, cost, known, span_ns, least_share)
        lead = np.maximum(events["lead_ns"], 1)
        elsewhere = np.minimum(_rounded(waited * (events["elsewhere_lead_ns"] / lead)), waited - cost)
        rank = events["rank"]
        both, of_both = events.together()
        shared = known & both
        inherited_by = np.concatenate((rank[known], rank[shared], events["second_rank"][shared]))
        half = _rounded((of_both * (1 - events.second_share()))[shared] / 2)
        inherited = np.concatenate(((waited - cost - elsewhere)[known], half, half))
        return Findings(
            late,
            int(warm.sum()),
            len(steps),
            own_ns,
            turns,
            _by_rank(inherited_by, inherited),
            _by_rank(rank[known], elsewhere[known]),
            _by_rank(rank[untold], waited[untold]),
        )


class _Events:
    """The rows of all parts, and what they say together."""

    def __init__(self, batches: list[dict[str, Numbers]]) -> None:
        names = (*_NUMBERS, *_FLAGS, "is_certain")
        empty = np.zeros(0, np.int64)
        self._columns = {name: np.concatenate([empty, *(part[name] for part in batches)]) for name in names}
        self.is_timed, self.is_known = (self[name] > 0 for name in _FLAGS)
        self.is_certain = self["is_certain"] > 0

    def __getitem__(self, name: str) -> Numbers:
        return self._columns[name]

    def step_codes(self) -> Numbers:
        """A number for each step of each attempt."""
        return (self["attempt"] << 32) + self["step"]

    def together(self) -> tuple[Flags, Numbers]:
        """Where the last two came together; and what the others waited for the two of them."""
        is_close = ~self.is_certain | (self["lead_ns"] < _TOGETHER * self["second_lead_ns"])
        both = (self["members"] > 2) & is_close
        return both, np.where(both, self["second_waited_ns"], 0)

    def second_share(self) -> Floats:
        """Which part of its lead the last but one has by its own time."""
        share: Floats = self["second_own_lead_ns"] / np.maximum(self["second_lead_ns"], 1)
        return share

    def of(self, steps: set[int]) -> Flags:
        """The rows of some steps; all where there are none."""
        if not steps:
            return np.ones(len(self["step"]), bool)
        chosen: Flags = np.isin(self.step_codes(), np.fromiter(steps, np.int64)) & (self["step"] >= 0)
        return chosen


def warm_steps(steps: set[int]) -> set[int]:
    """Without warm-up: of an attempt with several steps all after the first."""
    by_attempt: dict[int, list[int]] = {}
    for code in steps:
        by_attempt.setdefault(code >> 32, []).append(code)
    return {code for codes in by_attempt.values() for code in codes if len(codes) == 1 or code > min(codes)}


def _by_rank(rank: Numbers, values: Numbers) -> dict[int, int]:
    """The sum of each rank; of waits that are too short to be told from waking up, nothing."""
    values = _beyond_resolution(values)
    sums = {each: int(values[rank == each].sum()) for each in np.unique(rank).tolist()}
    return {each: total for each, total in sums.items() if total > 0}


def _beyond_resolution(waits: Numbers) -> Numbers:
    return np.where(waits >= REAL_WAIT_NS, waits, 0)


def _rounded(values: Floats) -> Numbers:
    """As integers, the sum of which is the same in any order."""
    return np.rint(values).astype(np.int64)


def _late_ranks(
    events: _Events, all_costs: Numbers, known: Flags, span_ns: int, least_share: float
) -> tuple[list[LateRank], int, dict[int, int]]:
    """The culprits, one after the other: each is taken out, and who was hidden behind it stands in its place."""
    both, of_both = events.together()
    shared = np.flatnonzero(known & both)
    rows = np.concatenate((np.flatnonzero(known), shared))
    half = _rounded(of_both * events.second_share() / 2)
    # The last one may have come from waits elsewhere, such as the root of a reduce after its last sender.
    of_last = np.minimum(events.second_share(), events["own_delay_ns"] / np.maximum(events["lateness_ns"], 1))
    blamed, cost = events["rank"][rows].copy(), (all_costs + _rounded(of_both * of_last / 2))[rows]
    seconds = np.arange(len(rows)) >= len(rows) - len(shared)
    blamed[seconds], cost[seconds] = events["second_rank"][shared], half[shared]
    # Who was hidden behind the last one: nobody, where the two came together.
    behind, behind_cost = events["second_rank"][rows], np.where(both, 0, events["second_own_lead_ns"])[rows]
    members = events["members"][rows].copy()
    seen, codes = events.is_timed[rows], events.step_codes()[rows]
    hidden = np.zeros(len(rows), bool)
    cost, behind_cost = _beyond_resolution(cost), _beyond_resolution(behind_cost)
    own_ns = int(cost.sum())
    late: list[LateRank] = []
    while True:
        heavy = heaviest(cost)
        culprit = _culprit(blamed, cost, members, hidden, heavy, span_ns, late, least_share)
        if culprit is None:
            break
        mine = blamed == culprit
        main = heavy[blamed[heavy] == culprit]
        is_hidden = bool(cost[mine & hidden].sum() > cost[mine & ~hidden].sum())
        steps = len(np.unique(codes[main]))
        late.append(
            LateRank(culprit, int(cost[mine].sum()), len(main), steps, is_hidden, bool(seen[mine].any()))
        )
        again = mine & ~hidden
        cost[mine] = 0
        cost[again] = behind_cost[again]
        blamed[again] = behind[again]
        members[again] -= 1
        hidden |= mine
        cost[np.isin(blamed, [each.rank for each in late])] = 0
    turns = {} if late or own_ns < _TURNS * span_ns else _by_rank(blamed, cost)
    if max(turns.values(), default=0) > _MOST_OF_IT * sum(turns.values()):
        turns = {}  # one rank, too seldom to be told from chance
    return late, own_ns, turns


def heaviest(cost: Numbers) -> Numbers:
    """The fewest rows that make most of the cost, and all that cost as much as the last of them."""
    falling = np.sort(cost)[::-1]
    total = np.cumsum(falling)
    if not len(total) or total[-1] <= 0:
        return np.zeros(0, np.int64)
    return np.flatnonzero(cost >= falling[int(np.searchsorted(total, _MOST_OF_IT * total[-1]))])


def _culprit(
    who: Numbers,
    cost: Numbers,
    members: Numbers,
    hidden: Flags,
    heavy: Numbers,
    span_ns: int,
    late: list[LateRank],
    least_share: float,
) -> int | None:
    """The rank that costs most, where that is worth a sentence and more than chance explains."""
    if not len(heavy):
        return None
    ranks = np.unique(who[heavy])
    costs = {rank: int(cost[who == rank].sum()) for rank in ranks.tolist()}
    sizes, counts = np.unique(np.maximum(members[heavy], 1), return_counts=True)
    expected = max(float((counts / sizes).sum()) / len(heavy), least_share)
    for rank in sorted(costs, key=lambda rank: -costs[rank]):
        mine = who == rank
        worth = _WORTH
        is_hidden = bool((mine & hidden).sum() * 2 > mine.sum())
        if is_hidden:
            worth = max(_WORTH, _HIDDEN_BESIDE * late[0].cost_ns / max(span_ns, 1))
        times = int((who[heavy] == rank).sum())
        is_more = times >= _MORE * expected * len(heavy) or (is_hidden and times == len(heavy))
        is_alone = times == len(heavy) >= _FEWEST and costs[rank] >= _MUCH * span_ns
        is_beyond_chance = is_alone or binomial_tail(times, len(heavy), expected) < _CHANCE * expected
        if costs[rank] >= worth * span_ns and is_more and is_beyond_chance:
            return int(rank)
    return None


def binomial_tail(times: int, of: int, share: float) -> float:
    """The probability that an event of probability ``share`` happens so often or more."""
    if share >= 1:
        return 0.0
    if of <= _EXACT:
        return sum(math.comb(of, k) * share**k * (1 - share) ** (of - k) for k in range(times, of + 1))
    deviation = (times - share * of) / math.sqrt(of * share * (1 - share))
    return math.erfc(deviation / math.sqrt(2)) / 2
