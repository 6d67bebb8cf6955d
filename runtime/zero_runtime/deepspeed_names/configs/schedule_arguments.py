"""Command-line arguments with which a script chooses a learning-rate schedule, as defined in
``deepspeed.runtime.lr_schedules``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Final

_FLOATS: Final = {
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_rate": 1.0},
    "OneCycle": {
        "cycle_min_lr": 0.01,
        "cycle_max_lr": 0.1,
        "decay_lr_rate": 0.0,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
    },
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.001},
}
_INTEGERS: Final = {
    "LRRangeTest": {"lr_range_test_step_size": 1000},
    "OneCycle": {
        "cycle_first_step_size": 1000,
        "cycle_first_stair_count": -1,
        "cycle_second_step_size": -1,
        "cycle_second_stair_count": -1,
        "decay_step_size": 1000,
    },
    "WarmupLR": {"warmup_num_steps": 1000},
}
# Maps a schedule to another schedule whose arguments it uses.
_SHARED: Final = {"WarmupDecayLR": "WarmupLR", "WarmupCosineLR": "WarmupLR"}
_UNSET: Final = -1  # a count with this value is not passed, so that the schedule uses its own default


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--lr_schedule`` and the arguments of the schedules to ``parser``, and return ``parser``."""
    group = parser.add_argument_group("Convergence Tuning", "Convergence tuning configurations")
    group.add_argument("--lr_schedule", default=None, help="name of a schedule, such as WarmupLR")
    for floats in _FLOATS.values():
        for name, number in floats.items():
            group.add_argument(f"--{name}", type=float, default=number)
    for integers in _INTEGERS.values():
        for name, count in integers.items():
            group.add_argument(f"--{name}", type=int, default=count)
    group.add_argument("--lr_range_test_staircase", type=_boolean, default=False)
    group.add_argument("--cycle_momentum", action="store_true")
    group.add_argument("--warmup_type", default="log", help="log or linear")
    return parser


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """Return the block ``scheduler`` of a configuration that parsed arguments describe.

    Returns:
        (the block, None), or (None, the reason why there is no block).
    """
    name = getattr(args, "lr_schedule", None)
    if name is None:
        return None, "--lr_schedule not specified on command line"
    own = _SHARED.get(name, name)
    if own not in _FLOATS:
        return None, f"{name} is not supported LR schedule"
    arguments = vars(args)
    params = {key: arguments[key] for key in _FLOATS[own] if key in arguments}
    params |= {key: arguments[key] for key in _INTEGERS[own] if arguments.get(key, _UNSET) != _UNSET}
    if own == "LRRangeTest":
        params["lr_range_test_staircase"] = bool(arguments.get("lr_range_test_staircase"))
    if own == "OneCycle":
        params["cycle_momentum"] = bool(arguments.get("cycle_momentum"))
    if own == "WarmupLR":
        params["warmup_type"] = arguments.get("warmup_type", "log")
    return {"type": name, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return the learning rate of a block ``scheduler``: for LRRangeTest the smallest rate, otherwise the largest rate.

    Returns:
        (the rate, ""), or (None, the reason why there is no rate).
    """
    if "type" not in config or "params" not in config:
        return None, "LR schedule type or params not defined in config"
    name, params = config["type"], config["params"]
    keys = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr"}
    if name not in (*_FLOATS, *_SHARED):
        return None, f"{name} is not a valid LR schedule"
    return params.get(keys.get(name, "warmup_max_lr")), ""


def _boolean(text: str) -> bool:
    return text.lower() in ("1", "true", "yes")
