"""The messages that the rules expect, compared with those that zero_runtime issues on real ranks.

Both implement the same rules independently.
"""

from __future__ import annotations

import functools
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from commprof.requested import Parameter, expected_in_step
from support.process_group_log import logged
from support.ranks import run_ranks

OPS = {
    "allreduce": "all_reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "uint8": 1, "int64": 8, "float64": 8}
BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}


def sharded(stage, **keys):
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": 20_000, **keys}}


# With two groups, matrices and vectors are in separate groups.
CONFIGS = [
    (config, two_groups)
    for stage in (1, 2)
    for config, two_groups in (
        (sharded(stage), False),
        (sharded(stage, gradient_reduction="reduce_scatter"), True),
        (sharded(stage, gradient_reduction="reduce_scatter", reduce_scatter_impl="native"), False),
        (sharded(stage, gradient_reduction="reduce_scatter", overlap_comm=True), False),
        (sharded(stage, use_multi_rank_bucket_allreduce=False, round_robin_gradients=True), True),
        (sharded(stage, reduce_scatter=False, parameter_alignment=True), True),
        (
            sharded(stage, allgather_partitions=False, compute_grad_norm=False) | {"gradient_clipping": 0},
            True,
        ),
        (sharded(stage, allgather_bucket_size=1_000), True),
        (sharded(stage) | {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2}, True),
        (
            sharded(stage, gradient_accumulation_reduce="boundary") | {"gradient_accumulation_steps": 3},
            True,
        ),
    )
] + [
    ({"zero_optimization": {"stage": 0}}, True),
    ({"bf16": {"enabled": True}}, False),
    (sharded(3), False),
    (
        sharded(3, gradient_accumulation_reduce="boundary", stage3_param_persistence_threshold=0)
        | {"gradient_accumulation_steps": 2},
        True,
    ),
    (sharded(3, reduce_scatter_impl="native", sub_group_size=20_000, stage3_prefetch_bucket_size=0), True),
    (sharded(3, gradient_reduction="all_reduce", stage3_param_persistence_threshold=200), False),
    (
        sharded(3, reduce_scatter=False, stage3_param_persistence_threshold=0)
        | {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2},
        True,
    ),
    (sharded(1, offload_optimizer={"device": "cpu"}, contiguous_gradients=False), True),
    (
        sharded(1, offload_optimizer={"device": "cpu"})
        | {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        False,
    ),
    (sharded(3, offload_optimizer={"device": "cpu", "ratio": 0.5}), False),
    *(
        (base | {"gradient_compression": compression} | more, two_groups)
        for base, compression, more, two_groups in (
            ({"zero_optimization": {"stage": 0}}, {"algorithm": "2bit"}, {}, False),
            (sharded(1), {"topk_ratio": 0.1}, {"communication_data_type": "bf16"}, True),
            (sharded(2), {"algorithm": "1bit"}, {"gradient_accumulation_steps": 2}, True),
            (sharded(2, use_multi_rank_bucket_allreduce=False), {"topk_ratio": 1e-9}, {}, True),
            (sharded(2), {"algorithm": "1bit", "warmup_steps": 1}, {}, False),
            (
                sharded(1),
                {"algorithm": "1bit"},
                {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
                False,
            ),
        )
    ),
    *((sharded(stage) | {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}, True) for stage in (1, 3)),
]


def make_model() -> nn.Module:
    sizes = (37, 131, 257, 67, 11)
    return nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(sizes)))


def optimizer_groups(model: nn.Module, two_groups: bool) -> list[Any]:
    if not two_groups:
        return list(model.parameters())
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1]},
    ]


def issued_by_each_config(rank: int, world: int, cases: tuple[str, ...]) -> dict[str, list[Any]]:
    """Return the collectives of one step (0) and of initialization (-1) for each config of ``cases``, in order."""
    import zero_runtime

    issued = {}
    for config, two_groups in CONFIGS:
        if str(config) not in cases:
            continue
        torch.manual_seed(0)
        model = make_model()
        with logged() as log:
            engine, *_ = zero_runtime.initialize(
                model=model,
                model_parameters=optimizer_groups(model, two_groups),
                config=BASE | config,
            )
            for micro in range(engine.gradient_accumulation_steps()):
                log.at("training", step=0, micro=micro)
                inputs = torch.randn(2, 37).to(next(model.parameters()).dtype)
                engine.backward(engine(inputs).float().square().mean())
                engine.step()
        issued[str(config)] = [tuple(call) for call in log.calls if call.method != "barrier"]
    return issued


@functools.cache
def issued(cases: tuple[str, ...]) -> dict[str, list[Any]]:
    return run_ranks(3, issued_by_each_config, cases, timeout=120)[0]


def payload(call: Any) -> int:
    _, _, _, method, _, _, numel_in, numel_out, dtype, _ = call
    numel = numel_out if OPS[method] == "all_gather" else numel_in
    return numel * ITEM_BYTES[dtype]


def traffic(calls: list[Any]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the count and payload bytes by (init or training, op)."""
    counts: Counter[tuple[str, str]] = Counter()
    sums: Counter[tuple[str, str]] = Counter()
    for call in calls:
        key = ("init" if call[0] < 0 else "training", OPS[call[3]])
        counts[key] += 1
        sums[key] += payload(call)
    return {key: (counts[key], sums[key]) for key in counts}


@pytest.mark.sampled
@pytest.mark.ranks
@pytest.mark.parametrize("number", range(len(CONFIGS)), ids=lambda number: str(CONFIGS[number][0]))
def test_zero_runtime_issues_what_the_rules_expect(cases_that_run, number):
    config, two_groups = CONFIGS[number]
    parameters = [
        Parameter(name, p.numel(), "float32", int(two_groups and p.dim() == 1), True, index)
        for index, (name, p) in enumerate(make_model().named_parameters())
    ]
    wanted: dict[tuple[str, str], tuple[int, int]] = {}
    for row in [
        *expected_in_step(BASE | config, parameters, 3, -1),
        *expected_in_step(BASE | config, parameters, 3, 0),
    ]:
        key = ("init" if row.when == "init" else "training", row.issued_op)
        count, bytes_so_far = wanted.get(key, (0, 0))
        wanted[key] = (count + row.count, bytes_so_far + row.payload_bytes)
    assert traffic(issued(cases_that_run)[str(config)]) == wanted
