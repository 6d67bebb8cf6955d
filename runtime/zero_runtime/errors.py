"""The exceptions of zero_runtime.

::

    ZeroRuntimeError
    ├── ConfigError          also a ValueError: a configuration, or an argument of initialize, that cannot be used
    │   └── UnsupportedError also a NotImplementedError: exists in DeepSpeed, but not in this version
    ├── UsageError           also a RuntimeError: methods of the engine called in a wrong order
    ├── TrafficContractError also a RuntimeError: ranks issue different messages (traffic_contract)
    ├── LossScaleError       also a RuntimeError: gradients overflow at the smallest loss scale
    ├── CheckpointError      also a RuntimeError: a checkpoint that cannot be written or loaded
    ├── MissingNameError     also a ModuleNotFoundError: a name of DeepSpeed's that this version lacks
    ├── MissingAttributeError also an AttributeError: an attribute of DeepSpeed's that this version lacks
    └── OffloadError         also a RuntimeError: files of offloaded tensors that cannot be written or read

A message states what happened, with values, what was expected, and what to do. ConfigError, UsageError and
CheckpointError are also AssertionErrors, because DeepSpeed uses assertions for most of these errors and scripts
catch AssertionError.
"""

from __future__ import annotations


class ZeroRuntimeError(Exception):
    """The base class; messages are written for the person who runs the training."""


class ConfigError(ZeroRuntimeError, ValueError, AssertionError):
    """The configuration, or an argument of ``initialize``, cannot be used as it is."""


class UnsupportedError(ConfigError, NotImplementedError):
    """The configuration requests a feature that exists in DeepSpeed but not in this version."""


class UsageError(ZeroRuntimeError, RuntimeError, AssertionError):
    """A method was called in a state that does not allow the call."""


class TrafficContractError(ZeroRuntimeError, RuntimeError):
    """Ranks issue different messages (``traffic_contract``).

    All ranks raise the same error, and the training cannot continue.
    """


class LossScaleError(ZeroRuntimeError, RuntimeError):
    """Gradients overflow at the smallest loss scale that the configuration allows."""


class CheckpointError(ZeroRuntimeError, RuntimeError, AssertionError):
    """A checkpoint cannot be written or loaded."""


class OffloadError(ZeroRuntimeError, RuntimeError):
    """An offloaded tensor cannot be written to its file, or is read back with other values."""


class MissingNameError(ZeroRuntimeError, ModuleNotFoundError):
    """A module or name of DeepSpeed's was imported that this runtime does not provide."""


class MissingAttributeError(ZeroRuntimeError, AttributeError):
    """An attribute of DeepSpeed's was looked up that this runtime does not provide.

    With this error, ``hasattr`` is false and ``getattr`` returns its default.
    """
