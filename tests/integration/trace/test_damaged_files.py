"""One damaged, missing or foreign file in a run.

Each command must either report this on a line that names the file, or answer as before.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commprof.analysis import api
from commprof.analysis.storage import index
from commprof.cli import execute
from commprof.exit_codes import MEANINGS
from commprof.trace.finaliser import finalise
from support import damaged_files
from support.damaged_files import contents, unfinalised_run
from support.detailed_runs import aligned_run

# The text that differs between two calls of a command.
CHANGING = re.compile(r"[\d.]+ (ns|µs|ms|s|B|KiB)\b|taken .*|provenance.*")
QUERY = "select op, phase, count(*) as records from collectives group by op, phase order by op, phase"
# The files of a run, which are tables and others. In the quick set, the damages of a few files represent all.
FILES = {
    "finalised": [
        "run.json",
        "config.json",
        "processes.jsonl",
        "index.duckdb",
        "wire.parquet",
        "samples.parquet",
        "steps.parquet",
        "groups.parquet",
        "clocks.parquet",
        "parameters.parquet",
        "buckets.parquet",
        "metrics.parquet",
        "aggregates.parquet",
        "stalls.parquet",
        "flight.parquet",
        "clock_offsets.parquet",
        "collectives/rank-00001-0-4000001.parquet",
    ],
    "aligned": ["matches.parquet", "comm_matches.parquet", "nccl_ops.parquet", "nccl_rings.parquet"],
    "unfinalised": [
        "run.json",
        "config.json",
        "wire.jsonl",
        "samples.jsonl",
        "processes.jsonl",
        "rank-00001-0-4000001.records",
        "rank-00001-0-4000001.events",
    ],
}
QUICK = {
    ("finalised", "run.json", "random_bytes"),
    ("finalised", "config.json", "pipe_instead"),
    ("finalised", "steps.parquet", "truncated"),
    ("finalised", "groups.parquet", "directory_instead"),
    ("finalised", "index.duckdb", "random_bytes"),
    ("finalised", "collectives/rank-00001-0-4000001.parquet", "one_byte_changed"),
    ("aligned", "matches.parquet", "emptied"),
    ("unfinalised", "rank-00001-0-4000001.records", "truncated"),
    ("unfinalised", "rank-00001-0-4000001.events", "missing"),
}
CASES = [
    pytest.param(
        kind,
        name,
        damage,
        id=f"{kind}-{name}-{damage.__name__}",
        marks=[] if (kind, name, damage.__name__) in QUICK else [pytest.mark.long],
    )
    for kind, names in FILES.items()
    for name in names
    for damage in damaged_files.DAMAGES
    if (kind, damage.__name__)
    != ("aligned", "missing")  # without its alignment, nothing shows that such a run was aligned
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Create a run of each kind, with an index if the run is finalised."""
    place = tmp_path_factory.mktemp("bases")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "_FEWEST_IN_FILE", 0)
        for kind in ("unfinalised", "finalised", "good"):
            unfinalised_run(place / kind)
        aligned_run(place / "aligned")
        for kind in ("finalised", "good", "aligned"):
            finalise(place / kind)
            api.index(place / kind)
    return place


@pytest.fixture
def copied(bases, tmp_path):
    """Return a function that copies a run of a kind to a place where a test may damage the run."""
    return lambda kind: shutil.copytree(bases / kind, tmp_path / "runs" / kind)


@pytest.fixture(scope="module")
def whole_answers(bases, tmp_path_factory):
    """Return the output of each command for the undamaged runs."""
    answers = {}

    def of(kind, ask):
        if kind not in answers:
            run = shutil.copytree(bases / kind, tmp_path_factory.mktemp("whole") / kind)
            answers[kind] = ask(run, bases / "good")
        return answers[kind]

    return of


def asked(run, good, capsys):
    """Run the reading commands on ``run``.

    Returns exit codes, standard output, standard error, and exported content.
    """
    out = run.parent / "exported"
    found = []
    for words in (
        ["report", run],
        ["verify", run],
        ["query", run, QUERY],
        ["compare", run, good],
        ["export", run, "--out", out],
        ["dump", run],
    ):
        capsys.readouterr()
        code = execute(list(map(str, words)))
        said = capsys.readouterr()
        texts = [text.replace(str(run.parent), "") for text in (said.out, said.err)]
        found.append((words[0], code, *(CHANGING.sub("", text) for text in texts)))
    provenance = out / "provenance.json"
    notes = json.loads(provenance.read_text())["runs"] if provenance.exists() else []
    shutil.rmtree(out, ignore_errors=True)
    return found, json.dumps(notes)


