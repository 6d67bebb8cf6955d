"""DeepSpeed's names for this runtime. After a call of :func:`as_deepspeed`, ``import deepspeed`` imports zero_runtime.

::

    import zero_runtime

    zero_runtime.as_deepspeed()
    import deepspeed

Two commands have the same effect without a change to the script: ``commprof run --engine zero_runtime
train.py`` and ``python -m zero_runtime.deepspeed_names train.py``. The tables of this package list the object
that each name refers to. ``docs/deepspeed-names.md`` is generated from these tables.
"""

from __future__ import annotations


def as_deepspeed() -> None:
    """Make later imports of ``deepspeed`` in this process import this runtime. A second call changes nothing.

    Raises:
        UsageError: DeepSpeed itself was imported before.
    """
    from zero_runtime.deepspeed_names.finder import install

    install()
