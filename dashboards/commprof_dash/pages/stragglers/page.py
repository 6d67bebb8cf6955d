"""The page Stragglers: which rank is late, how certain this is, and whether its arrival, launch or transfer is late."""

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
from commprof_dash.components.tables import Cell, Field, filled
from commprof_dash.data import Runs
from commprof_dash.measures import format_count
from commprof_dash.pages.index_wait import builds, waiting_for_index
from commprof_dash.pages.one_run import draw_run, no_records
from commprof_dash.pages.overview import cards as overview_cards
from commprof_dash.pages.page import Drawing, Page
from commprof_dash.pages.timeline.data import FROM, TO, path_of
from commprof_dash.theme import Scheme

FIRST: Final = "first"  # in the address: whether the first step is included
LEFT_OUT: Final = "out"
INCLUDED: Final = "in"
_FIRST_STEP: Final = {LEFT_OUT: "Leave out", INCLUDED: "Include"}
# The largest number of records that are read again to leave out the first step. The charts in the index
# include this step.
_MOST_RECORDS: Final = 200_000
_ALSO_FIRST: Final = " With the first step: the records are too many to read them again without it."
_ONLY_FIRST: Final = " With the first step, since there is no other."
_TABLE_ROWS: Final = 500
# The rows of collectives have twelve cells and two links each. The browser takes 0.4 s longer for 200 rows.
_COLLECTIVE_ROWS: Final = 50
_TABLE_RANKS: Final = 20  # the largest number of columns in the table of the steps
_WAITS: Final = {
    "own_ns": "Waited for its own delay",
    "inherited_ns": "for an inherited delay",
    "unknown_ns": "for an unknown cause",
}
_FEW_RANKS: Final = 8  # up to this number of ranks, the table shows all ranks
_ROOM: Final = 0.5  # the room beside a collective on the timeline, as a multiple of its length


def render(runs: Runs, query: Query, scheme: Scheme) -> Drawing:
    """Return the page for the run in ``query``."""

    def answers(name: str) -> tuple[Sequence[Component], Sequence[Component]]:
        waiting = builds.wait_for(path_of(runs, name))
        if waiting is not None:
            return [], waiting_for_index(waiting, name)
        asked = address.one(query, FIRST, _FIRST_STEP, LEFT_OUT) == INCLUDED
        straggling: api.Straggling = runs.of_run("straggling", name, api.straggling)
        statement = straggling.ranks.attrs["statement"]
        if straggling.lateness.empty:
            return [], [no_records(runs, name) or _nothing(statement, runs.health(name).ranks_recorded)]
        steps, records = len(runs.step_numbers(name)), runs.health(name).records
        # To leave out the first step, all records are read again.
        everything = asked or steps <= 1 or records > _MOST_RECORDS
        detailed: api.Straggling = (
            straggling
            if everything
            else runs.of_run("straggling-warm", name, partial(api.straggling, first_step=False))
        )
        # The timeline counts from the start of the run. The index of the run stores this time on the clock of
        # the arrivals.
        run_begin_ns: int = runs.of_run("run-begin", name, lambda path: int(api.index(path)["begin_ns"]))
        shown = controls.segmented(
            FIRST, "First step in the charts", _FIRST_STEP, INCLUDED if asked else LEFT_OUT
        )
        which = "" if everything == asked else _ONLY_FIRST if steps <= 1 else _ALSO_FIRST
        return [shown], [
            # The same line as on the page Overview and in the report.
            overview_cards.lateness(straggling.ranks),
            *_over_steps(straggling, asked, scheme),
            _ranks(straggling, name),
            _tiles(detailed, straggling),
            cards.columns(
                [_boxes(detailed.lateness, which, scheme), _causes(detailed.causes, which, scheme)]
            ),
            _collectives(detailed.collectives, name, run_begin_ns, which),
        ]

    return draw_run(runs, query, answers)


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


