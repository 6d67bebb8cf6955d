"""The part of ``commprof align`` for logs of the NCCL Inspector."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from commprof.cli import rendering
from commprof.cli.console import say
from commprof.cli.rendering import Heading, Rows
from commprof.errors import LogError, TraceError, UsageError
from commprof.printable import command_line
from commprof.trace.liveness import recording_process

if TYPE_CHECKING:
    from commprof.align.inspector_matching import InspectedAlignment
    from commprof.imports.inspector_log import InspectorLog
    from commprof.trace.reader import Run

_TITLES: Final = {
    "matched": "matched",
    "missing": "missing",
    "dropped": "dropped",
    "too_small": "too small",
    "extra": "extra",
}
_LEGEND: Final = (
    "matched: a collective of the log with its record. missing: a record whose collective is not in the log. dropped: "
    "missing ones that the inspector says it dropped. too small: below the inspector's least size. extra: a collective of "
    "the log without a record. Messages are not compared."
)


def align_inspector(
    run: Run, logs: Sequence[tuple[Path, InspectorLog]], *, force: bool, as_json: bool
) -> int:
    """Match the collectives of the logs with the records of the run, print the result and store the algorithms.

    Raises:
        UsageError: the run already has algorithms, and ``force`` is not set.
        LogError: the logs contain no collective, or some collectives of the run have no record.
    """
    from commprof.align.inspector_matching import align_inspected
    from commprof.imports.inspector import collectives_of, dropped_collectives, remarks

    if run.table("nccl_algorithms").num_rows and not force:
        raise UsageError(
            f"{run.path} already contains the algorithms of an earlier log; give --force to replace them"
        )
    _check_whole(run)
    operations, notes = collectives_of(logs), remarks(logs)
    if not operations:
        reason = f" ({'; '.join(notes)})" if notes else ""
        raise LogError(
            f"{logs[0][0]} has no collective that can be matched{reason}; record again while the program communicates"
        )
    alignment = align_inspected(
        run.table("collectives"), run.manifest.ranks, operations, dropped_collectives(logs)
    )
    alignment.notes = [*notes, *alignment.notes]
    if as_json:
        rendering.show_json(_facts(alignment))
    else:
        rendering.show(*_parts(alignment))
    _keep(run, alignment)
    return 0


def _keep(run: Run, alignment: InspectedAlignment) -> None:
    """Write the algorithms into the run, unless it is still being recorded."""
    from commprof.trace.tables import table_from_rows, write_table

    recorder = recording_process(run.path)
    if not alignment.algorithms:
        say(
            f"no algorithm is stored in {run.path}: no collective of the logs matches a record, or the logs name no "
            "algorithm (version 4.2 of their format does)"
        )
    elif recorder is not None:
        say(f"{run.path} is being recorded by {recorder}: no algorithm is stored in it yet")
    else:
        try:
            write_table(run.path, "nccl_algorithms", table_from_rows("nccl_algorithms", alignment.algorithms))
        except TraceError as error:
            say(f"the algorithms could not be stored in the run: {error}")
            return
        say(f"{run.path}  stored nccl_algorithms  next: {command_line('report', run.path)}")


def _check_whole(run: Run) -> None:
    """Raise LogError if some collectives of the run have no record.

    In such a run, the nth record of an operation may not be the nth collective.
    """
    health = run.health
    for count, what in (
        (health.lost, "were dropped while recording"),
        (health.unseen, "were not seen by the recorder"),
        (health.summed, "were recorded as sums only"),
        (health.outside, "were issued outside of the recorded steps"),
        (health.torn, "have incomplete records"),
    ):
        if count:
            raise LogError(
                f"{count:,} collectives of {run.path} {what}, so its records cannot be matched by number with a log of the "
                "NCCL Inspector; record the whole run"
            )


def _facts(alignment: InspectedAlignment) -> dict[str, Any]:
    members = [
        each.member._asdict()
        | {
            name: getattr(each, name)
            for name in ("comm_size", "rank", "pg", "group_ranks", "reason", *_TITLES)
        }
        for each in alignment.members
    ]
    return {
        **{state: alignment.total(state) for state in _TITLES},
        "communicators": members,
        "notes": alignment.notes,
    }


def _parts(alignment: InspectedAlignment) -> list[Rows | str]:
    headings = (
        Heading("communicator"),
        Heading("rank", number=True),
        Heading("group"),
        *(Heading(title, number=True) for title in _TITLES.values()),
    )
    cells: list[tuple[str, ...]] = []
    for each in alignment.members:
        group = rendering.text(each.pg) + (f" ({each.group_ranks})" if each.group_ranks else "")
        counts = (rendering.count(getattr(each, state)) for state in _TITLES)
        cells.append((each.member.comm, rendering.text(each.rank), group, *counts))
        if each.reason:
            cells.append((f"  {each.reason}", *[""] * (len(headings) - 1)))
    total = ", ".join(f"{title} {alignment.total(state):,}" for state, title in _TITLES.items())
    notes = [rendering.paragraph(note) for note in alignment.notes]
    return [Rows(headings, cells), total, rendering.paragraph(_LEGEND), *notes]
