"""Puts the parts of a training together, in DeepSpeed's order: device and dtype, broadcast, optimizer, hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import ConfigError, UnsupportedError
from zero_runtime.flat_parameters import FlatParameters
from zero_runtime.gradients import ParameterGroup, Policy, ShardedGradients
from zero_runtime.layout import PARAMETER_ALIGNMENT_BYTES, group_layout
from zero_runtime.optimizer import ReplicatedOptimizer, ShardedOptimizer, StepPolicy
from zero_runtime.precision import Precision, cast_module, communication_dtypes, precision
from zero_runtime.reduction import reduction
from zero_runtime.torch_optimizer import ClientOptimizer, check_shardable, torch_optimizer
from zero_runtime.whole_gradients import AccumulatedGradients, ReplicatedGradients

_BROADCAST: Final = hooks.tag("parameter_broadcast")
Gradients = ShardedGradients | ReplicatedGradients | AccumulatedGradients


@dataclass(slots=True)
class Boundary:
    """Asks the engine, which is made last, whether the micro-batch at hand is the last of its step."""

    ask: Callable[[], bool] = lambda: True

    def __call__(self) -> bool:
        """The engine's answer."""
        return self.ask()


class Assembly(NamedTuple):
    """The parts of an engine. Without an optimizer the last three are None."""

    module: torch.nn.Module
    device: torch.device
    group: DataParallelGroup
    precision: Precision
    boundary: Boundary
    torch_optimizer: torch.optim.Optimizer | None
    optimizer: Any
    gradients: Gradients | None


def assemble(
    config: RuntimeConfig, module: torch.nn.Module, client: ClientOptimizer | None, parameters: Any
) -> Assembly:
    """Prepare ``module`` for training: move, cast, broadcast from rank 0, and give it an optimizer.

    Args:
        config: the configuration.
        module: the model.
        client: the client's optimizer, or a function that makes one.
        parameters: tensors or param groups; None for all of the module.
    """
    _check_module(module)
    given = list(parameters) if parameters is not None else None
    group = DataParallelGroup()
    device = group.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    kinds = precision(config.precision)
    cast_module(module, config.precision)
    module.to(device)
    broadcast_parameters(module, group)
    boundary = Boundary()
    inner = torch_optimizer(
        config.optimizer, client, given if given is not None else list(module.parameters())
    )
    if inner is None:
        if config.zero.stage.shards_optimizer:
            raise ConfigError(
                f"zero_optimization.stage {config.zero.stage.number} shards an optimizer, and there is none; name one "
                "in the config, or pass one to initialize"
            )
        return Assembly(module, device, group, kinds, boundary, None, None, None)
    _describe(module, inner)
    policy = Policy(
        stage=config.zero.stage,
        reduce=reduction(config.zero.gradient_reduction, config.zero.reduce_scatter_impl),
        scaling=config.scaling(group.world_size),
        limit=config.zero.reduce_bucket_size,
        contiguous=config.zero.contiguous_gradients,
        balanced=config.zero.gradient_reduction == "reduce_scatter",
    )
    build = _sharded if config.zero.stage.shards_optimizer else _replicated
    optimizer, gradients = build(config, module, inner, kinds, policy, group, boundary)
    return Assembly(module, device, group, kinds, boundary, inner, optimizer, gradients)


def broadcast_parameters(module: torch.nn.Module, group: DataParallelGroup) -> None:
    """Give every rank the parameters of rank 0: one broadcast of its bytes for each, frozen ones included."""
    for parameter in module.parameters():
        data = parameter.detach()
        message = data.contiguous().view(-1).view(torch.uint8)
        group.broadcast(message, 0, why=_BROADCAST)
        if not data.is_contiguous():
            data.copy_(message.view(data.dtype).view(data.shape))


