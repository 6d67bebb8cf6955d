"""What a log lacks, said in sentences, with what to set next time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from commprof.nccl.membership import World

ASK_FOR_OPERATIONS = "set NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,COLL"
ASK_FOR_FILES = "set NCCL_DEBUG_FILE=<directory>/%h.%p, so that each process has a file of its own"


class Findings(NamedTuple):
    """What a parse found that a person should know."""

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


def remarks(found: Findings) -> tuple[str, ...]:
    """The sentences for ``found``, the gravest first."""
    notes = list(found.troubles)
    if found.generated:
        notes.append("The log says of itself that it was generated: it is not the output of NCCL.")
    if found.empty:
        notes.append("The log is empty.")
    if found.operations == 0:
        notes.append(f"No whole operation line was found. NCCL prints none by default: {ASK_FOR_OPERATIONS}.")
    if found.without_init:
        notes.append(
            f"{found.without_init} of {found.communicators} communicators have no init line, so their ranks are not "
            "known: NCCL_DEBUG_SUBSYS had COLL without INIT, or the log begins late. "
            "Next time set NCCL_DEBUG_SUBSYS=INIT,COLL."
        )
    if found.torn:
        notes.append(
            f"{found.torn} operation lines are torn; they are counted and kept, not repaired. NCCL does not flush "
            f"standard output per line since 2.13: {ASK_FOR_FILES}."
        )
    if found.ambiguous:
        notes.append(
            f"{found.ambiguous} communicators look alike and carry no commId, so which ranks share one is not known."
        )
    notes.extend(
        f"Global ranks are those of the largest communicator, of {world.nranks} ranks, of which the logs hold "
        f"{world.members}: they are right if no larger communicator existed."
        for world in found.partial_worlds
    )
    if found.types_hidden:
        notes.append(
            "AllGather and Broadcast are printed as int8 by NCCL 2.7.3 to 2.21.5, whatever their type: where that may "
            "be so, dtype is empty; bytes are right."
        )
    if found.unknown_ops:
        names = ", ".join(f"{name} ({count})" for name, count in sorted(found.unknown_ops.items()))
        notes.append(f"Operations that are not in the table, counted and left out: {names}.")
    if found.overlong:
        notes.append(f"{found.overlong} lines are longer than 16 MiB and were skipped.")
    return tuple(notes)
