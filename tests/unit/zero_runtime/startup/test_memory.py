"""Test the reports and estimates of memory."""

from __future__ import annotations

import re

import pytest
import torch

from zero_runtime import memory_estimates
from zero_runtime.startup import memory_status

GIB = 2**30


def test_memory_in_use_is_printed_only_when_it_is_forced(capsys):
    memory_status.see_memory_usage("before")
    assert capsys.readouterr().out == ""
    memory_status.see_memory_usage("after", force=True)
    assert re.fullmatch(
        r"after: (device .*; )?process \d+\.\d\d GiB resident \(peak \d+\.\d\d GiB\); host .* of .*\n",
        capsys.readouterr().out,
    )
    memory_status.memory_status("now")
    assert capsys.readouterr().out.startswith("rank 0, now: ")
    memory_status.memory_status("now", print_rank=1)
    assert capsys.readouterr().out == ""


def test_what_a_process_holds_is_seen():
    before = memory_status.memory_in_use()
    held = torch.ones(64 * 2**20 // 4)
    after = memory_status.memory_in_use()
    assert held.numel() * 4 * 0.9 < after.resident - before.resident < 2 * held.numel() * 4
    assert 0 < after.host_used < after.host


# Computed by hand for 1e9 parameters, a largest layer of 1e7, and 4 devices on each of 2 hosts.
@pytest.mark.parametrize(
    ("offload", "host", "device"),
    [(True, 1e9 * 32 * 1.5, 2e9), (False, 1e9 * 4 * 4 * 1.5, 2e9 + 18e9 / 8)],
)
def test_zero_2_by_hand(offload, host, device):
    found = memory_estimates.estimate_zero2_model_states_mem_needs(int(1e9), 4, 2, offload)
    assert found == (host, device)


@pytest.mark.parametrize(
    ("optimizer", "parameters", "zero_init", "host", "device"),
    [
        (True, True, True, 1e9 * 18 / 2, 0),
        (True, True, False, 1e9 * 16, 0),
        (True, False, True, 1e9 * 16 / 2, 2e9 / 8),
        (False, False, True, 1e7 * 4 * 4, 18e9 / 8),
        (False, False, False, 1e9 * 4 * 4, 18e9 / 8),
    ],
)
def test_zero_3_by_hand(optimizer, parameters, zero_init, host, device):
    found = memory_estimates.estimate_zero3_model_states_mem_needs(
        int(1e9), int(1e7), 4, 2, optimizer, parameters, zero_init
    )
    assert found == (host * 1.5, 4e7 + device, 4e7)


def test_estimates_of_a_model_count_each_parameter_once(capsys):
    model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Linear(10, 10))
    model[1].weight = model[0].weight
    assert memory_estimates.count_parameters(model) == (120, 110)
    memory_estimates.estimate_zero2_model_states_mem_needs_all_live(model, 8)
    memory_estimates.estimate_zero3_model_states_mem_needs_all_live(model, 8, 2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 + 8 and "on 2 hosts with 8 devices each" in lines[4]
    assert all(line.endswith(("offload_optimizer=cpu", "offload_optimizer=none")) for line in lines[2:4])
