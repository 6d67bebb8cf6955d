"""Reads the rows of ``expert_loads``, the number of tokens that chose each expert.

The events file has one line for each forward pass of a layer of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa

from commprof.schema import PHASES
from commprof.trace.rank_files.events import Events
from commprof.trace.rank_files.outside_rows import Fitted, whole_number
from commprof.trace.rank_files.steps import StepTable
from commprof.trace.tables import conform

_MOST_EXPERTS: Final = 1 << 16
_LARGEST_STEP: Final = (1 << 31) - 1
_NUMBERS: Final = ("step", "micro_step", "phase", "time_ns", "capacity", "sent")
_NO_STEP: Final = -(1 << 31)  # represents null in after_step


def load_rows(events: Events, steps: StepTable, process: Mapping[str, int]) -> Fitted:
    """Return the ``expert_loads`` table of one rank, and the number of lines that did not fit the table.

    Args:
        events: The events of the rank.
        steps: The training steps of the rank.
        process: The columns rank, attempt and pid.
    """
    lines = [line for line in map(_checked, events.rows["expert_load"]) if line is not None]
    # The line of a layer on a device is written late, when its counts arrive on the host.
    lines.sort(key=lambda line: int(line["time_ns"]))
    left_out = len(events.rows["expert_load"]) - len(lines)
    numbers = {name: np.array([line[name] for line in lines], np.int64) for name in _NUMBERS}
    placed = steps.place(
        numbers["step"].astype(np.int32), numbers["time_ns"], numbers["phase"].astype(np.uint8)
    )
    sizes = np.array([len(line["counts"]) for line in lines], np.int64)
    of_line = np.repeat(np.arange(len(lines)), sizes)
    tokens = np.array([count for line in lines for count in line["counts"]], np.int64)
    first = np.cumsum(sizes) - sizes
    after, capacity = placed.after[of_line], numbers["capacity"][of_line]
    layers = pa.array([line["layer"] for line in lines], pa.string()).dictionary_encode()
    columns = {
        **{name: pa.array(np.full(len(tokens), value, np.int64)) for name, value in process.items()},
        "step": pa.array(placed.step[of_line]),
        "after_step": pa.array(after, mask=after == _NO_STEP),
        "micro_step": pa.array(numbers["micro_step"][of_line]),
        "phase": pa.array(PHASES).take(pa.array(placed.phase[of_line].astype(np.int64))),
        "call": pa.array(_calls(lines, placed.step, placed.phase)[of_line]),
        "layer": layers.take(pa.array(of_line)).cast(pa.string()),
        "expert": pa.array(np.arange(len(tokens)) - first[of_line]),
        "tokens": pa.array(tokens),
        "dropped": pa.array(np.maximum(tokens - capacity, 0)),
        "capacity": pa.array(capacity),
        "sent": pa.array(numbers["sent"][of_line]),
        "time_ns": pa.array(numbers["time_ns"][of_line]),
    }
    return Fitted(conform("expert_loads", pa.table(columns)), left_out)


def _calls(lines: list[dict[str, Any]], steps: np.ndarray[Any, Any], phases: np.ndarray[Any, Any]) -> Any:
    """Return for each line the index of its forward pass within the layer, micro-batch and phase."""
    counted: dict[tuple[Any, ...], int] = {}
    calls = np.zeros(len(lines), np.int64)
    for number, (line, step, phase) in enumerate(zip(lines, steps.tolist(), phases.tolist(), strict=True)):
        # Outside of all steps, the recorded step still distinguishes successive evaluations.
        key = (step, line["step"], line["micro_step"], phase, line["layer"])
        calls[number] = counted[key] = counted.get(key, -1) + 1
    return calls


def _checked(line: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the values of ``line`` if all of them are valid, and None otherwise."""
    layer, counts = line.get("layer"), line.get("counts")
    if not isinstance(layer, str) or not isinstance(counts, list) or not 0 < len(counts) <= _MOST_EXPERTS:
        return None
    limits = {"step": (-_LARGEST_STEP, _LARGEST_STEP), "micro_step": (0, _LARGEST_STEP)}
    values = {**line, "sent": line.get("tokens")}
    limits["phase"] = (0, len(PHASES) - 1)
    numbers = {name: whole_number(values.get(name), *limits.get(name, ())) for name in _NUMBERS}
    if None in numbers.values() or any(whole_number(count, 0, 1 << 48) is None for count in counts):
        return None
    return {**numbers, "layer": layer, "counts": counts}
