"""Provides common parts of the pages about one run: the choice of the run, and notices about runs without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dash.development.base_component import Component

from commprof_dash import address
from commprof_dash.address import Query
from commprof_dash.components import controls, messages
from commprof_dash.data import Runs
from commprof_dash.pages.page import Drawing


def draw_run(
    runs: Runs,
    query: Query,
    answers: Callable[[str], tuple[Sequence[Component], Sequence[Component]]],
) -> Drawing:
    """Return the page of the run that ``query`` names, or else of the ticked run, or else of the newest run.

    Args:
        answers: Maps the name of a readable run to the controls besides the choice of the run, and to the body.
    """
    names = runs.names()
    if not names:
        return Drawing([], [messages.no_runs(str(runs.directory))], follows=True)
    name = next(iter(address.runs_in(query)), names[0])
    choice = controls.run_select(names, name)
    selection = runs.select([name])
    if selection.unknown:
        return Drawing([choice], [messages.unknown_runs(selection.unknown, str(runs.directory))], run=name)
    if selection.broken:
        return Drawing([choice], [messages.broken_run(name, selection.broken[name])], run=name)
    others, body = answers(name)
    going = runs.is_going([name])
    return Drawing([choice, *others], [*([still_going()] if going else []), *body], follows=going, run=name)


def still_going() -> Component:
    """Return the notice above the page of a run that is still being recorded."""
    return messages.message(
        "This run is still being recorded", "The page refreshes by itself and shows the records so far."
    )


def no_records(runs: Runs, name: str) -> Component | None:
    """Return the reason why a run has no records; None if it has records."""
    health = runs.health(name)
    if health.records:
        return None
    if health.summed:
        return messages.message(
            "Only sums were recorded",
            f"This run recorded only sums per step of its {health.summed:,} collectives (--aggregate, or "
            "--max-size was reached). So the time of a single collective and its waits are not known. The pages "
            "Overview, Compare and Traffic matrix show the traffic. To record each collective:",
            ["commprof run train.py"],
        )
    if runs.is_going([name]):
        return messages.message(
            "No records yet", "The first collective appears here as soon as it is issued."
        )
    if health.outside:
        return messages.message(
            "Nothing was recorded",
            f"All {health.outside:,} collectives of this run were issued outside of the recorded steps (--steps, "
            "--warmup). Record more steps:",
            ["commprof run train.py"],
        )
    return messages.message(
        "No records",
        "This run has no records: it ended before its first collective, or does not use "
        "torch.distributed. To see what commprof can record on this machine:",
        ["commprof doctor"],
    )
