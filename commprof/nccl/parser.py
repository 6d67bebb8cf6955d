"""NCCL logs as tables: every operation line is one row of ``nccl_ops``, every communicator is named once.

parsed = parse_logs(["logs/"])
parsed.ops            table nccl_ops            parsed.communicators   who is who
parsed.counts         what was read, by kind    parsed.notes           what is missing, and what to set next time
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from commprof.errors import LogError, UsageError
from commprof.nccl import lines as nccl_lines
from commprof.nccl.communicators import (
    Communicator,
    Process,
    Registry,
    communicators_table,
    note_operation_form,
)
from commprof.nccl.heads import KnownHosts
from commprof.nccl.membership import Membership, World, find_families, find_global_ranks
from commprof.nccl.operations import OperationRow, OperationRows, Versions, nccl_ops_table
from commprof.nccl.remarks import Findings, remarks
from commprof.nccl.sources import LogSource, find_logs
from commprof.nccl.versions import BYTE_TYPED_OPS, candidates, describe, parse_version, prints_bytes

GENERATED_MARK = b"# GENERATED"


class Counts(NamedTuple):
    """What the logs held. ``ignored`` counts the lines that say nothing about operations or communicators."""

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
    unknown_op: int
    fragment: int
    overlong: int
    ignored: int


@dataclass(frozen=True, slots=True)
class ParsedLogs:
    """What :func:`parse_logs` returns.

    Attributes:
        ops: table ``nccl_ops``, in the order of files and lines.
        communicators: one entry per use of a communicator address in a process.
        processes: the processes of the logs; ``Communicator.process`` counts them.
        counts: lines by kind.
        unknown_ops: lines by operation name, for names that are in no table.
        notes: sentences: what is missing or doubtful, and what to set next time.
        generated: a log says of itself that it was generated, and is not the output of NCCL.
        files: the log files in order; ``Communicator.file`` counts them.
    """

    ops: pa.Table
    communicators: tuple[Communicator, ...]
    processes: tuple[Process, ...]
    counts: Counts
    unknown_ops: dict[str, int]
    notes: tuple[str, ...]
    generated: bool
    files: tuple[str, ...]


def parse_logs(
    paths: Sequence[str | Path] | str | Path, progress: Callable[[int], None] | None = None
) -> ParsedLogs:
    """Read NCCL logs of any version, layout and compression.

    Args:
        paths: files, globs, directories (all files below them), or ``-`` for standard input.
        progress: called with the number of bytes of each block that was read.

    Raises:
        LogError: a path that does not exist or cannot be opened. Content never raises: what is not understood is
            counted.
    """
    reader = _Reader()
    for path in find_logs([paths] if isinstance(paths, str | Path) else paths):
        reader.read(LogSource(path), progress)
    return reader.result()


class _Reader:
    """The state of one parse: communicators open, rows so far, counts."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.hosts = KnownHosts()
        self.registry = Registry()
        self.rows = OperationRows()
        self.counts: Counter[str] = Counter()
        self.unknown_ops: Counter[str] = Counter()
        self.banners: dict[int, set[str]] = {}
        self.troubles: list[str] = []
        self.generated = False

    def read(self, source: LogSource, progress: Callable[[int], None] | None) -> None:
        """Read one log from its first line to its last."""
        file = len(self.files)
        self.files.append(str(source.path))
        last, read_so_far = 0, 0
        for block in source.blocks():
            if last == 0 and block and block[0].startswith(GENERATED_MARK):
                self.generated = True
            understood = 0
            for number, line in enumerate(block, last + 1):
                # is_relevant(), unrolled: most lines of a log stop here
                if b": o" in line or b"comm 0x" in line or b"NCCL CALL nccl" in line or (
                    b"NCCL version" in line or b" created ncclComm_ " in line
                ):  # fmt: skip
                    found = nccl_lines.read_line(nccl_lines.clean_line(line), self.hosts)
                    understood += bool(found)
                    for message in found:
                        self._add(message, file, number)
            last += len(block)
            self.counts["lines"] += len(block)
            self.counts["ignored"] += len(block) - understood
            if progress is not None:
                progress(source.num_bytes - read_so_far)
                read_so_far = source.num_bytes
        self.counts["bytes"] += source.num_bytes
        self.counts["overlong"] += source.overlong
        if source.trouble:
            self.troubles.append(source.trouble)

    def _add(self, message: nccl_lines.Line, file: int, number: int) -> None:
        match message:
            case nccl_lines.CollLine():
                self._add_coll(message, file, number)
            case nccl_lines.CallLine():
                self._add_call(message, file, number)
            case nccl_lines.TornLine():
                self._add_torn(message, file, number)
            case nccl_lines.InitLine():
                self.counts["init"] += 1
                process = self.registry.process(message.origin, file)
                self.registry.init(process, message, file, number)
            case nccl_lines.EndLine():
                self.counts["end"] += 1
                self.registry.end(self.registry.process(message.origin, file), message)
            case nccl_lines.VersionLine():
                self.counts["banner"] += 1
                self.banners.setdefault(file, set()).add(message.version)
                if message.origin is not None:
                    self.registry.process(message.origin, file).banner = message.version
            case nccl_lines.TorchCommLine():
                self.counts["torch"] += 1
                self.registry.torch_line(message, file)
            case nccl_lines.UnknownOpLine():
                self.unknown_ops[message.name] += 1
            case nccl_lines.FragmentLine():
                self.counts["fragment"] += 1

    def _add_coll(self, line: nccl_lines.CollLine, file: int, number: int) -> None:
        self.counts["coll"] += 1
        process = self.registry.process(line.origin, file)
        communicator = self.registry.operation(process, line.comm, line.nranks, file, number)
        note_operation_form(process, line, line.op in BYTE_TYPED_OPS)
        self.rows.append(
            OperationRow(
                file, number, process.index, communicator.index, line.origin.tid, line.origin.device, line.op,
                "coll", "whole", line.opcount, line.elements, line.datatype, line.reduction, line.root,
                line.stream.decode(), line.global_rank,
            )
        )  # fmt: skip

    def _add_call(self, line: nccl_lines.CallLine, file: int, number: int) -> None:
        self.counts["call"] += 1
        process = self.registry.process(line.origin, file)
        process.forms.add("call")
        communicator = self.registry.operation(process, line.comm, None, file, number)
        self.rows.append(
            OperationRow(
                file, number, process.index, communicator.index, line.origin.tid, None, line.op,
                "call", "whole", None, line.elements, line.datatype, line.reduction, line.root, line.stream.decode(),
            )
        )  # fmt: skip

    def _add_torn(self, line: nccl_lines.TornLine, file: int, number: int) -> None:
        self.counts["torn"] += 1
        process, tid, device = -1, None, None
        if line.origin is not None:
            process = self.registry.process(line.origin, file).index
            tid, device = line.origin.tid, line.origin.device
        self.rows.append(OperationRow(file, number, process, -1, tid, device, line.op, line.kind, "torn"))

    def result(self) -> ParsedLogs:
        """Join what only the whole log can tell."""
        registry = self.registry
        registry.apply_torch_lines()
        membership = find_families(registry.communicators)
        worlds = find_global_ranks(registry.communicators, membership)
        versions = _versions(registry.processes, self.banners)
        ops = nccl_ops_table(
            self.rows.table(), self.files, registry.processes, registry.communicators, versions
        )
        counts = Counts(
            files=len(self.files),
            unknown_op=sum(self.unknown_ops.values()),
            **{name: self.counts[name] for name in Counts._fields if name not in ("files", "unknown_op")},
        )
        findings = self._findings(membership, worlds, _has_hidden_types(ops))
        return ParsedLogs(
            ops,
            tuple(registry.communicators),
            tuple(registry.processes),
            counts,
            dict(self.unknown_ops),
            remarks(findings),
            self.generated,
            tuple(self.files),
        )

    def _findings(self, membership: Membership, worlds: tuple[World, ...], types_hidden: bool) -> Findings:
        communicators = self.registry.communicators
        return Findings(
            operations=self.counts["coll"] + self.counts["call"],
            torn=self.counts["torn"],
            overlong=self.counts["overlong"],
            empty=self.counts["lines"] == 0,
            generated=self.generated,
            without_init=sum(not c.stages and c.rank is None for c in communicators),
            communicators=len(communicators),
            ambiguous=len(membership.ambiguous),
            partial_worlds=tuple(world for world in worlds if world.members < world.nranks),
            types_hidden=types_hidden,
            unknown_ops=dict(self.unknown_ops),
            troubles=tuple(self.troubles),
        )


