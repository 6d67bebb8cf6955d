"""Preparation of a PipelineModule: reconciliation with the configuration, and construction of this rank's stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zero_runtime import comm, log
from zero_runtime.activation_checkpointing import checkpoint, non_reentrant_checkpoint
from zero_runtime.config import RuntimeConfig
from zero_runtime.configuration.blocks.pipeline_block import PipelineConfig
from zero_runtime.errors import ConfigError
from zero_runtime.groups.parallelism import Parallelism, of_grid
from zero_runtime.groups.process_grid import DATA, MODEL, PIPE, SEQUENCE, ProcessTopology
from zero_runtime.pipeline.model.layer_specs import LayerSpec
from zero_runtime.pipeline.model.pipeline_module import PipelineModule, stages_of
from zero_runtime.pipeline.schedule.step_plan import DEFAULT_CHUNKS, INTERLEAVED, Plan
from zero_runtime.pipeline.stage_grid import PipelineGrid


def stages_for(model: torch.nn.Module, config: PipelineConfig) -> int:
    """Return the number of stages on which ``model`` and the configuration agree; 1 for a model that is no pipeline.

    Raises:
        ConfigError: Neither sets the number, both set different numbers, or the configuration sets several
            stages for a model that is no pipeline.
    """
    if not isinstance(model, PipelineModule):
        if config.stages is not None and config.stages > 1:
            raise ConfigError(
                f"the configuration requests {config.stages} pipeline stages (pipeline_parallel.pp_size or "
                f"pipeline.stages), and the model is a {type(model).__name__}; give it as "
                "zero_runtime.PipelineModule(layers=[...], loss_fn=...), or remove the key"
            )
        if config.partition_method is not None and comm.get_rank() == 0:
            log.warning(
                f"the partition method {config.partition_method} has no effect: the model is a {type(model).__name__}, and "
                "only a PipelineModule is partitioned into stages"
            )
        return 1
    mine = model.num_stages if model.is_dealt else stages_of(model)
    if mine is None and config.stages is None:
        raise ConfigError(
            "neither PipelineModule(num_stages=...) nor the configuration (pipeline_parallel.pp_size or "
            "pipeline.stages) says how many stages there are; give one of them"
        )
    if mine is not None and config.stages not in (None, mine):
        verb = "is partitioned into" if model.is_dealt else "was made for"
        raise ConfigError(
            f"the PipelineModule {verb} {mine} stages, and the configuration requests {config.stages}; make them "
            "equal, or leave num_stages out of a new PipelineModule"
        )
    stages = mine or config.stages
    assert stages is not None
    return stages


def plan_for(model: PipelineModule, config: PipelineConfig, stages: int) -> Plan:
    """Return the schedule on which ``model`` and the configuration agree.

    Args:
        model: A pipeline, whose layers may not be assigned to stages yet.
        config: The pipeline keys of the configuration.
        stages: The result of :func:`stages_for`.

    Raises:
        ConfigError: The model and the configuration set different numbers of virtual stages, or there are
            several virtual stages with a schedule other than interleaved.
    """
    mine = model.virtual_stages if model.is_dealt else model.wanted_virtual_stages
    configured = config.virtual_stages
    if configured is None and model.wanted_virtual_stages is None and config.schedule == INTERLEAVED:
        configured = DEFAULT_CHUNKS
    if mine is not None and configured not in (None, mine):
        verb = "is partitioned into" if model.is_dealt else "was made for"
        raise ConfigError(
            f"the PipelineModule {verb} {mine} virtual stages on each stage, and the configuration says "
            f"pipeline_parallel.virtual_stages {configured}; give PipelineModule virtual_stages={configured}, or "
            "leave num_stages out "
            "of it"
        )
    chunks = mine or configured or 1
    name = config.schedule or (INTERLEAVED if chunks > 1 else "1f1b")
    if chunks > 1 and name != INTERLEAVED:
        raise ConfigError(
            f"each stage has {chunks} virtual stages (pipeline_parallel.virtual_stages, or PipelineModule's), and "
            f"pipeline_parallel.schedule {name} supports only one; use schedule interleaved, or 1 virtual stage"
        )
    return Plan(name, stages, chunks)


def plan_of(model: PipelineModule, config: PipelineConfig) -> Plan:
    """Return the schedule of a model whose layers are assigned to stages."""
    return plan_for(model, config, model.num_stages)


def prepare(
    model: PipelineModule, config: RuntimeConfig, stages: int, sample: Callable[[], Any] | None
) -> Parallelism:
    """Assign the layers of ``model`` to stages as configured, unless they are already assigned.

    All ranks must call this function.

    Args:
        model: The pipeline.
        config: The configuration.
        stages: The result of :func:`stages_for`.
        sample: A function that returns an input of the first layer, for the method ``profile``.

    Raises:
        ConfigError: ``PipelineModule.deal`` raises it, or the existing assignment contradicts the
            configuration.
    """
    plan = plan_for(model, config.pipeline, stages)
    _check_plan(plan, model, config)
    method = _method(model, config.pipeline.partition_method)
    topology = _topology(model, config, stages)
    if model.grid is None:
        sample_input = sample() if sample is not None and method == "profile" else None
        model.deal(PipelineGrid(topology), method, sample_input, plan.chunks)
    else:
        if model.grid.topology != topology:
            model.move_to(PipelineGrid(topology))
        if method is not None and method != model.method:
            _check_same(model, method)
    if config.pipeline.activation_checkpoint_interval:
        model.set_checkpoint_interval(config.pipeline.activation_checkpoint_interval)
    if not config.pipeline.use_reentrant and model.activation_checkpoint_func is checkpoint:
        model.activation_checkpoint_func = non_reentrant_checkpoint
    assert model.grid is not None
    return of_grid(model.grid.processes)


def _check_plan(plan: Plan, model: PipelineModule, config: RuntimeConfig) -> None:
    plan.check(config.gradient_accumulation_steps)
    chunks = plan.stages * plan.chunks
    if plan.chunks > 1 and chunks > len(model.layers):
        raise ConfigError(
            f"{plan.stages} stages of {plan.chunks} virtual stages each need {chunks} layers or more, and the model "
            f"has {len(model.layers)}; lower pipeline_parallel.virtual_stages, or divide the model into more layers"
        )
    interval = config.pipeline.activation_checkpoint_interval or model.activation_checkpoint_interval
    ours = model.activation_checkpoint_func in (checkpoint, non_reentrant_checkpoint)
    if plan.splits_backward and interval and not ours:
        raise ConfigError(
            f"activation_checkpoint_interval is {interval}, and pipeline_parallel.schedule is zero_bubble, which "
            "differentiates a forward pass in many parts; the activation_checkpoint_func of the PipelineModule would run "
            "layers again for each of them. Leave that function out, set the interval to 0, or use schedule 1f1b"
        )


def _method(model: PipelineModule, configured: str | None) -> str | None:
    mine = model.partition_method
    if mine is not None and configured not in (None, mine):
        raise ConfigError(
            f"PipelineModule has partition_method {mine!r}, and the configuration says {configured!r}; keep one of them"
        )
    return configured or mine


def _check_same(model: PipelineModule, method: str) -> None:
    bounds = model.bounds(model.num_stages * model.virtual_stages, method)
    if bounds != model.parts:
        raise ConfigError(
            f"PipelineModule already assigned the layers by {model.method} (stages begin at layers {model.parts}), "
            f"and {method} in the configuration gives {bounds}; leave num_stages out of PipelineModule and set "
            f"pipeline_parallel.pp_size to {model.num_stages}, or give PipelineModule partition_method={method!r}"
        )


def _topology(model: PipelineModule, config: RuntimeConfig, stages: int) -> ProcessTopology:
    """Return the axes of all ranks, from the model's own topology if it has one, otherwise from the configuration."""
    replicas = config.parallel.replicas(comm.get_world_size(), stages)
    if isinstance(model.wanted, ProcessTopology):
        topology = model.wanted.widened(PIPE, DATA)
        expected_sizes = {
            DATA: replicas,
            SEQUENCE: config.parallel.sequence_parallel_size,
            MODEL: config.parallel.tp_size,
        }
        for axis, size in expected_sizes.items():
            if topology.size(axis) != size:
                raise ConfigError(
                    f"the topology of the PipelineModule has {topology.size(axis)} ranks along {axis}, and the "
                    "configuration "
                    f"requests {size}; make them equal"
                )
        return topology
    sizes = {PIPE: stages, DATA: replicas}
    if config.parallel.sequence_parallel_size > 1:
        sizes[SEQUENCE] = config.parallel.sequence_parallel_size
    if config.parallel.tp_size > 1:
        sizes[MODEL] = config.parallel.tp_size
    return ProcessTopology.of(**sizes)


