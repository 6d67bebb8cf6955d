"""Test every key of the configuration.

Implemented keys have an effect, the others are refused with the reason, and no key is missing.
"""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path

import pytest

from support import recorded
from zero_runtime.config import RuntimeConfig
from zero_runtime.configuration import all_keys
from zero_runtime.configuration.blocks.activation_block import ActivationCheckpointing
from zero_runtime.configuration.blocks.precision_block import PrecisionConfig
from zero_runtime.configuration.blocks.sharding_block import ShardingConfig
from zero_runtime.configuration.blocks.zero_block import ZeroConfig
from zero_runtime.configuration.config_values import MonitorConfig, OptimizerConfig, SchedulerConfig
from zero_runtime.configuration.reading.checks import boolean
from zero_runtime.configuration.reading.coercion import UNCHECKED
from zero_runtime.configuration.reading.key_table import Status
from zero_runtime.errors import ConfigError, UnsupportedError

SOURCES = Path(all_keys.__file__).parent.parent
PLAIN = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW"},
    "scheduler": {"type": "WarmupLR"},
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2, "reduce_scatter": False},
}
STAGE_3 = {"zero_optimization": {"stage": 3, "reduce_scatter": False}}
NVME = {
    "zero_optimization": {
        "stage": 2,
        "reduce_scatter": False,
        "offload_optimizer": {"device": "nvme", "nvme_path": "here"},
    }
}
PARAMETERS_IN_FILES = {
    "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "there"}}
}
COSTS = {"communication": {"calibration": {"world": "all.json", "axes": ["one.json", "two.json"]}}}
CUT = {"tp_size": 2}
# For each implemented key, a value that must make a difference, and the other settings that this requires.
VALUES = {
    "train_batch_size": (8, {"train_micro_batch_size_per_gpu": None}),
    "checkpoint.load_universal": (True, {}),
    "timers": ({"throughput": {"enabled": False}}, {}),
    "timers.throughput": ({"enabled": False}, {}),
    "timers.throughput.enabled": (False, {}),
    "timers.throughput.synchronized": (False, {}),
    "pipeline": ({"stages": 2}, {}),
    "pipeline.stages": (2, {}),
    "pipeline.partition": ("uniform", {}),
    "pipeline.partition_methods": (["uniform"], {}),
    "pipeline.activation_checkpoint_interval": (2, {}),
    "pipeline.use_reentrant": (False, {}),
    "pipeline_parallel": ({"pp_size": 2}, {}),
    "pipeline_parallel.enabled": (False, {"pipeline_parallel": {"pp_size": 2}}),
    "pipeline_parallel.pp_size": (2, {}),
    "pipeline_parallel.micro_batches": (2, {}),
    "pipeline_parallel.schedule": ("gpipe", {}),
    "pipeline_parallel.virtual_stages": (2, {}),
    "pipeline_parallel.partition_method": ("uniform", {}),
    "pipeline_parallel.partition_methods": ("type:Block", {}),
    "partition_methods": ("profile", {}),
    "train_micro_batch_size_per_gpu": (2, {}),
    "gradient_accumulation_steps": (2, {}),
    "managed_gradient_accumulation": (False, {}),
    "optimizer": ({"type": "SGD"}, {}),
    "optimizer.type": ("SGD", {}),
    "optimizer.params": ({"lr": 0.1}, {}),
    "scheduler": ({"type": "StepLR"}, {}),
    "scheduler.type": ("StepLR", {}),
    "scheduler.params": ({"step_size": 1}, {}),
    "zero_optimization": (True, {}),
    "zero_optimization.stage": (1, {}),
    "zero_optimization.contiguous_gradients": (False, {}),
    "zero_optimization.reduce_scatter": (True, {}),
    "zero_optimization.use_multi_rank_bucket_allreduce": (False, {}),
    "zero_optimization.gradient_reduction": ("reduce_to_owner", {}),
    "traffic_contract": ("stop", {}),
    "zero_optimization.reduce_scatter_impl": ("native", {}),
    "zero_optimization.gradient_accumulation_reduce": ("boundary", {"zero_optimization": {"stage": 2}}),
    "zero_optimization.gradient_accumulation_limit": (1000, {"zero_optimization": {"stage": 2}}),
    "zero_optimization.reduce_bucket_size": (1000, {}),
    "zero_optimization.allgather_partitions": (False, {}),
    "zero_optimization.allgather_bucket_size": (1000, {}),
    "zero_optimization.overlap_comm": (True, {}),
    "zero_optimization.compute_grad_norm": (False, {"gradient_clipping": 0.0}),
    "zero_optimization.overlap_parameter_gather": (True, {}),
    "zero_optimization.round_robin_gradients": (True, {}),
    "zero_optimization.parameter_alignment": (True, {}),
    "zero_optimization.load_from_fp32_weights": (False, {}),
    "zero_optimization.ignore_unused_parameters": (False, {}),
    "zero_optimization.offload_param": ({"device": "cpu"}, STAGE_3),
    "zero_optimization.offload_param.device": ("cpu", STAGE_3),
    "zero_optimization.offload_params": ({"device": "cpu"}, STAGE_3),
    **{
        f"zero_optimization.offload_param.{name}": (value, PARAMETERS_IN_FILES)
        for name, value in {
            "nvme_path": "elsewhere",
            "buffer_count": 2,
            "buffer_size": 1000,
            "max_in_cpu": 0,
            "pin_memory": False,
        }.items()
    },
    "zero_optimization.cpu_offload_param": (True, STAGE_3),
    "zero_optimization.sub_group_size": (1000, STAGE_3),
    "zero_optimization.cpu_offload": (True, {}),
    "zero_optimization.offload_optimizer": ({"device": "cpu"}, {}),
    "zero_optimization.offload_optimizer.device": ("cpu", {}),
    **{
        f"zero_optimization.offload_optimizer.{name}": (value, NVME)
        for name, value in {
            "nvme_path": "there",
            "buffer_count": 2,
            "pin_memory": False,
            "pipeline": False,
            "pipeline_read": False,
            "pipeline_write": False,
            "fast_init": True,
            "ratio": 0.5,
        }.items()
    },
    "aio": ({"block_size": 8192}, {}),
    **{
        f"aio.{name}": (value, {})
        for name, value in {
            "block_size": 8192,
            "queue_depth": 4,
            "intra_op_parallelism": 2,
            "thread_count": 2,
            "single_submit": True,
            "overlap_events": False,
        }.items()
    },
    "gradient_compression": ({"algorithm": "1bit"}, {}),
    **{
        f"gradient_compression.{name}": (value, {"gradient_compression": {"enabled": enabled}})
        for name, value, enabled in (
            ("enabled", True, False),
            ("algorithm", "2bit", True),
            ("topk_ratio", 0.5, True),
            ("error_feedback", False, True),
            ("warmup_steps", 3, True),
            ("topk_warmup_steps", 3, True),
            ("topk_warmup_ratio", 0.5, True),
            ("momentum_correction", True, True),
            ("clip_before_residual", True, True),
            ("residual_decay", 0.5, True),
            ("huffman_coding", True, True),
            ("hierarchical_compress", True, True),
        )
    },
    "gradient_compression.two_phase": (True, {"gradient_compression": {"algorithm": "2bit"}}),
    "compress_communication": (True, {}),
    "zero_optimization.hierarchical_compress": (True, {"gradient_compression": {}}),
    "zero_optimization.zero_allowed_param_types": (["Linear"], {}),
    "zero_optimization.zero_force_param_types": (["LayerNorm"], {}),
    "zero_optimization.zero_hpz_partition_size": (2, STAGE_3),
    "zero_optimization.zero_quantized_weights": (True, STAGE_3),
    "zero_optimization.zero_quantized_nontrainable_weights": (True, STAGE_3),
    "zero_optimization.zero_quantized_gradients": (True, STAGE_3),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (True, STAGE_3),
    "zero_optimization.memory_efficient_linear": (False, STAGE_3),
    "zero_optimization.log_trace_cache_warnings": (True, STAGE_3),
    "zero_optimization.enable_sanity_checks": (True, STAGE_3),
    "zero_optimization.stage3_gather_unit": ("block", {"zero_optimization": {"stage": 3}}),
    "zero_optimization.leaf_module": ({"names": ["a"]}, STAGE_3),
    "zero_optimization.leaf_module.classes": (["a"], STAGE_3),
    "zero_optimization.leaf_module.names": (["a"], STAGE_3),
    "zero_optimization.leaf_module.name_suffixes": (["a"], STAGE_3),
    **{
        f"zero_optimization.{prefix}{name}": (value, STAGE_3)
        for prefix in ("", "stage3_")
        for name, value in {
            "prefetch_bucket_size": 10,
            "param_persistence_threshold": 10,
            "model_persistence_threshold": 10,
            "max_live_parameters": 10,
            "max_reuse_distance": 10,
            "gather_16bit_weights_on_model_save": True,
            "module_granularity_threshold": 10,
            "use_all_reduce_for_fetch_params": True,
            "allgather_sequential": True,
        }.items()
    },
    "fp16": ({"enabled": True}, {}),
    "fp16.enabled": (True, {}),
    "fp16.auto_cast": (True, {"fp16": {"enabled": True}}),
    "fp16.loss_scale": (8.0, {"fp16": {"enabled": True}}),
    "fp16.initial_scale_power": (8, {"fp16": {"enabled": True}}),
    "fp16.loss_scale_window": (8, {"fp16": {"enabled": True}}),
    "fp16.hysteresis": (8, {"fp16": {"enabled": True}}),
    "fp16.consecutive_hysteresis": (True, {"fp16": {"enabled": True}}),
    "fp16.min_loss_scale": (1e-5, {"fp16": {"enabled": True}}),
    "fp16.fp16_override_modules": (["norm"], {"fp16": {"enabled": True}}),
    "fp16_override_modules": (["norm"], {"fp16": {"enabled": True}}),
    **{
        f"{block}{name}": (value, {block.strip("."): {"enabled": True}})
        for block in ("bf16.", "bfloat16.")
        for name, value in {"check_grad_overflow": False}.items()
    },
    **{name: ({"enabled": True}, {}) for name in ("bf16", "bfloat16", "torch_autocast")},
    **{f"{name}.enabled": (True, {}) for name in ("bf16", "bfloat16", "torch_autocast")},
    **{
        f"{block}.{name}": (True, {block: {"enabled": True, other: True}})
        for block in ("bf16", "bfloat16")
        for name, other in (
            ("bf16_master_weights_and_grads", "bf16_optimizer_states"),
            ("bf16_optimizer_states", "bf16_master_weights_and_grads"),
        )
    },
    "data_types": ({"buffer_dtype": "bf16"}, {}),
    "data_types.grad_accum_dtype": ("fp32", {}),
    "data_types.param_dtype": (None, {}),
    "data_types.buffer_dtype": ("bf16", {}),
    "data_types.keep_in_fp32_modules": (["norm"], {}),
    "torch_autocast.dtype": ("float16", {"torch_autocast": {"enabled": True}}),
    "torch_autocast.lower_precision_safe_modules": (["a"], {"torch_autocast": {"enabled": True}}),
    "zero_allow_untested_optimizer": (True, {}),
    "gradient_clipping": (0.25, {}),
    "prescale_gradients": (True, {}),
    "gradient_predivide_factor": (2.0, {}),
    "gradient_allreduce_op": ("sum", {}),
    "communication_data_type": ("bf16", {}),
    "disable_allgather": (True, {}),
    "steps_per_print": (3, {}),
    "dataloader_drop_last": (True, {}),
    "wall_clock_breakdown": (True, {}),
    "memory_breakdown": (True, {}),
    "disable_python_gc": (True, {}),
    "dump_state": (True, {}),
    "checkpoint": ({"tag_validation": "Fail"}, {}),
    "checkpoint.tag_validation": ("fail", {}),
    "activation_checkpointing": ({"profile": True}, {}),
    "activation_checkpointing.contiguous_memory_optimization": (
        True,
        {"activation_checkpointing": {"partition_activations": True, "number_checkpoints": 3}},
    ),
    "activation_checkpointing.number_checkpoints": (5, {}),
    **{
        f"activation_checkpointing.{name}": (True, {})
        for name in (
            "partition_activations",
            "cpu_checkpointing",
            "synchronize_checkpoint_boundary",
            "profile",
        )
    },
    "tensor_parallel": ({"autotp_size": 2}, {}),
    "tensor_parallel.autotp_size": (2, {}),
    **{f"tensor_parallel.{name}": ({"tp_size": 2}, {}) for name in ("tp", "tensor_parallel")},
    **{f"tensor_parallel.{name}.tp_size": (2, {}) for name in ("tp", "tensor_parallel")},
    "tensor_parallel.plan": ({"a": "row"}, CUT),
    "tensor_parallel.partition_config": ({"use_default_specs": False}, CUT),
    "tensor_parallel.sequence_parallel": (True, CUT),
    "tp_size": (2, {}),
    "sequence_parallel_size": (2, {}),
    "use_data_before_expert_parallelism": (True, {}),
    "seq_parallel_communication_data_type": ("bf16", {"sequence_parallel_size": 2}),
    "data_parallel_size": (2, {}),
    "communication": ({"topology": 2}, {}),
    "communication.topology": ([1, 2], {}),
    "communication.calibration": ({"world": "all.json", "axes": ["one.json", "two.json"]}, {}),
    "communication.calibration.world": ("other.json", COSTS),
    "communication.calibration.axes": (["three.json", "four.json"], COSTS),
    "communication.slow_node_tolerance": (0.1, {}),
    "communication.bounded_delay": (1, {"zero_optimization": {"stage": 0}}),
    "comms_logger": ({"enabled": True}, {}),
    "comms_logger.enabled": (True, {}),
    "comms_logger.prof_all": (False, {}),
    "comms_logger.prof_ops": (["all_reduce"], {}),
    "comms_logger.verbose": (True, {}),
    "comms_logger.debug": (True, {}),
    **{
        name: value
        for block in ("csv_monitor", "tensorboard")
        for name, value in {
            block: ({"enabled": True}, {}),
            f"{block}.enabled": (True, {}),
            f"{block}.output_path": ("there", {}),
            f"{block}.job_name": ("mine", {}),
        }.items()
    },
}
ROWS = [(block, name, key) for block, table in all_keys.BLOCKS.items() for name, key in table.items()]
# An error shows the effect of these keys. Two keys together have one meaning, so neither can have a different
# value alone.
SHOWN_BY_AN_ERROR = {
    "data_types.param_dtype": ("bf16", "the model trains in fp32"),
    **{
        f"{block}.{name}": (True, "go together")
        for block in ("bf16", "bfloat16")
        for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states")
    },
}


