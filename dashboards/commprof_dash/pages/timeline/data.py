"""Provides the data of the pages Timeline and Records, and converts the state of the timeline to text.

Draws nothing.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from commprof.analysis import api
from commprof_dash.address import Query
from commprof_dash.data import Runs, reason

FROM: Final = "from"
TO: Final = "to"
RANKS: Final = "ranks"
RECORD: Final = "record"
STEP: Final = "step"
ROWS: Final = "rows"  # in the address: whether rows are ranks or hosts
BY: Final = "by"  # in the address: the order of the rows, rank or lateness
HOSTS: Final = "hosts"
LATENESS: Final = "lateness"
_CELLS: Final = 20_000  # the largest number of cells of a heat map: ranks x bins
_CELLS_OF_LANES: Final = 6_000  # the same limit if ranks have several rows each
_MOST_BINS: Final = 600
_FEWEST_BINS: Final = 120
_MOST_RANKS: Final = 1024  # the largest number of ranks that are drawn at once
# The largest number of ranks that have lanes with bars. If there are more ranks, they are rows of a heat map.
MOST_LANES_OF_BARS: Final = 32
_MOST_UNFOLDED: Final = 256  # If there are more ranks and several hosts, a row is a host.
_WARM_STEPS: Final = 3
_MINIMAP_BINS: Final = 240
_MINIMAP_RANKS: Final = 16
# Up to this number of records, rows are sorted by lateness by default. For more records, lateness takes
# seconds.
_SORTED_UNASKED: Final = 200_000
_FARTHEST: Final = 1 << 62


Record = tuple[int, int, int, int]  # rank, attempt, pid, seq


class View(NamedTuple):
    """The view of the timeline. Times are in nanoseconds since the run began.

    A begin of None is the start of the run, and an end of None is its end. Empty ``ranks`` are all ranks.
    ``rows`` is ``ranks`` or ``hosts``, and ``by`` is ``rank`` or ``lateness``. With "", the number of ranks
    determines the value.
    """

    begin_ns: int | None = None
    end_ns: int | None = None
    ranks: str = ""
    record: Record | None = None
    step: int | None = None
    rows: str = ""
    by: str = ""

    def stored(self) -> dict[str, Any]:
        """Return the view in the form that the browser stores."""
        return {
            FROM: self.begin_ns,
            TO: self.end_ns,
            RANKS: self.ranks,
            RECORD: None if self.record is None else record_text(self.record),
            STEP: self.step,
            ROWS: self.rows,
            BY: self.by,
        }


def view_of(values: Mapping[str, Any]) -> View:
    """Return the view that an address or the browser names. Invalid parts are ignored."""
    begin, end = (_number(values.get(name)) for name in (FROM, TO))
    if begin is not None and end is not None and end <= begin:
        begin = end = None
    ranks = str(values.get(RANKS) or "")[:1000]
    step = _number(values.get(STEP))
    rows, by = (str(values.get(name) or "") for name in (ROWS, BY))
    return View(
        begin,
        end,
        ranks,
        record_of(str(values.get(RECORD) or "")),
        None if step is None or step < 0 else step,
        rows if rows in ("ranks", HOSTS) else "",
        by if by in ("rank", LATENESS) else "",
    )


def view_in(query: Query) -> View:
    """Return the view in the query of an address."""
    return view_of({name: values[0] for name, values in query.items() if values})


def record_of(text: str) -> Record | None:
    """Return the record (rank, attempt, pid, seq) that :func:`record_text` wrote; None if ``text`` is not a record."""
    match = re.fullmatch(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})\.(\d{1,18})", text)
    if match is None:
        return None
    rank, attempt, pid, seq = map(int, match.groups())
    return rank, attempt, pid, seq


def record_text(record: Iterable[int]) -> str:
    """Return a record in the form of an address: ``rank.attempt.pid.seq``."""
    return ".".join(map(str, record))


def _number(value: Any) -> int | None:
    try:
        number = int(float(value)) if isinstance(value, float) else int(str(value))
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < _FARTHEST else None


def chosen_ranks(text: str, known: Iterable[int]) -> list[int]:
    """Return the ranks of ``known`` that a text such as ``0-3,8`` names.

    Return all ranks if the text names none, and only the first ranks if there are too many.
    """
    known = list(known)
    wanted: set[int] = set()
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d{1,7})\s*(?:-\s*(\d{1,7})\s*)?", part)
        if ends is not None:
            first, last = int(ends[1]), int(ends[2] or ends[1])
            wanted.update(rank for rank in known if first <= rank <= last)
    return [rank for rank in known if rank in wanted or not wanted][:_MOST_RANKS]


def path_of(runs: Runs, name: str) -> Path:
    """Return the directory of a run in the listing. Raises KeyError if there is no run with this name."""
    directory: Path = runs.of_run("path", name, lambda path: path)
    return directory


def opened(path: Path, view: View) -> View:
    """Return ``view`` with a window: that of its step, or else the first steps after the first step.

    The first step is left out because the ranks start up in this step.
    """
    if view.begin_ns is not None or view.end_ns is not None:
        return view
    window = None if view.step is None else api.step_window(path, view.step)
    if window is None:
        view = view._replace(step=None)
        window = api.warm_window(path, _WARM_STEPS)
    if window is None:
        return view
    origin = api.index(path)["begin_ns"]
    return view._replace(begin_ns=window[0] - origin, end_ns=window[1] - origin)


def is_folded(path: Path, view: View) -> bool:
    """Return whether a row of the timeline is a host."""
    ranks, hosts = chosen_ranks(view.ranks, api.index(path)["ranks"]), hosts_of(path)
    if view.rows:
        return view.rows == HOSTS and len(hosts) > 0
    return len(ranks) > _MOST_UNFOLDED and len({hosts.get(rank) for rank in ranks}) > 1


def is_sorted_by_lateness(path: Path, view: View) -> bool:
    """Return whether the rank with the largest lateness is the first row."""
    facts = api.index(path)
    if view.by:
        return view.by == LATENESS
    many = len(chosen_ranks(view.ranks, facts["ranks"])) > MOST_LANES_OF_BARS
    return many and facts["records"] <= _SORTED_UNASKED


def hosts_of(path: Path) -> dict[int, str]:
    """Return the host of each rank, if the run contains the hosts."""
    answer: dict[int, str] = api.answer_cache.of_files([path], "rank-hosts", lambda: _hosts_of(path))
    return answer


def _hosts_of(path: Path) -> dict[int, str]:
    groups = api.table(path, "groups")
    pairs = zip(groups["rank"].tolist(), groups["host"].tolist(), strict=True)
    return {rank: host for rank, host in pairs if isinstance(host, str)}


def lateness_of(path: Path) -> dict[int, float]:
    """Return the mean lateness of each rank in ns; empty if no collectives can be compared."""
    answer: dict[int, float] = api.answer_cache.of_files([path], "rank-lateness", lambda: _lateness_of(path))
    return answer


def _lateness_of(path: Path) -> dict[int, float]:
    ranks = api.straggling(path).ranks
    return dict(zip(ranks["rank"].tolist(), ranks["mean_lateness_ns"].astype(float).tolist(), strict=True))


class Minimap(NamedTuple):
    """The whole run in bins of equal length, with the mean over ranks of the shares of busy and exposed time."""

    busy: list[float]
    exposed: list[float]


def minimap(path: Path) -> Minimap:
    """Return the minimap of a run, computed from evenly chosen ranks.

    Some ranks are enough, because the minimap gives orientation and not exact values.
    """
    answer: Minimap = api.answer_cache.of_files([path], "minimap", lambda: _minimap(path))
    return answer


def _minimap(path: Path) -> Minimap:
    known = api.index(path)["ranks"]
    shown = api.timeline(
        path, pixels=_MINIMAP_BINS, ranks=known[:: -(-len(known) // _MINIMAP_RANKS) or 1], most_bars=0
    )
    length = shown.run_end_ns - shown.run_begin_ns
    sums = [[0.0] * _MINIMAP_BINS for _ in range(2)]
    if shown.density is None or shown.density.empty:
        return Minimap(*sums)
    each = shown.density.groupby(["begin_ns", "end_ns"], as_index=False)[["busy_ns", "exposed_ns"]].sum()
    for begin, end, busy, exposed in each.itertuples(index=False):
        first = (begin - shown.run_begin_ns) * _MINIMAP_BINS // length
        last = max(first + 1, (end - shown.run_begin_ns) * _MINIMAP_BINS // length)
        for cell in range(max(0, first), min(last, _MINIMAP_BINS)):
            for values, value in zip(sums, (busy, exposed), strict=True):
                values[cell] = max(values[cell], min(1.0, value / (end - begin) / len(shown.ranks)))
    return Minimap(*sums)


def timeline(path: Path, view: View) -> api.Timeline:
    """Return the part of a run that ``view`` shows, with the latest rank first if the view is sorted by lateness."""
    facts = api.index(path)
    ranks = chosen_ranks(view.ranks, facts["ranks"])
    lanes = len(ranks) * facts["lanes"] // max(1, len(facts["ranks"]))
    cells = _CELLS_OF_LANES // lanes if len(ranks) < lanes <= api.MOST_LANES else _CELLS // max(1, len(ranks))
    bins = max(_FEWEST_BINS, min(_MOST_BINS, cells))
    begin, end = (None if time is None else time + facts["begin_ns"] for time in (view.begin_ns, view.end_ns))
    if begin is not None and end is not None and end <= begin:
        begin = end = None
    if begin is not None and end is None and begin > facts["end_ns"]:
        begin = None
    if end is not None and begin is None and end <= facts["begin_ns"]:
        end = None
    is_heat = len(ranks) > MOST_LANES_OF_BARS or is_folded(path, view)
    shown = api.timeline(path, begin, end, bins, ranks, **({"most_bars": 0} if is_heat else {}))
    if is_sorted_by_lateness(path, view):
        late = lateness_of(path)
        shown = shown._replace(ranks=tuple(sorted(shown.ranks, key=lambda rank: -late.get(rank, 0.0))))
    return shown


class HeatRow(NamedTuple):
    """A row of the heat map: its label, its ranks, and the ranks that a click on the row shows."""

    label: str
    ranks: tuple[int, ...]
    unfolds: str


def heat_rows(path: Path, view: View, shown: api.Timeline) -> list[HeatRow] | None:
    """Return the rows of the heat map of ``shown``, in its order of ranks; None if ranks have lanes."""
    folded = is_folded(path, view)
    if len(shown.ranks) <= MOST_LANES_OF_BARS and not folded:
        return None
    hosts = hosts_of(path)
    members: dict[str, list[int]] = {}
    for rank in shown.ranks:
        members.setdefault(hosts.get(rank, "unknown host"), []).append(rank)
    if folded:
        return [HeatRow(host, tuple(ranks), ranks_text(ranks)) for host, ranks in members.items()]
    return [
        HeatRow(
            f"rank {rank}",
            (rank,),
            str(rank) if len(members) == 1 else ranks_text(members[hosts.get(rank, "unknown host")]),
        )
        for rank in shown.ranks
    ]


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ``ranks`` in the form of the address: ``0-3,8``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


class Builds:
    """The indexes that are being built, each in its own thread, so that a page can show the progress."""

    def __init__(self) -> None:
        self._progress: dict[Path, str] = {}
        self._lock = threading.Lock()

    def wait_for(self, path: Path) -> str | None:
        """Return None if the index of ``path`` is ready, else the progress of the index.

        The first call starts to build the index.
        """
        if api.has_index(path):
            return None
        with self._lock:
            if path not in self._progress:
                self._progress[path] = "Reading the run"
                threading.Thread(target=self._build, args=(path,), daemon=True).start()
            progress = self._progress.get(path)  # None: the index has been completed in the meantime
        if progress is not None and progress.startswith("!"):
            self._progress.pop(path, None)
            raise RuntimeError(progress[1:])
        return progress

    def _build(self, path: Path) -> None:
        def report(done: int, of: int) -> None:
            share = 100 * done // of if of else 100
            self._progress[path] = f"{done:,} of {of:,} records ({share} %)"

        try:
            api.index(path, report)
        except Exception as error:
            self._progress[path] = "!" + reason(error)
        else:
            self._progress.pop(path, None)
