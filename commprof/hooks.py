"""Hooks by which a program or runtime tells the recorder its steps, phases, tags, buckets and metrics.

Standard library only. Without a recording each hook costs one flag test, so any runtime can call them
on its hot paths. *What* was sent never comes from here: the recorder sees every collective itself, below
the framework. The hooks only tell *why*: the step and phase, the bucket of a collective, and the
operation that is intended.

The position (step, micro step, phase) is process-wide, because autograd runs hooks on threads of its
own that inherit neither context variables nor thread-locals. A tag belongs to one thread and covers exactly
the collectives issued inside it.
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
        """A new step (``micro_step`` 0) or micro step begins."""

    def on_step_end(self) -> None:
        """The step has ended: its last optimizer has stepped, or skipped the step."""

    def on_micro_step(self, micro_step: int) -> None:
        """The next collectives belong to another micro-batch of the same step, in any order."""

    def on_phase(self, name: str) -> None:
        """The phase changed."""

    def on_row(self, table: str, row: Mapping[str, Any]) -> None:
        """One row of a side table: ``metrics``, ``parameters``, ``expert_layers`` or ``config``."""

    def on_expert_load(self, layer: str, counts: Any, capacity: int, tokens: int) -> None:
        """A layer of experts has chosen the experts of its tokens."""

    def on_flush(self, content: bucket) -> None:
        """A gradient bucket was flushed."""


class Position:
    """The position of the training: process-wide, read by the recorder for every collective."""

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
        self.recorder_number = 0  # of the thread's name, while something records


class _ThreadLocal(threading.local):
    def __init__(self) -> None:
        self.state = _ThreadState()


position: Final = Position()
_thread: Final = _ThreadLocal()
_listener: Listener | None = None
_has_stepped = False  # since somebody listens


def recording() -> bool:
    """Whether this process is being recorded. Guard anything costlier than a hook call with this."""
    return _listener is not None


def has_stepped() -> bool:
    """Whether a step has begun since this recording started."""
    return _has_stepped


def attach(out: str | None = None, **options: Any) -> None:
    """Start recording this process, into run directory ``out``.

    ``commprof run`` does this automatically. Without ``out``, ranks started by one launcher share
    ``traces/<script>-<time>/``. Options are those of ``commprof.recorder.process.recorder_options.Options``. A second call
    does nothing. Never raises into the program: an error is printed once on stderr.
    """
    # Imported by name: the hooks are the lowest layer and must not depend on the recorder.
    from importlib import import_module

    import_module("commprof.recorder.session").attach(out, **options)


def detach() -> None:
    """Stop recording this process and close its files. Does nothing when nothing is recorded."""
    if _listener is not None:
        from importlib import import_module

        import_module("commprof.recorder.session").detach()


def listen(listener: Listener | None) -> None:
    """Make ``listener`` receive the hooks; ``None`` for no listener. For the recorder and tests."""
    global _has_stepped, _listener
    _listener = listener
    _has_stepped = False


class tag:  # noqa: N801 - reads as a statement: ``with tag("gradient_reduce", bucket=3):``
    """Tag the collectives that this thread issues inside this block.

    A tag may be reused and entered many times; that is cheaper than creating one for each call.

    Args:
        purpose: one of ``commprof.schema.PURPOSES``; anything else is recorded as ``other``.
        bucket: number of the gradient bucket within its step (0, 1, ...).
        owner: global rank that keeps the result (the destination), if there is one.
        parameters: names of the parameters in the buffer, in its order.
        intended_op: the intended collective, if another one is issued instead
            (``reduce_scatter`` built from an all_to_all and a local sum).
        bucket_bytes: bytes of the complete bucket; the collective may carry a part of it.
        module: qualified name of the module that it is issued for.
        padding_bytes: bytes of the payload (see ``payload_bytes`` in docs/schema.md) that are padding and carry no data.
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
    """The innermost tag of this thread."""
    return _thread.state.current


def step(n: int | None = None, micro_step: int = 0) -> None:
    """Step ``n`` begins (default: the next one), at micro-batch ``micro_step`` of it.

    The step is -1 (initialization) before the first call, and after ``step(-1)``, which prepares another training.
    """
    global _has_stepped
    position.step = position.step + 1 if n is None else n
    position.micro_step = micro_step
    if _listener is not None:
        _has_stepped = position.step >= 0
        _listener.on_step(position.step, micro_step)


