"""Test methods of ProcessGroup that the installed torch may not have.

These methods are read by the same rules as the other methods.
"""

from types import SimpleNamespace

import pytest
import torch
from torch._C._distributed_c10d import GatherOptions

from commprof.recorder.dispatcher.operators import C10D, METHOD, layout, read_c10d
from commprof.recorder.process_group.signatures import describe


def group(rank: int) -> SimpleNamespace:
    return SimpleNamespace(
        rank=rank, size=4, name="0", backend_for=lambda device: "gloo", global_rank=lambda root: 10 + root
    )


def columns(row: dict) -> tuple:
    return tuple(
        row[name] for name in ("op", "numel", "input_bytes", "output_bytes", "payload_bytes", "peer")
    )


@pytest.mark.parametrize("name", ["gather_single", "gather_into_tensor"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_gather_into_one_tensor_counts_as_a_gather(name, rank):
    options = GatherOptions()
    options.rootRank = 2
    output, tensor = torch.empty(4, 3) if rank == 2 else torch.empty(0), torch.empty(3)
    row = describe(METHOD[name], group(rank), (output, tensor, options), {})
    # S of nccl-tests is the sum of the contributions of all ranks, which arrives only at the root.
    assert columns(row) == ("gather", 12, 12, 48 if rank == 2 else 0, 48, 12)
    assert row["is_async"] is True


def test_its_operator_is_read_as_the_method():
    method = C10D["c10d::gather_into_tensor_"]
    places = layout(
        [
            ("output_tensor", "Tensor"),
            ("input_tensor", "Tensor"),
            ("process_group", "__torch__.torch.classes.c10d.ProcessGroup"),
            ("root_rank", "int"),
            ("asyncOp", "bool"),
            ("timeout", "int"),
        ]
    )
    output, tensor = torch.empty(4, 3), torch.empty(3)
    (issued,) = read_c10d(method, places)((output, tensor, "box", 2, False, -1), {})
    assert issued.group == "box" and issued.is_async is False
    row = describe(method, group(2), issued.values, {})
    assert columns(row) == ("gather", 12, 12, 48, 48, 12)
