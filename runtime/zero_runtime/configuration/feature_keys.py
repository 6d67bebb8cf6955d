"""The keys of blocks for features around training: monitors, profilers, checkpoints, and unsupported features."""

from __future__ import annotations

from typing import Final

from zero_runtime.configuration.blocks.activation_block import KEYS as ACTIVATION_CHECKPOINTING
from zero_runtime.configuration.blocks.communication_block import COMMUNICATION
from zero_runtime.configuration.blocks.compression_block import COMPRESSION
from zero_runtime.configuration.blocks.offload_block import AIO
from zero_runtime.configuration.blocks.parallel_block import KEYS as PARALLEL
from zero_runtime.configuration.blocks.pipeline_block import KEYS as PIPELINE
from zero_runtime.configuration.reading.checks import (
    Check,
    boolean,
    choice_of_any_case,
    integer,
    mapping,
    number,
    optional,
    strings,
    text,
)
from zero_runtime.configuration.reading.key_table import (
    Key,
    Table,
    inert,
    inside,
    later,
    refused,
    used,
    waiting,
)

_SIZE: Final = integer(-(2**63))
_NAME: Final = optional(text)


def _unavailable(
    feature: str,
    keys: dict[str, tuple[Check, object, str]],
    switch: str = "enabled",
    instead: str = "",
) -> Key:
    """A block of a feature that is not supported yet: it is accepted unless ``switch`` is true in it."""
    table = {
        switch: later(boolean, False, f"switch {feature} on", feature, instead),
        **{
            name: waiting(check, default, meaning, feature)
            for name, (check, default, meaning) in keys.items()
        },
    }
    return waiting(inside(table), {}, feature, feature)


def _remote(service: str, keys: dict[str, tuple[Check, object, str]]) -> Key:
    """A monitor that sends values to a service on the internet."""
    why = f"there is no monitoring by {service}; use csv_monitor or tensorboard, which write files"
    table = {
        "enabled": refused(why, f"send to {service}"),
        **{name: inert(check, default, meaning, why) for name, (check, default, meaning) in keys.items()},
    }
    return inert(inside(table), {}, f"monitoring by {service}", why)


def _monitor(what: str) -> Table:
    return {
        "enabled": used(boolean, False, f"write {what}"),
        "output_path": used(text, "", "directory of the files"),
        "job_name": used(text, "DeepSpeedJobName", "subdirectory of this training"),
    }


CHECKPOINT: Final[Table] = {
    "tag_validation": used(
        choice_of_any_case("Ignore", "Warn", "Fail"), "Warn", "what happens if ranks pass different tags"
    ),
    "load_universal": used(
        boolean, False, "without a tag, load DeepSpeed's folder latest_universal; other folders do not need this key"
    ),
    "use_node_local_storage": later(
        boolean, False, "each host keeps its own files", "checkpoints on local disks",
        "checkpoints need a directory that all ranks see",
    ),
    "parallel_write": inert(
        optional(inside({"pipeline_stage": inert(boolean, False, "each stage writes its layers", "every rank writes")})),
        None, "how ranks divide the writing", "every rank writes its own file",
    ),
    "writer": inert(optional(mapping), None, "how files are written", "files are written in one way"),
    "checkpoint_serialization": inert(boolean, True, "files in a newer format", "files are written in one format"),
}  # fmt: skip

CSV_MONITOR: Final[Table] = _monitor("one CSV file for each quantity")
TENSORBOARD: Final[Table] = _monitor("TensorBoard event files; needs the package tensorboard")

