"""Four hosts with a rank each: the interfaces sent the bytes of the executed operations.

The tests also show that gloo runs an all_reduce for a reduce_scatter. The expected factors are written here
by hand from the algorithms, and not taken from the package under test. A ring sends a chunk of S/n to one
neighbor in each of its n-1 rounds.
"""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from commprof.trace.reader import open_run
from support import hosts as network
from support.command import commprof, output
from support.warm_hosts import run_commprof_on_each

ROOT = Path(__file__).parents[3]
HOSTS = 4
TOLERANCE = 0.02
WHY_NOT = network.why_impossible()

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]

# Each step is one collective between two barriers, so that the collective is complete when the counters are
# read.
PLAIN = """
import torch, torch.distributed as dist
from commprof import hooks

dist.init_process_group("gloo")
world, rank = dist.get_world_size(), dist.get_rank()
whole, part = torch.ones(2**20), torch.ones(2**18)
calls = [
    lambda: dist.all_reduce(whole),
    lambda: dist.reduce_scatter_tensor(part, whole),
    lambda: dist.all_gather_into_tensor(whole, part),
    lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
]
for call in calls:  # connections are made at the first use
    call()
for step, call in enumerate(call for call in calls for _ in range(3)):
    dist.barrier()
    hooks.step(step)
    call()
    dist.barrier()
hooks.step(step + 1)
dist.destroy_process_group()
"""
PLAIN_BYTES = 4 * 2**20
# The bytes that a rank sends for S bytes. The reduce-scatter and the all-gather of a ring take (n-1)/n S
# each.
PLAIN_STEPS = {
    "all_reduce": (range(3), 2 * (HOSTS - 1) / HOSTS),
    "reduce_scatter": (range(3, 6), 2 * (HOSTS - 1) / HOSTS),  # gloo runs an all_reduce instead
    "all_gather": (range(6, 9), (HOSTS - 1) / HOSTS),
    "all_to_all": (range(9, 12), (HOSTS - 1) / HOSTS),
}

ZERO = """
import sys
import torch, torch.distributed as dist
import zero_runtime

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)))
engine, *_ = zero_runtime.initialize(
    model=model, model_parameters=model.parameters(), config=sys.argv[sys.argv.index("--config") + 1]
)
dist.barrier()
for _ in range(3):
    loss = engine(torch.randn(2, 1024)).square().mean()
    engine.backward(loss)
    engine.step()
dist.barrier()
dist.destroy_process_group()
"""
# The bytes of the gradients, which are also the bytes of the parameters.
ZERO_BYTES = 4 * 4 * 1024 * 1024
GATHER = (HOSTS - 1) / HOSTS  # for the updated parameters
ZERO_FACTORS = {
    "all_reduce": 2 * (HOSTS - 1) / HOSTS,
    "multi_rank_all_reduce": 2 * (HOSTS - 1) / HOSTS,
    # A reduce-scatter, after which all ranks but the owner send their parts to the owner. The factor is the
    # mean over the ranks.
    "reduce_to_owner": (HOSTS - 1) / HOSTS + (HOSTS - 1) / HOSTS**2,
    "reduce_scatter": (HOSTS - 1) / HOSTS,  # an all_to_all and a sum
}


def record(directory, program, *arguments):
    """Run ``program`` on every host, one rank each, into one shared directory.

    Returns the directory, and for the name of each host the number of bytes that it sent more than once.
    """
    script = directory / "train.py"
    script.write_text(textwrap.dedent(program))
    run = directory / "run"
    with network.hosts(HOSTS) as machines:
        words = ["run", "--wire", "--out", str(run), str(script), *arguments]
        run_commprof_on_each(machines, words, directory)
        return run, {machine.name: network.resent_bytes(machine) for machine in machines}


def agree(sent, expected, resent):
    """Return whether ``sent`` equals ``expected``.

    Up to ``resent`` bytes more are accepted.
    """
    return expected * (1 - TOLERANCE) <= sent <= expected * (1 + TOLERANCE) + resent


def sent_until(run, host):
    """Return for each step the bytes that ``host`` had sent when the step ended."""
    rows = open_run(run).table("wire").to_pylist()
    return {
        row["step"]: row["sent_bytes"]
        for row in rows
        if row["host"] == host and row["device"] == network.INTERFACE and row["step"] is not None
    }


