"""Compares the loss with compressed gradients to the dense loss, each method at its own best learning rate.

One process simulates four workers that train a small GPT with gradients clipped to 1. The simulation is
``tests/support/simulated_compression.py``, and gloo ranks match it step by step. The search for the learning rate
tries factors of 2 with trainings of 300 steps and one seed. The best learning rate is then used for trainings of
1,000 steps with three seeds. The bytes are those that ``commprof.requested`` predicts for four ranks at stage 0.
``--check`` records a short run of each case on gloo ranks and compares the bytes.

The benchmark takes about 30 minutes on one core. With ``--results``, finished trainings are appended to a file and not
repeated. An interrupted benchmark can therefore continue, and several processes, each with a different ``--only``, can
share the work. ``--finished`` trains nothing and publishes the rows whose trainings are all in the file.

``compression.py`` measures bytes and times over slow links.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from results import arguments, publish
from train_gpt import GPT, batches, read_text

from commprof.requested.parameters import Parameter
from commprof.requested.zero.zero_stages import expected_in_step, steady_step
from support.simulated_compression import Rules, Workers

RANKS, BATCH, CONTEXT = 4, 4, 32
SEARCHED_STEPS, STEPS, SEEDS = 300, 1000, (1, 2, 3)
LOSSY = 0.01  # The relative difference in loss from which a method is marked as lossy.
DIVERGED = 3.0  # A training has diverged if its loss exceeds this multiple of the loss of the first step.
TOPK: dict[str, Any] = {
    "algorithm": "topk",
    "topk_ratio": 0.025,
}  # 90 % fewer bytes than an all_reduce of 4 ranks
CORRECTED: dict[str, Any] = {"momentum_correction": True, "clip_before_residual": True}
DECAYING: dict[str, Any] = {"clip_before_residual": True, "residual_decay": 0.9}
# Each optimizer by name, with the learning rate in the middle of the search. METHODS gives the compression of each row.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"type": "SGD", "params": {"lr": 0.8}},
    "SGD, momentum 0.9": {"type": "SGD", "params": {"lr": 0.16, "momentum": 0.9}},
    "AdamW": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
}
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "SGD": {
        "dense": {"algorithm": "none"},
        "topk 2.5 %": TOPK,
        "1bit": {"algorithm": "1bit"},
        "2bit": {"algorithm": "2bit"},
        "1bit, no error feedback": {"algorithm": "1bit", "error_feedback": False},
    },
    "SGD, momentum 0.9": {
        "dense": {"algorithm": "none"},
        "topk 2.5 %, corrected and clipped": {**TOPK, **CORRECTED},
        "topk 2.5 %": TOPK,
        "1bit": {"algorithm": "1bit"},
        "1bit, corrected and clipped": {"algorithm": "1bit", **CORRECTED},
        "2bit, corrected and clipped": {"algorithm": "2bit", **CORRECTED},
        "topk 1 %, corrected and clipped": {**TOPK, **CORRECTED, "topk_ratio": 0.01},
        "2bit": {"algorithm": "2bit"},
    },
    "AdamW": {
        "dense": {"algorithm": "none"},
        "dense, betas 0.9 and 0.99": {"algorithm": "none"},
        "dense, betas 0.9 and 0.999": {"algorithm": "none"},
        "topk 2.5 %, clipped, betas 0 and 0.99": {**TOPK, "clip_before_residual": True},
        "topk 2.5 %, clipped, betas 0 and 0.999": {**TOPK, "clip_before_residual": True},
        "topk 2.5 %, clipped and decaying": {**TOPK, **DECAYING},
        "topk 2.5 %": TOPK,
        "2bit, clipped and decaying": {"algorithm": "2bit", **DECAYING},
        "1bit, clipped and decaying": {"algorithm": "1bit", **DECAYING},
        "topk 1 %, clipped and decaying": {**TOPK, **DECAYING, "topk_ratio": 0.01},
        "2bit": {"algorithm": "2bit"},
        "1bit": {"algorithm": "1bit"},
    },
}
# method -> the parameters of the optimizer that the method changes
CHANGED: dict[str, dict[str, Any]] = {
    "dense, betas 0.9 and 0.99": {"betas": [0.9, 0.99]},
    "dense, betas 0.9 and 0.999": {"betas": [0.9, 0.999]},
    "topk 2.5 %, clipped, betas 0 and 0.99": {"betas": [0.0, 0.99]},
    "topk 2.5 %, clipped, betas 0 and 0.999": {"betas": [0.0, 0.999]},
}


class Case(NamedTuple):
    """A row of the table: an optimizer and a compression method."""

    optimizer: str
    method: str

    @property
    def compression(self) -> dict[str, Any]:
        """The keys of ``gradient_compression``."""
        return METHODS[self.optimizer][self.method]

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the optimizer, with the learning rate in the middle of the search."""
        return {**OPTIMIZERS[self.optimizer]["params"], **CHANGED.get(self.method, {})}

    def config(self, lr: float | None = None) -> dict[str, Any]:
        """Return the configuration of a real run, with the learning rate ``lr`` if it is given."""
        params = self.params if lr is None else {**self.params, "lr": lr}
        return {
            "train_micro_batch_size_per_gpu": BATCH,
            "optimizer": {**OPTIMIZERS[self.optimizer], "params": params},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 0},
            "gradient_compression": self.compression,
        }


