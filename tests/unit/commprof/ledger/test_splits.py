"""Test how ``verify`` and ``dump`` compare the splits of all_to_alls between ranks. The runs are synthetic."""

import random

import pytest

from commprof.analysis import api
from commprof.cli import execute
from commprof.ledger.verification import verify
from commprof.sampling.job_dump import take_dump
from commprof.schema import format_splits
from support.runs import SyntheticRun


def exchange(run, sizes, *, expected=None, unknown=(), ranks=None, group=None, **columns):
    """Add one all_to_all in which the i-th rank of the group sends ``sizes[i][j]`` bytes to the j-th.

    The j-th rank expects ``expected[i][j]`` bytes. ``unknown`` gives the positions of ranks that passed their
    splits as tensors.
    """
    group = tuple(range(len(sizes))) if group is None else group
    expected = sizes if expected is None else expected
    for position, rank in enumerate(group):
        if ranks is not None and rank not in ranks:
            continue
        given, got = sizes[position], [row[position] for row in expected]
        is_unknown = position in unknown
        run.add_collective(
            "all_to_all",
            group=group,
            ranks=(rank,),
            payload_bytes=sum(given),
            **{
                "input_bytes": sum(given),
                "output_bytes": sum(got),
                "input_splits": "?" if is_unknown else format_splits(given),
                "output_splits": "?" if is_unknown else format_splits(got),
                "call_site": "moe.py:7 dispatch",
                "module": f"experts.{rank}",
                **columns,
            },
        )


def differences(run, path):
    """Return the sentences that ``verify`` finds, and assert that ``dump`` finds the same differences."""
    found = verify(run.open()).differences
    dumped = take_dump(run.write(path)).situation.differences
    assert {each.pg: each for each in found} == {each.pg: each for each in dumped}
    assert len(found) == len(dumped)
    return [each.sentence for each in found]


EVEN = [[8, 8], [8, 8]]
UNEVEN = [[8, 16], [4, 12]]


def test_the_pair_is_named_with_both_sizes_module_and_call_site(tmp_path):
    run = SyntheticRun(2)
    exchange(run, EVEN, step=0)
    exchange(run, UNEVEN, step=1)
    exchange(run, UNEVEN, expected=[[8, 20], [4, 12]], step=2)
    exchange(run, UNEVEN, expected=[[8, 24], [4, 12]], step=3)
    verdict = verify(run.open())
    assert (str(verdict.state), verdict.exit_code) == ("mismatch", 1)
    assert differences(run, tmp_path / "run") == [
        "in all_to_all #2 of group 0 (0-1) in step 2, rank 0 sends 16 bytes to rank 1, which expects 20: rank 0 issued "
        "all_to_all #2 (24 bytes, float32) for module experts.0 at moe.py:7 dispatch; rank 1 issued all_to_all #2 "
        "(16 bytes, float32) for module experts.1 at moe.py:7 dispatch"
    ]
    (row,) = verdict.as_dict()["differences"]
    assert (row["pg"], row["pg_seq"], row["step"]) == ("0", 2, 2)
    calls = [each["call"] for each in row["ranks"]]
    assert [(call["input_splits"], call["output_splits"]) for call in calls] == [
        ("8,16", "8,4"),
        ("4,12", "20,12"),
    ]


def test_equal_splits_follow_from_the_sizes(tmp_path):
    run = SyntheticRun(2)
    exchange(run, EVEN, expected=[[8, 8], [12, 12]], step=0)  # Ranks 0 and 1 both have 8,12.
    assert differences(run, tmp_path / "run")[0].startswith(
        "in all_to_all #0 of group 0 (0-1) in step 0, rank 1 sends 8 bytes to rank 0, which expects 12: "
    )
    run = SyntheticRun(2)
    # No rank has splits, and each rank sends parts of a different size.
    for rank, size in enumerate((16, 32)):
        run.add_collective(
            "all_to_all", payload_bytes=size, ranks=(rank,), input_bytes=size, output_bytes=size
        )
    assert differences(run, tmp_path / "sizes")[0].startswith(
        "in all_to_all #0 of group 0 (0-1) in step 0, rank 0 sends 8 bytes to rank 1, which expects 16: "
    )


def test_what_a_rank_gives_to_itself_is_compared(tmp_path):
    run = SyntheticRun(2)
    exchange(run, UNEVEN, expected=[[8, 16], [4, 16]])
    assert differences(run, tmp_path / "run")[0].startswith(
        "in all_to_all #0 of group 0 (0-1) in step 0, rank 1 gives 12 bytes to itself and expects 16: rank 1 issued "
    )


WRONG = {"expected": [[8, 20], [4, 12]]}


@pytest.mark.parametrize(
    "columns",
    [
        {"unknown": (0,)},
        {"ranks": (0,)},
        {"captured": True},
        {"layer": "imported"},
    ],
    ids=lambda columns: next(iter(columns)),
)
def test_what_is_not_known_is_not_compared(columns, tmp_path):
    run = SyntheticRun(2, state="killed")
    exchange(run, UNEVEN)
    exchange(run, UNEVEN, **WRONG, **columns)
    if "captured" in columns:
        # ``dump`` keeps captured calls in the order of their group.
        assert verify(run.open()).differences == ()
    else:
        assert differences(run, tmp_path / "run") == []


def test_a_call_that_raised_is_left_out(tmp_path):
    run = SyntheticRun(2)
    exchange(run, UNEVEN)
    exchange(run, UNEVEN, **WRONG, status="raised")
    exchange(run, UNEVEN)
    assert differences(run, tmp_path / "run") == []


