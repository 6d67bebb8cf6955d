"""Builds the command ``commprof`` from the verbs, and runs the verb that the arguments name."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Final

import typer

from commprof.cli import verbs
from commprof.cli.console import error

USAGE: Final = 2


def verb_modules() -> dict[str, str]:
    """Return the name of the module of each verb, by verb. Imports no module."""
    return {module.name.rstrip("_"): module.name for module in iter_modules(verbs.__path__)}


def build(verb: str | None = None) -> typer.Typer:
    """Return the command ``commprof`` with all verbs in the order of the help page.

    If ``verb`` is the name of a verb, the command has only this verb.
    """
    app = typer.Typer(
        name="commprof",
        help="Record every collective of a training job, and see what was requested, issued, executed and moved.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,  # plain help: complete in a pipe, and 0.1 s faster
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_global_options)
    names = verb_modules()
    modules = {
        name: import_module(f"{verbs.__name__}.{names[name]}")
        for name in ([verb] if verb in names else names)
    }
    for name, module in sorted(modules.items(), key=lambda each: each[1].HELP_ORDER):
        handler = getattr(module, names[name])
        if isinstance(handler, typer.Typer):
            app.add_typer(handler, name=name)
        else:
            app.command(name)(handler)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        from commprof.version import __version__

        typer.echo(f"commprof {__version__}")
        raise typer.Exit


def _global_options(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
    ),
) -> None:
    """Declare the global options. The callback of ``--version`` prints the version."""


def invoke(argv: list[str]) -> int:
    """Run the command line ``argv`` and return the exit code.

    Raises:
        CommprofError: the verb failed.
    """
    # The class is typer's or click's, depending on the version of typer.
    command: Any = typer.main.get_command(build(argv[0] if argv else None))
    try:
        outcome = command.main(
            args=separate_program(command, argv), prog_name="commprof", standalone_mode=False
        )
    except typer.Abort:
        raise KeyboardInterrupt from None
    except SystemExit as leaving:
        # typer exits with 1 when the reader of the output has closed it.
        raise leaving.__context__ if isinstance(leaving.__context__, BrokenPipeError) else leaving from None
    except Exception as problem:
        # typer uses its own copy of click or the installed click, so the attributes identify the error, not the class.
        if not (hasattr(problem, "format_message") and hasattr(problem, "exit_code")):
            raise
        return _explain_usage(problem)
    return outcome if isinstance(outcome, int) else 0


def separate_program(command: Any, argv: list[str]) -> list[str]:
    """Insert ``--`` before the user's program, so that commprof does not parse the program's options."""
    verb = command.commands.get(argv[0]) if argv else None
    if verb is None or not _takes_program(verb):
        return argv
    from commprof.launch.user_program import split_arguments

    with_value = {
        name
        for parameter in verb.params
        if parameter.param_type_name == "option" and not parameter.is_flag
        for name in parameter.opts
    }
    own, program = split_arguments(argv[1:], with_value)
    return [argv[0], *own, *(["--", *program] if program else [])]


def _takes_program(command: Any) -> bool:
    """Return whether ``command`` takes a program of the user, with the program's own options, after its options."""
    return any(parameter.name == "program" for parameter in getattr(command, "params", ()))


def _explain_usage(problem: Any) -> int:
    context = getattr(problem, "ctx", None)
    if type(problem).__name__ == "NoArgsIsHelpError":
        typer.echo(context.get_help() if context is not None else problem.format_message(), err=True)
        return USAGE
    message = str(problem.format_message()).strip().removesuffix(".").replace("Value error, ", "")
    if type(problem).__name__ == "NoSuchOption" and _takes_program(getattr(context, "command", None)):
        message += "; put the options of a script after the script"
    end = "" if message.endswith("?") else "."
    error(f"{message}{end} See: {context.command_path if context is not None else 'commprof'} --help")
    return USAGE