def _over_steps(straggling: api.Straggling, with_first: bool, scheme: Scheme) -> list[Component]:
    """Return the lateness of each rank in each step; empty for a run without training steps."""
    steps = straggling.steps if with_first or not straggling.steps["is_warm"].any() else _warm(straggling)
    steps = steps[steps["lateness_ns"].notna()]
    if steps.empty:
        return []
    late = straggling.ranks.attrs["late"]
    lines = lateness_chart.step_lines(steps, late)
    since = {rank: step for rank, step in straggling.ranks.attrs.get("since", ()) if rank in late}
    error_ns = float(straggling.lateness["error_ns"].max())
    ranges = int(steps["steps"].max())
    each = "step" if ranges == 1 else f"step (mean over each {ranges:,} steps)"
    who = "stragglers in color, the others grey" if late else "no rank is a straggler"
    headings = {name: _heading(name) for name in lines.columns[2:]}
    return [
        cards.figure_card(
            "lateness-steps",
            "Lateness of each rank over the steps",
            f"Latest arrival of each rank in each {each}, after the first rank of the same collective: {who}"
            f"{'' if with_first or not _after_first(straggling) else '; without the first step'}.",
            lateness_chart.over_steps(lines, late, since, error_ns, scheme),
            lines,
            [
                Field("step", "Step", str, numeric=True),
                *[
                    Field(name, heading, api.format_ns, numeric=True)
                    for name, heading in list(headings.items())[:_TABLE_RANKS]
                ],
            ],
            most_rows=_TABLE_ROWS,
        )
    ]


def _heading(column: str) -> str:
    """Return the heading of a column: ``Rank 3`` for ``rank_3_ns``, ``Others median`` for ``others_median_ns``."""
    return column.removesuffix("_ns").replace("_", " ").capitalize()


def _warm(straggling: api.Straggling) -> pd.DataFrame:
    """Return the steps that the sentence is about."""
    return straggling.steps[straggling.steps["is_warm"]]


def _after_first(straggling: api.Straggling) -> str:
    """Return the text that names the steps of the sums: all but the first, if there are others.

    The text is empty if there are no steps.
    """
    return ", after the first step" if not straggling.steps["is_warm"].all() else ""


def _tiles(detailed: api.Straggling, straggling: api.Straggling) -> Component:
    error = int(straggling.lateness["error_ns"].max())
    worst = detailed.collectives.iloc[0]
    warm = _warm(straggling)
    steps = len(warm[["attempt", "step"]].drop_duplicates())
    compared = warm.groupby("rank")["collectives"].sum() if steps else straggling.ranks["collectives"]
    return cards.tiles(
        [
            cards.tile(
                "Compared",
                format_count(int(compared.max()) if len(compared) else 0),
                f"collectives per rank in which every rank waits for all others{_after_first(straggling)}",
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
        ]
    )


def _boxes(frame: pd.DataFrame, which: str, scheme: Scheme) -> Component:
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
        "Lateness of each rank in all collectives",
        f"After the first rank of each collective or message: box over the middle half, whiskers from 5 to 95 %.{which}",
        lateness_chart.boxes(frame, scheme),
        frame,
        [
            Field("rank", "Rank", str, numeric=True),
            Field("collectives", "Compared", format_count, numeric=True),
            *[Field(name, heading, api.format_ns, numeric=True) for name, heading in columns.items()],
        ],
        most_rows=_TABLE_ROWS,
    )


