"""What pages about one run have in common: which run it is, and what is said where it cannot be shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from dash.development.base_component import Component

from commprof_dash import address
from commprof_dash.address import Query
from commprof_dash.components import controls, messages
from commprof_dash.data import Runs
from commprof_dash.pages.page import Drawing

_GOING: Final = "This run is still going"


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
    note = [messages.message(_GOING, "This page follows it: what is shown is what was recorded so far.")]
    return Drawing([choice, *others], [*(note if going else []), *body], follows=going)
