"""Test ``python -m zero_runtime.launch``: how DeepSpeed's launcher arguments are translated."""

from __future__ import annotations

import pytest

from zero_runtime import launch, launch_rank
from zero_runtime.errors import ConfigError


def planned(*words: str, visible: int = 0, hostname: str = "here") -> launch.Plan:
    return launch.plan(launch.parser().parse_args([*words, "train.py"]), visible, hostname)


def test_ranks_are_counted_by_argument_then_by_gpus_then_one():
    assert planned("--num_gpus", "3").slots == (0, 1, 2)
    assert planned("--num_accelerators", "2").slots == (0, 1)
    assert planned(visible=4).slots == (0, 1, 2, 3)
    assert planned().slots == (0,)
    assert planned().port == 29500 and planned("--master_port", "5").port == 5


def test_devices_are_chosen_by_name():
    assert planned("--include", "localhost:1,3", visible=4).slots == (1, 3)
    assert planned("-i", "here:2", visible=4).slots == (2,)
    assert planned("--exclude", "localhost:0", visible=3).slots == (1, 2)
    chosen = planned("--include", "localhost:1,3", visible=4)
    assert launch.variables(chosen, {})["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert launch.variables(chosen, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})["CUDA_VISIBLE_DEVICES"] == "5,7"
    assert launch.variables(planned("--num_gpus", "2", visible=4), {}) == {
        "OMP_NUM_THREADS": "1",
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "LOCAL_SIZE": "2",
    }


def test_a_hostfile_of_one_host(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("# ours\n\nworker-0 slots=4  # four\n")
    assert planned("--hostfile", str(path)).slots == (0, 1, 2, 3)
    assert planned("--hostfile", str(path), "--include", "worker-0:1").slots == (1,)
    assert launch.read_hosts(str(path)) == {"worker-0": 4}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--num_gpus", "0"], "numbers from 1"),
        (["--num_gpus", "2", "--include", "localhost:0"], "give one of the two"),
        (["--num_gpus", "9"], "this host has 4"),
        (["--include", "elsewhere:0"], "names host elsewhere"),
        (["--include", "localhost:0@other:1"], "--no_ssh"),
        (["--include", "localhost:x"], "not a choice of devices"),
        (["--exclude", "localhost:0,1,2,3"], "leaves no device"),
        (["--num_nodes", "2"], "--no_ssh --num_nodes 2"),
        (["--no_ssh", "--num_nodes", "2"], "needs --num_nodes, --node_rank from 0 to 1"),
        (["--autotuning", "run"], "commprof sweep"),
        (["--elastic_training"], "max-restarts"),
        (["--force_multi"], "this host only"),
        (["--module", "--no_python"], "give one of them"),
        (["--hostfile", "no_such_file"], "cannot be read"),
    ],
)
def test_what_cannot_be_is_one_clear_error(words, said):
    with pytest.raises(ConfigError, match=said) as refusal:
        planned(*words, visible=4)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("worker slots=2\nother slots=2\n", "not started over ssh"),
        ("worker\n", "line 1: 'worker'"),
        ("worker slots=2\nworker slots=2\n", "twice"),
        ("# nothing\n", "names no host"),
    ],
)
def test_hostfiles_that_cannot_be_used(tmp_path, text, said):
    path = tmp_path / "hostfile"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        planned("--hostfile", str(path))


def test_one_of_several_hosts():
    found = planned(
        "--no_ssh", "--num_nodes", "2", "--node_rank", "1", "--master_addr", "10.0.0.1", "--num_gpus", "2"
    )
    command = launch.torchrun_command(found, launch.parser().parse_args(["train.py", "--lr", "1"]))
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--nproc-per-node=2"} < set(command)
    assert command[-4:] == ["--", "train.py", "--lr", "1"]


def test_the_command_says_how_the_script_is_started():
    def words(*given: str) -> list[str]:
        parsed = launch.parser().parse_args([*given])
        return launch.torchrun_command(launch.plan(parsed, 0, "here"), parsed)

    assert "--kind=module" in words("--module", "package.train")
    assert "--kind=program" in words("--no_python", "./run.sh")
    assert "--no-local-rank" in words("--no_local_rank", "train.py")
    assert "--cores=0-3" in words("--bind_core_list", "0-3", "train.py")
    assert "--cores=all" in words("--bind_cores_to_rank", "train.py")
    logged = words("--enable_each_rank_log", "logs", "train.py")
    assert logged[logged.index("--log-dir") + 1] == "logs"
    # All arguments after the script belong to the script, whatever they are.
    assert words("train.py", "--num_gpus", "7", "-q")[-4:] == ["train.py", "--num_gpus", "7", "-q"]


def test_cores_are_shared_out():
    assert launch_rank.cores("0-2,8") == [0, 1, 2, 8]
    assert launch_rank.share([0, 1, 2, 8, 9], 1, 2) == [2, 8]
    with pytest.raises(ConfigError, match="'x' is no core"):
        launch_rank.cores("0,x")
    with pytest.raises(ConfigError, match="cannot be bound to 3 ranks"):
        launch_rank.share([0, 1], 0, 3)


def test_hosts_started_by_hand_count_each_other_in_the_hostfile(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("worker-0 slots=2\nworker-1 slots=2\n")
    words = ("--hostfile", str(path), "--no_ssh", "--node_rank", "1", "--master_addr", "10.0.0.1")
    found = planned(*words)
    assert (found.hosts, found.host, found.slots) == (2, 1, (0, 1))


def test_hosts_of_accelerate_are_one_clear_error():
    given = launch.parser().parse_args(["--launcher", "openmpi", "train.py"])
    launch.refuse_hosts_of_accelerate(given, {})
    with pytest.raises(ConfigError, match=r"deepspeed_multinode_launcher openmpi .* standard"):
        launch.refuse_hosts_of_accelerate(given, {"ACCELERATE_USE_DEEPSPEED": "true"})
