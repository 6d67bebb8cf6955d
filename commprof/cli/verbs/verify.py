"""``commprof verify``: closes the ledger of a run: requested, issued, executed, moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from commprof.cli import rendering
from commprof.cli.extras import needed
from commprof.cli.rendering import Heading, Rows
from commprof.cli.runs import RunArgument, remembered
from commprof.exit_codes import State

if TYPE_CHECKING:
    from commprof.ledger.levels import LedgerRow, Unexplained
    from commprof.trace.reader import Run

HELP_ORDER = 70

STATES: Final = {
    State.CLOSED: "closed: everything is explained, or labelled as not part of training",
    State.MISMATCH: "mismatch: see what is unexplained",
    State.UNKNOWN: "cannot tell",
}
_HEADINGS: Final = (
    Heading("purpose, level"),
    Heading("operation"),
    Heading("calls", number=True),
    Heading("payload", number=True),
    Heading("wire per member", number=True),
    Heading(""),
)
LEGEND: Final = (
    "requested: what the config requests. issued: what the program handed to torch.distributed. executed: what the backend "
    "ran. payload: S of nccl-tests. wire per member: modelled; the sum of the bytes that a rank of the group sends on "
    "average for each collective, and of the bytes of each message. Compare and Overview show wire per rank: the mean over "
    "all ranks of the job, which is less if a group has fewer ranks."
)
_MOST_LISTED: Final = 20


def verify(
    run: RunArgument,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON with exact bytes and every item.")
    ] = False,
) -> int:
    """Reconcile the requested, issued, executed and moved bytes of a run, and explain the differences.

    The requested bytes follow from the config of the run. The exit code is 0 if the ledger is closed, 1 if
    the ledger has a mismatch, and 3 if a part of the ledger is not known.
    """
    verdict = remembered("verify", run, _verdict, frames=False)
    exit_code = int(verdict["exit_code"])
    if as_json:
        rendering.show_json(verdict)
        return exit_code
    from commprof.ledger.levels import LedgerRow, Unexplained

    state = STATES[State(verdict["state"])]
    rendering.show(
        rendering.facts([("run", verdict["run"]), ("ledger", state), *verdict["sources"].items()]),
        "",
        *_tables([LedgerRow(**row) for row in verdict["rows"]]),
        *_listing([Unexplained(**item) for item in verdict["unexplained"]]),
        *map(rendering.paragraph, verdict["sentences"]),
        "",
        rendering.paragraph(LEGEND),
    )
    return exit_code


def _verdict(run: Run) -> dict[str, Any]:
    with needed("analysis", "to verify a run"):
        from commprof.analysis import api

        return {"run": str(run.path), **api.verify(run).as_dict()}


def _tables(rows: Sequence[LedgerRow]) -> list[Rows]:
    before = [row for row in rows if not row.steps]
    apart = [row for row in rows if _is_apart(row)]
    inside = [row for row in rows if row.steps and not _is_apart(row)]
    tables = []
    if before:
        tables.append(_table("Before the first step, in total", before, 1))
    if inside:
        steps = inside[0].steps
        name = "Training: the one step" if steps == 1 else f"Per training step, mean of {steps} steps"
        tables.append(_table(name, inside, steps))
    if apart:
        tables.append(_table("Not in every step, or outside of the steps, in total", apart, 1))
    return tables


def _is_apart(row: LedgerRow) -> bool:
    """Return whether no rule predicts the row and its mean per step would describe no actual step.

    This is the case if some of its operations were issued outside of the steps. It is also the case if the number
    of operations is not a multiple of the number of steps.
    """
    if not row.steps or row.requested_op is not None:
        return False
    return row.outside_count > 0 or row.issued_count % row.steps != 0


def _table(title: str, rows: Sequence[LedgerRow], steps: int) -> Rows:
    cells: list[Sequence[str]] = []
    last: str | None = ""
    for row in rows:
        if row.purpose != last:
            cells.append((row.purpose or "(no purpose given)", *[""] * 5))
            last = row.purpose
        cells += _levels(row, steps)
    return Rows(_HEADINGS, cells, title=title)


def _levels(row: LedgerRow, steps: int) -> list[Sequence[str]]:
    cells: list[Sequence[str]] = []
    if row.requested_op is not None:
        same = row.requested_op == row.expected_op
        cells.append(
            (
                "  requested",
                row.requested_op,
                _mean(row.expected_count, steps) if same else rendering.MISSING,
                _bytes(row.expected_payload_bytes, steps),
                _bytes(row.requested_wire_bytes, steps),
                "" if same else f"by the rules: {row.expected_op}",
            )
        )
    cells.append(
        (
            "  issued",
            row.issued_op or "nothing",
            _mean(row.issued_count, steps),
            _bytes(row.issued_payload_bytes, steps),
            _bytes(row.issued_wire_bytes, steps),
            _explanation(row),
        )
    )
    if row.issued_op is not None:
        cells.append(
            (
                "  executed",
                row.executed_op or "not known",
                _mean(row.executed_count, steps),
                rendering.MISSING if row.executed_op is None else _bytes(row.issued_payload_bytes, steps),
                _bytes(row.executed_wire_bytes, steps),
                "",
            )
        )
    return cells


def _explanation(row: LedgerRow) -> str:
    if row.explained_by is None:
        return "unexplained"
    if row.explained_by == "script":
        return "cannot tell"
    if row.explained_by != "label" and row.explained_bytes < row.issued_payload_bytes:
        return "in part unexplained"
    if row.expected_payload_bytes is not None and row.issued_payload_bytes != row.expected_payload_bytes:
        apart = row.issued_payload_bytes - row.expected_payload_bytes
        size = rendering.number_of_bytes(round(abs(apart) / max(row.steps, 1)))
        return f"{size} {'more' if apart > 0 else 'less'} than the rules say"
    return {
        "config": "as the rules say",
        "label": "labelled, not predicted",
        "barrier": "barrier",
        "evaluation": "an evaluation",
    }[row.explained_by]


def _mean(value: int | None, steps: int) -> str:
    return rendering.MISSING if value is None else rendering.count(value / steps)


def _bytes(value: float | None, steps: int) -> str:
    return rendering.MISSING if value is None else rendering.number_of_bytes(round(value / steps))


def _listing(unexplained: Sequence[Unexplained]) -> list[str]:
    if not unexplained:
        return []
    pairs = [pair for item in unexplained[:_MOST_LISTED] for pair in _described(item)]
    more = len(unexplained) - _MOST_LISTED
    last = [f"and {more:,} more; commprof verify --json lists all"] if more > 0 else []
    return ["Unexplained and missing", rendering.facts(pairs), *last, ""]


def _described(item: Unexplained) -> Sequence[tuple[str, str]]:
    before = "init" in item.steps
    steps = item.steps if before else f"step{'' if item.steps.isdigit() else 's'} {item.steps}"
    steps = f"after {steps}" if item.outside else steps
    what = f"{item.count:,} {item.op}, {item.payload_bytes:,} bytes, {item.purpose or 'no purpose given'}"
    where = "missing" if item.kind == "missing" else f"at {item.call_site or 'an unknown place'}"
    group = f", ranks {item.group_ranks}" if item.group_ranks else ""
    return (f"  {steps}", what + group), ("", where), ("", item.reason)
