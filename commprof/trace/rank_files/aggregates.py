"""Reads the sums that a rank wrote instead of records, as rows of ``aggregates``, and the steps with complete sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from commprof.trace.rank_files.events import Events
from commprof.trace.rank_files.layout import SUM_FIELDS
from commprof.trace.rank_files.steps import StepTable

_IN_MEMORY: Final = 2  # the number of steps whose sums a rank has not written yet


def sums_of(
    events: Events, groups: Mapping[str, Mapping[str, Any]], steps: StepTable
) -> Iterator[dict[str, Any]]:
    """Yield the rows of ``aggregates`` of one rank, without the columns that name the process.

    Malformed lines are skipped. If the group of a row is not known, its ranks and size are None.

    Args:
        events: The events of the rank.
        groups: The process groups of the rank, by name.
        steps: The training steps of the rank.
    """
    for line in events.rows["aggregate"]:
        step, sums = line.get("step"), line.get("sums")
        if not isinstance(step, int) or not isinstance(sums, list):
            continue
        for values in sums:
            if not isinstance(values, list) or len(values) != len(SUM_FIELDS):
                continue
            row = dict(zip(SUM_FIELDS, values, strict=True))
            group = groups.get(str(row["pg"]), {})
            placed, after = steps.place_sum(step, str(row["phase"]))
            yield {
                **row,
                "step": placed,
                "after_step": after,
                "group_ranks": group.get("group_ranks"),
                "group_size": group.get("group_size"),
            }


def step_rows(events: Events, steps: StepTable) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of ``steps``. If the sums of a step are missing, its end is None.

    A rank writes the sums of step n when step n + 2 begins. Until the recording ends, the sums of the last two steps
    are only in memory, so the traffic of these steps is not known.
    """
    is_missing = bool(events.rows["aggregate"] or _sums_only(events)) and events.last("end") is None
    known = len(steps.rows) - (_IN_MEMORY if is_missing else 0)
    for number, row in enumerate(steps.rows):
        yield row if number < known else {**row, "end_ns": None}


def _sums_only(events: Events) -> bool:
    options = (events.last("begin") or {}).get("options")
    return isinstance(options, dict) and options.get("aggregate") is True


def recorded_part(events: Events) -> dict[str, Any]:
    """Return the fields of the manifest entry that describe which part of the run this rank was asked to record.

    ``options`` are the options that differ from the defaults. ``outside`` is the number of collectives that the groups
    of the rank counted outside the steps to record. It is None if the groups do not count, or if all steps were to be
    recorded.
    """
    options = (events.last("begin") or {}).get("options")
    outside = (events.last("outside") or {}).get("collectives")
    return {
        "options": options if isinstance(options, dict) else {},
        "outside": outside if isinstance(outside, int) else None,
    }
