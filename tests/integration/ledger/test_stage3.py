"""Stage 3, recorded and verified: models with parameters created within zero.Init, and early evaluations."""

from __future__ import annotations

import functools
import re
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import zero_runtime
from commprof.ledger.verification import verify
from support.changed_runs import Changed
from support.recording import record

pytestmark = pytest.mark.ranks
WORDS, WIDTH = 12, 8


class Model(nn.Module):
    """An embedding, a hidden layer, and a head that may be tied to the embedding."""

    def __init__(self, drops):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if drops:
            self.unused = nn.ModuleList(nn.Linear(WIDTH, number) for number in (2, 3))
            self.head.weight = self.embedding.weight
            del self.unused

    def forward(self, words):
        return self.head(torch.tanh(self.hidden(self.embedding(words))))


def resize(model):
    """Resize the embedding like resize_token_embeddings of Hugging Face: a new embedding with the old rows."""
    larger = nn.Embedding(WORDS + 4, WIDTH)
    with zero_runtime.zero.GatheredParameters([model.embedding.weight], modifier_rank=None):
        larger.weight.data[:WORDS] = model.embedding.weight.data
    model.embedding = larger
    model.head.weight = larger.weight


def replace_head(model):
    model.head = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 2))


def add_frozen(model):
    """Add a frozen pooler that is never called, as the base model of an adapter may have."""
    model.pooler = nn.Linear(WIDTH, WIDTH).requires_grad_(False)


def freeze(model):
    model.hidden.requires_grad_(False)


CHANGES = {"resized": resize, "new head": replace_head, "frozen pooler": add_frozen, "frozen layer": freeze}


def made(how, config):
    torch.manual_seed(0)
    inside = how != "outside"
    with zero_runtime.zero.Init(config_dict_or_path=config) if inside else nullcontext():
        model = Model(drops=how in ("dropped", "resized"))
    CHANGES.get(how, lambda model: None)(model)
    return model


def evaluate(engines, passes):
    for engine in engines:
        engine.eval()
        with torch.no_grad():
            for _ in range(passes):
                engine(torch.arange(4))
    engines[0].train()


def train(rank, world, hows, evaluations=0, between=0, accumulation=1, threshold=None, steps=4, releases=()):
    """Train the model described by the first of ``hows``.

    Other entries of ``hows`` are reference models, which only run forward passes.

    Args:
        evaluations: The number of passes of each engine before the first step.
        between: The number of passes after each step.
        threshold: The persistence threshold. None is the default, with which all parameters stay gathered.
        releases: The steps after which the program releases the parameters that stay gathered.
    """
    zero = {"stage": 3} | ({} if threshold is None else {"stage3_param_persistence_threshold": threshold})
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": zero,
    }
    models = [made(how, config) for how in hows]
    engines = []
    for number, model in enumerate(models):
        own = config if number else config | {"optimizer": {"type": "AdamW"}}
        engines.append(zero_runtime.initialize(model=model, config=own)[0])
    engine, *references = engines
    evaluate(engines, evaluations)
    for step in range(steps):
        for _ in range(accumulation):
            loss = engine(torch.arange(4)).square().mean()
            for each in references:
                with torch.no_grad():
                    aim = each(torch.arange(4)).square().mean()
                loss = loss + aim
            engine.backward(loss)
            engine.step()
        if step in releases:
            engine.empty_partition_cache()
        if between and step < steps - 1:
            evaluate([engine], between)


@functools.cache
def recorded(*hows, **how_to_train):
    return record(Path(tempfile.mkdtemp()) / "run", 2, functools.partial(train, **how_to_train), hows)[0]


def broadcasts(run):
    rows = run.table("collectives").to_pylist()
    return [row for row in rows if row["purpose"] == "parameter_broadcast" and row["rank"] == 0]


# The number of parameters created inside zero.Init, broadcast once each, and of those created outside,
# broadcast twice each. The model has an embedding, a hidden layer with two parameters, and a head with one.
# Tied models drop a head, and two layers of two parameters.
MADE = {
    ("outside",): (0, 4),
    ("inside",): (4, 0),
    ("dropped",): (8, 0),
    ("resized",): (8, 1),
    ("new head",): (4, 4),
    ("resized", "resized"): (16, 2),
    ("inside", "outside"): (4, 4),
}


