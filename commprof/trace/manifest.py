"""The manifest ``run.json``: the command, hosts and settings of a run and how it ended. Standard library only."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from commprof.errors import SchemaError, TraceError, UsageError
from commprof.schema import SCHEMA_VERSION, TABLES
from commprof.trace.content import printable, read_content
from commprof.trace.directory import (
    COLLECTIVES_DIRECTORY,
    DUMPS_DIRECTORY,
    EVERY_SAMPLES,
    HOSTS_DIRECTORY,
    INDEX_NAME,
    MANIFEST_NAME,
    STACKS_DIRECTORY,
    SUMMARIES_DIRECTORY,
    is_run,
)
from commprof.trace.liveness import refuse_live
from commprof.trace.rank_files.layout import parse_stem
from commprof.version import __version__

RUNNING: Final = "running"
COMPLETE: Final = "complete"
FAILED: Final = "failed"
KILLED: Final = "killed"

_OUR_NAMES: Final = frozenset(
    {
        MANIFEST_NAME,
        COLLECTIVES_DIRECTORY,
        INDEX_NAME,
        SUMMARIES_DIRECTORY,
        HOSTS_DIRECTORY,
        "config.json",
        "nccl",
        "wire",
        "samples",
        "wire.jsonl",
        "processes.jsonl",
        "output.txt",
        STACKS_DIRECTORY,
        DUMPS_DIRECTORY,
    }
)
# The fields that may be null, and their types otherwise.
_NULLABLE: Final[dict[str, type]] = {
    "script": str,
    "ended_realtime_ns": int,
    "exit_code": int,
    "first_failed_rank": int,
    "nproc": int,
    "world_size": int,
    "launcher": dict,
    "torch": str,
    "config": dict,
    "config_path": str,
    "config_argument": str,
    "effective_config": dict,
    "engine": str,
    "construction": dict,
    "sweep": dict,
    "tables": list,
}
_OPTIONAL_COUNTS: Final = (
    "part",
    "world_size",
    "lost",
    "torn",
    "torn_events",
    "unseen",
    "raised",
    "incomplete",
    "faults",
    "recorder_ns",
)
_LARGEST: Final = 1 << 62
# A larger world size is a damaged number, and listing its missing ranks would take minutes.
MOST_RANKS: Final = 1_000_000
# Prefixes of the environment variables that affect collectives. Other variables are not recorded.
_KEPT_VARIABLES: Final = ("NCCL_", "TORCH_", "OMP_", "GLOO_")


@dataclass(slots=True)
class Manifest:
    """The content of ``run.json``. Times are CLOCK_REALTIME in nanoseconds.

    ``ranks`` has one mapping per rank file: rank, attempt, pid, part, host, records, lost, torn, unseen, raised,
    incomplete, faults, recorder_ns, stopped_reason, ended, finalised, cut, and file (the stem of the file of its
    records in ``collectives/``). ``tables`` lists the other tables that were written when the run was finalized. It is
    None if an earlier version of commprof finalized the run.
    """

    schema_version: int = SCHEMA_VERSION
    commprof_version: str = __version__
    command: list[str] = field(default_factory=list)
    script: str | None = None
    cwd: str = ""
    started_realtime_ns: int = 0
    ended_realtime_ns: int | None = None
    state: str = RUNNING
    exit_code: int | None = None
    first_failed_rank: int | None = None
    nproc: int | None = None
    world_size: int | None = None
    hosts: list[str] = field(default_factory=list)
    launcher: dict[str, Any] | None = None  # pid, host, start_ticks
    python: str = ""
    torch: str | None = None
    platform: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    config_path: str | None = None
    config_argument: str | None = None
    effective_config: dict[str, Any] | None = None  # the config that the engine published
    engine: str | None = None
    # See commprof.trace.rank_files.engines. Empty if the program has one engine.
    engines: list[dict[str, Any]] = field(default_factory=list)
    # How the parameters are constructed at stage 3, see commprof.hooks.describe_config.
    construction: dict[str, Any] | None = None
    sweep: dict[str, Any] | None = None  # name, point {dotted key: value}, repeat
    ranks: list[dict[str, Any]] = field(default_factory=list)
    tables: list[str] | None = None
    notes: list[str] = field(default_factory=list)
    # Keys of the file that this version does not define. They are written back without a change.
    extra: dict[str, Any] = field(default_factory=dict)


def describe_process(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the manifest fields that describe this process: command, cwd, python, platform and environment."""
    environment = os.environ if environment is None else environment
    return {
        "command": list(getattr(sys, "orig_argv", sys.argv)),
        "cwd": _working_directory(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "environment": {
            name: value for name, value in sorted(environment.items()) if name.startswith(_KEPT_VARIABLES)
        },
    }


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return ""  # The directory was deleted.


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of run directory ``path``.

    Raises:
        SchemaError: A newer version wrote the manifest.
        TraceError: The file is missing, unreadable, cut off, or not a manifest.
    """
    file = Path(path) / MANIFEST_NAME
    try:
        content = printable(json.loads(read_content(file)))
    except FileNotFoundError:
        raise TraceError(f"{path} has no {MANIFEST_NAME}") from None
    except OSError as error:
        raise TraceError(
            f"{file} cannot be read: {error.strerror}. Check its permissions, or copy the run to your own directory"
        ) from None
    except (ValueError, RecursionError) as error:
        raise TraceError(
            f"{file} is not valid JSON ({error}): it was cut off or changed by hand. Remove it to read the run without it"
        ) from None
    if not isinstance(content, dict) or type(content.get("schema_version")) is not int:
        raise TraceError(
            f"{file} has no schema_version: it was not written by commprof. If it belongs to another program, keep "
            "runs in a directory of their own"
        )
    if content["schema_version"] > SCHEMA_VERSION:
        raise SchemaError(
            f"{path} was written with schema version {content['schema_version']} by commprof "
            f"{content.get('commprof_version', '?')}; this commprof ({__version__}) reads versions up to {SCHEMA_VERSION}. "
            "Install a newer commprof to read it"
        )
    known = {item.name for item in fields(Manifest)}
    extra = {key: value for key, value in content.items() if key not in known}
    manifest = Manifest(**{key: value for key, value in content.items() if key in known})
    manifest.extra.update(extra)
    problem = _wrong_type(manifest)
    if problem is not None:
        raise TraceError(
            f"{file}: {problem}. The file was changed by hand; remove it to read the run without it"
        )
    return manifest


def _wrong_type(manifest: Manifest) -> str | None:
    pristine = Manifest()
    for item in fields(Manifest):
        value, default = getattr(manifest, item.name), getattr(pristine, item.name)
        expected = type(default) if default is not None else _NULLABLE[item.name]
        if value is None and default is None:
            continue
        if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
            return f"{item.name} is {type(value).__name__}, expected {expected.__name__}"
        if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
            return f"{item.name} is {value}, which is out of range"
    for name in ("command", "hosts", "notes", "tables"):
        if not all(isinstance(text, str) for text in getattr(manifest, name) or ()):
            return f"{name} holds something that is not text"
    if not all(isinstance(text, str) for text in manifest.environment.values()):
        return "environment holds something that is not text"
    if (manifest.world_size or 0) > MOST_RANKS or (manifest.nproc or 0) > MOST_RANKS:
        return f"world_size is {manifest.world_size}, more than {MOST_RANKS:,}"
    if manifest.sweep is not None and not isinstance(manifest.sweep.get("point", {}), dict):
        return "sweep has a point that is not an object"
    if not all(map(_is_engine, manifest.engines)):
        return "engines has an entry that does not describe an engine"
    return next((f"ranks: {problem}" for entry in manifest.ranks if (problem := wrong_entry(entry))), None)


def _is_engine(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and type(entry.get("after")) is int
        and -1 <= entry["after"] < _LARGEST
        and isinstance(entry.get("config"), dict)
        and isinstance(entry.get("same_model"), bool)
        and isinstance(entry.get("share_steps", False), bool)
    )


def wrong_entry(entry: Any) -> str | None:
    """Return the problem of an entry of ``ranks`` as a clause, and None if the entry is valid."""
    if not isinstance(entry, dict):
        return "an entry is not an object"
    for name in ("rank", "attempt", "pid"):
        if not _is_count(entry.get(name)):
            return f"an entry has no {name}"
    for name in ("records", *_OPTIONAL_COUNTS):
        if not (entry.get(name) is None or _is_count(entry[name])):
            return f"{name} is {entry[name]!r}, expected a count"
    if (entry.get("world_size") or 0) > MOST_RANKS:
        return f"world_size is {entry['world_size']}, more than {MOST_RANKS:,}"
    for name in ("file", "host", "stopped_reason"):
        if not isinstance(entry.get(name), str | None):
            return f"{name} is {type(entry[name]).__name__}, expected text"
    for name in ("notes", "cut"):
        texts = entry.get(name) or []
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            return f"{name} is not a list of texts"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write ``run.json`` of run directory ``path`` atomically.

    Raises:
        TraceError: The directory cannot be written to.
    """
    content = asdict(manifest)
    content.update(content.pop("extra"))
    text = json.dumps(content, indent=1, default=str) + "\n"
    try:
        _replace_file(Path(path) / MANIFEST_NAME, text)
    except OSError as error:
        raise TraceError(f"{Path(path) / MANIFEST_NAME} cannot be written: {error.strerror}") from None


def _replace_file(file: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_manifest_if_absent(path: Path, manifest: Manifest) -> bool:
    """Write ``run.json`` unless the file exists, and return whether this call wrote the file.

    Raises:
        OSError: The file cannot be written.
    """
    file = Path(path) / MANIFEST_NAME
    if file.exists():
        return False
    temporary = file.with_name(f".{MANIFEST_NAME}-{os.getpid()}")
    content = asdict(manifest)
    content.update(content.pop("extra"))
    _replace_file(temporary, json.dumps(content, indent=1, default=str) + "\n")
    try:
        os.link(temporary, file)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def create_run(path: Path, manifest: Manifest, force: bool = False) -> None:
    """Create run directory ``path`` and write its manifest.

    Args:
        path: The directory to create.
        manifest: The manifest to write.
        force: Whether to remove an existing run at ``path`` first. A directory that is not a run is never removed.

    Raises:
        UsageError: ``path`` is a file, or a directory that is not empty and cannot be replaced.
        TraceError: The directory cannot be created or written to.
    """
    path = Path(path)
    try:
        if path.is_dir() and any(path.iterdir()):
            _make_room(path, force)
        elif path.exists() and not path.is_dir():
            raise UsageError(f"{path} is a file; the run needs a directory. Choose another --out")
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TraceError(
            f"{path} cannot be used for the run: {error.strerror}. Choose a directory that you may write to with --out"
        ) from None
    write_manifest(path, manifest)


def _make_room(path: Path, force: bool) -> None:
    if not is_run(path):
        raise UsageError(
            f"{path} is not empty and is not a run, so nothing in it is touched, --force or not. Choose another --out"
        )
    refuse_live(path, "it is not replaced")
    if not force:
        raise UsageError(
            f"{path} holds a run already. Choose another --out, or give --force to replace that run"
        )
    check_replaceable(path)
    shutil.rmtree(path)


def check_replaceable(path: Path) -> None:
    """Raise an error if run ``path`` must not be removed.

    Raises:
        UsageError: The run is being recorded, or contains a file that commprof did not write.
    """
    refuse_live(path, "it is not replaced")
    foreign = sorted(child.name for child in path.iterdir() if not _is_ours(child))
    if foreign:
        raise UsageError(
            f"{path} is a run, but also holds {', '.join(foreign[:5])}, which commprof did not write: nothing is removed. "
            "Move that elsewhere, or choose another --out"
        )


def _is_ours(child: Path) -> bool:
    """Return whether ``child`` is a file or directory that commprof writes into a run directory."""
    if child.name in _OUR_NAMES or child.match(EVERY_SAMPLES):
        return True
    if child.name.startswith((f".{MANIFEST_NAME}-", f".{INDEX_NAME}-", ".rank-")):
        return True
    return parse_stem(child.stem) is not None or (
        child.suffix == ".parquet" and child.stem.lstrip(".") in TABLES
    )
