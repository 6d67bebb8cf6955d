"""Many groups, call sites, threads, workers and child processes.

All collectives are recorded, and memory stays bounded.
"""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, Dataset

from commprof.recorder.process_group.groups import live_groups
from commprof.trace.reader import open_run
from support.logged_training import Log, issued, results, train
from support.ranks import run_ranks
from support.recording import calls

pytestmark = pytest.mark.ranks


def fake_rank(world: int = 1) -> None:
    """Create a process group of ``world`` ranks of which only this rank exists.

    Its collectives return at once.
    """
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.long
def test_thousands_of_groups(tmp_path):
    many = 2_500

    def body(rank: int, world: int) -> int:
        import commprof

        fake_rank(8)
        commprof.attach(tmp_path / "run")
        tensor = torch.ones(4)
        for number in range(many):
            if number % 100 == 0:
                commprof.step(number // 100)
            group = dist.new_group([0, 1 + number % 7])
            dist.all_reduce(tensor, group=group)
            dist.broadcast(tensor, 0, group=group)
            if number % 2:
                name = group.group_name
                assert live_groups(name) == [group]
                dist.destroy_process_group(group)
                assert live_groups(name) == []
        commprof.detach()
        return 1

    run_ranks(1, body, process_group=False)
    run = open_run(tmp_path / "run")
    assert len(run.table("collectives")) == 2 * many and run.health.lost == run.health.unseen == 0
    names = {row["pg"] for row in run.table("groups").to_pylist()}
    assert len(names) >= many and set(calls(run, 0, "pg")) <= names
    members = {row["pg"]: row["group_ranks"] for row in run.table("groups").to_pylist()}
    for number, (pg, ranks) in enumerate(calls(run, 0, "pg", "group_ranks")[::2]):
        expected = "0-1" if number % 7 == 0 else f"0,{1 + number % 7}"
        assert ranks == members[pg] == expected


def _from_many_sites(run: Path, sites: int) -> tuple[int, int]:
    """Issue one collective from each of ``sites`` places.

    Returns how much memory grew in each half.
    """
    import commprof

    fake_rank()
    commprof.attach(run)
    tensor = torch.ones(4)

    def template() -> None:
        dist.all_reduce(tensor)

    marks = []
    for half in range(2):
        for number in range(half * sites // 2, (half + 1) * sites // 2):
            code = template.__code__.replace(co_firstlineno=1 + number, co_name=f"site_{number}")
            type(template)(code, template.__globals__, None, None, template.__closure__)()
        marks.append(resident_bytes())
    commprof.detach()
    return marks[0], marks[1]


@pytest.mark.parametrize("sites", [20_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_a_million_call_sites_keep_memory_bounded(tmp_path, sites):
    ((first, second),) = run_ranks(
        1, lambda rank, world: _from_many_sites(tmp_path / "run", sites), process_group=False, timeout=280
    )
    run = open_run(tmp_path / "run")
    assert run.health.records == len(run.table("collectives")) == sites and run.health.lost == 0
    distinct = set(run.table("collectives")["call_site"].to_pylist())
    assert len(distinct) == sites
    if sites > 500_000:
        assert second - first < 64 << 20  # the mapped records are part of the file, but are counted here


def test_threads_lose_and_double_nothing(tmp_path):
    threads, each = 8, 1500

    def body(rank: int, world: int) -> int:
        import commprof

        fake_rank()
        commprof.attach(tmp_path / "run")
        log = Log(tmp_path / "log")

        def work() -> None:
            tensor = torch.ones(3)
            for number in range(each):
                log.issue()
                if number % 2:
                    dist.all_reduce(tensor)
                else:
                    dist.broadcast(tensor, 0, async_op=True).wait()

        running = [threading.Thread(target=work, name=f"worker-{number}") for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        commprof.detach()
        return 1

    run_ranks(1, body, process_group=False)
    run = open_run(tmp_path / "run")
    assert issued(tmp_path / "log") == threads * each == run.health.records
    assert sorted(calls(run, 0, "seq")) == list(range(threads * each))
    assert sorted(calls(run, 0, "pg_seq")) == list(range(threads * each))
    names = calls(run, 0, "thread")
    assert {names.count(f"worker-{number}") for number in range(threads)} == {each}
    assert all(wait is not None for wait in calls(run, 0, "wait_end_ns"))


def test_a_fork_in_the_middle_goes_its_own_way(tmp_path):
    def body(rank: int, world: int) -> bool:
        import commprof

        fake_rank()
        train(Log(tmp_path / "plain"), 10)
        commprof.attach(tmp_path / "run")
        children = []

        def fork(step: int) -> None:
            if step in (3, 6):
                pid = os.fork()
                if pid == 0:
                    try:
                        train(Log(tmp_path / f"child-{step}"), 5)
                    finally:
                        os._exit(0)
                children.append(pid)

        train(Log(tmp_path / "log"), 10, fork)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        commprof.detach()
        return codes == [0, 0]

    assert run_ranks(1, body, process_group=False) == [True]
    assert results(tmp_path / "log") == results(tmp_path / "plain")
    for step in (3, 6):
        assert results(tmp_path / f"child-{step}") == results(tmp_path / "plain")[:5]
    run = open_run(tmp_path / "run")
    assert run.health.records == issued(tmp_path / "log") == 50
    assert len(run.manifest.ranks) == 1 and run.health.state == "complete"


def test_a_forked_child_of_an_armed_process_does_not_touch_all_objects_of_its_parent(tmp_path, monkeypatch):
    """A forked child of a process with an armed recorder does not access all objects of its parent.

    Otherwise the kernel would copy the pages of the objects in each epoch, for each data loader worker under
    ``commprof run``.
    """

    def body(rank: int, world: int) -> bool:
        from commprof.recorder.session import arm, current, detach

        fake_rank()
        arm(tmp_path / "run")
        dist.all_reduce(torch.ones(4))
        looks: list[int] = []
        all_objects = gc.get_objects
        monkeypatch.setattr(gc, "get_objects", lambda: looks.append(1) or all_objects())
        pid = os.fork()
        if pid == 0:
            os._exit(1 if looks or current() is None else 0)
        detach()
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    assert run_ranks(1, body, process_group=False) == [True]


class Numbers(Dataset):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(index, index + 8, dtype=torch.float32) / 60


@pytest.mark.long
def test_the_workers_of_a_data_loader_leave_the_training_and_the_trace_alone(tmp_path):
    def body(rank: int, world: int) -> bool:
        import commprof

        def loader() -> DataLoader:
            return DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork")

        train(Log(tmp_path / f"plain-{rank}"), 12, loader=loader())
        commprof.attach(tmp_path / "run")
        train(Log(tmp_path / f"log-{rank}"), 12, loader=loader())
        commprof.detach()
        return results(tmp_path / f"plain-{rank}") == results(tmp_path / f"log-{rank}")

    assert run_ranks(2, body) == [True, True]
    run = open_run(tmp_path / "run")
    assert [len(calls(run, rank, "op")) for rank in range(2)] == [
        issued(tmp_path / f"log-{r}") for r in range(2)
    ]
    assert len(run.manifest.ranks) == 2 and run.health.notes == ()
