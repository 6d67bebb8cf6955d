"""Test that messages reuse the memory of earlier messages, but never memory that is in use."""

from __future__ import annotations

import torch

from zero_runtime.sharding.message_memory import MessageMemory

CPU = torch.device("cpu")


def test_a_returned_buffer_is_used_again():
    memory = MessageMemory()
    first = memory.take(12, torch.float32, CPU)
    address = first.data_ptr()
    memory.put(first.view(3, 4))
    again = memory.take(12, torch.float32, CPU)
    assert (again.data_ptr(), again.shape) == (address, (12,))
    assert memory.take(12, torch.float32, CPU).data_ptr() != address  # The first memory is in use.


def test_another_size_or_dtype_gets_memory_of_its_own():
    memory = MessageMemory()
    kept = memory.take(12, torch.float32, CPU)
    memory.put(kept)
    for numel, dtype in ((6, torch.float32), (12, torch.bfloat16)):
        other = memory.take(numel, dtype, CPU)
        assert (other.numel(), other.dtype) == (numel, dtype)
        assert other.data_ptr() != kept.data_ptr()


def test_only_the_size_of_the_last_returned_buffer_is_kept():
    memory = MessageMemory()
    large = torch.zeros(1000)
    memory.put(large)
    memory.put(torch.zeros(10))
    references = torch._C._storage_Use_Count(large.untyped_storage()._cdata)
    del memory
    assert torch._C._storage_Use_Count(large.untyped_storage()._cdata) == references
