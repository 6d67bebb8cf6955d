"""Writes the generated pages of docs/ from the code: ``python docs/generate.py [--check]``."""

from __future__ import annotations

import ast
import html
import json
import re
import sys
from pathlib import Path
from textwrap import fill
from types import SimpleNamespace
from typing import TYPE_CHECKING

from commprof import schema
from commprof.trace.fingerprint import Opening

if TYPE_CHECKING:
    import pyarrow as pa

    from commprof.analysis.relations.evaluation import RunViews
    from zero_runtime.configuration.reading.key_table import Key

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent


def schema_page() -> str:
    """Return docs/schema.md: every table and column, as declared in commprof/schema.py."""
    lines = [
        f"# Schema, version {schema.SCHEMA_VERSION}",
        "",
        "Reference. For people who read the tables of a run.",
        "Generated from `commprof/schema.py` by `make docs`; do not edit.",
        "",
        "Columns whose names end in `_ns` contain times or durations in nanoseconds. Times are readings of",
        "CLOCK_MONOTONIC, unless the meaning of the column names CLOCK_REALTIME. All ranks of a host read",
        "the same CLOCK_MONOTONIC. A column is null if nothing fills it yet.",
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
        f"While a process runs, it writes one record of {schema.RECORD.size} bytes for each collective. The record",
        f"is little endian. Its format, in the notation of Python's `struct` module, is `{schema.RECORD.format}`.",
        "",
        "| field | code | holds |",
        "|---|---|---|",
        *(f"| `{field.name}` | `{field.code}` | {field.doc} |" for field in schema.RECORD_FIELDS),
        "",
    ]
    return "\n".join(lines)


def relations_page() -> str:
    """Return docs/relations.md: every relation with its grain, inputs and columns, as declared in its file."""
    from commprof.analysis.relations import relation_graph
    from commprof.analysis.relations.evaluation import BY, RunViews

    lines = [
        "# Relations",
        "",
        "Reference. For people who query a run with SQL.",
        "Generated from `commprof/analysis/relations/*.sql` by `make docs`; do not edit.",
        "",
        "A relation is derived from the tables of a run ([schema](schema.md)). Most relations are defined",
        "in SQL. The last relations on this page are evaluated in Python. commprof computes its answers by",
        "querying relations. You can also run your own query:",
        "",
        '    commprof query latest "select op, sum(collectives), sum(payload_bytes) from operations group by op"',
        "",
        "In a notebook, a relation is lazy. DuckDB evaluates the relation only when you request its rows.",
        "",
        '    run = commprof.open("latest")',
        '    run.relation("operations", by=["op", "purpose"]).df()   # or .pl(), .arrow()',
        "",
        "A relation that is marked as *summed* has one row for each combination of the columns that you",
        "request. Request as few columns as possible. If you request all columns, the relation has nearly",
        "one row per call. You can request these columns: " + ", ".join(f"`{name}`" for name in BY) + ".",
    ]
    views = RunViews(_EmptyRun())  # type: ignore[arg-type] # implements only the used attributes
    for name in relation_graph.names():
        relation = relation_graph.relation(name)
        summed = " *Summed.*" if re.search(r"\{(by|requested|flow)\}", relation.sql) else ""
        inputs = ", ".join(dict.fromkeys(f"`{each.name}`" for each in relation.inputs))
        lines += [
            "",
            f"## {name}",
            "",
            relation.title,
            "",
            fill(f"Grain: {relation.grain}.{summed} Inputs: {inputs}.", 100),
        ]
        for paragraph in filter(None, relation.notes.split("\n\n")):
            lines += ["", fill(paragraph, 100)]
        lines += _columns_of(views, name)
    for name, (title, grain) in relation_graph.MADE.items():
        lines += [
            "",
            f"## {name}",
            "",
            fill(title, 100),
            "",
            f"Grain: {grain}. Evaluated in Python.",
            *_columns_of(views, name),
        ]
    return "\n".join([*lines, ""])