def full(block, name):
    return f"{block}.{name}" if block else name


def of_status(*statuses):
    return [full(block, name) for block, name, key in ROWS if key.status in statuses]


def with_key(name, value, base):
    given = json.loads(json.dumps(base))
    *blocks, last = name.split(".")
    inner = given
    for block in blocks:
        inner = inner.setdefault(block, {})
    if value is None:
        inner.pop(last, None)
    else:
        inner[last] = value
    return given


def made(given):
    config = RuntimeConfig.from_mapping(given, 2)
    values = dataclasses.asdict(config)
    del values["given"], values["notices"]
    return values


@pytest.mark.parametrize("name", of_status(Status.USED))
def test_each_implemented_key_makes_a_difference(name):
    value, needs = VALUES[name]
    base = {**PLAIN, **needs}
    if name in SHOWN_BY_AN_ERROR:
        value, message = SHOWN_BY_AN_ERROR[name]
        with pytest.raises(ConfigError, match=message):
            made(
                with_key(
                    name, value, PLAIN if "data" in name else {**PLAIN, name.split(".")[0]: {"enabled": True}}
                )
            )
        return
    base = {key: each for key, each in base.items() if each is not None}
    if name == "train_batch_size":
        assert made(with_key(name, 16, base)) != made(with_key(name, value, base))
    else:
        assert made(with_key(name, value, base)) != made(
            with_key(name, None, base) if name in needs else base
        )


