"""Installs, extends and removes the layers that record collectives.

=================  ==============================================================================================
process_group      methods of ProcessGroup, which torch.distributed, FSDP, DeepSpeed and zero_runtime call
backend            methods of Backend, for programs that call these methods directly
functional         operators of ``_c10d_functional``, for DTensor and compiled code
c10d               operators of c10d, for collectives issued by C++: three operators from the first use of DDP's
                   reducer on; all operators ("complete") if requested, or if a group counted more than was recorded
framework          operators of a framework that communicates without c10d
=================  ==============================================================================================

No method calls another method through Python, and a kernel of c10d does not record calls that a layer above it records.
Therefore no collective is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import Backend, ProcessGroup, Work

from commprof import hooks
from commprof.recorder.coverage.trial import newer_torch, silent_layers
from commprof.recorder.coverage.unseen_traffic import Beneath
from commprof.recorder.device.stream_waits import StreamWaits
from commprof.recorder.dispatcher.cuda_graphs import CapturedGraphs
from commprof.recorder.dispatcher.functional import FRAMEWORK, FUNCTIONAL, WAIT
from commprof.recorder.dispatcher.issuers import CppIssuers, reducer_is_alive
from commprof.recorder.dispatcher.kernels import KernelRecorder
from commprof.recorder.dispatcher.operators import C10D, ISSUED_IN_CPP, unknown_operators
from commprof.recorder.dispatcher.registration import is_operator
from commprof.recorder.process.journal import Journal
from commprof.recorder.process_group.backend_groups import BackendGroups
from commprof.recorder.process_group.groups import Group, Groups, live_groups
from commprof.recorder.process_group.methods import METHODS
from commprof.recorder.process_group.wrappers import Wrappers
from commprof.schema import LAYERS, Layer
from commprof.trace.rank_files.segments import count_of


class Interception:
    """The wrappers and kernels of one recording.

    Args:
        journal: The journal that receives the records.
        open_group: A function that is called at the first use of a process group, before its first record.
        complete: Whether to record all operators of c10d from the beginning, instead of methods and functional
            operators.
        is_trial: Whether this interception is only a trial of the layers.
    """

    def __init__(
        self,
        journal: Journal,
        open_group: Callable[[Group, Any], None],
        complete: bool = False,
        is_trial: bool = False,
    ) -> None:
        self.journal = journal
        self.groups = Groups(open_group, self._forget)
        self.wrappers = Wrappers(journal, self.groups.find)
        self.kernels = KernelRecorder(journal, self.groups)
        self.is_complete = False
        self._backends = BackendGroups(self.groups, lambda address: self._backend_wrappers.forget(address))
        self._backend_wrappers = Wrappers(
            journal, self._backends.find, LAYERS.index(Layer.BACKEND), self.wrappers.pending
        )
        self.stalls = self.kernels.stalls
        self._issuers = CppIssuers(self._record_cpp_issuers, journal.fault, self.stalls)
        self._graphs = CapturedGraphs(journal.fault)
        self._stream_waits = StreamWaits(journal.device_times.begin_stream_wait)
        self._beneath = Beneath(journal.note)
        self._wants_complete = complete
        self._is_trial = is_trial
        self._installed: list[tuple[type, str, Any, Any]] = []
        self._blocks = 0
        self._begun: dict[str, int] = {}  # by group: its collectives when the open coalescing block began

    def _forget(self, address: int) -> None:
        self.wrappers.forget(address)

    def install(self, forked: bool = False) -> None:
        """Install every layer. Wrappers that other code installed earlier stay below the recorder's wrappers.

        Args:
            forked: Whether this process is a forked child. A forked child does not search for inherited reducers. They
                cannot reduce there, and the search would copy every memory page with objects of the parent, in each
                worker of a data loader.
        """
        if not self._is_trial:
            self._heed_trial()
        if self._wants_complete:
            self.kernels.replace_methods()
            self._wrap_methods(
                ProcessGroup,
                lambda method, owner, original: self.kernels.wrap_method(
                    method, owner, original, self.wrappers.pending
                ),
            )
            self.complete()
        else:
            self._wrap_methods(ProcessGroup, self.wrappers.wrap)
            self._observe_functional()
            if not self._issuers.install():
                self.journal.note(
                    "this torch lacks a function by which the use of DDP's reducer is detected: all operators of "
                    "c10d are recorded"
                )
                self.complete()
            elif not forked and live_groups() and reducer_is_alive():
                self._record_cpp_issuers()
        self._wrap_methods(Backend, self._backend_wrappers.wrap)
        self._graphs.install(torch.cuda.CUDAGraph)
        self.journal.on_captured = self._graphs.add
        self._stream_waits.install()
        self._beneath.install()
        self._attempt("operators of frameworks", self.kernels.observe, FRAMEWORK, Layer.FRAMEWORK)
        for name, wrap in (
            ("_start_coalescing", self._wrap_start_coalescing),
            ("_end_coalescing", self._wrap_end_coalescing),
        ):
            original = vars(ProcessGroup).get(name)
            if original is not None:
                self._replace(ProcessGroup, name, original, wrap(original))
        for kind in _work_classes():
            original = vars(kind).get("wait")
            if original is not None:
                self._replace(kind, "wait", original, self.wrappers.wrap_wait(kind, original))

    def _heed_trial(self) -> None:
        """Try the layers with this version of torch; record all of c10d, or write a note, if a layer does not work."""
        newer = newer_torch(torch.__version__)
        if newer is not None:
            self.journal.note(newer)
        try:
            silent = silent_layers(
                lambda journal, complete: Interception(journal, _nobody, complete, is_trial=True)
            )
        except Exception as error:  # this version of torch has no group for the trial
            if newer is not None:
                self.journal.note(f"the layers could not be tried: {type(error).__name__}: {error}")
            return
        for layer, records in silent.items():
            self.journal.note(f"in its trial the layer {layer} made {records} records instead of one")
        if {Layer.PROCESS_GROUP, Layer.FUNCTIONAL} & silent.keys() and Layer.C10D not in silent:
            self._wants_complete = True
            self.journal.note("so every operator of c10d is recorded instead")

    def complete(self) -> None:
        """Record every operator of c10d from now on, except for calls that a layer above it records."""
        if self.is_complete:
            return
        self.is_complete = True
        unknown = unknown_operators()
        if unknown:
            self.journal.note(
                f"operators of c10d that are not known here, and not recorded: {', '.join(unknown)}"
            )
        self._observe_c10d([name for name in C10D if is_operator(name)])

    def follow(self) -> None:
        """Write the data that does not come from recorded calls; called once per step and at the end."""
        self._graphs.write()
        self._beneath.look()
        self.stalls.write()

    def close_gap(self, group: Group) -> None:
        """Switch to complete mode and write a note, because ``group`` has counted collectives without a record."""
        if self.is_complete:
            return
        self.complete()
        self.journal.note(
            f"from step {hooks.position.step} on, every operator of c10d is recorded: group "
            f"{group.desc or group.name} had counted {group.unseen} more collectives than were recorded until then, "
            "and these are missing"
        )

    def renew(self, pg: Any, communicator: Any, before: tuple[int, int]) -> None:
        """Handle that the members of ``pg`` changed in place; see :meth:`Groups.renew`."""
        group = self.groups.renew(pg, communicator, before)
        if group is not None:
            self._backends.retire(group)

    def remove(self) -> None:
        """Remove the kernels, and the wrappers unless other code has wrapped them since."""
        self._issuers.remove()
        self._graphs.remove()
        self._stream_waits.remove()
        self._beneath.remove()
        self.kernels.remove()
        for owner, name, original, wrapper in self._installed:
            if vars(owner).get(name) is wrapper:
                setattr(owner, name, original)
        self._installed.clear()
        self.is_complete = False
        self.wrappers.remove()

    def _record_cpp_issuers(self) -> None:
        """Record the operators that C++ issues, because C++ is about to issue collectives."""
        self._observe_c10d(ISSUED_IN_CPP)

    def _observe_c10d(self, operators: Sequence[str]) -> None:
        for name in operators:
            self._attempt(name, self.kernels.observe_c10d, name)

    def _observe_functional(self) -> None:
        for name, reader in FUNCTIONAL.items():
            if is_operator(name):
                self._attempt(name, self.kernels.observe, {name: reader}, Layer.FUNCTIONAL)
        self._attempt(WAIT, self.kernels.observe_waits, WAIT)

    def _attempt(self, what: str, observe: Callable[..., None], *args: Any) -> None:
        """Install a kernel. If this version of torch refuses the kernel, only its records are missing."""
        try:
            observe(*args)
        except Exception as error:
            self.journal.note(
                f"no kernel could be registered to record: {what} ({type(error).__name__}: {error})"
            )

    def _wrap_methods(self, owner: type, wrap: Callable[[Any, type, Any], Any]) -> None:
        for method in METHODS:
            original = vars(owner).get(method.name)
            if original is not None:
                self._replace(owner, method.name, original, wrap(method, owner, original))

    def _replace(self, owner: type, name: str, original: Any, wrapper: Any) -> None:
        wrapper.__name__ = name
        wrapper.__qualname__ = f"{owner.__name__}.{name}"
        wrapper.__doc__ = original.__doc__
        wrapper.__wrapped__ = original
        setattr(owner, name, wrapper)
        self._installed.append((owner, name, original, wrapper))

    def _wrap_start_coalescing(self, original: Any) -> Any:
        def start_coalescing(pg: Any, /, *args: Any, **kwargs: Any) -> Any:
            result = original(pg, *args, **kwargs)
            try:
                group = self.groups.find(pg)
                self._blocks += 1
                group.coalesce_id = self._blocks
                self.journal.look_closer(group)
                self._begun[group.name] = count_of(group.collectives)
            except Exception as error:
                self.journal.fault(error)
            return result

        return start_coalescing

    def _wrap_end_coalescing(self, original: Any) -> Any:
        def end_coalescing(pg: Any, /, *args: Any, **kwargs: Any) -> Any:
            try:
                group = self.groups.find(pg)
                group.coalesce_id = 0
                self.journal.look_closer(group)
                issued = count_of(group.collectives) - self._begun.pop(group.name, 0)
                if issued > 1:
                    # NCCL, the only backend that coalesces, counts the block as one collective.
                    group.extra -= issued - 1
            except Exception as error:
                self.journal.fault(error)
            work = original(pg, *args, **kwargs)
            # The block's handle belongs to no single record. It may have the address of an earlier pending handle.
            self.wrappers.pending.pop(id(work), None)
            return work

        return end_coalescing


def _nobody(group: Group, pg: Any) -> None:
    return None


def _work_classes() -> list[type]:
    """Return torch's class of handles, and the subclasses that torch itself defines."""
    classes: list[type] = [Work]
    for kind in classes:
        subclasses: list[type] = kind.__subclasses__()
        classes.extend(sub for sub in subclasses if sub.__module__.startswith("torch."))
    return classes
