"""``log_summary`` and related functions of ``deepspeed.comm``: the communication log as a table and as a dictionary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from zero_runtime.deepspeed_names.ranks import comm_functions
from zero_runtime.errors import ConfigError
from zero_runtime.groups.comm_log import LOG, Sample, figures, shown_size, trimmed_mean

_HEADINGS = ("Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)",
             "busbw_avg (Gbps)")  # fmt: skip
_STRAGGLER_HEADINGS = ("Comm. Op", "Message Size", "Count", "Total comm lat(ms)", "Total straggler(ms)", "Avg comm lat(ms)",
                       "Avg straggler(ms)")  # fmt: skip
_WIDTH = 20


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Enable or disable the log, and set what it records. An argument that is None does not change its setting.

    Args:
        deepspeed_config: A configuration (dict, path or DeepSpeedConfig). Only its block ``comms_logger`` is used.
        enabled: Whether calls are timed.
        prof_all: Whether the calls of all operations are timed.
        prof_ops: The operations whose calls are timed.
        verbose: Whether a line is printed for each timed call.
        debug: Whether the log entries also contain the name of the calling function.
    """
    if deepspeed_config is not None:
        _configure_from(deepspeed_config)
    LOG.configure(enabled=enabled, prof_all=prof_all, prof_ops=prof_ops, verbose=verbose, debug=debug)


def _configure_from(config: Any) -> None:
    from zero_runtime import config as configuration
    from zero_runtime.configuration import all_keys

    document = getattr(config, "_param_dict", None)
    document = configuration.load(config) if document is None else document
    block = all_keys.as_deepspeed_reads(document).get("comms_logger", {})
    if not isinstance(block, Mapping):
        raise ConfigError(f'comms_logger is {block!r}; expected an object such as {{"enabled": true}}')
    if block.get("enabled"):
        configure(
            **{
                name: block[name]
                for name in ("enabled", "prof_all", "prof_ops", "verbose", "debug")
                if name in block
            }
        )


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print the durations of each operation and size on rank 0. All ranks must call this function.

    Args:
        show_straggler: Whether the ranks are also compared. The shortest time of a call on any rank counts as the
            duration of its communication, and the rest of the time on this rank counts as waiting.
        return_dict: Whether the figures of this rank are returned.

    Returns:
        None, or with ``return_dict`` a dictionary with three entries. ``summary`` and ``straggler_analysis``
            contain the
        figures by operation and bytes. ``straggler_analysis`` is None without ``show_straggler``. The third entry is
        ``metadata``.
    """
    with LOG.paused():
        return _log_summary(show_straggler, return_dict)


def _log_summary(show_straggler: bool, return_dict: bool) -> dict[str, Any] | None:
    comm_functions.barrier()
    samples = {
        name: {size: list(calls) for size, calls in by_size.items()} for name, by_size in LOG.read().items()
    }
    straggling = _compare(samples) if show_straggler else None
    if comm_functions.get_rank() == 0:
        _print(_HEADINGS, {name: _rows(by_size) for name, by_size in samples.items()})
        if straggling is not None:
            _print(_STRAGGLER_HEADINGS, {name: _straggler_rows(calls) for name, calls in straggling.items()})
    comm_functions.barrier()
    if not return_dict:
        return None
    return {
        "summary": {name: figures(by_size) for name, by_size in samples.items()},
        "straggler_analysis": straggling,
        "metadata": {
            "world_size": comm_functions.get_world_size(),
            "rank": comm_functions.get_rank(),
            "timestamp": datetime.now().isoformat(),
        },
    }


def reset_log() -> None:
    """Clear the log."""
    LOG.reset()


def has_comm_data() -> bool:
    """Return whether any call was logged."""
    return bool(LOG.read())


def get_comm_operation_count() -> int:
    """Return the number of logged calls."""
    return sum(len(samples) for by_size in LOG.read().values() for samples in by_size.values())


def get_logged_comm_ops() -> list[str]:
    """Return the names of the operations that were logged."""
    return list(LOG.read())


_Samples = Mapping[str, Mapping[int, Sequence[Sample]]]


def _compare(samples: _Samples) -> dict[str, dict[int, dict[str, Any]]]:
    """Compare the ranks, for the operations and sizes that all ranks logged.

    The result contains the durations on the last rank to arrive, and the additional time that this rank waited.
    """
    mine = {
        (name, size): [each.milliseconds for each in calls]
        for name, by_size in samples.items()
        for size, calls in by_size.items()
    }
    everybody: list[Any] = [None] * comm_functions.get_world_size()
    comm_functions.all_gather_object(everybody, mine)
    compared: dict[str, dict[int, dict[str, Any]]] = {}
    for (name, size), own in sorted(mine.items()):
        series = [each[name, size] for each in everybody if (name, size) in each]
        if len(series) < len(everybody):
            continue
        shortest = [min(each) for each in zip(*series, strict=False)]
        waited = [took - least for took, least in zip(own, shortest, strict=False)]
        compared.setdefault(name, {})[size] = {
            "count": len(shortest),
            "total_comm_lat_ms": sum(shortest),
            "total_straggler_ms": sum(waited),
            "avg_comm_lat_ms": trimmed_mean(shortest),
            "avg_straggler_ms": trimmed_mean(waited),
            "msg_size_bytes": size,
            "msg_size_str": shown_size(size),
        }
    return compared


def _rows(by_size: Mapping[int, Sequence[Sample]]) -> list[tuple[Any, ...]]:
    return [
        (row["msg_size_str"], row["count"], row["total_latency_ms"], row["avg_latency_ms"], row["tput_avg_gbps"],
         row["busbw_avg_gbps"])
        for row in figures(by_size).values()
    ]  # fmt: skip


def _straggler_rows(by_size: Mapping[int, Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (row["msg_size_str"], row["count"], row["total_comm_lat_ms"], row["total_straggler_ms"], row["avg_comm_lat_ms"],
         row["avg_straggler_ms"])
        for row in by_size.values()
    ]  # fmt: skip


def _print(headings: Sequence[str], rows: Mapping[str, Sequence[tuple[Any, ...]]]) -> None:
    print("".join(heading.ljust(_WIDTH) for heading in headings).rstrip())
    for name, lines in rows.items():
        print(name)
        for line in lines:
            cells = [f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in line]
            print("".join(cell.ljust(_WIDTH) for cell in ("", *cells)).rstrip(), flush=True)
