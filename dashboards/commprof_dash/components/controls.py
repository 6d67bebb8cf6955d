"""Builds the controls above a page. Each control sets one key of the page's address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dash_mantine_components as dmc
from dash import html
from dash.development.base_component import Component

from commprof_dash import address, ids
from commprof_dash.measures import MEASURES, Measure


def values_by_key(components: Sequence[Component]) -> dict[str, Any]:
    """Return the values of the controls that are in ``components``, by their key in the address."""
    values: dict[str, Any] = {}
    for component in html.Div(components)._traverse():
        identity = getattr(component, "id", None)
        if isinstance(identity, dict) and identity.get("type") == "control":
            values[identity["key"]] = component.value
    return values


def run_select(names: Sequence[str], value: str | None) -> Component:
    """Return the control that selects one run. A value that is not in ``names`` stays visible, marked as missing."""
    return dmc.Select(
        id=ids.control(address.RUN),
        label="Run",
        data=_options(names, [value] if value else []),
        value=value,
        searchable=True,
        allowDeselect=False,
        nothingFoundMessage="No run with this name",
        className="control-wide",
    )


def runs_select(names: Sequence[str], values: Sequence[str]) -> Component:
    """Return the control that selects any number of runs, collapsed to one line."""
    choice = dmc.MultiSelect(
        id=ids.control(address.RUN),
        label="Runs",
        data=_options(names, values),
        value=list(values),
        searchable=True,
        clearable=True,
        hidePickedOptions=True,
        nothingFoundMessage="No other run with this name",
        placeholder="Add a run",
        className="control-wide",
        classNames={"pillsList": "pills"},
    )
    return html.Details([html.Summary("Choose runs"), choice], className="runs-fold")


def measure_select(measure: Measure, choices: Mapping[str, Measure] = MEASURES) -> Component:
    """Return the control that selects the measure of traffic."""
    names = {one.key: one.name for one in choices.values()}
    return segmented(address.MEASURE, "Measure", names, measure.key)


def segmented(key: str, label: str, choices: Mapping[str, str], value: str) -> Component:
    """Return a control with a few choices. ``choices`` maps values of ``key`` in the address to their labels."""
    heading = f"{key}-label"
    return html.Div(
        [
            html.Div(label, className="control-label", id=heading),
            dmc.SegmentedControl(
                id=ids.control(key),
                data=[{"value": choice, "label": name} for choice, name in choices.items()],
                value=value,
                **{"aria-labelledby": heading},
            ),
        ]
    )


def select(
    key: str,
    label: str,
    choices: Sequence[str],
    value: str,
    disabled: bool = False,
    labels: Mapping[str, str] | None = None,
) -> Component:
    """Return a list that selects one of ``choices`` as the value of ``key`` in the address.

    Args:
        disabled: Whether the list is disabled because it has no effect.
        labels: The texts of the choices whose text differs from their value.
    """
    return dmc.Select(
        id=ids.control(key),
        label=label,
        data=[{"value": choice, "label": (labels or {}).get(choice, choice)[:80]} for choice in choices],
        value=value,
        allowDeselect=False,
        searchable=len(choices) > 12,
        disabled=disabled,
    )


def text(
    key: str, label: str, value: str, placeholder: str, wrong: str | None = None, disabled: bool = False
) -> Component:
    """Return a text field for ``key`` of the address. ``wrong`` is the message about invalid text."""
    return dmc.TextInput(
        id=ids.control(key),
        label=label,
        value=value,
        placeholder=placeholder,
        error=wrong,
        debounce=600,
        disabled=disabled,
    )


def area(key: str, label: str, value: str, placeholder: str) -> Component:
    """Return a text field of several lines for ``key`` of the address."""
    return dmc.Textarea(
        id=ids.control(key),
        label=label,
        value=value,
        placeholder=placeholder,
        autosize=True,
        minRows=2,
        maxRows=16,
        debounce=600,
        classNames={"input": "code-area"},
        spellCheck=False,
    )


def _options(names: Sequence[str], values: Sequence[str]) -> list[dict[str, str]]:
    known = set(names)
    missing = [value for value in values if value not in known]
    return [{"value": name, "label": name} for name in names] + [
        {"value": name, "label": f"{name[:80]} (not found)"} for name in missing
    ]
