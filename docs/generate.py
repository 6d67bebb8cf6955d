"""Write the generated pages of docs/ from the code: ``python docs/generate.py [--check]``."""

from __future__ import annotations

import sys
from pathlib import Path

from commprof import schema

DOCS = Path(__file__).parent


def schema_page() -> str:
    """docs/schema.md: every table and column, as declared in commprof/schema.py."""
    lines = [
        f"# Schema, version {schema.SCHEMA_VERSION}",
        "",
        "Generated from `commprof/schema.py` by `make docs`; do not edit.",
        "",
        "All `*_ns` are CLOCK_MONOTONIC in nanoseconds, one clock for all ranks of a host. Columns that no layer fills yet are null.",
    ]
    for table in schema.TABLES.values():
        lines += ["", f"## {table.name}", "", table.doc]
        if table.key:
            lines += ["", "Key: " + ", ".join(f"`{name}`" for name in table.key)]
        lines += ["", "| column | type | unit | null | meaning |", "|---|---|---|---|---|"]
        for column in table.columns:
            doc = column.doc.replace("|", "\\|")
            if column.values:
                doc += " (" + ", ".join(f"`{value}`" for value in column.values) + ")"
            lines.append(
                f"| `{column.name}` | {column.type} | {column.unit} | {'yes' if column.nullable else ''} | {doc} |"
            )
    lines += [
        "",
        "## The binary record",
        "",
        f"While a process runs, each collective is one record of {schema.RECORD.size} bytes (little endian, `{schema.RECORD.format}`).",
        "",
        "| field | code | holds |",
        "|---|---|---|",
        *(f"| `{field.name}` | `{field.code}` | {field.doc} |" for field in schema.RECORD_FIELDS),
        "",
    ]
    return "\n".join(lines)


def command_line_page() -> str:
    """docs/cli.md: every verb and option, as the command itself states them."""
    from commprof.cli.reference import command_reference

    return command_reference()


PAGES = {"schema.md": schema_page, "cli.md": command_line_page}


def main() -> int:
    """Write the pages, or with --check report those that are not current."""
    check = "--check" in sys.argv[1:]
    stale = []
    for name, page in PAGES.items():
        path, text = DOCS / name, page()
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not check:
                path.write_text(text)
                print(f"wrote docs/{name}")
    if check and stale:
        print(f"not current: {', '.join(stale)}; run: make docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
