"""``initialize``: constructs an engine from a model and a configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from commprof import hooks
from zero_runtime import comm, log
from zero_runtime import config as configuration
from zero_runtime.activation_checkpointing.checkpointing_settings import configure_by
from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import ConfigError
from zero_runtime.groups.comm_log import LOG
from zero_runtime.groups.parallelism import share, with_mesh
from zero_runtime.groups.traffic_contract import OFF
from zero_runtime.optimizer_step.interface import WrappedOptimizer
from zero_runtime.pipeline.model.pipeline_module import PipelineModule
from zero_runtime.pipeline.model.preparation import own_parameters, prepare, stages_for
from zero_runtime.pipeline.pipeline_engine import PipelineEngine, check_pipeline
from zero_runtime.pipeline.transfer.micro_batches import inputs_of
from zero_runtime.schedules import schedule
from zero_runtime.sharding.shards import shard_of
from zero_runtime.startup.assembly import assemble
from zero_runtime.startup.common_start import CommonStart
from zero_runtime.startup.equal_settings import check_parameters, check_settings
from zero_runtime.startup.gloo_threads import use_batch_policy
from zero_runtime.startup.open_values import decide
from zero_runtime.startup.process_end import pause_before_ending
from zero_runtime.startup.uncaught import report_uncaught
from zero_runtime.tensor_access import remember
from zero_runtime.training.data_loading import rank_loader
from zero_runtime.training.engine import Engine
from zero_runtime.version import VERSION


def initialize(  # noqa: PLR0913 - the signature is DeepSpeed's
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Engine, Any, Any, Any]:
    """Construct an engine for a model. The signature is DeepSpeed's.

    Args:
        args: may carry ``deepspeed_config``; its ``local_rank`` is set.
        model: the model; its parameters are moved to the device. At stages 1 and 2 they become views of flat buffers, at
            stage 3 they are sharded. If the model is passed again, its earlier engine can train it no longer.
        optimizer: a torch optimizer, or a function that makes one from the parameters; default: the config's.
        model_parameters: tensors or param groups; default: all parameters of the model.
        training_data: a dataset, which is distributed over the ranks.
        lr_scheduler: a scheduler, or a function that makes one from the torch optimizer; default: the config's.
        distributed_port: the port of rank 0, if no launcher has chosen one.
        mpu: the process groups of a script: a :class:`zero_runtime.ProcessGrid`, or an object with Megatron's methods.
        dist_init_required: False if torch.distributed must be initialised already.
        collate_fn: of the data loader.
        config: the configuration: a dict, or the path of a JSON file.
        mesh_param: (data-parallel ranks, sequence-parallel ranks), like data_parallel_size and sequence_parallel_size.
        config_params: another name of ``config``.

    Returns:
        (engine, engine.optimizer, data loader or None, schedule or None)

    Raises:
        ConfigError: the configuration or an argument cannot be used.
        UnsupportedError: it requests a feature that is not in this version.
    """
    # First, so that every later error is reported as one line.
    report_uncaught()
    pause_before_ending()
    if model is None:
        raise ConfigError("initialize needs a model; pass model=")
    if config is not None and config_params is not None:
        raise ConfigError("both config and config_params are given; keep config")
    if hooks.position.step >= 0 and not hooks.has_stepped():
        hooks.step(-1)  # the steps belong to another recording, or to none
    hooks.phase("init")
    config_values = configuration.load(config if config is not None else config_params, args)
    if mesh_param is not None:
        config_values = with_mesh(config_values, mesh_param)
    # The world size is needed to check the configuration: axes and batch sizes must multiply to it.
    comm.init_distributed(dist_init_required=dist_init_required, distributed_port=distributed_port)
    if args is not None and hasattr(args, "local_rank"):
        args.local_rank = comm.get_local_rank()
    with CommonStart(config_values.get("traffic_contract", OFF)) as start:
        return _constructed(
            start,
            config_values,
            model,
            optimizer,
            model_parameters,
            training_data,
            lr_scheduler,
            mpu,
            collate_fn,
        )


def _constructed(
    start: CommonStart,
    config_values: Mapping[str, Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None,
    model_parameters: Any,
    training_data: Any,
    lr_scheduler: Any,
    mpu: Any,
    collate_fn: Any,
) -> tuple[Engine, Any, Any, Any]:
    """What ``initialize`` returns, of its arguments."""
    stages = stages_for(model, configuration.pipeline_of(config_values))
    # A pipeline has its own groups; scripts pass the same ones as mpu.
    shared = share(
        configuration.parallel_of(config_values), None if isinstance(model, PipelineModule) else mpu, stages
    )
    checked = RuntimeConfig.from_mapping(config_values, comm.get_world_size(), shared.stages)
    # Before anything is sent: with other settings ranks would wait for messages that never come.
    checked = check_settings(checked, start)
    _notify(checked)
    if checked.comms_logger.enabled:
        LOG.configure(**dataclasses.asdict(checked.comms_logger))
    # A pipeline creates its groups and keeps only this rank's layers before anything is assembled; other models only need
    # the groups.
    engine_type: type[Engine] = Engine
    if isinstance(model, PipelineModule):
        engine_type = PipelineEngine
        check_pipeline(checked)
        was_dealt = model.is_dealt
        sample = None if training_data is None else partial(_sample, training_data, checked, collate_fn)
        parallelism = prepare(model, checked, stages, sample)
        model_parameters = own_parameters(model, model_parameters, not was_dealt)
    else:
        parallelism = shared.parallelism()
    _notify_host_update(checked, optimizer)
    use_batch_policy()  # of gloo's threads, before messages are timed for sizes that are "auto"
    checked = decide(checked, model, comm.DataParallelGroup(parallelism.data))
    if checked.traffic_contract != OFF:
        check_parameters(checked, model, comm.DataParallelGroup(parallelism.data))
    assembly = assemble(checked, model, optimizer, model_parameters, parallelism)
    # Activations that all tensor-parallel ranks have can be partitioned for checkpointing; with sequence parallelism there
    # are none.
    alike = None if checked.parallel.sequence_parallel else assembly.parallelism.tensor_group
    configure_by(
        checked.activation_checkpointing,
        assembly.device.type,
        "activation_checkpointing" in checked.given,
        alike,
    )
    # A schedule needs the torch optimizer, which the assembly has constructed.
    scheduler = None
    if assembly.torch_optimizer is not None:
        scheduler = schedule(checked.scheduler, lr_scheduler, assembly.torch_optimizer)
    loader = None
    if training_data is not None:
        loader = rank_loader(
            training_data,
            checked.train_micro_batch_size_per_gpu,
            drop_last=checked.dataloader_drop_last,
            # As in DeepSpeed, a pipeline takes samples in order.
            shuffle=not isinstance(model, PipelineModule),
            collate_fn=collate_fn,
            replicas=assembly.parallelism.replicas,
            replica=assembly.parallelism.replica,
        )
    engine = engine_type(checked, assembly, scheduler, loader)
    engine.keep_contract(start.verdict)
    if isinstance(assembly.optimizer, WrappedOptimizer):
        remember(assembly.optimizer, assembly.group, assembly.parallelism.experts)
    engine.collate_fn = collate_fn
    # The recorder gets the values in use, from which the requested traffic is predicted.
    effective = {**checked.effective(), **assembly.parallelism.described()}
    if assembly.installed.costs is not None:
        effective["communication"]["measured_costs"] = assembly.installed.costs.described()
    hooks.describe_config(
        effective,
        f"zero_runtime {VERSION}",
        numel=sum(
            each.numel() if shard is None else shard.numel
            for each in assembly.module.parameters()
            for shard in [shard_of(each)]
        ),
        has_optimizer=engine.optimizer is not None,
        construction=None if assembly.construction is None else assembly.construction.described(),
    )
    use_batch_policy()  # of the threads of groups that were made since
    hooks.phase("other")
    return engine, engine.optimizer, loader, scheduler


def _sample(training_data: Any, config: RuntimeConfig, collate_fn: Any) -> Any:
    """An input of the first layer: the input of the first batch."""
    loader = rank_loader(
        training_data,
        config.train_micro_batch_size_per_gpu,
        drop_last=False,
        shuffle=False,
        collate_fn=collate_fn,
    )
    return inputs_of(next(iter(loader)))


def _notify_host_update(config: RuntimeConfig, optimizer: Any) -> None:
    """Warn about an offloaded optimizer of the script that DeepSpeed would refuse."""
    offloads = config.zero.offload_optimizer is not None
    if not offloads or not isinstance(optimizer, torch.optim.Optimizer) or comm.get_rank() != 0:
        return
    kind = getattr(optimizer, "made_as", type(optimizer).__name__)
    if config.given.get("zero_force_ds_cpu_optimizer", True) and not kind.startswith("DeepSpeedCPU"):
        log.warning(
            f"zero_force_ds_cpu_optimizer is true (its default), and the optimizer is the script's {kind}: it updates the "
            "offloaded state here, and DeepSpeed refuses it; set the key to false, or use DeepSpeedCPUAdam"
        )


def _notify(config: RuntimeConfig) -> None:
    if comm.get_rank() != 0:
        return
    for notice in config.notices:
        log.warning(notice)
    if config.dump_state:
        for name, value in config.effective().items():
            log.info(f"{name} = {value}")
