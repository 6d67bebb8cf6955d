"""Which rank sends how much to which: the wire bytes of two models, put on pairs of ranks.

``wire_bytes`` is of the operations as issued. The model says what all ranks of a group send together (``schema.wire_bytes``
times the size of the group). Between whom it flows is modelled as well, so that each row and column adds up to exactly
what the model says of its rank:

* reduce, gather: from each other rank to the root; broadcast, scatter: from the root to each other rank, in equal parts;
* all_to_all: between each pair, by the splits of its records, or in equal parts;
* all_reduce, reduce_scatter, all_gather: around a ring in the order of the group, each rank to the next;
* send: from the sender to the receiver, as recorded.

``executed_wire_bytes`` is of what the backend runs for them. Who sends what is known of gloo
(:mod:`commprof.ledger.backends`) and of messages; of anything else it is null.

``between_hosts_bytes`` is the part of ``wire_bytes`` of pairs of ranks on two hosts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from commprof.analysis.byte_columns import BETWEEN_HOSTS, PADDING
from commprof.analysis.detailed_answers import MATRIX, MATRIX_BY, OWNERS
from commprof.analysis.engine import ask, evaluate
from commprof.analysis.frames import from_arrow, from_rows
from commprof.errors import UsageError
from commprof.ledger import backends
from commprof.schema import Op, parse_ranks

Steps: TypeAlias = tuple[int, int]
Ranks: TypeAlias = npt.NDArray[np.int64]
Shares: TypeAlias = npt.NDArray[np.float64]
Hosts: TypeAlias = Mapping[tuple[int, int], str]  # by attempt and rank, as far as they are known

EVERY_STEP: Final[Steps] = (-(2**31), 2**31 - 1)

ONCE: Final = "1"
# Columns of a flow that decide between whom it goes, as issued and on a backend, and on which hosts these are.
_ROUTE: Final = (
    *("attempt", "op", "group_ranks", "root", "sender", "receiver"),
    *("backend", "call_bytes"),
)

RING: Final = "around a ring in the order of the group"
TO_ROOT: Final = "from each other rank to the root"
FROM_ROOT: Final = "from the root to each other rank"
PAIRWISE: Final = "between each pair, as its splits say, or in equal parts"
RECORDED: Final = "as recorded"

MODELS: Final[dict[str, str]] = {
    Op.ALL_REDUCE: RING,
    Op.REDUCE_SCATTER: RING,
    Op.ALL_GATHER: RING,
    Op.REDUCE: TO_ROOT,
    Op.GATHER: TO_ROOT,
    Op.BROADCAST: FROM_ROOT,
    Op.SCATTER: FROM_ROOT,
    Op.ALL_TO_ALL: PAIRWISE,
    Op.SEND: RECORDED,
}
BACKWARDS: Final = "around a ring against the order of the group"
EXECUTED_MODELS: Final[dict[str, str]] = MODELS | {
    Op.ALL_REDUCE: BACKWARDS,
    Op.REDUCE_SCATTER: f"as an all_reduce, {BACKWARDS}",
    Op.REDUCE: f"{BACKWARDS}, then from each other rank its part to the root",
    Op.BROADCAST: "along a binomial tree from the root",
}
_LIKE_ISSUED: Final = frozenset(op for op in MODELS if MODELS[op] == EXECUTED_MODELS[op])
_PROBED_BYTES: Final = 1024  # of a rank's segment: any for which gloo's parts are equal


class _Pairs(NamedTuple):
    """Pairs of ranks and what each has of one flow; without any where it cannot be told between whom it went."""

    senders: Ranks
    receivers: Ranks
    shares: Shares


def _alike(senders: Ranks, receivers: Ranks) -> _Pairs:
    """Pairs with equal shares."""
    return _Pairs(senders, receivers, np.ones(len(senders)))


_NOWHERE: Final = _alike(np.empty(0, np.int64), np.empty(0, np.int64))


def hosts_of(groups: pa.Table) -> Hosts:
    """The host of each rank, from the table groups (the relation rank_hosts)."""
    rows = evaluate("rank_hosts", {"groups": groups}).to_pylist()
    return {(row["attempt"], row["rank"]): row["host"] for row in rows}


def matrix(
    operations: pa.Table,
    hosts: Hosts,
    by: Sequence[str] = (),
    steps: Steps = EVERY_STEP,
    op: str | None = None,
    purpose: str | None = None,
    most_ranks: int | None = None,
    weight: str = ONCE,
) -> pd.DataFrame:
    """Bytes from each rank to each other, for each combination of ``by``: see :func:`commprof.analysis.api.matrix`.

    Args:
        weight: how often an operation counts: once, or as a column of ``operations`` says; ``message_bytes`` is 0 then.

    Raises:
        UsageError: a column of ``by`` cannot be grouped by.
    """
    by = tuple(dict.fromkeys(by))
    for name in by:
        if name not in MATRIX_BY:
            near = get_close_matches(name, MATRIX_BY, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(
                f"the matrix cannot be grouped by {name!r}: {hint}choose from {', '.join(MATRIX_BY)}"
            )
    flows = [
        flow
        for flow in _flows(operations, tuple(dict.fromkeys((*by, "purpose"))), steps, weight)
        if op in (None, flow["op"]) and purpose in (None, flow["purpose"] or "untagged")
    ]
    ranks = ranks_of(operations)
    width = 1 if most_ranks is None else max(1, -(-len(ranks) // most_ranks))
    block_of = _Blocks(ranks, width, hosts)
    parts, unplaced, executed_unplaced = [], 0.0, 0.0
    unknown: dict[tuple[Any, ...], set[str]] = {}
    routes: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for flow in flows:
        routes[tuple(flow[name] for name in _ROUTE)].append(flow)
    for alike in routes.values():
        first, pairs = alike[0], _pairs(alike[0])
        whole = np.array([flow["flow_bytes"] / int(flow["wire_ranks"]) for flow in alike])
        if len(pairs.senders):
            is_message = first["op"] == Op.SEND and weight == ONCE
            recorded = np.array([flow["flow_bytes"] if is_message else 0 for flow in alike])
            cells = block_of.sums(pairs, wire_bytes=whole, message_bytes=recorded)
            cells |= block_of.between_hosts(pairs, first["attempt"], whole)
            parts.append(_repeated(by, alike, len(cells["sender"])) | cells)
        else:
            unplaced += float(whole.sum())
        is_known = first["op"] == Op.SEND or backends.known(first["backend"])
        for flow in alike:
            if not is_known or flow["unexecuted"]:
                backend = flow["backend"] or "an unknown backend"
                key = tuple(flow[name] for name in by)
                unknown.setdefault(key, set()).add(f"{flow['op']} on {backend}")
        ran = [flow for flow in alike if is_known and not flow["unexecuted"]]
        if ran:
            pairs = _executed_pairs(first)
            whole = np.array([_executed_bytes(flow, pairs) for flow in ran])
        if ran and len(pairs.senders):
            cells = block_of.sums(pairs, executed_wire_bytes=whole)
            parts.append(_repeated(by, ran, len(cells["sender"])) | cells)
        elif ran:
            executed_unplaced += float(whole.sum())
    frame = _added_up(parts, by, unknown.keys())
    names = sorted(set().union(*unknown.values()))
    frame.attrs |= {
        "unplaced_bytes": unplaced,
        "executed_unplaced_bytes": executed_unplaced,
        "executed_reason": f"who sends what is not known of {', '.join(names)}" if names else None,
        "ranks": len(ranks),
        "ranks_per_cell": width,
        "models": _named(MODELS, flows),
        "executed_models": _named(EXECUTED_MODELS, flows),
    }
    return frame


def _repeated(by: Sequence[str], flows: Sequence[Mapping[str, Any]], cells: int) -> dict[str, Any]:
    """The columns ``by`` of the cells of ``flows``, which are equally many of each."""
    count = len(flows) and cells // len(flows)
    return {name: np.repeat(np.array([flow[name] for flow in flows], object), count) for name in by}


def _named(models: Mapping[str, str], flows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return {op: model for op, model in models.items() if any(flow["op"] == op for flow in flows)}


def owners(operations: pa.Table, hosts: Hosts, steps: Steps = EVERY_STEP) -> pd.DataFrame:
    """What each rank owns and receives of reduces: see :func:`commprof.analysis.api.owners`."""
    found: dict[int, dict[str, Any]] = {}
    counted = {name: 0 for name in OWNERS.names if name != PADDING}
    for flow in _flows(operations, (), steps):
        members = parse_ranks(flow["group_ranks"])
        if flow["op"] != Op.REDUCE or flow["root"] not in members:
            continue
        for rank in members:
            found.setdefault(rank, counted | {PADDING: None, "rank": rank})
        row, payload = found[flow["root"]], int(flow["payload_bytes"])
        row["collectives"] += int(flow["collectives"])
        row["payload_bytes"] += payload
        row["received_bytes"] += payload * (len(members) - 1)
        if flow[PADDING] is not None:
            row[PADDING] = (row[PADDING] or 0) + int(flow[PADDING])
        on_hosts = [hosts.get((flow["attempt"], rank)) for rank in members]
        if None in on_hosts or row[BETWEEN_HOSTS] is None:
            row[BETWEEN_HOSTS] = None
        else:
            mine = hosts[flow["attempt"], flow["root"]]
            row[BETWEEN_HOSTS] += payload * sum(host != mine for host in on_hosts)
    frame = from_rows((found[rank] for rank in sorted(found)), OWNERS.columns)
    mean = frame["received_bytes"].mean() if len(frame) else 0
    frame.attrs["imbalance"] = float(frame["received_bytes"].max() / mean) if mean else None
    return frame


def columns(by: Sequence[str]) -> tuple[str, ...]:
    """The columns of the operations that :func:`matrix` and :func:`owners` ask for."""
    known = (name for name in by if name in MATRIX_BY)
    of_groups = ("group_ranks", "group_size", "backend", "call_bytes")
    return ("attempt", "step", "op", "purpose", *of_groups, "root", "sender", "receiver", *known)


def ranks_of(operations: pa.Table) -> list[int]:
    """The ranks of all groups of a run, in order."""
    texts = operations["group_ranks"].unique().to_pylist()
    return sorted({rank for text in texts for rank in parse_ranks(text)})


def _flows(operations: pa.Table, by: Sequence[str], steps: Steps, weight: str = ONCE) -> list[dict[str, Any]]:
    named = "".join(f"{name}, " for name in by if name not in ("attempt", "op"))
    first, last = (str(int(step)) for step in steps)
    flows = ask(
        "flows", {"operations": operations}, by=named, first=first, last=last, weight=weight
    ).to_pylist()
    for flow in flows:
        for name in ("flow_bytes", "executed_bytes"):
            if isinstance(flow[name], Decimal):
                flow[name] = int(flow[name])
    return [flow for flow in flows if flow["flow_bytes"]]


def _executed_bytes(flow: Mapping[str, Any], pairs: _Pairs) -> float:
    """How many bytes the backend sends for ``flow`` along ``pairs``."""
    if flow["op"] == Op.REDUCE and len(pairs.senders):  # the part of this root is known
        return float(pairs.shares.sum()) * float(flow["collectives"])
    return float(flow["executed_bytes"] / int(flow["wire_ranks"]))


def _executed_pairs(flow: Mapping[str, Any]) -> _Pairs:
    """Between whom gloo sends for ``flow``, or anybody a message."""
    if flow["op"] in _LIKE_ISSUED:
        return _pairs(flow)
    members: Ranks = np.array(parse_ranks(flow["group_ranks"]), np.int64)
    places = np.flatnonzero(members == flow["root"])
    if flow["op"] in (Op.REDUCE, Op.BROADCAST) and not len(places):
        return _NOWHERE
    root = int(places[0]) if len(places) else None
    size = flow["call_bytes"] if flow["op"] == Op.REDUCE else 2 * len(members) * _PROBED_BYTES
    pairs = _on_gloo(flow["op"], int(size), len(members), root)
    return _Pairs(members[pairs.senders], members[pairs.receivers], pairs.shares)


@lru_cache(maxsize=4096)
def _on_gloo(op: str, size: int, ranks: int, root: int | None) -> _Pairs:
    """The positions in the group between which gloo sends for a call, and the bytes of each pair."""
    sent = backends.flows(backends.Call(backends.GLOO, op, size, ranks, root)).sent or {}
    senders, receivers = (np.array([pair[side] for pair in sent], np.int64) for side in (0, 1))
    return _Pairs(senders, receivers, np.array(list(sent.values()), np.float64))


def _pairs(flow: Mapping[str, Any]) -> _Pairs:
    members: Ranks = np.array(parse_ranks(flow["group_ranks"]), np.int64)
    model, root = MODELS.get(flow["op"]), flow["root"]
    if model == RECORDED or flow["sender"] is not None:
        known = flow["sender"] in members and flow["receiver"] in members
        return _alike(np.array([flow["sender"]]), np.array([flow["receiver"]])) if known else _NOWHERE
    if model == RING:
        return _alike(members, np.roll(members, -1))
    if model == PAIRWISE:
        senders, receivers = np.repeat(members, len(members)), np.tile(members, len(members))
        other = senders != receivers
        return _alike(senders[other], receivers[other])
    if model is None or root not in members:
        return _NOWHERE
    others = members[members != root]
    roots = np.full(len(others), root)
    return _alike(others, roots) if model == TO_ROOT else _alike(roots, others)


class _Blocks:
    """Neighbouring ranks taken together, ``width`` at a time; a block is known by its first rank."""

    def __init__(self, ranks: Sequence[int], width: int, hosts: Hosts) -> None:
        self._ranks: Ranks = np.array(ranks, np.int64)
        self._width = width
        self._hosts = hosts
        self._numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts.values()))}
        self._hosts_of: dict[int, Ranks] = {}  # numbers of the hosts of the ranks, by attempt; -1: not known

    def sums(self, pairs: _Pairs, **whole: npt.NDArray[Any]) -> dict[str, Any]:
        """The cells of flows over ``pairs``, one flow after the other; ``whole``: by measure, the bytes of each flow."""
        count = -(-len(self._ranks) // self._width)
        cells, which = self._cells(pairs)
        shares = np.bincount(which, pairs.shares)
        first = self._ranks[:: self._width]
        flows = len(next(iter(whole.values())))
        columns: dict[str, Any] = {
            "sender": np.tile(first[cells // count], flows),
            "receiver": np.tile(first[cells % count], flows),
        }
        nothing = np.zeros(len(cells) * flows, np.int64)
        for name in _SUMMED:
            totals = whole.get(name)
            if totals is None or not totals.any():
                columns[name] = nothing
            elif len(pairs.senders) == 1:  # as of a message, whose bytes are whole numbers
                columns[name] = totals
            else:
                columns[name] = np.outer(totals, shares).ravel() / pairs.shares.sum()
        return columns

    def between_hosts(self, pairs: _Pairs, attempt: int, whole: Shares) -> dict[str, Any]:
        """In the cells of :meth:`sums`: bytes of pairs on two hosts, and how many pairs have a host that is not known."""
        if attempt not in self._hosts_of:
            named = (self._hosts.get((attempt, rank), "") for rank in self._ranks.tolist())
            self._hosts_of[attempt] = np.array([self._numbers.get(host, -1) for host in named], np.int64)
        sender, receiver = (
            self._hosts_of[attempt][np.searchsorted(self._ranks, side)]
            for side in (pairs.senders, pairs.receivers)
        )
        _, which = self._cells(pairs)
        shares = np.bincount(which, np.where(sender != receiver, pairs.shares, 0.0))
        unlocated = np.bincount(which, (sender < 0) | (receiver < 0))
        between = np.outer(whole, shares).ravel() / pairs.shares.sum()
        return {BETWEEN_HOSTS: between, _UNLOCATED: np.tile(unlocated, len(whole))}

    def _cells(self, pairs: _Pairs) -> tuple[Ranks, Ranks]:
        """The numbers of the cells of ``pairs``, and for each pair the place of its cell among them."""
        count = -(-len(self._ranks) // self._width)
        places = [np.searchsorted(self._ranks, side) // self._width for side in pairs[:2]]
        cells, which = np.unique(places[0] * count + places[1], return_inverse=True)
        return cells, which


def _added_up(
    parts: list[dict[str, Any]], by: Sequence[str], unknown: Collection[tuple[Any, ...]]
) -> pd.DataFrame:
    """The cells of all flows; ``unknown``: the combinations of ``by`` in which what ran is not known."""
    columns = (*(MATRIX_BY[name] for name in by), *MATRIX.columns)
    keys = [*by, "sender", "receiver"]
    if not parts:
        return from_arrow(pa.table({c.name: pa.array([], _ARROW[c.type]) for c in columns}), columns)
    frame = pd.DataFrame({name: np.concatenate([part[name] for part in parts]) for name in (*keys, *_SUMMED)})
    summed = frame.groupby(keys, as_index=False, dropna=False)[list(_SUMMED)].sum()
    summed[BETWEEN_HOSTS] = summed[BETWEEN_HOSTS].mask(summed[_UNLOCATED] > 0)
    if unknown:
        named = zip(*(summed[name] for name in by), strict=True) if by else [()] * len(summed)
        # null is not equal to itself: it is None among the combinations
        plain = [tuple(None if pd.isna(value) else value for value in values) for values in named]
        summed["executed_wire_bytes"] = summed["executed_wire_bytes"].mask(
            np.array([one in unknown for one in plain])
        )
        summed = summed[(summed["wire_bytes"] != 0) | summed["executed_wire_bytes"].notna()]
    return from_arrow(
        pa.table({c.name: pa.array(summed[c.name], _ARROW[c.type], from_pandas=True) for c in columns}),
        columns,
    )


_UNLOCATED: Final = "unlocated"
_SUMMED: Final = ("wire_bytes", "message_bytes", "executed_wire_bytes", BETWEEN_HOSTS, _UNLOCATED)
_ARROW: Final = {"int32": pa.int64(), "int64": pa.int64(), "float64": pa.float64(), "string": pa.string()}
