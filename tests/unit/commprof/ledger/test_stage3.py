"""Test the ledger of stage 3.

Evaluations gather too, and some amounts depend on the order in which modules run. The model has two modules
of 600 and 400 elements on two ranks. Every message is written by hand.
"""

from __future__ import annotations

import pytest

from commprof.analysis import api
from support.runs import SyntheticRun

SIZES = {"a.weight": 600, "b.weight": 400}
A, B = 2400, 1600
CONFIG = {
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "reduce_scatter_impl": "native",
    }
}
# The first micro-batch gathers for each module in the forward and backward pass. Later micro-batches gather
# everything at the root.
RECORDING, KNOWN = (A, B, B, A), (A + B,)


class Stage3:
    def __init__(self):
        self.run = SyntheticRun(world_size=2, config=CONFIG)
        self.run.add_parameters(SIZES)
        for size in (A, B, A, B):
            self.send("broadcast", size, -1, "init", "parameter_broadcast", peer=0)
        for size in (A, B):
            self.send("all_gather", size, -1, "init", "parameter_gather")

    def send(self, op, size, step, phase, purpose, **keys):
        self.run.add_collective(
            op, payload_bytes=size, step=step, phase=phase, purpose=purpose, call_site="torch.py:1", **keys
        )

    def check(self, step, *sizes):
        for size in sizes:
            self.send("broadcast", size, step, "forward", "trace_check", peer=0)

    def gather(self, step, sizes):
        for size in sizes:
            self.send("all_gather", size, step, "forward", "parameter_gather")

    def finish(self, step):
        self.send("reduce_scatter", A + B, step, "backward", "gradient_reduce")
        self.send("all_reduce", 8, step, "optimizer", "gradient_norm")

    def step(self, step, sizes=None):
        self.run.add_step(step)
        if step == 0:
            self.check(step, 8, 0)
        elif step == 1:
            # Both passes enter three modules, and both passes use each of the two parameters.
            self.check(step, 8, 48, 8, 32, 8, 32)
        self.gather(step, sizes if sizes is not None else KNOWN if step else RECORDING)
        self.finish(step)

    def verify(self):
        return api.verify(self.run.open())


def said(verdict, words):
    (found,) = [text for text in verdict.sentences if words in text]
    return found


def trained(*steps):
    job = Stage3()
    for step in steps:
        job.step(step)
    return job


def test_training_alone_closes_without_a_remark():
    verdict = trained(0, 1, 2).verify()
    assert (verdict.state, verdict.unexplained) == ("closed", ())
    assert not [text for text in verdict.sentences if "Step" in text]
    total = 3 * (A + B) + (2 * (A + B) + 8) + (A + B + 136) + (A + B) + 3 * (A + B + 8)
    assert verdict.issued_bytes == verdict.explained_bytes == total


@pytest.mark.parametrize("again", [0, 2])
def test_an_evaluation_gathers_and_the_step_after_it_need_not(again):
    job = trained(0, 1)
    job.gather(1, KNOWN * (1 + again))
    job.step(2, sizes=())
    job.step(3)
    verdict = job.verify()
    assert (verdict.state, verdict.unexplained) == ("closed", ())
    assert f"Step 1, parameter_gather: {1 + again} message" in said(verdict, "of an evaluation")
    assert "the evaluation before this step had already sent the rest" in said(verdict, "Step 2")


def test_an_evaluation_may_do_the_check_of_the_order_of_modules():
    job = trained(0)
    job.check(0, 8, 48, 8, 32, 8, 32)
    job.gather(0, KNOWN)
    job.run.add_step(1)
    job.finish(1)
    job.step(2)
    verdict = job.verify()
    assert (verdict.state, verdict.unexplained) == ("closed", ())


def test_an_evaluation_before_training_shifts_the_recording_of_the_order_of_modules():
    job = Stage3()
    job.check(-1, 8, 0)
    job.gather(-1, KNOWN)
    job.run.add_step(0)
    job.check(0, 8, 24, 8, 16, 8, 16)
    job.gather(0, KNOWN)
    job.finish(0)
    job.run.add_step(1)
    job.check(1, 8, 0)
    job.gather(1, RECORDING)
    job.finish(1)
    verdict = job.verify()
    assert (verdict.state, verdict.unexplained) == ("closed", ())
    assert said(verdict, "Before the first step, parameter_gather: 1 message (4,000 bytes) of an evaluation")
    assert "about 6 (136 bytes) expected: an estimate" in said(verdict, "Step 0, trace_check")
    assert not [text for text in verdict.sentences if "Step 1" in text]


