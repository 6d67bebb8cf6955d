"""A sweep over a small script: the settings of each run, failures that are reported, and the final comparison."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from commprof.analysis import api
from commprof.trace.manifest import COMPLETE, Manifest, create_run, read_manifest
from support.command import ROOT, commprof, environment

READS = "import json, sys; c = json.load(open(sys.argv[sys.argv.index('--config') + 1])); print(c)\n"
CONFIG = {"stage": 1, "deep": {"x": 1}}


def sweep(cwd: Path, *words: str) -> subprocess.CompletedProcess:
    return commprof("sweep", *words, cwd=cwd)


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(READS)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.long
def test_each_run_gets_its_point(script):
    done = sweep(
        script, "--nproc", "1", "--out", "s", "--repeat", "2", "--set", "deep.x=2,3", "--set", "new.key=auto",
        "--", "train.py", "--config", "ds.json", "--set", "mine",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    runs = sorted((script / "s").iterdir())
    manifests = [json.loads((run / "run.json").read_text()) for run in runs]
    assert [(m["sweep"]["point"]["deep.x"], m["sweep"]["repeat"]) for m in manifests] == [
        (2, 0),
        (3, 0),
        (2, 1),
        (3, 1),
    ]
    for run, manifest in zip(runs, manifests, strict=True):
        expected = {"stage": 1, "deep": {"x": manifest["sweep"]["point"]["deep.x"]}, "new": {"key": "auto"}}
        assert json.loads((run / "config.json").read_text()) == manifest["config"] == expected
        assert (run / "output.txt").read_text() == f"{expected}\n"
        assert manifest["command"][1:] == [
            "train.py",
            "--config",
            f"s/{run.name}/config.json",
            "--set",
            "mine",
        ]
    assert json.loads((script / "ds.json").read_text()) == CONFIG
    assert done.stderr.splitlines()[-1] == "commprof: s  4 runs, 0 failed  next: commprof dashboard s"


def test_a_script_that_reads_another_config_fails_loudly(script):
    (script / "train.py").write_text("print(open('ds.json').read())")
    done = sweep(
        script, "--nproc", "1", "--out", "s", "--set", "stage=1,2", "--", "train.py", "--config", "ds.json"
    )
    assert done.returncode == 1
    assert done.stderr.count("the script never opened s/") == 2
    assert "2 failed" in done.stderr.splitlines()[-1]


def test_a_failing_point_does_not_stop_the_others(script):
    (script / "train.py").write_text(READS + "print('the reason'); sys.exit(c['stage'])\n")
    words = ["--nproc", "1", "--set", "stage=0,3,0.0,5", "--", "train.py", "--config", "ds.json"]
    assert "twice" in sweep(script, *words).stderr
    words[3] = "stage=0,3,5"
    done = sweep(script, "--out", "s", *words)
    assert done.returncode == 1
    assert "run 2, stage=3, failed: rank 0 failed first, with exit code 3" in done.stderr
    assert "\\n" not in done.stderr  # the end of the script's output is shown as separate lines
    assert "    the reason" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("commprof: s  3 runs, 2 failed")
    fast = sweep(script, "--out", "f", "--fail-fast", *words)
    assert fast.returncode == 1
    assert "2 runs, 1 failed, 1 not run" in fast.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (["--nproc", "2", "--", "true"], {}, "--nproc cannot be used with"),
        (["--", "true"], {"RANK": "0", "WORLD_SIZE": "2"}, "this process is rank 0 of 2 already"),
        (["--predict", "nowhere", "--", "true"], {}, "nowhere does not exist"),
        (["--predict", "s/01", "--", "true"], {}, "this run is in s, whose runs --force replaces"),
    ],
)
def test_a_sweep_that_is_refused_replaces_nothing(script, words, variables, message):
    create_run(script / "s" / "01", Manifest(script="earlier", state=COMPLETE))
    place = words.index("true") + 1
    words = ["--force", "--out", "s", "--set", "stage=1,2", *words[:place], "--config", "ds.json"]
    done = commprof("sweep", *words, cwd=script, env=environment(**variables))
    assert done.returncode != 0 and message in done.stderr, done.stderr
    assert read_manifest(script / "s" / "01").script == "earlier"


@pytest.mark.long
@pytest.mark.ranks
def test_an_engine_that_uses_other_values_is_found_out(script):
    (script / "train.py").write_text(
        READS
        + "import torch.distributed as dist, commprof.hooks\n"
        + "dist.init_process_group('gloo'); c['deep']['x'] = 7\n"
        + "commprof.hooks.describe_config(c, engine='test')\n"
        + "dist.destroy_process_group()\n"
    )
    done = sweep(
        script, "--nproc", "1", "--out", "s", "--set", "deep.x=5", "--", "train.py", "--config", "ds.json"
    )
    assert done.returncode == 1
    assert "the engine did not use the derived config: deep.x is 7, not 5" in done.stderr


@pytest.mark.long
@pytest.mark.ranks
def test_the_comparison_of_two_reductions(tmp_path):
    done = sweep(
        tmp_path, "--nproc", "2", "--out", "s", "--set", "zero_optimization.use_multi_rank_bucket_allreduce=true,false",
        "--", str(ROOT / "examples" / "train_gpt.py"), "--config", str(ROOT / "examples" / "ds_zero2.json"), "--steps", "2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {
        line.split()[0]: line.split()[1:3] for line in done.stdout.splitlines() if "reduce_scatter  " in line
    }
    assert rows == {
        "use_multi_rank_bucket_allreduce=true": ["reduce_scatter", "all_reduce"],
        "use_multi_rank_bucket_allreduce=false": ["reduce_scatter", "reduce"],
    }
    runs = sorted((tmp_path / "s").iterdir())
    advice = api.compare_both([api.open_run(run) for run in runs]).advice.sentences
    assert advice and " ".join(advice) in " ".join(done.stdout.split())
    assert commprof("compare", *map(str, runs), cwd=tmp_path).stdout in done.stdout


@pytest.mark.long
def test_ctrl_c_in_a_terminal_ends_the_sweep_in_order(script):
    import pty

    (script / "train.py").write_text(
        READS + "import time\nopen(f'ready-{c[\"stage\"]}', 'w')\ntime.sleep(c['stage'])\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(script)
        os.environ.update(PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "runtime")]), TERM="xterm")
        words = [
            "--nproc",
            "1",
            "--out",
            "s",
            "--set",
            "stage=0,60,61",
            "--",
            "train.py",
            "--config",
            "ds.json",
        ]
        os.execv(sys.executable, [sys.executable, "-m", "commprof", "sweep", *words])
    text, told = b"", False
    try:
        while chunk := os.read(terminal, 4096):
            text += chunk
            if (
                not told and (script / "ready-60").exists()
            ):  # in the second run, tables were read and threads exist
                os.write(terminal, b"\x03")
                told = True
    except OSError:  # the terminal closes with its last process
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130, text.decode()
    assert not (script / "ready-61").exists()
    assert b"s  2 runs, 1 failed, 1 not run" in text


@pytest.mark.long
def test_a_script_written_for_deepspeed(script):
    (script / "train.py").write_text(
        "import argparse, deepspeed, json\n"
        "parser = deepspeed.add_config_arguments(argparse.ArgumentParser())\n"
        "print(deepspeed.__version__, json.load(open(parser.parse_args().deepspeed_config))['stage'])\n"
    )
    done = sweep(
        script, "--nproc", "1", "--out", "s", "--engine", "zero_runtime", "--set", "stage=2",
        "train.py", "--deepspeed_config", "ds.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = (script / "s" / "01-stage_2" / "output.txt").read_text()
    assert "+zero.runtime" in said and said.endswith(" 2\n")
