"""Measures memory and samples per second of each ZeRO stage, with offload and with 16-bit messages.

The model is the GPT of examples/train_gpt.py. Each configuration is a recorded run, and all runs form one sweep, which
``commprof compare`` and ``commprof dashboard`` can open. ``commprof sweep`` itself would run all combinations of the
given values. This benchmark runs only selected combinations.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from results import about, arguments, markdown, publish

from commprof.analysis import api
from commprof.launch.ranks import signals_held
from commprof.launch.sweeps.campaign import Campaign, carry_out, default_directory, make_room
from commprof.launch.sweeps.config_file import ConfigFile
from commprof.launch.sweeps.points import Turn
from commprof.launch.user_program import Kind, Program

ROOT: Final = Path(__file__).resolve().parents[1]
SCRIPT: Final = ROOT / "examples" / "train_gpt.py"
STAGE: Final = "zero_optimization.stage"
STATES: Final = "zero_optimization.offload_optimizer.device"
PARAMETERS: Final = "zero_optimization.offload_param.device"
COMMUNICATION: Final = "communication_data_type"
USUAL: Final = {STAGE: 0, STATES: "none", PARAMETERS: "none", COMMUNICATION: "fp32"}
# The name of each row of the table -> the keys that differ from USUAL.
CONFIGURATIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "plain data parallelism (stage 0)": {},
    "ZeRO-1": {STAGE: 1},
    "ZeRO-2": {STAGE: 2},
    "ZeRO-3": {STAGE: 3},
    "ZeRO-2, optimizer on cpu": {STAGE: 2, STATES: "cpu"},
    "ZeRO-2, optimizer in files": {STAGE: 2, STATES: "nvme"},
    "ZeRO-3, optimizer and parameters on cpu": {STAGE: 3, STATES: "cpu", PARAMETERS: "cpu"},
    "ZeRO-3, optimizer and parameters in files": {STAGE: 3, STATES: "nvme", PARAMETERS: "nvme"},
    "ZeRO-1, bf16 communication": {STAGE: 1, COMMUNICATION: "bf16"},
    "ZeRO-2, bf16 communication": {STAGE: 2, COMMUNICATION: "bf16"},
    "ZeRO-3, bf16 communication": {STAGE: 3, COMMUNICATION: "bf16"},
}
BUCKET: Final = 2_000_000  # elements
# glibc returns freed blocks of at least this many bytes to the system immediately. The resident memory then shows the
# memory that a configuration uses.
GIVEN_BACK: Final = 1 << 20
HEADER: Final = ("configuration", "after a step", "peak", "samples/s", "sent by a rank per step")
# --docs replaces the text at this place with the table.
PLACE: Final = re.compile(r"(?<=<!-- table -->\n).*(?=<!-- /table -->)", re.DOTALL)


class Row(NamedTuple):
    """The results of one configuration: memory of the rank with the most memory, throughput, and wire bytes."""

    name: str
    after_step_bytes: int
    peak_bytes: int
    samples_per_second: float
    wire_bytes_per_step: float

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the row as text, in the order of HEADER."""
        memory = (api.format_bytes(self.after_step_bytes), api.format_bytes(self.peak_bytes))
        return (
            self.name,
            *memory,
            f"{self.samples_per_second:.3g}",
            api.format_bytes(self.wire_bytes_per_step),
        )


def config(nvme_path: Path, micro_batch: int) -> dict[str, Any]:
    """Return the keys that all configurations have in common."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "reduce_bucket_size": BUCKET,
            # Without these two values, the parameters of this small model would stay gathered between steps, or
            # between the forward and the backward pass.
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": BUCKET,
            "offload_optimizer": {"nvme_path": str(nvme_path)},
            "offload_param": {"nvme_path": str(nvme_path), "max_in_cpu": 0, "buffer_size": 1_000_000},
        },
    }


def runs(campaign: Campaign, names: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Execute the sweep and yield the name and the run of each configuration.

    Raises:
        SystemExit: A run failed, or the sweep was interrupted.
    """
    with signals_held():
        for name, result in zip(names, carry_out(campaign, print), strict=True):
            if result.asked_to_stop:
                raise SystemExit("interrupted")
            if result.problem is not None:
                raise SystemExit(f"{name} failed: {result.problem}")
            print(f"{name}: {result.run}", file=sys.stderr, flush=True)
            yield name, result.run


def rows(made: Sequence[tuple[str, Path]]) -> list[Row]:
    """Return one row for each run, in the same order, computed from the values that the page Compare shows."""
    opened = [api.open_run(path) for _, path in made]
    needed = api.resources(opened).to_dict("records")
    compared = api.compare(opened).to_dict("records")
    peaks = [
        max(row["value"] for row in run.table("metrics").to_pylist() if row["name"] == "peak_rss_bytes")
        for run in opened
    ]
    return [
        Row(name, use["rss_bytes"], int(peak), use["samples_per_second"], cost["wire_bytes_per_step"])
        for (name, _), use, cost, peak in zip(made, needed, compared, peaks, strict=True)
    ]


def main() -> None:
    """Execute the runs and print their table."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where the runs go; default: traces/train_gpt-sweep-<time>")
    parser.add_argument(
        "--path", type=Path, help="folder on a disk, for offload to files; default: a temporary one"
    )
    parser.add_argument("--only", default="", help="configurations whose name has this in it")
    parser.add_argument("--nproc", type=int, default=2, help="ranks")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--docs", type=Path, help="put the table into this page, between its marks")
    args = parser.parse_args()
    # On a CPU, host memory is the memory of the device, so that offload to the CPU changes nothing.
    names = [
        name
        for name in CONFIGURATIONS
        if args.only in name and (torch.cuda.is_available() or not name.endswith("on cpu"))
    ]
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(GIVEN_BACK))
    sizes = [f"--{name}={getattr(args, name)}" for name in ("steps", "width", "layers")]
    with tempfile.TemporaryDirectory(prefix="memory-table-") as scratch:
        base = config(args.path or Path(scratch), args.micro_batch)
        given = Path(scratch) / "ds.json"
        program = Program(
            Kind.SCRIPT, str(SCRIPT), ("--config", str(given), *sizes, "--validation-batches=1")
        )
        campaign = Campaign(
            program=program,
            turns=[Turn(number, {**USUAL, **CONFIGURATIONS[name]}, 0) for number, name in enumerate(names)],
            config=ConfigFile("--config", given, base),
            argument=1,
            out=args.out or default_directory(program, datetime.now()),
            ranks=args.nproc,
        )
        make_room(campaign.out, force=False)
        table = rows(list(runs(campaign, names)))
    title = f"Memory and samples per second of a GPT, {args.nproc} ranks, width {args.width}, {args.layers} layers"
    figures = {row.name: row._asdict() for row in table}
    publish(args, title, HEADER, [row.cells() for row in table], figures)
    print(f"next: commprof dashboard {campaign.out}")
    if args.docs:
        text = f"{about()}\n\n{markdown(HEADER, [row.cells() for row in table])}\n"
        args.docs.write_text(PLACE.sub(lambda _: text, args.docs.read_text()))


if __name__ == "__main__":
    main()
