"""Builds notices, for example for a page that has nothing to draw, or less than was requested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import dash_mantine_components as dmc
from dash import html
from dash.development.base_component import Component

_COLOURS: Final = {"good": "teal", "note": "indigo", "warning": "yellow", "error": "red"}


def message(title: str, text: str, commands: Sequence[str] = (), severity: str = "note") -> Component:
    """Return a notice that states what happened, and what to type or do. ``severity``: see ``_COLOURS``."""
    return _notice(title, [dmc.Text(text, size="sm"), *commands_to_type(commands)], severity)


def sentences(
    title: str, texts: Sequence[str], severity: str = "note", commands: Sequence[str] = ()
) -> Component:
    """Return a notice of several sentences, and the commands to type."""
    listed = html.Ul([html.Li(text) for text in texts], className="sentences")
    return _notice(title, [listed, *commands_to_type(commands)], severity)


def line(chip: str, text: str, severity: str = "note") -> Component:
    """Return one line with a chip that names the state, and a sentence."""
    return html.P(
        [dmc.Badge(chip, color=_COLOURS[severity], variant="light", className="chip"), html.Span(text)],
        className=f"told message message-{severity}",
    )


def commands_to_type(commands: Sequence[str]) -> list[Component]:
    """Return the commands, each on its own line."""
    # A command that is longer than the window scrolls, also by keyboard.
    about = {"aria-label": "Command"}
    return [
        html.Pre(html.Code(command), className="command", tabIndex=0, role="group", **about)
        for command in commands
    ]


def _notice(title: str, children: Sequence[Component], severity: str) -> Component:
    return dmc.Alert(
        children,
        title=title,
        color=_COLOURS[severity],
        variant="light",
        className=f"message message-{severity}",
    )


def no_runs(directory: str) -> Component:
    """Return the notice that there is no run below the directory yet."""
    return message(
        "No runs yet",
        f"There is no recorded run below {directory}. Record one, then reload this page:",
        ["commprof run train.py --config ds.json"],
    )


def unknown_runs(names: Sequence[str], directory: str) -> Component:
    """Return the notice that the address names runs that do not exist."""
    listed = ", ".join(repr(name[:200]) for name in names[:8]) + (", ..." if len(names) > 8 else "")
    return message(
        "No such run" if len(names) == 1 else "No such runs",
        f"There is no run {listed} below {directory}. It may have been moved or deleted. Choose another run above.",
        severity="warning",
    )


def broken_run(name: str, reason: str) -> Component:
    """Return the notice that a run cannot be read."""
    return message(f"{name} cannot be read", reason, severity="error")


def unanswered_page(reason: str) -> Component:
    """Return the notice that the run lacks the data of the page."""
    return message("This page could not be drawn", reason[:1].upper() + reason[1:1000], severity="error")


def broken_page(reason: str) -> Component:
    """Return the notice that the page could not be drawn because of an error."""
    text = f"{reason[:1000]} The log of the server has the details."
    return message("This page could not be drawn", text, severity="error")
