"""Test the contents, the reduction and the duration of gradient buckets.

The expected values are computed by hand.
"""

import pandas as pd
import pytest

from commprof.analysis import api
from commprof.analysis.storage import index
from support.runs import SyntheticRun


def a_run(ranks=2, steps=3):
    """Return a run with two buckets per step.

    The first bucket uses one all_reduce. The second is reduced in parts to two owners and does not become
    full.
    """
    run = SyntheticRun(world_size=ranks)
    run.add_parameters({"a": 60, "b": 40, "c": 30})
    for step in range(steps):
        begin = 1_000_000 * (step + 1)
        run.add_step(step, begin_ns=begin, duration_ns=500_000)
        for bucket, (names, numel, why) in enumerate((("a,b", 100, "full"), ("c", 30, "end_of_backward"))):
            for rank in range(ranks):
                run.add(
                    "buckets", rank=rank, attempt=0, pid=run.pid(rank), step=step, micro_step=0, bucket=bucket,
                    numel=numel, bytes=4 * numel, capacity=100, dtype="float32", owners="0,1", parameters=names,
                    flush_reason=why, time_ns=begin + 100 * bucket,
                )  # fmt: skip
        tagged = {"step": step, "purpose": "gradient_reduce", "host_ns": 1000 * (step + 1)}
        run.add_collective(
            "all_reduce", payload_bytes=400, bucket=0, issue_ns=begin + 10, exposed_ns=500, **tagged
        )
        for owner, numel in enumerate((20, 10)):
            run.add_collective(
                "reduce", payload_bytes=4 * numel, bucket=1, owner=owner, peer=owner,
                issue_ns=begin + 5000 * (owner + 1), **tagged,
            )  # fmt: skip
        run.add_collective("all_gather", payload_bytes=64, step=step, purpose="parameter_gather", bucket=0)
    return run


def test_a_bucket_is_one_row_with_what_reduced_it():
    rows = api.bucket_flushes(a_run().open()).to_dict("records")
    assert [(row["step"], row["bucket"]) for row in rows] == [(s, b) for s in range(3) for b in range(2)]
    first, second = rows[:2]
    assert {name: first[name] for name in ("numel", "fill", "ranks", "alike", "flush_reason", "op", "collectives")} == {
        "numel": 100, "fill": 1.0, "ranks": 2, "alike": True, "flush_reason": "full", "op": "all_reduce", "collectives": 1,
    }  # fmt: skip
    assert (first["payload_bytes"], first["wire_bytes"]) == (
        400,
        400.0,
    )  # The result is 2 x 1/2 x 400. The gather is not included.
    assert (first["duration_ns"], first["exposed_ns"]) == (1000, 500)
    assert (second["op"], second["collectives"], second["fill"]) == ("reduce", 2, 0.3)
    assert (second["payload_bytes"], second["wire_bytes"]) == (120, 60.0)  # The wire bytes are 1/2 x 120.
    # The duration is from the first issue at 5,000 until the second call, issued at 10,000, returns.
    assert second["duration_ns"] == 6000


def test_the_buckets_of_steps_are_sums_of_those_rows():
    run = a_run().open()
    frame, found = api.bucket_flushes(run), api.bucket_steps(run)
    assert found["buckets"].sum() == len(frame) and list(found["step"].unique()) == [0, 1, 2]
    for name in ("bytes", "collectives", "wire_bytes"):
        sums = frame.groupby(["step", "flush_reason"])[name].sum().tolist()
        assert found.sort_values(["step", "flush_reason"])[name].tolist() == sums
    assert found["unlike"].sum() == 0
    one = api.bucket_flushes(run, step=1, micro_step=0, bucket=1)
    assert one[["step", "bucket"]].to_numpy().tolist() == [[1, 1]]


def test_the_means_leave_the_first_step_out_of_times_only():
    frame = api.bucket_means(a_run().open())
    first = frame.iloc[0]
    assert (first["steps"], first["numel"], first["wire_bytes"], first["steady"]) == (3, 100.0, 400.0, True)
    assert first["duration_ns"] == 2500  # The median of 2,000 and 3,000.
    assert list(frame["flush_reason"]) == ["full", "end_of_backward"]


