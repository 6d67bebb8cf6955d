"""Test the output of ``report``, ``compare``, ``export`` and ``align`` for runs that are written by hand."""

import json

import pytest

from commprof.cli import execute
from support.expert_runs import uneven_experts
from support.nccl_choices import with_choices
from support.runs import SyntheticRun


def synthetic(reduce_scatter: bool, op: str, intended: str | None = None) -> SyntheticRun:
    run = SyntheticRun(
        world_size=2, config={"zero_optimization": {"stage": 2, "reduce_scatter": reduce_scatter}}
    )
    run.add_collective(
        "broadcast", payload_bytes=4096, step=-1, phase="init", purpose="parameter_broadcast", peer=0
    )
    for step in range(3):
        run.add_step(step, duration_ns=(50 if step == 0 else 20) * 1_000_000, loss=2.0 - step)
        run.add_collective(
            op,
            payload_bytes=2048,
            step=step,
            purpose="gradient_reduce",
            intended_op=intended,
            exposed_ns=4_000,
        )
        run.add_collective("all_reduce", payload_bytes=4, step=step, purpose="gradient_norm")
    return run


def printed(capsys, *words: str) -> str:
    assert execute(list(words)) == 0
    return capsys.readouterr().out


def row(text: str, begin: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.strip().startswith(begin)]
    return line.split()


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    synthetic(True, "all_to_all", "reduce_scatter").write(tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.long
def test_a_report_tells_initialisation_from_steps(capsys, run):
    text = printed(capsys, "report", "run")
    before, steps = text.split("Per training step, of 2 steps after the first")
    assert row(before, "broadcast") == [
        "broadcast",
        "0-1",
        "1",
        "4.00",
        "KiB",
        "2.00",
        "KiB",
        "1.00",
        "us",
    ]
    assert row(steps, "all_to_all") == [
        "all_to_all",
        "0-1",
        "1",
        "2.00",
        "KiB",
        "1.00",
        "KiB",
        "1.00",
        "us",
    ]
    assert row(steps, "for") == ["for", "reduce_scatter"]
    assert row(steps, "all_reduce")[:6] == ["all_reduce", "0-1", "1", "4", "B", "4"]
    assert "time per step 20.0 ms" in before
    assert "final loss  0" in before
    assert "14 records, 0 dropped, 0 unseen" in steps


@pytest.mark.long
def test_per_step_reports_each_step(capsys, run):
    text = printed(capsys, "report", "run", "--per-step")
    assert [line for line in text.splitlines() if line.startswith("Step ")] == [
        "Step 0: 50.0 ms, exposed >= 4.00 us (>= 0.0 %), overlapped -, loss 2",
        "Step 1: 20.0 ms, exposed >= 4.00 us (>= 0.0 %), overlapped -, loss 1",
        "Step 2: 20.0 ms, exposed >= 4.00 us (>= 0.0 %), overlapped -, loss 0",
    ]
    assert text.count("  all_to_all  ") == 3


def test_a_group_without_a_name_is_shown_by_its_ranks(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = SyntheticRun(world_size=2)
    run.add_step(0)
    run.add_collective("all_reduce", payload_bytes=8, pg="1", group_desc="undefined")
    run.write(tmp_path / "run")
    text = printed(capsys, "report", "run")
    assert row(text, "all_reduce")[:3] == ["all_reduce", "0-1", "1"]
    assert "undefined" not in text


def test_a_report_says_what_a_step_stands_still_for(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = SyntheticRun(world_size=1)
    for step in range(3):
        begin = 10_000_000 * (step + 1)
        run.add_step(step, begin_ns=begin, end_ns=begin + 10_000_000)
        run.add_collective(
            "all_reduce", step=step, purpose="gradient_norm", issue_ns=begin + 1_000_000, exposed_ns=2_000_000
        )
        run.add_collective(
            "all_gather",
            step=step,
            purpose="parameter_gather",
            is_async=True,
            issue_ns=begin + 4_000_000,
            wait_begin_ns=begin + 7_000_000,
            wait_end_ns=begin + 7_500_000,
            exposed_ns=500_000,
        )
        run.add_collective("all_reduce", step=step, is_async=True, issue_ns=begin + 8_000_000)
    run.write(tmp_path / "run")
    block = printed(capsys, "report", "run").partition(
        "Exposed per training step of 10.0 ms, median of 2 warm steps"
    )[2]
    shown = [" ".join(row(block, name)) for name in ("gradient_norm", "parameter_gather", "(no", "all (")]
    assert shown == [
        "gradient_norm 2.00 ms 20.0 % 0 ns 2 of 2",
        "parameter_gather 500 us 5.0 % <= 3.00 ms 2 of 2",
        "(no purpose given) - - - 0 of 2",
        "all (union) >= 2.50 ms >= 25.0 % - 4 of 6",
    ]
    assert "For 2 records no wait was recorded" in " ".join(block.split())
    content = json.loads(printed(capsys, "report", "run", "--json"))
    assert [row["exposed_ns"] for row in content["exposure"]] == [2_500_000] * 3
    assert [(row["purpose"], row["exposed_share"]) for row in content["exposure_per_step"]] == [
        ("gradient_norm", 0.2),
        ("parameter_gather", 0.05),
        (None, None),
        ("all", 0.25),
    ]


@pytest.mark.long
def test_exposure_that_nobody_saw_is_not_called_none(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = SyntheticRun(world_size=2)
    for step in range(2):
        run.add_step(step, duration_ns=20_000_000)
        # Compiled code waits for the all_reduce in C++. The program itself waits for the barrier.
        run.add_collective("all_reduce", step=step, purpose="gradient_reduce", is_async=True)
        run.add_collective("barrier", step=step, purpose="metric", exposed_ns=0)
    run.write(tmp_path / "run")
    shown = printed(capsys, "report", "run")
    exposed = shown.partition("Exposed per training step")[2]
    assert row(exposed, "gradient_reduce")[1:4] == ["-", "-", "-"]
    assert row(exposed, "metric")[1:3] == ["0", "ns"]
    assert row(exposed, "all (union)")[2:5] == [">=", "0", "ns"]
    traffic = json.loads(printed(capsys, "report", "run", "--json"))["traffic"]
    assert {(each["op"], each["exposed_ns"]) for each in traffic} == {("all_reduce", None), ("barrier", 0)}


@pytest.mark.long
def test_where_no_wait_was_seen_at_all_that_is_said(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = SyntheticRun(world_size=2)
    for step in range(3):
        run.add_step(step, duration_ns=20_000_000)
        run.add_collective("all_reduce", step=step, purpose="gradient_reduce", is_async=True)
    run.write(tmp_path / "run")
    shown = " ".join(printed(capsys, "report", "run").split())
    assert "Exposed per training step: not known. For 4 records no wait was recorded" in " ".join(
        shown.split()
    )
    content = json.loads(printed(capsys, "report", "run", "--json"))
    for answer in ("traffic", "steps", "exposure", "exposure_per_step"):
        assert {row["exposed_ns"] for row in content[answer]} == {None}


def test_json_keeps_bytes_and_nanoseconds(capsys, run):
    content = json.loads(printed(capsys, "report", "run", "--json"))
    assert content["overview"]["records"] == 14
    assert sum(row["payload_bytes"] for row in content["traffic"]) == 4096 + 3 * (2048 + 4)
    assert [step["duration_ns"] for step in content["steps"]] == [50_000_000, 20_000_000, 20_000_000]


def test_what_is_missing_is_said(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = SyntheticRun(world_size=3, recorded_ranks=(0, 2), lost=5, unseen=7)
    run.add_step(0)
    run.add_collective("all_reduce", payload_bytes=8)
    run.write(tmp_path / "run")
    text = printed(capsys, "report", "run")
    assert row(text, "ranks")[1:4] == ["2", "of", "3,"]
    assert "5 dropped" in text
    assert "7 unseen" in text
    assert any(line.startswith("note") and "rank 1" in line for line in text.splitlines())


@pytest.mark.long
def test_a_comparison_shows_what_was_meant(capsys, run, tmp_path):
    synthetic(False, "all_reduce").write(tmp_path / "other")
    text = printed(capsys, "compare", "run", "other")
    first, second = (
        row(text.split("wire by operation")[0], f"reduce_scatter={value}") for value in ("true", "false")
    )
    # An all_to_all of 2048 B on 2 ranks sends half of the bytes. The norm adds 4 B.
    assert first == [
        "reduce_scatter=true",
        "reduce_scatter",
        "all_to_all",
        "for",
        "2.00",
        "KiB",
        "1.00",
        "KiB",
        "20.0",
        "ms",
        ">=",
        "4.00",
        "us",
        "0",
    ]  # The wait for the norm was not recorded.
    assert "\n                       reduce_scatter" in text or " reduce_scatter\n" in text
    assert second[:7] == ["reduce_scatter=false", "all_reduce", "all_reduce", "2.00", "KiB", "2.00", "KiB"]
    by_operation = text.split("wire by operation")[1].split("\n\n")[0]
    assert row(by_operation, "reduce_scatter=false")[1:] == ["2.00", "KiB", "0", "B"]
    assert row(by_operation, "reduce_scatter=true")[1:] == ["4", "B", "1.00", "KiB"]


def test_a_directory_stands_for_its_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    synthetic(True, "all_reduce").write(tmp_path / "all" / "a")
    synthetic(False, "all_reduce").write(tmp_path / "all" / "b")
    rows = json.loads(printed(capsys, "compare", "all", "--json"))
    assert len(rows) == 2
    assert rows[0]["advice"] and rows[0]["advice"] == rows[1]["advice"]
    assert " ".join(rows[0]["advice"][0].split()) in " ".join(printed(capsys, "compare", "all").split())


def test_an_export_lists_its_files(capsys, run):
    text = printed(capsys, "export", "run", "--format", "csv", "--out", "csv")
    assert row(text, "collectives.csv")[1] == "14"
    assert (run.parent / "csv" / "collectives.csv").read_text().count("\n") == 15
    assert execute(["export", "run", "--out", "csv"]) == 2
    assert "--force" in capsys.readouterr().err


def test_an_alignment_with_an_empty_log_misses_everything(capsys, run):
    (run.parent / "nccl.log").write_text("nothing of NCCL\n")
    content = json.loads(printed(capsys, "align", "run", "nccl.log", "--json"))
    assert (content["matched"], content["extra"]) == (0, 0)
    assert content["missing"] > 0
    # An alignment without matches is stored only if --force requests this, so that it blocks no later
    # alignment.
    assert execute(["align", "run", "nccl.log", "--force"]) == 0
    assert execute(["align", "run", "nccl.log"]) == 2
    assert "already has an alignment; give --force" in capsys.readouterr().err


@pytest.mark.long
def test_a_report_lists_the_places_of_what_has_no_purpose(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine, library = f"{tmp_path}/train.py:12 evaluate", "/venv/site-packages/library/loop.py:3 Loop.run"
    run = SyntheticRun(world_size=2)
    for step in range(3):
        run.add_step(step, duration_ns=20_000_000)
        run.add_collective("all_reduce", payload_bytes=4096, step=step, purpose="gradient_reduce")
        run.add_collective("all_gather", payload_bytes=1024, step=step, phase="other", call_site=mine)
    for place in range(9):
        run.add_collective(
            "broadcast", payload_bytes=8, step=2, phase="other", peer=0, call_site=f"{library}{place}"
        )
    run.write(tmp_path / "run")
    text = printed(capsys, "report", "run")
    part = text.partition("Without a purpose")[2]
    assert "12 calls, 3.07 KiB payload" in part
    assert row(part, "train.py") == ["train.py:12", "evaluate", "other", "all_gather", "3", "3.00", "KiB"]
    assert row(part, "library/loop.py:3 Loop.run0")[-3:] == ["1", "8", "B"]
    assert row(part, "and 2 more") == ["and", "2", "more", "2", "16", "B"]
    found = json.loads(printed(capsys, "report", "run", "--json"))["untagged"]
    assert len(found) == 10 and found[0]["call_site"] == mine
    assert [found[0][name] for name in ("collectives", "records", "payload_bytes")] == [3, 6, 3072]


def test_a_place_that_only_receives_is_left_out_where_the_sends_are_shown(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = SyntheticRun(world_size=2)
    run.add_step(0, duration_ns=20_000_000)
    for op, rank, line in (("send", 0, 3), ("recv", 1, 5)):
        place = f"{tmp_path}/pipe.py:{line} {op}"
        run.add_collective(op, payload_bytes=16, ranks=(rank,), peer=1 - rank, step=0, call_site=place)
    run.write(tmp_path / "run")
    part = printed(capsys, "report", "run").partition("Without a purpose")[2]
    assert "1 call, 16 B payload" in part and "pipe.py:3" in part and "pipe.py:5" not in part
    assert len(json.loads(printed(capsys, "report", "run", "--json"))["untagged"]) == 2


def test_a_report_shows_the_algorithms_of_an_aligned_log(capsys, tmp_path, monkeypatch):
    """NCCL prints a choice on one rank, so the bandwidth is that rank's.

    It is 2 (n - 1) / n of the payload divided by the time, with n = 2.
    """
    monkeypatch.chdir(tmp_path)
    with_choices(tmp_path / "run")
    capsys.readouterr()
    part = printed(capsys, "report", "run").partition("Algorithms that NCCL chose")[2]
    large, small = (line.split() for line in part.splitlines()[3:5])
    assert large == [
        "all_reduce",
        "0-1",
        "1.00",
        "MiB",
        "RING",
        "LL128",
        "8",
        "3",
        "1.05",
        "ms",
        "1.00",
        "GB/s",
    ]
    assert small[4:8] == ["TREE", "LL", "1", "3"]
    found = json.loads(printed(capsys, "report", "run", "--json"))["algorithms"]
    assert [(each["algorithm"], each["collectives"], each["records"]) for each in found] == [
        ("RING", 3, 3),
        ("TREE", 3, 3),
    ]


@pytest.mark.long
def test_a_report_says_nothing_of_algorithms_that_no_log_names(capsys, run):
    assert "Algorithms" not in printed(capsys, "report", "run")


@pytest.mark.long
def test_a_report_is_silent_where_all_has_a_purpose(capsys, run):
    assert "Without a purpose" not in printed(capsys, "report", "run")


def test_a_report_states_the_load_of_experts_and_what_to_try(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    uneven_experts().write(tmp_path / "run")
    text = printed(capsys, "report", "run")
    assert "Experts: load in 12 training steps" in text
    # The loads of expert 5 in 12 steps are 1 in four steps, 15/8, 22/8, 29/8, and 36/8 in five steps. The
    # first of the last five is step 7.
    assert row(text, "blocks.0.moe") == ["blocks.0.moe", "8", "3.19", "4.50", "7", "5", "1.94", "15.5%"]
    assert row(text, "blocks.1.moe") == ["blocks.1.moe", "8", "1.00", "1.00", "0", "0", "1.00", "0.0%"]
    flat = " ".join(text.split())
    assert "7.7% of the choices were dropped. Try a larger capacity_factor; with 4.50 nothing" in flat
    # A rank sends three quarters of 8 exchanges of 4096 bytes to other ranks. Two of these three parts go to
    # the other host.
    assert "send 96.0 KiB between ranks (median, all ranks together), 64.0 KiB of it between hosts" in flat
    assert "In blocks.0.moe the most loaded expert gets 3.19 times the mean load" in flat
    assert "Try an ep_size (now 4) of at most the number of ranks per host" in flat
    told = json.loads(printed(capsys, "report", "run", "--json"))
    first, second = told["experts"]["layers"]
    assert first["worst"] == {"attempt": 0, "step": 7, "expert": 5, "imbalance": 4.5}
    assert second["imbalance"] == 1.0 and len(told["exchange_imbalance"]) == 12
    assert told["experts"]["settings"][0]["capacity_factor"] == 2.0


def test_a_report_of_uneven_splits_names_the_rank_that_receives_the_most(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = SyntheticRun(world_size=2)
    for step, (first, second) in enumerate([(100, 100), (100, 300)]):
        run.add_step(step)
        for rank, (sent, got) in enumerate([((50, second), (50, first)), ((first, 50), (second, 50))]):
            run.add_collective(
                "all_to_all", payload_bytes=sum(sent), step=step, ranks=(rank,),
                input_splits=",".join(map(str, sent)), output_splits=",".join(map(str, got)),
            )  # fmt: skip
    run.write(tmp_path / "run")
    text = " ".join(printed(capsys, "report", "run").split())
    assert "gets 1.25 times the mean of the ranks (median of 2 steps); 1.50 times in step 1, rank 1" in text
    assert "Experts" not in text


def test_a_report_without_experts_says_nothing_of_them(capsys, run):
    text = printed(capsys, "report", "run")
    assert "xpert" not in text and "All_to_alls" not in text
