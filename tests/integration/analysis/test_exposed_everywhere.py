"""The exposed time of a step is one number in the report, JSON, CSV, API, Overview and Compare.

The runs are those of real programs. These tests compute the expected time with plain loops over the records
of the run.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
import time

import pandas as pd
import pytest
from plotly.utils import PlotlyJSONEncoder

from commprof.analysis import api
from commprof.cli import execute
from commprof_dash.app import draw_page, find_page
from commprof_dash.data import Runs
from support.recording import record

pytestmark = pytest.mark.ranks

SHOWN = ("exposed_ns", "exposed_low_ns", "exposed_high_ns", "step_ns", "exposed_share")


def late(rank: int) -> None:
    time.sleep(0.01 if rank else 0)


def ddp(rank, world):
    import torch

    import commprof

    torch.set_num_threads(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    for step in range(4):
        commprof.step(step)
        late(rank)
        model(torch.ones(2, 64)).sum().backward()


def waits(rank, world):
    """Issue collectives with several purposes, synchronous and asynchronous, two at a time."""
    import torch
    import torch.distributed as dist

    import commprof
    from commprof import hooks

    for step in range(5):
        commprof.step(step)
        late(rank)
        with hooks.tag("gradient_reduce"):
            handles = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(2)]
        with hooks.tag("metric"):
            dist.all_reduce(torch.ones(1))
        for handle in handles:
            handle.wait()


def zero_2(rank, world):
    import torch

    import zero_runtime

    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(4):
        late(rank)
        engine.backward(engine(torch.ones(2, 64)).sum())
        engine.step()


def messages(rank, world):
    """Exchange messages between two pipeline stages in the batches that torch forms."""
    import torch
    import torch.distributed as dist

    import commprof
    from commprof import hooks

    other = 1 - rank
    for step in range(4):
        commprof.step(step)
        for _ in range(3):
            late(rank)
            with hooks.tag("activation"):
                calls = [
                    dist.P2POp(dist.isend, torch.ones(100), other),
                    dist.P2POp(dist.irecv, torch.ones(100), other),
                ]
                for work in dist.batch_isend_irecv(calls):
                    work.wait()


PROGRAMS = (ddp, waits, zero_2, messages)


def union(intervals) -> int:
    length, reached = 0, -(1 << 62)
    for begin, end in sorted(intervals):
        length += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return length


def by_plain_loops(run) -> tuple[float, float, float]:
    """Return medians over the warm steps: the lower and upper bound of the exposed time, and the duration."""
    steps = [row for row in run.table("steps").to_pylist() if row["step"] >= 0 and row["end_ns"] is not None]
    records, stalls = run.table("collectives").to_pylist(), run.table("stalls").to_pylist()
    ranks = sorted({row["rank"] for row in records})
    durations, lows, highs = {}, {}, {}
    for row in steps:
        rank, step, begin, end = row["rank"], row["step"], row["begin_ns"], row["end_ns"]
        held = [
            (max(begin, each["wait_end_ns"] - each["exposed_ns"]), min(end, each["wait_end_ns"]))
            for each in records
            if each["rank"] == rank and each["exposed_ns"] and each["wait_end_ns"] > begin
            and each["wait_end_ns"] - each["exposed_ns"] < end
        ]  # fmt: skip
        known = union(held)
        mine = [
            each
            for each in stalls
            if each["rank"] == rank and begin <= each["begin_ns"] and each["end_ns"] <= end
        ]
        durations[step] = max(durations.get(step, 0), end - begin)
        lows[step] = lows.get(step, 0) + (known + sum(each["exposed_low_ns"] for each in mine)) / len(ranks)
        highs[step] = highs.get(step, 0) + (known + sum(each["exposed_high_ns"] for each in mine)) / len(
            ranks
        )
    warm = sorted(durations)[1:]
    return tuple(statistics.median(found[step] for step in warm) for found in (lows, highs, durations))


def page(directory, path: str) -> str:
    pathname, _, search = path.partition("?")
    _, drawing = draw_page(find_page(pathname), Runs(directory), pathname, f"?{search}", "light")
    return json.dumps(list(drawing.body), cls=PlotlyJSONEncoder)


def printed(capsys, *arguments: str) -> str:
    assert execute([str(each) for each in arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.sampled
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
def test_the_exposed_time_of_a_step_is_one_number(tmp_path, capsys, monkeypatch, program):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    path = tmp_path / "runs" / "one"
    run, _ = record(path, 2, program)
    low, high, duration = by_plain_loops(run)

    frame = api.exposure_per_step(path)
    whole = {name: None if pd.isna(value) else value for name, value in frame.iloc[-1].items()}
    assert whole["purpose"] == "all" and whole["bounded"] == whole["unwaited"]
    assert whole["exposed_low_ns"] == pytest.approx(low, abs=3) and low > 0
    assert whole["exposed_high_ns"] == pytest.approx(high, abs=3)
    assert whole["step_ns"] == pytest.approx(duration, abs=2) == api.overview(path)["step_time_ns"]
    if program is not ddp:
        assert whole["exposed_ns"] == whole["exposed_low_ns"] == whole["exposed_high_ns"]
        assert whole["exposed_share"] == pytest.approx(low / duration, rel=1e-4)
    # no purpose exceeds the union of all purposes
    assert (frame["exposed_high_ns"] <= whole["exposed_high_ns"]).all()

    told = json.loads(printed(capsys, "report", path, "--json"))["exposure_per_step"][-1]
    assert all(told[name] == whole[name] for name in SHOWN)
    printed(capsys, "export", path, "--format", "csv", "--out", tmp_path / "csv")
    with (tmp_path / "csv" / "exposure_per_step.csv").open() as file:
        (row,) = [each for each in csv.DictReader(file) if each["purpose"] == "all"]
    assert all((float(row[name]) if row[name] else None) == told[name] for name in SHOWN)

    resources = api.compare_both([path]).resources.iloc[0]
    assert all(told[name] == (None if pd.isna(resources[name]) else resources[name]) for name in SHOWN)

    (compared,) = json.loads(printed(capsys, "compare", path, "--json"))
    assert all(compared[name] == told[name] for name in SHOWN)

    text, share = api.exposed_time(told), api.exposed_share(told)
    before, _, block = printed(capsys, "report", path).partition("Exposed per training step")
    # No other number is labeled as exposed time.
    assert "exposed " not in " ".join(before.split()).replace("not exposed time", "")
    assert (
        f"{text} " in block
        and f" {share} " in block
        and "all: the union of the purposes, not their sum" in " ".join(block.split())
    )
    assert text.partition(" to ")[0] in printed(capsys, "compare", path)
    assert f"{text}, {share} of the step" in page(path.parent, "/overview?run=one")
    assert f"{text}, {share}" in page(path.parent, "/compare?run=one")


def test_a_recv_shows_the_calls_that_it_is_about(tmp_path, capsys):
    path = tmp_path / "one"
    run, _ = record(path, 2, messages)
    made = sum(row["op"] == "recv" for row in run.table("collectives").to_pylist()) / 4
    lines = [line.split() for line in printed(capsys, "report", path).splitlines()]
    (row,) = [line for line in lines if line[:1] == ["recv"]]
    assert made == 6 and row[1:7] == ["0-1", "6", "at", "send", "at", "send"]
