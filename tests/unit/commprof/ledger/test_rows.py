"""Test that separate requests of different groups stay separate rows of a ledger.

The expected numbers are computed by hand.
"""

from collections import Counter

from commprof.ledger.reconcile.attribution import Finding
from commprof.ledger.reconcile.ledger_table import ledger_rows
from commprof.ledger.records.issued import Message, StepKey
from commprof.ledger.requests.message_classes import Class, Want

PURPOSE = "gradient_reduce"


def finding(group, payload, asked, size=2):
    message = Message(PURPOSE, "all_reduce", group, size, "gloo", payload, None, "ok", "all_reduce")
    want = None if asked is None else Want(asked, 1, payload)
    return Class(PURPOSE, "all_reduce", group), Finding(want, Counter([message]), "config", payload)


def rows(*found):
    return {
        row.requested_op: (row.requested_wire_bytes, row.issued_count, row.issued_wire_bytes)
        for row in ledger_rows({StepKey(0, step): dict(found) for step in range(2)})
    }


def test_copies_of_a_weight_in_two_stages_do_not_say_what_the_other_gradients_were_asked_for():
    """All gradients are all_reduced.

    For the copies of the weight an all_reduce is required. For the other gradients it replaces a
    reduce_scatter.
    """
    copies, others = (finding("0,2", 100, "all_reduce"), finding("0-1", 1000, "reduce_scatter"))
    expected = {"all_reduce": (200.0, 2, 200.0), "reduce_scatter": (1000.0, 2, 2000.0)}
    assert rows(copies, others) == rows(others, copies) == expected


def test_what_nobody_expected_of_a_group_stands_with_the_same_operation():
    assert rows(finding("0,2", 100, None), finding("0-1", 1000, "reduce_scatter")) == {
        "reduce_scatter": (1000.0, 4, 2200.0)
    }
    assert rows(finding("0,2", 100, None)) == {None: (None, 2, 200.0)}


def test_each_group_is_asked_for_by_its_own_size():
    """For a reduce_scatter, 4 ranks send 3/4 of their bytes and 2 ranks send half.

    One rank sends nothing, whatever its size.
    """
    sizes = (finding("0-3", 1000, "reduce_scatter", 4), finding("0-1", 600, "reduce_scatter"))
    alone = finding("3", 5_000_000, "reduce_scatter", 1)
    assert rows(*sizes, alone) == {"reduce_scatter": (2 * (750.0 + 300.0), 6, 2 * (1500.0 + 600.0))}


def test_what_was_issued_as_asked_costs_what_was_asked_to_the_byte():
    found = [finding(f"{rank}-{rank + 2}", 100 + rank, "all_reduce", 3) for rank in range(40)]
    ((asked, _, sent),) = rows(*found).values()
    assert asked == sent