class _EmptyRun:
    """A run without rows, from which the columns of relations are determined."""

    path = ROOT
    manifest = SimpleNamespace(hosts=())

    def __init__(self) -> None:
        self.state = Opening()

    def scan(self, name: str, most_rows: int | None = None) -> pa.Table:
        return self.table(name)

    def table(self, name: str) -> pa.Table:
        from commprof.trace.tables import empty_table

        return empty_table(name)


def _columns_of(views: RunViews, name: str) -> list[str]:
    found = views.relation(name)
    kinds = dict(zip(found.columns, found.types, strict=True))
    recorded = schema.COLLECTIVES.names
    has_records = set(recorded) <= set(kinds)
    own = [
        f"`{column}` {str(kind).lower()}"
        for column, kind in kinds.items()
        if not has_records or column not in recorded
    ]
    text = ", ".join([*(["those of [collectives](schema.md#collectives)"] if has_records else []), *own])
    return ["", fill(f"Columns: {text}.", 100, break_on_hyphens=False)]


def command_line_page() -> str:
    """Return docs/cli.md: every verb and option with the help texts of the command."""
    from commprof.cli.reference import command_reference

    return command_reference()


def config_page() -> str:
    """Return docs/config.md: every configuration key, as declared in the tables of zero_runtime/configuration/."""
    from zero_runtime.configuration.all_keys import BLOCKS

    lines = [
        "# Configuration",
        "",
        "Reference. For people who write a config.",
        "Generated from `zero_runtime/configuration/all_keys.py` by `make docs`; do not edit.",
        "",
        "The configuration has the format of DeepSpeed 0.19.8: a JSON file or a dictionary. Pass it to `initialize` as",
        "`config` or as `args.deepspeed_config`. A key that is in none of the tables below raises an error,",
        "at the top level and in every block. The message names the most similar key.",
        "[The differences](deepspeed-differences.md) list the keys that differ from DeepSpeed's.",
        "Sizes are in elements, unless the meaning says bytes.",
        "",
        'The column "status" has one of these values:',
        "",
        "- *implemented*",
        "- *no effect*, with the reason. The value is checked; a notice reports a value other than the default.",
        "- *later*: the key belongs to the named feature, which this version does not have. Values that",
        "  enable the feature are refused. The text in parentheses says what this version does instead.",
        "- *refused*, with the reason. DeepSpeed refuses most of these keys too.",
    ]
    for name, table in BLOCKS.items():
        lines += [
            "",
            f"## `{name}`" if name else "## Top level",
            "",
            "| key | type | default | meaning | status |",
            "|---|---|---|---|---|",
            *(_config_row(key_name, key) for key_name, key in table.items()),
        ]
    return "\n".join(lines) + "\n"


def _config_row(name: str, key: Key) -> str:
    statuses = {
        "used": "implemented",
        "inert": f"no effect: {key.note}",
        "later": f"later: {key.note}",
        "waiting": f"later: {key.note}",
        "refused": f"refused: {key.note}",
    }
    instead = f" ({key.instead})" if key.instead else ""
    stage = "stage 3: " if key.stage_3_only else ""
    default = "-" if key.status == "refused" else f"`{json.dumps(key.default)}`"
    meaning = f"{stage}{key.meaning}"
    return f"| `{name}` | {key.check.expected} | {default} | {meaning} | {statuses[key.status]}{instead} |"


def modules_page() -> str:
    """Return docs/modules.md: the path of every module of the three packages, with the first line of its docstring."""
    lines = [
        "# Modules\n\n",
        "Reference. For people who look for the module that does something. Generated from the first line of\n",
        "each module by `make docs`; do not edit. [The parts](ARCHITECTURE.md) come first.\n",
    ]
    for package in ("commprof", "runtime/zero_runtime", "dashboards/commprof_dash"):
        for folder in sorted({path.parent for path in (ROOT / package).rglob("*.py")}):
            initial = first_line(folder / "__init__.py") if (folder / "__init__.py").exists() else ""
            lines.append(f"\n## {folder.relative_to(ROOT)}\n\n{initial}\n\n")
            lines += [
                f"- `{path.relative_to(ROOT)}`: {first_line(path)}\n"
                for path in sorted(folder.glob("*.py"))
                if path.name not in {"__init__.py", "__main__.py"}
            ]
    return "".join(lines)


