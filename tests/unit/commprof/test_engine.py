"""Test ``commprof run --engine``, which determines the target of ``import deepspeed``.

Each process decides when it first imports deepspeed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from commprof import deepspeed_provider
from commprof.deepspeed_provider import Engine
from commprof.errors import UsageError
from commprof.launch import injection
from commprof.launch.user_program import Kind, Program, parse_program, with_engine

ROOT = Path(__file__).parents[3]
RUNTIME = str(ROOT / "runtime")


@pytest.fixture
def installed(tmp_path):
    """Return a directory in which a DeepSpeed is installed."""
    package = tmp_path / "site" / "deepspeed"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0.1-real'\n")
    (tmp_path / "site" / "deepspeed-0.1.dist-info").mkdir()
    (tmp_path / "site" / "deepspeed-0.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.1\n"
    )
    return tmp_path / "site"


# torch does not matter here and is slow to import, so a package stands in for the runtime.
STAND_IN = """
import sys
from importlib.machinery import ModuleSpec
class Loader:
    def create_module(self, spec): return None
    def exec_module(self, module): module.__version__ = "ours"
class Finder:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, Loader()) if name == "deepspeed" else None
    def find_distributions(self, context): return []
def as_deepspeed(): sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def stand_in(tmp_path):
    package = tmp_path / "stand_in" / "zero_runtime" / "deepspeed_names"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text(STAND_IN)
    return tmp_path / "stand_in"


def ask(code, chosen, *paths, runtime, rank="0"):
    """Return the output of a process with the sitecustomize of ``commprof run`` and without packages."""
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([str(injection.DIRECTORY), *map(str, paths)]),
        "COMMPROF_ENGINE_PATHS": os.pathsep.join([str(ROOT), str(runtime)]),
        "RANK": rank,
        **({"COMMPROF_ENGINE": chosen} if chosen else {}),
    }
    return subprocess.run(
        [sys.executable, "-S", "-c", f"import sitecustomize\n{code}"],
        capture_output=True, text=True, env=environment, cwd="/", timeout=60, check=False,
    )  # fmt: skip


VERSION = "import deepspeed; print(deepspeed.__version__)"


@pytest.mark.parametrize(
    ("chosen", "there", "printed"),
    [
        ("zero_runtime", False, "ours"),
        ("zero_runtime", True, "ours"),
        ("auto", False, "ours"),
        ("auto", True, "0.1-real"),
        ("deepspeed", True, "0.1-real"),
        ("", True, "0.1-real"),
    ],
)
def test_which_deepspeed_a_process_gets(chosen, there, printed, installed, stand_in):
    paths = [installed] if there else []
    for code in (VERSION, f"import importlib.util; assert importlib.util.find_spec('deepspeed'); {VERSION}"):
        done = ask(code, chosen, *paths, runtime=stand_in)
        assert (done.returncode, done.stdout.strip()) == (0, printed), done.stderr
        said = [line for line in done.stderr.splitlines() if "--engine auto" in line]
        assert len(said) == (chosen == "auto")
        assert not said or ("zero_runtime" in said[0]) == (printed == "ours")


def test_the_installed_one_is_an_error_where_there_is_none(stand_in):
    done = ask("import deepspeed", "deepspeed", runtime=stand_in)
    assert done.returncode == 1 and "has none installed" in done.stderr
    done = ask(
        "try:\n    import deepspeed\nexcept ImportError:\n    print('none')", "deepspeed", runtime=stand_in
    )
    assert done.stdout.strip() == "none"


def test_other_ranks_say_nothing(stand_in):
    assert ask(VERSION, "auto", runtime=stand_in, rank="1").stderr == ""


def test_the_metadata_that_libraries_ask_for(installed):
    code = "import importlib.metadata as m; print(m.version('deepspeed'))"
    assert ask(code, "deepspeed", installed, runtime=RUNTIME).stdout.strip() == "0.1"
    assert ask(code, "auto", installed, runtime=RUNTIME).stdout.strip() == "0.1"


def test_what_the_ranks_are_told(tmp_path):
    told = injection.injected({}, tmp_path, engine=Engine.ZERO_RUNTIME)
    assert told[deepspeed_provider.VARIABLE] == "zero_runtime"
    assert str(ROOT) in told[deepspeed_provider.PATHS_VARIABLE].split(os.pathsep)
    assert deepspeed_provider.VARIABLE not in injection.injected({}, tmp_path)


def test_a_missing_deepspeed_is_a_usage_error_before_anything_runs(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("")
    program = parse_program([str(script)])
    if deepspeed_provider.is_installed(str(tmp_path)):
        pytest.skip("DeepSpeed is installed here")
    with pytest.raises(UsageError, match="--engine zero_runtime"):
        with_engine(program, Engine.DEEPSPEED)
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("")
    assert with_engine(program, Engine.DEEPSPEED) is program


def test_the_command_deepspeed_without_deepspeed(monkeypatch):
    command = Program(Kind.COMMAND, "deepspeed", ("--num_gpus", "2", "train.py"))
    monkeypatch.setenv("PATH", "/nowhere")
    ours = with_engine(command, Engine.AUTO)
    assert ours.target == sys.executable
    assert ours.arguments == ("-m", "zero_runtime.launch", "--num_gpus", "2", "train.py")
    assert ours.script == "train.py" and ours.stem == "train"
    assert with_engine(command, None) is command is with_engine(command, Engine.DEEPSPEED)


def test_a_deepspeed_on_the_path_goes_before_the_launcher_of_zero_runtime(tmp_path):
    def found(engine: Engine, path: str) -> str | None:
        return shutil.which(
            "deepspeed", path=injection.injected({"PATH": path}, tmp_path, engine=engine)["PATH"]
        )

    ours = str(deepspeed_provider.COMMANDS / "deepspeed")
    assert found(Engine.ZERO_RUNTIME, "/nowhere") == found(Engine.AUTO, "/nowhere") == ours
    assert found(Engine.DEEPSPEED, "/nowhere") is None
    twice = injection.injected(
        {"PATH": f"/nowhere:{deepspeed_provider.COMMANDS}"}, tmp_path, engine=Engine.AUTO
    )["PATH"]
    assert twice == f"/nowhere:{deepspeed_provider.COMMANDS}"
    installed = tmp_path / "deepspeed"
    installed.write_text("#!/bin/sh\n")
    installed.chmod(0o755)
    assert found(Engine.ZERO_RUNTIME, str(tmp_path)) == str(installed)
