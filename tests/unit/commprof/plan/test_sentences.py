"""Test the blocks, the latency and the frozen parameters of a plan against hand-computed values."""

from __future__ import annotations

import pytest

from commprof.calibration.file import write_calibration
from commprof.calibration.results import Calibration, Timing
from commprof.cli import execute
from commprof.plan.blocks import all_gathers, all_gathers_by_block, blocks_of
from commprof.plan.hosts import Hosts, Links
from commprof.plan.latency import by_calibration, gradient_bound, gradient_chunk
from commprof.plan.models import Model, sized_model
from commprof.plan.predictions import Job, predict
from commprof.plan.traffic import traffic_of
from commprof.requested.expectation import row
from commprof.requested.parameters import Parameter
from commprof.schema import Op, Purpose

STAGE_3 = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
    },
}


def calibration(alpha_ns: int, ns_per_byte: float) -> Calibration:
    sizes = [2**n for n in range(10, 25, 2)]
    times = tuple(Timing(size, t, t, t, 20) for size in sizes for t in [round(alpha_ns + ns_per_byte * size)])
    return Calibration(
        created="2026-01-02T03:04:05+00:00",
        torch="2.13.0",
        backend="gloo",
        backend_version=None,
        device="cpu",
        dtype="float32",
        world_size=4,
        hosts=("a",),
        machine={"system": "Linux", "machine": "x86_64", "cpus": 2, "accelerator": None},
        timings={"all_reduce": times},
    )


def test_blocks_are_the_outermost_numbered_modules_that_contain_modules():
    names = ("wte", "h.0.attn.qkv", "h.0.mlp.experts.0.fc", "h.1.attn.qkv", "0", "head")
    assert blocks_of(Parameter(f"{name}.weight", 4) for name in names) == ["h.0", "h.1"]


def test_gathering_by_block_launches_one_all_gather_for_each():
    job = Job(sized_model(4 * 12 * 64 * 64, 4), 8, 8)
    found = predict(STAGE_3, job)
    # There are four matrices in each of four layers, in the forward and the backward pass. With blocks there
    # is one message per layer. zero_runtime does not release the last block between the passes.
    assert (all_gathers(found.sent), all_gathers_by_block(found, job)) == (32, 7)
    deepspeed = job._replace(framework="deepspeed")
    assert all_gathers_by_block(predict(STAGE_3, deepspeed), deepspeed) == 8
    units = {"leaf_module": {"names": ["layers.0"]}}
    config = {**STAGE_3, "zero_optimization": {**STAGE_3["zero_optimization"], **units}}
    assert all_gathers_by_block(predict(config, job), job) is None
    flat = Job(Model([Parameter("0.weight", 64), Parameter("1.weight", 64)], None, ""), 8, 8)
    assert all_gathers_by_block(predict(STAGE_3, flat), flat) is None


def test_a_chunk_below_the_calibrated_one_is_latency_bound():
    """The calibration has 100 us and 1 ns per byte on 4 ranks. A message has 100 kB, and a chunk 25 kB."""
    sent = [row("step", Purpose.GRADIENT_REDUCE, Op.ALL_REDUCE, [1_000_000, 2_000_000], 100)]
    chunk = gradient_chunk(traffic_of(sent, Hosts(1, 100)), calibration(100_000, 1.0))
    assert chunk is not None
    assert (chunk.op, chunk.message_bytes, chunk.group_size, chunk.num_bytes) == (
        "all_reduce",
        2_000_000,
        100,
        20_000,
    )
    assert chunk.least_bytes == pytest.approx(25_000, rel=0.01)
    assert chunk.most_ranks == pytest.approx(80, abs=1)
    other = [row("step", Purpose.GRADIENT_REDUCE, Op.REDUCE_SCATTER, [1_000], 100)]
    assert gradient_chunk(traffic_of(other, Hosts(1, 100)), calibration(100_000, 1.0)) is None
    norm = [row("step", Purpose.GRADIENT_NORM, Op.ALL_REDUCE, [4], 100)]
    assert gradient_chunk(traffic_of(norm, Hosts(1, 100)), calibration(100_000, 1.0)) is None


