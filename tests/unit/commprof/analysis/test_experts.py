"""Test the load of experts by step, micro-batch, layer and rank. The expected values are computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commprof.analysis import api
from commprof.analysis.columns.expert_answers import EXPERT_ANSWERS
from support.expert_runs import LAYER, add_layer, add_load, uneven_experts
from support.runs import SyntheticRun


@pytest.fixture
def run():
    """Return a run of four ranks in two groups with two layers. Step 1 has two micro-batches."""
    run = SyntheticRun(world_size=4)
    add_layer(run)
    add_layer(run, "last")
    for rank in range(4):
        add_load(run, rank, [8, 4, 2, 2], capacity=6)
        add_load(run, rank, [4, 4, 4, 4 + 4 * rank], layer="last", step=0)
        for micro_step in range(2):
            add_load(run, rank, [3, 3, 1, 1] if micro_step else [1, 1, 3, 3], step=1, micro_step=micro_step)
        # Activation checkpointing repeats the forward pass, so this load must not count.
        add_load(run, rank, [8, 4, 2, 2], phase="backward")
        add_load(run, rank, [16, 0, 0, 0], step=-1, after_step=1, phase="evaluation")
    return run


def test_loads_are_summed_over_ranks_and_micro_batches_and_repeated_passes_are_left_out(run):
    rows = api.experts(run.open())
    assert [(r.step, r.layer, r.expert, r.ranks, r.tokens, r.dropped, r.load) for r in rows.itertuples()] == [
        (0, "last", 0, "0,2", 16, 0, 16 / 22),
        (0, "last", 1, "0,2", 16, 0, 16 / 22),
        (0, "last", 2, "1,3", 16, 0, 16 / 22),
        (0, "last", 3, "1,3", 40, 0, 40 / 22),
        (0, "moe", 0, "0,2", 32, 8, 2.0),
        (0, "moe", 1, "0,2", 16, 0, 1.0),
        (0, "moe", 2, "1,3", 8, 0, 0.5),
        (0, "moe", 3, "1,3", 8, 0, 0.5),
        *((1, "moe", expert, "0,2" if expert < 2 else "1,3", 16, 0, 1.0) for expert in range(4)),
    ]


def test_imbalance_is_the_largest_load_over_the_mean(run):
    rows = {(r.step, r.layer): r for r in api.expert_imbalance(run.open()).itertuples()}
    moe, last, even = rows[0, "moe"], rows[0, "last"], rows[1, "moe"]
    assert (moe.imbalance, moe.expert, moe.tokens, moe.seen, moe.dropped_share) == (2.0, 0, 64, 32, 8 / 64)
    # 8 of 8 tokens choose this expert. With two of four experts per token, this is twice the even load.
    assert moe.highest == 8 * 4 / (8 * 2)
    assert (last.imbalance, last.expert) == (40 / 22, 3)
    # Rank 3 has experts 2 and 3 for ranks 2 and 3. It gets 4 + 12 and 4 + 16 tokens. The mean is 22.
    assert (last.rank_imbalance, last.rank) == (36 / 22, 3)
    assert (even.imbalance, even.rank_imbalance, even.dropped_share) == (1.0, 1.0, 0.0)


def test_the_load_of_a_rank_is_that_of_its_experts_for_the_ranks_of_its_group(run):
    rows = api.expert_ranks(run.open()).query("step == 0 and layer == 'last'")
    assert rows["rank"].tolist() == [0, 1, 2, 3] and rows["experts"].tolist() == [2] * 4
    assert rows["tokens"].tolist() == [16, 4 + 4 + 4 + 8, 16, 4 + 12 + 4 + 16]


def test_the_summary_names_the_worst_step(run):
    summary = api.expert_summary(run.open())
    assert summary.steps == 2 and summary.settings == (LAYER,)
    last, moe = summary.layers
    assert (last.layer, last.imbalance, last.worst) == ("last", 40 / 22, (0, 0, 3, 40 / 22))
    assert (moe.layer, moe.imbalance, moe.worst) == ("moe", 1.5, (0, 0, 0, 2.0))  # The median of 2 and 1.
    assert moe.dropped_share == 8 / 128 and last.dropped_share == 0
    assert summary.dropped_share == 8 / (64 + 88 + 64)


def test_loads_without_described_layers_have_no_ranks():
    run = SyntheticRun(world_size=2)
    add_load(run, 0, [3, 1])
    rows, loads = api.expert_imbalance(run.open()), api.experts(run.open())
    assert rows["imbalance"].tolist() == [1.5] and rows["rank"].isna().all() and rows["highest"].isna().all()
    assert loads["ranks"].isna().all() and api.expert_ranks(run.open()).empty


def test_a_layer_whose_tokens_chose_nothing_has_no_imbalance():
    run = SyntheticRun(world_size=2)
    add_layer(run)
    add_load(run, 0, [0, 0, 0, 0])
    rows = api.expert_imbalance(run.open())
    assert rows["imbalance"].isna().all() and rows["dropped_share"].isna().all()
    assert api.expert_summary(run.open()).layers[0].worst is None


def test_a_run_without_experts_has_no_rows():
    run = SyntheticRun(world_size=2)
    run.add_collective("all_reduce", payload_bytes=8)
    opened = run.open()
    answers = (api.experts, api.expert_ranks, api.expert_imbalance, api.exchange_imbalance)
    assert all(answer(opened).empty for answer in answers) and api.expert_summary(opened) is None


def test_an_exchange_between_hosts_counts_there_and_unknown_splits_have_no_imbalance():
    run = SyntheticRun(world_size=4)
    run.hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    for step in range(2):
        run.add_step(step)
        run.add_collective("all_to_all", payload_bytes=400, step=step, purpose="activation")
    for rank in range(4):
        run.add_collective(
            "all_to_all", payload_bytes=400, step=1, ranks=(rank,), pg="split",
            input_splits="?", output_splits="?",
        )  # fmt: skip
    rows = api.exchange_imbalance(run.open())
    assert rows["wire_bytes"].tolist() == [1200.0, 1200.0]  # Each rank sends three quarters of its 400 bytes.
    assert rows["between_hosts_bytes"].tolist() == [800.0, 800.0]
    assert rows["imbalance"][0] == 1.0 and rows["imbalance"].isna().tolist() == [False, True]
    assert api.exchange_imbalance(run.open(), "activation")["imbalance"].tolist() == [1.0, 1.0]


def test_exchanges_of_sequences_are_not_those_of_tokens():
    run = SyntheticRun(world_size=4)
    add_layer(run)  # Ranks 0 and 1 share experts, and so do ranks 2 and 3.
    run.add_step(0)
    for ranks in ((0, 1), (2, 3)):
        run.add_collective("all_to_all", payload_bytes=400, step=0, group=ranks, pg="e", purpose="activation")
        run.add_collective("all_to_all", payload_bytes=80, step=0, group=ranks, pg="e", purpose="other")
    for ranks in ((0, 2), (1, 3)):  # These ranks share sequences.
        run.add_collective(
            "all_to_all", payload_bytes=6000, step=0, group=ranks, pg="s", purpose="activation"
        )
    opened = run.open()
    assert api.exchange_imbalance(opened, "activation")["wire_bytes"].tolist() == [4 * 200.0 + 4 * 3000.0]
    assert api.exchange_imbalance(opened, of_experts=True)["wire_bytes"].tolist() == [4 * 200.0]


def test_without_experts_no_exchange_is_of_tokens():
    run = SyntheticRun(world_size=2)
    run.add_step(0)
    run.add_collective("all_to_all", payload_bytes=6000, step=0, purpose="activation")
    assert api.exchange_imbalance(run.open(), of_experts=True).empty
    assert len(api.exchange_imbalance(run.open())) == 1


def test_sums_do_not_tell_equal_splits_from_others():
    run = SyntheticRun(world_size=2)
    for rank in range(2):
        run.add(
            "aggregates", rank=rank, attempt=0, pid=1, step=0, phase="forward", op="all_to_all", pg="0",
            group_ranks="0-1", group_size=2, is_p2p=False, calls=2, payload_bytes=800, input_bytes=800, output_bytes=800,
            host_ns=1,
        )  # fmt: skip
    opened = run.open()
    opened.health = replace(opened.health, summed=4)
    rows = api.exchange_imbalance(opened)
    assert rows["wire_bytes"].tolist() == [800.0] and rows["imbalance"].isna().all()


def test_answers_hold_exactly_what_is_declared(run):
    run.add_collective("all_to_all", payload_bytes=400, step=0, purpose="activation")
    opened = run.open()
    for name, declared in EXPERT_ANSWERS.items():
        frame = getattr(api, name)(opened)
        assert len(frame) and list(frame.columns) == list(declared.names)
        for column in declared.columns:
            assert column.nullable or not frame[column.name].isna().any(), (name, column.name)
            if column.type.startswith("int"):
                kind = "Int64" if column.nullable else "int64"
                assert str(frame[column.name].dtype) == kind, (name, column.name)


def test_imbalance_over_time_is_that_of_each_step():
    rows = api.expert_imbalance(uneven_experts().open()).query("layer == 'blocks.0.moe'")
    # Expert 5 gets 8, then 15, 22, 29, 36 of the 64 tokens of a rank. The mean is 8.
    assert rows["imbalance"].tolist() == [1.0] * 4 + [15 / 8, 22 / 8, 29 / 8] + [36 / 8] * 5
    assert rows["dropped"].tolist() == [0] * 5 + [4 * 6, 4 * 13] + [4 * 20] * 5
    assert set(rows["rank"][4:]) == {2}
