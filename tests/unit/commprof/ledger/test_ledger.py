"""Test the ledger of hand-written runs. Every byte of the runs is computed here."""

from __future__ import annotations

import json

import pytest

from commprof.analysis import api
from commprof.cli import execute
from support.runs import SyntheticRun

# Two matrices of 600 and 400 elements on 4 ranks need a flat buffer of 1000 elements, a multiple of 2 x 4.
# The shards have 250 elements.
SIZES = {"a.weight": 600, "b.weight": 400}
GRADIENT_BYTES = 4000
DEEPSPEED_DEFAULT = {"zero_optimization": {"stage": 2}}


def init(run: SyntheticRun, step: int = -1) -> None:
    for numel in SIZES.values():
        run.add_collective(
            "broadcast",
            payload_bytes=4 * numel,
            step=step,
            phase="init",
            purpose="parameter_broadcast",
            peer=0,
            dtype="uint8",
        )


def end_of_step(run: SyntheticRun, step: int) -> None:
    run.add_collective("all_reduce", payload_bytes=4, step=step, phase="optimizer", purpose="gradient_norm")
    run.add_collective(
        "all_gather",
        payload_bytes=GRADIENT_BYTES,
        step=step,
        phase="optimizer",
        purpose="parameter_gather",
    )


def gradients(
    run: SyntheticRun, step: int, op: str = "all_reduce", payload_bytes: int = GRADIENT_BYTES
) -> None:
    run.add_collective(
        op, payload_bytes=payload_bytes, step=step, purpose="gradient_reduce", call_site="engine.py:9 reduce"
    )


def zero2(steps: int = 3, config=DEEPSPEED_DEFAULT, op: str = "all_reduce", **keys) -> SyntheticRun:
    run = SyntheticRun(world_size=4, config=config, **keys)
    run.add_parameters(SIZES)
    init(run)
    for step in range(steps):
        run.add_step(step)
        gradients(run, step, op)
        end_of_step(run, step)
    return run


def row(verdict, purpose: str):
    (found,) = [row for row in verdict.rows if row.purpose == purpose]
    return found


def sentence(verdict, words: str) -> str:
    (found,) = [text for text in verdict.sentences if words in text]
    return found


def test_a_ledger_closes_to_the_byte():
    verdict = api.verify(zero2().open())
    assert (verdict.state, verdict.exit_code, verdict.unexplained) == ("closed", 0, ())
    total = 4000 + 3 * (4000 + 4 + 4000)
    assert (verdict.issued_bytes, verdict.explained_bytes) == (total, total)
    reduced = row(verdict, "gradient_reduce")
    assert (reduced.requested_op, reduced.issued_op, reduced.executed_op) == (
        "reduce_scatter",
        "all_reduce",
        "all_reduce",
    )
    assert (reduced.steps, reduced.expected_count, reduced.issued_count) == (3, 3, 3)
    assert reduced.requested_wire_bytes == 3 * 3 / 4 * 4000
    assert reduced.issued_wire_bytes == reduced.executed_wire_bytes == 3 * 3 / 2 * 4000


def test_the_sentence_names_the_key_that_did_it_and_what_it_costs():
    said = sentence(api.verify(zero2().open()), "requested")
    assert said == (
        "reduce_scatter, true by default, requested a reduce_scatter; use_multi_rank_bucket_allreduce, true by default, "
        "turned it into all_reduce: 1.50 instead of 0.75 of the gradient bytes on the wire per rank at n = 4 (modelled)."
    )


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"stage": 2, "reduce_scatter": True}, "reduce_scatter: true requested a reduce_scatter"),
        (
            {"stage": 2, "reduce_scatter": False},
            "reduce_scatter: false requested an all_reduce, and an all_reduce was issued: 1.50",
        ),
        (
            {"stage": 2, "contiguous_gradients": False},
            "contiguous_gradients: false overrides it and turned it into all_reduce: 1.50 instead of 0.75",
        ),
    ],
)
def test_each_combination_of_keys_has_its_sentence(section, words):
    verdict = api.verify(zero2(config={"zero_optimization": section}).open())
    assert verdict.state == "closed"
    assert words in sentence(verdict, "requested")