def names_of(file: str) -> list[str]:
    """Return the names by which a message may refer to a file: its name, or the rank that wrote it."""
    name = Path(file).name
    rank = re.match(r"rank-0*(\d+)-", name)
    return [name, *([f"rank {rank[1]}"] if rank and not file.startswith("collectives") else [])]


@pytest.mark.sampled
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "name", "damage"), CASES)
def test_a_damaged_file_is_named_and_kept(copied, bases, whole_answers, capsys, kind, name, damage):
    expected, _ = whole_answers(kind, lambda run, good: asked(run, good, capsys))
    run = copied(kind)
    damage(run / name)
    before = contents(run)
    found, exported = asked(run, bases / "good", capsys)
    for (verb, code, out, err), whole in zip(found, expected, strict=True):
        assert code in MEANINGS and code <= 3, (verb, code)
        assert "Traceback" not in out + err
        assert err.count("\n") <= 2, err
        is_named = any(each in out + err for each in names_of(name))
        is_told = is_named or (verb == "export" and any(each in exported for each in names_of(name)))
        is_answered = (code, out) == whole[1:3]
        # Readings of the machine omit unreadable parts, and the report states how much the readings cover.
        is_answered |= code == whole[1] and name in ("wire.jsonl", "samples.jsonl")
        assert is_told or is_answered, (verb, code, out, err)
        if verb == "verify" and name.startswith("collectives/"):
            assert "ledger mismatch" not in " ".join(out.split())
    after = contents(run)
    for file, content in before.items():
        if kind == "unfinalised" and file not in after:  # its rows are in a table now
            stem = Path(file).stem
            assert (run / "collectives" / f"{stem}.parquet").exists() or (run / f"{stem}.parquet").exists()
        elif file == name == "index.duckdb":  # the index is derived from the records, and is built again
            assert after.get(file) in (content, None)
        elif not (kind == "unfinalised" and file == "run.json"):
            assert after.get(file) == content, file


def newer_duckdb(file: Path) -> None:
    """Give a database the storage version of a future DuckDB.

    The version is the number behind the magic bytes of the main header. The header begins with its checksum,
    which is the exclusive or of a product of each of its words.
    """
    content = bytearray(file.read_bytes())
    checksum, before = struct.unpack_from("<QQ", content)
    assert content[8:12] == b"DUCK"
    struct.pack_into("<I", content, 12, 9999)
    (after,) = struct.unpack_from("<Q", content, 8)
    for word in (before, after):
        checksum ^= word * 0xBF58476D1CE4E5B9 % 2**64
    struct.pack_into("<Q", content, 0, checksum)
    file.write_bytes(content)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "damage",
    [newer_duckdb, damaged_files.random_bytes, damaged_files.truncated, damaged_files.directory_instead],
)
def test_an_index_that_cannot_be_read_is_ignored_or_made_again(copied, bases, capsys, monkeypatch, damage):
    monkeypatch.setattr(index, "_FEWEST_IN_FILE", 0)
    run = copied("finalised")
    right = api.traffic(bases / "good").to_dict("list")
    file = run / "index.duckdb"
    damage(file)
    if damage is newer_duckdb:
        with pytest.raises(duckdb.Error, match="newer version of DuckDB"):
            duckdb.connect(str(file), read_only=True)
    assert not api.has_index(run)
    assert api.traffic(run).to_dict("list") == right
    if damage is damaged_files.directory_instead:
        assert execute(["finalise", str(run)]) == 0  # the index is then in the cache directory or in memory
        assert file.is_dir()
        return
    assert execute(["finalise", str(run)]) == 0
    assert "finalised, indexed" in capsys.readouterr().err
    assert api.has_index(run)
    assert len(api.timeline(run).bars) == 80
    assert api.traffic(run).to_dict("list") == right


def changed(file: Path, change) -> None:
    """Write the Parquet ``file`` again with the table that ``change`` returns."""
    pq.write_table(change(pq.read_table(file)), file)


