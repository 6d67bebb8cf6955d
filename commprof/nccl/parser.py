"""Parses NCCL logs into tables: one row of ``nccl_ops`` per operation line, one entry per communicator.

parsed = parse_logs(["logs/"])
parsed.ops            table nccl_ops            parsed.communicators   ranks and sizes
parsed.counts         numbers of lines by kind  parsed.notes           missing data, and settings for the next log
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.csv as pa_csv

from commprof.errors import LogError, UsageError
from commprof.nccl.grammar.versions import candidates, describe, parse_version, prints_bytes
from commprof.nccl.scan import scan_blocks
from commprof.nccl.sources import Block, LogSource, find_logs
from commprof.nccl.state.communicators import (
    Communicator,
    Process,
    communicators_table,
)
from commprof.nccl.state.log_state import Assembly
from commprof.nccl.state.membership import Membership, World, find_families, find_global_ranks
from commprof.nccl.state.tuning_choices import NEEDED, attribute_in_windows
from commprof.nccl.tables.census import LineKind
from commprof.nccl.tables.missing_evidence import Findings, remarks
from commprof.nccl.tables.operations import Operations, OperationTable, Versions
from commprof.trace.tables import write_parquet

TABLE_NAMES = (
    "nccl_ops",
    "nccl_communicators",
    "nccl_rings",
    "nccl_trees",
    "nccl_links",
    "nccl_tuning",
    "nccl_messages",
)
GENERATED_MARK = b"# GENERATED"
_COUNTED_ELSEWHERE = ("files", "bytes", "unknown_op", "overlong")


class Counts(NamedTuple):
    """The numbers of files, bytes, and lines or messages of each kind. ``ignored`` counts lines that go to no table."""

    files: int
    bytes: int
    lines: int
    coll: int
    call: int
    torn: int
    init: int
    end: int
    banner: int
    torch: int
    group: int
    topology: int
    tuning: int
    message: int
    unknown_op: int
    fragment: int
    overlong: int
    ignored: int


@dataclass(frozen=True, slots=True)
class ParsedLogs:
    """The result of :func:`parse_logs`.

    Attributes:
        operations: The rows of ``nccl_ops``, in memory or on disk.
        communicators: The communicators, one entry per use of a communicator address in a process.
        processes: The processes of the logs. ``Communicator.process`` is an index into this tuple.
        counts: The numbers of lines by kind.
        unknown_ops: The number of lines for each operation name that is unknown.
        notes: Sentences on missing or doubtful data, and on settings for the next log.
        generated: Whether a log is marked as generated, so that it is not the output of NCCL.
        files: The log files in order. ``Communicator.file`` is an index into this tuple.
        tables: The tables ``nccl_communicators``, ``nccl_rings``, ``nccl_trees``, ``nccl_links``, ``nccl_tuning`` and
            ``nccl_messages``, by name.
        is_nccl: Whether NCCL, or torch about NCCL, printed any line of the logs.
        kinds: The kinds of lines. Each line has exactly one kind. Kinds without a table have examples.
    """

    operations: Operations
    communicators: tuple[Communicator, ...]
    processes: tuple[Process, ...]
    counts: Counts
    unknown_ops: dict[str, int]
    notes: tuple[str, ...]
    generated: bool
    files: tuple[str, ...]
    tables: Mapping[str, pa.Table]
    is_nccl: bool
    kinds: tuple[LineKind, ...]

    @property
    def ops(self) -> pa.Table:
        """The whole table ``nccl_ops`` in memory, in the order of files and lines."""
        return self.operations.table()


def parse_logs(
    paths: Sequence[str | Path] | str | Path,
    progress: Callable[[int], None] | None = None,
    *,
    scratch: str | Path | None = None,
    careful: bool = False,
) -> ParsedLogs:
    """Read NCCL logs of any version, layout and compression.

    Args:
        paths: Files, globs, directories (all files below them), or ``-`` for standard input.
        progress: A function that is called with the number of bytes of each block that was read.
        scratch: An existing directory for rows that do not fit into memory. The default is the directory for temporary
            files.
        careful: Whether to use the line reader for every line, which is many times slower and has the same result.
            Without the compiled scanner, all logs are read this way.

    Raises:
        LogError: A path does not exist or cannot be opened. The content of a log never raises an error, because
            unrecognized lines are counted.
    """
    logs = find_logs([paths] if isinstance(paths, str | Path) else paths)
    return parse_sources([LogSource(path) for path in logs], progress, scratch=scratch, careful=careful)


def parse_sources(
    sources: Sequence[LogSource],
    progress: Callable[[int], None] | None = None,
    *,
    scratch: str | Path | None = None,
    careful: bool = False,
) -> ParsedLogs:
    """Read NCCL logs as :func:`parse_logs` does, from sources instead of paths."""
    reader = _Reader(careful, None if scratch is None else Path(scratch))
    reader.read(sources, progress)
    return reader.result()


class _Tables(Mapping[str, pa.Table]):
    """A mapping of tables by name. A thread may still compute some of the tables."""

    def __init__(self, tables: dict[str, pa.Table | Future[pa.Table]]) -> None:
        self._tables = tables

    def __getitem__(self, name: str) -> pa.Table:
        table = self._tables[name]
        return table.result() if isinstance(table, Future) else table

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)


class _Reader:
    """One parse: blocks go through the scanner into the log state, and the tables are built at the end."""

    def __init__(self, careful: bool, scratch: Path | None) -> None:
        self.files: list[str] = []
        self.careful = careful
        self.assembly = Assembly(scratch)
        self.troubles: list[str] = []
        # The number of lines that replace several similar lines, and the number of the replaced lines.
        self.repeated = (0, 0)
        self.generated = False
        self.bytes = 0
        self.overlong = 0

    def read(self, sources: Sequence[LogSource], progress: Callable[[int], None] | None) -> None:
        """Read all logs in order."""
        read_by: deque[tuple[int, int]] = deque()
        for scan in scan_blocks(self._blocks(sources, read_by), self.careful):
            file, num_bytes = read_by.popleft()
            while file > self.assembly.file:
                self.assembly.begin_file()
            self.assembly.add(scan)
            lines, repetitions = self.repeated
            self.repeated = (lines + len(scan.repeated), repetitions + sum(scan.repeated))
            if progress is not None:
                progress(num_bytes)
        self.files = [source.name for source in sources]
        self.bytes = sum(source.num_bytes for source in sources)
        self.overlong = sum(source.overlong for source in sources)
        self.troubles = [source.trouble for source in sources if source.trouble]

    def _blocks(self, sources: Sequence[LogSource], read_by: deque[tuple[int, int]]) -> Iterator[Block]:
        """Yield the blocks of all logs, and append the log's number and the bytes of each block to ``read_by``."""
        for number, source in enumerate(sources):
            read_so_far, first = 0, True
            for block in source.spans() if source.is_plain() else source.blocks():
                if first:
                    self.generated |= _begins(block, GENERATED_MARK)
                    first = False
                read_by.append((number, source.num_bytes - read_so_far))
                read_so_far = source.num_bytes
                yield block

    def result(self) -> ParsedLogs:
        """Return the result after all logs were read, with families, global ranks and versions."""
        assembly, registry = self.assembly, self.assembly.registry
        registry.apply_torch_lines()
        membership = find_families(registry.communicators)
        worlds = find_global_ranks(registry.communicators, membership)
        versions = _versions(registry.processes, assembly.banners, assembly.census.forms)
        streams = [stream.decode() for stream in assembly.streams]
        operations = Operations(
            assembly.rows,
            OperationTable(self.files, registry.processes, registry.communicators, versions, streams),
        )
        counted = assembly.counts
        counted["ignored"] = counted["lines"] - counted["understood"]
        counts = Counts(
            files=len(self.files),
            bytes=self.bytes,
            unknown_op=sum(assembly.unknown_ops.values()),
            overlong=self.overlong,
            **{name: counted[name] for name in Counts._fields if name not in _COUNTED_ELSEWHERE},
        )
        findings = self._findings(membership, worlds, assembly.hides_types(versions.prints_bytes))
        return ParsedLogs(
            operations,
            tuple(registry.communicators),
            tuple(registry.processes),
            counts,
            dict(assembly.unknown_ops),
            remarks(findings, registry.communicators),
            self.generated,
            tuple(self.files),
            self._tables(operations, versions),
            assembly.has_heads or counted["understood"] > 0,
            assembly.census.kinds(self.files, counted["lines"], self.overlong),
        )

    def _tables(self, operations: Operations, versions: Versions) -> _Tables:
        """Return all tables except ``nccl_ops``.

        A thread attributes the choices of algorithms to operations while the caller writes the other tables.
        """
        assembly, registry = self.assembly, self.assembly.registry
        known = (registry.processes, registry.communicators, self.files)
        communicators = communicators_table(
            registry.communicators, registry.processes, self.files, versions.texts
        )
        tuning = assembly.chronicle.tuning.table(*known)
        choosing = assembly.chronicle.tuning.processes()
        assembly.rows.finish()
        thread = ThreadPoolExecutor(1)
        attributed = thread.submit(attribute_in_windows, tuning, operations.calls(choosing, NEEDED))
        thread.shutdown(wait=False)
        return _Tables(
            {
                "nccl_communicators": communicators,
                **assembly.chronicle.topology.tables(*known),
                "nccl_tuning": attributed,
                "nccl_messages": assembly.chronicle.messages.table(*known),
            }
        )

    def _findings(self, membership: Membership, worlds: tuple[World, ...], types_hidden: bool) -> Findings:
        communicators, counts = self.assembly.registry.communicators, self.assembly.counts
        return Findings(
            operations=counts["coll"] + counts["call"],
            torn=counts["torn"],
            overlong=self.overlong,
            empty=counts["lines"] == 0,
            generated=self.generated,
            without_init=sum(not c.stages and c.rank is None for c in communicators),
            communicators=len(communicators),
            ambiguous=len(membership.ambiguous),
            partial_worlds=tuple(world for world in worlds if world.members < world.nranks),
            types_hidden=types_hidden,
            unknown_ops=dict(self.assembly.unknown_ops),
            troubles=tuple(self.troubles),
            repeated=self.repeated,
        )


