"""The timeline of a run: for a window of time, either one bar per record, or how busy each rank was in each bin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from commprof.analysis.browse.density import Numbers, binned
from commprof.analysis.browse.lanes import JOINED, LANES, MOST_OF_RANK, NUMBER, Lane, order_of_group
from commprof.analysis.columns.answers import BANDS, DENSITY, TIMELINE_BARS
from commprof.analysis.columns.defaults import MOST_BARS
from commprof.analysis.columns.frames import from_arrow
from commprof.analysis.storage.index import Index
from commprof.analysis.storage.index_tables import numbers_of_ops
from commprof.errors import UsageError
from commprof.schema import OPS

MOST_BANDS: Final = 240
MOST_LANES: Final = 48  # maximum number of lanes of density; more lanes would be too narrow to see
MOST_LEVELS: Final = 4  # maximum number of levels for overlapping bars of one lane
_FAR: Final = 1 << 62


class Timeline(NamedTuple):
    """The content of a window of time.

    ``bars`` has a row for each record, and ``density`` is None. If there are too many records, ``bars`` is None and
    ``density`` is present. All times are on the clock of the host of rank 0. ``run_begin_ns`` and ``run_end_ns`` are
    the bounds of the whole run. ``bands`` are the steps and phases of the lowest rank in the window, unless there are
    too many. The phase ``init`` has a band only if the run has steps.
    """

    begin_ns: int
    end_ns: int
    run_begin_ns: int
    run_end_ns: int
    run_ranks: tuple[int, ...]
    ranks: tuple[int, ...]
    records: int  # number of records of the whole run
    # Number of records whose clock was never compared with the reference clock. Their times are not corrected.
    unknown_clocks: int
    bars: pd.DataFrame | None
    density: pd.DataFrame | None
    lanes: tuple[Lane, ...]  # lanes of the density of ``ranks``; empty if groups are not distinguished
    hidden_lanes: int  # number of lanes that are not shown, because there are too many
    bands: pd.DataFrame


def timeline(
    index: Index,
    begin_ns: int | None,
    end_ns: int | None,
    pixels: int,
    ranks: Sequence[int] | None,
    most_bars: int = MOST_BARS,
) -> Timeline:
    """Return the timeline of a window of time (see :func:`commprof.analysis.api.timeline`)."""
    if pixels < 1 or most_bars < 0:
        raise UsageError(
            f"a timeline of {pixels} pixels and {most_bars} bars cannot be drawn; give more than 0"
        )
    facts = index.facts
    first, last = facts["begin_ns"], facts["end_ns"] + 1
    begin = first if begin_ns is None else max(-_FAR, min(int(begin_ns), _FAR))
    end = last if end_ns is None else max(-_FAR, min(int(end_ns), _FAR))
    if end <= begin:
        raise UsageError(f"a timeline from {begin} to {end} has no length; its end must be after its begin")
    wanted = set(facts["ranks"] if ranks is None else ranks)
    shown = [rank for rank in facts["ranks"] if rank in wanted]
    bars = _bars(index, begin, end, shown, most_bars)
    lanes = _lanes(index, shown) if bars is None else ()
    shown_lanes = lanes if len(lanes) <= MOST_LANES else ()
    return Timeline(
        begin_ns=begin,
        end_ns=end,
        run_begin_ns=first,
        run_end_ns=last,
        run_ranks=tuple(facts["ranks"]),
        ranks=tuple(shown),
        records=facts["records"],
        unknown_clocks=facts["unknown_clocks"],
        bars=bars,
        density=_density(index, begin, end, shown, shown_lanes, pixels) if bars is None else None,
        lanes=shown_lanes,
        hidden_lanes=len(lanes) - len(shown_lanes),
        bands=_bands(index, begin, end),
    )


_WINDOW: Final = "r.begin_ns < ? and r.end_ns >= ?"


def _of_ranks(index: Index, ranks: Sequence[int]) -> str:
    """Return the SQL condition that selects the records of ``ranks``, which must be ranks of this index."""
    if len(ranks) == len(index.facts["ranks"]):
        return ""
    return f"and r.rank in ({', '.join(map(str, ranks))})" if ranks else "and false"


_BARS: Final = """
select r.*, k.* exclude (kind),
    case when still > 0 then held_end_ns - still end as exposed_begin_ns,
    case when still > 0 then held_end_ns end as exposed_end_ns
