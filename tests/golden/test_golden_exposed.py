"""Exposed time on a GPU equals the CUPTI measurements of two runs of ``tests/device/test_exposed.py`` on one H200.

``h200/ddp`` and ``h200/fsdp2`` are recordings of two ranks that take turns on the card, with 6 layers of 2,048
times 2,048 elements and 8 steps. CUPTI measured how long kernels of NCCL ran in the last 6
steps while the default stream was idle. The times are 293 and 291 ms for the two ranks of DDP, and 449 and 455 ms for
the two ranks of FSDP2.
"""

from pathlib import Path

import pytest

from commprof.analysis import api
from commprof.errors import UsageError
from commprof.prediction.predictions import predict
from commprof.trace.reader import open_run

RUNS = Path(__file__).parent / "h200"


def exposed(name: str, column: str) -> list[float]:
    """Return the milliseconds of each rank in ``column``, summed over the last 6 steps of the host.

    The host is at most one step ahead of the device.
    """
    rows = api.exposure(open_run(RUNS / name), by=("rank", "step", "purpose"))
    rows = rows[(rows["step"] >= 2) & rows["purpose"].isin(["gradient_reduce", "parameter_gather"])]
    by_step = api.exposure(open_run(RUNS / name), by=("rank", "step"))
    by_step = by_step[by_step["step"] >= 2]
    assert rows["bounded" if name == "ddp" else "timed"].sum() == rows["records"].sum() > 0
    return [by_step[by_step["rank"] == rank][column].sum() / 1e6 for rank in (0, 1)]


def test_of_fsdp2_on_side_streams_it_is_that_of_cupti():
    assert exposed("fsdp2", "exposed_ns") == pytest.approx([448.62, 455.01], rel=0.01)


def test_of_ddp_it_is_bounded_by_its_wait_in_cpp():
    assert exposed("ddp", "exposed_high_ns") == pytest.approx([293.23, 290.87], rel=0.02)
    assert exposed("ddp", "exposed_low_ns") == [0, 0]


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_what_it_sends_beside_the_default_stream_is_not_predicted(name):
    with pytest.raises(UsageError, match="no times on the GPU's default stream"):
        predict(open_run(RUNS / name), [({}, None)])
