"""Test the output of ``commprof doctor`` about the entry point with which torch starts the recorder."""

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from commprof.cli.entry_point import GROUP, NAME, VALUE, examine

OTHER = EntryPoint("hpu", "habana_frameworks.torch:start", GROUP)
OWN = EntryPoint(NAME, VALUE, GROUP)
ROOT = Path(__file__).parents[4]


def test_the_entry_point_of_this_commprof_works():
    works, text = examine([OTHER, OWN], {})
    assert works and "COMMPROF=1 records with any launcher" in text


@pytest.mark.parametrize(
    ("entries", "environment", "expected"),
    [
        ([OTHER], {}, "of commprof is not installed"),
        (
            [EntryPoint(NAME, "commprof.recorder.autoload:begin", GROUP)],
            {},
            "it names commprof.recorder.autoload:begin, not",
        ),
        ([EntryPoint("other", "commprof.gone:start", GROUP)], {}, "it names commprof.gone:start"),
        ([OWN], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set"),
    ],
)
def test_what_is_wrong_with_it_is_said_with_what_is_lost(entries, environment, expected):
    works, text = examine(entries, environment)
    assert not works and expected in text and "COMMPROF=1 records nothing" in text


def test_one_that_cannot_be_loaded_or_starts_another_commprof(monkeypatch):
    def fails(self):
        raise ImportError("no module named commprof")

    monkeypatch.setattr(EntryPoint, "load", fails)
    assert "cannot be loaded (ImportError: no module named commprof)" in examine([OWN], {}).text
    monkeypatch.setattr(EntryPoint, "load", lambda self: os.path.join)
    assert "it starts a different installation of commprof (" in examine([OWN], {}).text


def test_the_declared_entry_point_is_the_one_that_is_looked_for():
    import tomllib

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert declared[GROUP] == {NAME: VALUE}


@pytest.mark.sampled
@pytest.mark.parametrize(("switch", "missed"), [("1", "python -S:"), ("0", "python -I, -E or -S:")])
def test_doctor_names_the_interpreters_that_are_not_reached_with_and_without_it(switch, missed):
    done = subprocess.run(
        [sys.executable, "-m", "commprof", "doctor"],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": switch},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert f"programs run with {missed}" in " ".join(done.stdout.split())


@pytest.mark.long
def test_doctor_tells_a_missing_one_and_a_torch_that_another_packages_breaks(tmp_path):
    information = tmp_path / "broken-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[torch.backends]\nbroken = nothing_there:start\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    done = subprocess.run(
        [sys.executable, "-m", "commprof", "doctor"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    told = " ".join(done.stdout.split())
    assert "torch cannot be imported" in told and "broken" in told and "nothing_there" in told
