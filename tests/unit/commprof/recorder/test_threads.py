"""Test threads in the trace.

Each thread has one name, including threads of C++, and nothing is stored for threads that have ended.
"""

import gc
import threading

from commprof import hooks
from commprof.recorder.process import threads
from commprof.recorder.process.journal import Journal
from commprof.recorder.process.threads import ThreadNames


def in_thread(function, name=None):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()), name=name)
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_of_python_has_its_own_name():
    names = ThreadNames()
    assert names.row() == {"name": threading.current_thread().name, "ident": threading.get_ident()}
    row, ident = in_thread(lambda: (names.row(), threading.get_ident()), "loader")
    assert row == {"name": "loader", "ident": ident}


def test_a_thread_of_cpp_keeps_its_name_however_often_it_comes_in(monkeypatch):
    names = ThreadNames()
    native = [70, 71, 70, 71]
    monkeypatch.setattr(
        threads.threading, "current_thread", lambda: threading._DummyThread.__new__(threading._DummyThread)
    )
    monkeypatch.setattr(threads.threading, "get_native_id", lambda: native.pop(0))
    assert [names.row()["name"] for _ in range(4)] == ["native-1", "native-2", "native-1", "native-2"]


def test_threads_that_have_ended_are_forgotten():
    journal = Journal()
    numbers = {in_thread(journal.intern_thread, f"worker-{number}") for number in range(50)}
    gc.collect()
    assert len(numbers) == 50 and len(journal._threads) == 0
    mine = journal.intern_thread()
    assert hooks._thread.state.recorder_number == mine
    journal.close({})
    assert hooks._thread.state.recorder_number == 0
