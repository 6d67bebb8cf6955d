"""Reads torch's Flight Recorder at the end, to compare the backend's own list of operations with the records.

Only the JSON form of the list is read, although torch also offers another form. The lists of gloo and NCCL are
ring buffers of 2,000 entries by default (``TORCH_FR_BUFFER_SIZE``), so they contain only the newest operations.
gloo does not list sends and receives, and lists the operation that it executed. For example, gloo executes
reduce_scatter as an all_reduce.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from commprof.recorder.process.journal import Journal
from commprof.trace.rank_files.flight_entries import flight_row
from commprof.trace.rank_files.writer import encode_row

SIZE_VARIABLE: Final = "TORCH_FR_BUFFER_SIZE"
MOST_ENTRIES: Final = 2_000  # maximum number of entries kept from one dump; the newest ones are kept
_LARGEST_RING: Final = 20_000  # torch needs about 10 us for each entry, and blocks the interpreter meanwhile
_PAUSE_NS: Final = 1_000_000_000  # minimum time between two dumps if groups are destroyed one by one
# Maximum length of torch's JSON in characters. Entries with thousands of tensors make the JSON long. This length takes
# half a second to read and write. A time limit would also drop short JSON on a processor that is shared or stopped.
_LONGEST_JSON: Final = 32 << 20

# torch's functions in order of preference. NCCL has its own recorder, and all other backends share one.
DUMPS: Final = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


class FlightDump:
    """Writes each entry of the Flight Recorder into the rank's events file once.

    Args:
        journal: The journal into which the entries are written.
        group_name: A function that maps torch's current name of a group to commprof's name. torch reuses names.
    """

    def __init__(self, journal: Journal, group_name: Callable[[str], str]) -> None:
        self._written_ns = -_PAUSE_NS
        self.cost_ns = 0
        self._journal = journal
        self._group_name = group_name
        self._began_ns = time.time_ns()
        self._began_monotonic_ns = time.monotonic_ns()
        self._seen: dict[str, int] = {}  # for each function of torch, the id of the newest written entry
        self._noted: set[str] = set()

    def is_due(self) -> bool:
        """Return whether the last dump was so long ago that another dump costs little."""
        return time.perf_counter_ns() - self._written_ns > _PAUSE_NS

    def write(self) -> None:
        """Write the new entries. Never raises: if the entries cannot be read, writes a note with the reason."""
        if self._journal.events is None:
            return
        begin = time.perf_counter_ns()
        try:
            self._write()
        except Exception as error:
            self._note(f"torch's Flight Recorder could not be read: {type(error).__name__}: {error}")
        self._written_ns = time.perf_counter_ns()
        self.cost_ns += self._written_ns - begin

    def _write(self) -> None:
        module = getattr(torch._C, "_distributed_c10d", None)
        present = [name for name in DUMPS if hasattr(module, name)]
        if not present:
            self._note(f"torch {torch.__version__} has no Flight Recorder that answers in JSON")
            return
        size = ring_size(os.environ)
        if size == 0:
            self._note(f"torch's Flight Recorder was off ({SIZE_VARIABLE}=0)")
            return
        if size is not None and size > _LARGEST_RING:
            self._note(
                f"torch's Flight Recorder was not read: with {SIZE_VARIABLE}={size} that could hold up the end of the "
                f"program; at most {_LARGEST_RING} are read"
            )
            return
        for name in present:
            text = getattr(module, name)()
            if len(text) > _LONGEST_JSON:
                self._note(
                    f"torch's Flight Recorder was not read: its {len(text):,} bytes (at most {_LONGEST_JSON:,} are read) "
                    f"could hold up the end of the program; {SIZE_VARIABLE} sets how many entries it has"
                )
                continue
            self._write_entries(name, json.loads(text))

    def _write_entries(self, source: str, dump: Mapping[str, Any]) -> None:
        seen = self._seen.get(source, -1)
        since_ns = self._since_ns()
        fresh = [
            entry
            for entry in dump.get("entries") or ()
            if entry["record_id"] > seen and entry["time_created_ns"] >= since_ns
        ]
        fresh.sort(key=lambda entry: int(entry["record_id"]))
        newest = fresh[-MOST_ENTRIES:]
        if len(newest) < len(fresh):
            self._note(f"of torch's Flight Recorder only the newest {MOST_ENTRIES} entries are kept")
        for entry in newest:
            row = flight_row(entry)
            row["pg"] = self._group_name(row["pg"])
            self._journal.write_line("flight", encode_row("flight", row))
        if fresh:
            self._seen[source] = int(fresh[-1]["record_id"])

    def _since_ns(self) -> int:
        """Return when the recording began, in nanoseconds of the wall clock that torch uses.

        If the wall clock was set back since then, the result is relative to the current wall clock.
        """
        return min(self._began_ns, time.time_ns() - (time.monotonic_ns() - self._began_monotonic_ns))

    def _note(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._journal.note(text)


def ring_size(environment: Mapping[str, str]) -> int | None:
    """Return the number of entries that torch keeps according to the environment; None for torch's default."""
    for name in (SIZE_VARIABLE, "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        text = environment.get(name, "")
        if text.isdigit():
            return int(text)
    return None
