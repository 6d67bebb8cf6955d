"""Layers of experts that a program reports.

Each forward pass must have its step and its dropped tokens.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from commprof import hooks
from support.recording import record

pytestmark = pytest.mark.ranks

LAYER = {
    "layer": "blocks.0.moe",
    "num_experts": 4,
    "ep_size": 2,
    "k": 1,
    "capacity_factor": 1.25,
    "eval_capacity_factor": 2.0,
    "min_capacity": 4,
    "drop_tokens": True,
    "hidden": 16,
    "expert_ranks": "0,1",
}
COUNTS = [7, 0, 2, 3]


def publish(rank, world):
    hooks.describe_expert_layers([LAYER])
    hooks.describe_parameters(
        [
            {
                "name": name,
                "shape": "4",
                "dtype": "float32",
                "numel": 4,
                "requires_grad": True,
                "ep_size": size,
            }
            for name, size in (("wg", None), ("experts.2.w", 2))
        ]
    )
    gone = []
    for step in range(2):
        for micro_step in range(2):
            hooks.step(step, micro_step)
            hooks.phase("forward")
            for _ in range(2 if step else 1):
                counts = torch.tensor(COUNTS) + rank
                gone.append(weakref.ref(counts))
                hooks.expert_load("blocks.0.moe", counts, 5, 12)
                del counts
            dist.all_reduce(torch.ones(2))
            hooks.phase("backward")
        hooks.phase("optimizer")
        hooks.end_step()
        hooks.phase("evaluation")
        hooks.expert_load("blocks.0.moe", torch.tensor(COUNTS), 50, 12)
        hooks.phase("other")
    gc.collect()
    return [each() is None for each in gone]


def test_each_forward_pass_gives_one_row_an_expert(tmp_path):
    run, outcomes = record(tmp_path / "run", 2, publish)
    assert run.health.notes == () and run.health.state == "complete"
    assert all(all(outcome["result"]) for outcome in outcomes)  # no tensor was kept alive
    layers = run.table("expert_layers").to_pylist()
    assert [row["rank"] for row in layers] == [0, 1]
    assert [{name: row[name] for name in LAYER} for row in layers] == [LAYER, LAYER]
    sizes = {row["name"]: row["ep_size"] for row in run.table("parameters").to_pylist()}
    assert sizes == {"wg": None, "experts.2.w": 2}

    rows = [row for row in run.table("expert_loads").to_pylist() if row["rank"] == 1]
    columns = (
        "step",
        "after_step",
        "micro_step",
        "phase",
        "call",
        "expert",
        "tokens",
        "dropped",
        "capacity",
        "sent",
    )
    said = [tuple(row[name] for name in columns) for row in rows]

    def forward(step, micro_step, call):
        tokens = [count + 1 for count in COUNTS]
        dropped = [3, 0, 0, 0]  # 8, 1, 3 and 4 tokens, with 5 slots for each expert
        return [
            (step, None, micro_step, "forward", call, expert, tokens[expert], dropped[expert], 5, 12)
            for expert in range(4)
        ]

    def evaluation(step):
        return [(-1, step, 0, "evaluation", 0, e, COUNTS[e], 0, 50, 12) for e in range(4)]

    assert said == [
        *forward(0, 0, 0),
        *forward(0, 1, 0),
        *evaluation(0),
        *forward(1, 0, 0),
        *forward(1, 0, 1),
        *forward(1, 1, 0),
        *forward(1, 1, 1),
        *evaluation(1),
    ]
    assert {row["layer"] for row in rows} == {"blocks.0.moe"}


def test_steps_that_are_not_to_be_recorded_have_no_loads(tmp_path):
    run, _ = record(tmp_path / "run", 2, publish, steps="1:2")
    steps = {(row["step"], row["after_step"]) for row in run.table("expert_loads").to_pylist()}
    assert steps == {(1, None), (-1, 1)}
    assert len(run.table("expert_layers")) == 2


def without(rank, world):
    hooks.step(0)
    dist.all_reduce(torch.ones(2))


def test_a_program_without_experts_has_empty_tables(tmp_path):
    run, _ = record(tmp_path / "run", 2, without)
    assert len(run.table("expert_layers")) == len(run.table("expert_loads")) == 0


# Each rank has 16 tokens for 8 experts, two on each of four ranks. Expert 5 gets 9 of 16 tokens, which is 4.5
# times the mean of 2.
SHARES = [1, 1, 1, 1, 1, 9, 1, 1]
EVEN = [2] * 8
HIDDEN = 4


def gate_with_a_known_share(rank, world):
    """Run a layer of experts in plain torch.

    Its gate reads the expert from the token, and its buffer is padded.
    """
    row = {"layer": "moe", "num_experts": 8, "ep_size": 4, "k": 1, "capacity_factor": 1.5, "min_capacity": 1}
    row |= {"eval_capacity_factor": 1.5, "drop_tokens": True, "hidden": HIDDEN, "expert_ranks": "0,1,2,3"}
    hooks.describe_expert_layers([row])
    for step in range(3):
        hooks.step(step)
        hooks.phase("forward")
        shares = EVEN if step == 1 else SHARES
        chosen = torch.tensor([expert for expert, count in enumerate(shares) for _ in range(count)])
        logits = torch.nn.functional.one_hot(chosen, 8).float()
        counts = torch.bincount(logits.argmax(dim=1), minlength=8)
        capacity = 3  # 16 tokens / 8 experts x 1.5
        hooks.expert_load("moe", counts, capacity, 16)
        sent = torch.zeros(8, capacity, HIDDEN)
        with hooks.tag("activation", module="moe"):
            for _ in range(2):
                dist.all_to_all_single(torch.empty_like(sent), sent)
        hooks.phase("optimizer")
        hooks.end_step()
        hooks.phase("other")


def test_the_imbalance_of_a_gate_is_found_with_its_number(tmp_path):
    from commprof.analysis import api

    run, _ = record(tmp_path / "run", 4, gate_with_a_known_share)
    rows = api.expert_imbalance(run)
    assert rows["imbalance"].tolist() == [4.5, 1.0, 4.5]
    assert rows["expert"].tolist() == [5, 0, 5]
    # Experts 4 and 5 are on rank 2. They get 10 of 16 tokens, which is 2.5 times the mean of 4.
    assert rows["rank_imbalance"].tolist() == [2.5, 1.0, 2.5] and rows["rank"].tolist() == [2, 0, 2]
    assert rows["dropped"].tolist() == [4 * 6, 0, 4 * 6] and rows["tokens"].tolist() == [64, 64, 64]
    assert rows["dropped_share"].tolist() == [6 / 16, 0, 6 / 16]
    assert rows["highest"].tolist() == [4.5, 1.0, 4.5]  # a capacity_factor of 4.5 is 9 slots
    first = api.experts(run).query("step == 0")
    assert first["tokens"].tolist() == [4 * count for count in SHARES]
    assert first["ranks"].tolist() == ["0", "0", "1", "1", "2", "2", "3", "3"]
    summary = api.expert_summary(run)
    (layer,) = summary.layers
    assert layer.worst == (0, 0, 5, 4.5) and layer.imbalance == 4.5 and summary.steps == 3
    assert summary.dropped_share == pytest.approx(48 / 192)
    # The padded buffer is even. There are 2 exchanges. In each, 4 ranks send 3/4 of 8 x 3 x 4 numbers of 4
    # bytes.
    exchanged = api.exchange_imbalance(run, "activation")
    assert exchanged["wire_bytes"].tolist() == [2 * 4 * 288.0] * 3
    assert exchanged["imbalance"].tolist() == [1.0] * 3
    assert pairs_of(api.matrix(run, op="all_to_all", steps=(0, 0))) == {
        (sender, receiver): 2 * 96.0 for sender in range(4) for receiver in range(4) if sender != receiver
    }


def pairs_of(cells):
    return {(row.sender, row.receiver): row.wire_bytes for row in cells.itertuples()}


def send_uneven(rank, world):
    """Run a program of plain torch whose only hook is the step.

    In step 1 every rank sends 7 parts to rank 1, and one part to each other rank.
    """
    for step in range(2):
        hooks.step(step)
        splits = [7 if step == 1 and other == 1 else 1 for other in range(world)]
        received = [7 if step == 1 and rank == 1 else 1] * world
        sent, got = torch.zeros(sum(splits), 8), torch.zeros(sum(received), 8)
        dist.all_to_all_single(got, sent, received, splits)


def test_the_imbalance_of_uneven_splits_is_found_with_its_number(tmp_path):
    from commprof.analysis import api

    run, _ = record(tmp_path / "run", 4, send_uneven)
    rows = api.exchange_imbalance(run)
    # From other ranks, rank 1 receives 3 x 7 parts of 32 bytes, and each other rank receives 3. The maximum
    # is 21 and the mean 7.5.
    assert rows["imbalance"].tolist() == pytest.approx([1.0, 2.8])
    assert rows["rank"].tolist() == [0, 1] and rows["ranks"].tolist() == [4, 4]
    assert rows["wire_bytes"].tolist() == [12 * 32.0, 30 * 32.0]
    assert rows["most_received_bytes"].tolist() == [3 * 32.0, 21 * 32.0]
    assert pairs_of(api.matrix(run, op="all_to_all", steps=(1, 1))) == {
        (sender, receiver): 32.0 * (7 if receiver == 1 else 1)
        for sender in range(4)
        for receiver in range(4)
        if sender != receiver
    }
    assert api.expert_summary(run) is None and api.experts(run).empty


def train_with_experts(rank, world):
    """Train two steps of two micro-batches with zero_runtime's layer.

    Returns the answer of its gate in each forward pass.
    """
    import zero_runtime
    from zero_runtime.experts.layer import MoE

    torch.manual_seed(0)
    first, layer = torch.nn.Linear(8, 8), MoE(8, torch.nn.Linear(8, 8), num_experts=4, ep_size=2, k=2)
    model = torch.nn.ModuleDict({"first": first, "moe": layer})
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 1},
    }
    model.forward = lambda x: layer(first(x))
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    counts = []
    for number in range(4):
        random = torch.Generator().manual_seed(10 * number + rank)
        output, gate_loss, chosen = engine(torch.randn(16, 8, generator=random))
        counts.append(chosen.tolist())
        engine.backward(output.square().mean() + gate_loss)
        engine.step()
    return counts


def test_zero_runtime_publishes_what_its_gates_chose(tmp_path):
    run, outcomes = record(tmp_path / "run", 4, train_with_experts)
    assert run.health.notes == ()
    rows = run.table("expert_loads").to_pylist()
    for rank, outcome in enumerate(outcomes):
        mine = [row for row in rows if row["rank"] == rank]
        counts = [mine[number : number + 4] for number in range(0, len(mine), 4)]
        assert [[row["tokens"] for row in part] for part in counts] == outcome["result"]
        assert [(part[0]["step"], part[0]["micro_step"]) for part in counts] == [
            (0, 0),
            (0, 1),
            (1, 0),
            (1, 1),
        ]
        # ceil(16 tokens / 4 experts x 1.0 x 2)
        assert {(row["capacity"], row["sent"], row["layer"], row["phase"]) for row in mine} == {
            (8, 16, "moe", "forward")
        }
    layers = {row["rank"]: row["expert_ranks"] for row in run.table("expert_layers").to_pylist()}
    assert layers == {0: "0,1", 1: "0,1", 2: "2,3", 3: "2,3"}
    exchanged = [row for row in run.table("collectives").to_pylist() if row["op"] == "all_to_all"]
    assert {(row["module"], row["purpose"], row["payload_bytes"]) for row in exchanged} == {
        ("moe", "activation", 4 * 8 * 8 * 4)
    }
