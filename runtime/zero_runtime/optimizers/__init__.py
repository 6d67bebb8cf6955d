"""Optimizers that torch does not have, as torch optimizers: they work on whole parameters and on flat pieces of them."""

from __future__ import annotations

from zero_runtime.optimizers.adam import UncorrectedAdam
from zero_runtime.optimizers.lamb import Lamb
from zero_runtime.optimizers.lion import Lion
from zero_runtime.optimizers.muon import Muon
from zero_runtime.optimizers.one_bit import OneBitAdam, ZeroOneAdam
from zero_runtime.optimizers.one_bit_lamb import OneBitLamb

__all__ = ["Lamb", "Lion", "Muon", "OneBitAdam", "OneBitLamb", "UncorrectedAdam", "ZeroOneAdam"]
