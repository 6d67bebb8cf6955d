"""Test ``bandwidth()``.

The tests check times of collectives without the wait for late ranks, bandwidths, the ceiling, and the
collectives that averages exclude. The numbers are computed by hand. The calibration is exactly 100 us and 1
GB/s for an all_reduce of 4 ranks.
"""

from __future__ import annotations

import math
import random

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commprof.analysis import api
from commprof.calibration.bandwidths import bus_factor
from commprof.calibration.file import write_calibration
from commprof.calibration.results import Calibration, Timing
from commprof.errors import TraceError
from support.runs import HOST, SyntheticRun
from support.sample import examples

MB = 1_000_000


def calibration(world_size: int = 2, alpha_us: int = 100, noise: float = 0.0, **changes) -> Calibration:
    rng = random.Random(5)

    def time(size: int) -> int:
        return max(1, round((alpha_us * 1000 + size) * math.exp(rng.gauss(0, noise))))

    sizes = [2**n for n in range(10, 25)]
    timings = {op: tuple(Timing(s, time(s), 1, 1, 20) for s in sizes) for op in ("all_reduce", "send_recv")}
    values = {
        "created": "2026-01-02T03:04:05+00:00", "torch": "2.13.0", "backend": "gloo", "backend_version": None,
        "device": "cpu", "dtype": "float32", "world_size": world_size, "hosts": (HOST,), "machine": {}, "timings": timings,
    }  # fmt: skip
    return Calibration(**{**values, **changes})


def collective(
    run: SyntheticRun, op: str, issues: list[int], ends: list[int | None], size=MB, **columns
) -> None:
    """Add one ``op`` that rank r issues at ``issues[r]``.

    The synchronous call of rank r returns at ``ends[r]``.
    """
    number = run._next_pg_seq.get("number", 0)
    run._next_pg_seq["number"] = number + 1
    for rank, (issue, end) in enumerate(zip(issues, ends, strict=True)):
        took = None if end is None else end - issue
        run.add_collective(
            op, ranks=(rank,), issue_ns=issue, host_ns=took, pg_seq=number, payload_bytes=size, **columns
        )


def times(run: SyntheticRun, *arguments) -> list[int | None]:
    found = api.bandwidth_times(run.open(), *arguments)
    return [None if pd.isna(value) else int(value) for value in found["time_ns"]]


def test_the_time_begins_when_the_last_rank_has_come():
    run = SyntheticRun(2)
    collective(run, "all_reduce", [0, 700_000], [1_700_000, 1_710_000])
    found = api.bandwidth_times(run.open()).iloc[0]
    assert found["time_ns"] == 1_010_000, "from the arrival of rank 1 to the end on rank 1"
    assert found["algbw_bytes_per_s"] == pytest.approx(MB / 1_010_000 * 1e9)
    assert found["busbw_bytes_per_s"] == found["algbw_bytes_per_s"], "2 (n - 1) / n is 1 for two ranks"
    assert (found["time_source"], found["verdict"]) == ("host", "ok")


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("all_reduce", 4_000),  # The last end is 7,000 and the last arrival 3,000.
        ("all_gather", 4_000),
        ("reduce", 2_000),  # The root's end is 5,000 and the last arrival 3,000.
        ("gather", 2_000),
        # Rank 1 ends at 7,000, which is 5,000 after its own arrival at 2,000. Rank 2 takes 6,000 - 3,000.
        ("broadcast", 5_000),
        ("scatter", 5_000),
    ],
)
def test_whose_arrival_and_whose_end_count_depends_on_the_operation(op, expected):
    run = SyntheticRun(3)
    collective(run, op, [0, 2_000, 3_000], [5_000, 7_000, 6_000], peer=0)
    assert times(run) == [expected]


def test_a_message_is_timed_at_its_receiver():
    run = SyntheticRun(2)
    run.add_collective("send", ranks=(0,), peer=1, payload_bytes=MB, issue_ns=5_000, host_ns=10)
    run.add_collective("recv", ranks=(1,), peer=0, payload_bytes=MB, issue_ns=1_000, host_ns=9_000)
    found = api.bandwidth_times(run.open())
    assert list(found["op"]) == ["send"]
    assert found["time_ns"].iloc[0] == 5_000, "from the send at 5,000 to the return of the recv at 10,000"
    assert found["busbw_bytes_per_s"].iloc[0] == pytest.approx(MB / 5_000 * 1e9)


