"""Learning-rate schedules: those of DeepSpeed, and those of torch.optim.lr_scheduler by name."""

from __future__ import annotations

from zero_runtime.schedules.one_cycle import OneCycle
from zero_runtime.schedules.range_test import LRRangeTest
from zero_runtime.schedules.schedule_choice import advance, schedule
from zero_runtime.schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR", "advance", "schedule"]
