"""Takes a dump of a job: what each rank waits for, with its Python stacks.

For a running job, the dump reads the files and the processes of the ranks. For a job that has ended, the dump shows the
state at the end of the job, without stacks.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from commprof.errors import CommprofError, TraceError
from commprof.sampling.archive import read_archive
from commprof.sampling.calls import Call, RankCalls
from commprof.sampling.live import fingerprint, latest_files, read_live
from commprof.sampling.processes import RankProcess, State, state_of
from commprof.sampling.situation import END_UNKNOWN, End, RankReport, Situation
from commprof.sampling.stacks import take_stacks
from commprof.sampling.verdict import Verdict, judge
from commprof.sampling.waits import Wait, standings
from commprof.trace.directory import COLLECTIVES_DIRECTORY
from commprof.trace.manifest import read_manifest
from commprof.trace.rank_files.layout import RankFile

WATCH_SECONDS: Final = 0.5  # the time for which the job is observed for progress
_MOST_AT_ONCE: Final = 8  # processes whose stacks are taken at the same time


@dataclass(frozen=True, slots=True)
class Dump:
    """The state of the ranks of a run at one point in time, and the verdict on them."""

    run: Path
    taken: datetime
    situation: Situation
    verdict: Verdict
    with_stacks: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the dump as JSON values, named like the columns of the schema. Times are in ns and sizes in bytes."""
        situation = self.situation
        return {
            "run": str(self.run),
            "taken": self.taken.isoformat(),
            "kind": str(self.verdict.kind),
            "hangs": self.verdict.hangs,
            "sentence": self.verdict.sentence,
            "notes": list(self.verdict.notes),
            "differences": [difference.as_dict() for difference in situation.differences],
            "order_differences": [difference.as_dict() for difference in situation.order_differences],
            "ranks": [_rank(report) for report in situation.reports.values()],
            "waits": [_wait(wait) for wait in situation.waits],
            "groups": [
                {
                    "pg": standing.group.pg,
                    "group_desc": standing.group.desc,
                    "group_ranks": list(standing.group.ranks),
                    "last": {str(rank): call and _call(call) for rank, call in standing.last.items()},
                }
                for standing in standings(situation.groups)
            ],
        }


def take_dump(
    run: Path,
    *,
    stacks: bool = True,
    watch_seconds: float = WATCH_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
) -> Dump:
    """Take a dump of the job that records into ``run``, without changing or blocking it.

    Args:
        stacks: Whether to take the stacks of the processes, too.
        watch_seconds: The time in seconds for which the ranks are observed for progress.
        sleep: The function that waits for a number of seconds.

    Raises:
        TraceError: the run cannot be read.
        MissingExtraError: the run has ended and was converted to tables, and the packages that read tables are not
            installed.
    """
    files = latest_files(run)
    if not files:
        ended, gone = read_archive(run) if (run / COLLECTIVES_DIRECTORY).is_dir() else ([], {})
        reports = [RankReport(calls, _past_state(calls)) for calls in ended]
        return _dump(run, Situation(reports, damaged=gone, end=_end(run)), with_stacks=False)
    begin = time.monotonic()
    looked, damaged = _read(files)
    reports = [look.report for look in looked]
    local = [report for report in reports if report.state in (State.RUNS, State.STOPPED)]
    if stacks and local:
        with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(local))) as pool:
            list(pool.map(lambda report: _look_at(report, run), local))
    if local:
        sleep(max(0.0, begin + watch_seconds - time.monotonic()))
        for look in looked:
            with contextlib.suppress(CommprofError):
                look.report.moved = fingerprint(look.stem) != look.before
    watched_ns = round((time.monotonic() - begin) * 1e9)
    return _dump(run, Situation(reports, watched_ns, damaged, _end(run)), with_stacks=stacks and bool(local))


def _end(run: Path) -> End:
    try:
        manifest = read_manifest(run)
    except CommprofError:
        return END_UNKNOWN
    return End(manifest.exit_code, manifest.first_failed_rank)


class _Look(NamedTuple):
    """The report of a rank, and the fingerprint of its files before they were read."""

    stem: Path
    before: tuple[int, int]
    report: RankReport


