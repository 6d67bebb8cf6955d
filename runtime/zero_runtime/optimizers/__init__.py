"""Optimizers that torch does not have. Each is a torch optimizer, and updates whole parameters or flat shards."""

from __future__ import annotations

from zero_runtime.optimizers.adam import UncorrectedAdam
from zero_runtime.optimizers.lamb import Lamb
from zero_runtime.optimizers.lion import Lion
from zero_runtime.optimizers.muon import Muon

__all__ = ["Lamb", "Lion", "Muon", "UncorrectedAdam"]
