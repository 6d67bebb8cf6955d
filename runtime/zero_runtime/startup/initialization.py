"""The function ``initialize``, which constructs an engine from a model and a configuration."""

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
        args: Command-line arguments. They may contain ``deepspeed_config``, and their ``local_rank`` is set.
        model: The model, whose parameters are moved to the device. At stages 1 and 2 the parameters become
            views of flat buffers. At stage 3 they are sharded. If the model is passed again, its earlier engine
            can no longer train it.
        optimizer: A torch optimizer, or a function that creates an optimizer from the parameters. Default: the
            optimizer of the configuration.
        model_parameters: Tensors or param groups. Default: all parameters of the model.
        training_data: A dataset, which is distributed over the ranks.
        lr_scheduler: A scheduler, or a function that creates a scheduler from the torch optimizer. Default: the
            scheduler of the configuration.
        distributed_port: The port of rank 0, if no launcher has chosen a port.
        mpu: The process groups of a script: a :class:`zero_runtime.ProcessGrid`, or an object with Megatron's
            methods.
        dist_init_required: False if torch.distributed must already be initialized.
        collate_fn: The collate function of the data loader.
        config: The configuration: a dict, or the path of a JSON file.
        mesh_param: A pair (data-parallel ranks, sequence-parallel ranks), with the same meaning as
            data_parallel_size and sequence_parallel_size.
        config_params: Another name for ``config``.

    Returns:
        (engine, engine.optimizer, data loader or None, schedule or None)

    Raises:
        ConfigError: The configuration or an argument cannot be used.
        UnsupportedError: The configuration requests a feature that is not in this version.
    """
    # First, so that every later error is reported as one line.
    report_uncaught()
    pause_before_ending()
    if model is None:
        raise ConfigError("initialize needs a model; pass model=")
    if config is not None and config_params is not None:
        raise ConfigError("both config and config_params are given; keep config")
    if hooks.position.step >= 0 and not hooks.has_stepped():
        hooks.step(-1)  # the counted steps belong to another recording, or to no recording
    hooks.phase("init")
    config_values = configuration.load(config if config is not None else config_params, args)
    if mesh_param is not None:
        config_values = with_mesh(config_values, mesh_param)
    # The world size is needed to check the configuration, because axes and batch sizes must multiply to it.
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
    """Construct the engine and return the result of ``initialize`` for these arguments."""
    stages = stages_for(model, configuration.pipeline_of(config_values))
    # A pipeline has its own groups. Scripts pass the same groups as mpu.
    shared = share(
        configuration.parallel_of(config_values), None if isinstance(model, PipelineModule) else mpu, stages
    )
    checked = RuntimeConfig.from_mapping(config_values, comm.get_world_size(), shared.stages)
    # Compared before anything is sent. With different settings ranks would wait for messages that are never sent.
    checked = check_settings(checked, start)
    _notify(checked)
    if checked.comms_logger.enabled:
        LOG.configure(**dataclasses.asdict(checked.comms_logger))
    # A pipeline creates its groups and keeps only this rank's layers before anything is assembled. Other models need
    # only the groups.
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
    use_batch_policy()  # before messages are timed for sizes that are "auto"
    checked = decide(checked, model, comm.DataParallelGroup(parallelism.data))
    if checked.traffic_contract != OFF:
        check_parameters(checked, model, comm.DataParallelGroup(parallelism.data))
    assembly = assemble(checked, model, optimizer, model_parameters, parallelism)
    # Activations that are equal on all tensor-parallel ranks can be partitioned for checkpointing. With sequence
    # parallelism there are no such activations.
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
    use_batch_policy()  # again, for the threads of groups that were created since the first call
    hooks.phase("other")
    return engine, engine.optimizer, loader, scheduler


def _sample(training_data: Any, config: RuntimeConfig, collate_fn: Any) -> Any:
    """Return an input of the first layer: the input of the first batch."""
    loader = rank_loader(
        training_data,
        config.train_micro_batch_size_per_gpu,
        drop_last=False,
        shuffle=False,
        collate_fn=collate_fn,
    )
    return inputs_of(next(iter(loader)))


def _notify_host_update(config: RuntimeConfig, optimizer: Any) -> None:
    """Warn if the script's optimizer is offloaded and DeepSpeed would refuse it."""
    offloads = config.zero.offload_optimizer is not None
    if not offloads or not isinstance(optimizer, torch.optim.Optimizer) or comm.get_rank() != 0:
        return
    kind = getattr(optimizer, "made_as", type(optimizer).__name__)
    if config.given.get("zero_force_ds_cpu_optimizer", True) and not kind.startswith("DeepSpeedCPU"):
        log.warning(
            f"zero_force_ds_cpu_optimizer is true (its default), and the optimizer is the script's {kind}: "
            "zero_runtime updates the offloaded state with it, but DeepSpeed refuses it; set the key to false, or "
            "use DeepSpeedCPUAdam"
        )


def _notify(config: RuntimeConfig) -> None:
    if comm.get_rank() != 0:
        return
    for notice in config.notices:
        log.warning(notice)
    if config.dump_state:
        for name, value in config.effective().items():
            log.info(f"{name} = {value}")
