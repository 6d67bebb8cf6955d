"""The page Alignment: records and NCCL lines, divergences, groups of communicators, and NCCL's rings and trees."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, Final

import pandas as pd
from dash import dcc, html
from dash.development.base_component import Component

from commprof.analysis import api
from commprof_dash import address
from commprof_dash.address import Query
from commprof_dash.charts import alignment_chart, topology_chart
from commprof_dash.components import cards, controls, messages
from commprof_dash.components.tables import Cell, Field
from commprof_dash.data import Runs
from commprof_dash.measures import format_count
from commprof_dash.pages.one_run import draw_run, no_records
from commprof_dash.pages.page import Drawing, Page
from commprof_dash.pages.timeline.data import RECORD, record_of
from commprof_dash.theme import Scheme

PATH: Final = "/alignment"
RANK: Final = "rank"
GROUP: Final = "group"
STATE: Final = "state"
AT: Final = "at"
CHANNEL: Final = "channel"
COMMUNICATOR: Final = "communicator"
ALL: Final = "all"

_SHOWN: Final = 40  # the number of rows that are shown at a time
_BEFORE: Final = 3  # the number of pairs that are shown before a divergence
_TABLE_ROWS: Final = 500


def render(runs: Runs, query: Query, scheme: Scheme) -> Drawing:
    """Return the page for the run, rank, group, state, place and communicator in ``query``."""

    def answers(name: str) -> tuple[Sequence[Component], Sequence[Component]]:
        summary: api.AlignmentSummary = runs.of_run("alignment", name, api.alignment_summary)
        edges: pd.DataFrame = runs.of_run("topology", name, api.topology)
        if summary.counts.empty:
            return _unaligned(runs, name, edges, query, scheme)
        placed = _with_place_of_record(query, runs, name)
        ranks = [_word(rank) for rank in summary.counts["rank"].drop_duplicates()]
        first = summary.divergences.iloc[0] if len(summary.divergences) else None
        rank = address.one(placed, RANK, ranks, ranks[0] if first is None else _word(first["rank"]))
        of_rank = summary.counts[_words(summary.counts["rank"]) == rank]
        groups = [_word(group) for group in of_rank["pg"].drop_duplicates()]
        default = groups[0] if first is None or _word(first["pg"]) not in groups else _word(first["pg"])
        group = address.one(placed, GROUP, groups, default)
        state = address.one(placed, STATE, alignment_chart.STATES, ALL)
        of_group = of_rank[_words(of_rank["pg"]) == group].iloc[0]
        at = _position(placed, summary.divergences, state, rank, group)
        window = runs.of_run(
            f"alignment {rank} {group} {state} {at}",
            name,
            lambda path: api.alignment_window(
                path,
                None if pd.isna(of_group["rank"]) else int(of_group["rank"]),
                None if pd.isna(of_group["pg"]) else str(of_group["pg"]),
                None if state == ALL else state,
                at,
                _BEFORE,
                _SHOWN,
            ),
        )
        communicators = runs.of_run("comm_matches", name, lambda path: api.table(path, "comm_matches"))
        topology_controls, topology_cards = _topology(edges, placed, scheme)
        controls_shown = [
            controls.select(RANK, "Rank", ranks, rank),
            controls.select(GROUP, "Group", groups, group),
            controls.select(STATE, "State", [ALL, *alignment_chart.STATES], state),
            *topology_controls,
        ]
        return controls_shown, [
            _verdict(summary),
            *_generated(communicators),
            cards.columns([_divergences(summary.divergences, name), _states(summary.counts, scheme)]),
            _tiles(summary, communicators),
            _side_by_side(window, state, name, rank, group),
            _communicators(communicators),
            *topology_cards,
        ]

    return draw_run(runs, query, answers)


def _with_place_of_record(query: Query, runs: Runs, name: str) -> Query:
    """Return ``query`` with the rank, group and row of the record that a link of another page names; else ``query``."""
    record = record_of(next(iter(query.get(RECORD, ())), ""))
    if record is None or AT in query:
        return query
    located = runs.of_run(f"alignment place {record}", name, lambda path: api.alignment_place(path, *record))
    if located is None:
        return query
    rank, group, position = located
    place = {RANK: _word(rank), GROUP: _word(group), AT: str(position)}
    return {**query, **{key: (text,) for key, text in place.items()}}


def _position(query: Query, divergences: pd.DataFrame, state: str, rank: str, group: str) -> int:
    """Return the row that ``query`` names, or else the row of the first divergence, or else 0."""
    written = next(iter(query.get(AT, ())), "")
    if written.isdecimal() and len(written) < 12:
        return int(written)
    apart = divergences[(_words(divergences["rank"]) == rank) & (_words(divergences["pg"]) == group)]
    return int(apart["matched_before"].iloc[0]) if len(apart) and state == ALL else 0


def _unaligned(
    runs: Runs, name: str, edges: pd.DataFrame, query: Query, scheme: Scheme
) -> tuple[Sequence[Component], Sequence[Component]]:
    controls_shown, shown = _topology(edges, query, scheme)
    note = no_records(runs, name)
    if note is None:
        backends = runs.of_run("backends", name, lambda path: api.backends(path) or "")
        note = _how_to_align(backends, shlex.quote(str(runs.directory / name)[:1000]))
    return controls_shown, [note, *(shown if len(edges) else [])]


def _how_to_align(backends: str, path: str) -> Component:
    title = "Not aligned with an NCCL log"
    if backends == "gloo":
        return messages.message(
            title,
            "This run used gloo, which writes no log of its operations: there is nothing to align its records "
            "with. This page supports only runs with NCCL. To check a run with gloo, compare requested and issued:",
            [f"commprof verify {path}"],
        )
    return messages.message(
        title,
        "This run has no alignment. If it ran with NCCL and collected its logs (--nccl-log on), the first command "
        "aligns it; the second uses other logs.",
        [f"commprof align {path}", f"commprof align {path} LOG..."],
    )


def _word(value: Any) -> str:
    return "not known" if pd.isna(value) else str(value)


def _words(values: pd.Series[Any]) -> pd.Series[Any]:
    return values.map(_word, na_action=None).astype("str")


def _generated(communicators: pd.DataFrame) -> list[Component]:
    """Return a note if the log is not the output of NCCL."""
    if not communicators["generated"].fillna(False).astype(bool).any():
        return []
    return [
        messages.line(
            "A generated log",
            "The log of this alignment states that it was generated: it is not output of NCCL.",
        )
    ]


def _bounded(count: int, ambiguous: int, least: int) -> str:
    """Return a count as text; with ambiguous items, the range of counts that they allow."""
    if not ambiguous:
        return format_count(count)
    low, high = format_count(count + least), format_count(count + ambiguous)
    return low if low == high else f"{low} to {high}"


def _verdict(summary: api.AlignmentSummary) -> Component:
    """Return one sentence that states whether NCCL executed the issued collectives."""
    totals = summary.counts.groupby("state")["lines"].sum()
    counts = {state: int(totals.get(state, 0)) for state in alignment_chart.STATES}
    matched = f"{counts['matched']:,} of {sum(counts.values()):,} records and lines match"
    apart = [
        f"{counts[state]:,} {text}"
        for state, text in (("missing", "records have no line"), ("extra", "lines have no record"))
        if counts[state]
    ]
    if apart:
        first = "; the first divergence of each rank is below" if len(summary.divergences) else ""
        text = f"{matched}: {' and '.join(apart)}{first}."
        return messages.line("Records and log differ", text, severity="warning")
    unsure = counts["ambiguous"] + counts["torn"]
    if unsure:
        text = f"{matched}. {unsure:,} have no unique match: several candidates are equal, or a line is truncated."
        return messages.line("No difference is known", text)
    return messages.line("NCCL ran what was issued", f"{matched}.", severity="good")


def _tiles(summary: api.AlignmentSummary, communicators: pd.DataFrame) -> Component:
    totals = summary.counts.groupby("state")["lines"].sum()
    rows = int(totals.sum())
    what = {
        "matched": "a record and its line",
        "missing": "a record without a line",
        "extra": "a line without a record",
        "ambiguous": "several equal candidates match",
        "torn": "a truncated line",
    }
    shares = {state: int(totals.get(state, 0)) for state in alignment_chart.STATES}
    lines, records, missing, extra = (
        int(communicators[name].fillna(0).sum())
        for name in ("ambiguous", "ambiguous_records", "ambiguous_missing", "ambiguous_extra")
    )
    shown = {state: format_count(count) for state, count in shares.items()}
    shown["missing"] = _bounded(shares["missing"], records, missing)
    shown["extra"] = _bounded(shares["extra"], lines, extra)
    return cards.tiles(
        [
            cards.tile(state.capitalize(), shown[state], f"{100 * count / max(rows, 1):.1f} %: {what[state]}")
            for state, count in shares.items()
        ]
    )


def _states(frame: pd.DataFrame, scheme: Scheme) -> Component:
    return cards.figure_card(
        "states",
        "Records and lines of each rank",
        "Every record and every operation line is in exactly one state.",
        alignment_chart.states(frame, scheme),
        frame,
        [
            Field("rank", "Rank", str, numeric=True),
            Field("pg", "Group"),
            Field("op", "Operation"),
            Field("state", "State"),
            Field("lines", "Records and lines", format_count, numeric=True),
        ],
        most_rows=_TABLE_ROWS,
    )


def _divergences(frame: pd.DataFrame, name: str) -> Component:
    title = "First divergences"
    if frame.empty:
        return cards.empty_card(
            "divergences", title, "None: every record has a line, and every line a record."
        )
    links = frame.assign(place=range(len(frame)))
    rows = frame.to_dict("records")

    def link(place: int) -> Cell:
        row = rows[place]
        where = {RANK: _word(row["rank"]), GROUP: _word(row["pg"]), AT: str(row["matched_before"])}
        text = f"rank {where[RANK]}, group {where[GROUP]}"
        return html.Span(
            dcc.Link(text[:60], href=address.link(PATH, run=name, **where)), className="run-links"
        )

    return cards.table_card(
        "divergences",
        title,
        "The first record or line without a match, for each rank and group that has one.",
        links,
        [
            Field("place", "Look at", link),
            Field("matched_before", "Pairs before", format_count, numeric=True),
            Field("state", "State"),
            Field("op", "Operation"),
            Field("seq", "Record", str, numeric=True),
            Field("line", "Line", str, numeric=True),
            Field("reason", "Why"),
        ],
        most_rows=_TABLE_ROWS,
        download=frame,
    )


def _side_by_side(window: api.AlignmentWindow, state: str, name: str, rank: str, group: str) -> Component:
    title = f"Records beside lines: rank {rank}, group {group[:60]}"
    if window.rows.empty:
        return cards.empty_card("side-by-side", title, f"None of them is {state}.")
    places = window.rows["position"]

    def turn(text: str, position: int) -> Component:
        where = {RANK: rank, GROUP: group, STATE: state, AT: str(position)}
        return dcc.Link(text, href=address.link(PATH, run=name, **where))

    turns: list[Component] = []
    if window.earlier is not None:
        turns.append(turn(f"{_SHOWN} earlier", window.earlier))
    if window.later is not None:
        turns.append(turn(f"{_SHOWN} later", window.later))
    inner = cards.table_card(
        "side-by-side",
        title,
        f"Rows {int(places.iloc[0]):,} to {int(places.iloc[-1]):,} of {window.total:,} in the order of the log: record on "
        "the left, line on the right.",
        window.rows,
        [
            Field("position", "Row", format_count, numeric=True),
            Field("state", "State"),
            Field("seq", "Record", str, numeric=True),
            Field("step", "Step", str, numeric=True),
            Field("purpose", "Purpose"),
            Field("record_dtype", "Type"),
            Field("record_bytes", "Record's bytes", api.format_bytes, numeric=True),
            Field("op", "Operation"),
            Field("line_bytes", "Line's bytes", api.format_bytes, numeric=True),
            Field("elements", "count", format_count, numeric=True),
            Field("line_dtype", "datatype"),
            Field("opcount", "opCount", "{:x}".format, numeric=True),
            Field("line", "Line", str, numeric=True),
            Field("file", "File", lambda value: _short(PurePath(str(value)).name)),
            Field("reason", "Why"),
        ],
    )
    return html.Div([inner, html.Nav(turns, className="run-links", **{"aria-label": "Other rows"})])


def _short(text: Any) -> Cell:
    return str(text)[-40:]


def _communicators(frame: pd.DataFrame) -> Component:
    return cards.table_card(
        "communicators",
        "Communicators and their process groups",
        "Certain: torch's own line or the ranks identify the group. Likely: the operations do. None: see the reason.",
        frame,
        [
            Field("comm", "Communicator", _short),
            Field("rank", "Rank", str, numeric=True),
            Field("nranks", "of", str, numeric=True),
            Field("pg", "Group", _short),
            Field("group_ranks", "Ranks", lambda value: str(value)[:40]),
            Field("confidence", "Confidence"),
            Field("basis", "What ties them"),
            Field("reason", "Why not"),
            *[
                Field(state, state.capitalize(), format_count, numeric=True)
                for state in alignment_chart.STATES
            ],
            Field("ambiguous_missing", "Ambiguous: missing, at least", format_count, numeric=True),
            Field("ambiguous_extra", "Ambiguous: extra, at least", format_count, numeric=True),
        ],
        most_rows=_TABLE_ROWS,
    )


def _topology(edges: pd.DataFrame, query: Query, scheme: Scheme) -> tuple[list[Component], list[Component]]:
    if edges.empty:
        empty = cards.empty_card(
            "topology",
            "Rings and trees",
            "The log has no rings or trees. Record with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,GRAPH,COLL.",
        )
        return [], [empty]
    names = list(edges["communicator"].drop_duplicates())
    name = address.one(query, COMMUNICATOR, names, names[0])
    of_one = edges[edges["communicator"] == name]
    channels = [str(channel) for channel in sorted(set(of_one["channel"]))]
    channel = address.one(query, CHANNEL, channels, channels[0])
    shown = of_one[of_one["channel"] == int(channel)]
    controls_shown = [
        controls.select(COMMUNICATOR, "Communicator", names, name),
        controls.select(CHANNEL, "Channel", channels, channel),
    ]
    figures = [_edges(shown[shown["kind"] == kind], kind, channel, scheme) for kind in ("ring", "tree")]
    return controls_shown, [cards.columns(figures)]


def _edges(frame: pd.DataFrame, kind: str, channel: str, scheme: Scheme) -> Component:
    title = f"The {kind} of channel {channel}"
    if frame.empty:
        return cards.empty_card(f"topology-{kind}", title, f"The log prints no {kind} of this channel.")
    draw = topology_chart.ring if kind == "ring" else topology_chart.tree
    words = "each rank sends to the next" if kind == "ring" else "parents above their children"
    return cards.figure_card(
        f"topology-{kind}",
        title,
        f"As NCCL printed it, ranks within the communicator; {words}.",
        draw(frame, scheme),
        frame,
        [
            Field("from_rank", "Rank" if kind == "ring" else "Parent", str, numeric=True),
            Field("to_rank", "sends to" if kind == "ring" else "Child", str, numeric=True),
        ],
        most_rows=_TABLE_ROWS,
    )


PAGE: Final = Page(
    PATH,
    "Alignment",
    "Did NCCL run what was issued, and where do records and log lines diverge?",
    order=80,
    render=render,
    has_charts=False,
)
