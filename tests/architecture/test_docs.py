"""The documentation describes the code correctly."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_generated_pages_are_current(monkeypatch, capsys):
    """The generated pages are equal to the output of docs/generate.py.

    The generator runs in this process, which has already imported the modules that the pages describe.
    """
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    assert generate.main() == 0, capsys.readouterr().err


def walk_of_one_bucket() -> list[str]:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    section = text.split("## The path of one gradient bucket")[1].split("\n## ")[0]
    names = re.findall(r"^\| \d+ \| `([\w.]+)`", section, flags=re.MULTILINE)
    assert len(names) >= 10
    return names


def resolve(name: str):
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def test_each_step_of_the_walk_exists():
    for name in walk_of_one_bucket():
        assert callable(resolve(name)), name


def test_every_module_of_the_packages_is_listed():
    text = (ROOT / "docs" / "modules.md").read_text()
    missing = [
        str(path.relative_to(ROOT))
        for package in ("commprof", "runtime/zero_runtime", "dashboards/commprof_dash")
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.name not in {"__init__.py", "__main__.py"} and f"`{path.relative_to(ROOT)}`" not in text
    ]
    assert not missing, f"docs/modules.md does not list: {missing}"


@pytest.mark.parametrize("page", ["README.md", "docs/ARCHITECTURE.md"])
def test_verbs_that_a_page_shows_exist(page):
    from commprof.cli.reference import command_reference

    verbs = set(re.findall(r"commprof ([a-z]+)", command_reference()))
    shown = set(re.findall(r"^\s*(?:\$ )?commprof ([a-z]+)", (ROOT / page).read_text(), re.MULTILINE))
    assert shown <= verbs, shown - verbs
