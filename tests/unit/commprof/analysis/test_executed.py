"""Test the wire bytes that the backend executes.

The values are compared with interface counters, and with the output of ``report``, ``compare`` and the
advice.
"""

from __future__ import annotations

import json
import re

import pytest

from commprof.analysis import api
from commprof.cli import execute
from commprof.trace.reader import open_run
from support.runs import SyntheticRun

MIB = 2**20
# Each row has the operation, the bytes, the ranks and the sum of the counted bytes. || The interfaces of
# hosts with one rank each were counted under gloo.
COUNTED = [
    ("reduce", 4_000_012, 3, 4_007_398 + 4_007_992 + 2_674_404),
    ("reduce", 4_000_012, 4, 4_008_016 + 3_008_518 + 4_007_752 + 4_008_082),
    ("reduce", 20_000_000, 2, 28_433_300 + 18_969_936),
    ("reduce", 20_000_000, 3, 17_935_374 + 25_280_122 + 25_345_402),
    ("reduce", 20_000_000, 4, 23_180_750 + 23_309_486 + 23_244_116 + 18_913_836),
    ("reduce_scatter", 20_000_000, 4, 30_110_616 + 30_113_280 + 30_113_218 + 30_111_726),
    ("broadcast", 20_000_000, 4, 20_023_820 + 2_406 + 3_330 + 40_042_876),
    ("gather", 20_000_000, 4, 5_006_942 + 4_878 + 5_007_008 + 5_006_744),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("op", "size", "ranks", "counted"), COUNTED)
def test_executed_bytes_are_what_interfaces_counted(op, size, ranks, counted):
    run = SyntheticRun(world_size=ranks)
    run.add_step(0)
    run.add_collective(op, payload_bytes=size, step=0, peer=0)
    (found,) = api.traffic(run.open(), by=["op"]).to_dict("records")
    # The counters include headers and retransmitted bytes. For a large reduce, the model uses the mean part
    # for the root's part.
    assert found["executed_wire_bytes"] == pytest.approx(counted / ranks, rel=0.025)
    assert found["wire_bytes"] <= found["executed_wire_bytes"]


def test_what_nccl_runs_is_not_known_without_its_log():
    run = SyntheticRun(world_size=4, backend="nccl")
    run.add_step(0)
    run.add_collective("reduce_scatter", payload_bytes=4 * MIB, step=0)
    (found,) = api.traffic(run.open(), by=["op"]).to_dict("records")
    assert found["wire_bytes"] == 3 * MIB
    assert (
        found["executed_wire_bytes"] is None or found["executed_wire_bytes"] != found["executed_wire_bytes"]
    )


def test_sums_of_steps_have_executed_bytes_too():
    run = SyntheticRun(world_size=4)
    run.add_step(0)
    run.add_collective("barrier", step=0)  # The barrier defines the group and its backend.
    for rank in range(4):
        run.add(
            "aggregates", rank=rank, attempt=0, pid=run.pid(rank), step=0, phase="backward", op="reduce_scatter",
            purpose="gradient_reduce", pg="0", group_ranks="0-3", group_size=4, is_p2p=False, calls=2,
            payload_bytes=8 * MIB, input_bytes=8 * MIB, output_bytes=2 * MIB, host_ns=1,
        )  # fmt: skip
    (_, found) = api.traffic(run.open(), by=["op"]).to_dict("records")
    assert (found["op"], found["wire_bytes"]) == ("reduce_scatter", 6 * MIB)
    assert found["executed_wire_bytes"] == 12 * MIB


