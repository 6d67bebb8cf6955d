"""The rows of the ledger, with the levels of each purpose, and the verdict on a run.

Bytes are whole numbers, except ``wire_bytes``, the modeled mean number of bytes that a rank sends
(``schema.wire_bytes``).
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
PART: Final = "part"  # the part of the run between its first and last reading
WHAT_TO_SET: Final = "What to set: "  # the beginning of the sentence with the remedy


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """The values of one purpose before the first step, or summed over all training steps.

    If a level is not known, all its fields are None. ``expected_*`` are the messages that the runtime sends for the
    config, according to its rules. ``requested_wire_bytes`` are the wire bytes of the literal request: the same
    payload, sent with ``requested_op`` in the group of each message.
    """

    when: str  # init or steps
    steps: int  # number of training steps in the sums; 0 for init
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
    explained_bytes: int  # the explained part of issued_payload_bytes
    # config, barrier or evaluation; label: no rule predicts the amount; script: issued in a group that the script
    # created, which no rule covers
    explained_by: str | None
    group_size: int  # number of ranks of the largest group
    outside_count: int = 0  # the part of issued_count that was issued between steps


class RequestedReduction(NamedTuple):
    """The reduction of gradients that the config requests in one group. It is the same in each of ``steps``.

    Attributes:
        requested_op: The operation that the config requests.
        op: The operation that the runtime issues for ``requested_op``.
        group_size: The number of ranks of the group.
        count: The number of messages in a step.
        payload_bytes: The payload of ``op`` in a step.
        wire_bytes: The wire bytes that ``requested_op`` would send in a step.
        steps: The attempt and the number of each step.
    """

    requested_op: str
    op: str
    group_size: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls on a request
    payload_bytes: int
    wire_bytes: float
    steps: tuple[tuple[int, int], ...]


class Unexplained(NamedTuple):
    """Messages without an expectation (``kind`` is unexplained), or an expectation without messages (missing).

    ``outside`` is true if the messages were issued between steps, after one of ``steps`` ended.
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
    """Counters of one host, compared with the model of the executed operations in the same time.

    Attributes:
        host: The name of the host.
        device: The interface.
        when: ``steps`` or ``run``, or ``part`` if the readings do not cover the whole run.
        steps: The number of steps between the readings.
        sent_bytes, received_bytes: The bytes that the interface counted.
        expected_bytes: The modeled bytes. None if the counters cannot be compared with the model.
        reason: The reason why they cannot be compared, or None.
        allowed_bytes: The bytes that headers of the backend and retransmissions of TCP may add to the modeled bytes.
            None if an excess is not judged.
        header_bytes: The bytes of packet headers that were sent. None if packets were not counted.
        outside_bytes: The modeled bytes of evaluations, checkpoints and the time after the last step. None if not
            known.
        queued_first_bytes: The bytes that were handed to TCP and not acknowledged at the first reading. A part of them
            may be counted in ``sent_bytes``, although they were issued before.
        queued_last_bytes: The same at the last reading. A part of them may not be counted yet. None if this value was
            not read. In this case a deficit is not judged.
    """

    host: str
    device: str
    when: str
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
        state: Closed, mismatch or cannot tell.
        sentences: The report: what was requested, issued, executed and moved, and why the levels differ.
        rows: The rows of the ledger.
        moved: The comparison of each host's counters with the model.
        issued_bytes: The payload of all collectives. Each collective counts once.
        explained_bytes: The part of ``issued_bytes`` that an expectation explains.
        labelled_bytes: The part of ``issued_bytes`` with a purpose whose amount no rule predicts.
        unexplained: Every group of records without an explanation, and every expectation without records.
        sources: The source of each level, or the reason why the level is not known.
        disagreements: Clauses that state where the ranks of a group issued different collectives.
        differences: The first disagreement of each group, with the calls of each rank.
        order_differences: The places where ranks issued the collectives of several groups in different orders.
        unsure: Clauses about issued collectives that may or may not have been requested.
        request_reason: The reason why the request is not known. None if it is known.
        moved_together: The comparison of the sum over all hosts, if some host has no model of its own.
        requested_reductions: The requested reductions of gradients by step. ``rows`` contain the sums.
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
        """The setting that makes the runtime issue the requested reduction, or why no setting is needed.

        None if the requested reduction is issued, or not known.
        """
        return next((text.partition(WHAT_TO_SET)[2] for text in self.sentences if WHAT_TO_SET in text), None)

    @property
    def exit_code(self) -> int:
        """The exit code: 0 closed, 1 mismatch, 3 cannot tell."""
        return int(CODE_OF_STATE[self.state])

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as plain dictionaries and lists, with the exit code, without ``requested_reductions``."""
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
