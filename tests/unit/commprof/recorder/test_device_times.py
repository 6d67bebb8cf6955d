"""Test the times of a device with a fake device.

The fake device reaches events late, out of order or never, and its clock differs from the host's.
"""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commprof.recorder.device import device_timeline
from commprof.recorder.device.device_clock import DeviceClock
from commprof.recorder.device.device_times import DeviceTimes
from commprof.schema import RECORD
from commprof.trace.rank_files.segments import (
    DEVICE_BEGIN_WORD,
    DEVICE_END_WORD,
    EXPOSED_WORD,
    NO_WORDS,
    RETURN_WORD,
    STATE_WORD,
    WAIT_BEGIN_WORD,
    WAIT_END_WORD,
    Segment,
)
from support.fake_device import FakeDevice, FakeStream
from support.sample import examples

SYNC, ASYNC = 1, 2  # The numbers of two signatures.
WORDS = RECORD.size // 8


class Recording:
    """The records of one rank with one or two devices."""

    def __init__(self, device: FakeDevice, **others: FakeDevice) -> None:
        self.faults: list[BaseException] = []
        self.device = device
        sources = {"cuda": lambda: device} | {name: lambda one=one: one for name, one in others.items()}
        self.times = DeviceTimes(True, self.faults.append, sources, device.clock)
        self.times.learn(SYNC, "cuda:3", False)
        self.times.learn(ASYNC, "cuda:3", True)
        self.words = array("q", [0] * WORDS * 100_000)
        self.segment = Segment(None, 0, self.words)
        self.count = 0

    def issue(self, signature: int, captured: bool = False):
        """Begin a call and return its operation and the position of its words."""
        base = self.count * WORDS
        self.count += 1
        return self.times.follow(self.segment, base, signature, captured), base

    def write(self, operation, word: int) -> None:
        words, base = operation
        words[base + word] = self.device.clock()

    def sync(self, work_ns: int) -> int:
        operation = self.issue(SYNC)
        self.device.work(work_ns)
        self.write(operation, RETURN_WORD)
        return operation[1]

    def times_of(self, base: int) -> tuple[int, int, int]:
        return tuple(self.words[base + word] for word in (DEVICE_BEGIN_WORD, DEVICE_END_WORD, EXPOSED_WORD))


def test_a_synchronous_call_lasts_from_before_to_after_it():
    device = FakeDevice(offset_ns=-5_000_000_000)
    run = Recording(device)
    begin = device.now
    base = run.sync(2_000_000)
    run.times.end_step()
    assert run.times_of(base) == (0, 0, 0)  # The events are not reached yet.
    device.now += 3_000_000
    run.times.end_step()
    device_begin, device_end, exposed = run.times_of(base)
    assert exposed == pytest.approx(2_000_000, abs=1_000)
    assert device_end - device_begin == pytest.approx(exposed, abs=2)
    # No work preceded the event, so it was reached when it was created. The host's accuracy is limited by the
    # times of its queries.
    assert abs(device_begin - begin) <= run.times._timelines["cuda:3"].clock.error_ns(device.now) + 2_000
    assert device.indices == {3} and not run.faults


def test_of_an_asynchronous_call_the_wait_counts():
    """The program works for 5 ms during a collective of 8 ms.

    The remaining 3 ms are exposed, and the 5 ms are overlapped.
    """
    device = FakeDevice()
    run = Recording(device)
    operation = run.issue(ASYNC)
    issued = device.now
    run.write(operation, RETURN_WORD)
    device.work(5_000_000)
    run.write(operation, WAIT_BEGIN_WORD)
    device.busy_until = issued + 8_000_000  # The stream continues when the collective has ended.
    run.write(operation, WAIT_END_WORD)
    device.now += 20_000_000
    run.times.end_step()
    device_begin, device_end, exposed = run.times_of(operation[1])
    assert exposed == pytest.approx(3_000_000, abs=1_000)
    assert device_end - device_begin == pytest.approx(8_000_000, abs=1_000)


