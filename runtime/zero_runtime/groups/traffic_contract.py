"""The traffic contract (``traffic_contract``): every rank of a group issues the same messages, in the same order.

While the job runs, each collective of the data-parallel group is compared before it is issued: operation, purpose, bucket,
owner, elements, dtype and parameters. A message that follows the one before it as in an earlier step costs a look into a
set. Any other is agreed on first: the ranks write it into the store of the process group and wait for each other. So a rank
that is about to deviate stops before it issues anything. The ranks that have issued another message already, and wait in
it, answer through a thread that polls the store. All ranks raise one error. A rank that leaves says in the store how far
it has come; the others stop as soon as one of them issues a message beyond that.

The expected messages are those that the ranks agree on, not those of ``commprof.requested``: this package does not import
commprof, and the rules need the order of gradients, which only a run knows. ``commprof verify`` compares a run with them.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, NamedTuple

from commprof import hooks
from zero_runtime import comm, log
from zero_runtime.comm import COLLECTIVES, DEFAULT_TIMEOUT, Call, DataParallelGroup
from zero_runtime.errors import TrafficContractError, ZeroRuntimeError
from zero_runtime.groups.detailed_tags import add_reader

# Values of traffic_contract, beside warn.
OFF: Final = "off"
STOP: Final = "stop"
EXIT_CODE: Final = 2
_POLL_S: Final = 0.2  # how often a thread looks into the store
_ASK_S: Final = 0.05  # without an answer for so long, the threads of the other ranks are asked
_VOTE_S: Final = 3.0  # time for all ranks to say what they issue, and to read the error
_GRACE_S: Final = 10.0  # time for a collective to fail after the error; then the process exits
_KEPT: Final = 4096  # messages that a rank can still answer for
_SHOWN: Final = 3  # parameters in a sentence

_numbers: Final = count()  # of verdicts; equal on all ranks, which make as many


class Message(NamedTuple):
    """What all ranks must have in common in one collective."""

    operation: str
    purpose: str
    bucket: int | None
    owner: int | None
    numel: int
    dtype: str
    parameters: tuple[str, ...]

    @property
    def module(self) -> str:
        """The module of its first parameter, in a sentence."""
        return f"module {_module(self.parameters[0])}" if self.parameters else "no module"

    def described(self) -> str:
        """In a sentence."""
        where = "" if self.bucket is None else f" in bucket {self.bucket}"
        names = ", ".join(self.parameters[:_SHOWN])
        more = f" and {len(self.parameters) - _SHOWN} more" if len(self.parameters) > _SHOWN else ""
        carried = f" with {names}{more}" if names else ""
        owner = "" if self.owner is None else f" to member {self.owner}"
        return f"{self.operation} of {self.numel:,} elements ({self.dtype}) for {self.purpose}{owner}{where}{carried}"


class Place(NamedTuple):
    """Where a rank issues a message: step and micro-batch, -1 before the first, and the number within the step."""

    step: int
    micro_batch: int
    number: int


class Issued(NamedTuple):
    """A message of one rank."""

    place: Place
    message: Message

    @property
    def text(self) -> str:
        """As text, for the store."""
        return json.dumps([*self.place, *self.message])

    @classmethod
    def of(cls, text: str) -> Issued:
        """The message that ``text`` stands for."""
        *place, operation, purpose, bucket, owner, numel, dtype, parameters = json.loads(text)
        message = Message(operation, purpose, bucket, owner, numel, dtype, tuple(parameters))
        return cls(Place(*place), message)


@dataclass(slots=True)
class Verdict:
    """What a process knows of a deviation.

    Attributes:
        failure: the sentence about it; None without one.
        raised: the error has been raised in the program.
        inside: the program is in a collective.
        off: messages are compared no more.
        failing: held while the failure is noted.
        key: of the store, which all ranks share. All ranks make as many verdicts.
    """

    failure: str | None = None
    raised: bool = False
    inside: bool = False
    off: bool = False
    failing: threading.Lock = field(default_factory=threading.Lock)
    key: str = field(default_factory=lambda: f"zero_runtime/traffic/{next(_numbers)}")


class TrafficContract:
    """An observer of a group (:class:`zero_runtime.comm.Observer`) that compares its collectives.

    Args:
        group: the data-parallel ranks. All of them must make a contract.
        stops: whether a deviation is an error on all ranks; otherwise one rank warns, and the comparison ends.
        verdict: of this process, which the contracts of its groups share.
        name: of the contract among those that share a verdict.

    Attributes:
        methods: as of :class:`zero_runtime.comm.Observer`.
    """

    methods: Final = frozenset(COLLECTIVES)

    def __init__(self, group: DataParallelGroup, stops: bool, verdict: Verdict, name: str) -> None:
        self.verdict = verdict
        self._group, self._stops = group, stops
        self._store = comm.store()
        members = hashlib.sha256(repr(group.global_ranks).encode()).hexdigest()[:16]
        self._prefix = f"{verdict.key}/{name}/{members}"
        self._ids: dict[Message, int] = {}
        self._messages: list[Message] = []  # by their ids
        self._tagged: dict[tuple[str, hooks.tag, int], int] = {}  # ids by what identifies a bucket's message
        self._known: set[tuple[int, int]] = set()  # agreed on: a message, and the one before it
        self._history: list[tuple[int, Place]] = [(-1, Place(-1, -1, 0))] * _KEPT
        self._reached = -1  # number of the last message that this rank issues
        self._asked: set[int] = set()  # numbers of those that this rank itself agrees on
        self._step, self._begins = -1, 0  # the step, and the number of its first message
        self._before = -1
        self._ended = threading.Event()
        add_reader()
        if group.device.type == "cpu":
            comm.watch_waits(self._refuse)
        self._leave = weakref.WeakMethod(self._leave_program)
        atexit.register(_call, self._leave)
        self._thread = threading.Thread(target=self._watch, name="zero_runtime traffic contract", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the comparison on this rank."""
        self.verdict.off = True
        if not self._ended.is_set():
            self._ended.set()
            add_reader(-1)
            self._group.forget(self)
            try:
                place = self._history[self._reached % _KEPT][1]
                self._store.set(self._key("ended", self._rank), json.dumps([self._reached, place.step]))
                self._store.set(self._key("ended"), str(self._rank))
            except (RuntimeError, OSError):
                pass  # the store has ended with rank 0
        if self._thread is not threading.current_thread():
            self._thread.join(2 * _POLL_S + 1.0)

    def _leave_program(self) -> None:
        """Close at the exit. Rank 0 may have the store, so it stays until the others have left, or read that it leaves."""
        self.close()
        others = self._group.world_size - 1
        until = time.monotonic() + _VOTE_S
        with suppress(RuntimeError, OSError):
            while self._stops and self._rank == 0 and time.monotonic() < until:
                readers = others - len(self._departed())
                if readers == 0 or self._store.add(f"{self.verdict.key}/read", 0) >= readers:
                    break
                time.sleep(0.02)

    def observe(self, call: Call, issue: Callable[[], Any]) -> Any:
        """As of :class:`zero_runtime.comm.Observer`.

        Raises:
            TrafficContractError: this rank or another one deviates; the same on all ranks.
        """
        if self.verdict.off:
            return issue()
        self._refuse()
        message, number, moment = self._id_of(call), self._reached + 1, hooks.position
        if moment.step != self._step:
            self._step, self._begins = moment.step, number
        new = (self._before, message) not in self._known
        if new:
            self._asked.add(number)
        self._history[number % _KEPT] = message, Place(moment.step, moment.micro_step, number - self._begins)
        self._reached = number
        if new:
            self._agree(number)
            self._known.add((self._before, message))
        self._before = message
        work = self._run(issue)
        return work if work is None else _Work(work, self)

    def _id_of(self, call: Call) -> int:
        """The id of what ``call`` sends, equal for equal messages. Tags of buckets come back in every step."""
        why, compared = call.why, _COMPARED[call.method]
        value = None if compared is None else call.arguments[compared]
        tensors = () if value is None else value if isinstance(value, list | tuple) else (value,)
        numel = sum([each.numel() for each in tensors])
        if why is not None and why.bucket is not None:
            known = self._tagged.get((call.method, why, numel))
            if known is not None:
                return known
        message = Message(
            call.method.removeprefix("start_"),
            "other" if why is None else why.purpose,
            None if why is None else why.bucket,
            call.arguments.get("owner"),
            numel,
            str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            () if why is None else why.parameters,
        )
        number = self._ids.setdefault(message, len(self._messages))
        if number == len(self._messages):
            self._messages.append(message)
        if why is not None and why.bucket is not None:
            if len(self._tagged) >= _KEPT:
                self._tagged.clear()
            self._tagged[call.method, why, numel] = number
        return number

    def _run(self, issue: Callable[[], Any]) -> Any:
        """Call ``issue``; a collective that fails because of another rank's deviation raises what that rank raises."""
        self.verdict.inside = True
        try:
            return issue()
        except RuntimeError as error:
            if isinstance(error, ZeroRuntimeError):
                raise
            if self._stops and not self.verdict.off and self._failed_within(_VOTE_S):
                self.verdict.raised = True
                raise TrafficContractError(self.verdict.failure) from error
            raise
        finally:
            self.verdict.inside = False

    def _refuse(self) -> None:
        if self.verdict.failure is not None and self._stops:
            self.verdict.raised = True
            raise TrafficContractError(self.verdict.failure)

    def _failed_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self.verdict.failure is None and time.monotonic() < until:
            time.sleep(0.02)
        return self._stops and self.verdict.failure is not None

    # Agreement, by the thread that issues the message.

    def _agree(self, number: int) -> None:
        """Wait until all ranks have the same message ``number``. Raises TrafficContractError, or warns, if they have not."""
        try:
            if self._is_agreed(number):
                self._wait_for_all(number)
            else:
                self._dispute(number)
        except (RuntimeError, OSError) as error:
            if isinstance(error, ZeroRuntimeError):
                raise
            self.verdict.off = True  # the store has ended with rank 0: the collective itself will fail
        if self.verdict.failure is None:
            return
        if self._stops:
            self._refuse()
        self.verdict.off = True

    def _is_agreed(self, number: int) -> bool:
        """Count this rank among those that have the same message ``number`` as the first that wrote it; False otherwise."""
        message = json.dumps(self._at(number).message)
        if self._store.compare_set(self._key("message", number), "", message).decode() != message:
            return False
        self._store.add(self._key("agreed", number), 1)
        return True

    def _wait_for_all(self, number: int) -> None:
        begin, asked, pause = time.monotonic(), False, 0.0005
        while (
            self.verdict.failure is None
            and self._store.add(self._key("agreed", number), 0) < self._group.world_size
        ):
            passed = time.monotonic() - begin
            if passed > _ASK_S and not asked:
                asked = True
                claim = self._store.add(self._key("claims"), 1)
                self._store.set(self._key("claim", claim), str(number))
            if asked:
                comm.look()  # for other errors, for which a rank does not come
            if asked and self._store.check([self._key("ended")]):
                return  # a rank has left, and the collective itself will fail
            if passed > DEFAULT_TIMEOUT.total_seconds():
                raise TrafficContractError(
                    f"traffic_contract: rank {self._rank} waited {passed:.0f} s for the other ranks before "
                    f"{self._at(number).message.described()}; expected the same message on every rank, look for one that "
                    "has ended"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.01)

    def _dispute(self, number: int) -> None:
        """Ask all ranks for their message ``number``, and tell them in what they differ."""
        key = self._key("dispute")
        if self._store.compare_set(key, "", str(number)).decode() != str(number):
            self._failed_within(_VOTE_S + _GRACE_S)
            return
        self._vote(number)
        votes: dict[int, Issued] = {}
        until = time.monotonic() + _VOTE_S
        while len(votes) < self._group.world_size and time.monotonic() < until:
            for rank in self._group.global_ranks:
                vote = self._key("vote", rank)
                if rank not in votes and self._store.check([vote]):
                    votes[rank] = Issued.of(self._store.get(vote).decode())
            time.sleep(0.02)
        text = deviation(votes)
        told = self._store.compare_set(f"{self.verdict.key}/error", "", text).decode()
        if told == text and not self._stops:
            log.warning(told)
        self._fail(told)

    # Answers, by a thread of its own: the other one may wait in a collective.

    def _watch(self) -> None:
        pending: list[int] = []
        claims, voted = 0, False
        try:
            while not self._ended.wait(_POLL_S):
                if self.verdict.failure is None and self._store.check([f"{self.verdict.key}/error"]):
                    self._fail(self._store.get(f"{self.verdict.key}/error").decode())
                if self.verdict.failure is not None:
                    break
                if self._stops and self._store.check([self._key("ended")]):
                    self._look_for_departed()
                while self._store.check([self._key("claim", claims + 1)]):
                    claims += 1
                    pending.append(int(self._store.get(self._key("claim", claims))))
                pending = [number for number in pending if not self._answer(number)]
                if not voted and self._store.check([self._key("dispute")]):
                    voted = self._vote(int(self._store.get(self._key("dispute"))))
        except (RuntimeError, OSError):  # the store has ended with rank 0
            return
        if self.verdict.failure is not None and self._stops:
            self._exit_if_stuck()

    def _look_for_departed(self) -> None:
        """Fail if this rank has issued a message that a rank did not issue before it left."""
        reached = self._reached
        for rank, (last, step) in self._departed().items():
            if last < reached:
                text = departure(rank, step, self._rank, self._at(reached))
                self._fail(self._store.compare_set(f"{self.verdict.key}/error", "", text).decode())
                return

    def _departed(self) -> dict[int, list[int]]:
        """The other ranks that have left: number and step of the last message of each."""
        keys = {rank: self._key("ended", rank) for rank in self._group.global_ranks if rank != self._rank}
        return {
            rank: json.loads(self._store.get(key).decode())
            for rank, key in keys.items()
            if self._store.check([key])
        }

    def _answer(self, number: int) -> bool:
        """Say for this rank what it has issued as message ``number``; False if it has not come so far."""
        if number in self._asked:
            return True
        if number > self._reached:
            return False
        if not self._is_agreed(number):
            self._dispute(number)
        return True

    def _vote(self, number: int) -> bool:
        if number > self._reached:
            return False
        self._store.set(self._key("vote", self._rank), self._at(number).text)
        return True

    def _fail(self, text: str) -> None:
        """Note the failure, once all ranks have read it: a rank that has raised may end, and take the store along."""
        with self.verdict.failing:
            if self.verdict.failure is None:
                self.verdict.off = not self._stops
                self._wait_for_readers()
                self.verdict.failure = text

    def _wait_for_readers(self) -> None:
        try:
            self._store.add(f"{self.verdict.key}/read", 1)
            until = time.monotonic() + _VOTE_S
            readers = comm.get_world_size() - len(self._departed())
            while self._stops and time.monotonic() < until:
                if self._store.add(f"{self.verdict.key}/read", 0) >= readers:
                    break
                time.sleep(0.02)
        except (RuntimeError, OSError):
            pass  # the store has ended with rank 0

    def _exit_if_stuck(self) -> None:
        """Exit where the error cannot be raised: the program waits in a collective that does not fail."""
        on_cpu = self._group.device.type == "cpu"
        if not on_cpu:
            self._group.abort()  # gloo's groups cannot be
        begin = time.monotonic()
        while not self.verdict.raised and time.monotonic() < begin + _GRACE_S:
            if self._ended.wait(_POLL_S):
                return
        while on_cpu and not self.verdict.inside and not self.verdict.raised:
            if self._ended.wait(_POLL_S):
                return
        if not self.verdict.raised:
            print(f"zero_runtime: error: {self.verdict.failure}", file=sys.__stderr__, flush=True)
            os._exit(EXIT_CODE)

    def _key(self, topic: str, number: int | None = None) -> str:
        return f"{self._prefix}/{topic}" if number is None else f"{self._prefix}/{topic}/{number}"

    def _at(self, number: int) -> Issued:
        message, place = self._history[number % _KEPT]
        return Issued(place, self._messages[message])

    @property
    def _rank(self) -> int:
        return self._group.global_ranks[self._group.rank]


