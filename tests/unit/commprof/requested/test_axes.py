"""Test the axes of ranks as given by configurations, engines and hostile files."""

from __future__ import annotations

import pytest

from commprof.ledger.verification import verify
from commprof.requested import RequestedError
from commprof.requested.parallel.axes import Axes, axes_of_config, axes_of_topology
from commprof.requested.parameters import Parameter
from support.runs import SyntheticRun


def test_lines_differ_in_their_axes_alone():
    axes = Axes(("pipe", "data", "model"), (2, 2, 2))
    assert axes.lines("model") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert axes.lines("data", pipe=1) == ((4, 6), (5, 7))
    assert axes.lines("pipe", "model") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert axes.lines("sequence") == tuple((rank,) for rank in range(8))
    assert not axes.only_data and Axes(("data", "model"), (4, 1)).only_data


def test_configs_name_axes_by_several_keys():
    for config in (
        {"tp_size": 2, "pipeline": {"stages": 2}},
        {"tensor_parallel": {"autotp_size": 2}, "pipeline_parallel": {"pp_size": 2}},
        {
            "tensor_parallel": {"tp": {"tp_size": 2}},
            "pipeline": {"stages": 2},
            "pipeline_parallel": {"enabled": True},
        },
    ):
        axes = axes_of_config(config, 8)
        assert [axes.size(name) for name in ("pipe", "data", "sequence", "model")] == [2, 2, 1, 2]
    assert axes_of_config(
        {"pipeline": {"stages": "auto"}, "pipeline_parallel": {"enabled": False, "pp_size": 3}}, 4
    ).only_data


@pytest.mark.parametrize(
    "topology",
    [
        {"data": 2, "model": 2**62},
        {"data": -2, "model": -1},
        {"data": 1, "model": True},
        {"time": 2},
        {"data": 2, "model": "2"},
    ],
)
def test_topologies_that_cannot_be_are_refused(topology):
    with pytest.raises(RequestedError, match="topology"):
        axes_of_topology(topology, 2)


@pytest.mark.parametrize(
    "columns",
    [
        {"stages": "x"},
        {"stages": "7"},
        {"stages": "0,+"},
        {"shape": "axb", "cut": "row"},
        {"whole_shape": "9x-1", "cut": "row"},
    ],
)
def test_what_a_hostile_file_says_of_parameters_is_one_sentence(columns):
    run = SyntheticRun(
        world_size=2,
        config={"zero_optimization": {"stage": 1}, "tp_size": 2},
        effective_config={"topology": {"pipe": 1, "data": 1, "sequence": 1, "model": 2}},
    )
    run.add_parameters({"a.weight": 64})
    run.rows["parameters"][0].update({"shape": "8x8", **columns})
    run.add_step(0)
    run.add_collective("all_reduce", payload_bytes=4, purpose="gradient_norm")
    verdict = verify(run.open())
    assert str(verdict.state) == "unknown" and "parameter" in str(verdict.request_reason)


def test_a_parameter_knows_its_whole():
    found = Parameter("b.qkv.weight", 384, shape="24x16", whole_shape="48x16", cut="column", stages="0,2+")
    assert (found.module, found.extents, found.whole_numel) == ("b.qkv", (24, 16), 768)
    assert found.stage_numbers == (0, 2) and found.is_tied
