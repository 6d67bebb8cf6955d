"""The splits of uneven collectives.

Every layer that records must have the bytes to and from each rank, as the program specified them.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from commprof.align.matching import align
from commprof.analysis import api
from commprof.ledger.records.backends import sent_by_rank
from commprof.ledger.verification import verify
from commprof.nccl.parser import parse_logs
from support import planted_nccl
from support.programs import EXCHANGES_LISTS
from support.recording import record

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]

COLUMNS = 3  # the columns of each row, of 4 bytes each


def rows_between(world, turn=0):
    """Return the number of rows that each rank sends to each rank.

    The numbers differ between pairs, and some are 0.
    """
    return [[(3 * a + 5 * b + a * b + turn) % 7 for b in range(world)] for a in range(world)]


def exchange(rank, world, turn=0, splits=list, **options):
    table = rows_between(world, turn)
    sent, got = table[rank], [row[rank] for row in table]
    output, given = torch.empty(sum(got), COLUMNS), torch.ones(sum(sent), COLUMNS)
    return dist.all_to_all_single(output, given, splits(got), splits(sent), **options)


def of_rank(run, rank):
    table = run.table("collectives").to_pylist()
    return sorted((row for row in table if row["rank"] == rank), key=lambda row: row["seq"])


def text(rows):
    return None if len(set(rows)) == 1 else ",".join(str(count * COLUMNS * 4) for count in rows)


def single(rank, world):
    exchange(rank, world)
    exchange(rank, world, async_op=True).wait()
    exchange(rank, world, turn=1, splits=tuple)
    exchange(rank, world, turn=2, splits=np.array)
    exchange(rank, world, turn=3, splits=np.array)  # the shapes are those of the graph, but the splits differ
    group = dist.group.WORLD
    table = rows_between(world)
    sent, got = table[rank], [row[rank] for row in table]
    output, given = torch.empty(sum(got), COLUMNS), torch.ones(sum(sent), COLUMNS)
    group.alltoall_base(output, given, output_split_sizes=got, input_split_sizes=sent).wait()
    group.alltoall_base(output, given, got, input_split_sizes=sent).wait()


@pytest.mark.sampled
@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_single_tensor_is_recorded_with_the_splits_that_the_program_gave(tmp_path, world, complete):
    run, _ = record(tmp_path / "run", world, single, complete=complete)
    for rank in range(world):
        rows = of_rank(run, rank)
        turns = [0, 0, 1, 2, 3, 0, 0]
        assert len(rows) == len(turns)
        for row, turn in zip(rows, turns, strict=True):
            table = rows_between(world, turn)
            assert row["input_splits"] == text(table[rank])
            assert row["output_splits"] == text([given[rank] for given in table])
            assert row["input_bytes"] == 12 * sum(table[rank])


def functional_calls(rank, world):
    table = rows_between(world)
    sent, got = table[rank], [row[rank] for row in table]
    tensor = torch.ones(sum(sent), COLUMNS)

    def give(tensor):
        return functional.all_to_all_single(tensor, got, sent, dist.group.WORLD) + 1

    give(tensor)
    compiled = torch.compile(give)  # the operator is the same with or without inductor
    compiled(tensor)
    compiled(tensor)


@pytest.mark.long
def test_functional_and_compiled_exchanges_are_recorded_with_their_splits(tmp_path):
    run, _ = record(tmp_path / "run", 2, functional_calls)
    for rank in range(2):
        rows = of_rank(run, rank)
        table = rows_between(2)
        assert [row["input_splits"] for row in rows] == [text(table[rank])] * 3
        assert [row["output_splits"] for row in rows] == [text([row[rank] for row in table])] * 3
        assert [row["layer"] for row in rows] == ["functional"] * 3


def equal(rank, world):
    given = torch.ones(4 * world, COLUMNS)
    dist.all_to_all_single(torch.empty_like(given), given)
    dist.all_to_all_single(torch.empty_like(given), given, [4] * world, [4] * world)
    if EXCHANGES_LISTS:
        dist.all_to_all([torch.empty(3)] * world, [torch.ones(3)] * world)
    dist.all_gather([torch.empty(3) for _ in range(world)], torch.ones(3))
    dist.reduce_scatter(torch.empty(3), [torch.ones(3) for _ in range(world)])
    dist.gather(torch.ones(3), [torch.empty(3) for _ in range(world)] if rank == 0 else None)
    dist.scatter(torch.empty(3), [torch.ones(3) for _ in range(world)] if rank == 0 else None)
    dist.all_reduce_coalesced([torch.ones(number + 1) for number in range(world)])
    dist.all_reduce(given)


@pytest.mark.sampled
@pytest.mark.parametrize("complete", [False, True])
def test_equal_parts_have_no_splits(tmp_path, complete):
    run, _ = record(tmp_path / "run", 2, equal, complete=complete)
    rows = of_rank(run, 0)
    assert len(rows) == 8 + EXCHANGES_LISTS
    assert {(row["input_splits"], row["output_splits"]) for row in rows} == {(None, None)}


def lists(rank, world):
    sizes = [2 * other + 1 for other in range(world)]
    dist.reduce_scatter(torch.empty(sizes[rank]), [torch.ones(size) for size in sizes])


@pytest.mark.sampled
@pytest.mark.parametrize("complete", [False, True])
def test_an_uneven_list_is_recorded_with_the_bytes_of_each_rank(tmp_path, complete):
    run, _ = record(tmp_path / "run", 3, lists, complete=complete)
    for rank in range(3):
        (row,) = of_rank(run, rank)
        assert (row["input_splits"], row["output_splits"]) == ("4,12,20", None)


def never_the_same(rank, world, count, summed=False):
    """Run exchanges of random rows that differ in each call, in every form that torch has.

    Returns the bytes that each call sent to each rank.
    """
    import random

    import torch.distributed.nn.functional as differentiable

    import commprof

    chance = random.Random(5)
    group = dist.group.WORLD
    single = getattr(group, "all_to_all_single", None) or group.alltoall_base
    sent_bytes = []
    for number in range(count):
        if number == 2 * count // 3:
            commprof.step(1)
        columns = chance.choice((1, 3)) if number % 5 else 4
        table = [[chance.choice((0, 1, 2, 9, 30)) for _ in range(world)] for _ in range(world)]
        sent, got = table[rank], [row[rank] for row in table]
        given = torch.arange(sum(sent) * columns, dtype=torch.float32).reshape(-1, columns)
        output = torch.empty(sum(got), columns)
        form = number % 6
        if form == 0:
            dist.all_to_all_single(output, given, got, sent)
        elif form == 1:
            dist.all_to_all_single(output, given, got, sent, async_op=True).wait()
        elif form == 2:
            single(output, given, got, sent).wait()
        elif form == 3:
            functional.wait_tensor(functional.all_to_all_single(given, got, sent, group))
        elif form == 4:
            # The backward pass uses the splits of the opposite direction.
            given.requires_grad_()
            differentiable.all_to_all_single(output, given, got, sent).sum().backward()
        else:
            # gloo accepts lists of equal tensors only in versions that support them. With single tensors the
            # exchange is the same.
            dist.all_to_all_single(
                output.reshape(-1), given.reshape(-1), [n * columns for n in got], [n * columns for n in sent]
            )
        sent_bytes.append(
            (
                [4 * columns * n for n in sent],
                [4 * columns * n for n in got],
                list(given.shape),
                list(output.shape),
            )
        )
        if form == 4:
            sent_bytes.append(
                (
                    [4 * columns * n for n in got],
                    [4 * columns * n for n in sent],
                    list(output.shape),
                    list(given.shape),
                )
            )
        if form == 5:
            sent_bytes[-1] = (*sent_bytes[-1][:2], [given.numel()], [output.numel()])
    return sent_bytes


def splits_text(sizes):
    return None if len(set(sizes)) == 1 else ",".join(map(str, sizes))


def shape_text(shape):
    return "x".join(map(str, shape))


@pytest.mark.sampled
@pytest.mark.parametrize("complete", [False, True])
def test_splits_that_never_repeat_are_recorded_as_they_were(tmp_path, complete):
    run, outcomes = record(tmp_path / "run", 3, never_the_same, 120, complete=complete)
    assert run.health.notes == ()
    for rank in range(3):
        rows = [row for row in of_rank(run, rank) if row["op"] == "all_to_all"]
        expected = outcomes[rank]["result"]
        assert len(rows) == len(expected) == 140
        for row, (sent, got, given, output) in zip(rows, expected, strict=True):
            assert row["input_splits"] == splits_text(sent)
            assert row["output_splits"] == splits_text(got)
            assert (row["input_bytes"], row["output_bytes"]) == (sum(sent), sum(got))
            assert (row["payload_bytes"], row["numel"]) == (sum(sent), sum(sent) // 4)
            assert row["sizes"] == f"{shape_text(given)}->{shape_text(output)}"
            assert (row["dtype"], row["device"], row["num_tensors"], row["status"]) == (
                "float32",
                "cpu",
                1,
                "ok",
            )
            assert (row["group_ranks"], row["backend"], row["is_p2p"]) == ("0-2", "gloo", False)
    between = {
        (sender, receiver): sum(call[0][receiver] for call in outcomes[sender]["result"])
        for sender in range(3)
        for receiver in range(3)
        if sender != receiver
    }
    frame = api.matrix(run)
    assert (
        dict(zip(zip(frame["sender"], frame["receiver"], strict=True), frame["wire_bytes"], strict=True))
        == between
    )
    (traffic,) = api.traffic(run, ["op"]).itertuples()
    assert traffic.wire_bytes == pytest.approx(sum(between.values()) / 3)
    rows = [row for row in verify(run).rows if row.issued_op == "all_to_all"]
    assert sum(row.issued_wire_bytes for row in rows) == pytest.approx(sum(between.values()) / 3)
    planted = planted_nccl.plant(run.table("collectives").to_pylist())
    logs = tmp_path / "logs"
    logs.mkdir()
    for name, lines in planted.files.items():
        (logs / name).write_text("\n".join(lines) + "\n")
    assert align(run, parse_logs(logs).ops).counts == {
        "matched": planted.lines, "missing": 0, "extra": 0, "ambiguous": 0, "torn": 0
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "world", "count"),
    [
        ({"aggregate": True}, 3, 300),
        pytest.param({"max_bytes": 1_000_000}, 2, 3600, id="a size that is too small"),
    ],
)
def test_sums_of_splits_that_never_repeat_are_exact(tmp_path, options, world, count):
    run, outcomes = record(tmp_path / "run", world, never_the_same, count, **options)
    for rank in range(world):
        expected = outcomes[rank]["result"]
        kept = [row for row in of_rank(run, rank) if row["op"] == "all_to_all"]
        sums = [
            row
            for row in run.table("aggregates").to_pylist()
            if (row["rank"], row["op"]) == (rank, "all_to_all")
        ]
        assert sum(row["calls"] for row in sums) + len(kept) == len(expected) == count * 7 // 6
        assert sums and bool(kept) == ("max_bytes" in options)
        for name, place in (("input_bytes", 0), ("output_bytes", 1), ("payload_bytes", 0)):
            assert sum(row[name] for row in sums) + sum(row[name] for row in kept) == sum(
                sum(call[place]) for call in expected
            )


def remembered(rank, world):
    from commprof.recorder import session

    never_the_same(rank, world, 6000)
    journal = session.current().journal
    return len(journal._interned), len(journal.once or ()), journal._next_id


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"max_bytes": 100_000_000}], ids=["", "within a size"])
def test_splits_that_never_repeat_stay_out_of_memory(tmp_path, options):
    run, outcomes = record(tmp_path / "run", 2, remembered, **options)
    for outcome in outcomes:
        interned, once, numbers = outcome["result"]
        assert interned < 100 and once <= 256 and numbers > 3000
    assert len(run.table("collectives")) == 2 * 7_000


def as_tensors(rank, world):
    exchange(rank, world, splits=lambda rows: [torch.tensor(count) for count in rows])


def test_splits_that_are_not_read_are_not_taken_for_equal(tmp_path):
    run, _ = record(tmp_path / "run", 2, as_tensors)
    assert [row["input_splits"] for row in run.table("collectives").to_pylist()] == ["?", "?"]


@pytest.mark.long
def test_the_parts_of_an_exchange_follow_from_the_records_of_its_ranks(tmp_path):
    run, _ = record(tmp_path / "run", 4, exchange)
    rows = [of_rank(run, rank)[0] for rank in range(4)]
    names = ("input_bytes", "output_bytes", "input_splits", "output_splits")
    parts = sent_by_rank(*([row[name] for row in rows] for name in names))
    assert parts == tuple(tuple(12 * count for count in row) for row in rows_between(4))


@pytest.mark.long
def test_the_host_of_each_rank_is_recorded_with_its_groups(tmp_path):
    import socket

    run, _ = record(tmp_path / "run", 2, exchange)
    assert {row["host"] for row in run.table("groups").to_pylist()} == {socket.gethostname()}
