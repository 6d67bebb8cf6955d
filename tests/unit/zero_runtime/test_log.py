"""Test the log levels that the runtime prints."""

from __future__ import annotations

import logging

import pytest

from zero_runtime import log


@pytest.fixture(autouse=True)
def _no_levels(monkeypatch):
    for variable in log.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    log._number.cache_clear()


@pytest.mark.parametrize(
    ("variables", "level", "said"),
    [
        ({}, logging.INFO, ["asked", "odd"]),
        ({"DEEPSPEED_LOG_LEVEL": "warning"}, logging.WARNING, ["odd"]),
        ({"ZERO_RUNTIME_LOG_LEVEL": "ERROR"}, logging.ERROR, []),
        (
            {"ZERO_RUNTIME_LOG_LEVEL": "debug", "DEEPSPEED_LOG_LEVEL": "error"},
            logging.DEBUG,
            ["asked", "odd"],
        ),
        ({"ZERO_RUNTIME_LOG_LEVEL": "", "DEEPSPEED_LOG_LEVEL": "critical"}, logging.CRITICAL, []),
    ],
)
def test_the_own_variable_comes_before_that_of_deepspeed(monkeypatch, capsys, variables, level, said):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert log.level() == level
    log.info("asked")
    log.warning("odd")
    assert capsys.readouterr().err == "".join(f"zero_runtime: {each}\n" for each in said)


def test_a_level_that_there_is_not_is_said_once(monkeypatch, capsys):
    monkeypatch.setenv("ZERO_RUNTIME_LOG_LEVEL", "loud")
    assert log.level() == log.level() == logging.INFO
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "ZERO_RUNTIME_LOG_LEVEL is 'loud'; expected one of debug, info" in said
