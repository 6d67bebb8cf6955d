"""Test that the answers of the detail pages contain exactly the declared columns and do not change."""

import pytest

from commprof.analysis import api
from commprof.analysis.browse.notebook import OpenedRun
from commprof.analysis.columns.detailed_answers import DETAILED_ANSWERS
from support.detailed_runs import aligned_run
from support.nccl_choices import with_choices
from support.runs import SyntheticRun


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return aligned_run(tmp_path_factory.mktemp("details") / "run")


@pytest.fixture(scope="module")
def answers(path, tmp_path_factory):
    nameless = SyntheticRun(world_size=2)
    nameless.add_collective("all_reduce", payload_bytes=8, step=0)
    without_purpose = nameless.write(tmp_path_factory.mktemp("nameless") / "run")
    for step in range(3):
        nameless.add_step(step)
    once = api.one_offs(nameless.open())
    straggling, aligned = api.straggling(path), api.alignment(path)
    content = api.bucket_content(path, step=1, bucket=1)
    return {
        "matrix": api.matrix(path),
        "owners": api.owners(path),
        "one_offs": once,
        "untagged": api.untagged(without_purpose),
        "algorithms": api.algorithms(with_choices(tmp_path_factory.mktemp("choices") / "run")),
        "bucket_flushes": api.bucket_flushes(path),
        "bucket_means": api.bucket_means(path),
        "bucket_steps": api.bucket_steps(path),
        "buckets_per_step": api.buckets_per_step(path),
        "bucket_parameters": content.parameters,
        "bucket_operations": content.operations,
        "lateness": straggling.lateness,
        "lateness_of_steps": straggling.steps,
        "waiting_causes": straggling.causes,
        "late_collectives": straggling.collectives,
        "aligned": aligned.rows,
        "alignment_counts": aligned.counts,
        "divergences": aligned.divergences,
        "topology": api.topology(path),
    }


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("name", DETAILED_ANSWERS)
def test_answers_hold_exactly_what_is_declared(answers, name):
    frame, declared = answers[name], DETAILED_ANSWERS[name]
    assert len(frame)
    assert list(frame.columns) == list(declared.names)
    for column in declared.columns:
        if not column.nullable:
            assert not frame[column.name].isna().any(), column.name
        if column.type.startswith("int"):
            assert str(frame[column.name].dtype) == ("Int64" if column.nullable else "int64"), column.name
    if declared.key:
        assert not frame.duplicated(list(declared.key)).any()


def test_a_notebook_asks_the_same(path, answers):
    run = OpenedRun(path)
    assert run.matrix().equals(answers["matrix"])
    assert run.owners().equals(answers["owners"])
    assert run.buckets().equals(answers["bucket_flushes"])
    assert run.alignment().counts.equals(answers["alignment_counts"])
