"""From ``commprof calibrate`` on two emulated hosts to the route of each message.

The training chooses between plain and composed collectives by the measured costs.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from commprof.trace.reader import open_run
from support import hosts as network

HOSTS, EACH = 2, 2
RATE = "50mbit"
# On a busy machine more bytes may not take longer. The calibration is then repeated.
TRIES = 3
WHY_NOT = network.why_impossible()
OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")

pytestmark = [
    pytest.mark.long,
    pytest.mark.root,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]

PROGRAM = """
import sys
import torch, torch.distributed as dist
import commprof, zero_runtime

zero_runtime.init_distributed("gloo")
for path in sys.argv[1:]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 32))
    commprof.attach(path.replace(".json", "-run"))
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=path)
    for step in range(2):
        engine.backward(engine(torch.randn(2, 512)).square().mean())
        engine.step()
    engine.destroy()
    commprof.detach()
dist.destroy_process_group()
"""


def calibrated(machines, ranks, each, out, sizes="4K:1M:16"):
    """Run ``commprof calibrate`` with one process for each (host, rank) in ``ranks``, and ``each`` ranks per host."""
    words = [
        sys.executable,
        "-m",
        "commprof",
        "calibrate",
        "--force",
        "--out",
        str(out),
        "--ops",
        ",".join(OPS),
    ]
    words += ["--sizes", sizes, "--iterations", "6", "--warmup", "1"]
    for _ in range(TRIES):
        run(machines, [(machine, rank, words) for machine, rank in ranks], each)
        if all(entry.get("fit") for entry in json.loads(out.read_text())["ops"].values()):
            return
    pytest.skip(f"on this machine, as it is now, the times of {out.stem} do not grow with the bytes")


def run(machines, started, each):
    ranks = [
        machine.start(
            words,
            network.environment(machines, rank, each),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for machine, rank, words in started
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * len(ranks), said
    return said


def time_ns(path, op, payload, ranks):
    """Return the time that Hockney's model predicts from the bus bandwidth of the file (docs/calibration.md)."""
    entry = json.loads(path.read_text())["ops"][op]
    factor = (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks
    fit = entry["fit"]
    return fit["alpha_ns"] + payload * factor * 1e9 / (fit["beta_bytes_per_s"] * entry["bus_factor"])


def goes_along(files, payload):
    """Return whether an all_reduce of ``payload`` bytes among 2 x 2 ranks takes less time along the axes."""
    world, between, inside = files
    plain = time_ns(world, "all_reduce", payload, HOSTS * EACH)
    # The only group of the inner axis on a host has the link to itself. Both groups between hosts share the
    # link. gloo sums by all_to_all.
    axes = time_ns(inside, "all_to_all", payload, EACH) + time_ns(inside, "all_gather", payload, EACH)
    return axes + time_ns(between, "all_reduce", 2 * payload / EACH, HOSTS) < plain


NUMELS = {"0.weight": 512 * 512, "0.bias": 512, "1.weight": 512 * 32, "1.bias": 32}
PLAIN = [("all_reduce", "default_pg")]
ALONG = [("all_to_all", "axis 1 of 2x2"), ("all_reduce", "axis 0 of 2x2"), ("all_gather", "axis 1 of 2x2")]


def configured(folder, name, files):
    """Write a configuration and return its path.

    Each parameter is a bucket of its own, and so is sent as a separate message.
    """
    calibration = {"world": str(files[0]), "axes": [str(files[1]), str(files[2])]}
    path = folder / f"{name}.json"
    keys = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 1, "reduce_scatter": False, "reduce_bucket_size": 1},
        "communication": {"topology": "auto", "calibration": calibration},
    }
    path.write_text(json.dumps(keys))
    return path


def worth(path, factor):
    """Write a copy of the calibration in ``path`` with all times multiplied by ``factor``."""
    found = json.loads(path.read_text())
    for entry in found["ops"].values():
        entry["fit"]["alpha_ns"] *= factor
        entry["fit"]["beta_bytes_per_s"] /= factor
    scaled = path.with_name(f"{path.stem}-{factor}.json")
    scaled.write_text(json.dumps(found))
    return scaled


def sent(folder, name):
    """Return the operations and groups that rank 0 used for the gradient of each parameter."""
    rows = open_run(folder / f"{name}-run").table("collectives").to_pylist()
    mine = [
        row for row in rows if row["rank"] == 0 and row["step"] == 1 and row["purpose"] == "gradient_reduce"
    ]
    return {
        name: [(row["op"], row["group_desc"]) for row in mine if row["parameters"] == name] for name in NUMELS
    }


def test_each_message_goes_the_way_that_the_measured_costs_say(tmp_path):
    files = [tmp_path / f"{name}.json" for name in ("world", "between", "inside")]
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    with network.hosts(HOSTS, RATE) as machines:
        places = [(machines[rank // EACH], rank) for rank in range(HOSTS * EACH)]
        calibrated(machines, places, EACH, files[0])
        calibrated(machines, [(machine, rank) for rank, machine in enumerate(machines)], 1, files[1])
        calibrated(machines[:1], places[:EACH], EACH, files[2], "64K:16M:16")
        configs = [
            configured(tmp_path, "measured", files),
            configured(tmp_path, "slow", [worth(files[0], 1000), *files[1:]]),
            configured(tmp_path, "fast", [worth(files[0], 0.001), *files[1:]]),
        ]
        words = [sys.executable, str(script), *map(str, configs)]
        run(machines, [(machine, rank, words) for machine, rank in places], EACH)
    assert sent(tmp_path, "slow") == dict.fromkeys(NUMELS, ALONG)
    assert sent(tmp_path, "fast") == dict.fromkeys(NUMELS, PLAIN)
    expected = {name: ALONG if goes_along(files, 4 * numel) else PLAIN for name, numel in NUMELS.items()}
    assert sent(tmp_path, "measured") == expected
