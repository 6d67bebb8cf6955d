"""Threads that need the GIL get it before the interpreter ends.

Threads of gloo need the GIL for the tensors of the last collective.
"""

from __future__ import annotations

import sys

from support.command import execute

SCRIPT = """
import os, sys, threading, time, torch, zero_runtime

model = torch.nn.Linear(3, 2)
config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)

ended = threading.Event()

def late():
    ended.wait()
    time.sleep(0.003)
    print("done", flush=True)

threading.Thread(target=late, daemon=True).start()
time.sleep(0.1)
import atexit
atexit.register(ended.set)  # called first of all handlers: the last one registered
"""


def test_a_thread_of_the_backend_finishes_before_the_interpreter_ends(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = execute([sys.executable, str(script)], tmp_path)
    assert (done.returncode, done.stdout.strip().splitlines()[-1:]) == (0, ["done"]), done.stderr
