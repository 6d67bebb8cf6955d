"""The splits of uneven collectives: bytes to and from each rank, as the program gave them, by every layer that records."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from commprof.ledger.backends import parts_of
from support.programs import EXCHANGES_LISTS
from support.recording import record

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]

COLUMNS = 3  # of each row, of 4 bytes


def rows_between(world, turn=0):
    """How many rows each rank sends to each: unlike for all pairs, some of none."""
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
    exchange(rank, world, turn=3, splits=np.array)  # of the same shapes to freeze, with other splits
    group = dist.group.WORLD
    table = rows_between(world)
    sent, got = table[rank], [row[rank] for row in table]
    output, given = torch.empty(sum(got), COLUMNS), torch.ones(sum(sent), COLUMNS)
    group.alltoall_base(output, given, output_split_sizes=got, input_split_sizes=sent).wait()
    group.alltoall_base(output, given, got, input_split_sizes=sent).wait()


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
    compiled = torch.compile(give)  # inductor or not: the operator is the same
    compiled(tensor)
    compiled(tensor)


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


@pytest.mark.parametrize("complete", [False, True])
def test_equal_parts_have_no_splits(tmp_path, complete):
    run, _ = record(tmp_path / "run", 2, equal, complete=complete)
    rows = of_rank(run, 0)
    assert len(rows) == 8 + EXCHANGES_LISTS
    assert {(row["input_splits"], row["output_splits"]) for row in rows} == {(None, None)}


def lists(rank, world):
    sizes = [2 * other + 1 for other in range(world)]
    dist.reduce_scatter(torch.empty(sizes[rank]), [torch.ones(size) for size in sizes])


@pytest.mark.parametrize("complete", [False, True])
def test_an_uneven_list_is_recorded_with_the_bytes_of_each_rank(tmp_path, complete):
    run, _ = record(tmp_path / "run", 3, lists, complete=complete)
    for rank in range(3):
        (row,) = of_rank(run, rank)
        assert (row["input_splits"], row["output_splits"]) == ("4,12,20", None)


def as_tensors(rank, world):
    exchange(rank, world, splits=lambda rows: [torch.tensor(count) for count in rows])


def test_splits_that_are_not_read_are_not_taken_for_equal(tmp_path):
    run, _ = record(tmp_path / "run", 2, as_tensors)
    assert [row["input_splits"] for row in run.table("collectives").to_pylist()] == ["?", "?"]


def test_the_parts_of_an_exchange_follow_from_the_records_of_its_ranks(tmp_path):
    run, _ = record(tmp_path / "run", 4, exchange)
    rows = [of_rank(run, rank)[0] for rank in range(4)]
    names = ("input_bytes", "output_bytes", "input_splits", "output_splits")
    parts = parts_of(*([row[name] for row in rows] for name in names))
    assert parts == tuple(tuple(12 * count for count in row) for row in rows_between(4))


def test_the_host_of_each_rank_is_recorded_with_its_groups(tmp_path):
    import socket

    run, _ = record(tmp_path / "run", 2, exchange)
    assert {row["host"] for row in run.table("groups").to_pylist()} == {socket.gethostname()}