class UnfinishedError(Exception):
    """A training is not in the file, and no training may be run."""


class Trainings:
    """The validation losses of trainings. Each training is run only once.

    Args:
        path: The file of finished trainings as JSON lines; None for no file.
        trains: Whether a training that is not in the file is run.
    """

    def __init__(self, path: Path | None, trains: bool) -> None:
        self._path = path
        self._trains = trains
        self._texts = read_text(2_000_000)
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self._known = {
            (*each["case"], each["lr"], each["steps"], each["seed"]): each["loss"]
            for each in map(json.loads, lines)
        }

    def loss(self, case: Case, lr: float, steps: int, seed: int) -> float:
        """Return the validation loss after ``steps`` steps, or infinity if the training diverged.

        Raises:
            UnfinishedError: The loss is not known, and no training may be run.
        """
        key = (*case, lr, steps, seed)
        if key not in self._known:
            if not self._trains:
                raise UnfinishedError(case)
            self._known[key] = self._train(case, lr, steps, seed)
            line = {"case": case, "lr": lr, "steps": steps, "seed": seed, "loss": self._known[key]}
            print(line, file=sys.stderr, flush=True)
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        return self._known[key]

    def _train(self, case: Case, lr: float, steps: int, seed: int) -> float:
        torch.manual_seed(seed)
        model = small_model()
        params = {**case.params, "lr": lr}
        rules = Rules(momentum=params.get("momentum", 0.0), gradient_clipping=1.0, **case.compression)
        if rules.momentum_correction:
            params["momentum"] = 0.0
        workers = Workers(
            model,
            getattr(torch.optim, OPTIMIZERS[case.optimizer]["type"])(model.parameters(), **params),
            rules,
            RANKS,
        )
        training, validation = self._texts
        pieces = [batches(training, BATCH, CONTEXT, seed=1000 * seed + rank) for rank in range(RANKS)]
        first = None
        for _ in range(steps):
            loss = fmean(workers.step([lambda each=each: model(*next(each)) for each in pieces]))
            first = first or loss
            if not loss < DIVERGED * first:
                return math.inf
        with torch.no_grad():
            checks = batches(validation, 32, CONTEXT, seed=1_000_000)
            return fmean(model(*each).item() for each in islice(checks, 32))

    def best_rate(self, case: Case) -> float:
        """Return the learning rate with the lowest loss after the steps of the search.

        Half and twice this learning rate give no lower loss.
        """
        middle = case.params["lr"]

        def loss(power: int) -> float:
            return self.loss(case, middle * 2.0**power, SEARCHED_STEPS, SEEDS[0])

        best = 0
        while True:
            power = min((best - 1, best, best + 1), key=loss)
            if power == best:
                return float(middle * 2.0**best)
            best = power


def small_model() -> GPT:
    """Return a new model. All cases use the same model."""
    return GPT(64, 1, 2, CONTEXT)


def parameters() -> list[Parameter]:
    """Return the parameters of the model, as the rules of ``commprof.requested`` expect them."""
    return [
        Parameter(name=name, numel=each.numel(), dtype="float32", param_group=0)
        for name, each in small_model().named_parameters()
    ]


def sent_bytes(case: Case) -> float:
    """Return the gradient bytes that a rank sends in a step, as predicted by the rules of ``commprof.requested``."""
    config = case.config()
    rows = expected_in_step(config, parameters(), RANKS, steady_step(config))
    return sum(row.wire_bytes for row in rows if row.purpose == "gradient_reduce")