@pytest.mark.parametrize(
    ("columns", "source", "time"),
    [
        ({"device_end_ns": 400_000}, "sampled", 400_000),
        ({"is_async": True, "device_end_ns": 400_000}, "sampled", 400_000),
        ({"is_async": True, "wait_begin_ns": 100_000, "wait_end_ns": 600_000}, "wait", 600_000),
        (
            {"is_async": True, "wait_begin_ns": 599_000, "wait_end_ns": 600_000},
            None,
            None,
        ),  # The collective may have ended long before.
        ({"is_async": True}, None, None),
        ({"device": "cuda:0"}, None, None),  # Host times do not show when a GPU ran the collective.
        ({"device": "cuda:0", "device_begin_ns": 50_000, "device_end_ns": 250_000}, "device", 200_000),
        ({"status": "incomplete"}, None, None),
        ({"wait_begin_ns": 1, "wait_end_ns": 900_000}, "host", 900_000),
    ],
)
def test_the_best_known_end_counts(columns, source, time):
    run = SyntheticRun(2)
    collective(run, "all_reduce", [0, 0], [500_000, 500_000], **columns)
    found = api.bandwidth(run.open()).iloc[0]
    assert (None if pd.isna(found["time_source"]) else found["time_source"]) == source
    assert (None if pd.isna(found["time_ns"]) else found["time_ns"]) == time
    assert found["untimed"] == (source is None)


def test_a_call_that_raised_is_left_out_and_those_after_it_are_timed():
    run = SyntheticRun(2)
    run.add_collective("all_reduce", ranks=(0,), status="raised", issue_ns=0, host_ns=1, payload_bytes=8)
    for rank in (0, 1):
        run.add_collective("all_reduce", ranks=(rank,), issue_ns=rank, host_ns=9, payload_bytes=8)
    assert times(run) == [9]


def test_a_collective_of_which_a_rank_is_missing_has_no_time():
    run = SyntheticRun(3)
    for rank in (0, 1):
        run.add_collective("all_reduce", ranks=(rank,), issue_ns=0, host_ns=9, payload_bytes=8)
    assert times(run) == [None]


def test_what_moves_nothing_is_left_out():
    run = SyntheticRun(2)
    collective(run, "barrier", [0, 0], [9, 9], size=0, dtype=None)
    collective(run, "all_reduce", [0, 0], [9, 9], size=0)
    run.add_collective(
        "all_reduce", ranks=(0,), group=(0,), pg="alone", issue_ns=0, host_ns=9, payload_bytes=8
    )
    assert api.bandwidth(run.open()).empty and api.bandwidth_times(run.open()).empty


def test_the_ceiling_stands_beside_what_was_reached():
    run = SyntheticRun(2)
    # The collective takes 2.2 ms. The machine needs 100 us + 1 ms.
    collective(run, "all_reduce", [0, 0], [2_200_000, 2_200_000])
    found = api.bandwidth(run.open(), calibration()).iloc[0]
    assert found["ceiling_ns"] == pytest.approx(1_100_000, rel=1e-3)
    assert found["ceiling_share"] == pytest.approx(0.5, rel=1e-3)
    assert found["ceiling_busbw_bytes_per_s"] == pytest.approx(MB / 1.1e6 * 1e9, rel=1e-3)


def test_what_is_impossible_is_flagged_and_never_averaged_in():
    run = SyntheticRun(2)
    for _ in range(4):
        collective(run, "all_reduce", [0, 0], [1_200_000, 1_200_000])
    # The time is less than 1.1 ms minus the interval.
    collective(run, "all_reduce", [0, 0], [900_000, 900_000])
    collective(run, "all_reduce", [0, 0], [0, 0])
    collective(run, "all_reduce", [5_000, 5_000], [1_000, 2_000])  # The clock ran backward.
    both = api.bandwidth_both(run.open(), calibration(noise=0.01))
    assert list(both.collectives["verdict"]) == ["ok"] * 4 + ["impossible"] * 3
    row = both.sizes.iloc[0]
    assert (row["collectives"], row["timed"], row["impossible"], row["time_ns"]) == (7, 4, 3, 1_200_000)
    assert both.collectives["algbw_bytes_per_s"].notna().tolist() == [True] * 5 + [False] * 2
    without = api.bandwidth(run.open()).iloc[0]
    assert without["impossible"] == 2, "without a ceiling only what took no time is impossible"


