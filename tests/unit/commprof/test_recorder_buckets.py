"""Gradient buckets in the events file: each described once, and every flush of it is a row all the same."""

from __future__ import annotations

import pytest

from commprof.recorder.buckets import BucketRows
from commprof.recorder.journal import Journal
from commprof.trace.events import read_events
from commprof.trace.layout import RankFile
from commprof.trace.writer import EventFile, RecordFile


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
            buckets.write(given, step, 0, 1000 * step + number)
            expected.append(given | {"step": step, "micro_step": 0, "time_ns": 1000 * step + number})
    path = journal.events.path
    assert flushes(path) == expected
    assert path.read_text().count("layers.1.7.weight") == 1
    assert path.stat().st_size < 150 * 80 + 3 * 2500


def test_what_differs_is_another_bucket(journal):
    buckets = BucketRows(journal)
    given = [row(0), row(0, "a.weight"), row(0, flush_reason="end_of_backward"), row(0)]
    for number, each in enumerate(given):
        buckets.write(each, 0, number, number)
    assert flushes(journal.events.path) == [
        each | {"step": 0, "micro_step": number, "time_ns": number} for number, each in enumerate(given)
    ]


@pytest.mark.parametrize(
    ("given", "step"), [(row(0, owners=[0, 1]), 3), (row(0), 3.5), (row(0), True)], ids=str
)
def test_whatever_a_program_publishes_is_written(journal, given, step):
    buckets = BucketRows(journal)
    for time_ns in (1, 2):
        buckets.write(given, step, 0, time_ns)
    assert flushes(journal.events.path) == [
        given | {"step": step, "micro_step": 0, "time_ns": time_ns} for time_ns in (1, 2)
    ]


def test_buckets_that_never_come_again_take_no_memory_without_end(journal, monkeypatch):
    monkeypatch.setattr("commprof.recorder.buckets._MOST_KNOWN", 10)
    buckets = BucketRows(journal)
    for number in range(35):
        buckets.write(row(number), 0, 0, number)
    assert len(buckets._numbers) <= 10
    assert [each["bucket"] for each in flushes(journal.events.path)] == list(range(35))


def test_a_flush_whose_bucket_is_lost_is_counted_as_torn(journal):
    buckets = BucketRows(journal)
    buckets.write(row(0), 0, 0, 1)
    path = journal.events.path
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if b'"kind":"bucket"' not in line))
    events = read_events(path)
    assert events.rows["buckets"] == [] and events.torn == 1
