"""Models whose tensors ranks share train as one process does."""

from __future__ import annotations

import pytest

from support import parallel_training as training
from support.ranks import run_ranks

CLIPPED = 0.3
HALVED = {"tp_size": 2, "gradient_clipping": CLIPPED}


@pytest.fixture(scope="module")
def alone():
    """What one process makes of all samples, by stage and precision."""
    found = {}

    def of(stage: int, **more):
        key = (stage, tuple(more))
        if key not in found:
            given = training.config(stage, gradient_clipping=CLIPPED, **more) | {
                "train_micro_batch_size_per_gpu": 4
            }
            found[key] = run_ranks(1, training.train, given)[0]
        return found[key]

    return of


def _plan(sequence: bool = False) -> dict:
    return {"tensor_parallel": {"plan": training.PLAN, "sequence_parallel": sequence}}


@pytest.mark.parametrize("sequence", [False, True], ids=["columns", "sequence"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_slices_and_two_replicas_train_as_one_process_does(alone, stage, sequence):
    given = training.config(stage, **HALVED, **_plan(sequence))
    expected, norm = alone(stage)
    for losses, own in run_ranks(4, training.train, given, 3, 4, None, True):
        assert losses == pytest.approx(expected, rel=2e-5)
        assert stage == 0 or own == pytest.approx(norm, rel=1e-4)
