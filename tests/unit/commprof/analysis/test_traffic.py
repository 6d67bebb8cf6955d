"""Test ``traffic()``, which counts every collective once, in payload bytes and wire bytes.

The expected numbers are computed by hand.
"""

import random

import pandas as pd
import pytest

from commprof.analysis.columns.answers import GROUPINGS, TRAFFIC
from commprof.analysis.traffic.operation_totals import operations, traffic
from commprof.errors import UsageError
from support.runs import SyntheticRun


def ask(run: SyntheticRun, *by: str) -> pd.DataFrame:
    return traffic(operations(run.tables("collectives", "aggregates", "groups")), by)


def only(run: SyntheticRun) -> dict:
    frame = ask(run)
    assert len(frame) == 1
    return {name: frame[name].iloc[0] for name in frame.columns}  # A row would convert integers to floats.


def test_a_collective_of_four_ranks_counts_once():
    run = SyntheticRun(world_size=4)
    run.add_collective("all_reduce", payload_bytes=1000)
    unknown = {"exposed_ns": None, "padding_bytes": None, "between_hosts_bytes": None}
    assert only(run) | unknown == unknown | {
        "collectives": 1,
        "records": 4,
        "payload_bytes": 1000,
        "wire_bytes": 1500.0,  # 2 x 3/4 x 1000
        "executed_wire_bytes": 1500.0,
        "host_ns": 1000,
        "exposed_ns": None,
        "tensors": 1,
        "timed": 0,
    }


def test_what_is_known_of_some_ranks_only_says_of_how_many():
    run = SyntheticRun(world_size=4)
    for ranks, exposed_ns in (((1,), 300), ((2,), 100), ((0, 3), None)):
        run.add_collective("all_reduce", payload_bytes=1000, pg_seq=0, ranks=ranks, exposed_ns=exposed_ns)
    found = only(run)
    assert (found["records"], found["timed"], found["exposed_ns"]) == (4, 2, 200)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("op", "wire"),
    [
        ("all_reduce", 1600.0),  # 2 x 2/3 x 1200
        ("reduce", 800.0),  # 2/3 x 1200
        ("broadcast", 800.0),
        ("all_gather", 800.0),
        ("reduce_scatter", 800.0),
        ("all_to_all", 800.0),
        ("gather", 2400 / 9),  # Two ranks send 400 each. The mean of the 800 is over three ranks.
        ("scatter", 2400 / 9),
        ("barrier", 0.0),
    ],
)
def test_wire_bytes_of_each_operation_on_three_ranks(op, wire):
    run = SyntheticRun(world_size=3)
    run.add_collective(op, payload_bytes=1200, peer=0)
    assert only(run)["wire_bytes"] == pytest.approx(wire)
    assert only(run)["payload_bytes"] == 1200


def test_wire_bytes_use_the_size_of_the_group_not_of_the_world():
    run = SyntheticRun(world_size=8)
    run.add_collective("all_reduce", payload_bytes=100, group=(0, 3), pg="5")
    assert only(run)["wire_bytes"] == 100.0  # 2 x 1/2 x 100


def test_disjoint_groups_with_one_name_are_two_collectives():
    run = SyntheticRun(world_size=4)
    run.add_collective("all_reduce", payload_bytes=100, group=(0, 1), pg="tp")
    run.add_collective("all_reduce", payload_bytes=60, group=(2, 3), pg="tp")
    assert ask(run, "pg", "group_ranks")[["group_ranks", "payload_bytes"]].values.tolist() == [
        ["0-1", 100],
        ["2-3", 60],
    ]
    assert only(run)["collectives"] == 2
    assert only(run)["wire_bytes"] == 160.0


def test_a_collective_still_counts_once_when_ranks_are_missing():
    run = SyntheticRun(world_size=4, recorded_ranks=(1, 3))
    run.add_collective("all_reduce", payload_bytes=100)
    run.add_collective("all_reduce", payload_bytes=100, ranks=(3,), pg_seq=1)
    totals = only(run)
    assert (totals["collectives"], totals["records"], totals["payload_bytes"]) == (2, 3, 200)
    assert totals["wire_bytes"] == 300.0