def settings(tmp_path, **moved):
    """Write runs of three settings on 2 ranks, as in the demo.

    Per step, the settings issue an all_reduce, a reduce or an all_to_all of 2 MiB. If ``moved`` names the setting
    noisy, there is a fourth setting, with the same traffic as the first.
    """
    paths = []
    for name, op, intended in (
        ("plain", "all_reduce", None),
        ("owners", "reduce", None),
        ("pairs", "all_to_all", "reduce_scatter"),
        *([("noisy", "all_reduce", None)] if "noisy" in moved else []),
    ):
        run = SyntheticRun(world_size=2, config={"reduction": name})
        for step in range(3):
            run.add_step(step, duration_ns=50_000_000, loss=1.0)
            run.add_collective(
                op, payload_bytes=2 * MIB, step=step, purpose="gradient_reduce", intended_op=intended, peer=0
            )
        for time_ns, sent in ((1, 0), (10**9, moved.get(name, 0))):
            if moved:
                run.add(
                    "wire", host="host-a", device="lo", kind="interface", time_ns=time_ns, sent_bytes=sent,
                    received_bytes=sent,
                )  # fmt: skip
        paths.append(str(run.write(tmp_path / name)))
    return paths


def shown(capsys, *words):
    assert execute(list(words)) == 0
    return capsys.readouterr().out


@pytest.mark.long
def test_a_reduce_that_gloo_runs_with_more_bytes_is_not_as_good(tmp_path, capsys):
    paths = settings(tmp_path)
    text = " ".join(shown(capsys, "compare", *paths).split())
    assert "Set reduction=pairs: it sends the least, 1.00 MiB" in text
    assert "As good" not in text
    # gloo's reduce on 2 ranks sends (4-1)/4 S of 2 MiB. The issued operation is modelled with 1/2 S.
    assert "reduction=owners" in text
    assert "1.50 MiB 1.00 MiB" in text
    rows = {row["label"]: row for row in json.loads(shown(capsys, "compare", "--json", *paths))}
    assert rows["reduction=owners"]["wire_bytes_per_step"] == 1 * MIB
    assert rows["reduction=owners"]["executed_wire_bytes_per_step"] == 1.5 * MIB
    advice = api.advice(paths).settings.set_index("label")
    assert list(advice.index[advice["least_bytes"]]) == ["reduction=pairs"]
    assert set(advice["wire_of"]) == {"executed"}


def test_report_has_both_where_they_differ_and_one_where_not(tmp_path, capsys):
    plain, owners, _ = settings(tmp_path)
    text = shown(capsys, "report", owners)
    line = next(line for line in text.splitlines() if line.strip().startswith("reduce "))
    assert line.split()[2:9] == ["1", "2.00", "MiB", "1.50", "MiB", "1.00", "MiB"]
    assert "as issued" in text.partition("payload: S of")[0]
    assert "as issued" not in shown(capsys, "report", plain).partition("payload: S of")[0]


def test_the_counters_speak_up_against_a_recommendation(tmp_path, capsys):
    paths = settings(tmp_path, plain=9 * MIB, owners=9 * MIB, pairs=12 * MIB)
    text = " ".join(shown(capsys, "compare", *paths).split())
    assert (
        "But the counters show more bytes for it: reduction=pairs moved 4.00 MiB a step on all interfaces, reduction=owners "
        "3.00 MiB" in text
    )


def test_the_counters_may_agree_with_a_recommendation(tmp_path, capsys):
    paths = settings(tmp_path, plain=12 * MIB, owners=9 * MIB, pairs=6 * MIB)
    text = " ".join(shown(capsys, "compare", *paths).split())
    assert "The interface counters agree: 2.00 MiB a step on all hosts together, and 4.00 MiB with" in text
    assert "But the counters" not in text


@pytest.mark.parametrize(("plain", "agrees"), [(12, True), (6.1, False)])
def test_the_noise_of_one_run_is_not_shown_as_agreement(tmp_path, capsys, plain, agrees):
    """Of two settings with the same traffic, the one with the fewest moved bytes decides."""
    paths = settings(tmp_path, plain=int(plain * MIB), owners=9 * MIB, pairs=6 * MIB, noisy=90 * MIB)
    text = " ".join(shown(capsys, "compare", *paths).split())
    sentence = "The interface counters agree: 2.00 MiB a step on all hosts together, and 4.00 MiB with reduction=plain"
    assert (sentence in text) == agrees
    assert ("counters agree" in text) == agrees


