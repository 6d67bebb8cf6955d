"""Saves that are killed, full disks, ranks that fail alone, and checkpoints that do not match the engine."""

from __future__ import annotations

import functools
import os
import random
import resource
import signal
import tempfile
from pathlib import Path

import pytest
import torch

from commprof import hooks
from support.checkpoint_training import make_engine, train
from support.ranks import RankError, run_ranks
from zero_runtime import checkpoint
from zero_runtime.errors import CheckpointError

pytestmark = pytest.mark.ranks

SAVES = ("one", "two", "one")


# Saves that are killed.


class Saboteur:
    """A helper that counts the accesses of a save to the disk, and kills this process in one of them.

    If it kills in a write, only a part of the data reaches the file. Renames, removals and syncs do not
    happen any more.
    """

    def __init__(self, victim: int | None, part: float, monkeypatch) -> None:
        self.moments = 0
        self._victim, self._part = victim, part
        opened = Path.open
        monkeypatch.setattr(
            Path, "open", lambda path, *rest, **more: _Watched(opened(path, *rest, **more), self)
        )
        for owner, name in ((Path, "replace"), (Path, "unlink"), (Path, "mkdir"), (os, "fsync")):
            monkeypatch.setattr(owner, name, self._before(getattr(owner, name)))

    def is_now(self) -> bool:
        self.moments += 1
        return self.moments - 1 == self._victim

    def write(self, file, content) -> int:
        if self.is_now():
            file.write(content[: int(len(content) * self._part)])
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return file.write(content)

    def _before(self, function):
        def call(*arguments, **keywords):
            if self.is_now():
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)

        return call


class _Watched:
    """A file whose writes are counted by the saboteur."""

    def __init__(self, file, saboteur) -> None:
        self._file, self._saboteur = file, saboteur

    def write(self, content):
        return self._saboteur.write(self._file, content)

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *error):
        return self._file.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self._file, name)


def save_until_killed(rank, world, root, victim, part, killed_rank):
    """Save three times, the last time over the first checkpoint.

    Returns how often the disk was accessed.
    """
    engine = make_engine(1)
    with pytest.MonkeyPatch.context() as patch:
        saboteur = Saboteur(victim, part, patch) if rank == killed_rank else None
        for number, tag in enumerate(SAVES):
            for master in engine.optimizer.masters_with_parts():
                master.tensor.detach().fill_(number)
            engine.save_checkpoint(root, tag=tag, client_state={"number": number})
            if rank == 0:
                os.close(os.open(f"{root}.saved{number}", os.O_CREAT))
    return saboteur.moments if saboteur else 0


@functools.cache
def moments(world, rank):
    """Return how often a rank accesses the disk when it is not killed."""
    with tempfile.TemporaryDirectory() as root:
        return run_ranks(world, save_until_killed, root, None, 0.0, rank)[rank]


def number_in(directory):
    """Return the number of the save that a checkpoint is from.

    All of its values must be from the same save.
    """
    found = checkpoint.consolidated_state_dict(directory)
    values = torch.cat(
        [found[name].flatten() for name in ("first.weight", "second.bias", "turned", "unused")]
    )
    assert values.unique().numel() == 1
    return int(values[0])


def check_killed_saves(directory, world, kills, seed):
    """Kill saves at random moments.

    Returns the numbers of the checkpoints that were then the latest.
    """
    chance = random.Random(seed)
    survived = []
    for kill in range(kills):
        root = directory / f"kill{kill}"
        rank = chance.randrange(world)
        victim = chance.randrange(moments(world, rank))
        with pytest.raises(RankError, match="died with status -9"):
            run_ranks(world, save_until_killed, str(root), victim, chance.random(), rank, timeout=200)
        finished = sum(Path(f"{root}.saved{number}").exists() for number in range(len(SAVES)))
        if (root / "latest").exists():
            survived.append(number_in(root))
            assert finished - 1 <= survived[-1] <= finished
            if kill % 5 == 0:
                assert run_ranks(1, resume, str(root), timeout=200) == [survived[-1]]
        else:
            assert finished == 0
        for each in root.glob("*/manifest.json"):
            number_in(each.parent)
    return survived


