"""Record checkpoints of the real DeepSpeed for tests, on two gloo ranks on the CPU.

Run it with an interpreter that has DeepSpeed::

    python tools/deepspeed_checkpoints.py tests/golden/deepspeed_checkpoints [--only NAME ...]

It records the cases of ``tests/support/deepspeed_cases.py`` for the installed version of DeepSpeed. Each case becomes a
directory with the files that DeepSpeed wrote and with ``expected.json``. This file contains the losses, learning rates
and loss scales of the steps before the save, of the steps after the save, and of a fresh engine that loaded the
checkpoint. It also contains checksums of the weights as DeepSpeed's zero_to_fp32 reads them. Lamb and Lion compute
without their kernels (``deepspeed_kernels.py``).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import deepspeed_cases as cases
import torch

CASES = cases.CASES | cases.EXPERTS
RECOVERY = ("zero_to_fp32.py", "zero_to_torch.py")


def main() -> int:
    """Record the cases that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the directory of the fixtures")
    parser.add_argument("--only", nargs="*", default=[], help="names of cases; default: all of this version")
    parser.add_argument(
        "--go-on",
        action="store_true",
        help="record nothing: load OUT, a universal folder that another runtime wrote, with the settings of each case, "
        "and print what the steps after it give, as JSON by case and rank",
    )
    given = parser.parse_args()
    # DeepSpeed 0.14 loads its files with the default of torch before 2.6, which is not limited to weights.
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    if given.go_on:
        print(json.dumps({name: run_ranks(given.out, name, "universal") for name in given.only}))
        return 0
    import deepspeed

    version = deepspeed.__version__
    for name, case in CASES.items():
        if case.get("version", "0.19.8") == version and (not given.only or name in given.only):
            record(given.out / name, name)
    for name, source in (cases.UNIVERSAL | cases.EXPORTS).items():
        if version == "0.19.8" and (not given.only or name in given.only):
            convert(given.out, name, source)
    return 0


