"""Test tensors in files. They are read back unchanged, or an error says what happened."""

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from zero_runtime.errors import ConfigError, OffloadError
from zero_runtime.offload import file_ranges, tensor_files
from zero_runtime.offload.folders import new_folder
from zero_runtime.offload.tensor_files import AsynchronousIO, TensorFiles

SMALL = AsynchronousIO(block_size=4096, queue_depth=2)


def made(folder: Path, io: AsynchronousIO = SMALL, direct: bool | None = None) -> TensorFiles:
    folder.mkdir(parents=True, exist_ok=True)
    return TensorFiles(folder, io, direct=direct)


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize(
    "io", [SMALL, SMALL._replace(single_submit=True, overlap_events=False), AsynchronousIO()]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("numel", [0, 1, 1023, 8192, 20_001])
def test_a_tensor_comes_back_as_it_was_written(tmp_path, direct, io, dtype, numel):
    store = made(tmp_path / "f", io, direct)
    written = torch.randint(0, 100, (numel,)).to(dtype)
    store.write("layer.weight", written).wait()
    read = torch.empty(numel, dtype=dtype)
    store.read("layer.weight", read).wait()
    assert torch.equal(read, written)
    store.close()


def test_memory_that_begins_anywhere_is_written_and_read(tmp_path):
    store = made(tmp_path / "f")
    whole = torch.arange(30_000, dtype=torch.int16)
    for start in (0, 1, 2047, 2048):
        store.write("piece", whole[start : start + 20_000]).wait()
        target = torch.empty(30_000, dtype=torch.int16)[start : start + 20_000]
        store.read("piece", target).wait()
        assert torch.equal(target, whole[start : start + 20_000])
    store.close()


def test_aligned_memory_is_aligned():
    for size in (1, 4096, 5000):
        tensor = file_ranges.aligned_empty(size)
        assert tensor.numel() == size
        assert tensor.data_ptr() % 4096 == 0


def test_what_is_written_last_is_read_also_while_an_earlier_write_is_under_way(tmp_path):
    store = made(tmp_path / "f")
    target = torch.empty(100_000)
    for value in range(20):
        store.write("state", torch.full((100_000,), float(value)))
    store.read("state", target).wait()
    assert target.eq(19.0).all()
    store.close()


def test_a_tensor_may_change_its_size(tmp_path):
    store = made(tmp_path / "f")
    for numel in (10_000, 3, 20_000):
        store.write("state", torch.full((numel,), float(numel))).wait()
        target = torch.empty(numel)
        store.read("state", target).wait()
        assert target.eq(numel).all()
    store.close()


def test_names_of_any_kind_make_files(tmp_path):
    store = made(tmp_path / "f")
    names = ["a/b", "a%2Fb", "..", "x" * 500, "x" * 500 + "y"]
    for number, name in enumerate(names):
        store.write(name, torch.tensor([number]))
    for number, name in enumerate(names):
        target = torch.empty(1, dtype=torch.int64)
        store.read(name, target).wait()
        assert int(target) == number
    assert len(list((tmp_path / "f").iterdir())) == len(names)
    assert list(tmp_path.iterdir()) == [tmp_path / "f"]
    store.close()


def test_a_changed_byte_is_an_error_that_names_the_file_and_the_place(tmp_path):
    store = made(tmp_path / "f")
    store.write("state", torch.zeros(10_000)).wait()
    path = next((tmp_path / "f").iterdir())
    with path.open("r+b") as file:
        file.seek(20_000)
        file.write(b"\x01")
    with pytest.raises(OffloadError, match=f"{path}.*at 16384.*XXH3"):
        store.read("state", torch.empty(10_000)).wait()
    store.close()


@pytest.mark.parametrize("direct", [None, False])
def test_a_truncated_file_is_an_error(tmp_path, direct):
    store = made(tmp_path / "f", direct=direct)
    store.write("state", torch.zeros(10_000)).wait()
    os.truncate(next((tmp_path / "f").iterdir()), 12_288)
    with pytest.raises(OffloadError, match="shorter than it was written"):
        store.read("state", torch.empty(10_000)).wait()
    store.close()


def test_a_missing_file_and_a_missing_folder_are_errors_with_errno_and_path(tmp_path):
    store = made(tmp_path / "f")
    store.write("state", torch.zeros(10)).wait()
    path = next((tmp_path / "f").iterdir())
    path.unlink()
    with pytest.raises(OffloadError, match=f"{path}.*errno 2"):
        store.read("state", torch.empty(10)).wait()
    (tmp_path / "f").rmdir()
    with pytest.raises(OffloadError, match=r"errno 2.*nvme_path"):
        store.write("other", torch.zeros(10))
    store.close()


def test_wrong_sizes_and_layouts_are_refused(tmp_path):
    store = made(tmp_path / "f")
    store.write("state", torch.zeros(10)).wait()
    with pytest.raises(ValueError, match="40 bytes"):
        store.read("state", torch.empty(11))
    with pytest.raises(ValueError, match="not contiguous"):
        store.write("other", torch.zeros(4, 4).t())
    with pytest.raises(KeyError):
        store.read("none", torch.empty(1))
    store.close()


def test_a_file_is_removed_with_its_tensor_and_the_folder_with_all(tmp_path):
    store = made(tmp_path / "f")
    store.write("a", torch.zeros(10))
    store.write("b", torch.zeros(10))
    store.remove("a")
    assert "a" not in store
    assert [path.name for path in (tmp_path / "f").iterdir()] == ["000002-b"]
    store.close()
    store.close()
    assert not (tmp_path / "f").exists()


def test_a_store_that_nobody_has_any_more_removes_its_folder(tmp_path):
    store = made(tmp_path / "f")
    store.write("a", torch.zeros(10)).wait()
    del store
    deadline = time.monotonic() + 20  # The thread that wrote the file releases it last.
    while (tmp_path / "f").exists() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not (tmp_path / "f").exists()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a tmpfs")
@pytest.mark.parametrize("direct", [None, False])
def test_a_full_disk_is_an_error_that_says_how_full(tmp_path, direct):
    mount = tmp_path / "small"
    mount.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        store = made(mount / "f", direct=direct)
        store.write("fits", torch.ones(100_000)).wait()
        with pytest.raises(
            OffloadError, match=r"800000 bytes of large.*errno 28.*1048576 bytes are free.*larger disk"
        ):
            store.write("large", torch.ones(200_000))
        assert "large" not in store
        target = torch.empty(100_000)
        store.read("fits", target).wait()
        assert target.eq(1.0).all()
        store.close()
    finally:
        subprocess.run(["umount", str(mount)], check=True)


PROGRAM = """
import sys, torch
from zero_runtime.offload.tensor_files import TensorFiles
from zero_runtime.offload.folders import new_folder
store = TensorFiles(new_folder(sys.argv[1], 3, "optimizer"))
store.write("state", torch.ones(5000)).wait()
print(store.folder, flush=True)
if sys.argv[2] == "wait":
    sys.stdin.read()
elif sys.argv[2] == "kill":
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
"""


def started(path: Path, how: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.long
def test_files_go_at_exit_and_those_of_a_killed_process_at_the_next_start(tmp_path):
    killed, alive = started(tmp_path, "kill"), started(tmp_path, "wait")
    left, kept = Path(killed.stdout.readline().strip()), Path(alive.stdout.readline().strip())
    killed.communicate(timeout=60)
    assert list(left.iterdir())
    assert left.parts[-2:] == ("rank3", "optimizer")
    assert left.parents[2] == tmp_path / "zero_runtime"
    third = started(tmp_path, "exit")
    third.communicate(timeout=60)
    assert third.returncode == 0
    assert not left.exists()
    assert list(kept.iterdir())
    assert list((tmp_path / "zero_runtime").iterdir()) == [kept.parents[1]]
    alive.communicate(timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_folders_of_one_process_are_told_apart(tmp_path):
    first, second = (TensorFiles(new_folder(tmp_path, 0, "optimizer")) for _ in range(2))
    assert first.folder != second.folder
    first.write("a", torch.zeros(1)).wait()
    second.close()
    assert list(first.folder.iterdir())
    first.close()
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_made_is_a_configuration_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"offload_optimizer.nvme_path is '.*file'"):
        new_folder(tmp_path / "file", 0, "optimizer", "zero_optimization.offload_optimizer.nvme_path")


def test_the_checksum_of_nothing_changed_costs_no_error_when_unchecked(tmp_path):
    store = tensor_files.TensorFiles(tmp_path, SMALL, checked=False)
    store.write("state", torch.ones(10_000)).wait()
    target = torch.empty(10_000)
    store.read("state", target).wait()
    assert target.eq(1.0).all()
    store.close()


@pytest.mark.long
def test_without_the_package_for_checksums_bytes_are_checked_all_the_same(tmp_path):
    program = f"""
import sys
sys.modules["xxhash"] = None
import pathlib, torch
from zero_runtime.errors import OffloadError
from zero_runtime.offload.tensor_files import TensorFiles
folder = pathlib.Path({str(tmp_path)!r})
store = TensorFiles(folder)
store.write("state", torch.zeros(10_000)).wait()
with next(folder.iterdir()).open("r+b") as file:
    file.write(b"1")
try:
    store.read("state", torch.empty(10_000)).wait()
except OffloadError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "CRC-32 of" in done.stdout
