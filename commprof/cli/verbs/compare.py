"""``commprof compare``: compares runs by the settings in which their configs differ."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from commprof.cli import rendering
from commprof.cli.extras import needed
from commprof.cli.rendering import Heading, Rows
from commprof.cli.runs import asked, each_path, has_ended
from commprof.schema import OPS

if TYPE_CHECKING:
    import pandas as pd

    from commprof.analysis.api import Advice, Comparison
    from commprof.trace.reader import Run

HELP_ORDER = 30

_EXPOSED: Final = ("exposed_ns", "exposed_low_ns", "exposed_high_ns", "step_ns", "exposed_share")
_ISSUED: Final = "wire_bytes_per_step"
_EXECUTED: Final = "executed_wire_bytes_per_step"
LEGEND: Final = (
    "requested: the operation that the config, DDP or FSDP requests to reduce gradients. issued: what was issued for it, "
    "and the intended operation if that differs. (no purposes): nothing tells which collectives reduce gradients, so all "
    "collectives of a step without a purpose are listed. Bytes and times are per training step. payload: S of nccl-tests, "
    "all groups. wire per rank: modelled bytes that a rank sends, mean over all ranks of the job, for the operations that "
    "the backend ran (gloo's behavior is known, NCCL's from an aligned log). as issued: the same for the issued operations, "
    "if it differs or the executed operations are not known. time: median without the first step, with its 95 % interval. "
    "exposed: as in the report of a run."
)

NO_LOSS: Final = (
    'loss -: the program did not report it. Call commprof.metric("loss", value) in each step to record it.'
)


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="Run directories, directories of runs, or 'latest'.", show_default=False
        ),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON with exact bytes and nanoseconds.")
    ] = False,
) -> int:
    """Compare settings by their traffic and their step time, and recommend settings.

    For each setting, the command shows the requested operation, the issued operations, and the bytes
    that a rank sends.
    """
    answers = comparison_of(runs)
    if as_json:
        rendering.show_json(answers["advised"])
    else:
        show(answers)
    return 0


def comparison_of(runs: list[str]) -> dict[str, Any]:
    """Compare ``runs`` and return the output as JSON values; from the cache if it was computed before."""
    from commprof.analysis.storage import answer_files

    answers: dict[str, Any] = answer_files.remembered("compare", each_path(runs), lambda: _asked(runs))
    return answers


def _asked(runs: list[str]) -> tuple[dict[str, Any], bool]:
    """Return the comparison of ``runs``, and whether the result can be cached because all runs have ended."""
    with needed("analysis", "to compare runs"):
        from commprof.analysis import api

        opened_runs, compared = asked(runs, lambda opened: api.compare_both(opened, ranks=False))
    settings = with_exposed(compared)
    answers = {
        "settings": settings,
        "traffic": compared.traffic,
        "groups": compared.groups,
        "notes": [*incomplete(opened_runs), *_several_trainings(opened_runs)],
        "sentences": compared.advice.sentences,
        "advised": with_advice(settings, compared.advice),
    }
    return rendering.plain(answers), all(map(has_ended, opened_runs))


def _several_trainings(runs: Sequence[Run]) -> list[str]:
    """Return a sentence for each run with several trainings, because the comparison shows their common mean."""
    from commprof.analysis import api

    trainings = [(run.path.name, api.several_trainings(run)) for run in runs]
    return [f"{name}: {text}." for name, text in trainings if text is not None]


def show(answers: Mapping[str, Any]) -> None:
    """Print the settings, what their runs lack, and the recommendation.

    Args:
        answers: the result of :func:`comparison_of`.
    """
    show_comparison(answers["settings"], answers["traffic"], answers["groups"])
    rendering.show(*answers["notes"], "", *map(rendering.paragraph, answers["sentences"]))


def with_exposed(compared: Comparison) -> pd.DataFrame:
    """Return the answer of ``api.compare`` with the exposed time of each setting."""
    exposed = compared.resources[["label", *_EXPOSED]]
    frame: pd.DataFrame = compared.settings.merge(exposed, on="label", how="left", validate="one_to_one")
    return frame


def with_advice(frame: pd.DataFrame, advice: Advice) -> list[dict[str, Any]]:
    """Return the rows of ``api.compare``, each with the advice on its setting and the overall advice."""
    weighed = {row["label"]: row for row in rendering.records(advice.settings)}
    return [
        {
            **row,
            **{name: weighed[row["label"]][name] for name in ("recommended", "left_out")},
            "advice_answer": advice.answer,
            "advice": list(advice.sentences),
        }
        for row in rendering.records(frame)
    ]


def show_comparison(
    rows: Sequence[Mapping[str, Any]],
    traffic: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Print the answer of ``api.compare``: settings in full if the terminal is wide enough, otherwise lettered.

    Args:
        traffic: the answer of ``api.traffic_by_setting`` to the same runs.
        groups: the answer of ``api.traffic_by_group`` to the same runs.
    """
    sent = traffic, groups
    labels = [str(row["label"]) for row in rows]
    tables = _tables(rows, *sent, labels)
    if not all(rendering.fits(table) for table in tables):
        marks = [_mark(position) for position in range(len(rows))]
        legend = rendering.facts(zip(marks, labels, strict=True))
        tables = _tables(rows, *sent, marks, "")
        rendering.show(legend, "")
    unknown = any(rendering.is_missing(row["final_loss"]) for row in rows)
    hint = [rendering.paragraph(NO_LOSS)] if unknown else []
    rendering.show(*tables, rendering.paragraph(LEGEND), *hint)