def test_an_operation_whose_wait_raised_ends_once():
    """The code that marks a record as raised writes its state after the end of the wait."""
    run = Recording(FakeDevice())
    operation = run.issue(ASYNC)
    for word in (RETURN_WORD, WAIT_BEGIN_WORD, WAIT_END_WORD, STATE_WORD):
        run.write(operation, word)
    run.device.now += 1_000_000
    run.times.end_step()
    assert run.times.tally.timed == 1 and not run.faults


def test_a_handle_that_nobody_waits_for_has_no_times():
    device = FakeDevice()
    run = Recording(device)
    operation = run.issue(ASYNC)
    run.write(operation, RETURN_WORD)
    for _ in range(3):
        device.now += 1_000_000
        run.times.end_step()
    assert run.times_of(operation[1]) == (0, 0, 0)
    assert "0 collectives were timed" in run.times.finish()


def test_a_backend_that_makes_the_stream_wait_in_wait_counts_until_then():
    device = FakeDevice()
    run = Recording(device)
    operation = run.issue(SYNC)
    run.write(operation, RETURN_WORD)
    device.work(4_000_000)
    run.write(operation, WAIT_END_WORD)
    device.now += 10_000_000
    run.times.end_step()
    assert run.times_of(operation[1])[2] == pytest.approx(4_000_000, abs=1_000)


def test_events_reached_out_of_order_are_resolved_as_they_come():
    device = FakeDevice()
    run = Recording(device)
    device.now += 1_000_000
    first = run.sync(0)
    timeline = run.times._timelines["cuda:3"]
    stuck = run.issue(SYNC)
    run.write(stuck, RETURN_WORD)
    # This event is on a different stream, which makes no progress.
    stuck[0].end_event.reached_ns = device.now + 10**12
    later = [run.sync(1_000) for _ in range(5)]
    device.now += 1_000_000
    run.times.end_step()
    assert all(run.times_of(base)[2] for base in (first, *later))
    assert run.times_of(stuck[1])[2] == 0 and timeline.unresolved == 1
    stuck[0].end_event.reached_ns = device.now
    run.times.end_step()
    assert run.times_of(stuck[1])[2] and timeline.unresolved == 0


def test_few_unreached_events_end_a_pass():
    """Each query costs time, so a pass over thousands of open operations queries only the oldest."""
    device = FakeDevice()
    run = Recording(device)
    run.sync(0)
    device.now += 1_000
    run.times.end_step()
    device.work(10**12)
    for _ in range(1000):
        run.sync(0)
    before = device.queries
    run.times.end_step()
    assert device.queries - before <= device_timeline.MOST_UNREACHED


def test_events_are_used_again():
    device = FakeDevice()
    run = Recording(device)
    for _ in range(300):
        run.sync(1_000)
        device.now += 1_000_000
        run.times.end_step()
    assert run.times.tally.timed == 300
    anchors = 300
    assert len(device.made) - anchors <= 6


def test_what_does_not_fit_is_counted_and_the_queue_stays_bounded(monkeypatch):
    monkeypatch.setattr(device_timeline, "MOST_OPEN", 50)
    device = FakeDevice()
    run = Recording(device)
    device.work(10**12)
    for _ in range(200):
        run.sync(0)
        run.times.end_step()
    assert len(run.times._timelines["cuda:3"]._open) <= 51
    said = run.times.finish()
    timed = len([item for item in range(200) if run.times_of(item * WORDS)[2]])
    unresolved = run.times._timelines["cuda:3"].unresolved
    assert timed == 0 and run.times.tally.given_up == 200 - unresolved > 0
    assert f"{run.times.tally.given_up} were not, since 50 others were under way" in said
    assert f"{unresolved} had not ended on the device when recording did" in said
    device.now += 2 * 10**12  # There is room again.
    run.times.end_step()
    base = run.sync(1_000)
    device.now += 10**6
    run.times.end_step()
    assert run.times_of(base)[2]


