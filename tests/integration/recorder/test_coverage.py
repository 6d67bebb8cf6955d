"""Every collective of every kind of program is recorded exactly once.

The tests compare lists derived by hand, torch's Flight Recorder, and complete mode.
"""

from __future__ import annotations

import _thread
import functools
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from commprof.trace.rank_files.flight_entries import OPERATIONS
from commprof.trace.reader import open_run
from support import programs
from support.programs import LAYER, PROGRAMS, WIDTH
from support.ranks import device, run_ranks
from support.recording import calls, record, recorded

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

# The names of gloo operations in torch's Flight Recorder.
EXECUTED = {"reduce_scatter": "all_reduce"}
MODES = ("layers", "complete")


def has_kernel(operator: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, "BackendSelect")


def run_programs(rank: int, world: int, directory: str, cases: tuple[str, ...]) -> dict[str, dict]:
    """Run the ``cases`` (a program and a recording mode) in one process, each with its own recording."""
    outcomes = {}
    warnings.simplefilter("ignore")
    for program in PROGRAMS:
        for mode in MODES:
            case = f"{program.name}-{mode}"
            if case not in cases:
                continue
            options = {"complete": mode == "complete"}
            try:
                outcomes[case] = recorded(rank, world, f"{directory}/{case}", program.body, (), options)
            except Exception:
                outcomes[case] = {"error": traceback.format_exc()}  # the other cases run even if one fails
    return outcomes


@functools.cache
def recordings(cases: tuple[str, ...]):
    directory = Path(tempfile.mkdtemp())
    outcomes = run_ranks(programs.WORLD, run_programs, str(directory), cases)[0]
    return {case: (open_run(directory / case), outcome) for case, outcome in outcomes.items()}


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_each_collective_of_a_program_is_recorded_once(cases_that_run, program, mode):
    run, outcome = recordings(cases_that_run)[f"{program.name}-{mode}"]
    assert "error" not in outcome, outcome["error"]
    rows = calls(run, 0, "op", "payload_bytes")
    assert [op for op, _ in rows] == [op for op, _ in program.expected]
    told = zip(rows, program.expected, strict=True)
    assert all(found == known for (_, found), (_, known) in told if known is not None), rows
    assert len(calls(run, 1, "op")) == len(rows)
    assert run.health.unseen == run.health.lost == run.health.raised == 0
    # A loaded machine may leave clocks uncompared, and may truncate the list of the Flight Recorder.
    notes = [note for note in run.health.notes if "clock" not in note and "Flight Recorder" not in note]
    assert [note for note in notes if "timed on the device" not in note] == []
    sites = calls(run, 0, "call_site")
    # For the GPU, autograd has a thread of its own, which no line of the program calls.
    if device() == "cuda":
        sites = [
            site
            for site, thread in zip(sites, calls(run, 0, "thread"), strict=True)
            if thread == "MainThread"
        ]
    assert all("support/programs.py:" in site for site in sites)
    assert set(calls(run, 0, "status")) == {"ok"}
    assert set(calls(run, 0, "thread")) <= {
        "MainThread",
        "other",
        *(["native-1"] if device() == "cuda" else []),
    }
    assert all(issued < returned for issued, returned in calls(run, 0, "issue_ns", "return_ns"))
    if program.flight:
        flights = outcome["flights"]
        if device() == "cuda":
            flights, executed = [OPERATIONS[name.lstrip("_")].value for name in flights], {}
        else:
            executed = EXECUTED
        assert flights == [executed.get(op, op) for op, _ in rows]
        assert outcome["number"] == len(rows)
    layers = program.layers if mode == "layers" else {"c10d"} | (program.layers & {"backend"})
    assert set(calls(run, 0, "layer")) == layers


@pytest.mark.long
def test_what_inductor_makes_of_a_program_is_recorded_once(tmp_path):
    def body(rank, world):
        import torch._inductor.config

        torch._inductor.config.compile_threads = 1
        programs.run_compiled(rank, world, "inductor")

    for complete in (False, True):
        run, outcomes = record(tmp_path / f"run-{complete}", 2, body, complete=complete)
        assert calls(run, 0, "op", "payload_bytes") == programs.COMPILED
        assert set(calls(run, 0, "layer")) == {"c10d" if complete else "functional"}
        assert outcomes[0]["flights"] == [op for op, _ in programs.COMPILED]
        assert run.health.unseen == 0