def _tables(
    rows: Sequence[Mapping[str, Any]],
    traffic: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    labels: Sequence[str],
    heading: str = "setting",
) -> list[Rows]:
    by_operation, by_group = operations_table(rows, traffic, labels), groups_table(rows, groups, labels)
    optional = [by_operation, by_group]
    return [
        comparison_table(rows, labels, heading),
        *(table for table in optional if len(table.headings) > 1),
    ]


def _mark(position: int) -> str:
    letters = string.ascii_uppercase
    return (
        letters[position]
        if position < len(letters)
        else f"{letters[position // 26 - 1]}{letters[position % 26]}"
    )


def comparison_table(
    rows: Sequence[Mapping[str, Any]], labels: Sequence[str], heading: str = "setting"
) -> Rows:
    """Return the table with one row per setting: operations, bytes, time, loss."""
    from commprof.analysis.columns.exposed_texts import exposed_time

    both = any(_differ(row) for row in rows)
    headings = (
        Heading(heading),
        Heading("requested"),
        Heading("issued"),
        Heading("payload", number=True),
        Heading("wire per rank", number=True),
        *([Heading("as issued", number=True)] if both else []),
        Heading("time", number=True),
        Heading("exposed", number=True),
        Heading("loss", number=True),
    )
    cells = [
        (
            label,
            rendering.text(row["requested_op"]),
            _issued(row),
            rendering.number_of_bytes(_rounded(row["payload_bytes_per_step"])),
            rendering.number_of_bytes(_rounded(row[_EXECUTED])),
            *([rendering.number_of_bytes(_rounded(row[_ISSUED])) if _differ(row) else ""] if both else []),
            rendering.spread(*(row[f"step_time_{end}ns"] for end in ("", "low_", "high_"))),
            exposed_time(row) or rendering.MISSING,
            rendering.loss(row["final_loss"]),
        )
        for row, label in zip(rows, labels, strict=True)
    ]
    return Rows(headings, cells)


def _measure(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the column of wire bytes to show for all ``rows``, and the suffix of the column heading.

    The column is the issued bytes if one row has no known executed bytes, otherwise the executed bytes.
    """
    unknown = any(rendering.is_missing(row[_EXECUTED]) for row in rows)
    return (_ISSUED, ", as issued") if unknown else (_EXECUTED, "")


def _differ(row: Mapping[str, Any]) -> bool:
    """Return whether the executed wire bytes differ from the issued wire bytes or are not known.

    The result is False if the issued wire bytes are not known.
    """
    if rendering.is_missing(row[_ISSUED]):
        return False
    return bool(_rounded(row[_EXECUTED]) != _rounded(row[_ISSUED]))


def _issued(row: Mapping[str, Any]) -> str:
    issued, intended = rendering.text(row["issued_op"]), rendering.text(row["intended_op"])
    if not rendering.is_missing(row["issued_reason"]):
        return f"{issued.replace(', ', chr(10))}\n(no purposes)"
    return issued if intended in (rendering.MISSING, issued) else f"{issued} for\n{intended}"


def operations_table(
    rows: Sequence[Mapping[str, Any]], traffic: Sequence[Mapping[str, Any]], labels: Sequence[str]
) -> Rows:
    """Return the table of wire bytes per step by issued operation; one column per operation that any setting issues."""
    column, kind = _measure(traffic)
    sums: dict[str, dict[str, float]] = {}
    for row in traffic:
        of_setting = sums.setdefault(str(row["label"]), {})
        of_setting[row["op"]] = of_setting.get(row["op"], 0.0) + row[column]
    used = [op for op in OPS if any(of_setting.get(op) for of_setting in sums.values())]
    headings = (Heading(f"wire by operation{kind}"), *(Heading(op, number=True) for op in used))
    cells = [
        (label, *(rendering.number_of_bytes(_cell(row, sums, op)) for op in used))
        for row, label in zip(rows, labels, strict=True)
    ]
    return Rows(headings, cells)


def _cell(row: Mapping[str, Any], sums: Mapping[str, Mapping[str, float]], name: str) -> Any:
    """Return the sum called ``name`` for the setting of ``row``; None if the setting has no complete step."""
    if rendering.is_missing(row[_ISSUED]):
        return None
    return _rounded(sums.get(str(row["label"]), {}).get(name, 0.0))


def groups_table(
    rows: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], labels: Sequence[str]
) -> Rows:
    """Return the table of wire bytes per step by group name and size; no columns if each setting has one kind."""
    column, which = _measure(groups)
    sums: dict[str, dict[str, float]] = {}
    for row in groups:
        kind = f"{rendering.text(row['group_desc'])}\nof {row['group_size']}"
        of_setting = sums.setdefault(str(row["label"]), {})
        of_setting[kind] = of_setting.get(kind, 0.0) + row[column]
    several = any(len(of_setting) > 1 for of_setting in sums.values())
    kinds = (
        list(dict.fromkeys(kind for of_setting in sums.values() for kind in of_setting)) if several else []
    )
    headings = (Heading(f"wire by group{which}"), *(Heading(kind, number=True) for kind in kinds))
    cells = [
        (
            label,
            *(
                rendering.number_of_bytes(_rounded(sums.get(str(row["label"]), {}).get(kind, 0.0)))
                for kind in kinds
            ),
        )
        for row, label in zip(rows, labels, strict=True)
    ]
    return Rows(headings, cells)


def _rounded(value: Any) -> Any:
    return value if rendering.is_missing(value) else round(float(value))


def incomplete(runs: Sequence[Run]) -> list[str]:
    """Return a sentence for each run in which something is missing."""
    return [f"{run.path.name}: {note}" for run in runs for note in run.health.notes]
