"""Test the parts of a checkpoint that are not tensors, and the tensor files themselves."""

from __future__ import annotations

import json
import math
import pickle
import random
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from zero_runtime import checkpointing
from zero_runtime.checkpoint.files import random_state, tensor_file
from zero_runtime.checkpoint.files.checkpoint_manifest import check_tag
from zero_runtime.checkpoint.files.values import Encoder, decode
from zero_runtime.errors import CheckpointError

KEPT = [
    None,
    True,
    -3,
    1 << 80,
    0.1,
    math.inf,
    "text",
    [1, [2.5, None]],
    (1, (2, "b")),
    {"a": {"b": [1]}, "": 2},
    {0: "zero", 1.5: (), (1, 2): "pair", None: 3},
    {"$tuple": "not one"},
    Counter({30: 1, 80: 2}),
    torch.bfloat16,
    torch.device("cpu"),
    {1, (2, "b")},
    Namespace(lr=0.1, dtype=torch.half, betas=(0.9, 0.95), inner=Namespace(path="a")),
]


@pytest.mark.parametrize("value", KEPT, ids=lambda value: type(value).__name__)
def test_values_come_back_as_they_were(value):
    encoder = Encoder()
    text = json.dumps(encoder.encode("client_state", value), allow_nan=False)
    back = decode(json.loads(text), encoder.tensors.__getitem__)
    assert back == value
    assert type(back) is type(value)


def test_tensors_and_numbers_of_numpy_come_back():
    encoder = Encoder()
    given = {
        "best": numpy.float64(0.25),
        "seen": numpy.int64(3),
        "done": numpy.bool_(True),
        "state": numpy.random.get_state(),
        "drawn": numpy.random.rand(),
        "mask": numpy.array([[True], [False]]),
        "masks": (torch.arange(3), torch.tensor(2.5, dtype=torch.bfloat16)),
    }
    back = decode(json.loads(json.dumps(encoder.encode("client_state", given))), encoder.tensors.__getitem__)
    assert back["best"] == 0.25
    assert type(back["seen"]) is int and back["seen"] == 3
    assert back["done"] is True
    state = back["state"]
    assert state[0] == "MT19937" and isinstance(state[1], numpy.ndarray) and state[1].dtype == numpy.uint32
    numpy.random.set_state(state)
    assert numpy.random.rand() == given["drawn"]
    assert numpy.array_equal(back["mask"], given["mask"]) and back["mask"].dtype == bool
    assert torch.equal(back["masks"][0], torch.arange(3))
    assert back["masks"][1].dtype is torch.bfloat16
    assert math.isnan(decode(Encoder().encode("x", math.nan), {}.__getitem__))


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"model": {"args": [1, object()]}}, r"client_state\['model'\]\['args'\]\[1\] is a builtins.object"),
        ({"when": Path("x")}, r"client_state\['when'\] is a pathlib"),
        ({"set": {object}}, r"an element of client_state\['set'\] is a builtins.type"),
        ({"names": numpy.array(["a"])}, r"client_state\['names'\] is an array of <U1"),
        ({"args": Namespace(f=print)}, r"client_state\['args'\]\['f'\] is a builtins"),
        ({"f": print}, r"client_state\['f'\]"),
        ({"t": {frozenset(): 1}}, r"client_state\['t'\] has the key frozenset"),
        ({"sparse": torch.eye(2).to_sparse()}, r"client_state\['sparse'\] is a tensor of layout"),
    ],
)
def test_what_cannot_be_kept_is_named(value, named):
    with pytest.raises(CheckpointError, match=named):
        Encoder().encode("client_state", value)


def test_pickles_in_client_state_stay_bytes_that_are_refused():
    with pytest.raises(CheckpointError, match="bytes"):
        Encoder().encode("client_state", {"pickled": pickle.dumps(1)})


@pytest.mark.parametrize(
    "value",
    [
        {"$tuple": 3},
        {"$what": 1},
        {"$dtype": "Tensor"},
        {"$pairs": [1]},
        {"$device": "x"},
        {"$namespace": 1},
        [{"$tuple": [{"$set": 1}]}],
    ],
)
def test_json_that_no_value_is_written_as_is_an_error(value):
    with pytest.raises(CheckpointError, match="this version cannot read"):
        decode(value, {}.__getitem__)


