"""The content of the wheel: the packages, data files and compiled parts that an installation contains."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

from commprof.trace.rank_files import segments

ROOT = Path(__file__).resolve().parents[2]


def build(source: Path, out: Path, **variables: str) -> tuple[Path, str]:
    """Build a wheel from ``source`` and return its path and the output of the build."""
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=source,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (file,) = out.glob("*.whl")
    return file, built.stdout + built.stderr


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Return a copy of the sources without compiled files, so that the build does not replace files that are in use."""
    target = tmp_path_factory.mktemp("sources")
    for name in ("commprof", "runtime", "dashboards"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    return target


@pytest.fixture(scope="module")
def wheel(sources, tmp_path_factory):
    file, _ = build(sources, tmp_path_factory.mktemp("wheel"))
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
    """torch finds the entry point of the recorder at the end of ``import torch``.

    The wheel contains no ``.pth`` file, so commprof runs no code when an interpreter starts.
    """
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


def test_the_compiled_parts_travel_where_they_were_built(wheel, wheel_names):
    if not segments.IS_COMPILED:
        pytest.skip("no C compiler, or no headers of Python")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for part in ("commprof/trace/_slots", "commprof/recorder/_calls", "commprof/nccl/_scanner"):
        assert part + suffix in wheel_names
    assert not wheel.filename.endswith("-none-any.whl")


@pytest.mark.sampled
@pytest.mark.parametrize(
    "compiler",
    ["no-such-compiler", "true", "false", 'cc "unbalanced', r"sh -c 'printf \\377 >&2; exit 1'"],
    ids=["missing", "writes nothing", "fails", "no command", "says what is no text"],
)
def test_without_a_compiler_the_wheel_is_one_for_all_and_says_so(sources, tmp_path, compiler):
    if sys.platform != "linux":
        pytest.skip("nothing is compiled here")
    copy = tmp_path / "sources"
    shutil.copytree(sources, copy)
    file, said = build(copy, tmp_path / "out", CC=compiler)
    assert file.name.endswith("py3-none-any.whl") and "could not be compiled" in said
    assert not [name for name in zipfile.ZipFile(file).namelist() if name.endswith(".so")]


@pytest.mark.long
def test_a_part_that_fails_to_compile_takes_the_others_with_it(sources, tmp_path):
    """If one part does not compile, the wheel contains no compiled part, because the parts call each other."""
    copy = tmp_path / "sources"
    shutil.copytree(sources, copy)
    build(copy, tmp_path / "whole")
    (copy / "commprof" / "trace" / "_slots.c").write_text("int broken(")
    file, said = build(copy, tmp_path / "out")
    assert "_slots.c could not be compiled" in said or not segments.IS_COMPILED
    assert file.name.endswith("py3-none-any.whl") and not list(copy.rglob("*.so"))
