"""Test ``commprof align`` as a user runs it: the logs of the run, the counts, and which alignments are stored."""

from __future__ import annotations

import json

import pytest

from commprof.cli.application import invoke
from commprof.errors import LogError, TraceError, UsageError
from commprof.trace.reader import open_run
from support import planted_nccl
from support.runs import SyntheticRun


def a_run(directory, own_logs=True, drop=0):
    run = SyntheticRun(world_size=2, backend="nccl")
    for prime in planted_nccl.primes(12):
        run.add_collective("all_reduce", payload_bytes=4 * prime)
    path = run.write(directory / "run")
    logs = path / "nccl" if own_logs else directory / "logs"
    logs.mkdir()
    truth = planted_nccl.plant(run.table("collectives").to_pylist(), drop=drop)
    for name, lines in truth.files.items():
        (logs / name).write_text("\n".join(lines) + "\n")
    return path, logs


def test_without_a_log_it_reads_those_of_the_run(tmp_path, capsys):
    path, _ = a_run(tmp_path, drop=2)
    assert invoke(["align", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {name: facts[name] for name in ("matched", "missing", "extra", "ambiguous", "torn")} == {
        "matched": 22, "missing": 2, "extra": 0, "ambiguous": 0, "torn": 0,
    }  # fmt: skip
    assert [c["matched"] + c["missing"] for c in facts["communicators"]] == [12, 12]
    assert {c["confidence"] for c in facts["communicators"]} == {"certain"}
    kept = open_run(path)
    assert kept.table("matches").num_rows == 24
    assert kept.table("comm_matches").num_rows == 2
    assert kept.table("nccl_ops").num_rows == 22


def test_a_lost_table_of_an_alignment_is_named(tmp_path, capsys):
    path, _ = a_run(tmp_path)
    assert invoke(["align", str(path)]) == 0
    assert {"matches", "comm_matches", "nccl_ops"} <= set(
        json.loads((path / "run.json").read_text())["tables"]
    )
    (path / "matches.parquet").unlink()
    with pytest.raises(TraceError, match=r"matches.parquet of .* is missing; it was written when .* aligned"):
        open_run(path).table("matches")


def test_the_first_divergence_is_shown_side_by_side(tmp_path, capsys):
    path, _ = a_run(tmp_path, drop=1)
    assert invoke(["align", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "first divergence after" in shown
    assert "missing" in shown


def test_a_run_without_logs_says_what_to_do(tmp_path):
    path, _ = a_run(tmp_path, own_logs=False)
    with pytest.raises(LogError, match=r"holds no NCCL logs.*Name the logs: commprof align .* LOG"):
        invoke(["align", str(path)])


@pytest.mark.parametrize("force", [False, True])
def test_a_log_of_which_nothing_matches_is_kept_only_by_force(tmp_path, capsys, force):
    path, _ = a_run(tmp_path, own_logs=False)
    (tmp_path / "empty.log").write_text("nothing\n")
    arguments = ["align", str(path), str(tmp_path / "empty.log")]
    assert invoke(arguments + ["--force"] * force) == 0
    assert ("no alignment is stored" in capsys.readouterr().err) == (not force)
    assert bool(open_run(path).table("matches").num_rows) == force


def test_a_second_alignment_replaces_the_first_by_force_only(tmp_path):
    path, logs = a_run(tmp_path, own_logs=False)
    assert invoke(["align", str(path), str(logs)]) == 0
    with pytest.raises(UsageError, match="--force"):
        invoke(["align", str(path), str(logs)])
    assert invoke(["align", str(path), str(logs), "--force"]) == 0
