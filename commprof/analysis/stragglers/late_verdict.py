"""Write the verdict on stragglers in sentences.

The verdict is a rank that delays the others, a slow path, or the reason why the cause is unknown. The
functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import pandas as pd

from commprof.analysis.columns.units import format_bytes, format_ns
from commprof.analysis.stragglers.late_ranks import Findings, LateRank
from commprof.analysis.stragglers.late_roots import LateRoot
from commprof.analysis.stragglers.slow_paths import (
    EITHER,
    GROUP,
    LINK,
    PATH,
    PATHS,
    RECEIVES,
    SENDS,
    Paths,
    SlowPath,
)

LATE_RANK: Final = "late_rank"
SLOW_TRANSFER: Final = "slow_transfer"
TRANSFERS: Final = "transfers"
UNTOLD: Final = "untold"
NOBODY: Final = "nobody"

# The lowest cost that is reported, as a share of the time from the first arrival to the last.
_WORTH_SAYING: Final = 0.05
_ALL_MOST: Final = 0.5  # the share of collectives, steps or time that counts as most


class LateVerdict(NamedTuple):
    """The sentences about a run, the kind of cause (one of the five values above), and the stragglers."""

    statement: str | None
    culprit: str
    late: list[int]


def verdict(
    ranks: pd.DataFrame,
    warm: pd.DataFrame,
    findings: Findings,
    rooted: Sequence[LateRoot],
    paths: Paths,
    span_ns: int,
    unknown: int,
) -> LateVerdict:
    """Return the verdict that the arrivals of a run prove.

    Args:
        ranks: One row per rank (answers.STRAGGLERS).
        warm: The rows of ``ranks``, but counted without warm-up, as in ``findings``.
        findings: The evidence of the last ranks.
        rooted: The ranks for which other ranks wait in rooted collectives.
        paths: The evidence of the transfers.
        span_ns: The time from the first arrival to the last, in ns.
        unknown: The number of collectives with ranks whose clocks were never compared.
    """
    by_rank = {int(row["rank"]): row for _, row in warm.iterrows()}
    sentences = [_late(each, by_rank[each.rank], findings) for each in findings.late]
    late = [each.rank for each in findings.late]
    roots = [each for each in rooted if each.rank not in late]
    sentences += [_late_root(each, findings) for each in roots]
    late += [each.rank for each in roots]
    transfers = _transfers(findings, paths, by_rank, span_ns)
    culprit = LATE_RANK if sentences else SLOW_TRANSFER if transfers else NOBODY
    sentences += transfers
    if not sentences:
        sentences = _elsewhere(findings, span_ns) or _untold(findings, by_rank, span_ns)
        culprit = UNTOLD if sentences else NOBODY
    elif culprit == LATE_RANK:
        sentences += _elsewhere(findings, span_ns)
    sentences += _turns(findings) if not sentences else []
    if culprit == NOBODY or (culprit == UNTOLD and not findings.untold):
        limits = _transfers_alone(paths, by_rank)
        culprit = limits.culprit if limits.statement else culprit
        sentences += [limits.statement] if limits.statement else []
    if (
        not sentences
        and len(ranks)
        and int(ranks["within_bound"].sum()) * 2 > int(ranks["collectives"].max())
    ):
        bound = format_ns(float(ranks["error_ns"].max()))
        sentences.append(
            "No rank can be distinguished: in most collectives the lateness of the last rank is within the clock error "
            f"of the hosts ({bound})."
        )
    if unknown:
        sentences.append(
            f"In {unknown:,} collectives the last rank is not known: the clocks of their hosts were never compared "
            "(rank 0 was not recorded, could not be reached, or the job ended first)."
        )
    return LateVerdict(" ".join(sentences) or None, culprit, late)


def _late(late: LateRank, row: pd.Series, findings: Findings) -> str:
    cost = _cost(late.cost_ns, findings)
    since = "" if late.since is None else f", from step {late.since} on"
    if late.is_hidden:
        return f"Without it, rank {late.rank} would be a straggler: the others would wait {cost} for its own delay."
    if (
        late.since is None
        and findings.compared
        and findings.share == 1  # if not, the rank may have been late in collectives that were not compared
        and late.collectives < _ALL_MOST * findings.compared
        and late.steps < _ALL_MOST * findings.steps
    ):
        each = format_ns(late.cost_ns / max(late.steps, 1))
        return (
            f"Rank {late.rank} is a straggler in {late.steps:,} of {findings.steps:,} steps: the others waited about "
            f"{each} for its own delay in each of them, {cost} over all steps."
        )
    error = f", to within {format_ns(float(row['error_ns']))}" if row["error_ns"] else ""
    came = f"Rank {late.rank} is a straggler{since}: it arrived last in {_share(row)}{error}"
    if not late.is_seen:
        return (
            f"{came}; because of its own delay, it was the only missing rank for {cost}. "
            "Whether the others waited was not recorded."
        )
    return f"{came}; the others waited {cost} for its own delay."


def _late_root(late: LateRoot, findings: Findings) -> str:
    came = f"in {late.collectives:,} of {late.compared:,} {late.op} collectives"
    cost = _cost(late.cost_ns, findings)
    if late.is_root:
        return (
            f"Rank {late.rank} is a straggler as the root {came}: the others waited {cost} for its own delay."
        )
    return f"Rank {late.rank} is a straggler {came}: their root waited {cost} for its own delay."


def _transfers(findings: Findings, paths: Paths, by_rank: Mapping[int, pd.Series], span_ns: int) -> list[str]:
    """Return sentences about a slow path and about the rank that is late because of the path."""
    slow = paths.slow(_WORTH_SAYING * span_ns)
    by_cost = sorted(findings.inherited, key=lambda rank: (-findings.inherited[rank], rank))
    # In a reduce or a message, only some ranks wait for a rank. Such waits do not make the rank the last of all.
    by_cost = [rank for rank in by_cost if by_rank[rank]["last"] > 0] or by_cost
    late = [rank for rank in by_cost if findings.inherited[rank] * 2 >= findings.inherited[by_cost[0]]]
    waited = sum(findings.inherited[rank] for rank in late)
    # Few ranks inherit most of the waiting if their share of it is at least the midpoint between their share of the
    # ranks and 1.
    few = 2 * len(by_rank) * waited >= (len(late) + len(by_rank)) * sum(findings.inherited.values())
    is_told = 0 < len(late) < len(by_rank) and few
    if not is_told or waited < _WORTH_SAYING * span_ns:
        return [] if slow is None else [f"{_named(slow)}{_compared(slow, findings)}."]
    slow = slow or paths.rings(late)
    if slow is None:
        groups = paths.groups_of(late[0])[:3]
        slow = SlowPath(GROUP, tuple(groups) or (_all_of(by_rank),), 0.0, 0)
    last = " and ".join(f"{_share(by_rank[rank])} (rank {rank})" for rank in late[:3])
    cost = _cost(waited, findings)
    after = (
        f"Rank {late[0]} arrived last in {_share(by_rank[late[0]])}, and the others waited {cost} for it. "
        "The delay is inherited: the previous collectives ended late on this rank."
    )
    if len(late) > 1:
        after = (
            f"Ranks {_all_of(late)} arrived last, in {last}, and the others waited {cost} for them. "
            "The delay is inherited: the previous collectives ended late on these ranks."
        )
    return [f"{_named(slow)}{_compared(slow, findings)}. {after}"]


def _transfers_alone(paths: Paths, by_rank: Mapping[int, pd.Series]) -> LateVerdict:
    """Return the verdict on a run that spends its time in transfers while no rank is late.

    In such a run, all ranks wait equally long.
    """
    costliest = paths.costliest()
    if costliest is None or costliest.share < _ALL_MOST:
        return LateVerdict(None, NOBODY, [])
    what = (
        f"Transfers take most of the time, and no rank stands out by its own delay: {costliest.what} of "
        f"{format_bytes(costliest.size)} takes {format_ns(costliest.took_ns)} (median), "
        f"{format_bytes(costliest.size / costliest.took_ns * 1e9)} per second."
    )
    slow = paths.rings(by_rank)
    if slow is not None:
        return LateVerdict(f"{what} {_named(slow)}.", SLOW_TRANSFER, [])
    why = "no path or group of these transfers is much slower than another"
    if costliest.compared < 2:
        why = f"of these transfers only those {costliest.where} are timed"
    return LateVerdict(
        f"{what} It is not known whether the link of one host is slow, or the whole network: {why}. To find out, measure "
        "messages between each pair of hosts, with iperf3 or a recorded program of send and recv.",
        TRANSFERS,
        [],
    )


def _named(slow: SlowPath) -> str:
    if slow.kind == LINK:
        return f"Slow transfers: the link of {slow.ends[0]} is slow"
    if slow.kind == SENDS:
        return f"Slow transfers: {slow.ends[0]} sends slowly"
    if slow.kind == RECEIVES:
        return f"Slow transfers: {slow.ends[0]} receives slowly"
    if slow.kind == PATH:
        return (
            f"Slow transfers: the path from {slow.ends[0]} to {slow.ends[1]} is slow; it is not known whether the first "
            "sends slowly or the second receives slowly"
        )
    if slow.kind == EITHER:
        return (
            f"Slow transfers: the link of {' or '.join(slow.ends)} is slow; it is not known which one, because operations "
            "of about the same cost point to different ones"
        )
    if slow.kind == PATHS:
        return f"Slow transfers from {', from '.join(slow.ends)}: these paths have no common end"
    return (
        f"Slow transfers between ranks {', '.join(slow.ends)}: it is not known which host or link is slow, because every "
        "collective includes all of these ranks; to find out, measure messages between each pair"
    )


def _compared(slow: SlowPath, findings: Findings) -> str:
    if not slow.ratio:
        return ""
    return f" ({slow.ratio:.0f} times as long as elsewhere, {_cost(slow.extra_ns, findings)} more)"


def _elsewhere(findings: Findings, span_ns: int) -> list[str]:
    """Return sentences about a rank that is delayed by waits in other groups or for messages."""
    rank, waited = max(findings.elsewhere.items(), key=lambda each: each[1], default=(None, 0))
    if rank is None or waited < _WORTH_SAYING * span_ns:
        return []
    return [
        f"The others waited {_cost(waited, findings)} for rank {rank}, but not for its own delay: waits in other "
        "groups, in rooted collectives or for messages delayed it."
    ]


def _untold(findings: Findings, by_rank: Mapping[int, pd.Series], span_ns: int) -> list[str]:
    """Return sentences about ranks that stand out for an unknown cause."""
    sentences = []
    for rank, waited in sorted(findings.untold.items(), key=lambda each: -each[1]):
        row = by_rank[rank]
        stands_out = row["stands_out"] or rank in findings.untold_late
        if not stands_out or waited < _WORTH_SAYING * span_ns:
            continue
        since = findings.untold_late.get(rank)
        came = f"Rank {rank} arrived last in {_share(row)}"
        came += "" if since is None else f", and in nearly all from step {since} on"
        if pd.isna(row["others_waited_ns"]):
            came += f"; it was the only missing rank for {_cost(waited, findings)}"
            came += ", and whether the others waited was not recorded"
        else:
            came += f"; the others waited {_cost(waited, findings)} for it"
        sentences.append(
            f"{came}. It is not known whether this is its own delay or an inherited one: not all waits of the program for "
            "its collectives were recorded."
        )
    return sentences


def _turns(findings: Findings) -> list[str]:
    if not findings.turns:
        return []
    total_ns = sum(findings.turns.values())
    shares = ", ".join(
        f"rank {rank} {100 * cost / total_ns:.0f} %"
        for rank, cost in sorted(findings.turns.items(), key=lambda each: -each[1])[:4]
    )
    return [
        "No rank is late more often than the others: they are late in turn and waited "
        f"{_cost(total_ns, findings)} for each other ({shares})."
    ]


def _share(row: pd.Series) -> str:
    return f"{100 * row['last'] / row['collectives']:.0f} % of {row['collectives']:,} collectives"


def _cost(cost_ns: float, findings: Findings) -> str:
    cost_ns = cost_ns / findings.share
    return (
        f"{format_ns(cost_ns / findings.steps)} per step"
        if findings.steps
        else f"{format_ns(cost_ns)} in total"
    )


def _all_of(by_rank: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(by_rank)))
