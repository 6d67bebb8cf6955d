"""Test which rank a process has according to the variables of a launcher."""

import pytest

from commprof.recorder.process.placement import is_unique, job_id, place

SRUN = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    ("variables", "rank", "world_size"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, 1, 2),
        ({"RANK": "0", "WORLD_SIZE": "1"}, 0, 1),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, 3, 4),
        ({"PMI_RANK": "1", "PMI_SIZE": "8"}, 1, 8),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "8"}, 1, 8),
        (SRUN, 3, 4),
        # The number is from the job step, because the allocation has a different number.
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "8"}, 3, 8),
        ({**SRUN, "RANK": "7", "WORLD_SIZE": "16"}, 7, 16),  # torchrun is started by srun.
        # The daemons of Open MPI are started by Slurm.
        ({**SRUN, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, 1, 2),
    ],
)
def test_launchers_number_their_processes(variables, rank, world_size):
    assert place(variables)[:2] == (rank, world_size)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"RANK": "1"},
        {"RANK": "first", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        # These are the variables of a batch script.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"},
        {**SRUN, "SLURM_STEP_ID": "4294967290"},  # These are the variables of an interactive shell.
        {**SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},  # The command is srun --pty bash.
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_what_is_no_rank(variables):
    assert place(variables) is None


def test_jobs_with_a_name_of_their_own():
    assert job_id({}) is None
    assert job_id({"TORCHELASTIC_RUN_ID": "none"}) is None
    assert job_id({"TORCHELASTIC_RUN_ID": "my job/7"}) == "my_job_7"
    made_up = {"TORCHELASTIC_RUN_ID": "b5c9d1f0-3a4e-4f6b-9c1d-0123456789ab"}
    # With one host, a time is more useful to a user than this generated id.
    assert job_id({**made_up, "GROUP_WORLD_SIZE": "1"}) is None
    # This id is equal on all hosts.
    assert job_id({**made_up, "GROUP_WORLD_SIZE": "2"}) == made_up["TORCHELASTIC_RUN_ID"]
    assert job_id(SRUN) == "slurm-77.2"
    assert job_id({**SRUN, "SLURM_RESTART_COUNT": "1"}) == "slurm-77.2-1"
    assert job_id({"OMPI_COMM_WORLD_RANK": "0", "PMIX_NAMESPACE": "prterun-a-12@1"}) == "mpi-prterun-a-12_1"
    assert is_unique(SRUN) and not is_unique({"TORCHELASTIC_RUN_ID": "mine"})


def test_ranks_of_torchrun_on_several_hosts_share_the_place_where_they_meet():
    several = {"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    assert job_id({**several, "MASTER_ADDR": "10.0.0.7"}) == "10.0.0.7-29500"
    assert job_id({**several, "MASTER_ADDR": "fe80::1%eth0"}) == "fe80_1_eth0-29500"
    assert job_id(several) is None
    # With one host, a time is more useful than this id.
    assert job_id({**several, "MASTER_ADDR": "10.0.0.7", "GROUP_WORLD_SIZE": "1"}) is None
    assert job_id({"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}) is None
    assert job_id({**several, **SRUN, "MASTER_ADDR": "10.0.0.7"}) == "slurm-77.2"  # No later job has this id.
