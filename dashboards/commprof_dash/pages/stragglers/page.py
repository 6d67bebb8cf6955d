"""Stragglers: which rank is late, how certain that is, and whether its arrival, launch or transfer is late."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import pandas as pd
from dash import dcc, html
from dash.development.base_component import Component

from commprof.analysis import api
from commprof_dash import address
from commprof_dash.address import Query
from commprof_dash.charts import lateness_chart
from commprof_dash.components import cards, controls, messages
from commprof_dash.components.tables import Cell, Field
from commprof_dash.data import Runs
from commprof_dash.measures import format_count
from commprof_dash.pages.index_wait import builds, waiting_for_index
from commprof_dash.pages.one_run import draw_run, no_records
from commprof_dash.pages.overview import cards as overview_cards
from commprof_dash.pages.page import Drawing, Page
from commprof_dash.pages.timeline.data import FROM, TO, path_of
from commprof_dash.theme import Scheme

FIRST: Final = "first"  # in the address: the first step is
LEFT_OUT: Final = "out"
INCLUDED: Final = "in"
_FIRST_STEP: Final = {LEFT_OUT: "Leave out", INCLUDED: "Include"}
_MOST_RECORDS: Final = (
    200_000  # that are read without the first step; the answer about more is in the index, with it
)
_TABLE_ROWS: Final = 500
_FEW_RANKS: Final = 8  # of which the table has all
_ROOM: Final = 0.5  # beside a collective on the timeline, as part of its length


def render(runs: Runs, query: Query, scheme: Scheme) -> Drawing:
    """The page for the run in ``query``."""

    def answers(name: str) -> tuple[Sequence[Component], Sequence[Component]]:
        waiting = builds.wait_for(path_of(runs, name))
        if waiting is not None:
            return [], waiting_for_index(waiting, name)
        everything = address.one(query, FIRST, _FIRST_STEP, LEFT_OUT) == INCLUDED or not _has_warm_steps(
            runs, name
        )
        straggling = _straggling(runs, name, everything)
        statement = straggling.ranks.attrs["statement"]
        if straggling.lateness.empty:
            return [], [no_records(runs, name) or _nothing(statement, runs.overview(name)["ranks_recorded"])]
        # The timeline counts from the begin of the run; its index knows that begin on the clock of the arrivals.
        run_begin_ns: int = runs.of_run("run-begin", name, lambda path: int(api.index(path)["begin_ns"]))
        shown = controls.segmented(FIRST, "First step", _FIRST_STEP, INCLUDED if everything else LEFT_OUT)
        return [shown], [
            overview_cards.lateness(
                _straggling(runs, name, everything=True).ranks
            ),  # as on Overview and in the report
            _tiles(straggling, everything),
            cards.columns([_boxes(straggling.lateness, scheme), _causes(straggling.causes, scheme)]),
            _ranks(straggling.ranks),
            _collectives(straggling.collectives, name, run_begin_ns),
        ]

    return draw_run(runs, query, answers)


def _has_warm_steps(runs: Runs, name: str) -> bool:
    """Whether the page can leave out the first step: there is another, and the records are few enough to be read anew."""
    facts = runs.overview(name)
    return facts["steps"] > 1 and facts["records"] <= _MOST_RECORDS


def _straggling(runs: Runs, name: str, everything: bool) -> api.Straggling:
    answer: api.Straggling = (
        runs.of_run("straggling", name, api.straggling)
        if everything
        else runs.of_run("straggling-warm", name, partial(api.straggling, first_step=False))
    )
    return answer


def _nothing(statement: str | None, ranks: int) -> Component:
    if ranks == 1:
        return messages.message(
            "Nobody to compare",
            "Only one rank of this run was recorded, so there is no arrival skew. Record several ranks:",
            ["commprof run --nproc 4 train.py"],
        )
    why = statement or (
        "No collective of this run was recorded on more than one rank, so there is no arrival skew."
    )
    return messages.message(
        "Nobody to compare",
        f"{why} Record all ranks; across hosts rank 0 has to be among them, since its clock is the reference.",
        ["commprof run --nproc 4 train.py"],
    )


def _tiles(straggling: api.Straggling, everything: bool) -> Component:
    error = int(straggling.lateness["error_ns"].max())
    worst = straggling.collectives.iloc[0]
    compared = int(straggling.ranks["collectives"].max()) if len(straggling.ranks) else 0
    return cards.tiles(
        [
            cards.tile(
                "Compared",
                format_count(compared),
                "collectives per rank in which every rank waits for all others"
                + (
                    ""
                    if everything
                    else "; the first step, which the line above counts, is left out here and below"
                ),
            ),
            cards.tile(
                "Clock error",
                "0, one clock" if error == 0 else api.format_ns(error),
                "largest error of a lateness",
            ),
            cards.tile(
                "Largest skew",
                api.format_ns(int(worst["spread_ns"])),
                f"{worst['op']} of step {worst['step']}",
            ),
            cards.tile(
                "Typical skew",
                api.format_ns(int(straggling.lateness["median_ns"].max())),
                "of the rank whose median is the largest",
            ),
        ]
    )


def _boxes(frame: pd.DataFrame, scheme: Scheme) -> Component:
    columns = {
        "p5_ns": "5 % below",
        "p25_ns": "25 % below",
        "median_ns": "Median",
        "p75_ns": "75 % below",
        "p95_ns": "95 % below",
        "highest_ns": "Largest",
        "error_ns": "Error at most",
    }
    return cards.figure_card(
        "lateness",
        "Lateness of each rank",
        "After the first rank of each collective or message: box over the middle half, whiskers from 5 to 95 %.",
        lateness_chart.boxes(frame, scheme),
        frame,
        [
            Field("rank", "Rank", str, numeric=True),
            Field("collectives", "Compared", format_count, numeric=True),
            *[Field(name, heading, api.format_ns, numeric=True) for name, heading in columns.items()],
        ],
        most_rows=_TABLE_ROWS,
    )


def _causes(frame: pd.DataFrame, scheme: Scheme) -> Component:
    title = "What ranks wait for"
    if not int(frame["collectives"].sum()):
        return cards.empty_card(
            "causes", title, "In no collective is the longest part beyond the clock error."
        )
    return cards.figure_card(
        "causes",
        title,
        "Each collective counts for its longest part, if that is beyond the clock error. Late launches are known only if "
        "device times were recorded.",
        lateness_chart.causes(frame, scheme),
        frame,
        [
            Field("rank", "Rank", str, numeric=True),
            Field("cause", "Cause", _words),
            Field("collectives", "Collectives", format_count, numeric=True),
            Field("of_collectives", "of", format_count, numeric=True),
            Field("time_ns", "Time", api.format_ns, numeric=True),
        ],
        most_rows=_TABLE_ROWS,
    )


def _words(cause: Any) -> Cell:
    return str(cause).replace("_", " ")


def _ranks(frame: pd.DataFrame) -> Component:
    title = "How often each rank was the last"
    if frame.empty:
        return cards.empty_card(
            "stragglers",
            title,
            "No collective in which every rank waits for all others was recorded on all of its ranks.",
        )
    shown = frame.sort_values("others_waited_ns", ascending=False, kind="stable")
    if len(frame) > _FEW_RANKS:
        matters = (shown["others_waited_ns"] > 0) | shown["stands_out"].astype(bool)
        shown = shown[matters] if matters.any() else shown.head(_FEW_RANKS)
    left_out = (
        f" The other {len(frame) - len(shown):,} ranks kept nobody waiting."
        if len(shown) < len(frame)
        else ""
    )
    return cards.table_card(
        "stragglers",
        title,
        "Over the collectives in which every rank waits for all others, the rank that costs most first. Expected: if all "
        f"ranks were equally fast.{left_out}",
        shown,
        [
            Field("rank", "Rank", str, numeric=True),
            Field("others_waited_per_step_ns", "Others waited per step", api.format_ns, numeric=True),
            Field("others_waited_own_ns", "own delay", api.format_ns, numeric=True),
            Field("others_waited_inherited_ns", "inherited delay", api.format_ns, numeric=True),
            Field("last", "Last, beyond the error", format_count, numeric=True),
            Field("expected_last", "Expected", "{:,.1f}".format, numeric=True),
            Field("collectives", "Compared", format_count, numeric=True),
            Field("mean_lateness_ns", "Mean lateness", api.format_ns, numeric=True),
            Field("stands_out", "Stands out", lambda value: "yes" if value else "no"),
        ],
        most_rows=_TABLE_ROWS,
        download=frame,
    )


def _collectives(frame: pd.DataFrame, name: str, run_begin_ns: int) -> Component:
    rows = frame.assign(links=range(len(frame)), skew=range(len(frame)))
    records = frame.to_dict("records")

    def links(position: int) -> Cell:
        row = records[position]
        begin, end = (int(row[column]) - run_begin_ns for column in ("begin_ns", "end_ns"))
        room = max(int((end - begin) * _ROOM), 1000)
        window = {FROM: str(begin - room), TO: str(end + room)}
        place = f"{row['op']} of step {row['step']}, number {row['pg_seq']} in group {row['pg']}"
        record = [f"rank:=:{row['last_rank']}", f"seq:=:{row['seq']}"]
        shown = [
            dcc.Link(
                "timeline", href=address.link("/timeline", run=name, **window), title=f"Timeline: {place}"
            )
        ]
        if not pd.isna(row["last_rank"]):
            shown.append(
                dcc.Link(
                    "record", href=address.link("/records", run=name, filter=record), title=f"Record: {place}"
                )
            )
        return html.Span(shown, className="run-links")

    def skew(position: int) -> Cell:
        row = records[position]
        error = f" +- {api.format_ns(int(row['error_ns']))}" if row["error_ns"] else ""
        return api.format_ns(int(row["spread_ns"])) + error

    return cards.table_card(
        "late-collectives",
        "The collectives with the largest arrival skew",
        "From the first arrival to the last, largest first; +- is the bound of the clock error.",
        rows,
        [
            Field("skew", "Skew", skew, numeric=True),
            Field("last_rank", "Last rank", str, numeric=True),
            Field("certain", "Certain", lambda value: "yes" if value else "no"),
            Field("step", "Step", str, numeric=True),
            Field("op", "Operation"),
            Field("purpose", "Purpose"),
            Field("group_ranks", "Ranks", lambda value: str(value)[:40]),
            Field("waiting_ns", "Waiting", api.format_ns, numeric=True),
            Field("launch_ns", "Launch", api.format_ns, numeric=True),
            Field("transfer_ns", "Transfer", api.format_ns, numeric=True),
            Field("cause", "Longest", _words),
            Field("links", "Look at", links),
        ],
        most_rows=_TABLE_ROWS,
        download=frame,
    )


PAGE: Final = Page(
    "/stragglers",
    "Stragglers",
    "Which rank do the others wait for, and why is it late?",
    order=90,
    render=render,
)