FEATURES: Final[Table] = {
    "checkpoint": used(inside(CHECKPOINT), {}, "how checkpoints are saved"),
    "csv_monitor": used(inside(CSV_MONITOR), {}, "learning rate, loss and loss scale of each step as CSV files"),
    "tensorboard": used(inside(TENSORBOARD), {}, "the quantities of csv_monitor as TensorBoard event files"),
    "wandb": _remote("Weights & Biases", {
        "group": (_NAME, None, "group of runs"),
        "team": (_NAME, None, "name of the team"),
        "project": (text, "deepspeed", "project of runs"),
    }),
    "comet": _remote("Comet", {
        "samples_log_interval": (_SIZE, 100, "samples between two reports"),
        "project": (_NAME, None, "project of runs"),
        "workspace": (_NAME, None, "name of the workspace"),
        "api_key": (_NAME, None, "API key of the account"),
        "experiment_name": (_NAME, None, "name of this run"),
        "experiment_key": (_NAME, None, "key of this run"),
        "online": (optional(boolean), None, "send at once"),
        "mode": (_NAME, None, "start a run or continue one"),
    }),
    "comms_logger": used(inside({
        "enabled": used(boolean, False, "time messages for log_summary; `commprof run` records without waiting"),
        "prof_all": used(boolean, True, "time every operation"),
        "prof_ops": used(strings, (), "operations to time"),
        "verbose": used(boolean, False, "print a line for each message"),
        "debug": used(boolean, False, "name the function that called deepspeed.comm"),
    }), {}, "the communication logger"),
    "flops_profiler": _unavailable("the flops profiler", {
        "recompute_fwd_factor": (number(), 0.0, "factor for operations that are repeated in the backward pass"),
        "profile_step": (_SIZE, 1, "step that is profiled"),
        "module_depth": (integer(-1), -1, "largest depth of listed modules"),
        "top_modules": (_SIZE, 1, "number of modules listed at each depth"),
        "detailed": (boolean, True, "print the whole module tree"),
        "output_file": (_NAME, None, "output file of the profile"),
    }),
    "activation_checkpointing": used(inside(ACTIVATION_CHECKPOINTING), {}, "how checkpoint() stores its inputs"),
    **PIPELINE,
    "aio": used(optional(inside(AIO)), None, "how files of offloaded tensors are read and written"),
    "timers": used(inside({
        "throughput": used(inside({
            "enabled": used(boolean, True, "measure samples per second: engine.tput_timer"),
            "synchronized": used(boolean, True, "wait for the device before each reading, with steps_per_print"),
        }), {}, "samples per second"),
    }), {}, "timers of the engine"),
    "autotuning": _unavailable("autotuning", {
        "fast": (boolean, True, "try ZeRO stages and micro-batches only"),
        "start_profile_step": (_SIZE, 3, "first step measured"),
        "end_profile_step": (_SIZE, 5, "last step measured"),
        "metric": (text, "throughput", "quantity to optimize"),
        "metric_path": (_NAME, None, "file of the metric"),
        "arg_mappings": (optional(mapping), None, "options of the script that correspond to keys"),
        "tuner_type": (text, "gridsearch", "order of trials"),
        "tuner_early_stopping": (_SIZE, 5, "trials without improvement before tuning stops"),
        "tuner_num_trials": (_SIZE, 50, "largest number of trials"),
        "results_dir": (_NAME, None, "directory of the results"),
        "exps_dir": (_NAME, None, "directory of the trials"),
        "overwrite": (boolean, True, "run trials again"),
        "max_train_batch_size": (optional(_SIZE), None, "largest batch"),
        "min_train_batch_size": (_SIZE, 1, "smallest batch"),
        "max_train_micro_batch_size_per_gpu": (_SIZE, 1024, "largest micro-batch"),
        "min_train_micro_batch_size_per_gpu": (_SIZE, 1, "smallest micro-batch"),
        "num_tuning_micro_batch_sizes": (_SIZE, 3, "number of micro-batch sizes to try"),
        "mp_size": (_SIZE, 1, "model-parallel ranks"),
        "model_info": (optional(mapping), None, "facts about the model"),
        "model_info_path": (_NAME, None, "file of the facts about the model"),
    }, instead="`commprof sweep` varies settings"),
    "compile": _unavailable("DeepCompile", {
        "autoep_non_moe": (boolean, False, "compile modules that are not experts"),
        "free_activation": (boolean, False, "free activations early"),
        "free_activation_threshold": (_SIZE, 10_485_760, "free activations of at least this many bytes"),
        "offload_activation": (boolean, False, "move activations to the host"),
        "offload_activation_pin_memory": (boolean, True, "move activations to page-locked host memory"),
        "offload_opt_states": (boolean, False, "move optimizer state to the host"),
        "double_buffer": (boolean, True, "two buffers for messages"),
        "symmetric_memory": (boolean, False, "gather through symmetric memory"),
        "debug_log": (boolean, False, "print each action"),
        "offload_parameters": (boolean, False, "move parameters to the host"),
        "sync_before_reduce": (boolean, False, "wait before each reduction"),
        "sync_after_reduce": (boolean, False, "wait after each reduction"),
        "sync_before_allgather": (boolean, False, "wait before each all_gather"),
        "sync_after_allgather": (boolean, False, "wait after each all_gather"),
        "keep_int_input_tensors": (boolean, True, "keep integer inputs"),
        "keep_all_input_tensors": (boolean, False, "keep all inputs"),
        "passes": (optional(strings), None, "compiler passes"),
    }, switch="deepcompile", instead="engine.compile() compiles the model with torch.compile"),
    "hybrid_engine": _unavailable("the hybrid engine", {
        "max_out_tokens": (integer(1), 512, "tokens of an answer"),
        "inference_tp_size": (_SIZE, 1, "tensor-parallel ranks"),
        "release_inference_cache": (boolean, False, "free the inference cache"),
        "pin_parameters": (boolean, True, "page-locked parameters"),
        "tp_gather_partition_size": (_SIZE, 8, "layers gathered together"),
        "enable_cuda_graph": (boolean, False, "replay CUDA graphs"),
    }),
    "data_efficiency": _unavailable("data efficiency", {
        "seed": (_SIZE, 1234, "seed of the sampling"),
        "data_sampling": (mapping, {}, "curriculum learning and dynamic batches"),
        "data_routing": (mapping, {}, "random layerwise token dropping"),
    }),
    **PARALLEL,
    "expert_parallel": later(mapping, None, "experts on several ranks", "expert parallelism"),
    "weight_quantization": later(mapping, None, "quantized weights for inference", "compression"),
    "datastates": later(mapping, None, "checkpoints by DataStates", "checkpoints by DataStates"),
    "gradient_compression": used(
        optional(inside(COMPRESSION)), None, "stages 0 to 2: send compressed gradients. Not a key of DeepSpeed"
    ),
    "compress_communication": used(
        boolean, False, "gradient_compression with default settings. Not a key of DeepSpeed"
    ),
    "communication": used(inside(COMMUNICATION), {}, "topology-aware collectives. Not a key of DeepSpeed"),
}  # fmt: skip
