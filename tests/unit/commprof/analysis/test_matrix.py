"""Test the matrix, which shows how many bytes each rank sends to each other rank.

The expected numbers are computed by hand.
"""

import random

import pytest

from commprof.analysis import api
from commprof.errors import UsageError
from commprof.schema import UNKNOWN_SPLITS, format_ranks, format_splits
from support.runs import SyntheticRun

ROOTED = ("reduce", "broadcast", "gather", "scatter")


def cells(frame, column="wire_bytes"):
    return {(row["sender"], row["receiver"]): row[column] for row in frame.to_dict("records") if row[column]}


def matrix(run, **options):
    return api.matrix(run.open(), **options)


def of_one(op, ranks=3, **columns):
    run = SyntheticRun(world_size=ranks)
    run.add_collective(op, payload_bytes=1200, peer=1 if op in ROOTED else -1, **columns)
    return matrix(run)


def test_a_ring_in_the_order_of_the_group():
    around = {(0, 1), (1, 2), (2, 0)}
    assert cells(of_one("all_reduce")) == dict.fromkeys(around, 1600.0)  # 2 x 2/3 x 1200
    assert cells(of_one("reduce_scatter")) == dict.fromkeys(around, 800.0)
    assert cells(of_one("all_gather")) == dict.fromkeys(around, 800.0)


def test_a_group_in_an_order_of_its_own_is_a_ring_in_that_order():
    run = SyntheticRun(world_size=4)
    run.add_collective("all_gather", payload_bytes=300, group=(3, 0, 2))
    assert cells(matrix(run)) == {(3, 0): 200.0, (0, 2): 200.0, (2, 3): 200.0}


def test_rooted_operations_flow_between_the_root_and_each_other_rank():
    assert cells(of_one("reduce")) == {(0, 1): 1200.0, (2, 1): 1200.0}
    assert cells(of_one("broadcast")) == {(1, 0): 1200.0, (1, 2): 1200.0}
    assert cells(of_one("gather")) == {(0, 1): 400.0, (2, 1): 400.0}
    assert cells(of_one("scatter")) == {(1, 0): 400.0, (1, 2): 400.0}


def test_all_to_all_is_pairwise():
    # Each rank sends 1200 / 3 to each other rank.
    assert cells(of_one("all_to_all")) == {(i, j): 400.0 for i in range(3) for j in range(3) if i != j}


def exchange(run, members, sent, pg="0", number=0, **of_rank):
    """Add an all_to_all in which member i sends ``sent[i][j]`` bytes to member j.

    ``of_rank`` overrides the columns of single ranks.
    """
    for place, rank in enumerate(members):
        columns = {
            "input_splits": format_splits(sent[place]),
            "output_splits": format_splits([row[place] for row in sent]),
        } | of_rank.get(f"rank_{rank}", {})
        run.add_collective(
            "all_to_all", payload_bytes=sum(sent[place]), ranks=(rank,), group=members, pg=pg, pg_seq=number,
            **columns,
        )  # fmt: skip


UNEQUAL = ((7, 100, 0), (30, 5, 60), (40, 40, 40))
OF_UNEQUAL = {(3, 0): 100, (0, 3): 30, (0, 2): 60, (2, 3): 40, (2, 0): 40}  # The members are 3, 0 and 2.


def test_unequal_splits_go_where_the_records_say():
    run = SyntheticRun(world_size=4)
    for number in range(2):
        exchange(run, (3, 0, 2), UNEQUAL, pg="a", number=number)
    run.add_collective("all_to_all", payload_bytes=400)
    frame = matrix(run)
    equal = {(i, j): 100.0 for i in range(4) for j in range(4) if i != j}
    expected = {pair: equal[pair] + 2 * OF_UNEQUAL.get(pair, 0) for pair in equal}
    assert cells(frame) == cells(frame, "executed_wire_bytes") == expected
    assert frame.attrs["unplaced_bytes"] == 0
    traffic = api.traffic(run.open(), ["op", "group_ranks"])
    of_group = traffic[traffic["group_ranks"] == "3,0,2"].iloc[0]
    assert (of_group["collectives"], of_group["records"]) == (2, 6)
    assert of_group["wire_bytes"] == pytest.approx(2 * sum(OF_UNEQUAL.values()) / 3)


