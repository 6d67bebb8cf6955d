"""What pages about one run have in common: which run it is, and what is said where it cannot be shown."""

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
    """The page of the run that ``query`` names, the newest by default.

    Args:
        answers: from the name of a run that can be read, the controls beside that of the run, and the body.
    """
    names = runs.names()
    if not names:
        return Drawing([], [messages.no_runs(str(runs.directory))])
    name = next(iter(query.get(address.RUN, ())), names[0])
    choice = controls.run_select(names, name)
    selection = runs.select([name])
    if selection.unknown:
        return Drawing([choice], [messages.unknown_runs(selection.unknown, str(runs.directory))])
    if selection.broken:
        return Drawing([choice], [messages.broken_run(name, selection.broken[name])])
    others, body = answers(name)
    going = runs.is_going([name])
    return Drawing([choice, *others], [*([still_going()] if going else []), *body], follows=going)


def still_going() -> Component:
    """What stands above the page of a run whose processes are at work."""
    return messages.message(
        "This run is still going", "This page follows it: what is shown is what was recorded so far."
    )


def no_records(runs: Runs, name: str) -> Component | None:
    """In the place of what records would show, why a run has none; None where it has some."""
    facts = runs.overview(name)
    if facts["records"]:
        return None
    if facts["summed"]:
        return messages.message(
            "Only sums were kept",
            f"Of the {facts['summed']:,} collectives of this run only sums over each step were kept (--aggregate, or "
            "--max-size was reached), so no single one is known: not when it ran, nor who waited for it. What was sent "
            "is on the pages Overview, Compare and Traffic matrix. To keep each of them:",
            ["commprof run train.py"],
        )
    if runs.is_going([name]):
        return messages.message(
            "No records yet", "The first collective appears here as soon as it is issued."
        )
    if facts["outside"]:
        return messages.message(
            "Nothing was recorded",
            f"All {facts['outside']:,} collectives of this run were issued outside of the steps to be recorded (--steps, "
            "--warmup). Record more of them:",
            ["commprof run train.py"],
        )
    return messages.message(
        "No records",
        "Nothing that this run issued was recorded: it ended before its first collective, or does not use "
        "torch.distributed. What commprof sees on this machine, and what not:",
        ["commprof doctor"],
    )
