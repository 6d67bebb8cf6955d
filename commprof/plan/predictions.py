"""Predict the messages, memory and offload of one setting of a config, by the rules of ``commprof.requested``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from commprof.errors import UsageError
from commprof.plan.experts import NO_TOKENS, Load, Settings, placed, settings_of, without_settings
from commprof.plan.keys import KNOWN
from commprof.plan.memory.activations import activations_of, micro_batch_of
from commprof.plan.memory.peak import Peak, peak_of
from commprof.plan.memory.spans import Activations
from commprof.plan.models import Model
from commprof.requested.auto_values import decide
from commprof.requested.communication.measured_costs import Cost
from commprof.requested.config_keys import flag, section
from commprof.requested.configuration import read_configuration, zero_section
from commprof.requested.errors import RequestedError
from commprof.requested.expectation import Expectation
from commprof.requested.experts.rank_groups import RankGroups
from commprof.requested.memory.held import held_by_rank
from commprof.requested.memory.offload import read_offload
from commprof.requested.memory.sized_models import shared_transformer
from commprof.requested.memory.states import Holding, Movement, movements
from commprof.requested.parallel import axis_rules
from commprof.requested.parallel.activation_shapes import Shapes, assumed_shapes
from commprof.requested.parallel.axes import DATA, MODEL, PIPE, SEQUENCE, Axes, axes_of_config
from commprof.requested.parameters import Parameter, item_bytes
from commprof.requested.support import refuse_with_experts
from commprof.requested.zero.flat_stages import Runtime
from commprof.requested.zero.zero_stages import expected_in_step, steady_step
from commprof.schema import Op

NO_ACTIVATIONS: Final = (
    "activations that ranks send each other are left out: give --sequence to predict their size"
)
_DEEPSPEED_ON_AXES: Final = (
    "how DeepSpeed sends along the axes of a pipeline, tensors or sequences is not in the rules; use --framework "
    "zero_runtime, or a config with data parallelism alone"
)
_AUTO_IS_A_VALUE: Final = frozenset(
    (
        "communication.topology",
        "zero_optimization.gradient_reduction",
        "zero_optimization.reduce_scatter_impl",
    )
)
UNNAMED: Final = "{} (the config names no type)"


class Job(NamedTuple):
    """The job that a config is applied to.

    Attributes:
        model: The model that is trained.
        world: The number of ranks.
        ranks_per_host: The number of ranks that share a host.
        backend: ``nccl`` or ``gloo``.
        sequence: The number of tokens of a sequence, for activations. With None, the activations that ranks send
            each other are left out.
        framework: The runtime whose rules predict the messages.
        costs: The costs of a calibration, which decide the values that a config leaves open, or None.
    """

    model: Model
    world: int
    ranks_per_host: int
    backend: str = "nccl"
    sequence: int | None = None
    framework: Runtime = "zero_runtime"
    costs: Mapping[Op, Cost] | None = None


class Prediction(NamedTuple):
    """The prediction of one setting.

    Attributes:
        config: The setting.
        axes: The axes along which the ranks are arranged.
        precision: The element type of the model, as the config sets it.
        memory: The memory of rank 0 by kind, without activations.
        sent: The messages of one step, in the steady state in which all steps send the same messages.
        moved: The bytes that offload moves, per rank and step.
        note: The reason why messages are missing. Empty if the messages are complete.
        activations: The activations of one micro-batch, or None if they cannot be counted.
        uncounted: The reason why activations are not counted. Empty if they are counted.
        peak: The peak memory of rank 0, or None if activations are not counted.
        decisions: Sentences about the values that the config leaves open and that were decided.
        loads: The loads of layers with experts. Empty without such layers.
        expert_memory: The part of ``memory`` that the experts of a rank need, by kind.
    """

    config: Mapping[str, Any]
    axes: Axes
    precision: str
    memory: list[Holding]
    sent: list[Expectation]
    moved: list[Movement]
    note: str
    activations: Activations | None
    uncounted: str
    peak: Peak | None
    decisions: tuple[str, ...] = ()
    loads: tuple[Load, ...] = ()
    expert_memory: tuple[Holding, ...] = ()

    @property
    def parts(self) -> list[Holding]:
        """The memory of rank 0 by kind, with activations if they are counted."""
        if self.activations is None:
            return self.memory
        return [*self.memory, Holding("activations", self.activations.most_bytes, note=self.activations.note)]

    @property
    def on_device(self) -> int:
        """The bytes that rank 0 needs on its device at the peak, or for ``memory`` if activations are not counted."""
        return sum(each.device for each in self.memory) if self.peak is None else self.peak.device


class Refusal(NamedTuple):
    """A setting that cannot be used as it is.

    Attributes:
        reason: The reason, with the expected values.
    """

    reason: str


def predict_each(configs: Sequence[Mapping[str, Any]], job: Job) -> list[Prediction | Refusal]:
    """Predict each of ``configs`` in ``job``. A config that cannot be used becomes a :class:`Refusal`.

    Raises:
        UsageError: None of the configs can be used.
    """
    outcomes: list[Prediction | Refusal] = []
    problems: list[UsageError] = []
    for config in configs:
        try:
            outcomes.append(predict(config, job))
        except UsageError as problem:
            problems.append(problem)
            outcomes.append(Refusal(str(problem)))
    if problems and len(problems) == len(outcomes):
        raise problems[0]
    return outcomes


def predict(config: Mapping[str, Any], job: Job) -> Prediction:
    """Predict the messages, the memory and the offload of ``config`` in ``job``.

    If no rule predicts the messages, the prediction has a note and no messages.

    Raises:
        UsageError: The config cannot be used as it is.
    """
    settings = settings_of(config)
    config = without_settings(config)
    axes = axes_of_config(config, job.world)
    _check_startable(config, axes)
    if job.framework == "deepspeed":
        _check_asserted(config)
    placed_model, loads = _with_experts(config, settings, axes, job)
    model = placed_model.parameters
    replicas, of_rank, plain = job.world, model, config
    if not axes.only_data:
        if job.model.layers is None:
            raise UsageError(
                f"the config arranges the ranks along {axes}, and how a model that was built is divided is not known; "
                "use --model params:N, or a config with data parallelism alone"
            )
        # Rank 0 stores only its model-parallel shard of its own pipeline stage.
        model = shared_transformer(model, axes.size(MODEL), axes.size(PIPE))
        of_rank = [each for each in model if 0 in each.stage_numbers]
        replicas, plain = axes.size(DATA) * axes.size(SEQUENCE), axis_rules.without_axes(config, axes)
    decisions: tuple[str, ...] = ()
    if job.framework == "zero_runtime":
        plain, decisions = decide(plain, of_rank, replicas, job.backend, job.costs)
        config = decide(config, of_rank, replicas, job.backend, job.costs).config
    decisions += _left_open(config, decisions)
    types = {each.dtype.removeprefix("torch.") for each in of_rank}
    memory = held_by_rank(plain, of_rank, replicas, job.backend, job.framework)
    activations, uncounted = activations_of(config, placed_model, axes, job.sequence)
    order = _gradient_order(activations, of_rank)
    sent, note = _sent(config, model, axes, job, loads, order)
    # Offload moves states in each step, and also the parameters that stage 3 gathers.
    gathered = sum(row.payload_bytes for row in sent if row.purpose == "parameter_gather")
    steps = axis_rules.micro_batches(config, axes)
    peak = activations and peak_of(plain, of_rank, memory, activations, steps, job.backend, job.framework)
    return Prediction(
        config,
        axes,
        read_configuration(plain).model_dtype or UNNAMED.format(", ".join(sorted(types))),
        memory,
        sent,
        movements(plain, of_rank, replicas, gathered),
        note,
        activations,
        uncounted,
        peak,
        decisions,
        tuple(loads),
        tuple(_of_experts(memory, plain, of_rank, replicas, job)) if loads else (),
    )


def _check_startable(config: Mapping[str, Any], axes: Axes) -> None:
    """Raise UsageError for values with which no engine starts: types, offload, the optimizer, or batch sizes."""
    configuration = read_configuration(config)
    if configuration.model_dtype == "float16" and any(
        flag(section(config, name), f"{name}.enabled", False) for name in ("bf16", "bfloat16")
    ):
        raise UsageError("both fp16 and bf16 are enabled, and a model has one type; disable one of them")
    _check_files(zero_section(config), configuration.stage)
    optimizer = config.get("optimizer")
    if not isinstance(optimizer, Mapping | None) and optimizer != "auto":
        raise UsageError(f"optimizer is {optimizer!r} in the config; expected an object with type and params")
    total, replicas = configuration.train_batch_size, axes.size(DATA)
    if total is None or not configuration.managed_accumulation:
        return
    steps = axis_rules.micro_batches(config, axes)
    micro = configuration.micro_batch_size or max(total // (steps * replicas), 1)
    samples = micro * steps * replicas
    # DeepSpeed counts a sample once for each tensor-parallel rank.
    if total not in (
        samples,
        samples * axes.size(MODEL),
    ):
        if configuration.micro_batch_size is None:
            accumulated = f"gradient accumulation steps {steps} x " if steps > 1 else ""
            raise UsageError(
                f"train_batch_size {total} is not a multiple of {accumulated}{replicas} data-parallel ranks, so no "
                "micro-batch fits; change one of them"
            )
        raise UsageError(
            f"batch sizes do not multiply: train_batch_size {total} != micro-batch {micro} x gradient accumulation steps "
            f"{steps} x {replicas} data-parallel ranks; change one of them, or leave one out"
        )


def _check_asserted(config: Mapping[str, Any]) -> None:
    """Raise UsageError for values that assertions in the optimizers of DeepSpeed 0.19.8 exclude."""
    configuration = read_configuration(config)
    if configuration.stage >= 2 and configuration.reduce_scatter:
        factor = config.get("gradient_predivide_factor", 1.0)
        if factor not in (1.0, "auto") or flag(config, "prescale_gradients", False, is_checked=False):
            key = "gradient_predivide_factor" if factor not in (1.0, "auto") else "prescale_gradients"
            raise UsageError(
                f"{key} is {config[key]!r}, and DeepSpeed does not start with it at stage {configuration.stage} with "
                "zero_optimization.reduce_scatter; set reduce_scatter to false, or leave the key out"
            )
    size = configuration.allgather_bucket_size
    if (
        configuration.stage in (1, 2)
        and not configuration.reduces_flat_groups
        and size is not None
        and size % 2
    ):
        raise UsageError(
            f"zero_optimization.allgather_bucket_size is {size}, and DeepSpeed does not start with an odd number; set "
            f"{size + 1}"
        )


def _check_files(zero: Mapping[str, Any], stage: int) -> None:
    """Raise UsageError if the config offloads to NVMe without ``nvme_path``."""
    offload = read_offload(zero, stage)
    parameters = "offload_params" if zero.get("offload_params") is not None else "offload_param"
    for device, key in ((offload.optimizer, "offload_optimizer"), (offload.parameters, parameters)):
        path = section(zero, key).get("nvme_path")
        if device == "nvme" and not path:
            name = f"zero_optimization.{key}"
            raise UsageError(
                f"{name}.device is 'nvme' without nvme_path, which no engine accepts; set {name}.nvme_path to a "
                "folder on a fast local disk"
            )


def _left_open(config: Mapping[str, Any], decided: Sequence[str]) -> tuple[str, ...]:
    """Return a sentence about the keys that remain ``auto``, or nothing.

    These are the keys that neither a sentence of ``decided`` nor a rule decides.
    """

    def of(block: Mapping[str, Any], prefix: str) -> Iterator[str]:
        for name, value in block.items():
            if isinstance(value, Mapping):
                yield from of(value, f"{prefix}{name}.")
            elif value == "auto" and f"{prefix}{name}" in KNOWN - _AUTO_IS_A_VALUE:
                yield f"{prefix}{name}"

    names = sorted(
        name for name in of(config, "") if not any(each.startswith(f"{name} ") for each in decided)
    )
    if not names:
        return ()
    return (
        f"auto in the config: {', '.join(names)}. Launchers such as Hugging Face's Trainer fill them in; the plan takes "
        "them as not set. Give them with --set.",
    )


def _with_experts(
    config: Mapping[str, Any], settings: Settings | None, axes: Axes, job: Job
) -> tuple[Model, list[Load]]:
    """Return the part of the model that a rank stores, and the loads of its layers with experts.

    Raises:
        UsageError: The settings of experts do not fit the model, the config or the ranks.
    """
    if settings is None and not job.model.experts:
        return job.model, []
    if not axes.only_data:
        raise UsageError(
            f"the model has experts, and the config arranges the ranks along {axes}; experts have rules with data "
            "parallelism alone"
        )
    configuration = read_configuration(config)
    refuse_with_experts(config, configuration, is_own=job.framework == "zero_runtime")
    micro_batch = micro_batch_of(config, axes)
    tokens = 0 if micro_batch is None or job.sequence is None else micro_batch * job.sequence
    own = job.model.parameters[0].dtype if job.model.parameters else "float32"
    placed_model, loads = placed(job.model, settings, tokens, item_bytes(configuration.model_dtype or own))
    RankGroups(job.world).check(each.layer.ep_size for each in loads)
    return placed_model, loads


def _of_experts(
    memory: Sequence[Holding], config: Mapping[str, Any], parameters: list[Parameter], replicas: int, job: Job
) -> list[Holding]:
    """Return the part of ``memory`` that a rank would not need without its experts."""
    dense = {
        each.what: each
        for each in held_by_rank(
            config, [p for p in parameters if p.ep_size is None], replicas, job.backend, job.framework
        )
    }
    parts = []
    for each in memory:
        without = dense.get(each.what, Holding(each.what, 0))
        places = (each.device - without.device, each.host - without.host, each.disk - without.disk)
        parts.append(Holding(each.what, *places))
    return parts


def _gradient_order(
    activations: Activations | None, parameters: Sequence[Parameter]
) -> tuple[str, ...] | None:
    """Return the names of parameters in the order in which the traced pass completes their gradients.

    The result is None without a traced pass, or if the pass has gradients of parameters that are not trained here.
    """
    order = None if activations is None else activations.gradient_order
    trained = {each.name for each in parameters if each.requires_grad and each.param_group is not None}
    return order if order is not None and trained.issuperset(order) else None


def _sent(
    config: Mapping[str, Any],
    model: list[Parameter],
    axes: Axes,
    job: Job,
    loads: Sequence[Load],
    order: Sequence[str] | None,
) -> tuple[list[Expectation], str]:
    """Return the messages of a step, and a note that says why messages are missing, or an empty note.

    If the messages cannot be predicted, the list is empty.
    """
    try:
        if axes.only_data:
            hosts = min(job.ranks_per_host, job.world)
            step = steady_step(config)
            layers = [each.layer for each in loads for _ in range(each.count) if each.layer.tokens]
            sent = expected_in_step(
                config,
                model,
                job.world,
                step,
                order,
                job.backend,
                job.framework,
                host_ranks=hosts,
                expert_layers=layers,
            )
            return sent, NO_TOKENS if loads and not layers else ""
        if job.framework == "deepspeed":
            return [], f"bytes of messages cannot be predicted: {_DEEPSPEED_ON_AXES}"
        shapes = Shapes(assumed=True)
        if job.sequence is not None:
            shapes = assumed_shapes(config, model, job.sequence, axes.size(PIPE), axes.size(SEQUENCE))
        sent = axis_rules.expected_in_step_on_axes(config, model, axes, shapes, job.backend)
        return sent, "" if job.sequence else NO_ACTIVATIONS
    except RequestedError as problem:
        return [], f"bytes of messages cannot be predicted: {problem}"
