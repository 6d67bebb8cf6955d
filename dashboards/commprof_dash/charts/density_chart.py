"""Builds the zoomed-out timeline, which shows how busy each rank was.

A rank with several groups has one lane per group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from commprof.analysis import api
from commprof.schema import OPS
from commprof_dash.charts.labels import escape
from commprof_dash.charts.sketch import Sketch
from commprof_dash.theme import EXPOSED_COLOUR, OP_COLOURS, OTHER_COLOUR, PAPER, Scheme

OTHER_GROUPS: Final = "other groups"
_ALONE: Final = 1.25  # the height of the lane of a rank that has only one lane
_LANE: Final = 1.0  # the height of each lane of a rank that has several lanes
_BETWEEN: Final = 0.12  # the room between the lanes of a rank
_EXPOSED_ROW: Final = 0.45  # the height of the row for exposed communication, below the lanes of a rank
_ROOM: Final = 0.3  # the room below the row for exposed communication
_UNNAMED: Final = (None, "", "undefined")  # torch's descriptions of a group without a description


class LaneRow(NamedTuple):
    """The position of a lane, from ``top`` downwards. The lanes of a rank follow each other."""

    rank: int
    lane: int
    name: str  # the name of the group of the lane; "" if the lanes are not named
    ranks: str  # the ranks of the group of the lane
    top: float
    height: float
    is_last: bool  # whether this is the last lane of its rank

    @property
    def bottom(self) -> float:
        """The lower end of the lane, including the row for exposed communication if this row is below the lane."""
        return self.top + self.height + (_EXPOSED_ROW if self.is_last else 0)


def lane_rows(shown: api.Timeline) -> list[LaneRow]:
    """Return the lanes of all displayed ranks, from the top."""
    names = lane_names(shown)
    ranks = {(lane.rank, lane.lane): lane.group_ranks or "" for lane in shown.lanes}
    rows, top = [], 0.0
    for rank in shown.ranks:
        lanes = [lane.lane for lane in shown.lanes if lane.rank == rank] or [0]
        height = _LANE if len(lanes) > 1 else _ALONE
        for lane in lanes:
            key, is_last = (rank, lane), lane == lanes[-1]
            rows.append(LaneRow(rank, lane, names.get(key, ""), ranks.get(key, ""), top, height, is_last))
            top += height + (_EXPOSED_ROW + _ROOM if is_last else _BETWEEN)
    return rows


class Called(NamedTuple):
    """A lane with the name of its group. ``groups`` is the number of groups that share the lane."""

    rank: int
    lane: int
    pg: str | None
    group_desc: str | None
    groups: int = 1


def lane_names(shown: api.Timeline) -> dict[tuple[int, int], str]:
    """Return the name of each lane by its rank and number.

    The name is the description of the group. The name of the group is added if two lanes of a rank have the same
    description.
    """
    return names_of(
        [Called(lane.rank, lane.lane, lane.pg, lane.group_desc, lane.groups) for lane in shown.lanes]
    )


def names_of(lanes: Sequence[Called]) -> dict[tuple[int, int], str]:
    """Return the name of each of ``lanes`` by its rank and number. See :func:`lane_names` for the form of the names."""
    same_name = Counter((lane.rank, lane.group_desc) for lane in lanes)
    names = {}
    for lane in lanes:
        if lane.groups > 1:
            name = OTHER_GROUPS
        elif lane.group_desc in _UNNAMED:
            name = f"group {lane.pg}"
        else:
            name = (
                f"{lane.group_desc} {lane.pg}"
                if same_name[lane.rank, lane.group_desc] > 1
                else str(lane.group_desc)
            )
        names[lane.rank, lane.lane] = name
    return names


def draw_density(
    drawn: Sketch, density: pd.DataFrame, lanes: Sequence[LaneRow], origin: int, scheme: Scheme
) -> None:
    """Draw a heat map of how busy each lane was and of the exposed communication of each rank.

    The color of a cell is the color of the main operation of the lane.
    """
    if density.empty or not lanes:
        return
    width = int(density["end_ns"].iloc[0] - density["begin_ns"].iloc[0])
    first, last = int(density["begin_ns"].min()), int(density["begin_ns"].max())
    bins = (last - first) // width + 1
    known = set(density["op"])
    ops = [op for op in OPS if op in known]
    busy, exposed = _shares(density, lanes, ops, first, width, bins)
    total = busy.sum(axis=1)
    colour = busy.argmax(axis=1)
    rows: list[npt.NDArray[np.float64]] = []
    texts: list[list[str]] = []
    edges: list[float] = []
    begun = 0  # the number of the first lane of the rank
    for number, lane in enumerate(lanes):
        hover = _hover_of_lane(lane, busy[number], exposed[number], ops)
        rows.append(np.where(total[number] > 0, colour[number] + np.clip(total[number], 0, 0.999), np.nan))
        texts.append(hover)
        edges.append(lane.top)
        if lane.is_last:
            still = exposed[begun : number + 1].sum(axis=0)
            rows.append(np.where(still > 0, len(ops) + np.clip(still, 0, 0.999), np.nan))
            alone = begun == number
            texts.append(
                hover
                if alone
                else [f"<b>rank {lane.rank}</b>: exposed communication {100 * part:.0f} %" for part in still]
            )
            edges.append(lane.top + lane.height)
            begun = number + 1
        rows.append(np.full(bins, np.nan))
        texts.append([""] * bins)
        edges.append(lane.bottom)
    drawn.add_heatmap(
        name="busy",
        x=[float(first - origin + width * number) for number in range(bins + 1)],
        y=[*edges, lanes[-1].bottom + _ROOM],
        z=np.array(rows),
        text=texts,
        zmin=0,
        zmax=len(ops) + 1,
        colorscale=_scale([*(OP_COLOURS.get(op, OTHER_COLOUR) for op in ops), EXPOSED_COLOUR], scheme),
        showscale=False,
        hoverongaps=False,
        hoverinfo="none",  # the line above the figure shows the text
    )


class HeatShares(NamedTuple):
    """The shares of time of exposed communication and of any communication, as arrays of rows x bins.

    Attributes:
        begins: The left edges of the bins.
    """

    exposed: npt.NDArray[np.float64]
    busy: npt.NDArray[np.float64]
    begins: npt.NDArray[np.float64]
    width: int


def heat_shares(density: pd.DataFrame, rows: Sequence[Sequence[int]], origin: int) -> HeatShares:
    """Return, for each of ``rows``, the mean shares over the ranks of the row, by bin of ``density``.

    The left edges of the bins are relative to ``origin``.
    """
    width = int(density["end_ns"].iloc[0] - density["begin_ns"].iloc[0])
    first, last = int(density["begin_ns"].min()), int(density["begin_ns"].max())
    row_of = {rank: number for number, ranks in enumerate(rows) for rank in ranks}
    sizes = np.array([len(ranks) for ranks in rows], float)[:, None]
    cells = (
        density["rank"].map(row_of).to_numpy(int),
        ((density["begin_ns"] - first) // width).to_numpy(int),
    )
    shape = (len(rows), (last - first) // width + 1)
    exposed, busy = np.zeros(shape), np.zeros(shape)
    np.add.at(exposed, cells, density["exposed_ns"].to_numpy(float) / width)
    np.add.at(busy, cells, density["busy_ns"].to_numpy(float) / width)
    begins = first - origin + width * np.arange(shape[1], dtype=float)
    return HeatShares(np.clip(exposed / sizes, 0, 1), np.clip(busy / sizes, 0, 1), begins, width)


def draw_heat(
    drawn: Sketch,
    density: pd.DataFrame,
    labels: Sequence[str],
    rows: Sequence[Sequence[int]],
    unfolds: Sequence[str],
    origin: int,
    scheme: Scheme,
) -> None:
    """Draw a heat map with one row for each of ``rows`` (lists of ranks).

    The color of a cell is the share of exposed communication. If no exposed time is known, the color is the share
    of any communication. ``unfolds`` contains, for each row, the ranks that a click on the row shows.
    """
    if density.empty:
        return
    shares = heat_shares(density, rows, origin)
    is_known = bool(shares.exposed.any())
    values = shares.exposed if is_known else shares.busy
    texts = [
        [
            f"<b>{escape(label)}</b>: exposed {100 * one:.0f} %, in collectives {100 * other:.0f} %"
            if other
            else ""
            for one, other in zip(exposed, busy, strict=True)
        ]
        for label, exposed, busy in zip(labels, shares.exposed, shares.busy, strict=True)
    ]
    colour = EXPOSED_COLOUR if is_known else OP_COLOURS["all_reduce"]
    drawn.add_heatmap(
        x=shares.begins + shares.width / 2,
        y=np.arange(len(rows)),
        z=np.where(shares.busy > 0, np.maximum(values, 0.02), np.nan),
        zmin=0,
        zmax=1,
        colorscale=[[0, _mixed(colour, PAPER[scheme], 0.12)], [1, colour]],
        showscale=False,
        text=texts,
        hoverinfo="none",
        meta={"unfolds": list(unfolds)},
    )


def _shares(
    density: pd.DataFrame, lanes: Sequence[LaneRow], ops: Sequence[str], first: int, width: int, bins: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return shares of each bin: busy time (lanes x operations x bins) and exposed communication (lanes x bins)."""
    place = {(lane.rank, lane.lane): number for number, lane in enumerate(lanes)}
    busy = np.zeros((len(lanes), len(ops), bins))
    exposed = np.zeros((len(lanes), bins))
    at = (
        np.array([place[one] for one in zip(density["rank"], density["lane"], strict=True)]),
        density["op"].map({op: number for number, op in enumerate(ops)}).to_numpy(),
        ((density["begin_ns"] - first) // width).to_numpy(),
    )
    busy[at] = density["busy_share"].to_numpy()
    np.add.at(exposed, (at[0], at[2]), density["exposed_ns"].to_numpy() / width)
    return busy, exposed


def _hover_of_lane(
    lane: LaneRow, busy: npt.NDArray[np.float64], exposed: npt.NDArray[np.float64], ops: Sequence[str]
) -> list[str]:
    group = f", {escape(lane.name)}" + (f" ({escape(lane.ranks)})" if lane.ranks else "") if lane.name else ""
    texts = [""] * len(exposed)
    for cell in np.flatnonzero(busy.sum(axis=0) > 0):
        shares = sorted(zip(busy[:, cell], ops, strict=True), reverse=True)
        operations = ", ".join(f"{op} {100 * share:.0f} %" for share, op in shares[:3] if share > 0)
        texts[cell] = f"<b>rank {lane.rank}{group}</b>: {operations}; exposed {100 * exposed[cell]:.0f} %"
    return texts


def _scale(colours: Sequence[str], scheme: Scheme) -> list[list[Any]]:
    """Return a color scale with one part for each color, from faint to full."""
    stops: list[list[Any]] = []
    for number, colour in enumerate(colours):
        stops.append([number / len(colours), _mixed(colour, PAPER[scheme], 0.28)])
        stops.append([(number + 1) / len(colours) - (1e-9 if number + 1 < len(colours) else 0), colour])
    return stops


def _mixed(colour: str, with_colour: str, share: float) -> str:
    mixed = (
        round(int(colour[i : i + 2], 16) * share + int(with_colour[i : i + 2], 16) * (1 - share))
        for i in (1, 3, 5)
    )
    return "#" + "".join(f"{part:02x}" for part in mixed)