def _call(method: weakref.WeakMethod[Any]) -> None:
    function = method()
    if function is not None:
        function()


class _Work:
    """A work handle that raises the contract's error if its collective fails because of a deviation."""

    def __init__(self, work: Any, contract: TrafficContract) -> None:
        self._work = work
        self._contract = contract

    def wait(self, *arguments: Any) -> Any:
        """Wait for it."""
        return self._contract._run(lambda: self._work.wait(*arguments))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


# The argument whose elements are the same on all ranks; None where ranks may send different numbers.
_COMPARED: Final[Mapping[str, str | None]] = {
    **dict.fromkeys(COLLECTIVES, "tensor"),
    "barrier": None,
    "all_gather": None,
    "reduce_scatter": "rows",
    "reduce_scatter_single": "rows",
    "all_to_all_single": "rows",
}


def deviation(issued: Mapping[int, Issued]) -> str:
    """The sentence about ranks that issue different messages at one place.

    Args:
        issued: by rank; those that did not say it are missing.
    """
    ranks: dict[Message, list[int]] = defaultdict(list)
    for rank, each in sorted(issued.items()):
        ranks[each.message].append(rank)
    # What most ranks issue is taken as expected, of two that of the lower one.
    (expected, others), *deviating = sorted(ranks.items(), key=lambda item: (-len(item[1]), item[1]))
    place = issued[deviating[0][1][0] if deviating else others[0]].place
    when = f"step {place.step}, micro-batch {place.micro_batch}, message {place.number}"
    if not deviating:
        return (
            f"traffic_contract: at {when} a rank issues another message than {expected.described()} of rank {others[0]}, "
            "and did not say which"
        )
    found, (rank, *_) = deviating[0]
    others_issue = f"{_listed(others)} issue{'s' * (len(others) == 1)} {expected.described()}"
    difference = _first_difference(rank, found, others[0], expected)
    return (
        f"traffic_contract: at {when} rank {rank} issues {found.described()}, and {others_issue}; {difference}; every rank "
        "must run the same modules in the same order with the same configuration"
    )


