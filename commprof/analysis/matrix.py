"""Which rank sends how much to which: the wire bytes of the model, put on pairs of ranks.

The model says what all ranks of a group send together (``schema.wire_bytes`` times the size of the group). Between whom it
flows is modelled as well, so that every row and column adds up to exactly what the model says of its rank:

* reduce, gather: from each other rank to the root; broadcast, scatter: from the root to each other rank, in equal parts;
* all_to_all: between each pair, in equal parts (uneven splits are in no record);
* all_reduce, reduce_scatter, all_gather: around a ring in the order of the group, each rank to the next;
* send: from the sender to the receiver, as recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from commprof.analysis.detailed_answers import MATRIX, MATRIX_BY, OWNERS
from commprof.analysis.engine import ask
from commprof.analysis.frames import from_arrow
from commprof.errors import UsageError
from commprof.schema import Op, parse_ranks

Steps: TypeAlias = tuple[int, int]
Ranks: TypeAlias = npt.NDArray[np.int64]

EVERY_STEP: Final[Steps] = (-(2**31), 2**31 - 1)

RING: Final = "around a ring in the order of the group"
TO_ROOT: Final = "from each other rank to the root"
FROM_ROOT: Final = "from the root to each other rank"
PAIRWISE: Final = "between each pair, in equal parts"
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


class _Pairs(NamedTuple):
    """Pairs of ranks with equal shares of one flow; without any where it cannot be told between whom it went."""

    senders: Ranks
    receivers: Ranks


_NOWHERE: Final = _Pairs(np.empty(0, np.int64), np.empty(0, np.int64))


def matrix(
    operations: pa.Table,
    by: Sequence[str] = (),
    steps: Steps = EVERY_STEP,
    op: str | None = None,
    purpose: str | None = None,
    most_ranks: int | None = None,
) -> pd.DataFrame:
    """Bytes from each rank to each other, for each combination of ``by``: see :func:`commprof.analysis.api.matrix`.

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
        for flow in _flows(operations, tuple(dict.fromkeys((*by, "purpose"))), steps)
        if op in (None, flow["op"]) and purpose in (None, flow["purpose"] or "untagged")
    ]
    ranks = ranks_of(operations)
    width = 1 if most_ranks is None else max(1, -(-len(ranks) // most_ranks))
    block_of = _Blocks(ranks, width)
    parts, unplaced = [], 0.0
    for flow in flows:
        pairs, whole = _pairs(flow), int(flow["flow_bytes"]) / int(flow["wire_ranks"])
        if not len(pairs.senders):
            unplaced += whole
            continue
        parts.append(
            {name: flow[name] for name in by}
            | block_of.sums(pairs, whole, int(flow["flow_bytes"]) if flow["op"] == Op.SEND else 0)
        )
    frame = _added_up(parts, by)
    frame.attrs |= {
        "unplaced_bytes": unplaced,
        "ranks": len(ranks),
        "ranks_per_cell": width,
        "models": {name: MODELS[name] for name in MODELS if any(flow["op"] == name for flow in flows)},
    }
    return frame


def owners(operations: pa.Table, steps: Steps = EVERY_STEP) -> pd.DataFrame:
    """What each rank owns and receives of reduces: see :func:`commprof.analysis.api.owners`."""
    found: dict[int, dict[str, int]] = {}
    for flow in _flows(operations, (), steps):
        members = parse_ranks(flow["group_ranks"])
        if flow["op"] != Op.REDUCE or flow["root"] not in members:
            continue
        for rank in members:
            found.setdefault(rank, dict.fromkeys(OWNERS.names, 0) | {"rank": rank})
        row = found[flow["root"]]
        row["collectives"] += int(flow["collectives"])
        row["payload_bytes"] += int(flow["payload_bytes"])
        row["received_bytes"] += int(flow["payload_bytes"]) * (len(members) - 1)
    rows = [found[rank] for rank in sorted(found)]
    frame = from_arrow(
        pa.table({name: pa.array([row[name] for row in rows], pa.int64()) for name in OWNERS.names}),
        OWNERS.columns,
    )
    mean = frame["received_bytes"].mean() if len(frame) else 0
    frame.attrs["imbalance"] = float(frame["received_bytes"].max() / mean) if mean else None
    return frame


def columns(by: Sequence[str]) -> tuple[str, ...]:
    """The columns of the operations that :func:`matrix` and :func:`owners` ask for."""
    known = (name for name in by if name in MATRIX_BY)
    return ("step", "op", "purpose", "group_ranks", "group_size", "root", "sender", "receiver", *known)


def ranks_of(operations: pa.Table) -> list[int]:
    """The ranks of all groups of a run, in order."""
    texts = operations["group_ranks"].unique().to_pylist()
    return sorted({rank for text in texts for rank in parse_ranks(text)})


def _flows(operations: pa.Table, by: Sequence[str], steps: Steps) -> list[dict[str, Any]]:
    named = "".join(f"{name}, " for name in by if name != "op")
    answer = ask(
        "flows", {"operations": operations}, by=named, first=str(int(steps[0])), last=str(int(steps[1]))
    )
    return [flow for flow in answer.to_pylist() if flow["flow_bytes"]]


def _pairs(flow: dict[str, Any]) -> _Pairs:
    members: Ranks = np.array(parse_ranks(flow["group_ranks"]), np.int64)
    model, root = MODELS.get(flow["op"]), flow["root"]
    if model == RECORDED:
        known = flow["sender"] in members and flow["receiver"] in members
        return _Pairs(np.array([flow["sender"]]), np.array([flow["receiver"]])) if known else _NOWHERE
    if model == RING:
        return _Pairs(members, np.roll(members, -1))
    if model == PAIRWISE:
        senders, receivers = np.repeat(members, len(members)), np.tile(members, len(members))
        other = senders != receivers
        return _Pairs(senders[other], receivers[other])
    if model is None or root not in members:
        return _NOWHERE
    others = members[members != root]
    roots = np.full(len(others), root)
    return _Pairs(others, roots) if model == TO_ROOT else _Pairs(roots, others)


class _Blocks:
    """Neighbouring ranks taken together, ``width`` at a time; a block is known by its first rank."""

    def __init__(self, ranks: Sequence[int], width: int) -> None:
        self._ranks: Ranks = np.array(ranks, np.int64)
        self._width = width

    def sums(self, pairs: _Pairs, whole: float, recorded: int) -> dict[str, Any]:
        """The cells of a flow of ``whole`` bytes over ``pairs``, as columns."""
        count = -(-len(self._ranks) // self._width)
        places = [np.searchsorted(self._ranks, side) // self._width for side in pairs]
        cells, number = np.unique(places[0] * count + places[1], return_counts=True)
        first = self._ranks[:: self._width]
        return {
            "sender": first[cells // count],
            "receiver": first[cells % count],
            "wire_bytes": whole * number / len(pairs.senders),
            "message_bytes": np.full(len(cells), recorded),
        }


def _added_up(parts: list[dict[str, Any]], by: Sequence[str]) -> pd.DataFrame:
    columns = (*(MATRIX_BY[name] for name in by), *MATRIX.columns)
    keys = [*by, "sender", "receiver"]
    if not parts:
        return from_arrow(pa.table({c.name: pa.array([], _ARROW[c.type]) for c in columns}), columns)
    frame = pd.concat([pd.DataFrame(part) for part in parts], ignore_index=True)
    summed = frame.groupby(keys, as_index=False, dropna=False)[["wire_bytes", "message_bytes"]].sum()
    return from_arrow(
        pa.table({c.name: pa.array(summed[c.name], _ARROW[c.type], from_pandas=True) for c in columns}),
        columns,
    )


_ARROW: Final = {"int32": pa.int64(), "int64": pa.int64(), "float64": pa.float64(), "string": pa.string()}
