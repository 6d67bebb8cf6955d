"""Test gradient buckets in the events file.

Each bucket is described once, but every flush of a bucket is a row.
"""

from __future__ import annotations

import pytest

from commprof import hooks
from commprof.recorder.process.journal import Journal
from commprof.recorder.training.published_buckets import BucketRows
from commprof.trace.rank_files.events import read_events
from commprof.trace.rank_files.layout import RankFile
from commprof.trace.rank_files.writer import EventFile, RecordFile


def row(bucket, parameters="a.weight,a.bias", **more):
    return {
        "bucket": bucket,
        "numel": 96,
        "bytes": 384,
        "capacity": 4096,
        "dtype": "float32",
        "owners": "0,1",
        "parameters": parameters,
        "flush_reason": "full",
    } | more


@pytest.fixture
def journal(tmp_path):
    journal = Journal()
    journal.open(RecordFile(tmp_path / "r", RankFile(0, 0, 1, 1)), EventFile(tmp_path / "r"))
    yield journal
    journal.close({})


def flushes(path):
    rows = read_events(path).rows["buckets"]
    return [{name: value for name, value in each.items() if name != "id"} for each in rows]


def test_a_bucket_that_comes_again_costs_a_short_line_and_reads_back_whole(journal):
    buckets = BucketRows(journal)
    expected = []
    for step in range(50):
        for number in range(3):
            given = row(number, ",".join(f"layers.{number}.{k}.weight" for k in range(100)))
            buckets.add(hooks.bucket(**given), step, 0, 1000 * step + number)
            expected.append(given | {"step": step, "micro_step": 0, "time_ns": 1000 * step + number})
        buckets.write()
    path = journal.events.path
    assert flushes(path) == expected
    assert path.read_text().count("layers.1.7.weight") == 1
    assert path.stat().st_size < 150 * 80 + 3 * 2500


def test_what_differs_is_another_bucket(journal):
    buckets = BucketRows(journal)
    given = [row(0), row(0, "a.weight"), row(0, flush_reason="end_of_backward"), row(0)]
    for number, each in enumerate(given):
        buckets.add(hooks.bucket(**each), 0, number, number)
    buckets.write()
    assert flushes(journal.events.path) == [
        each | {"step": 0, "micro_step": number, "time_ns": number} for number, each in enumerate(given)
    ]


@pytest.mark.parametrize(
    ("given", "step"), [(row(0, owners=[0, 1]), 3), (row(0), 3.5), (row(0), True)], ids=str
)
def test_whatever_a_program_publishes_is_written(journal, given, step):
    buckets = BucketRows(journal)
    content = hooks.bucket(**given)
    for time_ns in (1, 2):
        buckets.add(content, step, 0, time_ns)
    buckets.write()
    assert flushes(journal.events.path) == [
        given | {"step": step, "micro_step": 0, "time_ns": time_ns} for time_ns in (1, 2)
    ]


def test_buckets_that_never_come_again_take_no_memory_without_end(journal, monkeypatch):
    monkeypatch.setattr("commprof.recorder.training.published_buckets._MOST_KNOWN", 10)
    buckets = BucketRows(journal)
    for number in range(35):
        buckets.add(hooks.bucket(**row(number)), 0, 0, number)
    buckets.write()
    assert len(buckets._numbers) <= 10
    assert [each["bucket"] for each in flushes(journal.events.path)] == list(range(35))


def test_a_flush_whose_bucket_is_lost_is_counted_as_torn(journal):
    buckets = BucketRows(journal)
    buckets.add(hooks.bucket(**row(0)), 0, 0, 1)
    buckets.write()
    path = journal.events.path
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if b'"kind":"bucket"' not in line))
    events = read_events(path)
    assert events.rows["buckets"] == [] and events.torn == 1


def test_flushes_wait_for_the_next_step_and_are_not_kept_without_end(journal, monkeypatch):
    monkeypatch.setattr("commprof.recorder.training.published_buckets._MOST_WAITING", 10)
    buckets, content = BucketRows(journal), hooks.bucket(**row(0))
    for time_ns in range(14):
        buckets.add(content, 0, 0, time_ns)
    assert [each["time_ns"] for each in flushes(journal.events.path)] == list(range(10))
    buckets.write()
    assert [each["time_ns"] for each in flushes(journal.events.path)] == list(range(14))


def test_a_bucket_that_is_kept_is_described_anew_in_another_recording(journal, tmp_path):
    content = hooks.bucket(**row(0))
    BucketRows(journal).add(content, 0, 0, 1)
    other = Journal()
    other.open(RecordFile(tmp_path / "o", RankFile(0, 0, 2, 1)), EventFile(tmp_path / "o"))
    buckets = BucketRows(other)
    buckets.add(content, 0, 0, 2)
    buckets.write()
    path = other.events.path
    other.close({})
    assert flushes(path) == [row(0) | {"step": 0, "micro_step": 0, "time_ns": 2}]