def write(parsed: ParsedLogs, out_dir: str | Path, force: bool = False) -> tuple[Path, ...]:
    """Write ``nccl_ops.parquet``, ``nccl_ops.csv`` and ``communicators.csv``; returns their paths.

    Raises:
        UsageError: one of them exists already and ``force`` is not set.
        LogError: the directory or a file cannot be written.
    """
    directory = Path(out_dir)
    parquet, ops, communicators = (
        directory / name for name in ("nccl_ops.parquet", "nccl_ops.csv", "communicators.csv")
    )
    taken = [path.name for path in (parquet, ops, communicators) if path.exists()]
    if taken and not force:
        raise UsageError(
            f"{directory} already holds {', '.join(taken)}; choose another directory with --out, or overwrite "
            "them with --force"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        pq.write_table(parsed.ops, parquet, compression="zstd")
        pa_csv.write_csv(parsed.ops, ops)
        pa_csv.write_csv(
            communicators_table(parsed.communicators, parsed.processes, parsed.files), communicators
        )
    except OSError as error:
        raise LogError(f"cannot write the tables to {directory}: {error.strerror or error}") from error
    return (parquet, ops, communicators)


def _has_hidden_types(ops: pa.Table) -> bool:
    bytewise = pc.is_in(ops["op"], value_set=pa.array(sorted(BYTE_TYPED_OPS)))
    hidden = pc.and_(pc.is_null(ops["dtype"]), pc.is_valid(ops["bytes"]))
    return bool(pc.any(pc.and_(bytewise, hidden)).as_py())


def _versions(processes: Sequence[Process], banners: dict[int, set[str]]) -> Versions:
    """The version of each process: its own banner, the only one of its files, of all files, else inferred.

    Up to 2.21 only rank 0 prints a banner, and without a host, so it stands for the other processes of the logs.
    """
    everywhere = set().union(*banners.values())
    forms: dict[int, set[str]] = {}
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