def test_what_a_sender_does_not_say_its_receivers_do():
    unread = {"input_splits": UNKNOWN_SPLITS}
    run = SyntheticRun(world_size=4)
    exchange(run, (3, 0, 2), UNEQUAL, pg="a", rank_0=unread)
    assert cells(matrix(run)) == OF_UNEQUAL
    exchange(run, (3, 0, 2), UNEQUAL, pg="b", rank_0=unread, rank_2={"output_splits": UNKNOWN_SPLITS})
    frame = matrix(run)
    assert cells(frame) == OF_UNEQUAL
    # The mean of the bytes of the three ranks.
    assert frame.attrs["unplaced_bytes"] == pytest.approx((107 + 95 + 120) / 3 * 2, abs=1)


def test_messages_stand_as_they_were_sent():
    run = SyntheticRun(world_size=3)
    for _ in range(2):
        run.add_collective("send", payload_bytes=40, ranks=(0,), peer=2)
        run.add_collective("recv", payload_bytes=40, ranks=(2,), peer=0)
    run.add_collective("all_reduce", payload_bytes=100, group=(0, 2), pg="pair")
    frame = matrix(run)
    assert cells(frame, "message_bytes") == {(0, 2): 80}
    assert cells(frame) == {(0, 2): 180.0, (2, 0): 100.0}
    assert frame.attrs["models"].keys() == {"all_reduce", "send"}


def test_bytes_whose_root_nobody_knows_are_said_and_not_placed():
    run = SyntheticRun(world_size=4)
    run.add_collective("reduce", payload_bytes=100, peer=-1)
    run.add_collective("all_gather", payload_bytes=100)
    frame = matrix(run)
    assert frame.attrs["unplaced_bytes"] == 300.0
    assert sum(cells(frame).values()) == 300.0


@pytest.mark.long
def test_only_what_is_asked_for_is_in_it():
    run = SyntheticRun(world_size=2)
    for step in (-1, 0, 1, 2):
        run.add_collective("all_reduce", payload_bytes=100, step=step, purpose="gradient_reduce")
        run.add_collective("all_gather", payload_bytes=10, step=step)
    both = {(0, 1), (1, 0)}
    assert cells(matrix(run)) == dict.fromkeys(both, 420.0)
    assert cells(matrix(run, op="all_reduce")) == dict.fromkeys(both, 400.0)
    assert cells(matrix(run, purpose="untagged")) == dict.fromkeys(both, 20.0)
    assert cells(matrix(run, steps=(1, 2))) == dict.fromkeys(both, 210.0)
    assert cells(matrix(run, op="broadcast")) == {}
    with pytest.raises(UsageError, match="did you mean 'purpose'"):
        matrix(run, by=("purposes",))


def test_many_ranks_are_added_up_in_blocks():
    run = SyntheticRun(world_size=6)
    run.add_collective("all_gather", payload_bytes=60)  # Each rank sends 50 to the next rank.
    frame = matrix(run, most_ranks=3)
    assert cells(frame) == {
        (0, 0): 50.0, (0, 2): 50.0, (2, 2): 50.0, (2, 4): 50.0, (4, 4): 50.0, (4, 0): 50.0,
    }  # fmt: skip
    assert (frame.attrs["ranks"], frame.attrs["ranks_per_cell"]) == (6, 2)


def test_a_run_of_one_rank_or_without_records_has_no_cells():
    alone = SyntheticRun(world_size=1)
    alone.add_collective("all_reduce", payload_bytes=8)
    for run in (alone, SyntheticRun(world_size=2)):
        frame = matrix(run)
        assert frame.empty
        assert list(frame.columns) == list(api.describe_columns("matrix"))
        assert api.owners(run.open()).empty


