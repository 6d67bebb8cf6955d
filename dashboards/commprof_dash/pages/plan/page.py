"""The page Plan: the traffic and memory of a config before it runs, by setting and over the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import dash_mantine_components as dmc
from dash import html
from dash.development.base_component import Component

from commprof.errors import CommprofError
from commprof.plan.api import Row
from commprof_dash import address, ids
from commprof_dash.address import Query
from commprof_dash.components import cards, controls, messages
from commprof_dash.data import Runs, reason
from commprof_dash.pages.page import Drawing, Page
from commprof_dash.pages.plan import cards as plan_cards
from commprof_dash.pages.plan import data as plan_data
from commprof_dash.theme import Scheme

_SETTING: Final = "setting"
_FIELDS: Final = {  # the label and the placeholder of each field
    "model": ("Model", "params:7e9"),
    "world": ("Ranks", "64"),
    "hosts": ("Hosts x ranks", "hosts of 8"),
    "micro_batch": ("Micro-batch", "of the config"),
    "layers": ("Layers", "typical of the size"),
    "sequence": ("Sequence length", "2048"),
    "links": ("Links", "intra=450GB/s,inter=8x50GB/s"),
    "compute": ("Computation of a step", "900ms"),
    "memory": ("Memory of a device", "80GiB"),
}
_EXPERTS: Final = {  # fields with several values compare these values
    "experts": ("Experts of a layer", "none"),
    "ep_size": ("Ranks that share them", "1"),
    "expert_k": ("Experts of a token", "1"),
    "capacity_factor": ("Capacity factor", "1"),
    "min_capacity": ("Least capacity", "4"),
    "drop_tokens": ("Drop tokens", "true"),
    "expert_layers": ("Layers with experts", "all"),
    "expert_skew": ("Load of the fullest expert", "1: balanced"),
}
_WIDE: Final = ("links",)


def render(runs: Runs, query: Query, scheme: Scheme) -> Drawing:
    """Return the form and its answer. An invalid value of a field becomes a one-line message."""
    form = plan_data.form_of(runs, query)
    selection = runs.select([form.run] if form.run else [])
    if selection.unknown:
        notice = messages.unknown_runs(selection.unknown, str(runs.directory))
        return Drawing(_controls(runs, form, []), [notice])
    if selection.broken:
        return Drawing(_controls(runs, form, []), [messages.broken_run(form.run, selection.broken[form.run])])
    try:
        answer = plan_data.planned(runs, form)
    except CommprofError as error:
        notice = messages.message("This cannot be planned", _first_upper(reason(error)), severity="error")
        return Drawing(_controls(runs, form, []), [notice])
    row = plan_data.shown_row(answer, form.setting)
    return Drawing(
        _controls(runs, form, [each.label for each in answer.rows], plan_data.shown_row(answer, "").label),
        _answer(answer, row, plan_data.command(runs, form), scheme),
    )


def _answer(answer: plan_data.Planned, row: Row, command: str, scheme: Scheme) -> list[Component]:
    world, capacity = answer.plan.job.world, answer.plan.capacity
    over, sent = plan_data.curves(answer, row), plan_data.messages(answer, row)
    figures = [
        plan_cards.traffic(over, row.label, world, scheme),
        plan_cards.memory(over, row.label, world, capacity, scheme),
        plan_cards.times(over, row.label, world, answer.plan.timing.recorded is not None, scheme),
        plan_cards.sizes(sent.sizes, row.label, world, scheme),
    ]
    return [
        plan_cards.advice(answer, row, command),
        plan_cards.settings(plan_data.settings_frame(answer)),
        cards.columns([figure for figure in figures if figure is not None]),
        plan_cards.sent(sent.sent, row.label, world),
    ]


def _controls(runs: Runs, form: plan_data.Form, labels: list[str], recommended: str = "") -> list[Component]:
    """Return the form. With several ``labels`` of settings, it includes the choice of the setting in the figures."""
    names = list(plan_data.runs_with_configs(runs))
    config = (
        [_choice(address.RUN, "Config of a run", names, form.run, "none: the text below", "(no config)")]
        if names or form.run
        else []
    )
    # The text of the config would be ignored if a run with a config is selected.
    if not form.run:
        config.append(
            controls.area("config", "Config (JSON, as DeepSpeed reads it)", form.texts["config"], "{ }")
        )
    config.append(
        controls.area(
            "set",
            "Settings to compare (KEY=V1,V2, one key a line)",
            form.texts["set"],
            "zero_optimization.stage=1,2,3",
        )
    )
    texts = form.texts
    config += [
        _titled(
            "calibration",
            _choice(
                "calibration",
                "Times of a calibration",
                plan_data.calibrations(runs),
                texts["calibration"],
                "none: NCCL's model at the rates of the links",
            ),
        ),
        _titled(
            "recorded",
            _choice(
                "recorded",
                "Computation and overlap of a run",
                runs.names(),
                texts["recorded"],
                'none: "Computation of a step"',
            ),
        ),
    ]
    fields = {
        **{
            key: controls.text(key, label, texts[key], placeholder)
            for key, (label, placeholder) in _FIELDS.items()
        },
        "framework": _one_of("framework", "Messages of", plan_data.FRAMEWORKS, texts),
        "backend": _one_of("backend", "Backend", plan_data.BACKENDS, texts),
    }
    shown = [_titled(key, field) for key, field in fields.items()]
    experts = [
        _titled(key, controls.text(key, label, texts[key], placeholder))
        for key, (label, placeholder) in _EXPERTS.items()
    ]
    # Most models have no experts: the fields are folded until one of them is used.
    shown.append(
        html.Details(
            [html.Summary("Experts (MoE)"), html.Div(experts, className="plan-fields")],
            className="plan-wide card-table",
            open=any(texts[key] for key in _EXPERTS),
        )
    )
    if len(labels) > 1:
        shown.append(html.Div(_setting_choice(labels, form.setting, recommended), className="plan-wide"))
    return [
        html.Div(
            [html.Div(config, className="plan-config"), html.Div(shown, className="plan-fields")],
            className="plan-form",
        )
    ]


def _titled(key: str, field: Component) -> Component:
    """Return ``field`` with the help of its option as a tooltip."""
    return html.Div(field, className="plan-wide" if key in _WIDE else "", title=plan_data.help_of(key))


def _one_of(key: str, label: str, choices: Mapping[str, str], texts: Mapping[str, str]) -> Component:
    value = texts[key] or plan_data.DEFAULTS[key]
    listed = choices if value in choices else {**choices, value: f"{value[:80]} (unknown)"}
    return dmc.Select(
        id=ids.control(key),
        label=label,
        data=[{"value": choice, "label": name} for choice, name in listed.items()],
        value=value,
        allowDeselect=False,
    )


def _choice(
    key: str, label: str, names: list[str], value: str, placeholder: str, missing: str = "(not found)"
) -> Component:
    """Return a control that selects one of ``names`` or none. A value that is not in ``names`` stays visible."""
    listed = [{"value": name, "label": name} for name in names]
    if value and value not in names:
        listed.append({"value": value, "label": f"{value[:80]} {missing}"})
    return dmc.Select(
        id=ids.control(key),
        label=label,
        data=listed,
        value=value or None,
        searchable=True,
        clearable=True,
        placeholder=placeholder,
        nothingFoundMessage="Nothing with this name",
    )


def _setting_choice(labels: list[str], chosen: str, recommended: str) -> Component:
    """Return the control that selects the setting in the figures.

    By default, it is the recommended setting of each answer.
    """
    return dmc.Select(
        id=ids.control(_SETTING),
        label="Setting in the figures",
        data=[{"value": label, "label": label[:80]} for label in labels],
        value=chosen if chosen in labels else None,
        clearable=True,
        searchable=len(labels) > 12,
        placeholder=f"recommended: {recommended}",
    )


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:1000]


PAGE: Final = Page(
    "/plan",
    "Plan",
    "What would a config send and hold on 1 to 16,384 ranks, before it runs?",
    order=40,
    render=render,
    has_charts=False,
)
