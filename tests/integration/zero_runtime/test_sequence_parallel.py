"""Sequences that ranks share: attention by all_to_all, and training that equals that of one process."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zero_runtime
from commprof import hooks
from commprof.analysis import api
from support import recorded
from support.process_group_log import logged
from support.recording import record
from support.standing_ranks import run_standing
from zero_runtime.sequence_parallel import DistributedAttention, mean_over_sequence, own_piece

LENGTH, WORDS, WIDTH, HEADS = 8, 16, 16, 4
CASE = recorded.ROOT / "C_ulysses_w2"


class Attention(nn.Module):
    """Attention with the layout (batch, sequence, heads, width)."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, query, key, value, *rest):
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=self.causal).transpose(1, 2)


class Net(nn.Module):
    """One layer over tokens, on whole sequences or on parts of them."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.shared = shared
        self.token, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WORDS)
        self.attention = DistributedAttention(Attention(True)) if shared else Attention(True)

    def forward(self, x, y):
        places = torch.arange(LENGTH).expand_as(x)
        if self.shared:
            x, y, places = (own_piece(each) for each in (x, y, places))
        hidden = self.token(x) + self.position(places)
        query, key, value = self.qkv(hidden).unflatten(-1, (3, HEADS, -1)).unbind(2)
        attended = self.attention(query, key, value)
        loss = F.cross_entropy(self.out(hidden + attended.flatten(2)).flatten(0, 1).float(), y.flatten())
        return mean_over_sequence(loss) if self.shared else loss


def _train(rank: int, world: int, stage: int, bf16: bool = False, mesh=None):
    torch.manual_seed(0)
    shared = world > 1
    model = Net(shared)
    replicas = world // 2 if shared else 1
    config = {
        "train_micro_batch_size_per_gpu": 4 // replicas,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_clipping": 0.2,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage},
    }
    if shared and mesh is None:
        config["sequence_parallel_size"] = 2
    engine, *_ = zero_runtime.initialize(
        model=model, model_parameters=model.parameters(), config=config, mesh_param=mesh
    )
    assert engine.train_batch_size() == 4 and engine.sequence_parallel_size == (2 if shared else 1)
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        text = torch.randint(0, WORDS, (4, LENGTH + 1), generator=generator)
        own = text.chunk(replicas)[engine.parallelism.replica]
        loss = engine(own[:, :-1].contiguous(), own[:, 1:].contiguous())
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        engine._group.all_reduce(total, why=hooks.tag("metric"))
        losses.append(float(total) / world)
    norm = engine.get_global_grad_norm()
    return losses, None if norm is None else float(norm)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_replicas_of_two_pieces_train_as_one_process_does(stage):
    expected, norm = run_standing(1, _train, stage)[0]
    for losses, own in run_standing(4, _train, stage):
        assert losses == pytest.approx(expected, rel=2e-5)
        assert norm is None or own == pytest.approx(norm, rel=1e-4)


def test_its_all_to_alls_are_not_those_of_tokens_of_experts(tmp_path):
    run, _ = record(tmp_path / "run", 2, _train, 1)
    exchanged = api.exchange_imbalance(run, "activation")
    assert len(exchanged) == 3 and (exchanged["wire_bytes"] > 0).all()
    assert api.exchange_imbalance(run, of_experts=True).empty
    assert api.expert_summary(run) is None


def test_a_mesh_says_the_same_as_the_keys():
    expected, _ = run_standing(1, _train, 1)[0]
    for losses, _ in run_standing(2, _train, 1, False, (1, 2)):
        assert losses == pytest.approx(expected, rel=2e-5)


def _with_rotary_positions(rank: int, world: int):
    group = torch.distributed.new_group(list(range(world)))
    torch.manual_seed(0)
    whole = [torch.randn(1, 8, 2, 5) for _ in range(3)]
    angles = torch.arange(8.0).view(8, 1, 1, 1) * torch.tensor([1.0, 0.1, 1.0, 0.1])

    def local(query, key, value, mask):
        assert mask == "mask"
        return query + 2 * key + value

    def rotated(tensor):
        turned = torch.complex(tensor[..., :2], tensor[..., 2:4])
        turned = turned * torch.polar(torch.ones(8, 1, 2), angles[:, 0, :, :2])
        return torch.cat((turned.real, turned.imag, tensor[..., 4:]), -1)

    mine = [each.chunk(world, 1)[rank] for each in whole]
    found = DistributedAttention(local, group)(*mine, 0, (angles.cos(), angles.sin()), "mask")
    query, key, value = whole
    wanted = rotated(query) + 2 * rotated(key) + value
    torch.testing.assert_close(found, wanted.chunk(world, 1)[rank])


def test_rotary_positions_are_the_fifth_argument():
    """Rotary positions are the fifth argument, as in DeepSpeed, which applies them itself.

    Further arguments are passed to the attention.
    """
    run_standing(2, _with_rotary_positions)


def _recorded(rank: int, world: int):
    group = torch.distributed.new_group(list(range(world)))
    attention = DistributedAttention(Attention(), group)
    torch.manual_seed(rank)
    query, key, value = (torch.randn(2, 8, 4, 16, requires_grad=True) for _ in range(3))
    with logged() as log:
        output = attention(query, key, value, 0)
        output.sum().backward()
    shown = [(call.method, call.group, call.numel_in, call.numel_out) for call in log.calls]
    return float(output.detach().sum()), list(output.shape), float(query.grad.norm()), shown


@pytest.mark.skipif(not CASE.is_dir(), reason=recorded.MISSING)
def test_attention_sends_and_computes_what_deepspeed_was_recorded_to():
    results = json.loads((CASE / "losses.json").read_text())
    with (CASE / "collectives.csv").open() as file:
        rows = list(csv.DictReader(file))
    for rank, (total, shape, norm, sent) in enumerate(run_standing(2, _recorded)):
        assert total == pytest.approx(results["losses"][str(rank)][0], rel=1e-6)
        theirs = [row for row in rows if row["rank"] == str(rank)]
        assert sent == [
            (row["op"], row["group"], int(row["numel_in"]), int(row["numel_out"])) for row in theirs
        ]
        if rank == 0:
            assert shape == results["extra_rank0"]["out_shape"]
            assert norm == pytest.approx(results["extra_rank0"]["grad"], rel=1e-6)
