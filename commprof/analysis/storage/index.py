"""The index of a run: a DuckDB file with the records in order of time on one clock, and how busy each rank was.

The index follows from the run, so it may be deleted at any time. It is rebuilt when a file of the run changes. The file
is in the run directory, or in the user's cache directory if the former is read-only. The index stays in memory if the
run is small or still runs, or if the index was not requested as a file.

The index has these tables:

- ``records``: the records in order of ``begin_ns`` (:mod:`commprof.analysis.storage.record_spans`)
- ``kinds``: the combinations of the values that records share
- ``lanes``: the groups of ranks (:mod:`commprof.analysis.browse.lanes`)
- ``density``: level, rank, lane, op, bin, busy_ns and still_ns, with only the rows whose values are not 0
- ``bands``: steps and phases
- ``facts``: facts about the run and the index

An index file also contains sums that other answers use (:mod:`commprof.analysis.storage.index_sums`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

import duckdb
import pyarrow as pa

from commprof.analysis.relations.memory import engine_settings
from commprof.analysis.relations.sql_engine import connect
from commprof.analysis.storage.answer_cache import answer_cache
from commprof.analysis.storage.answer_files import user_cache
from commprof.analysis.storage.index_sums import exposure_tables, fill_sums
from commprof.analysis.storage.index_tables import Laid, fill, fill_overview, fill_records
from commprof.analysis.storage.index_totals import keep_operations
from commprof.errors import TraceError
from commprof.printable import command_line
from commprof.trace.directory import INDEX_NAME, MANIFEST_NAME, resolve
from commprof.trace.fingerprint import fingerprint
from commprof.trace.manifest import read_manifest
from commprof.trace.rank_files.layout import rank_files
from commprof.trace.reader import Run, open_run

MOST_IN_MEMORY: Final = 5_000_000  # maximum number of records of an index in memory
_FEWEST_IN_FILE: Final = 300_000  # fewer records are indexed in less time than a person notices
_MOST_OPEN: Final = 8  # maximum number of indexes that stay open
_MOST_CACHED: Final = 16  # maximum number of files in the user's cache directory
_LIVE_SECONDS: Final = 2.0  # maximum age of the index of a run that still runs, if it was built quickly
# The engine's memory limit in bytes while it builds an index. The engine writes the rest to temporary files.
_MOST_MEMORY: Final = 400 << 20
_CORRUPT: Final = "Corrupt database file"  # begin of the engine's message about a wrong checksum

Progress = Callable[[int, int], None]
Answer = TypeVar("Answer")


class Index:
    """An opened index. It answers one question at a time.

    Attributes:
        run: The run directory.
        facts: Facts by name: records, begin_ns, end_ns, ranks, lanes (the number of lanes; 0 if groups are not
            distinguished), ops, unknown_clocks, levels (the bin width and the number of bins of each level), state.
        path: The file of the index, or None if the index is in memory.
        stamp: The ``inputs`` of the :func:`fingerprint` of the run from which the index was built.
    """

    def __init__(self, run: Path, engine: duckdb.DuckDBPyConnection, path: Path | None) -> None:
        self.run = run
        self.path = path
        self._engine = engine
        self._lock = threading.Lock()
        self._opened: Run | None = None
        self.stamp = str(_one(engine, "select value from facts where name = 'fingerprint'"))
        self.facts: Mapping[str, Any] = json.loads(
            _one(engine, "select value from facts where name = 'facts'")
        )
        self.born = time.monotonic()
        self.seconds = 0.0  # the time in seconds that was needed to open or build the index

    def ask(self, sql: str, values: Sequence[Any] = ()) -> pa.Table:
        """Return the answer to ``sql``, with ``values`` substituted for its question marks.

        Raises:
            TraceError: The index cannot be read. If a block of its file is damaged, the file is removed, so that the
                next question builds a new index.
        """
        with self._lock:
            try:
                return self._engine.sql(sql, params=list(values)).to_arrow_table()
            except duckdb.Error as error:
                message = _first_line(error)
        if self.path is None:
            raise TraceError(f"the index of {self.run} cannot be read: {message}")
        again = f"answers do not need the index, and {command_line('finalise', self.run)} rebuilds it"
        if _CORRUPT not in message:
            raise TraceError(f"{self.path} cannot be read: {message}. Remove it: {again}")
        _shelf.forget(self.run)
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            do = f"It could not be removed ({error.strerror}). Remove it: {again}"
        else:
            do = f"It was removed. Repeat the command: {again}"
        raise TraceError(f"{self.path} has a damaged block: {message}. {do}")

    def opened(self) -> Run:
        """Return the opened run, for tables that the index does not contain."""
        if self._opened is None:
            self._opened = open_run(self.run)
        return self._opened

    def close(self) -> None:
        """Close the index after the current question is answered."""
        with self._lock:
            self._engine.close()


class _Shelf:
    """The indexes that are open in this process, by run directory."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, Index] = OrderedDict()
        self._lock = threading.Lock()
        self._building: dict[Path, threading.Lock] = {}

    def take(self, run: Path, make: Callable[[], Index]) -> Index:
        """Return the open index of ``run`` if it is still valid, or else the index that ``make`` returns."""
        run = run.resolve()
        with self._lock:
            building = self._building.setdefault(run, threading.Lock())
        with building:  # several requests for the same run wait for one build
            with self._lock:
                open_index = self._open.get(run)
                if open_index is not None:
                    young = time.monotonic() - open_index.born < max(_LIVE_SECONDS, 10 * open_index.seconds)
                    if open_index.stamp == fingerprint(run).inputs and (young or not _is_live(run)):
                        self._open.move_to_end(run)
                        return open_index
                    # If the old file stayed open, DuckDB would return it instead of the new file of the same name.
                    self._open.pop(run).close()
            begin = time.monotonic()
            index = make()
            index.seconds = time.monotonic() - begin
            with self._lock:
                self._open[run] = index
                while len(self._open) > _MOST_OPEN:
                    self._open.popitem(last=False)[1].close()
            return index

    def holds(self, run: Path) -> bool:
        """Return whether the index of ``run`` is open and matches the files of the run."""
        with self._lock:
            open_index = self._open.get(run.resolve())
            return open_index is not None and open_index.stamp == fingerprint(run).inputs

    def forget(self, run: Path) -> None:
        """Close the index of ``run`` if it is open."""
        with self._lock:
            open_index = self._open.pop(run.resolve(), None)
        if open_index is not None:
            open_index.close()


