"""Generates docs/cli.md: every verb with its arguments and options and their help texts."""

from __future__ import annotations

import inspect
from typing import Any, Final

import typer

from commprof.cli.application import build
from commprof.exit_codes import MEANINGS

_HEAD: Final = """# Command line

Reference. For people who use the commands.
Generated from `commprof/cli/` by `make docs`; do not edit.

Put options of commprof before the script. commprof passes everything after the script to the script
unchanged. RUN is a run directory, or `latest` for the newest run below `traces/`. Commands overwrite files
only with `--force`. Results go to standard output. Everything else goes to standard error.

`commprof run` returns the exit code of the script. If several ranks fail, it returns the exit code of the
rank that failed first. If a signal ends the script, the exit code is 128 plus the number of the signal.
With `-- CMD`, `commprof run` returns the exit code of CMD. The commands also return these exit codes:

| exit code | meaning |
|---|---|
{codes}
"""


def command_reference() -> str:
    """Return the page docs/cli.md as Markdown."""
    command: Any = typer.main.get_command(build())
    codes = "\n".join(f"| {int(code)} | {text} |" for code, text in MEANINGS.items())
    sections = [_HEAD.format(codes=codes)]
    for name, verb in command.commands.items():
        if hasattr(verb, "commands"):
            sections.extend(_verb(f"{name} {below}", inner) for below, inner in verb.commands.items())
        else:
            sections.append(_verb(name, verb))
    return "\n".join(sections)


def _verb(name: str, verb: Any) -> str:
    words = [
        parameter.metavar or parameter.name.upper() for parameter in verb.params if _is_argument(parameter)
    ]
    lines = [f"## commprof {name}", "", f"    commprof {' '.join([name, '[OPTIONS]', *words])}", ""]
    lines += [inspect.cleandoc(verb.help or ""), ""]
    rows = [_row(parameter) for parameter in verb.params]
    return "\n".join([*lines, "| | |", "|---|---|", *rows, ""])


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _row(parameter: Any) -> str:
    if _is_argument(parameter):
        written = parameter.metavar or parameter.name.upper()
    else:
        value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
        written = ", ".join(sorted(parameter.opts, key=len)) + value
    text = (parameter.help or "").replace("|", "\\|")
    default = parameter.default
    if default not in (None, False, ()) and not callable(default) and parameter.show_default is not False:
        text += f" Default: `{default}`."
    if parameter.required and not _is_argument(parameter):
        text += " Required."
    return f"| `{written}` | {text} |"
