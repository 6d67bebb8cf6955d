"""``commprof report``: prints what one run sent, as text or JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from commprof.cli import rendering
from commprof.cli.extras import needed
from commprof.cli.rendering import Heading, Rows
from commprof.cli.runs import RunArgument, remembered
from commprof.cli.sections import exposure_section, resources
from commprof.cli.sections.algorithm_section import algorithm_parts
from commprof.cli.sections.expert_section import expert_parts
from commprof.cli.sections.untagged_section import untagged_parts

if TYPE_CHECKING:
    import pandas as pd

    from commprof.trace.reader import Run

HELP_ORDER = 20

BY: Final = (
    "attempt",
    "step",
    "after_step",
    "phase",
    "purpose",
    "op",
    "intended_op",
    "group_desc",
    "group_ranks",
    "group_size",
)
# The names that torch or an import gives to a group if the program gives the group no name.
_UNNAMED: Final = (rendering.MISSING, "default_pg", "undefined")
_PADDING: Final = "padding_bytes"
_BETWEEN: Final = "between_hosts_bytes"
_SUMMED: Final = ("collectives", "records", "payload_bytes", _PADDING, "wire_bytes", "host_ns")
_COUNTS: Final = {
    "records": "records",
    "lost": "dropped",
    "unseen": "unseen",
    "torn": "truncated",
    "raised": "raised",
    "incomplete": "incomplete",
}
_OUTSIDE: Final = {"evaluation": "evaluation", "checkpoint": "checkpoint", "other": "after the last step"}
_OUTSIDE_HEADINGS: Final = ("times", "time", "calls", "payload", "wire per member")
_EXECUTED: Final = "executed_wire_bytes"
_FIRST_HEADINGS: Final = (
    Heading("purpose, operation"),
    Heading("group"),
    Heading("calls", number=True),
    Heading("payload", number=True),
    Heading("wire per member", number=True),
)
_AS_ISSUED: Final = Heading("as issued", number=True)
_WHERE_ANY: Final = (
    (_PADDING, Heading("padding", number=True)),
    (_BETWEEN, Heading("between hosts", number=True)),
)
_IN_CALLS: Final = Heading("in calls", number=True)
_MOST_HOSTS: Final = 8  # the most hosts that a sentence about stragglers names
# The most records whose arrivals the report compares. The comparison of this many records takes a few seconds.
_MOST_COMPARED: Final = 1_000_000
LEGEND: Final = (
    "payload: S of nccl-tests. wire per member: modelled; the sum of the bytes that a rank of the group sends on average "
    "for each collective, and of the bytes of each message (counted at its send), for the operations that the backend ran "
    "(gloo's behavior is known, NCCL's from an aligned log). Compare and Overview show wire per rank: the mean over all "
    "ranks of the job, which is less if a group has fewer ranks. as issued: per member, for the issued operations, if it "
    "differs or the executed operations are not known. padding: the part of payload without data. between hosts: the part "
    "of the wire bytes as issued whose ranks are on several hosts. Both are shown if there are any. in calls: time in the "
    "issuing calls, mean over the ranks; it is not exposed time. A dash: not known."
)


def report(
    run: RunArgument,
    per_step: Annotated[
        bool, typer.Option("--per-step", help="Show the traffic of each training step separately.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON with exact bytes and nanoseconds.")
    ] = False,
) -> int:
    """Show the messages of a run by operation, group and purpose, and list missing data.

    The report shows the counts, the bytes and the times of the messages.
    """
    report_data = remembered("report", run, _answers)
    answers, late = report_data["answers"], report_data["late"]
    if as_json:
        rendering.show_json(answers)
        return 0
    facts, traffic, steps = answers["overview"], answers["traffic"], answers["steps"]
    rendering.show(title(facts), "")
    if not traffic:
        rendering.show("No collective was recorded.")
    else:
        step_texts = exposure_section.step_texts(steps, answers["exposure"]) if per_step else None
        rendering.show(*outside_parts(answers["outside_steps"], traffic))
        rendering.show(*traffic_parts(traffic, steps, step_texts, facts["trainings"]))
        rendering.show(*exposure_section.per_step_parts(answers["exposure_per_step"]))
        rendering.show(*expert_parts(answers))
        rendering.show(*algorithm_parts(answers["algorithms"]), *untagged_parts(answers["untagged"]))
    rendering.show(*resources.resource_parts(answers["resources"]))
    rendering.show(
        *straggler_parts(late), *moved_parts(answers["moved"], facts["moved_reason"]), health(facts)
    )
    return 0


def _answers(run: Run) -> dict[str, Any]:
    """Return the data of the report.

    The key ``answers`` contains the values that --json prints, and ``late`` the sentence about stragglers.
    """
    with needed("analysis", "to analyse a run"):
        from commprof.analysis import api
        from commprof.analysis.storage.index import index_if_there
        from commprof.trace.directory import elsewhere

        facts = api.overview(run)
        there = elsewhere(run.path)
        if there is not None:
            stragglers = None
        elif facts["records"] <= _MOST_COMPARED or index_if_there(run.path) is not None:
            stragglers = api.stragglers(run)
        else:
            stragglers = api.sampled_stragglers(run)
        answers = {
            "overview": facts,
            "traffic": api.traffic(run, by=BY),
            "steps": api.step_times(run),
            "moved": api.moved(run),
            "outside_steps": run.table("outside_steps").to_pylist(),
            "exposure": api.exposure(run, by=("attempt", "step")),
            "exposure_per_step": api.exposure_per_step(run),
            "resources": api.resource_use(run),
            "one_offs": api.one_offs(run),
            **_expert_answers(run),
            "untagged": api.untagged(run),
            "algorithms": api.algorithms(run),
            "stragglers": stragglers,
            "stragglers_sample": _sampled(stragglers),
        }
    late = _late(stragglers) if there is None else f"not evaluated, because the records are at {there.place}"
    return {"answers": answers, "late": late}


def _expert_answers(run: Run) -> dict[str, Any]:
    """Return the answers about experts and about the imbalance of all_to_alls.

    If the run has experts, only the all_to_alls that exchange tokens are examined.
    """
    from commprof.analysis import api

    summary = api.expert_summary(run)
    return {
        "experts": None if summary is None else summary.as_json(),
        "exchange_imbalance": api.exchange_imbalance(run, of_experts=summary is not None),
    }


def _late(stragglers: pd.DataFrame | None) -> str | None:
    """Return sentences about stragglers and about the sample of records that was examined.

    The result is None if all records were examined and there is no straggler.
    """
    if stragglers is None:
        return f"not evaluated for more than {_MOST_COMPARED:,} records; api.stragglers(run) evaluates them."
    statement: str | None = stragglers.attrs["statement"]
    sampled = _sampled(stragglers)
    if sampled is None:
        return statement
    steps, of_steps = sampled["steps"], sampled["of_steps"]
    basis = f"{steps:,} of {of_steps:,} steps" if steps < of_steps else f"all {steps:,} steps"
    part = "" if sampled["share"] == 1 else f"1/{round(1 / sampled['share']):,} of "
    hosts = [f"rank {rank}: {host}" for rank, host in stragglers.attrs["hosts"].items()][:_MOST_HOSTS]
    where = f" Hosts: {', '.join(hosts)}." if hosts else ""
    return (
        f"{statement or 'None stands out.'}{where} Examined: {part}the collectives of {basis}, no messages."
    )


def _sampled(stragglers: pd.DataFrame | None) -> dict[str, Any] | None:
    """Return the sample that ``stragglers`` was computed from (steps, all steps, share); None without sampling."""
    if stragglers is None or "of_steps" not in stragglers.attrs:
        return None
    return {name: stragglers.attrs[name] for name in ("steps", "of_steps", "share")}


def title(facts: Mapping[str, Any]) -> str:
    """Return the head of a report: the job, its ranks, steps and times."""
    time = rendering.duration(facts["step_time_ns"])
    if not rendering.is_missing(facts["step_time_low_ns"]):
        low, high = (rendering.duration(facts[f"step_time_{end}_ns"]) for end in ("low", "high"))
        time += f" ({low} to {high}, 95 %)"
    if facts["trainings"]:
        time += ", over all trainings"
    recorded, expected = facts["ranks_recorded"], facts["ranks_expected"]
    ranks = f"{recorded}" if recorded == expected or not expected else f"{recorded} of {expected}"
    exit_code = facts["exit_code"]
    return rendering.facts(
        [
            ("run", str(facts["path"])),
            ("state", f"{facts['state']}" + (f", exit code {exit_code}" if exit_code else "")),
            ("command", " ".join(map(str, facts["command"] or []))),
            ("setting", "" if facts["setting"] in (facts["name"], None) else str(facts["setting"])),
            (
                "ranks",
                f"{ranks}, {facts['backends'] or 'no backend seen'}, torch {rendering.text(facts['torch'])}",
            ),
            (
                "steps",
                f"{rendering.count(facts['steps'])}, time per step {time}" if facts["steps"] else "none",
            ),
            *_trainings(facts["trainings"]),
            (
                "final loss",
                "" if rendering.is_missing(facts["final_loss"]) else rendering.loss(facts["final_loss"]),
            ),
            ("pipeline", _pipeline(facts)),
        ]
    )


def _trainings(trainings: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the label and the text of one line for each training: its steps and the time per step."""
    lines = []
    for number, each in enumerate(trainings, 1):
        time = rendering.duration(each["step_time_ns"])
        steps = f"steps {each['first_step']} to {each['last_step']}, time per step {time}"
        lines.append((f"training {number}", steps))
    return lines


