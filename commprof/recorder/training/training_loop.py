"""Infers phases and steps from torch's global hooks, for training loops that do not report them.

Nothing stays attached to the program's modules, tensors or optimizers. The modules within a model are not slowed down,
because torch's hook for all modules is removed while the outermost module runs.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from commprof import hooks
from commprof.recorder.adapters.imports import ImportWatch
from commprof.recorder.adapters.patching import Patches
from commprof.recorder.dispatcher.compiler import keep_from_compiler
from commprof.recorder.process.journal import Journal
from commprof.recorder.training.progress import Progress
from commprof.recorder.training.published_models import Models, trains
from commprof.recorder.training.step_writer import Steps
from commprof.schema import Phase

_COMPILED: Final = "torch._dynamo.eval_frame"
# A program that reports one of these phases reports all of them. A program may also report only its checkpoints and
# leave the other phases to this module.
_NAMED_BY_RUNTIMES: Final = frozenset({Phase.INIT, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER})


class _Stepping(NamedTuple):
    """A call of an optimizer's step that has begun."""

    optimizer: int  # the id of the optimizer
    frame: int  # the id of the call's frame; a reference would keep the frame alive
    thread: int


class TrainingLoop:
    """Reports phases and steps of a program, unless the program reports them itself.

    Args:
        journal: The journal. It receives a note if detection fails.
        steps: The writer of the steps.
        models: The models to publish. They receive the trained modules and the optimizers.
    """

    def __init__(self, journal: Journal, steps: Steps, models: Models) -> None:
        self._journal = journal
        self._steps = steps
        self._models = models
        self._progress = Progress(hooks.position.step)
        self._patches = Patches()
        self._watch = ImportWatch({_COMPILED}, self._on_compiler, self._give_up)
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # The optimizers are numbered, because a new optimizer may get the id of a deleted one on some ranks only. The
        # step numbers of these ranks would then differ.
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._numbered = 0
        self._handles: list[Any] = []
        self._every_module: Any = None  # the hook for all modules, which is installed while no module runs
        self._armed = False
        self._outermost: Any = None  # the hook for the end of the outermost module that runs
        self._stepping: list[_Stepping] = []  # the optimizer steps in progress, the outermost first
        self._before_optimizer = ""  # the phase before the outermost optimizer step
        self._in_backward = False
        # The optimizers have stepped within a backward pass, so the step ends at the end of this pass.
        self._end_is_due = False
        self._steps_taken = 0  # the number of optimizer steps
        self._thread = threading.main_thread().ident  # the thread that trains
        self._trained: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        # The ids of modules that ran between two steps without being trained: after the last step, and one step before.
        self._aside: set[int] = set()
        self._aside_before: set[int] = set()
        self._one_batch = 0  # the nesting depth of ``one_batch``
        self._phases_named = False
        self._speaking = False

    def install(self) -> None:
        """Install the hooks and wrappers."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._patches.wrap(Optimizer, "__init__", self._wrap_optimizer)
        self._patches.wrap(torch.autograd, "backward", self._wrap_backward)
        self._patches.wrap(torch.amp.grad_scaler, "GradScaler.step", self._wrap_scaled_step)
        self._watch.start()
        self._arm()

    def remove(self) -> None:
        """Remove the hooks and wrappers."""
        self._watch.stop()
        self._patches.remove()
        self._disarm()
        for handle in (*self._handles, self._outermost):
            if handle is not None:
                handle.remove()
        self._handles.clear()
        self._outermost = None

    def finish(self) -> None:
        """Publish the trained models when recording ends, which may be within the first step."""
        self._models.publish(self._optimizers)

    def close(self) -> None:
        """Remove the hooks and reset the position that was set, so that a later recording starts from the beginning."""
        self.remove()
        if not self._steps.explicit():
            hooks.position.step, hooks.position.micro_step = -1, 0
        if not self._phases_named:
            hooks.position.phase = str(Phase.INIT)

    def heard(self, phase: str) -> None:
        """Handle a reported phase: if the program reported it, leave all phases to the program."""
        if not self._speaking and phase in _NAMED_BY_RUNTIMES:
            self._phases_named = True

    @contextmanager
    def one_batch(self, trains: bool) -> Iterator[None]:
        """Treat all passes in the block as one micro-batch, for code that runs micro-batches in its own order.

        Args:
            trains: Whether the passes are training passes, so that the block may begin a step.
        """
        if trains and torch.is_grad_enabled():
            self._guarded(self._begin_pass)
        self._one_batch += 1
        try:
            yield
        finally:
            self._one_batch -= 1

    def enter(self, phase: str) -> str:
        """Set phase ``phase``, unless the program reports its phases, and return the previous phase."""
        before = hooks.position.phase
        if not self._phases_named and not (before == Phase.EVALUATION and phase == Phase.FORWARD):
            self._say(phase)
        return before

    def leave(self, before: str) -> None:
        """Restore phase ``before``. After training has begun, set ``other`` instead of ``init``."""
        if not self._phases_named:
            self._say(Phase.OTHER if before == Phase.INIT and self._progress.step >= 0 else before)

    def is_beside_training(self) -> bool:
        """Return whether a different thread trains. Only that thread may then set the phase, which is process-wide."""
        return self._thread != threading.get_ident()

    def _say(self, phase: str) -> None:
        self._speaking = True
        try:
            hooks.phase(str(phase))
        except Exception as error:
            self._journal.fault(error)
        finally:
            self._speaking = False

    def _named_by_program(self) -> bool:
        """Return whether the program reports both its phases and its steps, so that nothing needs to be inferred."""
        return self._phases_named and self._steps.explicit()

    def _guarded(self, act: Callable[..., Any], *args: Any) -> Any:
        """Call ``act``, which is code of the recorder. Its exceptions never reach the training."""
        try:
            return act(*args)
        except Exception as error:
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        """Stop the detection, because it does not work with this version of torch, and write a note to the trace."""
        self.remove()
        self._journal.note(f"steps and phases are no longer detected: {type(error).__name__}: {error}")

    def _begin_pass(self) -> None:
        if self._progress.begin_pass():
            self._announce()

    def _end(self) -> None:
        """End the step after the optimizers have stepped, or at the end of the backward pass in which they stepped."""
        self._end_is_due = self._in_backward
        if not self._in_backward and not self._steps.explicit():
            self._steps.end()

    def _announce(self) -> None:
        progress = self._progress
        if progress.micro_step == 0:
            self._aside_before, self._aside = self._aside, set()
        if not self._steps.explicit():
            self._steps.begin_automatic(progress.step, progress.micro_step)

    # Forward passes of the outermost module.

    def _arm(self) -> None:
        """Install the hook, always under the same key, because code that torch.compile generated depends on the key."""
        if self._every_module is None:
            self._every_module = register_module_forward_pre_hook(self._on_forward)
        elif not self._armed:
            self._every_module.hooks_dict_ref()[self._every_module.id] = self._on_forward
        self._armed = True

    def _disarm(self) -> None:
        self._armed = False
        if self._every_module is not None:
            self._every_module.remove()

    def _on_forward(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # the hook itself is being traced
            return
        if isinstance(module, torch.jit.ScriptModule):  # it accepts no hook for the end of its call
            return
        self._guarded(self._follow, module)

    def _follow(self, module: torch.nn.Module) -> None:
        before = self._begin_forward(module)
        if before is not None:
            self._outermost = module.register_forward_hook(self._until_end(before), always_call=True)

    def _until_end(self, before: str) -> Callable[..., None]:
        def end(module: torch.nn.Module, args: Any, result: Any) -> None:
            handle, self._outermost = self._outermost, None
            if handle is not None:
                handle.remove()
                self._guarded(self._end_forward, before)

        return end

    def _begin_forward(self, module: torch.nn.Module) -> str | None:
        """Begin the forward pass of the outermost module.

        Returns:
            The previous phase; None if the program reports its phases and steps, so that detection has ended.
        """
        self._disarm()
        if self._named_by_program():
            self.remove()
            return None
        phase = Phase.FORWARD
        if torch.is_grad_enabled() and trains(module):
            self._models.saw(module)
            self._thread = threading.get_ident()
            if module not in self._trained:
                self._trained.update(module.modules())
            begins = self._progress.begin_pass if self._one_batch else self._progress.begin_forward
            if begins():
                self._announce()
        elif self._is_evaluation(module):
            phase = Phase.EVALUATION
        return self.enter(phase)

    def _is_evaluation(self, module: torch.nn.Module) -> bool:
        """Return whether a pass that trains nothing is an evaluation.

        A pass within a step belongs to the step, for example the pass of a teacher model. Between two steps, a pass of
        a trained module in evaluation mode is always an evaluation. A pass of any other module is an evaluation unless
        the module also ran before the previous step. In that case the pass is the first part of each step.
        """
        if self._stepping or not (self._progress.is_between_steps or self._progress.step < 0):
            return False
        self._aside.add(id(module))
        if self._progress.step < 0:
            return False
        return (module in self._trained and not trains(module)) or id(module) not in self._aside_before

    def _end_forward(self, before: str) -> None:
        self.leave(before)
        if self._handles and not self._in_backward:
            self._arm()

    def _on_compiler(self, module: ModuleType) -> None:
        """Wrap the call of modules that torch.compile returns, so that no hook for all modules is installed then.

        Such a module prints a warning if a hook for all modules is installed when the module is called.
        """
        keep_from_compiler(module)

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(compiled: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
                if not self._armed:
                    return original(compiled, *args, **kwargs)
                before = self._guarded(self._begin_forward, compiled)
                try:
                    return original(compiled, *args, **kwargs)
                finally:
                    if before is not None:
                        self._guarded(self._end_forward, before)

            return call

        # Versions of torch in which the class has no __call__ of its own do not warn.
        self._patches.wrap(module, "OptimizedModule.__call__", wrap)

    # Backward passes.

    def _wrap_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._in_backward or self._named_by_program():
                return original(*args, **kwargs)
            before = self._guarded(self._begin_backward)
            try:
                return original(*args, **kwargs)
            finally:
                self._in_backward = False
                if before is not None:
                    self._guarded(self._end_backward, before)

        return backward

    def _begin_backward(self) -> str:
        self._in_backward = True
        self._disarm()  # a module that is called within a backward pass recomputes its activations
        self._begin_pass()
        return self.enter(Phase.BACKWARD)

    def _end_backward(self, before: str) -> None:
        self._progress.end_backward()
        self.leave(before)
        if self._end_is_due:
            self._end()
        if self._handles and self._outermost is None:
            self._arm()

    # Optimizers.

    def _wrap_optimizer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def construct(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._guarded(self._optimizers.add, optimizer)

        return construct

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._in_backward and not torch.compiler.is_compiling():
            self._guarded(self._begin_step, optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._steps_taken += 1
            self._guarded(self._end_step, optimizer)

    def _wrap_scaled_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``GradScaler.step``: after an overflow the optimizer does not step, but the training step ends."""

        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._steps_taken
            result = original(scaler, optimizer, *args, **kwargs)
            if self._steps_taken == before and isinstance(optimizer, Optimizer):
                self._guarded(self._leave_out_step, optimizer)
            return result

        return step

    def _leave_out_step(self, optimizer: Optimizer) -> None:
        before = self.enter(Phase.OPTIMIZER)
        self.leave(before)
        self._count_step(optimizer)

    def _begin_step(self, optimizer: Optimizer) -> None:
        call = sys._getframe()
        while call.f_code.co_filename == __file__ and call.f_back is not None:
            call = call.f_back
        thread, above = threading.get_ident(), _ids(call.f_back)
        # Remove the steps that raised an exception, because no hook reports their end.
        self._stepping = [each for each in self._stepping if each.thread != thread or each.frame in above]
        self._stepping.append(_Stepping(id(optimizer), id(call), thread))
        if len(self._stepping) == 1:
            self._before_optimizer = self.enter(Phase.OPTIMIZER)

    def _end_step(self, optimizer: Optimizer) -> None:
        mine = [number for number, each in enumerate(self._stepping) if each.optimizer == id(optimizer)]
        if mine:
            del self._stepping[mine[-1] :]
            if not self._stepping:
                self.leave(self._before_optimizer)
            # The class of the optimizer called the step of a base class, for which torch also calls the hooks.
            if len(mine) > 1:
                return
        self._count_step(optimizer)

    def _count_step(self, optimizer: Optimizer) -> None:
        if hooks.position.phase == Phase.INIT:
            return
        self._optimizers.add(optimizer)
        # The set of all optimizers is needed in the first step only.
        all_optimizers = (
            set() if self._models.published else {self._number(each) for each in self._optimizers}
        )
        if self._progress.end_optimizer(self._number(optimizer), all_optimizers):
            self._announce()
        if self._progress.is_between_steps:
            self._models.publish(self._optimizers)
            if not self._stepping:
                self._end()

    def _number(self, optimizer: Optimizer) -> int:
        """Return a number that identifies ``optimizer`` and is never used for a different optimizer."""
        number = self._numbers.get(optimizer)
        if number is None:
            number = self._numbers[optimizer] = self._numbered
            self._numbered += 1
        return number


def _ids(frame: FrameType | None) -> set[int]:
    """Return the ids of ``frame`` and of all its callers."""
    frame_ids = set()
    while frame is not None:
        frame_ids.add(id(frame))
        frame = frame.f_back
    return frame_ids
