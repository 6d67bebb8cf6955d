"""Whole runs with real processes.

The tests check what the script sees, what the launcher prints, and what the run contains afterwards.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support import command

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "COMMPROF_RUN", "PYTHONPATH")
}

# The ways in which a program can detect how it was started.
WITNESS = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path, "stdin": sys.stdin.read(),
    "package": __package__, "main": sys.modules["__main__"] is sys.modules[__name__],
    "site": [name for name in sys.modules if "commprof" in name],
}))
"""

GLOO = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.ones(1000)
for _ in range(int(sys.argv[1])):
    dist.all_reduce(tensor)
dist.broadcast(tensor, src=1)
print(f"{dist.get_rank()} {tensor[0].item()}\\n", end="")  # one write, also where Python is told not to buffer
dist.destroy_process_group()
"""


def commprof(
    *words: str, cwd: Path, env=ENVIRONMENT, input="typed", new_interpreters=True
) -> subprocess.CompletedProcess:
    return command.commprof(
        *words, cwd=cwd, env=env, input=input, timeout=120, new_interpreters=new_interpreters
    )


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def run_of(cwd: Path) -> Path:
    (found,) = (cwd / "traces").iterdir()
    return found


@pytest.fixture
def on_path(monkeypatch):
    """Make commprof importable from any directory, as if it were installed."""
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "runtime")]))


pytestmark = pytest.mark.usefixtures("on_path")


@pytest.mark.sampled
@pytest.mark.parametrize("words", [["sub/witness.py"], ["-m", "sub.witness"]])
def test_the_script_sees_what_plain_python_shows_it(tmp_path, words):
    write(tmp_path / "sub" / "witness.py", WITNESS)
    arguments = ["--help", "-m", "--", "--nproc", "9", "a b", ""]
    plain = subprocess.run(
        [sys.executable, *words, *arguments], cwd=tmp_path, input="typed", capture_output=True, text=True, env=ENVIRONMENT
    )  # fmt: skip
    ours = commprof("run", "--nproc", "1", *words, *arguments, cwd=tmp_path)
    assert ours.returncode == plain.returncode == 0, ours.stderr
    assert json.loads(ours.stdout) == json.loads(plain.stdout)


def test_tracebacks_are_pythons_own(tmp_path):
    write(tmp_path / "fails.py", "def inner():\n    raise ValueError('boom')\ninner()\n")
    plain = subprocess.run(
        [sys.executable, "fails.py"], cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT
    )
    ours = commprof("run", "--nproc", "1", "fails.py", cwd=tmp_path)
    assert ours.returncode == plain.returncode == 1
    assert (
        "\n".join(line for line in ours.stderr.splitlines() if not line.startswith("commprof: "))
        == plain.stderr.strip()
    )


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("program", "code", "message"),
    [
        ("raise SystemExit(7)", 7, "rank 0 failed first; exit code 7"),
        ("import os; os._exit(255)", 255, "exit code 255"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "rank 0 was killed by SIGKILL first; exit code 137",
        ),
        ("import sys; sys.exit('no data')", 1, "no data"),
        ("x = ", 1, "SyntaxError"),
    ],
)
def test_exit_codes_are_the_scripts(tmp_path, program, code, message):
    write(tmp_path / "ends.py", program)
    done = commprof("run", "--nproc", "1", "ends.py", cwd=tmp_path)
    assert done.returncode == code
    assert message in done.stderr
    manifest = json.loads((run_of(tmp_path) / "run.json").read_text())
    assert (manifest["state"], manifest["exit_code"], manifest["first_failed_rank"]) == ("failed", code, 0)


def test_the_command_behind_dashes_gives_its_own_exit_code(tmp_path):
    done = commprof("run", "--", sys.executable, "-c", "raise SystemExit(9)", cwd=tmp_path)
    assert done.returncode == 9
    assert "rank" not in done.stderr.splitlines()[0]


def test_a_signal_to_commprof_ends_the_ranks_as_it_would_end_the_script(tmp_path):
    write(tmp_path / "waits.py", "import os, time\nos.write(1, b'.')\ntime.sleep(60)\n")
    started = subprocess.Popen(
        [sys.executable, "-m", "commprof", "run", "--nproc", "2", "waits.py"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT,
    )  # fmt: skip
    assert started.stdout.read(2) == b".."
    started.send_signal(signal.SIGTERM)
    _, error = started.communicate(timeout=20)
    assert started.returncode == 143
    assert b"was killed by SIGTERM first; exit code 143" in error


@pytest.mark.ranks
def test_two_ranks_are_recorded_and_the_last_line_says_so(tmp_path):
    write(tmp_path / "train.py", GLOO)
    write(tmp_path / "ds.json", '{"zero_optimization": {"stage": 2}}\n')
    words = ["--nproc", "2", "train.py", "5", "--config=ds.json"]
    done = commprof("run", *words, cwd=tmp_path, new_interpreters=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "0 32.0", "1 32.0"]
    run = run_of(tmp_path)
    name = re.escape(f"traces/{run.name}")
    assert re.fullmatch(r"train-\d{8}-\d{6}", run.name)
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(
        rf"commprof: {name}  2 ranks, 12 records, 0 dropped, 0 unseen, recording took [\d.]+ [mu]s of a rank \([\d.]+ %\)"
        rf"  next: commprof report {name}",
        last,
    )
    manifest = json.loads((run / "run.json").read_text())
    assert manifest["config"] == {"zero_optimization": {"stage": 2}}
    assert (manifest["config_path"], manifest["config_argument"]) == ("ds.json", "--config")
    assert (run / "config.json").read_text() == (tmp_path / "ds.json").read_text()
    assert (manifest["state"], manifest["world_size"], manifest["nproc"]) == ("complete", 2, 2)
    assert manifest["tables"] == sorted(file.stem for file in run.glob("*.parquet"))
    assert {"groups", "steps", "wire"} <= {*manifest["tables"]}
    assert not (run / "processes.jsonl").exists()
    report = commprof("report", "latest", "--json", cwd=tmp_path)
    traffic = json.loads(report.stdout)["traffic"]
    assert {(row["op"], row["collectives"], row["payload_bytes"]) for row in traffic} == {
        ("all_reduce", 5, 5 * 4000),
        ("broadcast", 1, 4000),
    }
    moved = {row["device"]: row["sent_bytes"] for row in json.loads(report.stdout)["moved"]}
    assert moved["lo"] > 4000


@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.parametrize("inside", [True, False])
def test_torchrun_around_commprof_and_inside_it(tmp_path, inside):
    write(tmp_path / "train.py", GLOO)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    if inside:
        done = commprof("run", "--", sys.executable, *torchrun, "train.py", "3", cwd=tmp_path)
    else:
        words = [sys.executable, *torchrun, "-m", "commprof", "run", "train.py", "3"]
        done = subprocess.run(
            words, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=ENVIRONMENT
        )
    assert done.returncode == 0, done.stderr
    run_of(tmp_path)  # one run for all ranks
    assert done.stderr.count("2 ranks, 8 records, 0 dropped, 0 unseen") == 1


@pytest.mark.long
@pytest.mark.ranks
def test_the_first_failing_rank_is_named_and_the_others_are_not_left_behind(tmp_path):
    program = (
        GLOO
        + "\nif dist.is_initialized() is False and int(__import__('os').environ['RANK']) == 1: raise SystemExit(3)\n"
    )
    write(tmp_path / "train.py", program)
    done = commprof("run", "--nproc", "2", "train.py", "1", cwd=tmp_path)
    assert done.returncode == 3
    assert "commprof: rank 1 failed first; exit code 3" in done.stderr.splitlines()
    assert "2 ranks, 4 records" in done.stderr.splitlines()[-1]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["-c", "pass"], "no process of the program imported torch.distributed"),
        (["-I", "-c", "pass"], "runs with python -I, -E or -S"),
    ],
)
def test_silence_is_explained(tmp_path, words, reason):
    done = commprof("run", "--", sys.executable, *words, cwd=tmp_path)
    assert done.returncode == 0
    assert "nothing was recorded" in done.stderr.splitlines()[-1]
    assert reason in done.stderr.splitlines()[-1]


def test_a_config_that_is_no_json_is_the_scripts_affair(tmp_path):
    write(tmp_path / "train.py", "print('started')")
    write(tmp_path / "ds.json", '{\n  "fp16": {"enabled": True}\n}')
    done = commprof("run", "--nproc", "1", "train.py", "--config", "ds.json", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout == "started\n"
    assert "warning: ds.json is not JSON: line 2, column 23: True is Python; JSON writes true" in done.stderr
    assert json.loads((run_of(tmp_path) / "run.json").read_text())["config"] is None


@pytest.mark.long
def test_an_existing_run_is_replaced_only_by_force(tmp_path):
    write(tmp_path / "train.py", "print('started')")
    words = ["--nproc", "1", "--out", "run", "train.py"]
    assert commprof("run", *words, cwd=tmp_path).returncode == 0
    before = (tmp_path / "run" / "run.json").read_text()
    again = commprof("run", *words, cwd=tmp_path)
    assert (again.returncode, again.stdout) == (2, "")
    assert "--force" in again.stderr
    assert (tmp_path / "run" / "run.json").read_text() == before
    assert commprof("run", "--force", *words, cwd=tmp_path).returncode == 0


def test_a_run_is_replaced_by_one_with_the_config_of_that_run(tmp_path):
    write(tmp_path / "train.py", "import sys; print(open(sys.argv[2]).read())")
    write(tmp_path / "ds.json", '{"stage": 2}')
    words = ["--nproc", "1", "--force", "--out", "run", "train.py", "--config"]
    assert commprof("run", *words, "ds.json", cwd=tmp_path).returncode == 0
    again = commprof("run", *words, "run/config.json", cwd=tmp_path)
    assert (again.returncode, again.stdout) == (0, '{"stage": 2}\n'), again.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"] == {"stage": 2}


def test_a_run_directory_that_vanishes_does_not_change_the_exit_code(tmp_path):
    write(tmp_path / "train.py", "import shutil; shutil.rmtree('run'); raise SystemExit(4)")
    done = commprof("run", "--nproc", "1", "--out", "run", "train.py", cwd=tmp_path)
    assert done.returncode == 4
    assert "Traceback" not in done.stderr


def test_nproc_contradicts_a_launchers_rank(tmp_path):
    write(tmp_path / "train.py", "print('started')")
    environment = {**ENVIRONMENT, "RANK": "0", "WORLD_SIZE": "2"}
    done = commprof("run", "--nproc", "2", "train.py", cwd=tmp_path, env=environment)
    assert done.returncode == 2
    assert "this process is rank 0 of 2 already" in done.stderr


def test_a_users_sitecustomize_still_runs(tmp_path):
    write(tmp_path / "mine" / "sitecustomize.py", "MARK = 'mine'\nprint('mine ran')\n")
    write(
        tmp_path / "train.py",
        "import sys, sitecustomize; print(sitecustomize.MARK, [p for p in sys.path if 'inject' in p])",
    )
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{tmp_path / 'mine'}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"}
    done = commprof("run", "--nproc", "1", "train.py", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout == "mine ran\nmine ran\nmine []\n".replace("mine ran\n", "", 1)
        or "mine []" in done.stdout
    )


def test_help_is_quick_and_imports_nothing_heavy():
    program = (
        "import sys; from commprof.cli import execute; execute(['--help']);"
        "heavy = ('torch', 'pandas', 'pyarrow', 'numpy', 'dash', 'rich.console');"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # CPU time is measured, because the wall-clock time depends on other tests that run at the same time.
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.stderr.strip() == "[]"
    assert min(seconds) < 1.0  # benchmarks/start_time.py enforces a limit of 200 ms


@pytest.mark.long
@pytest.mark.ranks
def test_what_ddp_issues_in_cpp_is_recorded(tmp_path):
    write(
        tmp_path / "train.py",
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
        dist.destroy_process_group()
        """,
    )
    done = commprof("run", "--nproc", "2", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.search(r"2 ranks, (\d+) records, 0 dropped, (\d+) unseen", done.stderr.splitlines()[-1])
    assert found, done.stderr
    assert int(found[1]) >= 4 and int(found[2]) == 0  # each rank reduces its gradients twice


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            "import sys; sys.exit(3)",
            "failed (exit code 3) before any process that the recorder reached had imported torch.distributed",
        ),
        (
            "import torch.distributed\nraise SystemExit(4)",
            "failed (exit code 4) before any process that the recorder reached had called init_process_group",
        ),
    ],
)
def test_a_program_that_fails_before_its_first_group_is_not_told_about_pythonpath(tmp_path, program, said):
    (tmp_path / "train.py").write_text(program)
    done = commprof("run", "--nproc", "1", "--out", "run", "train.py", cwd=tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert f"nothing was recorded: the program {said}" in last
    assert "PYTHONPATH" not in last and "doctor" not in last