def with_metadata(key: bytes, value: bytes):
    return lambda table: table.replace_schema_metadata({**(table.schema.metadata or {}), key: value})


def with_column(table: pa.Table) -> pa.Table:
    return table.append_column("novel", pa.array([1] * len(table)))


def with_value(name: str, value: str):
    def change(table):
        at = table.schema.get_field_index(name)
        return table.set_column(at, table.schema.field(at), pa.array([value] * len(table)))

    return change


@pytest.mark.sampled
@pytest.mark.parametrize("file", ["steps.parquet", "collectives/rank-00001-0-4000001.parquet"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            with_metadata(b"commprof.schema_version", b"99"),
            "schema version 99; this commprof reads versions up to",
        ),
        (with_column, "does not have column(s) novel"),
    ],
    ids=["newer", "column"],
)
def test_a_table_of_a_later_version_is_one_line(copied, capsys, file, change, words):
    run = copied("finalised")
    changed(run / file, change)
    before = contents(run)
    for verb in ("report", "verify"):
        assert execute([verb, str(run)]) == 1
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and str(run / file) in said and words in said, said
    assert contents(run) == before


def test_an_operation_of_a_later_version(copied, tmp_path, capsys, monkeypatch):
    """The report shows an operation of a later version by its name.

    A command that must understand the operation prints one line that asks for a newer version.
    """
    run = copied("finalised")
    for file in run.glob("collectives/*"):
        changed(file, with_value("op", "all_transmogrify"))
    assert execute(["report", str(run)]) == 0
    assert "all_transmogrify" in capsys.readouterr().out
    for words in (["export", run, "--out", tmp_path / "x", "--format", "chakra"], ["finalise", run]):
        assert execute(list(map(str, words))) == 1
        said = capsys.readouterr().err
        assert "'all_transmogrify' is not an operation of this version of commprof; install" in said
        assert said.count("\n") == 1


def test_an_operation_of_a_later_version_is_a_mismatch(copied, capsys):
    """verify reports a mismatch if ranks issued different operations and one is unknown.

    This case used to end in a traceback.
    """
    run = copied("finalised")
    (one, *_) = sorted(run.glob("collectives/*"))
    changed(one, with_value("op", "all_transmogrify"))
    assert execute(["verify", str(run)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"rank \d issued all_transmogrify #\d", said), said


def test_the_files_of_a_rank_of_a_later_version_are_kept(copied, capsys):
    run = copied("unfinalised")
    events = run / "rank-00001-0-4000001.events"
    events.write_text(events.read_text().replace('"op":"all_reduce"', '"op":"all_transmogrify"'))
    kept = contents(run)
    assert "all_transmogrify" in events.read_text()
    assert execute(["report", str(run)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    wanted = "names the operation 'all_transmogrify', which this version of commprof does not have"
    assert f"{events.name} {wanted}" in said
    assert execute(["verify", str(run)]) == 3
    after = contents(run)
    assert all(after[name] == kept[name] for name in kept if "rank-00001" in name)


def test_a_manifest_of_a_later_commprof_with_the_same_schema_is_read(copied, capsys):
    run = copied("finalised")
    content = json.loads((run / "run.json").read_text())
    content |= {"commprof_version": "9.9", "novel": {"a": 1}, "tables": [*content["tables"], "novel"]}
    content["ranks"][0]["novel"] = [1]
    (run / "run.json").write_text(json.dumps(content))
    assert execute(["report", str(run)]) == 0
    content["schema_version"] = 99
    (run / "run.json").write_text(json.dumps(content))
    assert execute(["report", str(run)]) == 1
    said = capsys.readouterr().err
    assert "schema version 99 by commprof 9.9" in said and said.count("\n") == 1


@pytest.mark.sampled
@pytest.mark.parametrize("suffix", ["records", "events"])
def test_a_file_that_was_cut_off_leaves_the_ledger_open(copied, capsys, suffix):
    run = copied("unfinalised")
    file = run / f"rank-00001-0-4000001.{suffix}"
    damaged_files.truncated(file)
    for _ in ("as it is", "finalised"):
        assert execute(["verify", str(run)]) == 3
        said = " ".join(capsys.readouterr().out.split())
        assert f"Cannot tell: rank 1: {file.name} was truncated when it was read" in said
