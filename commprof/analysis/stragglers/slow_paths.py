"""Find slow paths between hosts from the times of messages, rooted collectives, groups and ring steps.

The functions are pure. Only transfers of one kind are compared. A kind is one operation, one group size, and
payloads within a factor of two. Paths are between hosts if the run has several hosts, and otherwise between
ranks::

    messages, broadcast, scatter    from a sender to a receiver: pairs show which end sends or receives slowly. gloo
                                    broadcasts along a tree: receivers of the root that send to no rank are counted
    groups of different members     a host that all slow groups have in common and that is in no other group
    gloo's rings                    all_reduce receives from the next rank of the group, all_gather from the previous
                                    rank: the rank that receives over the slow path of the ring has its result one
                                    ring step after the others
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.ranks.rank_arrivals import REAL_WAIT_NS
from commprof.align.sequences.group_ids import numbered, split_by
from commprof.align.sequences.row_groups import Groups
from commprof.analysis.columns.dictionary_encoding import among
from commprof.analysis.stragglers.late_ranks import binomial_tail, warm_steps
from commprof.schema import Op, parse_ranks

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

SENDS, RECEIVES, LINK, PATH, PATHS, GROUP = "sends", "receives", "link", "path", "paths", "group"
EITHER: Final = "either"
_LARGE: Final = 1 << 16  # bytes: the rate of smaller transfers is weak evidence about a path
_SLOW: Final = 3.0  # a slow transfer takes at least this many times as long as the fastest of its kind
_FEWEST: Final = 8  # the fewest transfers of a path or group that is judged
_CHANCE: Final = 0.01  # the probability that equal paths of a ring end so often in the same order
# Share of the extra time of the costliest path. A path above this share may be the cause as well.
_AS_MUCH: Final = 0.5
# The most values that are kept for medians. If there are more, they are sampled. The sample depends only on the
# transfers.
_MOST_VALUES: Final = 2_000_000
_MIXED: Final = np.uint64(0x9E3779B97F4A7C15)
_ROOTED: Final = (Op.BROADCAST, Op.SCATTER)
# The neighbor from which a rank receives in gloo's ring.
_RINGS: Final = {Op.ALL_REDUCE: 1, Op.ALL_GATHER: -1}
# The rank that receives over a slow path ends later than the others by at least this part of a ring step. The three
# values are for a ring in which no other rank is late, for a ring of two ranks, and for a ring in which a second rank
# is late because of a second slow path. Equal paths stay below: measured, up to 0.78.
_LATE_ALONE: Final = 0.4
_LATE_OF_TWO: Final = 0.8
_LATE_WITH_ANOTHER: Final = 0.9
_ALONE: Final = 0.07  # of the lateness of the latest rank: below this share, a rank is not late

_NEEDED: Final = (
    "attempt",
    "collective",
    "op",
    "rank",
    "peer",
    "group_ranks",
    "group_size",
    "backend",
    "step",
    "arrived_ns",
    "payload_bytes",
    "lateness_ns",
    "transfer_ns",
    "ended_ns",
)

Pair = tuple[str, str]
Kind = tuple[str, int, int]  # operation, ranks of the group, magnitude of the payload
Place = TypeVar("Place", bound=Hashable)


class SlowPath(NamedTuple):
    """A slow path between hosts or ranks.

    Attributes:
        kind: One of SENDS, RECEIVES, LINK (both directions), PATH (it is not known which end is slow), PATHS
            (several paths without a common end), GROUP (the slow host or link is not known), EITHER (one of
            ``ends`` is slow, but it is not known which).
        ends: The hosts or ranks as text, the sender first if there are two.
        ratio: The time of a transfer relative to the fastest of its kind. 0 if there is nothing to compare.
        extra_ns: The total time in ns beyond the time of the fastest. 0 if there is nothing to compare.
    """

    kind: str
    ends: tuple[str, ...]
    ratio: float
    extra_ns: int


class Pace(NamedTuple):
    """The time per byte of transfers (median and quartiles), their total bytes and their number."""

    low: float
    ns: float
    high: float
    size: float
    number: int


class Costliest(NamedTuple):
    """The kind of transfers that costs most.

    Attributes:
        what: The operation, or "message".
        size: The median of the bytes of these transfers.
        took_ns: The median of the times of these transfers, in ns.
        share: The transfers of all kinds as a share of the time from the first transfer to the last. For each
            kind, only the costliest path or group counts, because the others run at the same time.
        compared: The number of paths or groups of the kind.
        where: The costliest of these paths or groups.
    """

    what: str
    size: int
    took_ns: float
    share: float
    compared: int
    where: str


class _Transfers(NamedTuple):
    """The transfers of one path, group or ring.

    Attributes:
        place: The time at which each transfer was issued. A hash of this time decides whether the transfer is
            sampled.
        step: The step and its attempt as one number.
        took: The duration of the whole transfer, in ns.
        size: The bytes of the transfer.
        ended: For a ring, one column for each rank: the time in ns from the end of the first rank to the end
            of this rank.
    """

    place: Numbers
    step: Numbers
    took: Numbers
    size: Numbers
    ended: Numbers

    def at(self, rows: Flags) -> _Transfers:
        return _Transfers(*(values[rows] for values in self))


Ring = tuple[str, str, tuple[int, ...]]  # operation, group, ranks
Key = tuple[Kind, tuple[int, int] | str] | Ring


class Paths:
    """Collects arrivals, one partition after another. The partitioning does not change the answer.

    Args:
        hosts: The host of each rank.
    """

    def __init__(self, hosts: Mapping[int, str]) -> None:
        self._hosts = hosts
        self._taken: dict[Key, list[_Transfers]] = defaultdict(list)
        self._count = 0
        self._sampled = 0  # the number of bits of the hashed place that are 0 in a sampled transfer
        self._steps: set[int] = set()

    def add(self, arrived: pa.Table) -> None:
        """Add arrivals, which must have the columns payload_bytes and backend."""
        steps = _steps(arrived)
        self._steps.update(np.unique(steps[steps >= 0]).tolist())
        is_large = _numbers(arrived, "payload_bytes") >= _LARGE
        rows = np.flatnonzero(arrived["is_last"].is_valid().to_numpy() & is_large)
        if not len(rows):
            return
        some = arrived.select(_NEEDED)
        some = some if len(rows) == len(some) else some.take(pa.array(rows))
        self._add_messages(some)
        self._add_rooted(some)
        self._add_groups(some)

    def _add_messages(self, rows: pa.Table) -> None:
        chosen = np.flatnonzero(among(rows["op"], [Op.RECV]) & rows["transfer_ns"].is_valid().to_numpy())
        if len(chosen):
            some = rows.take(pa.array(chosen))
            self._keep_pairs("message", some, _numbers(some, "peer"), _numbers(some, "transfer_ns"))

    def _add_rooted(self, rows: pa.Table) -> None:
        chosen = np.flatnonzero(among(rows["op"], _ROOTED))
        if not len(chosen):
            return
        some = rows.take(pa.array(chosen))
        groups = Groups(_numbers(some, "collective"))
        rank, root, arrival = (_numbers(some, name) for name in ("rank", "peer", "lateness_ns"))
        # Data flows between two ranks as soon as both have arrived. A receiver may have its result before other ranks
        # arrive.
        both = np.maximum(arrival, groups.largest(np.where(rank == root, arrival, 0)))
        took = _numbers(some, "ended_ns") - both
        known = some["ended_ns"].is_valid().to_numpy() & (rank != root) & (root >= 0) & (took > 0)
        for op in _ROOTED:
            of_op = known & among(some["op"], [op])
            if op == Op.BROADCAST:
                of_op &= among(some["backend"], ["gloo"]) & _is_leaf(groups, rank == root)
            mine = np.flatnonzero(of_op)
            if len(mine):
                self._keep_pairs(op, some.take(pa.array(mine)), root[mine], took[mine])

    def _keep_pairs(self, what: str, rows: pa.Table, sender: Numbers, took: Numbers) -> None:
        size, receiver, members = (_numbers(rows, name) for name in ("payload_bytes", "rank", "group_size"))
        place, step = _numbers(rows, "arrived_ns"), _steps(rows)
        codes = ((sender << 20) + receiver << 20) + members * 64 + np.log2(size).astype(np.int64)
        for code in np.unique(codes).tolist():
            mine = codes == code
            ends = (int(sender[mine][0]), int(receiver[mine][0]))
            kind = (what, int(members[mine][0]), code % 64)
            self._keep((kind, ends), _Transfers(place[mine], step[mine], took[mine], size[mine], size[mine]))

    def _add_groups(self, rows: pa.Table) -> None:
        is_symmetric = ~among(rows["op"], [*_ROOTED, Op.SEND, Op.RECV, Op.BARRIER])
        chosen = np.flatnonzero(is_symmetric)
        if not len(chosen):
            return
        groups = Groups(_numbers(rows, "collective")[chosen])
        transfer = np.where(rows["transfer_ns"].is_valid().to_numpy(), _numbers(rows, "transfer_ns"), -1)[
            chosen
        ]
        size = groups.reduced(np.maximum, _numbers(rows, "payload_bytes")[chosen])
        took, least = groups.reduced(np.maximum, transfer), groups.reduced(np.minimum, transfer)
        first = rows.take(pa.array(chosen[groups.starts]))
        place, step = _numbers(first, "arrived_ns"), _steps(first)
        magnitude = np.log2(size).astype(np.int64)
        alike = pa.table(
            {name: first[name] for name in ("op", "group_ranks", "backend")} | {"magnitude": magnitude}
        )
        codes, examples = numbered(alike)
        names = alike.take(pa.array(examples)).to_pylist()
        rank = _numbers(rows, "rank")[chosen]
        for where in split_by(codes, np.flatnonzero(took > 0)):
            named, count = names[codes[where[0]]], int(groups.lengths[where[0]])
            op, name = named["op"], named["group_ranks"]
            key = ((op, count, named["magnitude"]), name)
            self._keep(key, _Transfers(place[where], step[where], took[where], size[where], size[where]))
            ones = where[(least[where] >= 0) & (groups.lengths[where] == count)]
            if named["backend"] == "gloo" and op in _RINGS and len(ones):
                members = groups.starts[ones][:, None] + np.arange(count)
                ended = transfer[members] - least[ones][:, None]
                ring = (op, name, tuple(rank[members[0]].tolist()))
                self._keep(ring, _Transfers(place[ones], step[ones], took[ones], size[ones], ended))

    def _keep(self, key: Key, transfers: _Transfers) -> None:
        self._taken[key].append(transfers.at(self._is_sampled(transfers)))
        self._count += len(self._taken[key][-1].place)
        while self._count > _MOST_VALUES:
            self._sampled += 1
            for samples in self._taken.values():
                samples[:] = [part.at(self._is_sampled(part)) for part in samples]
            self._count = sum(len(part.place) for samples in self._taken.values() for part in samples)

    def _is_sampled(self, transfers: _Transfers) -> Flags:
        mixed = transfers.place.astype(np.uint64) * _MIXED >> np.uint64(32)
        sampled: Flags = mixed & np.uint64((1 << self._sampled) - 1) == 0
        return sampled

    def _transfers(self) -> Mapping[Key, _Transfers]:
        """Return the transfers of each path, group and ring, without warm-up, in order of their names."""
        warm = np.array(sorted(warm_steps(self._steps)), np.int64)
        of_path = {}
        for key in sorted(self._taken, key=repr):
            every = _Transfers(*(np.concatenate(each) for each in zip(*self._taken[key], strict=True)))
            of_path[key] = every.at(np.isin(every.step, warm)) if len(warm) else every
        return of_path

    def slow(self, worth_ns: float) -> SlowPath | None:
        """Return the costliest slow path among pairs and groups, or None if it costs less than ``worth_ns``."""
        by_pair: dict[Kind, dict[Pair, list[_Transfers]]] = defaultdict(lambda: defaultdict(list))
        by_group: dict[Kind, dict[str, list[_Transfers]]] = defaultdict(lambda: defaultdict(list))
        for key, transfers in self._transfers().items():
            if len(key) == 3:
                continue
            kind, member = key
            if isinstance(member, str):
                by_group[kind][member].append(transfers)
            elif (ends := self._ends(member)) is not None:
                by_pair[kind][ends].append(transfers)
        candidates = [_of_pairs(_paces(members)) for members in by_pair.values()]
        candidates += [self._of_groups(_paces(members)) for members in by_group.values()]
        in_all = [
            slow._replace(extra_ns=slow.extra_ns << self._sampled) for slow in candidates if slow is not None
        ]
        return agreed([slow for slow in in_all if slow.extra_ns >= worth_ns])

    def _ends(self, ranks: tuple[int, int]) -> Pair | None:
        """Return the two hosts of a pair of ranks, or the two ranks if the run has one host.

        The result is None for a pair on the same host, in a run with several hosts.
        """
        sender, receiver = map(self.place, ranks)
        return None if sender == receiver else (sender, receiver)

    def place(self, rank: int) -> str:
        """Return the host of ``rank`` as text if the run has several hosts, and otherwise the rank."""
        if len(set(self._hosts.values())) > 1 and rank in self._hosts:
            mates = sorted(each for each, host in self._hosts.items() if host == self._hosts[rank])
            return f"host {self._hosts[rank]} (rank{'s' if len(mates) > 1 else ''} {_listed(mates)})"
        return f"rank {rank}"

    def _of_groups(self, members: Mapping[str, Pace]) -> SlowPath | None:
        """Return the one host that all slow groups have in common and that is in no other group.

        Only groups with the same number of hosts are compared.
        """
        places = {name: {self.place(rank) for rank in parse_ranks(name)} for name in members}
        candidates = []
        for spread in sorted({len(each) for each in places.values()} - {1}):
            slow, fast, ratio, extra = _parted(
                {name: pace for name, pace in members.items() if len(places[name]) == spread}
            )
            shared = set[str]().union(*(places[name] for name in slow))
            shared = shared.intersection(*(places[name] for name in slow))
            shared = shared.difference(*(places[name] for name in fast))
            if len(shared) == 1:
                candidates.append(SlowPath(LINK, tuple(shared), ratio, extra))
            elif shared:
                candidates.append(SlowPath(GROUP, tuple(sorted(slow)), ratio, extra))
        return agreed(candidates)

    def rings(self, ranks: Iterable[int]) -> SlowPath | None:
        """Return the slow path that makes gloo's rings end late for ``ranks``.

        If two slow paths share an end, this end is returned.
        """
        candidates = []
        for key, transfers in self._transfers().items():
            if len(key) != 3 or len(transfers.took) < _FEWEST:
                continue
            op, _, members = key
            for late in _of_ring(
                Op(op), members, set(ranks), transfers.ended, float(np.median(transfers.took))
            ):
                ends = tuple(dict.fromkeys(self.place(each) for each in late))
                if len(ends) == len(late):  # if not, the ranks are on one host and no link is between them
                    candidates.append(SlowPath(PATH if len(ends) == 2 else LINK, ends, 0.0, 0))
        return agreed(candidates)

    def costliest(self) -> Costliest | None:
        """Return the kind of transfers that costs most.

        The result is None if there are too few transfers, or if the run has one host, which has no links.
        """
        if len(set(self._hosts.values())) < 2:
            return None
        costs: dict[Kind, list[tuple[int, tuple[int, int] | str, _Transfers]]] = defaultdict(list)
        begin, end = [], []
        for key, transfers in self._transfers().items():
            if len(key) == 2 and len(transfers.took) >= _FEWEST:
                costs[key[0]].append((int(transfers.took.sum()) << self._sampled, key[1], transfers))
                begin.append(int(transfers.place.min()))
                end.append(int((transfers.place + transfers.took).max()))
        if not costs:
            return None
        longest = {kind: max(members, key=lambda each: each[0]) for kind, members in costs.items()}
        kind = max(longest, key=lambda each: (longest[each][0], each))
        _, member, transfers = longest[kind]
        return Costliest(
            str(kind[0]),
            int(np.median(transfers.size)),
            float(np.median(transfers.took)),
            sum(cost for cost, *_ in longest.values()) / max(max(end) - min(begin), 1),
            len(costs[kind]),
            f"among ranks {member}"
            if isinstance(member, str)
            else f"from rank {member[0]} to rank {member[1]}",
        )

    def groups_of(self, rank: int) -> list[str]:
        """Return the groups of ``rank`` that have large transfers."""
        names = {key[1] for key in self._taken if isinstance(key[1], str)}
        return sorted(name for name in names if rank in parse_ranks(name))


def agreed(candidates: Sequence[SlowPath]) -> SlowPath | None:
    """Return the slow path that explains all ``candidates`` of about the highest cost.

    If no single path explains them, the kind of the result is EITHER.
    """
    if not candidates:
        return None
    most = max(slow.extra_ns for slow in candidates)
    candidates = sorted(
        (slow for slow in candidates if slow.extra_ns >= _AS_MUCH * most),
        key=lambda slow: (-slow.extra_ns, slow.kind, slow.ends),
    )
    named = [slow for slow in candidates if slow.kind not in (GROUP, PATHS)]
    if not named:
        return candidates[0]
    shared = set(named[0].ends).intersection(*(slow.ends for slow in named))
    # A path has one slow end, so another candidate that names this end agrees.
    best = min(named, key=lambda slow: (len(slow.ends), -slow.extra_ns, slow.ends))
    if set(best.ends) <= shared and len({slow.kind for slow in named if slow.kind != PATH}) <= 1:
        return best
    if len(shared) == 1 or set(best.ends) <= shared:
        return best._replace(kind=LINK, ends=tuple(sorted(shared))[:1])
    return best._replace(kind=EITHER, ends=tuple(sorted({end for slow in named for end in slow.ends})))


def _of_ring(
    op: Op, ranks: Sequence[int], asked: set[int], every: Numbers, took: float
) -> list[tuple[int, ...]]:
    """Return the slow path to one of the ranks ``asked`` as (sender, receiver), or the shared end of two slow paths.

    A slow path delays all ranks equally, except in the last step of the ring. In the last step, it delays
    only the rank that receives over it. Equal paths delay no such rank.

    Args:
        ranks: The members in order.
        asked: The ranks for which a slow path is searched.
        every: For each collective and rank, the time in ns from the end of the first rank to the end of this
            rank.
        took: The duration of the transfer, in ns.
    """
    count, ended = len(ranks), np.median(every, axis=0).tolist()
    step = took / ((count - 1) * (2 if op == Op.ALL_REDUCE else 1))
    top, second, *rest = sorted(range(count), key=lambda each: -ended[each])
    # Most ranks end no later than this. Ranks further along the ring end earlier.
    base = ended[rest[0]] if rest else ended[second]
    late, second_late = ended[top] - base, ended[second] - base
    if late < REAL_WAIT_NS:
        return []
    # The ranks from which these two receive.
    before = {each: (each + _RINGS[op]) % count for each in (top, second)}
    if second_late <= _ALONE * late:
        is_late = late >= (_LATE_ALONE if rest else _LATE_OF_TWO) * step and _is_mostly_later(
            every, top, second
        )
        return [(ranks[before[top]], ranks[top])] if is_late and ranks[top] in asked else []
    are_late = all(_is_mostly_later(every, each, rest[0]) for each in (top, second))
    if late < _LATE_WITH_ANOTHER * step or not are_late or not asked & {ranks[top], ranks[second]}:
        return []
    # Two paths are slow: the path to the rank that ends last, and the path to the second-last rank. Check whether the
    # two paths share an end.
    if before[top] == second:
        return [(ranks[second],)]
    return [(ranks[top],)] if before[second] == top else []


def _is_leaf(groups: Groups, is_root: Flags) -> Flags:
    """Return which ranks of gloo's broadcasts receive from the root and send to no rank.

    The time at which such a rank ends depends on one path only.
    """
    place = np.arange(len(is_root)) - np.repeat(groups.starts, groups.lengths)
    after_root = (place - groups.largest(np.where(is_root, place, 0))) % groups.size
    # In gloo's binomial tree, rank n receives from the rank whose number is n without its highest bit.
    is_of_root = (after_root & (after_root - 1)) == 0
    leaf: Flags = is_of_root & (3 * after_root >= groups.size)
    return leaf


def _is_mostly_later(every: Numbers, place: int, other: int) -> bool:
    """Return whether the rank at ``place`` ends later than the rank at ``other`` more often than by chance."""
    times = int((every[:, place] > every[:, other]).sum())
    return binomial_tail(times, len(every), 0.5) < _CHANCE


def _of_pairs(members: Mapping[Pair, Pace]) -> SlowPath | None:
    """Return the end that all slow pairs have in common and no other pair has, as sender or as receiver."""
    slow, _, ratio, extra = _parted(members)
    if not slow:
        return None
    pairs = list(members)
    ends = sorted({end for pair in pairs for end in pair})
    fits: list[tuple[str, str]] = []
    for end in ends:
        sent, received = ({pair for pair in pairs if pair[side] == end} for side in (0, 1))
        if slow == sent | received and sent and received:
            fits.append((LINK, end))
        if slow == sent:
            fits.append((SENDS, end))
        if slow == received:
            fits.append((RECEIVES, end))
    if len(fits) == 1:
        return SlowPath(fits[0][0], (fits[0][1],), ratio, extra)
    if len(slow) == 1:
        return SlowPath(PATH, next(iter(slow)), ratio, extra)
    shared = set.intersection(*map(set, slow))  # replies, such as acknowledgements, use the same link
    if len(shared) == 1:
        return SlowPath(LINK, tuple(shared), ratio, extra)
    return SlowPath(
        PATHS, tuple(f"{sender} to {receiver}" for sender, receiver in sorted(slow)), ratio, extra
    )


def _paces(members: Mapping[Place, list[_Transfers]]) -> dict[Place, Pace]:
    """Return the pace of each path or group that has enough transfers."""
    paces = {}
    for place, transfers in members.items():
        took, size = (
            np.concatenate([getattr(part, name) for part in transfers]) for name in ("took", "size")
        )
        if len(took) >= _FEWEST:
            low, median, high = np.quantile(took / size, (0.25, 0.5, 0.75)).tolist()
            paces[place] = Pace(low, median, high, float(size.sum()), len(size))
    return paces


def _parted(members: Mapping[Place, Pace]) -> tuple[set[Place], set[Place], float, int]:
    """Divide ``members`` into slow and other members.

    Returns:
        The slow members, the other members, the ratio of their times, and the total time in ns beyond the
            fastest.
    """
    if len(members) < 2:
        return set(), set(members), 0.0, 0
    by_pace = sorted(members.items(), key=lambda member: member[1].ns)
    fastest = by_pace[0][1].ns
    widest, answer = 0.0, (set[Place](), set(members), 0.0, 0)
    # The widest gap separates slow members from the others. A busy machine also delays some of the other paths, but by
    # less than a slow link does.
    for first in range(1, len(by_pace)):
        others, slow = ([pace for _, pace in part] for part in (by_pace[:first], by_pace[first:]))
        gap = slow[0].ns / others[-1].ns
        extra = [(pace.ns - fastest) * pace.size for pace in slow]
        is_apart = (
            slow[0].ns >= max(_SLOW * fastest, 2 * others[-1].ns)
            # The quartiles of slow and other members do not overlap. The difference is above the resolution of waits.
            and max(pace.high for pace in others) < min(pace.low for pace in slow)
            and all(time >= REAL_WAIT_NS * pace.number for time, pace in zip(extra, slow, strict=True))
        )
        if is_apart and gap > widest:
            ratio = float(np.median([pace.ns for pace in slow]) / np.median([pace.ns for pace in others]))
            names = [name for name, _ in by_pace]
            widest, answer = gap, (set(names[first:]), set(names[:first]), ratio, round(math.fsum(extra)))
    return answer


def _steps(arrived: pa.Table) -> Numbers:
    """Return the step and attempt of each row as one number, or -1 for rows outside of steps."""
    step, attempt = _numbers(arrived, "step").astype(np.int64), _numbers(arrived, "attempt").astype(np.int64)
    return np.where(step < 0, -1, (attempt << 32) + step)


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _numbers(rows: pa.Table, name: str) -> Numbers:
    numbers: Numbers = pc.fill_null(rows[name], 0).to_numpy().astype(np.int64, copy=False)
    return numbers
