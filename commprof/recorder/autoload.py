"""Starts recording without ``commprof run``: torch calls :func:`start` at the end of ``import torch``.

:func:`start` is an entry point of the group ``torch.backends``, so torch calls it in every process. It does nothing
unless ``COMMPROF=1`` is set or the process runs below ``commprof run``. The second case matters for processes that
were started with ``python -I`` or ``-E``, which no other mechanism reaches. :func:`start` raises no exception,
because an exception would make ``import torch`` fail. It imports only ``os`` before recording is requested.
"""

from __future__ import annotations

import os

SWITCH = "COMMPROF"  # 1 or 0; 0 also excludes a process below commprof run
OUT = "COMMPROF_OUT"  # the run directory, for all ranks
_ON = ("1", "true", "yes", "on")
_OFF = ("0", "false", "no", "off")


def start() -> None:
    """Record this process from its first process group on, if the environment requests it. Never raises."""
    try:
        asked = os.environ.get(SWITCH, "").strip().lower()
        below_run = bool(os.environ.get("COMMPROF_RUN"))
        if os.environ.get("COMMPROF_ENGINE"):
            from commprof import deepspeed_provider

            deepspeed_provider.install()
        if asked in _OFF or not (asked or below_run):
            return
        from commprof.recorder import session

        if asked and asked not in _ON:
            session.say(f"{SWITCH}={asked} is neither 1 nor 0, and is ignored")
            if not below_run:
                return
        if below_run:
            session.arm()
        else:
            session.arm(os.environ.get(OUT) or None, speaks=True)
    except Exception as error:
        _complain(error)


def _complain(error: Exception) -> None:
    import sys

    try:
        from commprof.printable import escaped

        what = escaped(f"{type(error).__name__}: {error}")
        sys.stderr.write(f"commprof: nothing is recorded: {what}. The training continues\n")
    except Exception:
        pass
