"""The recorder is loaded in every rank, whichever program starts it, and in no other process."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from commprof.trace.reader import open_run

ROOT = Path(__file__).parents[3]
_LAUNCHERS_OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in _LAUNCHERS_OWN and not name.startswith(("COMMPROF", "SLURM_", "OMPI_", "PMI_", "PMIX_"))
}

# The program issues five collectives in a group that its arguments describe, and one more only in the default
# group.
RANK = """
import os, sys, torch, torch.distributed as dist

def work(rank, world, store):
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=world)
    tensor = torch.ones(8)
    for _ in range(5):
        dist.all_reduce(tensor)
    assert tensor[0].item() == world ** 5
    dist.destroy_process_group()
"""


@pytest.fixture
def environment(tmp_path):
    """Make commprof importable with its entry points, as if it were installed."""
    information = tmp_path / "installed" / "commprof-0.1.0.dist-info"
    information.mkdir(parents=True)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in e.items()) for group, e in declared.items()]
    (information / "entry_points.txt").write_text("\n".join(lines))
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: commprof\nVersion: 0.1.0\n")
    paths = [str(ROOT), str(ROOT / "runtime"), str(information.parent)]
    return {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def execute(words, cwd, environment, **more) -> subprocess.CompletedProcess:
    return subprocess.run(
        words, cwd=cwd, env={**environment, **more}, capture_output=True, text=True, timeout=100, check=False
    )


def commprof(*words, cwd, environment, **more):
    return execute([sys.executable, "-m", "commprof", *words], cwd, environment, **more)


def recorded(run: Path) -> list[tuple[int, int]]:
    """Return the rank of each process that wrote a file, and the number of all_reduces recorded in it."""
    from commprof.trace.reader import open_run

    rows = open_run(run).table("collectives").to_pylist()
    pids = sorted({(row["rank"], row["pid"]) for row in rows})
    return [
        (rank, sum(row["pid"] == pid and row["op"] == "all_reduce" for row in rows)) for rank, pid in pids
    ]


# Ranks and their launchers.

# The environment that mpirun gives to its processes.
MPIRUN = """
import os, subprocess, sys
world, command = int(sys.argv[1]), sys.argv[2:]
started = [
    subprocess.Popen(command, env={**os.environ, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(world)})
    for rank in range(world)
]
sys.exit(max(process.wait() for process in started))
"""
MPI_RANK = (
    RANK
    + """