def own_parameters(model: PipelineModule, candidates: Any, unknown: bool) -> list[Any] | None:
    """Return those ``model_parameters`` that belong to this rank's stage. None means all parameters of the stage.

    Args:
        model: A pipeline whose layers are assigned to stages.
        candidates: The tensors or param groups that the script passed, or None for all parameters.
        unknown: Whether the layers were not assigned to stages when the script passed ``candidates``. The
            model then had no parameters of layers that were not built.

    Raises:
        ConfigError: ``candidates`` are param groups, and the layers were not built when the script passed them.
    """
    if candidates is None:
        return None
    listed = list(candidates)
    built_later = unknown and any(isinstance(layer, LayerSpec) for layer in model.layers)
    if built_later:
        if any(isinstance(each, dict) for each in listed):
            raise ConfigError(
                "model_parameters are param groups of a PipelineModule whose layers were built by initialize; give "
                "PipelineModule num_stages, after torch.distributed is initialized, so that it builds its layers at "
                "once, or pass a function as optimizer, which is called with the parameters"
            )
        return None
    mine = set(model.parameters())
    of_stage: list[Any] = []
    for each in listed:
        if isinstance(each, dict):
            of_stage.append({**each, "params": [p for p in _tensors(each["params"]) if p in mine]})
        elif each in mine:
            of_stage.append(each)
    return [each for each in of_stage if not isinstance(each, dict) or each["params"]]


def _tensors(values: Any) -> list[Any]:
    return [values] if isinstance(values, torch.Tensor) else list(values)
