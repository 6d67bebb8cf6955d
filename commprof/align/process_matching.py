"""Match the processes of a log with the processes of the run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from commprof.align.alignment_streams import LineStream, LogProcess, RecordStream, RunProcess


def distrust_small_worlds(
    lines: Sequence[LineStream], streams: Iterable[RecordStream], world_size: int | None
) -> None:
    """Discard the global ranks of a log whose largest communicator does not have the size of the job.

    The log alone does not show whether this is the case. If only subgroups communicate, the largest of them
    looks like the world.
    """
    if world_size is None:
        world_size = max((stream.group_size for stream in streams), default=0)
    if max((line.nranks or 0 for line in lines), default=0) != world_size:
        for line in lines:
            line.global_rank = None


def pair_processes(
    lines: Sequence[LineStream],
    processes: Collection[RunProcess],
    hosts: Mapping[RunProcess, str],
) -> dict[LogProcess, list[RunProcess]]:
    """Return the processes of the run that each process of the log may be, usually one.

    Processes are matched by process id, and by host if the run recorded it, unless the rank in the log
    contradicts the match. Otherwise they are matched by this rank. This function does not resolve a process
    of the log with several ranks, which is resolved by communicator.
    """
    ranks: dict[LogProcess, set[int]] = {}
    for stream in lines:
        known = ranks.setdefault(stream.process, set())
        if stream.global_rank is not None:
            known.add(stream.global_rank)
    paired = {}
    for process, known in ranks.items():
        same_pid = [
            candidate
            for candidate in processes
            if candidate.pid == process.pid
            and (not known or candidate.rank in known)
            and _same_host(hosts.get(candidate), process.host)
        ]
        if len(same_pid) != 1 and len(known) < 2:
            # The run was recorded without hosts or in another pid namespace, or the host names in the log were edited.
            same_pid = same_pid or [
                c for c in processes if c.pid == process.pid and (not known or c.rank in known)
            ]
        paired[process] = same_pid or [c for c in processes if c.rank in known]
    return paired


def _same_host(recorded: str | None, printed: str) -> bool:
    """Return whether the hosts are equal up to the first dot, because NCCL prints a host up to its first dot."""
    return recorded is None or recorded.partition(".")[0] == printed.partition(".")[0]
