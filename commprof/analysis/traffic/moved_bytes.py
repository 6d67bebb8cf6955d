"""The moved level: the bytes that the interface counters of the hosts counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pandas as pd
import pyarrow as pa

from commprof.analysis.columns.answers import MOVED
from commprof.analysis.columns.frames import from_arrow
from commprof.analysis.relations.sql_engine import ask
from commprof.schema import LOOPBACK

NO_READINGS: Final = "no counters were read during the run"
ONE_READING: Final = "the counters were read only once, so no difference can be formed"


def moved(wire: pa.Table, uncovered: Mapping[str, str]) -> pd.DataFrame:
    """Return the bytes that each interface of each host moved during the run (``queries/moved.sql``).

    The counters count the whole host, including other processes and other traffic. ``frame.attrs["reason"]``
    is the reason why there is no sum over all hosts for the whole run, or None if there is a sum.

    Args:
        uncovered: For each host, the part of the run that its readings do not cover. See
            :mod:`commprof.trace.coverage`.
    """
    rows = ask("moved", {"wire": wire})
    texts = [uncovered.get(host) for host in rows["host"].to_pylist()]
    frame = from_arrow(rows.append_column("left_out", pa.array(texts, pa.string())), MOVED.columns)
    left_out_text = "; ".join(f"host {host}: {text}" for host, text in uncovered.items())
    once = not frame.empty and bool((frame["readings"] < 2).all())
    frame.attrs["reason"] = NO_READINGS if frame.empty else left_out_text or (ONE_READING if once else None)
    return frame


def moved_per_step(frame: pd.DataFrame, steps: int) -> float | None:
    """Return the bytes that the hosts of a run sent per step, by :func:`moved`.

    The result is None unless the readings cover the run on every host. On one host, these are the bytes of
    its loopback interface. On several hosts, they are the bytes of the other interfaces.
    """
    if frame.attrs["reason"] is not None or not steps:
        return None
    interfaces = frame[frame["kind"] == "interface"]
    on_one = interfaces["host"].nunique() == 1
    return float(interfaces.loc[(interfaces["device"] == LOOPBACK) == on_one, "sent_bytes"].sum()) / steps
