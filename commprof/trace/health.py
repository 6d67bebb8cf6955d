"""The health of a run: which data its trace lacks, as numbers and as sentences. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from commprof.trace.directory import COLLECTIVES_DIRECTORY
from commprof.trace.manifest import COMPLETE, FAILED, KILLED, RUNNING, Manifest

_MOST_NOTES: Final = 20  # the largest number of notes of one rank, and of the run, that are shown


@dataclass(frozen=True, slots=True)
class Health:
    """How much of a run was recorded.

    Attributes:
        records: The number of records that are still present.
        lost: The number of dropped records.
        unseen: Collectives that the groups counted but that have no record, summed over the ranks.
        torn: Records that were cut off while they were written.
        raised: Records of calls that raised an exception.
        incomplete: Records whose call had not returned when the process ended.
        summed: Collectives that were recorded only as sums, over all ranks.
        outside: Collectives that the groups counted outside the requested steps, over all ranks.
        recorder_ns: The time in ns that recording cost a rank, averaged over the ranks that report this time.
        wall_ns: The duration of the run in ns.
        gone: Files of records that the run had and that are now missing. Their ranks count as not recorded.
        damaged: A sentence for each file of a rank that is missing, cut off or unreadable. ``notes`` begins with these
            sentences.
    """

    records: int
    lost: int
    unseen: int
    torn: int
    raised: int
    incomplete: int
    ranks_expected: int | None
    ranks_recorded: int
    missing_ranks: tuple[int, ...]
    state: str
    notes: tuple[str, ...]
    summed: int = 0
    outside: int = 0
    recorder_ns: int | None = None
    wall_ns: int | None = None
    gone: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()


def assess(
    manifest: Manifest,
    entries: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    alive: bool,
    damaged: Sequence[str] = (),
    gone: Collection[str] = (),
) -> Health:
    """Return the health of a run.

    Args:
        manifest: The manifest of the run.
        entries: The manifest entries, one per rank file (``Manifest.ranks``).
        groups: Rows of the ``groups`` table.
        alive: Whether a process of the run is still running.
        damaged: A sentence for each file of a rank that is missing or could not be read.
        gone: The ``file`` of each entry whose records are missing.
    """
    latest = max((entry["attempt"] for entry in entries), default=0)
    recorded = {entry["rank"] for entry in entries if entry["attempt"] == latest}
    expected = max(
        [entry.get("world_size") or 0 for entry in entries if entry["attempt"] == latest],
        default=manifest.world_size or 0,
    )
    present_entries = [entry for entry in entries if entry.get("file") not in gone]
    missing = tuple(rank for rank in range(expected) if rank not in recorded)
    damaged = (*damaged, *_cut_off(present_entries))
    state = _state(manifest, entries, missing, alive)
    of_run = [*manifest.notes[:_MOST_NOTES]]
    if len(manifest.notes) > _MOST_NOTES:
        of_run.append(f"and {len(manifest.notes) - _MOST_NOTES:,} more notes, all of them in run.json")
    notes = (*damaged, *_notes(entries, groups, missing, expected, state), *of_run)
    spent = [entry["recorder_ns"] for entry in entries if entry.get("recorder_ns") is not None]
    took = (manifest.ended_realtime_ns or 0) - manifest.started_realtime_ns
    return Health(
        records=_total(present_entries, "records"),
        lost=_total(entries, "lost"),
        unseen=_total(entries, "unseen"),
        torn=_total(entries, "torn"),
        raised=_total(entries, "raised"),
        incomplete=_total(entries, "incomplete"),
        ranks_expected=expected or None,
        ranks_recorded=len({entry["rank"] for entry in present_entries if entry["attempt"] == latest}),
        missing_ranks=missing,
        state=state,
        notes=notes,
        summed=_total(entries, "summed"),
        outside=_total(entries, "outside"),
        recorder_ns=round(sum(spent) / len(spent)) if spent else None,
        wall_ns=took if took > 0 else None,
        damaged=damaged,
        gone=tuple(f"{COLLECTIVES_DIRECTORY}/{stem}.parquet" for stem in gone),
    )


def _cut_off(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"rank {entry['rank']}: {name} was truncated when it was read: its last part, which the rank had written, was "
        "missing. Copy the run again from where it was recorded"
        for entry in entries
        for name in entry.get("cut") or ()
    ]


def _total(entries: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(entry.get(name) or 0 for entry in entries)


def _state(
    manifest: Manifest, entries: Sequence[Mapping[str, Any]], missing: Sequence[int], alive: bool
) -> str:
    if manifest.state in (COMPLETE, FAILED):
        return manifest.state
    if alive:
        return RUNNING
    if manifest.launcher is None and entries and not missing and all(entry.get("ended") for entry in entries):
        return COMPLETE
    return KILLED


def _notes(
    entries: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    missing: Sequence[int],
    expected: int,
    state: str,
) -> list[str]:
    notes = []
    if missing and entries:
        notes.append(
            f"{_ranks(missing)} of {expected} left no files: killed before the first process group, or recorded on "
            "another host"
        )
    if not entries:
        notes.append(
            "no rank recorded anything: the program never initialized torch.distributed, was killed before that, or "
            "ran on another host"
        )
    unended = [entry["rank"] for entry in entries if not entry.get("ended")]
    if unended and state != RUNNING:
        extent = "the recorded sums" if _total(entries, "summed") else "every issued collective"
        notes.append(
            f"{_ranks(unended)} ended without closing its recording (killed, or os._exit): the trace holds "
            f"{extent}, but the last "
            "self-check, the totals and the buckets of its last step are missing"
        )
    notes += _several_processes(entries)
    notes += _parts(entries)
    notes += _incidents(entries)
    notes += _unseen(groups)
    return notes


def _several_processes(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a note if several processes recorded as one rank in one attempt, such as two jobs of one shell script."""
    processes: dict[tuple[int, int], set[int]] = {}
    for entry in entries:
        processes.setdefault((entry["rank"], entry["attempt"]), set()).add(entry["pid"])
    several = [rank for (rank, _), pids in processes.items() if len(pids) > 1]
    if not several:
        return []
    most = max(map(len, processes.values()))
    return [
        f"{_ranks(several)}: {most} processes recorded as one rank (several jobs in one run?), so the traffic of a "
        "step is the sum over these processes; record each job with its own commprof run"
    ]