@pytest.mark.sampled
@pytest.mark.parametrize("complete", [False, True])
def test_what_a_thread_without_python_issues_is_recorded(tmp_path, complete):
    """Collectives issued by a thread without Python frames are recorded.

    Autograd runs the backward pass of a GPU on such a thread, where DDP's reducer issues its reductions.
    """

    def body(rank, world):
        programs.train(programs.ddp(), 1)  # from here on the c10d operators are recorded
        group = dist.group.WORLD
        x, y = torch.full((5,), float(rank)), torch.ones(7)
        for name, arguments, is_done in (
            ("c10d::broadcast_", ([x], group.boxed(), 1, 0, False, -1), lambda: bool((x == 1).all())),
            ("_c10d_functional::all_reduce_", (y, "sum", group.group_name), lambda: bool((y == 2).all())),
        ):
            call, _ = torch._C._jit_get_operation(name)
            number = group._get_sequence_number_for_group()
            _thread.start_new_thread(call, arguments)
            deadline = time.monotonic() + 60
            # On the root the value exists before the call, so the call must also have been issued.
            while group._get_sequence_number_for_group() == number or not is_done():
                assert time.monotonic() < deadline
                time.sleep(0.01)

    run, _ = record(tmp_path / "run", 2, body, complete=complete)
    rows = calls(run, 0, "op", "payload_bytes", "call_site")[-2:]
    assert rows == [("broadcast", 20, None), ("all_reduce", 28, None)]
    assert run.health.unseen == run.health.lost == run.health.raised == 0


@pytest.mark.long
def test_no_kernel_stands_before_an_operator_until_a_program_needs_it(tmp_path):
    def body(rank, world):
        import commprof

        wrapped = dist.ProcessGroup.allreduce
        seen = [has_kernel("c10d::allreduce_")]
        dist.all_reduce(torch.ones(2))
        seen.append(has_kernel("c10d::allreduce_"))
        programs.train(programs.ddp(), 1)
        seen += [has_kernel("c10d::allreduce_"), has_kernel("c10d::reduce_")]
        commprof.detach()
        seen += [has_kernel("c10d::allreduce_"), has_kernel("_c10d_functional::all_reduce")]
        dist.all_reduce(torch.ones(2))
        return seen, dist.ProcessGroup.allreduce is wrapped

    run, outcomes = record(tmp_path / "run", 2, body)
    assert outcomes[0]["result"] == ([False, False, True, False, False, False], False)
    assert calls(run, 0, "layer").count("process_group") == 1  # the call after detaching is not recorded


def test_a_gap_that_the_group_itself_tells_of_is_closed_and_said(tmp_path):
    def body(rank, world):
        import commprof

        def hidden():
            """Issue an all_reduce like C++ code, below every recorded method."""
            box = dist.group.WORLD.boxed()
            torch.ops.c10d.broadcast_([torch.ones(4)], box, 0, 0, False, -1)

        commprof.step(0)
        hidden()
        hidden()
        dist.all_reduce(torch.ones(2))
        for step in (1, 2):
            commprof.step(step)
            hidden()
            dist.all_reduce(torch.ones(2))

    run, outcomes = record(tmp_path / "run", 2, body)
    assert calls(run, 0, "op", "layer", "step") == [
        ("all_reduce", "process_group", 0),
        *[
            row
            for step in (1, 2)
            for row in (("broadcast", "c10d", step), ("all_reduce", "process_group", step))
        ],
    ]
    assert outcomes[0]["number"] == 7
    assert run.health.unseen == 4  # two on each rank
    notes = "\n".join(run.health.notes)
    assert "2 collectives were issued unseen in group default_pg (on each of ranks 0-1)" in notes
    assert (
        "from step 1 on, every operator of c10d is recorded" in notes
        and "2 more collectives than were recorded until then" in notes
    )


@pytest.mark.long
def test_ddp_that_was_made_before_recording_began_is_recorded_from_its_first_step_on(tmp_path):
    def body(rank, world):
        import commprof

        commprof.detach()
        model = programs.ddp()
        commprof.attach(str(tmp_path / "late"))
        programs.train(model, 2)
        commprof.detach()

    record(tmp_path / "run", 2, body)
    late = open_run(tmp_path / "late")
    assert calls(late, 0, "op", "payload_bytes") == [
        *programs.WHOLE,
        ("broadcast", 16),
        ("broadcast", 12),
        *programs.REDUCED,
    ]
    assert late.health.unseen == 0


