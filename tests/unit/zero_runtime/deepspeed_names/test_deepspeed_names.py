"""Test that ``import deepspeed`` imports this runtime.

The names of the table exist, and every other name says what to use instead.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from packaging.version import Version

import zero_runtime
from zero_runtime import as_deepspeed
from zero_runtime.deepspeed_names import finder
from zero_runtime.deepspeed_names.tables.catalogue import counts, importable, page, table_text
from zero_runtime.deepspeed_names.tables.names import Refused
from zero_runtime.errors import MissingNameError, UnsupportedError, UsageError

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def names():
    as_deepspeed()
    yield
    finder.uninstall()


def test_every_name_of_the_table_is_something_or_one_clear_error():
    used = 0
    for full, module in importable():
        imported = importlib.import_module(full)
        for name, row in module.names.items():
            found = getattr(imported, name)
            used += 1
            if isinstance(row, Refused):
                with pytest.raises(UnsupportedError, match="is not in this version") as refusal:
                    found(1, key=2)
                assert row.reason in str(refusal.value) and "--engine deepspeed" in str(refusal.value)
    assert used == counts().works + counts().refused > 500


def test_all_ways_of_importing_give_the_same_things():
    import deepspeed
    import deepspeed.comm as dist
    import deepspeed.ops.adam as adam
    from deepspeed import comm, zero
    from deepspeed.ops.adam.fused_adam import FusedAdam
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus

    import zero_runtime

    assert dist is comm is deepspeed.comm is deepspeed.dist
    assert zero is deepspeed.zero is sys.modules["deepspeed.runtime.zero"]
    assert adam.FusedAdam is FusedAdam is deepspeed.ops.adam.fused_adam.FusedAdam
    assert zero.GatheredParameters is GatheredParameters is zero_runtime.zero.GatheredParameters
    assert ZeroParamStatus is zero_runtime.zero.ZeroParamStatus
    assert deepspeed.initialize is zero_runtime.initialize
    assert deepspeed.DeepSpeedEngine is deepspeed.runtime.engine.DeepSpeedEngine is zero_runtime.Engine
    assert not [entry for entry in sys.path if "deepspeed" in entry]


def test_a_star_gives_what_works_and_nothing_that_is_refused():
    space: dict = {}
    exec("from deepspeed.comm import *\nfrom deepspeed.checkpoint import *", space)
    assert callable(space["all_reduce"]) and "DeepSpeedCheckpoint" not in space


def test_a_script_may_replace_a_name():
    import deepspeed.runtime.utils

    deepspeed.runtime.utils.clip_grad_norm_ = 17
    from deepspeed.runtime.utils import clip_grad_norm_

    assert clip_grad_norm_ == 17


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import deepspeed.moe.mappings", "experts"),
        ("from deepspeed.inference.engine import InferenceEngine", "torch.inference_mode"),
        ("import deepspeed.autotuning", "commprof sweep"),
        ("from deepspeed.runtime.data_pipeline.data_sampling import indexed_dataset", "curriculum"),
        ("from deepspeed.ops.transformer import DeepSpeedTransformerLayer", "kernels"),
        ("from deepspeed.runtime.zero.stage3 import Nonsense", "--list"),
        ("from deepspeed.utils import loger", "did you mean logger"),
        ("import deepspeed.zero", "from deepspeed import zero"),
        ("import deepspeed.no_such_module", "--engine deepspeed"),
    ],
)
def test_what_is_not_there_is_an_import_error_that_says_what_to_use(code, said):
    with pytest.raises(ModuleNotFoundError, match=said) as refusal:
        exec(code)
    assert isinstance(refusal.value, MissingNameError) and "\n" not in str(refusal.value)


def test_attributes_that_are_not_there_are_attribute_errors():
    import deepspeed

    assert not hasattr(deepspeed, "autotuning") and getattr(deepspeed, "nothing", 3) == 3
    with pytest.raises(AttributeError, match="curriculum"):
        _ = deepspeed.runtime.data_pipeline


def test_placeholders_can_be_subclassed_and_asked_for_but_not_made():
    from deepspeed.pipe import DualPipeVModule

    class Pipe(DualPipeVModule):
        pass

    assert not isinstance(3, DualPipeVModule)
    for kind, reason in ((Pipe, "pipelines"), (DualPipeVModule, "pipelines")):
        with pytest.raises(UnsupportedError, match=reason):
            kind([])


def test_versions_and_metadata_are_what_libraries_parse():
    import deepspeed

    version = Version(deepspeed.__version__)
    assert version.public == "0.19.8" and version >= Version("0.19.8")
    assert (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__) == (
        0,
        19,
        8,
    )
    assert importlib.metadata.version("deepspeed") == deepspeed.__version__
    assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
    assert importlib.util.find_spec("deepspeed") is not None
    installed = next(iter(importlib.metadata.distributions(name="deepspeed")))
    assert installed.version == deepspeed.__version__


def test_deepspeed_itself_is_not_replaced_once_it_is_there(monkeypatch):
    finder.uninstall()
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    with pytest.raises(UsageError, match="imported already"):
        as_deepspeed()


def test_uninstalling_leaves_nothing():
    import deepspeed  # noqa: F401

    finder.uninstall()
    assert "deepspeed" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("deepspeed")


def test_the_documentation_is_made_of_the_table():
    text = (ROOT / "docs" / "deepspeed-names.md").read_text()
    assert page() in text
    assert "deepspeed.pipe.DualPipeVModule: refused: pipelines" in table_text()


@pytest.mark.long
def test_modules_run_with_python_m(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "zero_runtime.deepspeed_names", "-m", "deepspeed.env_report"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "with the names of DeepSpeed 0.19.8" in done.stdout and "backends" in done.stdout


def test_operations_that_torch_has_are_there_and_none_is_built():
    import deepspeed
    from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder, QuantizerBuilder, UtilsBuilder

    there = deepspeed.ops.__compatible_ops__
    assert there[CPUAdamBuilder.NAME] and there["fused_adam"] and not there[QuantizerBuilder.NAME]
    with pytest.raises(UnsupportedError, match=r"FusedAdamBuilder.*it uses torch's"):
        FusedAdamBuilder().load()
    numbers = torch.arange(3, dtype=torch.int16)
    raw = UtilsBuilder().load().cast_to_byte_tensor(numbers)
    assert raw.dtype is torch.uint8 and raw.numel() == 6 and raw.data_ptr() == numbers.data_ptr()


def test_settings_of_activation_checkpoints_are_read_anew_each_time():
    from deepspeed import checkpointing

    try:
        assert not checkpointing.PARTITION_ACTIVATIONS and not checkpointing.CPU_CHECKPOINT
        checkpointing.configure(None, partition_activations=True, checkpoint_in_cpu=True, profile=True)
        assert (
            checkpointing.PARTITION_ACTIVATIONS
            and checkpointing.CPU_CHECKPOINT
            and checkpointing.PROFILE_TIME
        )
    finally:
        zero_runtime.checkpointing.forget()
    assert not checkpointing.PARTITION_ACTIVATIONS and not checkpointing.SYNCHRONIZE


def test_modules_are_found_by_dotted_names_as_deepspeed_chat_asks():
    from deepspeed.compression.helper import recursive_getattr, recursive_setattr

    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 3)))
    assert recursive_getattr(model, "0.0") is model[0][0]
    new = torch.nn.Linear(2, 5)
    recursive_setattr(model, "0.0", new)
    assert model[0][0] is new


def test_a_script_makes_configurations_of_its_own():
    pydantic = pytest.importorskip("pydantic")
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    class Sizes(DeepSpeedConfigModel):
        new: list[str] | None = None
        count: int = pydantic.Field(3, alias="size")
        old: str | None = pydantic.Field(
            None,
            json_schema_extra={"deprecated": True, "new_param": "new", "new_param_fn": lambda value: [value]},
        )

    assert Sizes(count="4").count == Sizes(size=4).count == 4 and Sizes(count="auto").count == 3
    assert Sizes(old="a").new == ["a"]
    with pytest.raises(AssertionError, match="which replaces it"):
        Sizes(old="a", new=["b"])
    with pytest.raises(pydantic.ValidationError):
        Sizes(other=1)


def test_pinned_memory_is_added_up():
    from deepspeed.utils.pin_memory_tracker import _fmt_bytes, _tracker, track_pinned_memory

    _tracker.reset()
    track_pinned_memory(2**35)
    track_pinned_memory(2**35)
    assert (_tracker._bytes, _tracker._calls, _tracker._next_checkpoint) == (2**36, 2, 2**37)
    assert [_fmt_bytes(size) for size in (7, 2048, 2**20, 2**30)] == ["7 B", "2.0 KB", "1.00 MB", "1.000 GB"]
    _tracker.reset()
