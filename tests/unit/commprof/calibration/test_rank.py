"""Test how a calibrating process derives its rank from the variables of launchers."""

import pytest

from commprof.calibration.calibration_sweep import Member
from commprof.calibration.rank import member_of

TORCHRUN = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}


def slurm(node: str, listed: str) -> dict[str, str]:
    return {"SLURM_LOCALID": "1", "SLURM_NODEID": node, "SLURM_STEP_TASKS_PER_NODE": listed}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, (1, 8)),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, (1, 8)),
        ({"MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "8"}, (1, 8)),
        ({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "8"}, (1, 8)),
        (slurm("1", "8(x2)"), (1, 8)),
        (slurm("2", "4(x2),6,2"), (1, 6)),
        (TORCHRUN | slurm("0", "1(x2)"), (1, 8)),
        # Values that are impossible for this job are ignored.
        (slurm("0", "8"), (1, 16)),
        (slurm("2", "8(x2)"), (1, 16)),
        (slurm("0", "8(2x)"), (1, 16)),
        ({}, (9, 16)),
    ],
)
def test_ranks_of_a_host(variables, expected):
    assert member_of(variables, 9, 16) == Member(9, 16, *expected)