def logged_run(directory, *, lost=False):
    """Return a run on NCCL with its log.

    On 2 ranks, each step has two all_reduces of 4 MiB and an all_gather of 8 MiB.
    """
    made = SyntheticRun(world_size=2, backend="nccl")
    for step in range(3):
        made.add_step(step)
        for op, size in (("all_reduce", 4), ("all_reduce", 4), ("all_gather", 8)):
            made.add_collective(op, payload_bytes=size * MIB, step=step, purpose="gradient_reduce")
    run = made.write(directory / "run")
    (run / "nccl").mkdir()
    for rank in (0, 1):
        head, comm = f"host-a:{1000 + rank}:{1000 + rank} [{rank}] NCCL INFO ", f"comm 0x55{rank}0"
        text = (
            f"{head}ncclCommInitRank {comm} rank {rank} nranks 2 cudaDev {rank} nvmlDev {rank} busId 1000 "
            "commId 0x9f - Init COMPLETE\n"
        )
        for number, op in enumerate(["AllReduce", "AllReduce", "AllGather"] * 3):
            if not (lost and op == "AllGather" and number == 5):
                text += (
                    f"{head}{op}: opCount {number:x} sendbuff 0x1 recvbuff 0x2 count {MIB} datatype 7 op 0 root 0 "
                    f"{comm} [nranks=2] stream 0x3\n"
                )
        (run / "nccl" / f"log.{1000 + rank}").write_text(text)
    return run


def test_what_nccl_ran_is_known_from_its_aligned_log(tmp_path, capsys):
    run = logged_run(tmp_path)
    before = shown(capsys, "report", str(run))
    assert api.traffic(open_run(run), by=["op"])["executed_wire_bytes"].isna().all()
    shown(capsys, "align", str(run), "--force")
    found = api.traffic(open_run(run), by=["op"]).set_index("op")["executed_wire_bytes"]
    assert found.to_dict() == {"all_reduce": 24 * MIB, "all_gather": 12 * MIB}
    (whole,) = api.traffic(open_run(run), by=[])["executed_wire_bytes"]
    assert whole == 36 * MIB
    after = shown(capsys, "report", str(run))
    lines = [
        next(line.split() for line in text.splitlines() if line.strip().startswith("all_reduce "))
        for text in (before, after)
    ]
    # The executed bytes are shown as a dash. The issued bytes follow.
    assert lines[0][2:8] == ["2", "8.00", "MiB", "-", "8.00", "MiB"]
    assert lines[1][2:7] == ["2", "8.00", "MiB", "8.00", "MiB"]
    assert "as issued" not in after.partition("payload: S of")[0]
    (row,) = json.loads(shown(capsys, "compare", "--json", str(run)))
    assert row["executed_wire_bytes_per_step"] == 12 * MIB


def test_what_a_record_without_a_line_ran_as_is_not_known(tmp_path, capsys):
    run = logged_run(tmp_path, lost=True)
    shown(capsys, "align", str(run), "--force")
    found = api.traffic(open_run(run), by=["op"]).set_index("op")["executed_wire_bytes"]
    assert found["all_reduce"] == 24 * MIB
    assert found.isna()["all_gather"]


@pytest.mark.long
def test_a_comparison_says_that_bytes_are_as_issued(tmp_path, capsys):
    run = logged_run(tmp_path)
    text = shown(capsys, "compare", str(run), str(run))
    assert "wire by operation, as issued" in text
    shown(capsys, "align", str(run), "--force")
    assert "wire by operation, as issued" not in shown(capsys, "compare", str(run), str(run))


@pytest.mark.long
def test_what_is_not_in_every_step_has_the_bytes_that_the_backend_sends(tmp_path, capsys):
    run = SyntheticRun(world_size=2)
    for step in range(5):
        run.add_step(step)
        run.add_collective("all_reduce", payload_bytes=2 * MIB, step=step, purpose="gradient_reduce")
    run.add_collective("reduce_scatter", payload_bytes=4 * MIB, step=3, purpose="other")
    text = shown(capsys, "report", str(run.write(tmp_path / "run")))
    line = next(line for line in text.splitlines() if "other, reduce_scatter" in line)
    assert re.findall(r"[\d.]+ MiB", line) == ["4.00 MiB", "4.00 MiB", "2.00 MiB"]