@pytest.mark.long
def test_the_kernels_see_what_a_mode_of_torch_hands_on_once(tmp_path):
    def body(rank, world):
        from torch.distributed.tensor.debug import CommDebugMode

        model = programs.ddp()
        with CommDebugMode() as counted:
            dist.all_reduce(torch.ones(2))
            model(torch.ones(4, WIDTH)).sum().backward()
        return counted.get_total_counts()

    run, outcomes = record(tmp_path / "run", 2, body)
    assert calls(run, 0, "op", "payload_bytes")[3:] == [("all_reduce", 8), ("all_reduce", 3 * LAYER)]
    assert outcomes[0]["result"] == 2


@pytest.mark.long
def test_an_operator_of_deepspeed_that_comes_after_attaching_is_recorded(tmp_path):
    def body(rank, world):
        from torch.library import Library

        absent = hasattr(torch.ops.deepspeed, "inference_all_reduce_")
        library = Library("deepspeed", "DEF")
        library.define("inference_all_reduce_(Tensor(a!) self) -> Tensor(a!)")
        library.impl("inference_all_reduce_", lambda tensor: tensor.mul_(2), "CPU")
        tensor = torch.ones(6)
        same = torch.ops.deepspeed.inference_all_reduce_(tensor) is tensor
        dist.all_reduce(torch.ones(1))
        return absent, same, tensor.tolist()

    run, outcomes = record(tmp_path / "run", 2, body)
    assert outcomes[0]["result"] == (False, True, [2.0] * 6)
    assert calls(run, 0, "op", "layer", "payload_bytes", "group_size", "reduce_op") == [
        ("all_reduce", "framework", 24, 2, "SUM"),
        ("all_reduce", "process_group", 4, 2, "SUM"),
    ]
    assert run.health.unseen == 0  # the backend of the group has not counted the call


def test_waits_are_seen_where_kernels_record(tmp_path):
    def body(rank, world):
        import torch.distributed._functional_collectives as functional

        dist.all_reduce(torch.ones(4))
        work = dist.all_reduce(torch.ones(4), async_op=True)
        work.wait()
        functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD).wait()

    for complete in (False, True):
        run, _ = record(tmp_path / f"run-{complete}", 2, body, complete=complete)
        rows = calls(run, 0, "is_async", "return_ns", "wait_begin_ns", "wait_end_ns")
        assert [row[0] for row in rows] == [False, True, True]
        waited = rows[:2] if complete else rows  # a functional wait runs in C++ below the kernels of c10d
        assert all(returned <= begin <= end for _, returned, begin, end in waited)


@pytest.mark.long
def test_a_call_that_a_kernel_sees_raise_raises_the_same_and_is_marked(tmp_path):
    def body(rank, world):
        try:
            torch.ops._c10d_functional.broadcast(torch.ones(4), 9, dist.group.WORLD.group_name)
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        dist.all_reduce(torch.ones(2))
        return raised

    run, outcomes = record(tmp_path / "run", 2, body)
    assert "invalid root rank: 9" in outcomes[0]["result"]
    assert calls(run, 0, "op", "status") == [("broadcast", "raised"), ("all_reduce", "ok")]
    assert run.health.raised == 2 and run.health.unseen == 0


def test_a_fault_of_ours_in_a_kernel_is_counted_and_the_training_goes_on(tmp_path, monkeypatch):
    from commprof.recorder.process_group import signatures

    def fail(*args):
        raise RuntimeError("ours")

    monkeypatch.setattr(signatures, "describe", fail)

    def body(rank, world):
        import torch.distributed._functional_collectives as functional

        return functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD).wait().tolist()

    run, outcomes = record(tmp_path / "run", 2, body)
    assert outcomes[0]["result"] == [2.0] * 4
    assert any("commprof itself failed on 1 collectives" in note for note in run.health.notes)


def test_what_lies_beneath_c10d_is_named(tmp_path):
    def body(rank, world):
        from torch._C._distributed_c10d import _SymmetricMemory

        before = _SymmetricMemory.rendezvous
        try:
            _SymmetricMemory.rendezvous(torch.ones(2), "0")
        except Exception as error:
            raised = type(error).__name__
        import commprof

        commprof.detach()
        return raised, _SymmetricMemory.rendezvous is before

    run, outcomes = record(tmp_path / "run", 2, body)
    assert outcomes[0]["result"] == ("RuntimeError", False)
    assert (
        "ranks 0, 1: torch's symmetric memory was in use: communication through it is below c10d and is not "
        "recorded" in run.health.notes
    )


