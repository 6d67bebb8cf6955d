"""Draws the settings, models, links and numbers of ranks for benchmarks/predict.py from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from predict_score import BESIDE, UNCHANGED

from commprof.quantities import bytes_per_second

ZERO_RUNTIME, DEEPSPEED, DDP = ENGINES = ("zero_runtime", "deepspeed", "ddp")
SCENES = ("settings", "world", "experts")
WORLDS = (2, 3, 4)
RATES: Mapping[str, Any] = {
    "1gbit": ("1gbit", "1gbit"),
    "200mbit": ("200mbit", "200mbit"),
    # The two pairs are for alternating hosts. Each pair is the rate of sending and the rate of receiving.
    "asymmetric": (("1gbit", "500mbit"), ("500mbit", "1gbit")),
}
# The factors of other links on which the recorded setting is measured. None exceeds 1 Gbit/s, because the bursts that
# tbf lets through are too small above 1 Gbit/s.
BANDWIDTHS: Mapping[str, Sequence[float]] = {"1gbit": (0.5,), "200mbit": (0.5, 4.0), "asymmetric": (0.5,)}
MODELS = ((128, 8), (192, 4), (192, 6), (256, 2))  # width and layers: 1.6 to 2.7 M parameters
BATCH, SLEEPING_BATCH = (4, 32), (1, 8)  # samples and tokens per rank
EXPERTS_WORLD, EXPERTS_MODEL, EXPERTS_BATCH = 4, (128, 2), (4, 64)
CAPACITY_FACTORS = (1.0, 1.5, 2.0)
SLEEP = 0.12  # the seconds that all blocks together sleep in a step; two thirds of them in the backward pass
WARM = 2
FIRST_STEPS = 10  # the first steps of a process, which are neither recorded nor measured
STAGES = (0, 1, 2, 2, 3)
BUCKETS = (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 500_000_000)  # elements
BUCKET_MIB = (0.4, 1.2, 4, 12, 40, 2000)  # the bucket sizes of DDP, about equal to BUCKETS
OF_SHARDS: Sequence[Mapping[str, Any]] = (  # reductions of stages 1 and 2 that both engines have
    {"reduce_scatter": False},
    {"use_multi_rank_bucket_allreduce": True},
    {"use_multi_rank_bucket_allreduce": False},
)
CLASSES: Mapping[str, set[str]] = {
    "stage": {"stage"},
    "message dtype": {"communication_data_type", "comm_hook"},
    "overlap": {"overlap_comm"},
    "reduction": {"reduce_scatter", "use_multi_rank_bucket_allreduce", "gradient_reduction"},
    "bucket size": {"reduce_bucket_size", "bucket_cap_mb"},
}
# Seconds on an idle machine with two cores, used only to estimate the duration: the start of two ranks, and one step.
START_S: Mapping[str, float] = {ZERO_RUNTIME: 5.0, DEEPSPEED: 6.0, DDP: 4.0}
STEP_S: Mapping[str, float] = {"1gbit": 0.2, "200mbit": 0.6, "asymmetric": 0.3}
CALIBRATION_S: Mapping[str, float] = {"1gbit": 20, "200mbit": 50, "asymmetric": 25}


class Case(NamedTuple):
    """A setting of a scene.

    Attributes:
        keys: The configuration by dotted keys.
        bandwidth: The factor by which the links are faster than those of the scene.
        world: The number of ranks.
        sleeps: Whether the blocks sleep instead of computing.
        experts: The arguments of the layer of experts of each block.
    """

    keys: Mapping[str, Any]
    bandwidth: float = 1.0
    world: int = 2
    sleeps: bool = False
    experts: Mapping[str, Any] = {}

    @property
    def text(self) -> str:
        """The setting as text."""
        words = [f"{key.rpartition('.')[2]}={json.dumps(value)}" for key, value in self.keys.items()]
        words += [f"{name}={value:g}" for name, value in self.experts.items()]
        words += [f"bandwidth x{self.bandwidth:g}"] * (self.bandwidth != 1.0)
        return " ".join([*words, f"{self.world} ranks", *["sleeping"] * self.sleeps])

    @property
    def processes(self) -> tuple[int, bool]:
        """A key that is equal for cases that can share processes: the number of ranks, and whether the stage is 3.

        Stage 3 needs separate processes, because stage 3 of DeepSpeed changes torch for all models.
        """
        return self.world, self.keys.get("zero_optimization.stage") == 3

    @property
    def batch(self) -> tuple[int, int]:
        """The number of samples and tokens per rank."""
        if self.experts:
            return EXPERTS_BATCH
        return SLEEPING_BATCH if self.sleeps else BATCH

    def changes(self, base: Case) -> dict[str, Any]:
        """Return the keys of ``predict``, with their values, that turn ``base`` into this case."""
        keys = {} if self.keys == base.keys else dict(self.keys)
        experts = {} if self.experts == base.experts else self.experts
        return keys | {f"experts.{name}": value for name, value in experts.items()}

    def config(self) -> dict[str, Any]:
        """Return the complete configuration."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": BATCH[0],
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
            "gradient_clipping": 1.0,
            "steps_per_print": 1_000_000,
        }
        for key, value in self.keys.items():
            block, _, name = key.rpartition(".")
            (config.setdefault(block, {}) if block else config)[name] = value
        return config