OWN = "zero_optimization.gradient_reduction: reduce_scatter"
SAVED = "0.75 instead of 1.50 of the gradient bytes per rank"


@pytest.mark.parametrize(
    ("engine", "section", "op", "remedy"),
    [
        ("zero_runtime", {}, "all_reduce", f"{OWN}. It sends {SAVED}."),
        ("zero_runtime", {"contiguous_gradients": False}, "all_reduce", f"{OWN}. It sends {SAVED}."),
        (
            "deepspeed 0.19.8",
            {},
            "all_reduce",
            "DeepSpeed has no reduce_scatter at stages 1 and 2. With use_multi_rank_bucket_allreduce: false it sends each "
            "owner one reduce, as many bytes by the model. For a reduce_scatter, run the program with commprof run "
            f"--engine zero_runtime and {OWN}: {SAVED}.",
        ),
        (
            "deepspeed 0.19.8",
            {"contiguous_gradients": False},
            "all_reduce",
            "DeepSpeed has no reduce_scatter at stages 1 and 2. With contiguous_gradients: true and "
            "use_multi_rank_bucket_allreduce: false it sends each owner one reduce, as many bytes by the model. For a "
            f"reduce_scatter, run the program with commprof run --engine zero_runtime and {OWN}: {SAVED}.",
        ),
        (
            "zero_runtime",
            {"gradient_reduction": "reduce_scatter"},
            "all_to_all",
            "nothing. An all_to_all with a local sum sends as many bytes as a reduce_scatter; on NCCL this config issues a "
            "reduce_scatter.",
        ),
        (
            "zero_runtime",
            {"gradient_reduction": "reduce_scatter", "reduce_scatter_impl": "all_to_all"},
            "all_to_all",
            "nothing. An all_to_all with a local sum sends as many bytes as a reduce_scatter; for a reduce_scatter on NCCL "
            "set reduce_scatter_impl: auto.",
        ),
        ("zero_runtime", {"reduce_scatter": False}, "all_reduce", None),
        ("zero_runtime", {"gradient_reduction": "reduce_scatter"}, "reduce_scatter", None),
    ],
)
def test_the_remedy_says_what_to_set_for_the_requested_reduce_scatter(engine, section, op, remedy):
    made = zero2(config={"zero_optimization": {"stage": 2, **section}}, op=op)
    run = made.open()
    run.manifest.engine = engine
    verdict = api.verify(run)
    assert verdict.remedy == remedy
    if remedy is not None:
        assert sentence(verdict, "What to set: ") == f"What to set: {remedy}"


def test_muon_needs_full_gradients_so_there_is_no_remedy():
    config = {"optimizer": {"type": "Muon"}, "zero_optimization": {"stage": 2}}
    remedy = api.verify(zero2(config=config).open()).remedy
    assert remedy == (
        "nothing. Muon needs the full gradients of a matrix, which a reduce_scatter leaves on no rank."
    )


def test_reduces_to_the_owners_cost_on_gloo_more_than_their_model():
    config = {"zero_optimization": {"stage": 2, "use_multi_rank_bucket_allreduce": False}}
    run = SyntheticRun(world_size=4, config=config)
    run.add_parameters(SIZES)
    init(run)
    run.add_step(0)
    for _ in range(4):
        gradients(run, 0, "reduce", 1000)
    end_of_step(run, 0)
    verdict = api.verify(run.open())
    assert verdict.state == "closed"
    assert "one reduce for each owner: 0.75 of the gradient bytes" in sentence(verdict, "requested")
    assert row(verdict, "gradient_reduce").executed_wire_bytes == 15 / 16 * 4000
    assert "0.94 instead of 0.75 of the payload on the wire per rank at n = 4 (modelled)." in sentence(
        verdict, "sends more"
    )


