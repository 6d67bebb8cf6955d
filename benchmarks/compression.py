"""Measures bytes, step time and loss of the example GPT with compressed gradients on emulated hosts.

Each host is a network namespace of this machine with one rank and its own link (veth and tbf, 100 Mbit/s unless
``--rate`` sets another rate). Every case starts from the same weights and uses the same batches. The bytes are those
that the interface of a host sent during the steps. They include TCP headers and, at stages 2 and 3, the gathered
parameters. The benchmark needs root.

With ``--methods``, the rows are the methods of ``compression_losses.py``, to measure their bytes and times:

    python benchmarks/compression.py --methods --hosts 4 --steps 50 --record
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from compression_losses import cases as cases_of_losses
from results import arguments, publish

from support import hosts as network

ROOT = Path(__file__).resolve().parent.parent
CANNOT = 3  # the exit code if this machine cannot create the hosts
COMMON: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "gradient_clipping": 1.0,
}

SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9}}}


class Case(NamedTuple):
    """A row of the table: the compression of the gradients, and other configuration keys."""

    name: str
    compression: Mapping[str, Any] | None = None
    stage: int = 0
    top: Mapping[str, Any] = {}

    @property
    def config(self) -> dict[str, Any]:
        """The complete configuration."""
        compression = {} if self.compression is None else {"gradient_compression": dict(self.compression)}
        return {**COMMON, "zero_optimization": {"stage": self.stage}, **compression, **self.top}


def cases(steps: int) -> list[Case]:
    """Return the rows for trainings of ``steps`` steps."""
    one_percent = {"algorithm": "topk", "topk_ratio": 0.01}
    tenth = steps // 10
    return [
        Case("uncompressed"),
        Case("bf16 on the wire", None, 0, {"communication_data_type": "bf16"}),
        Case("topk 10 %", {**one_percent, "topk_ratio": 0.1}),
        Case("topk 1 %", one_percent),
        Case("topk 1 %, Huffman coded", {**one_percent, "huffman_coding": True}),
        Case(f"topk 1 % after {tenth} steps", {**one_percent, "warmup_steps": tenth}),
        Case("topk 1 %, no error feedback", {**one_percent, "error_feedback": False}),
        Case("topk 0.1 %", {**one_percent, "topk_ratio": 0.001}),
        Case("2bit", {"algorithm": "2bit"}),
        Case("2bit, in two phases", {"algorithm": "2bit", "two_phase": True}),
        Case("1bit", {"algorithm": "1bit"}),
        Case("1bit, in two phases", {"algorithm": "1bit", "two_phase": True}),
        Case(f"1bit after {tenth} steps", {"algorithm": "1bit", "warmup_steps": tenth}),
        Case("1bit, no error feedback", {"algorithm": "1bit", "error_feedback": False}),
        Case("OneBitAdam, uncompressed", None, 0, _one_bit("OneBitAdam", freeze_step=steps)),
        Case("OneBitAdam, signs after a fifth", None, 0, _one_bit("OneBitAdam", freeze_step=steps // 5)),
        Case(
            "ZeroOneAdam, v frozen after a fifth",
            None,
            0,
            _one_bit("ZeroOneAdam", var_freeze_step=steps // 5, local_step_scaler=steps // 5),
        ),
        Case("SGD, uncompressed", None, 0, SGD),
        Case("SGD, topk 1 %", one_percent, 0, SGD),
        Case("SGD, topk 1 %, no error feedback", {**one_percent, "error_feedback": False}, 0, SGD),
        Case("SGD, 1bit", {"algorithm": "1bit"}, 0, SGD),
        Case("SGD, 1bit, no error feedback", {"algorithm": "1bit", "error_feedback": False}, 0, SGD),
        Case("uncompressed, stage 2", None, 2),
        Case("topk 1 %, stage 2", one_percent, 2),
        Case("quantized, stage 3", None, 3, {"zero_optimization": _quantized(True)}),
        Case("uncompressed, stage 3", None, 3, {"zero_optimization": _quantized(False)}),
    ]


def method_cases() -> list[Case]:
    """Return a case for each row of the table of ``compression_losses.py``."""
    return [
        Case(
            f"{each.optimizer}, {each.method}", each.compression, 0, {"optimizer": each.config()["optimizer"]}
        )
        for each in cases_of_losses([])
    ]


def _one_bit(kind: str, **more: int) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": {**COMMON["optimizer"]["params"], **more}}}


def _quantized(quantized: bool) -> dict[str, Any]:
    keys = {"zero_quantized_weights": quantized, "zero_quantized_gradients": quantized}
    return {"stage": 3, "stage3_param_persistence_threshold": 1000, **keys}


def run(configs: Mapping[str, Any], hosts: int, rate: str, steps: int) -> dict[str, dict[str, float]]:
    """Train all cases and return the measurements of rank 0 by name of the case."""
    script = str(ROOT / "benchmarks" / "compression_rank.py")
    with tempfile.TemporaryDirectory() as folder, network.hosts(hosts, rate) as machines:
        plan = Path(folder) / "plan.json"
        plan.write_text(json.dumps({"steps": steps, "cases": configs}))
        ranks = [
            machine.start(
                [sys.executable, script, str(plan)],
                network.environment(machines, rank),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, machine in enumerate(machines)
        ]
        try:
            lines = [process.communicate()[0].splitlines() for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    figures = [line for line in lines[0] if line.startswith("figures ")]
    if len(figures) != len(configs):
        raise SystemExit(f"{len(figures)} of {len(configs)} cases ran to their end; see above")
    return dict(zip(configs, (json.loads(each[8:]) for each in figures), strict=True))


def main() -> None:
    """Measure and publish the table."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="100mbit", help="of each link, in the words of tc(8)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--methods", action="store_true", help="the rows of compression_losses.py instead of those here"
    )
    parser.add_argument(
        "--lr", type=float, help="learning rate; default: that of the example, or of each case"
    )
    parser.add_argument("--clipping", type=float, default=1.0, help="gradient_clipping; 0 for none")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        help="only the case of this name, or those whose name holds it; repeatable",
    )
    args = parser.parse_args()
    if (why := network.why_impossible()) is not None:
        print(f"there can be no hosts here: {why}", file=sys.stderr)
        raise SystemExit(CANNOT)
    known = method_cases() if args.methods else cases(args.steps)
    names = {each.name for each in known}
    chosen = [
        each
        for each in known
        if not args.only
        or any(part == each.name or (part not in names and part in each.name) for part in args.only)
    ]
    configs = {each.name: each.config | {"gradient_clipping": args.clipping} for each in chosen}
    if args.lr is not None:
        for name, config in configs.items():
            optimizer = config["optimizer"]
            params = {**optimizer["params"], "lr": args.lr}
            configs[name] = config | {"optimizer": {**optimizer, "params": params}}
    figures = run(configs, args.hosts, args.rate, args.steps)
    base = figures.get("uncompressed", next(iter(figures.values())))
    rows = [
        [
            name,
            f"{found['sent_bytes'] / 1e3:,.0f}",
            f"{1 - found['sent_bytes'] / _uncompressed(name, figures)['sent_bytes']:.1%}",
            f"{found['training_loss']:.3f}",
            f"{found['validation_loss']:.3f}",
            f"{found['median_ms']:.0f} ({found['low_ms']:.0f} to {found['high_ms']:.0f})",
        ]
        for name, found in figures.items()
    ]
    publish(
        args,
        f"Compressed gradients: the example GPT ({base['parameters']:,.0f} parameters), {args.hosts} hosts, {args.rate} "
        f"links, {args.steps} steps, clipping {args.clipping:g}, learning rate {args.lr or 'of the example'}",
        [
            "gradients",
            "kB sent per rank and step",
            "fewer than uncompressed at that stage",
            "training loss (last tenth)",
            "validation loss",
            "ms per step: median (tenth to ninetieth percentile)",
        ],
        rows,
        figures,
    )


def _uncompressed(name: str, figures: Mapping[str, dict[str, float]]) -> dict[str, float]:
    """Return the figures of the uncompressed case at the stage of case ``name``.

    If that case was not run, the figures of the case ``SGD, dense`` are returned. If that case was not run either, the
    figures of case ``name`` are returned.
    """
    _, comma, stage = name.partition(", stage ")
    plain = f"uncompressed{comma}{stage}" if comma else "uncompressed"
    return figures.get(plain, figures.get("SGD, dense", figures[name]))


if __name__ == "__main__":
    main()
