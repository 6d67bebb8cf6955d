"""Where transfers are slow: between which hosts, as far as messages, roots, groups and the ends of ring steps tell. Pure.

Only transfers of one kind are compared: one operation, one group size, payloads within a factor of two. Between hosts where
the run has several, else between ranks::

    messages, broadcast, scatter    from a sender to a receiver: pairs tell who sends and who receives slowly
    groups of different members     a host that all slow groups have and no other group
    gloo's rings                    all_reduce receives from the next rank of the group, all_gather from the one before: a
                                    rank behind the slow one of the ring's paths has its result a ring step after the others
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.distinct import numbered, split_by
from commprof.align.row_groups import Groups
from commprof.analysis.text_numbers import among
from commprof.schema import Op, parse_ranks

Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

SENDS, RECEIVES, LINK, PATH, PATHS, GROUP = "sends", "receives", "link", "path", "paths", "group"
_LARGE: Final = 1 << 16  # bytes: of less, the rate of a path says little
_SLOW: Final = 3.0  # times as long as the fastest of its kind
_FEWEST: Final = 3  # transfers of a path or group that are enough to speak of it
_MOST_VALUES: Final = 2_000_000  # of which medians are told
_ROOTED: Final = (Op.BROADCAST, Op.SCATTER)
_RINGS: Final = {Op.ALL_REDUCE: 1, Op.ALL_GATHER: -1}  # from which neighbour gloo's ring receives
# The rank behind the one slow path ends later than the others by this part of a ring step at least: where no other is late,
# of two ranks, and where the rank behind a second slow path is late as well. Equal paths stay below: measured.
_LATE_ALONE: Final = 0.4
_LATE_OF_TWO: Final = 0.8
_LATE_WITH_ANOTHER: Final = 0.6
_ALONE: Final = 0.07  # of the latest: less late is not late

_NEEDED: Final = (
    *("attempt", "collective", "op", "rank", "peer", "group_ranks", "group_size", "backend"),
    *("payload_bytes", "lateness_ns", "transfer_ns"),
)

Pair = tuple[str, str]
Kind = tuple[str, int, int]  # operation, ranks of the group, magnitude of the payload
Place = TypeVar("Place", bound=Hashable)


class SlowPath(NamedTuple):
    """What is slow: ``ends`` are hosts or ranks as text, sender first where there are two.

    Attributes:
        kind: one of SENDS, RECEIVES, LINK (both ways), PATH (which of the two ends cannot be told), PATHS
            (several without an end in common), GROUP (only that).
        ratio: how many times as long as the fastest of its kind a transfer takes; 0 where there is nothing to compare.
        extra_ns: time beyond the fastest, in all; 0 where there is nothing to compare.
    """

    kind: str
    ends: tuple[str, ...]
    ratio: float
    extra_ns: int


class Pace(NamedTuple):
    """The median time for each byte of some transfers, and their bytes in all."""

    ns: float
    size: float


class _Values(NamedTuple):
    """Transfers: a number for their kind and path, nanoseconds for each byte, and bytes."""

    key: Numbers
    pace: Floats
    size: Numbers


class Paths:
    """Takes the arrivals of whole collectives, part by part.

    Args:
        hosts: of each rank.
    """

    def __init__(self, hosts: Mapping[int, str]) -> None:
        self._hosts = hosts
        self._keys: dict[tuple[Kind, tuple[int, int] | str], int] = {}
        self._values: list[_Values] = []
        self._count = 0
        # Of rings, by (op, group, ranks): how long after the first each rank ended, and the whole transfer.
        self._rings: dict[tuple[str, str, tuple[int, ...]], list[tuple[Numbers, Numbers]]] = {}
        self._first_steps: dict[int, int] = {}

    def add(self, arrived: pa.Table) -> None:
        """Take some arrivals, with the columns payload_bytes and backend."""
        rows = np.flatnonzero(self._counted(arrived))
        if not len(rows):
            return
        some = arrived.select(_NEEDED)
        some = some if len(rows) == len(some) else some.take(pa.array(rows))
        self._add_messages(some)
        self._add_rooted(some)
        self._add_groups(some)

    def _counted(self, arrived: pa.Table) -> Flags:
        """Large transfers of collectives and messages that are all there, without warm-up."""
        step, attempt = _numbers(arrived, "step"), _numbers(arrived, "attempt")
        counted: Flags = arrived["is_last"].is_valid().to_numpy() & (
            _numbers(arrived, "payload_bytes") >= _LARGE
        )
        for each in np.unique(attempt).tolist():
            mine = attempt == each
            inside = step[mine & (step >= 0)]
            if len(inside):
                first = min(int(inside.min()), self._first_steps.get(each, int(inside.min())))
                self._first_steps[each] = first
                if int(inside.max()) > first:
                    counted &= ~mine | (step > first)
        return counted

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
        # transfer_ns counts from the last arrival; between two ranks data flows once both are there.
        since_both = groups.largest(arrival) - np.maximum(
            arrival, groups.largest(np.where(rank == root, arrival, 0))
        )
        known = some["transfer_ns"].is_valid().to_numpy() & (rank != root) & (root >= 0)
        known &= _numbers(some, "transfer_ns") > 0
        for op in _ROOTED:
            mine = np.flatnonzero(known & among(some["op"], [op]))
            if len(mine):
                took = (_numbers(some, "transfer_ns") + since_both)[mine]
                self._keep_pairs(op, some.take(pa.array(mine)), root[mine], took)

    def _keep_pairs(self, what: str, rows: pa.Table, sender: Numbers, took: Numbers) -> None:
        size, receiver, members = (_numbers(rows, name) for name in ("payload_bytes", "rank", "group_size"))
        codes = ((sender << 20) + receiver << 20) + members * 64 + np.log2(size).astype(np.int64)
        for code in np.unique(codes).tolist():
            mine = codes == code
            ends = (int(sender[mine][0]), int(receiver[mine][0]))
            kind = (what, int(members[mine][0]), code % 64)
            self._keep((kind, ends), took[mine], size[mine])

    def _add_groups(self, rows: pa.Table) -> None:
        whole = ~among(rows["op"], [*_ROOTED, Op.SEND, Op.RECV, Op.BARRIER])
        chosen = np.flatnonzero(whole)
        if not len(chosen):
            return
        groups = Groups(_numbers(rows, "collective")[chosen])
        transfer = np.where(rows["transfer_ns"].is_valid().to_numpy(), _numbers(rows, "transfer_ns"), -1)[
            chosen
        ]
        size = groups.reduced(np.maximum, _numbers(rows, "payload_bytes")[chosen])
        took, least = groups.reduced(np.maximum, transfer), groups.reduced(np.minimum, transfer)
        first = rows.take(pa.array(chosen[groups.starts]))
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
            self._keep(((op, count, named["magnitude"]), name), took[where], size[where])
            whole_ones = where[(least[where] >= 0) & (groups.lengths[where] == count)]
            if named["backend"] == "gloo" and op in _RINGS and len(whole_ones):
                members = groups.starts[whole_ones][:, None] + np.arange(count)
                ended = transfer[members] - least[whole_ones][:, None]
                self._keep_ring((op, name), rank[members[0]].tolist(), ended, took[whole_ones])

    def _keep_ring(self, ring: tuple[str, str], ranks: Sequence[int], ended: Numbers, took: Numbers) -> None:
        self._count += ended.size
        if self._count <= _MOST_VALUES:
            self._rings.setdefault((*ring, tuple(ranks)), []).append((ended, took))

    def _keep(self, key: tuple[Kind, tuple[int, int] | str], took: Numbers, size: Numbers) -> None:
        if self._count > _MOST_VALUES:
            return
        number = self._keys.setdefault(key, len(self._keys))
        self._count += len(took)
        self._values.append(_Values(np.full(len(took), number, np.int64), took / size, size))

    def slow(self, worth_ns: float) -> SlowPath | None:
        """The slow path that costs most, where it costs ``worth_ns`` at least; by pairs and groups."""
        by_pair: dict[Kind, dict[Pair, list[Numbers]]] = defaultdict(lambda: defaultdict(list))
        by_group: dict[Kind, dict[str, list[Numbers]]] = defaultdict(lambda: defaultdict(list))
        key, pace, size = (
            (np.concatenate(each) for each in zip(*self._values, strict=True)) if self._values else _NOTHING
        )
        order = np.argsort(key, kind="stable")
        names = {number: name for name, number in self._keys.items()}
        for rows in np.split(order, np.flatnonzero(np.diff(key[order])) + 1) if len(order) else ():
            kind, member = names[int(key[rows[0]])]
            if isinstance(member, str):
                by_group[kind][member].append(rows)
            elif (ends := self._ends(member)) is not None:
                by_pair[kind][ends].append(rows)
        found = [_of_pairs(_paces(members, pace, size)) for members in by_pair.values()]
        found += [self._of_groups(_paces(members, pace, size)) for members in by_group.values()]
        worth = [slow for slow in found if slow is not None and slow.extra_ns >= worth_ns]
        return max(worth, key=lambda slow: slow.extra_ns, default=None)

    def _ends(self, ranks: tuple[int, int]) -> Pair | None:
        """The two hosts of a pair of ranks, or the ranks where all are on one; None for neighbours among several hosts."""
        sender, receiver = map(self.place, ranks)
        return None if sender == receiver else (sender, receiver)

    def place(self, rank: int) -> str:
        """What names the place of ``rank``: its host where there are several, else itself."""
        if len(set(self._hosts.values())) > 1 and rank in self._hosts:
            mates = sorted(each for each, host in self._hosts.items() if host == self._hosts[rank])
            return f"host {self._hosts[rank]} (rank{'s' if len(mates) > 1 else ''} {_listed(mates)})"
        return f"rank {rank}"

    def _of_groups(self, members: Mapping[str, Pace]) -> SlowPath | None:
        """The one host that all slow groups have and no other group, among groups of as many hosts."""
        places = {name: {self.place(rank) for rank in parse_ranks(name)} for name in members}
        for spread in {len(each) for each in places.values()} - {1}:
            slow, fast, ratio, extra = _parted(
                {name: pace for name, pace in members.items() if len(places[name]) == spread}
            )
            shared = set[str]().union(*(places[name] for name in slow))
            shared = shared.intersection(*(places[name] for name in slow))
            shared = shared.difference(*(places[name] for name in fast))
            if len(shared) == 1:
                return SlowPath(LINK, tuple(shared), ratio, extra)
            if shared:
                return SlowPath(GROUP, tuple(sorted(slow)), ratio, extra)
        return None

    def ring(self, rank: int) -> SlowPath | None:
        """Why collectives of gloo's rings end late for ``rank``: the path to it, or its one end where that can be told."""
        found: SlowPath | None = None
        for (op, _, ranks), parts in self._rings.items():
            if rank not in ranks:
                continue
            ended, took = (np.concatenate(each) for each in zip(*parts, strict=True))
            if len(took) < _FEWEST:
                continue
            late = _of_ring(Op(op), ranks, rank, np.median(ended, axis=0).tolist(), float(np.median(took)))
            ends = tuple(dict.fromkeys(self.place(each) for each in late))
            if not ends or (len(ends) == 1 and len(late) == 2):  # on one host no link is between them
                continue
            if found is None or len(ends) == 1:
                found = SlowPath(PATH if len(ends) == 2 else LINK, ends, 0.0, 0)
        return found

    def groups_of(self, rank: int) -> list[str]:
        """The groups with large transfers that ``rank`` is in."""
        names = {member for _, member in self._keys if isinstance(member, str)}
        return sorted(name for name in names if rank in parse_ranks(name))


