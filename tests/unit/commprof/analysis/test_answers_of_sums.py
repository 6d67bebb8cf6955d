"""Compare a run of sums (``--aggregate``) with the same run of records.

Each answer is equal, or null if the sums do not contain it.
"""

from math import nan

import pytest

from commprof.analysis import api
from commprof.cli import execute
from support.runs import SyntheticRun, with_sums

BY = ("attempt", "step", "after_step", "phase", "purpose", "op", "intended_op", "group_desc", "group_ranks")
MEASURES = ("collectives", "records", "payload_bytes", "wire_bytes", "executed_wire_bytes", "host_ns")
STEPS = 4


def a_run() -> SyntheticRun:
    """Return a run of four ranks on two hosts, with groups of two ranks on one host.

    The run contains gradients, activations, an evaluation and a barrier after the last step.
    """
    run = SyntheticRun(world_size=4)
    run.hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    run.add_collective("broadcast", payload_bytes=40, step=-1, phase="init", peer=0)
    for step in range(STEPS):
        begin = 1_000_000 * (step + 1)
        run.add_step(step, begin_ns=begin, duration_ns=500_000)
        for bucket in range(2):
            run.add_collective(
                "all_reduce", payload_bytes=400, step=step, purpose="gradient_reduce", bucket=bucket
            )
            for rank in range(4):
                run.add(
                    "buckets", rank=rank, attempt=0, pid=run.pid(rank), step=step, micro_step=0, bucket=bucket, numel=100,
                    bytes=400, capacity=100, dtype="float32", flush_reason="full", time_ns=begin + bucket,
                )  # fmt: skip
        for group in ((0, 1), (2, 3)):
            run.add_collective(
                "all_gather", payload_bytes=80, step=step, phase="forward", purpose="activation", group=group,
                pg="model", group_desc="model",
            )  # fmt: skip
        if step == 1:
            outside = {"step": -1, "after_step": step, "phase": "evaluation"}
            run.add_collective("all_gather", payload_bytes=800, purpose="metric", **outside)
    run.add_collective("barrier", step=-1, after_step=STEPS - 1, phase="other")
    return run


def test_traffic_is_equal_also_outside_of_the_steps_and_by_the_names_of_groups():
    records, sums = a_run().open(), with_sums(a_run()).open()
    expected, found = (api.traffic(run, BY)[[*BY, *MEASURES]] for run in (records, sums))
    assert found.equals(expected)
    assert {(row.step, row.after_step) for row in found.itertuples() if row.phase == "evaluation"} == {
        (-1, 1)
    }
    assert set(found["group_desc"]) == {"default_pg", "model"}


def test_steps_and_settings_are_equal():
    records, sums = a_run().open(), with_sums(a_run()).open()
    times = ["step", "duration_ns", "collectives", "payload_bytes", "wire_bytes", "between_hosts_bytes"]
    assert api.step_times(sums)[times].equals(api.step_times(records)[times])
    assert api.step_times(sums)["exposed_ns"].isna().all()
    for answer in (api.compare, api.traffic_by_setting, api.traffic_by_group):
        expected, found = (answer([run]).drop(columns=["runs"], errors="ignore") for run in (records, sums))
        assert found.equals(expected), answer.__name__


def test_the_report_names_what_was_sent_outside_of_the_steps(tmp_path, capsys):
    shown = []
    for name, run in (("records", a_run()), ("sums", with_sums(a_run()))):
        for phase, after in (("evaluation", 1), ("other", STEPS - 1)):
            run.add("outside_steps", rank=0, attempt=0, pid=run.pid(0), phase=phase, after_step=after, begin_ns=1,
                    end_ns=2, passes=1)  # fmt: skip
        assert execute(["report", str(run.write(tmp_path / name))]) == 0
        lines = capsys.readouterr().out.splitlines()
        first = next(number for number, line in enumerate(lines) if "Outside of the steps" in line)
        shown.append(lines[first : first + 12])
    assert shown[0] == shown[1]
    assert any("evaluation" in line and "800 B" in line for line in shown[1])


def test_messages_of_sums_may_leave_a_host_only_in_groups_across_hosts():
    run = SyntheticRun(world_size=4)
    run.hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    for group in ((0, 1, 2, 3), (1, 2), (2, 3)):
        pg = "-".join(map(str, group))
        run.add_collective("barrier", group=group, pg=pg)
        first, second = group[:2]
        run.add_collective("send", payload_bytes=100, ranks=(first,), peer=second, group=group, pg=pg)
        run.add_collective("recv", payload_bytes=100, ranks=(second,), peer=first, group=group, pg=pg)
    records, sums = (
        api.traffic(each(), ("pg",)).set_index("pg")["between_hosts_bytes"].to_dict()
        for each in (run.open, lambda: with_sums(run).open())
    )
    assert records == {"0-1-2-3": 0, "1-2": 100, "2-3": 0}
    assert sums == {"0-1-2-3": pytest.approx(nan, nan_ok=True), "1-2": 100, "2-3": 0}


@pytest.mark.parametrize("steps", [None, (2, 3)], ids=["all of them", "after some records"])
def test_sums_do_not_name_buckets_so_their_bytes_are_null_and_not_0(steps):
    run = with_sums(a_run(), steps).open()
    frame = api.bucket_flushes(run)
    summed = frame["step"].isin(range(STEPS) if steps is None else steps)
    measures = ["collectives", "payload_bytes", "wire_bytes", "executed_wire_bytes", "between_hosts_bytes"]
    assert frame.loc[summed, measures].isna().all(axis=None) and frame["numel"].eq(100).all()
    assert frame.loc[~summed, "wire_bytes"].tolist() == [600.0] * (0 if steps is None else 4)
    of_steps = api.bucket_steps(run).set_index("step")
    assert of_steps["buckets"].tolist() == [2] * STEPS
    assert of_steps["wire_bytes"].isna().sum() == (STEPS if steps is None else 2)
    (per_step,) = api.buckets_per_step(run).to_dict("records")
    assert (per_step["buckets"], per_step["bytes"]) == (2, 800)
    assert steps is not None or per_step["wire_bytes"] != per_step["wire_bytes"]
    assert len(api.bucket_means(run)) == 2
