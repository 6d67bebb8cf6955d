"""Test the padding bytes and between-hosts bytes in the answers that sum operations.

The expected numbers are computed by hand.
"""

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest

import commprof
from commprof.analysis import api
from commprof.analysis.relations.sql_engine import evaluate
from commprof.analysis.traffic import matrix
from commprof.cli import execute
from support.runs import SyntheticRun

TRACES = Path("traces")


def training(hosts: dict[int, str], padding: int | None) -> SyntheticRun:
    """Return a run of four ranks and three steps.

    All ranks reduce gradients (1500 wire bytes), and ranks 0 and 1 gather parameters (10 wire bytes).
    """
    run = SyntheticRun(world_size=4)
    run.hosts = hosts
    for step in range(3):
        run.add_step(step, duration_ns=1000, loss=1.0)
        run.add_collective("all_reduce", payload_bytes=1000, step=step, purpose="gradient_reduce")
        run.add_collective(
            "all_gather",
            payload_bytes=20,
            padding_bytes=padding,
            step=step,
            purpose="parameter_gather",
            group=(0, 1),
            pg="1",
        )
    return run


ONE_HOST = dict.fromkeys(range(4), "a")
TWO_HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}


@pytest.mark.sampled
@pytest.mark.parametrize("padding", [None, 0, 8])
def test_a_step_has_its_bytes_between_hosts_and_its_padding(padding: int | None):
    run = training(TWO_HOSTS, padding).open(TRACES / "run")
    times, compared = api.step_times(run), api.compare([run])
    assert times["between_hosts_bytes"].tolist() == [1500] * 3
    assert compared["between_hosts_bytes_per_step"].tolist() == [1500]
    # Two of the four ranks send 10 bytes each, which adds 5 bytes per rank.
    assert compared["wire_bytes_per_step"].tolist() == [1505]
    facts = api.overview(run)
    assert facts["between_hosts_bytes"] == 4500
    found = [*times["padding_bytes"], *compared["padding_bytes_per_step"], facts["padding_bytes"]]
    if padding is None:
        assert all(map(pd.isna, found))  # No runtime reports that there is no padding.
    else:
        assert found == [*[padding] * 4, 3 * padding]
    by_purpose = api.traffic_by_setting([run]).set_index("purpose")
    assert by_purpose["between_hosts_bytes_per_step"].to_dict() == {
        "gradient_reduce": 1500,
        "parameter_gather": 0,
    }


def test_on_one_host_nothing_travels_between_hosts():
    run = training(ONE_HOST, None).open(TRACES / "run")
    assert api.step_times(run)["between_hosts_bytes"].tolist() == [0] * 3


# In the ring of all ranks, rank 1 sends to rank 2 and rank 3 to rank 0 on another host.
OF_OTHERS = [(0, 1), (1, 2), (2, 3), (3, 0)]


def planted(hosts: dict[int, str]) -> SyntheticRun:
    """Return a run with one flow of each kind.

    The flows are two rings, a reduce to rank 1, a broadcast from rank 3, an all_to_all, and messages.
    """
    run = SyntheticRun(world_size=4)
    run.hosts = hosts
    run.add_step(0, duration_ns=1000)
    # The ring sends 1500 bytes on each of 4 pairs.
    run.add_collective("all_reduce", payload_bytes=1000, step=0, purpose="gradient_reduce")
    # 10 bytes on each of 2 pairs.
    run.add_collective("all_gather", payload_bytes=20, step=0, group=(0, 1), pg="1")
    run.add_collective(
        "reduce", payload_bytes=100, padding_bytes=4, step=0, peer=1, purpose="gradient_reduce"
    )  # Each of the others sends 100 bytes.
    run.add_collective("broadcast", payload_bytes=30, step=0, peer=3)  # 30 bytes to each of the others.
    run.add_collective("all_to_all", payload_bytes=8, step=0)  # 2 bytes on each of 12 pairs.
    run.add_collective("send", payload_bytes=7, step=0, ranks=(0,), peer=1)
    run.add_collective("send", payload_bytes=5, step=0, ranks=(1,), peer=2)
    return run


def by_hand() -> dict[tuple[int, int], float]:
    cells = {(i, j): 2.0 for i in range(4) for j in range(4) if i != j}
    for pairs, size in (
        (OF_OTHERS, 1500),
        ([(0, 1), (1, 0)], 10),
        ([(0, 1), (2, 1), (3, 1)], 100),
        ([(3, 0), (3, 1), (3, 2)], 30),
        ([(0, 1)], 7),
        ([(1, 2)], 5),
    ):
        for pair in pairs:
            cells[pair] += size
    return cells


