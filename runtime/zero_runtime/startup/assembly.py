"""Assembly of a training in DeepSpeed's order: device and dtype, broadcast, optimizer, hooks."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch

from commprof import hooks
from zero_runtime import log
from zero_runtime.comm import DataParallelGroup
from zero_runtime.config import RuntimeConfig
from zero_runtime.configuration.blocks.communication_block import check_optimizer_given, check_whole
from zero_runtime.configuration.blocks.zero_block import WHOLE_BUCKET_NUMEL
from zero_runtime.configuration.feature_combinations import check_one_bit
from zero_runtime.errors import ConfigError, UnsupportedError
from zero_runtime.experimental.compression.compressor_assembly import Trained, by_signs, compressed
from zero_runtime.experimental.compression.local_gradients import return_momentum
from zero_runtime.experimental.compression.residuals import Residuals
from zero_runtime.experimental.one_bit import OneBitOptimizer
from zero_runtime.experimental.topology_aware.delay import DelayedGradients
from zero_runtime.experimental.topology_aware.installation import Installed
from zero_runtime.experts.expert_groups import ExpertRanks
from zero_runtime.experts.expert_parameters import (
    ep_size,
    group_of,
    is_expert,
    parameter_names,
    with_expert_groups,
)
from zero_runtime.experts.expert_preparation import check_optimizer, install_experts
from zero_runtime.gradient_reduction.loss_scale import LossScale
from zero_runtime.gradient_reduction.owner_ordered_buckets import OwnerOrderedGradients
from zero_runtime.gradient_reduction.reducer import ParameterGroup, Policy, ShardedGradients
from zero_runtime.gradient_reduction.reduction import Reduction, reduction
from zero_runtime.gradient_reduction.stages import stage
from zero_runtime.gradient_reduction.used_parameters import UsedParameters
from zero_runtime.gradient_reduction.whole_buckets import BucketedGradients
from zero_runtime.gradient_reduction.whole_gradients import AccumulatedGradients, ReplicatedGradients
from zero_runtime.groups.data_parallel import data_parallel_ranks
from zero_runtime.groups.parallelism import Parallelism, data_parallel, stage_text, use
from zero_runtime.offload.allocation import keep_freed_memory
from zero_runtime.offload.offload_placement import placement
from zero_runtime.optimizer_step.dtypes import (
    Precision,
    accumulate_in,
    cast_module,
    communication_dtype,
    communication_dtypes,
    precision,
)
from zero_runtime.optimizer_step.flat_parameters import FlatParameters
from zero_runtime.optimizer_step.grouping import flat_groups
from zero_runtime.optimizer_step.interface import StepPolicy
from zero_runtime.optimizer_step.matrix_updates import check_whole_gradients
from zero_runtime.optimizer_step.partitioned_types import owner_types, whole_parameters
from zero_runtime.optimizer_step.replicated_step import ReplicatedOptimizer
from zero_runtime.optimizer_step.sharded_step import ShardedOptimizer
from zero_runtime.optimizer_step.torch_optimizer import ClientOptimizer, check_shardable, torch_optimizer
from zero_runtime.optimizers.muon import mark_matrices
from zero_runtime.sharding.gather_schedule.residency import Residency, residency_of
from zero_runtime.sharding.shard_assembly import ShardedModel
from zero_runtime.sharding.sharded_construction import Construction, construction_of
from zero_runtime.sharding.shards import shard_of
from zero_runtime.tensor_parallel.division import divide, sharing
from zero_runtime.tensor_parallel.inputs import check_first_inputs
from zero_runtime.training.direct_passes import unwatch

_BROADCAST: Final = hooks.tag("parameter_broadcast")
Gradients = ShardedGradients | OwnerOrderedGradients | ReplicatedGradients | AccumulatedGradients


@dataclass(slots=True)
class Boundary:
    """Whether the current micro-batch is the last of its step.

    This object asks the engine, which is constructed last.
    """

    ask: Callable[[], bool] = lambda: True
    steps: Callable[[], int] = lambda: 0  # number of steps so far, as counted by the engine

    def __call__(self) -> bool:
        """Return the engine's answer."""
        return self.ask()


