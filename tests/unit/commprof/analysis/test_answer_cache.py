"""Test the cache of answers.

The cache detects a run that changed, grew, disappeared or was added. It reads nothing else, and its memory is
bounded.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from commprof.analysis import api
from commprof.analysis.relations import memory
from commprof.analysis.storage import opened_runs
from commprof.analysis.storage.answer_cache import AnswerCache, answer_cache
from commprof.errors import UsageError
from commprof.trace.fingerprint import fingerprint
from commprof_dash.data import Runs
from support.detailed_runs import detailed_run
from support.rank_files import write_rank
from support.runs import SyntheticRun


def a_run(path, steps=2, payload=400):
    run = SyntheticRun(2, config={"zero_optimization": {"stage": 2}})
    for step in range(steps):
        run.add_step(step, begin_ns=1000 * step, duration_ns=1000)
        run.add_collective("all_reduce", step=step, payload_bytes=payload, purpose="gradient_reduce")
    return run.write(path)


@pytest.fixture
def opened(monkeypatch):
    """Return the names of the runs that the listing opens, in order."""
    found = []
    original = opened_runs.open_run

    def watched(path):
        found.append(path.name)
        return original(path)

    monkeypatch.setattr(opened_runs, "open_run", watched)
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
    # No file of the run records whether its processes are alive.
    expected = 1 if api.find_runs(tmp_path)["state"][0] == "killed" else 4
    assert len(opened) == expected


def test_of_a_live_run_every_new_record_is_in_the_next_answer(tmp_path):
    ten = Path(f"{write_rank(tmp_path / 'ten', records=10, ended=False)}.records")
    twenty = Path(f"{write_rank(tmp_path / 'twenty', records=20, ended=False)}.records")
    # The recorder writes into a file whose size is reserved, so the size does not change.
    assert ten.stat().st_size == twenty.stat().st_size
    run, runs = ten.parent, Runs(tmp_path)
    before = fingerprint(run)

    def records() -> tuple[int, int, int]:
        page = runs.of_run("traffic", "ten", lambda path: api.traffic(path, ()))
        return (
            int(api.traffic(run, ())["records"][0]),
            int(page["records"][0]),
            len(api.exposure(run, ["rank"])),
        )

    assert records() == records() == (10, 10, 1)
    held = api.open_run(run)
    assert api.traffic(held, ())["records"].tolist() == [10]
    with ten.open("r+b") as file:
        file.write(twenty.read_bytes())
    os.utime(ten, ns=(0, {name: changed for name, _, _, changed, _ in before.files}[ten.name]))
    assert records() == (20, 20, 1)
    # An opened run keeps the records that it had when it was opened.
    assert api.traffic(held, ())["records"].tolist() == [10]


def test_nothing_is_held_of_a_directory_that_is_written_to(tmp_path):
    asked = []
    (tmp_path / "rank-00000-0-1.records").write_bytes(b"x")
    for _ in range(2):
        answer_cache.of_files([tmp_path], "growing", lambda: asked.append(1))
    assert len(asked) == 2 and not len(answer_cache)


def test_of_an_unchanged_run_the_files_are_not_read_again(tmp_path):
    path = detailed_run(steps=40).write(tmp_path / "run")
    records = sum(file.stat().st_size for file in (path / "collectives").iterdir())
    runs = Runs(tmp_path)
    questions = {
        "traffic": lambda: api.traffic(path, ["op"]),
        "another traffic": lambda: api.traffic(path, ["step", "purpose"]),
        "exposure": lambda: api.exposure_per_step(path),
        "steps": lambda: api.step_times(path),
        "page": lambda: runs.of_run("step_times", "run", api.step_times),
    }
    first = {name: bytes_read(ask) for name, ask in questions.items()}
    again = {name: bytes_read(ask) for name, ask in questions.items()}
    assert first["traffic"] > records > 50_000
    # The repeated question reads the manifest and the table of groups.
    assert max(first["another traffic"], *again.values()) < records / 4
    assert again["page"] < 1000  # This includes the bytes read to count the bytes.


def bytes_read(ask: Callable[[], Any]) -> int:
    """Return the number of bytes that this process read from files while ``ask`` ran."""

    def read() -> int:
        return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])

    before = read()
    ask()
    return read() - before


def test_an_opened_run_answers_again_when_its_files_are_gone(tmp_path):
    run = api.open_run(detailed_run(steps=4).write(tmp_path / "run"))
    before = api.traffic(run, ["op"]), api.exposure_per_step(run)
    shutil.rmtree(run.path)
    assert api.traffic(run, ["op"]).equals(before[0]) and api.exposure_per_step(run).equals(before[1])


def test_many_questions_do_not_grow_the_cache_beyond_its_bounds():
    cache = AnswerCache(most_bytes=10_000, most_answers=50)
    for number in range(1000):
        cache.get(str(number % 7), number, lambda: 1)
    assert len(cache) == 50
    for number in range(100):
        cache.get("tables", number, lambda: pa.table({"a": np.zeros(200)}))
        cache.get("tables", 0, lambda: pytest.fail("what was used a moment ago is gone"))
    assert len(cache) == 6  # Each entry takes 1600 bytes.
    asked = []
    cache.get("tables", 98, lambda: asked.append("held"))
    cache.get("tables", 3, lambda: asked.append("gone"))
    assert asked == ["gone"]
    cache.get("tables", "large", lambda: pd.DataFrame({"a": np.zeros(20_000)}))
    assert len(cache) == 1
    cache.get("tables", "large", lambda: pytest.fail("the newest is held, however large it is"))


def test_several_threads_ask_at_once():
    cache = AnswerCache(most_bytes=1 << 20, most_answers=8)

    def ask(number: int) -> int:
        return cache.get(str(number % 16), "double", lambda: 2 * (number % 16))

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(4000)))
    assert found == [2 * (number % 16) for number in range(4000)]
    assert len(cache) == 8


@pytest.mark.long
def test_nothing_stays_of_an_opened_live_run_that_nobody_has_any_more(tmp_path):
    write_rank(tmp_path / "run", records=10, ended=False)
    for _ in range(5):
        api.traffic(tmp_path / "run")
    gc.collect()
    answer_cache.get("other", "question", lambda: 1)
    assert len(answer_cache) == 1


def test_an_error_is_not_held():
    cache = AnswerCache()
    with pytest.raises(ZeroDivisionError):
        cache.get("state", "question", lambda: 1 // 0)
    assert cache.get("state", "question", lambda: 1) == 1


def test_the_records_of_an_analysis_are_among_its_files(tmp_path):
    """The records of an analysis are a link to the records of its run."""
    run, analysis = a_run(tmp_path / "run"), tmp_path / "analysis"
    analysis.mkdir()
    (analysis / "collectives").symlink_to(run / "collectives")
    before = fingerprint(analysis)
    os.utime(next((run / "collectives").iterdir()))
    after = fingerprint(analysis)
    assert before.key != after.key and before.inputs != after.inputs


def test_what_is_derived_counts_in_a_moved_run_and_other_files_do_not_matter(tmp_path):
    run = a_run(tmp_path / "run")
    before = fingerprint(run)
    (run / "notes.txt").write_text("")
    noted = fingerprint(run)
    moved = fingerprint(run.rename(tmp_path / "moved"))
    assert before.inputs == noted.inputs == moved.inputs
    assert len({before.key, noted.key, moved.key}) == 3


@pytest.mark.long
def test_a_comparison_reads_again_what_changed_and_a_run_in_memory_as_it_is(tmp_path):
    a_run(tmp_path / "a")
    other = a_run(tmp_path / "b", payload=800)
    before = api.compare([tmp_path / "a", other])
    held = api.open_run(other)
    held.table("collectives")
    shutil.rmtree(other)
    a_run(other, payload=1600)
    after = api.compare([tmp_path / "a", other])
    # With two ranks, 2 (n - 1) / n of the payload equals the payload.
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
        with pytest.raises(UsageError, match="not a size"):
            memory.engine_settings()