def test_within_the_interval_of_the_ceiling_nothing_is_impossible():
    run = SyntheticRun(2)
    collective(run, "all_reduce", [0, 0], [1_000_000, 1_000_000])
    assert api.bandwidth(run.open(), calibration(noise=0.2))["impossible"].tolist() == [0]
    assert api.bandwidth(run.open(), calibration(noise=0.01))["impossible"].tolist() == [1]


def test_messages_and_groups_of_other_sizes_are_not_called_impossible_by_the_ceiling():
    run = SyntheticRun(3)
    collective(run, "all_reduce", [0, 0, 0], [1_000, 1_000, 1_000])
    run.add_collective("send", ranks=(0,), peer=1, payload_bytes=MB, issue_ns=0, host_ns=10)
    run.add_collective("recv", ranks=(1,), peer=0, payload_bytes=MB, issue_ns=0, host_ns=1_000)
    found = api.bandwidth(run.open(), calibration(world_size=2))
    assert found["impossible"].sum() == 0
    # The group has 3 ranks instead of 2. The factor is 4/3, so a third more bytes pass each link.
    assert found.loc[0, "ceiling_ns"] == pytest.approx(100_000 + MB * 4 / 3, rel=1e-3)
    assert any("2 ranks" in note and "Groups of 3" in note for note in found.attrs["notes"])


def test_outliers_are_flagged_and_left_out_of_the_median():
    run = SyntheticRun(2)
    durations = [1_000_000 + 1_000 * i for i in range(19)] + [9_000_000, 9_100_000, 100_000]
    for duration in durations:
        collective(run, "all_reduce", [0, 0], [duration, duration])
    both = api.bandwidth_both(run.open())
    assert list(both.collectives["verdict"]) == ["ok"] * 19 + ["slow", "slow", "fast"]
    row = both.sizes.iloc[0]
    assert (row["timed"], row["slow"], row["fast"], row["time_ns"]) == (19, 2, 1, 1_009_000)
    assert (row["time_low_ns"], row["time_high_ns"]) == (1_004_500, 1_013_500)


def test_the_error_of_the_clocks_keeps_from_calling_a_time_impossible():
    run = SyntheticRun(2)
    for _ in range(2):
        collective(run, "all_reduce", [0, 0], [1_000_000, 1_000_000])
    for rank, name in enumerate("ab"):
        clock = {"rank": rank, "attempt": 0, "pid": run.pid(rank), "host": f"host-{name}"}
        run.add("clocks", **clock, monotonic_ns=0, realtime_ns=0, uncertainty_ns=0, clock=name)
    run.add(
        "clock_offsets",
        rank=1, attempt=0, pid=run.pid(1), host="h", reference_rank=0, time_ns=0, offset_ns=0, error_ns=200_000,
        exchanges=30,
    )  # fmt: skip
    opened = run.open()
    opened.manifest.hosts = ["host-a", "host-b"]
    found = api.bandwidth(opened, calibration(noise=0.001))
    assert found["impossible"].tolist() == [0]
    assert any("host-b" in note for note in found.attrs["notes"])


def test_another_backend_has_no_ceiling_and_the_notes_say_so():
    run = SyntheticRun(2, backend="nccl")
    collective(run, "all_reduce", [0, 0], [9, 9])
    found = api.bandwidth(run.open(), calibration())
    assert found["ceiling_ns"].isna().all()
    assert any("calibration is for gloo" in note and "nccl" in note for note in found.attrs["notes"])


def test_steps_can_be_chosen():
    run = SyntheticRun(2)
    for step in range(4):
        collective(run, "all_reduce", [0, 0], [1000 + step, 1000 + step], step=step)
    assert times(run, None, (1, 2)) == [1001, 1002]