class Assembly(NamedTuple):
    """The parts of an engine. Without an optimizer, both optimizers are None and the loss scale is 1.

    ``residency`` is the residency of sharded parameters. ``installed`` contains the parts that the block
    ``communication`` configures. ``residuals`` are the residuals of gradient compression. ``parallelism``
    contains the axes. ``construction`` describes how sharded parameters were constructed.
    """

    module: torch.nn.Module
    device: torch.device
    group: DataParallelGroup
    precision: Precision
    boundary: Boundary
    loss_scale: LossScale
    torch_optimizer: torch.optim.Optimizer | None
    optimizer: Any
    gradients: Gradients
    residency: Residency | None = None
    installed: Installed = Installed()
    residuals: Residuals | None = None
    parallelism: Parallelism = Parallelism(None, 1, 0)
    construction: Construction | None = None


def assemble(
    config: RuntimeConfig,
    module: torch.nn.Module,
    client: ClientOptimizer | None,
    parameters: Any,
    parallelism: Parallelism | None = None,
) -> Assembly:
    """Prepare ``module`` for training: move and cast it, broadcast it from rank 0, and construct its optimizer.

    Args:
        config: The configuration.
        module: The model.
        client: The client's optimizer, or a function that creates an optimizer.
        parameters: Tensors or param groups; None for all parameters of the module.
        parallelism: The axes; None for pure data parallelism.
    """
    parallelism = parallelism or data_parallel()
    check_whole(config.communication, parallelism.model is not None or parallelism.grid is not None)
    _check_module(module)
    close(module)
    parameter_list = list(parameters) if parameters is not None else None
    divide(config.parallel, module, parallelism.tensor_group, parallelism.stages > 1)
    use(parallelism)
    if parallelism.tensor_group is not None and parallelism.stages == 1:
        check_first_inputs(module, parallelism.tensor_group)
    ranks = data_parallel_ranks(config, parallelism.data)
    experts = install_experts(config, module, parallelism, ranks.observed)
    if experts:
        parallelism = parallelism._replace(experts=experts)
        use(parallelism)
    assembly = _assembled(config, module, client, parameter_list, ranks.group, parallelism.replicas, experts)
    if assembly.optimizer is not None:
        assembly.optimizer.model_ranks = parallelism.model
    return assembly._replace(installed=ranks.installed, parallelism=parallelism)


def _assembled(
    config: RuntimeConfig,
    module: torch.nn.Module,
    client: ClientOptimizer | None,
    parameters: list[Any] | None,
    group: DataParallelGroup,
    replicas: int,
    experts: Mapping[str, ExpertRanks],
) -> Assembly:
    device = group.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    kinds = precision(config.precision)
    cast_module(module, config.precision)
    module.to(device)
    if device.type == "cpu" and not config.zero.stage.shards_parameters:
        keep_freed_memory()
    broadcast_parameters(module, group, experts)
    boundary = Boundary()
    if config.optimizer is not None and config.optimizer.type.lower() == "muon":
        mark_matrices(module)
    trained = parameters if parameters is not None else list(module.parameters())
    inner = torch_optimizer(
        config.optimizer, client, with_expert_groups(trained) if experts and client is None else trained
    )
    if inner is not None:
        _check_optimizer(module, inner)
    if config.zero.stage.shards_parameters:
        return _with_sharded_parameters(config, module, inner, kinds, group, boundary, replicas)
    if inner is None:
        check_optimizer_given(config.communication)
        unapplied = _unused_gradients(config, module, kinds, group, boundary)
        return Assembly(module, device, group, kinds, boundary, LossScale(), None, None, unapplied)
    _describe(module, inner)
    scale = LossScale(config.precision.loss_scale)
    reduce, residuals = _reduction(config, module, inner, group, boundary, scale)
    policy = Policy(
        stage=config.zero.stage,
        reduce=reduce,
        scaling=config.scaling(replicas),
        limit=config.zero.reduce_bucket_size,
        contiguous=config.zero.contiguous_gradients,
        overlap=config.zero.overlap_comm and config.zero.stage.shards_optimizer,
    )
    build = _sharded if config.zero.stage.shards_optimizer else _replicated
    if experts:
        check_optimizer(inner, parameter_names(module), config.zero.stage.shards_optimizer)
    optimizer, gradients = build(config, module, inner, kinds, policy, group, boundary, scale, experts)
    assembly = Assembly(module, device, group, kinds, boundary, scale, inner, optimizer, gradients)
    return assembly._replace(residuals=residuals)


