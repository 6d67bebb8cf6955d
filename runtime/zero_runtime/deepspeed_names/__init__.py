"""DeepSpeed's names for this runtime: after :func:`as_deepspeed`, ``import deepspeed`` imports zero_runtime.

::

    import zero_runtime

    zero_runtime.as_deepspeed()
    import deepspeed

or, without a change to the script, ``commprof run --engine zero_runtime train.py`` or ``python -m
zero_runtime.deepspeed_names train.py``. The tables of this package list what each name refers to;
``docs/deepspeed-names.md`` is generated from them.
"""

from __future__ import annotations


def as_deepspeed() -> None:
    """Let ``import deepspeed`` import this runtime in this process from now on. A second call changes nothing.

    Raises:
        UsageError: DeepSpeed itself has been imported already.
    """
    from zero_runtime.deepspeed_names.finder import install

    install()
