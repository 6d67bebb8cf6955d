"""Test the comparison of jobs whose ranks are divided into groups.

The tests check the bytes per rank of the job and by group, and that unlike sums give no advice.
"""

from pathlib import Path

import pytest

from commprof.analysis import api
from commprof.cli.application import invoke
from support.runs import SyntheticRun

PAIRS = ((0, 1), (2, 3))
ACROSS = ((0, 2), (1, 3))


def run(*issued, **config):
    """Return a run of four ranks and two steps.

    Args:
        issued: (op, payload, groups or None for all ranks, name of the group, purpose) of each operation.
    """
    made = SyntheticRun(4, config={"zero_optimization": {"stage": 2}, "layout": {"kind": "plain", **config}})
    for step in range(2):
        made.add_step(step, duration_ns=1_000_000, loss=2.0)
        for op, payload, groups, name, purpose in issued:
            for number, group in enumerate(groups or [tuple(range(4))]):
                where = {"group": group, "pg": f"{name}{number}", "group_desc": name, "step": step}
                what = {"payload_bytes": payload, "purpose": purpose}
                if op == "send":
                    made.add_collective("send", ranks=group[:1], peer=group[1], **where, **what)
                    made.add_collective("recv", ranks=group[1:], peer=group[0], **where, **what)
                else:
                    made.add_collective(
                        op, peer=group[0] if op in ("reduce", "gather") else -1, **where, **what
                    )
    return made


def opened(*runs):
    return [each.open(Path("traces") / f"run-{number}") for number, each in enumerate(runs)]


FLAT = ("all_reduce", 1000, None, "data", "gradient_reduce")
HALVES = ("all_reduce", 500, ACROSS, "data", "gradient_reduce")
ACTIVATIONS = ("all_reduce", 300, PAIRS, "model", "activation")
STAGES = ("send", 200, PAIRS, "pipe", "pipeline")


def test_wire_bytes_of_a_setting_are_those_of_a_rank_of_the_job():
    frame = api.compare(
        opened(
            run(FLAT, kind="flat"),
            run(HALVES, ACTIVATIONS, kind="shared"),
            run(HALVES, STAGES, kind="stages"),
        )
    )
    # An all_reduce of 4 ranks sends 1.5 x 1000. Two groups of 2 ranks send 1 x 500 and 1 x 300 per rank. Two
    # of 4 ranks issue a send.
    assert frame["wire_bytes_per_step"].tolist() == [1500.0, 800.0, 600.0]
    assert frame["gradient_wire_bytes_per_step"].tolist() == [1500.0, 500.0, 500.0]
    assert frame["wire_send"].tolist() == [0.0, 0.0, 100.0]
    # Payload and counts are for the complete job. Each collective counts once.
    assert frame["payload_bytes_per_step"].tolist() == [1000.0, 1600.0, 1400.0]
    assert frame["collectives_per_step"].tolist() == [1.0, 4.0, 4.0]


@pytest.mark.sampled
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce", "gather", "all_to_all", "send"])
def test_they_are_the_mean_of_what_the_ranks_send(op):
    runs = opened(run((op, 960, PAIRS, "model", "activation"), (op, 480, None, "data", "gradient_reduce")))
    sent = api.rank_bytes(runs)["sent_bytes_per_step"]
    assert sent.sum() / 4 == pytest.approx(api.compare(runs)["wire_bytes_per_step"].item())


@pytest.mark.long
def test_bytes_by_group_add_up_to_those_of_the_setting():
    runs = opened(run(FLAT, kind="flat"), run(HALVES, ACTIVATIONS, STAGES, kind="shared"))
    frame = api.traffic_by_group(runs)
    told = frame[["group_desc", "group_size", "groups", "op", "collectives_per_step", "wire_bytes_per_step"]]
    assert told.to_numpy().tolist() == [
        ["data", 4, 1, "all_reduce", 1.0, 1500.0],
        ["data", 2, 2, "all_reduce", 2.0, 500.0],
        ["model", 2, 2, "all_reduce", 2.0, 300.0],
        ["pipe", 2, 2, "send", 2.0, 100.0],
    ]
    sums = frame.groupby("label", sort=False)["wire_bytes_per_step"].sum()
    assert sums.tolist() == api.compare(runs)["wire_bytes_per_step"].tolist()


@pytest.mark.long
def test_levels_are_of_a_rank_of_the_job_too():
    frame = api.reduction_levels(opened(run(FLAT, kind="flat"), run(HALVES, kind="halves")))
    issued = frame[frame["level"] == "issued"]
    assert issued["wire_bytes_per_step"].tolist() == [1500.0, 500.0]
    assert issued["payload_bytes_per_step"].tolist() == [1000.0, 1000.0]


@pytest.mark.long
def test_jobs_that_share_their_models_in_unlike_ways_get_no_advice():
    found = api.advice(opened(run(FLAT, kind="flat"), run(HALVES, ACTIVATIONS, kind="shared")))
    assert found.answer == "cannot tell"
    assert (
        "use different model parallelism (groups and their sizes: not at all; model 2)." in found.sentences[0]
    )
    assert not found.settings["recommended"].any()
    stages = ("send", 200, ((0, 1, 2, 3),), "pipe", "pipeline")
    other = api.advice(opened(run(HALVES, STAGES, kind="two"), run(FLAT, stages, kind="four")))
    assert "(groups and their sizes: pipe 2; pipe 4)" in other.sentences[0]


@pytest.mark.long
def test_replicas_in_other_groups_do_the_same_work():
    """Gradients that are reduced along two axes send more than gradients that are reduced in one group.

    The advice weighs both by the bytes that a rank sends.
    """
    inner = ("all_to_all", 1000, PAIRS, "axis 1", "gradient_reduce")
    outer = ("all_to_all", 500, ACROSS, "axis 0", "gradient_reduce")
    found = api.advice(opened(run(FLAT, kind="flat"), run(inner, outer, kind="grid")))
    assert found.answer == "recommended"
    # A rank sends 1000 / 2 along one axis and 500 / 2 along the other. The sum over all groups would equal
    # the 1500 of the single group.
    assert found.sentences[0].startswith(
        "Set kind=grid: it sends the least, 750 B on the wire per rank and step"
    )


@pytest.mark.long
def test_of_a_program_without_purposes_any_smaller_group_may_share_its_model():
    plain = ("all_reduce", 1000, None, "default_pg", None)
    shared = ("all_reduce", 300, PAIRS, "TENSOR_MODEL_PARALLEL_GROUP", None)
    found = api.advice(opened(run(plain, kind="flat"), run(plain, shared, kind="shared")))
    assert found.answer == "cannot tell"
    assert "not at all; TENSOR_MODEL_PARALLEL_GROUP 2" in found.sentences[0]


def test_the_command_names_the_groups(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    paths = [
        str(made.write(tmp_path / name))
        for name, made in (("a", run(FLAT, kind="flat")), ("b", run(HALVES, ACTIVATIONS, kind="shared")))
    ]
    assert invoke(["compare", *paths]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    place = next(number for number, line in enumerate(lines) if "wire by group" in line)
    assert lines[place - 1].split() == ["data", "data", "model"]
    assert lines[place].split()[3:] == ["of", "4", "of", "2", "of", "2"]
    assert [line.split()[1:] for line in lines[place + 2 : place + 4]] == [
        ["1.46", "KiB", "0", "B", "0", "B"],
        ["0", "B", "500", "B", "300", "B"],
    ]
    assert "use different model parallelism" in text
