"""Test ``python -m zero_runtime.report``, which shows what is installed on this machine."""

from __future__ import annotations

import pytest
import torch

from zero_runtime.report import main
from zero_runtime.version import VERSION


def shown(capsys):
    lines = capsys.readouterr().out.splitlines()
    return {line[: line.index("  ")]: line[line.index("  ") :].strip() for line in lines}


def test_versions_backends_memory_and_disks_are_named_and_nothing_is_left(tmp_path, capsys):
    assert main(["--directory", str(tmp_path), "--disk-bytes", "1m"]) == 0
    found = shown(capsys)
    assert found["zero_runtime"].startswith(VERSION) and found["torch"].startswith(torch.__version__)
    assert (
        "gloo" in found["backends"] and "GiB are free" in found["memory"] and str(tmp_path) in found["disk"]
    )
    assert "through the page cache" in found["disk speed"] and "MB/s read (1 MiB" in found["disk speed"]
    assert found["log level"].startswith("info")
    assert list(tmp_path.iterdir()) == []


def test_the_disk_need_not_be_measured(tmp_path, capsys):
    assert main(["--directory", str(tmp_path), "--no-disk-speed"]) == 0
    assert "disk speed" not in shown(capsys)


def test_a_disk_that_cannot_be_written_is_said(capsys):
    assert main(["--directory", "/proc", "--disk-bytes", "1m"]) == 0
    assert "cannot be measured" in shown(capsys)["disk speed"]


def test_a_size_that_is_no_multiple_of_a_block_is_refused(tmp_path):
    with pytest.raises(SystemExit):
        main(["--directory", str(tmp_path), "--disk-bytes", "1000"])
