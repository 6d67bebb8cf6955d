"""Provides the data of the pages through cached calls to commprof.analysis.api. This module draws nothing."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pandas as pd

from commprof.analysis import api
from commprof_dash import traffic_frames
from commprof_dash.background import background
from commprof_dash.charts.series import with_series

_ATTEMPTS: Final = 3
_ERRORS: Final = "commprof.errors"  # the messages of these exceptions are written for users
_UNREADABLE: Final = "unreadable"  # a state of api.find_runs
_ENDED: Final = ("complete", "failed", "killed")
_LISTING_SECONDS: Final = 1.0  # drawing one page requests the listing many times
_CURVE_POINTS: Final = 1000


class Selection(NamedTuple):
    """The runs that an address names, sorted into those that can be read and those that cannot."""

    readable: tuple[str, ...]
    unknown: tuple[str, ...]
    broken: Mapping[str, str]  # name -> reason


class Runs:
    """The runs below one directory.

    A run is identified by its path below the directory; other names cannot reach any file. Answers are cached
    until a file of the run changes. Answers about a run that is still being recorded are not cached.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._listed: tuple[float, pd.DataFrame] | None = None  # the time of the listing, and the listing
        self._tried: set[str] = set()
        self._lock = threading.Lock()

    def listing(self, names: Sequence[str] = ()) -> pd.DataFrame:
        """Return all runs, the newest first (see ``api.find_runs``).

        The listing contains all runs of ``names`` that exist.
        """
        now = time.monotonic()
        with self._lock:
            if (
                self._listed is None
                or now - self._listed[0] > _LISTING_SECONDS
                or not set(names) <= set(self._listed[1]["name"])
            ):
                self._listed = (now, self._finalised(api.find_runs(self.directory)))
            return self._listed[1]

    def _finalised(self, listing: pd.DataFrame) -> pd.DataFrame:
        """Finalize the runs that were killed while this server watched them, and return the updated ``listing``.

        Each such run is tried once.
        """
        rows = zip(listing["path"], listing["state"], listing["finalised"], strict=True)
        ended = [path for path, state, finalised in rows if state in _ENDED and not finalised]
        due = [path for path in ended if path not in self._tried]
        self._tried.update(due)
        done = [api.finalise(path) for path in due]
        return api.find_runs(self.directory) if any(done) else listing

    def stamp(self) -> str:
        """Return a text that changes with the size or time of any file of a run, and with the list of runs."""
        digest = hashlib.sha256()
        for path in self.listing()["path"]:
            digest.update(api.fingerprint(Path(path)).key.encode())
        return digest.hexdigest()[:16]

    def is_going(self, names: Sequence[str]) -> bool:
        """Return whether any of these runs is still being written."""
        listing = self.listing(names)
        return bool(((listing["state"] == "running") & listing["name"].isin(list(names))).any())

    def names(self) -> list[str]:
        """Return the names of all runs, the newest first."""
        return [str(name) for name in self.listing()["name"]]

    def select(self, names: Sequence[str]) -> Selection:
        """Sort ``names`` into readable, unknown and broken runs."""
        listing = self.listing(names)
        listed = dict(zip(listing["name"], zip(listing["state"], listing["note"], strict=True), strict=True))
        chosen = list(dict.fromkeys(names))
        broken = {
            name: str(listed[name][1]) for name in chosen if name in listed and listed[name][0] == _UNREADABLE
        }
        readable = tuple(name for name in chosen if name in listed and name not in broken)
        return Selection(readable, tuple(name for name in chosen if name not in listed), broken)

    def overview(self, name: str) -> dict[str, Any]:
        """Return the basic facts of a run (see ``api.overview``)."""
        return self.of_run("overview", name, api.overview)

    def health(self, name: str) -> api.Health:
        """Return what was recorded of a run and what is missing, without the values of :meth:`overview`."""
        health: api.Health = self.of_run("health", name, api.health)
        return health

    def traffic_by_step(self, name: str) -> pd.DataFrame:
        """Return the traffic per training step.

        The columns are step, steps (the number of steps that a row is the mean of), series, and each measure per
        step.
        """
        return self.of_run("traffic_by_step", name, traffic_frames.by_step)

    def traffic_by_purpose(self, name: str) -> pd.DataFrame:
        """Return the mean traffic of a training step.

        The columns are purpose, phase, op, intended_op, series, and each measure per step.
        """
        return self.of_run("traffic_by_purpose", name, traffic_frames.by_purpose)

    def traffic_outside_steps(self, name: str) -> pd.DataFrame:
        """Return the traffic outside of all training steps: when, purpose, series and the total of each measure."""
        return self.of_run("traffic_outside_steps", name, traffic_frames.outside_steps)

    def one_offs(self, name: str) -> pd.DataFrame:
        """Return the one-off traffic: when, purpose, series and the total of each measure."""
        return self.of_run("one_offs", name, traffic_frames.one_offs)

    def step_times(self, name: str) -> pd.DataFrame:
        """Return one row per training step (see ``api.step_times``)."""
        return self.of_run("step_times", name, api.step_times)

    def step_numbers(self, name: str) -> list[int]:
        """Return the training steps in order (see ``api.step_numbers``)."""
        steps: list[int] = self.of_run("step_numbers", name, api.step_numbers)
        return steps

    def several_trainings(self, name: str) -> str:
        """Return a sentence if the run has several trainings (``api.several_trainings``), else an empty text."""
        return str(self.of_run("several_trainings", name, lambda path: api.several_trainings(path) or ""))

    def groups(self, name: str) -> pd.DataFrame:
        """Return one row per process group.

        The columns are pg, group_desc, group_ranks, group_size, backend, and unseen, summed over the ranks of the
        group.
        """
        return self.of_run("groups", name, traffic_frames.groups)

    def moved(self, name: str) -> pd.DataFrame:
        """Return the bytes that the interface counters of the hosts counted (see ``api.moved``)."""
        return self.of_run("moved", name, api.moved)

    def comparison(self, names: Sequence[str]) -> pd.DataFrame:
        """Return one row per setting (see ``api.compare``).

        The column ``runs`` contains the names that this class uses.
        """
        frame = self.of_runs("comparison", names, traffic_frames.compared).settings
        labels = self.of_runs("settings", names, api.settings)["label"]
        of_label: dict[str, list[str]] = {}
        for name, label in zip(names, labels, strict=True):
            of_label.setdefault(str(label), []).append(name)
        return frame.assign(runs=[", ".join(of_label.get(str(label), [])) for label in frame["label"]])

    def traffic_by_setting(self, names: Sequence[str]) -> pd.DataFrame:
        """Return the mean traffic of a training step, with one row per setting, op, intended_op and purpose.

        The result has a column ``series``.
        """
        return with_series(self.of_runs("comparison", names, traffic_frames.compared).traffic)

    def loss_curves(self, labels: Mapping[str, str]) -> pd.DataFrame:
        """Return the loss of each step, in the columns label, step and loss. Long curves are thinned.

        Args:
            labels: For each label, the name of the run whose loss is returned.
        """
        curves = []
        for label, name in labels.items():
            times = self.step_times(name)
            times = times[times["loss"].notna()].drop_duplicates("step", keep="last")
            every = -(-len(times) // _CURVE_POINTS) or 1
            curves.append(times[["step", "loss"]].iloc[::every].assign(label=label))
        return (
            pd.concat(curves, ignore_index=True)
            if curves
            else pd.DataFrame(columns=["step", "loss", "label"])
        )

    def _paths(self, names: Sequence[str]) -> dict[str, Path]:
        listing = self.listing(names)
        return {str(name): Path(path) for name, path in zip(listing["name"], listing["path"], strict=True)}

    def of_run(self, question: str, name: str, answer: Callable[[Path], Any]) -> Any:
        """Return ``answer`` of the run ``name``, cached under ``question`` until a file of the run changes.

        ``question`` contains all other values that the answer depends on. ``answer`` receives the path of a run
        that is in the listing, so that names from an address cannot reach any other file.

        Raises:
            KeyError: There is no run with this name.
        """
        path = self._paths([name])[name]
        return self._cached(question, (path,), lambda: answer(path))

    def of_runs(self, question: str, names: Sequence[str], answer: Callable[[list[Path]], Any]) -> Any:
        """Return ``answer`` of several runs, cached in the same way as in :meth:`of_run`."""
        known = self._paths(names)
        paths = tuple(known[name] for name in names)
        return self._cached(question, paths, lambda: answer(list(paths)))

    def run_beside(self, question: str, name: str, answer: Callable[[Path], Any]) -> Any | None:
        """Return ``answer``, a module-level function, of a run; None while another process computes it.

        Raises:
            KeyError: There is no run with this name.
        """
        path = self._paths([name])[name]
        return self._beside(question, (path,), answer, path)

    def runs_beside(
        self, question: str, names: Sequence[str], answer: Callable[[list[Path]], Any]
    ) -> Any | None:
        """Return ``answer`` of several runs, or None while another process computes it (see :meth:`run_beside`)."""
        known = self._paths(names)
        paths = [known[name] for name in names]
        return self._beside(question, paths, answer, paths)

    def _beside(
        self, question: str, paths: Sequence[Path], answer: Callable[[Any], Any], argument: Any
    ) -> Any | None:
        def ask() -> Any | None:
            key = (question, *(api.fingerprint(path).key for path in paths))
            return background.ask(key, answer, argument)

        return api.answer_cache.of_files(paths, ("page", question), ask)

    def _cached(self, question: str, paths: Sequence[Path], answer: Callable[[], Any]) -> Any:
        return api.answer_cache.of_files(paths, ("page", question), lambda: _asked(paths, answer))


def _asked(paths: Sequence[Path], answer: Callable[[], Any]) -> Any:
    """Return the result of ``answer``, and retry if the files of a run were replaced during the call.

    Files are replaced when a run ends, because the run is then finalized.
    """
    for _ in range(_ATTEMPTS - 1):
        before = [_names_in(path) for path in paths]
        try:
            return answer()
        except Exception as error:
            replaced = before != [_names_in(path) for path in paths]
            if not replaced or type(error).__module__ != _ERRORS:
                raise
    return answer()


def _names_in(path: Path) -> list[str]:
    return [name for name, *_ in api.fingerprint(path).files]


def reason(error: Exception) -> str:
    """Return what went wrong, in one sentence.

    The messages of commprof's own errors are written for users. For other errors, the sentence starts with their
    type.
    """
    text = str(error).strip().removesuffix(".")
    return f"{text}." if type(error).__module__ == _ERRORS else f"{type(error).__name__}: {text}."