def test_nothing_is_done_while_a_graph_is_captured():
    device = FakeDevice()
    run = Recording(device)
    open_before = run.issue(ASYNC)
    device.capturing = True  # From here on, the fake device raises if any query is made.
    captured = run.issue(SYNC, captured=True)
    run.write(captured, RETURN_WORD)
    run.write(open_before, WAIT_BEGIN_WORD)
    run.write(open_before, WAIT_END_WORD)
    run.times.end_step()
    device.capturing = False
    device.now += 1_000_000
    run.times.end_step()
    assert run.times_of(captured[1]) == run.times_of(open_before[1]) == (0, 0, 0)
    assert run.times.tally.captured == 2 and not run.faults
    assert "2 were not, since a CUDA graph was being captured" in run.times.finish()
    # Host times are recorded.
    assert run.words[captured[1] + RETURN_WORD] and run.words[open_before[1] + WAIT_END_WORD]


def on_side(run: Recording, work_ns: int, signature: int = SYNC) -> int:
    """Issue a collective on the side stream after the current work of the default stream."""
    device = run.device
    device.aside = True
    device.wait()
    operation = run.issue(signature)
    device.work(work_ns)
    run.write(operation, RETURN_WORD)
    device.aside = False
    return operation[1]


def wait_for_side(run: Recording) -> tuple[float, float]:
    """Make the default stream wait for the side stream.

    Returns:
        The begin and the end of the wait on the host's clock.
    """
    device = run.device
    end = run.times.begin_stream_wait(FakeStream(3, 0))
    begin = max(device.busy_until, device.now)
    device.wait()
    if end is not None:
        end()
    return begin, max(device.busy_until, device.now)


def test_of_a_collective_on_a_side_stream_the_wait_of_the_default_stream_is_exposed():
    """The program computes for 3 ms during a collective of 5 ms and then waits. The exposed time is 2 ms."""
    device = FakeDevice()
    run = Recording(device)
    base = on_side(run, 5_000_000)
    device.work(3_000_000)
    wait_for_side(run)
    device.now += 20_000_000
    run.times.end_step()
    device_begin, device_end, exposed = run.times_of(base)
    assert device_end - device_begin == pytest.approx(5_000_000, abs=1_000)
    assert exposed == pytest.approx(2_000_000, abs=1_000)
    assert "side streams" not in run.times.finish() and not run.faults


def test_a_collective_on_a_side_stream_that_ended_before_the_wait_is_not_exposed():
    device = FakeDevice()
    run = Recording(device)
    base = on_side(run, 1_000_000)
    device.work(3_000_000)
    wait_for_side(run)
    device.now += 20_000_000
    run.times.end_step()
    assert run.times_of(base)[2] == 1  # 0 would mean that the exposed time is not known.


def test_waits_of_side_streams_are_no_waits_of_the_program():
    device = FakeDevice()
    run = Recording(device)
    base = on_side(run, 1_000_000)
    assert run.times.begin_stream_wait(FakeStream(3, 77)) is None
    device.now += 5_000_000
    run.times.end_step()
    device_begin, device_end, exposed = run.times_of(base)
    assert device_end - device_begin == pytest.approx(1_000_000, abs=1_000) and exposed == 0
    assert "1 of these were on side streams" in run.times.finish()


def test_without_collectives_on_side_streams_no_wait_is_timed():
    run = Recording(FakeDevice())
    run.sync(1_000)
    assert run.times.begin_stream_wait(FakeStream(3, 0)) is None
    assert run.times.begin_stream_wait(FakeStream(5, 0)) is None  # This device has no collectives.
    assert run.times.begin_stream_wait(None) is None and len(run.faults) == 1


@settings(max_examples=examples(80), deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["compute", "collective", "wait", "host", "step"]), st.integers(0, 3_000_000)
        ),
        min_size=1,
        max_size=60,
    )
)
def test_exposed_time_of_side_streams_is_what_the_first_wait_that_ends_later_shares_with_it(steps):
    device = FakeDevice(offset_ns=10**12)
    run = Recording(device)
    collectives, waits = [], []
    for number, (kind, ns) in enumerate(steps):
        if kind == "compute":
            device.work(ns)
        elif kind == "collective":
            begin = max(device.side_busy_until, device.busy_until, device.now)
            base = on_side(run, ns)
            collectives.append((number, base, begin, device.side_busy_until))
        elif kind == "wait":
            waits.append((number, *wait_for_side(run)))
        elif kind == "host":
            device.now += ns
        else:
            run.times.end_step()
    device.now = int(max(device.now, device.busy_until, device.side_busy_until)) + 1
    run.times.end_step()
    run.times.finish()
    assert not run.faults
    for number, base, begin, end in collectives:
        later = [wait for wait in waits if wait[0] > number]
        exposed = run.times_of(base)[2]
        if not later:
            assert exposed == 0
        else:
            assert exposed == pytest.approx(
                max(1, min(later[0][2], end) - max(later[0][1], begin)), abs=2_500
            )


