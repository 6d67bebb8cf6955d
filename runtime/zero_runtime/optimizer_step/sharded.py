"""The step over flat pieces of the parameters (stages 1 to 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import ConfigError
from zero_runtime.gradient_reduction.buckets import joined
from zero_runtime.gradient_reduction.clip import joint_norm, sharded_norm, sum_of_squares
from zero_runtime.gradient_reduction.loss_scale import LossScale
from zero_runtime.gradient_reduction.owner_ordered_buckets import OwnerOrderedGradients
from zero_runtime.gradient_reduction.reducer import ParameterGroup, ShardedGradients
from zero_runtime.gradient_reduction.used_parameters import UsedParameters
from zero_runtime.gradient_reduction.whole_gradients import AccumulatedGradients
from zero_runtime.groups.parallelism import ModelRanks
from zero_runtime.offload.placement import Placement
from zero_runtime.optimizer_step.flat_parameters import FlatParameters
from zero_runtime.optimizer_step.fragments import Fragment, Master, Source, Stored, fragments_of
from zero_runtime.optimizer_step.gathered_matrices import GatheredMatrices
from zero_runtime.optimizer_step.interface import StepPolicy, WrappedOptimizer
from zero_runtime.optimizer_step.masters import Masters
from zero_runtime.optimizer_step.matrix_updates import MatrixUpdates
from zero_runtime.optimizer_step.precision import agree_on_overflow, any_overflow
from zero_runtime.optimizer_step.torch_optimizer import replace_parameters
from zero_runtime.optimizers.lamb import Division, Lamb, Segment
from zero_runtime.optimizers.muon import Muon
from zero_runtime.sharding.parameters import ShardedParameters

_NORM: Final = hooks.tag("gradient_norm")


class ShardedOptimizer(WrappedOptimizer):
    """Updates this rank's piece of every group of parameters, and shares it with the other ranks.

    Each rank keeps its piece as a flat fp32 tensor, which is all that the torch optimizer sees: the parameters' own memory
    where they are fp32.

    Args:
        optimizer: the torch optimizer.
        groups: the trainable parameters: one or more groups for each of its param groups.
        parameters: their pieces in the model's dtype.
        gradients: where reduced gradients come from.
        group: the data-parallel ranks.
        policy: what a step does besides the update.
        scale: what the loss was multiplied by.
        chunk: elements of the matrices that Muon gathers at a time, at stage 3.
        placement: where the pieces and the optimizer's state are kept, if not with the parameters.
        used: parameters that must each get a gradient within a step, where the configuration says so.
    """

    is_sharded = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[ParameterGroup],
        parameters: FlatParameters | ShardedParameters,
        gradients: ShardedGradients | OwnerOrderedGradients | AccumulatedGradients,
        group: DataParallelGroup,
        policy: StepPolicy,
        scale: LossScale,
        chunk: int = 0,
        placement: Placement | None = None,
        used: UsedParameters | None = None,
    ) -> None:
        super().__init__(optimizer, gradients, policy, scale)
        self._reduced = gradients
        self._group = group
        self._used = used
        self._counted: list[list[slice]] | None = None
        self._parameters = parameters
        self._groups = list(groups)
        self.grow: Callable[[int, dict[str, Any]], list[ParameterGroup]] | None = None
        self._masters = Masters(optimizer, parameters, policy.masters, group.rank, placement)
        mine: list[list[torch.Tensor]] = [[] for _ in optimizer.param_groups]
        for each, masters in zip(groups, self._masters.add(groups), strict=True):
            mine[each.number] += masters
        replace_parameters(optimizer, mine)
        self._masters.watch()
        if isinstance(optimizer, Lamb):
            optimizer.divide(self._division())
        self._matrices: MatrixUpdates | GatheredMatrices | None = None
        if isinstance(optimizer, Muon) and isinstance(gradients, ShardedGradients):
            self._matrices = (
                MatrixUpdates(optimizer, self.held(), gradients)
                if isinstance(parameters, FlatParameters)
                else GatheredMatrices(optimizer, self._groups, self._masters.tensors, group, chunk)
            )

    def close(self) -> None:
        """Remove what is kept in files, and hooks; no step can be taken any more."""
        self._masters.close()
        if self._used is not None:
            self._used.close()

    def fragments(self, parameter: torch.nn.Parameter | None = None) -> Iterator[Fragment]:
        """What this rank holds of each parameter, or of one, its state included."""
        if isinstance(self._matrices, MatrixUpdates):
            return fragments_of(self._matrices.elementwise(), self.held())
        return self._masters.fragments(parameter)

    def stored(self) -> Iterator[Stored]:
        """What ``fragments`` gives, to be read one by one, in any order: for a checkpoint."""
        if isinstance(self._matrices, MatrixUpdates):
            return super().stored()
        return self._masters.stored()

    def load_fragments(self, source: Source, states: bool = True) -> None:
        """Fill the masters and, with ``states``, the state from a checkpoint; the model's parameters stay as they are."""
        self._masters.load(source, states)
        if isinstance(self._matrices, MatrixUpdates) and states:
            self._matrices.load(source)

    def state_dict(self) -> dict[str, Any]:
        """The torch optimizer's state, of this rank alone."""
        return self._masters.state_dict()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train further parameters of the model, at stage 3; those that are new in it are broadcast from rank 0.

        Raises:
            UsageError: at another stage.
            ConfigError: a parameter is trained already, or is not the model's.
        """
        if self.grow is None:
            super().add_param_group(param_group)
            return
        given = param_group["params"]
        wanted: list[Any] = [given] if isinstance(given, torch.Tensor) else list(given)
        trained = {parameter: name for name, (parameter, _) in self.trained().items()}
        for parameter in wanted:
            if parameter in trained:
                raise ConfigError(f"{trained[parameter]} is trained already; give it to one param group")
        self.optimizer.add_param_group({**param_group, "params": wanted})
        number = len(self.param_groups) - 1
        try:
            groups = self.grow(number, self.param_groups[number])
        except BaseException:
            del self.param_groups[number]
            raise
        self._groups += groups
        self.param_groups[number]["params"] = [
            each for masters in self._masters.add(groups) for each in masters
        ]
        if isinstance(self.optimizer, torch.optim.Adagrad):
            # Adagrad makes its state when it is made, not in the first step.
            renewed = torch.optim.Adagrad([self.param_groups[number]], **self.optimizer.defaults)
            self.state.update(renewed.state)
        self._masters.watch()
        if isinstance(self.optimizer, Lamb):
            self.optimizer.divide(self._division())

    def _division(self) -> Division:
        """Where the parameters lie in the masters."""
        numbers = {name: number for number, name in enumerate(self.trained())}
        segments = {
            master.tensor: [Segment(numbers[part.name], part.offset, part.numel) for part in master.parts]
            for master in self.held()
        }
        return Division(segments, len(numbers), partial(self._group.all_reduce, why=_NORM))

    @property
    def masters(self) -> list[torch.Tensor]:
        """What the optimizer updates on this rank, flat; of those that are in files, what stands for them."""
        return self._masters.tensors

    def parameter_tensors(self) -> Iterator[torch.Tensor]:
        """The pieces of the parameters."""
        return self._parameters.tensors()

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """The masters on this rank, flat, by DeepSpeed's name at stage 3."""
        return [master.tensor for master in self.held()]

    single_partition_of_fp32_groups = fp32_partitioned_groups_flat  # its name at stages 1 and 2

    @property
    def fp16_groups(self) -> list[list[torch.nn.Parameter]]:
        """The parameters of each group, at stage 3 of each sub-group, by DeepSpeed's name there, whatever their dtype."""
        return [list(each.parameters) for each in self._groups]

    @property
    def averaged_gradients(self) -> dict[int, list[torch.Tensor]]:
        """This rank's parts of the reduced gradients, for each of its pieces, by DeepSpeed's name at stages 1 and 2."""
        parts: dict[int, list[torch.Tensor]] = {number: [] for number in range(len(self._reduced.shards))}
        for stretch, master, reduced in zip(
            self._masters.stretches, self.held(), self.reduced(), strict=True
        ):
            parts[stretch.piece] += [reduced.narrow(0, part.offset, part.numel) for part in master.parts]
        return parts

    @property
    def grad_partitions_flat_buffer(self) -> torch.Tensor:
        """This rank's reduced gradients end to end, by DeepSpeed's name at stage 3; copied if there are several groups."""
        return joined(self._reduced.shards)

    def held(self) -> list[Master]:
        """The masters: for each group this rank's piece of it, whole or in stretches, which may be in files."""
        return self._masters.held()

    def reduced(self) -> list[torch.Tensor]:
        """The gradients of the masters."""
        return self._masters.reduced(self._reduced.shards)

    def trained(self) -> dict[str, tuple[torch.nn.Parameter, int]]:
        """The parameters of all groups."""
        return {
            name: (parameter, each.number)
            for each in self._groups
            for name, parameter in zip(each.names, each.parameters, strict=True)
        }

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for parameters that are under way, and bring what a script has changed in its slices into the masters."""
        self._take_over(self._parameters.changes())

    @torch.no_grad()
    def adopt(self) -> None:
        """Make the masters copies of the model's parameters anew, whoever has changed those."""
        self.settle()
        self._parameters.refresh()
        self._masters.take_all_over()

    def loaded(self) -> None:
        """A checkpoint has been read: have the model's parameters as a step would have left them."""
        self._parameters.loaded()

    def _take_over(self, changes: Sequence[tuple[int, slice]]) -> None:
        for index, part in changes:
            self._masters.take_over(index, part)

    def _norm(self) -> torch.Tensor:
        """The norm of the whole model's gradients."""
        if self.model_ranks is None:
            return self._reduced.norm()
        if self._counted is None:
            self._counted = [_counted(each, self.model_ranks) for each in self.held()]
        squares = [torch.zeros((), dtype=torch.float64, device=each.device) for each in self._reduced.shards]
        for stretch, gradient, spans in zip(
            self._masters.stretches, self.reduced(), self._counted, strict=True
        ):
            for span in spans:
                squares[stretch.piece] += sum_of_squares(gradient[span])
        return joint_norm(squares, [self._group, *self._model_groups()], self._reduced.norm_dtype)

    @torch.no_grad()
    def _get_norm_groups(self) -> list[torch.Tensor]:
        """The norm of each group's reduced gradients, scaled as they are; by DeepSpeed's name. All ranks must call it."""
        return [sharded_norm([each], self._group, self._reduced.norm_dtype) for each in self._reduced.shards]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take the step that the reduced gradients ask for, unless one of them overflowed."""
        self._take_over(self._parameters.begin_step())
        self._masters.begin_step()
        pieces = self._reduced.shards
        overflow = self._policy.check_overflow and agree_on_overflow(
            any_overflow(pieces, pieces[0].device), self._group, *self._model_groups()
        )
        if self._used is not None:
            self._used.begin_step() if overflow else self._used.check()
        commit = None
        if self._matrices is not None and not overflow:
            commit = self._matrices.apply(pieces, self._scale.value)
        if not self._measured(overflow, self._norm):
            return
        if commit is not None:
            commit()
        factor = self._factor()
        reduced = self.reduced()
        for numbers in self._masters.rounds():
            for number in numbers:
                self._masters.take_gradient(number, reduced[number], factor)
            self.optimizer.step()
            for number in numbers:
                self._masters.give_values(number)
        self._scale.update(False)
        self._gradients.clear()
        self._parameters.share()


def _counted(master: Master, model: ModelRanks) -> list[slice]:
    """What this rank counts of a master in a norm over the whole model: as few stretches of it as can be."""
    spans: list[slice] = []
    for part in sorted(master.parts, key=lambda each: each.offset):
        if not model.counts(part.parameter):
            continue
        begin, end = part.offset, part.offset + part.numel
        if spans and spans[-1].stop == begin:
            begin = spans.pop().start
        spans.append(slice(begin, end))
    return spans
