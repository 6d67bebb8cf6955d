"""``deepspeed.runtime.pipe.schedule``: pipeline schedules, as objects that list the instructions of one stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Final

from zero_runtime.pipeline.schedule import pipeline_schedules
from zero_runtime.pipeline.schedule.instructions import Action, Instruction


class PipeInstruction:
    """An instruction of a stage.

    Attributes:
        name: The name of the class of the instruction.
        kwargs: The arguments of the instruction. Each argument is also an attribute.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for name, value in kwargs.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """An instruction that updates the parameters."""


class ReduceGrads(PipeInstruction):
    """An instruction that reduces gradients over the replicas."""


class ReduceTiedGrads(PipeInstruction):
    """An instruction that reduces the gradients of tied parameters over the stages that share these parameters."""


class BufferOpInstruction(PipeInstruction):
    """An instruction for the micro-batch in one buffer."""

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """An instruction that loads the next micro-batch."""


class ForwardPass(BufferOpInstruction):
    """An instruction that runs the forward pass of the layers."""


class BackwardPass(BufferOpInstruction):
    """An instruction that runs the backward pass of the layers."""


class SendActivation(BufferOpInstruction):
    """An instruction that sends outputs to the next stage."""


class RecvActivation(BufferOpInstruction):
    """An instruction that receives inputs from the previous stage."""


class SendGrad(BufferOpInstruction):
    """An instruction that sends the gradients of inputs to the previous stage."""


class RecvGrad(BufferOpInstruction):
    """An instruction that receives the gradients of outputs from the next stage."""


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
    """The instructions of one stage in one training step.

    Args:
        micro_batches: The number of micro-batches of the step.
        stages: The number of stages of the pipeline.
        stage_id: The number of this stage.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield lists of instructions. Stages may wait for one another after each list."""

    def num_pipe_buffers(self) -> int:
        """Return the number of buffers that the stage needs."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        """The number of this stage."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches of the step."""
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
    """The schedule 1F1B (one forward, one backward)."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the lists of instructions. The last list also contains the reductions and the update."""
        instructions = pipeline_schedules.one_f_one_b(self.stages, self.micro_batches, self.stage_id)
        for number, step in enumerate(instructions, 1):
            last = [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()] if number == len(instructions) else []
            yield [*map(self._translated, step), *last]

    def num_pipe_buffers(self) -> int:
        """Return the number of micro-batches in flight, but at least two."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))


class InferenceSchedule(PipeSchedule):
    """A schedule that consists of forward passes only."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield a list of instructions for each step in which any stage computes.

        The instruction that loads a micro-batch is the first one of its list.
        """
        instructions = pipeline_schedules.inference(self.stages, self.micro_batches, self.stage_id)
        for step in instructions[: self.micro_batches + self.stages - 1]:
            ordered = sorted(step, key=lambda each: each.action is not Action.LOAD)
            yield [*map(self._translated, ordered)]

    def num_pipe_buffers(self) -> int:
        """Return two."""
        return 2


class DataParallelSchedule(PipeSchedule):
    """A schedule for gradient accumulation without pipeline stages."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield a list of instructions for each micro-batch."""
        for number in range(1, self.micro_batches + 1):
            instructions: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            yield (
                [*instructions, ReduceGrads(), OptimizerStep()]
                if number == self.micro_batches
                else instructions
            )

    def num_pipe_buffers(self) -> int:
        """Return one."""
        return 1
