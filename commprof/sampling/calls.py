"""What each rank of a job has issued last, and how far each call has come. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, NamedTuple

from commprof.align.ranks.agreement import Agreed, agreed
from commprof.schema import UNKNOWN_SPLITS, Layer

MAIN_THREAD: Final = "MainThread"
WINDOW: Final = 20_000  # the last records of a rank that are looked at

# Layers whose waits the recorder times: what was not waited for there is still on its way, or was left alone.
_TIMED_LAYERS: Final = frozenset({Layer.PROCESS_GROUP.value, Layer.BACKEND.value})


class What(NamedTuple):
    """What is equal in all calls of one signature."""

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
        """Whether the host itself carries it out, so that a wait of the host is a wait for it."""
        return self.device is None or self.device.partition(":")[0] == "cpu"

    @property
    def agreed(self) -> Agreed:
        """What all ranks of the group must agree about in one collective."""
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
    thread_ident: int | None = None  # by which stacks name the thread; None where the trace does not say
    module: str | None = None

    @property
    def place(self) -> int:
        """How many the rank had issued before it in the group."""
        return -1 - self.pg_seq if self.raised else self.pg_seq

    @property
    def other_thread(self) -> str | None:
        """The thread that issued it, where that is not the main one."""
        return None if self.thread == MAIN_THREAD else self.thread

    @property
    def end_ns(self) -> int:
        """When it was over for the program, as far as the host knows."""
        return max(self.return_ns, self.wait_end_ns, self.device_end_ns)


class Stage(Enum):
    """How far a call has come."""

    INSIDE = auto()  # the program stands in the call, or in its wait
    UNKNOWN = auto()  # issued; whether it is complete shows nowhere (a device, or a wait in C++)
    ISSUED = auto()  # asynchronous, and not waited for yet
    DONE = auto()


class GroupFacts(NamedTuple):
    """A process group as its members describe it."""

    pg: str
    desc: str | None
    ranks: tuple[int, ...]


@dataclass(slots=True)
class RankCalls:
    """What one rank has issued.

    Attributes:
        calls: the last ones, oldest first.
        total: how many there are, those before the window included.
        ended: the recording was closed in order.
        last_clock: (monotonic, realtime) of the last time when both were read together, in ns.
        stacks: signal and file by which the process writes its stacks, where it offers that.
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
        """Whether ``calls`` holds all that the rank has issued."""
        return self.total <= len(self.calls)

    def stages(self) -> list[Stage]:
        """How far each of ``calls`` has come."""
        return list(_stages(self.calls, self.ended))

    def inside(self) -> list[Call]:
        """The calls in which the program stands: one in each thread at most, as a rule."""
        return [call for call, stage in zip(self.calls, self.stages(), strict=True) if stage is Stage.INSIDE]

    def last_done(self) -> Call | None:
        """The call that ended last, as far as that is known."""
        stages = self.stages()
        done = [call for call, stage in zip(self.calls, stages, strict=True) if stage is Stage.DONE]
        return max(done, key=lambda call: call.end_ns, default=None)

    def last_unknown(self) -> Call | None:
        """The last call of which nothing shows whether it is complete."""
        later: set[str] = set()  # groups of which a later call has ended: they end in the order of a group
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
    # It waits as soon as it has returned, and only the end of that wait is recorded.
    return Stage.INSIDE if is_last else Stage.DONE