_shelf: Final = _Shelf()


def index_of(run: Run | Path | str, progress: Progress | None = None, *, write: bool = False) -> Index:
    """Return the opened index of ``run``. If there is no valid index, the function first builds one.

    Args:
        progress: A function that is called during the build with the number of processed records and the number of
            all records.
        write: Whether to write the index to a file if the run is large and has ended. Otherwise a new index stays in
            memory.

    Raises:
        TraceError: The run cannot be read. Or its index is too large for memory, and the index was not requested as a
            file or the file cannot be written.
    """
    path = run.path if isinstance(run, Run) else resolve(run)
    opened_run = run if isinstance(run, Run) else None
    return _shelf.take(path, lambda: _open(path, opened_run, progress or _ignore, write))


def index_if_there(run: Path) -> Index | None:
    """Return the opened index of ``run`` if a valid index file exists, or else None. No index is built."""
    path = run.resolve()
    files = [file for file in _places(path) if file.is_file()]
    if not files or _is_live(path) or not (_shelf.holds(path) or _holds(path, files)):
        return None
    index = index_of(path)
    return index if index.path is not None else None


def by_index(
    run: Run,
    indexed: Callable[[Index], Answer | None],
    otherwise: Callable[[], Answer],
    question: Hashable = None,
) -> Answer:
    """Return the answer of ``indexed`` if ``run`` has a valid index file, or else the answer of ``otherwise``.

    Args:
        run: The run.
        indexed: A function that answers from the index. If it returns None, ``otherwise`` is called.
        otherwise: A function that answers without the index.
        question: The key under which the answer of ``indexed`` is cached. Default: the answer is not cached.
    """

    def ask() -> Answer | None:
        index = index_if_there(run.path)
        return None if index is None else indexed(index)

    answer = ask() if question is None else answer_cache.get(run.state, question, ask)
    return otherwise() if answer is None else answer


def has_index(run: Path) -> bool:
    """Return whether ``run`` is small, still runs, or has a valid index, so that no large index must be built."""
    path = resolve(run)
    if _shelf.holds(path) or _is_live(path):
        return True
    entries = read_manifest(path).ranks if (path / MANIFEST_NAME).is_file() else []
    if sum(int(entry.get("records") or 0) for entry in entries) < _FEWEST_IN_FILE:
        return True
    return _holds(path, _places(path))


def _places(run: Path) -> list[Path]:
    """Return the possible paths of the index file: in the run directory and in the user's cache directory."""
    places = [run / INDEX_NAME]
    cache = user_cache("indexes")
    if cache is not None:
        name = hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:32]
        places.append(cache / f"{name}{Path(INDEX_NAME).suffix}")
    return places


def _holds(path: Path, files: Sequence[Path]) -> bool:
    index = _existing(path, files)
    if index is None:
        return False
    index.close()
    return True


def _open(path: Path, run: Run | None, progress: Progress, write: bool) -> Index:
    files = _places(path)
    if not _is_live(path):
        index = _existing(path, files)
        if index is not None:
            return index
    run = run or open_run(path)
    records = run.health.records
    if records < _FEWEST_IN_FILE or run.health.state == "running" or _is_live(path):
        return _in_memory(run, progress)
    if not write:
        if records <= MOST_IN_MEMORY:
            return _in_memory(run, progress)
        raise TraceError(
            f"{path} has {records:,} records and no index. Make it once: {command_line('finalise', path)}"
        )
    try:
        with _locked(path):
            index = _existing(path, files)  # another process may have built the index meanwhile
            if index is None:
                _write(run, files, progress)
    except OSError as error:
        if records > MOST_IN_MEMORY:
            raise TraceError(
                f"{path} has {records:,} records, and its index cannot be written to "
                f"{' or '.join(str(file.parent) for file in files)}: {error.strerror or error}. Copy the run to a directory "
                "that you may write to, or set XDG_CACHE_HOME to one"
            ) from None
        return _in_memory(run, progress)
    return index or _existing(path, files) or _in_memory(run, progress)


