"""``traffic_contract``: a rank that issues a different message is named, and all ranks stop with one error."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import zero_runtime
from commprof.ledger.verification import verify
from support.command import commprof
from support.process_group_log import logged
from support.ranks import RankError, run_ranks
from support.recording import record
from zero_runtime import ZeroRuntimeError, comm
from zero_runtime.comm import DataParallelGroup
from zero_runtime.groups import traffic_contract
from zero_runtime.groups.contract_messages import (
    History,
    Issued,
    Message,
    Place,
    absence,
    deviation,
    first_difference,
    loss,
)
from zero_runtime.groups.host_processes import HostProcesses
from zero_runtime.groups.traffic_contract import TrafficContract

pytestmark = pytest.mark.ranks

STEPS = 5
POLL_S = traffic_contract._POLL_S
STAGES = {
    2: {"stage": 2, "reduce_bucket_size": 9000},
    3: {"stage": 3, "reduce_bucket_size": 9000, "stage3_param_persistence_threshold": 0},
    "blocks": {"stage": 3, "stage3_gather_unit": "block"},
}


@pytest.fixture(autouse=True)
def _ranks_look_often(monkeypatch):
    """Shorten the interval at which ranks and their threads look for an error.

    Only the time until an error depends on this.
    """
    monkeypatch.setattr(traffic_contract, "_POLL_S", 0.1)
    monkeypatch.setattr(comm, "_PATIENCE", timedelta(seconds=0.5))


class Net(nn.Module):
    """Six equal layers and a head.

    From call ``at`` on, rank 1 skips layer 3, or swaps layers 2 and 3.
    """

    def __init__(self, plant="", rank=0, at=0):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.head = nn.Linear(64, 8)
        self.deviates, self.at, self.calls = plant if rank == 1 else "", at, 0

    def forward(self, x):
        order = list(range(6))
        if self.calls >= self.at:
            if self.deviates == "order":
                order[2], order[3] = order[3], order[2]
            if self.deviates == "left out":
                order.remove(3)
        self.calls += 1
        for number in order:
            x = F.relu(self.layers[number](x))
        return self.head(x).square().mean()


def config(stage, mode, **zero):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {**STAGES[stage], **zero},
        "traffic_contract": mode,
    }


def step(engine):
    engine.backward(engine(torch.ones(4, 64)))
    engine.step()


def planted(rank, world, stage, plant, at, mode="stop"):
    """Return the number of steps that this rank completed, the error, and the seconds until then."""
    begin, done = time.monotonic(), 0
    zero = {"reduce_bucket_size": 5000} if plant == "bucket size" and rank == 1 else {}
    model = Net(plant, rank, at)
    if plant == "parameter" and rank == 1:
        model.head.bias = None
    try:
        engine, *_ = zero_runtime.initialize(model=model, config=config(stage, mode, **zero))
        for number in range(STEPS):
            if plant == "bucket limit" and rank == 1 and number == at:
                engine._gradients._bucketer._limit = 5000
            step(engine)
            done += 1
    except ZeroRuntimeError as error:
        return done, str(error).partition(". Found by rank")[0], time.monotonic() - begin
    return done, "", time.monotonic() - begin


CASES = [
    (2, 2, "order", 0, ("rank 1", "step 0", "bucket 0", "module layers.2", "layers.3.bias of module layers.3")),
    (3, 2, "order", 3, ("rank 1", "step 3", "bucket 0", "module layers.2", "module layers.3", "ranks 0, 2")),
    (2, 2, "left out", 0, ("rank 1", "step 0", "bucket 0", "layers.3.bias of module layers.3")),
    (2, 2, "left out", 2, ("rank 1", "step 2", "bucket 0", "layers.3.bias of module layers.3")),
    (2, 2, "bucket limit", 2, ("rank 1", "step 2", "bucket 0", "4,744 elements", "8,904 elements", "module layers.4")),
    (2, 2, "bucket size", 0, ("reduce_bucket_size is 5000 on rank 1 and 9000 on rank 0", "bucket 0", "step 0")),
    (2, 2, "parameter", 0, ("head.bias of module head is missing on rank 1", "13 parameters", "has 14")),
    (3, 3, "order", 0, ("layers.2", "layers.3")),  # the agreement on modules may detect it first
    (2, 3, "bucket limit", 2, ("rank 1", "step 2", "bucket 0", "4,680 elements", "8,840 elements")),
    (2, 3, "bucket size", 0, ("reduce_bucket_size is 5000 on rank 1 and 9000 on rank 0",)),
]  # fmt: skip


@pytest.mark.sampled("left out-2", "order-0")
@pytest.mark.parametrize(
    ("world", "stage", "plant", "at", "parts"),
    CASES,
    ids=[f"{w} ranks-stage {s}-{p}-{a}" for w, s, p, a, _ in CASES],
)
def test_a_deviation_is_named_and_all_ranks_raise_the_same(world, stage, plant, at, parts):
    found = run_ranks(world, planted, stage, plant, at, timeout=60)
    assert len({text for _, text, _ in found}) == 1
    text = found[0][1]
    assert all(part in text for part in parts), text
    # no update was applied on which the ranks did not agree
    assert [done for done, _, _ in found] == [at] * world
    assert max(seconds for _, _, seconds in found) < 60


def asked_by_both(rank, world):
    """Run :func:`planted` with two threads that act at the same time.

    One thread disputes a message, while the thread of the other rank compares all messages.
    """
    dispute, compare = TrafficContract._dispute, TrafficContract._compare_with_neighbor

    def dispute_while_compared(contract, number):
        while not contract._store.check([contract._key("comparison")]):
            time.sleep(0.01)
        dispute(contract, number)

    def compare_while_agreeing(contract):
        compare(contract)
        if rank == 1 and contract._agreeing and contract._step == 2:
            contract._compare_all()

    TrafficContract._compare_with_neighbor = compare_while_agreeing
    if rank == 0:
        TrafficContract._dispute = dispute_while_compared
    return planted(rank, world, 3, "bucket limit", 2)


def test_ranks_that_ask_each_other_at_once_answer():
    found = run_ranks(2, asked_by_both, timeout=60)
    assert len({text for _, text, _ in found}) == 1
    text = found[0][1]
    assert all(
        part in text for part in ("rank 1", "step 2", "bucket 0", "4,680 elements", "8,840 elements")
    ), text


def uneventful(rank, world, stage):
    """Return the collectives with and without a contract, the losses, and the remaining threads and observers."""
    found = {}
    for mode in ("off", "stop"):
        with logged() as log:
            engine, *_ = zero_runtime.initialize(
                model=Net(), config=config(stage, mode) | {"gradient_accumulation_steps": 2}
            )
            losses = []
            for number in range(STEPS):
                for _ in range(2):
                    loss = engine(torch.full((4, 64), float(number + rank)))
                    engine.backward(loss)
                    engine.step()
                    losses.append(loss.item())
                if number == 2:  # an evaluation sends other messages, on all ranks
                    engine.eval()
                    with torch.no_grad():
                        engine(torch.ones(4, 64))
                    engine.train()
        group = engine._group
        watched = len(group.observers)
        engine.destroy()
        found[mode] = [tuple(call) for call in log.calls], losses, watched, len(group.observers)
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_a_contract_adds_no_message_and_ends_with_the_engine(stage):
    for found in run_ranks(2, uneventful, stage):
        assert found["off"][:2] == found["stop"][:2]
        assert found["off"][2:] == (0, 0)
        assert found["stop"][2:] == (1, 0)


def test_warn_says_it_once_and_goes_on(capfd):
    found = run_ranks(2, planted, 2, "order", 2, "warn")
    assert [(done, text) for done, text, _ in found] == [(STEPS, "")] * 2
    warnings = capfd.readouterr().err
    assert warnings.count("traffic_contract: at step 2") == 1
    assert "layers.2.bias of module layers.2" in warnings


def known(rank, world, what, stage, folder):
    """Deviate on rank 1 in step 3.

    All ranks have sent each of its messages before, after the same previous message.
    """
    released = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0} if stage == 3 else {}
    settings = config(stage, "stop", **released) | {"gradient_accumulation_steps": 2}
    engine, *_ = zero_runtime.initialize(model=Net(), config=settings)
    try:
        for number in range(STEPS):
            deviates = rank == 1 and number == 3
            if what == "checkpoint" and (number == 1 or deviates):
                engine.save_checkpoint(folder)
            if what == "evaluation" and (number in (1, 2) or deviates):
                engine.eval()
                with torch.no_grad():
                    engine(torch.ones(4, 64))
                engine.train()
            for _ in range(2):
                step(engine)
    except ZeroRuntimeError as error:
        return "raised", str(error)
    return "ended", ""


@pytest.mark.parametrize(
    ("what", "world", "stage", "parts"),
    [
        ("checkpoint", 3, 2, ("rank 1 issues barrier for checkpoint", "ranks 0, 2 issue", "in bucket 0")),
        ("evaluation", 2, 3, ("rank 1 issues", "rank 0 issues")),
    ],
)
def test_a_deviation_by_known_messages_is_named(tmp_path, capfd, monkeypatch, what, world, stage, parts):
    """A deviation by known messages is named.

    All ranks may wait in collectives that never fail. They then exit with the message.
    """
    # A comparison may also come before all ranks have reached the message. It then names the ranks that have.
    monkeypatch.setattr(traffic_contract, "_POLL_S", POLL_S)
    begin = time.monotonic()
    try:
        sentences = {text for _, text in run_ranks(world, known, what, stage, str(tmp_path), timeout=60)}
    except RankError as error:
        assert "died with status 2" in str(error)
        sentences = set()
    start = "zero_runtime: error: "
    printed = [each for each in capfd.readouterr().err.splitlines() if each.startswith(start)]
    (sentence,) = {each.removeprefix(start) for each in printed} | sentences
    assert all(part in sentence for part in parts), sentence
    assert time.monotonic() - begin < 30


def started(rank, world, plant):
    """Return the error of a rank in ``initialize``, and the seconds until then.

    Rank 1 starts with different settings.
    """
    begin, settings, model = time.monotonic(), config(2, "stop"), Net()
    if rank == 1:
        if plant == "off":
            settings["traffic_contract"] = "off"
        elif plant == "stage":
            settings["zero_optimization"]["stage"] = 0  # also changes the default of gradient_reduction
        elif plant == "auto":
            settings["zero_optimization"]["reduce_bucket_size"] = "auto"
        elif plant == "key":
            settings["zero_optimization"]["reduce_bucket_sise"] = 1
        elif plant == "argument":
            settings["optimizer"]["params"]["learning"] = 1
        elif plant == "frozen":
            model.head.weight.requires_grad_(False)
    try:
        engine, *_ = zero_runtime.initialize(model=model, config=settings)
        step(engine)
    except (ZeroRuntimeError, RuntimeError) as error:
        if plant == "off" and rank != 1:
            dist.destroy_process_group()  # rank 1 waits for this in its first message
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", 0.0


@pytest.mark.parametrize(
    ("plant", "parts"),
    [
        ("off", ("traffic_contract is 'off' on rank 1 and 'stop' on rank 0", "not all ranks compare")),
        ("stage", ("zero_optimization.stage is 0 on rank 1 and 2 on rank 0",)),
        ("auto", ("zero_optimization.reduce_bucket_size is 'auto' on rank 1 and 9000 on rank 0",)),
        ("key", ("rank 1 has failed", "ConfigError: unknown key", "did you mean", "reduce_bucket_size")),
        ("argument", ("rank 1 has failed", "optimizer.params.learning = 1 is not an argument")),
        ("frozen", ("head.weight of shape [8, 64] in float32, frozen on rank 1", "in float32 on rank 0")),
    ],
)
def test_a_rank_that_starts_differently_is_named_and_nobody_waits_for_it(plant, parts):
    found = run_ranks(3, started, plant, timeout=60)
    for rank in (0, 2):
        kind, text, seconds = found[rank]
        assert kind == "TrafficContractError" and seconds < 15
        assert all(part in text for part in parts), text
    assert found[1][0] == {"off": "RuntimeError", "key": "ConfigError", "argument": "ConfigError"}.get(
        plant, "TrafficContractError"
    )


def killed(rank, world, victim, when, folder):
    settings = config(2, "stop")
    if when == "start" and rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        engine, *_ = zero_runtime.initialize(model=Net(), config=settings)
        for number in range(STEPS):
            if rank == victim and number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if when == "new message" and number == 2:
                engine._group.all_reduce(torch.ones(3))
            step(engine)
    except ZeroRuntimeError as error:
        Path(folder, f"{rank}.txt").write_text(f"{time.monotonic() - begin} {error}")
        raise


@pytest.mark.parametrize("when", ["known message", "new message"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_is_named_on_the_ranks_that_remain(tmp_path, victim, when):
    with pytest.raises(RankError, match=f"rank {victim}: died with status -9"):
        run_ranks(3, killed, victim, when, str(tmp_path), timeout=60)
    files = {path.stem: path.read_text().partition(" ") for path in tmp_path.glob("?.txt")}
    assert sorted(files) == [str(rank) for rank in range(3) if rank != victim]
    for seconds, _, text in files.values():
        assert float(seconds) < 20
        place = (
            "step 1, micro-batch 0, message 5"
            if when == "new message"
            else "step 2, micro-batch 0, message 0"
        )
        assert f"at {place} rank {victim} is gone: its process" in text, text
    assert len({text for _, _, text in files.values()}) == 1


def waited(rank, world):
    """Return the seconds of the step.

    Rank 1 is slow, and rank 0 waits for a message with a time limit.
    """
    settings = config(2, "stop", overlap_comm=True)
    engine, *_ = zero_runtime.initialize(model=Net(), config=settings)
    for _ in range(2):
        step(engine)
    begin = time.monotonic()
    if rank == 1:
        time.sleep(1.0)  # rank 0 looks for an error, and waits again
    step(engine)
    return time.monotonic() - begin


def test_a_slow_rank_delays_the_others_by_no_more_than_its_own_time():
    assert max(run_ranks(2, waited, timeout=60)) < 2.5


def stopped(rank, world, folder, seconds, limit):
    """Stop rank 1 in step 2, and return the steps of each rank and its error."""
    dist.init_process_group(
        "gloo", f"file://{folder}/store", timedelta(seconds=limit), world_size=world, rank=rank
    )
    done = 0
    try:
        engine, *_ = zero_runtime.initialize(model=Net(), config=config(2, "stop"))
        for number in range(STEPS):
            if rank == 1 and number == 2:
                resume = f"sleep {seconds}; kill -CONT {os.getpid()}"
                subprocess.Popen(["sh", "-c", resume], start_new_session=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            step(engine)
            done += 1
    except ZeroRuntimeError as error:
        return done, str(error)
    return done, ""


def test_a_process_that_is_stopped_for_a_while_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(traffic_contract, "_VOTE_S", 1.0)  # shorter than the time for which rank 1 is stopped
    arguments = (3, stopped, str(tmp_path), 2, 60)
    assert run_ranks(*arguments, timeout=60, process_group=False) == [(STEPS, "")] * 3


@pytest.mark.long
def test_a_process_that_is_stopped_beyond_the_time_limit_is_not_said_to_be_gone(tmp_path):
    arguments = (3, stopped, str(tmp_path), 20, 6)
    found = run_ranks(*arguments, timeout=60, process_group=False)
    ((done, text),) = set(found)
    assert done == 2 and "message 0 rank 1 does not answer (process" in text
    assert "is gone" not in text


OVERFLOWS = {
    "stage 1": ({"stage": 1}, 1),
    "stage 2, accumulation": ({"stage": 2, "overlap_comm": True}, 2),
    "stage 3": ({"stage": 3}, 1),
    "stage 3, blocks": (STAGES["blocks"], 1),
}


def overflowing(rank, world, zero, accumulation):
    """Return the skipped steps after each step in fp16.

    The gradients of rank 1 overflow in steps 2, 3 and 5.
    """
    settings = config(2, "stop") | {
        "zero_optimization": zero,
        "gradient_accumulation_steps": accumulation,
        "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1},
    }
    engine, *_ = zero_runtime.initialize(model=Net(), config=settings)
    skipped = []
    for number in range(7):
        for _ in range(accumulation):
            value = 60_000 if rank == 1 and number in (2, 3, 5) else 1
            engine.backward(engine(torch.full((4, 64), value, dtype=torch.half)))
            engine.step()
        skipped.append(engine.skipped_steps)
    return skipped


@pytest.mark.sampled("stage 2, accumulation")
@pytest.mark.parametrize("name", OVERFLOWS)
def test_skipped_steps_are_no_deviation(name):
    assert run_ranks(2, overflowing, *OVERFLOWS[name], timeout=60) == [[0, 0, 1, 2, 2, 3, 3]] * 2


def process(rank, world):
    processes = HostProcesses(dist.distributed_c10d._get_default_store(), "test", rank)
    dist.barrier()
    alive = processes.ended()
    dist.barrier()
    if rank == 1:
        os._exit(0)
    until = time.monotonic() + 10
    while not processes.ended() and time.monotonic() < until:
        time.sleep(0.01)
    return alive, list(processes.ended())


def test_a_process_that_has_ended_is_found_by_the_processes_of_its_host(tmp_path):
    with pytest.raises(RankError, match="rank 1: died with status 0"):
        run_ranks(2, process)


def test_the_first_message_that_differs_is_found_where_histories_overlap():
    def history(first, *messages):
        return History(first, messages, [(0, 0, 0)] * len(messages))

    assert first_difference([history(0, 0, 1, 2, 1), history(0, 0, 1, 2)]) is None
    assert first_difference([history(0, 0, 1, 2, 1), history(2, 2, 3, 1), history(1, 1, 2)]) == 3
    assert first_difference([history(0, 0), history(0)]) is None


def test_sentences_about_ranks_that_are_gone_or_late():
    issued = Issued(Place(7, 1, 4), Message("all_reduce", "norm", None, None, 1, "float32", ()))
    assert loss([1], {1: 4711}, 0, issued) == (
        "traffic_contract: at step 7, micro-batch 1, message 4 rank 1 is gone: its process 4711 has ended, and "
        "rank 0 issues all_reduce of 1 elements (float32) for norm; a process that was killed or crashed cannot "
        "report why; look for its exit status and its last lines (gloo aborts a process that receives another size "
        "than it expects), and check whether the host ran out of memory"
    )
    assert loss([1], {}, 0, issued, {0: 4710, 1: 4711}) == (
        "traffic_contract: at step 7, micro-batch 1, message 4 rank 1 does not answer (process 4711 of this host "
        "exists), and rank 0 issues all_reduce of 1 elements (float32) for norm; a process that is stopped, or "
        "runs code that holds Python's lock, cannot answer; look at its stacks, such as with py-spy dump; if it is "
        "on another host, check whether it was killed"
    )
    assert "message 4 ranks 1, 2 do not answer, and rank 0" in loss([1, 2], {1: 4711}, 0, issued)
    assert "rank 0 is gone: its process has ended, and" in loss([0], {0: None}, 1, issued)
    assert "ranks 1, 2 are gone: their processes 5, 6 have ended, and" in loss(
        [1, 2], {1: 5, 2: 6}, 0, issued
    )
    assert "rank 0 has waited for ranks 1, 2 in all_reduce" in absence([1, 2], 0, issued)


def blocks(rank, world):
    """Train by blocks, with one additional gather on rank 1.

    Parameters are gathered in a group of their own, which also has a contract.
    """
    engine, *_ = zero_runtime.initialize(model=Net(), config=config("blocks", "stop"))
    for _ in range(STEPS):
        step(engine)
    (gathers,) = engine._residency.own_groups
    try:
        if rank == 1:
            gathers.all_gather_single(torch.empty(10), torch.ones(5))
        step(engine)
    except ZeroRuntimeError as error:
        return len(gathers.observers), str(error)
    return len(gathers.observers), ""


def test_the_group_that_gathers_blocks_has_a_contract():
    found = run_ranks(2, blocks, timeout=60)
    assert found[0] == found[1]
    assert found[0][0] == 1
    assert "rank 1 issues all_gather_single of 5 elements" in found[0][1]


def recorded(rank, world):
    engine, *_ = zero_runtime.initialize(model=Net(), config=config(3, "stop"))
    for _ in range(STEPS):
        step(engine)


def test_verify_closes_a_run_with_a_contract(tmp_path):
    run, _ = record(tmp_path / "run", 2, recorded)
    assert verify(run).exit_code == 0


def leaves(rank, world):
    """Raise an error on rank 1 before a new message.

    The contract must not make rank 0 wait for this message.
    """
    engine, *_ = zero_runtime.initialize(model=Net(), config=config(2, "stop"))
    step(engine)
    if rank == 1:
        engine.end_contract()
        dist.destroy_process_group()
        return "left"
    begin = time.monotonic()
    group: DataParallelGroup = engine._group
    try:
        group.all_reduce(torch.ones(3))  # a message that was not sent before
    except RuntimeError:
        pass
    return time.monotonic() - begin


def test_a_rank_that_has_left_is_not_waited_for():
    assert run_ranks(2, leaves, timeout=60)[0] < 30


def lingers(rank, world):
    """Catch the error on rank 1 and stay, so that the collective in which rank 0 waits does not fail."""
    engine, *_ = zero_runtime.initialize(model=Net("order", rank, 2), config=config(2, "stop"))
    try:
        for _ in range(STEPS):
            step(engine)
    except ZeroRuntimeError:
        if rank:
            time.sleep(20)
    return "ended"


@pytest.mark.long
def test_a_rank_that_is_stuck_in_a_collective_exits(capfd):
    with pytest.raises(RankError, match="rank 0: died with status 2"):
        run_ranks(2, lingers, timeout=60)
    assert "zero_runtime: error: traffic_contract: at step 2" in capfd.readouterr().err


PROGRAM = """
import os, sys
import torch
from torch import nn
import zero_runtime

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        layers = [self.first, self.second]
        if os.environ["RANK"] == "1" and self.calls > 2:
            layers = layers[:1]
        for layer in layers:
            x = layer(x).relu()
        return self.head(x).square().mean()

