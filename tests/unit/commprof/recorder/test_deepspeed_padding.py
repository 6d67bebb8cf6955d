"""Test the padding in DeepSpeed's messages.

The tests use stand-ins with DeepSpeed's signatures, and the padding is computed by hand.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
import torch

from commprof import hooks
from commprof.recorder.adapters.deepspeed_padding import Paddings, gradient_padding
from commprof.recorder.adapters.patching import Patches

RANKS = 3
MISSING, HERE = SimpleNamespace(name="NOT_AVAILABLE"), SimpleNamespace(name="AVAILABLE")


@pytest.fixture
def deepspeed(monkeypatch):
    """Return stand-ins for the parts of DeepSpeed that matter. ``sent`` contains the tag of each message."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: RANKS)
    faults, sent = [], []
    modules = {
        name: ModuleType(f"deepspeed.{name}")
        for name in (
            "comm",
            "runtime.zero.stage_1_and_2",
            "runtime.bf16_optimizer",
            "runtime.zero.stage3",
            "runtime.zero.partition_parameters",
            "runtime.zero.partitioned_param_coordinator",
        )
    }
    comm, stage_1_2, bf16, stage_3, parameters, coordinator = modules.values()

    def note(*args, **kwargs):
        sent.append(hooks.current_tag())

    comm.all_gather_into_tensor = lambda output_tensor, tensor, group=None, async_op=False: note()
    comm.all_gather = lambda tensor_list, tensor, group=None, async_op=False: note()
    parameters._dist_allgather_fn = lambda input_tensor, output_tensor, group=None: note()
    stage_3.reduce_scatter_coalesced = lambda tensors, group=None: note()

    class Flat:
        def update_lp_params(self):
            for flat in self.flat:
                comm.all_gather_into_tensor(flat, flat[: flat.numel() // RANKS], None)

    class DeepSpeedZeroOptimizer(Flat):
        def __init__(self, groups, flat):
            self.bit16_groups, self.bit16_groups_flat, self.flat = groups, flat, flat

        def update_lp_params(self):
            super().update_lp_params()

        def step(self):
            # This gather is for a different purpose.
            comm.all_gather_into_tensor(torch.zeros(6), torch.zeros(2))
            super().update_lp_params()

    class BF16_Optimizer(Flat):  # noqa: N801 - its name
        def __init__(self, groups, flat):
            self.bf16_groups, self.bf16_groups_flat, self.flat = groups, flat, flat

        def update_lp_params(self):
            super().update_lp_params()

    class DeepSpeedZeroOptimizer_Stage3:  # noqa: N801
        def _fp32_state_allgather(self, param, fp32_state_partition):
            buffer = torch.zeros(RANKS * fp32_state_partition.numel())
            comm.all_gather_into_tensor(buffer, fp32_state_partition, group=None)

    class Init:
        def _allgather_param(self, param, async_op=False, hierarchy=0):
            comm.all_gather([param.ds_tensor] * RANKS, param.ds_tensor)

        def _allgather_params(self, param_list, hierarchy=0):
            own = torch.cat([each.ds_tensor for each in param_list])
            comm.all_gather([own] * RANKS, own)

        def _allgather_params_coalesced(self, param_list, hierarchy=0, quantize=False):
            for each in param_list:
                comm.all_gather_into_tensor(torch.zeros(RANKS * each.ds_tensor.numel()), each.ds_tensor)

    class PartitionedParameterCoordinator:
        coalesces = True

        def __all_gather_params_(self, params, forward, quantize=False):
            missing = sorted((p for p in params if p.ds_status is MISSING), key=lambda p: p.ds_id)
            messages = [[each.ds_tensor] for each in missing]
            if self.coalesces:
                dtypes = {each.ds_tensor.dtype: None for each in missing}
                messages = [[p.ds_tensor for p in missing if p.ds_tensor.dtype == dtype] for dtype in dtypes]
            for message in messages:
                own = torch.cat(message)
                parameters._dist_allgather_fn(own, own.repeat(RANKS), None)

    stage_1_2.DeepSpeedZeroOptimizer, bf16.BF16_Optimizer = DeepSpeedZeroOptimizer, BF16_Optimizer
    stage_3.DeepSpeedZeroOptimizer_Stage3, parameters.Init = DeepSpeedZeroOptimizer_Stage3, Init
    coordinator.PartitionedParameterCoordinator = PartitionedParameterCoordinator
    paddings, patches = Paddings(faults.append), Patches()
    for module in modules.values():
        paddings.wrap(module, patches)
    names = {name.rpartition(".")[2]: module for name, module in modules.items()}
    yield SimpleNamespace(**names, sent=sent, padding=lambda: [each and each.padding_bytes for each in sent])
    patches.remove()
    assert faults == []
    assert not hasattr(comm.all_gather, "__wrapped__") and not hasattr(Init._allgather_param, "__wrapped__")


def parameter(number, numel, dtype=torch.float32, status=MISSING):
    shard = torch.zeros(-(-numel // RANKS), dtype=dtype)
    shard.ds_numel = shard.numel()
    return SimpleNamespace(
        ds_id=number,
        ds_numel=numel,
        ds_tensor=shard,
        ds_status=status,
        ds_secondary_tensor=None,
        ds_process_group="world",
    )


def fetch(deepspeed, parameters, coalesces=True, **more):
    owner = deepspeed.partitioned_param_coordinator.PartitionedParameterCoordinator()
    owner.coalesces = coalesces
    owner._PartitionedParameterCoordinator__all_gather_params_(parameters, True, **more)


@pytest.mark.parametrize(
    ("module", "name"), [("stage_1_and_2", "DeepSpeedZeroOptimizer"), ("bf16_optimizer", "BF16_Optimizer")]
)
def test_flat_groups_are_longer_than_their_parameters(deepspeed, module, name):
    groups = [[torch.zeros(5, 7), torch.zeros(7)], [torch.zeros(12)], [torch.zeros(5)]]
    flat = [torch.zeros(48), torch.zeros(12), torch.zeros(12, dtype=torch.bfloat16)]
    optimizer = getattr(getattr(deepspeed, module), name)(groups, flat)
    optimizer.update_lp_params()
    assert deepspeed.padding() == [4 * 6, None, 2 * 7]  # The padding is null if a message has none.
    deepspeed.sent.clear()
    if hasattr(optimizer, "step"):
        optimizer.step()
        assert deepspeed.padding() == [None, 4 * 6, None, 2 * 7]


def test_parameters_that_are_gathered_together(deepspeed):
    # Shards of 3, 2 and 1 elements on 3 ranks are 18 elements, and 7 + 5 + 3 of them are data. The fourth
    # parameter is already available.
    parameters = [parameter(2, 5), parameter(1, 7), parameter(3, 3), parameter(0, 8, status=HERE)]
    fetch(deepspeed, parameters)
    assert deepspeed.padding() == [4 * (18 - 15)]


def test_each_dtype_is_a_message_of_its_own(deepspeed):
    fetch(
        deepspeed,
        [parameter(1, 7), parameter(2, 4, torch.bfloat16), parameter(3, 9), parameter(4, 1, torch.bfloat16)],
    )
    assert deepspeed.padding() == [4 * 2, 2 * (9 - 5)]


def test_parameters_one_by_one_are_told_apart_by_their_order(deepspeed):
    # All three parameters have shards of 3 elements, with 2, 1 and no elements of padding.
    fetch(deepspeed, [parameter(3, 9), parameter(1, 7), parameter(2, 8)], coalesces=False)
    assert deepspeed.padding() == [4 * 2, 4 * 1, None]


def test_quantized_messages_have_no_known_padding(deepspeed):
    fetch(deepspeed, [parameter(1, 7)], quantize=True)
    quantized = parameter(2, 7)
    quantized.ds_tensor.ds_quant_scale = torch.zeros(1)
    fetch(deepspeed, [quantized])
    deepspeed.partition_parameters.Init()._allgather_params_coalesced([parameter(1, 7)], 0, True)
    assert deepspeed.padding() == [None, None, None]


def test_what_the_context_of_init_gathers(deepspeed):
    init = deepspeed.partition_parameters.Init()
    init._allgather_param(parameter(1, 7))
    init._allgather_params([parameter(1, 7), parameter(2, 8)])
    init._allgather_params_coalesced(param_list=[parameter(1, 7), parameter(2, 9), parameter(3, 8)])
    assert deepspeed.padding() == [4 * 2, 4 * 3, 4 * 2, None, 4 * 1]


def test_a_shard_among_a_part_of_the_ranks(deepspeed):
    within = parameter(1, 7)
    within.ds_secondary_tensor = within.ds_tensor = torch.zeros(4)  # The shards are over two ranks.
    within.ds_tensor.ds_numel = 2
    deepspeed.partition_parameters._dist_allgather_fn(within.ds_tensor, torch.zeros(8))
    fetch(deepspeed, [within])
    assert deepspeed.padding() == [None, 4 * (RANKS * 4 - 7)]  # The stand-in has three elements in each part.


def test_gradients_are_filled_up_to_the_ranks(deepspeed):
    gradients = [torch.zeros(7), torch.zeros(3, 3), torch.zeros(1)]
    bucket = hooks.tag("gradient_reduce", bucket=4, parameters=("a", "b"), bucket_bytes=68)
    with bucket:
        deepspeed.stage3.reduce_scatter_coalesced(gradients, "world")
        deepspeed.stage3.reduce_scatter_coalesced([torch.zeros(9)], group="world")
    first, second = deepspeed.sent
    assert (first.purpose, first.bucket, first.parameters, first.bucket_bytes) == (
        "gradient_reduce",
        4,
        ("a", "b"),
        68,
    )
    assert (first.padding_bytes, second.padding_bytes) == (4 * (2 + 0 + 2), None)
    deepspeed.stage3.DeepSpeedZeroOptimizer_Stage3()._fp32_state_allgather(parameter(1, 7), torch.zeros(3))
    assert deepspeed.padding()[2:] == [8]


def test_flat_gradients_are_longer_than_their_groups():
    flat = [torch.zeros(48), torch.zeros(30)]
    optimizer = SimpleNamespace(
        fp32_groups_gradients_flat=flat, bf16_groups=[[torch.zeros(5, 7), torch.zeros(7)], [torch.zeros(28)]]
    )
    assert gradient_padding(optimizer, flat) == 6 + 2
    assert gradient_padding(optimizer, [flat[1], torch.zeros(30)]) == 2
    assert gradient_padding(SimpleNamespace(), flat) == 0
