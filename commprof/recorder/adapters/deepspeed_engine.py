"""Wraps DeepSpeed's engine: reports steps, phases, the model's parameters and the effective configuration."""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final

import torch

from commprof import hooks
from commprof.recorder.adapters.deepspeed_experts import Expert, ExpertLayers
from commprof.recorder.adapters.patching import Patches, tagged
from commprof.recorder.training.published_models import Parameter, parameter_rows, trains
from commprof.schema import Phase

ENGINE_MODULE: Final = "deepspeed.runtime.engine"
_ENGINE: Final = "DeepSpeedEngine"
_OPTIMIZER_MAKERS: Final = (
    "_configure_zero_optimizer",
    "_configure_bf16_optimizer",
    "_configure_fp16_optimizer",
)
_CHECKPOINTS: Final = (
    "save_checkpoint",
    "load_checkpoint",
    "save_16bit_model",
    "_zero3_consolidated_16bit_state_dict",
)
_CONFIG_KEYS: Final = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "managed_gradient_accumulation",
    "gradient_clipping",
    "prescale_gradients",
    "gradient_predivide_factor",
    "gradient_allreduce_op",
    "disable_allgather",
)

Call = Callable[..., Any]


@dataclass(slots=True)
class _Progress:
    """The progress of one engine."""

    number: int  # the number of the engine, in the order in which engines were seen
    steps: hooks.StepNumbers = field(default_factory=hooks.StepNumbers)
    is_later: bool = False  # constructed after steps of another engine
    micro_step: int = 0  # backward passes since the last step
    announced: tuple[int, int] | None = None
    inside_backward: bool = False
    # Each parameter and its parameter group, collected while the engine is constructed.
    groups: list[tuple[torch.nn.Parameter, int]] = field(default_factory=list)


