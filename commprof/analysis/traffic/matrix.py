"""Compute the bytes that each rank sends to each other rank, by two models.

``wire_bytes`` models the operations as issued. All ranks of a group together send ``schema.wire_bytes`` times
the size of the group. A model of the pairs (the relation matrix) distributes these bytes, so that the sum of
each row and column is the modeled bytes of its rank:

* reduce, gather: from each other rank to the root; broadcast, scatter: from the root to each other rank, in
  equal parts;
* all_to_all: between each pair, by the splits of its records, or in equal parts;
* all_reduce, reduce_scatter, all_gather: around a ring in the order of the group, each rank to the next;
* send: from the sender to the receiver, as recorded.

``executed_wire_bytes`` models the operations that the backend runs. The pairs are known for gloo
(:mod:`commprof.ledger.records.backends`) and for messages. For other operations, the value is null.

``between_hosts_bytes`` is the part of ``wire_bytes`` between ranks on different hosts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache, reduce
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from commprof.analysis.columns.byte_columns import BETWEEN_HOSTS, PADDING
from commprof.analysis.columns.detailed_answers import MATRIX, MATRIX_BY, OWNERS
from commprof.analysis.columns.frames import from_arrow, from_rows
from commprof.analysis.relations.sql_engine import ask, evaluate, group_members, query_text
from commprof.analysis.traffic.steady_steps import EXECUTED as _EXECUTED
from commprof.errors import UsageError
from commprof.ledger.records import backends
from commprof.schema import Op, parse_ranks

Steps: TypeAlias = tuple[int, int]
Ranks: TypeAlias = npt.NDArray[np.int64]
Shares: TypeAlias = npt.NDArray[np.float64]

EVERY_STEP: Final[Steps] = (-(2**31), 2**31 - 1)
UNTAGGED: Final = "untagged"
_UNLOCATED: Final = "unlocated"
# The columns that determine the pairs between which gloo sends.
_ROUTE: Final = ("op", "group_ranks", "root", "call_bytes")


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
_PROBED_BYTES: Final = 1024  # of a segment of a rank: any value for which gloo's segments are equal


class _Pairs(NamedTuple):
    """Pairs of ranks and the share of one flow that each pair has. Empty if the pairs are not known."""

    senders: Ranks
    receivers: Ranks
    shares: Shares


_NOWHERE: Final = _Pairs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))


def matrix(
    operations: pa.Table,
    groups: pa.Table,
    by: Sequence[str] = (),
    steps: Steps = EVERY_STEP,
    op: str | None = None,
    purpose: str | None = None,
    most_ranks: int | None = None,
) -> pd.DataFrame:
    """Return the bytes from each rank to each other rank for each combination of ``by``.

    See :func:`commprof.analysis.api.matrix`.

    Args:
        groups: The table ``groups``, which contains the hosts of the ranks.

    Raises:
        UsageError: A column of ``by`` cannot be grouped by.
    """
    # An unknown column is refused before anything is evaluated, so that the error names this column.
    by = tuple(dict.fromkeys(by))
    for name in by:
        if name not in MATRIX_BY:
            near = get_close_matches(name, MATRIX_BY, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(
                f"the matrix cannot be grouped by {name!r}: {hint}choose from {', '.join(MATRIX_BY)}"
            )
    # The ranks are those of the whole run, so that every choice of steps has the same rows and columns.
    ranks = ranks_of(operations)
    blocks = _Blocks(ranks, most_ranks)
    chosen = _chosen(operations, steps, op, purpose)
    # Issued model: SQL evaluates the model for all backends. Bytes whose root or receiver is unknown have no cell. They
    # are only summed, so that cells and unplaced bytes together are the total.
    issued = _issued(chosen, groups, by, blocks)
    is_placed = issued["sender"] >= 0
    cell_tables = [{name: values[is_placed] for name, values in issued.items()}]
    executed_unplaced = float(issued[_EXECUTED][~is_placed].sum())
    # Executed model: operations that the backend routes like the issued ones are already in the cells (_LIKE_ISSUED).
    # The other operations have different routes. Flows with equal routes are collected, so that each route is computed
    # once.
    # A single flow of an unknown backend makes the whole row null, because a partial sum would look like a complete
    # sum.
    unknown: dict[tuple[Any, ...], set[str]] = {}
    routes: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    flows = _flows(chosen, tuple(dict.fromkeys((*by, "purpose"))))
    for flow in flows:
        if flow["unexecuted"] or (flow["op"] != Op.SEND and not backends.known(flow["backend"])):
            backend, key = flow["backend"] or "an unknown backend", tuple(flow[name] for name in by)
            unknown.setdefault(key, set()).add(f"{flow['op']} on {backend}")
        elif flow["op"] not in _LIKE_ISSUED:
            routes[tuple(flow[name] for name in _ROUTE)].append(flow)
    # The bytes of all flows of a route are distributed over its pairs at once.
    for alike in routes.values():
        pairs = _executed_pairs(alike[0])
        executed_bytes = np.array([_executed_bytes(flow, pairs) for flow in alike])
        if len(pairs.senders):
            cells = blocks.of_pairs(pairs, executed_bytes)
            count = len(cells["sender"]) // len(alike)
            named = {name: np.repeat(np.array([flow[name] for flow in alike], object), count) for name in by}
            cell_tables.append(named | cells)
        else:
            executed_unplaced += float(executed_bytes.sum())
    # There is one row per pair and combination of ``by``, regardless of the number of flows. The attributes contain the
    # bytes that are in no row.
    frame = _added_up(cell_tables, by, unknown.keys())
    names = sorted(set().union(*unknown.values()))
    frame.attrs |= {
        "unplaced_bytes": float(issued["wire_bytes"][~is_placed].sum()),
        "executed_unplaced_bytes": executed_unplaced,
        "executed_reason": f"it is not known which ranks send the bytes of {', '.join(names)}"
        if names
        else None,
        "ranks": len(ranks),
        "ranks_per_cell": blocks.width,
        "models": _named(MODELS, flows),
        "executed_models": _named(EXECUTED_MODELS, flows),
    }
    return frame


def _named(models: Mapping[str, str], flows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return {op: model for op, model in models.items() if any(flow["op"] == op for flow in flows)}


def owners(operations: pa.Table, groups: pa.Table, steps: Steps = EVERY_STEP) -> pd.DataFrame:
    """Return what each rank owns and receives in reduces: see :func:`commprof.analysis.api.owners`."""
    rows_by_rank: dict[int, dict[str, Any]] = {}
    rows = evaluate("rank_hosts", {"groups": groups}).to_pylist()
    hosts = {(row["attempt"], row["rank"]): row["host"] for row in rows}
    counted = {name: 0 for name in OWNERS.names if name != PADDING}
    for flow in _flows(_chosen(operations, steps), ("attempt",)):
        members = parse_ranks(flow["group_ranks"])
        if flow["op"] != Op.REDUCE or flow["root"] not in members:
            continue
        for rank in members:
            rows_by_rank.setdefault(rank, counted | {PADDING: None, "rank": rank})
        row, payload = rows_by_rank[flow["root"]], int(flow["payload_bytes"])
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
    frame = from_rows((rows_by_rank[rank] for rank in sorted(rows_by_rank)), OWNERS.columns)
    mean = frame["received_bytes"].mean() if len(frame) else 0
    frame.attrs["imbalance"] = float(frame["received_bytes"].max() / mean) if mean else None
    return frame


def columns(by: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of the operations that :func:`matrix` and :func:`owners` need."""
    known = (name for name in by if name in MATRIX_BY)
    of_groups = ("group_ranks", "group_size", "backend", "call_bytes")
    return ("attempt", "step", "op", "purpose", *of_groups, "root", "sender", "receiver", *known)


