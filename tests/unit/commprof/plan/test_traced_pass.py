"""Test the failure of the traced pass of ``plan``."""

import pytest
import torch

from commprof.plan.memory.traced_pass import TraceError, trace


def test_a_pass_without_gradients_is_one_line():
    with torch.device("meta"):
        model, inputs = torch.nn.Linear(2, 2), torch.empty(1, 2)
    with torch.no_grad(), pytest.raises(TraceError, match=r"^Linear raised RuntimeError: [^\n]+$"):
        trace(model, inputs)
