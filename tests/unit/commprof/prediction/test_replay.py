"""Test the prediction of an unchanged run, and the times of messages.

The runs have known compute and message times.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commprof.calibration.results import Calibration, Timing
from commprof.errors import UsageError
from commprof.prediction.durations import Durations, Kind, Link, interpolated, message_times, typical
from commprof.prediction.program import Message
from commprof.prediction.recorded import recorded_steps
from commprof.prediction.simulation import quiet_steps, replayed
from commprof.trace.reader import open_run
from support.calibrations import made_calibration
from support.predictable_runs import predictable_run
from unit.commprof.prediction.made_runs import MS, gather, gradient, recorded

SPANS = [[30, 33], [0, 0], [20, 18], [0, 0], [5, 5], [0, 0], [2, 2]]


def by_size(message):
    return 1 + message.payload_bytes / 1e6  # In ms: 1 ms of latency, and 1 GB/s.


def blocking_run(**changes):
    messages = [gradient(8_000_000, 0), gradient(4_000_000, 1), gather(6_000_000)]
    return recorded(messages, SPANS, by_size, **changes)


def overlapping_run(**changes):
    messages = [gradient(8_000_000, 0, blocks=False), gradient(4_000_000, 1, blocks=False)]
    return recorded(messages, [[30, 33], [6, 6], [3, 3], [0, 0], [2, 2]], by_size, **changes)


@pytest.mark.parametrize("run", [blocking_run, overlapping_run])
def test_without_noise_the_replay_is_exact(run):
    made = run()
    assert replayed(made, quiet_steps(made, 1.0), 1.0).median_ns == pytest.approx(
        np.median(made.step_ns), rel=1e-9
    )


@pytest.mark.parametrize("run", [blocking_run, overlapping_run])
def test_with_noise_the_replay_stays_within_two_percent(run):
    made = run(steps=60, jitter=0.1)
    replay = replayed(made, quiet_steps(made, 1.0), 1.0)
    assert replay.median_ns == pytest.approx(np.median(made.step_ns), rel=0.02)


def test_records_whose_group_is_not_known_are_refused(tmp_path):
    path = predictable_run(tmp_path / "run", gradient_ms=3.0)
    file = next((path / "collectives").glob("rank-00001-*.parquet"))
    records = pq.read_table(file)
    column = records.schema.get_field_index("group_ranks")
    unknown = pa.array([""] * len(records)).cast(records.schema.field(column).type)
    pq.write_table(records.set_column(column, records.schema.field(column), unknown), file)
    with pytest.raises(UsageError, match=r"records whose process group is not known, of ranks 1: .* damaged"):
        recorded_steps(open_run(path))


def test_a_slowdown_beside_messages_is_taken_out_and_put_back():
    made = recorded(
        [gradient(20_000_000, 0, blocks=False)], [[30, 33], [6, 6], [2, 2]], by_size, slowdown=1.5
    )
    assert made.steps[0].spans[1] == pytest.approx([7.5 * MS, 9 * MS])
    quiet = quiet_steps(made, 1.5)
    assert quiet[0].spans[1] == pytest.approx([6 * MS, 6 * MS], rel=1e-6)
    assert replayed(made, quiet, 1.5).median_ns == pytest.approx(np.median(made.step_ns), rel=1e-6)


def test_the_replay_does_not_use_message_times_of_the_step_it_replays():
    made = blocking_run()
    slow = made.finishes.copy()
    slow[::2, -1] += 100 * MS  # In every other step, the gather ends later than before.
    changed = replayed(made._replace(finishes=slow), made.steps, 1.0)
    # These steps become longer, and the other steps do not.
    longer = changed.step_ns - made.step_ns
    assert longer[1::2] == pytest.approx(100 * MS, rel=0.01)
    assert longer[::2] == pytest.approx(0, abs=MS)


def test_waiting_for_a_late_rank_is_not_time_of_the_message():
    made = recorded([gradient(8_000_000, 0)], [[5, 90], [0, 0], [1, 1]], by_size)
    assert typical(message_times(made)[Kind("all_reduce", 2), 8_000_000]) == pytest.approx(9 * MS)


def test_messages_in_flight_at_once_share_their_time_by_bytes():
    made = recorded(
        [gradient(8_000_000, 0, blocks=False), gradient(4_000_000, 1, blocks=False)],
        [[5, 5], [1, 1], [0, 0], [0, 0], [1, 1]],
        by_size,
    )
    times = message_times(made)
    total = (9 + 5) * MS
    assert typical(times[Kind("all_reduce", 2), 8_000_000]) == pytest.approx(total * 2 / 3, rel=0.01)
    assert typical(times[Kind("all_reduce", 2), 4_000_000]) == pytest.approx(total / 3, rel=0.02)


def message(size, op="all_reduce", dtype=""):
    return Message(op, size, "gradient_reduce", ((0, 1),), True, dtype=dtype)


def test_sizes_between_recorded_ones_are_interpolated_and_far_ones_refused():
    durations = Durations(message_times(blocking_run(steps=10)))
    assert typical(durations.of(message(6_000_000)).times) == pytest.approx(7 * MS, rel=0.01)
    assert typical(durations.of(message(16_000_000)).times) == pytest.approx(17 * MS, rel=0.01)
    with pytest.raises(
        UsageError, match=r"all_reduce of 16,000,001 bytes .* commprof calibrate --nproc 2 --ops all_reduce"
    ):
        durations.of(message(16_000_001))
    with pytest.raises(UsageError, match="the run has no such message"):
        durations.of(message(8_000_000, "reduce"))


def test_a_group_of_one_rank_copies_at_any_size_and_on_any_links():
    """``predict`` used to refuse every setting of a run whose experts are on one rank each.

    The reason was a message that passes no link.
    """
    alone = Message("all_to_all", 8_000_000, "gradient_reduce", ((0,),), True)
    times = {(Kind("all_reduce", 1), 1_000_000): np.full((5, 1), 0.25 * MS)}
    for link in (Link(), Link(factor=0.1), Link(added_ns=MS)):
        assert typical(Durations(times, link=link).of(alone).times) == pytest.approx(0.25 * 9 / 2 * MS)
    # A norm of four bytes was used as a rate of bytes. A copy of 1 MB then took 72 s, and such runs could not
    # be replayed.
    tiny = {(Kind("all_reduce", 1), 4): np.full((5, 1), 0.25 * MS)}
    assert typical(Durations(tiny).of(alone).times) == pytest.approx(0.25 * 9 * MS, rel=1e-4)
    assert typical(Durations({}).of(alone).times) == 0


def calibration(ns_per_byte):
    sizes = (1_000_000, 4_000_000, 16_000_000, 64_000_000)
    timings = tuple(Timing(each, round(MS + ns_per_byte * each), 0, 0, 5) for each in sizes)
    return Calibration(
        created="", torch="", backend="gloo", backend_version=None, device="cpu", dtype="float32", world_size=2,
        hosts=("a", "b"), machine={}, timings={"all_reduce": timings, "reduce": timings},
    )  # fmt: skip


def test_a_calibration_is_scaled_by_how_much_slower_the_run_is():
    # Calibrated messages take half as long as the messages of the run.
    durations = Durations(message_times(blocking_run(steps=10)), calibration(0.4375))
    sample = durations.of(message(32_000_000))
    assert sample.source == "calibration"
    calibrated = 1 + 0.4375 * 32
    assert typical(sample.times) == pytest.approx(calibrated * 9 / 4.5 * MS, rel=0.01)
    assert typical(durations.of(message(8_000_000, "reduce")).times) == pytest.approx(9 * MS, rel=0.01)
    with pytest.raises(UsageError, match="and the calibration has none of that size"):
        durations.of(message(200_000_000))


def halves(size, *, twice_as_slow):
    """Return a run with one message of ``size`` bytes of float16. The sum takes 1 or 2 ns per byte."""
    return recorded(
        [gradient(size, 0)._replace(dtype="float16")],
        [[5, 5], [0, 0], [1, 1]],
        lambda each: (2 if twice_as_slow else 1) * each.payload_bytes / 1e6,
        steps=10,
    )


def test_times_of_float16_do_not_stand_for_float32():
    """gloo sums float16 more slowly than float32.

    A step with float32 used to be predicted up to 15 % too long from a run with float16.
    """
    times = message_times(halves(8_000_000, twice_as_slow=True))
    durations = Durations(times, calibration(1.0))  # The calibration is 1 ms and 1 ns per byte of float32.
    assert typical(durations.of(message(16_000_000, dtype="float32")).times) == pytest.approx(
        17 * MS, rel=0.01
    )
    # Relative to the calibrated time, a different bucket of float16 is as slow as the recorded bucket.
    assert typical(durations.of(message(40_000_000, dtype="float16")).times) == pytest.approx(
        41 * 16 / 9 * MS, rel=0.01
    )
    # Without a calibration, the times of the recorded element type also apply to the other element type.
    alone = Durations(times)
    assert typical(alone.of(message(8_000_000, dtype="float32")).times) == pytest.approx(16 * MS, rel=0.01)


def test_an_element_type_that_nobody_measured_takes_the_times_of_another():
    made = recorded(
        [gradient(8_000_000, 0)._replace(dtype="float32")], [[5, 5], [0, 0], [1, 1]], by_size, steps=10
    )
    durations = Durations(message_times(made), calibration(1.0))
    for size, ms in ((8_000_000, 9), (4_000_000, 4.5), (64_000_000, 65)):
        assert typical(durations.of(message(size, dtype="bfloat16")).times) == pytest.approx(
            ms * MS, rel=0.12
        )


def test_times_of_small_messages_are_not_extended_along_the_noise_of_a_calibration():
    """Stage 3 was predicted 37 times too long.

    A line through 0.9 ms for 1 KiB and 4.1 ms for 4 KiB is below 0 at 4 bytes. The run's message of 4 bytes
    therefore seemed thousands of times slower than a calibrated message, and so did each small gather.
    """
    small = recorded([gradient(4, 0), gradient(8_000_000, 1)], [[5, 5], *[[0, 0]] * 4], by_size, steps=10)
    sizes = {1024: 0.9, 4096: 4.1, 16_384: 0.8, 65_536: 1.0, 1_048_576: 2.0, 16_777_216: 17.0}
    timings = tuple(Timing(size, round(each * MS), 0, 0, 5) for size, each in sizes.items())
    measured = replace(calibration(1.0), timings={"all_reduce": timings, "all_gather": timings})
    durations = Durations(message_times(small), measured)
    latency = typical(durations.of(message(4)).times)
    assert typical(durations.of(message(768, "all_gather")).times) <= 1.5 * latency


def test_links_change_the_transfer_and_not_the_latency():
    made = recorded([gradient(1000, 0), gradient(8_000_000, 1)], [[5, 5], *[[0, 0]] * 4], by_size, steps=10)
    times = message_times(made)

    def changed(**link):
        return typical(Durations(times, link=Link(**link)).of(message(8_000_000)).times)

    assert changed(factor=4.0) == pytest.approx((1 + 8 / 4) * MS, rel=0.01)
    assert changed(added_ns=2 * MS) == pytest.approx(11 * MS, rel=0.01)
    # The run's 8 MB in 9 ms are assumed to fill its links. TCP gets 95 % of a rate.
    assert changed(rate=2e9) == pytest.approx((1 + 8 / (2e9 * 0.95 / (8e6 / 9e-3))) * MS, rel=0.01)
    # Whatever the links are, a byte takes 0.5 ns of a processor.
    assert changed(factor=1000.0, cpu_per_byte=0.5) == pytest.approx((1 + 4) * MS, rel=0.01)


def test_what_small_messages_wait_for_others_is_no_latency():
    times = {
        (Kind("all_reduce", 2), 4): MS * np.array([[each, each] for each in (1.0, 1.0, *[5.0] * 8)]),
        (Kind("all_reduce", 2), 8_000_000): np.full((10, 2), 9.0 * MS),
    }
    assert typical(Durations(times, link=Link(4.0)).of(message(8_000_000)).times) == pytest.approx(3 * MS)


def test_nearly_equal_sizes_are_one_point():
    assert interpolated({1000: 5.0, 1001: 9.0, 2000: 14.0}, 3000) == pytest.approx(21.0, rel=0.01)


def test_messages_whose_ends_nobody_waited_for_are_replayed_with_a_calibration():
    hidden = recorded([gradient(2**16, 0, blocks=False)], [[1, 1], [50, 50], [1, 1]], lambda _: 1)
    with pytest.raises(UsageError, match="all_reduce of 65,536 bytes"):
        replayed(hidden, hidden.steps, 1.0)
    again = replayed(hidden, hidden.steps, 1.0, made_calibration())
    assert again.median_ns == pytest.approx(52 * MS)
