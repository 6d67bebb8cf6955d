"""Test processes that fork while, or after, they ask about a run."""

import os
import subprocess
import sys
import textwrap
import threading

from commprof.analysis.relations.sql_engine import evaluate
from support.runs import SyntheticRun


def made_run():
    run = SyntheticRun(world_size=2)
    run.add_collective("all_reduce", payload_bytes=4096)
    return run


def test_a_fork_beside_many_threads_that_have_asked():
    """A child died in os.fork because it deleted the engines of its parent's threads.

    Each engine waited for threads that do not exist in the child.
    """
    tables = made_run().tables("collectives", "groups")
    asked, may_end = threading.Barrier(17), threading.Event()

    def ask():
        evaluate("rank_operations", tables)
        asked.wait()
        may_end.wait()

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    asked.wait()
    child = os.fork()
    if child == 0:
        os._exit(0)
    may_end.set()
    for thread in threads:
        thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_asks_too_and_both_end(tmp_path):
    """The child has its own engines, because the threads of the parent's engines do not exist in the child."""
    made_run().write(tmp_path / "run")
    text = f"""
        import os, sys
        from commprof.analysis import api
        answer = api.traffic({str(tmp_path / "run")!r})
        child = os.fork()
        again = api.traffic({str(tmp_path / "run")!r}, by=("op",))
        assert again["payload_bytes"].tolist() == answer["payload_bytes"].tolist() == [4096]
        if child:
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