def record(out: Path, name: str) -> None:
    """Write the fixture ``name`` to ``out``: train, save, continue, and load the checkpoint in fresh ranks."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    results = run_ranks(out, name, "train")
    if CASES[name].get("resume", True):
        for mine, resumed in zip(results, run_ranks(out, name, "resume"), strict=True):
            mine["resumed"] = resumed
    # DeepSpeed's zero_to_fp32 reads neither checkpoints without ZeRO nor checkpoints with experts.
    has_weights = CASES[name]["stage"] and name not in cases.EXPERTS
    expected = {"ranks": results, "weights": checksums(out) if has_weights else None}
    (out / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    for script in RECOVERY:
        (out / script).unlink(missing_ok=True)
    print(f"{out}: {sum(each.stat().st_size for each in out.rglob('*') if each.is_file())} bytes")


def run_ranks(out: Path, name: str, what: str) -> list[dict]:
    """Run each rank in a separate process and return the results in rank order."""
    world = CASES[name].get("world", cases.WORLD)
    with tempfile.TemporaryDirectory() as scratch:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), str(out), name, what, scratch],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    # Otherwise torch.compile compiles the arithmetic of Muon, which takes minutes.
                    "TORCH_COMPILE_DISABLE": "1",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": "0",
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_SIZE": str(world),  # Without this value, DeepSpeed 0.14 calls numactl.
                    "WORLD_SIZE": str(world),
                },
            )
            for rank in range(world)
        ]
        try:
            codes = [each.wait(timeout=300) for each in ranks]
        finally:
            for each in ranks:
                each.kill()
        if any(codes):
            raise SystemExit(f"{name}: the ranks ended with {codes}")
        return [json.loads((Path(scratch) / f"{rank}.json").read_text()) for rank in range(world)]


def one_rank(rank: int, out: Path, name: str, what: str, scratch: Path) -> None:
    """Run one rank: train and save, or load a checkpoint and continue."""
    import deepspeed
    import deepspeed_kernels
    from deepspeed.accelerator import get_accelerator

    deepspeed_kernels.install()
    # The compilation would take minutes, and gloo gives the same results. The module is looked up in sys.modules,
    # because the attribute deepspeed.comm.torch is torch itself.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    torch.set_num_threads(1)
    case = CASES[name]
    world = case.get("world", cases.WORLD)
    torch.distributed.init_process_group("gloo", f"file://{scratch}/store", rank=rank, world_size=world)
    deepspeed.init_distributed("gloo")
    model = cases.make_model(case)
    config = cases.make_config(case)
    if "fp16" in config:
        # oneDNN reports that it does not support fp16, but the arithmetic works.
        get_accelerator().is_fp16_supported = lambda: True
    if what == "universal":
        config["checkpoint"] = {"load_universal": True}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=cases.make_groups(model, case), config=config
    )
    if what == "train":
        found = {"before": steps(engine, rank, 0, cases.BEFORE)}
        engine.save_checkpoint(
            str(out),
            client_state=dict(cases.CLIENT_STATE),
            exclude_frozen_parameters=case.get("exclude_frozen", False),
        )
        if name in cases.EXPORTS.values():
            engine.save_16bit_model(str(out / "export"))
        found["counters"] = {
            "global_steps": engine.global_steps,
            "global_samples": engine.global_samples,
            "skipped_steps": engine.skipped_steps,
        }
        found["after"] = steps(engine, rank, cases.BEFORE, cases.AFTER)
    else:
        engine.load_checkpoint(str(out))
        found = steps(engine, rank, cases.BEFORE, cases.AFTER)
    (scratch / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def steps(engine, rank: int, first: int, count: int) -> dict:
    """Train ``count`` steps from step ``first``; return their losses, learning rates and loss scales."""
    found: dict[str, list] = {"losses": [], "rates": [], "scales": []}
    for step in range(first, first + count):
        found["losses"] += cases.train(engine, rank, step, 1)
        found["rates"].append(engine.get_lr())
        scale = getattr(engine.optimizer, "loss_scale", None)
        if scale is None and hasattr(engine.optimizer, "cur_scale"):
            scale = engine.optimizer.cur_scale
        found["scales"].append(scale)
    return found


def checksums(out: Path) -> dict[str, list[float]] | None:
    """Return the sum and the sum of squares of every tensor as DeepSpeed's zero_to_fp32 reads the checkpoint.

    The result is None if zero_to_fp32 cannot read the checkpoint.
    """
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    try:
        found = get_fp32_state_dict_from_zero_checkpoint(str(out))
    except ValueError as error:  # zero_to_fp32 cannot read checkpoints of BF16_Optimizer
        print(f"{out}: {error}")
        return None
    return {
        name: [each.double().sum().item(), each.double().square().sum().item()]
        for name, each in found.items()
    }


def convert(out: Path, name: str, source: str) -> None:
    """Write a universal checkpoint, or 16-bit weight files, from the checkpoint of the case ``source``."""
    made, tag = out / name, f"global_step{cases.BEFORE}"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    if name in cases.EXPORTS:
        exported = out / source / "export"
        exported.rename(made / "whole")
        split(made / "whole" / "pytorch_model.bin", made / "shards")
        return
    subprocess.run(
        [
            sys.executable,
            "-m",
            "deepspeed.checkpoint.ds_to_universal",
            "--inject_missing_state",
            "--num_extract_workers",
            "1",
            "--num_merge_workers",
            "1",
            "--input_folder",
            str(out / source / tag),
            "--output_folder",
            str(made / f"{tag}_universal"),
        ],
        check=True,
    )


def split(whole: Path, out: Path) -> None:
    """Write the weights as two files and an index, in the format of zero_to_fp32 with huggingface_hub installed."""
    out.mkdir()
    weights = torch.load(whole, weights_only=True)
    names = list(weights)
    places = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({name: weights[name].clone() for name in part}, out / file)
        places.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": sum(each.nbytes for each in weights.values())}, "weight_map": places}
    (out / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        one_rank(int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5], Path(sys.argv[6]))
    else:
        sys.exit(main())
