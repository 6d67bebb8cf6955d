"""Test which results benchmarks/deepspeed_suite.py reports for a checkout.

The cases are test outcomes, test files that cannot be imported, and hangs.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import deepspeed_suite as suite

TESTS = """
import os
import pytest

def test_passes():
    import deepspeed
    assert deepspeed.__version__.startswith("0.19")

def test_fails():
    assert 1 == 2, "one is not two"

def test_skips():
    pytest.skip("needs a GPU")

@pytest.fixture
def broken():
    yield
    raise RuntimeError("in the end")

def test_passes_and_fails_in_the_end(broken):
    pass

def test_is_refused():
    from deepspeed.pipe import DualPipeVModule
    DualPipeVModule(4)

def test_ends_its_process():
    os._exit(1)

def test_behind_it():
    pass
"""
UNREAD = """
from deepspeed.inference.engine import InferenceEngine

def test_one(): pass

class TestTwo:
    def test(self): pass
    def helper(self): pass
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    checkout = tmp_path_factory.mktemp("checkout")
    unit = checkout / "tests" / "unit"
    (unit / "comm").mkdir(parents=True)
    (unit / "comm" / "test_some.py").write_text(TESTS)
    (unit / "comm" / "test_unread.py").write_text(UNREAD)
    return suite.measure(sys.executable, checkout, ["comm"], timeout=60, is_ours=True)


def test_a_file_or_a_part_of_it_in_place_of_a_part(tmp_path):
    unit = tmp_path / "tests" / "unit"
    (unit / "comm").mkdir(parents=True)
    (unit / "comm" / "test_some.py").write_text("class TestOne:\n    pass\n")
    assert list(suite.test_files(unit, "comm/test_some.py")) == [unit / "comm" / "test_some.py"]
    assert [str(each) for each in suite.test_files(unit, "comm/test_some.py::TestOne")] == [
        f"{unit}/comm/test_some.py::TestOne"
    ]
    with pytest.raises(SystemExit, match=r"there is no test file .*test_other\.py"):
        list(suite.test_files(unit, "comm/test_other.py"))


@pytest.mark.long
def test_each_test_has_one_outcome(outcomes):
    found = {each.test.rpartition("::")[2]: each.outcome for each in outcomes if "::" in each.test}
    assert found == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_skips": "skipped",
        "test_passes_and_fails_in_the_end": "failed",
        "test_is_refused": "refused",
        "test_ends_its_process": "failed",
        "test_behind_it": "passed",
    }


@pytest.mark.long
def test_reasons_are_the_lines_that_say_what_went_wrong(outcomes):
    reasons = {each.test.rpartition("::")[2]: each.reason for each in outcomes}
    assert "one is not two" in reasons["test_fails"]
    assert "micro-batches from both ends are not in this version" in reasons["test_is_refused"]
    assert reasons["test_ends_its_process"] == "hung, or ended its process"


@pytest.mark.long
def test_a_file_that_cannot_be_read_counts_once_for_each_test_in_it(outcomes):
    unread = [each for each in outcomes if "not imported" in each.test]
    assert Counter(each.outcome for each in unread) == {"refused": 2}
    assert all("torch.inference_mode" in each.reason for each in unread)


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("E  zero_runtime.errors.UnsupportedError: per_head_muon is not in this version", "refused"),
        (
            "zero_runtime.errors.MissingNameError: deepspeed.moe.experts is not in this version of zero_runtime: x",
            "refused",
        ),
        (
            "zero_runtime.errors.ConfigError: eigenvalue: the block has been removed from DeepSpeed; remove it",
            "refused",
        ),
        ("zero_runtime.errors.MissingNameError: deepspeed.x is not among the names of DeepSpeed", "failed"),
        ("zero_runtime.errors.ConfigError: train_batch_size is 0; expected a whole number", "failed"),
        ("AttributeError: 'Engine' object has no attribute 'x'", "failed"),
    ],
)
def test_only_what_is_left_out_by_name_is_refused(text, outcome):
    row = {"test": "a.py::b", "outcome": "failed", "text": text}
    (result,) = suite.results_of("comm", Path(), [row])
    assert result.outcome == outcome and json.dumps(result.reason)
