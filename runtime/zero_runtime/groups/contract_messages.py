"""The data that ranks compare for the traffic contract, and the error texts about ranks that deviate."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

_SHOWN: Final = 3  # parameters in a sentence
_LISTED: Final = 8  # ranks in a sentence
_KILLED: Final = (
    "a process that was killed or crashed cannot report why; look for its exit status and its last lines (gloo "
    "aborts a process that receives another size than it expects), and check whether the host ran out of memory"
)
_SILENT: Final = (
    "a process that is stopped, or runs code that holds Python's lock, cannot answer; look at its stacks, such as "
    "with py-spy dump; if it is on another host, check whether it was killed"
)


class Message(NamedTuple):
    """The properties of one collective that must be equal on all ranks."""

    operation: str
    purpose: str
    bucket: int | None
    owner: int | None
    numel: int
    dtype: str
    parameters: tuple[str, ...]

    @property
    def module(self) -> str:
        """The module of the first parameter, as part of a sentence."""
        return f"module {_module(self.parameters[0])}" if self.parameters else "no module"

    def described(self) -> str:
        """Return the message as part of a sentence."""
        where = "" if self.bucket is None else f" in bucket {self.bucket}"
        names = ", ".join(self.parameters[:_SHOWN])
        more = f" and {len(self.parameters) - _SHOWN} more" if len(self.parameters) > _SHOWN else ""
        carried = f" with {names}{more}" if names else ""
        owner = "" if self.owner is None else f" to member {self.owner}"
        size = f" of {self.numel:,} elements ({self.dtype})" if self.dtype else ""
        return f"{self.operation}{size} for {self.purpose}{owner}{where}{carried}"


class Place(NamedTuple):
    """The point at which a rank issues a message: the step, the micro-batch and the number within the step.

    The step and the micro-batch are -1 before the first step.
    """

    step: int
    micro_batch: int
    number: int

    def described(self) -> str:
        """Return the place as part of a sentence."""
        return f"step {self.step}, micro-batch {self.micro_batch}, message {self.number}"


class Issued(NamedTuple):
    """A message that one rank issued."""

    place: Place
    message: Message

    @property
    def text(self) -> str:
        """The message as text, for the store."""
        return json.dumps([*self.place, *self.message])

    @classmethod
    def of(cls, text: str) -> Issued:
        """Return the message that ``text`` encodes."""
        *place, operation, purpose, bucket, owner, numel, dtype, parameters = json.loads(text)
        message = Message(operation, purpose, bucket, owner, numel, dtype, tuple(parameters))
        return cls(Place(*place), message)


class History(NamedTuple):
    """The last messages of one rank. The ids of messages are equal on all ranks.

    Attributes:
        first: The number of the first of these messages among all messages of the rank.
        messages: The ids of the messages. Equal messages have the same id on all ranks.
        places: The place where each message was issued, as the fields of :class:`Place`.
    """

    first: int
    messages: Sequence[int]
    places: Sequence[Sequence[int]]

    @property
    def end(self) -> int:
        """The number of the next message of the rank."""
        return self.first + len(self.messages)


def first_difference(histories: Sequence[History]) -> int | None:
    """Return the number of the first message in which ``histories`` differ; None if they do not differ.

    Only messages that at least two histories contain can differ.
    """
    for number in range(max(each.first for each in histories), max(each.end for each in histories)):
        messages = {each.messages[number - each.first] for each in histories if number < each.end}
        if len(messages) > 1:
            return number
    return None


def deviation(issued: Mapping[int, Issued]) -> str:
    """Return the error text about ranks that issue different messages at the same place.

    Args:
        issued: The message of each rank. Ranks that did not report their message are missing.
    """
    ranks: dict[Message, list[int]] = defaultdict(list)
    for rank, each in sorted(issued.items()):
        ranks[each.message].append(rank)
    # The message that most ranks issue is taken as expected. In a tie it is the message of the lowest rank.
    (expected, others), *deviating = sorted(ranks.items(), key=lambda item: (-len(item[1]), item[1]))
    when = issued[deviating[0][1][0] if deviating else others[0]].place.described()
    if not deviating:
        return (
            f"traffic_contract: at {when} a rank issues another message than {expected.described()} of rank {others[0]}, "
            "and did not say which"
        )
    actual, (rank, *_) = deviating[0]
    others_issue = f"{_listed(others)} issue{'s' * (len(others) == 1)} {expected.described()}"
    difference = _first_difference(rank, actual, others[0], expected)
    return (
        f"traffic_contract: at {when} rank {rank} issues {actual.described()}, and {others_issue}; {difference}; every rank "
        "must run the same modules in the same order with the same configuration"
    )


def departure(rank: int, step: int, waiting: int, issued: Issued) -> str:
    """Return the error text about a rank that has left, and a remaining rank whose message needs it.

    Args:
        rank: The rank that has left.
        step: The step of the last message of ``rank``; -1 before the first step.
        waiting: A rank that remains.
        issued: The message of the rank ``waiting``.
    """
    last = f"its last message is of step {step}" if step >= 0 else "it has issued no message in a step"
    return (
        f"traffic_contract: at {issued.place.described()} rank {rank} is gone: it has ended its training ({last}), and "
        f"rank {waiting} issues {issued.message.described()}; every rank must run the same steps; look for an error of "
        f"rank {rank}, or for a step that it leaves out"
    )


def loss(
    ranks: Sequence[int],
    ended: Mapping[int, int | None],
    waiting: int,
    issued: Issued,
    running: Mapping[int, int] | None = None,
) -> str:
    """Return the error text about ranks that left without a report or do not answer.

    The text also names a rank whose message needs these ranks.

    Args:
        ranks: The ranks that gave no answer.
        ended: The processes that are known to have ended, by rank. None if the process id is not known.
        waiting: A rank that remains.
        issued: The message of the rank ``waiting``.
        running: The processes on the host of ``waiting`` that have not ended, by rank.
    """
    if ended.keys() >= set(ranks):
        what, advice = _gone(ranks, ended), _KILLED
    else:
        what, advice = _silent(ranks, running or {}), _SILENT
    return (
        f"traffic_contract: at {issued.place.described()} {what}, and rank {waiting} issues "
        f"{issued.message.described()}; {advice}"
    )


def lost_start(ended: Mapping[int, int]) -> str:
    """Return the error text about ranks whose processes ended during the construction of an engine.

    Args:
        ended: The processes, by rank.
    """
    return f"traffic_contract: before step 0 {_gone(sorted(ended), ended)}, in zero_runtime.initialize; {_KILLED}"


def failed_start(rank: int, error: Exception) -> str:
    """Return the error text about a rank that failed during the construction of an engine."""
    return (
        f"traffic_contract: before step 0 rank {rank} has failed, in zero_runtime.initialize: {type(error).__name__}: "
        f"{error}; every rank needs the same configuration and model"
    )


def absence(ranks: Sequence[int], waiting: int, issued: Issued) -> str:
    """Return the error text about ranks that have not reached a message before the time limit of a waiting rank.

    Args:
        ranks: The ranks that have not reached the message.
        waiting: A rank that has waited.
        issued: The message of the rank ``waiting``.
    """
    return (
        f"traffic_contract: at {issued.place.described()} rank {waiting} has waited for {_listed(ranks)} in "
        f"{issued.message.described()} until the time limit of the process group; these processes answer, but have "
        "not reached this message; look at their stacks, such as with commprof run --watchdog"
    )


def _gone(ranks: Sequence[int], ended: Mapping[int, int | None]) -> str:
    numbers = ", ".join(str(ended[rank]) for rank in ranks[:_LISTED] if ended[rank] is not None)
    numbers += " " if numbers else ""
    if len(ranks) == 1:
        return f"{_listed(ranks)} is gone: its process {numbers}has ended"
    return f"{_listed(ranks)} are gone: their processes {numbers}have ended"


def _silent(ranks: Sequence[int], running: Mapping[int, int]) -> str:
    numbers = [str(running[rank]) for rank in ranks[:_LISTED] if rank in running]
    where = ""
    if numbers:
        exist = "process {} of this host exists" if len(numbers) == 1 else "processes {} of this host exist"
        where = f" ({exist.format(', '.join(numbers))})"
    return f"{_listed(ranks)} {'does' if len(ranks) == 1 else 'do'} not answer{where}"


def _first_difference(rank: int, actual: Message, other: int, expected: Message) -> str:
    if (actual.operation, actual.purpose) != (expected.operation, expected.purpose):
        return f"rank {rank} is at {actual.module}, rank {other} at {expected.module}"
    missing = [name for name in expected.parameters if name not in actual.parameters]
    added = [name for name in actual.parameters if name not in expected.parameters]
    if missing and not added:
        return f"{missing[0]} of module {_module(missing[0])} is missing on rank {rank}"
    for mine, theirs in zip(actual.parameters, expected.parameters, strict=False):
        if mine != theirs:
            return (
                f"rank {rank} has {mine} of module {_module(mine)} where rank {other} has {theirs} of module "
                f"{_module(theirs)}"
            )
    if added:
        return f"{added[0]} of module {_module(added[0])} is on rank {rank} only"
    for name in ("operation", "numel", "dtype", "bucket", "owner", "purpose"):
        mine, theirs = getattr(actual, name), getattr(expected, name)
        if mine != theirs:
            return f"they differ first in {name}: {mine} on rank {rank}, {theirs} on rank {other}"
    return "they are equal"


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0] or "(the model)"


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:_LISTED]))}{', ...' if len(ranks) > _LISTED else ''}"
