"""Pipelines compared with recorded runs of DeepSpeed.

Messages between stages, reductions and losses must be equal.
"""

from __future__ import annotations

import functools

import pytest

from support import recorded, recorded_pipelines
from support.ranks import RankError, run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not recorded.ROOT.is_dir(), reason=recorded.MISSING),
]

CASES = recorded_pipelines.cases()
# Cases in which DeepSpeed 0.19.8 fails and this runtime does not: no input requires a gradient, or there is
# no seed_fn.
FAILED_THERE = [case for case in CASES if not case.succeeded]
MATCHED = [case for case in CASES if case.succeeded]
TOLERANCES = {"fp32": 1e-6, "bf16": 5e-3}


@functools.cache
def run(world: int):
    found = [case for case in CASES if case.world == world]
    try:
        return run_ranks(world, recorded_pipelines.replay_all, found, timeout=200)
    except RankError as error:
        return error


def replays(case):
    outcome = run(case.world)
    if isinstance(outcome, RankError):
        raise outcome
    return [each[case.name] for each in outcome]


@pytest.mark.parametrize("case", MATCHED, ids=lambda case: case.name)
def test_recorded_pipeline(case):
    tolerance = TOLERANCES[recorded.precision_of(case)]
    for rank, replay in enumerate(replays(case)):
        assert replay.error is None
        assert replay.losses == pytest.approx(case.results["losses"][str(rank)], rel=tolerance)
        for mine, theirs in zip(replay.norms, case.results["grad_norm"][str(rank)], strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or mine == pytest.approx(theirs, rel=tolerance)
        wanted = recorded_pipelines.expected_calls(case, rank)
        if recorded.precision_of(case) == "bf16" and case.zero.get("stage", 0) == 0:
            # DeepSpeed shards the optimizer here even at stage 0, and so gathers parameters.
            wanted = [call for call in wanted if call.method != "all_gather_single"]
        assert replay.calls == wanted, f"messages of rank {rank}"
    assert replays(case)[0].parts == case.results["engine_rank0"]["parts"]
    evaluated = case.results.get("extra_rank0", {}).get("eval")
    if evaluated is not None:
        assert [replay.evaluated for replay in replays(case)] == [
            pytest.approx(evaluated, rel=1e-6)
        ] * case.world


@pytest.mark.parametrize("case", FAILED_THERE, ids=lambda case: case.name)
def test_what_deepspeed_fails_at(case):
    """Cases in which DeepSpeed fails work here.

    Checkpointed or seeded layers do not change the losses. Sharded gradients are also refused here.
    """
    if case.zero.get("stage", 0) >= 2:
        assert all("use stage 0 or 1" in replay.error for replay in replays(case))
        return
    plain = next(
        each for each in MATCHED if each.config == case.config and not each.flags["args"].get("tied")
    )
    for rank, replay in enumerate(replays(case)):
        assert replay.losses == pytest.approx(plain.results["losses"][str(rank)], rel=1e-6)


def test_there_are_pipelines_of_several_kinds():
    kinds = {name for case in MATCHED for name in case.flags.get("args", {})}
    assert {"tied", "dynamic", "partition", "stages", "eval"} <= kinds
