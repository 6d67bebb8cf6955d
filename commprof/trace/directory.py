"""Finds run directories and names new ones. Uses only the standard library."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Final, NamedTuple

from commprof.errors import TraceError
from commprof.trace.rank_files.layout import rank_files

MANIFEST_NAME: Final = "run.json"
COLLECTIVES_DIRECTORY: Final = "collectives"
# The index of the dashboard. It is derived from the other files, and is built again if it is missing.
INDEX_NAME: Final = "index.duckdb"
# The summaries, which are derived from the other files when the run ends.
SUMMARIES_DIRECTORY: Final = "relations"
HOSTS_DIRECTORY: Final = "hosts"  # the sums of the ranks of each host, written by the launcher of the host
SAMPLES_NAME: Final = "samples.jsonl"  # the readings of the launcher's samplers while the job runs
EVERY_SAMPLES: Final = "samples*.jsonl"  # the files of samplers of all hosts
STACKS_DIRECTORY: Final = "stacks"  # one file per process, to which the process writes its stacks on request
DUMPS_DIRECTORY: Final = "dumps"  # the dumps that the watchdog writes if the job hangs
# The location of the records of an analysis if they are not on this machine.
ELSEWHERE_NAME: Final = "elsewhere.json"
TRACES: Final = Path("traces")
LATEST: Final = "latest"


def default_run_directory(script: str, now: datetime, traces: Path = TRACES) -> Path:
    """Return ``traces/<script stem>-<YYYYmmdd-HHMMSS>``, with ``-2``, ``-3``, ... appended if the name is taken.

    The directory is not created.

    Args:
        script: The path of the script, or the name of the module.
        now: The local time at which the run starts.
        traces: The parent directory.
    """
    path = traces / run_name(script, now)
    number = 1
    candidate = path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def claim_run_directory(script: str, now: datetime, traces: Path = TRACES) -> Path:
    """Create the directory that :func:`default_run_directory` names, and return its path.

    Jobs that start at the same time get different directories.

    Raises:
        TraceError: The directory cannot be created.
    """
    while True:
        path = default_run_directory(script, now, traces)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not path.exists():
                raise TraceError(
                    f"{path} cannot be created: a symbolic link with this name exists, but its target does not. "
                    "Remove it"
                ) from None
        except OSError as error:
            raise TraceError(
                f"{path} cannot be used for the run: {error.strerror}. Choose a directory that you may write to with --out"
            ) from None
        else:
            return path


def run_name(script: str, now: datetime) -> str:
    """Return ``<script stem>-<YYYYmmdd-HHMMSS>``. The stem of ``pkg.train`` and of ``a/train.py`` is ``train``."""
    return f"{script_stem(script)}-{now:%Y%m%d-%H%M%S}"


def script_stem(script: str) -> str:
    """Return the name for runs of ``script``, for example ``train`` for ``pkg.train`` and for ``a/train.py``."""
    name = Path(script).name
    stem = name[:-3] if name.endswith(".py") else name.rpartition(".")[2]
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in stem).strip("_") or "run"


def is_run(path: Path) -> bool:
    """Return whether ``path`` is a directory with a manifest, the files of a rank, or finalized collectives."""
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
    """The location of the records of an analyzed run if they are not on this machine.

    Attributes:
        place: The URL of the directory of the run (``s3a://...``), as it was given to ``commprof analyse``.
        stems: The names of the files of its collectives, without their suffix.
    """

    place: str
    stems: frozenset[str]


def elsewhere(run: Path) -> Elsewhere | None:
    """Return the location of the records of ``run`` if they are not in the directory itself, and None if they are.

    Raises:
        TraceError: The file that states the location is damaged.
    """
    if (run / COLLECTIVES_DIRECTORY).exists() or not (run / ELSEWHERE_NAME).is_file():
        return None
    try:
        content = json.loads((run / ELSEWHERE_NAME).read_text("utf-8"))
        return Elsewhere(str(content["run"]), frozenset(map(str, content["collectives"])))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(
            f"{run / ELSEWHERE_NAME} does not say where the records lie ({error}); run commprof analyse again"
        ) from None


def find_runs(directory: Path) -> list[Path]:
    """Return all run directories at or below ``directory``, ordered by name. A run contains no other runs."""
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
    """Return the run directory that ``text`` names: a path, or ``latest`` for the last started run in ``traces``.

    Raises:
        TraceError: There is no such directory, or it is not a run.
    """
    path = Path(text)
    if str(text) == LATEST and not path.exists():
        runs = find_runs(traces)
        if not runs:
            raise TraceError(
                f"there is no run in {traces}/, and {LATEST!r} means the newest run there. Record one with: "
                "commprof run SCRIPT, or name a run directory"
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