def _existing(run: Path, files: Sequence[Path]) -> Index | None:
    """Return the first valid index of ``run`` among ``files``, or None if there is none."""
    for file in files:
        index = _read(run, file)
        if index is not None:
            return index
    return None


def _read(run: Path, file: Path) -> Index | None:
    """Return the index in ``file``, or None if it is missing, incomplete, or does not match the files of ``run``."""
    if not file.is_file():
        return None
    engine = None
    try:
        engine = duckdb.connect(str(file), read_only=True, config=engine_settings())
        # Only used blocks are compared with the size, because free blocks at the end of a file may be missing.
        blocks = int(_one(engine, "select block_size * used_blocks from pragma_database_size()"))
        is_whole = file.stat().st_size >= blocks
        stamp = _one(engine, "select value from facts where name = 'fingerprint'")
        if is_whole and stamp == fingerprint(run).inputs:
            return Index(run, engine, file)
    except (duckdb.Error, ValueError, TypeError, OSError):
        pass
    if engine is not None:
        engine.close()
    return None


def _in_memory(run: Run, progress: Progress) -> Index:
    engine = connect()
    try:
        fill(engine, run, {"fingerprint": fingerprint(run.path).inputs}, progress)
    except duckdb.Error as error:
        raise TraceError(f"the records of {run.path} cannot be put in order: {_first_line(error)}") from None
    return Index(run.path, engine, None)


def _write(run: Run, files: Sequence[Path], progress: Progress) -> None:
    """Write the index atomically to the first of ``files`` that can be written.

    Raises:
        OSError: None of ``files`` can be written.
    """
    for file in files:
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write_to(file, run, progress)
        except OSError:
            if file == files[-1]:
                raise
        else:
            break
    if file != run.path / INDEX_NAME:
        _remove_oldest(file.parent)


def _remove_oldest(cache: Path) -> None:
    """Remove all but the newest files of the cache directory."""
    with contextlib.suppress(OSError):
        files = sorted(cache.glob(f"*{Path(INDEX_NAME).suffix}"), key=lambda file: -file.stat().st_mtime_ns)
        for file in files[_MOST_CACHED:]:
            file.unlink(missing_ok=True)


def _write_to(file: Path, run: Run, progress: Progress) -> None:
    # These are files of a process that was killed, because this process now has the lock.
    for left in file.parent.glob(f".{file.name}-*"):
        _remove(left)
    with TemporaryDirectory(dir=file.parent, prefix=f".{file.name}-", ignore_cleanup_errors=True) as folder:
        temporary = Path(folder) / file.name
        try:
            settings = {**engine_settings(_MOST_MEMORY), "temp_directory": folder}
            with (
                # Tables that do not depend on the records are computed while the engine sorts the records, because
                # sorting leaves CPU time idle.
                ThreadPoolExecutor(1) as beside,
                connect(str(temporary), **settings) as engine,
            ):
                exposures = beside.submit(exposure_tables, run)
                laid = fill_records(engine, run, lambda done, of: progress(done // 2, of))
                facts, records = {"fingerprint": fingerprint(run.path).inputs}, run.health.records
                overview_done = beside.submit(_fill_overview, engine, run, facts, laid)
                operations_done = beside.submit(keep_operations, engine, run)
                sum_facts = fill_sums(
                    engine,
                    run,
                    exposures,
                    operations_done,
                    lambda done, of: progress((of + done) * records // of // 2, records),
                )
                overview_done.result()
                engine.executemany("insert into facts values (?, ?)", list(sum_facts.items()))
        except duckdb.Error as error:
            raise OSError(_first_line(error)) from None
        temporary.replace(file)


def _fill_overview(engine: duckdb.DuckDBPyConnection, run: Run, facts: Mapping[str, Any], laid: Laid) -> None:
    """Call :func:`fill_overview` with a connection of its own, because another thread uses ``engine``."""
    with engine.cursor() as cursor:
        fill_overview(cursor, run, facts, laid)


def _remove(left: Path) -> None:
    if left.is_dir() and not left.is_symlink():
        shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _locked(run: Path) -> Iterator[None]:
    """Hold the lock for building an index of ``run``. The lock is on the directory, so it leaves no file behind."""
    descriptor = os.open(run, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # A file system may not support locks. The write is atomic even then, because it ends with a rename.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_live(run: Path) -> bool:
    return bool(rank_files(run))


def _one(engine: duckdb.DuckDBPyConnection, sql: str) -> Any:
    # All rows are fetched, because a connection with an unread result refuses other questions.
    rows = engine.execute(sql).fetchall()
    return rows[0][0] if rows else None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _ignore(done: int, of: int) -> None:
    return None
