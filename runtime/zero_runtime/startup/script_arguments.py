"""Command-line arguments of a training script, by DeepSpeed's names."""

from __future__ import annotations

import argparse


def add_core_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config``, and their old names. Return ``parser``."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument(
        "--deepspeed", action="store_true", help="use the runtime (a flag for the script's own use)"
    )
    group.add_argument("--deepspeed_config", default=None, metavar="FILE", help="JSON configuration")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, help=argparse.SUPPRESS)
    return parser


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config``, and ``--local_rank`` if it is missing. Return ``parser``."""
    add_core_arguments(parser)
    if "--local_rank" not in parser._option_string_actions:
        parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return parser
