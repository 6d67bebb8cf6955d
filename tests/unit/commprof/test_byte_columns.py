"""Padding and traffic between hosts in the answers that add up operations. The numbers are worked out by hand."""

from pathlib import Path

import pandas as pd
import pytest

from commprof.analysis import api
from commprof.cli import execute
from support.runs import SyntheticRun

TRACES = Path("traces")


def training(hosts: dict[int, str], padding: int | None) -> SyntheticRun:
    """Four ranks, three steps: gradients summed by all (1500 wire bytes), parameters gathered by ranks 0 and 1 (10)."""
    run = SyntheticRun(world_size=4)
    run.hosts = hosts
    for step in range(3):
        run.add_step(step, duration_ns=1000, loss=1.0)
        run.add_collective("all_reduce", payload_bytes=1000, step=step, purpose="gradient_reduce")
        run.add_collective(
            "all_gather",
            payload_bytes=20,
            padding_bytes=padding,
            step=step,
            purpose="parameter_gather",
            group=(0, 1),
            pg="1",
        )
    return run


ONE_HOST = dict.fromkeys(range(4), "a")
TWO_HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}


@pytest.mark.parametrize("padding", [None, 0, 8])
def test_a_step_has_its_bytes_between_hosts_and_its_padding(padding: int | None):
    run = training(TWO_HOSTS, padding).open(TRACES / "run")
    times, compared = api.step_times(run), api.compare([run])
    assert times["between_hosts_bytes"].tolist() == [1500] * 3
    assert compared["between_hosts_bytes_per_step"].tolist() == [1500]
    assert compared["wire_bytes_per_step"].tolist() == [1505]  # (10 of 2 ranks) / 4
    facts = api.overview(run)
    assert facts["between_hosts_bytes"] == 4500
    found = [*times["padding_bytes"], *compared["padding_bytes_per_step"], facts["padding_bytes"]]
    if padding is None:
        assert all(map(pd.isna, found))  # nobody says that there is none
    else:
        assert found == [*[padding] * 4, 3 * padding]
    by_purpose = api.traffic_by_setting([run]).set_index("purpose")
    assert by_purpose["between_hosts_bytes_per_step"].to_dict() == {
        "gradient_reduce": 1500,
        "parameter_gather": 0,
    }


def test_on_one_host_nothing_travels_between_hosts():
    run = training(ONE_HOST, None).open(TRACES / "run")
    assert api.step_times(run)["between_hosts_bytes"].tolist() == [0] * 3


@pytest.mark.parametrize(("hosts", "padding"), [(ONE_HOST, 0), (TWO_HOSTS, 8)])
def test_the_report_shows_bytes_between_hosts_and_padding_where_there_are_any(
    tmp_path, capsys, hosts, padding
):
    execute(["report", str(training(hosts, padding).write(tmp_path / "run"))])
    said = capsys.readouterr().out
    head = next(line for line in said.splitlines() if "purpose, operation" in line)
    assert ("between hosts" in head, "padding" in head) == (hosts == TWO_HOSTS, bool(padding))
    assert ("1500 B" in said or "1.46 KiB" in said) and "between hosts: of the wire bytes" in " ".join(
        said.split()
    )