def test_a_file_is_taken_as_a_calibration_and_listed(tmp_path):
    (tmp_path / "runs").mkdir()
    path = tmp_path / "runs" / "calibration-a.json"
    write_calibration(path, calibration())
    (tmp_path / "runs" / "calibration-b.json").write_text("no")
    (tmp_path / "runs" / "other.json").write_text("{}")
    outside = tmp_path / "calibration-outside.json"
    write_calibration(outside, calibration())
    (tmp_path / "runs" / "calibration-link.json").symlink_to(outside)
    listed = api.calibrations(tmp_path / "runs")
    assert sorted(listed["name"]) == ["calibration-a.json", "calibration-b.json"]
    assert listed.set_index("name").loc["calibration-a.json", "world_size"] == 2
    assert "no JSON" in listed.set_index("name").loc["calibration-b.json", "note"]
    run = SyntheticRun(2)
    collective(run, "all_reduce", [0, 0], [9_000_000, 9_000_000])
    assert api.bandwidth(run.open(), str(path))["ceiling_ns"].notna().all()
    with pytest.raises(TraceError):
        api.bandwidth(run.open(), tmp_path / "runs" / "calibration-b.json")


def test_the_curve_holds_what_was_measured_and_what_was_fitted():
    curve = api.ceiling(calibration())
    part = curve[curve["op"] == "all_reduce"]
    measured = part[part["measured_ns"].notna()]
    assert list(measured["payload_bytes"]) == [2**n for n in range(10, 25)]
    assert (
        (measured["time_ns"].astype(float) / measured["measured_ns"].astype(float))
        .between(0.999, 1.001)
        .all()
    )
    assert part["busbw_bytes_per_s"].is_monotonic_increasing
    wider = api.ceiling(calibration(), group_size=4, low=8, high=2**30)
    assert (wider["payload_bytes"].min(), wider["payload_bytes"].max()) == (8, 2**30)
    assert wider["measured_ns"].isna().all(), "nothing was measured with 4 ranks"


def test_an_empty_run_has_no_rows_and_the_declared_columns():
    both = api.bandwidth_both(SyntheticRun(2).open(), calibration())
    assert both.sizes.empty and both.collectives.empty and both.sizes.attrs["notes"] == []
    assert list(both.sizes.columns) == list(api.describe_columns("bandwidth"))
    assert list(both.collectives.columns) == list(api.describe_columns("bandwidth_times"))


@st.composite
def runs(draw):
    """Return a run of random collectives at random times, and the same run with renumbered ranks."""
    world = draw(st.integers(2, 4))
    plan = draw(
        st.lists(
            st.tuples(
                st.sampled_from(
                    ["all_reduce", "broadcast", "reduce", "all_gather", "all_to_all", "reduce_scatter"]
                ),
                st.sampled_from([64, 4096, MB]),
                st.lists(st.integers(0, 10**6), min_size=world, max_size=world),
                st.lists(st.integers(-10, 10**7), min_size=world, max_size=world),
                st.integers(0, world - 1),
            ),
            max_size=12,
        )
    )
    return world, plan, draw(st.permutations(range(world)))


def made(world, plan, order) -> SyntheticRun:
    run = SyntheticRun(world)
    for op, size, issues, lasting, root in plan:
        begins, ends = [0] * world, [0] * world
        for rank in range(world):
            begins[order[rank]], ends[order[rank]] = issues[rank], issues[rank] + lasting[rank]
        collective(run, op, begins, ends, size, peer=order[root] if op in ("broadcast", "reduce") else -1)
    return run


@settings(max_examples=examples(20), deadline=None)
@given(runs())
def test_counts_are_conserved_and_renumbered_ranks_change_nothing(case):
    world, plan, order = case
    held = calibration(world)
    found = api.bandwidth_both(made(world, plan, range(world)).open(), held)
    sizes = found.sizes
    assert sizes["collectives"].sum() == len(found.collectives) == len(plan)
    parts = sizes[["timed", "slow", "fast", "impossible", "untimed"]].sum(axis=1)
    assert (parts == sizes["collectives"]).all()
    good = sizes[sizes["time_ns"].notna()]
    for row in good.to_dict("records"):
        expected = row["algbw_bytes_per_s"] * bus_factor(row["op"], row["group_size"])
        assert row["busbw_bytes_per_s"] == pytest.approx(expected)
    assert (found.collectives["time_ns"].dropna() > 0).all() or sizes["impossible"].sum() > 0
    renumbered = api.bandwidth_both(made(world, plan, order).open(), held)
    pd.testing.assert_frame_equal(renumbered.sizes, sizes)
    pd.testing.assert_frame_equal(renumbered.collectives, found.collectives)
