"""``run --wire`` of a program that evaluates and saves between its steps.

The counters are compared with all bytes that were sent. The expected bytes are written here by hand: 2 ranks,
S bytes in each direction of an all_reduce, 2 S over the loopback.
"""

from __future__ import annotations

import json

import pytest

from support.command import commprof, output

pytestmark = pytest.mark.alone

SIZE = 4 * 2**20
STEPS = 6
SCRIPT = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(1024, 1024, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    model(torch.ones(1, 1024)).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(torch.ones(2**20))  # after the end of the step
    if step % 2:
        model.eval()
        with torch.no_grad():
            model(torch.ones(1, 1024))
        for _ in range(4):
            dist.all_reduce(torch.ones(2**20))
        model.train()
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "saved.pt")
dist.all_reduce(torch.ones(2**20))
dist.destroy_process_group()
"""
OUTSIDE = 4 * (STEPS // 2) + 1
OF_STEPS = 2 * STEPS + OUTSIDE
# The all_reduce after the optimizer step is between two steps if an evaluation follows. It is then outside
# the steps, like the evaluation.
BEFORE_AN_EVALUATION = STEPS // 2


def test_what_moved_is_held_to_the_evaluations_and_checkpoints_between_the_readings_too(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    output("run", "--nproc", "2", "--wire", "--out", "run", "train.py", cwd=tmp_path)
    told = json.loads(commprof("verify", "run", "--json", cwd=tmp_path).stdout)
    (moved,) = told["moved"]
    assert (moved["when"], moved["steps"]) == ("steps", STEPS)
    assert moved["expected_bytes"] == OF_STEPS * 2 * SIZE
    assert moved["outside_bytes"] == (OUTSIDE + BEFORE_AN_EVALUATION) * 2 * SIZE
    ratio = moved["sent_bytes"] / moved["expected_bytes"]
    assert 1 <= ratio < 1.03  # Other processes and retransmissions add to the counters of the host.
    text = " ".join(commprof("verify", "run", cwd=tmp_path).stdout.split())
    assert "Mismatch" not in text and f"{ratio:.3f} times the" in text, text