class Scene(NamedTuple):
    """The settings for one engine on links of one rate.

    Attributes:
        bases: Each recorded setting with the settings that are predicted from it.
    """

    kind: str
    engine: str
    rate: str
    model: tuple[int, int]
    bases: list[tuple[Case, list[Case]]]

    @property
    def name(self) -> str:
        """The name of the scene, which can be part of a file name."""
        return f"{self.kind}-{self.engine}-{self.rate}"

    @property
    def cases(self) -> list[tuple[Case, Case]]:
        """All measured settings, each as a pair (recorded setting, measured setting)."""
        return [(base, case) for base, cases in self.bases for case in cases]

    @property
    def worlds(self) -> list[int]:
        """The numbers of ranks of all measured settings."""
        return sorted({case.world for _, case in self.cases})

    def seconds(self, case: Case, steps: int) -> float:
        """Return the expected duration of ``steps`` steps of ``case``, in seconds."""
        return (WARM + steps) * STEP_S[self.rate] / case.bandwidth

    def starting(self, world: int) -> float:
        """Return the expected seconds until ``world`` ranks have started and trained their first steps."""
        return START_S[self.engine] * world / 2 + (WARM + FIRST_STEPS) * STEP_S[self.rate]


def drawn_keys(engine: str, chance: random.Random) -> dict[str, Any]:
    """Draw a setting that ``engine`` accepts."""
    if engine == DDP:
        hook = "fp16_compress_hook" if chance.random() < 0.25 else None
        return {"ddp.bucket_cap_mb": chance.choice(BUCKET_MIB), "ddp.comm_hook": hook}
    stage = chance.choice(STAGES)
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": chance.choice(BUCKETS),
        "overlap_comm": chance.random() < 0.5,
    }
    keys = {
        f"zero_optimization.{name}": value
        for name, value in (zero | _reduction(engine, stage, chance)).items()
    }
    return keys | ({"communication_data_type": "bf16"} if chance.random() < 0.2 else {})


def _reduction(engine: str, stage: int, chance: random.Random) -> Mapping[str, Any]:
    """Draw one of the gradient reductions that the engine supports at ``stage``, and return its keys."""
    ways = [{}] if stage in (0, 3) else list(OF_SHARDS)
    if engine == ZERO_RUNTIME:
        ways.append({"gradient_reduction": "all_reduce" if stage in (0, 3) else "reduce_scatter"})
    elif stage == 3:
        ways.append({"reduce_scatter": False})
    return chance.choice(ways)