def ranks_of(operations: pa.Table) -> list[int]:
    """Return the ranks of all groups of a run, in order."""
    texts = operations["group_ranks"].unique().to_pylist()
    return sorted({rank for text in texts for rank in parse_ranks(text)})


def _chosen(
    operations: pa.Table, steps: Steps, op: str | None = None, purpose: str | None = None
) -> pa.Table:
    """Return the operations of some steps.

    Args:
        op, purpose: If passed, only operations with this operation and purpose are returned.
    """
    first, last = steps
    wanted = [pc.greater_equal(operations["step"], first), pc.less_equal(operations["step"], last)]
    if op is not None:
        wanted.append(pc.equal(operations["op"], op))
    if purpose is not None:
        purposes = operations["purpose"]
        wanted.append(pc.is_null(purposes) if purpose == UNTAGGED else pc.equal(purposes, purpose))
    return operations.filter(reduce(pc.and_kleene, wanted))


def _issued(
    operations: pa.Table, groups: pa.Table, by: Sequence[str], blocks: _Blocks
) -> dict[str, npt.NDArray[Any]]:
    """Return the relation matrix by blocks of ranks, as columns.

    Sender and receiver are -1 if they are not known.
    """
    ranks = group_members(pa.table({"group_ranks": operations["group_ranks"].unique()}))
    tables = {"groups": groups, "ranks_of_groups": ranks, "blocks": blocks.table()}
    select = query_text("cells").format(by="".join(f"{name}, " for name in by))
    cells = evaluate("matrix", tables, by, {"operations": operations}, select)
    columns: dict[str, npt.NDArray[Any]] = {name: np.array(cells[name].to_pylist(), object) for name in by}
    columns |= {name: pc.fill_null(cells[name], -1).to_numpy() for name in ("sender", "receiver")}
    return columns | {
        "wire_bytes": cells["wire_bytes"].to_numpy(),
        "message_bytes": cells["message_bytes"].to_numpy(),
        _EXECUTED: cells["alike_bytes"].to_numpy(),
        BETWEEN_HOSTS: pc.fill_null(cells[BETWEEN_HOSTS], 0.0).to_numpy(),
        _UNLOCATED: cells[_UNLOCATED].to_numpy(),
    }