def buckets_in(present, steps=7):
    """Return a run that has bucket 0 in every step and bucket 1 only in the steps ``present``."""
    run = SyntheticRun(world_size=2)
    for step in range(steps):
        run.add_step(step, begin_ns=1_000_000 * (step + 1), duration_ns=500_000)
        for bucket in (0, 1) if step in present else (0,):
            for rank in range(2):
                run.add(
                    "buckets", rank=rank, attempt=0, pid=run.pid(rank), step=step, micro_step=0, bucket=bucket, numel=10,
                    bytes=40, capacity=20, dtype="float32", parameters=f"p{bucket}", flush_reason="full",
                    owners="0", time_ns=1_000_000 * (step + 1) + bucket,
                )  # fmt: skip
            run.add_collective(
                "all_reduce",
                payload_bytes=40,
                step=step,
                bucket=bucket,
                purpose="gradient_reduce",
                phase="backward",
            )
    return run.open()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("present", "buckets"),
    [
        ({0}, [0]),  # DDP has such a bucket before it rebuilds its buckets.
        ({0, 3}, [0]),
        ({0, 1, 3}, [0]),  # The steps are at no regular interval.
        ({1, 4}, [0, 1]),  # The bucket is in every third of the six steps after the first.
        ({1, 2, 5}, [0, 1]),  # The bucket is in half of the steps.
    ],
)
def test_a_mean_step_has_the_buckets_that_come_back(present, buckets):
    assert api.bucket_means(buckets_in(present))["bucket"].tolist() == buckets


def test_the_content_of_a_bucket_is_its_parameters_and_the_records_that_reduced_it():
    found = api.bucket_content(a_run().open(), step=1, bucket=0)
    assert found.parameters[["name", "shape", "numel", "first_element"]].values.tolist() == [
        ["a", "60", 60, 0],
        ["b", "40", 40, 60],
    ]
    parts = api.bucket_content(a_run().open(), step=1, bucket=1).operations
    assert parts[["op", "owner", "numel", "first_element"]].values.tolist() == [
        ["reduce", 0, 20, 0],
        ["reduce", 1, 10, 20],
    ]
    assert list(parts["rank"]) == [0, 0]
    assert api.bucket_content(a_run().open(), step=9, bucket=0) is None


def test_the_place_of_a_parameter_is_not_guessed():
    run = a_run()
    for row in run.rows["buckets"]:
        row["parameters"] = "a,unheard"
    found = api.bucket_content(run.open(), step=0, bucket=0).parameters
    assert found["first_element"].isna().all()
    assert list(found["name"]) == ["a", "unheard"]


def test_what_differs_between_ranks_is_said():
    run = a_run()
    run.rows["buckets"][1]["numel"] = 99
    assert list(api.bucket_flushes(run.open())["alike"])[:2] == [False, True]


def test_a_bucket_that_no_record_carries_and_one_without_capacity_have_nulls():
    run = a_run(steps=1)
    run.rows["collectives"] = [row for row in run.rows["collectives"] if row.get("bucket") != 0]
    for row in run.rows["buckets"][:2]:
        row["capacity"] = None
    row = api.bucket_flushes(run.open()).iloc[0]
    assert row[["op", "fill", "duration_ns"]].isna().all()
    assert row["collectives"] == 0


def test_a_run_without_buckets_has_no_rows():
    run = SyntheticRun(world_size=2)
    for frame in (api.bucket_flushes(run.open()), api.bucket_means(run.open())):
        assert frame.empty
        assert "flush_reason" in frame


@pytest.mark.sampled
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_buckets_together_sent_what_their_purpose_sent(ranks):
    run = a_run(ranks)
    sent = api.traffic(run.open(), by=("purpose",)).set_index("purpose").loc["gradient_reduce"]
    frame = api.bucket_flushes(run.open())
    assert frame["wire_bytes"].sum() == pytest.approx(sent["wire_bytes"])
    assert frame["payload_bytes"].sum() == sent["payload_bytes"]
    assert frame["collectives"].sum() == sent["collectives"]


def two_stages():
    """Return a pipeline of two stages with two replicas each.

    Both stages number their buckets from 0, but their buckets contain different parameters.
    """
    run = SyntheticRun(world_size=4)
    for step in range(2):
        begin = 1_000_000 * (step + 1)
        run.add_step(step, begin_ns=begin, duration_ns=500_000)
        for number, (ranks, name, numel) in enumerate((((0, 1), "first", 100), ((2, 3), "second", 40))):
            for rank in ranks:
                run.add(
                    "buckets", rank=rank, attempt=0, pid=run.pid(rank), step=step, micro_step=0, bucket=0, numel=numel,
                    bytes=4 * numel, capacity=200, dtype="float32", parameters=name, flush_reason="end_of_backward",
                    time_ns=begin,
                )  # fmt: skip
            run.add_collective(
                "all_reduce", payload_bytes=4 * numel, bucket=0, group=ranks, pg=f"data{number}", step=step,
                purpose="gradient_reduce", host_ns=1000 * (number + 1),
            )  # fmt: skip
    return run