@pytest.mark.sampled
@pytest.mark.parametrize("most_ranks", [None, 2, 1])
@pytest.mark.parametrize("hosts", [ONE_HOST, TWO_HOSTS, {0: "a", 1: "b", 2: "a"}])
def test_in_the_matrix_the_hosts_of_each_pair_decide(hosts, most_ranks):
    frame = api.matrix(planted(hosts).open(), most_ranks=most_ranks)
    width = 4 // (most_ranks or 4)
    expected = {}
    for (sender, receiver), size in by_hand().items():
        between = size if hosts.get(sender) != hosts.get(receiver) else 0.0
        known = sender in hosts and receiver in hosts
        expected.setdefault((sender // width * width, receiver // width * width), []).append(
            between if known else None
        )
    found = frame.set_index(["sender", "receiver"])["between_hosts_bytes"]
    assert {pair: None if pd.isna(size) else size for pair, size in found.items()} == {
        pair: None if None in sizes else sum(sizes) for pair, sizes in expected.items()
    }


@pytest.mark.sampled
@pytest.mark.parametrize("by", [(), ("op", "step")])
@pytest.mark.parametrize("hosts", [TWO_HOSTS, {0: "a", 1: "b", 2: "a"}])
def test_the_relation_has_the_bytes_of_the_answer_and_those_that_no_pair_has(tmp_path, by, hosts):
    run = planted(hosts)
    run.add_collective("broadcast", payload_bytes=300, step=0, peer=9)  # The root is not in the group.
    opened = commprof.open(run.write(tmp_path / "run"))
    rows = opened.relation("matrix", by=by).df()
    placed = rows.dropna(subset="sender")
    measures = ["wire_bytes", "message_bytes", "between_hosts_bytes"]
    keys = [*by, "sender", "receiver"]
    found = placed.set_index(keys)[measures].sort_index()
    answer = api.matrix(opened.run, by)
    # gloo uses different pairs.
    expected = answer[answer["wire_bytes"] > 0].set_index(keys)[measures].sort_index()
    pd.testing.assert_frame_equal(found, expected, check_dtype=False, check_index_type=False)
    assert rows["wire_bytes"].sum() - placed["wire_bytes"].sum() == 900.0
    assert (
        api.query(opened.run, "select sum(wire_bytes) as n from matrix")["n"][0] == rows["wire_bytes"].sum()
    )


def test_a_rank_may_be_on_another_host_in_each_attempt():
    run = SyntheticRun(world_size=2)
    run.hosts = {0: "a", 1: "a"}
    run.add_collective("all_gather", payload_bytes=20)
    first = run.tables("collectives", "groups", "aggregates")
    moved = SyntheticRun(world_size=2)
    moved.hosts = {0: "a", 1: "b"}
    moved.add_collective("all_gather", payload_bytes=200, attempt=1)
    second = moved.tables("collectives", "groups", "aggregates")
    frame = matrix_of({name: pa.concat_tables([first[name], second[name]]) for name in first})
    assert frame["wire_bytes"].tolist() == [110.0, 110.0]
    assert frame["between_hosts_bytes"].tolist() == [100.0, 100.0]


def matrix_of(tables):
    operations = evaluate("operations", tables, matrix.columns(()))
    return matrix.matrix(operations, tables["groups"])


def test_owners_and_ranks_have_what_comes_from_and_goes_to_other_hosts():
    run = planted(TWO_HOSTS).open()
    owners = api.owners(run).set_index("rank")
    assert owners["received_bytes"].tolist() == [0, 300, 0, 0]
    assert owners["between_hosts_bytes"].tolist() == [0, 200, 0, 0]  # Ranks 2 and 3 send these bytes.
    assert owners["padding_bytes"].fillna(-1).tolist() == [-1, 4, -1, -1]
    frame = api.rank_bytes([run]).set_index("rank")
    cells = {pair: size for pair, size in by_hand().items() if (pair[0] < 2) != (pair[1] < 2)}
    for rank in range(4):
        assert frame.loc[rank, "sent_between_hosts_bytes_per_step"] == sum(
            size for (sender, _), size in cells.items() if sender == rank
        )
        assert frame.loc[rank, "received_between_hosts_bytes_per_step"] == sum(
            size for (_, receiver), size in cells.items() if receiver == rank
        )


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("hosts", "of_one"), [(ONE_HOST, 0.0), (TWO_HOSTS, 200.0), ({0: "a", 1: "b", 2: "a"}, None)]
)
def test_an_owner_has_null_where_a_host_is_not_known(hosts, of_one):
    found = api.owners(planted(hosts).open()).set_index("rank")["between_hosts_bytes"]
    assert [None if pd.isna(size) else size for size in found] == [0, of_one, 0, 0]
    ranks = api.rank_bytes([planted(hosts).open()])["sent_between_hosts_bytes_per_step"]
    # In the all_to_all, every rank either sends to rank 3 or is rank 3.
    assert ranks.isna().tolist() == [of_one is None] * 4


