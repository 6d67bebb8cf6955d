"""Tests on a real GPU with NCCL, with two ranks on one card (see ``support/ranks.py``).

The tests are skipped if there is no GPU or no NCCL.
"""

import os
from pathlib import Path

import pytest

# Without this variable, torch.cuda.is_available() initializes CUDA. Ranks cannot be forked from a process that has
# initialized CUDA.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a GPU and NCCL"))


@pytest.fixture(autouse=True)
def _on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMPROF_TESTS_DEVICE", "cuda")
