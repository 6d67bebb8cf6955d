"""Hooks with which a program or runtime reports its steps, phases, tags, buckets and metrics to the recorder.

Standard library only. Without a recording each hook costs one flag test, so any runtime can call the hooks
on its hot paths. The hooks do not report *what* was sent: the recorder observes every collective itself, below
the framework. The hooks only report *why* a collective was issued: the step and phase, the bucket, and the
intended operation.

The position (step, micro-batch, phase) is process-wide, because autograd runs hooks on its own threads, which
inherit neither context variables nor thread-locals. A tag belongs to one thread and applies to exactly the
collectives that the thread issues inside the tag's block.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Protocol

__all__ = [
    "Listener",
    "StepNumbers",
    "attach",
    "bucket",
    "current_tag",
    "describe_bucket",
    "describe_config",
    "describe_expert_layers",
    "describe_parameters",
    "detach",
    "end_step",
    "expert_load",
    "has_stepped",
    "metric",
    "micro_step",
    "phase",
    "position",
    "recording",
    "step",
    "tag",
]


class Listener(Protocol):
    """The interface that the recorder implements. Methods must never raise and never block."""

    def on_step(self, step: int, micro_step: int) -> None:
        """Handle the begin of a new step (``micro_step`` 0) or of a further micro-batch of the step."""

    def on_step_end(self) -> None:
        """Handle the end of the step: the last optimizer of the step has stepped, or skipped the step."""

    def on_micro_step(self, micro_step: int) -> None:
        """Assign the next collectives to micro-batch ``micro_step`` of the current step; any order is allowed."""

    def on_phase(self, name: str) -> None:
        """Handle a change to phase ``name``."""

    def on_row(self, table: str, row: Mapping[str, Any]) -> None:
        """Handle one row of a side table: ``metrics``, ``parameters``, ``expert_layers`` or ``config``."""

    def on_expert_load(self, layer: str, counts: Any, capacity: int, tokens: int) -> None:
        """Handle the expert choices of one forward pass of ``layer``."""

    def on_flush(self, content: bucket) -> None:
        """Handle the flush of a gradient bucket."""


class Position:
    """The position of the training, which is process-wide. The recorder reads it for every collective."""

    __slots__ = ("micro_step", "phase", "step")

    def __init__(self) -> None:
        self.step = -1
        self.micro_step = 0
        self.phase = "init"


class _ThreadState:
    """The open tags of one thread, and the recorder's cache for that thread."""

    __slots__ = ("__weakref__", "current", "outer", "recorder_number")

    def __init__(self) -> None:
        self.current: tag | None = None
        self.outer: list[tag | None] = []
        self.recorder_number = 0  # the number of the thread's name in the current recording


class _ThreadLocal(threading.local):
    def __init__(self) -> None:
        self.state = _ThreadState()


position: Final = Position()
_thread: Final = _ThreadLocal()
_listener: Listener | None = None
_has_stepped = False  # whether a step has begun since the listener was set


def recording() -> bool:
    """Return whether this process is being recorded. Use this to guard work that costs more than a hook call."""
    return _listener is not None


def has_stepped() -> bool:
    """Return whether a step has begun since this recording started."""
    return _has_stepped


def attach(out: str | None = None, **options: Any) -> None:
    """Start recording this process, into run directory ``out``.

    ``commprof run`` does this automatically. Without ``out``, ranks started by one launcher share
    ``traces/<script>-<time>/``. The options are the fields of
    ``commprof.recorder.process.recorder_options.Options``. A second call does nothing. This function never raises
    into the program: an error is printed once on stderr.
    """
    # The module is imported by name, because the hooks are the lowest layer and must not depend on the recorder.
    from importlib import import_module

    import_module("commprof.recorder.session").attach(out, **options)


def detach() -> None:
    """Stop recording this process and close its files. Does nothing when nothing is recorded."""
    if _listener is not None:
        from importlib import import_module

        import_module("commprof.recorder.session").detach()


def listen(listener: Listener | None) -> None:
    """Make ``listener`` receive all hook calls; ``None`` removes the listener. For the recorder and tests."""
    global _has_stepped, _listener
    _listener = listener
    _has_stepped = False


