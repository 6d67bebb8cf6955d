"""Test the numbers of tokens per expert.

On a host the numbers are read immediately. On a device they are read without waiting for the device.
"""

from __future__ import annotations

import pytest
import torch

from commprof.recorder.process.journal import Journal
from commprof.recorder.training import expert_loads
from commprof.recorder.training.expert_loads import ExpertLoads
from commprof.trace.rank_files.events import read_events
from commprof.trace.rank_files.layout import RankFile
from commprof.trace.rank_files.writer import EventFile, RecordFile


class Device:
    """A device whose copies complete when the test requests this."""

    def __init__(self):
        self.reached = self.marked = 0
        self.capturing = False
        self.device = self

    def record(self, event, index, stream=None):
        device, self.marked = self, self.marked + 1

        class Mark:
            number = device.marked

            def query(self):
                return self.number <= device.reached

        return Mark()

    def is_capturing(self):
        return self.capturing


@pytest.fixture
def journal(tmp_path):
    journal = Journal()
    journal.open(RecordFile(tmp_path / "r", RankFile(0, 0, 1, 1)), EventFile(tmp_path / "r"))
    yield journal
    journal.close({})


def rows(journal):
    return [
        (row["layer"], row["counts"], row["capacity"], row["tokens"])
        for row in read_events(journal.events.path).rows["expert_load"]
    ]


def notes(journal):
    return [row["text"] for row in read_events(journal.events.path).rows["note"]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_counts_of_a_host_are_written_at_once(journal, dtype):
    loads = ExpertLoads(journal)
    journal.move(3, 1)
    loads.add("moe", torch.tensor([1, 0, 1], dtype=dtype), 4, 9)
    (line,) = read_events(journal.events.path).rows["expert_load"]
    assert rows(journal) == [("moe", [1, 0, 1], 4, 9)]
    assert (line["step"], line["micro_step"]) == (3, 1)


def test_counts_of_a_device_are_written_when_they_have_arrived_with_the_step_in_which_they_were_computed(
    journal,
):
    device = Device()
    loads = ExpertLoads(journal, {"cpu": lambda: device})
    counts = torch.tensor([5, 3])
    for step in range(4):
        journal.move(step, 0)
        loads.add("moe", counts + step, 8, 8)
    assert rows(journal) == []
    device.reached = 2
    loads.add("moe", counts, 8, 8)
    assert [each[1] for each in rows(journal)] == [[5, 3], [6, 4]]
    device.reached = 4
    loads.finish()
    assert [each[1] for each in rows(journal)] == [[5, 3], [6, 4], [7, 5], [8, 6]]
    assert [row["step"] for row in read_events(journal.events.path).rows["expert_load"]] == [0, 1, 2, 3]
    assert notes(journal) == [
        "expert loads of 1 forward passes were not recorded: the device had not computed them when recording ended"
    ]


def test_a_tensor_of_the_program_may_change_or_go_once_it_was_published(journal):
    device = Device()
    loads = ExpertLoads(journal, {"cpu": lambda: device})
    counts = torch.tensor([5, 3])
    loads.add("moe", counts, 8, 8)
    counts.zero_()
    device.reached = 1
    loads.finish()
    assert rows(journal) == [("moe", [5, 3], 8, 8)]


def test_memory_is_bounded_when_nothing_arrives_and_is_used_again_when_it_does(journal, monkeypatch):
    monkeypatch.setattr(expert_loads, "MOST_UNDER_WAY", 3)
    device = Device()
    loads = ExpertLoads(journal, {"cpu": lambda: device})
    for number in range(5):
        loads.add("moe", torch.tensor([number, 9]), 8, 8)
    device.reached = 3
    for number in range(5, 50):
        loads.add(
            "wide" if number == 30 else "moe", torch.tensor([number] * (4 if number == 30 else 2)), 8, 8
        )
        device.reached += 1
    loads.finish()
    assert [each[1][0] for each in rows(journal)] == [0, 1, 2, *range(5, 50)]
    assert [each for each in notes(journal) if "2 forward passes" in each and "on their way" in each]


def test_counts_of_more_experts_wait_for_room_and_are_counted(journal):
    device = Device()
    loads = ExpertLoads(journal, {"cpu": lambda: device})
    loads.add("moe", torch.tensor([1, 1]), 8, 2)
    loads.add("wide", torch.tensor([1, 1, 1]), 8, 3)
    device.reached = 1
    loads.add("wide", torch.tensor([1, 1, 1]), 8, 3)
    device.reached = 2
    loads.finish()
    assert [each[0] for each in rows(journal)] == ["moe", "wide"] and len(notes(journal)) == 1


def test_nothing_is_asked_of_a_device_while_a_graph_is_captured(journal):
    device = Device()
    loads = ExpertLoads(journal, {"cpu": lambda: device})
    loads.add("moe", torch.tensor([1, 2]), 8, 3)
    device.capturing, device.reached = True, 1
    loads.add("moe", torch.tensor([3, 4]), 8, 7)
    assert rows(journal) == [] and device.marked == 1
    device.capturing = False
    loads.finish()
    assert rows(journal) == [("moe", [1, 2], 8, 3)]
    assert notes(journal) == [
        "expert loads of 1 forward passes were not recorded: a CUDA graph was being captured"
    ]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ((torch.ones(2), 4, 8), "integer tensor"),
        ((torch.ones(2, 2, dtype=torch.int64), 4, 8), "integer tensor"),
        (([1, 2], 4, 8), "integer tensor"),
        ((torch.tensor([1, 2]), torch.tensor(4), 8), "Python integers"),
        ((torch.tensor([1, 2]), 4, None), "Python integers"),
        ((torch.ones(2, dtype=torch.int64, device="meta"), 4, 8), "device type meta"),
    ],
)
def test_what_would_need_a_synchronization_is_refused_and_said(journal, given, reason):
    loads = ExpertLoads(journal)
    for _ in range(3):
        loads.add("moe", *given)
    loads.finish()
    (note,) = notes(journal)
    assert rows(journal) == [] and note.startswith("expert loads of 3 forward passes") and reason in note
    assert journal.faults == 0
