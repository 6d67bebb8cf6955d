"""commprof: records every collective of a training job, and explains it.

Most users need only the command line (``commprof run train.py``). A program can report more about
itself with the hooks; each costs one flag test while nothing is recording::

    import commprof

    commprof.step(7)
    with commprof.tag("gradient_reduce", bucket=3):
        torch.distributed.all_reduce(bucket)
    commprof.metric("loss", 2.31)

A notebook opens a recorded run (``pip install 'commprof[analysis]'``)::

    run = commprof.open("latest")
    run.traffic(by=["op", "purpose"])
"""

import sys
from typing import TYPE_CHECKING

from commprof.hooks import attach, detach, metric, phase, recording, step, tag

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from pathlib import Path

    from commprof.analysis.browse.notebook import OpenedRun
    from commprof.version import __version__
else:

    def __getattr__(name):
        """Import ``__version__`` when it is first read: one file fewer to load in every process that is recorded."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from commprof import version

        return version.__version__


__all__ = ["__version__", "attach", "detach", "metric", "open", "phase", "recording", "step", "tag"]


def open(path: "Path | str" = "latest") -> "OpenedRun":
    """Open the run at ``path`` (default: the newest below ``traces/``).

    Raises:
        commprof.errors.TraceError: there is no such run, or it cannot be read.
        ImportError: the packages of the ``analysis`` extra are not installed.
    """
    # Imported by name and only now: a program that is being recorded must not load pandas.
    from importlib import import_module

    opened: OpenedRun = import_module("commprof.analysis.browse.notebook").OpenedRun(path)
    return opened


class _Moved:
    """The last finder of Python's import system: resolves the old names of modules that have moved."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """How to import the module that had ``name`` before it moved; None for all others."""
        if not name.startswith(("commprof.", "zero_runtime.")) or name == "commprof.moved":
            return None
        from commprof.moved import spec_of

        return spec_of(name)


sys.meta_path.append(_Moved)  # type: ignore[arg-type]  # it has what Python calls