def test_gloo_runs_a_reduce_scatter_as_an_all_reduce():
    section = {"stage": 2, "gradient_reduction": "reduce_scatter", "reduce_scatter_impl": "native"}
    verdict = api.verify(zero2(config={"zero_optimization": section}, op="reduce_scatter").open())
    assert verdict.state == "closed"
    assert row(verdict, "gradient_reduce").executed_op == "all_reduce"
    assert row(verdict, "gradient_reduce").executed_wire_bytes == 3 * 1.5 * 4000
    assert "ran reduce_scatter as all_reduce: 1.50 instead of 0.75" in sentence(verdict, "The backend ran")


def test_a_planted_record_without_purpose_is_listed_with_its_call_site():
    run = zero2()
    for step in (0, 1):
        run.add_collective("all_reduce", payload_bytes=44, step=step, call_site="train.py:7 main")
    verdict = api.verify(run.open())
    assert (verdict.state, verdict.exit_code) == ("mismatch", 1)
    (found,) = verdict.unexplained
    assert (found.kind, found.steps, found.op, found.group_ranks) == (
        "unexplained",
        "0-1",
        "all_reduce",
        "0-3",
    )
    assert (found.count, found.payload_bytes, found.call_site) == (2, 88, "train.py:7 main")
    assert verdict.issued_bytes - verdict.explained_bytes == 88


def test_a_record_after_the_last_step_is_not_listed_as_one_of_that_step(tmp_path, capsys):
    run = zero2()
    run.add_collective("all_reduce", payload_bytes=40, step=-1, after_step=2, call_site="train.py:9 main")
    run.add_collective("all_reduce", payload_bytes=40, step=2, call_site="train.py:9 main")
    within, after = sorted(api.verify(run.open()).unexplained, key=lambda item: item.outside)
    assert [(item.steps, item.count, item.outside) for item in (within, after)] == [
        ("2", 1, False),
        ("2", 1, True),
    ]
    assert execute(["verify", str(run.write(tmp_path / "run"))]) == 1
    said = capsys.readouterr().out
    assert "  step 2        1 all_reduce, 40 bytes" in said
    assert "  after step 2  1 all_reduce, 40 bytes" in said


def test_a_planted_record_with_a_purpose_is_singled_out():
    run = zero2()
    run.add_collective(
        "all_reduce", payload_bytes=512, step=1, purpose="gradient_reduce", call_site="train.py:8 sneak"
    )
    (found,) = api.verify(run.open()).unexplained
    assert (found.steps, found.count, found.payload_bytes, found.call_site) == (
        "1",
        1,
        512,
        "train.py:8 sneak",
    )


def test_what_is_missing_is_listed():
    run = zero2(steps=2)
    run.add_step(2)
    end_of_step(run, 2)
    verdict = api.verify(run.open())
    (found,) = verdict.unexplained
    assert verdict.state == "mismatch"
    assert (found.kind, found.steps, found.op, found.count, found.payload_bytes) == (
        "missing",
        "2",
        "all_reduce",
        1,
        4000,
    )


def test_another_operation_than_the_rules_say_is_both_unexplained_and_missing():
    verdict = api.verify(zero2(op="reduce_scatter").open())
    assert [(item.kind, item.op, item.steps) for item in verdict.unexplained] == [
        ("missing", "all_reduce", "0-2"),
        ("unexplained", "reduce_scatter", "0-2"),
    ]


def test_what_the_program_tagged_itself_is_labelled_and_no_mismatch():
    run = zero2()
    run.add_collective("all_reduce", payload_bytes=8, step=2, purpose="metric")
    run.add_collective("all_gather", payload_bytes=80, step=2, purpose="checkpoint")
    run.add_collective("barrier", step=-1, phase="init")
    verdict = api.verify(run.open())
    assert verdict.state == "closed"
    assert row(verdict, "metric").explained_by == "label"
    assert verdict.issued_bytes - verdict.explained_bytes == verdict.labelled_bytes == 88


