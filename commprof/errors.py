"""The errors that commprof reports, and the exit code of each.

::

    CommprofError            exit 1
    ├── UsageError           exit 2    arguments, options or config files that cannot be used
    ├── TraceError           exit 1    a run directory that cannot be read or written
    │   └── SchemaError      exit 1    ... because it was written by another version
    ├── LogError             exit 1    an NCCL log that cannot be read
    ├── MissingExtraError    exit 1    a package of an extra that is not installed
    └── LaunchError          exit 125  commprof's own failure while it runs the user's program

Packages define their own errors as subclasses of these (``commprof.requested.errors``).

A message contains what happened, with values; what was expected; and what to do. The command line prints
the message on one line and exits. The user sees no traceback.
"""

from __future__ import annotations

from commprof.exit_codes import ExitCode


class CommprofError(Exception):
    """An error whose message is written for the person at the terminal."""

    exit_code = ExitCode.FAILED


class UsageError(CommprofError):
    """The arguments or a config file cannot be used as they are."""

    exit_code = ExitCode.USAGE


class TraceError(CommprofError):
    """A run directory cannot be read or written."""


class SchemaError(TraceError):
    """A run was written with a schema that this version does not read."""


class LogError(CommprofError):
    """An NCCL log cannot be read."""


class MissingExtraError(CommprofError):
    """A package that belongs to one of commprof's extras is not installed.

    Args:
        package: The package that could not be imported, for example ``"pandas"``.
        extra: The extra that installs the package, for example ``"analysis"``.
        purpose: The purpose for which the package is needed, for example ``"to read a run"``.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{package} is needed {purpose}, and is not installed. Install it with: "
            f"pip install 'commprof[{extra}]'"
        )
        self.package = package
        self.extra = extra


class LaunchError(CommprofError):
    """commprof could not start or watch the user's program."""

    exit_code = ExitCode.LAUNCH_FAILED
