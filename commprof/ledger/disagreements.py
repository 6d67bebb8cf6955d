"""Where the ranks of a group issued different things."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commprof.ledger.lookup import combinations
from commprof.ledger.survey import GROUP, Group
from commprof.schema import Op

COLUMNS: Final = (*GROUP, "rank", "step", "op", "payload_bytes")
# Members of these may hold buffers of different sizes.
_UNEVEN: Final = frozenset({Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER})
_OF_GROUP: Final = ["name", "step"]


class Members:
    """What each rank of each group issued in each step, summed up of records that are added part by part."""

    def __init__(self) -> None:
        self._names: dict[Group, int] = {}  # of groups with an operation
        self._ranks: dict[Group, set[int]] = {}
        self._sums: list[pa.Table] = []

    def add(self, part: pa.Table) -> None:
        """Take in some records: their columns :data:`COLUMNS`."""
        name = np.full(len(part), -1, np.int64)
        for (*group, op), places in combinations(part, [*GROUP, "op"]):
            if op not in (Op.SEND, Op.RECV):
                name[places] = self._names.setdefault((*group, op), len(self._names))
        for (*group, op, rank), _ in combinations(part, [*GROUP, "op", "rank"]):
            if op not in (Op.SEND, Op.RECV):
                self._ranks.setdefault(tuple(group), set()).add(rank)
        rows = part.select(["step", "rank", "payload_bytes"]).append_column("name", pa.array(name))
        rows = rows.filter(pa.array(name >= 0))
        sums = rows.group_by([*_OF_GROUP, "rank"]).aggregate([([], "count_all"), ("payload_bytes", "sum")])
        self._sums.append(sums.select([*_OF_GROUP, "rank", "count_all", "payload_bytes_sum"]))

    def disagreements(self) -> list[str]:
        """Groups whose recorded members did not issue the same collectives, or other bytes of them, as sentences."""
        if not self._sums:
            return []
        names = list(self._names)
        sums = (
            pa.concat_tables(self._sums)
            .group_by([*_OF_GROUP, "rank"])
            .aggregate([("count_all", "sum"), ("payload_bytes_sum", "sum")])
            .rename_columns([*_OF_GROUP, "rank", "times", "bytes"])
        )
        found: dict[Group, str] = {}
        apart = self._apart(sums, names)
        for key in sorted(((*names[name], step) for name, step in apart), key=str):
            group, op, step = key[:3], key[3], key[4]
            if group not in found:
                own = sums.filter(
                    (pc.field("name") == self._names[*group, op]) & (pc.field("step") == step)
                ).to_pylist()
                found[group] = _sentence(group, op, step, sorted(self._ranks[group]), own)
        return list(found.values())

    def _apart(self, sums: pa.Table, names: Sequence[Group]) -> list[tuple[int, int]]:
        """Name and step of what the members of a group did not do alike."""
        ends = sums.group_by(_OF_GROUP).aggregate(
            [([], "count_all"), *((name, end) for name in ("times", "bytes") for end in ("min", "max"))]
        )
        if not len(ends):
            return []
        name, step, members, *extremes = (
            ends[column].to_numpy()
            for column in ("name", "step", "count_all", "times_min", "times_max", "bytes_min", "bytes_max")
        )
        expected = np.array([len(self._ranks[each[:3]]) for each in names], np.int64)[name]
        even = np.array([each[3] not in _UNEVEN for each in names], bool)[name]
        times_differ, bytes_differ = extremes[0] != extremes[1], extremes[2] != extremes[3]
        apart = np.flatnonzero((members != expected) | times_differ | (even & bytes_differ))
        return list(zip(name[apart].tolist(), step[apart].tolist(), strict=True))


def _sentence(group: Group, op: str, step: int, ranks: Sequence[int], own: Sequence[dict[str, Any]]) -> str:
    of_rank = {row["rank"]: (row["times"], row["bytes"]) for row in own}
    times, sizes = zip(*(of_rank.get(rank, (0, 0)) for rank in ranks), strict=True)
    differing = _of_ranks("{} times", times) or _of_ranks("{} bytes", sizes)
    return (
        f"the ranks of group {group[1]} ({group[2]}) did not issue the same: {op} "
        f"{'before the first step' if step < 0 else f'in step {step}'}: {differing} "
        f"on ranks {', '.join(map(str, ranks))}"
    )


def _of_ranks(unit: str, values: Sequence[int]) -> str:
    """``values`` with their unit where they differ; nothing where they are all the same."""
    return unit.format(", ".join(f"{value:,}" for value in values)) if len(set(values)) > 1 else ""