def _reduction(
    config: RuntimeConfig,
    module: torch.nn.Module,
    inner: torch.optim.Optimizer,
    group: DataParallelGroup,
    boundary: Boundary,
    scale: LossScale,
) -> tuple[Reduction, Residuals | None]:
    """Return the reduction of gradients, and the residuals.

    There are residuals if the gradients or the values of a 1-bit optimizer are compressed.
    """
    return_momentum(inner)
    plain = reduction(config.zero.gradient_reduction, config.zero.reduce_scatter_impl)
    if isinstance(inner, OneBitOptimizer):
        check_one_bit(config, type(inner).__name__)
        return by_signs(inner, plain, module, group)
    if config.gradient_compression is None:
        return plain, None
    trained = Trained(inner, config.gradient_clipping, group, lambda: boundary.steps(), lambda: scale.value)
    return compressed(config.gradient_compression, plain, trained)


_gradients_of: WeakKeyDictionary[
    torch.nn.Module, weakref.ref[ShardedGradients | OwnerOrderedGradients | BucketedGradients]
] = WeakKeyDictionary()
_parameters_of: WeakKeyDictionary[torch.nn.Module, weakref.ref[FlatParameters]] = WeakKeyDictionary()
_optimizer_of: WeakKeyDictionary[torch.nn.Module, weakref.ref[ShardedOptimizer]] = WeakKeyDictionary()


def close(module: torch.nn.Module) -> None:
    """Undo an earlier ``assemble`` of ``module``: remove hooks and files, and gather sharded parameters."""
    unwatch(module)
    earlier = _gradients_of.pop(module, None)
    gradients = None if earlier is None else earlier()
    if gradients is not None:
        gradients.close()
        gradients.clear()
    flat = _parameters_of.pop(module, None)
    parameters = None if flat is None else flat()
    if parameters is not None:
        parameters.close()
    residency = residency_of(module)
    if residency is not None:
        residency.shut_down()
    sharded = _optimizer_of.pop(module, None)
    optimizer = None if sharded is None else sharded()
    if optimizer is not None:
        optimizer.close()


def broadcast_parameters(
    module: torch.nn.Module,
    group: DataParallelGroup,
    experts: Mapping[str, ExpertRanks] = MappingProxyType({}),
) -> None:
    """Broadcast the parameters of rank 0 as bytes, with one broadcast for each, including frozen parameters.

    Parameters of experts are broadcast from the first rank that has them. Sharded parameters are skipped,
    because they were broadcast when they were sharded.
    """
    for parameter in module.parameters():
        if shard_of(parameter) is not None:
            continue
        data = parameter.detach()
        message = data.contiguous().view(-1).view(torch.uint8)
        ranks = experts[group_of(parameter)].data if is_expert(parameter) else group
        ranks.broadcast(message, 0, why=_BROADCAST)
        if not data.is_contiguous():
            data.copy_(message.view(data.dtype).view(data.shape))


