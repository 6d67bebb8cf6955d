"""Writes notes on data that a log lacks, with settings for the next log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from commprof.nccl.state.communicators import Communicator
from commprof.nccl.state.membership import (
    CROWDED,
    CUT_OUT,
    INCOMPLETE,
    LOOK_ALIKE,
    NO_PARENT,
    PARENT_UNKNOWN,
    RENUMBERED,
    REPEATED,
    World,
)

ASK_FOR_OPERATIONS = "set NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,COLL"
ASK_FOR_FILES = "set NCCL_DEBUG_FILE=<directory>/%h.%p, so that each process has a file of its own"


# The advice for each reason why a family or a global rank is unknown.
_ASK: Final = {
    LOOK_ALIKE: "NCCL prints a commId since 2.16; with an older one, log each process with CALL lines too "
    "(NCCL_DEBUG=TRACE, NCCL_DEBUG_SUBSYS=INIT,COLL,CALL, from 2.13), or align the log with a recorded run.",
    INCOMPLETE: f"Keep the log of every process: {ASK_FOR_FILES}.",
    REPEATED: "Name each log once, and only the logs of one start of the job.",
    NO_PARENT: "Log from the start of the job, with INIT among NCCL_DEBUG_SUBSYS.",
    PARENT_UNKNOWN: "Log from the start of the job, with INIT among NCCL_DEBUG_SUBSYS.",
    CUT_OUT: "Log from the start of the job, with INIT among NCCL_DEBUG_SUBSYS.",
    RENUMBERED: "Write the logs of each start of the job to a separate directory, with NCCL_DEBUG_FILE.",
    CROWDED: f"Log each process by itself: {ASK_FOR_FILES}.",
}


class Findings(NamedTuple):
    """The findings of a parse that become notes.

    ``repeated`` is the number of lines that replace several similar lines, and the number of the replaced lines.
    """

    operations: int
    torn: int
    overlong: int
    empty: bool
    generated: bool
    without_init: int
    communicators: int
    ambiguous: int
    partial_worlds: tuple[World, ...]
    types_hidden: bool
    unknown_ops: Mapping[str, int]
    troubles: tuple[str, ...]
    repeated: tuple[int, int] = (0, 0)


def remarks(findings: Findings, communicators: Iterable[Communicator] = ()) -> tuple[str, ...]:
    """Return the notes for ``findings``, the most severe first.

    Args:
        findings: The findings of the parse.
        communicators: The communicators, after families and global ranks were determined. The reasons of unknown
            families and ranks become notes.
    """
    communicators = tuple(communicators)
    # The first notes are about wrong counts, the next about unknown values, and the last about lines that are left out.
    notes = list(findings.troubles)
    if findings.generated:
        notes.append("The log states that it was generated: it is not output of NCCL.")
    if findings.repeated[0]:
        lines, repetitions = findings.repeated
        notes.append(
            f"{lines:,} lines stand for {repetitions:,} similar ones that Ray or syslog dropped: operations in "
            f"dropped lines are not counted. Set RAY_DEDUP_LOGS=0, or {ASK_FOR_FILES}."
        )
    if findings.empty:
        notes.append("The log is empty.")
    if findings.operations == 0:
        notes.append(
            f"No complete operation line was found. NCCL prints none by default: {ASK_FOR_OPERATIONS}."
        )
    if findings.without_init:
        notes.append(
            f"{_without_init(findings.without_init, findings.communicators)} no init line, so ranks are not known there: "
            "NCCL_DEBUG_SUBSYS had COLL without INIT, or the log begins late. "
            "Next time set NCCL_DEBUG_SUBSYS=INIT,COLL."
        )
    if findings.torn:
        notes.append(
            f"{_torn(findings.torn)} counted and stored, not repaired. Processes that share a stream write into "
            "each other's "
            "lines, and since 2.13 NCCL does not flush standard output per line; lines at the end of a file may be "
            f"cut: {ASK_FOR_FILES}."
        )
    notes.extend(_unknown_families(communicators))
    # With ``communicators``, the notes on families already give the reasons. Otherwise only the number is known.
    if findings.ambiguous and not communicators:
        notes.append(
            f"{findings.ambiguous} communicators have the same number of ranks and no commId, so it is not known "
            "which ranks belong to the same communicator."
        )
    if _is_call_only(communicators):
        notes.append(
            "Communicators are known from CALL lines alone, which print neither device nor start: add INIT to "
            "NCCL_DEBUG_SUBSYS next time."
        )
    notes.extend(
        f"Global ranks are the ranks in the largest communicator ({world.nranks} ranks, {world.members} of them in "
        "the logs): they are right if no larger communicator existed."
        for world in findings.partial_worlds
    )
    if findings.types_hidden:
        notes.append(
            "NCCL 2.7.3 to 2.21.5 prints AllGather and Broadcast as int8, whatever their type: dtype is empty where "
            "this may apply; bytes are right."
        )
    if findings.unknown_ops:
        names = ", ".join(f"{name} ({count})" for name, count in sorted(findings.unknown_ops.items()))
        notes.append(f"Operations that are not in the table, counted and left out: {names}.")
    if findings.overlong:
        notes.append(
            "1 line is longer than 16 MiB and was skipped."
            if findings.overlong == 1
            else f"{findings.overlong} lines are longer than 16 MiB and were skipped."
        )
    return tuple(notes)


def _without_init(number: int, communicators: int) -> str:
    if communicators == 1:
        return "The only communicator has"
    return f"{number} of {communicators} communicators {'has' if number == 1 else 'have'}"


def _torn(number: int) -> str:
    return (
        "1 operation line is truncated; it is"
        if number == 1
        else f"{number} operation lines are truncated; they are"
    )


def _unknown_families(communicators: Iterable[Communicator]) -> list[str]:
    """Return a note for each reason why a family or a global rank is unknown, with the number of communicators."""
    communicators = tuple(communicators)
    families = Counter(c.family_reason for c in communicators if c.family is None and c.family_reason)
    ranks = Counter(
        c.global_rank_reason for c in communicators if c.global_rank is None and c.global_rank_reason
    )
    sentences = [
        f"Which ranks share {_communicators(count)} is not known: {reason}. {_ASK[reason]}"
        for reason, count in families.items()
    ]
    sentences += [
        f"The rank in the job is not known for {_communicators(count)}: {reason}. {_ASK[reason]}"
        for reason, count in ranks.items()
    ]
    return sentences


def _communicators(count: int) -> str:
    return "1 communicator" if count == 1 else f"{count} communicators"


def _is_call_only(communicators: Iterable[Communicator]) -> bool:
    """Return whether all communicators with an Init line are known from CALL lines only."""
    stages = [c.stages for c in communicators if c.stages]
    return bool(stages) and all(stage == {"call"} for stage in stages)