@pytest.mark.parametrize("what", ["lost", "torn", "unseen"])
def test_with_records_missing_nothing_can_be_told(what):
    verdict = api.verify(zero2(**{what: 5}).open())
    assert (verdict.state, verdict.exit_code) == ("unknown", 3)
    assert sentence(verdict, "Cannot tell").startswith("Cannot tell: 5 ")


def test_a_rank_without_records_cannot_be_told():
    verdict = api.verify(zero2(recorded_ranks=(0, 1, 2)).open())
    assert verdict.exit_code == 3
    assert "rank 3 left no records" in sentence(verdict, "Cannot tell")


@pytest.mark.parametrize(
    ("config", "reason"),
    [(None, "no config was recorded"), ({"model": "gpt"}, "neither zero_optimization")],
)
def test_without_a_config_of_zero_the_other_levels_are_told(config, reason):
    verdict = api.verify(zero2(config=config).open())
    assert (verdict.state, verdict.exit_code, verdict.unexplained) == ("unknown", 3, ())
    assert reason in sentence(verdict, "The requested level")
    assert row(verdict, "gradient_reduce").executed_op == "all_reduce"
    assert row(verdict, "gradient_reduce").requested_op is None


def test_the_engines_config_stands_in_for_a_script_without_a_file():
    verdict = api.verify(zero2(config=None, effective_config=DEEPSPEED_DEFAULT).open())
    assert verdict.state == "closed"
    assert "the engine's own config" in verdict.sources["requested"]


@pytest.mark.parametrize("is_missing", [False, True])
def test_what_is_requested_in_a_step_is_of_the_steps_that_what_is_issued_is_of(is_missing):
    """The requested and the issued bytes of a step must come from the same steps.

    The first of seven steps is a warmup. Three steps request reduce_scatter and three request all_reduce,
    whatever a step lacks.
    """
    run = zero2(steps=0)
    other = {"zero_optimization": {"stage": 2, "reduce_scatter": False}}
    run.engines = [
        {"after": -1, "config": DEEPSPEED_DEFAULT, "same_model": True},
        {"after": 3, "config": other, "same_model": True},
    ]
    for step in range(7):
        run.add_step(step)
        if step == 4:
            init(run, step)
        if not (is_missing and step == 6):
            run.add_collective(
                "all_reduce", payload_bytes=GRADIENT_BYTES, step=step, purpose="gradient_reduce",
                intended_op="reduce_scatter" if step < 4 else None,
            )  # fmt: skip
        end_of_step(run, step)
    verdict = api.verify(run.open())
    assert verdict.state == ("mismatch" if is_missing else "closed"), verdict.unexplained
    asked = {row.requested_op: row for row in verdict.rows if row.purpose == "gradient_reduce"}
    assert {op: row.expected_count for op, row in asked.items()} == {"reduce_scatter": 4, "all_reduce": 3}
    assert asked["all_reduce"].issued_count == 3 - is_missing
    assert sentence(verdict, "requested a reduce_scatter").startswith(
        "reduce_scatter, true by default, requested"
    )
    assert sentence(verdict, "requested an all_reduce").startswith(
        "From step 4 on: reduce_scatter: false requested an all_reduce, and an all_reduce was issued: 1.50 of"
    )
    levels = api.reduction_levels([run.open()])
    requested = levels[levels["level"] == "requested"].set_index("op")
    assert requested["payload_bytes_per_step"].to_dict() == {"reduce_scatter": 2000.0, "all_reduce": 2000.0}
    # On 4 ranks a reduce_scatter sends 3/4 of its payload, and an all_reduce sends twice as much.
    assert requested["wire_bytes_per_step"].to_dict() == {"reduce_scatter": 1500.0, "all_reduce": 3000.0}
    issued = levels[(levels["level"] == "issued") & (levels["intended_op"] == "reduce_scatter")]
    assert issued["payload_bytes_per_step"].tolist() == [2000.0]


