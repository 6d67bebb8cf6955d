"""The tool bar of the timeline: buttons that move it, and fields that name a step, ranks or a record."""

from __future__ import annotations

from typing import Final

from dash import dcc, html
from dash.development.base_component import Component

from commprof.analysis import api
from commprof_dash.pages.timeline.data import View

STEP: Final = "timeline-step"
RANKS: Final = "timeline-ranks"
RECORD: Final = "timeline-record"
BUTTON: Final = "timeline-button"
_BUTTONS: Final = {
    "in": "Zoom in",
    "out": "Zoom out",
    "left": "Earlier",
    "right": "Later",
    "all": "Whole run",
}
_SIGNS: Final = {"in": "+", "out": "\u2212", "left": "\u2190", "right": "\u2192", "all": "Whole run"}


def toolbar(view: View, shown: api.Timeline) -> Component:
    """The buttons and fields for the timeline that shows ``view``."""
    buttons = [
        html.Button(
            _SIGNS[what],
            id={"type": BUTTON, "what": what},
            className="tool",
            title=title,
            type="button",
            **{"aria-label": title},
        )
        for what, title in _BUTTONS.items()
    ]
    return html.Div(
        [
            *buttons,
            html.Label(
                [
                    "Step ",
                    dcc.Input(id=STEP, type="number", min=0, step=1, debounce=True, className="tool-input"),
                ]
            ),
            html.Label(
                [
                    "Ranks ",
                    dcc.Input(
                        id=RANKS,
                        type="text",
                        debounce=True,
                        value=view.ranks,
                        placeholder=_ranks_text(shown.run_ranks),
                        className="tool-input",
                    ),
                ]
            ),
            html.Label(
                [
                    "Record ",
                    dcc.Input(
                        id=RECORD,
                        type="text",
                        debounce=True,
                        value=view.stored()["record"],
                        placeholder="its key",
                        className="tool-input",
                    ),
                ]
            ),
        ],
        className="toolbar",
        role="group",
        **{"aria-label": "Move the timeline"},
    )


def _ranks_text(ranks: tuple[int, ...]) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else ", ".join(map(str, ranks))