class tag:  # noqa: N801 - reads as a statement: ``with tag("gradient_reduce", bucket=3):``
    """Tag the collectives that this thread issues inside this block.

    A tag may be reused and entered many times. This is cheaper than creating a tag for each call.

    Args:
        purpose: One of ``commprof.schema.PURPOSES``; any other value is recorded as ``other``.
        bucket: The number of the gradient bucket within its step (0, 1, ...).
        owner: The global rank that keeps the result (the destination), if only one rank keeps the result.
        parameters: The names of the parameters in the buffer, in the order in which the buffer contains them.
        intended_op: The intended collective, if a different collective is issued instead
            (``reduce_scatter`` built from an all_to_all and a local sum).
        bucket_bytes: The size of the complete bucket in bytes; the collective may carry only a part of the bucket.
        module: The qualified name of the module for which the collective is issued.
        padding_bytes: The bytes of the payload (see ``payload_bytes`` in docs/schema.md) that are padding and carry
            no data.
    """

    __slots__ = (
        "bucket",
        "bucket_bytes",
        "intended_op",
        "interned",
        "module",
        "owner",
        "padding_bytes",
        "parameters",
        "purpose",
    )

    def __init__(
        self,
        purpose: str,
        bucket: int | None = None,
        owner: int | None = None,
        parameters: tuple[str, ...] = (),
        intended_op: str | None = None,
        bucket_bytes: int | None = None,
        module: str | None = None,
        padding_bytes: int | None = None,
    ) -> None:
        self.purpose = purpose
        self.bucket = bucket
        self.owner = owner
        self.parameters = parameters
        self.intended_op = intended_op
        self.bucket_bytes = bucket_bytes
        self.module = module
        self.padding_bytes = padding_bytes
        self.interned: tuple[object, int] | None = None  # the recorder's cache: (session, id)

    def __enter__(self) -> tag:
        state = _thread.state
        state.outer.append(state.current)
        state.current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        state = _thread.state
        state.current = state.outer.pop()


def current_tag() -> tag | None:
    """Return the innermost open tag of this thread, or None."""
    return _thread.state.current


def step(n: int | None = None, micro_step: int = 0) -> None:
    """Begin step ``n`` (default: the next step) at its micro-batch ``micro_step``.

    The step is -1 (initialization) before the first call. ``step(-1)`` sets the step to -1 again, to prepare another
    training.
    """
    global _has_stepped
    position.step = position.step + 1 if n is None else n
    position.micro_step = micro_step
    if _listener is not None:
        _has_stepped = position.step >= 0
        _listener.on_step(position.step, micro_step)


class StepNumbers:
    """Numbers the steps of one engine.

    Each engine counts its steps from 0. If an engine is constructed after recorded steps of other engines, its steps
    could be mistaken for the earlier steps. The new engine therefore continues the numbering, unless its own count is
    already higher, for example after ``load_checkpoint``. Engines that are constructed before the first step share
    the steps, and therefore also the numbers.

    Steps that an engine repeats after it has loaded an earlier checkpoint also get new numbers.
    """

    def __init__(self) -> None:
        self._after = position.step if has_stepped() else -1
        self._offset: int | None = None
        self._last = -1  # the latest step in the engine's own count

    def of(self, global_step: int) -> int:
        """Return the recorded number of step ``global_step`` of the engine."""
        if self._offset is None:
            self._offset = max(0, self._after + 1 - global_step)
        elif global_step < self._last:
            self._offset = position.step + 1 - global_step
        self._last = global_step
        return global_step + self._offset


def end_step() -> None:
    """End the step, after its last optimizer step or without an optimizer step (an overflow).

    Later collectives belong to the next step. This hook is for runtimes. If it is not called, a step that
    :func:`step` began lasts until the next call of :func:`step`.
    """
    if _listener is not None:
        _listener.on_step_end()


def micro_step(number: int) -> None:
    """Set the micro-batch of the next collectives, for a pipeline that processes micro-batches in any order.

    Unlike :func:`step`, this hook does not begin a step or a micro-batch.
    """
    position.micro_step = number
    if _listener is not None:
        _listener.on_micro_step(number)


def phase(name: str) -> None:
    """Begin phase ``name``: init, forward, backward, optimizer, evaluation, checkpoint or other."""
    position.phase = name
    if _listener is not None:
        _listener.on_phase(name)


def metric(name: str, value: float) -> None:
    """Record a value of the current step, for example the loss.

    ``value`` must be a Python number: the profiler never calls ``.item()`` on a tensor, because that call would
    synchronize the device. Any other value is counted as refused and is not recorded.
    """
    if _listener is not None:
        _listener.on_row("metrics", {"name": name, "value": value})


