"""Finds run directories, and names new ones. Standard library only."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Final, NamedTuple

from commprof.errors import TraceError
from commprof.trace.rank_files.layout import rank_files

MANIFEST_NAME: Final = "run.json"
COLLECTIVES_DIRECTORY: Final = "collectives"
# What the dashboard asks; made from the rest, and made again when it is gone.
INDEX_NAME: Final = "index.duckdb"
# What most answers begin with, made from the rest when the run ended.
SUMMARIES_DIRECTORY: Final = "relations"
HOSTS_DIRECTORY: Final = "hosts"  # the same of each host, made by its own launcher
SAMPLES_NAME: Final = "samples.jsonl"  # what the launcher's samplers read, while the job runs
EVERY_SAMPLES: Final = "samples*.jsonl"  # and those of other hosts
STACKS_DIRECTORY: Final = "stacks"  # one file for each process, in which it writes its stacks on request
DUMPS_DIRECTORY: Final = "dumps"  # what the watchdog wrote of a job that hung
ELSEWHERE_NAME: Final = "elsewhere.json"  # of an analysis whose records this machine does not have
TRACES: Final = Path("traces")
LATEST: Final = "latest"


def default_run_directory(script: str, now: datetime, traces: Path = TRACES) -> Path:
    """``traces/<script stem>-<YYYYmmdd-HHMMSS>``, with ``-2``, ``-3``, ... where that is taken. Nothing is created.

    Args:
        script: path of the script, or the module's name.
        now: when the run starts, local time.
    """
    path = traces / run_name(script, now)
    number = 1
    candidate = path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def claim_run_directory(script: str, now: datetime, traces: Path = TRACES) -> Path:
    """Create the directory that :func:`default_run_directory` names. Of jobs that start together each gets its own.

    Raises:
        TraceError: it cannot be created.
    """
    while True:
        path = default_run_directory(script, now, traces)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not path.exists():
                raise TraceError(f"{path} cannot be created: a link of that name leads nowhere") from None
        except OSError as error:
            raise TraceError(
                f"{path} cannot be used for the run: {error.strerror}. Choose a directory that you may write to with --out"
            ) from None
        else:
            return path


def run_name(script: str, now: datetime) -> str:
    """``<script stem>-<YYYYmmdd-HHMMSS>``: of ``pkg.train`` and of ``a/train.py`` the stem is ``train``."""
    return f"{script_stem(script)}-{now:%Y%m%d-%H%M%S}"


def script_stem(script: str) -> str:
    """What the runs of ``script`` are called: ``train`` of ``pkg.train`` and of ``a/train.py``."""
    name = Path(script).name
    stem = name[:-3] if name.endswith(".py") else name.rpartition(".")[2]
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in stem).strip("_") or "run"


def is_run(path: Path) -> bool:
    """Whether ``path`` is a run directory: it holds a manifest, the files of a rank, or finalised collectives."""
    if not path.is_dir():
        return False
    if (path / MANIFEST_NAME).is_file():
        return True
    if any((path / COLLECTIVES_DIRECTORY).glob("rank-*.parquet")):
        return True
    try:
        return bool(rank_files(path))
    except OSError:
        return False


class Elsewhere(NamedTuple):
    """The place of an analysed run's records that are not on this machine.

    Attributes:
        place: URL of the directory of the run (``s3a://...``), as it was given to ``commprof analyse``.
        stems: the files of its collectives, without their suffix.
    """

    place: str
    stems: frozenset[str]


def elsewhere(run: Path) -> Elsewhere | None:
    """Where the records of ``run`` lie; None where they belong into the directory itself.

    Raises:
        TraceError: the file that says so is damaged.
    """
    if (run / COLLECTIVES_DIRECTORY).exists() or not (run / ELSEWHERE_NAME).is_file():
        return None
    try:
        content = json.loads((run / ELSEWHERE_NAME).read_text("utf-8"))
        return Elsewhere(str(content["run"]), frozenset(map(str, content["collectives"])))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(
            f"{run / ELSEWHERE_NAME} does not say where the records lie ({error}); analyse the run again"
        ) from None


def find_runs(directory: Path) -> list[Path]:
    """All run directories at or below ``directory``, in order of their names. A run holds no other runs."""
    if not directory.is_dir():
        return []
    if is_run(directory):
        return [directory]
    runs: list[Path] = []
    try:
        children = sorted(child for child in directory.iterdir() if child.is_dir())
    except OSError:
        return []
    for child in children:
        if not child.is_symlink() and not child.name.startswith("."):
            runs.extend(find_runs(child))
    return runs


def resolve(text: str | Path, traces: Path = TRACES) -> Path:
    """The run directory that ``text`` means: a path, or ``latest`` for the one in ``traces`` that started last.

    Raises:
        TraceError: there is no such directory, or it is no run.
    """
    path = Path(text)
    if str(text) == LATEST and not path.exists():
        runs = find_runs(traces)
        if not runs:
            raise TraceError(
                f"there is no run in {traces}/, so nothing is the latest. Record one with: commprof run SCRIPT, or name "
                "a run directory"
            )
        return max(runs, key=_started)
    if not path.exists():
        raise TraceError(
            f"{path} does not exist; a run directory was expected. Runs are kept in {traces}/ below the folder "
            f"where they were started, and '{LATEST}' means the newest of them"
        )
    if not path.is_dir():
        raise TraceError(f"{path} is a file; a run directory was expected, which holds {MANIFEST_NAME}")
    if not is_run(path):
        inner = find_runs(path)
        hint = (
            f"it holds {len(inner)} run(s), for example {inner[-1]}: name one of them"
            if inner
            else f"it holds neither {MANIFEST_NAME} nor files of a rank. Record a run with: commprof run SCRIPT"
        )
        raise TraceError(f"{path} is not a run directory: {hint}")
    return path


def _started(path: Path) -> tuple[int, str]:
    try:
        started = json.loads((path / MANIFEST_NAME).read_text())["started_realtime_ns"]
        return int(started), path.name
    except (OSError, ValueError, KeyError, TypeError):
        try:
            return path.stat().st_mtime_ns, path.name
        except OSError:
            return 0, path.name
