"""Command-line arguments of a training script, by DeepSpeed's names."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed``, ``--deepspeed_config`` and, unless it is there, ``--local_rank``; returns ``parser``."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument(
        "--deepspeed", action="store_true", help="use the runtime (a flag for the script's own use)"
    )
    group.add_argument("--deepspeed_config", default=None, metavar="FILE", help="JSON configuration")
    if "--local_rank" not in parser._option_string_actions:
        group.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return parser
