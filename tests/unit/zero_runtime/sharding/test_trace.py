"""Test which parameters are prefetched and which are kept, for a chain of modules.

The expected values are computed by hand.
"""

from __future__ import annotations

import pytest

from zero_runtime.sharding.gather_schedule.module_order import Limits, Mode, Planner, Trace

# Module 0 is the model. Modules 1, 2 and 3 own parameters 10, 20 and 30 of 100, 200 and 300 elements.
OWNED = {0: [], 1: [10], 2: [20], 3: [30]}
NUMELS = {10: 100, 20: 200, 30: 300}
FORWARD, BACKWARD = [0, 1, 2, 3], [0, 3, 2, 1]
UNLIMITED = Limits(prefetch=10**9, reuse_distance=10**9, max_live=10**9)


class Driver:
    """Replaces the hooks. The driver tracks which parameters are gathered, and logs gathers and releases."""

    def __init__(self, limits, persistent=(), owned=OWNED):
        self.planner = Planner(limits, NUMELS)
        self.persistent = set(persistent)
        self.owned = owned
        self.whole = set()
        self.log = []

    def begin(self):
        return self.planner.begin(lambda module, deep=None: self.owned[module])

    def gather(self, what, parameters):
        missing = [each for each in parameters if each not in self.whole]
        if missing:
            self.log.append((what, missing))
            self.whole |= set(missing)
            self.planner.live += sum(NUMELS[each] for each in missing)

    def run(self, module):
        self.enter(module)
        self.leave(module)

    def enter(self, module):
        left = self.planner.enter(module)
        self.gather("own", self.owned[module])
        ahead = self.planner.ahead(self.owned[module], lambda number: number not in self.whole)
        self.gather("ahead", ahead or [])
        if left or ahead is None:
            self.log.append("left the trace")

    def leave(self, module):
        for each in self.planner.releasable(module, self.owned[module], self.persistent.__contains__):
            if each in self.whole:
                self.whole.remove(each)
                self.log.append(("release", each))
                self.planner.live -= NUMELS[each]

    def iterate(self, order=(*FORWARD, *BACKWARD)):
        self.log = []
        compared = self.begin()
        for module in order:
            self.run(module)
        return compared


def recorded(limits, **options):
    driver = Driver(limits, **options)
    assert driver.iterate() == [[]]
    return driver


def test_first_iteration_gathers_each_module_and_releases_it():
    driver = recorded(UNLIMITED, persistent=[10])
    steps = [step for n in (10, 20, 30, 30, 20, 10) for step in (("own", [n]), ("release", n))]
    assert driver.log == steps  # This includes persistent parameters.


def test_second_iteration_compares_what_was_recorded():
    driver = recorded(UNLIMITED)
    assert driver.planner.mode is Mode.RECORDING
    assert driver.iterate() == [[0, 1, 2, 3, 0, 3, 2, 1], [10, 20, 30, 30, 20, 10], [1, 2, 3, 5, 6, 7]]
    assert driver.planner.mode is Mode.FOLLOWING
    assert driver.iterate() == []


def test_everything_is_gathered_at_once_without_limits():
    driver = recorded(UNLIMITED)
    for _ in range(2):
        driver.iterate()
        assert driver.log == [("ahead", [10, 20, 30]), ("release", 30), ("release", 20), ("release", 10)]


@pytest.mark.parametrize(
    ("prefetch", "gathered"),
    [
        (0, [("own", [10]), ("own", [20]), ("own", [30])]),
        # The limit is checked before a parameter is added, so a parameter of 200 elements exceeds a limit of
        # 1.
        (1, [("ahead", [10]), ("ahead", [20]), ("ahead", [30])]),
        (100, [("ahead", [10]), ("ahead", [20]), ("ahead", [30])]),
        (101, [("ahead", [10, 20]), ("ahead", [30])]),
    ],
)
def test_prefetch_limit(prefetch, gathered):
    driver = recorded(UNLIMITED._replace(prefetch=prefetch))
    driver.iterate()
    assert [step for step in driver.log if step[0] != "release"] == gathered


