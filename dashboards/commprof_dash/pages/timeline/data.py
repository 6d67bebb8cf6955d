"""What the timeline and the records page ask of a run, and the state of the timeline as text. Nothing here draws."""

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
_CELLS: Final = 20_000  # of a heatmap: ranks x bins
_CELLS_OF_LANES: Final = 6_000  # where ranks have several rows each
_MOST_BINS: Final = 600
_FEWEST_BINS: Final = 120
_MOST_RANKS: Final = 256  # that are drawn at once
_FARTHEST: Final = 1 << 62


Record = tuple[int, int, int, int]  # rank, attempt, pid, seq


class View(NamedTuple):
    """What the timeline shows. Times are nanoseconds since the run began; None: from its begin, to its end, all ranks."""

    begin_ns: int | None = None
    end_ns: int | None = None
    ranks: str = ""
    record: Record | None = None

    def stored(self) -> dict[str, Any]:
        """As the browser keeps it."""
        return {
            FROM: self.begin_ns,
            TO: self.end_ns,
            RANKS: self.ranks,
            RECORD: None if self.record is None else record_text(self.record),
        }


def view_of(values: Mapping[str, Any]) -> View:
    """The view that an address or the browser names; what makes no sense there is left out."""
    begin, end = (_number(values.get(name)) for name in (FROM, TO))
    if begin is not None and end is not None and end <= begin:
        begin = end = None
    ranks = str(values.get(RANKS) or "")[:1000]
    return View(begin, end, ranks, record_of(str(values.get(RECORD) or "")))


def view_in(query: Query) -> View:
    """The view in the query of an address."""
    return view_of({name: values[0] for name, values in query.items() if values})


def record_of(text: str) -> Record | None:
    """The record that :func:`record_text` wrote: rank, attempt, pid, seq; None where ``text`` names none."""
    match = re.fullmatch(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})\.(\d{1,18})", text)
    if match is None:
        return None
    rank, attempt, pid, seq = map(int, match.groups())
    return rank, attempt, pid, seq


def record_text(record: Iterable[int]) -> str:
    """A record in an address: ``rank.attempt.pid.seq``."""
    return ".".join(map(str, record))


def _number(value: Any) -> int | None:
    try:
        number = int(float(value)) if isinstance(value, float) else int(str(value))
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < _FARTHEST else None


def chosen_ranks(text: str, known: Iterable[int]) -> list[int]:
    """The ranks of ``known`` that ``0-3,8`` names; all where it names none, the first where they are too many."""
    known = list(known)
    wanted: set[int] = set()
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d{1,7})\s*(?:-\s*(\d{1,7})\s*)?", part)
        if ends is not None:
            first, last = int(ends[1]), int(ends[2] or ends[1])
            wanted.update(rank for rank in known if first <= rank <= last)
    return [rank for rank in known if rank in wanted or not wanted][:_MOST_RANKS]


def path_of(runs: Runs, name: str) -> Path:
    """The directory of a run that is listed. KeyError: there is none of that name."""
    directory: Path = runs.of_run("path", name, lambda path: path)
    return directory


def timeline(path: Path, view: View) -> api.Timeline:
    """What ``view`` shows of a run."""
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
    return api.timeline(path, begin, end, bins, ranks)


class Builds:
    """Indexes that are being built, each by a thread of its own, so that a page can say how far it is."""

    def __init__(self) -> None:
        self._progress: dict[Path, str] = {}
        self._lock = threading.Lock()

    def wait_for(self, path: Path) -> str | None:
        """None when ``path`` can be asked at once; else how far its index is, which is being built from now on."""
        if api.has_index(path):
            return None
        with self._lock:
            if path not in self._progress:
                self._progress[path] = "Reading the run"
                threading.Thread(target=self._build, args=(path,), daemon=True).start()
            progress = self._progress.get(path)  # None: it was done meanwhile
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
