"""The keys of pipelines: DeepSpeed's block ``pipeline``, the block ``pipeline_parallel``, and ``partition_methods``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from zero_runtime.configuration.reading.checks import Check, boolean, choice, either, integer, optional
from zero_runtime.configuration.reading.key_table import Table, inert, inside, used
from zero_runtime.errors import ConfigError

_METHODS: Final = ("uniform", "parameters", "profile")


def _method(name: str, value: Any) -> str:
    method = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
    kind, _, pattern = method.lower().partition(":") if isinstance(method, str) else ("", "", "")
    if kind == "type" and pattern:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{name} is {value!r}, which is no regular expression: {error}") from None
        return str(method)
    if kind in _METHODS and not pattern:
        return kind
    raise ConfigError(
        f"{name} is {value!r}; expected uniform, parameters, profile, or type: and a pattern of class names"
    )


_METHOD: Final = Check("`uniform`, `parameters`, `profile` or `type:REGEX`", _method)
_DEALING: Final = "how layers are assigned to stages, as in the argument partition_method of PipelineModule"
_TENSORS: Final = "each model-parallel rank sends complete activations"

PIPELINE: Final[Table] = {
    "stages": used(
        either("auto", integer(1)),
        "auto",
        "the number of pipeline stages. With auto, it is the argument num_stages of PipelineModule",
    ),
    "partition": used(
        either("best", _METHOD), "best", f"{_DEALING}. With best, the value of this argument is used"
    ),
    "partition_methods": used(optional(_METHOD), None, "another name for partition. Not a key of DeepSpeed"),
    "seed_layers": inert(
        boolean,
        False,
        "set the random seed separately for each layer",
        "use PipelineModule(seed_layers=True)",
    ),
    "activation_checkpoint_interval": used(
        integer(0),
        0,
        "the number of layers between two activation checkpoints. With 0, the value of the module is used",
    ),
    "pipe_partitioned": inert(boolean, True, "divide activations among the model-parallel ranks", _TENSORS),
    "grad_partitioned": inert(
        boolean, True, "divide gradients of activations among the model-parallel ranks", _TENSORS
    ),
    "use_reentrant": used(
        boolean,
        True,
        "run checkpointed layers again before their backward pass. If false, they run again within it",
    ),
}  # fmt: skip

PIPELINE_PARALLEL: Final[Table] = {
    "enabled": used(boolean, True, "whether this block is used"),
    "pp_size": used(optional(integer(1)), None, "the number of pipeline stages"),
    "micro_batches": used(
        optional(integer(1)),
        None,
        "the number of micro-batches in a step. This is another name for gradient_accumulation_steps",
    ),
    "schedule": used(
        optional(choice("1f1b", "gpipe", "interleaved", "zero_bubble")),
        None,
        "the order of forward and backward passes, described in docs/pipeline.md. By default it is "
        "interleaved if virtual stages are used, and 1f1b otherwise",
    ),
    "virtual_stages": used(
        optional(integer(1)),
        None,
        "the number of chunks of the model on each stage, with the schedule interleaved. The default with "
        "this schedule is 2",
    ),
    "partition_method": used(optional(_METHOD), None, _DEALING),
    "partition_methods": used(optional(_METHOD), None, "another name for partition_method"),
}  # fmt: skip

KEYS: Final[Table] = {
    "pipeline": used(
        optional(inside(PIPELINE)), None, "the settings of a pipeline, described in docs/pipeline.md"
    ),
    "pipeline_parallel": used(
        optional(inside(PIPELINE_PARALLEL)),
        None,
        "the settings of a pipeline under other names. Not a key of DeepSpeed",
    ),
    "partition_methods": used(optional(_METHOD), None, f"{_DEALING}. Not a key of DeepSpeed"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """The pipeline keys of a configuration.

    Attributes:
        stages: The number of stages; None if the model sets the number.
        micro_batches: The number of micro-batches of a step; None if gradient_accumulation_steps sets the number.
        partition_method: The method that assigns layers to stages; None if the model sets the method.
        schedule: ``1f1b``, ``gpipe``, ``interleaved`` or ``zero_bubble``; None if ``virtual_stages`` determines the
            schedule.
        virtual_stages: The number of chunks of the model on each stage; None if the model sets the number.
        activation_checkpoint_interval: The number of layers between two activation checkpoints; 0 if the model sets the
            number.
        use_reentrant: Whether checkpointed layers run again before their backward pass, instead of within this pass.
    """

    stages: int | None = None
    micro_batches: int | None = None
    partition_method: str | None = None
    schedule: str | None = None
    virtual_stages: int | None = None
    activation_checkpoint_interval: int = 0
    use_reentrant: bool = True


def read_pipeline(top: Mapping[str, Any]) -> PipelineConfig:
    """Return the pipeline keys in the checked values of a configuration.

    Raises:
        ConfigError: Two keys contradict each other.
    """
    theirs, ours = top["pipeline"] or {}, top["pipeline_parallel"] or {}
    if ours.get("enabled") is False:
        ours = {}
    stages = {
        "pipeline.stages": None if theirs.get("stages") == "auto" else theirs.get("stages"),
        "pipeline_parallel.pp_size": ours.get("pp_size"),
    }
    methods = {
        "pipeline.partition": None if theirs.get("partition") == "best" else theirs.get("partition"),
        "pipeline.partition_methods": theirs.get("partition_methods"),
        "pipeline_parallel.partition_method": ours.get("partition_method"),
        "pipeline_parallel.partition_methods": ours.get("partition_methods"),
        "partition_methods": top["partition_methods"],
    }
    return PipelineConfig(
        stages=_agreed(stages),
        micro_batches=ours.get("micro_batches"),
        partition_method=_agreed(methods),
        schedule=ours.get("schedule"),
        virtual_stages=ours.get("virtual_stages"),
        activation_checkpoint_interval=theirs.get("activation_checkpoint_interval", 0),
        use_reentrant=theirs.get("use_reentrant", True),
    )


def _agreed(by_key: Mapping[str, Any]) -> Any:
    configured = {name: value for name, value in by_key.items() if value is not None}
    if len(set(configured.values())) > 1:
        raise ConfigError(
            f"{' and '.join(f'{name} {value!r}' for name, value in configured.items())} differ; keep one of them"
        )
    return next(iter(configured.values()), None)


def accumulation_steps(micro_batches: int | None, steps: int | None) -> int | None:
    """Return the value of ``gradient_accumulation_steps``, for which ``micro_batches`` is another name.

    Raises:
        ConfigError: Both are set and differ.
    """
    if micro_batches is not None and steps is not None and micro_batches != steps:
        raise ConfigError(
            f"pipeline_parallel.micro_batches is {micro_batches} and gradient_accumulation_steps is {steps}, which "
            "are the same thing; make them equal, or keep one"
        )
    return steps if micro_batches is None else micro_batches