def _sharded(
    config: RuntimeConfig,
    module: torch.nn.Module,
    inner: torch.optim.Optimizer,
    kinds: Precision,
    policy: Policy,
    group: DataParallelGroup,
    boundary: Boundary,
    scale: LossScale,
    experts: Mapping[str, ExpertRanks],
) -> tuple[ShardedOptimizer, Gradients]:
    check_shardable(inner, config.zero.stage.number, config.zero_allow_untested_optimizer)
    check_whole_gradients(inner, config, kinds)
    # Owner-ordered buckets need one communication dtype and one owner for each element. With torch.autocast a group has
    # several dtypes, and unpartitioned parameters are summed on every rank. Experts have separate groups of ranks.
    unpartitioned = whole_parameters(module, config.zero.partitioned_types)
    reduced = config.zero.gradient_reduction == "reduce_scatter" and kinds.autocast is None
    chunked = reduced and not unpartitioned and not experts
    groups = flat_groups(module, inner.param_groups, config.zero, group.world_size, chunked, experts)
    gradients: ShardedGradients | OwnerOrderedGradients | AccumulatedGradients
    steps = _step_policy(config, kinds)
    # bf16 with fp32 accumulation reduces whole gradients, as DeepSpeed's separate optimizer for this case does. The
    # norm of whole gradients is computed without a message and shows overflows, so no extra check is needed.
    if config.accumulates_whole:
        gradients = AccumulatedGradients(
            groups, kinds.communication, policy, group, kinds.accumulation or torch.float32, boundary
        )
        steps = steps._replace(check_overflow=False, check_norm=True)
    else:
        dtypes = communication_dtypes(module, kinds, config.precision.autocast_modules)
        _add_foreign(dtypes, groups, kinds)
        # Gradients that wait for the last micro-batch accumulate in each parameter's grad. Other gradients
        # accumulate in the reducer's shards.
        if not config.zero.stage.reduces_every_micro_batch:
            accumulate_in((p for each in groups for p in each.parameters), kinds.accumulation)
        gradients = (
            OwnerOrderedGradients(
                groups,
                dtypes,
                policy,
                group,
                kinds.accumulation,
                boundary,
                list(module.parameters()),
                config.zero.reduce_scatter_impl,
                config.zero.quantized_gradients,
            )
            if chunked
            else ShardedGradients(
                groups,
                dtypes,
                policy,
                group,
                kinds.accumulation,
                boundary,
                unpartitioned=unpartitioned,
            )
        )
    # Makes the parameters views of flat buffers, with the layout of the groups.
    parameters = FlatParameters(
        groups,
        group,
        not config.zero.allgather_partitions,
        config.zero.allgather_bucket_size,
        module if config.zero.overlap_parameter_gather else None,
        config.zero.quantized_weights,
    )
    # Stored by module, so that a later assemble() of the same module can undo this assembly.
    _parameters_of[module] = weakref.ref(parameters)
    # DeepSpeed checks for unused parameters only with offload, because it then sums the norm parameter by parameter.
    may_be_unused = config.zero.ignore_unused_parameters or config.zero.offload_optimizer is None
    if isinstance(gradients, ShardedGradients | OwnerOrderedGradients):
        _gradients_of[module] = weakref.ref(gradients)
    optimizer = ShardedOptimizer(
        inner,
        groups,
        parameters,
        gradients,
        group,
        steps,
        scale,
        placement=placement(config, inner, group),
        used=None if may_be_unused else UsedParameters(groups),
    )
    _optimizer_of[module] = weakref.ref(optimizer)
    return optimizer, gradients