def train_rank(rank: int, world: int, config: dict[str, Any]) -> None:
    """Train three steps on one rank."""
    import zero_runtime

    torch.manual_seed(0)
    model = small_model()
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    for batch in islice(batches(read_text(200_000)[0], BATCH, CONTEXT, seed=rank), 3):
        engine.backward(engine(*batch))
        engine.step()


def check(case: Case) -> None:
    """Compare the predicted payload bytes of a step with the bytes that gloo ranks issued.

    Raises:
        SystemExit: The predicted and the issued bytes differ.
    """
    from support.recording import record

    config = case.config()
    with tempfile.TemporaryDirectory() as folder:
        run, _ = record(Path(folder) / "run", RANKS, train_rank, config)
        rows = [row for row in run.table("collectives").to_pylist() if row["rank"] == 0 and row["step"] == 2]
    issued = sum(row["payload_bytes"] for row in rows if row["purpose"] == "gradient_reduce")
    wanted = sum(
        row.payload_bytes
        for row in expected_in_step(config, parameters(), RANKS, 2)
        if row.purpose == "gradient_reduce"
    )
    if issued != wanted:
        raise SystemExit(
            f"{case}: ranks issued {issued} bytes of gradients in a step; the rules say {wanted}"
        )
    print(f"{case}: {issued} payload bytes, as predicted", file=sys.stderr)


def cases(only: list[str]) -> Iterator[Case]:
    """Yield the rows whose optimizer or method contains one of ``only``, or all rows if ``only`` is empty."""
    for optimizer, methods in METHODS.items():
        for method in methods:
            if not only or any(each in f"{optimizer}: {method}" for each in only):
                yield Case(optimizer, method)


def row(case: Case, trainings: Trainings) -> tuple[list[str], Mapping[str, Any]]:
    """Return the cells of a row, and the figures of the row."""
    rate = trainings.best_rate(case)
    losses = [trainings.loss(case, rate, STEPS, seed) for seed in SEEDS]
    dense = Case(case.optimizer, "dense")
    dense_rate = trainings.best_rate(dense)
    pairs = [
        (loss, trainings.loss(dense, dense_rate, STEPS, seed))
        for loss, seed in zip(losses, SEEDS, strict=True)
    ]
    gap = fmean(loss for loss, _ in pairs) / fmean(loss for _, loss in pairs) - 1
    sent = sent_bytes(case)
    figures = {
        "lr": rate,
        "losses": losses,
        "gap": gap,
        "sent_bytes": sent,
        "fewer": 1 - sent / sent_bytes(dense),
    }
    verdict = "" if case.method == "dense" else f"{gap:+.1%}{', lossy' if gap > LOSSY else ''}"
    cells = [
        case.optimizer,
        case.method,
        f"{sent / 1e3:,.1f}",
        f"{figures['fewer']:.1%}",
        f"{rate:g}",
        f"{fmean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})",
        verdict,
    ]
    return cells, figures


def main() -> None:
    """Train and publish the table."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--results", type=Path, help="file of finished trainings: read, and appended to")
    parser.add_argument(
        "--finished", action="store_true", help="publish finished rows only, without training"
    )
    parser.add_argument(
        "--only", action="append", default=[], help="only rows whose name contains this; repeatable"
    )
    parser.add_argument(
        "--check", action="store_true", help="compare the bytes of each row with a short run on gloo ranks"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = list(cases(args.only))
    if args.check:
        for case in chosen:
            check(case)
    trainings = Trainings(args.results, not args.finished)
    rows = {}
    for case in chosen:
        try:
            rows[case] = row(case, trainings)
        except UnfinishedError:
            print(f"{case} is not finished", file=sys.stderr)
    numel = sum(each.numel for each in parameters())
    publish(
        args,
        f"Losses with compressed gradients: a GPT of {numel:,} parameters, {RANKS} ranks, {STEPS:,} steps, "
        f"{len(SEEDS)} seeds, each row at its own best learning rate",
        [
            "optimizer",
            "gradients",
            "kB sent per rank and step",
            "fewer than dense",
            "learning rate",
            "validation loss: mean (lowest to highest)",
            "against dense",
        ],
        [cells for cells, _ in rows.values()],
        {": ".join(case): figures for case, (_, figures) in rows.items()},
    )


if __name__ == "__main__":
    main()
