"""Test that commprof's own options are separated from the program, for all forms that users type."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commprof.errors import UsageError
from commprof.launch.user_program import (
    Kind,
    Program,
    check_program,
    find_argument,
    parse_program,
    replace_argument,
    split_arguments,
)

VALUE_OPTIONS = {"--nproc", "--out", "-o"}


def parse(line: str) -> tuple[list[str], Program]:
    own, words = split_arguments(line.split(), VALUE_OPTIONS)
    return own, parse_program(words)


@pytest.mark.parametrize(
    ("line", "own", "kind", "target", "arguments"),
    [
        ("train.py", "", Kind.SCRIPT, "train.py", ""),
        ("train.py --help", "", Kind.SCRIPT, "train.py", "--help"),
        ("train.py --nproc 4 --out x", "", Kind.SCRIPT, "train.py", "--nproc 4 --out x"),
        ("--nproc 4 train.py --nproc 9", "--nproc 4", Kind.SCRIPT, "train.py", "--nproc 9"),
        ("--nproc=4 train.py", "--nproc=4", Kind.SCRIPT, "train.py", ""),
        ("-o dir --force train.py a", "-o dir --force", Kind.SCRIPT, "train.py", "a"),
        ("-odir train.py", "-odir", Kind.SCRIPT, "train.py", ""),
        ("--out -m train.py", "--out -m", Kind.SCRIPT, "train.py", ""),
        ("train", "", Kind.SCRIPT, "train", ""),
        ("train.py -- x -m y", "", Kind.SCRIPT, "train.py", "-- x -m y"),
        ("train.py -m y", "", Kind.SCRIPT, "train.py", "-m y"),
        ("-m pkg.mod --help", "", Kind.MODULE, "pkg.mod", "--help"),
        ("-mpkg.mod -x", "", Kind.MODULE, "pkg.mod", "-x"),
        ("--nproc 2 -m pkg -- -m z", "--nproc 2", Kind.MODULE, "pkg", "-- -m z"),
        ("-- train.py --help", "", Kind.SCRIPT, "train.py", "--help"),
        ("-- -m pkg a", "", Kind.MODULE, "pkg", "a"),
        (
            "-- torchrun --nproc-per-node 2 t.py -- y",
            "",
            Kind.COMMAND,
            "torchrun",
            "--nproc-per-node 2 t.py -- y",
        ),
        ("--out d -- deepspeed t.py", "--out d", Kind.COMMAND, "deepspeed", "t.py"),
        ("-- python -m pkg", "", Kind.COMMAND, "python", "-m pkg"),
    ],
)
def test_everything_behind_the_own_options_is_the_programs(line, own, kind, target, arguments):
    assert parse(line) == (own.split(), Program(kind, target, tuple(arguments.split())))


@given(st.lists(st.text(max_size=8)))
def test_no_word_is_lost_or_changed(words):
    own, program = split_arguments(words, VALUE_OPTIONS)
    assert own + program == words


@given(st.lists(st.text(max_size=8)))
def test_a_scripts_arguments_are_never_ours(arguments):
    assert split_arguments(["--nproc", "2", "train.py", *arguments], VALUE_OPTIONS)[1] == [
        "train.py",
        *arguments,
    ]


@pytest.mark.parametrize("line", ["", "--force", "--", "--nproc 2", "-m", "-- -m", "-"])
def test_a_line_without_a_program_says_what_to_write(line):
    with pytest.raises(UsageError, match=r"commprof run|module|file"):
        parse(line)


@pytest.mark.parametrize(
    ("line", "stem"),
    [
        ("examples/train_gpt.py --x 1", "train_gpt"),
        ("-m package.module", "module"),
        ("-m package.__main__", "package"),
        ("-- torchrun --nproc-per-node 2 src/train.py other.py", "train"),
        ("-- mpirun prog", "mpirun"),
        ("../x/..", "script"),
    ],
)
def test_runs_are_named_after_the_script(line, stem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse(line)[1].stem == stem


def test_command_lines():
    assert Program(Kind.SCRIPT, "t.py", ("-m",)).command_line(["py", "-O"]) == ["py", "-O", "t.py", "-m"]
    assert Program(Kind.MODULE, "m", ("a",)).command_line(["py"]) == ["py", "-m", "m", "a"]
    assert Program(Kind.COMMAND, "torchrun", ("t.py",)).command_line(["py"]) == ["torchrun", "t.py"]


def test_a_missing_script_is_found_by_its_nearest_name(tmp_path):
    (tmp_path / "train.py").touch()
    with pytest.raises(UsageError, match=r"no such script: .*trian\.py\. Did you mean .*train\.py\?"):
        check_program(Program(Kind.SCRIPT, str(tmp_path / "trian.py")))
    with pytest.raises(UsageError, match=r"There is no directory .*nowhere either"):
        check_program(Program(Kind.SCRIPT, str(tmp_path / "nowhere" / "train.py")))


def test_a_directory_is_a_script_only_with_a_main(tmp_path):
    with pytest.raises(UsageError, match=r"directory without __main__\.py"):
        check_program(Program(Kind.SCRIPT, str(tmp_path)))
    (tmp_path / "__main__.py").touch()
    check_program(Program(Kind.SCRIPT, str(tmp_path)))


def test_a_missing_command():
    with pytest.raises(UsageError, match="no such command: no-such-launcher"):
        check_program(Program(Kind.COMMAND, "no-such-launcher"))


@pytest.mark.parametrize(
    ("arguments", "found", "replaced"),
    [
        (["--config", "a.json"], (1, "a.json"), ["--config", "NEW"]),
        (["--config=a.json", "x"], (0, "a.json"), ["--config=NEW", "x"]),
        (["--config", "a=b.json"], (1, "a=b.json"), ["--config", "NEW"]),
        (["--config", "--a=b"], (1, "--a=b"), None),
        (["--config", "a.json", "--config=b.json"], (2, "b.json"), ["--config", "a.json", "--config=NEW"]),
        (["--configure", "x"], None, None),
        (["--config"], None, None),
        ([], None, None),
    ],
)
def test_a_config_argument_in_both_forms(arguments, found, replaced):
    assert find_argument(arguments, ["--config"]) == (found and ("--config", *found))
    if replaced is not None:
        assert list(replace_argument(arguments, found[0], "NEW")) == replaced


def test_a_readable_script_is_no_error(tmp_path):
    script = Path(tmp_path / "s")
    script.touch()
    check_program(Program(Kind.SCRIPT, str(script)))


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("bash train.sh", "commprof run -- bash ..."),
        ("python train.py", "commprof run SCRIPT (on every rank), or commprof run -- python ... (once)"),
        (
            "-m torch.distributed.run --nproc-per-node 2 train.py",
            "commprof run -- python -m torch.distributed.run ...",
        ),
        ("bin/torchrun train.py", "commprof run -- bin/torchrun ..."),
        ("train.sh 1", "commprof run -- bash train.sh ..."),
    ],
)
def test_what_starts_its_own_ranks_is_not_started_on_every_rank(line, instead, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    for name in ("bin/torchrun", "bin/bash", "bin/python", "train.sh"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", "bin")
    with pytest.raises(UsageError) as refused:
        check_program(parse(line)[1])
    assert str(refused.value).endswith(f"Write: {instead}")
