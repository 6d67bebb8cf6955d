"""The configuration block ``communication``: collectives along the axes of a grid, slow ranks, and bounded delay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from zero_runtime.configuration.reading.checks import Check, integer, number, optional, strings, text
from zero_runtime.configuration.reading.key_table import Table, inside, used
from zero_runtime.errors import ConfigError


def _topology(name: str, value: Any) -> int | str | tuple[int, ...]:
    if value == "auto":
        return "auto"
    if isinstance(value, list | tuple) and value and all(type(each) is int and each > 0 for each in value):
        return tuple(value)
    if type(value) is int and value in (1, 2, 3):
        return value
    raise ConfigError(
        f"{name} is {value!r}; expected 1, 2 or 3 axes, auto, or a list with the ranks along each axis, such as [2, 4]"
    )


def _fraction(name: str, value: Any) -> float:
    number_value = float(number(0.0)(name, value))
    if not 0.0 < number_value < 1.0:
        raise ConfigError(
            f"{name} is {value!r}; expected a fraction of a step's time, above 0 and below 1, such as 0.2"
        )
    return number_value


CALIBRATION: Final[Table] = {
    "world": used(optional(text), None, "the file that commprof calibrate wrote in a run on all ranks"),
    "axes": used(
        strings,
        (),
        "one calibration file for each axis, from the outermost axis to the innermost. Each file is "
        "measured on the ranks of one group along that axis",
    ),
}

COMMUNICATION: Final[Table] = {
    "topology": used(
        Check("1, 2, 3, `auto` or list of int", _topology),
        1,
        "the axes of the grid of ranks. Gradients are summed and parameters are gathered along these axes. "
        "See docs/topology.md",
    ),
    "calibration": used(
        optional(inside(CALIBRATION)),
        None,
        "files with measured costs. The costs determine the values of the sizes that are set to auto, and "
        "which collectives run along the axes",
    ),
    "slow_node_tolerance": used(
        optional(Check("number above 0 and below 1", _fraction)),
        None,
        "report the rank or link that delays the others by more than this fraction of a step",
    ),
    "bounded_delay": used(
        integer(0),
        0,
        "the delay N of gradients in steps. Step t applies the gradients of step t - N. This requires "
        "stage 0 and uses point-to-point messages. The value 0 means no delay",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicationConfig:
    """The checked values of the block ``communication``.

    Attributes:
        topology: The number of axes, ``auto``, or the number of ranks along each axis, outermost first.
        world_calibration: The path of the calibration file for all ranks; None if no costs are known.
        axis_calibrations: The paths of the calibration files, one for each axis.
        slow_node_tolerance: A fraction of the time of a step; None to disable the detection of slow ranks.
        bounded_delay: The number of steps by which the averages of gradients are delayed; 0 for no delay.
    """

    topology: int | str | tuple[int, ...] = 1
    world_calibration: str | None = None
    axis_calibrations: tuple[str, ...] = ()
    slow_node_tolerance: float | None = None
    bounded_delay: int = 0

    @property
    def plain(self) -> bool:
        """Whether each collective runs among all ranks, not along axes."""
        return self.topology == 1

    def effective(self) -> dict[str, Any]:
        """Return the settings by their configuration keys."""
        files = {"world": self.world_calibration, "axes": list(self.axis_calibrations)}
        return {
            "topology": list(self.topology) if isinstance(self.topology, tuple) else self.topology,
            "calibration": files if self.world_calibration else None,
            "slow_node_tolerance": self.slow_node_tolerance,
            "bounded_delay": self.bounded_delay,
        }


def read_communication(values: Mapping[str, Any], world_size: int) -> CommunicationConfig:
    """Return the settings in ``values``, the values of the block after the check of each key.

    Raises:
        ConfigError: The product of the axis sizes is not the number of ranks, or a calibration file is missing.
    """
    topology = values["topology"]
    if isinstance(topology, tuple) and prod(topology) != world_size:
        raise ConfigError(
            f"communication.topology is {list(topology)}, a grid of {prod(topology)} ranks, and there are {world_size}; "
            "expected sizes whose product is the number of ranks, or auto"
        )
    files = values["calibration"]
    along_axes = topology != 1
    if files is not None and not (files["world"] and (files["axes"] or not along_axes)):
        raise ConfigError(
            "communication.calibration needs world, a file of commprof calibrate among all ranks, and for a topology of "
            "several axes also axes, a list with one such file for each; give them, or remove the block"
        )
    if files is not None and isinstance(topology, tuple):
        expected = max(1, sum(size > 1 for size in topology))
        if expected > 1 and len(files["axes"]) != expected:
            raise ConfigError(wrong_number_of_files(len(files["axes"]), expected))
    return CommunicationConfig(
        topology=topology,
        world_calibration=files["world"] if files else None,
        axis_calibrations=files["axes"] if files else (),
        slow_node_tolerance=values["slow_node_tolerance"],
        bounded_delay=values["bounded_delay"],
    )


def check_whole(communication: CommunicationConfig, shared: bool) -> None:
    """Refuse ``bounded_delay`` if ranks share a model or its samples (``shared`` is true). Raises ConfigError."""
    if communication.bounded_delay and shared:
        raise ConfigError(
            f"communication.bounded_delay is {communication.bounded_delay}, which needs the whole model and samples of its "
            "own on every rank; remove it, or the keys of tensor, sequence and pipeline parallelism"
        )


def check_optimizer_given(communication: CommunicationConfig) -> None:
    """Refuse ``bounded_delay`` without an optimizer. Raises ConfigError."""
    if communication.bounded_delay:
        raise ConfigError(
            f"communication.bounded_delay is {communication.bounded_delay}, and there is no optimizer that could apply "
            "gradients later; name one in the config, or pass one to initialize"
        )


def wrong_number_of_files(count: int, expected: int) -> str:
    """Return the error message for a wrong number of calibration files for axes."""
    return (
        f"communication.calibration.axes has {count} files, and the grid has {expected} axes of more than one rank; "
        "expected one file for each of them, outermost first"
    )
