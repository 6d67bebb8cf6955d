"""Find stragglers by own delay from the ranks that arrived last in each collective.

The functions are pure.
"""

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

_WORTH: Final = 0.02  # of the time: the lowest cost of a straggler
_MOST_OF_IT: Final = 0.8  # of the waiting: the most expensive part, which is searched for stragglers
_HIDDEN_BESIDE: Final = 0.1  # of the cost of the first straggler: the lowest cost of a hidden straggler
_CHANCE: Final = 0.01  # the probability that any of several equal ranks looks like a straggler
# The fewest collectives or steps that suffice as evidence against a rank that alone causes most of the waiting.
_FEWEST: Final = 3
_MUCH: Final = 0.05  # of the time: the lowest cost of a rank that alone causes most of the waiting
_EXACT: Final = 300  # up to this many events, the binomial tail is summed exactly
_EXCEPTIONS: Final = 0.1  # of the steps since a rank became slow: the most exceptions
_TOGETHER: Final = 0.5  # of the lead of the second-last rank: below this, the last two ranks arrived together
_MORE: Final = 1.25  # times as often as among equal ranks: the lowest frequency of a straggler
_TURNS: Final = 0.05  # of the time: the lowest total cost of ranks that are late in turn

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
        cost_ns: The time in ns that the others waited for its own delay alone. For a hidden straggler, the
            time that the others would wait without the other stragglers.
        collectives: The number of compared collectives that cause most of the cost.
        steps: The number of steps with these collectives.
        is_hidden: True if another rank arrives still later.
        is_seen: True if the waits of the others were recorded. If not, the cost is the time in which this
            rank alone was missing.
        since: The step from which on the rank was late in nearly all steps to the end. None if the rank was
            late from the start, or only occasionally.
    """

    rank: int
    cost_ns: int
    collectives: int
    steps: int
    is_hidden: bool
    is_seen: bool
    since: int | None = None


class Waits(NamedTuple):
    """The times in ns that the others waited for a rank in a step, with one row for each wait.

    ``code`` is the step and its attempt as one number. A wait is for the own delay of the rank or for its
    inherited delay, or the cause of the wait is not known.
    """

    rank: Numbers
    code: Numbers
    own_ns: Numbers
    inherited_ns: Numbers
    unknown_ns: Numbers


class Findings(NamedTuple):
    """The evidence of the last ranks of all collectives, without warm-up.

    Attributes:
        late: The stragglers by own delay, in order of cost, largest first.
        compared: The number of compared collectives.
        steps: The number of training steps of the run without warm-up, or 0 if the run has no steps.
        own_ns: The total time that the others waited for the own delay of the last rank.
        turns: The cost of each rank, if ranks are late in turn.
        inherited: By rank, the time that the others waited because the previous collective had ended late for
            this rank.
        elsewhere: By rank, the time that the others waited because waits in other groups or for messages had
            blocked this rank longer.
        untold: By rank, the waiting time of unknown cause. The cause is unknown if some wait was not
            recorded.
        untold_late: The ranks that stand out by ``untold``, with the step from which on each was late, as in
            LateRank.since.
        warm: The steps without warm-up, each with its attempt as one number.
        waits: The waits for each rank, divided into waits for its own delay, for its inherited delay, and of
            unknown cause.
        share: The share of the collectives of the steps that were compared.
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
        steps: The steps of the run, each with its attempt as one number.
    """

    def __init__(self) -> None:
        self._batches: list[dict[str, Numbers]] = []
        self.steps: set[int] = set()

    def add(self, arrived: pa.Table, rows: Numbers) -> None:
        """Add ``rows`` of arrivals: the last ranks of collectives in which all ranks wait for all ranks."""
        last = np.flatnonzero(pc.fill_null(arrived["is_last"], False).to_numpy())
        attempt, step = (arrived[name].to_numpy()[last].astype(np.int64) for name in ("attempt", "step"))
        self.steps.update(np.unique(((attempt << 32) + step)[step >= 0]).tolist())
        taken = arrived.select(_NUMBERS).take(pa.array(rows))
        part = {name: pc.fill_null(taken[name], 0).to_numpy().astype(np.int64) for name in _NUMBERS}
        part |= {flag: taken[name].is_valid().to_numpy().astype(np.int64) for flag, name in _FLAGS.items()}
        certain = pc.fill_null(arrived["certain"].take(pa.array(rows)), False).to_numpy()
        # It does not have to be certain which of two ranks was last if all others certainly arrived before both.
        is_told = certain | ((part["members"] > 2) & (part["second_lead_ns"] > part["lateness_error_ns"]))
        part["is_certain"] = certain.astype(np.int64)
        part = {name: values[is_told] for name, values in part.items()}
        self._batches.append(part)

    def findings(self, span_ns: int, least_share: float = 0.0, share: float = 1.0) -> Findings:
        """Return the evidence of all rows, in a run of ``span_ns``.

        Args:
            least_share: The lowest probability that a rank is last by chance. Ranks that wait for roots
                cannot arrive late, so only few ranks remain that can.
            share: The share of the collectives of the steps that were added.
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
    """Return the waits of all ``kinds`` as one table, each kind with its ranks, steps and times.

    Waits that are not longer than the time to wake up a thread are set to 0.
    """
    rank, code = (np.concatenate(each) for each in list(zip(*kinds, strict=True))[:2])
    kind = np.repeat(np.arange(len(kinds)), [len(ns) for *_, ns in kinds])
    times = _beyond_resolution(np.concatenate([ns for *_, ns in kinds]))
    return Waits(rank, code, *(np.where(kind == number, times, 0) for number in range(len(kinds))))


