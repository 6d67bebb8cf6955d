"""The C code of the scanner, run with the address and undefined-behavior sanitizers.

The tests run with and without vector instructions.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from benchmarks.nccl_log import generate

ROOT = Path(__file__).resolve().parents[3]
LOGS = Path(os.environ.get("COMMPROF_NCCL_LOGS", ROOT.parent / "shared" / "data" / "nccl-logs"))
CC = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
FLAGS = [
    "-g",
    "-O1",
    "-fPIC",
    "-shared",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
]


def build(folder: Path, name: str, *flags: str) -> str:
    target = folder / f"{name}.so"
    include = f"-I{sysconfig.get_paths()['include']}"
    source = str(ROOT / "commprof/nccl/_scanner.c")
    command = [CC, *FLAGS, *flags, include, source, "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{CC} cannot build with the sanitizers: {done.stderr.strip().splitlines()[-1:]}")
    return str(target)


def fuzz(tmp_path: Path, seconds: int, seed: int) -> None:
    if sys.platform != "linux" or shutil.which(CC) is None:
        pytest.skip(f"no C compiler {CC} here")
    modules = [build(tmp_path, "vectors"), build(tmp_path, "plain", "-DCOMMPROF_PLAIN")]
    runtime = subprocess.run(
        [CC, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip(f"{CC} has no libasan.so that Python can be started with")
    log = tmp_path / "nccl.log"
    generate(log, 300_000, ranks=8, seed=seed)
    text = log.read_bytes() + b"".join(
        p.read_bytes()[:100_000] for p in sorted(LOGS.glob("*")) if p.suffix in (".log", ".txt")
    )
    done = subprocess.run(
        [sys.executable, "-S", str(ROOT / "tests/support/scanner_fuzz.py"), str(seconds), str(seed), *modules],
        input=text, capture_output=True, check=False,
        env={"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc", "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")[-3000:]


@pytest.mark.long
def test_damaged_blocks_are_read_within_their_bounds(tmp_path):
    fuzz(tmp_path, 1, 1)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_damaged_blocks_for_minutes(tmp_path):
    fuzz(tmp_path, 240, 2)