def _parts(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return notes on records that were left out because the user requested this."""
    notes = []
    by_window: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        options = entry.get("options") or {}
        asked = [f"--{name} {options[name]}" for name in ("steps", "warmup") if name in options]
        if asked:
            by_window.setdefault(" ".join(asked), []).append(entry)
    for words, members in by_window.items():
        notes.append(f"only the steps of {words} were recorded; {_outside(members)}")
    summed = _total(entries, "summed")
    if summed:
        text = (
            f"for {summed:,} collectives only sums by step, phase, operation, group and purpose were recorded"
        )
        killed = [entry["rank"] for entry in entries if entry.get("summed") and not entry.get("ended")]
        if killed:
            text += f"; those of the last steps before {_ranks(killed)} ended are missing"
        notes.append(text)
    return notes


def _outside(entries: Sequence[Mapping[str, Any]]) -> str:
    counted = [entry["outside"] for entry in entries if entry.get("outside") is not None]
    if not counted:
        return "the number of collectives outside them is not known"
    number = f"{min(counted):,}" if min(counted) == max(counted) else f"{min(counted):,} to {max(counted):,}"
    least = "" if all(entry.get("ended") for entry in entries) else "at least "
    return f"outside them the groups of a rank counted {least}{number} collectives"


def _incidents(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    notes = []
    said_by: dict[str, list[int]] = {}
    for entry in entries:
        who = f"rank {entry['rank']}"
        if entry.get("stopped_reason"):
            notes.append(
                f"{who} stopped recording: {entry['stopped_reason']}; {entry.get('lost') or 0} collectives were dropped"
            )
        if entry.get("torn") or entry.get("torn_events"):
            notes.append(
                f"{who}: {entry.get('torn') or 0} records and {entry.get('torn_events') or 0} lines of events are "
                "truncated or damaged, and were left out"
            )
        if entry.get("incomplete"):
            notes.append(
                f"{who}: {entry['incomplete']} collectives had been issued and had not returned when it ended"
            )
        if entry.get("faults"):
            notes.append(f"{who}: commprof itself failed on {entry['faults']} collectives, which are missing")
        notes_of_rank = list(dict.fromkeys(entry.get("notes") or ()))
        for text in notes_of_rank[:_MOST_NOTES]:
            said_by.setdefault(text, []).append(entry["rank"])
        if len(notes_of_rank) > _MOST_NOTES:
            notes.append(
                f"{who}: and {len(notes_of_rank) - _MOST_NOTES:,} more notes, all of them in run.json"
            )
    # A note that several ranks wrote is shown once.
    return notes + [f"{_ranks(ranks)}: {text}" for text, ranks in said_by.items()]


def _unseen(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    by_group: dict[tuple[str, str, str], int] = {}
    for row in groups:
        if row.get("unseen"):
            key = (str(row["pg"]), str(row.get("group_desc") or row["pg"]), str(row["group_ranks"]))
            by_group[key] = max(by_group.get(key, 0), row["unseen"])
    return [
        f"{count} {'collective was' if count == 1 else 'collectives were'} issued unseen in group {desc} (on each of ranks "
        f"{ranks}): the code that issued them bypassed every layer that was active then"
        for (_, desc, ranks), count in by_group.items()
    ]


def _ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, ``ranks 0, 1``, or for more than 8 ranks ``ranks 0, 1, ... (12 in all)``."""
    unique = sorted(set(ranks))
    shown = ", ".join(map(str, unique[:8]))
    more = f", ... ({len(unique)} in all)" if len(unique) > 8 else ""
    return f"rank{'s' if len(unique) > 1 else ''} {shown}{more}"