def _begins(block: Block, mark: bytes) -> bool:
    if isinstance(block, bytes):
        return block.startswith(mark)
    with block.path.open("rb") as stream:
        return stream.read(len(mark)) == mark


def refuse_taken(out_dir: str | Path, csv: bool = False) -> None:
    """Check that :func:`write` would overwrite no file.

    Raises:
        UsageError: ``out_dir`` is a file, or a file with the name of a table exists already.
    """
    directory = Path(out_dir)
    if directory.exists() and not directory.is_dir():
        raise UsageError(
            f"{directory} is a file; expected a directory for the tables, or a new name, with --out"
        )
    taken = [path.name for path in _targets(directory, csv) if path.exists()]
    if taken:
        raise UsageError(
            f"{directory} already holds {', '.join(taken)}; choose another directory with --out, or overwrite "
            "them with --force"
        )


def write(
    parsed: ParsedLogs, out_dir: str | Path, force: bool = False, csv: bool = False
) -> tuple[Path, ...]:
    """Write ``nccl_ops.parquet`` and one Parquet file for each of ``parsed.tables``, and return the paths.

    Args:
        parsed: The result of :func:`parse_logs`.
        out_dir: The directory, which is created if necessary.
        force: Whether to replace files with the same names.
        csv: Whether to write the tables as CSV too.

    Raises:
        UsageError: One of the files exists already and ``force`` is not set.
        LogError: The directory or a file cannot be written. Nothing was replaced.
    """
    directory = Path(out_dir)
    if not force:
        refuse_taken(directory, csv)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".nccl-") as unfinished:
            _write(parsed, Path(unfinished), csv)
            for path in _targets(directory, csv):
                Path(unfinished, path.name).replace(path)
    except OSError as error:
        raise LogError(f"cannot write the tables to {directory}: {error.strerror or error}") from error
    return tuple(_targets(directory, csv))


