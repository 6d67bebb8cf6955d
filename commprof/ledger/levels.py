"""The entries of the ledger, one for each purpose and level, and the verdict over them.

Bytes are whole numbers, except ``wire_bytes``, the modelled mean that a rank sends (``schema.wire_bytes``).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Final, NamedTuple

from commprof.align.ranks.agreement import Difference
from commprof.align.ranks.group_orders import OrderDifference
from commprof.exit_codes import CODE_OF_STATE, State

INIT: Final = "init"
STEPS: Final = "steps"
RUN: Final = "run"
PART: Final = "part"  # of the run: only between its readings
WHAT_TO_SET: Final = "What to set: "  # how the sentence about a remedy begins


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One purpose before the first step, or in all training steps together.

    A level that is not known has None in each of its fields. ``expected_*`` is what the runtime sends
    for the config, by its rules. ``requested_wire_bytes`` is what the config requests literally: the same payload, sent
    by ``requested_op`` in each message's own group.
    """

    when: str  # init or steps
    steps: int  # training steps that the sums are over; 0 for init
    purpose: str | None
    requested_op: str | None
    expected_op: str | None
    expected_count: int | None
    expected_payload_bytes: int | None
    requested_wire_bytes: float | None
    issued_op: str | None
    issued_count: int
    issued_payload_bytes: int
    issued_wire_bytes: float
    executed_op: str | None
    executed_count: int | None
    executed_wire_bytes: float | None
    explained_bytes: int  # of issued_payload_bytes
    # config, barrier or evaluation; label: no rule predicts the amount; script: in a group of the script, which no rule
    # knows
    explained_by: str | None
    group_size: int  # ranks of the largest group among them
    outside_count: int = 0  # of issued_count: after a step had ended, in none


class RequestedReduction(NamedTuple):
    """The reduction of gradients that the config requests in one group, equal in each of ``steps``.

    ``payload_bytes``: of ``op``, which the runtime issues for ``requested_op``. ``wire_bytes``: what ``requested_op``
    would send. ``steps``: attempt and step of each.
    """

    requested_op: str
    op: str
    group_size: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls on a request
    payload_bytes: int
    wire_bytes: float
    steps: tuple[tuple[int, int], ...]


class Unexplained(NamedTuple):
    """Records without an expectation, or an expectation without records: ``kind`` is unexplained or missing.

    ``outside``: issued after one of the ``steps`` had ended, in none.
    """

    kind: str
    steps: str  # "init", "4" or "0-3,7"
    purpose: str | None
    op: str
    group_ranks: str | None
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls on a record
    payload_bytes: int
    call_site: str | None
    reason: str
    outside: bool = False


class Moved(NamedTuple):
    """Counters of one host, compared with the model of what was executed in the same time.

    ``expected_bytes`` is None, with its ``reason``, where the two cannot be compared. ``allowed_bytes`` is what the
    backend's own headers and TCP's retransmissions may add to it; None where more than expected is not judged.
    ``header_bytes``: of the packets sent, where these were counted. ``outside_bytes``: what the model has of evaluations,
    checkpoints and the time after the last step; None where that is not known. ``queued_first_bytes`` and
    ``queued_last_bytes``: handed to TCP and not acknowledged at the first and at the last reading. Of the former some may
    be counted in ``sent_bytes``, though issued before; of the latter some may not be counted yet. The last is None where it
    was not read: then less than expected is not judged.
    """

    host: str
    device: str
    when: str  # "steps", "run", or "part": the readings leave out some of it
    steps: int
    sent_bytes: int
    received_bytes: int
    expected_bytes: float | None
    reason: str | None
    allowed_bytes: float | None = None
    header_bytes: int | None = None
    outside_bytes: float | None = None
    queued_first_bytes: int = 0
    queued_last_bytes: int | None = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The ledger of one run.

    Attributes:
        sentences: what was requested, issued, executed and moved, and why these differ.
        issued_bytes: payload of all collectives, each counted once.
        explained_bytes: how much of it an expectation explains.
        labelled_bytes: how much of it has a purpose whose amount no rule predicts.
        unexplained: every record without explanation, grouped, and every expectation without its record.
        disagreements: where the ranks of a group issued different things, as clauses.
        differences: the first of them of each group, with what each rank did.
        order_differences: where ranks issued the collectives of several groups in different orders.
        unsure: issued collectives that may or may not have been requested, as clauses.
        sources: level -> where it was taken from, or why it is not known.
        request_reason: why it is not known what was requested; None when it is.
        moved_together: the sum over all hosts, where some host has no model of its own.
        requested_reductions: what was requested to reduce gradients, step by step; ``rows`` have the sums.
    """

    state: State
    sentences: tuple[str, ...]
    rows: tuple[LedgerRow, ...]
    moved: tuple[Moved, ...]
    issued_bytes: int
    explained_bytes: int
    unexplained: tuple[Unexplained, ...]
    sources: dict[str, str]
    disagreements: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    order_differences: tuple[OrderDifference, ...] = ()
    unsure: tuple[str, ...] = ()
    labelled_bytes: int = 0
    request_reason: str | None = None
    moved_together: Moved | None = None
    requested_reductions: tuple[RequestedReduction, ...] = ()

    @property
    def remedy(self) -> str | None:
        """What to set for the requested reduction, or why nothing; None where it is issued, or not known."""
        return next((text.partition(WHAT_TO_SET)[2] for text in self.sentences if WHAT_TO_SET in text), None)

    @property
    def exit_code(self) -> int:
        """0 closed, 1 mismatch, 3 cannot tell."""
        return int(CODE_OF_STATE[self.state])

    def as_dict(self) -> dict[str, Any]:
        """All of it but ``requested_reductions`` as plain dictionaries and lists, the exit code included."""
        return {
            **{
                item.name: getattr(self, item.name)
                for item in fields(self)
                if item.name != "requested_reductions"
            },
            "state": str(self.state),
            "rows": [asdict(row) for row in self.rows],
            "moved": [row._asdict() for row in self.moved],
            "moved_together": self.moved_together._asdict() if self.moved_together else None,
            "unexplained": [item._asdict() for item in self.unexplained],
            "differences": [each.as_dict() for each in self.differences],
            "order_differences": [each.as_dict() for each in self.order_differences],
            "exit_code": self.exit_code,
        }