def test_attempts_are_counted_apart():
    run = SyntheticRun(world_size=2)
    for attempt in (0, 1):
        run.add_collective("all_reduce", payload_bytes=100, attempt=attempt, pg_seq=0)
    assert ask(run, "attempt")["collectives"].tolist() == [1, 1]


def test_a_group_name_used_again_in_one_process_is_another_group():
    run = SyntheticRun(world_size=2)
    for _ in range(2):  # The group is destroyed and created again, so its numbers begin at 0 again.
        for number in range(3):
            run.add_collective("all_reduce", payload_bytes=10, pg_seq=number)
    assert only(run)["collectives"] == 6
    assert only(run)["payload_bytes"] == 60


def test_a_message_counts_at_its_send_and_the_recv_adds_only_its_record_and_time():
    run = SyntheticRun(world_size=2)
    run.add_collective("send", payload_bytes=100, ranks=(0,), peer=1, host_ns=5)
    run.add_collective("recv", payload_bytes=100, ranks=(1,), peer=0, host_ns=70)
    frame = ask(run, "op").set_index("op")
    columns = ["collectives", "records", "payload_bytes", "wire_bytes", "host_ns"]
    assert frame.loc["send", columns].tolist() == [1, 1, 100, 100.0, 5]
    assert frame.loc["recv", columns].tolist() == [0, 1, 0, 0.0, 70]


def test_a_recv_whose_send_was_not_recorded_counts_without_wire_bytes():
    run = SyntheticRun(world_size=3, recorded_ranks=(1, 2))
    run.add_collective("recv", payload_bytes=100, ranks=(1,), peer=0)  # The record of rank 0 was dropped.
    run.add_collective("send", payload_bytes=30, ranks=(2,), peer=1)
    run.add_collective("recv", payload_bytes=30, ranks=(1,), peer=2)
    # The record of a second send was dropped.
    run.add_collective("recv", payload_bytes=40, ranks=(1,), peer=2)
    totals = only(run)
    assert (totals["collectives"], totals["records"]) == (3, 4)
    assert totals["payload_bytes"] == 100 + 30 + 40
    assert totals["wire_bytes"] == 30.0


def test_a_recv_from_any_source_is_set_against_the_sends_that_no_other_recv_takes():
    run = SyntheticRun(world_size=3)
    run.add_collective("send", payload_bytes=10, ranks=(0,), peer=2)
    run.add_collective("send", payload_bytes=20, ranks=(1,), peer=2)
    run.add_collective("recv", payload_bytes=10, ranks=(2,), peer=0)
    run.add_collective("recv", payload_bytes=20, ranks=(2,), peer=-1)
    # No rank recorded the send of this message.
    run.add_collective("recv", payload_bytes=40, ranks=(2,), peer=-1)
    totals = only(run)
    assert (totals["collectives"], totals["payload_bytes"], totals["wire_bytes"]) == (3, 70, 30.0)


def test_a_collective_and_a_message_with_one_number_are_two():
    run = SyntheticRun(world_size=2)
    run.add_collective("all_reduce", payload_bytes=10, pg_seq=0)
    run.add_collective("send", payload_bytes=10, ranks=(0,), peer=1, pg_seq=0)
    run.add_collective("recv", payload_bytes=10, ranks=(1,), peer=0, pg_seq=0)
    assert only(run)["collectives"] == 2


def test_a_coalesced_call_is_one_collective_with_its_summed_bytes():
    run = SyntheticRun(world_size=2)
    run.add_collective("all_reduce", payload_bytes=300, num_tensors=3, sizes="10;25;40")
    totals = only(run)
    assert (totals["collectives"], totals["tensors"], totals["payload_bytes"]) == (1, 3, 300)


def test_uneven_all_to_all_counts_the_mean_of_what_the_ranks_send():
    run = SyntheticRun(world_size=2)
    run.add_collective("all_to_all", payload_bytes=100, ranks=(0,), pg_seq=0)
    run.add_collective("all_to_all", payload_bytes=40, ranks=(1,), pg_seq=0)
    totals = only(run)
    assert (totals["collectives"], totals["payload_bytes"], totals["wire_bytes"]) == (1, 70, 35.0)


