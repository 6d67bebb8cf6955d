"""What each micro-batch of stage 3 does about the order of modules, from the broadcasts that evaluations and steps sent."""

from __future__ import annotations

import pytest

from commprof.ledger.requests.module_orders import Pass, passes_of

RECORDS, COMPARES, FOLLOWS = Pass.RECORDS, Pass.COMPARES, Pass.FOLLOWS
DEPARTS, BOTH = Pass.DEPARTS, Pass.COMPARES_AND_DEPARTS


@pytest.mark.parametrize(
    ("micro_steps", "evaluated", "sent", "passes"),
    [
        (1, [0, 0, 0], [2, 6, 0], [None, None, None]),
        (1, [0, 6, 0], [2, 0, 0], [None, None, None]),  # an evaluation compares what a step has recorded
        (1, [2, 0, 0, 0], [6, 2, 6, 0], [(BOTH,), (RECORDS,), (COMPARES,), (FOLLOWS,)]),
        (1, [8, 0, 0, 0], [0, 2, 6, 0], [(DEPARTS,), (RECORDS,), (COMPARES,), (FOLLOWS,)]),
        (2, [8, 0, 0], [2, 6, 0], [(DEPARTS, RECORDS), (COMPARES, FOLLOWS), (FOLLOWS, FOLLOWS)]),
        (1, [8, 8, 8], [0, 0, 0], [(DEPARTS,), (DEPARTS,), (DEPARTS,)]),  # one after each step
        # Another engine has evaluated. The step alone would not tell, the one after it does.
        (1, [8, 0, 0], [2, 6, 0], [None, None, None]),
        (2, [2, 0], [8, 0], [None, None]),
        (2, [2, 0], [8, 6], [(BOTH, RECORDS), (COMPARES, FOLLOWS)]),
        # What no engine can have sent changes nothing: the likeliest is expected.
        (1, [8, 0, 0], [4, 2, 6], [(DEPARTS,), (RECORDS,), (COMPARES,)]),
    ],
)
def test_passes(micro_steps, evaluated, sent, passes):
    assert passes_of(micro_steps, evaluated, sent) == passes