def a_mixture(seed, names=None):
    """Return a run of random kinds of collectives in random groups. ``names`` renames the ranks."""
    chance = random.Random(seed)
    world = 5
    names = names or list(range(world))
    run = SyntheticRun(world_size=world)
    for number in range(40):
        members = chance.sample(range(world), chance.randint(2, world))
        op = chance.choice(
            ("all_reduce", "reduce", "broadcast", "all_gather", "all_to_all", "gather", "send", "scatter")
        )
        size = 60 * chance.randint(1, 10_000)
        sender, peer = members[0], members[1] if op == "send" else chance.choice(members)
        run.add_collective(
            op,
            payload_bytes=size,
            group=tuple(names[rank] for rank in members),
            pg=f"{number}",
            ranks=(names[sender],) if op == "send" else None,
            peer=names[peer] if op in (*ROOTED, "send") else -1,
            step=chance.randint(-1, 3),
            purpose=chance.choice((None, "gradient_reduce", "pipeline")),
        )
    return run


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_or_invented_under_any_grouping(seed):
    run = a_mixture(seed).open()  # The run is opened once, so that each relation is evaluated once.
    sent = api.traffic(run, by=("op", "group_size"))
    whole = sum(
        row["wire_bytes"] * (1 if row["op"] == "send" else row["group_size"])
        for row in sent.to_dict("records")
    )
    for by in ((), ("op",), ("purpose",), ("step", "pg"), ("op", "phase", "intended_op")):
        assert api.matrix(run, by=by)["wire_bytes"].sum() == pytest.approx(whole, rel=1e-12)
    for most in (1, 2, 3):
        assert api.matrix(run, most_ranks=most)["wire_bytes"].sum() == pytest.approx(whole, rel=1e-12)
    assert api.matrix(run)["message_bytes"].sum() == sent[sent["op"] == "send"]["payload_bytes"].sum()


@pytest.mark.sampled
@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_each_rank_sends_and_receives_its_wire_bytes(op):
    run = SyntheticRun(world_size=5)
    run.add_collective(op, payload_bytes=1000)
    frame, wire = matrix(run), float(api.traffic(run.open(), by=())["wire_bytes"].iloc[0])
    for side in ("sender", "receiver"):
        assert list(frame.groupby(side)["wire_bytes"].sum()) == pytest.approx([wire] * 5, rel=1e-12)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(4))
def test_other_numbers_for_the_ranks_give_the_same_cells_under_these_numbers(seed):
    names = random.Random(seed).sample(range(5), 5)
    plain, renamed = (cells(matrix(run)) for run in (a_mixture(seed), a_mixture(seed, names)))
    assert renamed == pytest.approx({(names[i], names[j]): size for (i, j), size in plain.items()})


def test_owners_and_their_imbalance():
    run = SyntheticRun(world_size=3)
    for peer, size in ((0, 100), (0, 50), (2, 150)):
        run.add_collective("reduce", payload_bytes=size, peer=peer, purpose="gradient_reduce")
    run.add_collective("broadcast", payload_bytes=1000, peer=1)
    frame = api.owners(run.open())
    assert frame.drop(columns=["padding_bytes", "between_hosts_bytes"]).to_dict("records") == [
        {"rank": 0, "collectives": 2, "payload_bytes": 150, "received_bytes": 300},
        {"rank": 1, "collectives": 0, "payload_bytes": 0, "received_bytes": 0},
        {"rank": 2, "collectives": 1, "payload_bytes": 150, "received_bytes": 300},
    ]
    assert frame.attrs["imbalance"] == 1.5  # The largest value is 300 and the mean is 200.


def test_a_thousand_ranks_are_answered_in_blocks():
    run = SyntheticRun(world_size=2)
    row = {"group_ranks": format_ranks(tuple(range(1024))), "group_size": 1024}
    run.add_collective("all_to_all", payload_bytes=1024 * 1024, **row)
    frame = matrix(run, most_ranks=64)
    assert len(frame) == 64 * 64
    assert frame["wire_bytes"].sum() == 1023 * 1024 * 1024
    assert frame.attrs["ranks_per_cell"] == 16
