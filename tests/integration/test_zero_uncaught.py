"""What a user sees when a config cannot be used and the script does not catch the error."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

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