def test_the_sentence_about_latency(tmp_path, capsys):
    config, file = tmp_path / "ds.json", tmp_path / "calibration.json"
    config.write_text('{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}')
    write_calibration(file, calibration(100_000, 1.0))
    words = ["plan", str(config), "--model", "params:1e6", "--calibration", str(file), "--world"]
    assert execute([*words, "1024"]) == 0
    few = " ".join(capsys.readouterr().out.split())
    assert "at 1,024 ranks: latency bound. Up to 16" in few and "(4 ranks, gloo on cpu)" in few
    tiny = [row("step", Purpose.GRADIENT_REDUCE, Op.ALL_REDUCE, [1_000], 8)]
    sentence = by_calibration(tiny, Hosts(1, 8), calibration(100_000, 1.0))
    assert (
        sentence is not None
        and "latency bound. It stays latency bound at any number of ranks: latency equals" in sentence
    )
    assert execute([*words, "8", "--set", "zero_optimization.stage=0,1"]) == 0
    assert "stage=0: The largest gradient message, all_reduce of" in " ".join(capsys.readouterr().out.split())
    assert execute([*words[:-2], str(tmp_path / "absent.json")]) == 1
    assert "absent.json cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_parameters_have_neither_gradients_nor_states(stage):
    trained = [Parameter("a.weight", 4_000), Parameter("b.weight", 4_000)]
    frozen = [trained[0], trained[1]._replace(requires_grad=False)]
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }

    def parts(parameters):
        found = predict(config, Job(Model(parameters, None, ""), 4, 4))
        return {each.what: each.device for each in found.memory}

    whole, part = parts(trained), parts(frozen)
    assert part["parameters"] == whole["parameters"]
    for what in ("gradients", "masters", "optimizer states", "gradient buckets"):
        assert part[what] * 2 == whole[what]
    assert (
        parts([each._replace(requires_grad=False) for each in trained])["parameters"] == whole["parameters"]
    )


def test_the_largest_gradient_message_by_the_model_of_nccl():
    """A ring over 1,024 ranks takes 2,046 steps. Each of the 128 hosts has 8 ranks that share 400 GB/s."""
    links, hosts = Links(450e9, 400e9), Hosts(128, 8)

    def bound(*sizes):
        sent = [row("step", Purpose.GRADIENT_REDUCE, Op.REDUCE_SCATTER, list(sizes), 1024)]
        return gradient_bound(sent, hosts, links)

    # With the protocol Simple, 896 steps within hosts take 3.4 us and 127 steps between hosts take 14 us,
    # plus 8.4 us at the beginning.
    large = bound(10**6, 10**10)
    assert (large.op, large.message_bytes, large.ranks) == ("reduce_scatter", 10**10, 1024)
    assert large.latency_ns == pytest.approx(8_400 + 896 * 3_400 + 127 * 14_000)
    assert large.time_ns == pytest.approx(large.latency_ns + 10**10 * 1023 / 1024 / 400)
    assert not large.by_latency and large.most_ranks >= 1024
    small = bound(2**29)
    assert small.by_latency and 8 <= small.most_ranks < 1024
    assert 2**29 < small.least_bytes == large.least_bytes < 10**10
    assert bound(0) is None and gradient_bound([], hosts, links) is None
    assert (
        gradient_bound([row("step", Purpose.GRADIENT_REDUCE, Op.ALL_REDUCE, [8], 1024)], hosts, Links(1e9))
        is None
    )


def test_other_numbers_of_ranks_are_on_hosts_as_those_of_the_plan():
    """8 ranks do not fit on one host of 6. Two ranks of a group with one rank on each host are on two hosts."""
    sent = [row("step", Purpose.GRADIENT_REDUCE, Op.ALL_REDUCE, [10**10], 6)]
    inside = gradient_bound(sent, Hosts(1, 6), Links(450e9, None))
    assert inside is not None and inside.most_ranks == 4
    pairs = tuple((first, first + 4) for first in range(4))
    for power in range(14, 30):
        sent = [row("step", Purpose.GRADIENT_REDUCE, Op.ALL_REDUCE, [2**power], 2)._replace(groups=pairs)]
        bound = gradient_bound(sent, Hosts(2, 4), Links(450e9, 400e9))
        assert bound is not None and bound.by_latency == (bound.most_ranks < 2)


def test_sentences_about_latency_by_the_model_of_nccl(tmp_path, capsys):
    config = tmp_path / "ds.json"
    config.write_text('{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}')
    words = [
        "plan",
        str(config),
        "--model",
        "params:1e8",
        "--links",
        "intra=450GB/s,inter=8x50GB/s",
        "--world",
    ]
    assert execute([*words, "1024"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "By NCCL's model the largest gradient message, reduce_scatter of" in text
    assert "latency bound. It is bandwidth bound up to" in text
    assert "is latency. Fewer, larger messages or fewer ranks in a group would shorten it." in text
    assert execute([*words, "8"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "of it latency: bandwidth bound up to" in text and "is latency. Fewer" not in text