def test_the_issued_level_has_its_bytes_between_hosts_and_its_padding():
    run = planted(TWO_HOSTS).open(TRACES / "run")
    levels = api.reduction_levels([run])
    issued = levels[levels["level"] == "issued"].set_index("op")
    assert issued["wire_bytes_per_step"].to_dict() == {"all_reduce": 1500, "reduce": 75}
    assert issued["between_hosts_bytes_per_step"].to_dict() == {"all_reduce": 1500, "reduce": 75}
    assert issued["padding_bytes_per_step"].fillna(-1).to_dict() == {"all_reduce": -1, "reduce": 4}
    others = levels[levels["level"] != "issued"]
    assert others["between_hosts_bytes_per_step"].isna().all()


@pytest.mark.long
def test_tables_of_a_paper_have_the_columns_where_there_are_any(tmp_path):
    for name, run in (("some", hierarchical(TWO_HOSTS)), ("none", training(ONE_HOST, None))):
        run.write(tmp_path / name)
        execute(["export", str(tmp_path / name), "--out", str(tmp_path / f"{name}-csv")])
        execute(["paper", str(tmp_path / f"{name}-csv"), "--out", str(tmp_path / f"{name}-paper")])
    cells = {"comparison.tex": ["500 B & 16 B &"], "traffic.tex": ["& 500 B & --", "& 0 & 16 B"]}
    for table, expected in cells.items():
        some, none = ((tmp_path / f"{name}-paper" / table).read_text() for name in ("some", "none"))
        assert "& Between hosts & Padding" in some and "several hosts" in some
        assert all(row in some for row in expected)
        assert "Between hosts" not in none and "Padding" not in none


def hierarchical(hosts: dict[int, str]) -> SyntheticRun:
    """Return a run that reduces one bucket in each of three steps.

    The ranks of each host issue a reduce_scatter. Each rank then issues an all_reduce of its half across the
    hosts.
    """
    run = SyntheticRun(world_size=4)
    run.hosts = hosts
    for step in range(3):
        run.add_step(step, duration_ns=1000)
        for rank in range(4):
            run.add(
                "buckets", rank=rank, attempt=0, pid=run.pid(rank), step=step, micro_step=0, bucket=0, numel=250,
                bytes=1000, dtype="float32", parameters="a", flush_reason="full", time_ns=step,
            )  # fmt: skip
        of_bucket = {"step": step, "bucket": 0, "purpose": "gradient_reduce"}
        for pg, group in enumerate(((0, 1), (2, 3))):
            run.add_collective(
                "reduce_scatter", payload_bytes=1000, padding_bytes=8, group=group, pg=f"in{pg}", **of_bucket
            )
        for pg, group in enumerate(((0, 2), (1, 3))):
            run.add_collective("all_reduce", payload_bytes=500, group=group, pg=f"across{pg}", **of_bucket)
    return run


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("hosts", "between"), [(TWO_HOSTS, 500.0), (ONE_HOST, 0.0), ({0: "a", 1: "a", 2: "b"}, None)]
)
def test_a_bucket_has_its_bytes_between_hosts_and_its_padding(hosts, between):
    """A rank sends 1000 / 2 bytes within its host and 2 x 500 / 2 bytes to the other host.

    The reduce_scatter of each host has 8 bytes of padding.
    """
    run = hierarchical(hosts).open(TRACES / "run")
    for frame, rows in (
        (api.bucket_flushes(run), 3),
        (api.bucket_steps(run), 3),
        (api.buckets_per_step(run), 1),
        (api.bucket_means(run), 1),
    ):
        assert frame["wire_bytes"].tolist() == [1000.0] * rows
        assert frame["padding_bytes"].tolist() == [16] * rows
        found = [None if pd.isna(value) else value for value in frame["between_hosts_bytes"]]
        assert found == [between] * rows
    assert api.bucket_content(run, 1, 0).operations["padding_bytes"].fillna(-1).tolist() == [8, -1]


@pytest.mark.sampled
@pytest.mark.parametrize(("hosts", "padding"), [(ONE_HOST, 0), (TWO_HOSTS, 8)])
def test_the_report_shows_bytes_between_hosts_and_padding_where_there_are_any(
    tmp_path, capsys, hosts, padding
):
    execute(["report", str(training(hosts, padding).write(tmp_path / "run"))])
    said = capsys.readouterr().out
    head = next(line for line in said.splitlines() if "purpose, operation" in line)
    assert ("between hosts" in head, "padding" in head) == (hosts == TWO_HOSTS, bool(padding))
    assert (
        "1500 B" in said or "1.46 KiB" in said
    ) and "between hosts: the part of the wire bytes" in " ".join(said.split())
