"""Partitioning of a model by a plan, which replaces layers by tensor-parallel layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.configuration.blocks.parallel_block import ParallelConfig
from zero_runtime.errors import ConfigError
from zero_runtime.sharding.shards import shard_of
from zero_runtime.tensor_parallel.cuts import cut_of
from zero_runtime.tensor_parallel.division_plan import (
    How,
    Plan,
    Rule,
    automatic_plan,
    configured_plan,
    first_rule,
    plan_of,
    unused,
)
from zero_runtime.tensor_parallel.parallel_layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from zero_runtime.tensor_parallel.parallel_loss import VocabParallelCrossEntropy
from zero_runtime.tensor_parallel.tensor_collectives import Ranks, split_sequence, sum_gradients

_EXPECTED: Final[Mapping[How, type[torch.nn.Module]]] = {
    How.COLUMN: torch.nn.Linear,
    How.GATHERED: torch.nn.Linear,
    How.ROW: torch.nn.Linear,
    How.VOCABULARY: torch.nn.Embedding,
    How.LOSS: torch.nn.CrossEntropyLoss,
}
_CUT: Final = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, VocabParallelCrossEntropy)
# Attributes of attention modules that contain a number of heads. Each rank has its share of the heads.
_HEADS: Final = (
    "heads", "num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads",
    "n_local_heads", "num_attn_heads", "nheads",
)  # fmt: skip
_WIDTHS: Final = ("head_width", "head_dim", "head_size", "attention_head_size")
_HEADED: Final = ("q_proj", "k_proj", "v_proj", "query", "key", "value", "wq", "wk", "wv")
_BROADCAST: Final = hooks.tag("parameter_broadcast")
_SHARED: Final = "zero_runtime_shared"  # an attribute of modules that work on shards of sequences


def divide(
    config: ParallelConfig, module: torch.nn.Module, group: DataParallelGroup | None, is_stage: bool = False
) -> None:
    """Partition ``module`` over the ranks of ``group`` as configured, unless ``module`` is already partitioned.

    Before the partition, every rank receives the parameters and buffers of the group's first rank. So all ranks
    partition the same model.

    Args:
        config: The parallel keys.
        module: The model. Its attribute ``tensor_parallel_plan`` is the plan if the configuration has no plan.
        group: The tensor-parallel ranks, or None without tensor parallelism.
        is_stage: Whether ``module`` is a pipeline stage. Patterns of a plan may then match nothing.

    Raises:
        ConfigError: The plan does not fit the model, or there is no plan.
    """
    if group is None or config.tp_size == 1 or any(isinstance(each, _CUT) for each in module.modules()):
        return
    if any(shard_of(parameter) is not None for parameter in module.parameters()):
        raise ConfigError(
            f"tp_size is {config.tp_size}, and parameters of the model were sharded when it was constructed "
            "(zero.Init), before they could be partitioned; make the model outside of zero.Init, or set tp_size to 1"
        )
    plan, lenient = configured_plan(config, getattr(module, "tensor_parallel_plan", None))
    steps = _checked(module, plan, group.world_size, lenient, config.sequence_parallel, is_stage)
    for tensor in (*module.parameters(), *module.buffers()):
        # A message needs contiguous memory, so that a non-contiguous tensor is copied before and after.
        data = tensor.detach()
        message = data.contiguous()
        group.broadcast(message.view(-1).view(torch.uint8), 0, why=_BROADCAST)
        if message.data_ptr() != data.data_ptr():
            data.copy_(message)
    _divide(module, steps, group, config.sequence_parallel)


def parallelize(
    module: torch.nn.Module,
    group: Any,
    plan: Mapping[str, Any] | None = None,
    *,
    sequence_parallel: bool = False,
) -> torch.nn.Module:
    """Partition ``module`` in place over the ranks of ``group``.

    This function is for scripts that partition their models themselves and pass an ``mpu`` to ``initialize``.
    With ``tp_size`` in the configuration, ``initialize`` partitions the model.

    Args:
        module: The model, whose parameters must be equal on all ranks of ``group``.
        group: The tensor-parallel ranks, as a process group of torch or a :class:`DataParallelGroup`.
        plan: Patterns of module names, each with the partition of the matching modules. None selects a plan
            for common names of layers.
        sequence_parallel: Whether to partition activations between these modules along the sequence.

    Returns:
        ``module``.

    Raises:
        ConfigError: The plan does not fit the model, or no layer of the model has a known name.
    """
    ranks = group if isinstance(group, DataParallelGroup) else DataParallelGroup(group)
    rules = automatic_plan() if plan is None else plan_of(plan)
    steps = _checked(module, rules, ranks.world_size, plan is None, sequence_parallel)
    if ranks.world_size > 1:
        _divide(module, steps, ranks, sequence_parallel)
    return module


def _checked(
    module: torch.nn.Module,
    plan: Plan,
    size: int,
    lenient: bool,
    shares_sequence: bool,
    is_stage: bool = False,
) -> dict[str, Rule]:
    """Check all rules, and return the rule of each module that has a rule.

    The rules are checked before any module is changed.
    """
    named = dict(module.named_modules())
    rules = {name: rule for name in named if name and (rule := first_rule(plan, name)) is not None}
    if lenient:
        rules = {name: rule for name, rule in rules.items() if _fits(named[name], rule)}
    elif not is_stage:
        idle = unused(plan, [name for name in named if name])
        if idle:
            raise ConfigError(
                f"the tensor-parallel plan names {', '.join(map(repr, idle))}, but the model has no such module; the "
                f"first of its {len(named) - 1} modules are {', '.join(list(named)[1:6])}"
            )
    for name, rule in rules.items():
        if not _fits(named[name], rule):
            wanted = _EXPECTED[rule.how].__name__
            raise ConfigError(
                f"the tensor-parallel plan partitions {name!r} as {rule.how}, which needs a {wanted}, but it is a "
                f"{type(named[name]).__name__}; change the plan"
            )
        _check_shapes(name, named[name], rule, size)
    cut = [name for name, rule in rules.items() if rule.how in _EXPECTED]
    if not cut and not is_stage:
        raise ConfigError(
            f"tensor parallelism over {size} ranks: no layer of the {type(module).__name__} has a name that determines its "
            'partition; name its modules in tensor_parallel.plan, such as {"layers.*.up": "column", "layers.*.down": "row"}'
        )
    for name in _attention(rules):
        _check_heads(name, named[name], size)
        _check_head_width(name, named[name], rules, size)
    if shares_sequence:
        _check_sequence(named, rules)
    return rules


def _fits(module: torch.nn.Module, rule: Rule) -> bool:
    return isinstance(module, _EXPECTED.get(rule.how, torch.nn.Module))


def _check_shapes(name: str, module: torch.nn.Module, rule: Rule, size: int) -> None:
    """Raise ConfigError if the parameters of ``module`` cannot be partitioned evenly. No module is changed yet."""
    extents: tuple[tuple[str, int], ...] = ()
    if isinstance(module, torch.nn.Linear) and rule.how in (How.COLUMN, How.GATHERED):
        extents = tuple(("outputs", each) for each in _extents(name, module, rule))
    elif isinstance(module, torch.nn.Linear) and rule.how is How.ROW:
        extents = (("inputs", module.in_features),)
    elif isinstance(module, torch.nn.Embedding) and rule.how is How.VOCABULARY:
        extents = (("vocabulary entries", module.num_embeddings),)
    for what, extent in extents:
        if extent % size:
            hint = "; pad the vocabulary" if what == "vocabulary entries" else ""
            raise ConfigError(
                f"{name} has {extent} {what}, which tp_size {size} does not divide; choose a tp_size that divides it, or "
                f"leave the module out of the plan{hint}"
            )


def _extents(name: str, layer: torch.nn.Linear, rule: Rule) -> tuple[int, ...]:
    if isinstance(rule.sections, tuple):
        return rule.sections
    if layer.out_features % rule.sections:
        raise ConfigError(
            f"{name} has {layer.out_features} outputs, which are not {rule.sections} equal sections; name their sizes in "
            'the plan: "column:64,16,16"'
        )
    return (layer.out_features // rule.sections,) * rule.sections


def _attention(rules: Mapping[str, Rule]) -> list[str]:
    """Return the names of the modules that contain column-parallel layers.

    These modules include the attention modules, which have attributes with a number of heads.
    """
    owners = {name.rpartition(".")[0]: None for name, rule in rules.items() if rule.how is How.COLUMN}
    return [name for name in owners if name]


def _heads(module: torch.nn.Module) -> dict[str, int]:
    values = {name: module.__dict__.get(name) for name in _HEADS}
    return {
        name: each for name, each in values.items() if isinstance(each, int) and not isinstance(each, bool)
    }


def _check_heads(name: str, module: torch.nn.Module, size: int) -> None:
    for attribute, heads in _heads(module).items():
        if heads % size:
            raise ConfigError(
                f"{name}.{attribute} is {heads}, which tp_size {size} does not divide: each rank has whole heads; choose a "
                "tp_size that divides it"
            )


def _check_head_width(name: str, module: torch.nn.Module, rules: Mapping[str, Rule], size: int) -> None:
    """Check the number of heads, like :func:`_check_heads`, for modules that store only the width of a head."""
    widths = [
        each for attribute in _WIDTHS if isinstance(each := module.__dict__.get(attribute), int) and each > 0
    ]
    for child, layer in module.named_children():
        rule = rules.get(f"{name}.{child}")
        if rule is None or rule.how is not How.COLUMN or not isinstance(layer, torch.nn.Linear):
            continue
        extents = _extents(f"{name}.{child}", layer, rule)
        for width in widths if len(extents) > 1 or child in _HEADED else ():
            heads = [extent // width for extent in extents if extent % width == 0 and extent // width % size]
            if heads:
                raise ConfigError(
                    f"{name}.{child} has {heads[0]} heads of width {width}, which tp_size {size} does not divide: each rank "
                    "has whole heads; choose a tp_size that divides them"
                )


def _check_sequence(named: Mapping[str, torch.nn.Module], rules: Mapping[str, Rule]) -> None:
    for name, module in named.items():
        if name not in rules and any(True for _ in module.parameters(recurse=False)):
            raise ConfigError(
                f"tensor_parallel.sequence_parallel is true, and the plan does not say whether {name!r} "
                f"({type(module).__name__}) works on shards of sequences; name it as "
                '"sequence" if it does (as norms do), as "split" if its output is to be sharded, or as "whole"'
            )


def _divide(
    module: torch.nn.Module, rules: Mapping[str, Rule], group: DataParallelGroup, shares_sequence: bool
) -> None:
    named = dict(module.named_modules(remove_duplicate=False))
    for name in _attention(rules):
        for attribute, heads in _heads(named[name]).items():
            setattr(named[name], attribute, heads // group.world_size)
    replacements: dict[torch.nn.Module, torch.nn.Module] = {}
    for name, rule in rules.items():
        layer = named[name]
        replacements[layer] = _replacement(layer, rule, Ranks(group, name), name, shares_sequence)
    for name, child in named.items():
        if child in replacements and replacements[child] is not child:
            parent, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(parent), attribute, replacements[child])


def _replacement(
    layer: torch.nn.Module, rule: Rule, ranks: Ranks, name: str, shares_sequence: bool
) -> torch.nn.Module:
    match rule.how, layer:
        case ((How.COLUMN | How.GATHERED), torch.nn.Linear()):
            return ColumnParallelLinear.of(
                layer,
                ranks,
                name,
                sections=_extents(name, layer, rule),
                gathers=rule.how is How.GATHERED,
                shares_sequence=shares_sequence,
            )
        case How.ROW, torch.nn.Linear():
            return RowParallelLinear.of(layer, ranks, name, shares_sequence=shares_sequence)
        case How.VOCABULARY, torch.nn.Embedding():
            return VocabParallelEmbedding.of(layer, ranks, name, shares_sequence=shares_sequence)
        case How.LOSS, torch.nn.CrossEntropyLoss():
            return VocabParallelCrossEntropy.of(layer, ranks, name)
    if shares_sequence and rule.how in (How.SEQUENCE, How.SPLIT):
        setattr(layer, _SHARED, rule.how)
    if shares_sequence and rule.how is How.SEQUENCE:
        for each, parameter in layer.named_parameters():
            sum_gradients(parameter, ranks, f"{name}.{each}")
    if shares_sequence and rule.how is How.SPLIT:
        layer.register_forward_hook(lambda _module, _inputs, output: split_sequence(output, ranks))
    return layer


def sharing(module: torch.nn.Module) -> dict[torch.nn.Parameter, dict[str, str]]:
    """Return the partition of parameters, for the record of a run.

    The result contains each partitioned parameter, and each parameter of a module that works on shards of
    sequences.
    """
    facts: dict[torch.nn.Parameter, dict[str, str]] = {}
    for child in module.modules():
        how = _how(child)
        if how is None:
            continue
        for parameter in child.parameters(recurse=how is How.SEQUENCE):
            cut = cut_of(parameter)
            fact = {"cut": str(how)}
            if cut is not None:
                shard = shard_of(parameter)
                shape = parameter.shape if shard is None else shard.shape
                fact["whole_shape"] = "x".join(map(str, cut.whole_shape(tuple(shape))))
            facts.setdefault(parameter, fact)
    return facts


def _how(module: torch.nn.Module) -> How | None:
    match module:
        case ColumnParallelLinear():
            return How.GATHERED if module.gathers else How.COLUMN
        case RowParallelLinear():
            return How.ROW
        case VocabParallelEmbedding():
            return How.VOCABULARY
    return getattr(module, _SHARED, None)


def whole_parameter(parameter: torch.Tensor, group: DataParallelGroup, why: hooks.tag) -> torch.Tensor:
    """Return the complete ``parameter`` from the shards of ``group``. All ranks must call this function.

    A partitioned parameter is gathered with one all_gather.
    """
    how = cut_of(parameter)
    own = parameter.detach().contiguous()
    if how is None:
        return own
    shards = own.new_empty((how.size, *own.shape))
    group.all_gather_single(shards.view(-1), own.view(-1), why=why)
    return how.joined(list(shards.unbind()))