def resume(rank, world, root):
    engine = make_engine(2)
    _, client = engine.load_checkpoint(root)
    engine.save_checkpoint(root, tag="one")
    assert engine.load_checkpoint(root)[1] == {}
    return client["number"]


def test_the_checkpoint_before_a_killed_save_loads(tmp_path):
    check_killed_saves(tmp_path, 1, 5, seed=1)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [1, 2])
def test_the_checkpoint_before_any_of_50_killed_saves_loads(tmp_path, world):
    survived = check_killed_saves(tmp_path, world, 25, seed=world)
    assert {0, 1} <= set(survived)  # the third is the latest only if the kill comes after it is complete


# A rank that fails alone.


def fail_alone(rank, world, root):
    """Let rank 1 fail in several ways, one after another.

    Returns the error that each rank gets, and whether all ranks continue.
    """
    told = {}
    engine = make_engine(2)
    train(engine, rank, 0, 1)
    engine.save_checkpoint(root, tag="good", client_state={"good": True})

    def attempt(name, **arguments):
        try:
            engine.save_checkpoint(root, **{"tag": name, **arguments})
            told[name] = None
        except CheckpointError as error:
            told[name] = str(error)

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    attempt("full")
    attempt("good")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    attempt("state", client_state={"model": {"x": object()}} if rank == 1 else {})
    attempt(f"mine{rank}")
    told["mine"] = told.pop(f"mine{rank}")
    attempt("a/b")
    blocked = Path(root) / "blocked"
    if rank == 0:
        blocked.write_text("a file where a directory should be")
    attempt("blocked")
    attempt("after")

    before = train(engine, rank, 1, 1)
    for tag, directory in (("good", root if rank == 0 else f"{root}/nowhere"), ("missing", root)):
        try:
            engine.load_checkpoint(directory, tag=tag)
        except CheckpointError as error:
            told["load", tag] = str(error)
    again = train(engine, rank, 2, 1)
    _, client = engine.load_checkpoint(root, tag="good")
    assert client == {"good": True}
    assert train(engine, rank, 1, 2) == [*before, *again]
    return told, sorted(each.name for each in Path(root).iterdir())


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    return run_ranks(2, fail_alone, str(tmp_path_factory.mktemp("failures")), timeout=200)


@pytest.mark.parametrize(
    ("name", "of_rank_0", "of_rank_1"),
    [
        ("full", "failed on rank 1; see the message", "could not be written: File too large; make room"),
        ("good", "failed on rank 1", "could not be written"),
        ("state", "failed on rank 1", "client_state['model']['x'] is a builtins.object"),
        ("mine", "see different directories, or saved different tags", "failed on rank 0"),
        ("a/b", "expected the name of a directory", "expected the name of a directory"),
        ("blocked", "cannot be made", "cannot be made"),
        (("load", "good"), "failed on rank 1", "there is no checkpoint"),
        (("load", "missing"), "there is no checkpoint", "there is no checkpoint"),
    ],
)
def test_all_ranks_learn_of_a_failure(failed, name, of_rank_0, of_rank_1):
    assert of_rank_0 in failed[0][0][name]
    assert of_rank_1 in failed[1][0][name]


def test_what_failed_leaves_nothing(failed):
    told, names = failed[0]
    assert told["after"] is None
    assert names == ["after", "blocked", "good", "latest"]


