"""Test the alignment of records with logs of the NCCL Inspector.

The Inspector numbers each operation of a communicator separately.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest

from commprof.cli import execute
from commprof.trace.reader import open_run
from support.nccl_choices import with_choices
from support.runs import HOST, SyntheticRun

LARGE, SMALL = 1 << 20, 1 << 10
NAMES = {"all_reduce": "AllReduce", "all_gather": "AllGather", "broadcast": "Broadcast"}


def program(world=2, steps=3):
    """Return the operations and payloads that the program issued, in order."""
    run = SyntheticRun(world, backend="nccl")
    run.add_collective("broadcast", payload_bytes=LARGE, step=-1, phase="init", peer=0)
    issued = [("broadcast", LARGE)]
    for step in range(steps):
        run.add_step(step)
        for op, size in (("all_reduce", LARGE), ("all_gather", 2 * LARGE), ("all_reduce", SMALL)):
            run.add_collective(op, payload_bytes=size, step=step)
            issued.append((op, size))
    return run, issued


def log_of(rank, issued, world=2, dropped=(), pid=None, comm="0xfeed", version="v4.4", least=8192):
    """Return the log of one rank as the plugin writes it.

    Each operation has its own numbers. Dropped positions have no line but are counted.
    """
    counted: Counter[str] = Counter()
    entries = []
    for place, (op, size) in enumerate(issued):
        number, part = counted[op], size // world if op == "all_gather" else size
        counted[op] += 1
        if part >= least and place not in dropped:
            algorithm = ("RING", "LL128") if op == "all_reduce" else ("NVLS", "SIMPLE")
            body = {"coll": NAMES[op], "coll_sn": number, "coll_msg_size_bytes": part, "coll_exec_time_us": 5}
            entries.append({"coll_perf": body | {"coll_algo": algorithm[0], "coll_proto": algorithm[1]}})
    stats = {
        "coll_records": len(entries),
        "coll_dropped_total": len(dropped),
        "p2p_records": 0,
        "p2p_dropped_total": 0,
    }
    dump = {
        "header": {"id": comm, "comm_name": "unknown", "rank": rank, "n_ranks": world, "nnodes": 1},
        "metadata": {
            "inspector_output_format_version": version,
            "dump_timestamp_us": 1,
            "hostname": HOST,
            "pid": 1000 + rank if pid is None else pid,
        },
        "dump_stats": stats,
    }
    return "".join(json.dumps(each) + "\n" for each in (dump, *entries))


def aligned(tmp_path, capsys, run, logs, *options):
    """Return the JSON and the text that ``align`` prints, in this order."""
    run.write(tmp_path / "run")
    (tmp_path / "logs").mkdir()
    for name, text in logs.items():
        (tmp_path / "logs" / name).write_text(text)
    words = ["align", str(tmp_path / "run"), str(tmp_path / "logs"), *options]
    assert execute([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert execute([*words, "--force"]) == 0
    return found, " ".join(capsys.readouterr().out.split())


def counts(found):
    return [found[state] for state in ("matched", "missing", "dropped", "too_small", "extra")]


def test_dropped_events_are_stated_and_neither_missing_nor_a_shift(tmp_path, capsys):
    run, issued = program()
    lost = (1, 4)  # The first two large all_reduces of rank 1.
    found, text = aligned(
        tmp_path, capsys, run, {"0.log": log_of(0, issued), "1.log": log_of(1, issued, dropped=lost)}
    )
    assert counts(found) == [12, 0, 2, 6, 0]
    assert "2 events dropped by the inspector (2 collectives, 0 messages)" in text
    assert "matched 12, missing 0, dropped 2, too small 6, extra 0" in text
    told = open_run(tmp_path / "run").table("nccl_algorithms").to_pylist()
    by_rank = {
        rank: [(row["seq"], row["algorithm"]) for row in told if row["rank"] == rank] for rank in (0, 1)
    }
    assert by_rank[0] == [
        (0, "NVLS"),
        (1, "RING"),
        (2, "NVLS"),
        (4, "RING"),
        (5, "NVLS"),
        (7, "RING"),
        (8, "NVLS"),
    ]
    assert by_rank[1] == [(0, "NVLS"), (2, "NVLS"), (5, "NVLS"), (7, "RING"), (8, "NVLS")]
    assert execute(["report", str(tmp_path / "run")]) == 0
    shown = [line.split()[:7] for line in capsys.readouterr().out.splitlines()]
    assert ["all_reduce", "0-1", "1.00", "MiB", "RING", "LL128", "-"] in shown


def test_what_is_in_no_log_and_was_not_dropped_is_missing(tmp_path, capsys):
    run, issued = program()
    whole, cut = log_of(0, issued), log_of(1, issued).splitlines(keepends=True)
    found, text = aligned(tmp_path, capsys, run, {"0.log": whole, "1.log": "".join(cut[:-2])})
    assert counts(found) == [12, 2, 0, 6, 0]
    assert "2 operations that a dump announces are not in the files" in text


def test_empty_collectives_have_no_number(tmp_path, capsys):
    run = SyntheticRun(2, backend="nccl")
    for size in (0, LARGE, 2 * LARGE):
        run.add_collective("all_reduce", payload_bytes=size, step=-1)
    issued = [("all_reduce", LARGE), ("all_reduce", 2 * LARGE)]
    found, _ = aligned(tmp_path, capsys, run, {f"{rank}.log": log_of(rank, issued) for rank in (0, 1)})
    assert counts(found) == [4, 0, 0, 0, 0]


def test_groups_that_did_the_same_are_not_guessed(tmp_path, capsys):
    run = SyntheticRun(2, backend="nccl")
    for pg in ("0", "1"):
        run.add_collective("all_reduce", payload_bytes=LARGE, step=-1, pg=pg)
    found, _ = aligned(tmp_path, capsys, run, {"0.log": log_of(0, [("all_reduce", LARGE)])})
    assert counts(found) == [0, 0, 0, 0, 1]
    assert "the groups 0, 1 issued the same operations" in found["communicators"][0]["reason"]
    assert not open_run(tmp_path / "run").table("nccl_algorithms").num_rows


def test_a_log_of_another_run_matches_nothing(tmp_path, capsys):
    run, issued = program()
    other = [(op, 2 * size) for op, size in issued]
    logs = {"0.log": log_of(0, other), "1.log": log_of(1, issued, pid=7)}
    found, _ = aligned(tmp_path, capsys, run, logs)
    assert counts(found) == [0, 0, 0, 0, 14]
    reasons = [each["reason"] for each in sorted(found["communicators"], key=lambda each: each["comm_rank"])]
    assert (
        "all_gather number 0 has 4,194,304 bytes in the log and 2,097,152 bytes in its record" in reasons[0]
    )
    assert "no process of the run has this host and process id" in reasons[1]
    assert any("no log has operations of rank(s) 1" in note for note in found["notes"])


def test_records_of_a_part_of_a_run_are_refused_in_one_line(tmp_path, capsys):
    run, issued = program()
    path = run.write(tmp_path / "run")
    manifest = json.loads((path / "run.json").read_text())
    manifest["ranks"][0]["outside"] = 5
    (path / "run.json").write_text(json.dumps(manifest))
    (tmp_path / "0.log").write_text(log_of(0, issued))
    assert execute(["align", str(path), str(tmp_path / "0.log")]) == 1
    told = capsys.readouterr().err.strip()
    assert (
        len(told.splitlines()) == 1 and "5 collectives of" in told and "outside of the recorded steps" in told
    )


def test_algorithms_are_replaced_by_force_only(tmp_path, capsys):
    run, issued = program()
    path = run.write(tmp_path / "run")
    (tmp_path / "0.log").write_text(log_of(0, issued))
    words = ["align", str(path), str(tmp_path / "0.log")]
    assert execute(words) == 0
    assert execute(words) == 2
    assert "--force" in capsys.readouterr().err
    assert execute([*words, "--force"]) == 0


@pytest.mark.parametrize("version", ["v5.0", "v4.4"])
def test_logs_that_cannot_be_used_are_an_error_in_one_line(tmp_path, capsys, version):
    run, issued = program()
    path = run.write(tmp_path / "run")
    text = log_of(0, issued, version=version)
    (tmp_path / "0.log").write_text(text if version == "v5.0" else text.splitlines(keepends=True)[0])
    assert execute(["align", str(path), str(tmp_path / "0.log")]) == 1
    told = capsys.readouterr().err.strip()
    wanted = "version v5.0" if version == "v5.0" else "has no collective that can be matched"
    assert len(told.splitlines()) == 1 and wanted in told


def test_a_record_that_two_logs_know_counts_once(tmp_path, capsys):
    """If NCCL's own log also names the algorithm, the Inspector's value counts."""
    path = with_choices(tmp_path / "run")
    issued = [("all_reduce", size) for _ in range(3) for size in (4096, LARGE)]
    capsys.readouterr()
    assert execute(["report", str(path), "--json"]) == 0
    before = json.loads(capsys.readouterr().out)["algorithms"]
    manifest = json.loads((path / "run.json").read_text())
    pid = next(each["pid"] for each in manifest["ranks"] if each["rank"] == 0)
    (tmp_path / "0.log").write_text(log_of(0, issued, least=0, pid=pid))
    assert execute(["align", str(path), str(tmp_path / "0.log")]) == 0
    capsys.readouterr()
    assert execute(["report", str(path), "--json"]) == 0
    after = json.loads(capsys.readouterr().out)["algorithms"]
    assert [(each["algorithm"], each["records"]) for each in before] == [("RING", 3), ("TREE", 3)]
    assert [(each["algorithm"], each["records"], each["channels"]) for each in after] == [
        ("RING", 3, None),
        ("RING", 3, None),
    ]