def departure(rank: int, step: int, waiting: int, issued: Issued) -> str:
    """The sentence about a rank that has left, and a rank whose message needs it.

    Args:
        rank: that has left.
        step: of its last message; -1 before the first.
        waiting: a rank that remains.
        issued: its message.
    """
    place = issued.place
    last = f"its last message is of step {step}" if step >= 0 else "it has issued no message in a step"
    return (
        f"traffic_contract: at step {place.step}, micro-batch {place.micro_batch}, message {place.number} rank {rank} is "
        f"gone: it has ended its training ({last}), and rank {waiting} issues {issued.message.described()}; every rank must "
        f"run the same steps; look for an error of rank {rank}, or for a step that it leaves out"
    )


def _first_difference(rank: int, found: Message, other: int, expected: Message) -> str:
    if (found.operation, found.purpose) != (expected.operation, expected.purpose):
        return f"rank {rank} is at {found.module}, rank {other} at {expected.module}"
    missing = [name for name in expected.parameters if name not in found.parameters]
    added = [name for name in found.parameters if name not in expected.parameters]
    if missing and not added:
        return f"{missing[0]} of module {_module(missing[0])} is missing on rank {rank}"
    for mine, theirs in zip(found.parameters, expected.parameters, strict=False):
        if mine != theirs:
            return (
                f"rank {rank} has {mine} of module {_module(mine)} where rank {other} has {theirs} of module "
                f"{_module(theirs)}"
            )
    if added:
        return f"{added[0]} of module {_module(added[0])} is in that of rank {rank} only"
    for name in ("operation", "numel", "dtype", "bucket", "owner", "purpose"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        if mine != theirs:
            return f"they differ first in {name}: {mine} on rank {rank}, {theirs} on rank {other}"
    return "they are equal"


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0] or "(the model)"


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"
