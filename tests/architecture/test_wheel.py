"""What an installed commprof makes importable."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (file,) = out.glob("*.whl")
    return zipfile.ZipFile(file)


@pytest.fixture(scope="module")
def wheel_names(wheel):
    return wheel.namelist()


def test_the_wheel_holds_three_packages_and_no_generic_name(wheel_names):
    top = {name.split("/")[0] for name in wheel_names if ".dist-info" not in name.split("/")[0]}
    assert top == {"commprof", "zero_runtime", "commprof_dash"}


def test_the_wheel_holds_what_is_not_python(wheel_names):
    for needed in (
        "commprof/py.typed",
        "zero_runtime/py.typed",
        "commprof_dash/py.typed",
        "commprof/launch/inject/sitecustomize.py",
    ):
        assert needed in wheel_names
    assert any(
        name.startswith("commprof/analysis/queries/") and name.endswith(".sql") for name in wheel_names
    )
    assert any(name.startswith("commprof_dash/assets/") for name in wheel_names)


def test_torch_finds_the_recorder_in_it(wheel, tmp_path):
    """As torch looks for it at the end of its import; nothing of ours runs at the start of an interpreter."""
    wheel.extractall(tmp_path)
    points = [
        p
        for found in distributions(path=[str(tmp_path)])
        for p in found.entry_points.select(group="torch.backends")
    ]
    assert [(point.name, point.value) for point in points] == [
        ("commprof", "commprof.recorder.autoload:start")
    ]
    assert not [name for name in wheel.namelist() if name.endswith(".pth")]


def test_the_licence_travels(wheel_names):
    assert any(name.endswith("licenses/LICENSE") for name in wheel_names)