def describe_parameters(rows: Iterable[Mapping[str, Any]]) -> None:
    """Publish the model's parameters, in the order of the optimizer's groups.

    Each row contains ``name``, ``shape`` (text, ``64x32``), ``dtype``, ``numel``, ``param_group``, ``requires_grad``,
    ``module``, and ``forward_index`` (position in ``model.named_parameters()``). A row may also contain ``cut``,
    ``whole_shape``, ``stages``, ``owner_types`` and ``ep_size``, which have the same meaning as in the table
    ``parameters``. The name of an expert's parameter contains the number of the expert among all experts of its layer.
    """
    if _listener is not None:
        for row in rows:
            _listener.on_row("parameters", row)


def describe_expert_layers(rows: Iterable[Mapping[str, Any]]) -> None:
    """Publish the expert layers of an engine. Call this hook once, when the engine has been constructed.

    Each row contains:

    - ``layer``: the qualified name of the module.
    - ``num_experts``: the number of experts on all ranks together.
    - ``ep_size``: the number of ranks that share the experts.
    - ``k``: the number of experts that each token is sent to.
    - ``capacity_factor``, ``eval_capacity_factor``, ``min_capacity``, ``drop_tokens``.
    - ``hidden``: the number of elements of a token.
    - ``expert_ranks``: the global ranks of this rank's expert-parallel group in group order (text, ``0,1``).
    """
    if _listener is not None:
        for row in rows:
            _listener.on_row("expert_layers", row)


def expert_load(layer: str, counts: Any, capacity: int, tokens: int) -> None:
    """Publish how many tokens of this rank chose each expert of a layer. Call it once per forward pass of the layer.

    Args:
        layer: The qualified name of the module.
        counts: An integer tensor of shape (num_experts,) with the number of choices for each expert, before tokens
            are dropped. The tensor may be on a device: the recorder copies it without waiting for the device, and
            keeps no reference.
        capacity: The number of tokens that each expert accepts from this rank. It must be a Python integer, because
            reading a Python integer costs no synchronization.
        tokens: The number of tokens of this rank that the gate processed.
    """
    if _listener is not None:
        _listener.on_expert_load(layer, counts, capacity, tokens)


class bucket:  # noqa: N801 - as tag
    """A gradient bucket that recurs in every step. It is described once, and each flush is reported.

    Args:
        row: The description: ``bucket`` (number within the step), ``numel``, ``bytes``, ``capacity`` (elements),
            ``dtype``, ``owners`` (text), ``parameters`` (text), ``flush_reason``.
    """

    __slots__ = ("interned", "row")

    def __init__(self, **row: Any) -> None:
        self.row: Mapping[str, Any] = row
        self.interned: tuple[object, int] | None = None  # the recorder's cache: (session, id)

    def flushed(self) -> None:
        """Publish that the bucket is flushed now, in the current step."""
        if _listener is not None:
            _listener.on_flush(self)


def describe_bucket(**row: Any) -> None:
    """Publish a gradient bucket that is flushed now. For a recurring bucket, a reused :class:`bucket` is cheaper."""
    if _listener is not None:
        _listener.on_flush(bucket(**row))


def describe_config(
    config: Mapping[str, Any],
    engine: str,
    *,
    numel: int | None = None,
    has_optimizer: bool = True,
    construction: Mapping[str, Any] | None = None,
) -> None:
    """Publish the effective configuration of an engine, and the engine's name and version.

    Args:
        config: The effective configuration.
        engine: The name and version of the engine.
        numel: The number of elements of all parameters of the model.
        has_optimizer: False for an engine that only evaluates and publishes no parameters.
        construction: At stage 3, how the parameters were constructed. ``sharded`` lists pairs of a size in bytes and
            a count, for the parameters that ``zero.Init`` sharded since the previous engine was constructed. ``whole``
            lists such pairs for the parameters of this model that ``zero.Init`` did not shard. ``sharded_of_model``
            is the number of parameters of this model that ``zero.Init`` sharded.
    """
    if _listener is not None:
        row = {
            "config": dict(config),
            "engine": engine,
            "numel": numel,
            "has_optimizer": has_optimizer,
            "construction": construction,
        }
        _listener.on_row("config", row)
