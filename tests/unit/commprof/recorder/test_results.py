"""Test which record a wait for a functional collective's result belongs to, also if memory is reused."""

import gc

import torch

from commprof.recorder.process_group.pending_functional import Results


def test_a_view_of_the_result_is_the_result_and_it_is_taken_once():
    results, result = Results(), torch.ones(4)
    results.remember(["token"], result)
    assert results.take(torch.ones(4)) is None
    assert results.take(result[1:3].view(2, 1)) == "token"
    assert results.take(result) is None


def test_each_of_several_results_has_its_own_record_or_all_have_one():
    results, pair, both = Results(), [torch.ones(2), torch.ones(2)], [torch.ones(2), torch.ones(2)]
    results.remember(["first", "second"], pair)
    results.remember(["shared"], both)
    assert [results.take(each) for each in (*pair, *both)] == ["first", "second", "shared", "shared"]


def test_memory_that_is_used_again_is_not_the_result_that_lay_there():
    results, reused = Results(), 0
    for _ in range(200):
        result = torch.empty(1024)
        address = result.data_ptr()
        results.remember(["token"], result)
        del result
        another = torch.empty(1024)
        reused += another.data_ptr() == address
        assert results.take(another) is None
    assert reused > 0  # The allocator reuses memory in this test.


def test_nothing_is_held_in_memory_and_only_so_much_is_remembered():
    results, storages = Results(), []
    for number in range(5000):
        result = torch.empty(2)
        storages.append(torch.multiprocessing.reductions.StorageWeakRef(result.untyped_storage()))
        results.remember([number], result)
    last = result
    del result
    gc.collect()
    assert all(storage.expired() for storage in storages[:-1])
    assert len(results._of_storage) <= 4096
    assert results.take(last) == 4999
    results.clear()
    assert results.take(last) is None and results.take(None) is None
