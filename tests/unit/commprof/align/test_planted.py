"""Score alignment against planted logs.

Alignment makes no wrong pair, and it finds every pair that can be determined.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commprof.align.matching import MatchReport, align
from commprof.nccl.parser import parse_logs
from commprof.trace.tables import table_from_rows
from support import planted_nccl
from support.runs import SyntheticRun
from support.sample import examples

WORLD = (0, 1, 2, 3)
GROUPS = {"0": WORLD, "even": (0, 2), "odd": (1, 3)}
ROOTED = ("broadcast", "reduce", "gather", "scatter")
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", *ROOTED)
VERSIONS = [(2, 4, 7), (2, 8, 3), (2, 18, 1), (2, 21, 5), (2, 27, 3), (2, 30, 7)]


class Score(NamedTuple):
    """The precision and the recall of an alignment.

    Attributes:
        precision: The fraction of the pairs made that are correct.
        recall: The fraction of the pairs that can be determined that were made.
    """

    precision: float
    recall: float


def watermarked_run(seed: int, calls: int) -> SyntheticRun:
    """Return a run in which the size of every call contains a unique prime.

    Every lost or added line can therefore be identified.
    """
    chance = random.Random(seed)
    run = SyntheticRun(world_size=4, backend="nccl")
    for prime in planted_nccl.primes(calls):
        pg, group = chance.choice(sorted(GROUPS.items()))
        op = chance.choice(OPS)
        columns = {"peer": chance.choice(group)} if op in ROOTED else {}
        size = planted_nccl.watermark(prime, len(group))
        run.add_collective(op, payload_bytes=size, group=group, pg=pg, **columns)
    return run


def repeating_run(steps: int, seed: int = 0) -> SyntheticRun:
    """Return a run that repeats the same calls in every step, as a training does.

    Some calls of a step are equal to each other.
    """
    chance = random.Random(seed)
    sizes = [chance.choice((64, 128, 4096)) for _ in range(6)]
    run = SyntheticRun(world_size=2, backend="nccl")
    for step in range(steps):
        for size in sizes:
            run.add_collective("all_reduce", payload_bytes=size, step=step)
        run.add_collective("all_gather", payload_bytes=512, step=step)
        run.add_collective("barrier", step=step)
    return run


def planted(directory: Path, run: SyntheticRun, **planting) -> tuple[planted_nccl.Planted, MatchReport]:
    directory.mkdir(exist_ok=True)
    truth = planted_nccl.plant(run.table("collectives").to_pylist(), **planting)
    for name, lines in truth.files.items():
        (directory / name).write_text("\n".join(lines) + "\n")
    parsed = parse_logs(directory)
    report = align(run.open(), parsed.ops)
    each_once(run, truth, report, parsed.ops)
    return truth, report


def part_of(row) -> tuple[int, ...]:
    return (row["rank"], row["attempt"], row.get("record_pid", row.get("pid")), row["seq"], row["part"])


def each_once(run, truth, report, ops) -> None:
    """Assert that every part of a record and every line has exactly one row.

    A COLL line and its CALL line count as one line.
    """
    rows = report.matches.to_pylist()
    assert report.matches.num_rows == sum(report.counts.values())
    parts = Counter(part_of(row) for row in rows if row["seq"] is not None and row["part"] is not None)
    assert set(parts.values()) <= {1}
    for row in rows:
        assert (row["seq"] is None) == (row["rank"] is None)
        assert row["state"] == "matched" or (row["seq"] is None) != (row["line"] is None)
        assert row["state"] == "matched" or row["reason"]
    whole = {(record["rank"], record["seq"]) for record in run.table("collectives").to_pylist()}
    assert {(row["rank"], row["seq"]) for row in rows if row["seq"] is not None} == whole
    lines = Counter((row["file"], row["line"]) for row in rows if row["line"] is not None)
    assert set(lines.values()) <= {1}
    printed = ops.to_pylist()
    twins = {(row["file"], row["twin_line"]) for row in printed if row["kind"] == "coll"}
    calls = {(row["file"], row["line"]) for row in printed if (row["file"], row["line"]) not in twins}
    if any(row["twin_line"] for row in printed) or {row["kind"] for row in printed} != {"coll", "call"}:
        assert set(lines) == calls


def score(
    truth: planted_nccl.Planted, report: MatchReport, unknowable: set[tuple[int, ...]] = frozenset()
) -> Score:
    said = {place: None if whose is None else key(whose) for place, whose in truth.said.items()}
    made = [row for row in report.matches.to_pylist() if row["state"] == "matched"]
    right = sum(said.get((Path(row["file"]).name, row["line"])) == part_of(row) for row in made)
    knowable = {whose for whose in said.values() if whose is not None} - unknowable
    found = {part_of(row) for row in made}
    recall = len(knowable & found) / len(knowable) if knowable else 1.0
    return Score(right / len(made) if made else 1.0, recall)


def key(whose) -> tuple[int, ...]:
    return tuple(whose[name] for name in ("rank", "attempt", "pid", "seq", "part"))


@settings(
    max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 10_000),
    calls=st.integers(1, 60),
    drop=st.integers(0, 8),
    tear=st.integers(0, 4),
    duplicate=st.integers(0, 4),
    extra=st.integers(0, 6),
    renew=st.sampled_from([0, 0, 5, 11]),
    frozen=st.booleans(),
    one_stream=st.booleans(),
    version=st.sampled_from(VERSIONS),
)
def test_watermarks_are_found_without_error(
    tmp_path_factory, seed, calls, drop, tear, duplicate, extra, renew, frozen, one_stream, version
):
    truth, report = planted(
        tmp_path_factory.mktemp("logs"),
        watermarked_run(seed, calls),
        drop=drop,
        tear=tear,
        duplicate=duplicate,
        extra=extra,
        # Without commIds, a new communicator at a reused address cannot be distinguished from the old one.
        renew=renew,
        frozen=frozen,
        one_stream=one_stream,
        version=version,
        seed=seed,
    )
    doubled = {key(whose) for whose in truth.duplicated}
    found = score(truth, report, unknowable=doubled)
    assert found.precision == 1.0
    if calls >= 20:  # With fewer calls, a communicator may have too few lines to be identified.
        assert found.recall >= 0.99
    assert report.torn == len(truth.torn)
    rows = report.matches.to_pylist()
    missing = [row for row in rows if row["state"] == "missing"]
    if not any("AlltoAll:" in line for lines in truth.files.values() for line in lines):
        # No remaining line shows whether an all_to_all is one line or many.
        missing = [
            row for row in missing if row["op"] != "all_to_all" or row["part"] == 0 or version < (2, 28)
        ]
    if calls >= 20:
        assert {part_of(row) for row in missing} == {key(whose) for whose in truth.lost}
        assert report.extra == len(truth.extra)


@pytest.mark.parametrize("left", ["torn on each rank", "whole on another rank"])
def test_an_all_to_all_that_lost_its_line_is_still_one_line(tmp_path, left):
    run = SyntheticRun(world_size=2, backend="nccl")
    for size in (64, 128):
        run.add_collective("all_reduce", payload_bytes=size)
    run.add_collective("all_to_all", payload_bytes=256)
    directory = tmp_path / "logs"
    directory.mkdir()
    truth = planted_nccl.plant(run.table("collectives").to_pylist(), version=(2, 30, 7))
    for rank, (name, lines) in enumerate(sorted(truth.files.items())):
        (place,) = [number for number, line in enumerate(lines) if "AlltoAll" in line]
        if left == "torn on each rank":
            lines[place] = lines[place][: lines[place].index(" datatype")]
        elif rank == 0:
            del lines[place]
        (directory / name).write_text("\n".join(lines) + "\n")
    report = align(run.open(), parse_logs(directory).ops)
    missing = [
        (row["rank"], row["op"], row["parts"])
        for row in report.matches.to_pylist()
        if row["state"] == "missing"
    ]
    # One row per rank is expected, instead of four rows with a Send and a Recv for both ranks.
    ranks = (0, 1) if left == "torn on each rank" else (0,)
    assert missing == [(rank, "all_to_all", 1) for rank in ranks]


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("seed", range(12))
def test_steps_that_repeat_are_never_paired_wrongly(tmp_path, seed):
    chance = random.Random(seed)
    truth, report = planted(
        tmp_path,
        repeating_run(60, seed),
        drop=chance.randrange(12),
        tear=chance.randrange(3),
        extra=chance.randrange(4),
        duplicate=chance.randrange(4),
        frozen=bool(seed % 2),
        seed=seed,
    )
    assert score(truth, report).precision == 1.0
    assert report.matched > 0.8 * truth.lines


@pytest.mark.parametrize("seed", range(8))
def test_a_call_line_stands_for_its_lost_coll_line(tmp_path, seed):
    run = watermarked_run(seed, 60)
    truth, report = planted(tmp_path, run, call=True, spoil_twins=True, drop=30, seed=seed)
    found = score(truth, report)
    assert found == Score(1.0, 1.0)
    missing = {part_of(row) for row in report.matches.to_pylist() if row["state"] == "missing"}
    assert missing == {key(whose) for whose in truth.lost}
    assert report.extra == report.ambiguous == 0


def test_of_equal_neighbours_one_of_which_was_lost_none_is_guessed(tmp_path):
    run = SyntheticRun(world_size=1, backend="nccl")
    for size in (400, 64, 64, 64, 800):
        run.add_collective("all_reduce", payload_bytes=size)
    truth = planted_nccl.plant(run.table("collectives").to_pylist())
    (lines,) = truth.files.values()
    lines.remove(next(line for line in lines if " count 16 " in line))
    (tmp_path / "a.log").write_text("\n".join(lines) + "\n")
    report = align(run.open(), parse_logs(tmp_path).ops)
    assert report.counts == {"matched": 2, "missing": 0, "extra": 0, "ambiguous": 5, "torn": 0}
    reasons = {row["reason"] for row in report.matches.to_pylist() if row["state"] == "ambiguous"}
    assert len(reasons) == 1
    assert reasons.pop().startswith("3 expected and 2 printed lines")


def test_equal_neighbours_that_are_all_there_match_in_order(tmp_path):
    truth, report = planted(tmp_path, repeating_run(40))
    assert report.matched == truth.lines
    assert score(truth, report) == Score(1.0, 1.0)


def two_equal_groups(interleaved: bool) -> SyntheticRun:
    run = SyntheticRun(world_size=2, backend="nccl")
    order = ["0", "dp"] * 20 if interleaved else ["0"] * 20 + ["dp"] * 20
    for pg in order:
        run.add_collective("all_reduce", payload_bytes=64, pg=pg)
    return run


@pytest.mark.parametrize("interleaved", [True, False])
def test_two_groups_of_equal_ranks_and_calls_are_told_apart_by_the_order_of_use(tmp_path, interleaved):
    truth, report = planted(tmp_path, two_equal_groups(interleaved))
    assert score(truth, report) == Score(1.0, 1.0)
    assert set(report.comm_matches["confidence"].to_pylist()) == {"likely"}


def test_two_groups_that_nothing_separates_are_ambiguous_altogether(tmp_path):
    truth = planted_nccl.plant(two_equal_groups(interleaved=True).table("collectives").to_pylist())
    for name, lines in truth.files.items():
        first = next(number for number, line in enumerate(lines) if "opCount" in line)
        (tmp_path / name).write_text("\n".join(lines[:first] + lines[first + 1 :]) + "\n")
    report = align(two_equal_groups(interleaved=True).open(), parse_logs(tmp_path).ops)
    assert (report.matched, report.missing, report.extra) == (0, 0, 0)
    assert report.ambiguous == 2 * 40 + 2 * 39
    assert set(report.comm_matches["confidence"].to_pylist()) == {"none"}
    assert all("nothing distinguishes" in reason for reason in report.comm_matches["reason"].to_pylist())


def test_two_communicators_of_one_group_are_not_certain(tmp_path):
    """The match is uncertain if the log has a second communicator of the same ranks with the same operations.

    No record belongs to the second communicator.
    """
    truth = planted_nccl.plant(two_equal_groups(interleaved=True).table("collectives").to_pylist())
    for name, lines in truth.files.items():
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    run = SyntheticRun(world_size=2, backend="nccl")
    for _ in range(20):
        run.add_collective("all_reduce", payload_bytes=64)
    report = align(run.open(), parse_logs(tmp_path).ops)
    assert report.comm_matches["confidence"].to_pylist() == ["likely"] * 4


@pytest.mark.parametrize("version", VERSIONS)
def test_the_communicators_of_one_group_on_its_ranks_are_certain(tmp_path, version):
    """NCCL before 2.18 does not print which communicators of the ranks belong together."""
    _, report = planted(tmp_path, watermarked_run(3, 60), version=version)
    assert set(report.comm_matches["confidence"].to_pylist()) == {"certain"}


def test_torch_s_own_line_decides_between_equal_groups(tmp_path):
    run = two_equal_groups(interleaved=True)
    truth = planted_nccl.plant(run.table("collectives").to_pylist())
    told = []
    for name, lines in truth.files.items():
        addresses = dict.fromkeys(line.split(" comm ")[1].split()[0] for line in lines if "opCount" in line)
        first = next(number for number, line in enumerate(lines) if "opCount" in line)
        (tmp_path / name).write_text("\n".join(lines[:first] + lines[first + 1 :]) + "\n")
        place = {"host": "node-0", "pid": int(name.split(".")[1]), "comm_epoch": 0, "operations": 20}
        told += [
            {**place, "comm": address, "pg": pg, "file": name, "line": 1}
            for pg, address in zip(("0", "dp"), addresses, strict=True)
        ]
    communicators = table_from_rows("nccl_communicators", told)
    report = align(run.open(), parse_logs(tmp_path).ops, communicators)
    assert set(report.comm_matches["confidence"].to_pylist()) == {"certain"}
    assert sorted(report.comm_matches["pg"].to_pylist()) == ["0", "0", "dp", "dp"]
    # The lost line is one of 20 equal lines of group 0. Nothing else is ambiguous.
    assert report.counts == {"matched": 40, "missing": 0, "extra": 0, "ambiguous": 78, "torn": 0}


def test_messages_outside_of_a_batch_have_a_communicator_of_two(tmp_path):
    run = SyntheticRun(world_size=4, backend="nccl")
    for prime in planted_nccl.primes(10):
        run.add_collective("all_reduce", payload_bytes=16 * prime)
        for source, target in ((0, 1), (0, 2), (2, 3)):
            run.add_collective("send", payload_bytes=4 * prime, ranks=(source,), peer=target)
            run.add_collective("recv", payload_bytes=4 * prime, ranks=(target,), peer=source)
    truth, report = planted(tmp_path, run, drop=3, seed=5)
    assert score(truth, report) == Score(1.0, 1.0)
    pairs = Counter(report.comm_matches["group_ranks"].to_pylist())
    assert pairs == {"0-3": 4, "0,1": 2, "0,2": 2, "2,3": 2}


def test_messages_of_a_batch_are_in_the_communicator_of_their_group(tmp_path):
    run = SyntheticRun(world_size=2, backend="nccl")
    for number, prime in enumerate(planted_nccl.primes(10)):
        for rank in (0, 1):
            columns = {"ranks": (rank,), "peer": 1 - rank, "coalesce_id": number + 1}
            run.add_collective("send", payload_bytes=4 * prime, **columns)
            run.add_collective("recv", payload_bytes=4 * prime, **columns)
    truth, report = planted(tmp_path, run)
    assert score(truth, report) == Score(1.0, 1.0)
    assert report.comm_matches.num_rows == 2


def test_where_records_and_lines_part_is_shown_with_what_stands_around(tmp_path):
    run = SyntheticRun(world_size=1, backend="nccl")
    for prime in planted_nccl.primes(10):
        run.add_collective("all_reduce", payload_bytes=4 * prime)
    truth = planted_nccl.plant(run.table("collectives").to_pylist())
    (lines,) = truth.files.values()
    gone = [line for line in lines if "opCount 5 " in line]
    (tmp_path / "a.log").write_text("\n".join(line for line in lines if line not in gone) + "\n")
    (divergence,) = align(run.open(), parse_logs(tmp_path).ops).divergences
    assert divergence.matched_before == 5
    assert [side.state for side in divergence.sides] == [*["matched"] * 3, "missing", *["matched"] * 4]
    assert divergence.sides[3].line is None
    assert "seq 5 all_reduce" in divergence.sides[3].record


def test_a_log_that_ends_early_matches_up_to_its_end(tmp_path):
    run = SyntheticRun(world_size=1, backend="nccl")
    for step in range(100):
        for size in (64, 128, 64, 256, 512, 128, 1024):
            run.add_collective("all_reduce", payload_bytes=size, step=step)
    truth = planted_nccl.plant(run.table("collectives").to_pylist())
    (lines,) = truth.files.values()
    (tmp_path / "a.log").write_text("\n".join(lines[:300]) + "\n")
    report = align(run.open(), parse_logs(tmp_path).ops)
    assert report.missing == 700 - report.matched
    assert report.extra == report.ambiguous == 0


@pytest.mark.long
def test_long_logs_of_equal_steps_are_aligned_without_error(tmp_path):
    truth, report = planted(tmp_path, repeating_run(1000), seed=1, drop=200, extra=50)
    assert score(truth, report).precision == 1.0
