"""``deepspeed.runtime.pipe.schedule``: pipeline schedules as objects with the instructions of one stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Final

from zero_runtime.pipeline.schedule import pipeline_schedules
from zero_runtime.pipeline.schedule.instructions import Action, Instruction


class PipeInstruction:
    """An instruction of a stage.

    Attributes:
        name: of its class.
        kwargs: its arguments, which are attributes too.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for name, value in kwargs.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """Update the parameters."""


class ReduceGrads(PipeInstruction):
    """Reduce gradients over the replicas."""


class ReduceTiedGrads(PipeInstruction):
    """Reduce gradients of tied parameters over their stages."""


class BufferOpInstruction(PipeInstruction):
    """An instruction for the micro-batch of a buffer."""

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Take the next batch."""


class ForwardPass(BufferOpInstruction):
    """Run the layers."""


class BackwardPass(BufferOpInstruction):
    """Run them backward."""


class SendActivation(BufferOpInstruction):
    """Send outputs to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive inputs from the stage before."""


class SendGrad(BufferOpInstruction):
    """Send the gradients of inputs to the stage before."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradients of outputs from the next stage."""


_CLASSES: Final[dict[Action, type[BufferOpInstruction]]] = {
    Action.LOAD: LoadMicroBatch,
    Action.FORWARD: ForwardPass,
    Action.BACKWARD: BackwardPass,
    Action.SEND_ACTIVATION: SendActivation,
    Action.RECEIVE_ACTIVATION: RecvActivation,
    Action.SEND_GRADIENT: SendGrad,
    Action.RECEIVE_GRADIENT: RecvGrad,
}


class PipeSchedule(ABC):
    """The instructions of one stage in one step of the training.

    Args:
        micro_batches: of the step.
        stages: of the pipeline.
        stage_id: which of them.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Lists of instructions; stages may wait for one another after each."""

    def num_pipe_buffers(self) -> int:
        """The number of buffers that the stage needs."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        """This stage."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the step."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """Whether this stage is the first."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this stage is the last."""
        return self.stage_id == self.stages - 1

    def _translated(self, each: Instruction) -> PipeInstruction:
        return _CLASSES[each.action](buffer_id=each.micro_batch % self.num_pipe_buffers())

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return self.steps()


class TrainSchedule(PipeSchedule):
    """One forward, one backward."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The instructions, with the reductions and the update in the last list."""
        instructions = pipeline_schedules.one_f_one_b(self.stages, self.micro_batches, self.stage_id)
        for number, step in enumerate(instructions, 1):
            last = [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()] if number == len(instructions) else []
            yield [*map(self._translated, step), *last]

    def num_pipe_buffers(self) -> int:
        """The number of micro-batches in flight, and at least two."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))


class InferenceSchedule(PipeSchedule):
    """Forward passes only."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The instructions: a list for each of the steps in which any stage computes. Batches are taken first."""
        instructions = pipeline_schedules.inference(self.stages, self.micro_batches, self.stage_id)
        for step in instructions[: self.micro_batches + self.stages - 1]:
            ordered = sorted(step, key=lambda each: each.action is not Action.LOAD)
            yield [*map(self._translated, ordered)]

    def num_pipe_buffers(self) -> int:
        """Two."""
        return 2


class DataParallelSchedule(PipeSchedule):
    """Gradient accumulation without stages."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """A list for each micro-batch."""
        for number in range(1, self.micro_batches + 1):
            instructions: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            yield (
                [*instructions, ReduceGrads(), OptimizerStep()]
                if number == self.micro_batches
                else instructions
            )

    def num_pipe_buffers(self) -> int:
        """One."""
        return 1
