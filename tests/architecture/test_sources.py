"""Rules for the sources that no linter checks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tools.house import circles

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "commprof": ROOT / "commprof",
    "zero_runtime": ROOT / "runtime" / "zero_runtime",
    "commprof_dash": ROOT / "dashboards" / "commprof_dash",
}


def sources(package: str) -> list[Path]:
    return sorted(PACKAGES[package].rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def names_torch_distributed(path: Path) -> bool:
    if "distributed" not in path.read_text():  # skip the slow parsing
        return False
    if any(
        name == "torch.distributed" or name.startswith("torch.distributed.")
        for name in imported_modules(path)
    ):
        return True
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "distributed"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
        for node in ast.walk(ast.parse(path.read_text()))
    )


def test_only_comm_names_torch_distributed_in_the_runtime():
    # The module of the runtime, and the replacement of deepspeed.comm.
    allowed = {"comm.py", "comm_functions.py"}
    found = {path.name for path in sources("zero_runtime") if names_torch_distributed(path)}
    assert found <= allowed, (
        "only zero_runtime/comm.py and deepspeed_names/ranks/comm_functions.py may name torch.distributed; "
        f"so do: {found - allowed}"
    )


def test_a_stage_is_asked_for_only_in_stages_and_config():
    pattern = re.compile(r"\bstage\s*(==|!=|>=|<=|<|>)\s*\d|\bstage\s+(not\s+)?in\s*[({\[]")
    offenders = [
        f"{path.name}:{number}"
        for path in sources("zero_runtime")
        if path.name not in {"stages.py", "config.py"}
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line.split("#")[0])
    ]
    assert not offenders, f"a stage is a row of data in stages.py; these ask for its number: {offenders}"


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_are_named_by_nouns(package):
    vague = {"utils.py", "helpers.py", "common.py", "misc.py", "util.py", "tools.py"}
    assert not {path.name for path in sources(package)} & vague


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_is_left_unfinished(package):
    marks = re.compile(r"\b(TODO|FIXME|XXX)\b|raise NotImplementedError")
    found = [
        f"{path.name}:{n}"
        for path in sources(package)
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert not found


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_from_outside_is_unpickled(package):
    loaders = {"pickle", "dill", "cloudpickle", "shelve", "joblib", "marshal"}
    found = [
        path.name
        for path in sources(package)
        if any(word in path.read_text() for word in (*loaders, "torch.load"))  # skip the slow parsing
        and (
            {name.partition(".")[0] for name in imported_modules(path)} & loaders
            or any(map(loads_objects, ast.walk(ast.parse(path.read_text()))))
        )
    ]
    assert not found


def loads_objects(node: ast.AST) -> bool:
    """Return whether ``node`` is a call of torch.load that may execute code from the file."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != "torch.load":
        return False
    return not any(
        each.arg == "weights_only" and isinstance(each.value, ast.Constant) and each.value.value is True
        for each in node.keywords
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_sources_are_ascii_outside_of_strings_that_people_read(package):
    # Docstrings and output may contain box-drawing and typographic characters. Identifiers and code must not.
    for path in sources(package):
        if path.read_text().isascii():  # skip the slow parsing
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            for name in (getattr(node, "id", None), getattr(node, "name", None), getattr(node, "attr", None)):
                assert not isinstance(name, str) or name.isascii(), f"{path.name}: {name}"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_tuple_is_spliced_to_put_several_names_on_a_line(package):
    """No source writes ``(*("a", "b"), *("c",))`` instead of ``("a", "b", "c")``."""
    spliced = [
        f"{path.name}:{node.lineno}"
        for path in sources(package)
        if re.search(r"\*[(\[]", path.read_text())  # skip the slow parsing
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List)
    ]
    assert not spliced, f"write the names themselves, one on a line: {spliced}"


def test_no_message_puts_a_path_into_a_command_unquoted():
    """Messages quote paths in commands with ``commprof.printable.command_line``.

    A path with spaces that is not quoted would be several words in a shell.
    """
    pattern = re.compile(r"(?<!<)commprof [a-z]+(?: (?:[A-Z.]+|--[a-z-]+))* \{")
    found = [
        (path.name, line.strip())
        for path in sources("commprof")
        for line in path.read_text().splitlines()
        if pattern.search(line)
    ]
    assert found == []


def test_no_imports_are_circular_at_run_time():
    assert circles(with_types=False) == []


def test_imports_for_annotations_are_circular_only_where_the_architecture_says_why():
    justified = [
        ["commprof.recorder.dispatcher.kernels", "commprof.recorder.dispatcher.operator_calls"],
        ["commprof.recorder.process_group.fast_path", "commprof.recorder.process_group.wrappers"],
    ]
    assert sorted(circles(with_types=True)) == justified, "import a narrower module, or move the shared type"
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    assert all(f"{name.split('.')[-1]}.py`" in text for circle in justified for name in circle)