@pytest.mark.long
def test_another_wrapper_around_ours_makes_no_second_record(tmp_path):
    def body(rank, world):
        import commprof

        ours, heard = dist.ProcessGroup.allreduce, []

        def theirs(self, *args, **kwargs):
            heard.append(1)
            return ours(self, *args, **kwargs)

        dist.ProcessGroup.allreduce = theirs
        programs.ddp()  # from here on c10d::allreduce_ also has a kernel of the recorder
        dist.all_reduce(torch.ones(2))
        commprof.detach()
        kept = dist.ProcessGroup.allreduce is theirs
        dist.all_reduce(torch.ones(2))
        return kept, len(heard)

    run, outcomes = record(tmp_path / "run", 2, body)
    assert outcomes[0]["result"] == (True, 2)
    assert calls(run, 0, "op", "layer")[3:] == [("all_reduce", "process_group")]


DEEPSPEED = """
import sys, torch, deepspeed
stage = int(sys.argv[1])
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
config = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": stage},
    "bf16": {"enabled": True},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(3):
    engine.backward(engine(torch.ones(2, 16, dtype=torch.bfloat16)).float().sum())
    engine.step()
"""

# In bf16, two bytes per element: 16x16 + 16 and 16x4 + 4 elements.
_WEIGHTS = [512, 32, 128, 8]
_WHOLE = sum(_WEIGHTS)
# All gradients fit into one bucket, which the default settings reduce with all_reduce. Then follow the
# overflow flag, the norm, and an all_gather of the updated weights.
_FLAT_STEP = [("all_reduce", _WHOLE), ("all_reduce", 1), ("all_reduce", 4), ("all_gather", _WHOLE)]
_FLAT = [("broadcast", size) for size in _WEIGHTS] + _FLAT_STEP * 3
# Stage 3 broadcasts the weights twice, has three barriers, and gathers each weight once to install its hooks.
_SHARDED_START = [
    *[("broadcast", size) for size in _WEIGHTS * 2],
    *[("barrier", 0)] * 3,
    *[("all_gather", size) for size in _WEIGHTS],
]
# Weights below the threshold stay gathered, so they are gathered one at a time after each step.
_SHARDED_STEP = [("reduce_scatter", _WHOLE), ("all_reduce", 8), *[("all_gather", size) for size in _WEIGHTS]]
_SHARDED = [
    *_SHARDED_START,
    # In the first step the order of modules is not known. The ranks compare the length and content of the
    # order. Each layer is gathered twice.
    ("broadcast", 8),
    ("broadcast", 0),
    *[("all_gather", size) for size in (544, 136, 136, 544)],
    *_SHARDED_STEP,
    # The second step compares the order: 6 visits to modules, 8 uses of weights, and the next use of each
    # weight. The length of each list precedes the list.
    *[("broadcast", size) for size in (8, 48, 8, 64, 8, 64)],
    *_SHARDED_STEP * 2,
]


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_real_deepspeed_by_methods_and_in_complete_mode(tmp_path, stage):
    python = os.environ.get("COMMPROF_DEEPSPEED_PYTHON")
    if not python:
        pytest.skip("COMMPROF_DEEPSPEED_PYTHON names no interpreter that has the real DeepSpeed")
    script = tmp_path / "script.py"
    script.write_text(DEEPSPEED)
    commprof = str(Path(sys.executable).with_name("commprof"))
    rows = {}
    for mode, options in (("layers", []), ("complete", ["--complete"])):
        out = tmp_path / mode
        command = [commprof, "run", *options, "--out", str(out), "--", python, "-m", "torch.distributed.run"]
        command += ["--standalone", "--nproc_per_node", "2", str(script), str(stage)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr[-3000:]
        run = open_run(out)
        assert run.health.unseen == run.health.lost == 0
        assert set(calls(run, 0, "layer")) == {"process_group" if mode == "layers" else "c10d"}
        assert all("/deepspeed/runtime/" in site for site in calls(run, 0, "call_site"))
        rows[mode] = calls(run, 0, "op", "payload_bytes", "group_ranks", "peer", "step", "phase", "purpose")
    assert rows["layers"] == rows["complete"]
    assert [row[:2] for row in rows["layers"]] == (_SHARDED if stage == 3 else _FLAT)
