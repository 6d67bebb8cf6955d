"""Test bad input at the command line.

There is one message, the correct exit code and no traceback, and nothing is overwritten.
"""

import json
import socket

import pytest

from commprof.cli import execute, main
from commprof.schema import SCHEMA_VERSION


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def failing(capsys, line: str, code: int) -> str:
    """Return the only message of a command line that fails with ``code``."""
    assert execute(line.split()) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert printed.err.startswith("commprof: error: ")
    assert printed.err.count("commprof: error: ") == 1
    return printed.err.removeprefix("commprof: error: ").strip()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run", "no program was given"),
        ("run missing.py", "no such script: missing.py"),
        ("run --nproc 0 train.py", "--nproc 0: a number of ranks, 1 or more, was expected"),
        ("run --nproc -3 train.py", "--nproc -3: a number of ranks"),
        ("run --nproc two train.py", "--nproc two: a number of ranks"),
        ("run --nproc 1.5 train.py", "--nproc 1.5: a number of ranks"),
        ("run --nprocs 2 train.py", "No such option: --nprocs"),
        (
            "run --config ds.json train.py",
            "No such option: --config; put the options of a script after the script.",
        ),
        ("run --nproc", "--nproc"),
        ("run .", "is a directory without __main__.py"),
        ("run -m", "-m needs the name of a module"),
        ("run -- no-such-launcher train.py", "no such command: no-such-launcher"),
        ("sweep --set a=1 -- missing.py", "no such script: missing.py"),
        ("sweep -- train.py", "--set"),
        ("sweep --set a=1 --repeat 0 -- train.py", "--repeat 0"),
        ("sweep --set a=1 -- train.py", "none of --config, --deepspeed_config and --ds_config"),
        ("sweep --set a=1 --config-arg cfg -- train.py --config x", "no argument --cfg"),
        ("sweep --set a=1 -- train.py --config none.json", "no such config file: none.json"),
        ("sweep --set a=True -- train.py --config ds.json", "True is Python; JSON writes true"),
        ("sweep --set a.b=1 -- train.py --config ds.json", "a is 1 in the config, which is not an object"),
        ("sweep --set a=2 -- train.py --config bad.json", "line 1, column 7: True is Python"),
        ("dashboard train.py", "is a file; a directory of runs was expected"),
        ("dashboard --port 99999", "99999"),
        ("export latest --format pdf --out x", "'--format': 'pdf' is not"),
        ("frobnicate", "No such command 'frobnicate'"),
        ("reprot latest", "Did you mean 'report'"),
    ],
)
def test_usage_errors(capsys, empty_directory, line, message):
    (empty_directory / "train.py").write_text("raise SystemExit('it was started')")
    (empty_directory / "ds.json").write_text('{"a": 1}')
    (empty_directory / "bad.json").write_text('{"a": True}')
    assert message in failing(capsys, line, 2)
    assert sorted(path.name for path in empty_directory.iterdir()) == ["bad.json", "ds.json", "train.py"]


@pytest.mark.parametrize("verb", ["report", "compare", "export --out csv", "align"])
def test_directories_that_are_no_runs(capsys, empty_directory, verb):
    logs = " log.txt" if verb == "align" else ""
    (empty_directory / "empty").mkdir()
    (empty_directory / "file").touch()
    for run, message in (
        ("nowhere", "nowhere does not exist"),
        ("empty", "empty is not a run directory"),
        ("file", "file is a file"),
        ("latest", "there is no run in traces"),
    ):
        words = verb.split()
        assert message in failing(capsys, " ".join([words[0], run, *words[1:]]) + logs, 1)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (
            json.dumps({"schema_version": SCHEMA_VERSION + 1, "commprof_version": "9.0"}),
            "Install a newer commprof",
        ),
        (json.dumps({"schema_version": 1, "state": "complete"})[:20], "is not valid JSON"),
        ("", "is not valid JSON"),
        ("[]", "has no schema_version"),
    ],
)
def test_manifests_that_cannot_be_read(capsys, empty_directory, manifest, message):
    run = empty_directory / "run"
    run.mkdir()
    (run / "run.json").write_text(manifest)
    assert message in failing(capsys, "report run", 1)
    assert (run / "run.json").read_text() == manifest


@pytest.mark.parametrize("option", ["", "--force "])
def test_a_directory_that_is_no_run_is_never_replaced(capsys, empty_directory, option):
    (empty_directory / "train.py").write_text("raise SystemExit('it was started')")
    (empty_directory / "thesis").mkdir()
    (empty_directory / "thesis" / "chapter.tex").write_text("years of work")
    assert "is not empty and is not a run" in failing(capsys, f"run {option}--out thesis train.py", 2)
    assert "so it is not changed" in failing(
        capsys,
        f"sweep {option}--set a=1 --out thesis -- train.py --config ds.json".replace("ds.json", _config()),
        2,
    )
    assert (empty_directory / "thesis" / "chapter.tex").read_text() == "years of work"


def _config() -> str:
    with open("ds.json", "w") as file:  # noqa: PTH123
        file.write("{}")
    return "ds.json"


def test_out_is_a_file_or_below_one(capsys, empty_directory):
    (empty_directory / "train.py").write_text("raise SystemExit('it was started')")
    assert "train.py is a file" in failing(capsys, "run --out train.py train.py", 2)
    assert "cannot be used" in failing(capsys, "run --out train.py/run train.py", 125)


def test_a_port_in_use_is_named(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = failing(capsys, f"dashboard --port {port}", 1)
    assert f"port {port} of 127.0.0.1 is in use" in message
    assert "--port" in message


def test_a_host_that_is_not_ours(capsys):
    assert "cannot listen on 192.0.2.1" in failing(capsys, "dashboard --host 192.0.2.1 --port 0", 1)


def test_logs_that_cannot_be_read(capsys):
    assert "missing.log" in failing(capsys, "nccl parse missing.log", 1)


def test_a_missing_package_is_one_line(capsys, monkeypatch, empty_directory):
    run = empty_directory / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"schema_version": 1}))
    monkeypatch.setitem(__import__("sys").modules, "commprof.trace.reader", None)
    import builtins

    real = builtins.__import__

    def without_pyarrow(name, *args, **kwargs):
        if name == "commprof.trace.reader":
            raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    message = failing(capsys, "report run", 1)
    assert message == (
        "pyarrow is needed to read a run, and is not installed. Install it with: pip install 'commprof[analysis]'"
    )


def test_version_and_help(capsys):
    assert execute(["--version"]) == 0
    assert capsys.readouterr().out == "commprof 0.1.0\n"
    assert execute(["--help"]) == 0
    text = capsys.readouterr().out
    for verb in ("run", "report", "compare", "sweep", "nccl", "align", "export", "dashboard", "doctor"):
        assert f"\n  {verb} " in text
    assert execute([]) == 2
    assert "Usage: commprof" in capsys.readouterr().err


def test_main_ends_with_the_exit_code():
    with pytest.raises(SystemExit) as ended:
        main(["run"])
    assert ended.value.code == 2
