"""The main workflow on the command line, with the program examples/train_gpt.py.

The tests record, report, export and align a run, and serve the dashboard.
"""

import csv
import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from support.command import ROOT, commprof, environment

EXAMPLE = [
    str(ROOT / "examples" / "train_gpt.py"),
    "--config",
    str(ROOT / "examples" / "ds_zero2.json"),
    "--steps",
    "3",
]
ENVIRONMENT = environment()
COMMPROF = [sys.executable, "-m", "commprof"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Record one run of the example, and return its directory and the completed process."""
    directory = tmp_path_factory.mktemp("main-job")
    done = commprof("run", "--nproc", "2", *EXAMPLE, cwd=directory)
    assert done.returncode == 0, done.stderr
    return directory, done


def output(directory: Path, *words: str) -> str:
    done = commprof(*words, cwd=directory)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.ranks
def test_the_last_line_says_what_to_type_next(recorded):
    directory, done = recorded
    last = done.stderr.strip().splitlines()[-1]
    found = re.fullmatch(
        r"commprof: (traces/train_gpt-\S+)  2 ranks, ([\d,]+) records, 0 dropped, 0 unseen, recording took .+"
        r"  next: commprof (report \S+)",
        last,
    )
    assert found, last
    text = output(directory, *found[3].split())
    assert f"{found[2]} records, 0 dropped, 0 unseen" in text
    assert "Per training step, of 2 steps after the first" in text


@pytest.mark.ranks
def test_the_export_adds_up_to_the_report(recorded):
    directory, _ = recorded
    output(directory, "export", "latest", "--format", "csv", "--out", "csv")
    with (directory / "csv" / "collectives.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["rank"] == "0"]
    report = json.loads(output(directory, "report", "latest", "--json"))
    assert report["overview"]["collectives"] == len(rows)
    for op in {row["op"] for row in rows}:
        exported = sum(int(row["payload_bytes"]) for row in rows if row["op"] == op)
        assert exported == sum(row["payload_bytes"] for row in report["traffic"] if row["op"] == op)
    for name in ("data_dictionary.csv", "provenance.json", "steps.csv", "groups.csv", "wire.csv"):
        assert (directory / "csv" / name).stat().st_size > 0


@pytest.mark.ranks
def test_planted_lines_are_found_missing_and_extra(recorded):
    directory, _ = recorded
    (run,) = (directory / "traces").iterdir()
    planted = [sys.executable, str(ROOT / "tests" / "support" / "planted_nccl.py"), str(run), "--out", "log"]
    subprocess.run(
        [*planted, "--drop", "3", "--extra", "2"],
        cwd=directory,
        env=ENVIRONMENT,
        check=True,
        capture_output=True,
    )
    found = json.loads(output(directory, "align", "latest", "log", "--json"))
    assert found["generated"] and found["missing"] == found["missing_at_least"]
    assert found["missing_at_least"] <= 3 <= found["missing_at_most"]
    assert found["extra_at_least"] <= 2 <= found["extra_at_most"]
    records = json.loads(output(directory, "report", "latest", "--json"))["overview"]["records"]
    # Broadcasts of parameters of equal size are adjacent. The alignment cannot determine the broadcast whose line is
    # missing, but it determines that one line is missing.
    rows = pq.read_table(run / "matches.parquet").to_pylist()
    unclear = [row for row in rows if row["state"] == "ambiguous"]
    lost = sum((row["seq"] is not None) - (row["line"] is not None) for row in unclear)
    assert found["states"]["missing"] + lost == 3
    assert sum(row["seq"] is not None for row in rows) == records
    assert sum(row["line"] is not None for row in rows) == records - 3 + 2


@pytest.mark.ranks
def test_the_dashboard_is_served_to_this_machine(recorded):
    directory, _ = recorded
    server = subprocess.Popen(
        [*COMMPROF, "dashboard", "--port", "0"],
        cwd=directory,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        address = re.search(r"http://127\.0\.0\.1:\d+", server.stderr.readline())[0]
        with urllib.request.urlopen(address, timeout=20) as page:
            assert b"commprof" in page.read()
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=20)
    assert server.returncode == 0


def test_doctor_says_what_would_be_recorded(tmp_path):
    findings = json.loads(output(tmp_path, "doctor", "--json"))
    assert findings["can_record"]
    recorded_here = [item["text"] for item in findings["findings"] if item["section"] == "recorded here"]
    assert any("allreduce" in text and "_allgather_base" in text for text in recorded_here)
    assert any("unseen" in item["text"] for item in findings["findings"] if item["section"] == "not recorded")
