"""Optional packages. A missing package becomes an error of one line that names the extra to install."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from commprof.errors import MissingExtraError

# For each extra: the names under which packages are imported, and the distributions that contain the packages.
PACKAGES: Final[dict[str, dict[str, str]]] = {
    "analysis": {"pandas": "pandas", "pyarrow": "pyarrow", "duckdb": "duckdb", "numpy": "numpy"},
    "dash": {
        "dash": "dash",
        "plotly": "plotly",
        "dash_mantine_components": "dash-mantine-components",
        "dash_ag_grid": "dash-ag-grid",
        "flask_compress": "flask-compress",
        "waitress": "waitress",
    },
    "export": {},  # needs only the packages of analysis
    "spark": {"pyspark": "pyspark"},
    "sampling": {"pynvml": "nvidia-ml-py", "py_spy": "py-spy"},
    "train": {"torch": "torch", "numpy": "numpy"},
}


@contextlib.contextmanager
def needed(extra: str, purpose: str) -> Iterator[None]:
    """Convert a failed import of a package of ``extra`` within this context into MissingExtraError.

    Args:
        extra: The name of the extra.
        purpose: The reason why the package is needed, such as "to read a run".
    """
    wanted = {**PACKAGES["analysis"], **PACKAGES[extra]}
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in wanted:
            raise
        raise MissingExtraError(wanted[package], extra, purpose) from error
