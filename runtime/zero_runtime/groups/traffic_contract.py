"""The traffic contract (``traffic_contract``): every rank of a group issues the same messages, in the same order.

While the job runs, each rank compares a collective of the data-parallel group before it issues the collective.
The comparison covers operation, purpose, bucket, owner, elements, dtype and parameters. If a message follows
the previous message as in an earlier step, the comparison is a lookup in a set. The ranks agree on any other
message first, and also on the first message of an evaluation or a checkpoint and the first message after it. To
agree, the ranks write the message into the store of the process group and wait for each other. Therefore a rank
that is about to deviate stops before it issues anything. Ranks that have already issued a different message,
and wait in it, answer through a thread that polls the store. All ranks raise the same error.

A rank can also deviate by messages that each follow as in an earlier step. Therefore the thread of each rank
compares a checksum of all messages with its neighbor's checksum once per second. All ranks compare their last
messages when a checksum differs or a collective fails. A rank that leaves writes the number of its last message
into the store. The other ranks stop as soon as one of them issues a message after this number. If a process
ends without such a report, the waiting ranks name it.

The expected messages are those that the ranks agree on, not those of ``commprof.requested``. This package does
not import ``commprof.requested``, and its rules need the order of gradients, which is known only in a run.
``commprof verify`` compares a run with these rules.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Final

import torch

from commprof import hooks
from zero_runtime import comm, log
from zero_runtime.comm import COLLECTIVES, DEFAULT_TIMEOUT, Call, DataParallelGroup
from zero_runtime.errors import TrafficContractError, ZeroRuntimeError
from zero_runtime.groups.contract_messages import (
    History,
    Issued,
    Message,
    Place,
    absence,
    departure,
    deviation,
    first_difference,
    loss,
)
from zero_runtime.groups.detailed_tags import add_reader
from zero_runtime.groups.host_processes import HostProcesses

# Values of traffic_contract. The third value is warn.
OFF: Final = "off"
STOP: Final = "stop"
EXIT_CODE: Final = 2
_POLL_S: Final = 0.5  # interval at which a thread polls the store
_COMPARE_POLLS: Final = 2  # polls between two comparisons with the neighbor's messages
_ASK_S: Final = 0.05  # wait without an answer before the threads of the other ranks are asked
_VOTE_S: Final = 3.0  # time for all ranks to report their messages, and to read the error
_GRACE_S: Final = 10.0  # time for a collective to fail after the error; then the process exits
_KEPT: Final = 4096  # last messages that a rank stores
_LISTED: Final = 3840  # stored messages that a thread may read while the program issues more
_LEFT: Final = 512  # messages that a rank writes into the store when it leaves
_APART: Final = frozenset({"evaluation", "checkpoint"})  # phases; the ranks agree on their begin and end
_CHECKSUM_BITS: Final = (1 << 61) - 1

_numbers: Final = count()  # of verdicts; equal on all ranks, because all create the same number of verdicts


@dataclass(slots=True)
class Verdict:
    """The state of a deviation in one process.

    Attributes:
        failure: The error text about the deviation; None without a deviation.
        raised: Whether the error has been raised in the program.
        inside: Whether the program is in a collective.
        off: Whether the comparison of messages has ended.
        failing: A lock that is acquired while the failure is recorded.
        key: The prefix of keys in the store. It is equal on all ranks, because all ranks create the same number
            of verdicts.
        processes: The processes of the ranks of this host; None before the start.
    """

    failure: str | None = None
    raised: bool = False
    inside: bool = False
    off: bool = False
    failing: threading.Lock = field(default_factory=threading.Lock)
    key: str = field(default_factory=lambda: f"zero_runtime/traffic/{next(_numbers)}")
    processes: HostProcesses | None = None


class TrafficContract:
    """An observer of a group (:class:`zero_runtime.comm.Observer`) that compares the group's collectives.

    Args:
        group: The data-parallel ranks. All of them must construct a contract.
        stops: Whether a deviation is an error on all ranks. Otherwise one rank warns, and the comparison ends.
        verdict: The verdict of this process, which the contracts of its groups share.
        name: The name of the contract among the contracts that share a verdict.

    Attributes:
        methods: The observed methods (:class:`zero_runtime.comm.Observer`).
    """

    methods: Final = frozenset(COLLECTIVES)

    def __init__(self, group: DataParallelGroup, stops: bool, verdict: Verdict, name: str) -> None:
        self.verdict = verdict
        self._group, self._stops = group, stops
        self._store = comm.store()
        members = hashlib.sha256(repr(group.global_ranks).encode()).hexdigest()[:16]
        self._prefix = f"{verdict.key}/{name}/{members}"
        self._ids: dict[Message, int] = {}
        self._messages: list[Message] = []  # indexed by id
        # The ids of messages, by the values that identify the message of a bucket.
        self._tagged: dict[tuple[str, hooks.tag, int], int] = {}
        self._known: set[tuple[int, int]] = set()  # pairs that were agreed on: (previous message, message)
        # The id of the message, the fields of its place, and the checksum of all messages up to this message.
        self._history: list[tuple[int, tuple[int, int, int], int]] = [(-1, (-1, -1, 0), 0)] * _KEPT
        self._reached = -1  # number of the last message that this rank issues
        self._asked: set[int] = set()  # numbers of messages on which the program itself agrees
        self._step, self._begins = -1, 0  # the step, and the number of its first message
        # The last message, and whether it belonged to an evaluation or a checkpoint.
        self._before, self._apart = -1, False
        self._checksum = 0
        self._compared = -1  # number of the last message whose checksum the neighbor can read
        self._agreeing = False  # whether the program waits for an agreement
        # Whether this rank has voted in the dispute, and whether it has written its last messages.
        self._has_voted = self._has_said = False
        self._looked = 0.0  # last time when a wait outside of this class looked for an error
        # The number of the message in which the program waited at the last comparison.
        self._waiting: int | None = None
        self._ended = threading.Event()
        add_reader()
        if group.device.type == "cpu":
            comm.watch_waits(self._look)
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
                place = self._at(self._reached).place if self._reached >= 0 else Place(-1, -1, 0)
                self._say_history(_LEFT)
                self._store.set(self._key("ended", self._rank), json.dumps([self._reached, place.step]))
                self._store.set(self._key("ended"), str(self._rank))
            except (RuntimeError, OSError):
                pass  # the store has ended with rank 0
        if self._thread is not threading.current_thread():
            self._thread.join(2 * _POLL_S + 1.0)

    def _leave_program(self) -> None:
        """Close the contract at the exit of the program.

        Rank 0 may run the store. Therefore rank 0 stays until the others have left or have read the error.
        """
        self.close()
        others = self._group.world_size - 1
        until = time.monotonic() + _VOTE_S
        with suppress(RuntimeError, OSError):
            while self._stops and self._rank == 0 and time.monotonic() < until:
                readers = others - len(self._gone())
                if readers == 0 or self._store.add(f"{self.verdict.key}/read", 0) >= readers:
                    break
                time.sleep(0.02)

    def observe(self, call: Call, issue: Callable[[], Any]) -> Any:
        """Compare the call, and then issue it (:class:`zero_runtime.comm.Observer`).

        Raises:
            TrafficContractError: A rank deviates. The error is the same on all ranks.
        """
        if self.verdict.off:
            return issue()
        if self.verdict.failure is not None:
            self._refuse()
        message, number, moment = self._id_of(call), self._reached + 1, hooks.position
        if moment.step != self._step:
            self._step, self._begins = moment.step, number
        apart = moment.phase in _APART
        new = apart != self._apart or (self._before, message) not in self._known
        self._apart = apart
        if new:
            self._asked.add(number)
        self._checksum = (self._checksum * 1_000_003 ^ message) & _CHECKSUM_BITS
        # A tuple instead of a Place, because a Place takes longer to construct and only few are read.
        place = (moment.step, moment.micro_step, number - self._begins)
        self._history[number % _KEPT] = message, place, self._checksum
        self._reached = number
        if new:
            self._agree(number)
            self._known.add((self._before, message))
        self._before = message
        work = self.run(issue, number)
        return work if work is None else _Work(work, self, number)

    def _id_of(self, call: Call) -> int:
        """Return the id of the message of ``call``; equal messages have equal ids.

        The ids of bucket messages are cached, because the tags of buckets are the same in every step.
        """
        why: hooks.tag | None = call.arguments["why"]
        compared = _COMPARED[call.method]
        value = None if compared is None else call.arguments[compared]
        tensors = [value] if isinstance(value, torch.Tensor) else value or ()
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

    def run(self, issue: Callable[[], Any], number: int, limited: bool = False) -> Any:
        """Call ``issue``. If a collective fails because of a deviation, raise the error that all ranks raise.

        Args:
            issue: A function that issues a collective or waits for it.
            number: The number of the message.
            limited: Whether ``issue`` waits for a limited time, so that the caller may wait again.
        """
        self.verdict.inside = True
        try:
            return issue()
        except RuntimeError as error:
            if isinstance(error, ZeroRuntimeError) or not self._stops or self.verdict.off:
                raise
            timed_out = "timed out" in str(error).lower()
            if limited and timed_out:
                raise
            if self._is_explained(number, timed_out):
                self.verdict.raised = True
                raise TrafficContractError(self.verdict.failure) from error
            raise
        finally:
            self.verdict.inside = False

    def _refuse(self) -> None:
        if self.verdict.failure is not None and self._stops:
            self.verdict.raised = True
            raise TrafficContractError(self.verdict.failure)

    def _look(self) -> None:
        """Raise the error of a deviation. This method is called while the program waits for something else."""
        self._looked = time.monotonic()
        self._refuse()

    def _failed_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self.verdict.failure is None and time.monotonic() < until:
            time.sleep(0.02)
        return self._stops and self.verdict.failure is not None

    # Agreement, by the thread that issues the message.

    def _agree(self, number: int) -> None:
        """Wait until all ranks have the same message ``number``.

        If they do not, raise TrafficContractError or warn.
        """
        self._agreeing = True
        try:
            if self._is_agreed(number):
                self._wait_for_all(number)
            else:
                self._dispute(number)
        except (RuntimeError, OSError) as error:
            if isinstance(error, ZeroRuntimeError):
                raise
            self._lose_store(number)
        finally:
            self._agreeing = False
        if self.verdict.failure is None:
            return
        if self._stops:
            self._refuse()
        self.verdict.off = True

    def _is_agreed(self, number: int) -> bool:
        """Return whether this rank has the same message ``number`` as the first rank that wrote it.

        If so, count this rank among the ranks that agree.
        """
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
                comm.look()  # for other errors, because of which a rank may not arrive
            if asked and self._store.check([self._key("ended")]):
                return  # a rank has left, and the collective itself will fail
            if passed > DEFAULT_TIMEOUT.total_seconds():
                raise TrafficContractError(
                    f"traffic_contract: rank {self._rank} waited {passed:.0f} s for the other ranks before "
                    f"{self._at(number).message.described()}; expected the same message on every rank; look for a "
                    "rank that has exited"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.01)

    def _dispute(self, number: int) -> None:
        """Collect message ``number`` of all ranks, and report the difference to all ranks."""
        key = self._key("dispute")
        if self._store.compare_set(key, "", str(number)).decode() != str(number):
            until = time.monotonic() + _VOTE_S + _GRACE_S
            while self.verdict.failure is None and time.monotonic() < until:
                self._say_what_is_asked()
                time.sleep(0.02)
            return
        self._vote(number)
        self._deviate({rank: Issued.of(text) for rank, text in self._collected("vote").items()})

    def _deviate(self, issued: Mapping[int, Issued]) -> None:
        """Fail because of the messages that ranks have issued at the same place."""
        text = deviation(issued)
        sentence = self._store.compare_set(f"{self.verdict.key}/error", "", text).decode()
        if sentence == text and not self._stops:
            log.warning(sentence)
        self._fail(sentence)

    def _collected(self, topic: str) -> dict[int, str]:
        """Return the answer of each rank to ``topic``.

        The wait ends when all remaining ranks have answered, or when the time is up.

        Meanwhile this method answers the questions of other ranks for this rank. Otherwise two ranks that wait for
        each other would both get no answer.
        """
        answers: dict[int, str] = {}
        until = time.monotonic() + _VOTE_S
        while time.monotonic() < until:
            self._say_what_is_asked()
            if answers.keys() | self._gone() >= set(self._group.global_ranks):
                break
            for rank in self._group.global_ranks:
                key = self._key(topic, rank)
                if rank not in answers and self._store.check([key]):
                    answers[rank] = self._store.get(key).decode()
            time.sleep(0.02)
        return answers

    # Comparison of the issued messages, after a failed collective or if a checksum differs.

    def _is_explained(self, number: int, timed_out: bool) -> bool:
        """Return whether another rank caused the failure of the collective of message ``number`` on this rank."""
        # Another rank waits for the answers, and then until all ranks, including silent ranks, have read its error.
        patience = 3 * _VOTE_S
        try:
            if not self._failed_within(2 * _POLL_S) and self._compare_all(number, timed_out):
                patience = _VOTE_S  # for a rank that is leaving now
        except (RuntimeError, OSError) as error:
            if isinstance(error, ZeroRuntimeError):
                raise
            self._lose_store(number)
        return self._failed_within(patience)

    def _compare_all(self, failed: int | None = None, timed_out: bool = False) -> bool:
        """Collect the issued messages of all ranks, and fail by the first difference.

        The result is False if another thread does this already.

        Args:
            failed: The number of the message whose collective has failed. If given, a rank that does not answer
                is also a failure.
            timed_out: Whether the collective failed because of its time limit. If so, a rank that has not
                reached the message is also a failure.
        """
        mine = f"{self._rank}/{threading.get_ident()}"
        if self._store.compare_set(self._key("comparison"), "", mine).decode() != mine:
            return False
        self._say_history()
        histories = {rank: History(*json.loads(text)) for rank, text in self._collected("history").items()}
        number = first_difference(list(histories.values()))
        if number is not None:
            self._deviate_at(number, histories)
        elif failed is not None:
            lost = sorted(set(self._group.global_ranks) - histories.keys() - self._departed().keys())
            late = sorted(rank for rank, each in histories.items() if each.end <= failed)
            if lost:
                processes = self.verdict.processes
                running = {} if processes is None else processes.running()
                self._fail_for_all(loss(lost, self._ended_processes(), self._rank, self._at(failed), running))
            elif timed_out and late:
                self._fail_for_all(absence(late, self._rank, self._at(failed)))
        return True

    def _deviate_at(self, number: int, histories: Mapping[int, History]) -> None:
        """Fail because message ``number`` differs between ``histories``, which are given by rank."""
        reached = {rank: each for rank, each in histories.items() if each.first <= number < each.end}
        messages = {rank: each.messages[number - each.first] for rank, each in reached.items()}
        if max(messages.values()) >= len(self._messages):  # a message that only another rank can describe
            self._dispute(number)
            return
        places = {rank: Place(*each.places[number - each.first]) for rank, each in reached.items()}
        self._deviate({rank: Issued(places[rank], self._messages[messages[rank]]) for rank in reached})

    def _say_history(self, length: int = _LISTED) -> None:
        """Write the last messages of this rank into the store."""
        self._store.set(self._key("history", self._rank), json.dumps(self._last(length)))

    def _last(self, length: int) -> History:
        """Return the last ``length`` messages of this rank."""
        reached = self._reached
        first = max(0, reached - length + 1)
        entries = [self._history[number % _KEPT] for number in range(first, reached + 1)]
        return History(first, [message for message, _, _ in entries], [place for _, place, _ in entries])

    def _lose_store(self, number: int) -> None:
        """Fail because the store is gone.

        The store is in the process of rank 0, unless a launcher runs it.
        """
        if self._rank == 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            self.verdict.off = True  # the collective itself will fail
        else:
            self.verdict.failure = loss([0], {0: None}, self._rank, self._at(number))

    # Answers, by a separate thread, because the thread of the program may wait in a collective.

    def _watch(self) -> None:
        pending: list[int] = []
        claims, polls = 0, 0
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
                self._say_what_is_asked()
                polls += 1
                if polls % _COMPARE_POLLS == 0:
                    self._compare_with_neighbor()
                    self._look_for_ended()
        except (RuntimeError, OSError):  # the store has ended with rank 0
            return
        if self.verdict.failure is not None and self._stops:
            self._exit_if_stuck()

    def _compare_with_neighbor(self) -> None:
        """Compare the checksum of all messages with that of the previous rank, up to the last common message."""
        reached, members = self._reached, self._group.global_ranks
        if reached > self._compared:
            self._compared = reached
            checksum = self._history[reached % _KEPT][2]
            self._store.set(self._key("checksum", self._rank), json.dumps([reached, checksum]))
        neighbor = self._key("checksum", members[self._group.rank - 1])
        if not self._store.check([neighbor]):
            return
        number, checksum = json.loads(self._store.get(neighbor))
        if reached - _LISTED < number <= reached and self._history[number % _KEPT][2] != checksum:
            self._compare_all()

    def _look_for_ended(self) -> None:
        """Fail if a process on this host has ended without a report while this rank waits.

        This rank must have waited since the last call.
        """
        looks = time.monotonic() - self._looked < _COMPARE_POLLS * _POLL_S
        waits = self.verdict.inside or self._agreeing or looks
        before, self._waiting = self._waiting, self._reached if waits else None
        if self._stops and waits and before == self._reached:
            ended = self._ended_processes()
            lost = sorted(ended.keys() - self._departed().keys())
            if lost:
                self._fail_for_all(loss(lost, ended, self._rank, self._at(self._reached)))

    def _look_for_departed(self) -> None:
        """Fail if this rank has issued a message that another rank did not issue before it left."""
        reached = self._reached
        for rank, (last, step) in self._departed().items():
            if last < reached:
                if not self._differs(rank):
                    self._fail_for_all(departure(rank, step, self._rank, self._at(reached)))
                return

    def _differs(self, rank: int) -> bool:
        """Fail if ``rank``, which has left, issued different messages than this rank.

        The deviation may be the reason why ``rank`` has left. The result is whether there is a difference.
        """
        theirs = History(*json.loads(self._store.get(self._key("history", rank)).decode()))
        mine = self._last(_LISTED)
        number = first_difference([mine, theirs])
        if number is None:
            return False
        self._deviate_at(number, {rank: theirs, self._rank: mine})
        return True

    def _gone(self) -> set[int]:
        """Return the other ranks that have left, or whose processes have ended on this host."""
        return self._departed().keys() | self._ended_processes().keys()

    def _ended_processes(self) -> dict[int, int]:
        """Return the processes of ranks of the group that have ended on this host, by rank."""
        ended = {} if self.verdict.processes is None else self.verdict.processes.ended()
        return {rank: process for rank, process in ended.items() if rank in self._group.global_ranks}

    def _departed(self) -> dict[int, list[int]]:
        """Return the other ranks that have left, with the number and the step of the last message of each."""
        keys = {rank: self._key("ended", rank) for rank in self._group.global_ranks if rank != self._rank}
        return {
            rank: json.loads(self._store.get(key).decode())
            for rank, key in keys.items()
            if self._store.check([key])
        }

    def _answer(self, number: int) -> bool:
        """Report the message ``number`` of this rank. Return False if this rank has not reached the message."""
        if number in self._asked:
            return True
        if number > self._reached:
            return False
        if not self._is_agreed(number):
            self._dispute(number)
        return True

    def _say_what_is_asked(self) -> None:
        """Answer each question of another rank once.

        The questions are for this rank's message in a dispute, and for its last messages.
        """
        if not self._has_voted and self._store.check([self._key("dispute")]):
            self._has_voted = self._vote(int(self._store.get(self._key("dispute"))))
        if not self._has_said and self._store.check([self._key("comparison")]):
            self._has_said = True
            self._say_history()

    def _vote(self, number: int) -> bool:
        if number > self._reached:
            return False
        self._store.set(self._key("vote", self._rank), self._at(number).text)
        return True

    def _fail_for_all(self, text: str) -> None:
        """Fail with ``text``, or with the error that another rank has written first."""
        self._fail(self._store.compare_set(f"{self.verdict.key}/error", "", text).decode())

    def _fail(self, text: str) -> None:
        """Record the failure after all ranks have read it.

        A rank that has raised the error may exit, and the store may exit with it.
        """
        with self.verdict.failing:
            if self.verdict.failure is None:
                self.verdict.off = not self._stops
                self._wait_for_readers()
                self.verdict.failure = text

    def _wait_for_readers(self) -> None:
        try:
            self._store.add(f"{self.verdict.key}/read", 1)
            until = time.monotonic() + _VOTE_S
            readers = comm.get_world_size() - len(self._gone())
            while self._stops and time.monotonic() < until:
                if self._store.add(f"{self.verdict.key}/read", 0) >= readers:
                    break
                time.sleep(0.02)
        except (RuntimeError, OSError):
            pass  # the store has ended with rank 0

    def _exit_if_stuck(self) -> None:
        """Exit the process if the error cannot be raised.

        This is the case if the program waits in a collective that does not fail.
        """
        on_cpu = self._group.device.type == "cpu"
        if not on_cpu:
            self._group.abort()  # gloo's groups cannot be aborted
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
        message, place, _ = self._history[number % _KEPT]
        return Issued(Place(*place), self._messages[message])

    @property
    def _rank(self) -> int:
        return self._group.global_ranks[self._group.rank]


def _call(method: weakref.WeakMethod[Any]) -> None:
    function = method()
    if function is not None:
        function()


class _Work:
    """A work handle that raises the contract's error if its collective fails because of a deviation."""

    __slots__ = ("_contract", "_number", "_work")

    def __init__(self, work: Any, contract: TrafficContract, number: int) -> None:
        self._work = work
        self._contract = contract
        self._number = number

    def wait(self, *arguments: Any) -> Any:
        """Wait for the collective, for a limited time if an argument limits it."""
        return self._contract.run(partial(self._work.wait, *arguments), self._number, bool(arguments))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


# The argument that has the same number of elements on all ranks; None if ranks may send different numbers.
_COMPARED: Final[Mapping[str, str | None]] = {
    **dict.fromkeys(COLLECTIVES, "tensor"),
    "barrier": None,
    "all_gather": None,
    "reduce_scatter": "rows",
    "reduce_scatter_single": "rows",
    "all_to_all_single": "rows",
}
