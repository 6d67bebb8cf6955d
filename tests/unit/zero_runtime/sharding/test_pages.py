"""Compare shards in files with shards in memory, for any order of reads, writes, prefetches and drops."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from zero_runtime.sharding.gather_schedule.policy import SliceOffload
from zero_runtime.sharding.placement.pages import Pager
from zero_runtime.sharding.shards import Shard

NUMELS = (1, 99, 100, 101, 250, 731)


class Alone:
    """A group of one rank."""

    rank = 0
    world_size = 1


def paged(folder, dtype=torch.float32, **offload):
    """Return shards of ``NUMELS`` and the pager that stores them."""
    pager = Pager(
        SliceOffload(
            "nvme", str(folder), **{"buffer_count": 2, "buffer_size": 100, "max_in_cpu": 0, **offload}
        ),
        0,
        False,
    )
    shards = [Shard(nn.Parameter(torch.randn(numel).to(dtype)), Alone()) for numel in NUMELS]
    for shard in shards:
        pager.adopt(shard)
    return pager, shards


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_reads_and_writes(tmp_path, dtype, seed):
    torch.manual_seed(seed)
    choose = random.Random(seed)
    pager, shards = paged(tmp_path, dtype, buffer_count=1 + seed)
    known = [shard.parameter.detach().clone() for shard in shards]
    for _ in range(300):
        number = choose.randrange(len(shards))
        shard, values = shards[number], known[number]
        start = choose.randrange(shard.slice_numel)
        part = slice(start, choose.randint(start + 1, shard.slice_numel))
        numel = part.stop - part.start
        match choose.randrange(6):
            case 0 | 1:
                out = torch.empty(numel, dtype=choose.choice([dtype, torch.float64]))
                pager.read(shard, out, start)
                assert torch.equal(out, values[part].to(out.dtype))
            case 2 | 3:
                values[part] = torch.randn(numel).to(dtype)
                written = values[part].clone()
                pager.write(shard, written, start)
                written.zero_()
            case 4:
                coming = choose.sample(shards, choose.randint(1, len(shards)))
                pager.refill(lambda coming=coming: coming)
            case 5:
                choose.choice([lambda shard=shard: pager.begin([shard]), pager.cancel])()
        assert pager.largest <= 100 * (1 + seed)
    for shard, values in zip(shards, known, strict=True):
        with shard.lent() as own:
            assert torch.equal(own, values)
            own.add_(1)
        shard.page_in()
        assert torch.equal(shard.own, values + 1)
    assert not list(tmp_path.rglob("*parameter*"))


def test_the_first_slices_stay_in_memory(tmp_path):
    pager, shards = paged(tmp_path, max_in_cpu=200)
    assert [shard.pager is None for shard in shards] == [True, True, True, False, False, False]
    assert pager.in_files == 101 + 250 + 731
    pager.adopt(shards[0])  # This shard already has memory.
    assert pager.in_files == 101 + 250 + 731


def test_what_is_read_ahead_is_there(tmp_path):
    pager, shards = paged(tmp_path, buffer_count=3)
    for buffer in pager._leaving.values():  # A buffer that is still being written leaves no room for reads.
        buffer.transfer.wait()
    begun = []
    begin = pager._begin
    pager._begin = lambda page: (begun.append(page.number), begin(page))
    pager.refill(lambda: [shards[3], shards[0], shards[1]])
    assert begun == [shards[3].number] * 2 + [shards[0].number, shards[1].number]
    begun.clear()
    for shard in (shards[3], shards[0], shards[1]):
        pager.read(shard, torch.empty(shard.slice_numel))
    assert begun == []


def test_another_dtype(tmp_path):
    pager, shards = paged(tmp_path)
    values = shards[4].parameter.detach().clone()
    shards[4].cast(torch.bfloat16)
    assert shards[4].pager is pager
    with shards[4].lent() as own:
        assert torch.equal(own, values.to(torch.bfloat16))