def verify(run):
    """Return the exit code and the output of ``commprof verify``, joined into one line."""
    done = commprof("verify", run, cwd=run.parent, env=dict(os.environ))
    assert "Traceback" not in done.stderr
    return done.returncode, " ".join(done.stdout.split())


def agreements(text):
    """Return for each host the ratio of sent to modelled bytes that verify reports."""
    found = re.findall(
        r"Host (\S+) sent [\d,]+ bytes through eth0 .*?: ([\d.]+) times the [\d,]+ modelled", text
    )
    return {host: float(ratio) for host, ratio in found}


def test_the_interfaces_send_what_was_executed(tmp_path):
    run, resent = record(tmp_path, PLAIN)
    opened = open_run(run)
    assert (opened.health.ranks_recorded, opened.health.lost, opened.health.unseen) == (HOSTS, 0, 0)
    assert {entry["host"] for entry in opened.manifest.ranks} == set(resent)
    for name in resent:
        sent = sent_until(run, name)
        assert sorted(sent) == list(range(-1, 13))
        for op, (steps, factor) in PLAIN_STEPS.items():
            moved = sent[steps[-1]] - sent[steps[0] - 1]
            expected = len(steps) * factor * PLAIN_BYTES
            assert agree(moved, expected, resent[name]), (name, op, moved, expected, resent)
    code, text = verify(run)
    assert code == 3  # the run does not contain what was requested
    assert "ran reduce_scatter as all_reduce: 1.50 instead of 0.75" in text
    assert set(agreements(text)) == set(resent)
    modelled = sum(len(steps) * factor for steps, factor in PLAIN_STEPS.values()) * PLAIN_BYTES
    assert all(agree(ratio, 1, resent[name] / modelled) for name, ratio in agreements(text).items()), text


@pytest.mark.long
@pytest.mark.parametrize("reduction", ZERO_FACTORS)
def test_zero_stage_2_moves_what_its_reduction_executes(tmp_path, reduction):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2, "gradient_reduction": reduction, "reduce_bucket_size": 1_048_576},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    run, resent = record(tmp_path, ZERO, "--config", "ds.json")
    totals = {}
    for name in resent:
        sent = sent_until(run, name)
        assert sorted(sent) == [-1, 0, 1, 2]
        totals[name] = sent[2] - sent[-1]
    expected = 3 * (ZERO_FACTORS[reduction] + GATHER) * ZERO_BYTES
    assert agree(sum(totals.values()), HOSTS * expected, sum(resent.values())), (totals, expected, resent)
    code, text = verify(run)
    assert code == 0, text
    assert "100.000 % of the issued payload is explained" in text
    assert set(agreements(text)) == set(resent)
    assert all(agree(ratio, 1, resent[name] / expected) for name, ratio in agreements(text).items()), text