def test_a_script_that_changes_the_stage_is_found_out():
    run = zero2(config={"zero_optimization": {"stage": 0}}, effective_config=DEEPSPEED_DEFAULT)
    verdict = api.verify(run.open())
    assert verdict.state == "mismatch"
    assert "stage is 0 in the config and 2 in the engine" in sentence(verdict, "differ")


def test_the_last_step_of_a_killed_run_lacks_nothing():
    run = zero2(steps=2)
    run.add_step(2, end_ns=None)
    gradients(run, 2)
    verdict = api.verify(run.open())
    assert verdict.state == "closed"
    assert sentence(verdict, "Step 2").endswith("do not count as missing.")


def test_a_step_ends_at_the_overflow_check():
    run = SyntheticRun(world_size=4, config={"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}})
    run.add_parameters(SIZES)
    for numel in SIZES.values():
        run.add_collective(
            "broadcast", payload_bytes=2 * numel, step=-1, purpose="parameter_broadcast", peer=0
        )
    for step in range(2):
        run.add_step(step)
        gradients(run, step, payload_bytes=2000)
        run.add_collective("all_reduce", payload_bytes=1, dtype="uint8", step=step, purpose="overflow_check")
    run.add_collective("all_reduce", payload_bytes=4, step=1, purpose="gradient_norm")
    run.add_collective("all_gather", payload_bytes=2000, step=1, purpose="parameter_gather")
    verdict = api.verify(run.open())
    assert verdict.state == "closed"
    assert "Step 0: ended at the overflow check" in sentence(verdict, "overflow")


def test_buckets_make_the_counts_exact():
    config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 600}}
    run = SyntheticRun(world_size=4, config=config)
    run.add_parameters(SIZES)
    init(run)
    run.add_step(0)
    for number, name in enumerate(SIZES):
        size = 4 * SIZES[name]
        run.add(
            "buckets",
            rank=0, attempt=0, pid=1000, step=0, micro_step=0, bucket=number, numel=SIZES[name], bytes=size,
            dtype="float32", parameters=name, flush_reason="full", time_ns=1,
        )  # fmt: skip
        gradients(run, 0, payload_bytes=size)
    end_of_step(run, 0)
    assert api.verify(run.open()).state == "closed"
    gradients(run, 0, payload_bytes=0)
    assert api.verify(run.open()).state == "mismatch"


def test_ranks_that_issue_different_things_are_a_mismatch():
    run = zero2()
    run.add_collective("barrier", step=2, ranks=(0, 1), pg_seq=99)
    verdict = api.verify(run.open())
    assert verdict.state == "mismatch"
    assert (
        "did not issue the same in step 2: ranks 0, 1 issued barrier #99; ranks 2, 3 did not, and issued nothing more"
    ) in sentence(verdict, "Mismatch")


def test_a_rank_that_an_earlier_attempt_ended_without_is_no_mismatch():
    run = SyntheticRun(world_size=4)
    run.add_collective("all_reduce", step=0, payload_bytes=8)
    run.add_collective("barrier", step=0, ranks=(0, 1), pg_seq=1)
    run.add_collective("send", step=0, payload_bytes=8, ranks=(0,), peer=1)
    assert api.verify(run.open()).state == "mismatch"
    run.add_collective("all_reduce", step=0, payload_bytes=8, attempt=1)
    assert "Mismatch" not in " ".join(api.verify(run.open()).sentences)
    run.add_collective("barrier", step=0, ranks=(0, 1), pg_seq=1, attempt=1)
    assert "ranks 0, 1 issued barrier" in sentence(api.verify(run.open()), "Mismatch")