def test_each_setting_is_read_by_the_runtime():
    read = set()
    for path in SOURCES.rglob("*.py"):
        # Code that only reports settings, or that is part of the configuration itself, does not count as a
        # reader.
        is_table = (
            "configuration" in path.relative_to(SOURCES).parts and path.name != "setting_combinations.py"
        )
        if is_table or path.name in ("config.py", "settings.py"):
            continue
        tree = ast.parse(path.read_text())
        read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    classes = (RuntimeConfig, ZeroConfig, PrecisionConfig, ShardingConfig, OptimizerConfig, SchedulerConfig)
    blocks = (MonitorConfig, ActivationCheckpointing)
    settings = {each.name for kind in (*classes, *blocks) for each in dataclasses.fields(kind)}
    # Other settings are resolved from these keys, within the configuration itself.
    resolved = {"reduce_scatter", "use_multi_rank_bucket_allreduce", "train_batch_size"}
    # Properties of the configuration read these keys.
    by_property = {"prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op", "bf16", "fp16"}
    assert settings - read - resolved - by_property == set()


@pytest.mark.parametrize("name", of_status(Status.LATER))
def test_each_key_of_a_later_part_is_refused_with_the_part(name):
    key = next(key for block, each, key in ROWS if full(block, each) == name)
    if key.check.table is not None:
        value = {next(iter(key.check.table)): 0.5}
    elif key.check.expected in ("object", "any"):
        value = {"enabled": True}
    elif key.check.expected.startswith("list"):
        value = ["Linear"]
    elif key.check.expected.startswith("bool"):
        value = not key.default
    else:
        value = 7
    base = {**PLAIN, **STAGE_3} if key.stage_3_only else PLAIN
    with pytest.raises(UnsupportedError) as refusal:
        made(with_key(name, value, base))
    text = str(refusal.value)
    assert "not in this version yet" in text and "issue" not in text and "\n" not in text
    # A block that contains only such keys may be refused as a whole.
    assert key.note in text or name.rpartition(".")[0] in text


