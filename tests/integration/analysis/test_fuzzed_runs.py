"""Damaged and hostile run directories.

Each reader must answer with correct notes or fail with a message of one line, and must not remove any data.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
from pathlib import Path
from random import Random

import pyarrow.parquet as pq
import pytest

from commprof.cli import execute
from commprof.errors import CommprofError
from commprof.schema import COMMIT, RECORD, TABLES
from commprof.trace.finaliser import finalise
from commprof.trace.manifest import Manifest, create_run
from commprof.trace.rank_files.writer import PAGE
from commprof.trace.reader import open_run
from support import run_mutations
from support.rank_files import write_rank

RECORDS = 40
# The limit of CPU time for one run and all its readers. Only a reader that does not return reaches this
# limit, even on a busy machine.
SECONDS = 240


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Create the runs that the tests damage.

    One run is as two ranks leave it, and one is a finalised copy of it. One has no manifest, and in one the
    second rank was killed.
    """
    place = tmp_path_factory.mktemp("bases")
    for name in ("binary", "finalised", "bare", "killed"):
        run = place / name
        if name != "bare":
            config = {"zero_optimization": {"stage": 2}, "train_batch_size": 2}
            about = {"script": "train.py", "nproc": 2, "world_size": 2, "config": config}
            create_run(run, Manifest(started_realtime_ns=1_700_000_000_000_000_000, **about))
        for rank in range(2):
            stem = write_rank(run, rank, 2, RECORDS, ended=name != "killed" or rank == 0)
            _more_events(stem, rank)
        reading = {"host": "h", "device": "lo", "kind": "interface", "sent_bytes": 1, "received_bytes": 2}
        lines = [json.dumps({**reading, "time_ns": time, "step": None}) for time in (1, 2)]
        (run / "wire.jsonl").write_text("\n".join(lines) + "\n")
        for file in run.glob("rank-*"):
            os.utime(file, (1, 1))
    finalise(place / "finalised")
    return place


def _more_events(stem, rank):
    rows = [
        {"kind": "metrics", "step": 0, "name": "loss", "value": 1.5, "time_ns": 5},
        {"kind": "parameters", "name": "w", "shape": "8", "dtype": "float32", "numel": 8, "requires_grad": True},
        {"kind": "buckets", "step": 0, "micro_step": 0, "bucket": 0, "numel": 8, "bytes": 32, "dtype": "fp32", "time_ns": 6},
        {"kind": "tag", "id": 9, "purpose": "gradient_reduce", "bucket": 0, "parameters": "w"},
        {"kind": "note", "text": "a note"},
        {"kind": "unseen", "pg": "0", "unseen": 0},
    ]  # fmt: skip
    with stem.with_name(stem.name + ".events").open("a") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


def whole_records(run: Path) -> dict[str, int]:
    """Return, by rank file, the records that have their commit word. They are counted from the bytes."""
    found = {}
    for file in run.glob("rank-*.records"):
        if file.is_file() and file.stat().st_size < 1 << 30:
            data = file.read_bytes()
            commits = range(PAGE + RECORD.size - 4, len(data) - 3, RECORD.size)
            found[file.stem] = sum(struct.unpack_from("<I", data, at)[0] == COMMIT for at in commits)
    return found


def contents(place: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(place)): path.read_bytes()
        for path in place.rglob("*")
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 30
    }


class TooSlowError(Exception):
    """A reader did not return within the limit of CPU time."""


@pytest.fixture
def in_time():
    """Limit the CPU time of a test.

    The wall-clock time would depend on the load of the machine. The timeout of pytest stops a reader that
    waits without computing.
    """

    def ring(number, frame):
        raise TooSlowError(f"more than {SECONDS} s of CPU time")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


