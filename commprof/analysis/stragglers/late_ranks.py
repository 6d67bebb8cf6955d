"""Stragglers by own delay: which rank arrived last in each collective, and what follows from that. Pure."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.ranks.rank_arrivals import REAL_WAIT_NS

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

_WORTH: Final = 0.02  # of the time: the least cost of a culprit
_MOST_OF_IT: Final = 0.8  # of the waiting: its most expensive part, which is searched for culprits
_HIDDEN_BESIDE: Final = 0.1  # of the delay of the rank that hides it
_CHANCE: Final = 0.01  # the probability that among equal ranks any looks like a culprit
_FEWEST: Final = 3  # collectives, or steps, that are enough for a rank that alone causes most of the waiting
_MUCH: Final = 0.05  # of the time
_EXACT: Final = 300  # events up to which the binomial tail is summed
_EXCEPTIONS: Final = 0.1  # of the steps since a rank became slow
_TOGETHER: Final = 0.5  # of the lead of the second last rank: below it the last two came together
_MORE: Final = 1.25  # times as often as among equal ranks
_TURNS: Final = 0.05  # of the cost of ranks that are late in turn

_NUMBERS: Final = (
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
    "others_waited_own_ns",
    "own_lead_ns",
    "elsewhere_lead_ns",
    "second_lead_ns",
    "second_own_lead_ns",
    "second_waited_ns",
)
_FLAGS: Final = {"is_timed": "others_waited_ns", "is_known": "own_lead_ns"}


class LateRank(NamedTuple):
    """A straggler by own delay.

    Attributes:
        cost_ns: how long the others waited for its own delay alone; for a hidden one, how long they would wait without the
            other stragglers.
        collectives: the compared ones that make most of the cost; ``steps``: in how many steps.
        is_hidden: another rank comes later still.
        is_seen: the waits of the others were recorded; if not, the cost is the time in which it alone was missing.
        since: the step from which on it was late, in nearly all steps to the end; None if it was late from the start, or
            only now and then.
    """

    rank: int
    cost_ns: int
    collectives: int
    steps: int
    is_hidden: bool
    is_seen: bool
    since: int | None = None


class Waits(NamedTuple):
    """How long the others waited for a rank in a step; one row for each wait.

    ``code`` is the step with its attempt as one number. A wait is for the own delay of the rank, for one that it inherits,
    or its cause is not known.
    """

    rank: Numbers
    code: Numbers
    own_ns: Numbers
    inherited_ns: Numbers
    unknown_ns: Numbers


class Findings(NamedTuple):
    """The evidence of the last ranks of all collectives, without warm-up.

    Attributes:
        late: the stragglers by own delay, in order of cost, largest first.
        compared: compared collectives; ``steps``: training steps of the run, 0 if it has none.
        own_ns: the waiting for the own delay of the last rank, in all; ``turns``: by rank, if ranks are late in turn.
        inherited: by rank, the waiting for it because the collective before had ended late for it.
        elsewhere: by rank, the waiting for it because waits in other groups or for messages had blocked it longer.
        untold: by rank, the waiting of unknown cause, since some wait was not recorded.
        untold_late: the ranks that stand out by it, and the step from which on each was late, as of a LateRank.
        warm: the steps without warm-up, each with its attempt as one number.
        waits: what of the waiting for each rank is for its own delay, inherited, or of unknown cause.
        share: the share of the collectives of the steps that were compared.
    """

    late: list[LateRank]
    compared: int
    steps: int
    own_ns: int
    turns: dict[int, int]
    inherited: dict[int, int]
    elsewhere: dict[int, int]
    untold: dict[int, int]
    untold_late: dict[int, int | None]
    warm: set[int]
    waits: Waits
    share: float = 1.0


class LastRanks:
    """Collects the rows of the last ranks, one partition after another.

    Attributes:
        steps: the steps of the run, each with its attempt as one number.
    """

    def __init__(self) -> None:
        self._batches: list[dict[str, Numbers]] = []
        self.steps: set[int] = set()

    def add(self, arrived: pa.Table, rows: Numbers) -> None:
        """Add ``rows`` of arrivals: the last ranks of collectives in which all wait for all."""
        last = np.flatnonzero(pc.fill_null(arrived["is_last"], False).to_numpy())
        attempt, step = (arrived[name].to_numpy()[last].astype(np.int64) for name in ("attempt", "step"))
        self.steps.update(np.unique(((attempt << 32) + step)[step >= 0]).tolist())
        taken = arrived.select(_NUMBERS).take(pa.array(rows))
        part = {name: pc.fill_null(taken[name], 0).to_numpy().astype(np.int64) for name in _NUMBERS}
        part |= {flag: taken[name].is_valid().to_numpy().astype(np.int64) for flag, name in _FLAGS.items()}
        certain = pc.fill_null(arrived["certain"].take(pa.array(rows)), False).to_numpy()
        # It need not be certain which of two ranks was last if all others certainly came before them.
        is_told = certain | ((part["members"] > 2) & (part["second_lead_ns"] > part["lateness_error_ns"]))
        part["is_certain"] = certain.astype(np.int64)
        part = {name: values[is_told] for name, values in part.items()}
        self._batches.append(part)

    def findings(self, span_ns: int, least_share: float = 0.0, share: float = 1.0) -> Findings:
        """The evidence of all rows, in a run of ``span_ns``.

        Args:
            least_share: the least probability of a rank to be last by chance. Ranks that wait for roots cannot come late, so
                few ranks remain that can.
            share: the share of the collectives of the steps that were added.
        """
        events = _Events(self._batches)
        steps = warm_steps(self.steps)
        warm = events.of(steps)
        cost = np.where(events.is_timed, events["others_waited_own_ns"], events["own_lead_ns"])
        waited = np.where(events.is_timed, events["others_waited_ns"], events["lead_ns"])
        counts = events.is_certain if share < 1 else events.is_certain & events.counts_once()
        cost, waited = (np.where(counts, each, 0).astype(np.int64) for each in (cost, waited))
        known, untold = warm & events.is_known, warm & ~events.is_known
        delays = _OwnDelays.of(events, cost, known)
        late, own_ns, turns = _late_ranks(delays, span_ns, least_share)
        of_unknown_cause, *_ = _late_ranks(
            _OwnDelays.of(events, waited, untold), span_ns, least_share, np.unique(events.step_codes()[warm])
        )
        lead = np.maximum(events["lead_ns"], 1)
        elsewhere = np.minimum(_rounded(waited * (events["elsewhere_lead_ns"] / lead)), waited - cost)
        rank = events["rank"]
        both, of_both = events.together()
        shared = known & both
        inherited_by = np.concatenate((rank[known], rank[shared], events["second_rank"][shared]))
        half = _rounded((of_both * (1 - events.second_share()))[shared] / 2)
        inherited = np.concatenate(((waited - cost - elsewhere)[known], half, half))
        codes = events.step_codes()
        waits = _waits(
            (delays.rank, delays.codes, delays.cost_ns),
            (
                np.concatenate((inherited_by, rank[known])),
                np.concatenate((codes[known], codes[shared], codes[shared], codes[known])),
                np.concatenate((inherited, elsewhere[known])),
            ),
            (rank[untold], codes[untold], waited[untold]),
        )
        return Findings(
            late,
            int(warm.sum()),
            len(steps),
            own_ns,
            turns,
            _by_rank(inherited_by, inherited),
            _by_rank(rank[known], elsewhere[known]),
            _by_rank(rank[untold], waited[untold]),
            {each.rank: each.since for each in of_unknown_cause if not each.is_hidden},
            steps,
            waits,
            share,
        )


def _waits(*kinds: tuple[Numbers, Numbers, Numbers]) -> Waits:
    """The waits of all ``kinds``, each with its ranks, steps and times, without those that are as short as waking up."""
    rank, code = (np.concatenate(each) for each in list(zip(*kinds, strict=True))[:2])
    kind = np.repeat(np.arange(len(kinds)), [len(ns) for *_, ns in kinds])
    times = _beyond_resolution(np.concatenate([ns for *_, ns in kinds]))
    return Waits(rank, code, *(np.where(kind == number, times, 0) for number in range(len(kinds))))


class _Events:
    """The rows of all partitions, and what follows from them together."""

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
        """In which rows the last two ranks came together, and how long the others waited for both."""
        is_close = ~self.is_certain | (self["lead_ns"] < _TOGETHER * self["second_lead_ns"])
        both = (self["members"] > 2) & is_close
        return both, np.where(both, self["second_waited_ns"], 0)

    def counts_once(self) -> Flags:
        """Rows whose waits were recorded, and of the others the one with the largest lead of a rank in a step.

        Without waits in between, a rank that is late for one collective is as late for the next ones: the others wait once.
        """
        rows = np.flatnonzero(~self.is_timed)
        order = rows[np.lexsort((-self["lead_ns"][rows], self["rank"][rows], self.step_codes()[rows]))]
        rank, code = self["rank"][order], self.step_codes()[order]
        is_largest = np.ones(len(order), bool)
        is_largest[1:] = (np.diff(rank) != 0) | (np.diff(code) != 0)
        counts = self.is_timed.copy()
        counts[order[is_largest | (code < 0)]] = True
        return counts

    def second_share(self) -> Floats:
        """The share of its lead that the second last rank has by its own delay."""
        share: Floats = self["second_own_lead_ns"] / np.maximum(self["second_lead_ns"], 1)
        return share

    def of(self, steps: set[int]) -> Flags:
        """The rows of some steps; all rows if there are no steps."""
        if not steps:
            return np.ones(len(self["step"]), bool)
        chosen: Flags = np.isin(self.step_codes(), np.fromiter(steps, np.int64)) & (self["step"] >= 0)
        return chosen


def warm_steps(steps: set[int]) -> set[int]:
    """The steps without warm-up: of an attempt with several steps all after the first."""
    by_attempt: dict[int, list[int]] = {}
    for code in steps:
        by_attempt.setdefault(code >> 32, []).append(code)
    return {code for codes in by_attempt.values() for code in codes if len(codes) == 1 or code > min(codes)}


def _by_rank(rank: Numbers, values: Numbers) -> dict[int, int]:
    """The sum of each rank, without waits that are as short as waking up."""
    values = _beyond_resolution(values)
    sums = {each: int(values[rank == each].sum()) for each in np.unique(rank).tolist()}
    return {each: total for each, total in sums.items() if total > 0}


def _beyond_resolution(waits: Numbers) -> Numbers:
    return np.where(waits >= REAL_WAIT_NS, waits, 0)


def _rounded(values: Floats) -> Numbers:
    """As integers, whose sum does not depend on the order."""
    return np.rint(values).astype(np.int64)


class _OwnDelays(NamedTuple):
    """The waiting for own delays, one row for each rank that is blamed for one.

    Attributes:
        rank: the rank that is blamed; ``codes``: the step with its attempt as one number.
        cost_ns: how long the others waited for its own delay; 0 for a wait that is as short as waking up.
        behind: the rank that was hidden behind it, with its cost; 0 if the two came together.
        members: ranks of the collective; ``is_seen``: the waits of the others were recorded.
    """

    rank: Numbers
    codes: Numbers
    cost_ns: Numbers
    behind: Numbers
    behind_ns: Numbers
    members: Numbers
    is_seen: Flags

    @classmethod
    def of(cls, events: _Events, all_costs: Numbers, known: Flags) -> _OwnDelays:
        """Those in the rows ``known`` of ``events``, of which ``all_costs`` are the costs of the last rank."""
        both, of_both = events.together()
        shared = np.flatnonzero(known & both)
        rows = np.concatenate((np.flatnonzero(known), shared))
        half = _rounded(of_both * events.second_share() / 2)
        # The last rank may have been blocked elsewhere, such as the root of a reduce after its last sender.
        of_last = np.minimum(
            events.second_share(), events["own_delay_ns"] / np.maximum(events["lateness_ns"], 1)
        )
        blamed, cost = events["rank"][rows].copy(), (all_costs + _rounded(of_both * of_last / 2))[rows]
        seconds = np.arange(len(rows)) >= len(rows) - len(shared)
        blamed[seconds], cost[seconds] = events["second_rank"][shared], half[shared]
        behind_ns = _beyond_resolution(np.where(both, 0, events["second_own_lead_ns"])[rows])
        return cls(
            blamed,
            events.step_codes()[rows],
            _beyond_resolution(cost),
            events["second_rank"][rows],
            behind_ns,
            events["members"][rows],
            events.is_timed[rows],
        )


def _late_ranks(
    delays: _OwnDelays, span_ns: int, least_share: float, steps_of_run: Numbers | None = None
) -> tuple[list[LateRank], int, dict[int, int]]:
    """The culprits in turn: each is removed, and the rank that was hidden behind it takes its place.

    Args:
        steps_of_run: the codes of the steps in which a rank can be late; default: those of ``delays``.
    """
    blamed, cost, members = (each.copy() for each in (delays.rank, delays.cost_ns, delays.members))
    codes, seen, behind, behind_cost = delays.codes, delays.is_seen, delays.behind, delays.behind_ns
    hidden = np.zeros(len(blamed), bool)
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
        # The heaviest leave out steps that cost a little less.
        as_late = mine & (2 * cost >= np.median(cost[main]))
        since = _since(np.unique(codes[as_late]), np.unique(codes) if steps_of_run is None else steps_of_run)
        late.append(
            LateRank(
                culprit, int(cost[mine].sum()), len(main), steps, is_hidden, bool(seen[mine].any()), since
            )
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
        turns = {}  # one rank, too seldom to exclude chance
    return late, own_ns, turns


def _since(late_in: Numbers, codes: Numbers) -> int | None:
    """The step at which a rank that was late in the steps ``late_in`` became slow, of the steps ``codes`` of one attempt.

    The division of the steps with the fewest exceptions: late ones before it, others after it. A single late step before
    does not move it. None if the exceptions are many, if the rank was late from the start, or is no longer late at the end.
    """
    if codes[0] < 0 or codes[0] >> 32 != codes[-1] >> 32:
        return None
    is_late = np.isin(codes, late_in)
    exceptions = np.cumsum(is_late) - is_late + np.cumsum(~is_late[::-1])[::-1]
    begin = int(np.argmin(exceptions))
    after = len(codes) - begin
    became_slow = min(begin, after) >= _FEWEST and exceptions[begin] <= _EXCEPTIONS * after
    is_slow_still = is_late[-max(_FEWEST, after // 10) :].mean() >= 0.5
    return int(codes[begin] & 0xFFFFFFFF) if became_slow and is_slow_still else None


def heaviest(cost: Numbers) -> Numbers:
    """The fewest rows that make most of the cost, and all rows that cost as much as the cheapest of them."""
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
    """The rank that costs most, if the cost is worth a sentence and above chance."""
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
    """The probability that an event of probability ``share`` happens ``times`` or more in ``of`` trials."""
    if share >= 1:
        return 0.0
    if of <= _EXACT:
        return sum(math.comb(of, k) * share**k * (1 - share) ** (of - k) for k in range(times, of + 1))
    deviation = (times - share * of) / math.sqrt(of * share * (1 - share))
    return math.erfc(deviation / math.sqrt(2)) / 2