def _read(files: Sequence[tuple[RankFile, Path]]) -> tuple[list[_Look], dict[int, str]]:
    """Return the ranks whose files can be read, and for each other rank why its files cannot be read.

    Raises:
        TraceError: the files of no rank can be read.
    """
    looked, damaged = [], {}
    for identity, stem in files:
        try:
            looked.append(_Look(stem, fingerprint(stem), _report(read_live(identity, stem))))
        except TraceError as error:
            damaged[identity.rank] = str(error)
    if not looked:
        raise TraceError("; ".join(damaged.values()))
    return looked, damaged


def _look_at(report: RankReport, run: Path) -> None:
    report.stacks = take_stacks(_process(report.calls), run, report.calls.stacks)


def _dump(run: Path, situation: Situation, with_stacks: bool) -> Dump:
    return Dump(run, datetime.now(UTC), situation, judge(situation), with_stacks)


def _past_state(calls: RankCalls) -> State:
    return State.ENDED if calls.ended else State.GONE


def _process(calls: RankCalls) -> RankProcess:
    return RankProcess(calls.rank, calls.pid, calls.start_ticks)


def _report(calls: RankCalls) -> RankReport:
    """Return the report of a rank, with the state of its process and the current time on its clock."""
    if calls.ended:
        return RankReport(calls, State.ENDED)
    if calls.host != socket.gethostname():
        return RankReport(calls, State.ELSEWHERE, _now_elsewhere(calls))
    state = state_of(_process(calls))
    return RankReport(calls, state, None if state is State.GONE else time.perf_counter_ns())


def _now_elsewhere(calls: RankCalls) -> int | None:
    """Return the current time in ns on the monotonic clock of a rank on another host; None if that is not known.

    The result is only as accurate as the real-time clocks of the two hosts.
    """
    if calls.last_clock is None:
        return None
    monotonic_ns, realtime_ns = calls.last_clock
    return monotonic_ns + time.time_ns() - realtime_ns


def _rank(report: RankReport) -> dict[str, Any]:
    calls, stacks = report.calls, report.stacks
    last, unknown = calls.last_done(), calls.last_unknown()
    return {
        "rank": calls.rank,
        "attempt": calls.attempt,
        "pid": calls.pid,
        "host": calls.host,
        "state": str(report.state),
        "moved": report.moved,
        "records": calls.total,
        "now_ns": report.now_ns,
        "inside": [_call(call) for call in calls.inside()],
        "last_completed": None if last is None else _call(last),
        "last_of_unknown_end": None if unknown is None else _call(unknown),
        "stacks_by": None if stacks is None else stacks.source,
        "stacks_problem": None if stacks is None else stacks.problem,
        "stacks": [
            {
                "thread": stack.thread,
                "main": stack.is_main,
                "frames": [frame._asdict() for frame in stack.frames],
            }
            for stack in (() if stacks is None else stacks.threads)
        ],
    }


def _wait(wait: Wait) -> dict[str, Any]:
    return {
        "call": _call(wait.call),
        "waiting": list(wait.waiting),
        "missing": list(wait.missing),
        "finished": list(wait.finished),
        "absent": list(wait.absent),
        "known": wait.known,
    }


def _call(call: Call) -> dict[str, Any]:
    own = {name: value for name, value in call._asdict().items() if name != "what"}
    times = {name: value or None for name, value in own.items() if name.endswith("_ns")}
    return {**call.what._asdict(), **own, **times}


def keep_dump(directory: Path, name: str, texts: Sequence[tuple[str, str]]) -> Path:
    """Write the files of a dump below ``directory`` and return the path of the first file.

    The files get the first free name among ``name``, ``name-2``, ``name-3`` and so on.

    Args:
        texts: A pair of suffix and content for each file.

    Raises:
        OSError: a file cannot be written.
    """
    directory.mkdir(exist_ok=True)
    number = 1
    while True:
        stem = name if number == 1 else f"{name}-{number}"
        first = directory / f"{stem}{texts[0][0]}"
        try:
            os.close(os.open(first, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            number += 1
            continue
        for suffix, text in texts:
            (directory / f"{stem}{suffix}").write_text(text, encoding="utf-8")
        return first
