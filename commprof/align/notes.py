"""Write remarks about an alignment for the report, above all whether the log is from this run. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from commprof.align.alignment_streams import LineStream, RecordStream, RunProcess
from commprof.align.sequences.count_bounds import Bounds


def notes(
    streams: Mapping[tuple[RunProcess, Any], RecordStream],
    lines: Sequence[LineStream],
    world_size: int | None,
    states: Mapping[str, int],
    unclear: int,
    bounds: Bounds,
) -> tuple[str, ...]:
    """Return sentences about an alignment.

    Args:
        streams: The records by process and group.
        lines: The communicators of the log.
        world_size: The number of ranks of the run, if it is known.
        states: The number of rows of ``matches`` by state.
        unclear: The number of missing records that do not determine the lines they leave.
        bounds: The lower and upper bounds of the numbers of missing and extra lines.
    """
    world = world_size or max((stream.group_size for stream in streams.values()), default=0)
    sentences = _of_backends({stream.backend for stream in streams.values()}, states)
    if streams and lines:
        sentences += _of_jobs({process for process, _ in streams}, lines, world, states)
    elif streams and not states["torn"]:
        sentences.append(
            "The log has no lines of operations: set NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,COLL to make NCCL "
            "print such lines."
        )
    if states["torn"]:
        sentences.append(
            f"{states['torn']} lines are truncated; each may be the line of a record that is counted as missing."
        )
    if states["ambiguous"]:
        sentences.append(
            f"{states['ambiguous']:,} records and lines are ambiguous: they have several equal partners, and the "
            "log does not show which partners were dropped or duplicated. Including the ambiguous rows, "
            f"{bounds.missing} lines are missing and {bounds.extra} are extra."
        )
    if unclear:
        sentences.append(f"{unclear} of the missing records do not show which lines the log should have.")
    return tuple(sentences)


def _of_backends(backends: Collection[str | None], states: Mapping[str, int]) -> list[str]:
    foreign = sorted(str(backend) for backend in set(backends) - {"nccl", None})
    if not foreign:
        return []
    if not states["matched"]:
        return [f"The run used {', '.join(foreign)}: its collectives leave no line in an NCCL log."]
    return [
        f"The run used {', '.join(foreign)}; its collectives do not pass through NCCL: the lines that match come "
        "from a generated log, or "
        "from another run of the same program."
    ]


def _of_jobs(
    processes: Collection[RunProcess], lines: Sequence[LineStream], world: int, states: Mapping[str, int]
) -> list[str]:
    """Return sentences on whether the log can be from this run.

    The evidence is the sizes of its communicators, its process ids, and what matches.
    """
    sentences = []
    largest = max((line.nranks or 0 for line in lines), default=0)
    if largest > world:
        sentences.append(
            f"The log has a communicator of {largest} ranks and the run has {world}: the log is of a larger job."
        )
    if not states["matched"] and states["extra"]:
        sentences.append("Nothing matches: the log is of another run, or of other processes of this one.")
        if 0 < largest < world:
            sentences.append(
                f"Its largest communicator has {largest} rank{'s' * (largest > 1)}; the run has {world}."
            )
        return sentences
    if not {line.process.pid for line in lines} & {process.pid for process in processes}:
        sentences.append(
            "No process of the log has the process id of a rank: the log may be of another run of the same program. "
            "Processes were matched by rank."
        )
    elif states["missing"] > states["matched"] and states["extra"]:
        sentences.append(
            f"More lines are missing ({states['missing']:,}) than match ({states['matched']:,}), and "
            f"{states['extra']:,} "
            "lines are extra: the log may be of another run, or of other processes."
        )
    return sentences
