"""zero_runtime: a ZeRO runtime driven by DeepSpeed's API and configuration files.

::

    engine, optimizer, _, _ = zero_runtime.initialize(model=model, model_parameters=model.parameters(),
        config="ds.json")
    for x, y in batches:
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()

The runtime supports stages 0 to 3, and fp32, bf16 and fp16. ``docs/deepspeed-differences.md`` lists the
differences from DeepSpeed.
"""

from __future__ import annotations

from zero_runtime import activation_checkpointing as checkpointing
from zero_runtime import comm, zero
from zero_runtime.comm import init_distributed
from zero_runtime.deepspeed_names import as_deepspeed
from zero_runtime.errors import (
    ConfigError,
    LossScaleError,
    TrafficContractError,
    UnsupportedError,
    UsageError,
    ZeroRuntimeError,
)
from zero_runtime.groups.process_grid import ProcessGrid, ProcessTopology
from zero_runtime.pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from zero_runtime.pipeline.pipeline_engine import PipelineEngine
from zero_runtime.startup.huge_pages import use_huge_pages
from zero_runtime.startup.initialization import initialize
from zero_runtime.startup.memory_status import memory_status, see_memory_usage
from zero_runtime.startup.script_arguments import add_config_arguments
from zero_runtime.training.data_loading import RepeatingLoader
from zero_runtime.training.engine import Engine
from zero_runtime.version import VERSION

__version__ = VERSION
DeepSpeedEngine = Engine

__all__ = [
    "ConfigError",
    "DeepSpeedEngine",
    "Engine",
    "LayerSpec",
    "LossScaleError",
    "PipelineEngine",
    "PipelineModule",
    "ProcessGrid",
    "ProcessTopology",
    "RepeatingLoader",
    "TiedLayerSpec",
    "TrafficContractError",
    "UnsupportedError",
    "UsageError",
    "ZeroRuntimeError",
    "__version__",
    "add_config_arguments",
    "as_deepspeed",
    "checkpointing",
    "comm",
    "init_distributed",
    "initialize",
    "memory_status",
    "see_memory_usage",
    "zero",
]

use_huge_pages()  # must run before the program constructs its model
