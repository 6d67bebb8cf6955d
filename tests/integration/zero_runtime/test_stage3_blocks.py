"""Stage 3 by blocks: the losses of DeepSpeed and of gathers by ``module``, with the messages that ``requested`` states.

The losses of unusual models are DeepSpeed 0.19.8's (tests/golden/stage3_models.json).
"""

from __future__ import annotations

import datetime
import functools
import json
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_runtime
from commprof.ledger.verification import verify
from commprof.requested import Parameter
from commprof.requested.zero.zero_stages import expected
from support import unusual_models as models
from support.ranks import run_ranks
from support.standing_ranks import record_standing, run_standing

pytestmark = pytest.mark.ranks

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "stage3_models.json").read_text())
CASES = GOLDEN["cases"]
MODELS = sorted({case["model"] for case in CASES.values()})
KEPT = {"stage3_gather_unit": "block"}
GIVEN_BACK = {**KEPT, "stage3_max_reuse_distance": 0}
SETTINGS = {
    "kept": KEPT,
    "given back": GIVEN_BACK,
    "tight": {**GIVEN_BACK, "stage3_max_live_parameters": 40},
    "on demand": {**GIVEN_BACK, "stage3_prefetch_bucket_size": 0},
}


def train_unusual(name, setting, rank):
    case = CASES[f"{name}-tight"]
    model = models.make(name)
    if name == "Hidden":
        zero_runtime.zero.register_external_parameter(model, model.first.weight)
    if name == "Experts":
        zero_runtime.zero.set_z3_leaf_modules(model, [models.Experts.Mixture])
    config = {
        **GOLDEN["config"],
        "zero_optimization": {"stage": 3, **SETTINGS[setting]},
        "gradient_accumulation_steps": case["micro_batches"],
    }
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for step in range(4):
        for micro in range(case["micro_batches"]):
            batches = [
                models.batch(10 * step + micro + at, rank) for at in range(getattr(model, "passes", 1))
            ]
            loss = sum(engine(each) for each in batches)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def train_unusual_cases(rank, world, cases):
    return {each: train_unusual(*each.split("-"), rank) for each in cases}


@functools.cache
def unusual_losses(cases):
    return run_standing(2, train_unusual_cases, cases, timeout=200)


@pytest.mark.sampled("HalfUsed-kept", "Tied-given back", "Experts-kept")
@pytest.mark.parametrize("name", [f"{model}-{setting}" for model in MODELS for setting in SETTINGS])
def test_an_unusual_model_has_the_losses_of_deepspeed(cases_that_run, name):
    golden = CASES[f"{name.partition('-')[0]}-tight"]["losses"]
    for rank, each in enumerate(unusual_losses(cases_that_run)):
        torch.testing.assert_close(each[name], golden[rank], rtol=1e-6, atol=0.0)


WIDTH, WORDS, LAYERS = 10, 21, 3


class Layer(nn.Module):
    """A transformer layer without its attention."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Embedding(nn.Embedding):
    """An embedding whose backward pass reads the weight, unlike that of torch's class with this name."""

    def forward(self, places):
        return super().forward(places) * self.weight.norm()


class Model(nn.Module):
    """Embeddings, layers, a norm and a head."""

    def __init__(self, *features):
        super().__init__()
        self.features = features
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(4, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if "embeddings" in features:
            self.words = nn.Embedding(WORDS, WIDTH, padding_idx=3, scale_grad_by_freq=True)
            self.places = Embedding(4, WIDTH)
        if "replaced forward" in features:
            self.places.forward = lambda places: self.places.weight.square()[places]
        if "own parameter" in features:
            self.gain = nn.Parameter(torch.ones(WIDTH))
        if "unused" in features:
            self.layers[1].unused = nn.Linear(WIDTH, 3)
        if "tied" in features:
            self.head.weight = self.words.weight
        if "frozen" in features:
            self.words.requires_grad_(False)
            self.layers[0].requires_grad_(False)
            self.layers[1].up.requires_grad_(False)

    def forward(self, words):
        hidden = self.words(words) + self.places(torch.arange(words.shape[1]))
        for layer in self.layers:
            hidden = (
                checkpoint(layer, hidden, use_reentrant=False)
                if "recomputed" in self.features
                else layer(hidden)
            )
        if "own parameter" in self.features:
            hidden = hidden * self.gain
        return self.head(self.norm(hidden))


def batches(rank, count, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return [torch.randint(WORDS, (2, 4), generator=generator) for _ in range(count)]


def config_of(zero, accumulation=1, **top):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, **zero},
        **top,
    }


