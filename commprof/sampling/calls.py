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

# Layers whose waits the recorder times. A call of such a layer that has no wait is in progress or was abandoned.
_TIMED_LAYERS: Final = frozenset({Layer.PROCESS_GROUP.value, Layer.BACKEND.value})


class What(NamedTuple):
    """The values that are equal in all calls with the same signature."""

    op: str
    pg: str
    is_p2p: bool
    payload_bytes: int
    dtype: str | None
    reduce_op: str | None
    peer: int  # the global rank of the root, or of the peer of a message; -1 for no rank or any rank
    device: str | None
    is_async: bool
    backend: str | None = None
    input_bytes: int | None = None
    output_bytes: int | None = None
    input_splits: str | None = UNKNOWN_SPLITS
    output_splits: str | None = UNKNOWN_SPLITS

    @property
    def on_host(self) -> bool:
        """Whether the call runs on the host, so that a wait of the program is a wait for the call."""
        return self.device is None or self.device.partition(":")[0] == "cpu"

    @property
    def agreed(self) -> Agreed:
        """The values that must be equal on all ranks of the group in one collective."""
        return agreed(self.op, self.payload_bytes, self.dtype, self.reduce_op, self.peer, self.backend)


class Call(NamedTuple):
    """One collective or message that a rank issued, or a call that raised an exception.

    All times are in ns, and 0 means that the time is not known. ``pg_seq`` is the column of the table ``collectives``.
    It is negative for a call that raised an exception.
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
        """The number of calls that the rank had issued in the group before this call."""
        return -1 - self.pg_seq if self.raised else self.pg_seq

    @property
    def other_thread(self) -> str | None:
        """The name of the thread that issued the call; None if it is the main thread or is not known."""
        return None if self.thread == MAIN_THREAD else self.thread

    @property
    def end_ns(self) -> int:
        """The time in ns at which the call ended for the program, as far as the host recorded it."""
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
    """The last calls of one rank, with the identity of its process.

    Attributes:
        calls: The last calls of the rank, the oldest first. At most ``WINDOW`` records are read.
        total: The number of all calls of the rank, including the calls before the window.
        ended: Whether the rank closed its recording normally.
        last_clock: The monotonic and the real-time clock in ns when both were last read together.
        stacks: The signal on which the process writes its stacks, and the file, if the process supports this.
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
        """Whether ``calls`` contains all calls of the rank."""
        return self.total <= len(self.calls)

    def stages(self) -> list[Stage]:
        """Return the stage of each call in ``calls``."""
        return list(_stages(self.calls, self.ended))

    def inside(self) -> list[Call]:
        """Return the calls that the program is inside of. Each thread usually has at most one such call."""
        return [call for call, stage in zip(self.calls, self.stages(), strict=True) if stage is Stage.INSIDE]

    def last_done(self) -> Call | None:
        """Return the call that ended last, or None if no call is known to have ended."""
        stages = self.stages()
        done = [call for call, stage in zip(self.calls, stages, strict=True) if stage is Stage.DONE]
        return max(done, key=lambda call: call.end_ns, default=None)

    def last_unknown(self) -> Call | None:
        """Return the last call whose completion is not known, or None if there is none."""
        # The groups with a later call that has ended. Calls of a group end in order, so earlier calls have ended too.
        later: set[str] = set()
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
        # A thread that has issued another call since then is no longer inside this call.
        return Stage.INSIDE if is_last else Stage.DONE
    if not call.what.on_host:
        return Stage.UNKNOWN
    if ended and not call.what.is_async:
        return Stage.DONE  # a synchronous call on the host returns when it is complete
    if call.wait_begin_ns:
        # The recorder also writes the end of a wait that an exception ends.
        return Stage.DONE if ended else Stage.INSIDE
    if call.layer not in _TIMED_LAYERS:
        return Stage.UNKNOWN
    if call.what.is_async:
        return Stage.ISSUED
    # The program waits as soon as the call returns, and only the end of that wait is recorded.
    return Stage.INSIDE if is_last else Stage.DONE
