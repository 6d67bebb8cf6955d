"""Stages whose ranks share sequences or tensors, under every schedule: the training equals that of one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zero_runtime
from support import parallel_training as training
from support.pipelines import MICRO_BATCHES
from support.standing_ranks import run_standing
from zero_runtime.sequence_parallel import DistributedAttention, mean_over_sequence, own_piece

pytestmark = pytest.mark.ranks
LENGTH, WORDS, WIDTH, HEADS, STEPS = 8, 16, 16, 4, 2
SCHEDULES = ({"schedule": "1f1b"}, {"schedule": "zero_bubble"}, {"virtual_stages": 2})


class Words(nn.Module):
    """An embedding of the tokens of whole sequences that returns the vectors of this rank's part of the sequences."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.shared = shared
        self.token, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, x):
        places = torch.arange(LENGTH).expand_as(x)
        if self.shared:
            x, places = own_piece(x), own_piece(places)
        return self.token(x) + self.position(places)


class Causal(nn.Module):
    def forward(self, query, key, value, *rest):
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention = DistributedAttention(Causal()) if shared else Causal()

    def forward(self, hidden):
        query, key, value = self.qkv(hidden).unflatten(-1, (3, HEADS, -1)).unbind(2)
        return hidden + self.attention(query, key, value).flatten(2)


class Loss(nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, logits, y):
        y = own_piece(y) if self.shared else y
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        return mean_over_sequence(loss) if self.shared else loss


def _sequences(rank, world, stages, pieces, schedules):
    found = []
    for schedule in schedules:
        shared = pieces > 1
        layers = [
            zero_runtime.LayerSpec(Words, shared),
            zero_runtime.LayerSpec(Attention, shared),
            zero_runtime.LayerSpec(Attention, shared),
            zero_runtime.LayerSpec(nn.Linear, WIDTH, WORDS),
        ]
        model = zero_runtime.PipelineModule(
            layers, loss_fn=Loss(shared), seed_layers=True, partition_method="uniform"
        )
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "gradient_clipping": 0.2,
            "zero_optimization": {"stage": 1},
            "sequence_parallel_size": pieces,
            "pipeline_parallel": {"pp_size": stages, "micro_batches": MICRO_BATCHES, **schedule},
        }
        engine, *_ = zero_runtime.initialize(model=model, config=config)
        losses = []
        for step in range(STEPS):
            text = torch.randint(
                0, WORDS, (2 * MICRO_BATCHES, LENGTH + 1), generator=torch.Generator().manual_seed(step)
            )
            losses.append(float(engine.train_batch(data=text[:, :-1], targets=text[:, 1:])))
        losses.append(float(engine.eval_batch(data=text[:, :-1], targets=text[:, 1:])))
        found.append([*losses, float(engine.get_global_grad_norm())])
    return found


@pytest.mark.long
def test_stages_of_ranks_that_share_sequences():
    [expected] = run_standing(1, _sequences, 1, 1, SCHEDULES[:1])[0]
    for outcomes in run_standing(4, _sequences, 2, 2, SCHEDULES):
        for found in outcomes:
            assert found == pytest.approx(expected, rel=1e-4)


class Body(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand, self.contract = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden):
        return hidden + self.contract(torch.tanh(self.expand(hidden)))


def _slices(rank, world, stages, slices, schedules, folder):
    found = []
    for number, schedule in enumerate(schedules):
        layers = [
            zero_runtime.LayerSpec(nn.Embedding, training.WORDS, WIDTH),
            *[zero_runtime.LayerSpec(Body, WIDTH)] * 3,
            zero_runtime.LayerSpec(nn.Linear, WIDTH, training.WORDS),
        ]
        model = zero_runtime.PipelineModule(
            layers,
            loss_fn=lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten()),
            seed_layers=True,
        )
        given = training.config(
            1,
            train_batch_size=8,
            gradient_clipping=0.3,
            tp_size=slices,
            tensor_parallel={"plan": {"*.expand": "column", "*.contract": "row"}} if slices > 1 else {},
            pipeline_parallel={"pp_size": stages, **schedule},
        )
        engine, *_ = zero_runtime.initialize(model=model, config=given)
        losses = []
        for step in range(STEPS):
            x, y = training.batch(step, 8)
            losses.append(float(engine.train_batch(data=x, targets=y)))
        engine.save_16bit_model(folder, f"{world}-{number}.bin")
        found.append([*losses, float(engine.get_global_grad_norm())])
    return found


def test_stages_of_ranks_that_share_tensors(tmp_path):
    """Stages whose ranks share tensors train like one process.

    All stages also save one file with whole tensors.
    """
    [expected] = run_standing(1, _slices, 1, 1, SCHEDULES[:1], tmp_path)[0]
    for outcomes in run_standing(4, _slices, 2, 2, SCHEDULES, tmp_path):
        for found in outcomes:
            assert found == pytest.approx(expected, rel=1e-4)
    wanted = torch.load(tmp_path / "1-0.bin", weights_only=True)
    for number in range(len(SCHEDULES)):
        found = torch.load(tmp_path / f"4-{number}.bin", weights_only=True)
        assert set(found) == set(wanted)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)
