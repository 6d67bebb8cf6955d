"""Installs and removes the adapters of all frameworks."""

from __future__ import annotations

from commprof.recorder.adapters.checkpoints import Checkpoints
from commprof.recorder.adapters.ddp import Ddp
from commprof.recorder.adapters.deepspeed import DeepSpeedAdapter
from commprof.recorder.adapters.dtensors import DTensors
from commprof.recorder.adapters.fsdp import Fsdp
from commprof.recorder.adapters.fully_shard import FullyShard
from commprof.recorder.adapters.parts import Adapter
from commprof.recorder.adapters.tensor_parallel import TensorParallel
from commprof.recorder.adapters.torch_functions import TorchFunctions
from commprof.recorder.adapters.trainers import Trainers
from commprof.recorder.adapters.zero_redundancy import ZeroRedundancy
from commprof.recorder.process.journal import Journal
from commprof.recorder.training.published_models import Models
from commprof.recorder.training.reducer_waits import Stalls
from commprof.recorder.training.step_writer import Steps
from commprof.recorder.training.training_loop import TrainingLoop
from commprof.recorder.training.wrapped import WrappedModels


class Frameworks:
    """The adapters of all frameworks, which report steps, phases and purposes that programs do not report."""

    def __init__(self, journal: Journal, steps: Steps, stalls: Stalls) -> None:
        self.models = Models(journal.fault)
        self.loop = TrainingLoop(journal, steps, self.models)
        self.wrapped = WrappedModels(journal)
        ddp = Ddp(journal, self.wrapped, stalls)
        self.explain = ddp.explain  # returns the tag of a collective that C++ issues
        checkpoints = Checkpoints(self.loop)
        self._tensors = TensorParallel(journal, self.wrapped)
        patches = [
            *TorchFunctions(journal, self.loop, checkpoints).parts(),
            *ddp.parts(),
            *Fsdp(journal, checkpoints, self.wrapped).parts(),
            *FullyShard(journal, self.wrapped).parts(),
            *ZeroRedundancy(journal, self.wrapped).parts(),
            *self._tensors.parts(),
            *DTensors().parts(),
            *Trainers(checkpoints).parts(),
        ]
        self._adapters = (DeepSpeedAdapter(journal, steps.explicit), Adapter(journal, patches))

    def install(self) -> None:
        """Install all adapters."""
        self.loop.install()
        self._tensors.install()
        for adapter in self._adapters:
            adapter.install()

    def finish(self) -> None:
        """Publish all deferred data when recording ends."""
        self.loop.finish()
        self.wrapped.finish()

    def remove(self) -> None:
        """Remove all adapters."""
        for adapter in reversed(self._adapters):
            adapter.remove()
        self._tensors.remove()
        self.loop.close()