class StepNumbers:
    """Numbers the steps of one engine.

    Each engine counts from 0. If an engine is constructed after others have taken recorded steps, its steps could be
    mistaken for theirs. So they continue the numbering, unless their own count is higher anyway, as after
    ``load_checkpoint``. Engines that are constructed before the first step share the numbers, as they share the steps.

    Steps that an engine repeats after it has loaded an earlier checkpoint get new numbers too.
    """

    def __init__(self) -> None:
        self._after = position.step if has_stepped() else -1
        self._offset: int | None = None
        self._last = -1  # step of the engine's own count

    def of(self, global_step: int) -> int:
        """The number of step ``global_step`` of the engine."""
        if self._offset is None:
            self._offset = max(0, self._after + 1 - global_step)
        elif global_step < self._last:
            self._offset = position.step + 1 - global_step
        self._last = global_step
        return global_step + self._offset


def end_step() -> None:
    """End the step, after its last optimizer step or without one (an overflow). What follows belongs to the next step.

    For runtimes. Without it, a step that :func:`step` began lasts until the next call of :func:`step`.
    """
    if _listener is not None:
        _listener.on_step_end()


def micro_step(number: int) -> None:
    """Set the micro-batch of the next collectives, for a pipeline that processes several in any order.

    Unlike :func:`step`, it does not begin anything.
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
    """Record a number of the current step, for example the loss.

    ``value`` must be a Python number: the profiler never calls ``.item()`` on a tensor, because that would
    synchronize the device. Anything else is counted and not recorded.
    """
    if _listener is not None:
        _listener.on_row("metrics", {"name": name, "value": value})


def describe_parameters(rows: Iterable[Mapping[str, Any]]) -> None:
    """Publish the model's parameters, in the order of the optimizer's groups.

    Each row: ``name``, ``shape`` (text, ``64x32``), ``dtype``, ``numel``, ``param_group``, ``requires_grad``,
    ``module``, ``forward_index`` (position in ``model.named_parameters()``); where they are of interest also ``cut``,
    ``whole_shape``, ``stages``, ``owner_types`` and ``ep_size``, as the table has them. The name of an expert's parameter
    has the number of the expert among all experts of its layer.
    """
    if _listener is not None:
        for row in rows:
            _listener.on_row("parameters", row)


def describe_expert_layers(rows: Iterable[Mapping[str, Any]]) -> None:
    """Publish the layers of experts of an engine, once it is made.

    Each row: ``layer`` (qualified name of the module), ``num_experts`` (of all ranks), ``ep_size`` (ranks that share them),
    ``k`` (experts that each token is sent to), ``capacity_factor``, ``eval_capacity_factor``, ``min_capacity``,
    ``drop_tokens``, ``hidden`` (elements of a token), ``expert_ranks`` (text, ``0,1``: global ranks of this rank's
    expert-parallel group, in its order).
    """
    if _listener is not None:
        for row in rows:
            _listener.on_row("expert_layers", row)


def expert_load(layer: str, counts: Any, capacity: int, tokens: int) -> None:
    """Publish how many tokens of this rank chose each expert of a layer. Call it once per forward of the layer.

    Args:
        layer: qualified name of the module.
        counts: integer tensor of shape (num_experts,): choices for each expert, before any are dropped. It may be on a
            device: the recorder copies it without waiting for the device, and keeps no reference.
        capacity: tokens that each expert takes from this rank; a Python integer, which costs no synchronization.
        tokens: tokens of this rank that the gate has seen.
    """
    if _listener is not None:
        _listener.on_expert_load(layer, counts, capacity, tokens)


class bucket:  # noqa: N801 - as tag
    """A gradient bucket that recurs in every step: described once, and reported each time it is flushed.

    Args:
        row: ``bucket`` (number within the step), ``numel``, ``bytes``, ``capacity`` (elements), ``dtype``, ``owners``
            (text), ``parameters`` (text), ``flush_reason``.
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
    """Publish a gradient bucket that is flushed now. For a recurring one, a reused :class:`bucket` is cheaper."""
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
        config: the configuration.
        engine: name and version.
        numel: elements of the model's parameters.
        has_optimizer: False for an engine that only evaluates and publishes no parameters.
        construction: at stage 3, how parameters were made. ``sharded``: pairs of bytes and a count, of the parameters that
            ``zero.Init`` has sharded since the last engine was made; ``whole``: of those of this model that it has not;
            ``sharded_of_model``: how many of this model it has.
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