@pytest.mark.parametrize(
    ("max_live", "ahead"),
    [(0, []), (50, [[10]]), (101, [[10, 20]]), (301, [[10, 20, 30]])],
)
def test_live_limit_stops_gathering_ahead(max_live, ahead):
    driver = recorded(UNLIMITED._replace(max_live=max_live))
    driver.iterate()
    assert [step[1] for step in driver.log if step[0] == "ahead"] == ahead


def test_reuse_distance_counts_elements_until_the_next_use():
    # After the forward pass of module 3, the next use of module 3 is immediate. The next use of parameter 20
    # is 300 (forward) + 300 elements away.
    driver = recorded(Limits(prefetch=0, reuse_distance=601, max_live=0))
    driver.iterate(FORWARD)
    assert driver.whole == {20, 30}
    for module in BACKWARD:
        driver.run(module)
    assert driver.whole == set()
    exact = recorded(Limits(prefetch=0, reuse_distance=600, max_live=0))
    exact.iterate(FORWARD)
    assert exact.whole == {30}


def test_what_was_passed_over_as_whole_is_kept():
    # The prefetch at module 3 finds parameter 30 gathered for its use in the backward pass, and does not
    # queue it again.
    driver = recorded(Limits(prefetch=1, reuse_distance=0, max_live=10**9))
    driver.iterate(FORWARD)
    assert 30 in driver.whole


def test_persistent_parameters_stay():
    driver = recorded(UNLIMITED, persistent=[10, 30])
    driver.iterate()
    assert driver.whole == {10, 30}
    driver.iterate()
    assert driver.log == [("ahead", [20]), ("release", 20)]


def test_another_order_ends_the_trace_and_is_recorded_next():
    driver = recorded(UNLIMITED)
    driver.iterate()
    other = (0, 1, 3, 2, 0, 2, 3, 1)
    driver.iterate(other)
    assert driver.log[0] == ("ahead", [10, 20, 30])
    assert driver.log.count("left the trace") == 1
    assert driver.planner.mode is Mode.WITHOUT
    assert driver.iterate(other) == [[]]
    assert driver.iterate(other)[0] == list(other)
    assert driver.planner.mode is Mode.FOLLOWING


def test_more_modules_than_recorded_end_the_trace():
    driver = recorded(UNLIMITED)
    driver.iterate((*FORWARD, *BACKWARD, 1))
    assert driver.log[-3:] == [("own", [10]), "left the trace", ("release", 10)]


def test_fewer_modules_than_recorded_do_not():
    driver = recorded(UNLIMITED)
    driver.iterate(FORWARD)  # This iteration is an evaluation.
    assert driver.whole == {10, 20, 30}
    driver.iterate()
    assert "left the trace" not in driver.log
    assert driver.whole == set()


def test_a_parameter_that_the_trace_does_not_know_ends_it():
    owned = {module: list(parameters) for module, parameters in OWNED.items()}
    driver = recorded(UNLIMITED._replace(prefetch=0), owned=owned)
    driver.iterate()
    owned[1].append(30)
    driver.iterate()
    assert "left the trace" in driver.log
    driver.iterate()
    assert driver.iterate()[1] == [10, 30, 20, 30, 30, 20, 10, 30]


def test_shared_parameter_is_listed_for_every_use():
    owned = {1: [10, 30], 2: [20, 30]}
    trace = Trace([1, 2, 1], lambda module, deep=None: owned[module], NUMELS)
    assert [use.parameter for use in trace.uses] == [10, 30, 20, 30, 10, 30]
    assert trace.distance(30, 0) == 0
    assert trace.distance(10, 1) == 500
    assert trace.distance(20, 2) is None


def test_release_of_a_leaf_module_looks_inside_the_others():
    inside = {0: [10, 20, 30], 1: [10], 2: [20], 3: [30]}
    trace = Trace([0, 3, 2], lambda module, deep=None: (inside if deep else OWNED)[module], NUMELS)
    assert trace.distance(20, 0) == 300
    assert trace.distance(20, 0, deep=True) == 0