def test_a_tag_that_only_one_rank_carries_still_groups_the_collective_once():
    run = SyntheticRun(world_size=2)
    run.add_collective("all_reduce", payload_bytes=10, ranks=(0,), pg_seq=0)
    run.add_collective("all_reduce", payload_bytes=10, ranks=(1,), pg_seq=0, purpose="gradient_norm")
    frame = ask(run, "purpose")
    assert frame["purpose"].tolist() == ["gradient_norm"]
    assert frame["collectives"].tolist() == [1]


def test_a_collective_that_never_returned_counts_and_has_no_time():
    run = SyntheticRun(world_size=2)
    run.add_collective("all_reduce", payload_bytes=10, host_ns=None)
    totals = only(run)
    assert totals["collectives"] == 1
    assert totals["host_ns"] is pd.NA


def test_times_are_means_over_the_ranks_of_each_collective():
    run = SyntheticRun(world_size=2)
    run.add_collective("all_reduce", ranks=(0,), pg_seq=0, host_ns=100, exposed_ns=40)
    run.add_collective("all_reduce", ranks=(1,), pg_seq=0, host_ns=300, exposed_ns=0)
    run.add_collective("all_reduce", host_ns=7, exposed_ns=None, pg_seq=1)
    totals = only(run)
    assert (totals["host_ns"], totals["exposed_ns"]) == (207, 20)


def test_one_rank_sends_nothing_over_a_wire():
    run = SyntheticRun(world_size=1)
    run.add_collective("all_reduce", payload_bytes=100)
    assert only(run)["payload_bytes"] == 100
    assert only(run)["wire_bytes"] == 0.0


def test_an_empty_run_has_totals_of_zero_and_no_rows_otherwise():
    totals = only(SyntheticRun())
    assert (totals["collectives"], totals["payload_bytes"], totals["wire_bytes"]) == (0, 0, 0.0)
    assert totals["host_ns"] is pd.NA
    assert len(ask(SyntheticRun(), "op")) == 0


def test_bytes_past_what_a_float_holds_stay_exact():
    run = SyntheticRun(world_size=2)
    run.add_collective("all_reduce", payload_bytes=2**60 + 1, dtype=None)
    run.add_collective("all_reduce", payload_bytes=2, dtype=None)
    assert only(run)["payload_bytes"] == 2**60 + 3
    assert ask(run)["payload_bytes"].dtype == "int64"


def test_every_grouping_and_its_columns_have_the_declared_types():
    run = SyntheticRun(world_size=2)
    run.add_collective("all_reduce", payload_bytes=8, bucket=3, purpose="gradient_reduce")
    run.add_collective("all_gather", payload_bytes=8)
    frame = ask(run, *GROUPINGS)
    assert list(frame.columns) == [*GROUPINGS, *TRAFFIC.names]
    assert frame["bucket"].dtype == "Int64"
    assert frame["step"].dtype == "int64"
    assert frame["collectives"].sum() == 2