def _causes(frame: pd.DataFrame, which: str, scheme: Scheme) -> Component:
    title = "What ranks wait for"
    if not int(frame["collectives"].sum()):
        return cards.empty_card(
            "causes", title, "In no collective is the longest part beyond the clock error."
        )
    return cards.figure_card(
        "causes",
        title,
        "Each collective counts for its longest part, if that is beyond the clock error. Late launches are known only if "
        f"device times were recorded.{which}",
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


def _ranks(straggling: api.Straggling, name: str) -> Component:
    """Return the time that each rank costs the others, from the sums that the sentence above uses, too."""
    title = "What each rank costs the others"
    if straggling.ranks.empty:
        return cards.empty_card(
            "stragglers",
            title,
            "No collective in which every rank waits for all others was recorded on all of its ranks.",
        )
    frame, steps = _costs(straggling)
    shown = frame.sort_values("own_ns", ascending=False, kind="stable")
    if len(frame) > _FEW_RANKS:
        matters = (shown[list(_WAITS)].sum(axis=1) > 0) | shown["is_late"]
        shown = shown[matters] if matters.any() else shown.head(_FEW_RANKS)
    left_out = (
        f" The other {len(frame) - len(shown):,} ranks kept nobody waiting."
        if len(shown) < len(frame)
        else ""
    )
    since = dict(straggling.ranks.attrs.get("since", ()))

    def begin(rank: Any) -> Cell:
        if rank not in since:
            return "-"
        href = address.link("/timeline", run=name, step=str(since[rank]))
        return html.Span(
            dcc.Link(str(since[rank]), href=href, title="Timeline of the step"), className="run-links"
        )

    fields = [
        Field("rank", "Rank", str, numeric=True),
        Field("is_late", "Straggler", lambda value: "yes" if value else "no"),
        *([Field("since", "From step", begin, numeric=True)] if since else []),
        *[
            Field(column, heading, api.format_ns, numeric=True)
            for column, heading in _WAITS.items()
            if column == "own_ns" or frame[column].any()
        ],
        Field("last", "Arrived last", format_count, numeric=True),
        Field("expected_last", "Expected", "{:,.1f}".format, numeric=True),
        Field("collectives", "Compared", format_count, numeric=True),
    ]
    of_steps = f"{steps:,} steps" if steps > 1 else "one step"
    unit = f"per step, mean of {of_steps}{_after_first(straggling)}" if steps else "in all"
    return cards.table_card(
        "stragglers",
        title,
        f"How long the others waited for a rank, {unit}. Arrived last: collectives in which every rank waits for all "
        f"others and it came last beyond the clock error. Expected: if all ranks were equally fast.{left_out}",
        shown.assign(since=shown["rank"]),
        fields,
        most_rows=_TABLE_ROWS,
        download=frame,
    )


def _costs(straggling: api.Straggling) -> tuple[pd.DataFrame, int]:
    """Return one row per rank with the waits for this rank and counts, and the number of steps.

    The waits are the mean per step, or the total if there are no steps.
    """
    warm = _warm(straggling)
    steps = len(warm[["attempt", "step"]].drop_duplicates())
    if not steps:
        frame = straggling.ranks[["rank", "collectives", "last", "expected_last"]].assign(
            own_ns=straggling.ranks["others_waited_own_ns"].fillna(0).astype(float),
            inherited_ns=straggling.ranks["others_waited_inherited_ns"].fillna(0).astype(float),
            unknown_ns=0.0,
        )
    else:
        names = {"own_ns": "others_waited_own_ns", "inherited_ns": "others_waited_inherited_ns"}
        names |= {"unknown_ns": "others_waited_unknown_ns"}
        sums = warm.groupby("rank")[["collectives", "last", "expected_last", *names.values()]].sum()
        frame = sums.rename(columns={column: name for name, column in names.items()}).reset_index()
        steps = int(warm.drop_duplicates(["attempt", "step"])["steps"].sum())
        frame = frame.assign(**{name: frame[name] / steps for name in names})
    return frame.assign(is_late=frame["rank"].isin(straggling.ranks.attrs["late"])), steps


def _collectives(frame: pd.DataFrame, name: str, run_begin_ns: int, which: str) -> Component:
    rows = frame.assign(links=range(len(frame)), skew=range(len(frame)))
    records = frame.to_dict("records")
    blanks = {text: dcc.Link(text, href="") for text in ("timeline", "record")}
    span = html.Span(className="run-links")

    def links(position: int) -> Cell:
        row = records[position]
        begin, end = (int(row[column]) - run_begin_ns for column in ("begin_ns", "end_ns"))
        room = max(int((end - begin) * _ROOM), 1000)
        window = {FROM: str(begin - room), TO: str(end + room)}
        place = f"{row['op']} of step {row['step']}, number {row['pg_seq']} in group {row['pg']}"
        record = [f"rank:=:{row['last_rank']}", f"seq:=:{row['seq']}"]
        shown = [
            filled(
                blanks["timeline"],
                href=address.link("/timeline", run=name, **window),
                title=f"Timeline: {place}",
            )
        ]
        if not pd.isna(row["last_rank"]):
            href = address.link("/records", run=name, filter=record)
            shown.append(filled(blanks["record"], href=href, title=f"Record: {place}"))
        return filled(span, children=shown)

    def skew(position: int) -> Cell:
        row = records[position]
        error = f" +- {api.format_ns(int(row['error_ns']))}" if row["error_ns"] else ""
        return api.format_ns(int(row["spread_ns"])) + error

    return cards.table_card(
        "late-collectives",
        "The collectives with the largest arrival skew",
        f"From the first arrival to the last, largest first; +- is the bound of the clock error.{which}",
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
        most_rows=_COLLECTIVE_ROWS,
        download=frame,
    )


PAGE: Final = Page(
    "/stragglers",
    "Stragglers",
    "Which rank do the others wait for, and why is it late?",
    order=90,
    render=render,
)