engine, *_ = zero_runtime.initialize(model=Net(), config={
    "train_micro_batch_size_per_gpu": 4, "traffic_contract": "stop", "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 5000}})
for _ in range(5):
    engine.backward(engine(torch.ones(4, 64)))
    engine.step()
"""


def test_a_program_ends_with_the_sentence_and_a_non_zero_exit_code(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    begin = time.monotonic()
    result = commprof("run", "--nproc", "2", "--out", "run", "train.py", cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert "traffic_contract: at step 2, micro-batch 0, message 0 rank 1 issues" in result.stderr
    assert "module second" in result.stderr
    assert "Traceback" not in result.stderr
    assert time.monotonic() - begin < 60


LEAVER = """
import os, sys
from pathlib import Path
import torch
from torch import nn
import zero_runtime

leaver, how = int(sys.argv[1]), sys.argv[2]
rank = int(os.environ["RANK"])
torch.manual_seed(0)
engine, *_ = zero_runtime.initialize(model=nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), config={
    "train_micro_batch_size_per_gpu": 4, "traffic_contract": "stop", "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 2}})
try:
    for step in range(6):
        if rank == leaver and step == 3:
            if how == "skips":
                continue
            if how == "raises":
                raise ValueError("no more data")
            break
        engine.backward(engine(torch.ones(4, 64)).square().mean())
        engine.step()
except zero_runtime.TrafficContractError as error:
    Path(f"{rank}.txt").write_text(str(error))
    raise
if how == "destroys":
    torch.distributed.destroy_process_group()
"""


@pytest.mark.sampled("ends-1", "raises-0")
@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("how", ["ends", "raises", "skips", "destroys"])
def test_a_rank_that_is_gone_is_named_on_all_ranks_that_remain(tmp_path, how, leaver):
    (tmp_path / "train.py").write_text(LEAVER)
    result = commprof("run", "--nproc", "3", "--out", "run", "train.py", str(leaver), how, cwd=tmp_path)
    # The exit code is that of the rank that failed first.
    assert result.returncode == (1 if how == "raises" else 2), result.stderr
    sentences = {path.stem: path.read_text() for path in tmp_path.glob("?.txt")}
    assert sorted(sentences) == [str(rank) for rank in range(3) if rank != leaver], result.stderr
    (sentence,) = set(sentences.values())
    at, last = (5, 4) if how == "skips" else (3, 2)
    assert f"traffic_contract: at step {at}, micro-batch 0, message 0 rank {leaver} is gone" in sentence
    assert f"its last message is of step {last}" in sentence
    assert sentence in result.stderr
    assert "Connection closed" not in result.stderr and result.stderr.count("Traceback") == (how == "raises")


def test_the_sentence_names_what_most_ranks_do():
    """The error names the message that most ranks have, and the rank that differs.

    The messages are written by hand. Rank 2 of 4 has another message, and one rank did not report its
    message.
    """
    usual = Message("all_reduce", "gradient_reduce", 3, None, 100, "float32", ("a.weight", "a.bias"))
    other = usual._replace(numel=60, parameters=("a.weight",))
    place = Place(7, 1, 4)
    text = deviation({0: Issued(place, usual), 2: Issued(place, other), 3: Issued(place, usual)})
    assert text == (
        "traffic_contract: at step 7, micro-batch 1, message 4 rank 2 issues all_reduce of 60 elements (float32) for "
        "gradient_reduce in bucket 3 with a.weight, and ranks 0, 3 issue all_reduce of 100 elements (float32) for "
        "gradient_reduce in bucket 3 with a.weight, a.bias; a.bias of module a is missing on rank 2; every rank must run "
        "the same modules in the same order with the same configuration"
    )
    issued = Issued(place, usual)
    assert Issued.of(issued.text) == issued
    wider = deviation({0: issued, 1: Issued(place, usual._replace(dtype="bfloat16"))})
    assert "they differ first in dtype: bfloat16 on rank 1, float32 on rank 0" in wider
    moved = deviation({0: issued, 1: Issued(place, Message("barrier", "other", None, None, 0, "", ()))})
    assert "rank 1 is at no module, rank 0 at module a" in moved


def group_of(rank, world):
    group = DataParallelGroup(dist.new_group([0, 1]))

    class Observer:
        methods = ("all_reduce",)

        def observe(self, call, issue):
            seen.append(call.method)
            return issue()

    seen, first, second = [], Observer(), Observer()
    group.observe(first)
    group.observe(second)
    group.all_reduce(torch.ones(1))
    group.forget(first)
    group.all_reduce(torch.ones(1))
    group.forget(second)
    group.all_reduce(torch.ones(1))
    return seen


def test_a_forgotten_observer_sees_no_more_calls():
    assert run_ranks(2, group_of) == [["all_reduce"] * 3] * 2
