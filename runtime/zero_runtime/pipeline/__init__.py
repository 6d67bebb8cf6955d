"""Pipeline parallelism: a sequence of layers is partitioned into stages, which process micro-batches in turn."""

from __future__ import annotations

from zero_runtime.pipeline.model.layer_specs import LayerSpec, TiedLayerSpec
from zero_runtime.pipeline.model.pipeline_module import PipelineModule

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
