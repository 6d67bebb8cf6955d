"""Test the summaries that are stored with a run.

Answers are the same with and without summaries. Summaries count only if the run has not changed.
"""

import os
import shutil
from functools import partial

import pandas as pd
import pytest

from commprof.analysis import api
from commprof.analysis.storage import run_totals, summaries
from commprof.trace.directory import SUMMARIES_DIRECTORY
from support.detailed_runs import detailed_run

QUESTIONS = {
    "traffic": api.traffic,
    "by purpose": partial(api.traffic, by=("op", "purpose")),
    "matrix": api.matrix,
    "steps": api.step_times,
    "exposure": api.exposure,
    "exposure_per_step": api.exposure_per_step,
    "buckets": api.bucket_flushes,
    "bucket_means": api.bucket_means,
    "bucket_steps": api.bucket_steps,
}


@pytest.fixture
def run(tmp_path):
    return detailed_run(seed=3).write(tmp_path / "run")


@pytest.mark.sampled
@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_answers_are_the_same_with_summaries(run, question, monkeypatch):
    plain = question(run)
    assert run_totals.summarise(run)
    # With this patch, an evaluation of the records fails.
    monkeypatch.setattr("commprof.analysis.traffic.operation_totals.evaluate", None)
    found = question(run)
    pd.testing.assert_frame_equal(found, plain)
    assert len(found)


def test_summaries_of_changed_files_do_not_count(run):
    assert run_totals.summarise(run)
    step = run / "steps.parquet"
    os.utime(step, ns=(step.stat().st_mtime_ns + 1,) * 2)
    assert not summaries.read(run)
    assert run_totals.summarise(run) and summaries.read(run)


def test_a_damaged_summary_does_not_count(run):
    plain = api.traffic(run)
    assert run_totals.summarise(run)
    file = run / SUMMARIES_DIRECTORY / "operations.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    pd.testing.assert_frame_equal(api.traffic(run), plain)


def test_summaries_that_cannot_be_written_leave_nothing_behind(run, monkeypatch):
    before = sorted(path.name for path in run.iterdir())

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("commprof.analysis.storage.summaries.write_parquet", full)
    assert not run_totals.summarise(run)
    assert sorted(path.name for path in run.iterdir()) == before


def test_what_a_killed_process_left_is_removed(run):
    left = run / f".{SUMMARIES_DIRECTORY}-abc"
    left.mkdir()
    (left / "operations.parquet").write_bytes(b"half")
    assert run_totals.summarise(run)
    assert not left.exists() and summaries.read(run)


def test_a_large_run_of_a_short_job_gets_none(run, monkeypatch):
    monkeypatch.setattr(summaries, "_SMALL", 5)
    monkeypatch.setattr(summaries, "_RECORD_NS", 10**9)
    assert not run_totals.summarise(run)
    assert not (run / SUMMARIES_DIRECTORY).exists()
    monkeypatch.setattr(summaries, "_RECORD_NS", 1)  # With this value the job was long enough for summaries.
    assert run_totals.summarise(run)


def test_a_large_run_is_affordable_where_it_takes_half_a_percent_of_the_job():
    hour = 3600 * 10**9
    assert summaries.is_affordable(300_000, 0) and not summaries.is_affordable(300_001, 0)
    assert summaries.is_affordable(3_000_000, hour) and not summaries.is_affordable(3_000_001, hour)


@pytest.mark.long
def test_a_copied_run_is_answered_from_its_records(run, tmp_path):
    assert run_totals.summarise(run)
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, copy_function=shutil.copyfile)
    pd.testing.assert_frame_equal(api.traffic(copy), api.traffic(run))
