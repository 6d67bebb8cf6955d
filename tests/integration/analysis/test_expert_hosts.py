"""Two hosts with two ranks each that exchange tokens.

The modelled bytes between the hosts are compared with the bytes that the interfaces of the hosts sent.
"""

import pytest

from commprof.analysis import api
from commprof.trace.reader import open_run
from support import hosts as network
from support.warm_hosts import run_commprof_on_each

WHY_NOT = network.why_impossible()
pytestmark = [
    pytest.mark.long,
    pytest.mark.root,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]

HOSTS, EACH, STEPS, TOKENS, WIDTH = 2, 2, 3, 2048, 256
# Each rank has one expert, and no other rank has a copy of it, so gradients of experts are not reduced. Apart
# from the gradients of the gate, the ranks exchange only tokens.
PROGRAM = f"""
import torch, torch.distributed as dist
import zero_runtime

zero_runtime.as_deepspeed()
import deepspeed
from deepspeed.moe.layer import MoE

deepspeed.init_distributed(dist_backend="gloo")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        expert = torch.nn.Linear({WIDTH}, {WIDTH})
        self.experts = MoE({WIDTH}, expert, num_experts=4, ep_size=4, k=1, capacity_factor=1.0)

    def forward(self, tokens):
        return self.experts(tokens)[0]


torch.manual_seed(0)
model = Model()
config = {{"train_micro_batch_size_per_gpu": 1, "optimizer": {{"type": "SGD", "params": {{"lr": 0.1}}}}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
tokens = torch.randn({TOKENS}, {WIDTH}, requires_grad=True)
for _ in range({STEPS}):
    dist.barrier()
    engine.backward(engine(tokens).square().mean())
    engine.step()
dist.barrier()
dist.destroy_process_group()
"""
# The capacity is the mean load, so every expert has slots for a quarter of the tokens of each rank. One
# all_to_all sends the tokens and another returns them, and their gradients need two more. Each of the four
# sends half of the buffer of a rank to the two ranks of the other host.
BETWEEN = HOSTS * EACH * 4 * TOKENS * WIDTH * 4 // 2
RECEIVED = 4 * TOKENS * WIDTH * 4 * 3 // 4


def test_tokens_between_hosts_are_what_the_interfaces_sent(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    run = tmp_path / "run"
    with network.hosts(HOSTS) as machines:
        run_commprof_on_each(machines, ["run", "--wire", "--out", str(run), "train.py"], tmp_path, EACH)
        resent = sum(map(network.resent_bytes, machines))
    exchanged = api.exchange_imbalance(run, of_experts=True)
    assert exchanged["between_hosts_bytes"].tolist() == [BETWEEN] * STEPS
    assert exchanged["received_bytes"].tolist() == [RECEIVED] * STEPS
    assert exchanged["imbalance"].tolist() == [1.0] * STEPS
    sent = {
        (row["step"], row["host"]): row["sent_bytes"]
        for row in open_run(run).table("wire").to_pylist()
        if row["device"] == network.INTERFACE and row["step"] is not None
    }
    # The first step also includes the setup of the connections.
    moved = sum(sent[STEPS - 1, machine.name] - sent[0, machine.name] for machine in machines)
    expected = (STEPS - 1) * BETWEEN
    assert expected * 0.98 <= moved <= expected * 1.02 + resent
