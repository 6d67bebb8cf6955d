"""Test the list of names of a group's communication methods.

Code that times or counts all of these methods must miss none.
"""

from __future__ import annotations

import inspect

from zero_runtime.comm import COLLECTIVES, MESSAGES, DataParallelGroup


def test_every_method_that_issues_something_is_named() -> None:
    tagged = {
        name
        for name, method in inspect.getmembers(DataParallelGroup, inspect.isfunction)
        if "why" in inspect.signature(method).parameters
    }
    made_of_another = {"sum_rows"}

    assert tagged - made_of_another == {*COLLECTIVES, *MESSAGES}