def _flows(operations: pa.Table, by: Sequence[str]) -> list[dict[str, Any]]:
    named = "".join(f"{name}, " for name in by if name != "op")
    flows: list[dict[str, Any]] = ask("flows", {"operations": operations}, by=named).to_pylist()
    return flows


def _executed_bytes(flow: Mapping[str, Any], pairs: _Pairs) -> float:
    """Return the bytes that the backend sends for ``flow`` along ``pairs``."""
    if flow["op"] == Op.REDUCE and len(pairs.senders):  # the bytes for this root are known
        return float(pairs.shares.sum()) * float(flow["collectives"])
    return float(flow["executed_bytes"])


def _executed_pairs(flow: Mapping[str, Any]) -> _Pairs:
    """Return the pairs between which gloo sends for ``flow``.

    This is for operations whose pairs differ from the pairs of the issued operation.
    """
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
    """Return the positions in the group between which gloo sends for a call, and the bytes of each pair."""
    sent = backends.flows(backends.Call(backends.GLOO, op, size, ranks, root)).sent or {}
    senders, receivers = (np.array([pair[side] for pair in sent], np.int64) for side in (0, 1))
    return _Pairs(senders, receivers, np.array(list(sent.values()), np.float64))


class _Blocks:
    """Blocks of neighboring ranks, at most ``most`` blocks. The first rank names the block."""

    def __init__(self, ranks: Sequence[int], most: int | None) -> None:
        self.width = 1 if most is None else max(1, -(-len(ranks) // most))
        self._ranks: Ranks = np.array(ranks, np.int64)

    def table(self) -> pa.Table:
        """Return the first rank of the block of each rank, for the query ``cells``."""
        first = np.repeat(self._ranks[:: self.width], self.width)[: len(self._ranks)]
        return pa.table({"rank": pa.array(self._ranks, pa.int32()), "first": pa.array(first, pa.int32())})

    def of_pairs(self, pairs: _Pairs, executed_bytes: Shares) -> dict[str, npt.NDArray[Any]]:
        """Return the cells of flows over ``pairs``, one flow after another.

        Args:
            executed_bytes: The executed bytes of each flow.
        """
        count = -(-len(self._ranks) // self.width)
        places = [np.searchsorted(self._ranks, side) // self.width for side in pairs[:2]]
        cells, which = np.unique(places[0] * count + places[1], return_inverse=True)
        shares = np.bincount(which, pairs.shares) / pairs.shares.sum()
        first = self._ranks[:: self.width]
        nothing = np.zeros(len(cells) * len(executed_bytes), np.int64)
        return dict.fromkeys(_SUMMED, nothing) | {
            "sender": np.tile(first[cells // count], len(executed_bytes)),
            "receiver": np.tile(first[cells % count], len(executed_bytes)),
            _EXECUTED: np.outer(executed_bytes, shares).ravel(),
        }


def _added_up(
    cell_tables: Sequence[Mapping[str, npt.NDArray[Any]]],
    by: Sequence[str],
    unknown: Collection[tuple[Any, ...]],
) -> pd.DataFrame:
    """Return the summed cells of all flows.

    Args:
        unknown: The combinations of ``by`` for which the executed bytes are not known.
    """
    columns = (*(MATRIX_BY[name] for name in by), *MATRIX.columns)
    keys = [*by, "sender", "receiver"]
    frame = pd.DataFrame(
        {name: np.concatenate([part[name] for part in cell_tables]) for name in (*keys, *_SUMMED)}
    )
    summed = frame.groupby(keys, as_index=False, dropna=False)[list(_SUMMED)].sum()
    summed[BETWEEN_HOSTS] = summed[BETWEEN_HOSTS].mask(summed[_UNLOCATED] > 0)
    if unknown:
        named = zip(*(summed[name] for name in by), strict=True) if by else [()] * len(summed)
        # Null is not equal to itself, so the combinations contain None instead.
        plain = [tuple(None if pd.isna(value) else value for value in values) for values in named]
        summed[_EXECUTED] = summed[_EXECUTED].mask(np.array([one in unknown for one in plain]))
        summed = summed[(summed["wire_bytes"] != 0) | summed[_EXECUTED].notna()]
    return from_arrow(
        pa.table({c.name: pa.array(summed[c.name], _ARROW[c.type], from_pandas=True) for c in columns}),
        columns,
    )


_SUMMED: Final = ("wire_bytes", "message_bytes", _EXECUTED, BETWEEN_HOSTS, _UNLOCATED)
_ARROW: Final = {"int32": pa.int64(), "int64": pa.int64(), "float64": pa.float64(), "string": pa.string()}