def wire(
    run: SyntheticRun, *readings: tuple[int, int | None, int], device: str = "lo", host: str = "host-a"
) -> None:
    for time, step, count in readings:
        run.add(
            "wire", host=host, device=device, kind="interface", time_ns=time, sent_bytes=count,
            received_bytes=count, step=step,
        )  # fmt: skip


def test_counters_of_one_host_agree_with_all_that_its_ranks_send():
    sizes = {"a.weight": 600_000, "b.weight": 400_000}
    run = SyntheticRun(world_size=4, config=DEEPSPEED_DEFAULT)
    run.add_parameters(sizes)
    for numel in sizes.values():
        run.add_collective(
            "broadcast", payload_bytes=4 * numel, step=-1, purpose="parameter_broadcast", peer=0
        )
    run.add_step(0)
    gradients(run, 0, payload_bytes=4_000_000)
    run.add_collective("all_reduce", payload_bytes=4, step=0, purpose="gradient_norm")
    run.add_collective("all_gather", payload_bytes=4_000_000, step=0, purpose="parameter_gather")
    # The expected bytes are 4 ranks x (1.5 x 4,000,000 + 1.5 x 4 + 0.75 x 4,000,000). The broadcasts were
    # before the first reading.
    begin = min(row["issue_ns"] for row in run.rows["collectives"] if row["step"] == 0)
    end = max(row["return_ns"] for row in run.rows["collectives"])
    at_first, at_last = (begin - 1, -1, 12_000_000), (end + 1, 0, 12_000_000 + 36_100_000)
    wire(run, (0, None, 0), at_first, at_last, (end + 9, None, 90_000_000))
    (moved,) = api.verify(run.open()).moved
    assert (moved.device, moved.when, moved.steps, moved.sent_bytes) == ("lo", "steps", 1, 36_100_000)
    assert moved.expected_bytes == 36_000_024
    run.rows["wire"][2]["sent_bytes"] -= 3_000_000
    verdict = api.verify(run.open())
    assert verdict.state == "mismatch"
    assert "fewer bytes moved than the model predicts" in sentence(verdict, "Host host-a")


def test_an_untrue_flight_list_is_a_mismatch():
    run = zero2(steps=1)
    for number, op in enumerate(["broadcast", "broadcast", "reduce", "all_reduce", "all_gather"], 1):
        run.add(
            "flight", rank=0, attempt=0, pid=1000, pg="0", seq=number, op_id=number, is_p2p=False,
            name=f"gloo:{op}", op=op,
        )  # fmt: skip
    verdict = api.verify(run.open())
    assert verdict.state == "mismatch"
    assert "lists reduce where gloo is expected to run all_reduce (4 of 5 agree)" in sentence(
        verdict, "Flight"
    )


def test_coalesced_reduce_scatters_are_an_all_reduce_for_each_tensor_in_the_flight_list():
    run = zero2(steps=1)
    run.add_collective(
        "reduce_scatter", payload_bytes=64, num_tensors=3, backend_method="reduce_scatter_single_coalesced"
    )
    run.add_collective(
        "all_gather", payload_bytes=64, num_tensors=2, backend_method="all_gather_single_coalesced"
    )
    listed = [
        "broadcast",
        "broadcast",
        "all_reduce",
        "all_reduce",
        "all_gather",
        *["all_reduce"] * 3,
        "all_gather",
    ]
    for number, op in enumerate(listed, 1):
        run.add(
            "flight", rank=0, attempt=0, pid=1000, pg="0", seq=number, op_id=number, is_p2p=False,
            name=f"gloo:{op}", op=op,
        )  # fmt: skip
    found = api.verify(run.open())
    assert "agrees on 9 of 9" in found.sources["executed"] and not found.disagreements