@pytest.mark.parametrize("name", of_status(Status.REFUSED))
def test_each_refused_key_says_why(name):
    key = next(key for block, each, key in ROWS if full(block, each) == name)
    with pytest.raises(ConfigError) as refusal:
        made(with_key(name, True, PLAIN))
    assert str(refusal.value) == f"{name}: {key.note}"
    made(with_key(name, False, PLAIN))


def noticed(given):
    return RuntimeConfig.from_mapping(given, 2).notices


@pytest.mark.parametrize("name", of_status(Status.INERT, Status.WAITING))
def test_each_other_key_passes_with_its_default_and_checks_its_value(name):
    key = next(key for block, each, key in ROWS if full(block, each) == name)
    plain = made(PLAIN)
    assert made(with_key(name, key.default, PLAIN)) == plain
    if key.check is boolean and name.rpartition(".")[0] in UNCHECKED:
        assert any(f"{name} 'what' as true" in line for line in noticed(with_key(name, "what", PLAIN)))
    elif key.check.expected.startswith(("bool", "int", "number", "object")):
        with pytest.raises(ConfigError, match=f"{name.replace('bfloat16', 'bf16')} is 'what'"):
            made(with_key(name, "what", PLAIN))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("zero_optimization.offload_optimizer.devise", "zero_optimization.offload_optimizer.device"),
        ("zero_optimization.leaf_module.clases", "zero_optimization.leaf_module.classes"),
        ("timers.throughput.enabeld", "timers.throughput.enabled"),
        ("csv_monitor.outputpath", "csv_monitor.output_path"),
        ("checkpoint.tag_validate", "checkpoint.tag_validation"),
        ("pipeline.seed_layer", "pipeline.seed_layers"),
        ("zero_optimization.gradient_cliping", "gradient_clipping"),
        ("offload_optimizer", "zero_optimization.offload_optimizer"),
    ],
)
def test_an_unknown_key_is_an_error_at_every_level(name, near):
    with pytest.raises(ConfigError) as refusal:
        made(with_key(name, 1, PLAIN))
    assert str(refusal.value) == f"unknown key {name!r}; did you mean {near!r}?"