from (
    select *, case
        -- C++ waited: still_ns is the whole wait, because nothing else blocked the program then.
        when exposed_ns is null then still_ns
        else least(exposed_ns, coalesce(held_end_ns - begin_ns, 0))
    end as still
    from records r where {window} {ranks} limit {most}
) r
join kinds k using (kind)
order by r.begin_ns, r.rank, r.attempt, r.pid, r.seq
"""


def _bars(index: Index, begin: int, end: int, ranks: Sequence[int], most: int) -> pd.DataFrame | None:
    """Return the records in the window, or None if there are more than ``most``."""
    sql = _BARS.format(window=_WINDOW, ranks=_of_ranks(index, ranks), most=most + 1)
    records = index.ask(sql, [end, begin])
    if len(records) > most:
        return None
    lanes, levels = _places(records)
    placed = records.append_column("lane", pa.array(lanes, pa.int64())).append_column(
        "level", pa.array(levels, pa.int64())
    )
    return from_arrow(placed, TIMELINE_BARS.columns)


def _places(bars: pa.Table) -> tuple[list[int], list[int]]:
    """Return the lane of each bar and its level in the lane.

    There is one lane for each group of the window, in order of group size, the largest first. Levels are chosen so that
    few bars overlap. ``bars`` must be in order of their begin.
    """
    groups = list(zip(*(bars[name].to_pylist() for name in ("group_size", "pg", "group_ranks")), strict=True))
    order = sorted(set(groups), key=lambda group: order_of_group(*group))
    lane_of = {group: place for place, group in enumerate(order)}
    busy_until: dict[tuple[int, int], list[int]] = {}  # by rank and lane: the last end of each level
    lanes, levels = [], []
    for group, rank, begin, end in zip(
        groups, *(bars[name].to_pylist() for name in ("rank", "begin_ns", "end_ns")), strict=True
    ):
        level_ends = busy_until.setdefault((rank, lane_of[group]), [])
        level = next((number for number, until in enumerate(level_ends) if until <= begin), len(level_ends))
        if level == MOST_LEVELS:
            level = level_ends.index(min(level_ends))
        elif level == len(level_ends):
            level_ends.append(end)
        level_ends[level] = max(level_ends[level], end)
        lanes.append(lane_of[group])
        levels.append(level)
    return lanes, levels


def _lanes(index: Index, ranks: Sequence[int]) -> tuple[Lane, ...]:
    """Return the lanes of ``ranks``. The result is empty if each of these ranks has only one lane."""
    rows = index.ask(
        f"select * from lanes r where true {_of_ranks(index, ranks)} order by rank, lane"
    ).to_pylist()
    return tuple(Lane(**row) for row in rows) if len(rows) > len(ranks) else ()


_RAW: Final = """
select r.rank, {lane} as lane, k.op, r.end_ns, r.busy_ns, coalesce(r.held_end_ns, 0) as held_end_ns, r.still_ns
from records r join kinds k using (kind) {lanes}
where {window} {ranks}
"""
_BINNED: Final = """
select rank, {lane} as lane, op, (bin // {fold}) as bin,
    cast(sum(busy_ns) as bigint) as busy_ns, cast(sum(still_ns) as bigint) as still_ns
from density r
where level = ? and bin >= ? and bin < ? {ranks}
group by all
order by 4, rank, lane, op
"""


def _density(
    index: Index, begin: int, end: int, ranks: Sequence[int], lanes: Sequence[Lane], pixels: int
) -> pd.DataFrame:
    """Return how busy each rank was in each bin, by lane and operation. Only values above 0 are included."""
    window = end - begin
    for number, level in enumerate(index.facts["levels"]):
        width = level["width_ns"]
        if window // width >= pixels:
            return _from_level(index, number, begin, end, ranks, lanes, -(-window // (width * pixels)))
    finest = index.facts["levels"][-1]["width_ns"]
    if window // finest * 2 >= pixels:  # bins of two pixels look as sharp as bins of one pixel
        return _from_level(index, len(index.facts["levels"]) - 1, begin, end, ranks, lanes, 1)
    return _from_records(index, begin, end, ranks, lanes, pixels)


def _from_level(
    index: Index, number: int, begin: int, end: int, ranks: Sequence[int], lanes: Sequence[Lane], fold: int
) -> pd.DataFrame:
    level = index.facts["levels"][number]
    width, origin = level["width_ns"], index.facts["begin_ns"]
    first = max(0, (begin - origin) // width)
    last = min(level["bins"], -(-(end - origin) // width))
    sql = _BINNED.format(fold=fold, lane="lane" if lanes else "0", ranks=_of_ranks(index, ranks))
    cells = index.ask(sql, [number, first // fold * fold, -(-last // fold) * fold])
    return _density_frame(cells, lanes, origin, width * fold)


def _from_records(
    index: Index, begin: int, end: int, ranks: Sequence[int], lanes: Sequence[Lane], pixels: int
) -> pd.DataFrame:
    width = max(1, -(-(end - begin) // pixels))
    bins = -(-(end - begin) // width)
    joined, lane = (JOINED, NUMBER) if lanes else ("", "0")
    sql = _RAW.format(window=_WINDOW, ranks=_of_ranks(index, ranks), lanes=joined, lane=lane)
    rows = index.ask(sql, [end, begin])
    known = list(ranks)
    each = MOST_OF_RANK if lanes else 1
    if not len(rows):
        return from_arrow(
            pa.table({c.name: pa.array([], pa.int64()) for c in DENSITY.columns}), DENSITY.columns
        )
    cells = _cells_of(rows, known, each)
    busy, still = (
        binned(
            rows[until].to_numpy() - rows[length].to_numpy(),
            rows[until].to_numpy(),
            cells,
            len(known) * each * len(OPS),
            begin,
            width,
            bins,
        )
        for until, length in (("end_ns", "busy_ns"), ("held_end_ns", "still_ns"))
    )
    cell, place = np.nonzero(busy | still)
    lane_of_cell = cell // len(OPS)
    table = pa.table(
        {
            "rank": np.array(known, np.int64)[lane_of_cell // each],
            "lane": lane_of_cell % each,
            "op": pa.array(OPS).take(pa.array(cell % len(OPS))),
            "bin": place,
            "busy_ns": busy[cell, place],
            "still_ns": still[cell, place],
        }
    )
    table = table.sort_by([(name, "ascending") for name in ("bin", "rank", "lane", "op")])
    return _density_frame(table, lanes, begin, width)


def _density_frame(cells: pa.Table, lanes: Sequence[Lane], origin: int, width: int) -> pd.DataFrame:
    codes = np.array([lane.rank * MOST_OF_RANK + lane.lane for lane in lanes], np.int64)
    lane_indices = np.searchsorted(codes, cells["rank"].to_numpy() * MOST_OF_RANK + cells["lane"].to_numpy())
    groups = pa.Table.from_pylist([lane._asdict() for lane in lanes], LANES).take(
        pa.array(lane_indices, mask=np.full(len(lane_indices), not lanes))
    )
    begin = cells["bin"].to_numpy().astype(np.int64) * width + origin
    busy, still = (cells[name].to_numpy() for name in ("busy_ns", "still_ns"))
    columns: dict[str, Any] = {
        "rank": cells["rank"],
        "lane": cells["lane"],
        **{name: groups[name] for name in ("pg", "group_desc", "group_ranks")},
        "begin_ns": begin,
        "end_ns": begin + width,
        "op": cells["op"],
        "busy_ns": busy,
        "busy_share": busy / width,
        "exposed_ns": still,
    }
    return from_arrow(pa.table(columns), DENSITY.columns)


_BANDS_OF: Final = """
select * from bands
where kind = ? and begin_ns < ? and end_ns > ?
    and (kind = 'step' or name <> 'init' or exists (select 1 from bands where kind = 'step'))
order by begin_ns, attempt
limit ?
"""


def _bands(index: Index, begin: int, end: int) -> pd.DataFrame:
    """Return the steps and phases of the window. A kind is left out if it has too many bands to distinguish."""
    bands = [index.ask(_BANDS_OF, [kind, end, begin, MOST_BANDS + 1]) for kind in ("step", "phase")]
    return from_arrow(
        pa.concat_tables([rows for rows in bands if len(rows) <= MOST_BANDS] or [bands[0].slice(0, 0)]),
        BANDS.columns,
    )


def step_window(index: Index, step: int) -> tuple[int, int] | None:
    """Return begin and end of a step in ns on the clock of the timeline, or None if no such step ended."""
    bands = index.ask(
        "select begin_ns, end_ns from bands where kind = 'step' and step = ? order by attempt desc limit 1",
        [step],
    ).to_pylist()
    return (bands[0]["begin_ns"], bands[0]["end_ns"]) if bands else None


def warm_window(index: Index, steps: int) -> tuple[int, int] | None:
    """Return begin and end of the first ``steps`` steps that follow the first step of the last attempt.

    The times are in ns on the clock of the timeline. The result is None if no such step ended.
    """
    bands = index.ask(
        "select begin_ns, end_ns from bands where kind = 'step' and attempt = (select max(attempt) from bands where "
        "kind = 'step') order by begin_ns limit ? offset 1",
        [steps],
    ).to_pylist()
    return (bands[0]["begin_ns"], bands[-1]["end_ns"]) if bands else None


def _cells_of(rows: pa.Table, ranks: list[int], each: int) -> Numbers:
    """Return the cell of each row in a flat array of ranks x lanes x operations.

    Args:
        rows: The rows, with the columns rank, lane and op.
        ranks: The ranks of the array.
        each: The number of lanes of each rank.
    """
    place = np.searchsorted(np.array(ranks), rows["rank"].to_numpy())
    encoded = rows["op"].combine_chunks().dictionary_encode()
    encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
    numbers = numbers_of_ops(encoded.dictionary.to_pylist() or [OPS[0]])
    lane = place * each + rows["lane"].to_numpy()
    cells: Numbers = lane * len(OPS) + numbers[encoded.indices.to_numpy(zero_copy_only=False)]
    return cells