def test_the_command_says_it_all_within_100_columns(capsys, tmp_path):
    run = zero2().write(tmp_path / "run")
    assert execute(["verify", str(run)]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    words = [line.split() for line in text.splitlines()]
    assert ["issued", "all_reduce", "1", "3.91", "KiB", "5.86", "KiB", "as", "the", "rules", "say"] in words
    assert execute(["verify", str(run), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["state"], answer["exit_code"], answer["issued_bytes"]) == ("closed", 0, 28012)


def test_the_command_lists_what_is_unexplained(capsys, tmp_path):
    run = zero2()
    site = f"/{'long' * 30}/train.py:7 main"
    run.add_collective("all_reduce", payload_bytes=44, step=1, call_site=site)
    assert execute(["verify", str(run.write(tmp_path / "run"))]) == 1
    text = capsys.readouterr().out
    lines = [line.strip() for line in text.splitlines()]
    assert "step 1  1 all_reduce, 44 bytes, no purpose given, ranks 0-3" in lines
    assert f"at {site}" in lines
    assert max(len(line) for line in lines if site not in line) <= 100
    assert "; 1 collective has no explanation." in " ".join(text.split())
    assert "100.000 %" not in text


def test_on_nccl_what_ran_is_what_the_log_says(tmp_path):
    made = SyntheticRun(world_size=2, backend="nccl", config={"zero_optimization": {"stage": 0}})
    made.add_parameters({"w": 250})
    made.add_collective("broadcast", payload_bytes=1000, step=-1, purpose="parameter_broadcast", peer=0)
    made.add_step(0)
    made.add_collective("all_reduce", payload_bytes=1000, step=0, purpose="gradient_reduce")
    made.add_collective("all_reduce", payload_bytes=4, step=0, purpose="gradient_norm")
    run = made.write(tmp_path / "run")
    assert api.verify(run).sources["executed"].startswith("not known: ")
    (run / "nccl").mkdir()
    for rank in (0, 1):
        head = f"host-a:{1000 + rank}:{1000 + rank} [{rank}] NCCL INFO "
        lines = [
            f"{head}ncclCommInitRank comm 0x55{rank}0 rank {rank} nranks 2 cudaDev {rank} nvmlDev {rank} "
            "busId 1000 commId 0x9f - Init COMPLETE"
        ]
        lines += [
            f"{head}{op}: opCount {number} sendbuff 0x1 recvbuff 0x2 count {count} datatype 7 op 0 root 0 "
            f"comm 0x55{rank}0 [nranks=2] stream 0x3"
            for number, (op, count) in enumerate([("Broadcast", 250), ("AllReduce", 250), ("AllReduce", 1)])
        ]
        (run / "nccl" / f"log.{1000 + rank}").write_text("\n".join(lines) + "\n")
    verdict = api.verify(run)
    assert (verdict.state, verdict.sources["executed"]) == (
        "closed",
        "the NCCL log: 6 lines matched with records",
    )
    assert row(verdict, "gradient_reduce").executed_op == "all_reduce"


def test_one_rank_sends_nothing_and_no_sentence_says_otherwise():
    run = SyntheticRun(world_size=1, config={"zero_optimization": {"stage": 0}})
    run.add_parameters({"w": 250})
    run.add_step(0)
    run.add_collective("reduce_scatter", payload_bytes=1000, purpose="metric")
    assert not [text for text in api.verify(run.open()).sentences if "backend" in text]


def test_what_the_words_of_a_config_cost_is_over_all_operations_that_came_of_them():
    keys = {"reduce_scatter": False, "reduce_bucket_size": 500, "reduce_scatter_impl": "native"}
    config = {"zero_optimization": {"stage": 3, **keys}}
    run = SyntheticRun(world_size=2, config=config)
    run.add_parameters(SIZES)
    run.add_step(0)
    gradients(run, 0, "all_reduce", 1600)
    gradients(run, 0, "reduce_scatter", 2400)
    said = sentence(api.verify(run.open()), "requested")
    # The 2400 bytes count with 0.5 and the 1600 bytes with 1.
    assert "for 60 % of the bytes, stage 3" in said
    assert "turned it into reduce_scatter: 0.70 instead of 1.00 of the gradient bytes" in said