work(int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"]), os.path.abspath("store"))
"""
)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI's mpirun is not installed here")
@pytest.mark.long
@pytest.mark.parametrize("outside", [True, False])
def test_ranks_of_open_mpi(tmp_path, environment, outside):
    write(tmp_path / "train.py", MPI_RANK)
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    ours = [sys.executable, "-m", "commprof", "run", "--out", "run"]
    words = [*ours, "--", *mpirun, sys.executable, "train.py"] if outside else [*mpirun, *ours, "train.py"]
    done = execute(words, tmp_path, environment)
    assert done.returncode == 0, done.stderr
    assert recorded(tmp_path / "run") == [(0, 5), (1, 5)]


@pytest.mark.long
@pytest.mark.ranks
def test_ranks_of_the_deepspeed_launcher(tmp_path, environment):
    python = os.environ.get("COMMPROF_DEEPSPEED_PYTHON")
    if not python:
        pytest.skip("COMMPROF_DEEPSPEED_PYTHON names no interpreter that has the real DeepSpeed")
    write(tmp_path / "train.py", TORCHRUN_RANK)
    launcher = [str(Path(python).with_name("deepspeed")), "--num_gpus", "2", "train.py"]
    words = ["run", "--out", "run", "--", *launcher]
    done = commprof(*words, cwd=tmp_path, environment=environment, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr
    assert recorded(tmp_path / "run") == [(0, 5), (1, 5)]


@pytest.mark.long
@pytest.mark.ranks
def test_ranks_of_mpirun_below_python_below_a_shell_below_make(tmp_path, environment):
    write(tmp_path / "mpirun.py", MPIRUN)
    write(tmp_path / "train.py", MPI_RANK)
    write(tmp_path / "outer.py", "import os, sys; sys.exit(os.system('sh train.sh') >> 8)")
    write(tmp_path / "train.sh", f'exec "{sys.executable}" mpirun.py 2 "{sys.executable}" train.py\n')
    (tmp_path / "Makefile").write_text(f"all:\n\t@{sys.executable} outer.py\n")
    done = commprof("run", "--out", "run", "--", "make", cwd=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    assert recorded(tmp_path / "run") == [(0, 5), (1, 5)]


SPAWN_AND_FORK = (
    RANK
    + """
import torch.multiprocessing as mp
from torch.utils.data import DataLoader

def train(rank, world, store):
    work(rank, world, store)
    loader = DataLoader(list(range(8)), num_workers=2, multiprocessing_context="fork")
    assert sum(int(batch.sum()) for batch in loader) == 28

if __name__ == "__main__":
    for method in ("spawn", "fork"):  # as accelerate's debug_launcher does, too
        mp.start_processes(train, (2, os.path.abspath(method)), nprocs=2, start_method=method)
"""
)


@pytest.mark.long
@pytest.mark.ranks
def test_spawned_and_forked_ranks_are_reached_and_workers_of_a_loader_are_none(tmp_path, environment):
    write(tmp_path / "train.py", SPAWN_AND_FORK)
    done = commprof(
        "run", "--out", "run", "--", sys.executable, "train.py", cwd=tmp_path, environment=environment
    )
    assert done.returncode == 0, done.stderr
    assert sorted(recorded(tmp_path / "run")) == [(0, 5), (0, 5), (1, 5), (1, 5)]


# On each host srun has a daemon that starts the tasks.
SRUN = """
import os, subprocess, sys
hosts = [
    subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)", *sys.argv[1:]],
        env={**os.environ, "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(task), "SLURM_NTASKS": "2",
             "SLURM_LOCALID": "0"},
    )
    for task in range(2)
]
sys.exit(max(host.wait() for host in hosts))
"""
SLURM_RANK = (
    RANK
    + """
