"""A configuration error that ends the program is one line and exit code 2, on every rank the same code, on one the line.

A mistake in a config file is the user's own, and Python's traceback through this package would hide the sentence that
says what to do. A script that catches the error sees nothing of this.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Final, ParamSpec, TypeVar

from zero_runtime.errors import ConfigError

EXIT_CODE: Final = 2
P = ParamSpec("P")
R = TypeVar("R")


def reports_config_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Let an uncaught ConfigError of ``function`` end the program with its message alone."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except ConfigError:
            _install()
            raise

    return call


def _install() -> None:
    # The hook that is there now may be torch.distributed's, which marks tracebacks with the rank: others go to it.
    previous = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, ConfigError):
            previous(kind, error, trace)
            return
        if os.environ.get("RANK", "0") == "0":
            print(f"zero_runtime: error: {error}", file=sys.stderr, flush=True)
        # Python takes the exit code of a SystemExit that leaves the hook.
        raise SystemExit(EXIT_CODE)

    if getattr(previous, "__module__", None) != __name__:
        sys.excepthook = report