def _pipeline(facts: Mapping[str, Any]) -> str:
    idle, expected = facts["pipeline_idle"], facts["pipeline_idle_expected"]
    if idle is None or expected is None:
        return ""
    return f"first stage idle or sending {idle:.1%} of a step; idle by the schedule {expected:.1%}"


def traffic_parts(
    rows: Sequence[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
    per_step: Mapping[tuple[int, int], str] | None,
    trainings: Sequence[Mapping[str, Any]] = (),
) -> list[Rows | str]:
    """Return the traffic tables of a report: initialization, then the mean of the complete steps; the legend last.

    Args:
        rows: traffic by :data:`BY`.
        per_step: show each step instead of the mean; a text for the heading of each, by attempt and step.
        trainings: of :func:`commprof.analysis.api.overview`; each has a mean of its own.
    """
    blocks: list[Rows | str] = []
    before = [row for row in rows if row["step"] < 0 and rendering.is_missing(row["after_step"])]
    if before:
        blocks.append(_table("Before the first step, in total", before, 1))
    complete_steps = {
        (row["attempt"], row["step"]) for row in steps if not rendering.is_missing(row["duration_ns"])
    }
    if per_step is not None:
        blocks.extend(_step_table(step, rows, per_step) for step in steps)
    elif complete_steps:
        blocks.extend(_steady_parts(rows, steps, trainings))
    incomplete = [
        row for row in rows if row["step"] >= 0 and (row["attempt"], row["step"]) not in complete_steps
    ]
    if incomplete and per_step is None:
        blocks.append(_table("In steps that did not end, in total", incomplete, 1))
    return [*blocks, rendering.paragraph(LEGEND) + "\n"]


def _steady_parts(
    traffic: Sequence[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
    trainings: Sequence[Mapping[str, Any]],
) -> Iterator[Rows]:
    """Yield a table of the mean traffic per step for each training, then the table of one-off traffic."""
    from commprof.analysis.traffic.steady_steps import TRAFFIC_KEY, steady_traffic, when

    one_offs: list[dict[str, Any]] = []
    several: Sequence[Mapping[str, Any] | None] = [*trainings] if trainings else [None]
    for number, training in enumerate(several, 1):
        steady = steady_traffic(_within(traffic, training), _within(steps, training))
        ended = sum(not rendering.is_missing(row["duration_ns"]) for row in _within(steps, training))
        count = len(steady.warm)
        which = f"of {count} step{'' if count == 1 else 's'}" + (" after the first" if count < ended else "")
        whose = "" if training is None else f" of training {number}"
        if count:
            yield _table(f"Per training step{whose}, {which}", steady.per_step, 1, _rhythm)
        one_offs += steady.one_offs
    once: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in one_offs:
        once.setdefault(tuple(row[name] for name in TRAFFIC_KEY), []).append(row)
    if once:
        sums = [_sums(each) for each in once.values()]
        both = any(_differ(each, 1) for each in sums)
        cells = [
            (
                f"{each[0]['purpose'] or '(no purpose given)'}, {each[0]['op']}",
                _group(each[0]),
                rendering.count(sent["collectives"]),
                *_sent(sent, both),
                when(each),
            )
            for each, sent in zip(once.values(), sums, strict=True)
        ]
        headings = (*_FIRST_HEADINGS, *([_AS_ISSUED] if both else []), Heading("when"))
        yield Rows(headings, cells, title="Not in every step, in total, in no mean")


def _within(
    rows: Sequence[Mapping[str, Any]], training: Mapping[str, Any] | None
) -> Sequence[Mapping[str, Any]]:
    """Return the rows of the steps of ``training``; all rows if ``training`` is None."""
    if training is None:
        return rows
    return [row for row in rows if training["first_step"] <= row["step"] <= training["last_step"]]


def _sums(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the sums over ``rows``. The sum of executed bytes is None if one row has no known executed bytes."""
    sums: dict[str, float | None] = {
        name: sum(row[name] for row in rows) for name in ("collectives", "payload_bytes", "wire_bytes")
    }
    unknown = any(rendering.is_missing(row[_EXECUTED]) for row in rows)
    return {**sums, _EXECUTED: None if unknown else sum(row[_EXECUTED] for row in rows)}


def _sent(sums: Mapping[str, float | None], both: bool) -> tuple[str, ...]:
    """Return the cells of payload bytes and executed wire bytes.

    With ``both``, add a cell for the issued wire bytes. The cell is empty if both numbers of wire bytes are equal.
    """
    issued = ["wire_bytes"] if both else []
    return tuple(
        ""
        if name in issued and not _differ(sums, 1)
        else rendering.number_of_bytes(None if sums[name] is None else round(sums[name] or 0.0))
        for name in ("payload_bytes", _EXECUTED, *issued)
    )


def _rhythm(row: Mapping[str, Any]) -> str:
    every = row.get("every", 1)
    if every == 1:
        return ""
    return " (not in every step)" if every is None else f" (in 1 of {every} steps)"


def outside_parts(
    outside: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> list[Rows | str]:
    """Return the table of evaluations, checkpoints and the time after the last step: time of the lowest rank, bytes."""
    blocks: list[Rows | str] = []
    phases = []
    for phase, name in _OUTSIDE.items():
        mine = [row for row in outside if row["phase"] == phase]
        sent = [
            row
            for row in rows
            if row["step"] < 0
            and not rendering.is_missing(row["after_step"])
            and (row["phase"] == phase or (phase == "other" and row["phase"] not in _OUTSIDE))
        ]
        if not mine and not sent:
            continue
        lowest = min((row["rank"] for row in mine if row["passes"] or phase == "other"), default=0)
        times = [row for row in mine if row["rank"] == lowest]
        known = [row["end_ns"] - row["begin_ns"] for row in times if row["end_ns"] is not None]
        texts = (
            name,
            rendering.count(len(times)) if phase != "other" else "",
            rendering.duration(sum(known)) if len(known) == len(times) and known else rendering.MISSING,
        )
        phases.append((texts, _sums(sent)))
    if phases:
        both = any(_differ(sums, 1) for _, sums in phases)
        cells = [(*texts, rendering.count(sums["collectives"]), *_sent(sums, both)) for texts, sums in phases]
        numbers = (Heading(text, number=True) for text in _OUTSIDE_HEADINGS)
        headings = (Heading("what"), *numbers, *([_AS_ISSUED] if both else []))
        blocks.append(Rows(headings, cells, title="Outside of the steps, in total"))
    return blocks


def _step_table(
    step: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], texts: Mapping[tuple[int, int], str]
) -> Rows:
    inside = [row for row in rows if (row["attempt"], row["step"]) == (step["attempt"], step["step"])]
    name = f"Step {step['step']}" + (f" of attempt {step['attempt']}" if step["attempt"] else "")
    took = (
        "did not end"
        if rendering.is_missing(step["duration_ns"])
        else rendering.duration(step["duration_ns"])
    )
    loss_text = "" if rendering.is_missing(step["loss"]) else f", loss {rendering.loss(step['loss'])}"
    spent = texts.get((step["attempt"], step["step"]))
    return _table(f"{name}: {took}{f', {spent}' if spent else ''}{loss_text}", inside, 1)


def _table(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    steps: int,
    remark: Callable[[Mapping[str, Any]], str] = lambda row: "",
) -> Rows:
    """Return a table of ``rows`` of traffic, summed by purpose, operation and group and divided by ``steps``.

    A value that is not known for any of the rows is shown as a dash, not as 0.
    """
    sums: dict[tuple[str, ...], dict[str, float | None]] = {}
    for row in rows:
        key = (
            *(rendering.text(row[column]) for column in ("purpose", "op", "intended_op")),
            _group(row) + remark(row),
        )
        into = sums.setdefault(key, dict.fromkeys(_SUMMED))
        for column in _SUMMED:
            if not rendering.is_missing(row[column]):
                into[column] = (into[column] or 0.0) + float(row[column])
        # The executed and between-hosts bytes of a sum are not known if they are not known for one of its rows.
        for column in (_EXECUTED, _BETWEEN):
            before, value = into.get(column, 0.0), row[column]
            into[column] = None if before is None or rendering.is_missing(value) else before + float(value)
    both = any(_differ(each, steps) for each in sums.values())
    shown = [(name, heading) for name, heading in _WHERE_ANY if any(each[name] for each in sums.values())]
    headings = (
        *_FIRST_HEADINGS,
        *([_AS_ISSUED] if both else []),
        *(heading for _, heading in shown),
        _IN_CALLS,
    )
    blank = [""] * (len(headings) - 1)
    cells: list[Sequence[str]] = []
    last = None
    for key in sorted(sums, key=lambda key: (key[0], -(sums[key]["wire_bytes"] or 0.0), key)):
        purpose, op, intended, group = key
        if purpose != last:
            cells.append((purpose if purpose != rendering.MISSING else "(no purpose given)", *blank))
            last = purpose
        cells.append((f"  {op}", group, *_measures(op, sums[key], steps, both, [name for name, _ in shown])))
        if intended not in (rendering.MISSING, op):
            cells.append((f"    for {intended}", *blank))
    return Rows(headings, cells, title=name)


def _differ(sums: Mapping[str, float | None], steps: int) -> bool:
    """Return whether the executed wire bytes differ from the issued wire bytes or are not known."""
    return sums[_EXECUTED] is None or round((sums["wire_bytes"] or 0.0) / steps) != round(
        (sums[_EXECUTED] or 0.0) / steps
    )


def _group(row: Mapping[str, Any]) -> str:
    """Return the ranks of a group, and its name if the program gave one, such as an axis."""
    name, ranks = rendering.text(row["group_desc"]), rendering.text(row["group_ranks"])
    return ranks if name in _UNNAMED else f"{name} {ranks}"


def _measures(
    op: str, sums: Mapping[str, float | None], steps: int, both: bool, shown: Sequence[str]
) -> tuple[str, ...]:
    mean = {name: None if value is None else round(value / steps) for name, value in sums.items()}
    at_send = op == "recv" and not sums["collectives"]  # each message counts once, at its send
    calls = sums["records" if op == "recv" else "collectives"]
    return (
        rendering.count((calls or 0.0) / steps),
        *(
            "at send" if at_send else rendering.number_of_bytes(mean[name])
            for name in ("payload_bytes", _EXECUTED)
        ),
        *([rendering.number_of_bytes(mean["wire_bytes"]) if _differ(sums, steps) else ""] if both else []),
        *(rendering.number_of_bytes(mean[name]) for name in shown),
        rendering.duration(mean["host_ns"]),
    )


def straggler_parts(statement: str | None) -> list[str]:
    """Return the paragraph about stragglers; empty if no rank stands out."""
    return [rendering.paragraph(f"Stragglers: {statement}") + "\n"] if statement else []


def moved_parts(moved: Sequence[Mapping[str, Any]], reason: str | None) -> list[Rows | str]:
    """Return the table of the machine's counters, and the reason if they do not cover the complete run."""
    if not moved:
        return [f"Moved bytes: none known. {reason or ''}".rstrip(), ""]
    headings = [
        Heading("host"),
        Heading("interface"),
        Heading("sent", True),
        Heading("received", True),
        Heading("over", True),
    ]
    rows = [
        (
            str(row["host"]),
            str(row["device"]),
            rendering.number_of_bytes(row["sent_bytes"]),
            rendering.number_of_bytes(row["received_bytes"]),
            f"{float(row['seconds']):.1f} s",
        )
        for row in moved
        if row["sent_bytes"] or row["received_bytes"]
    ]
    title = "Moved: counters of the whole machine, all its processes"
    return [Rows(headings, rows, title=title), *([f"Not the complete run: {reason}.", ""] if reason else [])]


def health(facts: Mapping[str, Any]) -> str:
    """Return what was recorded, what is missing, and the cost of recording."""
    cost = "unknown"
    if not rendering.is_missing(facts["recorder_ns"]):
        cost = f"{rendering.duration(facts['recorder_ns'])} per rank"
        if not rendering.is_missing(facts["recorder_share"]):
            cost += f", {100 * float(facts['recorder_share']):.3f} % of the run"
    counts = ", ".join(f"{facts[name]:,} {label}" for name, label in _COUNTS.items())
    for name, where in (("summed", "in sums"), ("outside", "outside the steps recorded")):
        counts += f", {facts[name]:,} {where}" if facts[name] else ""
    lines = [("recorded", counts), ("own cost", cost), *(("note", str(note)) for note in facts["notes"])]
    return rendering.facts(lines)
