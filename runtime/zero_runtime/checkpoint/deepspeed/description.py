"""Counters, loss scale, optimizer class and client values in DeepSpeed's files, converted to this runtime's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from zero_runtime.checkpoint.deepspeed.objects import plain

# DeepSpeed's own keys in the dictionary that also contains the client's values.
_OWN_KEYS: Final = frozenset((
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
    "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "csr_tensor_module_names", "skipped_steps",
    "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
    "checkpoint_parallel_dimensions", "num_experts", "universal_checkpoint_info", "ds_autoep_layers", "autoep_layers",
))  # fmt: skip
# This runtime's classes for DeepSpeed's optimizers, by the type in a configuration.
_CLASSES: Final = {
    "adam": "AdamW",
    "adamw": "AdamW",
    "adagrad": "Adagrad",
    "sgd": "SGD",
    "lamb": "Lamb",
    "lion": "Lion",
    "muon": "Muon",
}
# The same classes by the names of their state tensors. If several classes have equal states, the first is the default.
_BY_STATES: Final[Mapping[frozenset[str], Sequence[str]]] = {
    frozenset(("exp_avg", "exp_avg_sq")): ("AdamW", "UncorrectedAdam", "Lamb", "Lion"),
    frozenset(("exp_avg", "exp_avg_sq", "max_exp_avg_sq")): ("AdamW",),
    frozenset(("momentum_buffer",)): ("SGD", "Muon"),
    frozenset(): ("SGD",),
    frozenset(("sum",)): ("Adagrad",),
    frozenset(("exp_avg_sq",)): ("Adagrad",),
    frozenset(("exp_avg",)): ("Lion",),
}
# State tensors that have a different name in DeepSpeed's own optimizers. This maps DeepSpeed's name to the name in this
# runtime. None marks a state tensor that is not used.
_STATE_NAMES: Final[Mapping[str, Mapping[str, str | None]]] = {
    "Adagrad": {"exp_avg_sq": "sum"},
    "Lion": {"exp_avg_sq": None},
}


def counters(states: Mapping[str, Any]) -> dict[str, int]:
    """Return the counters of the model states. The result is empty if there are no model states."""
    if not states:
        return {}
    steps = int(states["global_steps"])
    return {
        "global_steps": steps,
        "global_samples": int(states.get("global_samples") or 0),
        "skipped_steps": int(states.get("skipped_steps") or 0),
        # DeepSpeed saves no count of micro-batches, because accumulation starts again after each step.
        "micro_steps": steps,
        "gradient_accumulation_steps": 1,
    }


def client_values(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the script's own values (client state) from the model states."""
    return {key: plain(value) for key, value in states.items() if key not in _OWN_KEYS}


def stage(common: Mapping[str, Any], config: Any) -> int:
    """Return the ZeRO stage that the optimizer states record, or else the stage of the configuration."""
    recorded = common.get("zero_stage")
    if isinstance(recorded, int):
        return int(recorded)
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    number = zero.get("stage") if isinstance(zero, dict) else None
    return number if isinstance(number, int) else 0


def loss_scale(common: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state of the loss scale, or None if the loss scale is static."""
    scaler_state = vars(common["loss_scaler"]) if hasattr(common.get("loss_scaler"), "__dict__") else common
    if (
        not (scaler_state.get("dynamic") or scaler_state.get("dynamic_loss_scale"))
        or "cur_scale" not in scaler_state
    ):
        return None
    return {
        "value": float(scaler_state["cur_scale"]),
        "steps": int(scaler_state.get("cur_iter", 0)),
        "last_overflow": int(scaler_state.get("last_overflow_iter", -1)),
        "overflows_left": int(scaler_state.get("cur_hysteresis", 1)),
        "dynamic": True,
        "window": int(scaler_state.get("scale_window", 1000)),
        "hysteresis": int(scaler_state.get("delayed_shift", 1)),
        "consecutive_hysteresis": bool(scaler_state.get("consecutive_hysteresis", False)),
        "minimum": float(scaler_state.get("min_scale", 1.0)),
    }


def optimizer_class(config: Mapping[str, Any], states: Sequence[frozenset[str]], known: str | None) -> str:
    """Return the class name of the optimizer. It is inferred, because no file names the class.

    Args:
        config: The configuration, which may name the optimizer's type.
        states: The names of the state tensors of each parameter that was trained.
        known: The class name of the optimizer that loads the checkpoint. It is used unless the states
            contradict it.
    """
    optimizer_block = config.get("optimizer")
    if isinstance(optimizer_block, dict) and isinstance(name := optimizer_block.get("type"), str):
        class_name = _CLASSES.get(name.lower(), name)
        params = optimizer_block.get("params")
        corrected = not isinstance(params, dict) or params.get("bias_correction") is not False
        return class_name if class_name != "AdamW" or corrected else "UncorrectedAdam"
    kinds = set(states)
    fitting = _BY_STATES.get(next(iter(kinds)), ()) if len(kinds) == 1 else ()
    if not fitting or known in fitting:
        return known or ""
    return fitting[0]


def state_name(optimizer: str | None, name: str) -> str | None:
    """Return the name that class ``optimizer`` gives to the state tensor that DeepSpeed calls ``name``.

    The result is None if the class has no such state.
    """
    return _STATE_NAMES.get(optimizer or "", {}).get(name, name)
