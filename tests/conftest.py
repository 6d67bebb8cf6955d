"""Settings that all tests share. They apply before any module imports torch."""

import atexit
import contextlib
import gc
import inspect
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support import sample

# The test items that pytest collects stay in memory. With the default threshold, Python's garbage collector would
# examine all of them ten times during the collection of tests.
gc.set_threshold(200_000, 20, 100)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a forked rank must not inherit an OpenMP pool
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "COMMPROF_RUN"):
    os.environ.pop(name, None)

# A shell starts background jobs with SIGINT ignored, and the programs that tests start would inherit this setting.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# With SCHED_BATCH, a thread that a message wakes up does not preempt a running thread. This applies to this process and
# to all processes that tests start. Otherwise the threads of gloo would spin for a fifth of the processor time
# (zero_runtime/startup/gloo_threads.py).
if hasattr(os, "SCHED_BATCH"):
    with contextlib.suppress(OSError):  # a sandbox may forbid the call
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# The files of tests are in memory if enough memory is free, because commands that write to a disk wait for the disk.
# To use a different directory, set PYTEST_DEBUG_TEMPROOT, which pytest reads.
MEMORY = "/dev/shm"
ROOM = 8 << 30
if Path(MEMORY).is_dir() and shutil.disk_usage(MEMORY).free >= ROOM:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)


def pytest_configure(config: pytest.Config) -> None:
    sample.set_share(config)
    # Property-based tests have no deadline, because a loaded machine may be slow and no result depends on time.
    settings.register_profile(
        "any pace",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        max_examples=sample.examples(sample.EXAMPLES),
    )
    settings.load_profile("any pace")


@pytest.fixture(scope="session", autouse=True)
def _temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set TMPDIR to a directory of pytest, which removes the directory with the other files of the tests.

    This also removes the files that programs, browsers and killed processes leave behind.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        patched.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(scope="module")
def _forgotten_answers() -> None:
    """Clear the answer cache before the first test of a file."""
    _forget_answers()


@pytest.fixture(autouse=True)
def _no_answers_of_other_tests(
    request: pytest.FixtureRequest, _forgotten_answers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clear the answer cache before each test, and disable the user's cache directory.

    With the marker ``shared_answers``, the tests of a file share the cached answers, as in a server that draws many
    pages. A test that takes ``monkeypatch`` always starts with an empty cache, so that its replacements are called.
    """
    replaces = "monkeypatch" in inspect.signature(request.function).parameters
    if replaces or request.node.get_closest_marker("shared_answers") is None:
        _forget_answers()
    monkeypatch.setattr("commprof.analysis.storage.answer_files.cache_directory", lambda: None)


@pytest.fixture(autouse=True)
def _no_names_for_other_tests() -> Iterator[None]:
    """Fail a test that leaves zero_runtime installed as ``deepspeed`` in the test process, and uninstall it."""
    yield
    finder = sys.modules.get("zero_runtime.deepspeed_names.finder")
    if finder is not None and any(isinstance(each, finder.NamesFinder) for each in sys.meta_path):
        finder.uninstall()
        pytest.fail(
            "this test leaves zero_runtime installed as deepspeed: call zero_runtime.deepspeed_names.finder.uninstall"
        )


def _forget_answers() -> None:
    if "commprof.analysis.storage.answer_cache" in sys.modules:
        sys.modules["commprof.analysis.storage.answer_cache"].answer_cache.clear()


@pytest.fixture
def cases_that_run(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Return the names of the cases of a parametrized test that this session runs.

    One set of ranks computes these cases and no others.
    """
    family = request.node.nodeid.partition("[")[0] + "["
    return tuple(item.callspec.id for item in request.session.items if item.nodeid.startswith(family))


@pytest.hookimpl(tryfirst=True)  # run before -m selects tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sample.mark_long(items)


def pytest_collection_finish() -> None:
    """Exclude all existing objects from later garbage collections, in this process and in its forks.

    Imported modules stay in memory anyway. Later collections start after 20,000 new objects instead of 700. In two
    profiles, collections took 3 % and 14 % of the processor time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    # When the interpreter exits, it must be able to clean up the imported objects, because DuckDB reports
    # objects that are left. The objects stay frozen until then, because pytest collects garbage five times when
    # a session ends.
    atexit.register(gc.unfreeze)