def disagree(rank, world, root, mode):
    engine = make_engine(1, checkpoint={"tag_validation": mode})
    calls = []
    import torch.distributed as dist

    original = dist.all_reduce

    def all_reduce(tensor, *arguments, **keywords):
        tag = hooks.current_tag()
        calls.append((tensor.numel(), None if tag is None else tag.purpose, hooks.position.phase))
        return original(tensor, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        try:
            engine.save_checkpoint(root, tag=f"tag{rank}")
        except CheckpointError as error:
            return str(error), calls
    return None, calls


@pytest.mark.parametrize(
    ("mode", "message", "sizes"),
    [
        ("fail", "the ranks save different tags", [20, 20]),
        ("WARN", "saved different tags", [20, 20, 1]),
        ("Ignore", "saved different tags", [1]),
    ],
)
def test_different_tags_are_found(tmp_path, mode, message, sizes):
    (text, calls), _ = run_ranks(2, disagree, str(tmp_path), mode)
    assert message in text
    assert calls == [(size, "checkpoint", "checkpoint") for size in sizes]


# Checkpoints that do not match the engine.


def misfit(rank, world, root):
    told = {}
    engine = make_engine(2)
    assert engine.load_checkpoint(root) == (None, {})
    train(engine, rank, 0, 2)
    engine.save_checkpoint(root)
    saved = {name: each.clone() for name, each in engine.module.named_parameters()}

    def attempt(name, engine, **arguments):
        try:
            told[name] = engine.load_checkpoint(root, **arguments)
        except CheckpointError as error:
            told[name] = str(error)

    try:
        engine.load_checkpoint(str(Path(root) / "global_step2"))
    except CheckpointError as error:
        told["the checkpoint itself"] = str(error)

    other = make_engine(0, optimizer="SGD")
    attempt("optimizer", other)
    attempt("without states", other, load_optimizer_states=False)
    assert all(torch.equal(each, saved[name]) for name, each in other.module.named_parameters())
    assert other.optimizer.state == {}

    fresh = make_engine(1)
    attempt("module only", fresh, load_module_only=True)
    assert (fresh.global_steps, len(fresh.optimizer.state)) == (0, 0)
    assert torch.equal(fresh.module.second.weight, saved["second.weight"])
    told["module only loss"] = train(fresh, rank, 2, 1)

    custom = make_engine(1, "bf16")
    attempt(
        "custom",
        custom,
        custom_load_fn=lambda src, dst: dst.load_state_dict(
            {**src, "first.bias": src["first.bias"] + 1}, False
        ),
    )
    assert torch.equal(custom.module.first.bias, (saved["first.bias"] + 1).bfloat16())
    train(custom, rank, 2, 1, "bf16")
    assert (custom.module.first.bias.float() - saved["first.bias"] - 1).abs().max() < 0.2

    import zero_runtime

    for name, change in (("shape", {"unused": 18}), ("names", {"extra": 3})):
        model = make_engine(0).module
        for parameter, numel in change.items():
            setattr(model, parameter, torch.nn.Parameter(torch.ones(numel)))
        config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {}}}
        engine, *_ = zero_runtime.initialize(
            model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config
        )
        before = model.second.weight.clone()
        attempt(name, engine)
        assert torch.equal(model.second.weight, before)
        attempt(f"{name}, not strict", engine, load_module_strict=False)
        if name == "names":
            assert torch.equal(model.second.weight, saved["second.weight"])
            assert torch.equal(model.extra, torch.ones(3))
    rounded = make_engine(2, "bf16", zero={"load_from_fp32_weights": False})
    attempt("rounded", rounded)
    exact = make_engine(2, "bf16")
    attempt("exact", exact)
    masters = [
        (each.tensor, other.tensor)
        for each, other in zip(
            rounded.optimizer.masters_with_parts(), exact.optimizer.masters_with_parts(), strict=True
        )
    ]
    assert all(torch.equal(first, second.bfloat16().float()) for first, second in masters)
    assert not all(torch.equal(*each) for each in masters)
    return told


def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path):
    for told in run_ranks(2, misfit, str(tmp_path), timeout=200):
        assert f"load_checkpoint({str(tmp_path)!r}, tag='global_step2')" in told["the checkpoint itself"]
        assert "optimizer state of AdamW, and the engine has SGD" in told["optimizer"]
        assert told["without states"][0] == str(tmp_path / "global_step2")
        assert told["module only"][0] == told["custom"][0] == str(tmp_path / "global_step2")
        assert "'unused' has shape (18,) in the model and (17,) in" in told["shape"]
        assert "'unused' has shape" in told["shape, not strict"]
        assert "it lacks 'extra'" in told["names"]
        assert told["names, not strict"][0] is not None
