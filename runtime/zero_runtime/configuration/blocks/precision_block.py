"""The dtype settings of the configuration: fp16, bf16, data_types, torch_autocast and related keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2
from typing import Any

from zero_runtime.errors import ConfigError
from zero_runtime.gradient_reduction.loss_scale import UNSCALED, ScaleRules


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """The dtypes of a training, with DeepSpeed's names (fp32, fp16, bf16). A dtype is None if the model determines it.

    ``fp32_modules`` are patterns of modules that stay in fp32. ``fp32_buffers`` are patterns of buffers that
    stay in fp32, or None to use the lists of the model.
    """

    fp16: bool
    bf16: bool
    auto_cast: bool
    loss_scale: ScaleRules
    check_grad_overflow: bool
    bf16_masters: bool
    fp32_modules: tuple[str, ...]
    fp32_buffers: tuple[str, ...] | None
    grad_accum_dtype: str | None
    param_dtype: str | None
    buffer_dtype: str | None
    communication_data_type: str | None
    autocast_dtype: str | None
    autocast_modules: tuple[str, ...] | None

    @property
    def model(self) -> str:
        """The dtype of the parameters."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "fp32"

    def effective_fp16(self) -> dict[str, Any]:
        """Return the effective fp16 block."""
        if not self.fp16:
            return {"enabled": False}
        rules = self.loss_scale
        scale: dict[str, Any] = {"loss_scale": rules.value}
        if rules.dynamic:
            scale = {
                "loss_scale": 0,
                "initial_scale_power": round(log2(rules.value)),
                "loss_scale_window": rules.window,
                "hysteresis": rules.hysteresis,
                "consecutive_hysteresis": rules.consecutive_hysteresis,
                "min_loss_scale": rules.minimum,
            }
        return {"enabled": True, "auto_cast": self.auto_cast, **scale}


def read_precision(top: Mapping[str, Any]) -> PrecisionConfig:
    """Return the dtype settings in the checked values of the top level.

    Raises:
        ConfigError: Keys contradict each other.
    """
    fp16, bf16, types, autocast = top["fp16"], top["bf16"], top["data_types"], top["torch_autocast"]
    if fp16["enabled"] and bf16["enabled"]:
        raise ConfigError("both fp16 and bf16 are enabled, and a model has one dtype; disable one of them")
    model = "fp16" if fp16["enabled"] else "bf16" if bf16["enabled"] else "fp32"
    check_param_dtype(types["param_dtype"], model)
    if bf16["bf16_master_weights_and_grads"] != bf16["bf16_optimizer_states"]:
        raise ConfigError(
            "bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states go together: masters and state "
            "have one dtype, offloaded or not; set both, or neither"
        )
    modules = autocast["lower_precision_safe_modules"]
    buffers = types["keep_in_fp32_modules"]
    return PrecisionConfig(
        fp16=fp16["enabled"],
        bf16=bf16["enabled"],
        auto_cast=fp16["enabled"] and fp16["auto_cast"],
        loss_scale=_scale_rules(fp16, autocast),
        check_grad_overflow=fp16["enabled"] or (bf16["enabled"] and bf16["check_grad_overflow"]),
        bf16_masters=bf16["enabled"] and bf16["bf16_master_weights_and_grads"],
        fp32_modules=_fp32_modules(top["fp16_override_modules"], fp16["fp16_override_modules"]),
        fp32_buffers=None if buffers == "auto" else buffers,
        grad_accum_dtype=types["grad_accum_dtype"],
        param_dtype=types["param_dtype"],
        buffer_dtype=types["buffer_dtype"],
        communication_data_type=top["communication_data_type"],
        autocast_dtype=autocast["dtype"] if autocast["enabled"] else None,
        autocast_modules=None if modules is None else tuple(modules),
    )


def check_param_dtype(param_dtype: str | None, model: str) -> None:
    """Refuse a ``data_types.param_dtype`` other than the dtype that the ``model`` trains in. Raises ConfigError."""
    if param_dtype not in (None, model):
        raise ConfigError(
            f"data_types.param_dtype is {param_dtype}, but the model trains in {model}; expected {model}, or "
            "set fp16.enabled or bf16.enabled accordingly"
        )


def _scale_rules(fp16: Mapping[str, Any], autocast: Mapping[str, Any]) -> ScaleRules:
    """Return the rules of the loss scale, from the fp16 block.

    With torch.autocast in fp16, the rules are those of torch.amp.GradScaler.
    """
    if not fp16["enabled"]:
        lower = autocast["enabled"] and autocast["dtype"] in ("fp16", "float16")
        return ScaleRules(2.0**16, dynamic=True, window=2000, hysteresis=1) if lower else UNSCALED
    if fp16["loss_scale"]:
        return ScaleRules(fp16["loss_scale"])
    return ScaleRules(
        2.0 ** fp16["initial_scale_power"],
        True,
        fp16["loss_scale_window"],
        fp16["hysteresis"],
        fp16["consecutive_hysteresis"],
        fp16["min_loss_scale"],
    )


def _fp32_modules(top: tuple[str, ...] | None, inner: tuple[str, ...] | None) -> tuple[str, ...]:
    if top is not None and inner is not None:
        raise ConfigError(
            "both fp16_override_modules and fp16.fp16_override_modules are given; keep the former"
        )
    return top or inner or ()
