"""zero_runtime reports the padding in each of its messages.

The expected padding is computed by hand from the shapes of a small model on three ranks.
"""

import pytest
import torch

from support.recording import calls, record

pytestmark = pytest.mark.ranks

WORLD = 3
# The layers have 5 x 4 + 5 and 1 x 5 + 1 elements: 25 and 6, in 4 parameters of 20, 5, 5 and 1.
NUMELS = (20, 5, 5, 1)


def train(rank, world, zero, keys):
    import zero_runtime

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 1))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "zero_optimization": {"stage3_param_persistence_threshold": 0, **zero},
        **keys,
    }
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(2):
        loss = engine(torch.ones(2, 4)).square().mean()
        engine.backward(loss)
        engine.step()


def padded(tmp_path, zero, op, purpose, **keys):
    run, _ = record(tmp_path / "run", WORLD, train, zero, keys)
    found = [
        calls(run, rank, "op", "purpose", "payload_bytes", "padding_bytes", "parameters")
        for rank in range(WORLD)
    ]
    return [[row[2:] for row in rows if row[:2] == (op, purpose)] for rows in found]


def test_stages_1_and_2_gather_a_flat_buffer_whose_end_is_padding(tmp_path):
    for rows in padded(tmp_path, {"stage": 2}, "all_gather", "parameter_gather"):
        # The buffer has 31 elements, rounded up to a multiple of 2 x 3.
        assert {(payload, padding) for payload, padding, _ in rows} == {(4 * 36, 4 * 5)}


@pytest.mark.long
def test_a_buffer_that_is_gathered_in_parts_has_its_padding_in_the_last_ones(tmp_path):
    rows, *_ = padded(tmp_path, {"stage": 1, "allgather_bucket_size": 12}, "all_gather", "parameter_gather")
    # Rows have 12 elements, and 4 elements of each are gathered at a time: elements 0-3, 12-15, 24-27; then
    # 4-7, 16-19, 28-31; then 8-11, 20-23, 32-35.
    assert [(payload, padding) for payload, padding, _ in rows[:3]] == [(48, None), (48, 4), (48, 16)]


def test_stage_3_pads_each_parameter(tmp_path):
    for rows in padded(tmp_path, {"stage": 3}, "all_gather", "parameter_gather"):
        assert rows
        for payload, padding, names in rows:
            numels = [
                dict(zip(("0.weight", "0.bias", "1.weight", "1.bias"), NUMELS, strict=True))[name]
                for name in names.split(",")
            ]
            slices = [-(-numel // WORLD) for numel in numels]
            assert payload == 4 * WORLD * sum(slices)
            assert padding == 4 * (WORLD * sum(slices) - sum(numels))


@pytest.mark.long
def test_a_native_reduce_scatter_states_the_padding_of_its_rows(tmp_path):
    zero = {"stage": 3, "gradient_reduction": "reduce_scatter", "reduce_scatter_impl": "native"}
    for rows in padded(tmp_path, zero, "reduce_scatter", "gradient_reduce"):
        assert rows
        for payload, padding, names in rows:
            assert payload - padding == 4 * sum(
                NUMELS[("0.weight", "0.bias", "1.weight", "1.bias").index(name)] for name in names.split(",")
            )