def _replicated(
    config: RuntimeConfig,
    module: torch.nn.Module,
    inner: torch.optim.Optimizer,
    kinds: Precision,
    policy: Policy,
    group: DataParallelGroup,
    boundary: Boundary,
    scale: LossScale,
    experts: Mapping[str, ExpertRanks],
) -> tuple[Any, ReplicatedGradients]:
    if config.precision.grad_accum_dtype not in (None, config.precision.model):
        raise UnsupportedError(
            f"data_types.grad_accum_dtype is {config.precision.grad_accum_dtype} for a {config.precision.model} model at "
            "stage 0, which accumulates in the model's dtype; use stage 1, 2 or 3, or remove the key"
        )
    labels = parameter_names(module)
    trainable = [parameter for parameter in labels if parameter.requires_grad]
    names = [labels[parameter] for parameter in trainable]
    dtypes = {parameter: communication_dtype(parameter, kinds) for parameter in trainable}
    delay = config.communication.bounded_delay
    gradients: ReplicatedGradients
    if delay:
        gradients = DelayedGradients(names, trainable, dtypes, policy, group, boundary, delay)
        if group.rank == 0:
            log.info(
                f"communication.bounded_delay is {delay}: the first {delay} steps change no weights, and each later "
                f"step applies the mean gradients of {delay} steps before; engine.drain_gradients() applies the rest"
            )
    elif config.zero.reduces_whole_in_buckets:
        gradients = BucketedGradients(names, trainable, dtypes, policy, group, boundary)
        _gradients_of[module] = weakref.ref(gradients)
    else:
        gradients = ReplicatedGradients(
            names, trainable, dtypes, policy, group, boundary, _ranks_of(trainable, experts)
        )
    # Every rank has the same gradients, so the ranks agree on overflows without a message.
    reduced = kinds.model is not None
    steps = _step_policy(config, kinds)._replace(
        compute_norm=reduced, check_norm=reduced, check_overflow=False
    )
    optimizer = ReplicatedOptimizer(inner, gradients, group, steps, scale, not reduced, labels)
    # Frozen experts have no gradients that could differ between the ranks.
    optimizer.experts = experts if any(map(is_expert, trainable)) else {}
    return optimizer, gradients


def _ranks_of(
    parameters: Iterable[torch.nn.Parameter], experts: Mapping[str, ExpertRanks]
) -> dict[torch.nn.Parameter, DataParallelGroup]:
    """Return the ranks that store each parameter of an expert."""
    return {each: experts[group_of(each)].data for each in parameters if is_expert(each)}


def _unused_gradients(
    config: RuntimeConfig,
    module: torch.nn.Module,
    kinds: Precision,
    group: DataParallelGroup,
    boundary: Boundary,
) -> ReplicatedGradients:
    """Return the gradients of an engine without an optimizer.

    There is nothing to shard, so stages 1 and 2 reduce gradients in the same way as stage 0.
    """
    zero = dataclasses.replace(
        config.zero, stage=stage(0, False), gradient_reduction="all_reduce", explicit_reduction=True
    )
    policy = Policy(
        stage=zero.stage,
        reduce=reduction("all_reduce", None),
        scaling=dataclasses.replace(config, zero=zero).scaling(group.world_size),
        limit=WHOLE_BUCKET_NUMEL,
        contiguous=True,
    )
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    dtypes = {parameter: communication_dtype(parameter, kinds) for parameter in named.values()}
    return ReplicatedGradients(list(named), list(named.values()), dtypes, policy, group, boundary)