def parameter_groups(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, config: RuntimeConfig, world_size: int
) -> list[ParameterGroup]:
    """The trainable parameters of each param group, laid out in flat buffers.

    Raises:
        ConfigError: a group without a trainable parameter or of several dtypes, or a parameter in two groups.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    seen: set[torch.nn.Parameter] = set()
    groups = []
    for number, each in enumerate(optimizer.param_groups):
        trainable = [parameter for parameter in each["params"] if parameter.requires_grad]
        for parameter in trainable:
            if parameter in seen:
                name = names.get(parameter, f"a parameter of shape {tuple(parameter.shape)}")
                raise ConfigError(f"{name} stands in more than one param group; give it to one")
            seen.add(parameter)
        dtypes = sorted({str(parameter.dtype) for parameter in trainable})
        if len(dtypes) != 1:
            found = f"parameters of {' and '.join(dtypes)}" if dtypes else "no trainable parameter"
            raise ConfigError(
                f"param group {number} has {found}; expected trainable parameters of one dtype in each group"
            )
        numels = [parameter.numel() for parameter in trainable]
        aligned = PARAMETER_ALIGNMENT_BYTES // trainable[0].element_size()
        layout = group_layout(
            numels,
            world_size,
            round_robin=config.zero.round_robin_gradients,
            alignment=aligned if config.zero.parameter_alignment else 1,
        )
        labels = [names.get(p, f"param_groups[{number}][{index}]") for index, p in enumerate(trainable)]
        groups.append(ParameterGroup(number, tuple(labels), tuple(trainable), layout))
    return groups


def _sharded(
    config: RuntimeConfig,
    module: torch.nn.Module,
    inner: torch.optim.Optimizer,
    kinds: Precision,
    policy: Policy,
    group: DataParallelGroup,
    boundary: Boundary,
) -> tuple[ShardedOptimizer, Gradients]:
    check_shardable(inner, config.zero.stage.number, config.zero_allow_untested_optimizer)
    groups = parameter_groups(module, inner, config, group.world_size)
    gradients: ShardedGradients | AccumulatedGradients
    steps = _step_policy(config, kinds)
    if config.accumulates_whole:
        gradients = AccumulatedGradients(
            groups, kinds.communication, policy, group, kinds.accumulation or torch.float32, boundary
        )
        steps = steps._replace(check_overflow=False)
    else:
        dtypes = communication_dtypes(module, kinds, config.precision.autocast_modules)
        _add_foreign(dtypes, groups, kinds)
        gradients = ShardedGradients(groups, dtypes, policy, group, kinds.accumulation, boundary)
    parameters = FlatParameters(
        groups, group, not config.zero.allgather_partitions, config.zero.allgather_bucket_size
    )
    return ShardedOptimizer(inner, groups, parameters, gradients, group, steps), gradients


def _replicated(
    config: RuntimeConfig,
    module: torch.nn.Module,
    inner: torch.optim.Optimizer,
    kinds: Precision,
    policy: Policy,
    group: DataParallelGroup,
    boundary: Boundary,
) -> tuple[Any, ReplicatedGradients]:
    if config.precision.bf16 and kinds.accumulation is torch.float32:
        raise ConfigError(
            "data_types.grad_accum_dtype is fp32 for a bf16 model at stage 0, which accumulates in the model's dtype; "
            "use stage 1 or 2, or remove the key"
        )
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    names, trainable = [name for name, _ in named], [parameter for _, parameter in named]
    gradients = ReplicatedGradients(names, trainable, kinds.communication, policy, group, boundary)
    steps = _step_policy(config, kinds)
    labels = {parameter: name for name, parameter in module.named_parameters()}
    return ReplicatedOptimizer(inner, gradients, group, steps, not config.precision.bf16, labels), gradients


def _step_policy(config: RuntimeConfig, kinds: Precision) -> StepPolicy:
    return StepPolicy(
        clipping=config.gradient_clipping,
        compute_norm=config.zero.compute_grad_norm,
        check_overflow=kinds.check_overflow,
    )


def _add_foreign(
    dtypes: dict[torch.nn.Parameter, torch.dtype], groups: Sequence[ParameterGroup], kinds: Precision
) -> None:
    """Parameters that the optimizer has and the module has not."""
    for each in groups:
        for parameter in each.parameters:
            dtypes.setdefault(parameter, kinds.communication)


def _check_module(module: torch.nn.Module) -> None:
    for name, child in module.named_modules():
        if getattr(child, "sparse", False) and isinstance(child, torch.nn.Embedding | torch.nn.EmbeddingBag):
            raise UnsupportedError(
                f"{name or 'the model'} is an embedding with sparse gradients, which are not in this version yet; "
                "make it with sparse=False"
            )


def _describe(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Publish the parameters, in the order of the optimizer's groups, those it has not last."""
    if not hooks.recording():
        return
    index = {parameter: (number, name) for number, (name, parameter) in enumerate(module.named_parameters())}
    group_of = {p: number for number, each in enumerate(optimizer.param_groups) for p in each["params"]}
    ordered = [p for p in group_of if p in index] + [p for p in index if p not in group_of]
    hooks.describe_parameters(
        {
            "name": index[parameter][1],
            "shape": "x".join(map(str, parameter.shape)),
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "numel": parameter.numel(),
            "param_group": group_of.get(parameter, -1),
            "requires_grad": parameter.requires_grad,
            "module": index[parameter][1].rpartition(".")[0],
            "forward_index": index[parameter][0],
        }
        for parameter in ordered
    )
