"""One gradient bucket on its path from the bucketer to the CSV file, as docs/ARCHITECTURE.md describes it."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
SIZES = (
    37,
    53,
    11,
)  # widths of two successive Linear layers: 2,014 + 594 parameters, odd sizes, so owners share parameters
LIMIT = 700
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {
        "stage": 2,
        "reduce_scatter": True,
        "use_multi_rank_bucket_allreduce": False,
        "reduce_bucket_size": LIMIT,
    },
}


def train(rank: int, world: int, out: str) -> None:
    import torch

    import zero_runtime
    from commprof import hooks

    hooks.attach(out)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(SIZES[0], SIZES[1]), torch.nn.ReLU(), torch.nn.Linear(SIZES[1], SIZES[2])
    )
    engine, _, _, _ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        loss = engine(torch.randn(4, SIZES[0], generator=generator)).square().mean()
        engine.backward(loss)
        engine.step()
    hooks.detach()


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory):
    out = tmp_path_factory.mktemp("walk") / "run"
    run_ranks(2, train, str(out))
    return out


def expected_reduces() -> list[tuple[int, int]]:
    """Return (owner, elements) of each reduce of a step, derived by hand.

    Gradients arrive in reverse order of the parameters. The flat buffer contains 0.weight 1961, 0.bias 53,
    2.weight 583 and 2.bias 11. These are 2,608 elements, two shards of 1,304 elements (already a multiple of 2 x 2).
    The bucket of 700 elements takes 2.bias and 2.weight (594 elements) and 0.bias (647 elements in total). 0.weight
    exceeds the bucket size and is reduced alone. Rank 0 owns 1,304 of its elements, and rank 1 owns 657.
    """
    return [(1, 11 + 583 + 53), (0, 1304), (1, 657)]


@pytest.mark.ranks
def test_the_bucket_is_recorded_as_it_was_sent(run_directory):
    from commprof.trace.reader import open_run

    table = open_run(run_directory).table("collectives").to_pandas()
    for rank in (0, 1):
        for step in (0, 1):
            rows = table[
                (table["rank"] == rank) & (table["step"] == step) & (table["purpose"] == "gradient_reduce")
            ]
            assert list(rows["op"]) == ["reduce"] * 3
            assert list(zip(rows["peer"], rows["numel"], strict=True)) == expected_reduces()
            assert list(rows["owner"]) == list(rows["peer"])
            assert list(rows["payload_bytes"]) == [4 * numel for _, numel in expected_reduces()]
            assert list(rows["bucket"]) == [0, 1, 1]
            assert list(rows["bucket_bytes"]) == [4 * 647, 4 * 1961, 4 * 1961]
            assert list(rows["parameters"]) == ["2.bias,2.weight,0.bias", "0.weight", "0.weight"]
            assert set(rows["phase"]) == {"backward"}


@pytest.mark.ranks
def test_it_meets_its_line_in_the_log(run_directory, tmp_path):
    from commprof.align.matching import align
    from commprof.nccl.parser import parse_logs
    from commprof.trace.reader import open_run

    generator = ROOT / "tests" / "support" / "planted_nccl.py"
    subprocess.run([sys.executable, str(generator), str(run_directory), "--out", str(tmp_path)], check=True)
    report = align(open_run(run_directory), parse_logs([tmp_path]).ops)
    matches = report.matches.to_pandas()
    records = open_run(run_directory).table("collectives").num_rows
    assert list(matches["state"].unique()) == ["matched"]
    assert len(matches) == records
    assert (matches["record_bytes"] == matches["line_bytes"]).all()


@pytest.mark.ranks
def test_table_figure_and_file_say_the_same(run_directory, tmp_path):
    from commprof.analysis import api
    from commprof.export.csv import export_csv

    sent = sum(numel for _, numel in expected_reduces()) * 4
    traffic = api.traffic(str(run_directory), by=("step", "purpose", "op"))
    reduced = traffic[traffic["purpose"] == "gradient_reduce"]
    assert list(reduced["payload_bytes"]) == [sent, sent]
    assert list(reduced["wire_bytes"]) == [sent / 2, sent / 2]

    compared = api.compare([str(run_directory)])
    assert compared["requested_op"].iloc[0] == "reduce_scatter"
    assert compared["issued_op"].iloc[0] == "reduce"

    export_csv(api.open_run(str(run_directory)), tmp_path / "csv")
    with (tmp_path / "csv" / "collectives.csv").open(newline="") as file:
        rows = [
            row for row in csv.DictReader(file) if row["purpose"] == "gradient_reduce" and row["rank"] == "0"
        ]
    assert sum(int(row["payload_bytes"]) for row in rows) == 2 * sent
