"""Every error that zero_runtime itself reports.

::

    ZeroRuntimeError
    ├── ConfigError          also a ValueError: a configuration, or an argument of initialize, that cannot be used
    │   └── UnsupportedError also a NotImplementedError: known and meaningful, but not in this version
    ├── UsageError           also a RuntimeError: methods of the engine called in an order that means nothing
    ├── LossScaleError       also a RuntimeError: gradients overflow at the smallest loss scale
    ├── CheckpointError      also a RuntimeError: a checkpoint that cannot be written or loaded
    ├── MissingNameError     also a ModuleNotFoundError: a name of DeepSpeed's that is not given here
    ├── MissingAttributeError also an AttributeError: the same where it is looked up
    └── OffloadError         also a RuntimeError: files of offloaded tensors that cannot be written or read

A message says what happened, with values; what was expected; and what to do. ConfigError, UsageError and CheckpointError are
also AssertionErrors, since DeepSpeed asserts most of what they say, and scripts catch that.
"""

from __future__ import annotations


class ZeroRuntimeError(Exception):
    """An error whose message is written for the person who runs the training."""


class ConfigError(ZeroRuntimeError, ValueError, AssertionError):
    """The configuration, or an argument of ``initialize``, cannot be used as it is."""


class UnsupportedError(ConfigError, NotImplementedError):
    """The configuration asks for something that exists in DeepSpeed but not in this version."""


class UsageError(ZeroRuntimeError, RuntimeError, AssertionError):
    """A method was called where it means nothing."""


class LossScaleError(ZeroRuntimeError, RuntimeError):
    """Gradients overflow at the smallest loss scale that the configuration allows."""


class CheckpointError(ZeroRuntimeError, RuntimeError, AssertionError):
    """A checkpoint cannot be written, or is not what can be loaded."""


class OffloadError(ZeroRuntimeError, RuntimeError):
    """A tensor that is kept in a file cannot be written there, or does not come back as it was written."""


class MissingNameError(ZeroRuntimeError, ModuleNotFoundError):
    """A module or name of DeepSpeed's is imported, and this runtime does not give it."""


class MissingAttributeError(ZeroRuntimeError, AttributeError):
    """The same where the name is looked up as an attribute, so that ``hasattr`` is false and ``getattr`` has its default."""
