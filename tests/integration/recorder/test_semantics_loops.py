"""Training loops without any hooks: their phases, steps and micro-batches.

Recording must leave no trace in the objects of the program.
"""

from __future__ import annotations

import copy
import gc
import io
import warnings

import pytest
import torch
import torch.distributed as dist

from support.recording import calls, record

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]


class Talking(torch.nn.Module):
    """A module that issues a collective in the forward pass and another in the backward pass."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    def forward(self, x):
        dist.all_reduce(torch.ones(1))
        y = self.inner(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: dist.all_reduce(torch.ones(2)))
        return y


class TalkingSGD(torch.optim.SGD):
    def step(self, closure=None):
        dist.all_reduce(torch.ones(3))
        return super().step(closure)


def beside_its_base(rank, world, body):
    """Run ``body`` after torch has wrapped the step of the base class, as creating an optimizer of that class does."""
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    return body(rank, world)


def said(run, *columns):
    rows = calls(run, 0, *columns)
    assert rows == calls(run, 1, *columns)
    return rows


def plain(rank, world):
    dist.broadcast(torch.ones(1), 0)
    net = Talking()
    optimizer = TalkingSGD(net.parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(2):
            loss = net(torch.ones(1, 2)).sum()
            dist.all_reduce(loss.detach())
            loss.backward()
        for parameter in net.inner[0].parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        net.eval()
        with torch.no_grad():
            net(torch.ones(1, 2))
        net.train()
    dist.barrier()


@pytest.mark.sampled
@pytest.mark.parametrize("way", [(plain,), (beside_its_base, plain)], ids=["alone", "beside its base"])
def test_each_collective_is_in_the_phase_that_issued_it(tmp_path, way):
    run, _ = record(tmp_path / "run", 2, *way)
    micro_batch = [("forward", "1"), ("other", "()"), ("backward", "2")]
    step = [(micro, *row) for micro in (0, 1) for row in micro_batch]
    # The loop uses gradients computed by hand, the optimizer, and an evaluation that belongs to no step.
    step += [(1, "other", "2x2"), (1, "other", "2"), (1, "optimizer", "3")]
    rows = said(run, "step", "after_step", "micro_step", "phase", "sizes")
    assert rows[0] == (-1, None, 0, "init", "1") and rows[-1][:4] == (-1, 1, 0, "evaluation")
    assert rows[1:-1] == [
        row
        for number in (0, 1)
        for row in [*((number, None, *row) for row in step), (-1, number, 0, "evaluation", "1")]
    ]
    assert [(r["step"], r["micro_steps"]) for r in run.table("steps").to_pylist()] == [(0, 2), (1, 2)] * 2
    parameters = run.table("parameters").to_pylist()
    assert [(p["name"], p["shape"], p["param_group"]) for p in parameters] == [
        ("inner.0.weight", "2x2", 0),
        ("inner.0.bias", "2", 0),
        ("inner.1.weight", "2x2", 0),
        ("inner.1.bias", "2", 0),
    ]


def gan(rank, world):
    generator, critic = Talking(), Talking()
    of_critic = TalkingSGD(critic.parameters(), lr=0.1)
    of_generator = TalkingSGD(generator.parameters(), lr=0.1)
    for _ in range(3):
        fake = generator(torch.ones(1, 2))
        (critic(torch.ones(1, 2)) - critic(fake.detach())).sum().backward()
        of_critic.step()
        critic(fake).sum().backward()
        of_generator.step()


@pytest.mark.sampled
@pytest.mark.parametrize("way", [(gan,), (beside_its_base, gan)], ids=["alone", "beside its base"])
def test_two_optimizers_end_a_step_together_from_the_first_on(tmp_path, way):
    run, _ = record(tmp_path / "run", 2, *way)
    rows = said(run, "step", "phase", "micro_step")
    one = [("forward", 0)] * 3 + [("backward", 0)] * 2 + [("optimizer", 0), ("forward", 0)]
    one += [("backward", 0)] * 2 + [("optimizer", 0)]
    assert rows == [(step, *row) for step in range(3) for row in one]


def failing(rank, world):
    net = Talking()
    optimizer = TalkingSGD(net.parameters(), lr=0.1)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            net(torch.ones(1, 7))
        with pytest.raises(RuntimeError):
            net(torch.ones(1, 2)).backward()  # raises, because the output is not a scalar
        dist.all_reduce(torch.ones(4))
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()


@pytest.mark.long
def test_ranks_count_alike_when_an_optimizer_takes_the_place_of_one_that_is_gone(tmp_path):
    def body(rank, world):
        net, kept = torch.nn.Linear(2, 2), []

        def stage(came_back):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(3):
                net(torch.ones(1, 2)).sum().backward()
                told = torch.tensor([float(came_back)])
                dist.all_reduce(told)
                optimizer.step()
            if rank == 1:
                kept.append(optimizer)
            return id(optimizer), bool(told)

        places, came_back, told, stages = set(), False, False, 0
        while not told and stages < 1000:  # until rank 0 gets an address again, which the allocator decides
            place, told = stage(came_back)
            came_back = came_back or place in places
            places.add(place)
            stages += 1
            gc.collect()
        return stages, told, len(places)

    run, outcomes = record(tmp_path / "run", 2, body)
    (stages, told, places), (_, _, kept) = (each["result"] for each in outcomes)
    assert told and places < stages == kept
    # Each optimizer trains three steps of its own, whether or not an earlier optimizer had the same address.
    assert said(run, "step") == list(range(3 * stages))


@pytest.mark.long
@pytest.mark.parametrize("way", [(failing,), (beside_its_base, failing)], ids=["alone", "beside its base"])
def test_a_pass_that_raises_ends_its_phase(tmp_path, way):
    run, _ = record(tmp_path / "run", 2, *way)
    assert [row for row in said(run, "phase", "sizes", "step") if row[1] == "4"] == [
        ("other", "4", step) for step in (0, 1)
    ]
    assert run.health.notes == ()


def untouched(rank, world):
    """Run a program that inspects its own objects while it is recorded."""
    net = Talking()
    seen = []

    class Looking(torch.nn.Module):
        def forward(self, x):
            from torch.nn.modules import module

            seen.append(len(module._global_forward_pre_hooks))
            return x

    net.inner.append(Looking())
    optimizer = TalkingSGD(net.parameters(), lr=0.1)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save(copy.deepcopy(net.inner[0]), io.BytesIO())
    state = [net._forward_hooks, net._forward_pre_hooks, optimizer._optimizer_step_pre_hooks]
    return seen, [len(each) for each in state]


def test_nothing_is_left_on_the_modules_and_none_within_the_model_is_hooked(tmp_path):
    _, outcomes = record(tmp_path / "run", 2, untouched)
    assert outcomes[0]["result"] == ([0], [0, 0, 0])


def named(rank, world, what):
    """Run a program that names its steps, or its phases, or only its checkpoints."""
    from commprof import hooks

    net = Talking()
    optimizer = TalkingSGD(net.parameters(), lr=0.1)
    for number in range(2):
        if what == "steps":
            hooks.step(10 + number)
        if what == "phases":
            hooks.phase("forward")
        loss = net(torch.ones(1, 2)).sum()
        if what == "phases":
            hooks.phase("backward")
        loss.backward()
        if what == "phases":
            hooks.phase("optimizer")
        optimizer.step()
        if what == "checkpoint":
            hooks.phase("checkpoint")
            dist.barrier()


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "steps", "last"),
    [("steps", (10, 11), []), ("phases", (0, 1), []), ("checkpoint", (0, 1), ["checkpoint"])],
)
def test_what_the_program_names_is_left_to_it(tmp_path, what, steps, last):
    run, _ = record(tmp_path / "run", 2, named, what)
    phases = ["forward", "backward", "optimizer", *last]
    assert said(run, "step", "phase") == [
        (-1 if phase == "checkpoint" else step, phase) for step in steps for phase in phases
    ]


def line_search(rank, world):
    net = Talking()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2, max_eval=2)

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(1, 2)).pow(2).sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)


@pytest.mark.long
def test_passes_within_an_optimizer_have_their_own_phases(tmp_path):
    run, _ = record(tmp_path / "run", 2, line_search)
    rows = said(run, "step", "phase")
    assert {row[0] for row in rows} == {0, 1} and {row[1] for row in rows} == {"forward", "backward"}


def recorded_twice(rank, world, second):
    import commprof

    def loop():
        net = Talking()
        optimizer = TalkingSGD(net.parameters(), lr=0.1)
        for _ in range(2):
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    loop()
    commprof.detach()
    commprof.attach(second)
    loop()
    commprof.detach()


@pytest.mark.long
def test_a_second_recording_begins_anew(tmp_path):
    from commprof.trace.reader import open_run

    run, _ = record(tmp_path / "run", 2, recorded_twice, str(tmp_path / "second"))
    expected = [(step, phase) for step in (0, 1) for phase in ("forward", "backward", "optimizer")]
    assert said(run, "step", "phase") == said(open_run(tmp_path / "second"), "step", "phase") == expected


def broken(rank, world, places, directory):
    """Run the same training without recording, and with one part of the recorder failing at a time."""
    import commprof

    def losses():
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        optimizer = TalkingSGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(3):
            loss = model(torch.ones(1, 2)).pow(2).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    def planted(*args, **kwargs):
        raise RuntimeError("planted")

    commprof.detach()
    plain = losses()
    recorded = []
    for number, place in enumerate(places):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*place, planted)
            commprof.attach(f"{directory}/run-{number}")
            recorded.append(losses())
            commprof.detach()
    return [each == plain for each in recorded]


@pytest.mark.long
def test_what_fails_in_watching_never_reaches_the_training(tmp_path):
    from commprof.recorder.adapters import ddp, ddp_buckets
    from commprof.recorder.training import progress, published_models
    from commprof.trace.reader import open_run

    places = [
        (progress.Progress, "begin_forward"),
        (progress.Progress, "begin_pass"),
        (progress.Progress, "end_backward"),
        (progress.Progress, "end_optimizer"),
        (published_models, "distinct"),
        (ddp_buckets.Reduction, "__init__"),
        (ddp_buckets.Reduction, "read"),
        (ddp_buckets.Reduction, "expect"),
        (ddp_buckets.Reduction, "is_due"),
        (ddp, "open_bucket"),
    ]
    _, outcomes = record(tmp_path / "first", 2, broken, places, str(tmp_path))
    assert [outcome["result"] for outcome in outcomes] == [[True] * len(places)] * 2
    for number, place in enumerate(places):
        run = open_run(tmp_path / f"run-{number}")
        assert "planted" in "".join(run.health.notes) or run.manifest.ranks[0]["faults"], place
        ops = calls(run, 0, "op")
        assert ops.count("all_reduce") == 6, place  # three of DDP and three of the optimizer


class Compiled(torch.nn.Module):
    """A module that torch can compile in place. torch does not do this for modules of torch.nn itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def compiled(rank, world, kind):
    import warnings

    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    net = Compiled()
    optimizer = TalkingSGD(net.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*global hooks.*")
        if kind == "in place":
            net.compile(backend=counter)
            model = net
        else:
            model = torch.compile(net, backend=counter)
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    return counter.frame_count


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["in place", "wrapped"])
def test_compiled_modules_are_compiled_once_and_warn_of_nothing(tmp_path, kind):
    run, outcomes = record(tmp_path / "run", 2, compiled, kind)
    assert [outcome["result"] for outcome in outcomes] == [1, 1]
    assert said(run, "step", "phase") == [(step, "optimizer") for step in range(3)]


def test_steps_of_models_in_torchscript_are_seen_and_those_beside_them(tmp_path):
    """Steps of TorchScript models and of models beside them are detected.

    A scripted module accepts no hook, and the teacher or the trained model may be scripted.
    """

    def body(rank, world):
        with warnings.catch_warnings(action="ignore"):
            teacher, student = (torch.jit.script(torch.nn.Linear(2, 2)) for _ in range(2))
        for model in (torch.nn.Linear(2, 2), student):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                x = torch.ones(1, 2)
                with torch.no_grad():
                    target = teacher(x)
                (model(x) - target).sum().backward()
                dist.all_reduce(torch.ones(1))
                optimizer.step()

    run, _ = record(tmp_path / "run", 2, body)
    assert said(run, "step") == [0, 1, 2, 3] and run.health.notes == ()
