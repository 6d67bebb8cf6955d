"""The last calls of each rank, and the stage of each call. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, NamedTuple

from commprof.align.ranks.agreement import Agreed, agreed
from commprof.schema import UNKNOWN_SPLITS, Layer

MAIN_THREAD: Final = "MainThread"
WINDOW: Final = 20_000  # how many of the last records of a rank are read

# Layers whose waits the recorder times: a call without a wait there is still under way, or was abandoned.
_TIMED_LAYERS: Final = frozenset({Layer.PROCESS_GROUP.value, Layer.BACKEND.value})


class What(NamedTuple):
    """The values that are equal in all calls of one signature."""

    op: str
    pg: str
    is_p2p: bool
    payload_bytes: int
    dtype: str | None
    reduce_op: str | None
    peer: int  # global rank of the root or of the other side; -1 for none or any
    device: str | None
    is_async: bool
    backend: str | None = None
    input_bytes: int | None = None
    output_bytes: int | None = None
    input_splits: str | None = UNKNOWN_SPLITS
    output_splits: str | None = UNKNOWN_SPLITS

    @property
    def on_host(self) -> bool:
        """Whether the host runs it, so that a wait of the host is a wait for it."""
        return self.device is None or self.device.partition(":")[0] == "cpu"

    @property
    def agreed(self) -> Agreed:
        """The values on which all ranks of the group must agree in one collective."""
        return agreed(self.op, self.payload_bytes, self.dtype, self.reduce_op, self.peer, self.backend)


class Call(NamedTuple):
    """One collective or message that a rank has issued, or that raised. Times of 0 are not known.

    ``pg_seq``: as in the table ``collectives``: negative for a call that raised.
    """

    what: What
    pg_seq: int
    site: str | None  # file:line function
    purpose: str | None
    step: int
    thread: str | None
    layer: str
    raised: bool
    issue_ns: int
    return_ns: int
    wait_begin_ns: int
    wait_end_ns: int
    device_end_ns: int
    thread_ident: int | None = None  # identifies the thread in stacks; None if the trace lacks it
    module: str | None = None

    @property
    def place(self) -> int:
        """How many calls the rank had issued before it in the group."""
        return -1 - self.pg_seq if self.raised else self.pg_seq

    @property
    def other_thread(self) -> str | None:
        """The thread that issued it; None for the main thread."""
        return None if self.thread == MAIN_THREAD else self.thread

    @property
    def end_ns(self) -> int:
        """When it ended for the program, as far as the host knows."""
        return max(self.return_ns, self.wait_end_ns, self.device_end_ns)


class Stage(Enum):
    """The stage of a call."""

    INSIDE = auto()  # the program is in the call, or in its wait
    UNKNOWN = auto()  # issued; its completion is not recorded (a device, or a wait in C++)
    ISSUED = auto()  # asynchronous, and not waited for yet
    DONE = auto()


class GroupFacts(NamedTuple):
    """A process group as its members describe it."""

    pg: str
    desc: str | None
    ranks: tuple[int, ...]


@dataclass(slots=True)
class RankCalls:
    """The calls of one rank.

    Attributes:
        calls: the last ones, oldest first.
        total: number of calls, including those before the window.
        ended: the recording was closed in order.
        last_clock: (monotonic, realtime) of the last time when both were read together, in ns.
        stacks: signal and file by which the process writes its stacks, if it supports that.
    """

    rank: int
    attempt: int
    pid: int
    host: str | None = None
    start_ticks: int | None = None
    world_size: int | None = None
    calls: list[Call] = field(default_factory=list)
    total: int = 0
    ended: bool = False
    groups: dict[str, GroupFacts] = field(default_factory=dict)
    last_clock: tuple[int, int] | None = None
    stacks: dict[str, Any] | None = None

    @property
    def whole(self) -> bool:
        """Whether ``calls`` has all calls of the rank."""
        return self.total <= len(self.calls)

    def stages(self) -> list[Stage]:
        """The stage of each of ``calls``."""
        return list(_stages(self.calls, self.ended))

    def inside(self) -> list[Call]:
        """The calls in which the program is now: usually at most one in each thread."""
        return [call for call, stage in zip(self.calls, self.stages(), strict=True) if stage is Stage.INSIDE]

    def last_done(self) -> Call | None:
        """The call that ended last, if known."""
        stages = self.stages()
        done = [call for call, stage in zip(self.calls, stages, strict=True) if stage is Stage.DONE]
        return max(done, key=lambda call: call.end_ns, default=None)

    def last_unknown(self) -> Call | None:
        """The last call whose completion is not known."""
        later: set[str] = set()  # groups with a later call that has ended: calls of a group end in order
        for call, stage in reversed(list(zip(self.calls, self.stages(), strict=True))):
            if stage is Stage.UNKNOWN and call.what.pg not in later:
                return call
            if stage is Stage.DONE and not call.raised:
                later.add(call.what.pg)
        return None


def _stages(calls: Sequence[Call], ended: bool) -> Iterator[Stage]:
    last_of_thread = {call.thread: position for position, call in enumerate(calls)}
    for position, call in enumerate(calls):
        yield _stage(call, last_of_thread[call.thread] == position and not ended, ended)


def _stage(call: Call, is_last: bool, ended: bool) -> Stage:
    if call.raised or call.wait_end_ns or call.device_end_ns:
        return Stage.DONE
    if not call.return_ns:
        # A thread that went on to issue another call has left this one, however that happened.
        return Stage.INSIDE if is_last else Stage.DONE
    if not call.what.on_host:
        return Stage.UNKNOWN
    if ended and not call.what.is_async:
        return Stage.DONE  # on the host a call that is not asynchronous returns when it is complete
    if call.wait_begin_ns:
        # A wait that an exception ends is recorded to its end as well.
        return Stage.DONE if ended else Stage.INSIDE
    if call.layer not in _TIMED_LAYERS:
        return Stage.UNKNOWN
    if call.what.is_async:
        return Stage.ISSUED
    # The program waits as soon as the call returns, and only the end of that wait is recorded.
    return Stage.INSIDE if is_last else Stage.DONE
