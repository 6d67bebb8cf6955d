"""Test that one-off traffic is the same in the API, the report, its JSON, the export and the page Overview.

The expected values are counted by hand.
"""

from __future__ import annotations

import csv
import json
import random
from collections import Counter

import pytest

from commprof.analysis import api
from commprof.cli import execute
from commprof.export.csv import check_csv, export_csv
from support.runs import SyntheticRun

STEPS = 6
CHECKPOINT = 5000


@pytest.fixture
def path(tmp_path):
    """Return the path of a run with three all_reduces per step and one more in the first step.

    Step 4 has a gather of a checkpoint to rank 1.
    """
    run = SyntheticRun(world_size=4)
    for step in range(STEPS):
        run.add_step(step, duration_ns=1_000_000)
        for _ in range(4 if step == 0 else 3):
            run.add_collective("all_reduce", payload_bytes=800, step=step, purpose="gradient_reduce")
        if step == 4:
            run.add_collective("all_gather", payload_bytes=CHECKPOINT, step=step, group=(0, 1), pg="pair")
            run.add_collective("barrier", step=step, purpose="barrier")
    run.add_collective("all_gather", payload_bytes=77, step=-1)
    return run.write(tmp_path / "run")


# The columns are attempt, step, purpose, op, ranks, collectives, payload and wire. The wire bytes are 2 x 3/4
# x 800, and 1/2 x 5000 for two ranks.
WANTED = [
    (0, 0, "gradient_reduce", "all_reduce", "0-3", 1, 800, 1200.0),
    (0, 4, "barrier", "barrier", "0-3", 1, 0, 0.0),
    (0, 4, None, "all_gather", "0-1", 1, CHECKPOINT, 2500.0),
]
NAMES = ("attempt", "step", "purpose", "op", "group_ranks", "collectives", "payload_bytes", "wire_bytes")


def rows_of(frame):
    return [
        tuple(None if value is None or value != value else value for value in row)
        for row in frame[list(NAMES)].itertuples(index=False)
    ]


def test_the_answer_lists_what_single_steps_sent_beyond_each_step(path):
    frame = api.one_offs(path)
    assert list(frame.columns) == list(api.describe_columns("one_offs"))
    assert rows_of(frame) == WANTED
    assert list(frame["executed_wire_bytes"]) == [1200.0, 0.0, 2500.0]  # gloo executes them as issued.


@pytest.mark.long
def test_report_json_and_export_have_the_same_rows(path, tmp_path, capsys):
    assert execute(["report", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["one_offs"]
    assert [tuple(row[name] for name in NAMES) for row in told] == WANTED
    export_csv(path, tmp_path / "csv")
    with (tmp_path / "csv" / "one_offs.csv").open() as file:
        exported = list(csv.DictReader(file))
    assert [
        (int(row["step"]), row["op"], int(row["collectives"]), float(row["wire_bytes"])) for row in exported
    ] == [(row[1], row[3], row[5], row[7]) for row in WANTED]
    assert check_csv(tmp_path / "csv", [api.open_run(path)]) == []


def test_a_run_whose_steps_are_alike_has_none(tmp_path):
    run = SyntheticRun(world_size=2)
    for step in range(3):
        run.add_step(step, duration_ns=1_000_000)
        run.add_collective("all_reduce", payload_bytes=800, step=step)
    assert api.one_offs(run.open()).empty


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(6))
def test_one_offs_and_the_values_of_a_step_are_all_that_was_sent(seed):
    """All traffic is the number of complete steps times the value per step, plus the one-offs.

    This equation applies if no traffic varies or pauses.
    """
    chance = random.Random(seed)
    run = SyntheticRun(world_size=2)
    steps = chance.randrange(5, 12)
    extra = {step: chance.randrange(0, 3) for step in chance.sample(range(steps), 2)}
    sent: Counter[str] = Counter()
    for step in range(steps):
        run.add_step(step, duration_ns=1_000_000)
        for number in range(4 + extra.get(step, 0)):
            run.add_collective("all_reduce", payload_bytes=100, step=step)
            sent["all_reduce"] += 100
            if number == 4:
                run.add_collective("broadcast", payload_bytes=10, peer=0, step=step)
                sent["broadcast"] += 10
    opened = run.open()
    once = api.one_offs(opened).groupby("op")["payload_bytes"].sum()
    per_step = api.traffic_by_setting([opened]).set_index("op")["payload_bytes_per_step"]
    for op, total in sent.items():
        assert once.get(op, 0) + steps * per_step.get(op, 0) == pytest.approx(total, rel=1e-12)


def test_bytes_as_issued_stand_only_where_they_differ(tmp_path, capsys):
    """gloo executes an all_reduce as issued. Its reduce of 2 MiB on 2 ranks sends (4-1)/4 instead of 1/2."""

    def printed(name, op):
        run = SyntheticRun(world_size=2)
        for step in range(STEPS):
            run.add_step(step, duration_ns=1_000_000)
        for step, after in ((2, None), (-1, STEPS - 1)):
            run.add_collective(
                op, payload_bytes=2**21, step=step, **({} if after is None else {"after_step": after})
            )
        run.add_collective("all_reduce", payload_bytes=800, step=3, purpose="usual")
        assert execute(["report", str(run.write(tmp_path / name))]) == 0
        return capsys.readouterr().out.partition("payload: S of")[0]

    same, other = printed("same", "all_reduce"), printed("other", "reduce")
    assert "Outside of the steps, in total" in same and "Not in every step, in total" in same
    assert "as issued" not in same
    assert other.count("as issued") == 2
    lines = [line.split() for line in other.splitlines()]
    (usual,) = [line for line in lines if line[:1] == ["usual,"]]
    assert usual[3:] == ["1", "800", "B", "800", "B", "step", "3"]
    assert " ".join(other.split()).count("1.50 MiB 1.00 MiB") == 2


def test_the_labels_say_whose_wire_bytes_they_are(tmp_path, capsys):
    """An all_reduce of 800 B on ranks 0 and 1 of 4 sends 800 B per rank of the group.

    Per rank of the job these are 400 B.
    """
    run = SyntheticRun(world_size=4)
    for step in range(STEPS):
        run.add_step(step, duration_ns=1_000_000)
        run.add_collective("all_reduce", payload_bytes=800, step=step, group=(0, 1), pg="pair")
    path = str(run.write(tmp_path / "run"))
    for words, label, size in (
        (["report"], "wire per member", "800 B"),
        (["verify"], "wire per member", "800 B"),
        (["compare"], "wire per rank", "400 B"),
    ):
        execute([*words, path])
        table, _, legend = capsys.readouterr().out.partition("payload: S of")
        assert label in table and size in table
        assert f"{label}: modelled" in " ".join(legend.split())
