"""Align the records of a run with the lines of an NCCL log: which match, which have no partner, and why.

First, communicators are paired with process groups (:mod:`commprof.align.pairing`). Then the lines of one
process and group are aligned with the lines that its records should leave
(:mod:`commprof.align.expected_lines`), by order, operation, bytes and root. A dropped or additional line is
reported as such and does not shift other lines. If several records or lines match equally well, all of them
are ambiguous. opCount is not used, because it is not a sequence number in any version.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.alignment_streams import (
    RunProcess,
    Vocabulary,
    line_streams,
    record_streams,
    torn_rows,
)
from commprof.align.communicator_matches import comm_matches
from commprof.align.divergence import Divergence
from commprof.align.group_alignment import GroupAlignment
from commprof.align.match_rows import STATES, TORN, TORN_LINE, MatchRows
from commprof.align.notes import notes
from commprof.align.pairing import pair_communicators
from commprof.align.process_matching import distrust_small_worlds, pair_processes
from commprof.align.ranks.collectives import has_raised
from commprof.align.sequences.count_bounds import Bounds, bounds_of
from commprof.errors import LogError
from commprof.printable import command_line

LOGS: Final = "nccl"


class RecordedRun(Protocol):
    """The parts of a run that an alignment reads."""

    @property
    def path(self) -> Path:
        """The directory of the run."""

    @property
    def manifest(self) -> Any:
        """The manifest, with ``world_size`` and ``ranks``.

        ``ranks`` has one mapping per rank file, with rank, attempt, pid and host.
        """

    def table(self, name: str) -> pa.Table:
        """Return a table of the schema, by name."""


@dataclass(frozen=True, slots=True)
class MatchReport:
    """The result of an alignment.

    Counts are rows of ``matches``. A record that leaves several lines has a row for each line.

    Attributes:
        matches: The table ``matches``: every expected line of a record and every line once. A COLL line and
            its CALL line count as one line.
        comm_matches: The table ``comm_matches``: the results by communicator, in the order of the log.
            Records of a group without a communicator are only in ``matches``.
        matched, missing, extra, ambiguous, torn: The number of rows of ``matches`` by state.
        bounds: The lower and upper bounds of the numbers of missing and extra lines. They differ because
            ambiguous lines may be missing or extra.
        unclear: The number of records, counted in ``missing``, that do not determine the lines they leave.
        divergences: For each rank and group whose records and lines differ, the first place where they
            differ.
        notes: Remarks for the report.
    """

    matches: pa.Table
    comm_matches: pa.Table
    matched: int
    missing: int
    extra: int
    ambiguous: int
    torn: int
    unclear: int
    bounds: Bounds
    divergences: tuple[Divergence, ...]
    notes: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        """The number of rows of ``matches`` by state."""
        return {state: getattr(self, state) for state in STATES}


def align(
    run: RecordedRun, ops: pa.Table, communicators: pa.Table | None = None, *, generated: bool = False
) -> MatchReport:
    """Align the records of ``run`` with the operation lines of its NCCL logs.

    Args:
        run: A run, as ``commprof.trace.reader.open_run`` returns it.
        ops: The table ``nccl_ops`` of :func:`commprof.nccl.parser.parse_logs`.
        communicators: The table ``nccl_communicators`` of the same function, with the group that torch
            printed for each address.
        generated: Whether the log is marked as generated.
    """
    collectives = run.table("collectives")
    # A call that raised has no line, because NCCL checks a call before it prints the call.
    collectives = collectives.filter(pc.invert(has_raised(collectives)))
    vocabulary = Vocabulary()
    streams = record_streams(collectives, vocabulary)
    lines = line_streams(ops, vocabulary, communicators)
    distrust_small_worlds(lines, streams.values(), run.manifest.world_size)
    processes = pair_processes(lines, {process for process, _ in streams}, _hosts(run.manifest.ranks))
    pairing = pair_communicators(lines, streams, processes, vocabulary)
    rows = MatchRows(collectives, ops)
    alignment = GroupAlignment(streams, lines, pairing, vocabulary, rows, ops)
    alignment.run()
    torn = torn_rows(ops)
    rows.add_lines(TORN, torn, TORN_LINE)
    matches = rows.table()
    of_comms = comm_matches(lines, pairing, alignment.outcomes, ops, torn, generated)
    bounds = bounds_of(matches, of_comms)
    states = Counter({row["values"]: row["counts"] for row in matches["state"].value_counts().to_pylist()})
    return MatchReport(
        matches,
        of_comms,
        **{state: states[state] for state in STATES},
        unclear=alignment.unclear,
        bounds=bounds,
        divergences=tuple(alignment.divergences),
        notes=notes(streams, lines, run.manifest.world_size, states, alignment.unclear, bounds),
    )


def align_run(run: RecordedRun) -> MatchReport:
    """Align a run with the logs in its directory ``nccl``.

    Raises:
        LogError: There are no logs.
    """
    from commprof.nccl.parser import parse_logs

    parsed = parse_logs([logs_of(run.path)])
    communicators = getattr(parsed, "tables", {}).get("nccl_communicators")
    return align(run, parsed.ops, communicators, generated=parsed.generated)


def logs_of(path: Path) -> Path:
    """Return the directory with the NCCL logs of the run at ``path``.

    Raises:
        LogError: The run has no NCCL logs.
    """
    logs = path / LOGS
    if not logs.is_dir() or not any(entry.is_file() for entry in logs.rglob("*")):
        raise LogError(
            f"{path} holds no NCCL logs (in {LOGS}/): the run was not on NCCL, or was recorded with --nccl-log off. "
            f"Name the logs: {command_line('align', path, 'LOG...')}"
        )
    return logs


def _hosts(ranks: Any) -> dict[RunProcess, str]:
    """Return the host of each process for which the manifest contains a host."""
    return {
        RunProcess(entry["rank"], entry["attempt"], entry["pid"]): entry["host"]
        for entry in ranks
        if entry.get("host") and {"rank", "attempt", "pid"} <= set(entry)
    }