def _write(parsed: ParsedLogs, directory: Path, csv: bool) -> None:
    parsed.operations.write(directory / "nccl_ops.parquet")
    for name, table in parsed.tables.items():
        write_parquet(directory / f"{name}.parquet", table)
    if csv:
        parsed.operations.write_csv(directory / "nccl_ops.csv")
        for name, table in parsed.tables.items():
            pa_csv.write_csv(table, directory / f"{name}.csv")


def _targets(directory: Path, csv: bool) -> list[Path]:
    return [
        directory / f"{name}.{kind}"
        for kind in ("parquet", *(["csv"] if csv else []))
        for name in TABLE_NAMES
    ]


def _versions(
    processes: Sequence[Process], banners: dict[int, set[str]], forms_by_file: Mapping[int, set[str]]
) -> Versions:
    """Return the version of NCCL for each process.

    The version is in the banner of the process. Without a banner, it is the only version in the banners of the files of
    the process, or of all files. Otherwise, it is inferred from the forms of the lines. Up to 2.21 only rank 0 prints a
    banner, without a host, so this banner is used for the other processes too.
    """
    everywhere = set().union(*banners.values())
    forms = {file: set(its_forms) for file, its_forms in forms_by_file.items()}
    typed: set[int] = set()
    for process in processes:
        for file in process.files:
            forms.setdefault(file, set()).update(process.forms)
            typed.update({file} if process.typed_bytewise_op_seen else ())
    texts: list[str | None] = []
    hidden: list[bool] = []
    for process in processes:
        nearby = set().union(*(banners.get(file, set()) for file in process.files))
        banner = process.banner
        for seen in (nearby, everywhere):
            if banner is None and len(seen) == 1:
                banner = next(iter(seen))
        possible = candidates(
            set().union(*(forms[file] for file in process.files)), not typed.isdisjoint(process.files)
        )
        texts.append(banner or describe(possible))
        hidden.append(prints_bytes(None if banner is None else parse_version(banner), possible))
    return Versions(texts, hidden)
