"""The output for an error of zero_runtime that the script does not catch: one sentence and its place, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import zero_runtime
from commprof import hooks
from commprof.recorder.adapters.patching import tagged
from support.command import commprof, environment
from zero_runtime.configuration.reading.checks import integer
from zero_runtime.startup.uncaught import sentence_of

SCRIPT = """
import sys, torch, zero_runtime
model = torch.nn.Linear(3, 2)
zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[1])
"""


def run(tmp_path, text, **environment):
    config = tmp_path / "ds.json"
    config.write_text(text)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, str(script), str(config)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **environment},
    )


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"train_batch_size": 4,\n "fp16": {"enabled": True}}', ("line 2", "True")),
        ('{"train_batch_size": 4, "zero_optimisation": {}}', ("zero_optimisation", "zero_optimization")),
        (
            '{"train_batch_size": 4, "zero_optimization": {"reduce_scater": true}}',
            ("reduce_scater", "reduce_scatter"),
        ),
        (json.dumps({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}), ("7", "2")),
    ],
)
def test_a_bad_config_is_one_line_and_exit_code_2(tmp_path, text, said):
    done = run(tmp_path, text)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("zero_runtime: error: ")]
    assert len(lines) == 1
    assert all(part in lines[0] for part in said)
    assert f"{tmp_path / 'train.py'}, line 4: zero_runtime.initialize(" in done.stderr


def test_the_place_is_in_the_script_where_the_recorder_wraps_the_call():
    check = tagged(integer(1), hooks.tag("other"))
    with pytest.raises(zero_runtime.ConfigError) as error:
        check("reduce_bucket_size", 0)
    assert sentence_of(error.value, error.tb).splitlines()[1].startswith(f"  {__file__}, line ")


NOT_CAST = """
import deepspeed, torch
model = torch.nn.Linear(8, 8)
config = {"train_batch_size": 4, "fp16": {"enabled": True}, "zero_optimization": {"stage": 3}}
engine, *_ = deepspeed.initialize(model=model, config=config)
engine(torch.ones(2, 8))
"""
NOT_READY = """
import torch
from deepspeed.comm import all_reduce
all_reduce(torch.ones(3))
"""
NO_SUCH_NAME = """
from deepspeed.runtime.zero.stage3 import nothing_of_the_kind
"""


def of_two_ranks(tmp_path, text, **variables):
    (tmp_path / "train.py").write_text(text)
    words = ("run", "--engine", "zero_runtime", "--nproc", "2", "train.py")
    return commprof(*words, cwd=tmp_path, env=environment(**variables), new_interpreters=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "said", "line"),
    [
        (NOT_CAST, "set fp16.auto_cast to true", "line 6: engine(torch.ones(2, 8))"),
        (NOT_READY, "call deepspeed.init_distributed()", "line 4: all_reduce(torch.ones(3))"),
        (NO_SUCH_NAME, "nothing_of_the_kind", "line 2: from deepspeed.runtime"),
    ],
    ids=["inputs", "order", "name"],
)
def test_two_ranks_say_the_same_once(tmp_path, text, said, line):
    done = of_two_ranks(tmp_path, text)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("zero_runtime: error: ") == done.stderr.count(line) == 1
    assert said in done.stderr


@pytest.mark.long
def test_the_traceback_is_there_for_who_asks(tmp_path):
    done = of_two_ranks(tmp_path, NOT_READY, ZERO_RUNTIME_LOG_LEVEL="debug")
    assert done.returncode == 2
    assert "Traceback" in done.stderr and "logged_calls.py" in done.stderr


@pytest.mark.long
def test_a_rank_that_fails_alone_is_heard(tmp_path):
    text = "import deepspeed, os\nif os.environ['RANK'] == '1':\n    deepspeed.comm.barrier()\n"
    done = of_two_ranks(tmp_path, text)
    assert done.returncode == 2
    assert done.stderr.count("zero_runtime: error: deepspeed.comm.barrier") == 1


@pytest.mark.long
def test_other_errors_keep_their_traceback(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import zero_runtime\n"
        "try:\n    zero_runtime.initialize(model=None)\n"
        "except zero_runtime.ConfigError:\n    pass\n"
        "raise KeyError('mine')\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "KeyError: 'mine'" in done.stderr