class _Events:
    """The rows of all partitions, with values that are derived from all rows together."""

    def __init__(self, batches: list[dict[str, Numbers]]) -> None:
        names = (*_NUMBERS, *_FLAGS, "is_certain")
        empty = np.zeros(0, np.int64)
        self._columns = {name: np.concatenate([empty, *(part[name] for part in batches)]) for name in names}
        self.is_timed, self.is_known = (self[name] > 0 for name in _FLAGS)
        self.is_certain = self["is_certain"] > 0

    def __getitem__(self, name: str) -> Numbers:
        return self._columns[name]

    def step_codes(self) -> Numbers:
        """Return the step and attempt of each row as one number."""
        return (self["attempt"] << 32) + self["step"]

    def together(self) -> tuple[Flags, Numbers]:
        """Return in which rows the last two ranks arrived together, and how long the others waited for both."""
        is_close = ~self.is_certain | (self["lead_ns"] < _TOGETHER * self["second_lead_ns"])
        both = (self["members"] > 2) & is_close
        return both, np.where(both, self["second_waited_ns"], 0)

    def counts_once(self) -> Flags:
        """Return which rows are counted, so that no delay is counted more than once.

        All rows with recorded waits are counted. Of the other rows, only the row with the largest lead of
        each rank in each step is counted. Without waits in between, a rank that is late for one collective is
        equally late for the next ones, but the others wait only once.
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
        """Return the part of the lead of the second-last rank that is due to its own delay, as a share."""
        share: Floats = self["second_own_lead_ns"] / np.maximum(self["second_lead_ns"], 1)
        return share

    def of(self, steps: set[int]) -> Flags:
        """Return which rows belong to ``steps``, or all rows if ``steps`` is empty."""
        if not steps:
            return np.ones(len(self["step"]), bool)
        chosen: Flags = np.isin(self.step_codes(), np.fromiter(steps, np.int64)) & (self["step"] >= 0)
        return chosen


def warm_steps(steps: set[int]) -> set[int]:
    """Return the steps without warm-up.

    The first step of an attempt is warm-up, unless the attempt has only one step.
    """
    by_attempt: dict[int, list[int]] = {}
    for code in steps:
        by_attempt.setdefault(code >> 32, []).append(code)
    return {code for codes in by_attempt.values() for code in codes if len(codes) == 1 or code > min(codes)}


def _by_rank(rank: Numbers, values: Numbers) -> dict[int, int]:
    """Return the sum of the values of each rank, without waits that are as short as waking up."""
    values = _beyond_resolution(values)
    sums = {each: int(values[rank == each].sum()) for each in np.unique(rank).tolist()}
    return {each: total for each, total in sums.items() if total > 0}


def _beyond_resolution(waits: Numbers) -> Numbers:
    return np.where(waits >= REAL_WAIT_NS, waits, 0)


def _rounded(values: Floats) -> Numbers:
    """Return ``values`` as integers, because an integer sum does not depend on the order."""
    return np.rint(values).astype(np.int64)


class _OwnDelays(NamedTuple):
    """The waiting for own delays, with one row for each rank to which an own delay is attributed.

    Attributes:
        rank: The rank to which the delay is attributed.
        codes: The step and its attempt as one number.
        cost_ns: The time in ns that the others waited for the own delay of the rank. 0 for a wait that is as
            short as waking up.
        behind: The second-last rank, which was hidden behind the rank.
        behind_ns: The cost of ``behind`` in ns. 0 if the two ranks arrived together.
        members: The number of ranks of the collective.
        is_seen: True if the waits of the others were recorded.
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
        """Return the own delays in the rows ``known`` of ``events``.

        Args:
            all_costs: The cost of the last rank for each row of ``events``.
        """
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
    """Find the stragglers one after another.

    After a straggler is found, it is removed, and the rank that was hidden behind it replaces it.

    Args:
        steps_of_run: The codes of the steps in which a rank can be late. Default: the codes of ``delays``.

    Returns:
        The stragglers, the total cost of all own delays in ns, and the cost of each rank if ranks are late in
            turn.
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
        # The heaviest rows exclude steps that cost only a little less, so include these steps here.
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
        turns = {}  # one rank causes most of the cost, but too seldom to exclude chance
    return late, own_ns, turns


def _since(late_in: Numbers, codes: Numbers) -> int | None:
    """Return the step at which a rank became slow, or None if no such step stands out.

    The step divides the steps so that there are as few exceptions as possible. An exception is a late step
    before the division or a step after it that is not late. A single late step before the division does not
    move it. The result is None if there are many exceptions, if the rank was late from the start, or if the
    rank is no longer late at the end.

    Args:
        late_in: The codes of the steps in which the rank was late.
        codes: The codes of all steps, which must be of one attempt.
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
    """Return the fewest rows that cause most of the cost.

    All rows that cost as much as the cheapest of these rows are also returned.
    """
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
    """Return the rank that costs most, if its cost is large enough to be reported and above chance."""
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
    """Return the probability that an event of probability ``share`` happens ``times`` or more in ``of`` trials."""
    if share >= 1:
        return 0.0
    if of <= _EXACT:
        return sum(math.comb(of, k) * share**k * (1 - share) ** (of - k) for k in range(times, of + 1))
    deviation = (times - share * of) / math.sqrt(of * share * (1 - share))
    return math.erfc(deviation / math.sqrt(2)) / 2
