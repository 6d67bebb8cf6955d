"""Compressed gradients between four hosts.

The bytes that the interfaces sent, from the kernel's counters, are compared with sizes computed by hand.
"""

from __future__ import annotations

import json
import textwrap

import pytest

from support import hosts as network
from support.warm_hosts import run_on_each

HOSTS = 4
STEPS = 2
WHY_NOT = network.why_impossible()

pytestmark = [
    pytest.mark.long,
    pytest.mark.root,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]

NUMEL = 4 * 512 * 512
PROGRAM = """
import json, sys
import torch, torch.distributed as dist
import zero_runtime

def sent():
    for line in open("/proc/self/net/dev"):
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            return int(counters.split()[8])

zero_runtime.init_distributed("gloo")
found = {}
for name, compression in json.loads(sys.argv[1]).items():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(4)))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 0},
        "gradient_compression": compression,
    }
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    counted = []
    for step in range(STEPS + 1):  # connections are made in the first
        dist.barrier()
        counted.append(sent())
        engine.backward(engine(torch.randn(2, 512)).square().mean())
        engine.step()
    dist.barrier()
    counted.append(sent())
    found[name] = (counted[-1] - counted[1]) / STEPS
print("found", json.dumps(found), flush=True)
dist.destroy_process_group()
"""
CASES = {
    "none": {"algorithm": "none"},
    "topk": {"algorithm": "topk", "topk_ratio": 0.01},
    "1bit": {"algorithm": "1bit"},
    "2bit": {"algorithm": "2bit"},
    "1bit, two phases": {"algorithm": "1bit", "two_phase": True},
}
# A ring sends each payload, including indices and levels, to the n - 1 other ranks. An all_reduce sends 2
# (n-1)/n of the buffer.
EXPECTED = {
    "none": 2 * (HOSTS - 1) / HOSTS * 4 * NUMEL,
    "topk": (HOSTS - 1) * 8 * (NUMEL // 100 + 1),
    "1bit": (HOSTS - 1) * (NUMEL / 8 + 4 * NUMEL / 2048),
    "2bit": (HOSTS - 1) * (NUMEL / 4 + 8 * NUMEL / 2048),
    "1bit, two phases": 2 * (HOSTS - 1) / HOSTS * (NUMEL / 8 + 4 * NUMEL / 2048),
}


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """Return for each case the bytes that a host sent in a step, averaged over the hosts."""
    script = tmp_path_factory.mktemp("hosts") / "train.py"
    script.write_text(textwrap.dedent(PROGRAM).replace("STEPS", str(STEPS)))
    with network.hosts(HOSTS) as machines:
        said = run_on_each(machines, [str(script), json.dumps(CASES)], script.parent)
    found = [
        json.loads(line[6:]) for out, _ in said for line in out.splitlines() if line.startswith("found ")
    ]
    return {name: sum(each[name] for each in found) / HOSTS for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_interfaces_sent_what_the_payloads_are(sent, name):
    # TCP headers add a few percent, and barriers add a little.
    assert 0.99 * EXPECTED[name] < sent[name] < 1.08 * EXPECTED[name] + 20_000


def test_top_one_percent_saves_most_of_the_traffic(sent):
    assert sent["topk"] < 0.05 * sent["none"]
    assert sent["1bit"] < 0.07 * sent["none"]