def test_what_cpp_issues_and_waits_for_is_between_two_events():
    """Two buckets take 4 ms in total and overlap with 3 ms of computation.

    C++ then waits and copies for 0.5 ms, so at most 1.5 ms are exposed.
    """
    device = FakeDevice()
    run = Recording(device)
    stalls: list[tuple[int, int]] = []
    bases = []
    for _ in range(2):
        base = run.count * WORDS
        run.count += 1
        operation = run.times.follow(run.segment, base, ASYNC, False, issued_in_cpp=True)
        run.write((operation, base), RETURN_WORD)
        bases.append(base)
    issued = device.now
    device.work(3_000_000)
    end = run.times.begin_cpp_wait(lambda *times: stalls.append(times))
    device.busy_until = issued + 4_000_000
    device.work(500_000)
    end()
    assert run.times.begin_cpp_wait(lambda *times: None) is None  # No new collective was issued.
    assert not stalls
    device.now += 20_000_000
    run.times.end_step()
    ((begin_ns, end_ns),) = stalls
    assert end_ns - begin_ns == pytest.approx(1_500_000, abs=3_000)
    for base in bases:
        device_begin, device_end, exposed = run.times_of(base)
        assert end_ns - device_begin == pytest.approx(4_500_000, abs=3_000)
        assert device_end == exposed == 0  # It is not known when the collective ended.
    assert not run.faults


def test_what_cpp_issued_before_a_backward_pass_is_not_waited_for_in_it():
    run = Recording(FakeDevice())
    operation = run.times.follow(run.segment, 0, ASYNC, False, issued_in_cpp=True)
    operation[RETURN_WORD] = 1
    run.times.forget_cpp()
    assert run.times.begin_cpp_wait(lambda *times: None) is None


def test_each_device_has_its_own_clock_and_others_are_left_alone():
    first, second = FakeDevice(offset_ns=10**15), FakeDevice(offset_ns=-(10**15))
    run = Recording(first, other=second)
    second.clock = first.clock
    run.times.learn(7, "other:0", False)
    run.times.learn(8, "hpu:0", False)
    for signature in (SYNC, 7, 8):
        operation = run.issue(signature)
        run.write(operation, RETURN_WORD)
    first.now += 1_000_000
    second.now = first.now
    run.times.end_step()
    placed = [run.times_of(number * WORDS)[1] for number in range(3)]
    assert abs(placed[0] - first.now) < 1_100_000 and abs(placed[1] - first.now) < 1_100_000
    assert placed[2] == 0 and run.words[2 * WORDS + RETURN_WORD]


def test_switched_off_it_asks_for_no_event():
    device = FakeDevice()
    times = DeviceTimes(False, pytest.fail, {"cuda": lambda: device}, device.clock)
    times.learn(SYNC, "cuda:0", False)
    words = times.follow(Segment(None, 0, array("q", [0] * WORDS)), 0, SYNC, False)
    words[RETURN_WORD] = 5
    assert words[RETURN_WORD] == 5 and not device.made
    times.end_step()
    assert times.finish() is None


def test_calls_without_a_record_or_of_the_host_are_left_alone():
    run = Recording(FakeDevice())
    assert run.times.follow(NO_WORDS, 0, SYNC, False) is NO_WORDS
    assert run.times.follow(run.segment, 0, 99, False) is run.segment


def test_a_device_that_fails_costs_times_and_nothing_else():
    device = FakeDevice()
    run = Recording(device)

    def fail(event, index, stream):
        raise RuntimeError("CUDA error: device-side assert triggered")

    device.record = fail
    operation = run.issue(SYNC)
    run.write(operation, RETURN_WORD)
    run.times.end_step()
    assert run.words[operation[1] + RETURN_WORD] and run.times_of(operation[1]) == (0, 0, 0)
    assert all("device-side assert" in str(fault) for fault in run.faults)