def test_a_frozen_module_that_never_runs_is_not_missing():
    """Parameters of a frozen module that never runs are not reported as missing.

    Verify found a mismatch here, because the rules expected a gather of them in each pass. Surplus bytes are
    still a mismatch.
    """
    run = recorded("frozen pooler", threshold=0)
    verdict = verify(run)
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict
    told = [text for text in verdict.sentences if "which frozen modules run" in text]
    pooler = 4 * (WIDTH * WIDTH + WIDTH)
    assert told and "parameter_gather" in told[0]
    issued, wanted = (int(each.replace(",", "")) for each in re.findall(r"\(([\d,]+) bytes\)", told[-1])[:2])
    assert wanted - issued == pooler

    def longer(row):
        is_gather = row["step"] == 3 and row["purpose"] == "parameter_gather"
        return [{**row, "payload_bytes": row["payload_bytes"] + 2 * pooler} if is_gather else row]

    assert str(verify(Changed(run, longer)).state) == "mismatch"


def test_a_frozen_module_that_runs_after_an_early_evaluation():
    """A frozen module that runs after an early evaluation is no mismatch.

    Gathers that follow no order of modules have no upper bound, but rules with frozen parameters applied one.
    """
    verdict = verify(recorded("frozen layer", evaluations=1, threshold=0))
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("threshold", [None, 20])
def test_persistent_parameters_that_the_program_releases_are_gathered_again(accumulation, threshold):
    """The first micro-batch after a release gathers the persistent parameters again.

    Another gather in the same step is still a surplus.
    """
    run = recorded("inside", accumulation=accumulation, threshold=threshold, releases=(1,))
    verdict = verify(run)
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict
    gathers = [row for row in run.table("collectives").to_pylist() if row["purpose"] == "parameter_gather"]
    sizes = [sum(row["payload_bytes"] for row in gathers if row["step"] == step) for step in (2, 3)]
    persistent = [2 * WORDS * WIDTH, WIDTH * WIDTH, WIDTH] if threshold is None else [WIDTH]
    assert sizes[0] - sizes[1] == 2 * 4 * sum(persistent)  # both ranks, fp32
    planted = min(row["seq"] for row in gathers if row["step"] == 2)

    def twice(row):
        return [row, row] if row["step"] == 2 and row["seq"] == planted else [row]

    assert str(verify(Changed(run, twice)).state) == "mismatch"


def saved_after_an_overflow(rank, world):
    """Train until the third step is skipped, which leaves no parameter gathered, and then save a checkpoint.

    The checkpoint gathers the parameters.
    """
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "zero_optimization": {"stage": 3},
    }
    engine = zero_runtime.initialize(model=Model(drops=False), config=config)[0]
    with tempfile.TemporaryDirectory() as folder:
        place = [folder]
        torch.distributed.broadcast_object_list(place)
        for step in range(5):
            loss = engine(torch.arange(4)).float().square().mean()
            engine.backward(loss * (float("inf") if step == 2 else 1.0))
            engine.step()
            if step == 2:
                engine.save_checkpoint(place[0])
        torch.distributed.barrier()


def test_a_checkpoint_after_a_skipped_step_gathers_what_the_next_step_needs(tmp_path):
    run, _ = record(tmp_path / "run", 2, saved_after_an_overflow)
    verdict = verify(run)
    assert any("overflow" in sentence for sentence in verdict.sentences)
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict


@pytest.mark.parametrize("threshold", [None, 20])
def test_an_evaluation_gathers_persistent_parameters_that_the_program_has_released(threshold):
    """Gathers of released persistent parameters between two steps are explained by an evaluation.

    If all parameters persist, only these gathers show that there was an evaluation.
    """
    run = recorded("inside", between=2, threshold=threshold, releases=(2,))
    verdict = verify(run)
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict
    gathers = [row for row in run.table("collectives").to_pylist() if row["purpose"] == "parameter_gather"]
    assert any(row["after_step"] == 2 for row in gathers)

    # The same gathers within a training pass are a surplus.
    def within(row):
        is_gather = row["after_step"] == 2 and row["purpose"] == "parameter_gather"
        return [row | {"after_step": None, "step": 3, "phase": "forward"} if is_gather else row]

    assert str(verify(Changed(run, within)).state) == "mismatch"


@pytest.mark.sampled
@pytest.mark.parametrize("hows", MADE, ids=" and ".join)
def test_broadcasts_of_parameters_that_are_made_within_zero_init_or_not(hows):
    run = recorded(*hows, evaluations=len(hows))
    inside, outside = MADE[hows]
    assert len(broadcasts(run)) == inside + 2 * outside
    verdict = verify(run)
    assert (str(verdict.state), verdict.unexplained, verdict.disagreements) == ("closed", (), ()), verdict
    told = [text for text in verdict.sentences if "sharded by zero.Init" in text]
    once = f"{inside} parameters sharded by zero.Init, each broadcast once"
    twice = f"; {outside} made outside of it, each broadcast twice" if outside else ""
    assert told == ([f"{once}{twice}."] if inside else [])


