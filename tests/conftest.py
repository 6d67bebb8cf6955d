"""Settings that every test shares. Set before torch is imported anywhere."""

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

# What is collected stays. By the usual threshold Python would look at all of it ten times meanwhile.
gc.set_threshold(200_000, 20, 100)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # forked ranks must not meet a parent's OpenMP pool
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "COMMPROF_RUN"):
    os.environ.pop(name, None)

# A shell starts background jobs with SIGINT ignored, and programs started by tests would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A thread that a message wakes up does not preempt another one, here and in all processes that tests start: gloo's threads
# would spin for a fifth of the processor time (zero_runtime/startup/gloo_threads.py).
if hasattr(os, "SCHED_BATCH"):
    with contextlib.suppress(OSError):  # a sandbox forbids it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# The files of tests lie in memory where that has room: commands wait for a disk when they write. Another place is taken with
# PYTEST_DEBUG_TEMPROOT, which pytest reads.
MEMORY = "/dev/shm"
ROOM = 8 << 30
if Path(MEMORY).is_dir() and shutil.disk_usage(MEMORY).free >= ROOM:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)


def pytest_configure(config: pytest.Config) -> None:
    sample.set_share(config)
    # What is generated is tried at whatever pace a loaded machine has: no test depends on time.
    settings.register_profile(
        "any pace",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        max_examples=sample.examples(sample.EXAMPLES),
    )
    settings.load_profile("any pace")


@pytest.fixture(scope="session", autouse=True)
def _temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What programs, browsers and killed processes leave in it is removed with the other files of the tests."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        patched.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(scope="module")
def _forgotten_answers() -> None:
    """What tests of other files asked is forgotten."""
    _forget_answers()


@pytest.fixture(autouse=True)
def _no_answers_of_other_tests(
    request: pytest.FixtureRequest, _forgotten_answers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test that asks in its own process works its answers out, and leaves none in the user's cache directory.

    With the marker ``shared_answers`` the answers stay from test to test of a file, as in a server that draws many pages;
    not where a test replaces something: what it replaces has to be asked.
    """
    replaces = "monkeypatch" in inspect.signature(request.function).parameters
    if replaces or request.node.get_closest_marker("shared_answers") is None:
        _forget_answers()
    monkeypatch.setattr("commprof.analysis.storage.answer_files.cache_directory", lambda: None)


@pytest.fixture(autouse=True)
def _no_names_for_other_tests() -> Iterator[None]:
    """A test that lets ``import deepspeed`` import zero_runtime, in its own process, undoes that."""
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
    """Names of the cases of a parametrized test that this session runs: one set of ranks works out these, and no others."""
    family = request.node.nodeid.partition("[")[0] + "["
    return tuple(item.callspec.id for item in request.session.items if item.nodeid.startswith(family))


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sample.mark_long(items)


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection of this process, nor of those forked from it, looks at it again.

    Later ones come after 20,000 new objects and not after 700: in two profiles they took 3 and 14 % of the processor time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    # At its end the interpreter cleans up what was imported: DuckDB reports what is left. Not before: pytest collects five
    # times when a session ends.
    atexit.register(gc.unfreeze)