def test_a_second_gather_within_the_step_is_no_evaluation():
    job = trained(0, 1)
    job.run.add_step(2)
    job.gather(2, KNOWN * 2)
    job.finish(2)
    verdict = job.verify()
    assert verdict.state == "mismatch"
    assert {(item.steps, item.op, item.call_site) for item in verdict.unexplained} == {
        ("2", "all_gather", "torch.py:1")
    }


def test_less_than_all_parameters_after_a_step_is_no_evaluation():
    job = trained(0, 1)
    job.gather(1, (A,))
    job.step(2)
    (found,) = job.verify().unexplained
    assert (found.steps, found.payload_bytes) == ("1", A)


def test_an_estimate_has_a_least_amount():
    job = Stage3()
    job.step(0, sizes=(A,))
    verdict = job.verify()
    assert verdict.state == "mismatch"
    assert [(item.kind, item.purpose) for item in verdict.unexplained] == [("missing", "parameter_gather")]


def test_more_than_modules_can_explain_cannot_be_told():
    job = Stage3()
    job.step(0, sizes=RECORDING * 5)
    verdict = job.verify()
    assert verdict.state == "unknown"
    assert "20 messages (40,000 bytes) were issued, about 4 (8,000 bytes) expected" in said(
        verdict, "Cannot tell"
    )


def test_an_estimate_that_one_step_alone_exceeds_cannot_be_told():
    job = Stage3()
    tight = {
        "stage3_max_live_parameters": 500,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
    }
    job.run.config = {"zero_optimization": CONFIG["zero_optimization"] | tight}
    job.step(0)
    for step in (1, 2, 3, 4):
        job.step(step, sizes=(A, B, A, A) if step == 3 else (A, B, A))
    verdict = job.verify()
    assert verdict.state == "unknown"
    assert "Step 3, parameter_gather" in said(verdict, "Cannot tell")
    assert "in most comparable steps" in said(verdict, "Cannot tell")


def test_ranks_that_send_other_bytes_are_a_mismatch():
    run = trained(0, 1).run
    rows = [row for row in run.rows["collectives"] if row["rank"] == 1 and row["purpose"] == "gradient_norm"]
    rows[1]["payload_bytes"] = 16
    verdict = api.verify(run.open())
    assert verdict.state == "mismatch"
    told = said(verdict, "Mismatch")
    assert "in step 1: rank 0 issued all_reduce #22 (8 bytes, float32, SUM)" in told
    assert "; rank 1 issued all_reduce #22 (16 bytes, float32, SUM)" in told


def test_a_budget_takes_what_cannot_be_told_for_broken():
    from commprof.ledger.budget import budget_of, violations
    from commprof.ledger.limits import parse_budget

    budget = parse_budget({"only_requested": True}, "budget.toml")
    job = Stage3()
    job.step(0, sizes=RECORDING * 5)
    (broken,) = violations(job.run.open(), budget)
    assert broken.text.startswith("cannot tell: Step 0, parameter_gather: 20 messages")
    assert "only_requested = false" in budget_of(job.run.open())
    assert violations(trained(0, 1).run.open(), budget) == []


def test_each_small_group_of_a_second_copy_is_expected_to_gather():
    job = Stage3()
    job.run = SyntheticRun(
        world_size=4,
        config={"zero_optimization": CONFIG["zero_optimization"] | {"zero_hpz_partition_size": 2}},
    )
    job.run.add_parameters(SIZES)
    for size in (A, B, A, B):
        job.send("broadcast", size, -1, "init", "parameter_broadcast", peer=0)
    for size in (A, B):
        job.send("all_gather", size, -1, "init", "parameter_gather")
    job.run.add_step(0)
    job.check(0, 8, 0)
    for pg, group in (("1", (0, 1)), ("2", (2, 3))):
        for size in RECORDING:
            job.send("all_gather", size, 0, "forward", "parameter_gather", group=group, pg=pg)
    job.finish(0)
    job.step(1)
    verdict = job.verify()
    assert (verdict.state, verdict.unexplained) == ("closed", ())
    assert not [text for text in verdict.sentences if "Step" in text]
