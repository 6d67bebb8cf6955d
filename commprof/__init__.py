"""commprof records every collective of a training job, and explains why it was issued.

Most users need only the command line (``commprof run train.py``). A program can report more about
itself with the hooks. Each hook costs one flag test while nothing is recording::

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
        """Import ``__version__`` only when it is first read, so that every recorded process loads one file less."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from commprof import version

        return version.__version__


__all__ = ["__version__", "attach", "detach", "metric", "open", "phase", "recording", "step", "tag"]


def open(path: "Path | str" = "latest") -> "OpenedRun":
    """Open the run at ``path`` (default: the newest run below ``traces/``).

    Raises:
        commprof.errors.TraceError: The run does not exist or cannot be read.
        ImportError: The packages of the ``analysis`` extra are not installed.
    """
    # The module is imported only here and by name, because a program that is being recorded must not load pandas.
    from importlib import import_module

    opened: OpenedRun = import_module("commprof.analysis.browse.notebook").OpenedRun(path)
    return opened


class _Moved:
    """A meta path finder that resolves the old names of modules that have moved. It runs after Python's finders."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """Return the spec of the module that had ``name`` before it moved; None for all other names."""
        if not name.startswith(("commprof.", "zero_runtime.")) or name == "commprof.moved":
            return None
        from commprof.moved import spec_of

        return spec_of(name)


sys.meta_path.append(_Moved)  # type: ignore[arg-type]  # it has the method that Python calls