def test_buckets_of_one_number_in_two_stages_are_two_buckets():
    run = two_stages().open()
    names = [
        "step",
        "bucket",
        "group_ranks",
        "numel",
        "parameters",
        "ranks",
        "collectives",
        "wire_bytes",
        "duration_ns",
    ]
    assert api.bucket_flushes(run)[names].to_numpy().tolist() == [
        [step, 0, *row]
        for step in range(2)
        for row in (["0-1", 100, "first", 2, 1, 400.0, 1000], ["2-3", 40, "second", 2, 1, 160.0, 2000])
    ]
    assert api.bucket_flushes(run)["alike"].all()
    assert api.bucket_means(run)[["group_ranks", "steps", "numel", "steady"]].to_numpy().tolist() == [
        ["0-1", 2, 100.0, True],
        ["2-3", 2, 40.0, True],
    ]
    assert api.bucket_steps(run)[["buckets", "bytes", "unlike"]].to_numpy().tolist() == [[2, 560, 0]] * 2
    assert len(api.bucket_flushes(run, group_ranks="2-3")) == 2


def test_the_content_of_a_bucket_is_that_of_the_ranks_that_are_asked_for():
    run = two_stages().open()
    first, second = (api.bucket_content(run, step=1, bucket=0, group_ranks=ranks) for ranks in (None, "2-3"))
    assert (first.parameters["name"].tolist(), first.operations["rank"].tolist()) == (["first"], [0])
    assert (second.parameters["name"].tolist(), second.operations["rank"].tolist()) == (["second"], [2])
    assert second.operations["payload_bytes"].tolist() == [160]
    assert api.bucket_content(run, step=1, bucket=0, group_ranks="0-3") is None


def test_a_bucket_that_is_reduced_along_two_axes_is_one_with_the_bytes_of_one_rank():
    run = SyntheticRun(world_size=4)
    run.add_step(0)
    for rank in range(4):
        run.add(
            "buckets", rank=rank, attempt=0, pid=run.pid(rank), step=0, micro_step=0, bucket=0, numel=100, bytes=400,
            dtype="float32", flush_reason="full", time_ns=0,
        )  # fmt: skip
    for name, payload, groups in (("inner", 400, ((0, 1), (2, 3))), ("outer", 200, ((0, 2), (1, 3)))):
        for number, group in enumerate(groups):
            run.add_collective(
                "reduce_scatter", payload_bytes=payload, bucket=0, group=group, pg=f"{name}{number}",
                purpose="gradient_reduce",
            )  # fmt: skip
    row = api.bucket_flushes(run.open()).to_dict("records")
    assert len(row) == 1
    assert (row[0]["group_ranks"], row[0]["ranks"], row[0]["collectives"]) == ("0-3", 4, 4)
    assert row[0]["wire_bytes"] == 300.0  # The sum of half of 400 and half of 200.


def test_the_index_tells_groups_apart_too(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "_FEWEST_IN_FILE", 0)
    path = two_stages().write(tmp_path / "run")
    plain = two_stages().open()
    assert api.index(path)["in_file"]
    for ask in (api.bucket_flushes, api.bucket_means, api.bucket_steps):
        pd.testing.assert_frame_equal(ask(path), ask(plain))
    found = api.bucket_content(path, step=1, bucket=0, group_ranks="2-3")
    assert found.operations["rank"].tolist() == [2]


def test_the_last_step_of_a_killed_run_whose_buckets_were_not_written_is_in_no_mean(tmp_path):
    run = SyntheticRun(1, state="killed")
    for step in range(4):
        run.add_step(step)
        for bucket in range(2 if step < 3 else 0):
            run.add(
                "buckets", rank=0, attempt=0, pid=run.pid(0), step=step, micro_step=0, bucket=bucket, numel=10, bytes=40,
                capacity=20, dtype="float32", owners="0", parameters="w", flush_reason="full", time_ns=step,
            )  # fmt: skip
        run.add_collective("all_reduce", payload_bytes=80, step=step, purpose="gradient_reduce")
    (row,) = api.buckets_per_step(run.write(tmp_path / "run")).to_dict("records")
    assert (row["buckets"], row["bytes"]) == (2, 80)