def test_arguments_of_optimizers_are_the_optimizers():
    assert made(with_key("optimizer.params", {"no_such_key": 1}, PLAIN))["optimizer"]["params"] == {
        "no_such_key": 1
    }


def test_old_forms_are_read_as_todays():
    on = RuntimeConfig.from_mapping({**PLAIN, "zero_optimization": True}, 2)
    assert on.zero.stage.number == 1 and 'read as {"stage": 1}' in on.notices[0]
    assert RuntimeConfig.from_mapping({**PLAIN, "zero_optimization": False}, 2).zero.stage.number == 0
    assert RuntimeConfig.from_mapping({**PLAIN, "bfloat16": {"enabled": True}}, 2).precision.bf16


@pytest.mark.skipif(not recorded.ROOT.is_dir(), reason=recorded.MISSING)
def test_every_key_that_deepspeed_has_is_in_the_tables_with_its_default():
    path = recorded.ROOT / "C_config_keys_w1" / "losses.json"
    blocks = json.loads(path.read_text())["extra_rank0"]
    inner = ("offload_param", "offload_optimizer", "leaf_module", "zenflow")
    seen = 0
    for block, table in blocks.items():
        name = f"zero_optimization.{block}" if block in inner else block
        for key, known in table.items():
            row = all_keys.BLOCKS[name][key]
            seen += 1
            plain = known["default"] not in (None, [], "(factory)") and row.default is not None
            # If the default is null here, the runtime resolves the value itself.
            if plain and row.status is not Status.REFUSED:
                assert row.default == known["default"], f"{name}.{key}"
    assert seen > 100