@pytest.mark.parametrize("tag", ["", ".", "..", "latest", "a/b", "x\0", "y" * 300])
def test_tags_that_are_no_directory_names_are_refused(tag):
    with pytest.raises(CheckpointError, match="expected the name of a directory"):
        check_tag(tag)


def test_random_generators_go_on():
    random.seed(3)
    numpy.random.seed(4)
    torch.manual_seed(5)
    random.gauss(0, 1)
    numpy.random.standard_normal()
    states = random_state.collect(torch.device("cpu"))

    def draw():
        return random.gauss(0, 1), random.random(), numpy.random.standard_normal(), torch.rand(2).tolist()

    first = draw()
    assert draw() != first
    random_state.restore(states, torch.device("cpu"))
    assert draw() == first


def test_named_states_of_the_tracker_go_on():
    tracker, device = checkpointing.get_cuda_rng_tracker(), torch.device("cpu")
    tracker.reset()
    tracker.add("model-parallel-rng", 7)
    tracker.add("experts", 8)

    def draw(name):
        with tracker.fork(name):
            return torch.rand(3).tolist()

    draw("experts")
    states = random_state.collect(device)
    first = draw("experts"), draw("model-parallel-rng")
    assert (draw("experts"), draw("model-parallel-rng")) != first
    random_state.restore(states, device)
    assert (draw("experts"), draw("model-parallel-rng")) == first
    tracker.reset()  # A new process has not added these states yet, but has a state of its own.
    tracker.add("own", 9)
    random_state.restore(states, device)
    assert (draw("experts"), draw("model-parallel-rng")) == first
    assert sorted(tracker.get_states()) == ["experts", "model-parallel-rng", "own"]
    tracker.reset()


@pytest.mark.parametrize("name", ["torch", "tracked.cpu.experts"])
def test_random_states_that_were_changed_are_an_error(name):
    with pytest.raises(CheckpointError, match="random states"):
        random_state.restore({name: torch.zeros(3, dtype=torch.uint8)}, torch.device("cpu"))


# The safetensors package can read the written files, and the package itself writes the same files.

TENSORS = {
    "bytes": torch.arange(5, dtype=torch.uint8),
    "mask": torch.tensor([True, False, True]),
    "half": torch.randn(3, 5).to(torch.bfloat16),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.zeros(0, 4),
    "turned": torch.randn(4, 6).t(),
    "odd name/0/x.y": torch.arange(7),
}


def test_files_are_what_safetensors_reads(tmp_path):
    entries = [tensor_file.entry_of(name, tensor) for name, tensor in TENSORS.items()]
    written = tensor_file.write(tmp_path / "ours.safetensors", entries, {"a": "b"})
    assert written.num_bytes == (tmp_path / "ours.safetensors").stat().st_size
    found = load_file(tmp_path / "ours.safetensors")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor)


def test_files_have_the_length_of_those_of_safetensors(tmp_path):
    whole = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    save_file(whole, tmp_path / "theirs.safetensors")
    tensor_file.write(
        tmp_path / "ours.safetensors", [tensor_file.entry_of(name, each) for name, each in whole.items()], {}
    )
    sizes = [(tmp_path / f"{each}.safetensors").stat().st_size for each in ("ours", "theirs")]
    assert abs(sizes[0] - sizes[1]) < 64  # The difference is the empty metadata.


@pytest.mark.long
def test_a_disk_that_is_full_leaves_no_file(tmp_path):
    program = f"""
import resource, torch, pathlib
from zero_runtime.checkpoint import tensor_file
from zero_runtime.errors import CheckpointError
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
path = pathlib.Path({str(tmp_path)!r}) / "x.safetensors"
try:
    tensor_file.write(path, [tensor_file.entry_of("x", torch.zeros(200_000))], {{}})
except CheckpointError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "could not be written" in done.stdout, done.stderr
    assert "make room" in done.stdout
    assert list(tmp_path.iterdir()) == []