def _with_sharded_parameters(
    config: RuntimeConfig,
    module: torch.nn.Module,
    inner: torch.optim.Optimizer | None,
    kinds: Precision,
    group: DataParallelGroup,
    boundary: Boundary,
    replicas: int,
) -> Assembly:
    """Return the assembly of stage 3. Without an optimizer gradients are reduced and kept."""
    if inner is not None:
        check_shardable(inner, config.zero.stage.number, config.zero_allow_untested_optimizer)
    construction = construction_of(module.parameters())
    groups = None if inner is None else inner.param_groups
    sharded = ShardedModel(config, module, groups, kinds, group, boundary, replicas)
    if config.zero.stage.waits:
        accumulate_in(sharded.trained, kinds.accumulation)
    _gradients_of[module] = weakref.ref(sharded.gradients)
    optimizer, scale = None, LossScale()
    if inner is not None:
        _describe(module, inner)
        scale = LossScale(config.precision.loss_scale)
        # Only a step in fp16 checks for overflows with a separate message.
        steps = _step_policy(config, kinds)._replace(check_overflow=config.precision.fp16)
        optimizer = ShardedOptimizer(
            inner,
            sharded.groups,
            sharded.parameters,
            sharded.gradients,
            group,
            steps,
            scale,
            config.zero.reduce_bucket_size,
            placement(config, inner, group),
        )
        _optimizer_of[module] = weakref.ref(optimizer)
        optimizer.grow = sharded.add
    sharded.residency.install(sharded.trained)
    return Assembly(
        module,
        group.device,
        group,
        kinds,
        boundary,
        scale,
        inner,
        optimizer,
        sharded.gradients,
        sharded.residency,
        construction=construction,
    )


def _step_policy(config: RuntimeConfig, kinds: Precision) -> StepPolicy:
    norm = config.zero.compute_grad_norm
    # Without a norm, torch.autocast in fp16 would not detect an overflow.
    scaled = config.precision.loss_scale.dynamic and not norm
    return StepPolicy(
        clipping=config.sum_clipping,
        compute_norm=norm,
        check_overflow=kinds.check_overflow or scaled,
        check_norm=kinds.model is not torch.bfloat16 or kinds.check_overflow,
        masters=kinds.masters,
    )


def _add_foreign(
    dtypes: dict[torch.nn.Parameter, torch.dtype], groups: Sequence[ParameterGroup], kinds: Precision
) -> None:
    """Add the dtypes of parameters that are in the optimizer but not in the module."""
    for each in groups:
        for parameter in each.parameters:
            dtypes.setdefault(parameter, communication_dtype(parameter, kinds))


def _check_optimizer(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    known = set(module.parameters())
    updated = [parameter for each in optimizer.param_groups for parameter in each["params"]]
    if updated and known and known.isdisjoint(updated):
        raise ConfigError(
            f"the optimizer updates {len(updated)} parameters, none of which is one of the {len(known)} of the model; "
            "expected an optimizer, or model_parameters, of the same model"
        )


def _check_module(module: torch.nn.Module) -> None:
    for name, child in module.named_modules():
        if getattr(child, "sparse", False) and isinstance(child, torch.nn.Embedding | torch.nn.EmbeddingBag):
            raise UnsupportedError(
                f"{name or 'the model'} is an embedding with sparse gradients, which are not in this version yet; "
                "construct it with sparse=False"
            )


def _describe(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Publish the parameters for the recorder, in the order of the optimizer's groups. Other parameters are last."""
    if not hooks.recording():
        return
    names = parameter_names(module)
    index = {parameter: (number, name) for number, (parameter, name) in enumerate(names.items())}
    group_of = {p: number for number, each in enumerate(optimizer.param_groups) for p in each["params"]}
    ordered = [p for p in group_of if p in index] + [p for p in index if p not in group_of]
    shapes = {p: p.shape if shard is None else shard.shape for p in ordered for shard in [shard_of(p)]}
    shared, types = sharing(module), owner_types(module)
    hooks.describe_parameters(
        {
            **shared.get(parameter, {}),
            "stages": stage_text(parameter),
            "owner_types": types.get(parameter),
            "ep_size": ep_size(parameter),
            "name": index[parameter][1],
            "shape": "x".join(map(str, shapes[parameter])),
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "numel": shapes[parameter].numel(),
            "param_group": group_of.get(parameter, -1),
            "requires_grad": parameter.requires_grad,
            "module": index[parameter][1].rpartition(".")[0],
            "forward_index": index[parameter][0],
        }
        for parameter in ordered
    )
