"""Test ranks as a grid, and the groups along its axes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from zero_runtime.errors import ConfigError, UsageError
from zero_runtime.groups.process_grid import ProcessGrid, ProcessTopology


def test_every_place_has_its_rank_and_back():
    grid = ProcessTopology.of(pipe=2, data=3, model=4)
    assert grid.world_size == 24 and grid.size("data") == 3 and grid.size("sequence") == 1
    for rank in range(24):
        place = grid.place(rank)
        assert rank == place["pipe"] * 12 + place["data"] * 4 + place["model"] == grid.rank(**place)
    assert grid.ranks(pipe=1, data=2) == [20, 21, 22, 23] and grid.ranks() == list(range(24))
    assert grid.ranks(pipe=2) == []


def test_lines_are_parts_of_all_ranks():
    grid = ProcessTopology.of(pipe=2, data=2, model=2)
    assert grid.lines("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.lines("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.lines("pipe", "model") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert grid.lines("elsewhere") == [[rank] for rank in range(8)]
    assert grid.line(5, "pipe") == [1, 5]
    wider = grid.widened("model", "sequence")
    assert wider.axes == ("pipe", "data", "model", "sequence") and wider.lines("model") == grid.lines("model")


def test_what_is_no_grid_is_refused():
    with pytest.raises(ConfigError, match="the same length"):
        ProcessTopology(("pipe",), (1, 2))
    with pytest.raises(ConfigError, match="differ"):
        ProcessTopology(("pipe", "pipe"), (1, 2))
    with pytest.raises(ConfigError, match="at least 1"):
        ProcessTopology.of(pipe=0)
    grid = ProcessTopology.of(pipe=2, data=3)
    with pytest.raises(ConfigError, match="2 x 3"):
        grid.rank(pipe=0, data=3)
    with pytest.raises(ConfigError, match="a value for every axis"):
        grid.rank(pipe=0)
    with pytest.raises(ConfigError, match="no axis modle"):
        grid.ranks(modle=0)
    with pytest.raises(ConfigError, match="rank 6"):
        grid.place(6)
    with pytest.raises(ConfigError, match="pipe=2, data=3 has 6 places, and there are 8 ranks"):
        grid.check(8)
    with pytest.raises(UsageError, match="not initialized"):
        ProcessGrid(grid)


def _sums(rank: int, world: int) -> dict[str, tuple[str, float]]:
    grid = ProcessGrid(ProcessTopology.of(pipe=1, data=2, model=world // 2), joined=[("pipe", "model")])
    found = {}
    for axes in (("pipe",), ("data",), ("model",), ("pipe", "model")):
        group = grid.group(*axes)
        total = torch.tensor([float(rank)])
        group.all_reduce(total)
        assert group.group is not None
        found["+".join(axes)] = (group.group.group_desc, total.item())
    with pytest.raises(UsageError, match="data\\+model; it has pipe, data, model, pipe\\+model"):
        grid.group("data", "model")
    assert grid.along("model") == dist.get_rank() % 2 and grid.along("sequence") == 0
    return found


def test_groups_are_named_by_their_axes_and_hold_their_ranks():
    for rank, found in enumerate(run_ranks(4, _sums)):
        pair = 1.0 if rank < 2 else 5.0
        assert found == {
            "pipe": ("pipe", float(rank)),
            "data": ("data", 2.0 if rank % 2 == 0 else 4.0),
            "model": ("model", pair),
            "pipe+model": ("pipe+model", pair),
        }
