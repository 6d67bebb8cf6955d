"""Predict settings, recommend one of them, and show how a setting scales with the number of ranks.

The command line and the dashboard's Plan page both call this module, so that they give the same answers.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, get_args

from commprof.calibration.bandwidths import bus_factor
from commprof.calibration.file import read_calibration
from commprof.calibration.results import Calibration
from commprof.errors import UsageError
from commprof.launch.sweeps.config_file import parse_config
from commprof.launch.sweeps.points import derive, label, parse_setting, points
from commprof.plan.durations import StepTime, Timing, parse_duration, timing_by
from commprof.plan.experts import KEY, Load, parse_values
from commprof.plan.experts import OPTIONS as EXPERT_OPTIONS
from commprof.plan.hosts import Hosts, Links, groups_of, parse_hosts, parse_links
from commprof.plan.keys import check_keys, misspelled
from commprof.plan.latency import by_calibration, by_model
from commprof.plan.memory.peak import Peak
from commprof.plan.models import Model, parse_number, read_model
from commprof.plan.options import OPTIONS
from commprof.plan.predictions import Job, Prediction, Refusal, predict, predict_each
from commprof.plan.rank_classes import mean_wire_bytes, rank_classes, spreads
from commprof.plan.recommendations import Candidate, advice, samples_of
from commprof.plan.recorded_steps import RecordedJob, RecordedStep, recorded_job, recorded_step
from commprof.plan.traffic import Totals, Traffic, histogram, totals_of, traffic_of
from commprof.recorder.process.recorder_options import parse_size
from commprof.requested.communication.measured_costs import Cost
from commprof.requested.configuration import read_configuration
from commprof.requested.memory.states import Holding
from commprof.requested.parallel import axis_rules
from commprof.requested.parallel.axes import axes_of_config
from commprof.requested.zero.flat_stages import Runtime
from commprof.schema import Op

__all__ = [
    "BACKENDS",
    "EXPERT_OPTIONS",
    "OPTIONS",
    "Plan",
    "Question",
    "RecordedJob",
    "RecordedStep",
    "Row",
    "WorldOutcome",
    "as_json",
    "batch_follows_ranks",
    "combinations",
    "compare",
    "histogram",
    "latency_sentences",
    "make_plan",
    "over_worlds",
    "parse_capacity",
    "parse_config",
    "parse_number",
    "read_calibration",
    "read_job",
    "read_recorded",
    "recommendation",
    "traffic",
]

WHOLE_CONFIG: Final = "the config"  # the label of the setting if there is no --set
BACKENDS: Final = ("nccl", "gloo")
PLACES: Final = ("device", "host", "disk")
_BATCH_KEYS: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
UNUSED_COMPUTE: Final = (
    "the time of computation (--step-compute, --recorded) is not used: steps have different numbers of samples, "
    "so ranks compute for different times"
)


class Question(NamedTuple):
    """A config and the options for its prediction. The texts have the form of the options of ``commprof plan``.

    Attributes:
        config: The config, as DeepSpeed reads it.
        model: ``params:175e9``, ``py:module:function``, ``hf:CONFIG_DIR`` or ``run:RUN``.
        world: The number of ranks.
        hosts, links, settings, layers, backend, sequence, step_compute: The values of the options of these names.
            ``settings`` has the texts of ``--set``.
        capacity: The memory of a device in bytes, or None if it is not known.
        calibration: The calibration for the times of messages, or None.
        framework: The runtime that reads the config: ``zero_runtime`` or ``deepspeed``.
        recorded: The recorded step of a run with the same model and micro-batch. It replaces ``step_compute``.
        experts: The texts of the options for experts, by the name of the setting
            (:data:`commprof.plan.experts.OPTIONS`).
        most_messages: The maximum number of messages of a step. A setting with more messages is refused. With
            None, any number is predicted, even if this takes long.
    """

    config: Mapping[str, Any]
    model: str
    world: int = 1
    hosts: str | None = None
    links: str | None = None
    settings: tuple[str, ...] = ()
    layers: int | None = None
    backend: str = "nccl"
    sequence: int | None = None
    step_compute: str | None = None
    capacity: int | None = None
    calibration: Calibration | None = None
    most_messages: int | None = None
    framework: str = "zero_runtime"
    recorded: RecordedStep | None = None
    experts: Mapping[str, str] = MappingProxyType({})


class Plan(NamedTuple):
    """The outcomes of all settings of a question.

    Attributes:
        job: The job that the config is applied to.
        hosts: The hosts of all ranks.
        links: The rates of the links, or None if they are not given.
        timing: The source of the times of messages and steps.
        capacity: The memory of a device in bytes, or None if it is not known.
        calibration: The calibration that gives the times, or None.
        settings: The dotted keys and values of each setting.
        configs: The config of each setting.
        outcomes: The prediction or the refusal of each setting.
        remarks: Sentences about values of the question that the plan does not use.
    """

    job: Job
    hosts: Hosts
    links: Links | None
    timing: Timing
    capacity: int | None
    calibration: Calibration | None
    settings: list[dict[str, Any]]
    configs: list[dict[str, Any]]
    outcomes: list[Prediction | Refusal]
    remarks: list[str]

    @property
    def model(self) -> Model:
        """The model that is trained."""
        return self.job.model

    @property
    def usable(self) -> list[tuple[dict[str, Any], Prediction]]:
        """The settings that are not refused, with their predictions."""
        pairs = zip(self.settings, self.outcomes, strict=True)
        return [(setting, each) for setting, each in pairs if isinstance(each, Prediction)]

    @property
    def refused(self) -> list[tuple[str, str]]:
        """The labels of the settings that are refused, with the reasons."""
        pairs = zip(self.settings, self.outcomes, strict=True)
        return [(label(setting), each.reason) for setting, each in pairs if isinstance(each, Refusal)]


class Row(NamedTuple):
    """One row of the comparison of the settings that are not refused.

    Attributes:
        label: The setting as text.
        prediction: The prediction of the setting.
        totals: The traffic of a step.
        timed: The time of a step, or the reason why it is not known.
    """

    label: str
    prediction: Prediction
    totals: Totals
    timed: StepTime | str


class WorldOutcome(NamedTuple):
    """One setting at one number of ranks.

    Attributes:
        world: The number of ranks.
        wire_bytes: The bytes that a rank sends per step, by purpose.
        memory: The memory of rank 0 by kind.
        peak: The peak memory of rank 0, or None if it is not known.
        timed: The time of a step, or the reason why it is not known.
        reason: The reason why the setting cannot be used, or why its messages cannot be predicted, at this number
            of ranks. Empty if neither applies.
    """

    world: int
    wire_bytes: dict[str, int]
    memory: list[Holding]
    peak: Peak | None
    timed: StepTime | str
    reason: str


def combinations(settings: Iterable[str]) -> int:
    """Return the number of combinations of the values in ``settings``, the texts of ``--set``.

    Raises:
        UsageError: A text does not have the form KEY=V1,V2.
    """
    return math.prod(len(parse_setting(text)[1]) for text in settings)


def make_plan(question: Question) -> Plan:
    """Predict every setting of ``question``. Nothing is run.

    Raises:
        UsageError: A text cannot be used, or no setting can be used.
    """
    hosts = parse_hosts(question.hosts, question.world)
    links = None if question.links is None else parse_links(question.links)
    compute = question.step_compute
    compute_ns = None if compute is None else parse_duration(compute, "--step-compute")
    if question.recorded is not None:
        if compute_ns is not None:
            raise UsageError(
                f"--step-compute is {compute} and --recorded {question.recorded.path}; give one of them: both say how long "
                "a rank computes"
            )
        compute_ns = question.recorded.compute_ns
    if question.backend not in BACKENDS:
        raise UsageError(f"--backend is {question.backend[:80]!r}; expected {' or '.join(BACKENDS)}")
    framework = _framework(question.framework)
    timing = timing_by(question.calibration, links, question.backend, compute_ns)
    timing = timing._replace(framework=framework, recorded=question.recorded)
    base, of_experts = _expert_settings(question)
    settings = points((*of_experts, *question.settings))
    check_keys(dict.fromkeys(key for setting in settings for key in setting))
    configs = [derive(base, setting) for setting in settings]
    model = read_model(question.model, question.layers, question.sequence)
    costs = _costs(question.calibration)
    job = Job(model, question.world, hosts.ranks, question.backend, question.sequence, framework, costs)
    if question.most_messages is not None:
        for setting, config in zip(settings, configs, strict=True):
            _check_messages(label(setting), config, job, question.most_messages)
    plan = Plan(
        job,
        hosts,
        links,
        timing,
        question.capacity,
        question.calibration,
        settings,
        configs,
        predict_each(configs, job),
        misspelled(question.config),
    )
    if compute_ns is None or len({samples_of(each) for _, each in plan.usable}) <= 1:
        return plan
    return plan._replace(
        timing=timing._replace(compute_ns=None, recorded=None), remarks=[*plan.remarks, UNUSED_COMPUTE]
    )


def _expert_settings(question: Question) -> tuple[Mapping[str, Any], list[str]]:
    """Return the config with those settings of experts that have one value, and ``--set`` texts for the others."""
    single, compared = dict(question.config.get(KEY) or {}), []
    for name, text in question.experts.items():
        values = parse_values(name, OPTIONS[EXPERT_OPTIONS[name]].flag, text)
        if len(values) == 1:
            single[name] = values[0]
        else:
            compared.append(f"{KEY}.{name}={','.join(map(json.dumps, values))}")
    return ({**question.config, KEY: single} if single else question.config), compared


def _costs(calibration: Calibration | None) -> Mapping[Op, Cost] | None:
    """Return the costs of ``calibration`` by operation, rounded like in the file from which a run reads them."""
    if calibration is None:
        return None
    costs = {}
    for name, fit in calibration.fits().items():
        factor = bus_factor(name, calibration.world_size)
        if factor is not None and name in set(map(str, Op)):
            beta = round(fit.beta_bytes_per_s) * factor
            costs[Op(name)] = Cost(round(fit.alpha_ns, 1), 1e9 / beta)
    return costs


def _framework(name: str) -> Runtime:
    for each in get_args(Runtime):
        if name == each:
            known: Runtime = each
            return known
    raise UsageError(f"--framework is {name!r}; expected {' or '.join(get_args(Runtime))}")


def read_recorded(path: Path) -> RecordedStep:
    """Return the compute time and the overlap of the steps that the run at ``path`` recorded.

    Raises:
        CommprofError: The run cannot be read, or its exposed time is not known.
    """
    # Imported here because the reader needs pyarrow, which a plan without a run does not need.
    from commprof.trace.reader import open_run

    return recorded_step(open_run(path))


def read_job(path: Path) -> RecordedJob:
    """Return the job of the run at ``path``, so that a plan can start from the same job.

    Raises:
        CommprofError: The run cannot be read.
    """
    from commprof.analysis.storage.opened_runs import opened

    return recorded_job(opened(path))


def latency_sentences(plan: Plan, prediction: Prediction) -> list[str]:
    """Return a sentence that says whether the largest gradient message of a setting is latency bound, or nothing.

    The calibration decides if there is one. Otherwise NCCL's model decides.
    """
    sentence = None
    if plan.calibration is not None:
        sentence = by_calibration(prediction.sent, plan.hosts, plan.calibration)
    elif plan.links is not None and plan.job.backend == "nccl":
        sentence = by_model(prediction.sent, plan.hosts, plan.links)
    return [] if sentence is None else [sentence]


def compare(plan: Plan) -> list[Row]:
    """Return the settings that are not refused, with their totals and times."""
    return [
        Row(
            label(setting) or WHOLE_CONFIG,
            each,
            totals_of(each.sent, plan.hosts),
            plan.timing.of(each, plan.hosts),
        )
        for setting, each in plan.usable
    ]


def recommendation(plan: Plan, rows: Iterable[Row]) -> tuple[int | None, str]:
    """Return the position of the recommended row, or None without a recommendation, and a sentence with the reason."""
    candidates = [
        Candidate(
            row.label,
            row.prediction.on_device,
            row.totals.rank_bytes,
            row.totals.host_bytes,
            samples_of(row.prediction),
            not row.prediction.note,
            not row.prediction.uncounted,
            None if isinstance(row.timed, str) else row.timed.typical_ns,
        )
        for row in rows
    ]
    return advice(candidates, plan.capacity, plan.timing.compute_ns is not None)


def traffic(plan: Plan, row: Row) -> list[Traffic]:
    """Return the messages of a step of one setting, by purpose and operation."""
    return traffic_of(row.prediction.sent, plan.hosts)


def over_worlds(plan: Plan, config: Mapping[str, Any], worlds: Iterable[int]) -> list[WorldOutcome]:
    """Predict ``config``, the config of a setting of ``plan``, for each number of ranks in ``worlds``.

    Each host has as many ranks as in the plan. If :func:`batch_follows_ranks` is true for ``config``, its
    ``train_batch_size`` is ignored, because it is valid only for the plan's own number of ranks.
    """
    if batch_follows_ranks(config):
        config = {key: value for key, value in config.items() if key != "train_batch_size"}
    outcomes = []
    for world in worlds:
        hosts = Hosts(max(1, world // plan.hosts.ranks), min(plan.hosts.ranks, world))
        try:
            prediction = predict(config, plan.job._replace(world=world, ranks_per_host=hosts.ranks))
        except UsageError as problem:
            outcomes.append(WorldOutcome(world, {}, [], None, "", str(problem)))
            continue
        wire: Counter[str] = Counter()
        for each in prediction.sent:
            wire[each.purpose] += round(mean_wire_bytes(each, len(groups_of(each, hosts)[0])))
        fill = hosts.count * hosts.ranks == world
        timed = (
            plan.timing.of(prediction, hosts)
            if fill
            else f"hosts of {hosts.ranks} ranks each do not add up to {world:,} ranks"
        )
        outcomes.append(
            WorldOutcome(world, dict(wire), prediction.parts, prediction.peak, timed, prediction.note)
        )
    return outcomes


def batch_follows_ranks(config: Mapping[str, Any]) -> bool:
    """Return whether ``config`` sets all three batch sizes, so that they are consistent at one number of ranks only."""
    return all(type(config.get(key)) is int for key in _BATCH_KEYS)


def _check_messages(name: str, config: Mapping[str, Any], job: Job, most: int) -> None:
    """Raise UsageError if a step may have more than ``most`` messages, because the prediction would take long."""
    try:
        configuration = read_configuration(config)
        steps = axis_rules.micro_batches(config, axes_of_config(config, job.world))
    except UsageError:
        return  # the prediction reports the same problem
    smallest = max(
        1, min(configuration.reduce_bucket_size, configuration.allgather_bucket_size or sys.maxsize)
    )
    number = steps * (len(job.model.parameters) + job.model.numel // smallest)
    if number > most:
        raise UsageError(
            f"{name or WHOLE_CONFIG}: a step may have {number:,} messages, and at most {most:,} are predicted here; set "
            "larger buckets, fewer micro-batches or a smaller model, or use commprof plan, which has no limit"
        )


def parse_capacity(text: str) -> int | None:
    """Return the memory of a device in bytes, from a text such as ``80GiB``.

    Raises:
        UsageError: The text is not a number of bytes.
    """
    try:
        return parse_size(text)
    except ValueError as problem:
        raise UsageError(f"--device-memory is {text!r}: {problem}") from None


def as_json(plan: Plan) -> dict[str, Any]:
    """Return ``plan`` in the JSON form that docs/plan.md describes, with bytes and nanoseconds as integers."""
    pairs = zip(plan.settings, plan.outcomes, strict=True)
    return {"settings": [_setting_json(setting, each, plan) for setting, each in pairs]}


def _load_json(load: Load) -> dict[str, Any]:
    layer = load.layer
    known = bool(layer.tokens)
    return {
        "layers": load.count,
        "num_experts": layer.num_experts,
        "ep_size": layer.ep_size,
        "experts_per_rank": load.local_experts,
        "k": layer.k,
        "capacity_factor": layer.capacity_factor,
        "drop_tokens": layer.drop_tokens,
        "skew": layer.skew,
        "parameter_bytes_per_rank": load.held_bytes,
        "tokens": layer.tokens if known else None,
        "capacity": layer.capacity if known else None,
        "fullest_expert_tokens": load.fullest if known else None,
        "dropped_share": load.dropped_share if known else None,
        "busiest_rank": load.busiest_rank if known else None,
    }


def _setting_json(setting: Mapping[str, Any], prediction: Prediction | Refusal, plan: Plan) -> dict[str, Any]:
    if isinstance(prediction, Refusal):
        nothing: dict[str, Any] = {"set": dict(setting), "traffic": [], "memory_bytes_per_rank": None}
        return {**nothing, "step_ns": {"least": None, "most": None}, "refused": prediction.reason}
    timed = plan.timing.of(prediction, plan.hosts)
    known = timed if isinstance(timed, StepTime) else None
    classes = rank_classes(prediction.sent, plan.hosts)
    return {
        "set": dict(setting),
        "traffic": [
            {
                "purpose": row.purpose,
                "op": row.op,
                "group_size": row.group_size,
                "count": row.count,
                "payload_bytes": row.payload_bytes,
                "wire_bytes_per_rank": row.wire_bytes_per_rank,
                "padding_bytes": row.padding_bytes,
            }
            for row in traffic_of(prediction.sent, plan.hosts)
        ],
        "memory_bytes_per_rank": {
            **{place: sum(getattr(each, place) for each in prediction.parts) for place in PLACES},
            "parts": {
                each.what: {place: getattr(each, place) for place in PLACES} for each in prediction.parts
            },
            "peak": None if prediction.peak is None else prediction.peak._asdict(),
        },
        "step_ns": {"least": known and known.least_ns, "most": known and known.most_ns},
        "communication_ns": {
            "all": known and known.communication_ns,
            "latency": known and known.latency_ns,
            "overlapping": known and known.overlapping_ns,
            "by_purpose": known and known.by_purpose(),
            "source": plan.timing.source.text if known and plan.timing.source else None,
            "note": "" if known else timed,
        },
        "experts": [_load_json(each) for each in prediction.loads],
        "expert_memory_bytes_per_rank": {each.what: each.device for each in prediction.expert_memory},
        "per_rank": {
            name: each._replace(mean=each.mean if name == "messages" else round(each.mean))._asdict()
            for name, each in spreads(classes).items()
        },
        "rank_classes": [
            {"first_rank": each.first_rank, "ranks": each.ranks, **each.sums._asdict()} for each in classes
        ],
    }
