"""``python -m zero_runtime.checkpoint DIR OUT``: writes a checkpoint as one fp32 state dict or universal folder."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from zero_runtime.checkpoint.consolidation import PICKLED, SAFETENSORS, open_checkpoint, write_state_dict
from zero_runtime.checkpoint.deepspeed.deepspeed_export import write_universal
from zero_runtime.checkpoint.opened import OpenCheckpoint
from zero_runtime.errors import ZeroRuntimeError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code: 0, or 2 after an error."""
    parser = argparse.ArgumentParser(
        prog="python -m zero_runtime.checkpoint",
        description="Write the complete model of a checkpoint to one file, in fp32; or the complete training state to a "
        "folder that DeepSpeed loads. The checkpoint is zero_runtime's or DeepSpeed's.",
    )
    parser.add_argument(
        "dir", type=Path, help="the directory that checkpoints were saved to, or one checkpoint"
    )
    parser.add_argument(
        "out",
        type=Path,
        help="a .safetensors file; .bin, .pt and .pth write torch.save's format; a directory gets "
        "model.safetensors",
    )
    parser.add_argument("--tag", help="which checkpoint; default: the one saved last")
    parser.add_argument(
        "--exclude-frozen", action="store_true", help="leave out parameters that were not trainable"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it is there")
    parser.add_argument(
        "--universal",
        action="store_true",
        help="make OUT a directory with a universal folder, which DeepSpeed loads with checkpoint.load_universal",
    )
    parser.add_argument(
        "--steps",
        choices=("numbers", "tensors"),
        default="numbers",
        help="with --universal, how steps are counted: numbers (default) for DeepSpeed's own optimizers (FusedAdam, "
        "DeepSpeedCPUAdam), tensors for torch's (torch_adam, or one that the script makes)",
    )
    options = parser.parse_args(arguments)
    out = options.out
    if options.universal:
        return _universal(options)
    if out.suffix not in (SAFETENSORS, *PICKLED):
        out = out / f"model{SAFETENSORS}"
    if out.exists() and not options.force:
        return _fail(f"{out} is there already; pass --force to replace it")
    try:
        checkpoint = open_checkpoint(options.dir, options.tag)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_state_dict(checkpoint, out, options.exclude_frozen)
    except (ZeroRuntimeError, OSError) as error:
        return _fail(str(error))
    print(_summary(out, checkpoint))
    return 0


def _universal(options: argparse.Namespace) -> int:
    try:
        checkpoint = open_checkpoint(options.dir, options.tag)
        options.out.mkdir(parents=True, exist_ok=True)
        folder = write_universal(checkpoint, options.out, options.steps == "tensors", options.force)
    except (ZeroRuntimeError, OSError) as error:
        return _fail(str(error))
    print(_summary(folder, checkpoint))
    return 0


def _summary(out: Path, checkpoint: OpenCheckpoint) -> str:
    manifest = checkpoint.manifest
    numel = sum(math.prod(each.shape) for each in checkpoint.parameters.values())
    step = manifest.counters.get("global_steps")
    return f"{out}: {numel} elements of {manifest.tag}" + ("" if step is None else f", step {step}")


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