def gallery_page() -> str:
    """Return docs/gallery.md: every page of the dashboard with its question and, if it exists, its picture."""
    from commprof_dash.pages import PAGES

    lines = [
        "# The pages of the dashboard",
        "",
        "Reference. For people who want to see what the dashboard answers, or look for the page with an answer.",
        "Generated from `commprof_dash/pages/` by `make docs`; do not edit.",
        "",
        "    commprof dashboard            # http://127.0.0.1:8050, on this machine only",
        "",
        "The pictures show runs of `make demo`: five settings of a small GPT on two gloo ranks. The NCCL log of",
        "the page Alignment is generated. `docs/screenshots/make_screenshots.py --gallery` takes the pictures.",
    ]
    for page in PAGES:
        picture = f"screenshots/gallery-{page.path.strip('/') or 'runs'}.png"
        lines += ["", f"## {page.title}", "", page.question]
        if (DOCS / picture).exists():
            lines += ["", f"![Page {page.title}: {page.question}]({picture})"]
    return "\n".join([*lines, ""])


def deepspeed_names_page() -> str:
    """Return docs/deepspeed-names.md with updated lists of names."""
    from zero_runtime.deepspeed_names.tables.catalogue import page

    return renewed("deepspeed-names.md", "names", f"\n{page()}\n\n")


def renewed(name: str, part: str, text: str) -> str:
    """Return the page ``name`` with the text between the marks of ``part`` replaced by ``text``."""
    before, _, rest = (DOCS / name).read_text().partition(f"<!-- {part} -->\n")
    _, _, after = rest.partition(f"<!-- /{part} -->")
    return f"{before}<!-- {part} -->\n{text}<!-- /{part} -->{after}"


def glossary_asset() -> str:
    """Return the HTML page of the glossary that the dashboard links to, generated from docs/glossary.md."""
    body = []
    for block in (DOCS / "glossary.md").read_text().strip().split("\n\n"):
        mark, _, rest = block.partition(" ")
        level = len(mark) if set(mark) == {"#"} else 0
        text = html.escape(" ".join((rest if level else block).split()), quote=False)
        # The links are removed, because the other pages of docs/ are not in the package.
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
        text = re.sub(r"`([^`]*)`", r"<code>\1</code>", text)
        text = re.sub(r"\*\*(.+?)\*\*", r"<dfn>\1</dfn>", text)
        body.append(f"<h{level}>{text}</h{level}>" if level else f"<p>{text}</p>")
    style = (
        ":root { color-scheme: light dark; } body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 75ch; "
        "padding: 24px 20px 60px; } dfn { font-style: normal; font-weight: 650; } code { overflow-wrap: anywhere; }"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Glossary - commprof</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<!-- Generated from docs/glossary.md by make docs; do not edit. -->\n<style>{style}</style></head>\n"
        "<body><main>\n" + "\n".join(body) + "\n</main></body></html>\n"
    )


def first_line(path: Path) -> str:
    """Return the first paragraph of a module's docstring as one line."""
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(doc.split("\n\n")[0].split())


PAGES = {
    "schema.md": schema_page,
    "relations.md": relations_page,
    "cli.md": command_line_page,
    "config.md": config_page,
    "modules.md": modules_page,
    "gallery.md": gallery_page,
    "deepspeed-names.md": deepspeed_names_page,
    "../dashboards/commprof_dash/assets/glossary.html": glossary_asset,
}


def main() -> int:
    """Write the pages, or with --check report the pages that are not current."""
    check = "--check" in sys.argv[1:]
    stale = []
    for name, page in PAGES.items():
        path, text = (DOCS / name).resolve(), page()
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not check:
                path.write_text(text)
                print(f"wrote {path.relative_to(ROOT)}")
    if check and stale:
        print(f"not current: {', '.join(stale)}; run: make docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
