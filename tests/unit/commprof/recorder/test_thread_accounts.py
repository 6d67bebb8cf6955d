"""Test the kernel's accounts of threads and the device memory of tensors.

Both are read in every step, so the reads must be cheap.
"""

import threading
from pathlib import Path

import pytest
import torch

from commprof.recorder.training import reducer_waits
from commprof.recorder.training.step_writer import _device_bytes


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_accounts_stay_open_and_are_those_of_the_thread():
    accounts = reducer_waits._Accounts()
    own = threading.get_native_id()
    before = descriptors()
    ran, _ = accounts.read(own)
    sum(range(2_000_000))
    assert accounts.read(own)[0] > ran
    assert descriptors() == before + 1
    accounts.keep(())
    assert descriptors() == before


def test_of_a_thread_that_has_ended_nothing_stays_open():
    accounts, numbers, end = reducer_waits._Accounts(), [], threading.Event()

    def work() -> None:
        numbers.append(threading.get_native_id())
        end.wait()

    before = descriptors()
    thread = threading.Thread(target=work)
    thread.start()
    while not numbers:
        pass
    accounts.read(numbers[0])
    end.set()
    thread.join()
    while Path(f"/proc/self/task/{numbers[0]}").exists():
        pass
    with pytest.raises(OSError):
        accounts.read(numbers[0])
    assert descriptors() == before


@pytest.mark.parametrize(
    ("statistics", "expected"),
    [({}, 0), ({"allocated_bytes": {"all": {"current": 4096, "peak": 8192}}}, 4096)],
)
def test_bytes_on_the_device_are_those_allocated_now(monkeypatch, statistics, expected):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: statistics)
    assert _device_bytes() == expected


def test_without_a_device_there_are_no_bytes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert _device_bytes() is None
