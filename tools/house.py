"""Prints figures about the structure of the code (``make house``). It reports and never fails.

The figures are: modules per folder, module names that are used more than once, import cycles, functions over 60 lines,
files of each recipe, and words in the prose for which the glossary has other words.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grimp

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = ("commprof", "zero_runtime", "commprof_dash")
FOLDERS: Final = (ROOT / "commprof", ROOT / "runtime" / "zero_runtime", ROOT / "dashboards" / "commprof_dash")
MOST_MODULES: Final = 15
MOST_LINES: Final = 60
# The words for which docs/glossary.md has other words.
REPLACED: Final = (
    r"stands? still", r"stood still", r"holds? the program up", r"behind its work", r"comes? late", r"told apart",
    r"slices?", r"words of", r"fetch(es|ed|ing)?", r"asked for", r"what it stands for", r"by itself", r"beneath",
    r"in the place of", r"of which", r"has not\b",
)  # fmt: skip


def modules() -> list[Path]:
    """Return the modules of the three packages."""
    return sorted(file for folder in FOLDERS for file in folder.rglob("*.py"))


def rooms() -> Counter[str]:
    """Return the number of modules in each folder, without ``__init__.py``."""
    return Counter(str(file.parent.relative_to(ROOT)) for file in modules() if not file.name.startswith("__"))


def reused_names() -> dict[str, int]:
    """Return the module names that are used more than once, with the number of uses."""
    names = Counter(file.stem for file in modules() if not file.name.startswith("__"))
    return {name: count for name, count in names.most_common() if count > 1}


def circles(with_types: bool) -> list[list[str]]:
    """Return the import cycles: sets of modules that import each other directly or indirectly.

    Args:
        with_types: Whether imports that are needed only for annotations count too.
    """
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=not with_types, cache_dir=None)
    imported = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    found = []
    left = set(imported)
    while left:
        start = left.pop()
        forward = _reached(start, imported)
        circle = {name for name in forward if start in _reached(name, imported)} | {start}
        left -= circle
        if len(circle) > 1:
            found.append(sorted(circle))
    return sorted(found, key=len)


def _reached(start: str, imported: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for name in imported.get(waiting.pop(), ()):
            if name not in found:
                found.add(name)
                waiting.append(name)
    return found


def long_functions() -> Iterator[tuple[str, int]]:
    """Yield the location and the number of lines of each function with more than :data:`MOST_LINES` lines."""
    for file in modules():
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MOST_LINES:
                    yield f"{file.relative_to(ROOT)}:{node.name}", lines


def misses() -> Counter[str]:
    """Count how often the prose (documents, docstrings, messages) uses each word that the glossary replaces."""
    texts = [file.read_text("utf-8") for file in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))]
    for file in modules():
        nodes = ast.walk(ast.parse(file.read_text("utf-8")))
        texts += [
            node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
    whole = "\n".join(texts)
    return Counter({word: len(re.findall(rf"\b{word}\b", whole)) for word in REPLACED})


def recipes() -> Iterator[tuple[str, str]]:
    """Yield each recipe of CONTRIBUTING.md with the number of files that the recipe states."""
    yield from re.findall(r"^### (.+) \((.+)\)$", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE)


def main() -> None:
    """Print all figures."""
    large = {room: count for room, count in rooms().most_common() if count > MOST_MODULES}
    print(f"{len(modules())} modules; rooms of more than {MOST_MODULES}: {len(large)}")
    for room, count in large.items():
        print(f"  {count:3}  {room}")
    names = reused_names()
    print(f"module names used more than once: {len(names)}")
    print("  " + ", ".join(f"{name} {count}" for name, count in names.items()))
    for label, with_types in (("at run time", False), ("with annotations", True)):
        found = circles(with_types)
        print(f"import circles, {label}: {len(found)}")
        for circle in found:
            print(f"  {len(circle)}: {', '.join(circle[:8])}{', ...' if len(circle) > 8 else ''}")
    functions = list(long_functions())
    print(f"functions over {MOST_LINES} lines: {len(functions)}")
    for place, lines in functions:
        print(f"  {lines:3}  {place}")
    print("recipes, and how many files a change touches:")
    for recipe, files in recipes():
        print(f"  {files:25}  {recipe}")
    counted = misses()
    print(f"words that the glossary replaces: {counted.total()}")
    print("  " + ", ".join(f"{word} {count}" for word, count in counted.most_common()))


if __name__ == "__main__":
    main()
