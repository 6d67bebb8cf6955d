"""Determine when C++ waited for collectives, from intervals with waits for several collectives (``stalls``).

The functions are pure. DistributedDataParallel waits for all its buckets at the end of a backward pass. The
table contains the time from which on the program was blocked, and the lower and upper bound of the blocked
time. It does not contain which bucket blocked the program at which moment. If the two bounds are close, the
wait as a whole is as good as recorded, and the time between two such waits is the own time of the program.
The whole wait is attributed to the last record of an interval, because the other records are complete when
the last record is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.sequences.group_ids import numbered, split_by

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_PROCESS: Final = ("attempt", "rank", "pid")
# The columns of records that CppWaits needs, and the columns that it adds.
SOURCES: Final = (
    *_PROCESS,
    "issue_ns",
    "device",
    "is_async",
    "layer",
    "purpose",
    "wait_end_ns",
    "exposed_ns",
)
COLUMNS: Final = ("cpp_wait_begin_ns", "cpp_wait_end_ns")
# The largest difference between the two bounds of a wait is the larger of the time that waking up takes, and of this
# share of the time since the previous wait.
_LEAST_APART_NS: Final = 50_000
_MOST_APART: Final = 0.1


class _Intervals(NamedTuple):
    """The waits of one process on its host, in order of their end."""

    since: Numbers
    begin: Numbers
    wait_end: Numbers
    end: Numbers
    is_close: Flags


class CppWaits:
    """The intervals in which C++ code of each process waited on its host.

    Args:
        stalls: The table ``stalls`` of a run.
    """

    def __init__(self, stalls: pa.Table) -> None:
        of_host = stalls.filter(pc.is_null(stalls["device_end_ns"]))
        self._intervals: dict[tuple[int, ...], _Intervals] = {}
        if len(of_host):
            code, first = numbered(of_host.select(_PROCESS))
            keys = of_host.select(_PROCESS).take(pa.array(first)).to_pylist()
            for rows in split_by(code, np.arange(len(of_host))):
                key = _key(keys[code[rows[0]]])
                self._intervals[key] = _intervals(of_host.take(pa.array(rows)))

    def beside(self, records: pa.Table) -> pa.Table:
        """Return ``records`` (:data:`SOURCES`) with :data:`COLUMNS`.

        The values are null if no wait is known, or if a wait is known only roughly.
        """
        begin, end = np.zeros(len(records), np.int64), np.zeros(len(records), np.int64)
        is_known = np.zeros(len(records), bool)
        if self._intervals and len(records):
            rows = np.flatnonzero(unseen_waits(records, on_device=False))
            issue = records["issue_ns"].to_numpy()
            code, first = numbered(records.select(_PROCESS))
            keys = records.select(_PROCESS).take(pa.array(first)).to_pylist()
            for mine in split_by(code, rows):
                waits = self._intervals.get(_key(keys[code[mine[0]]]))
                if waits is None:
                    continue
                of_record = np.searchsorted(waits.end, issue[mine], "left")
                place = np.minimum(of_record, len(waits.end) - 1)
                inside = (of_record < len(waits.end)) & (waits.since[place] <= issue[mine])
                inside &= waits.is_close[place]
                mine, place = mine[inside], place[inside]
                mine = mine[np.argsort(issue[mine], kind="stable")]
                place = np.sort(place)
                begin[mine] = end[mine] = np.maximum(waits.begin[place], issue[mine])
                # A part of the records of a process may end within an interval. The other records of this interval are
                # then in a different part.
                is_last = np.append(np.diff(place) > 0, True)[: len(place)]
                end[mine[is_last]] = np.maximum(waits.wait_end[place[is_last]], end[mine[is_last]])
                is_known[mine] = True
        for name, values in zip(COLUMNS, (begin, end), strict=True):
            records = records.append_column(name, pa.array(values, mask=~is_known))
        return records


def unseen_waits(records: pa.Table, on_device: bool) -> Flags:
    """Return for which ``records``, of devices or of the host, C++ may have waited.

    These are records without a recorded wait that C++ issued or reduced.
    """
    device, layer, purpose = (records[name].cast(pa.string()) for name in ("device", "layer", "purpose"))
    of_reducer = pc.or_kleene(pc.equal(layer, "c10d"), pc.equal(purpose, "gradient_reduce"))
    on_host = pc.fill_null(pc.equal(device, "cpu"), True)
    unseen = pc.and_(pc.fill_null(of_reducer, False), pc.invert(on_host) if on_device else on_host)
    for known in (records["wait_end_ns"], records["exposed_ns"]):
        unseen = pc.and_(unseen, pc.is_null(known))
    return np.asarray(pc.and_(unseen, records["is_async"]).to_numpy())


def _intervals(stalls: pa.Table) -> _Intervals:
    stalls = stalls.take(pa.array(np.argsort(stalls["end_ns"].to_numpy(), kind="stable")))
    since, begin, end, low, high = (
        pc.fill_null(stalls[name], 0).to_numpy().astype(np.int64)
        for name in ("since_ns", "begin_ns", "end_ns", "exposed_low_ns", "exposed_high_ns")
    )
    period = np.diff(end, prepend=end[:1])
    # DistributedDataParallel waits first and copies the gradients afterwards.
    wait_end = np.minimum(begin + np.maximum((low + high) // 2, 0), end)
    is_close = high - low <= np.maximum(_LEAST_APART_NS, _MOST_APART * period)
    return _Intervals(since, begin, wait_end, end, is_close)


def _key(process: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(process[name] for name in _PROCESS)
