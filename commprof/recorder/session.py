"""Recording one process: from ``attach`` (or ``arm``, under ``commprof run``) until ``detach`` or the end of
the program.

This is the shell around the recorder: it reads the environment, finds the run directory, opens the rank's files
when the process turns out to be a rank, and says at the end what was lost. Nothing here raises into the
program.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from multiprocessing import util as multiprocessing_util
from pathlib import Path
from typing import Any, Final

from commprof import __version__, hooks
from commprof.errors import CommprofError
from commprof.recorder.groups import Group, live_groups
from commprof.recorder.interception import Interception
from commprof.recorder.journal import Journal
from commprof.recorder.selfcheck import SelfCheck
from commprof.recorder.steps import Steps
from commprof.schema import SCHEMA_VERSION
from commprof.trace.directory import TRACES, run_name
from commprof.trace.layout import RankFile
from commprof.trace.manifest import Manifest, describe_process, write_manifest_if_absent
from commprof.trace.process import process_start_ns, start_ticks
from commprof.trace.writer import EventFile, RecordFile, count_of

RUN_VARIABLE: Final = "COMMPROF_RUN"
OPTIONS_VARIABLE: Final = "COMMPROF_OPTIONS"
_TABLES: Final = frozenset({"metrics", "parameters", "buckets", "config"})


class Session:
    """One recording of one process.

    Args:
        out: run directory; default: ``COMMPROF_RUN``, else one that all ranks of a launcher share, below ``traces/``.
        quiet: do not say on stderr where the trace is.
        selfcheck: compare the groups' own counts with the records, once a step.
    """

    def __init__(
        self,
        out: str | os.PathLike[str] | None = None,
        quiet: bool = False,
        selfcheck: bool = True,
        armed: bool = False,
    ) -> None:
        self.armed = armed
        self.quiet = quiet
        self.journal = Journal()
        self.interception = Interception(self.journal, self._on_group)
        self.steps = Steps(self.journal, self._check)
        self.selfcheck = SelfCheck(self.journal, self.interception.groups) if selfcheck else None
        self.identity: RankFile | None = None
        self.directory: Path | None = None
        self._out = out
        self._failed: str | None = None
        self._opened_ns = 0
        self._lock = threading.RLock()
        self._unpatch: list[Any] = []

    def start(self) -> None:
        """Begin to watch. Files are opened at once when torch.distributed is initialised, else when it is."""
        if self.selfcheck is not None:
            self.selfcheck.start()
        self.interception.install()
        self._watch_groups()
        self.steps.install()
        hooks.listen(self)
        groups = live_groups()
        if groups:
            self.interception.groups.find(groups[0])

    def stop(self) -> None:
        """Write what is left, close the files, and take every wrapper out."""
        self._check()
        hooks.listen(None)
        self.steps.remove()
        self.interception.remove()
        for restore in self._unpatch:
            restore()
        self._unpatch.clear()
        self.close()

    def close(self) -> None:
        """End the rank's files in an orderly way."""
        with self._lock:
            journal, records = self.journal, self.journal.records
            if records is None or self.identity is None:
                if self._failed is not None:
                    self._complain(journal.lost, self._failed)
                return
            self.steps.finish()
            journal.write("end", {"time_ns": time.perf_counter_ns()})
            totals = self._totals(records)
            kept, lost, reason = records.kept, records.lost, records.stopped_reason
            if reason is None and journal.events is not None:
                reason = journal.events.stopped_reason
            journal.close(totals)
            journal.records = journal.events = None
            _first_seq[0] += kept
        if reason is not None or lost or journal.faults:
            self._complain(lost, reason)

    def _complain(self, lost: int, reason: str | None) -> None:
        rank = self.identity.rank if self.identity else "?"
        parts = []
        if reason is not None or lost:
            parts.append(
                f"recording stopped: {reason}; {lost} collectives were lost, the training was not touched"
            )
        if self.journal.faults:
            parts.append(
                f"{self.journal.faults} collectives could not be recorded (first reason: {self.journal.first_fault})"
            )
        _say(f"rank {rank}: {'; '.join(parts)}")

    def _totals(self, records: RecordFile) -> dict[str, Any]:
        journal = self.journal
        calls = sum(
            count_of(group.collectives) + count_of(group.messages)
            for group in self.interception.groups.every()
        )
        cost = journal.cost_ns / journal.cost_samples if journal.cost_samples else 0.0
        stopped = records.stopped_reason or (journal.events.stopped_reason if journal.events else None)
        return {
            "records": records.kept,
            "lost": records.lost,
            "raised": journal.raised,
            "faults": journal.faults,
            "first_fault": journal.first_fault,
            "recorder_ns": round(cost * calls) + self.steps.cost_ns,
            "stopped_reason": stopped,
        }

    def drop(self) -> None:
        """In a forked child: let go of everything that belongs to the parent."""
        self.journal.drop()
        self.journal.records = self.journal.events = None
        hooks.listen(None)
        self.steps.remove()
        self.interception.remove()
        for restore in self._unpatch:
            restore()
        self._unpatch.clear()

    # What the hooks tell (hooks.Listener).

    def on_step(self, step: int, micro_step: int) -> None:
        """A step or micro step begins."""
        try:
            self.steps.begin(step, micro_step)
        except Exception as error:
            self.journal.fault(error)

    def on_phase(self, name: str) -> None:
        """The phase changed."""
        self.journal.enter_phase(name)

    def on_row(self, table: str, row: Mapping[str, Any]) -> None:
        """One row of a side table."""
        try:
            if table in _TABLES:
                self.steps.note_row(table, row)
        except Exception as error:
            self.journal.fault(error)

    # Opening.

    def _on_group(self, group: Group) -> None:
        """A process group is seen for the first time: open the files if this is the first, and write it down."""
        with self._lock:
            if self.journal.records is None and self._failed is None:
                self._open()
        self.journal.write("group", group.row())

    def _open(self) -> None:
        import torch.distributed as dist

        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        try:
            self.directory = self._find_directory()
            self.directory.mkdir(parents=True, exist_ok=True)
            self._write_manifest(world)
            identity, records, events = _create_files(self.directory, rank)
        except (OSError, CommprofError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            self._failed = reason
            _say(f"rank {rank}: nothing is recorded: {self.directory}: {reason}. The training goes on")
            self.journal.refuse(reason)
            return
        self.identity = identity
        self._opened_ns = time.perf_counter_ns()
        self.journal.open(records, events)
        self._write_beginning(identity, world)
        self.steps.start()
        # multiprocessing ends its children without running atexit handlers.
        multiprocessing_util.Finalize(None, _finish, exitpriority=10)

    def _write_beginning(self, identity: RankFile, world: int) -> None:
        import torch

        self.journal.write(
            "begin",
            {
                "schema_version": SCHEMA_VERSION,
                "commprof_version": __version__,
                "rank": identity.rank,
                "attempt": identity.attempt,
                "pid": identity.pid,
                "part": identity.part,
                "world_size": world,
                "host": socket.gethostname(),
                "start_ticks": start_ticks(identity.pid),
                "time_ns": self._opened_ns,
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
            },
        )

    def _find_directory(self) -> Path:
        out = self._out or os.environ.get(RUN_VARIABLE)
        if out:
            return Path(out).absolute()
        # Ranks of one launcher have one parent; the moment at which it started names the run for all of them.
        started = process_start_ns(os.getppid()) or process_start_ns(os.getpid()) or time.time_ns()
        main = sys.modules.get("__main__")
        script = getattr(main, "__file__", None) or (sys.argv[0] if sys.argv else "") or "run"
        moment = datetime.fromtimestamp(started / 1e9)
        return (TRACES / run_name(script, moment)).absolute()

    def _write_manifest(self, world: int) -> None:
        import torch

        assert self.directory is not None
        fields = describe_process()
        write_manifest_if_absent(
            self.directory,
            Manifest(
                script=sys.argv[0] if sys.argv else None,
                started_realtime_ns=time.time_ns(),
                world_size=world,
                hosts=[socket.gethostname()],
                torch=torch.__version__,
                **fields,
            ),
        )

    # Watching groups come and go.

    def _watch_groups(self) -> None:
        from torch.distributed import distributed_c10d

        for name, wrap in (
            ("init_process_group", self._wrap_init),
            ("destroy_process_group", self._wrap_destroy),
        ):
            original = getattr(distributed_c10d, name)
            self._patch(name, original, wrap(original))

    def _patch(self, name: str, original: Any, wrapper: Any) -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        for module in (dist, distributed_c10d):
            if getattr(module, name, None) is original:
                setattr(module, name, wrapper)
                self._unpatch.append(functools.partial(_restore, module, name, original, wrapper))

    def _wrap_init(self, original: Any) -> Any:
        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            try:
                for pg in live_groups()[:1]:
                    self.interception.groups.find(pg)
            except Exception as error:
                self.journal.fault(error)
            return result

        return init_process_group

    def _wrap_destroy(self, original: Any) -> Any:
        @functools.wraps(original)
        def destroy_process_group(group: Any = None, *args: Any, **kwargs: Any) -> Any:
            name = None
            try:
                self._check()
                import torch.distributed as dist

                if group is not None and group is not dist.GroupMember.WORLD:
                    name = group.group_name
            except Exception as error:
                self.journal.fault(error)
            result = original(group, *args, **kwargs)
            try:
                self.interception.groups.retire(name)
                if self.selfcheck is not None:
                    self.selfcheck.forget(name)
            except Exception as error:
                self.journal.fault(error)
            return result

        return destroy_process_group

    def _check(self) -> None:
        if self.selfcheck is not None and self.journal.records is not None:
            try:
                self.selfcheck.run()
            except Exception as error:
                self.journal.fault(error)


def _restore(module: Any, name: str, original: Any, wrapper: Any) -> None:
    if getattr(module, name, None) is wrapper:
        setattr(module, name, original)


def _create_files(directory: Path, rank: int) -> tuple[RankFile, RecordFile, EventFile]:
    """Both files of this process, under the first part number that is free."""
    attempt = _number(os.environ.get("TORCHELASTIC_RESTART_COUNT"))
    part = 1
    while True:
        identity = RankFile(rank, attempt, os.getpid(), part)
        stem = directory / identity.stem
        finalised = directory / "collectives" / f"{identity.stem}.parquet"
        try:
            if finalised.exists():
                raise FileExistsError(str(finalised))
            events = EventFile(stem)
        except FileExistsError:
            part += 1
            continue
        return identity, RecordFile(stem, identity, _first_seq[0]), events


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0


def _say(text: str) -> None:
    try:
        sys.stderr.write(f"commprof: {text}\n")
    except Exception:
        pass


_session: Session | None = None
_first_seq: Final = [0]  # records of earlier recordings of this process: seq goes on over them


def current() -> Session | None:
    """The recording of this process, if there is one."""
    return _session


def attach(out: str | os.PathLike[str] | None = None, **options: Any) -> None:
    """Start recording this process. See :func:`commprof.hooks.attach`."""
    _begin(out, options, armed=False)


def arm() -> None:
    """Record this process as ``commprof run`` asks it to, by ``COMMPROF_RUN`` and ``COMMPROF_OPTIONS``.

    Called once torch.distributed has been imported. A process that never initialises it leaves no file.
    """
    try:
        options = json.loads(os.environ.get(OPTIONS_VARIABLE) or "{}")
        if not isinstance(options, dict):
            raise ValueError("not an object")
    except ValueError as error:
        _say(f"{OPTIONS_VARIABLE} is ignored: it is not a JSON object ({error})")
        options = {}
    _begin(None, options, armed=True)


def detach() -> None:
    """Stop recording this process and close its files."""
    global _session
    session, _session = _session, None
    if session is not None:
        try:
            session.stop()
        except Exception as error:
            _say(f"could not end the recording: {type(error).__name__}: {error}")


def _begin(out: str | os.PathLike[str] | None, options: Mapping[str, Any], armed: bool) -> None:
    global _session
    if _session is not None:
        return
    try:
        import torch.distributed as dist

        if not dist.is_available():
            _say("nothing is recorded: this torch was built without torch.distributed")
            return
        session = Session(out, armed=armed, **options)
        session.start()
    except Exception as error:
        _say(f"nothing is recorded: {type(error).__name__}: {error}. The training goes on")
        return
    _session = session


def _finish() -> None:
    detach()


def _after_fork() -> None:
    """In a forked child: the parent's files are not ours. A child under ``commprof run`` waits to become a rank itself."""
    global _session
    session, _session = _session, None
    _first_seq[0] = 0
    if session is None:
        return
    try:
        session.drop()
    except Exception as error:
        _say(f"after fork: {type(error).__name__}: {error}")
    if session.armed:
        arm()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_finish)
