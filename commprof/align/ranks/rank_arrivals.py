"""Compute the arrival of each rank at each collective, on one clock, and how long the others waited. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.ranks.collectives import COLUMNS, matchable, together
from commprof.align.ranks.cpp_waits import COLUMNS as CPP_WAITS
from commprof.align.ranks.own_times import OWN_COLUMNS, with_own_times
from commprof.align.ranks.reference_clock import ReferenceClock
from commprof.align.sequences.row_groups import Flags, Groups, Values

_CARRIED: Final = (
    "attempt",
    "step",
    "op",
    "purpose",
    "pg",
    "group_ranks",
    "group_size",
    "pg_seq",
    "is_p2p",
    "peer",
    "rank",
    "pid",
    "seq",
    "payload_bytes",
    "backend",
)
_TIMES: Final = (
    "issue_ns",
    "return_ns",
    "wait_begin_ns",
    "wait_end_ns",
    "device_begin_ns",
    "device_end_ns",
    "exposed_ns",
)
NEEDED: Final = tuple(
    dict.fromkeys((*COLUMNS, *_CARRIED, *_TIMES, "captured", "is_async", "device", *OWN_COLUMNS))
)
# A wait shorter than this does not show the end of the collective, which may have completed before the wait.
REAL_WAIT_NS: Final = 50_000
FROM_ROOT: Final = ("broadcast", "scatter")
TO_ROOT: Final = ("reduce", "gather")
CAUSES: Final = ("late_arrival", "late_launch", "slow_transfer")


def arrivals(collectives: pa.Table, reference: ReferenceClock, also: Sequence[str] = ()) -> pa.Table:
    """Return one row per record that can be matched with other ranks, in the order of its collective and rank.

    Times of ranks that share a clock are compared directly. Other times are compared on the reference clock.
    The columns are the columns of the answer ``arrivals`` and ``ended_ns``. ``ended_ns`` is the time from the
    first arrival to the end, if the end is known. The result also has the columns that :func:`_delays` and
    :func:`_rooted` add for ranks for which others wait, and the columns in ``also``.

    If the records do not have :data:`OWN_COLUMNS`, they must be all records of their processes. Waits in C++
    (cpp_waits.COLUMNS, if the records have them) determine how long the program was blocked, but not when a
    collective ended.
    """
    collectives = with_own_times(collectives)
    in_cpp = [name for name in CPP_WAITS if name in collectives.column_names]
    rows = matchable(collectives.select(tuple(dict.fromkeys((*NEEDED, *in_cpp, *also)))))
    order_of_rows, collective = together(rows)
    # Reordering a chunked table is far slower.
    rows = _encoded(rows).combine_chunks().take(pa.array(order_of_rows))
    clock = reference.readings(rows)
    groups = Groups(collective)
    one_clock = groups.smallest(clock.clock) == groups.largest(clock.clock)
    comparable = one_clock | groups.all(clock.known)
    shift = np.where(one_clock, 0, clock.offset_ns)
    error = np.where(one_clock, 0, clock.error_ns)
    times = _Times(rows, shift)
    order = _Order(groups, times.issue, clock.clock, error)
    arrived = rows["issue_ns"].to_numpy() + np.where(clock.known, clock.offset_ns, 0)
    known = clock.known | comparable
    columns = {
        "collective": pa.array(collective),
        "members": pa.array(groups.size),
        "arrived_ns": _integers(arrived, known),
        "error_ns": _integers(np.where(clock.known, clock.error_ns, 0), known),
        "lateness_ns": _integers(times.issue - order.first, comparable),
        "lateness_error_ns": _integers(order.first_error, comparable),
        "from_median_ns": _integers(times.issue - order.median, comparable),
        **_waits(rows, groups, times, order, comparable),
    }
    columns |= _delays(rows, groups, times, order, comparable, columns)
    columns |= _rooted(rows, groups, times, order, columns)
    carried = {name: rows[name] for name in (*_CARRIED, *also)}
    carried["pg_seq"] = pc.if_else(rows["is_p2p"], pa.scalar(None, pa.int64()), rows["pg_seq"])
    return pa.table({**carried, **columns})


class _Times:
    """The times of the rows, converted to one clock.

    They are nanoseconds since the first issue of all rows, so that they are exact.
    """

    def __init__(self, rows: pa.Table, shift: Values) -> None:
        issue = rows["issue_ns"].to_numpy() + shift
        self.base = int(issue.min()) if len(issue) else 0
        self.issue = issue - self.base
        in_cpp = [name for name in CPP_WAITS if name in rows.column_names]
        moved = {name: _floats(rows[name], shift - self.base) for name in (*_TIMES[1:-1], *in_cpp)}
        self.device_begin = moved["device_begin_ns"]
        self.exposed = _floats(rows["exposed_ns"], np.int64(0))
        is_async = rows["is_async"].to_numpy(zero_copy_only=False)
        on_cpu = pc.equal(rows["device"].cast(pa.string()), "cpu").fill_null(True)
        self.on_cpu = on_cpu.combine_chunks().to_numpy(zero_copy_only=False)
        returned = np.where(np.isnan(moved["wait_end_ns"]), moved["return_ns"], moved["wait_end_ns"])
        # A synchronous call blocks the program from its beginning. An asynchronous call blocks it only during a wait.
        self.blocked_from = np.where(is_async, moved["wait_begin_ns"], self.issue)
        self.blocked_until = np.where(is_async, moved["wait_end_ns"], returned)
        if in_cpp:
            begin, end = (moved[name] for name in CPP_WAITS)
            self.blocked_from = np.where(np.isnan(begin), self.blocked_from, begin)
            self.blocked_until = np.where(np.isnan(end), self.blocked_until, end)
        waited = moved["wait_end_ns"] - moved["wait_begin_ns"] > REAL_WAIT_NS
        host_end = np.where(is_async, np.where(waited, moved["wait_end_ns"], np.nan), returned)
        self.end = np.where(np.isnan(moved["device_end_ns"]), host_end, moved["device_end_ns"])


class _Order:
    """The rows of each group in the order of arrival.

    This includes the first and the last rank, and the error of their order.
    """

    def __init__(self, groups: Groups, at: Values, clock: Values, error: Values) -> None:
        by_arrival = groups.in_order(at)
        first, last = groups.starts, groups.starts + groups.lengths - 1

        def of(values: Values, position: Values) -> Values:
            """Return ``values`` at a position of each group in the order of arrival."""
            return groups.spread(values[by_arrival][position])

        def time_error(position: Values) -> Values:
            """Return the error of the time between each row and the row at this position."""
            return np.where(of(clock, position) == clock, 0, of(error, position) + error)

        low, high = first + (groups.lengths - 1) // 2, first + groups.lengths // 2
        self.first, self.last = of(at, first), of(at, last)
        self.second_last = of(at, np.maximum(last - 1, first))
        # The rows of each group that arrived first, last, second-last and third-last.
        self.of_first = groups.spread(by_arrival[first])
        self.of_last, self.of_second, self.of_third = (
            by_arrival[np.maximum(last - back, first)] for back in range(3)
        )
        self.median = of(at, low) + (of(at, high) - of(at, low)) / 2
        self.is_last = of(np.arange(len(at)), last) == np.arange(len(at))
        self.first_error, self.last_error = time_error(first), time_error(last)
        self.waiting = self.last - at
        self.is_certain = groups.all(self.is_last | (self.waiting > self.last_error))


def _waits(
    rows: pa.Table, groups: Groups, times: _Times, order: _Order, comparable: Flags
) -> dict[str, pa.Array]:
    """Return the last rank and the durations between arrival and result.

    The result also contains how long the others waited for the last rank.
    """
    expected = np.where(rows["is_p2p"].to_numpy(zero_copy_only=False), 2, rows["group_size"].to_numpy())
    is_complete = comparable & (groups.size == expected) & (groups.size > 1)
    last_one = is_complete & order.is_last
    launched = np.where(groups.all(~np.isnan(times.device_begin)), groups.largest(times.device_begin), np.nan)
    launch = np.maximum(launched - order.last, 0)
    transfer = np.maximum(times.end - np.fmax(launched, order.last), 0)
    lead = order.last - order.second_last
    blocked = np.minimum(times.blocked_until, order.last) - np.maximum(times.blocked_from, order.second_last)
    waited = np.where(times.on_cpu, np.maximum(blocked, 0), np.minimum(times.exposed, lead))
    waited = np.where(is_complete & ~order.is_last, waited, np.nan)
    return {
        "is_last": pa.array(order.is_last, mask=~is_complete),
        "certain": pa.array(order.is_certain, mask=~last_one),
        "lead_ns": _integers(lead, last_one),
        "waiting_ns": _integers(order.waiting, comparable),
        "launch_ns": _integers(launch, comparable),
        "transfer_ns": _integers(transfer, comparable),
        "ended_ns": _integers(times.end - order.first, comparable),
        "waited_ns": _integers(waited, is_complete),
        "others_waited_ns": _integers(groups.mean(waited), last_one),
        "cause": _causes((order.waiting, launch, transfer), order.last_error, is_complete),
    }


def _delays(
    rows: pa.Table,
    groups: Groups,
    times: _Times,
    order: _Order,
    comparable: Flags,
    columns: Mapping[str, pa.Array],
) -> dict[str, pa.Array]:
    """Divide a lateness into the own delay of the rank and the delay that it inherits from earlier waits.

    ``own_delay_ns`` compares the own times of a rank and of the first rank, since the collective for which
    all ranks waited. ``own_lead_ns`` is the same value for ``lead_ns``, between the last rank and the
    second-last rank. ``elsewhere_lead_ns`` is the additional time that the last rank waited in other groups
    and for messages.

    Without the last rank, ``second_rank`` would be the last rank. ``second_lead_ns`` is the time between its
    arrival and the arrival of the third-last rank. ``second_own_lead_ns`` is the part of this time that is
    due to its own time. ``second_waited_ns`` is the time that the others waited for it.
    """
    own, since, elsewhere = (_numbers(rows[name]) for name in OWN_COLUMNS)
    known = comparable & groups.all(rows[OWN_COLUMNS[0]].is_valid().to_numpy())
    known &= groups.smallest(since) == groups.largest(since)
    lateness = times.issue - order.first
    own_delay = np.clip(own - own[order.of_first], 0, lateness)
    last, second, third = order.of_last, order.of_second, order.of_third
    is_lead = np.zeros(len(own), bool)
    is_lead[last] = True
    is_lead &= columns["lead_ns"].is_valid().to_numpy(zero_copy_only=False)
    is_lead_known = is_lead & known

    def at_last(values: Values) -> Values:
        """Return ``values``, which has one value for each group, at the row of the last rank of the group."""
        placed = np.zeros(len(own), np.int64)
        placed[last] = values
        return placed

    at = times.issue
    lead = at[last] - at[second]
    own_lead = np.clip(own[last] - own[second], 0, lead)
    elsewhere_lead = np.clip(elsewhere[last] - elsewhere[second], 0, lead - own_lead)
    second_lead = np.clip(own[second] - own[third], 0, at[second] - at[third])
    behind = groups.spread(at[second])
    blocked = np.minimum(times.blocked_until, behind) - np.maximum(
        times.blocked_from, groups.spread(at[third])
    )
    # Only for calls on CPUs do the recorded times show when the rank itself was blocked.
    blocked = np.where(times.on_cpu & (at < behind), np.maximum(blocked, 0), np.nan)
    second_waited = groups.mean(blocked)[last]
    waited = _numbers(columns["others_waited_ns"])
    share = np.divide(own_lead, lead, out=np.zeros(len(lead)), where=lead > 0)
    is_timed = is_lead_known & columns["others_waited_ns"].is_valid().to_numpy(zero_copy_only=False)
    return {
        "own_delay_ns": _integers(own_delay, known),
        "inherited_ns": _integers(lateness - own_delay, known),
        "others_waited_own_ns": _integers(at_last(np.rint(waited[last] * share)), is_timed),
        "own_lead_ns": _integers(at_last(own_lead), is_lead_known),
        "elsewhere_lead_ns": _integers(at_last(elsewhere_lead), is_lead_known),
        "second_rank": _integers(at_last(rows["rank"].to_numpy()[second]), is_lead),
        "second_lead_ns": _integers(at_last(at[second] - at[third]), is_lead),
        "second_own_lead_ns": _integers(at_last(second_lead), is_lead_known),
        "second_waited_ns": _integers(at_last(np.nan_to_num(second_waited)), is_lead),
    }


def _rooted(
    rows: pa.Table, groups: Groups, times: _Times, order: _Order, columns: Mapping[str, pa.Array]
) -> dict[str, pa.Array]:
    """Return for rooted collectives how long others waited for the own delay of the awaited rank, on its row.

    The receivers of a broadcast or scatter wait for the root. The root of a reduce or gather waits for its
    last sender. No rank waits for any other late rank. ``awaited_own_ns`` is the mean over the ranks that can
    wait. ``awaited_later_ns`` is how much longer the own time of the awaited rank is than the own times of
    these ranks. It is negative if the awaited rank arrives early.
    """
    op = pc.fill_null(pc.index_in(rows["op"].cast(pa.string()), pa.array([*FROM_ROOT, *TO_ROOT])), -1)
    number = op.combine_chunks().to_numpy(zero_copy_only=False)
    known = columns["own_delay_ns"].is_valid().to_numpy(zero_copy_only=False) & (number >= 0)
    known &= columns["is_last"].is_valid().to_numpy(zero_copy_only=False)
    if not known.any():
        return {name: pa.nulls(len(rows), pa.int64()) for name in ("awaited_own_ns", "awaited_later_ns")}
    from_root = known & (number < len(FROM_ROOT))
    is_root = rows["rank"].to_numpy() == _numbers(rows["peer"])
    awaited = known & np.where(from_root, is_root, order.is_last)
    known &= groups.spread(groups.reduced(np.add, awaited.astype(np.int64))) == 1
    waits = known & ~awaited & (from_root | is_root)
    own = _numbers(rows[OWN_COLUMNS[0]])
    at, its_own = (
        groups.spread(groups.reduced(np.add, np.where(awaited, of, 0))) for of in (times.issue, own)
    )
    lead = at - times.issue
    since = np.where(from_root, times.blocked_from, np.fmax(times.blocked_from, order.second_last))
    blocked = np.where(
        times.on_cpu, np.minimum(times.blocked_until, at) - since, np.minimum(times.exposed, lead)
    )
    share = np.clip((its_own - own) / np.maximum(lead, 1), 0, 1)
    waited = np.where(waits, np.maximum(blocked, 0) * share, np.nan)
    later = np.where(waits, np.sign(its_own - own) * np.minimum(np.abs(its_own - own), np.abs(lead)), np.nan)
    apart = np.abs(lead) > order.last_error + order.first_error
    on_row = known & awaited
    return {
        # If the root of a reduce arrives last, no rank waits.
        "awaited_own_ns": _integers(
            np.nan_to_num(groups.mean(np.where(apart, waited, 0.0 * waited))), on_row
        ),
        "awaited_later_ns": _integers(np.nan_to_num(groups.mean(later)), on_row),
    }


def _numbers(column: pa.ChunkedArray | pa.Array) -> Values:
    """Return a column of integers in which null is replaced by 0."""
    filled = pc.fill_null(column, 0)
    return filled.to_numpy() if isinstance(filled, pa.ChunkedArray) else filled.to_numpy(zero_copy_only=False)


def _causes(durations: tuple[Values, ...], error: Values, known: Flags) -> pa.Array:
    """Return which of ``durations`` is the longest, if it exceeds ``error``. Among equal ones, the first counts."""
    longest, cause = np.nan_to_num(durations[0], nan=0.0), np.zeros(len(error), np.int32)
    for number, duration in enumerate(durations[1:], 1):
        is_longer = duration > longest  # unknown durations are never longer
        longest, cause = np.where(is_longer, duration, longest), np.where(is_longer, np.int32(number), cause)
    return pa.DictionaryArray.from_arrays(
        pa.array(cause, mask=~(known & (longest > error))),
        pa.array(CAUSES, pa.string()),
    )


def _encoded(rows: pa.Table) -> pa.Table:
    """Return ``rows`` with dictionary-encoded text, because reordering plain text takes far longer."""
    for position, field in enumerate(rows.schema):
        if pa.types.is_string(field.type):
            text = pc.dictionary_encode(rows.column(position).combine_chunks())
            rows = rows.set_column(position, field.name, text)
    return rows


def _floats(column: pa.ChunkedArray, shift: Values) -> Values:
    """Return ``column`` moved by ``shift``.

    The shift is applied to integers, because a double is exact only below 104 days of uptime.
    """
    if column.null_count == len(column):
        return np.full(len(column), np.nan)
    if not column.null_count:
        return (column.to_numpy() + shift).astype(np.float64)
    moved = (column.fill_null(0).to_numpy() + shift).astype(np.float64)
    moved[column.is_null().to_numpy(zero_copy_only=False)] = np.nan
    return moved


def _integers(values: Values, known: Flags) -> pa.Array:
    if values.dtype == np.int64:
        return pa.array(values, mask=None if known.all() else ~known)
    missing = np.isnan(values) | ~known
    if not missing.any():
        return pa.array(np.rint(values).astype(np.int64))
    return pa.array(np.where(missing, 0, np.rint(values)).astype(np.int64), mask=missing)
