"""Exports runs as one offline HTML file: facts, the ledger, the figures of the dashboard, and their numbers.

The figures are drawn by ``commprof_dash.charts``. The package ``commprof_dash`` is imported lazily. The file includes
plotly.js.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pandas as pd

from commprof.analysis import api
from commprof.analysis.api import AnyRun, Run
from commprof.errors import CommprofError
from commprof.export.export_tables import opened_runs, with_resources
from commprof.export.files import ExportedFile, Progress, staged
from commprof.version import __version__

REPORT: Final = "report.html"
_MOST_ROWS: Final = 200

_STYLE: Final = """
:root { color-scheme: light; }
body { font: 15px/1.5 -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; color: #212529; margin: 0 auto;
  max-width: 1100px; padding: 24px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 20px; margin: 36px 0 8px; }
h3 { font-size: 16px; margin: 24px 0 4px; }
p, li { max-width: 90ch; } .muted { color: #5c636a; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; } dt { color: #5c636a; }
dd { margin: 0; overflow-wrap: anywhere; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13.5px; }
th, td { text-align: left; padding: 3px 12px 3px 0; border-bottom: 1px solid #e5e8eb; } .number { text-align: right; }
summary { cursor: pointer; color: #5c636a; } .note { border-left: 4px solid #e8a400; padding-left: 12px; }
@media print { details { display: none; } }
"""


def export_html(
    run: AnyRun | Sequence[AnyRun],
    out: Path | str,
    force: bool = False,
    progress: Progress | None = None,
    to_set: Sequence[str] = (),
) -> list[ExportedFile]:
    """Write ``report.html`` into ``out``, with a table of contents and advice on settings.

    The report of several runs begins with their comparison.

    Args:
        run: The run or runs, or their paths.
        out: The directory to write to.
        force: Whether to write into a directory that is not empty.
        progress: A function that is called with the name of the file before the file is written.
        to_set: Sentences with advice on the settings of a single run. For several runs the advice follows from the
            comparison.

    Raises:
        UsageError: ``out`` is not a directory, or is not empty and ``force`` is off.
        TraceError: A run cannot be read, or ``out`` cannot be written to.
    """
    runs = opened_runs(run)
    with staged(Path(out), [REPORT], force, progress) as staging:
        staging.write_text(REPORT, "".join(_document(runs, to_set)))
    return staging.files


def _document(runs: Sequence[Run], to_set: Sequence[str]) -> Iterator[str]:
    from plotly.offline import get_plotlyjs

    names = api.run_names(runs)
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs compared"
    yield f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)} - commprof</title>\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    yield f"<style>{_STYLE}</style>\n<script>{get_plotlyjs()}</script></head>\n<body>\n<h1>{_text(title)}</h1>\n"
    yield f'<p class="muted">Made by commprof {__version__}. payload: S of nccl-tests. '
    yield "wire: modelled bytes that a rank sends. Per step: the mean over all ranks of the job. For a whole run: "
    yield "the mean over the ranks of each group, summed over its collectives, plus the bytes of each message.</p>\n"
    first = _comparison(runs) if len(runs) > 1 else _advice(to_set)
    of_runs = (
        _run(run, name, f"run-{place}") for place, (run, name) in enumerate(zip(runs, names, strict=True), 1)
    )
    body = "".join([*first, *(text for parts in of_runs for text in parts)])
    yield _contents(body, "h2" if len(runs) > 1 else "h[23]")
    yield body
    yield "</body></html>\n"


def _contents(body: str, headings: str) -> str:
    """Return the table of contents: links to the headings of ``body``.

    Args:
        body: The body of the document as HTML.
        headings: A regular expression for the tags of the headings, for example ``h[23]``.
    """
    sections = re.findall(rf'<{headings} id="([^"]*)">(.*?)</', body)
    links = "".join(f'<li><a href="#{anchor}">{title}</a></li>' for anchor, title in sections)
    return f'<nav aria-label="Contents"><h2>Contents</h2><ul>{links}</ul></nav>\n'


def _advice(sentences: Sequence[str]) -> Iterator[str]:
    if sentences:
        yield '<h2 id="advice">What to set</h2>\n<p>Predicted from this run, not measured.</p>\n'
        yield f"<ul>{''.join(f'<li>{_text(sentence)}</li>' for sentence in sentences)}</ul>\n"


def _comparison(runs: Sequence[Run]) -> Iterator[str]:
    from commprof_dash import traffic_frames
    from commprof_dash.charts import time_charts, traffic
    from commprof_dash.charts.series import with_series
    from commprof_dash.measures import WIRE

    both = traffic_frames.compared(list(runs))
    labels = [str(label) for label in both.settings["label"]]
    answer, *reasons = both.advice.sentences
    yield f'<h2 id="advice">What to set</h2>\n<p><strong>{_text(answer)}</strong></p>\n'
    yield f"<ul>{''.join(f'<li>{_text(reason)}</li>' for reason in reasons)}</ul>\n" if reasons else ""
    yield '<h2 id="comparison">Comparison</h2>\n'
    frame = with_series(both.traffic)
    if len(frame):
        yield from _figure(
            "comparison",
            "Traffic of a step by setting",
            traffic.by_setting(frame, labels, WIRE, "light"),
            frame,
        )
    if both.settings["step_time_ns"].notna().any():
        columns = [
            "label",
            "step_time_ns",
            "step_time_low_ns",
            "step_time_high_ns",
            "interval_over",
            "repeats",
        ]
        yield from _figure(
            "comparison",
            "Step time",
            time_charts.by_setting(both.settings[columns], "light"),
            both.settings[columns],
        )
    yield _table(with_resources(both))


def _run(run: Run, name: str, anchor: str) -> Iterator[str]:
    from commprof_dash import traffic_frames
    from commprof_dash.charts import expert_charts, exposure_chart, time_charts, traffic
    from commprof_dash.measures import WIRE

    facts = api.overview(run)
    yield f'<h2 id="{anchor}">{_text(name)}</h2>\n'
    yield _facts(facts)
    if facts["notes"]:
        items = "".join(f"<li>{_text(note)}</li>" for note in facts["notes"])
        yield f'<div class="note"><h3>What is missing</h3><ul>{items}</ul></div>\n'
    if trainings := api.several_trainings(run):
        yield f'<p class="note">{_text(trainings)}.</p>\n'
    yield from _verdict(run, anchor)
    by_step = traffic_frames.by_step(run)
    if len(by_step):
        yield from _figure(
            anchor, "Traffic per step, by operation", traffic.by_step(by_step, WIRE, "light"), by_step
        )
    by_purpose = traffic_frames.by_purpose(run)
    if len(by_purpose):
        yield from _figure(
            anchor, "Traffic by purpose", traffic.by_purpose(by_purpose, WIRE, "light"), by_purpose
        )
    # A restarted run may have a step several times. Only the last time counts.
    steps = api.step_times(run).drop_duplicates("step", keep="last")
    if steps["duration_ns"].notna().any():
        yield from _figure(
            anchor, "Step time and exposed communication", time_charts.over_steps(steps, "light"), steps
        )
    exposed = api.exposure_per_step(run)
    if exposed["exposed_low_ns"].notna().any():
        title = "Exposed and overlapped time of a training step"
        yield from _figure(anchor, title, exposure_chart.by_purpose(exposed, "light"), exposed)
    experts = api.expert_imbalance(run)
    if len(experts):
        title = "Imbalance of experts by layer"
        yield from _figure(anchor, title, expert_charts.by_layer(experts, "light"), experts)


def _verdict(run: Run, anchor: str) -> Iterator[str]:
    try:
        verdict = api.verify(run)
    except CommprofError as error:
        yield f'<p class="muted">The ledger is not known: {_text(error)}</p>\n'
        return
    sentences = "".join(f"<li>{_text(sentence)}</li>" for sentence in verdict.sentences)
    yield f'<h3 id="{anchor}-ledger">Ledger: {_text(verdict.state)}</h3><ul>{sentences}</ul>\n'


def _facts(facts: dict[str, Any]) -> str:
    shown = {
        "Command": " ".join(map(str, facts["command"] or ())) or "not known",
        "State": facts["state"],
        "Ranks": facts["ranks_recorded"],
        "Backends": facts["backends"] or "-",
        "Steps": facts["steps"],
        "Median step time": api.format_ns(facts["step_time_ns"])
        if facts["step_time_ns"] is not None
        else "-",
        "Requested to reduce gradients": facts["requested_op"] or f"not known: {facts['requested_reason']}",
        "Wire bytes, whole run": api.format_bytes(facts["wire_bytes"]) + ", as issued"
        if facts["executed_wire_bytes"] is None
        else api.format_bytes(facts["executed_wire_bytes"]),
        "Records": f"{facts['records']:,}, {facts['lost']:,} dropped, {facts['unseen']:,} unseen",
        "torch": facts["torch"] or "-",
    }
    pairs = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in shown.items())
    return f"<dl>{pairs}</dl>\n"


def _figure(section: str, title: str, figure: Any, frame: pd.DataFrame) -> Iterator[str]:
    from commprof_dash.components.graph import GRAPH_CONFIG

    figure.update_layout(
        showlegend=len(figure.data) > 1, legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
    )
    drawn = figure.to_html(full_html=False, include_plotlyjs=False, config=GRAPH_CONFIG)
    label = f"{_text(title)}; the table below holds the same numbers"
    anchor = f"{section}-{title.lower().replace(' ', '-').replace(',', '')}"
    yield f'<h3 id="{anchor}">{_text(title)}</h3>\n<div role="img" aria-label="{label}">{drawn}</div>\n'
    yield f"<details><summary>Table ({len(frame):,} rows)</summary>{_table(frame)}</details>\n"


def _table(frame: pd.DataFrame) -> str:
    numeric = [pd.api.types.is_numeric_dtype(frame[name]) for name in frame.columns]
    kinds = [' class="number"' if number else "" for number in numeric]
    head = "".join(
        f'<th scope="col"{kind}>{_text(name)}</th>' for name, kind in zip(frame.columns, kinds, strict=True)
    )
    rows = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{_cell(value)}</td>" for value, kind in zip(row, kinds, strict=True))
        + "</tr>"
        for row in frame.head(_MOST_ROWS).itertuples(index=False)
    )
    cut = (
        f'<p class="muted">The first {_MOST_ROWS} of {len(frame):,} rows.</p>'
        if len(frame) > _MOST_ROWS
        else ""
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>{cut}\n'


def _cell(value: Any) -> str:
    if value is None or (not isinstance(value, str | list | tuple) and pd.isna(value)):
        return "-"
    return _text(f"{value:,.6g}" if isinstance(value, float) else value)


def _text(value: Any) -> str:
    """Return ``value`` as text that is escaped for HTML."""
    return html.escape(str(value), quote=True)
