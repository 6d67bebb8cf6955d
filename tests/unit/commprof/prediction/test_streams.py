"""Test the replacement of host times by the times of a GPU stream."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from commprof.errors import UsageError
from commprof.prediction.streams import device_of, on_stream, stream_steps


def records(*rows, rank=0):
    """Return rows of (step, seq, asynchronous, device begin, device end, exposed).

    The host issues each record at 1,000 times its seq.
    """
    return pd.DataFrame(
        {
            "rank": rank,
            "step": step,
            "seq": seq,
            "op": "all_reduce",
            "purpose": "gradient_reduce",
            "device": "cuda:0",
            "is_async": is_async,
            "issue_ns": 1000 * seq,
            "return_ns": 1000 * seq + 5,
            "wait_begin_ns": np.nan,
            "wait_end_ns": np.nan,
            "device_begin_ns": begin,
            "device_end_ns": end,
            "exposed_ns": exposed,
            "arrived_ns": 1000 * seq + 70,
        }
        for step, seq, is_async, begin, end, exposed in rows
    )


def test_a_blocking_message_blocks_the_stream_from_its_begin_to_its_end():
    (row,) = on_stream(records((1, 3, False, 9000, 9400, 400)), "run").to_dict("records")
    assert (row["issue_ns"], row["return_ns"]) == (9000, 9400)
    assert np.isnan(row["wait_begin_ns"]) and np.isnan(row["device_end_ns"])
    assert row["arrived_ns"] == 9070  # The clock of the other rank keeps its offset.


def test_an_asynchronous_message_blocks_where_the_stream_waits():
    (row,) = on_stream(records((1, 3, True, 9000, 9900, 100)), "run").to_dict("records")
    assert (row["issue_ns"], row["return_ns"]) == (9000, 9000)
    assert (row["wait_begin_ns"], row["wait_end_ns"]) == (9800, 9900)


def test_a_message_without_times_is_named():
    frame = records((1, 3, False, 9000, 9400, 400), (1, 4, False, np.nan, np.nan, np.nan))
    with pytest.raises(
        UsageError, match=r"1 of 2 messages of the/run .*all_reduce for gradient_reduce, step 1"
    ):
        on_stream(frame, "the/run")


def test_a_step_lasts_from_last_message_to_last_message_and_one_without_the_step_before_it_is_left_out():
    rows = [(step, step, False, 10_000 * step, 10_000 * step + 400 + step, 400) for step in (1, 2, 3, 5, 6)]
    frame = pd.concat([on_stream(records(*rows, rank=rank), "run") for rank in (0, 1)])
    times, kept = stream_steps(frame, [1, 2, 3, 5, 6])
    assert kept == [2, 3, 6]
    assert times.loc[(3, 1), ["begin_ns", "end_ns"]].tolist() == [20_402, 30_403]
    assert times["cpu_ns"].isna().all()


def test_devices_of_two_kinds_are_refused():
    frame = records((1, 3, False, 9000, 9400, 400), (1, 4, False, 9500, 9600, 100))
    assert device_of(frame, "run") == "cuda"
    frame.loc[0, "device"] = "cpu"
    with pytest.raises(UsageError, match="tensors of cpu and of cuda"):
        device_of(frame, "run")
    assert device_of(frame.assign(device=None), "run") == "cpu"