def drawn_scene(kind: str, engine: str, rate: str, settings: int, seed: str) -> Scene:
    """Draw a scene of the given ``kind``."""
    chance = random.Random(f"{seed} {kind} {engine} {rate}")
    if kind == "experts":
        return Scene(kind, engine, rate, EXPERTS_MODEL, [drawn_experts(engine, settings, chance)])
    model, keys = chance.choice(MODELS), drawn_keys(engine, chance)
    if kind == "world":
        world = chance.choice((2, 4))
        bases = [Case(keys, world=world, sleeps=sleeps) for sleeps in (True, False)]
        return Scene(
            kind,
            engine,
            rate,
            model,
            [(base, [base._replace(world=each) for each in WORLDS]) for base in bases],
        )
    base = Case(keys)
    cases: list[Case] = []
    while len(cases) < settings:
        is_near = len(cases) % 2 == 0
        case = Case(nearly(engine, keys, chance) if is_near else drawn_keys(engine, chance))
        if case not in [*cases, base]:
            cases.append(case)
    cases += [base._replace(bandwidth=each) for each in BANDWIDTHS[rate]]
    return Scene(kind, engine, rate, model, [(base, [*cases, base])])


def drawn_experts(engine: str, settings: int, chance: random.Random) -> tuple[Case, list[Case]]:
    """Draw a case with expert-parallel layers, and other cases with different ``ep_size`` or capacity factor."""
    keys = drawn_keys(engine, chance)
    while keys["zero_optimization.stage"] == 3:
        keys = drawn_keys(engine, chance)
    layers = [{"ep_size": size, "capacity_factor": each} for size in (2, 4, 1) for each in CAPACITY_FACTORS]
    recorded = chance.choice(layers[:-3])
    others = chance.sample([each for each in layers if each != recorded], settings)
    base = Case(keys, world=EXPERTS_WORLD, sleeps=True, experts=recorded)
    return base, [*(base._replace(experts=each) for each in others), base]


def nearly(engine: str, keys: Mapping[str, Any], chance: random.Random) -> dict[str, Any]:
    """Draw a setting that differs from ``keys`` in one class of change. All classes have the same probability."""
    by_class: dict[str, dict[str, Any]] = {}
    draws = 0
    while draws < 300 or not by_class:  # If keys has rare values, few draws are close to it.
        other = drawn_keys(engine, chance)
        if len(classes := classes_of_change(keys, other)) == 1:
            by_class[classes[0]] = other
        draws += 1
    return by_class[chance.choice(sorted(by_class))]


def classes_of_change(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the classes in which two settings differ, the largest change first."""
    changed = {key.rpartition(".")[2] for key in {*before, *after} if before.get(key) != after.get(key)}
    return [kind for kind, names in CLASSES.items() if changed & names]


def kind_of_change(base: Case, case: Case) -> str:
    """Return the class of the largest change between two cases."""
    if case.world != base.world:
        return f"world {base.world} to {case.world}" + ("" if case.sleeps else f", {BESIDE}")
    if case.bandwidth != base.bandwidth:
        return f"bandwidth x{case.bandwidth:g}"
    if changed := [name for name, value in case.experts.items() if value != base.experts[name]]:
        return f"experts: {' and '.join(changed)}"
    return next(iter(classes_of_change(base.keys, case.keys)), UNCHANGED)


def links(rate: str, count: int, factor: float = 1.0) -> list[Any]:
    """Return the links of ``count`` hosts, ``factor`` times as fast as the links of ``rate``."""

    def faster(words: Any) -> Any:
        if not isinstance(words, str):
            return tuple(map(faster, words))
        return f"{round(8 * (bytes_per_second(words) or 0.0) * factor / 1e6)}mbit"

    return [faster(RATES[rate][number % 2]) for number in range(count)]


def drawn_scenes(options: Any) -> Iterator[Scene]:
    """Yield all scenes of the command line.

    The scenes ``settings`` come first, for each rate. Each of the other kinds of scenes uses links of one rate.
    """
    if "settings" in options.scenes:
        for rate in options.rates:
            for engine in options.engines:
                yield drawn_scene("settings", engine, rate, options.settings, options.seed)
    for kind in SCENES[1:]:
        if kind in options.scenes:
            # The communication of 4 ranks takes a long time on links of 200 Mbit/s.
            fast = [rate for rate in options.rates if rate != "200mbit"]
            rate = random.Random(f"{options.seed} {kind}").choice(fast or options.rates)
            for engine in options.engines:
                if (kind, engine) != ("experts", DDP):
                    yield drawn_scene(kind, engine, rate, options.settings, options.seed)