def _of_ring(op: Op, ranks: Sequence[int], rank: int, ended: Sequence[float], took: float) -> tuple[int, ...]:
    """The slow path to ``rank`` as (sender, receiver), or the one of them at which a second path is slow as well.

    A slow path holds everything up equally but for its last step, which only the rank behind it waits for. Equal paths give
    no such rank.

    Args:
        ended: of each of ``ranks``, how long after the first of them it ended.
        took: the whole transfer.
    """
    count, place = len(ranks), ranks.index(rank)
    step = took / ((count - 1) * (2 if op == Op.ALL_REDUCE else 1))
    top, second, *rest = sorted(range(count), key=lambda each: -ended[each])
    if place not in (top, second):
        return ()
    base = (
        ended[rest[0]] if rest else ended[second]
    )  # most ranks end no later, and far down the ring they end earlier
    late, second_late = ended[top] - base, ended[second] - base
    before = {each: (each + _RINGS[op]) % count for each in (top, second)}  # whom they receive from
    if second_late <= _ALONE * late:
        is_late = place == top and late >= (_LATE_ALONE if rest else _LATE_OF_TWO) * step
        return (ranks[before[top]], rank) if is_late else ()
    if late < _LATE_WITH_ANOTHER * step:
        return ()
    # Two paths are slow: into the rank that ends last, and into the one that ends second. Do they share an end?
    return (ranks[second],) if before[top] == second else (ranks[top],) if before[second] == top else ()


