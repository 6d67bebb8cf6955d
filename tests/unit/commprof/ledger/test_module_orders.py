"""Test how stage 3 handles the module order in each micro-batch.

The result is derived from the broadcasts that evaluations and steps sent.
"""

from __future__ import annotations

import pytest

from commprof.ledger.requests.module_orders import Pass, passes_of

RECORDS, COMPARES, FOLLOWS = Pass.RECORDS, Pass.COMPARES, Pass.FOLLOWS
DEPARTS, BOTH = Pass.DEPARTS, Pass.COMPARES_AND_DEPARTS


@pytest.mark.parametrize(
    ("micro_steps", "evaluated", "sent", "passes"),
    [
        (1, [0, 0, 0], [2, 6, 0], [None, None, None]),
        # An evaluation compares the order that a step recorded.
        (1, [0, 6, 0], [2, 0, 0], [None, None, None]),
        (1, [2, 0, 0, 0], [6, 2, 6, 0], [(BOTH,), (RECORDS,), (COMPARES,), (FOLLOWS,)]),
        (1, [8, 0, 0, 0], [0, 2, 6, 0], [(DEPARTS,), (RECORDS,), (COMPARES,), (FOLLOWS,)]),
        (2, [8, 0, 0], [2, 6, 0], [(DEPARTS, RECORDS), (COMPARES, FOLLOWS), (FOLLOWS, FOLLOWS)]),
        # There is one evaluation after each step.
        (1, [8, 8, 8], [0, 0, 0], [(DEPARTS,), (DEPARTS,), (DEPARTS,)]),
        # A different engine ran the evaluation. The step alone does not show this, but the step after it
        # does.
        (1, [8, 0, 0], [2, 6, 0], [None, None, None]),
        (2, [2, 0], [8, 0], [None, None]),
        (2, [2, 0], [8, 6], [(BOTH, RECORDS), (COMPARES, FOLLOWS)]),
        # Counts that no engine can send change nothing, and the most likely order is expected.
        (1, [8, 0, 0], [4, 2, 6], [(DEPARTS,), (RECORDS,), (COMPARES,)]),
    ],
)
def test_passes(micro_steps, evaluated, sent, passes):
    assert passes_of(micro_steps, evaluated, sent) == passes
