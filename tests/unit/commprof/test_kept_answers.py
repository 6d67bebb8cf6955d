"""Answers that are kept between questions: a run that changed, grew, went or came is noticed, and nothing else is read."""

from __future__ import annotations

import json
import shutil

import pytest

from commprof.analysis import api, kept, listing, memory
from commprof.errors import UsageError
from support.runs import SyntheticRun


def a_run(path, steps=2, payload=400):
    run = SyntheticRun(2, config={"zero_optimization": {"stage": 2}})
    for step in range(steps):
        run.add_step(step, begin_ns=1000 * step, duration_ns=1000)
        run.add_collective("all_reduce", step=step, payload_bytes=payload, purpose="gradient_reduce")
    return run.write(path)


@pytest.fixture
def opened(monkeypatch):
    """The runs that the listing opens, in order."""
    found = []
    original = listing.open_run

    def watched(path):
        found.append(path.name)
        return original(path)

    monkeypatch.setattr(listing, "open_run", watched)
    return found


def test_a_listing_reads_only_runs_that_are_new_or_have_changed(tmp_path, opened):
    for name in ("a", "b", "c"):
        a_run(tmp_path / name)
    api.find_runs(tmp_path)
    assert sorted(opened) == ["a", "b", "c"]
    opened.clear()
    assert sorted(api.find_runs(tmp_path)["name"]) == ["a", "b", "c"]
    assert opened == []

    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "b")
    a_run(tmp_path / "b", steps=5)
    a_run(tmp_path / "d")
    found = api.find_runs(tmp_path).set_index("name")
    assert sorted(opened) == ["b", "d"]
    assert sorted(found.index) == ["b", "c", "d"]
    assert (found.loc["b", "steps"], found.loc["b", "records"]) == (5, 10)


def test_a_manifest_that_was_replaced_by_one_of_equal_length_is_noticed(tmp_path):
    run = a_run(tmp_path / "a")
    file = run / "run.json"
    assert api.find_runs(tmp_path)["state"].tolist() == ["complete"]
    file.write_text(file.read_text().replace('"complete"', '"failed"  '))
    assert api.find_runs(tmp_path)["state"].tolist() == ["failed"]


def test_a_run_that_says_it_is_running_is_read_each_time(tmp_path, opened):
    run = a_run(tmp_path / "a")
    manifest = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(manifest | {"state": "running"}))
    for _ in range(3):
        api.find_runs(tmp_path)
    # Whether its processes are alive is written in none of its files.
    expected = 1 if api.find_runs(tmp_path)["state"][0] == "killed" else 4
    assert len(opened) == expected


def test_a_file_that_grows_is_never_kept(tmp_path):
    asked = []
    (tmp_path / "rank-00000-0-1.records").write_bytes(b"x")
    for _ in range(2):
        kept.kept(tmp_path, "growing", lambda: asked.append(1))
    assert len(asked) == 2


def test_a_comparison_reads_again_what_changed_and_a_run_in_memory_as_it_is(tmp_path):
    a_run(tmp_path / "a")
    other = a_run(tmp_path / "b", payload=800)
    before = api.compare([tmp_path / "a", other])
    held = api.open_run(other)
    held.table("collectives")
    shutil.rmtree(other)
    a_run(other, payload=1600)
    after = api.compare([tmp_path / "a", other])
    # Two ranks: 2 (n - 1) / n of the payload is the payload.
    assert before["payload_bytes_per_step"].tolist() == [600.0]
    assert after["payload_bytes_per_step"].tolist() == [1000.0]
    assert api.compare([tmp_path / "a", held])["payload_bytes_per_step"].tolist() == [600.0]
    assert api.compare([tmp_path / "a", other]).equals(after)


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/job/task\n", {"job/memory.max": "max", "job/task/memory.max": "1000000"}, 1_000_000),
        ("0::/job/task\n", {"job/memory.max": "500000", "job/task/memory.max": "1000000"}, 500_000),
        ("0::/outside\n", {"memory.max": "700000"}, 700_000),
        ("4:cpu,memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": "300000"}, 300_000),
        ("4:memory:/job\n", {"memory/job/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("", {}, None),
    ],
)
def test_the_memory_is_that_of_the_machine_or_of_the_control_group(tmp_path, lines, files, expected):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(lines)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    whole = memory.memory_bytes(tmp_path / "nowhere")
    assert memory.memory_bytes(tmp_path) == (expected or whole)


def test_the_environment_limits_the_engine_and_what_is_no_size_is_refused(monkeypatch):
    monkeypatch.setenv(memory.VARIABLE, "1.5GiB")
    assert memory.limit_bytes() == 3 << 29
    monkeypatch.setenv(memory.VARIABLE, "300 mb")
    assert memory.limit_bytes() == 300_000_000
    for wrong in ("much", "-1", "5 parsecs"):
        monkeypatch.setenv(memory.VARIABLE, wrong)
        with pytest.raises(UsageError, match="no size"):
            memory.engine_settings()
