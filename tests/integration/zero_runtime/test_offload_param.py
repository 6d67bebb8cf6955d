"""offload_param: shards in host memory and in files train bit for bit like shards that stay with the parameters."""

from __future__ import annotations

import copy
import errno
import gc
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zero_runtime
from support.process_group_log import logged
from support.ranks import run_ranks
from support.recorded_models import make_batch, make_model
from support.standing_ranks import run_standing
from zero_runtime import tensor_access
from zero_runtime.errors import ConfigError, OffloadError
from zero_runtime.offload import stretches
from zero_runtime.sharding.placement import pages
from zero_runtime.sharding.placement.pages import Pager
from zero_runtime.sharding.shards import shard_of
from zero_runtime.zero import GatheredParameters, Init

pytestmark = pytest.mark.ranks

STEPS = 2
# The parameters of the gpt. Each of two ranks has half of them, without padding.
NUMEL = 113_504
NOTHING_PERSISTENT = {"stage3_param_persistence_threshold": 0}
TIGHT = {
    **NOTHING_PERSISTENT,
    "stage3_prefetch_bucket_size": 1000,
    "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 20_000,
}
SETTINGS = {
    "tight": {"zero": TIGHT},
    "all ahead": {"zero": NOTHING_PERSISTENT},
    "small parameters persistent": {"zero": {"stage3_param_persistence_threshold": 1000}},
    "2 micro-batches, clipped": {"zero": TIGHT, "gradient_accumulation_steps": 2, "gradient_clipping": 0.1},
    "bf16": {"zero": TIGHT, "bf16": {"enabled": True}},
    "fp16": {"zero": TIGHT, "fp16": {"enabled": True, "initial_scale_power": 30}},
    "autocast": {"zero": TIGHT, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "one message each": {"zero": {**NOTHING_PERSISTENT, "stage3_allgather_sequential": True}},
    "by all_reduce": {"zero": {**NOTHING_PERSISTENT, "stage3_use_all_reduce_for_fetch_params": True}},
    "second slices": {"zero": {**TIGHT, "zero_hpz_partition_size": 2}},
    "leaf modules": {"zero": {**TIGHT, "leaf_module": {"classes": ["Layer"]}}},
    "sub-groups": {"zero": {**TIGHT, "sub_group_size": 5000}},
    "optimizer in files": {
        "zero": {**TIGHT, "offload_optimizer": {"device": "nvme", "nvme_path": "@FOLDER"}}
    },
    "optimizer in files, bf16": {
        "zero": {**TIGHT, "offload_optimizer": {"device": "nvme", "nvme_path": "@FOLDER"}},
        "bf16": {"enabled": True},
    },
    "Lamb": {"zero": NOTHING_PERSISTENT, "optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}},
    "Adagrad": {"zero": NOTHING_PERSISTENT, "optimizer": {"type": "Adagrad", "params": {"lr": 1e-3}}},
    "made in slices": {"zero": TIGHT, "init": True},
    "made in slices, bf16": {"zero": TIGHT, "bf16": {"enabled": True}, "init": True},
}
CUT_UP = ("by all_reduce", "sub-groups", "optimizer in files", "made in slices")
WAYS = {
    "host memory": {"device": "cpu"},
    "files": {"device": "nvme", "max_in_cpu": 0},
    "some in files, small buffers": {
        "device": "nvme",
        "max_in_cpu": 20_000,
        "buffer_size": 700,
        "buffer_count": 3,
    },
    "files, one buffer": {"device": "nvme", "max_in_cpu": 0, "buffer_size": 5000, "buffer_count": 1},
}


ONE = ("some in files, small buffers",)
SHORT = {"tight": (*WAYS,), "bf16": ONE, "small parameters persistent": ONE}
OTHERS = {name: ONE for name in SETTINGS if name not in SHORT} | {"bf16": (*WAYS,)}


def config_of(setting, offload=None, **more):
    given = {name: value for name, value in setting.items() if name not in ("zero", "init")}
    zero = {"stage": 3, "reduce_bucket_size": 20_000, **setting["zero"], **more}
    if offload is not None:
        zero["offload_param"] = offload
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
        **given,
    }


def make_engine(setting, offload=None, model="gpt", **more):
    config = config_of(setting, offload, **more)
    with Init(config_dict_or_path=config, enabled=setting.get("init", False)):
        module = make_model(model)
    engine, *_ = zero_runtime.initialize(
        model=module, model_parameters=module.parameters(), config=copy.deepcopy(config)
    )
    return engine


def train(engine, rank, steps=STEPS, first=0):
    losses = []
    for step in range(first, first + steps):
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(*make_batch("gpt", step, micro, rank))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def pager_of(engine) -> Pager:
    pagers = {shard_of(each).pager for each in engine.module.parameters()} - {None}
    (pager,) = pagers or {None}
    return pager


def in_ways(rank, world, folder, cases):
    """Return losses, messages and final parameters of every setting, with and without offload."""
    found = {}
    for name, ways in cases.items():
        # Sizes small enough for several chunks and pages in this model. Chunks begin and end within pages.
        stretches._SMALLEST, pages._LARGEST = (1024, 1500) if name in CUT_UP else (2**18, 2**20)
        setting = copy.deepcopy(SETTINGS[name])
        if "offload_optimizer" in setting["zero"]:
            setting["zero"]["offload_optimizer"]["nvme_path"] = folder
        for way, offload in {"none": None, **{way: WAYS[way] for way in ways}}.items():
            if offload is not None and offload["device"] == "nvme":
                offload = {**offload, "nvme_path": folder}
            with logged() as log:
                engine = make_engine(setting, offload)
                losses = train(engine, rank)
                calls = list(log.calls)
            with GatheredParameters(engine.module.parameters()):
                weights = [each.detach().clone() for each in engine.module.parameters()]
            numbers = None
            if offload is not None and offload["device"] == "nvme":
                pager = pager_of(engine)
                numbers = (pager.in_files, pager.largest)
            found[name, way] = losses, calls, weights, numbers
    return found


@pytest.fixture(
    scope="module", params=[SHORT, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["short", "others"]
)
def compared(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk")
    return run_ranks(2, in_ways, str(folder), request.param, timeout=280)


def test_losses_messages_and_weights_are_the_same(compared):
    for result in compared:
        for name, way in result:
            losses, calls, weights, _ = result[name, way]
            plain = result[name, "none"]
            assert losses == plain[0], (name, way)
            assert calls == plain[1], (name, way)
            assert all(map(torch.equal, weights, plain[2])), (name, way)
            assert len(set(losses)) == len(losses)


def test_what_is_in_memory_keeps_to_the_limits(compared):
    for result in compared:
        for (name, way), (*_, numbers) in result.items():
            if numbers is None:
                continue
            in_files, largest = numbers
            room = WAYS[way].get("max_in_cpu")
            if name == "small parameters persistent":
                assert 0 < in_files < NUMEL // 2 - room
            else:
                # Only whole shards stay in memory, so a part of the limit may remain unused.
                assert NUMEL // 2 - room <= in_files <= NUMEL // 2 - room + 8192
            size = WAYS[way].get("buffer_size", 10**8)
            assert 0 < largest <= size * WAYS[way].get("buffer_count", 5)


class Wide(nn.Module):
    """A model with layers large enough to be visible among all tensors of a process."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))
        self.live = None

    def forward(self, hidden):
        for number, layer in enumerate(self.layers):
            hidden = torch.relu(layer(hidden))
            if self.live is not None and number in (2, 6):
                self.live.append(tensor_bytes())
        return hidden.float().square().mean()


def tensor_bytes():
    """Return the bytes of all tensors of this process. Each storage is counted once."""
    storages = {}
    for each in gc.get_objects():
        if (
            isinstance(each, torch.Tensor) and each.layout is torch.strided
        ):  # other tensors have no storage of their own
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def measured(rank, world, folder, precision, filed):
    """Return the most tensor bytes in the third forward pass."""
    offload = {
        "device": "nvme",
        "nvme_path": folder,
        "max_in_cpu": 0,
        "buffer_size": 70_000,
        "buffer_count": 1,
    }
    setting = {"zero": TIGHT, **({} if precision == "fp32" else {precision: {"enabled": True}})}
    torch.manual_seed(0)
    gc.collect()
    before = tensor_bytes()  # tensors of earlier tests
    module = Wide()
    engine, *_ = zero_runtime.initialize(
        model=module,
        model_parameters=module.parameters(),
        config=config_of(setting, offload if filed else None),
    )
    gc.collect()
    for step in range(3):
        module.live = [] if step == 2 else None
        loss = engine(torch.ones(4, 256, dtype=module.layers[0].weight.dtype) * (1 + rank))
        engine.backward(loss)
        engine.step()
    return max(module.live) - before


@pytest.mark.filterwarnings(
    "ignore:.*deprecated:FutureWarning"
)  # a walk over all objects also reaches deprecated ones
@pytest.mark.long
def test_slices_in_files_take_no_memory(tmp_path):
    numel = 8 * (256 * 256 + 256) // 2  # on each rank
    for precision, item in (("bf16", 2), ("fp32", 4)):
        plain, filed = (run_ranks(2, measured, str(tmp_path), precision, way) for way in (False, True))
        for without, within in zip(plain, filed, strict=True):
            # All shards are out of memory except for those in use: a buffer, messages, and memory that gloo's
            # thread still references.
            assert without - within > item * (numel - 2.5 * 70_000), precision


def reads(rank, world, folder):
    """Return how many pages were read too late in each step.

    A page is late if a wait for it begins before its read. Also returns the number of pages read in the last
    step, and the number of different pages among them.
    """
    begin, arrived = Pager._begin, Pager._arrived
    late, read = [0], []

    def counted_arrival(pager, page):
        late[-1] += page not in pager._ahead and page not in pager._leaving
        return arrived(pager, page)

    def counted_begin(pager, page):
        read.append(page)
        begin(pager, page)

    Pager._arrived, Pager._begin = counted_arrival, counted_begin
    engine = make_engine(SETTINGS["tight"], {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0})
    for step in range(4):
        late.append(0)
        read.clear()
        train(engine, rank, 1, step)
    return late, len(read), len(set(read))


def test_slices_are_read_ahead_of_their_use(tmp_path):
    for late, read, distinct in run_ranks(2, reads, str(tmp_path)):
        assert late[-2:] == [0, 0]
        # Pages are read for the forward and the backward pass, and for the next forward pass.
        assert distinct <= read <= 3 * distinct


def changing(rank, world, folder):
    """Read and change parameters in all supported ways, with shards in files and without."""
    found = []
    stretches._SMALLEST, pages._LARGEST = 1024, 1500
    for offload in (None, {"device": "nvme", "nvme_path": folder, "max_in_cpu": 9000, "buffer_size": 999}):
        engine = make_engine(SETTINGS["tight"], offload)
        seen = train(engine, rank, 2)
        head = engine.module.head.weight
        with GatheredParameters(head, modifier_rank=0):
            if rank == 0:
                head.data.mul_(0.5)
        seen += train(engine, rank, 1, 2)
        value = tensor_access.safe_get_full_fp32_param(head)
        tensor_access.safe_set_full_fp32_param(head, value * 1.5)
        seen += train(engine, rank, 1, 3)
        tensor_access.safe_set_local_fp32_param(head, tensor_access.safe_get_local_fp32_param(head) + 0.01)
        engine.eval()
        with torch.inference_mode():
            seen.append(engine(*make_batch("gpt", 9, 0, rank)).item())
        engine.train()
        seen += train(engine, rank, 1, 4)
        with GatheredParameters(engine.module.parameters()):
            whole = {name: each.clone() for name, each in engine.module.state_dict().items()}
        found.append((seen, value, whole))
    return found


@pytest.mark.long
def test_parameters_can_be_looked_at_and_changed(tmp_path):
    for plain, filed in run_ranks(2, changing, str(tmp_path)):
        assert filed[0] == plain[0]
        assert torch.equal(filed[1], plain[1])
        assert all(torch.equal(filed[2][name], plain[2][name]) for name in plain[2])


def two_engines(rank, world, folder):
    """Train two engines in turns, then both again at other stages.

    Returns the number of files in the folder in between.
    """
    offload = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}
    first, second = make_engine(SETTINGS["tight"], offload), make_engine(SETTINGS["bf16"], offload)
    alone = train(make_engine(SETTINGS["tight"]), rank)
    losses = []
    for step in range(STEPS):
        losses += train(first, rank, 1, step)
        train(second, rank, 1, step)
    files = sum(path.name.endswith(".0") for path in Path(folder).rglob("*"))
    torch.distributed.barrier()
    shapes = []
    for engine in (first, second):
        again, *_ = zero_runtime.initialize(
            model=engine.module, config=config_of(SETTINGS["tight"], None, stage=2)
        )
        train(again, rank, 1)
        shapes += [tuple(each.shape) for each in again.module.parameters()]
    torch.distributed.barrier()
    left = [path for path in Path(folder).rglob("*") if path.is_file()]
    return losses == alone, files, len(left), (0,) in shapes


@pytest.mark.long
def test_two_engines_and_other_stages_after(tmp_path):
    for same, files, left, empty in run_standing(2, two_engines, str(tmp_path)):
        assert same
        assert files == 2 * 2 * 30  # engines x ranks x parameters
        assert left == 0
        assert not empty


def saved_and_loaded(rank, world, folder, disk, save):
    """Save with shards in files and load with and without files, or the other way round."""
    offload = {"device": "nvme", "nvme_path": disk, "max_in_cpu": 0, "buffer_size": 1111}
    found = []
    if save:
        for name, way in (("filed", offload), ("plain", None)):
            engine = make_engine(SETTINGS["tight"], way)
            train(engine, rank, 2)
            engine.save_checkpoint(f"{folder}/{name}", tag="t")
    for name in ("filed", "plain"):
        for way in (offload, None):
            engine = make_engine(SETTINGS["tight"], way)
            engine.load_checkpoint(f"{folder}/{name}", tag="t")
            found.append(train(engine, 0, 2, 2))
    return found


@pytest.mark.long
def test_checkpoints_at_any_world_size(tmp_path):
    disk, folder = tmp_path / "disk", tmp_path / "checkpoints"
    disk.mkdir()
    for world in (2, 1, 3):
        for found in run_standing(world, saved_and_loaded, str(folder), str(disk), world == 2):
            assert all(each == found[0] for each in found[1:]), world


def half_frozen(rank, world, folder):
    """Save and load a model with a frozen part, and then load only the weights."""
    offload = {"device": "nvme", "nvme_path": f"{folder}/disk", "max_in_cpu": 0}
    found = []
    for way in (offload, None):
        module = make_model("gpt")
        module.blocks[0].requires_grad_(False)
        config = config_of(SETTINGS["bf16"], way, stage3_gather_16bit_weights_on_model_save=True)
        trained = [each for each in module.parameters() if each.requires_grad]
        engine, *_ = zero_runtime.initialize(model=module, model_parameters=trained, config=config)
        train(engine, rank, 2)
        name = "plain" if way is None else "filed"
        engine.save_checkpoint(f"{folder}/{name}", tag="t")
        engine.save_16bit_model(f"{folder}/{name}", "model.safetensors")
        with GatheredParameters(module.parameters(), modifier_rank=0):
            for each in module.parameters():
                each.data.zero_()
        engine.load_checkpoint(f"{folder}/{name}", tag="t")
        found.append(train(engine, rank, 2, 2))
    return found


@pytest.mark.long
def test_frozen_parameters_and_weights(tmp_path):
    for filed, plain in run_standing(2, half_frozen, str(tmp_path)):
        assert filed == plain
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("filed", "plain")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(each, weights[1][name]) for name, each in weights[0].items())


def refused(rank, world, folder):
    messages = []
    for offload in (
        {"device": "nvme", "nvme_path": f"{folder}/file/below"},
        {"device": "nvme"},
    ):
        for init in (False, True):
            with pytest.raises(ConfigError) as refusal:
                make_engine({"zero": TIGHT, "init": init}, offload and {**offload, "max_in_cpu": 0})
            messages.append(str(refusal.value))
    with pytest.raises(ConfigError) as refusal, Init(remote_device="nvme"):
        pass
    return [*messages, str(refusal.value)]


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("in the way")
    (messages,) = run_standing(1, refused, str(tmp_path))
    assert messages[0] == messages[1] and messages[2] == messages[3]
    assert "offload_param.nvme_path" in messages[0] and "below" in messages[0]
    assert "nvme_path" in messages[2] and "offload_param" in messages[4]


def on_a_full_disk(rank, world, folder):
    reserve, room = os.posix_fallocate, [7]

    def limited(*arguments):
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(*arguments)

    os.posix_fallocate = limited
    with pytest.raises(OffloadError) as refusal:
        make_engine({"zero": TIGHT}, {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0})
    return str(refusal.value)


def test_a_full_disk_is_one_error(tmp_path):
    (message,) = run_standing(1, on_a_full_disk, str(tmp_path))
    assert "No space left on device" in message
    assert "set zero_optimization.offload_param.nvme_path to a folder on a larger disk" in message


def nothing_in_files(rank, world, folder):
    make_engine({"zero": TIGHT}, {"device": "nvme", "nvme_path": folder})


def test_it_is_said_when_everything_fits(tmp_path, capfd):
    run_ranks(2, nothing_in_files, str(tmp_path))
    said = capfd.readouterr().err
    assert said.count("has put nothing into files") == 1
    assert "56752 elements fit in max_in_cpu (1000000000)" in said