@pytest.mark.sampled
@pytest.mark.parametrize("hows", MADE, ids=" and ".join)
@pytest.mark.parametrize("times", [0, 2], ids=["missing", "extra"])
def test_a_planted_broadcast_is_named(hows, times):
    run = recorded(*hows, evaluations=len(hows))
    inside, outside = MADE[hows]
    planted = broadcasts(run)[-1]

    def change(row):
        is_planted = row["phase"] == "init" and row["pg_seq"] == planted["pg_seq"]
        return [row] * times if is_planted else [row]

    verdict = verify(Changed(run, change))
    assert str(verdict.state) == "mismatch" and verdict.unexplained
    for named in verdict.unexplained:
        assert (named.steps, named.purpose, named.op) == ("init", "parameter_broadcast", "broadcast")
        assert named.kind == ("unexplained" if times else "missing")
        expected = inside + 2 * outside
        assert named.reason.startswith(f"{expected + times - 1} messages ")
        assert f"issued, {expected} (" in named.reason
    if not times:
        (named,) = verdict.unexplained
        assert (named.count, named.payload_bytes) == (1, planted["payload_bytes"])


@pytest.mark.parametrize(
    ("how", "state"), [("outside", "closed"), ("inside", "closed"), ("resized", "mismatch")]
)
def test_a_run_that_does_not_say_how_parameters_were_made_is_judged_by_its_messages(how, state):
    run = Changed(recorded(how, evaluations=1), lambda row: [row])
    run.manifest = replace(run.manifest, construction=None)
    verdict = verify(run)
    assert str(verdict.state) == state


# Passes before the first step, passes after each step, micro-batches of a step, and engines. Without a pass
# before the first step, the passes of a reference model are within steps, and the next test covers these.
EVALUATIONS = [
    (evaluations, between, accumulation, models)
    for evaluations, between in ((1, 0), (2, 0), (3, 2), (0, 1))
    for accumulation in (1, 2)
    for models in (1, 2)
    if evaluations or models == 1
]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "threshold", [None, *(pytest.param(size, marks=pytest.mark.long) for size in (0, 20))]
)
@pytest.mark.parametrize(("evaluations", "between", "accumulation", "models"), EVALUATIONS)
def test_an_evaluation_before_the_order_of_modules_is_known(
    evaluations, between, accumulation, models, threshold
):
    run = recorded(
        *["inside"] * models,
        evaluations=evaluations,
        between=between,
        accumulation=accumulation,
        threshold=threshold,
    )
    verdict = verify(run)
    assert (str(verdict.state), verdict.unexplained, verdict.disagreements) == ("closed", (), ()), verdict


@pytest.mark.sampled
@pytest.mark.parametrize("threshold", [0, None])
def test_what_a_reference_model_gathers_within_steps_is_doubted(threshold):
    """Gathers of a reference model within steps leave the ledger open.

    Nothing shows which of two engines issued the gathers. The state is unknown, and not a mismatch.
    """
    verdict = verify(recorded("inside", "inside", threshold=threshold))
    assert (str(verdict.state), verdict.unexplained) == ("unknown", ()), verdict
    assert any(
        "an engine that takes no step, such as the reference model of DPO" in text
        for text in verdict.sentences
    )


@pytest.mark.sampled
@pytest.mark.parametrize("evaluations", [1, 2])
def test_a_planted_check_of_the_order_of_modules_is_named(evaluations):
    """A planted check of the order of modules is named.

    All parameters stay gathered. Step 1 records the order with two broadcasts, and no step after the second
    checks it.
    """
    run = recorded("inside", evaluations=evaluations)
    checks = [row for row in run.table("collectives").to_pylist() if row["purpose"] == "trace_check"]
    sizes = {
        step: [r["payload_bytes"] for r in checks if r["step"] == step and not r["rank"]] for step in (1, 3)
    }
    assert sizes == {1: [8, 0], 3: []}

    def planted(step):
        def change(row):
            is_planted = row["purpose"] == "trace_check" and row["step"] == 1 and row["payload_bytes"]
            return [row, row | {"step": step}] if is_planted else [row]

        return verify(Changed(run, change))

    for step in (1, 3):
        verdict = planted(step)
        assert str(verdict.state) == "mismatch"
        assert {(each.steps, each.purpose) for each in verdict.unexplained} == {(str(step), "trace_check")}

    def without(row):
        return [] if row["purpose"] == "trace_check" and row["step"] == 1 else [row]

    (missing,) = verify(Changed(run, without)).unexplained
    assert (missing.kind, missing.steps, missing.purpose, missing.count) == ("missing", "1", "trace_check", 2)