work(int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"]), os.path.abspath("store"))
"""
)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("behind_dashes", [pytest.param(False, marks=pytest.mark.long), True])
def test_tasks_of_slurm_on_two_hosts_share_a_run(tmp_path, environment, behind_dashes):
    write(tmp_path / "srun.py", SRUN)
    write(tmp_path / "train.py", SLURM_RANK)
    program = ["--", sys.executable, "train.py"] if behind_dashes else ["train.py"]
    words = [sys.executable, "srun.py", sys.executable, "-m", "commprof", "run", *program]
    done = execute(words, tmp_path, environment)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "traces").iterdir()
    assert run.name == "train-slurm-77.0"
    assert recorded(run) == [(0, 5), (1, 5)]
    assert done.stderr.count("process 0 of 2 (Slurm)") == 1


TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
TORCHRUN_RANK = (
    RANK
    + """
work(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.path.abspath("store"))
print("commprof.recorder.session" in sys.modules, flush=True)
"""
)


@pytest.mark.ranks
def test_one_variable_is_enough_with_any_launcher(tmp_path, environment):
    write(tmp_path / "train.py", TORCHRUN_RANK)
    done = execute([sys.executable, *TORCHRUN, "train.py"], tmp_path, environment, COMMPROF="1")
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "traces").iterdir()
    assert recorded(run) == [(0, 5), (1, 5)]
    assert "commprof: recorded 5 collectives of rank 0 into traces/train-" in done.stderr


@pytest.mark.ranks
def test_without_the_variable_torch_loads_nothing_of_ours(tmp_path, environment):
    write(
        tmp_path / "train.py",
        RANK + "work(0, 1, os.path.abspath('store'))\n"
        "print([n for n in sys.modules if n.startswith('commprof')])",
    )
    done = execute([sys.executable, "train.py"], tmp_path, environment, COMMPROF="0")
    assert done.returncode == 0, done.stderr
    assert set(eval(done.stdout.splitlines()[-1])) <= {
        "commprof",
        "commprof.hooks",
        "commprof.recorder",
        "commprof.recorder.autoload",
    }
    assert not (tmp_path / "traces").exists()


@pytest.mark.long
@pytest.mark.ranks
def test_an_isolated_interpreter_is_reached_through_torch(tmp_path, environment):
    """``python -I`` ignores PYTHONPATH, but finds packages that are installed beside torch."""
    paths = environment["PYTHONPATH"].split(os.pathsep)
    text = f"import sys; sys.path[:0] = {paths!r}\n{RANK}\nwork(0, 1, {str(tmp_path / 'store')!r})\n"
    write(tmp_path / "train.py", text)
    done = commprof(
        "run", "--out", "run", "--", sys.executable, "-I", "train.py", cwd=tmp_path, environment=environment
    )
    assert done.returncode == 0, done.stderr
    assert recorded(tmp_path / "run") == [(0, 5)]


@pytest.mark.long
@pytest.mark.ranks
def test_of_two_commprofs_the_inner_one_records(tmp_path, environment):
    write(tmp_path / "train.py", RANK + "work(0, 1, os.path.abspath('store'))")
    inner = [sys.executable, "-m", "commprof", "run", "--nproc", "1", "--out", "inner", "train.py"]
    done = commprof("run", "--out", "outer", "--", *inner, cwd=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    assert recorded(tmp_path / "inner") == [(0, 5)]
    assert (
        f"this command runs within the recording {tmp_path / 'outer'}: its ranks are recorded into"
        in done.stderr
    )
    last = done.stderr.splitlines()[-1]
    assert "nothing was recorded: a commprof run within this one recorded its ranks" in last
    assert not list((tmp_path / "outer").glob("rank-*"))


# Other processes that a job starts below commprof.


def test_a_process_without_torch_gets_one_module_and_no_more(tmp_path, environment):
    program = "import sys; print(sorted(sys.modules))"
    plain = execute([sys.executable, "-c", program], tmp_path, environment)
    ours = commprof(
        "run", "--out", "run", "--", sys.executable, "-c", program, cwd=tmp_path, environment=environment
    )
    assert set(eval(ours.stdout)) - set(eval(plain.stdout)) <= {"sitecustomize", "__future__"}


CUSTOM = "import sys; print('{name} ran, path of', len(sys.path))\n{more}"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("sitecustomize", ""),
        ("sitecustomize", "raise RuntimeError('of the user')"),
        ("sitecustomize", "import no_such_module"),
        ("usercustomize", ""),
    ],
)
def test_what_the_user_has_python_import_at_its_start_runs_as_ever(tmp_path, environment, name, more):
    write(tmp_path / "mine" / f"{name}.py", CUSTOM.format(name=name, more=more))
    paths = f"{tmp_path / 'mine'}{os.pathsep}{environment['PYTHONPATH']}"
    # commprof itself is a Python program, so only the output of the script is compared.
    write(
        tmp_path / "quiet.sh", f'"{sys.executable}" -c "import {name}; print({name}.__file__)" >out 2>err\n'
    )
    outcomes = []
    for prefix in ([], [sys.executable, "-m", "commprof", "run", "--out", "run", "--"]):
        done = execute(
            [*prefix, "sh", "quiet.sh"], tmp_path, environment, PYTHONPATH=paths, PYTHONNOUSERSITE=""
        )
        outcomes.append((done.returncode, (tmp_path / "out").read_text(), _last_line(tmp_path / "err")))
    assert outcomes[0] == outcomes[1]
    assert f"{name} ran" in outcomes[0][1]


def _last_line(path: Path) -> str:
    return (path.read_text().splitlines() or [""])[-1]


@pytest.mark.sampled
@pytest.mark.parametrize("flag", ["-I", "-S"])
def test_interpreters_that_pass_us_by_are_explained(tmp_path, environment, flag):
    done = commprof("run", "--", sys.executable, flag, "-c", "pass", cwd=tmp_path, environment=environment)
    assert done.returncode == 0
    assert (
        "nothing was recorded: no Python process of the program could be reached"
        in done.stderr.splitlines()[-1]
    )
    assert "python -I, -E or -S" in done.stderr.splitlines()[-1]


@pytest.mark.long
def test_the_exit_code_of_a_command_stays_its_own(tmp_path, environment):
    done = commprof("run", "--", "sh", "-c", "kill -9 $$", cwd=tmp_path, environment=environment)
    assert done.returncode == 137
    assert json.loads(next((tmp_path / "traces").glob("*/run.json")).read_text())["exit_code"] == 137


DAMAGED = {"COMMPROF_OPTIONS": '{"warmup": -3, "colour": "red", "clocks": false}'}
IGNORED = ("option warmup -3 is ignored", "option 'colour' is ignored")


def said(done) -> list[int]:
    assert done.returncode == 0, done.stderr
    return [done.stderr.count(text) for text in IGNORED]


@pytest.mark.long
@pytest.mark.ranks
def test_damaged_options_are_said_once_by_rank_0(tmp_path, environment):
    from commprof.trace.reader import open_run

    write(tmp_path / "train.py", TORCHRUN_RANK)
    words = [sys.executable, *TORCHRUN, "train.py"]
    assert said(execute(words, tmp_path, environment, COMMPROF="1", **DAMAGED)) == [1, 1]
    (run,) = (tmp_path / "traces").iterdir()
    assert [sum(text in note for note in open_run(run).health.notes) for text in IGNORED] == [1, 1]
    assert recorded(run) == [(0, 5), (1, 5)]


@pytest.mark.ranks
@pytest.mark.long
def test_damaged_options_are_said_once_by_the_launcher(tmp_path, environment):
    write(tmp_path / "train.py", TORCHRUN_RANK)
    words = ["run", "--nproc", "2", "--out", "run", "--steps", ":9", "train.py"]
    done = commprof(*words, cwd=tmp_path, environment=environment, **DAMAGED)
    assert said(done) == [1, 1]
    assert recorded(tmp_path / "run") == [(0, 5), (1, 5)]


def test_what_can_be_used_of_damaged_options_reaches_the_ranks(tmp_path):
    from commprof.launch.injection import injected
    from commprof.recorder.process.recorder_options import from_mapping

    options = from_mapping({"steps": ":9"})[0]
    passed_on = [
        injected(environment, tmp_path, recording=recording).get("COMMPROF_OPTIONS")
        for environment in (DAMAGED, {"COMMPROF_OPTIONS": "{"})
        for recording in (options, from_mapping({})[0])
    ]
    found = [text and json.loads(text) for text in passed_on]
    assert found == [{"clocks": False, "steps": ":9"}, {"clocks": False}, {"steps": ":9"}, None]


@pytest.mark.ranks
@pytest.mark.long
def test_damaged_options_are_said_once_where_forked_processes_become_the_ranks(tmp_path, environment):
    write(tmp_path / "train.py", SPAWN_AND_FORK.replace('("spawn", "fork")', '("fork",)'))
    done = execute([sys.executable, "train.py"], tmp_path, environment, COMMPROF="1", **DAMAGED)
    assert said(done) == [1, 1]


@pytest.mark.long
def test_jobs_of_torchrun_that_start_together_are_named_by_script_and_time_and_never_share_a_run(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(4))\n"
        "dist.barrier(); dist.destroy_process_group()\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    # The second program starts each of its ranks through a shell.
    programs = (["train.py"], ["--no-python", "sh", "-c", f"{sys.executable} train.py; true"])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COMMPROF")}
    jobs = [
        subprocess.Popen(
            [*torchrun, *words], cwd=tmp_path, env=kept | {"COMMPROF": "1", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for words in programs
    ]  # fmt: skip
    for job in jobs:
        _, said = job.communicate(timeout=120)
        assert job.returncode == 0, said
    runs = sorted((tmp_path / "traces").iterdir())
    assert len(runs) == 2
    for run in runs:
        assert re.fullmatch(r"train-\d{8}-\d{6}(-2)?", run.name)
        health = open_run(run).health
        assert (health.ranks_recorded, health.missing_ranks, health.records) == (2, (), 4)
