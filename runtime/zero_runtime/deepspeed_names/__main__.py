"""Runs a script with ``import deepspeed`` as this runtime: ``python -m zero_runtime.deepspeed_names [-m] SCRIPT ARGS``.

Under a launcher: ``torchrun --nproc-per-node 2 -m zero_runtime.deepspeed_names train.py``. ``--list`` prints the names.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from zero_runtime.deepspeed_names.script import run
from zero_runtime.deepspeed_names.tables.catalogue import table_text

USAGE = "usage: python -m zero_runtime.deepspeed_names [--list] [-m MODULE | SCRIPT] ARGS"


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    if arguments and arguments[0] == "--list":
        print(table_text())
        return 0
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["-m"]:
        print(f"{USAGE}\n\n{__doc__.strip()}" if "-h" in arguments or "--help" in arguments else USAGE)
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    is_module = arguments[0] == "-m"
    words = arguments[1:] if is_module else arguments
    run(words[0], words[1:], is_module=is_module)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
