"""gloo's event threads have the policy SCHED_BATCH once an engine exists.

A policy that the program has set is not changed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zero_runtime
from support.ranks import run_ranks
from zero_runtime.startup import open_sizes

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no such policy"),
    pytest.mark.skipif(torch.__version__ < "2.13", reason="gloo's threads have no name before torch 2.13"),
]
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam"},
    "zero_optimization": {"stage": 3},
}


def policies():
    """Return (name, policy) of each thread of this process, by thread number."""
    return {
        task.name: (
            (task / "comm").read_text(errors="replace").strip(),
            os.sched_getscheduler(int(task.name)),
        )
        for task in Path("/proc/self/task").iterdir()
    }


def around_an_engine(rank, world):
    """Return :func:`policies` before an engine exists and after a step.

    Also returns the thread whose policy the program has set.
    """
    dist.new_group([0, 1])
    for number in policies():  # in case the tests themselves run with another policy
        os.sched_setscheduler(int(number), os.SCHED_OTHER, os.sched_param(0))
    threads = [number for number, (name, _) in policies().items() if name == "gloo_tcp_loop"]
    os.sched_setscheduler(int(threads[0]), os.SCHED_IDLE, os.sched_param(0))
    # A thread name that is truncated within a character.
    Path(f"/proc/self/task/{os.getpid()}/comm").write_bytes("ränkerränker".encode()[:2])
    before = policies()
    engine, *_ = zero_runtime.initialize(model=torch.nn.Linear(4, 4), config=CONFIG)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    return before, policies(), threads[0]


def test_event_threads_preempt_nothing_and_other_threads_stay_as_they_are():
    for before, after, own in run_ranks(2, around_an_engine):
        loops = {number: policy for number, (name, policy) in after.items() if name == "gloo_tcp_loop"}
        assert len(loops) >= 2
        assert loops.pop(own) == os.SCHED_IDLE
        assert set(loops.values()) == {os.SCHED_BATCH}
        others = [policy for name, policy in after.values() if name != "gloo_tcp_loop"]
        assert (
            set(others)
            == {os.SCHED_OTHER}
            == {policy for number, (_, policy) in before.items() if number != own}
        )


def while_sizes_are_measured(rank, world):
    """Return the policies of gloo's event threads while messages are timed for a size that is "auto"."""
    for number in policies():
        os.sched_setscheduler(int(number), os.SCHED_OTHER, os.sched_param(0))
    seen = []
    measured = open_sizes.measured_cost

    def measured_cost(*args):
        seen.extend(policy for name, policy in policies().values() if name == "gloo_tcp_loop")
        return measured(*args)

    open_sizes.measured_cost = measured_cost
    zero = {"stage": 2, "reduce_bucket_size": "auto"}
    zero_runtime.initialize(model=torch.nn.Linear(4, 4), config={**CONFIG, "zero_optimization": zero})
    return seen


def test_sizes_that_are_auto_are_measured_with_that_policy():
    for seen in run_ranks(2, while_sizes_are_measured):
        assert set(seen) == {os.SCHED_BATCH}
