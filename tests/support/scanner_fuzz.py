"""Runs the compiled scanner under the sanitizers, on damaged logs that are cut at random places.

    python scanner_fuzz.py SECONDS SEED MODULE... < LOG

Each MODULE is a build of ``_scanner.c``. All builds must return equal results. The scanned buffers have exactly
the size of the text. This program uses only the standard library, so that no other compiled code runs under the
sanitizers.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import random
import sys
import time
from array import array
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parent))

from log_mutations import mutate


def load(path: str) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader("_scanner", path)
    spec = importlib.util.spec_from_loader("_scanner", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def main() -> None:
    """Scan damaged logs until the given number of seconds has passed."""
    seconds, seed, *paths = sys.argv[1:]
    rng = random.Random(int(seed))
    modules = [load(path) for path in paths]
    lines = sys.stdin.buffer.read().split(b"\n")
    end, blocks = time.monotonic() + float(seconds), 0
    while time.monotonic() < end or not blocks:
        scanners = [module.Scanner() for module in modules]
        for _ in range(20):
            text = mutate(lines, rng.randint(1, 40), rng.randrange(1 << 30))
            for place in {0, len(text), *(rng.randrange(len(text) + 1) for _ in range(20))}:
                for cut in (text[:place], text[place:]):
                    block = (ctypes.c_ubyte * len(cut)).from_buffer_copy(cut)  # a buffer without spare bytes
                    found = [scanner.scan(block) for scanner in scanners]
                    assert all(other == found[0] for other in found), cut
                    kinds = array("b", (rng.randrange(-1, 3) for _ in range(len(found[0][0]) // 20)))
                    tallies = [module.tally(block, found[0][0], kinds) for module in modules]
                    assert all(other == tallies[0] for other in tallies), cut
                    blocks += 1
            if rng.random() < 0.2:
                for scanner in scanners:
                    scanner.forget()
    print(f"{blocks} blocks")


if __name__ == "__main__":
    main()
