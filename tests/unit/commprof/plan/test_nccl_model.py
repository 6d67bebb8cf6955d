"""Compare the model of NCCL's times with the model of torch's inductor and with hand-computed values."""

from __future__ import annotations

import pytest

from commprof.plan.hosts import Hosts, Links, Place, places_of
from commprof.plan.nccl_model import fastest

SIZES = [4, 64, 1_000, 2**15, 10**6, 2**24, 10**8, 2**29, 2**30 + 4, 10**10]


@pytest.fixture
def inductor(monkeypatch):
    analysis = pytest.importorskip("torch._inductor.comm_analysis")
    if not hasattr(analysis, "_nccl_best_algo_time"):
        pytest.skip("this torch has another model of NCCL")
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(analysis, "get_gpu_type", lambda: analysis.NVIDIA_GPU_TYPE.HOPPER)
    # commprof's model does not include inductor's corrections for one InfiniBand network.
    monkeypatch.setattr(analysis, "detect_interconnect", lambda ranks: analysis.InterconnectType.NVLINK_H100)
    return analysis


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("ranks", [2, 4, 8, 24, 64, 1024, 16384])
def test_times_are_those_of_inductor(inductor, monkeypatch, op, ranks):
    monkeypatch.setattr(inductor, "get_intra_node_bw", lambda: 450.0)
    monkeypatch.setattr(inductor, "get_inter_node_bw", lambda: 300.0)
    place = Place(ranks, max(1, ranks // 8), min(8, ranks), 1)
    for size in SIZES:
        cost = fastest(op, size, place, Links(450e9, 300e9))
        expected, _, _ = inductor._nccl_best_algo_time(size, ranks, inductor.NCCL_COLL[op.upper()])
        assert cost is not None and cost.time_ns(size) == pytest.approx(1e3 * expected, rel=1e-9)


def test_large_messages_take_as_long_as_their_bytes_on_the_slowest_link():
    """An all_to_all of 64 GB on 8 hosts of 8 ranks sends 8 x 7 GB out of each host.

    A ring carries 63/64 of the bytes.
    """
    links, place = Links(450e9, 50e9), Place(64, 8, 8, 1)
    seconds = {
        op: fastest(op, 64e9, place, links).time_ns(64e9) / 1e9
        for op in ("all_to_all", "all_gather", "reduce", "send", "gather")
    }
    assert seconds["all_to_all"] == pytest.approx(8 * 56 / 50, rel=0.01)
    assert seconds["all_gather"] == pytest.approx(63 / 50, rel=0.01)
    assert [seconds["reduce"], seconds["send"]] == pytest.approx([64 / 50, 64 / 50], rel=0.01)
    assert seconds["gather"] == pytest.approx(56 / 50, rel=0.01)
    shared = fastest("all_gather", 64e9, place._replace(sharing=8), links)
    assert shared is not None and shared.time_ns(64e9) == pytest.approx(8e9 * 63 / 50, rel=0.01)


def test_a_missing_rate_leaves_the_time_open():
    assert fastest("all_reduce", 4, Place(8, 1, 8, 1), Links(None, 50e9)) is None
    assert fastest("all_reduce", 4, Place(8, 2, 4, 1), Links(450e9, None)) is None
    assert fastest("all_reduce", 4, Place(8, 8, 1, 8), Links(None, 50e9)) is not None


def test_places_of_groups_that_share_the_links_of_a_host():
    hosts = Hosts(2, 4)
    assert places_of([range(8)], hosts) == [Place(8, 2, 4, 1)]
    assert places_of([(0, 4), (1, 5), (2, 3)], hosts) == [
        Place(2, 2, 1, 2),
        Place(2, 2, 1, 2),
        Place(2, 1, 2, 2),
    ]
    assert places_of([(0, 1)], hosts) == [Place(2, 1, 2, 1)]
