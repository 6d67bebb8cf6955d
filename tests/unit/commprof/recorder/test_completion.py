"""Test the completion times that handles report.

The tests check which handles are asked, what remains in the handles, and that no step raises an exception.
"""

import gc
import mmap
import weakref

import pytest

from commprof.recorder.device import completion
from commprof.recorder.device.completion import Completions
from commprof.recorder.device.device_timeline import Operation
from commprof.schema import RECORD
from commprof.trace.rank_files.segments import DEVICE_END_WORD, NO_WORDS, Segment


class Work:
    """A handle whose future stores its callbacks, as torch's future does."""

    def __init__(self):
        self.callbacks = []
        self.outputs = bytearray(100)

    def get_future(self):
        return self

    def add_done_callback(self, callback):
        self.callbacks.append(callback)

    def end(self):
        for callback in self.callbacks:
            callback(self)


class Unwilling(Work):
    def get_future(self):
        self.asked = True
        raise RuntimeError("get_future is not supported")


@pytest.fixture
def segment():
    return Segment(mmap.mmap(-1, 1 << 16), 1 << 16)


def test_the_end_stands_in_the_record_and_nothing_is_kept(segment):
    times = Completions(1, clock=lambda: 4711)
    work, base = Work(), 3 * RECORD.size // 8
    times.sample((segment, base, True), work)
    assert segment[base + DEVICE_END_WORD] == 0
    work.end()
    assert segment[base + DEVICE_END_WORD] == 4711
    assert times.asked == 1 and times.cost_ns > 0 and not completion._under_way
    gone = weakref.ref(work)
    del work
    gc.collect()
    assert gone() is None


def test_a_handle_that_never_ends_is_not_held_either(segment):
    times = Completions(1)
    work = Work()
    times.sample((segment, 0, True), work)
    assert len(completion._under_way) == 1
    gone = weakref.ref(work)
    work.callbacks.clear()  # torch does the same when it drops the operation.
    del work
    gc.collect()
    assert gone() is None
    completion._under_way.clear()


@pytest.mark.parametrize(("every", "asked"), [(1, 12), (3, 4), (5, 3), (100, 1), (0, 0)])
def test_one_in_so_many_is_asked(segment, every, asked):
    times = Completions(every)
    works = [Work() for _ in range(12)]
    for work in works:
        times.sample((segment, 0, True), work)
    assert times.asked == asked == sum(len(work.callbacks) for work in works)
    for work in works:
        work.end()
    assert not completion._under_way


def test_synchronous_calls_devices_and_lost_records_are_left_alone(segment):
    times, work = Completions(1), Work()
    times.sample((segment, 0, False), work)
    times.sample((NO_WORDS, 0, True), work)
    times.sample((Operation(segment, 0, True), 0, True), work)
    times.sample((segment, 0, True), None)
    assert not work.callbacks and not times.asked


def test_an_end_after_the_recording_ended_changes_nothing(segment):
    work = Work()
    Completions(1).sample((segment, 0, True), work)
    segment.close()
    work.end()
    assert not completion._under_way


def test_a_backend_without_futures_is_soon_left_in_peace(segment):
    times = Completions(1)
    works = [Unwilling() for _ in range(40)]
    for work in works:
        times.sample((segment, 0, True), work)
    assert 1 < sum(hasattr(work, "asked") for work in works) < 20
    assert not times.asked and not completion._under_way


def test_before_the_interpreter_goes_what_was_asked_is_waited_for(segment, monkeypatch):
    work, slept = Work(), []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 20:
            work.end()

    Completions(1).sample((segment, 0, True), work)
    monkeypatch.setattr(completion.time, "sleep", sleep)
    completion._await_callbacks()
    # There is one more call after the last callback, because the backend's thread then needs Python's lock to
    # drop the callback.
    assert len(slept) == 21 and max(slept) <= 0.05
    completion._await_callbacks()
    assert len(slept) == 21
