"""Test the function that torch calls at the end of ``import torch``."""

import time

import pytest

from commprof.recorder import autoload, session


@pytest.fixture
def asked(monkeypatch):
    """Return the arguments of the requested recordings."""
    calls = []
    monkeypatch.setattr(session, "arm", lambda out=None, **options: calls.append((out, options)))
    for name in ("COMMPROF", "COMMPROF_OUT", "COMMPROF_RUN"):
        monkeypatch.delenv(name, raising=False)
    return calls


@pytest.mark.parametrize("value", [None, "", " ", "0", "false", "No", "off"])
def test_nothing_happens_unless_it_is_asked_for(asked, monkeypatch, value):
    if value is not None:
        monkeypatch.setenv("COMMPROF", value)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        autoload.start()
        times.append(time.perf_counter() - begin)
    assert asked == []
    assert min(times) < 1e-3


def test_the_variables_say_what_to_do(asked, monkeypatch, capsys):
    monkeypatch.setenv("COMMPROF", "1")
    autoload.start()
    monkeypatch.setenv("COMMPROF_OUT", "runs/one")
    autoload.start()
    # ``commprof run`` sets this variable and prints the messages for all ranks.
    monkeypatch.setenv("COMMPROF_RUN", "/run")
    autoload.start()
    monkeypatch.setenv("COMMPROF", "0")
    autoload.start()
    assert asked == [(None, {"speaks": True}), ("runs/one", {"speaks": True}), (None, {})]
    monkeypatch.setenv("COMMPROF", "please")
    monkeypatch.delenv("COMMPROF_RUN")
    autoload.start()
    assert len(asked) == 3
    assert "COMMPROF=please is neither 1 nor 0" in capsys.readouterr().err


def test_no_exception_reaches_torch(monkeypatch, capsys):
    def fails(*args, **options):
        raise RuntimeError("broken")

    monkeypatch.setattr(session, "arm", fails)
    monkeypatch.setenv("COMMPROF", "1")
    autoload.start()
    assert "nothing is recorded: RuntimeError: broken. The training continues" in capsys.readouterr().err