def engine_of(config, features=()):
    torch.manual_seed(0)
    model = Model(*features)
    engine = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    if "hook" in features:
        weight = model.words.weight
        weight.register_hook(lambda gradient: gradient + 0.1 * weight)
    return engine


def run(engine, words, evaluates=False):
    """Train on each of ``words``.

    Returns the losses, and the losses of an evaluation after each step.
    """
    losses = []
    for each in words:
        loss = nn.functional.cross_entropy(engine(each).flatten(0, 1).float(), each.flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if evaluates:
            engine.eval()
            with torch.no_grad():
                losses.append(engine(each).float().square().mean().item())
            engine.train()
    return losses


FEATURES = {
    "plain": (),
    "tied": ("tied",),
    "frozen": ("frozen",),
    "unused": ("unused",),
    "recomputed": ("recomputed",),
    "own parameter": ("own parameter",),
    "embeddings": ("embeddings",),
    "hook": ("hook",),
}


def train_features(rank, world, name):
    features = FEATURES[name]
    found = {}
    for setting in ({}, KEPT, GIVEN_BACK):
        engine = engine_of(config_of(setting, accumulation=2), features)
        found[str(setting)] = run(engine, batches(rank, 4), evaluates=True)
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("name", FEATURES)
def test_blocks_have_the_losses_of_modules(name):
    for found in run_standing(2, train_features, name):
        reference, *others = found.values()
        for each in others:
            torch.testing.assert_close(each, reference, rtol=1e-6, atol=1e-7)


def train_in_fp16(rank, world):
    """Train in fp16 with an initial loss scale that is too large, so that the first steps overflow."""
    kinds = {"fp16": {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}}
    engines = [engine_of(config_of(each, **kinds)) for each in ({}, KEPT, GIVEN_BACK)]
    return [(run(engine, batches(rank, 12)), engine.skipped_steps) for engine in engines]


def test_overflows_skip_the_same_steps():
    for reference, *others in run_standing(2, train_in_fp16, timeout=120):
        assert reference[1] > 0
        for losses, skipped in others:
            assert skipped == reference[1]
            torch.testing.assert_close(losses, reference[0], rtol=1e-3, atol=1e-4)


def train_with_pauses(rank, world):
    found = []
    for setting in ({}, KEPT, GIVEN_BACK):
        engine = engine_of(config_of(setting, accumulation=2))
        losses = []
        for first, second in zip(batches(rank, 4), batches(rank, 4, seed=1), strict=True):
            with engine.coalesce_grad_reduction():
                for each in (first, second):
                    loss = nn.functional.cross_entropy(engine(each).flatten(0, 1), each.flatten())
                    engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found.append(losses)
    return found


def test_gradients_may_be_reduced_after_several_passes():
    for reference, *others in run_standing(2, train_with_pauses, timeout=120):
        for each in others:
            torch.testing.assert_close(each, reference, rtol=1e-6, atol=1e-7)


def resume(rank, world, folder):
    words = batches(rank, 4)
    whole = run(engine_of(config_of({})), words)
    found = []
    for saved, loaded in (({}, KEPT), (KEPT, GIVEN_BACK), (GIVEN_BACK, {})):
        first = engine_of(config_of(saved))
        head = run(first, words[:2])
        place = f"{folder}/{saved}-{loaded}"
        first.save_checkpoint(place)
        second = engine_of(config_of(loaded))
        second.load_checkpoint(place)
        found.append(head + run(second, words[2:]))
    return whole, found


@pytest.mark.long
def test_checkpoints_load_with_another_unit(tmp_path):
    for whole, found in run_standing(2, resume, tmp_path, timeout=120):
        for each in found:
            torch.testing.assert_close(each, whole, rtol=1e-6, atol=1e-7)


def train_recorded(rank, world, config, features, steps):
    run(engine_of(config, features), batches(rank, steps))


RECORDED = {
    "kept": (config_of(KEPT), ()),
    "given back": (config_of(GIVEN_BACK), ()),
    "given back, native, 2 micro-batches": (
        config_of({**GIVEN_BACK, "reduce_scatter_impl": "native"}, accumulation=2),
        (),
    ),
    "auto": (config_of({"stage3_gather_unit": "auto"}), ()),
    "auto takes modules": (
        config_of(
            {"stage3_gather_unit": "auto", "stage3_max_live_parameters": 100, "stage3_max_reuse_distance": 0}
        ),
        (),
    ),
    "unpartitioned norms": (config_of({**KEPT, "zero_force_param_types": ["LayerNorm"]}), ()),
    "little memory": (config_of({**KEPT, "stage3_max_live_parameters": 1000}), ()),
    "tied, own parameter": (config_of(KEPT), ("tied", "own parameter")),
    "frozen": (config_of(GIVEN_BACK), ("frozen",)),
    "embeddings": (config_of(GIVEN_BACK), ("embeddings",)),
    "replaced forward": (config_of(GIVEN_BACK), ("replaced forward",)),
}
STEPS = 4


def requested(config, run):
    """Return the requested messages of each micro-batch: purpose and bytes."""
    rows = run.table("parameters").to_pylist()
    names = [field for field in Parameter._fields if field in rows[0]]
    parameters = [Parameter(**{field: row[field] for field in names}) for row in rows if not row.get("rank")]
    accumulation = config["gradient_accumulation_steps"]
    found = []
    for iteration in range(STEPS):
        sent = Counter()
        for row in expected(config, parameters, 3, iteration=iteration):
            ends = (iteration + 1) % accumulation == 0
            if row.when == "micro_step" or (
                row.when == "step" and ends and row.purpose == "parameter_gather"
            ):
                sent.update((row.purpose, row.issued_op, sum(each)) for each in _messages(row))
        found.append(sent)
    return found


def _messages(row):
    assert len(row.payloads) == row.count
    return row.payloads


@pytest.mark.sampled("kept", "auto takes modules")
@pytest.mark.parametrize("name", RECORDED)
def test_the_messages_are_those_that_are_requested(name):
    config, features = RECORDED[name]
    folder = Path(tempfile.mkdtemp()) / "run"
    made, _ = record_standing(folder, 3, train_recorded, config, features, STEPS)
    verdict = verify(made)
    assert (str(verdict.state), verdict.unexplained, verdict.disagreements) == ("closed", (), ()), verdict
    wanted = requested(config, made)
    issued = [Counter() for _ in wanted]
    for row in made.table("collectives").to_pylist():
        if not row["rank"] and row["step"] >= 0 and row["purpose"] in ("parameter_gather", "gradient_reduce"):
            micro = row["step"] * config["gradient_accumulation_steps"] + (row["micro_step"] or 0)
            issued[micro][row["purpose"], row["op"], row["payload_bytes"]] += 1
    for micro, (sent, want) in enumerate(zip(issued, wanted, strict=True)):
        assert sent == Counter(
            {key: n for key, n in want.items() if key[0] in ("parameter_gather", "gradient_reduce")}
        ), micro


def train_alike(rank, world, setting):
    """Train eight blocks of equal size, with a loss that has no parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))
    engine, *_ = zero_runtime.initialize(
        model=model, model_parameters=model.parameters(), config=config_of(setting)
    )
    for seed in range(3):
        engine.backward(engine(torch.full((2, 16), seed + 1.0)).square().mean())
        engine.step()


@pytest.mark.parametrize(("setting", "two_from"), [(KEPT, 2), (GIVEN_BACK, 7)], ids=["kept", "given back"])
def test_two_blocks_are_on_their_way_once_the_parameters_of_two_have_left_room(tmp_path, setting, two_from):
    made, _ = record_standing(tmp_path / "run", 2, train_alike, setting)
    rows = made.table("collectives").to_pandas()
    sent = rows[
        (rows["rank"] == 0) & (rows["step"] == 2) & (rows["purpose"] == "gradient_reduce")
    ].sort_values("seq")
    assert len(sent) == 8
    alone = [
        begin < issued for begin, issued in zip(sent["wait_begin_ns"][:-1], sent["issue_ns"][1:], strict=True)
    ]
    assert alone == [number < two_from for number in range(1, 8)]


def time_limits(rank, world, folder):
    """Return the time limits of all groups in seconds.

    The program has chosen 77 s for the group of all ranks.
    """
    dist.init_process_group(
        "gloo", f"file://{folder}/store", datetime.timedelta(seconds=77), world_size=world, rank=rank
    )
    engine_of(config_of({"stage": 3, "stage3_gather_unit": "block"}))
    groups = dist.distributed_c10d._world.pg_map
    return [each._get_backend(torch.device("cpu")).options._timeout.total_seconds() for each in groups]


def test_the_group_that_gathers_blocks_has_the_time_limit_of_all_ranks(tmp_path):
    """The group that gathers blocks has the time limit of the group of all ranks.

    It used to have torch's default, 10 minutes with NCCL, although the program waited longer for a slow rank.
    """
    assert run_ranks(2, time_limits, str(tmp_path), process_group=False) == [[77, 77], [77, 77]]
