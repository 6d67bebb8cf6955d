"""The selection of the cases of a sampled test that `make test` runs."""

from support.sample import sample

STAGES = [f"stage {stage}, {kind}" for stage in (0, 1, 2, 3) for kind in ("fp32", "fp16", "bf16")]


def words(cases):
    return {word for case in cases for word in case.replace(",", "").split()}


def test_each_word_that_cases_share_is_in_the_sample():
    chosen = sample("test", STAGES)
    assert words(chosen) == words(STAGES)
    assert len(chosen) == 4


def test_names_that_share_nothing_have_one_case():
    assert len(sample("test", ["truncated", "emptied", "removed"])) == 1
    assert sample("test", ["only"]) == {"only"}


def test_a_named_case_is_always_run():
    for case in STAGES:
        assert case in sample("test", STAGES, always=[case])


def test_one_in_so_many_is_run_by_its_name_alone():
    numbers = [f"seed{number}" for number in range(1000)]
    tenth = sample("test", numbers, one_in=10)
    assert 70 < len(tenth) < 130
    assert sample("test", numbers[:500], one_in=10) == tenth & set(numbers[:500])
    assert sample("test", reversed(numbers), one_in=10) == tenth


def test_other_tests_run_other_cases():
    pair = ["compiled", "python"]
    assert set().union(*(sample(f"test_{number}", pair) for number in range(20))) == set(pair)
