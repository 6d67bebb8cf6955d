"""The recording of one process, from ``attach`` (``arm`` under ``commprof run``) to ``detach`` or the program's end.

The session reads the environment and finds the run directory. It opens the rank's files when the process is known to
be a rank, and reports dropped records at the end. Nothing in this module raises into the program.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing import util as multiprocessing_util
from pathlib import Path
from typing import Any, Final

from commprof import hooks
from commprof.printable import command_line, escaped
from commprof.recorder.adapters.frameworks import Frameworks
from commprof.recorder.clocks.clock_meeting import Meeting, job_meeting
from commprof.recorder.clocks.clock_offsets import ClockOffsets
from commprof.recorder.coverage.flight_comparison import FlightDump
from commprof.recorder.coverage.selfcheck import SelfCheck
from commprof.recorder.process.aggregation import Aggregation
from commprof.recorder.process.bounds import SizeLimit, StepWindow
from commprof.recorder.process.counters import host_readings
from commprof.recorder.process.journal import Journal
from commprof.recorder.process.opening import Opened, begin_row, find_directory, open_files, this_rank
from commprof.recorder.process.recorder_options import (
    BEFORE_THE_FIRST,
    DEFAULTS,
    OPTIONS_VARIABLE,
    Options,
    from_json,
    from_mapping,
)
from commprof.recorder.process.stack_signal import StackSignal
from commprof.recorder.process_group.groups import Group, live_groups
from commprof.recorder.process_group.interception import Interception
from commprof.recorder.process_group.lifecycle import GroupLifecycle
from commprof.recorder.training.expert_loads import ExpertLoads
from commprof.recorder.training.step_writer import Steps
from commprof.trace.rank_files.segments import count_of

_TABLES: Final = frozenset({"metrics", "parameters", "expert_layers", "config"})


class Session:
    """One recording of one process.

    Args:
        out: The run directory. Default: ``COMMPROF_RUN``, or else a directory below ``traces/`` that all ranks of a
            launcher share.
        options: The options of the recording.
        notes: Messages about ignored options. Rank 0 prints each message once, when its files are opened.
        armed: Whether the environment requested the recording. Forked children inherit the environment, so they are
            recorded too.
        speaks: Whether to print at the end where the trace is, unless ``out`` named the directory.
    """

    def __init__(
        self,
        out: str | os.PathLike[str] | None = None,
        options: Options = DEFAULTS,
        notes: Sequence[str] = (),
        armed: bool = False,
        speaks: bool = True,
    ) -> None:
        self.options = options
        self._notes = notes
        self.armed = armed
        self.speaks = speaks and not options.quiet
        self.opened: Opened | None = None
        self.journal = Journal(options.completion_every)
        self.interception = Interception(self.journal, self._on_group, options.complete)
        groups = self.interception.groups
        self.lifecycle = GroupLifecycle(
            self._on_init,
            self._before_destroy,
            self._on_destroy,
            self._before_reconfigure,
            self._on_reconfigure,
            self.journal.fault,
        )
        self.steps = Steps(self.journal, self._check)
        self.experts = ExpertLoads(self.journal)
        self.window = StepWindow(options.window, self.journal, self._resume, self._pause)
        self.limit = SizeLimit(options.max_bytes, self.journal)
        self.sums = Aggregation(self.journal, options.aggregate, self.limit) if _makes_sums(options) else None
        self.selfcheck = (
            SelfCheck(self.journal, groups, self.interception.close_gap) if options.selfcheck else None
        )
        self.flight = FlightDump(self.journal, groups.unique_name)
        self.stacks = StackSignal()
        self.clock_offsets = ClockOffsets(self.journal, self._clock_meeting)
        self.frameworks = Frameworks(self.journal, self.steps, self.interception.stalls)
        self.interception.kernels.tagger = self.frameworks.explain
        # The program may change its working directory before its ranks are known.
        self._folder = _working_directory()
        self.out = self._folder / out if out else None
        self._refused: str | None = None  # the reason why no file could be opened
        self._lock = threading.RLock()

    def start(self, forked: bool = False) -> None:
        """Start recording. The files are opened when torch.distributed is initialized, or now if it already is.

        Args:
            forked: Whether this process is a forked child. A forked child inherits the groups of its parent without
                being a rank, so its files are opened at its first collective.
        """
        if self.selfcheck is not None:
            self.selfcheck.start()
        self.window.start(hooks.position.step)
        if self.window.is_open:
            self.interception.install(forked)
        self.lifecycle.install()
        hooks.listen(self)
        self.frameworks.install()
        for group in [] if forked else live_groups()[:1]:
            self.interception.groups.find(group)

    def stop(self) -> None:
        """Write pending data, remove every wrapper, and close the files."""
        self.journal.is_closing = True
        self._check(is_last=True)
        self.window.count()
        self.frameworks.finish()
        self.experts.finish()
        self._unwatch()
        self.clock_offsets.finish()
        if self.sums is not None:
            self.sums.finish()
        self.flight.write()
        self._close()

    def drop(self) -> None:
        """Close everything that belongs to the parent process; called in a forked child."""
        self.journal.drop()
        self.stacks.drop()
        self.clock_offsets.drop()
        self._unwatch()

    def abandon(self) -> None:
        """Remove the wrappers and hooks that are already installed, because the session could not be started."""
        try:
            self._unwatch()
        except Exception as error:
            say(f"wrappers or hooks could not be removed from torch: {type(error).__name__}: {error}")

    def _unwatch(self) -> None:
        hooks.listen(None)
        self.frameworks.remove()
        self.lifecycle.remove()
        self.interception.remove()
        if self.selfcheck is not None:
            self.selfcheck.stop()

    def _close(self) -> None:
        with self._lock:
            if self.opened is None:
                if self._refused is not None:
                    self._complain("?", self.journal.lost, self._refused)
                return
            _, identity, records, _ = self.opened
            self.steps.finish()
            self.stacks.remove()
            self.journal.write("end", {"time_ns": time.perf_counter_ns()})
            totals = self._totals(self.opened)
            self.journal.close(totals)
            _first_seq[0] += totals["records"]
        self._complain(identity.rank, totals["lost"], totals["stopped_reason"])
        if self.speaks and not self.out and identity.rank == 0:
            place = _relative(self.opened.directory)
            say(
                f"recorded {records.kept} collectives of rank 0 into {place}  next: {command_line('report', place)}"
            )

    def _complain(self, rank: int | str, lost: int, reason: str | None) -> None:
        """Print one line about dropped and faulty records, if there are any."""
        problems = []
        if reason is not None or lost:
            problems.append(
                f"recording stopped: {reason}; {lost} collectives were dropped; the training is not affected"
            )
        if self.journal.faults:
            problems.append(
                f"{self.journal.faults} collectives could not be recorded (first reason: {self.journal.first_fault})"
            )
        if problems:
            say(f"rank {rank}: {'; '.join(problems)}")

    def _totals(self, opened: Opened) -> dict[str, Any]:
        journal = self.journal
        groups = self.interception.groups.every()
        calls = sum(count_of(group.collectives) + count_of(group.messages) for group in groups)
        kernels = self.interception.kernels
        sums = self.sums
        cost = journal.cost_ns / journal.cost_samples if journal.cost_samples else 0.0
        return {
            "records": opened.records.kept,
            "lost": opened.records.lost + (sums.lost if sums is not None else 0),
            "raised": journal.raised,
            "faults": journal.faults,
            "first_fault": journal.first_fault,
            "recorder_ns": round(cost * (calls - kernels.records))
            + kernels.cost_ns
            + kernels.stalls.cost_ns
            + journal.completion.cost_ns
            + self.steps.cost_ns
            + self.experts.cost_ns
            + self.flight.cost_ns
            + self.clock_offsets.cost_ns
            + (sums.cost_ns if sums is not None else 0),
            "stopped_reason": opened.records.stopped_reason or opened.events.stopped_reason,
        }

    # The methods of hooks.Listener.

    def on_step(self, step: int, micro_step: int) -> None:
        """Begin a step or a micro-batch."""
        try:
            inside = self.window.enter(step)
            if step == BEFORE_THE_FIRST:
                self.steps.go_back()
                return
            if not inside:
                self.steps.pass_by(step, micro_step)
                return
            self.steps.begin(step, micro_step)
            if micro_step == 0 and self.sums is not None and self.opened is not None:
                self.opened.records.end_step()
                self.sums.end_step()
        except Exception as error:
            self.journal.fault(error)

    def on_step_end(self) -> None:
        """End the step, as reported by the runtime."""
        try:
            if self.window.is_open:
                self.steps.tell_end()
        except Exception as error:
            self.journal.fault(error)

    def on_micro_step(self, micro_step: int) -> None:
        """Assign the next collectives to micro-batch ``micro_step``."""
        self.journal.enter_micro_step(micro_step)

    def on_phase(self, name: str) -> None:
        """Change to phase ``name``."""
        self.frameworks.loop.heard(name)
        if self.window.is_open:
            self.steps.hear_phase(name)
            self.journal.enter_phase(name)

    def on_row(self, table: str, row: Mapping[str, Any]) -> None:
        """Write one row of a side table."""
        try:
            if table == "parameters":
                self.frameworks.models.heard()
            elif table == "expert_layers":
                self.experts.reserve(row.get("num_experts"))
            if table in _TABLES and (self.window.is_open or table != "metrics"):
                self.steps.note_row(table, row)
        except Exception as error:
            self.journal.fault(error)

    def on_expert_load(self, layer: str, counts: Any, capacity: int, tokens: int) -> None:
        """Record how many tokens chose each expert in one forward pass of ``layer``."""
        try:
            if self.window.is_open:
                self.experts.add(layer, counts, capacity, tokens)
        except Exception as error:
            self.journal.fault(error)

    def on_flush(self, content: hooks.bucket) -> None:
        """Record the flush of a gradient bucket."""
        try:
            if self.window.is_open:
                self.steps.note_flush(content)
        except Exception as error:
            self.journal.fault(error)

    # The callbacks of the interception and of the group lifecycle.

    def _on_init(self, pg: Any) -> None:
        """Handle an initialization of torch.distributed, possibly a repeated one with different ranks.

        Args:
            pg: The default process group, which contains all ranks.
        """
        self.interception.groups.find(pg)
        opened = self.opened
        if opened is not None and opened.identity.rank != pg.rank():
            self.journal.note(
                f"rank {opened.identity.rank} initialized torch.distributed as rank {pg.rank()} of {pg.size()}: its records "
                f"stay under rank {opened.identity.rank}, while group_ranks, roots and peers have the new numbers"
            )

    def _on_group(self, group: Group, pg: Any) -> None:
        """Write the row of a process group at its first use; open the files if it is the first group."""
        with self._lock:
            if self.opened is None and self._refused is None:
                self._open()
        if self.selfcheck is not None and pg is not None:
            self.selfcheck.add(group, pg)
        self.journal.write("group", group.row())
        if not group.ranks:
            self.journal.note(
                f"group {group.name} got other members in place, and torch does not report which ranks they are: its "
                "records have no group_ranks, and roots and peers are unknown"
            )

    def _resume(self) -> None:
        """Begin to record at the first step of the step window."""
        self.journal.enter_phase(hooks.position.phase)
        self.interception.install()
        if self.selfcheck is not None:
            self.selfcheck.skip()

    def _pause(self) -> None:
        """Stop recording after the last step of the step window."""
        self._check()
        self.interception.remove()
        self.steps.close()

    def _before_destroy(self, name: str | None, has_peers: bool) -> None:
        """Handle that one group, or every group, is about to be destroyed.

        For one group, check only this group, because the program may have thousands of groups.

        Args:
            name: The name of the group; None for all groups.
            has_peers: Whether the other ranks take part, so that clock offsets can still be measured.
        """
        self._check(only=name)
        if self.selfcheck is not None:
            self.selfcheck.stop(name)
        self.window.count()
        if name is None:
            self.clock_offsets.part(measure=has_peers)
        if name is None or self.flight.is_due():
            self.flight.write()

    def _on_destroy(self, name: str | None) -> None:
        self.interception.groups.retire(name)
        self.window.outside.forget(name)
        if self.selfcheck is not None:
            self.selfcheck.forget(name)

    def _before_reconfigure(self, pg: Any) -> tuple[int, int]:
        """Handle that the members of the group are about to change.

        Returns:
            The rank of this process in the group, and the size of the group, before the change.
        """
        self._check(only=pg.group_name)
        self.window.count()
        self.flight.write()  # the entries until now describe the group before the change
        return pg.rank(), pg.size()

    def _on_reconfigure(self, pg: Any, communicator: Any, before: tuple[int, int]) -> None:
        self.interception.renew(pg, communicator, before)
        self.window.outside.forget(pg.group_name)
        if self.selfcheck is not None:
            self.selfcheck.begin(pg)

    def _check(self, is_last: bool = False, only: str | None = None) -> None:
        if self.journal.records is None or not self.window.is_open:
            return
        try:
            self.interception.follow()
            if self.selfcheck is not None:
                self.selfcheck.run(is_last, only)
        except Exception as error:
            self.journal.fault(error)

    def _clock_meeting(self) -> Meeting | None:
        assert self.opened is not None
        identity = self.opened.identity
        return job_meeting(f"commprof/clocks/{identity.attempt}/{identity.part}")

    def _open(self) -> None:
        rank = this_rank()
        directory = None
        try:
            directory = find_directory(self.out, rank, self._folder)
            self.opened = open_files(directory, rank, _first_seq[0], self.sums)
        except OSError as error:
            self._refused = error.strerror or str(error)
            say(
                f"rank {rank.rank}: nothing is recorded: {directory}: {self._refused}. The training continues"
            )
            return
        self.journal.open(self.opened.records, self.opened.events)
        self.journal.write("begin", begin_row(self.opened.identity, rank.world_size, self.options.changed()))
        for note in self._notes if rank.rank == 0 else ():
            self.journal.note(note)
            _say_once(note)
        self.steps.readings = host_readings(os.environ, directory)
        self.steps.readings.open()
        self.steps.start(self.window.is_open)
        signal = self.stacks.install(directory, self.opened.identity.stem)
        if signal is not None:
            self.journal.write("stacks", signal)
        if self.options.clocks:
            self.clock_offsets.start(rank.rank, rank.world_size, os.environ)
        # multiprocessing ends its children without running atexit handlers.
        multiprocessing_util.Finalize(None, detach, exitpriority=10)


def _makes_sums(options: Options) -> bool:
    return options.aggregate or options.max_bytes is not None


def _working_directory() -> Path:
    try:
        return Path.cwd()
    except OSError:  # the directory was deleted; an absolute path does not need it
        return Path()


def _relative(directory: Path) -> str:
    """Return ``directory`` relative to the working directory, or unchanged if the working directory was deleted."""
    try:
        return os.path.relpath(directory)
    except OSError:  # the working directory was deleted
        return str(directory)


def say(text: str) -> None:
    """Print one line to stderr, with the prefix ``commprof:``. Never raises."""
    try:
        sys.stderr.write(f"commprof: {escaped(text)}\n")
    except Exception:
        pass


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        say(text)


# The messages that were printed by this process and by the processes that it was forked from.
_said: Final[set[str]] = set()
_session: Session | None = None
# The number of records in earlier recordings of this process. The column seq continues after these records.
_first_seq: Final = [0]


def current() -> Session | None:
    """Return the recording of this process, or None."""
    return _session


def attach(out: str | os.PathLike[str] | None = None, **options: Any) -> None:
    """Start recording this process. See :func:`commprof.hooks.attach`."""
    _begin(out, *from_mapping(options), armed=False)


def arm(out: str | os.PathLike[str] | None = None, *, forked: bool = False, speaks: bool = False) -> None:
    """Record this process into ``out`` or ``COMMPROF_RUN``, with the options in ``COMMPROF_OPTIONS``.

    This function is called after torch.distributed has been imported. A process that never initializes
    torch.distributed writes no file.

    Args:
        out: The run directory; None for the default.
        forked: Whether this process is a forked child of a process that was armed.
        speaks: Whether to print at the end where the trace is, because no other process prints it.
    """
    options, notes = from_json(os.environ.get(OPTIONS_VARIABLE))
    _begin(out, options, notes, armed=True, forked=forked, speaks=speaks)


def detach() -> None:
    """Stop recording this process and close its files."""
    global _session
    session, _session = _session, None
    if session is not None:
        try:
            session.stop()
        except Exception as error:
            say(f"the recording could not be closed: {type(error).__name__}: {error}")


def _begin(
    out: str | os.PathLike[str] | None,
    options: Options,
    notes: Sequence[str],
    armed: bool,
    forked: bool = False,
    speaks: bool = True,
) -> None:
    global _session
    if _session is not None:
        return
    session = None
    try:
        import torch.distributed as dist

        if not dist.is_available():
            say("nothing is recorded: this torch was built without torch.distributed")
            return
        session = Session(out, options, notes, armed=armed, speaks=speaks)
        session.start(forked)
    except Exception as error:
        say(f"nothing is recorded: {type(error).__name__}: {error}. The training continues")
        if session is not None:
            session.abandon()
        return
    _session = session


def _after_fork() -> None:
    """Drop the parent's recording in a forked child, because the open files belong to the parent.

    If the environment requested the recording, arm the child again, because the child may be a rank itself.
    """
    global _session
    session, _session = _session, None
    _first_seq[0] = 0
    if session is None:
        return
    try:
        session.drop()
    except Exception as error:
        say(f"after fork: {type(error).__name__}: {error}")
    if session.armed:
        arm(session.out, forked=True, speaks=session.speaks)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(detach)
