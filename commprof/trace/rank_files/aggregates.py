"""Reads the sums that a rank wrote instead of records: the rows of ``aggregates``, and which steps were recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from commprof.trace.rank_files.events import Events
from commprof.trace.rank_files.layout import SUM_FIELDS
from commprof.trace.rank_files.steps import StepTable

_IN_MEMORY: Final = 2  # steps whose sums a rank has not written yet


def sums_of(
    events: Events, groups: Mapping[str, Mapping[str, Any]], steps: StepTable
) -> Iterator[dict[str, Any]]:
    """The rows of the table, without the rank; a malformed line gives none. A row of an unknown group has no size.

    Args:
        events: of one rank.
        groups: its process groups, by name.
        steps: its training steps.
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
    """The rows of ``steps``, without the end of those whose sums are missing.

    A rank writes the sums of a step when the next but one begins. Until it has ended its recording, those of its last two
    steps are in its memory only, so what these steps sent is not known.
    """
    is_missing = bool(events.rows["aggregate"] or _sums_only(events)) and events.last("end") is None
    known = len(steps.rows) - (_IN_MEMORY if is_missing else 0)
    for number, row in enumerate(steps.rows):
        yield row if number < known else {**row, "end_ns": None}


def _sums_only(events: Events) -> bool:
    options = (events.last("begin") or {}).get("options")
    return isinstance(options, dict) and options.get("aggregate") is True


def recorded_part(events: Events) -> dict[str, Any]:
    """What of the run this rank was asked to record, for its entry in the manifest.

    ``options``: those that were not the defaults. ``outside``: collectives that its groups counted outside the steps to
    record; None where they do not count, or all steps were to be recorded.
    """
    options = (events.last("begin") or {}).get("options")
    outside = (events.last("outside") or {}).get("collectives")
    return {
        "options": options if isinstance(options, dict) else {},
        "outside": outside if isinstance(outside, int) else None,
    }