def test_a_record_whose_memory_is_gone_is_passed_over():
    device = FakeDevice()
    run = Recording(device)
    memory = memoryview(bytearray(RECORD.size)).cast("q")
    operation = run.times.follow(Segment(None, 0, memory), 0, SYNC, False)
    operation[RETURN_WORD] = 1
    base = run.sync(1_000)
    memory.release()
    device.now += 1_000_000
    run.times.end_step()
    assert run.times_of(base)[2] and not run.faults


@settings(max_examples=examples(80), deadline=None)
@given(
    offset=st.integers(-(10**17), 10**17),
    drift=st.floats(-40e-6, 40e-6),
    calls=st.lists(
        st.tuples(st.integers(0, 3_000_000), st.integers(0, 3_000_000), st.booleans()),
        min_size=1,
        max_size=60,
    ),
)
def test_placed_times_are_within_the_stated_error(offset, drift, calls):
    """The times are within the error for any behavior of the device and the host.

    The host provides only its clock and the reached events.
    """
    device = FakeDevice(offset, drift)
    run = Recording(device)
    truth, ends = [], []
    for work_ns, host_ns, step_ends in calls:
        operation = run.issue(SYNC)
        begin = operation[0].begin_event.reached_ns
        device.work(work_ns)
        run.write(operation, RETURN_WORD)
        truth.append((operation[1], begin, operation[0].end_event.reached_ns))
        device.now += host_ns
        if step_ends:
            run.times.end_step()
    device.now = int(max(device.now, device.busy_until)) + 1
    run.times.end_step()
    error = run.times._timelines["cuda:3"].clock.error_ns(device.now)
    assert error is not None and not run.faults
    for base, begin, end in truth:
        device_begin, device_end, exposed = run.times_of(base)
        assert exposed == pytest.approx(max(1, end - begin), abs=300)
        ends.append(max(abs(device_begin - begin), abs(device_end - end)))
    # The last events are placed with all measurements. Between measurements, the clock drifts by at most the
    # assumed rate.
    assert ends[-1] <= error + 2_000


def test_asking_often_bounds_a_device_that_lags_behind():
    """The device always lags one second behind the host.

    No event is therefore reached soon after it was created.
    """
    device = FakeDevice(offset_ns=-(10**12))
    run = Recording(device)
    device.work(1_000_000_000)
    bases = []
    for _ in range(4_000):
        bases.append((run.sync(900_000), device.busy_until))
        device.now += 900_000
    clock = run.times._timelines["cuda:3"].clock
    # The error is below one step of the host, instead of the lag.
    assert clock.error_ns(device.now) < 1_000_000
    placed = [(run.times_of(base)[1], end) for base, end in bases if run.times_of(base)[1]]
    assert len(placed) > 2_000
    assert max(abs(at - end) for at, end in placed[100:]) < 1_000_000


def test_the_clock_believes_the_tightest_bounds_and_lets_them_go_with_time():
    clock = DeviceClock()
    assert clock.offset(0) is None and clock.error_ns(0) is None
    clock.reached_after(1_000, 6_000)  # The host is at least 5,000 ahead.
    assert clock.offset(6_000) == 5_000 and clock.error_ns(6_000) is None
    clock.reached_before(2_000, 7_200)  # The host is at most 5,200 ahead.
    assert clock.offset(7_200) == pytest.approx(5_100, abs=1) and clock.error_ns(7_200) == 100
    clock.reached_after(3_000, 7_000)  # This event adds no information.
    clock.reached_before(3_000, 9_000)
    assert clock.error_ns(7_200) == 100
    second = 1_000_000_000
    # The drift is 100 millionths of a second.
    assert clock.error_ns(7_200 + second) == pytest.approx(100 + 100_000, abs=2)
    # This event contradicts the earlier ones, so the clock uses only this event.
    clock.reached_after(second, second + 200_000)
    assert clock.offset(second + 200_000) == 200_000
    assert clock.error_ns(second + 200_000) is None