CALLS, CALL_BYTES = 16, 1_000_000
# One host has rank 0 and the other does not. Each rank starts a real Python interpreter.
READ_HOSTS = 2
SENDS = """
import os, signal, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
tensor = torch.ones(250_000)
for number in range(16):
    dist.all_reduce(tensor)
if len(sys.argv) > 1:  # a job that is killed, the last two of its steps after the last reading
    from commprof import hooks
    for step in range(4):
        hooks.step(step)
        dist.all_reduce(tensor)
        dist.barrier()
        time.sleep(0.6 if step < 2 else 0)
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""
LAUNCHES = {
    "commprof run on each host": (["-m", "commprof", "run", "--out", "run"], {}),
    "COMMPROF=1 on each host": ([], {"COMMPROF": "1", "COMMPROF_OUT": "run"}),
}


def sent_by_the_kernel(machine):
    """Return the bytes that the interface of a host sent, as ip(8) reads them over netlink."""
    words = ["ip", "-n", machine.name, "-s", "-j", "link", "show", "dev", network.INTERFACE]
    (link,) = json.loads(subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout)
    return link["stats64"]["tx"]["bytes"]


def run_each(directory, machines, launch, *arguments, program=SENDS):
    """Run ``program`` on every host with the launch method ``launch``.

    Returns for each host the bytes that its interface sent during the run, and the exit codes.
    """
    (directory / "train.py").write_text(program)
    words, variables = LAUNCHES[launch]
    before = {machine.name: sent_by_the_kernel(machine) for machine in machines}
    ranks = [
        machine.start(
            [sys.executable, *words, "train.py", *arguments],
            {**network.environment(machines, rank), **variables},
            cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for rank, machine in enumerate(machines)
    ]  # fmt: skip
    codes = [rank.wait(timeout=200) for rank in ranks]
    return {machine.name: sent_by_the_kernel(machine) - before[machine.name] for machine in machines}, codes


def reported(run):
    """Return for each host the megabytes that ``commprof report`` prints as sent through eth0, and the whole text."""
    rows = json.loads(output("report", run, "--json", cwd=run.parent, env=dict(os.environ)))
    moved = [row for row in rows["moved"] if row["device"] == network.INTERFACE]
    text = output("report", run, cwd=run.parent, env=dict(os.environ))
    return {row["host"]: row["sent_bytes"] for row in moved}, " ".join(text.split())


@pytest.mark.sampled("COMMPROF=1 on each host")
@pytest.mark.parametrize("launch", LAUNCHES)
def test_the_readings_of_every_host_cover_its_whole_run(tmp_path, launch):
    with network.hosts(READ_HOSTS) as machines:
        truth, codes = run_each(tmp_path, machines, launch)
    assert codes == [0] * READ_HOSTS
    sent, text = reported(tmp_path / "run")
    assert set(sent) == set(truth)
    least = CALLS * CALL_BYTES * 2 * (READ_HOSTS - 1) / READ_HOSTS
    for host, moved in sent.items():
        # Before the first reading and after the last, only the rendezvous of the ranks sends bytes.
        assert least <= moved <= truth[host], (host, moved, truth)
        assert truth[host] - moved < CALL_BYTES / 4, (host, moved, truth)
    assert "Not the complete run" not in text
    _, verdict = verify(tmp_path / "run")
    assert verdict.count("over the whole run (counters of the whole host)") == READ_HOSTS
    assert "is not known: its counters" not in verdict


@pytest.mark.long
@pytest.mark.parametrize("launch", LAUNCHES)
def test_zero_stage_2_without_readings_at_steps_has_the_bytes_of_every_host(tmp_path, launch):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1_048_576},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    with network.hosts(HOSTS) as machines:
        truth, codes = run_each(tmp_path, machines, launch, "--config", "ds.json", program=ZERO)
        resent = {machine.name: network.resent_bytes(machine) for machine in machines}
    assert codes == [0] * HOSTS
    sent, text = reported(tmp_path / "run")
    assert set(sent) == set(truth)
    of_steps = 3 * (ZERO_FACTORS["multi_rank_all_reduce"] + GATHER) * ZERO_BYTES
    for host, moved in sent.items():
        assert of_steps <= moved <= truth[host], (host, moved, truth)
        assert truth[host] - moved < 100_000, (host, moved, truth)  # only the rendezvous of the ranks
    assert "Not the complete run" not in text
    code, verdict = verify(tmp_path / "run")
    assert code == 0, verdict
    assert verdict.count("over the whole run (counters of the whole host)") == HOSTS
    ratios = agreements(verdict)
    assert set(ratios) == set(truth)
    assert all(agree(ratio, 1, resent[host] / of_steps) for host, ratio in ratios.items()), verdict


@pytest.mark.long
@pytest.mark.alone
def test_of_a_job_that_is_killed_it_is_said_that_the_last_reading_is_one_at_an_interval(tmp_path):
    with network.hosts(2) as machines:
        truth, codes = run_each(tmp_path, machines, "COMMPROF=1 on each host", "killed")
    assert all(codes)
    for file in (tmp_path / "run").glob(
        "rank-*"
    ):  # as if it were later, since this host cannot query the other hosts
        os.utime(file, (0, 0))
    sent, text = reported(tmp_path / "run")
    for host, moved in sent.items():
        assert CALLS * CALL_BYTES <= moved < truth[host] - CALL_BYTES, (sent, truth)
        assert f"host {host}: its last reading was taken" in text
    assert "had issued its last collective" in text
    _, verdict = verify(tmp_path / "run")
    assert verdict.count("not compared: its last reading was taken") == 2
