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
    """Return the row of a block of an unsupported feature. The block is refused if the key ``switch`` is true."""
    table = {
        switch: later(boolean, False, f"enable {feature}", feature, instead),
        **{
            name: waiting(check, default, meaning, feature)
            for name, (check, default, meaning) in keys.items()
        },
    }
    return waiting(inside(table), {}, feature, feature)


def _remote(service: str, keys: dict[str, tuple[Check, object, str]]) -> Key:
    """Return the row of the block of a monitor that sends values to a service on the internet."""
    why = f"there is no monitoring by {service}; use csv_monitor or tensorboard, which write files"
    table = {
        "enabled": refused(why, f"send values to {service}"),
        **{name: inert(check, default, meaning, why) for name, (check, default, meaning) in keys.items()},
    }
    return inert(inside(table), {}, f"monitoring by {service}", why)


def _monitor(what: str) -> Table:
    return {
        "enabled": used(boolean, False, f"write {what}"),
        "output_path": used(text, "", "the directory for the files"),
        "job_name": used(text, "DeepSpeedJobName", "the name of the subdirectory for this training"),
    }


CHECKPOINT: Final[Table] = {
    "tag_validation": used(
        choice_of_any_case("Ignore", "Warn", "Fail"), "Warn", "what happens if the ranks pass different tags"
    ),
    "load_universal": used(
        boolean,
        False,
        "if no tag is passed, load the folder that DeepSpeed's file latest_universal names. Other folders "
        "load without this key",
    ),
    "use_node_local_storage": later(
        boolean,
        False,
        "each host keeps its own checkpoint files",
        "checkpoints on local disks",
        "checkpoints need a directory that all ranks see",
    ),
    "parallel_write": inert(
        optional(inside({"pipeline_stage": inert(
            boolean, False, "each pipeline stage writes its own layers", "every rank writes its own file"
        )})),
        None,
        "how the ranks divide the writing of a checkpoint",
        "every rank writes its own file",
    ),
    "writer": inert(
        optional(mapping), None, "how checkpoint files are written", "files are written in one way"
    ),
    "checkpoint_serialization": inert(
        boolean, True, "write checkpoint files in a newer format", "files are written in one format"
    ),
}  # fmt: skip

CSV_MONITOR: Final[Table] = _monitor("one CSV file for each quantity")
TENSORBOARD: Final[Table] = _monitor("TensorBoard event files. This requires the package tensorboard")

