"""Runs the cases of a program in sequence, each on two forked ranks, so that its libraries are imported only once.

    python forked.py ENGINE PROGRAM CASES OUT     # CASES: JSON {name: case}; OUT/NAME/ gets the files of each case

With ENGINE ``zero_runtime``, ``import deepspeed`` imports zero_runtime, and each case is recorded in OUT/NAME/run. With
``deepspeed``, the installed DeepSpeed is used. The exit code is the number of failed cases. OUT/NAME/log-RANK.txt
contains the output of each rank.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import socket
import sys
import time
import traceback
import warnings
from pathlib import Path

WORLD = 2
LIMIT_S = 300
# The modules that each program imports. They are imported once, before the ranks are forked.
IMPORTED = {
    "trainer": ("accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama"),
    "accelerate_loop": ("accelerate", "transformers.integrations"),
    "lightning_fit": ("lightning", "lightning.pytorch.strategies"),
    "sft": ("datasets", "transformers.models.llama.modeling_llama", "trl.trainer.sft_trainer", "peft"),
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "WORLD_SIZE": str(WORLD),
    "LOCAL_WORLD_SIZE": str(WORLD),
    "MASTER_ADDR": "127.0.0.1",
}


def main() -> int:
    engine, program, cases, out = sys.argv[1], *map(Path, sys.argv[2:5])
    os.environ.update(ENVIRONMENT)
    # DeepSpeed builds its operations with the ninja that is in the same directory as its Python.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    warnings.filterwarnings("ignore")
    if engine == "zero_runtime":
        importlib.import_module("zero_runtime").as_deepspeed()
    importlib.import_module("torch").set_num_threads(1)
    for name in ("deepspeed", *IMPORTED[program.stem]):
        importlib.import_module(name)
    if engine == "deepspeed":  # the build takes a minute, and only inference needs it
        importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    source = compile(program.read_text("utf-8"), str(program), "exec")
    failed = 0
    for name, case in json.loads(cases.read_text("utf-8")).items():
        where = out / name
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir(parents=True)
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(found.getsockname()[1])
        begun = time.monotonic()
        codes = _wait([_fork(engine, rank, program, source, case, where) for rank in range(WORLD)])
        failed += any(codes)
        print(f"{name}: exit codes {codes}, {time.monotonic() - begun:.1f} s", flush=True)
    return failed


def _fork(engine, rank, program, source, case, where):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(where / f"log-{rank}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), **case.get("environment", {}))
        sys.argv = [str(program), json.dumps(case), str(where)]
        recorder = importlib.import_module("commprof") if engine == "zero_runtime" else None
        if recorder is not None:
            recorder.attach(str(where / "run"))
        try:
            exec(source, {"__name__": "__main__", "__file__": str(program)})
        finally:
            if recorder is not None:
                recorder.detach()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pids):
    """Wait for the ranks and return their exit codes.

    After one rank has failed, the other rank is killed if it does not exit within 15 seconds.
    """
    codes, end = {}, time.monotonic() + LIMIT_S
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid]:
                    end = min(end, time.monotonic() + 15)
            elif time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    sys.exit(main())
