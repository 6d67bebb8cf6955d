"""Averages that are applied some steps late (``communication.bounded_delay``).

The tests check which averages are applied, when, and that all ranks apply the same ones.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from support.ranks import RankError, run_ranks
from support.recording import record

STEPS = 6


def numbered(rank, world, delay, folder):
    """Train with gradients that identify their rank and step.

    The gradient of rank r in step s is 2 to the power s at index (r, s), and 0 elsewhere. Plain SGD at a rate
    of 1 therefore leaves the negated sum of the applied gradients in the weights. After half of the ``STEPS``
    steps the state is saved, and another engine loads it.

    Returns the applied gradients after each step, before the engine is replaced and at the end, then what
    ``was_step_applied`` returned after each step, and what ``drain_gradients`` returned.
    """
    import torch

    import zero_runtime

    class Numbered(torch.nn.Module):
        def __init__(self):
            super().__init__()
            # Two dtypes, so that each step has two messages.
            self.narrow = torch.nn.Parameter(torch.zeros(world, STEPS))
            self.wide = torch.nn.Parameter(torch.zeros(world, STEPS, dtype=torch.float64))

        def forward(self, step):
            return 2.0**step * (self.narrow[rank, step] + self.wide[rank, step])

    def made():
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.0,
            "gradient_allreduce_op": "sum",  # a mean of three ranks would not be exact
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            "communication": {"bounded_delay": delay},
        }
        engine, *_ = zero_runtime.initialize(model=Numbered(), config=config)
        return engine

    def applied(engine):
        both = [-each.detach() for each in engine.module.parameters()]
        assert torch.equal(*[each.double() for each in both])
        return both[0].tolist()

    engine = made()
    seen, said, taken = [], [], []
    for step in range(STEPS):
        if step == STEPS // 2:
            engine.save_checkpoint(folder)
            seen.append(applied(engine))
            engine = made()
            engine.load_checkpoint(folder)
        for micro in range(2):
            engine.backward(engine(step))
            if micro == 0 and step == STEPS - 1:
                taken.append(engine.drain_gradients())  # in the middle of a step, whose first half remains
            engine.step()
        seen.append(applied(engine))
        said.append(engine.was_step_applied())
    assert engine.global_steps == STEPS and engine.skipped_steps == 0
    taken += [engine.drain_gradients(), engine.drain_gradients()]
    return [*seen, applied(engine)], said, taken


def places(world, steps):
    """Return the expected result once the gradients of the first ``steps`` steps are applied, each once."""
    return [[2.0**step if step < steps else 0.0 for step in range(STEPS)]] * world


DELAYS = (1, 4)


def several(rank, world, folder):
    """Run :func:`numbered` with each of ``DELAYS``."""
    return [numbered(rank, world, delay, f"{folder}/{delay}") for delay in DELAYS]


@pytest.mark.long
def test_every_gradient_is_applied_once_in_order_and_by_all_ranks_alike(tmp_path):
    world, half = 3, STEPS // 2
    outcomes = run_ranks(world, several, str(tmp_path))
    assert all(other == outcomes[0] for other in outcomes[1:])
    for delay, (seen, said, taken) in zip(DELAYS, outcomes[0], strict=True):
        first = [max(0, step - delay) for step in range(1, half + 1)]
        # the pipeline of averages fills again
        after_loading = [max(0, step - delay) for step in range(1, half)]
        expected = [*first, half, *(half + each for each in after_loading), STEPS - 1, STEPS]
        assert seen == [places(world, each) for each in expected]
        assert said == [each > 0 for each in [*first, *after_loading, 0]]
        assert taken == [min(delay, half - 1), 1, 0]


def trained(rank, world, config, steps=4, drained=False):
    """Return the weights of a small model after each step."""
    import torch

    import zero_runtime

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
    engine, *_ = zero_runtime.initialize(model=model, config={"train_micro_batch_size_per_gpu": 2, **config})
    generator = torch.Generator().manual_seed(rank)
    seen = []
    for _ in range(steps):
        inputs = torch.randn(2, 7, generator=generator).to(next(model.parameters()).dtype)
        engine.backward(engine(inputs).float().square().mean())
        engine.step()
        if drained:
            engine.drain_gradients()
        seen.append(torch.cat([each.detach().flatten() for each in model.parameters()]).tolist())
    engine.destroy()
    return seen


ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "gradient_clipping": 0.1}


def cases(rank, world):
    """Return the weights of the same training with and without a delay."""
    late = {"communication": {"bounded_delay": 2}}
    return {
        "plain": trained(rank, world, ADAM),
        "switched off": trained(rank, world, {**ADAM, "communication": {"bounded_delay": 0}}),
        "drained": trained(rank, world, {**ADAM, **late}, drained=True),
        "late": trained(rank, world, {**ADAM, **late}),
        "late in bf16": trained(rank, world, {**ADAM, **late, "bf16": {"enabled": True}}),
        "late, predivided": trained(rank, world, {**ADAM, **late, "gradient_predivide_factor": 2.0}),
    }


def test_without_a_delay_and_with_all_of_it_drained_the_weights_are_those_of_an_all_reduce(capfd):
    first, second = run_ranks(2, cases)
    assert first == second
    # Two numbers have only one sum. On two ranks all_reduce and a sum in the order of the ranks therefore
    # give the same bits.
    assert first["plain"] == first["switched off"] == first["drained"]
    for name in ("late", "late in bf16", "late, predivided"):
        weights = first[name]
        assert weights[0] == weights[1] and weights[1] != weights[2] != weights[3], name
    said = capfd.readouterr().err
    assert said.count("the first 2 steps change no weights") == 4
    assert said.count("the gradients of the last 2 steps were not applied") == 3


def held_back(rank, world, delay, folder):
    """Delay rank 1, which begins step t only after rank 0 has finished step t + delay - 1.

    With an all_reduce, rank 0 would wait for rank 1 and the program would hang.
    """
    import torch

    import zero_runtime

    model = torch.nn.Linear(3, 2)
    config = {**ADAM, "train_micro_batch_size_per_gpu": 1, "communication": {"bounded_delay": delay}}
    engine, *_ = zero_runtime.initialize(model=model, config=config)
    for step in range(STEPS):
        if rank == 1:
            awaited = Path(folder) / str(min(step + delay, STEPS) - 1)
            while not awaited.exists():
                time.sleep(0.01)
        engine.backward(engine(torch.full((1, 3), float(step + rank))).square().mean())
        engine.step()
        if rank == 0:
            (Path(folder) / str(step)).touch()
    engine.drain_gradients()
    return [each.tolist() for each in model.parameters()]


def test_a_rank_that_is_late_by_the_delay_holds_nobody_up(tmp_path):
    first, second = run_ranks(2, held_back, 3, str(tmp_path))
    assert first == second


def test_messages_say_what_they_stand_for_and_verify_explains_them(tmp_path):
    from commprof.analysis import api

    run, _ = record(tmp_path / "run", 2, trained, {**ADAM, "communication": {"bounded_delay": 1}}, 3, True)
    rows = [row for row in run.table("collectives").to_pylist() if row["step"] == 1 and row["rank"] == 1]
    assert {(row["purpose"], row["intended_op"], row["bucket"]) for row in rows} == {
        ("gradient_reduce", "all_reduce", 0)
    }
    assert sorted(row["op"] for row in rows) == ["recv", "send"]
    assert {row["payload_bytes"] for row in rows} == {4 * (7 * 9 + 9 + 9 * 3 + 3)}
    verdict = api.verify(run)
    assert (verdict.exit_code, verdict.unexplained) == (0, ())
    assert any("communication.bounded_delay: 1 has each rank send" in each for each in verdict.sentences)


def without_optimizer(rank, world):
    import torch

    import zero_runtime

    zero_runtime.initialize(
        model=torch.nn.Linear(2, 2),
        config={"train_micro_batch_size_per_gpu": 1, "communication": {"bounded_delay": 1}},
    )


def test_there_must_be_an_optimizer():
    with pytest.raises(
        RankError, match=r"ConfigError: communication\.bounded_delay is 1, and there is no optimizer"
    ):
        run_ranks(1, without_optimizer)