class Engines:
    """Wraps the methods of DeepSpeedEngine.

    Args:
        names: A dict that is filled with the names of the parameters by their ``id``.
        experts: The object that publishes the expert layers.
        explicit: A function that returns whether the program itself reports its steps.
        on_fault: A function that is called with each exception of the recorder's own code.
    """

    def __init__(
        self,
        names: dict[int, str],
        experts: ExpertLayers,
        explicit: Callable[[], bool],
        on_fault: Callable[[Exception], None],
    ) -> None:
        self.version = ""
        self._names = names
        self._experts = experts
        self._explicit = explicit
        self._on_fault = on_fault
        self._progress: weakref.WeakKeyDictionary[Any, _Progress] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._speaker: weakref.ref[Any] | None = None  # the engine whose steps are the training steps

    def wrap(self, module: ModuleType, patches: Patches) -> list[str]:
        """Wrap the methods of the engine, and return the paths of expected methods that this version lacks."""
        wrappers: dict[str, Callable[[Call], Call]] = {
            "__init__": self._wrap_init,
            "forward": self._wrap_forward,
            "backward": self._wrap_backward,
            "_take_model_step": self._wrap_step,
            **dict.fromkeys(_OPTIMIZER_MAKERS, self._wrap_optimizer_maker),
            **dict.fromkeys(_CHECKPOINTS, _wrap_checkpoint),
        }
        missing = [
            f"{_ENGINE}.{name}"
            for name, wrap in wrappers.items()
            if not patches.wrap(module, f"{_ENGINE}.{name}", wrap)
        ]
        # Newer versions have these methods, because they also support loss.backward().
        patches.wrap(module, f"{_ENGINE}._backward_prologue", self._wrap_prologue)
        patches.wrap(module, f"{_ENGINE}._backward_epilogue", self._wrap_epilogue)
        return missing

    def take_back(self) -> None:
        """Reset the step, micro-batch and phase that were taken from an engine.

        A later recording in this process then starts without them.
        """
        if self._speaker is not None:
            hooks.position.step, hooks.position.micro_step = -1, 0
            hooks.position.phase = str(Phase.INIT)

    def _wrap_init(self, original: Call) -> Call:
        construct = tagged(original, hooks.tag("other"))

        def construct_and_publish(engine: Any, *args: Any, **kwargs: Any) -> None:
            hooks.phase("init")
            is_later = hooks.has_stepped()
            construct(engine, *args, **kwargs)
            self._of(engine).is_later = is_later
            self._guarded(self._publish, engine)
            hooks.phase("other")

        return construct_and_publish

    def _wrap_optimizer_maker(self, original: Call) -> Call:
        def make(engine: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._guarded(self._keep_groups, engine, optimizer)
            return original(engine, optimizer, *args, **kwargs)

        return make

    def _wrap_forward(self, original: Call) -> Call:
        def forward(engine: Any, *args: Any, **kwargs: Any) -> Any:
            self._guarded(self._announce, engine)
            evaluates = self._evaluates(engine)
            hooks.phase("evaluation" if evaluates else "forward")
            if evaluates:
                self._guarded(_publish_released, engine, "evaluation_released_share")
            try:
                return original(engine, *args, **kwargs)
            finally:
                hooks.phase("other")

        return forward

    def _wrap_backward(self, original: Call) -> Call:
        def backward(engine: Any, *args: Any, **kwargs: Any) -> Any:
            progress = self._of(engine)
            hooks.phase("backward")
            progress.inside_backward = True
            try:
                return original(engine, *args, **kwargs)
            finally:
                progress.inside_backward = False
                progress.micro_step += 1
                hooks.phase("other")

        return backward

    def _wrap_prologue(self, original: Call) -> Call:
        def prologue(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._of(engine).inside_backward:
                hooks.phase("backward")
            return original(engine, *args, **kwargs)

        return prologue

    def _wrap_epilogue(self, original: Call) -> Call:
        def epilogue(engine: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(engine, *args, **kwargs)
            finally:
                progress = self._of(engine)
                if not progress.inside_backward:
                    progress.micro_step += 1
                    hooks.phase("other")

        return epilogue

    def _wrap_step(self, original: Call) -> Call:
        def take_model_step(engine: Any, *args: Any, **kwargs: Any) -> Any:
            hooks.phase("optimizer")
            try:
                result = original(engine, *args, **kwargs)
                self._guarded(_publish_metrics, engine)
                return result
            finally:
                self._of(engine).micro_step = 0
                hooks.phase("other")
                if self._speaker is not None:
                    hooks.end_step()

        return take_model_step

    def _evaluates(self, engine: Any) -> bool:
        """Return whether a forward pass between two steps of ``engine`` is an evaluation, which trains nothing."""
        progress = self._of(engine)
        is_training = trains(engine) and torch.is_grad_enabled()
        return not is_training and progress.announced is not None and not progress.micro_step

    def _of(self, engine: Any) -> _Progress:
        progress = self._progress.get(engine)
        if progress is None:
            progress = self._progress[engine] = _Progress(next(self._numbers))
        return progress

    def _guarded(self, act: Callable[..., None], *args: Any) -> None:
        """Run ``act``, a part of the recorder's own code. Its exceptions never reach the training."""
        try:
            act(*args)
        except Exception as error:
            self._on_fault(error)

    def _announce(self, engine: Any) -> None:
        """Report each step and micro-batch once, unless the program or another engine reports them.

        An engine that was constructed after steps of another engine is a separate training. Its steps continue
        the numbering.
        """
        if not trains(engine) or not torch.is_grad_enabled():
            return
        progress = self._of(engine)
        speaker = None if self._speaker is None else self._speaker()
        if speaker is None:
            if self._speaker is None and self._explicit():
                return
            self._speaker = weakref.ref(engine)
        elif speaker is not engine:
            if not progress.is_later or progress.number < self._of(speaker).number:
                return
            self._speaker = weakref.ref(engine)
        now = (progress.steps.of(int(engine.global_steps)), progress.micro_step)
        if now != progress.announced:
            is_first, progress.announced = progress.announced is None, now
            hooks.step(*now)
            hooks.metric("samples", float(engine.train_micro_batch_size_per_gpu()))
            if not is_first and not progress.micro_step:
                _publish_released(engine, "released_share")

    def _keep_groups(self, engine: Any, optimizer: Any) -> None:
        """Store the parameters of the optimizer by group, before DeepSpeed replaces them by flat partitions."""
        progress = self._of(engine)
        if not progress.groups:
            progress.groups = [
                (p, n) for n, group in enumerate(_groups_of(optimizer)) for p in group["params"]
            ]

    def _publish(self, engine: Any) -> None:
        progress = self._of(engine)
        grouped, progress.groups = progress.groups, []
        if not grouped:
            optimizer = getattr(engine, "optimizer", None)
            grouped = [(p, n) for n, group in enumerate(_groups_of(optimizer)) for p in group["params"]]
        experts = self._experts.publish(engine.module)
        parameters = [
            _whole(name, parameter, experts.get(id(parameter)))
            for name, parameter in engine.module.named_parameters()
        ]
        self._names.update({key: parameter.name for parameter in parameters for key in parameter.keys})
        hooks.describe_config(effective_config(engine), f"deepspeed {self.version}")
        hooks.describe_parameters(parameter_rows(parameters, {id(p): number for p, number in grouped}))


def _groups_of(optimizer: Any) -> Sequence[Mapping[str, Any]]:
    return getattr(optimizer, "param_groups", None) or ()


def _wrap_checkpoint(original: Call) -> Call:
    call = tagged(original, hooks.tag("checkpoint"))

    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        hooks.phase("checkpoint")
        try:
            return call(*args, **kwargs)
        finally:
            hooks.phase("other")

    return checkpoint


def _publish_released(engine: Any, metric: str) -> None:
    """Publish the released share of the elements of stage 3's persistent parameters, if any are released."""
    persistent = getattr(engine.optimizer, "persistent_parameters", None) or ()
    released = sum(each.ds_numel for each in persistent if not each.numel())
    if released:
        hooks.metric(metric, released / sum(each.ds_numel for each in persistent))


def _publish_metrics(engine: Any) -> None:
    """Publish the norm of the gradients, if it is already a Python number."""
    norm = getattr(engine, "_global_grad_norm", None)
    if isinstance(norm, float):
        hooks.metric("grad_norm", norm)


def _whole(name: str, parameter: torch.nn.Parameter, expert: Expert | None) -> Parameter:
    """Describe ``parameter`` with its size before stage 3 partitioned it.

    ``expert`` is the name of the parameter if it belongs to an expert; otherwise None.
    """
    return Parameter(
        name if expert is None else expert.name,
        getattr(parameter, "ds_shape", parameter.shape),
        parameter.dtype,
        getattr(parameter, "ds_numel", parameter.numel()),
        parameter.requires_grad,
        (id(parameter),),
        None if expert is None else expert.ep_size,
    )


def effective_config(engine: Any) -> dict[str, Any]:
    """Return the configuration that ``engine`` uses, with the keys of a DeepSpeed config file."""
    settings = engine._config
    config = plain(getattr(settings, "_param_dict", None) or {})
    for key in _CONFIG_KEYS:
        if hasattr(settings, key):
            config[key] = plain(getattr(settings, key))
    config["zero_optimization"] = plain(settings.zero_config)
    config["communication_data_type"] = plain(engine.communication_data_type)
    config.pop("bfloat16", None)
    for key, section, enabled in (
        ("bf16", "bfloat16_config", "bfloat16_enabled"),
        ("fp16", "float16_config", "fp16_enabled"),
    ):
        values = plain(getattr(settings, section, None) or config.get(key) or {})
        config[key] = {**values, "enabled": bool(getattr(engine, enabled)())}
    return dict(config)


def plain(value: Any) -> Any:
    """Convert ``value`` to JSON values.

    Sections become mappings, dtypes become their names, and values of other types become text.
    """
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    dump = getattr(value, "model_dump", None) or getattr(value, "dict", None)
    if callable(dump):
        return plain(dump(by_alias=True))
    return str(value)