def test_a_trace_without_splits_is_not_compared(tmp_path, monkeypatch):
    run = SyntheticRun(2)
    for rank, size in enumerate((16, 32)):
        run.add_collective(
            "all_to_all", payload_bytes=size, ranks=(rank,), input_bytes=size, output_bytes=size
        )
    manifest = run.manifest()
    monkeypatch.setattr(run, "manifest", lambda: {**manifest, "schema_version": 1})
    assert differences(run, tmp_path / "run") == []


def test_behind_a_skipped_collective_no_splits_are_named(tmp_path):
    run = SyntheticRun(2)
    exchange(run, UNEVEN, step=0)
    exchange(run, EVEN, step=1, ranks=(0,))
    run.add_collective("all_reduce", payload_bytes=8, step=1, ranks=(1,))
    exchange(run, UNEVEN, step=2)
    exchange(run, [[1, 2], [3, 4]], step=3, ranks=(0,))
    exchange(run, [[5, 2], [3, 4]], step=3, ranks=(1,))
    (said,) = differences(run, tmp_path / "run")
    assert said.startswith("the ranks of group 0 (0-1) did not issue the same in step 1: ")


def test_a_name_that_is_given_again_is_another_group():
    run = SyntheticRun(2)
    for number, sizes in ((0, UNEVEN), (1, EVEN), (0, [[1, 2], [3, 4]]), (1, UNEVEN)):
        exchange(run, sizes, pg="7", pg_seq=number)
    assert verify(run.open()).differences == ()
    exchange(run, UNEVEN, **WRONG, pg="7", pg_seq=2)
    (found,) = verify(run.open()).differences
    assert found.call.number == 2


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("seed", range(40))
def test_a_planted_difference_is_found_exactly_and_nothing_else(seed, tmp_path):
    rng = random.Random(seed)
    world = rng.randint(2, 5)
    is_killed, is_planted = seed % 4 == 0, seed % 3 > 0
    run = SyntheticRun(world, state="killed" if is_killed else "complete")
    groups = {str(number): None for number in range(rng.randint(1, 3))}
    for pg in groups:
        groups[pg] = tuple(sorted(rng.sample(range(world), rng.randint(2, world))))
    planted = {}
    for step in range(rng.randint(5, 30)):
        pg, group = rng.choice(list(groups.items()))
        if rng.random() < 0.2:
            run.add_collective("all_reduce", payload_bytes=8, group=group, pg=pg, step=step)
            continue
        n = len(group)
        sizes = [[4 * rng.randint(0, 3) for _ in group] for _ in group]
        expected = [row[:] for row in sizes]
        if is_planted and rng.random() < 0.2:
            i, j = rng.randrange(n), rng.randrange(n)
            expected[i][j] += 4
            planted.setdefault(pg, (step, group[i], group[j], sizes[i][j]))
        exchange(run, sizes, expected=expected, group=group, pg=pg, step=step)
    if is_killed:
        exchange(run, [[1] * world] * world, pg="8", step=99, ranks=(0,))
    found = {}
    for each in verify(run.open()).differences:
        ranks = [rank for conduct in each.conducts for rank in conduct.ranks]
        found[each.pg] = each
        step, sender, receiver, size = planted[each.pg]
        assert each.call.step == step
        assert ranks == ([sender] if sender == receiver else [sender, receiver])
        assert f"{size:,} bytes" in each.sentence and each.sentence.count(f" expects {size + 4:,}:") == 1
    assert found.keys() == planted.keys()
    assert {said.partition(" of group ")[2][0] for said in differences(run, tmp_path / "run")} == set(planted)


def test_many_exchanges_are_compared_in_parts_of_all_sizes():
    """Each sum is over several collectives. The first difference is after several such sums."""
    run = SyntheticRun(3)
    for step in range(1200):
        sizes = [[4 * (1 + (step + i + j) % 3) for j in range(3)] for i in range(3)]
        expected = [row[:] for row in sizes]
        if step >= 1100:
            expected[2][0] += 4
        exchange(run, sizes, expected=expected, step=step)
    (found,) = verify(run.open()).differences
    assert (found.call.number, [each.ranks for each in found.conducts]) == (1100, [(2,), (0,)])


# Rank 0 sends nearly all its bytes to rank 2. 1008 bytes go to other ranks, and the diagonal parts stay.
SKEWED = [[4, 0, 1000], [8, 40, 0], [0, 0, 400]]
MODEL = 484 * 2  # The model assumes equal parts: each of three ranks sends two thirds of the mean payload.


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("unknown", "ranks", "sent"),
    [((), None, 1008), ((1,), None, MODEL), ((0, 1, 2), None, MODEL), ((), (1,), 48 * 2)],
)
def test_verify_and_check_have_the_bytes_of_the_splits(tmp_path, capsys, unknown, ranks, sent):
    run = SyntheticRun(3, config={"zero_optimization": {"stage": 0}})
    for step in range(2):
        run.add_step(step)
        exchange(run, SKEWED, unknown=unknown, ranks=ranks, step=step)
    path = run.write(tmp_path / "run")
    (row,) = (row for row in verify(run.open()).rows if row.issued_op == "all_to_all")
    assert row.issued_wire_bytes == row.executed_wire_bytes == pytest.approx(2 * sent / 3)
    (traffic,) = api.traffic(path, ["op"]).itertuples()
    assert traffic.wire_bytes == pytest.approx(2 * sent / 3)
    most = -(-sent // 3)
    for limit, code in ((most, 0), (most - 1, 1)):
        (tmp_path / "budget.toml").write_text(f"[step]\nmax_wire_bytes = {limit}")
        assert execute(["check", str(path), "--budget", str(tmp_path / "budget.toml")]) == code, limit