FEATURES: Final[Table] = {
    "checkpoint": used(inside(CHECKPOINT), {}, "how checkpoints are saved"),
    "csv_monitor": used(
        inside(CSV_MONITOR),
        {},
        "write the learning rate, the loss and the loss scale of each step to CSV files",
    ),
    "tensorboard": used(
        inside(TENSORBOARD), {}, "write the quantities of csv_monitor to TensorBoard event files"
    ),
    "wandb": _remote("Weights & Biases", {
        "group": (_NAME, None, "the group of the run"),
        "team": (_NAME, None, "the name of the team"),
        "project": (text, "deepspeed", "the project of the run"),
    }),
    "comet": _remote("Comet", {
        "samples_log_interval": (_SIZE, 100, "the number of samples between two reports"),
        "project": (_NAME, None, "the project of the run"),
        "workspace": (_NAME, None, "the name of the workspace"),
        "api_key": (_NAME, None, "the API key of the account"),
        "experiment_name": (_NAME, None, "the name of this run"),
        "experiment_key": (_NAME, None, "the key of this run"),
        "online": (optional(boolean), None, "send values immediately"),
        "mode": (_NAME, None, "whether to start a new run or to continue an existing one"),
    }),
    "comms_logger": used(inside({
        "enabled": used(
            boolean,
            False,
            "measure how long messages take, for log_summary. `commprof run` records messages even if this key is false",
        ),
        "prof_all": used(boolean, True, "time every operation"),
        "prof_ops": used(strings, (), "the operations to time if prof_all is false"),
        "verbose": used(boolean, False, "print a line for each message"),
        "debug": used(
            boolean,
            False,
            "in the log, add to each operation the name of the function that called deepspeed.comm",
        ),
    }), {}, "the communication logger"),
    "flops_profiler": _unavailable("the flops profiler", {
        "recompute_fwd_factor": (
            number(), 0.0, "the factor for operations that are repeated in the backward pass"
        ),
        "profile_step": (_SIZE, 1, "the step that is profiled"),
        "module_depth": (integer(-1), -1, "the largest depth of the modules that are listed"),
        "top_modules": (_SIZE, 1, "the number of modules that are listed at each depth"),
        "detailed": (boolean, True, "print the whole module tree"),
        "output_file": (_NAME, None, "the output file of the profile"),
    }),
    "activation_checkpointing": used(inside(ACTIVATION_CHECKPOINTING), {}, "how checkpoint() stores its inputs"),
    **PIPELINE,
    "aio": used(optional(inside(AIO)), None, "how files of offloaded tensors are read and written"),
    "timers": used(inside({
        "throughput": used(inside({
            "enabled": used(boolean, True, "measure samples per second with the timer engine.tput_timer"),
            "synchronized": used(
                boolean,
                True,
                "wait for the device before the timer is read. This has an effect only if steps_per_print "
                "is set",
            ),
        }), {}, "the timer for samples per second"),
    }), {}, "the timers of the engine"),
    "autotuning": _unavailable("autotuning", {
        "fast": (boolean, True, "try only ZeRO stages and micro-batch sizes"),
        "start_profile_step": (_SIZE, 3, "the first step that is measured"),
        "end_profile_step": (_SIZE, 5, "the last step that is measured"),
        "metric": (text, "throughput", "the quantity to optimize"),
        "metric_path": (_NAME, None, "the file that contains the metric"),
        "arg_mappings": (
            optional(mapping), None, "the options of the script that correspond to configuration keys"
        ),
        "tuner_type": (text, "gridsearch", "the order of the trials"),
        "tuner_early_stopping": (
            _SIZE, 5, "the number of trials without improvement after which tuning stops"
        ),
        "tuner_num_trials": (_SIZE, 50, "the largest number of trials"),
        "results_dir": (_NAME, None, "the directory for the results"),
        "exps_dir": (_NAME, None, "the directory for the trials"),
        "overwrite": (boolean, True, "run trials again if they have been run before"),
        "max_train_batch_size": (optional(_SIZE), None, "the largest batch size to try"),
        "min_train_batch_size": (_SIZE, 1, "the smallest batch size to try"),
        "max_train_micro_batch_size_per_gpu": (_SIZE, 1024, "the largest micro-batch size to try"),
        "min_train_micro_batch_size_per_gpu": (_SIZE, 1, "the smallest micro-batch size to try"),
        "num_tuning_micro_batch_sizes": (_SIZE, 3, "the number of micro-batch sizes to try"),
        "mp_size": (_SIZE, 1, "the number of model-parallel ranks"),
        "model_info": (optional(mapping), None, "facts about the model"),
        "model_info_path": (_NAME, None, "the file that contains the facts about the model"),
    }, instead="`commprof sweep` varies settings"),
    "compile": _unavailable("DeepCompile", {
        "autoep_non_moe": (boolean, False, "compile modules that are not experts"),
        "free_activation": (boolean, False, "free activations early"),
        "free_activation_threshold": (_SIZE, 10_485_760, "free only activations of at least this many bytes"),
        "offload_activation": (boolean, False, "move activations to host memory"),
        "offload_activation_pin_memory": (boolean, True, "move activations to page-locked host memory"),
        "offload_opt_states": (boolean, False, "move optimizer state to host memory"),
        "double_buffer": (boolean, True, "use two buffers for messages"),
        "symmetric_memory": (boolean, False, "gather parameters through symmetric memory"),
        "debug_log": (boolean, False, "print each action"),
        "offload_parameters": (boolean, False, "move parameters to host memory"),
        "sync_before_reduce": (boolean, False, "wait before each reduction"),
        "sync_after_reduce": (boolean, False, "wait after each reduction"),
        "sync_before_allgather": (boolean, False, "wait before each all_gather"),
        "sync_after_allgather": (boolean, False, "wait after each all_gather"),
        "keep_int_input_tensors": (boolean, True, "keep input tensors of integers"),
        "keep_all_input_tensors": (boolean, False, "keep all input tensors"),
        "passes": (optional(strings), None, "the compiler passes to run"),
    }, switch="deepcompile", instead="engine.compile() compiles the model with torch.compile"),
    "hybrid_engine": _unavailable("the hybrid engine", {
        "max_out_tokens": (integer(1), 512, "the largest number of tokens in an answer"),
        "inference_tp_size": (_SIZE, 1, "the number of tensor-parallel ranks for inference"),
        "release_inference_cache": (boolean, False, "free the inference cache"),
        "pin_parameters": (boolean, True, "keep parameters in page-locked memory"),
        "tp_gather_partition_size": (_SIZE, 8, "the number of layers that are gathered together"),
        "enable_cuda_graph": (boolean, False, "replay CUDA graphs"),
    }),
    "data_efficiency": _unavailable("data efficiency", {
        "seed": (_SIZE, 1234, "the seed of the sampling"),
        "data_sampling": (mapping, {}, "curriculum learning and dynamic batches"),
        "data_routing": (mapping, {}, "random layerwise token dropping"),
    }),
    **PARALLEL,
    "expert_parallel": later(mapping, None, "place experts on several ranks", "expert parallelism"),
    "weight_quantization": later(mapping, None, "quantize weights for inference", "compression"),
    "datastates": later(mapping, None, "save checkpoints with DataStates", "checkpoints by DataStates"),
    "gradient_compression": used(
        optional(inside(COMPRESSION)), None, "stages 0 to 2: send compressed gradients. Not a key of DeepSpeed"
    ),
    "compress_communication": used(
        boolean, False, "enable gradient_compression with its default settings. Not a key of DeepSpeed"
    ),
    "communication": used(
        inside(COMMUNICATION), {}, "the settings of topology-aware collectives. Not a key of DeepSpeed"
    ),
}  # fmt: skip