def test_an_unknown_grouping_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'purpose'"):
        ask(SyntheticRun(), "porpose")


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(5))
def test_against_an_independent_count(seed):
    """Compare with a plain Python count over a random trace with subgroups, messages and missing ranks."""
    rng = random.Random(seed)
    world = rng.choice([2, 3, 4, 6])
    run = SyntheticRun(world_size=world)
    groups = {"0": tuple(range(world)), "1": tuple(range(0, world, 2)), "2": tuple(range(world // 2))}
    expected: dict[tuple, list] = {}
    for _ in range(60):
        pg = rng.choice(sorted(groups))
        group = groups[pg]
        op = rng.choice(["all_reduce", "reduce", "all_gather", "reduce_scatter", "broadcast", "barrier"])
        size = 0 if op == "barrier" else 4 * rng.randrange(1, 10_000)
        step = rng.randrange(-1, 4)
        run.add_collective(op, payload_bytes=size, step=step, group=group, pg=pg, peer=group[0])
        entry = expected.setdefault((step, op), [0, 0, 0, 0.0])
        n = len(group)
        factor = {"all_reduce": 2, "barrier": 0}.get(op, 1)
        entry[0] += 1
        entry[1] += n
        entry[2] += size
        entry[3] += factor * (n - 1) / n * size
    frame = ask(run, "step", "op").set_index(["step", "op"])
    assert set(frame.index) == set(expected)
    for key, (collectives, records, payload, wire) in expected.items():
        row = frame.loc[key]
        assert (row["collectives"], row["records"], row["payload_bytes"]) == (collectives, records, payload)
        assert row["wire_bytes"] == pytest.approx(wire, rel=1e-12)


def two_hosts(run: SyntheticRun, unknown: tuple[int, ...] = ()) -> SyntheticRun:
    """Place the ranks of ``run`` on two hosts: ranks 0 and 1 on the first, the others on the second."""
    run.rows["groups"] = run.table("groups").to_pylist()
    for row in run.rows["groups"]:
        row["host"] = None if row["rank"] in unknown else "ab"[row["rank"] > 1]
    return run


@pytest.mark.parametrize("unknown", [(), (3,)])
def test_bytes_within_a_host_are_told_from_those_between_hosts(unknown):
    run = SyntheticRun(world_size=4)
    run.add_collective("all_reduce", payload_bytes=1000)
    run.add_collective("all_reduce", payload_bytes=10, group=(0, 1), pg="1")
    run.add_collective("all_gather", payload_bytes=20, group=(2, 3), pg="2")
    run.add_collective("send", payload_bytes=7, ranks=(0,), peer=1)
    run.add_collective("send", payload_bytes=5, ranks=(1,), peer=2)
    run.add_collective("recv", payload_bytes=5, ranks=(2,), peer=1)
    run.add_collective("send", payload_bytes=3, ranks=(2,), peer=3)
    frame = ask(two_hosts(run, unknown), "span", "op").set_index(["op", "span"])["payload_bytes"]
    found = {key: size for key, size in frame.dropna().to_dict().items() if size}
    sure = "within_host" if not unknown else None
    found = {(op, None if pd.isna(span) else span): size for (op, span), size in found.items()}
    expected = {
        ("all_reduce", "between_hosts"): 1000,
        ("all_reduce", "within_host"): 10,
        ("all_gather", sure): 20,
        ("send", "within_host"): 7,
        ("send", "between_hosts"): 5,
    }
    expected[("send", sure)] = expected.get(("send", sure), 0) + 3
    assert found == expected


@pytest.mark.parametrize("unknown", [(), (3,)])
def test_bytes_between_hosts_are_a_part_of_the_wire_bytes_of_every_sum(unknown):
    run = SyntheticRun(world_size=4)
    run.add_collective("all_reduce", payload_bytes=1000)  # The wire bytes are 2 x 3/4 x 1000, on both hosts.
    run.add_collective("all_reduce", payload_bytes=10, group=(0, 1), pg="1")
    run.add_collective("all_gather", payload_bytes=20, group=(2, 3), pg="2")
    run.add_collective("send", payload_bytes=7, ranks=(0,), peer=1)
    run.add_collective("send", payload_bytes=5, ranks=(1,), peer=2)
    frame = ask(two_hosts(run, unknown), "op").set_index("op")["between_hosts_bytes"]
    found = {op: None if pd.isna(size) else size for op, size in frame.items()}
    # If the host of rank 3 is not known, the span of the all_gather is not known. The spans of the others are
    # known.
    assert found == {"all_reduce": 1500, "send": 5, "all_gather": None if unknown else 0}
    total = only(two_hosts(run, unknown))["between_hosts_bytes"]
    assert pd.isna(total) if unknown else total == 1505


def test_padding_is_summed_where_a_runtime_says_it():
    run = SyntheticRun(world_size=2)
    run.add_collective("all_gather", payload_bytes=64, padding_bytes=8, purpose="parameter_gather")
    run.add_collective("all_gather", payload_bytes=64, padding_bytes=0, purpose="parameter_gather")
    run.add_collective("all_gather", payload_bytes=64, ranks=(0,), purpose="metric", pg_seq=2)
    run.add_collective(
        "all_gather", payload_bytes=64, padding_bytes=4, ranks=(1,), purpose="metric", pg_seq=2
    )
    run.add_collective("broadcast", payload_bytes=64)
    frame = ask(run, "op", "purpose")
    found = {(row.op, row.purpose): row.padding_bytes for row in frame.itertuples()}
    assert found["all_gather", "parameter_gather"] == 8
    assert found["all_gather", "metric"] == 4
    assert all(pd.isna(size) for (op, _), size in found.items() if op == "broadcast")
