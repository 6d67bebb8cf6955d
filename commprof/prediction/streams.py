"""Replace the times of the host by those of a GPU's stream, on which a training on GPUs computes and waits. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import pandas as pd

from commprof.errors import UsageError

HOST: Final = "cpu"
_ROUNDING_NS: Final = 2_000


def device_of(records: pd.DataFrame, path: str) -> str:
    """Return the kind of device of the tensors that the messages send: ``cpu`` or ``cuda``.

    Raises:
        UsageError: The messages send tensors of several kinds of device.
    """
    kinds = sorted({str(each).partition(":")[0] for each in records["device"].dropna()})
    if len(kinds) > 1:
        raise UsageError(
            f"the messages of {path} carry tensors of {' and of '.join(kinds)}; only trainings with one kind of device "
            "can be predicted"
        )
    return kinds[0] if kinds else HOST


def on_stream(records: pd.DataFrame, path: str) -> pd.DataFrame:
    """Return ``records`` of a GPU with the times at which its stream began to send, was blocked, and continued.

    Raises:
        UsageError: These times are not known for some messages.
    """
    begin, end, exposed = (
        records[name].to_numpy(np.float64, na_value=np.nan)
        for name in ("device_begin_ns", "device_end_ns", "exposed_ns")
    )
    blocks = ~records["is_async"].to_numpy(bool)
    # A blocking call on a side stream does not block the program's stream for the whole duration of the call.
    beside = blocks & (exposed < end - begin - _ROUNDING_NS)
    unknown = np.isnan(begin) | np.isnan(end) | np.isnan(exposed) | beside
    if unknown.any():
        first = records[unknown].iloc[0]
        raise UsageError(
            f"{unknown.sum()} of {len(records)} messages of {path} have no times on the GPU's default stream (the first: "
            f"{first['op']} for {first['purpose']}, step {first['step']}), so the run cannot be predicted; these "
            "times are missing for messages that DistributedDataParallel waits for in C++ or FSDP2 sends on its "
            "own streams, in CUDA graphs, and with --completion-every 0"
        )
    issue = begin.astype(np.int64)
    records = records.assign(
        # Queueing an asynchronous message takes no time. The end of the message is known only if the stream was
        # blocked until then.
        return_ns=np.where(blocks, end.astype(np.int64), issue),
        wait_begin_ns=np.where(blocks, np.nan, end - exposed),
        wait_end_ns=np.where(blocks, np.nan, end),
        device_end_ns=np.nan,
        arrived_ns=records["arrived_ns"] - records["issue_ns"] + issue,
    )
    return records.assign(issue_ns=issue).sort_values(
        ["step", "rank", "seq"], kind="stable", ignore_index=True
    )


def stream_steps(records: pd.DataFrame, usable: Sequence[int]) -> tuple[pd.DataFrame, list[int]]:
    """Return the steps on the stream. A step lasts from the end of the previous step's last message to the end of its own
    last message.

    The host ends a step before the GPU does, and only the messages show where a step ends on the stream.

    Args:
        records: The records with times on the stream.
        usable: The numbers of the usable steps.

    Returns:
        The times by step and rank, and the numbers of the steps whose previous step is also in ``usable``.
    """
    last = records[["return_ns", "wait_end_ns"]].max(axis=1).groupby([records["step"], records["rank"]]).max()
    ranks = sorted(records["rank"].unique())
    paired = [
        step
        for before, step in pairwise(usable)
        if step == before + 1 and all((each, rank) in last.index for each in (before, step) for rank in ranks)
    ]
    rows = [(step, rank, last[step - 1, rank], last[step, rank]) for step in paired for rank in ranks]
    frame = pd.DataFrame(rows, columns=["step", "rank", "begin_ns", "end_ns"])
    # The processor time of the host is left out, because it does not measure the time of messages on the GPU.
    return frame.assign(cpu_ns=np.nan).set_index(["step", "rank"]), paired