def read_all(run: Path, good: Path, out: Path, capsys, most: bool) -> None:
    """Call all readers, or only the main ones.

    Any exception that is not a CommprofError is passed on to the caller.
    """
    try:
        opened = open_run(run)
        assert all(isinstance(note, str) for note in opened.health.notes) and len(opened.health.notes) < 1000
    except CommprofError as error:
        assert "\n" not in str(error) and len(str(error)) < 5000
    else:
        for name in TABLES:
            try:
                assert tuple(opened.table(name).column_names) == TABLES[name].names
                opened.table(name).to_pylist()
            except CommprofError:
                pass
    capsys.readouterr()
    for number, command in enumerate(
        [
            ["report", str(run)],
            ["verify", str(run)],
            ["report", str(run), "--per-step", "--json"],
            ["compare", str(run), str(good)],
            ["export", str(run), "--out", str(out)],
        ][: 5 if most else 2]
    ):
        code = execute(command)
        said = capsys.readouterr()
        assert code in (0, 1, 2, 3), (command, code)
        assert "Traceback" not in said.out + said.err
        assert said.err.count("\n") <= 3, said.err
        said.out.encode()
        if number == 2 and code == 0:
            json.loads(said.out)
    if most:
        read_as_the_dashboard_does(run)


def read_as_the_dashboard_does(run: Path) -> None:
    from commprof_dash.data import Runs

    runs = Runs(run.parent)
    name = run.name
    if name not in runs.names():
        return
    if runs.select([name]).broken:
        return
    for answer in (
        runs.overview,
        runs.traffic_by_step,
        runs.traffic_by_purpose,
        runs.traffic_outside_steps,
        runs.step_times,
        runs.groups,
        runs.moved,
        lambda name: runs.comparison([name]),
        lambda name: runs.traffic_by_setting([name]),
        lambda name: runs.loss_curves({"a": name}),
    ):
        try:
            answer(name)
        except CommprofError:
            pass


def check_nothing_was_lost(run: Path, before: dict[str, bytes], records: dict[str, int]) -> None:
    """Check that every file is unchanged or that its rows are now in a table."""
    after = contents(run)
    for name, data in before.items():
        stem = Path(name).stem
        if after.get(name) == data or Path(name).name == "run.json":
            continue
        if name.startswith("rank-"):
            table = run / "collectives" / f"{stem}.parquet"
            assert table.is_file(), f"{name} is gone, and no table holds it"
            if name.endswith(".records"):
                assert pq.read_metadata(table).num_rows <= records[stem]
        elif name.startswith("wire"):
            assert (run / "wire.parquet").is_file(), name
        else:
            assert name.endswith(".parquet") and name in after, f"{name} was changed or is gone"
            assert "/" not in name and len(after[name]) > 0


def fuzz(bases: Path, tmp_path: Path, seed: int, mutations, capsys, most: bool = True) -> None:
    rng = Random(seed)
    base = bases / rng.choice(["binary", "finalised", "finalised", "bare", "killed"])
    place = tmp_path / "runs"
    run = place / "run"
    shutil.copytree(base, run)
    for mutate in mutations(rng):
        mutate(run, rng)
    before, records = contents(run), whole_records(run)
    outside = contents(tmp_path / "outside") if (tmp_path / "outside").exists() else None
    read_all(run, bases / "finalised", tmp_path / "export", capsys, most)
    if run.exists():
        check_nothing_was_lost(run, before, records)
    if outside is not None:
        assert contents(tmp_path / "outside") == outside
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.sampled(one_in=5)
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("mutation", run_mutations.MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_each_kind_of_damage(bases, tmp_path, capsys, mutation):
    number = run_mutations.MUTATIONS.index(mutation)
    fuzz(bases, tmp_path, number, lambda rng: [mutation], capsys, most=number % 8 == 0)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("seed", range(2, 14))
@pytest.mark.parametrize("mutation", run_mutations.MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_each_kind_of_damage_at_length(bases, tmp_path, capsys, mutation, seed):
    fuzz(bases, tmp_path, seed, lambda rng: [mutation], capsys)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("seed", range(1000, 1150))
def test_several_kinds_of_damage_at_once(bases, tmp_path, capsys, seed):
    fuzz(bases, tmp_path, seed, lambda rng: rng.choices(run_mutations.MUTATIONS, k=rng.randint(2, 4)), capsys)