def _of_pairs(members: Mapping[Pair, Pace]) -> SlowPath | None:
    """The end that all slow pairs have and no other pair, on the side that they have it."""
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
    shared = set.intersection(
        *map(set, slow)
    )  # what is sent back, such as acknowledgements, takes the same link
    if len(shared) == 1:
        return SlowPath(LINK, tuple(shared), ratio, extra)
    return SlowPath(
        PATHS, tuple(f"{sender} to {receiver}" for sender, receiver in sorted(slow)), ratio, extra
    )


def _paces(members: Mapping[Place, list[Numbers]], pace: Floats, size: Numbers) -> dict[Place, Pace]:
    """The pace of each path or group that has enough transfers."""
    joined = {place: np.concatenate(rows) for place, rows in members.items()}
    return {
        place: Pace(float(np.median(pace[rows])), float(size[rows].sum()))
        for place, rows in joined.items()
        if len(rows) >= _FEWEST
    }


def _parted(members: Mapping[Place, Pace]) -> tuple[set[Place], set[Place], float, int]:
    """The slow and the other ones of ``members``, how many times as slow, and the time beyond the fastest."""
    if len(members) < 2:
        return set(), set(members), 0.0, 0
    fastest = min(pace for pace, _ in members.values())
    slow = {name for name, (pace, _) in members.items() if pace >= _SLOW * fastest}
    extra = sum((members[name][0] - fastest) * members[name][1] for name in slow)
    others = [members[name][0] for name in members if name not in slow]
    if not slow or max(others) * 2 > min(members[name][0] for name in slow):
        return set(), set(members), 0.0, 0  # no gap between the two kinds
    ratio = float(np.median([members[name][0] for name in slow]) / np.median(others))
    return slow, set(members) - slow, ratio, round(extra)


_NOTHING: Final = (np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64))


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _numbers(rows: pa.Table, name: str) -> Numbers:
    numbers: Numbers = pc.fill_null(rows[name], 0).to_numpy().astype(np.int64, copy=False)
    return numbers
