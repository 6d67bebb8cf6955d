"""Infers phases and steps of training loops that do not report them, from torch's global hooks.

Nothing is attached to the program's modules, tensors or optimizers. No module within a model is slowed: torch's hook for
all modules is removed while the outermost of them runs.
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
# A program that names one of these names them all; it may name a checkpoint and leave the rest to us.
_NAMED_BY_RUNTIMES: Final = frozenset({Phase.INIT, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER})


class _Stepping(NamedTuple):
    """A call of an optimizer's step that has begun."""

    optimizer: int  # its id
    frame: int  # the id of the call's frame, which must not be held
    thread: int


class TrainingLoop:
    """Reports phases and steps of a program, unless the program reports them itself.

    Args:
        journal: gets notes on what could not be watched.
        steps: writes the steps.
        models: gets the trained modules and the optimizers.
    """

    def __init__(self, journal: Journal, steps: Steps, models: Models) -> None:
        self._journal = journal
        self._steps = steps
        self._models = models
        self._progress = Progress(hooks.position.step)
        self._patches = Patches()
        self._watch = ImportWatch({_COMPILED}, self._on_compiler, self._give_up)
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # An id may be that of an optimizer that is gone, on one rank and not on the next: their steps would part.
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._numbered = 0
        self._handles: list[Any] = []
        self._every_module: Any = None  # the hook of all modules, which is in place while none of them runs
        self._armed = False
        self._outermost: Any = None  # the hook of the one that runs
        self._stepping: list[_Stepping] = []  # the outermost first
        self._before_optimizer = ""  # the phase before the outermost of them
        self._in_backward = False
        self._end_is_due = False  # the step ends when the backward pass does, in which the optimizers stepped
        self._steps_taken = 0  # by optimizers
        self._thread = threading.main_thread().ident  # which trains
        self._trained: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        # Modules that ran without being trained between two steps: now, and the time before.
        self._aside: set[int] = set()
        self._aside_before: set[int] = set()
        self._one_batch = 0  # inside what runs many passes for one batch
        self._phases_named = False
        self._speaking = False

    def install(self) -> None:
        """Begin to watch."""
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
        """Watch no more."""
        self._watch.stop()
        self._patches.remove()
        self._disarm()
        for handle in (*self._handles, self._outermost):
            if handle is not None:
                handle.remove()
        self._handles.clear()
        self._outermost = None

    def finish(self) -> None:
        """Recording ends, perhaps within the first step: publish what was trained."""
        self._models.publish(self._optimizers)

    def close(self) -> None:
        """Watch no more, and take back what was said: a later recording of this process begins anew."""
        self.remove()
        if not self._steps.explicit():
            hooks.position.step, hooks.position.micro_step = -1, 0
        if not self._phases_named:
            hooks.position.phase = str(Phase.INIT)

    def heard(self, phase: str) -> None:
        """Somebody has named a phase: leave phases to the program if it was the program."""
        if not self._speaking and phase in _NAMED_BY_RUNTIMES:
            self._phases_named = True

    @contextmanager
    def one_batch(self, trains: bool) -> Iterator[None]:
        """Around what runs the passes of many micro-batches in an order of its own: they are one."""
        if trains and torch.is_grad_enabled():
            self._guarded(self._begin_pass)
        self._one_batch += 1
        try:
            yield
        finally:
            self._one_batch -= 1

    def enter(self, phase: str) -> str:
        """Say ``phase``, unless the program names its phases, and return the one that it takes the place of."""
        before = hooks.position.phase
        if not self._phases_named and not (before == Phase.EVALUATION and phase == Phase.FORWARD):
            self._say(phase)
        return before

    def leave(self, before: str) -> None:
        """Say again what was the phase before; once training has begun, no more that it is being prepared."""
        if not self._phases_named:
            self._say(Phase.OTHER if before == Phase.INIT and self._progress.step >= 0 else before)

    def is_beside_training(self) -> bool:
        """Whether another thread than this one trains: the phase, which is that of the process, is the other's to say."""
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
        """Whether nothing is left for us to say."""
        return self._phases_named and self._steps.explicit()

    def _guarded(self, act: Callable[..., Any], *args: Any) -> Any:
        """Run the recorder's own code; its exceptions never reach the training."""
        try:
            return act(*args)
        except Exception as error:
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        """Watching does not work with this torch: leave it, and say so in the trace."""
        self.remove()
        self._journal.note(f"steps and phases are no longer detected: {type(error).__name__}: {error}")

    def _begin_pass(self) -> None:
        if self._progress.begin_pass():
            self._announce()

    def _end(self) -> None:
        """The optimizers have stepped: the step has ended, or does so with the backward pass that they step in."""
        self._end_is_due = self._in_backward
        if not self._in_backward and not self._steps.explicit():
            self._steps.end()

    def _announce(self) -> None:
        progress = self._progress
        if progress.micro_step == 0:
            self._aside_before, self._aside = self._aside, set()
        if not self._steps.explicit():
            self._steps.begin_automatic(progress.step, progress.micro_step)

    # Forward passes: of the outermost module.

    def _arm(self) -> None:
        """Put the hook in place, always under one key: code that torch.compile made depends on it."""
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
        if isinstance(module, torch.jit.ScriptModule):  # it takes no hook for its end
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
        """The phase before; None where nothing is left for us to say."""
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
        """Whether a pass that trains nothing is an evaluation. One within a step is part of it, as a teacher's is.

        Between two steps that of a trained module in evaluation mode always is. Another is one unless the same module ran
        before the last step too: then it is the first thing that each step does.
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
        """A module that torch.compile returned warns of hooks for all modules: there must be none when it is called."""
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

        # Versions without a __call__ of its own do not warn.
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
        self._disarm()  # a module that is called now computes its activations again
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
        """An overflow keeps the optimizer from stepping, but ends the step."""

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
        # A step that raised has told nobody that it ended.
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
            if len(mine) > 1:  # its class called the step of a base class, which torch watches too
                return
        self._count_step(optimizer)

    def _count_step(self, optimizer: Optimizer) -> None:
        if hooks.position.phase == Phase.INIT:
            return
        self._optimizers.add(optimizer)
        # Who there is matters in the first step only.
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
        """What stands for ``optimizer``, and for no other before or after it."""
        number = self._numbers.get(optimizer)
        if number is None:
            number = self._numbers[optimizer] = self._numbered
            self._numbered += 1
        return number


def _ids(frame: FrameType | None) -> set[int]:
    """The ids of ``frame`` and of its callers."""
    frame_ids = set()
    while frame is not None:
        frame_ids.add(id(frame))
        frame = frame.f_back
    return frame_ids
