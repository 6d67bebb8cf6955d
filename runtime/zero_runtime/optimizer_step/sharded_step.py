"""The optimizer step over flat shards of the parameters (stages 1 to 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import ConfigError
from zero_runtime.gradient_reduction.clip import joint_norm, sharded_norm, sum_of_squares
from zero_runtime.gradient_reduction.gradient_buckets import joined
from zero_runtime.gradient_reduction.loss_scale import LossScale
from zero_runtime.gradient_reduction.owner_ordered_buckets import OwnerOrderedGradients
from zero_runtime.gradient_reduction.reducer import ParameterGroup, ShardedGradients
from zero_runtime.gradient_reduction.used_parameters import UsedParameters
from zero_runtime.gradient_reduction.whole_gradients import AccumulatedGradients
from zero_runtime.groups.parallelism import ModelRanks
from zero_runtime.offload.offload_placement import Placement
from zero_runtime.optimizer_step.dtypes import agree_on_overflow, any_overflow
from zero_runtime.optimizer_step.flat_parameters import FlatParameters
from zero_runtime.optimizer_step.fragments import Fragment, Master, Source, Stored, fragments_of
from zero_runtime.optimizer_step.gathered_matrices import GatheredMatrices
from zero_runtime.optimizer_step.interface import StepPolicy, WrappedOptimizer
from zero_runtime.optimizer_step.masters import Masters
from zero_runtime.optimizer_step.matrix_updates import MatrixUpdates
from zero_runtime.optimizer_step.torch_optimizer import replace_parameters
from zero_runtime.optimizers.lamb import Division, Lamb, Segment
from zero_runtime.optimizers.muon import Muon
from zero_runtime.sharding.sharded_parameters import ShardedParameters

_NORM: Final = hooks.tag("gradient_norm")


class ShardedOptimizer(WrappedOptimizer):
    """Updates this rank's shard of every group of parameters, and shares the shard with the other ranks.

    The torch optimizer sees only the shards of this rank, as flat tensors in the dtype of the masters
    (``policy.masters``, fp32 by default). If the parameters are fp32, these tensors are the memory of the
    parameters themselves.

    Args:
        optimizer: The torch optimizer.
        groups: The trainable parameters. Each param group of the optimizer has one or more of these groups.
        parameters: The shards of the parameters, in the model's dtype.
        gradients: The reduced gradients.
        group: The group of the data-parallel ranks.
        policy: The options of a step.
        scale: The loss scale.
        chunk: The number of elements of the matrices that Muon gathers together at stage 3.
        placement: The placement of the masters and the optimizer's state. None for the device of the
            parameters.
        used: The check that every parameter gets a gradient in each step. None if there is no such check.
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
                MatrixUpdates(optimizer, self.masters_with_parts(), gradients)
                if isinstance(parameters, FlatParameters)
                else GatheredMatrices(optimizer, self._groups, self._masters.tensors, group, chunk)
            )

    def close(self) -> None:
        """Remove files and hooks. No step can be taken afterwards."""
        self._masters.close()
        if self._used is not None:
            self._used.close()

    def fragments(self, parameter: torch.nn.Parameter | None = None) -> Iterator[Fragment]:
        """Return this rank's fragments of all parameters, or only of ``parameter``, with their optimizer state."""
        if isinstance(self._matrices, MatrixUpdates):
            return fragments_of(self._matrices.elementwise(), self.masters_with_parts())
        return self._masters.fragments(parameter)

    def stored(self) -> Iterator[Stored]:
        """Return the fragments for a checkpoint. Their tensors are read on demand, in any order."""
        if isinstance(self._matrices, MatrixUpdates):
            return super().stored()
        return self._masters.stored()

    def load_fragments(self, source: Source, states: bool = True) -> None:
        """Fill the masters and, with ``states``, the optimizer state from a checkpoint.

        The model's parameters do not change.
        """
        self._masters.load(source, states)
        if isinstance(self._matrices, MatrixUpdates) and states:
            self._matrices.load(source)

    def state_dict(self) -> dict[str, Any]:
        """Return the torch optimizer's state on this rank."""
        return self._masters.state_dict()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train additional parameters of the model (stage 3 only).

        Parameters that are new in the model are broadcast from rank 0.

        Raises:
            UsageError: The stage is not 3.
            ConfigError: A parameter is trained already, or is not in the model.
        """
        if self.grow is None:
            super().add_param_group(param_group)
            return
        params = param_group["params"]
        new_parameters: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
        trained = {parameter: name for name, (parameter, _) in self.trained().items()}
        for parameter in new_parameters:
            if parameter in trained:
                raise ConfigError(
                    f"{trained[parameter]} is already in a param group; add each parameter only once"
                )
        self.optimizer.add_param_group({**param_group, "params": new_parameters})
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
            # Adagrad creates its state in its constructor, not in the first step.
            renewed = torch.optim.Adagrad([self.param_groups[number]], **self.optimizer.defaults)
            self.state.update(renewed.state)
        self._masters.watch()
        if isinstance(self.optimizer, Lamb):
            self.optimizer.divide(self._division())

    def _division(self) -> Division:
        """Return the positions of the parameters in the masters."""
        numbers = {name: number for number, name in enumerate(self.trained())}
        segments = {
            master.tensor: [Segment(numbers[part.name], part.offset, part.numel) for part in master.parts]
            for master in self.masters_with_parts()
        }
        return Division(segments, len(numbers), partial(self._group.all_reduce, why=_NORM))

    @property
    def masters(self) -> list[torch.Tensor]:
        """The flat masters on this rank. Masters on NVMe are placeholders."""
        return self._masters.tensors

    def parameter_tensors(self) -> Iterator[torch.Tensor]:
        """Return the tensors of the parameters' shards."""
        return self._parameters.tensors()

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """The flat masters on this rank, under DeepSpeed's name at stage 3."""
        return [master.tensor for master in self.masters_with_parts()]

    # This is DeepSpeed's name at stages 1 and 2.
    single_partition_of_fp32_groups = fp32_partitioned_groups_flat

    @property
    def fp16_groups(self) -> list[list[torch.nn.Parameter]]:
        """The parameters of each group, of any dtype, under DeepSpeed's name at stage 3.

        At stage 3 these groups are sub-groups.
        """
        return [list(each.parameters) for each in self._groups]

    @property
    def averaged_gradients(self) -> dict[int, list[torch.Tensor]]:
        """This rank's parts of the reduced gradients for each group, under DeepSpeed's name at stages 1 and 2."""
        by_group: dict[int, list[torch.Tensor]] = {number: [] for number in range(len(self._reduced.shards))}
        for stretch, master, reduced in zip(
            self._masters.stretches, self.masters_with_parts(), self.reduced(), strict=True
        ):
            by_group[stretch.piece] += [reduced.narrow(0, part.offset, part.numel) for part in master.parts]
        return by_group

    @property
    def grad_partitions_flat_buffer(self) -> torch.Tensor:
        """This rank's reduced gradients, concatenated, under DeepSpeed's name at stage 3.

        With several groups this is a copy.
        """
        return joined(self._reduced.shards)

    def masters_with_parts(self) -> list[Master]:
        """Return the masters with their parts: for each group the shard of this rank, whole or in chunks."""
        return self._masters.masters_with_parts()

    def reduced(self) -> list[torch.Tensor]:
        """Return the gradient of each master."""
        return self._masters.reduced(self._reduced.shards)

    def trained(self) -> dict[str, tuple[torch.nn.Parameter, int]]:
        """Return the parameters of all groups, by name, with the number of their param group."""
        return {
            name: (parameter, each.number)
            for each in self._groups
            for name, parameter in zip(each.names, each.parameters, strict=True)
        }

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for parameters in flight, and copy shards that a script has changed to the masters."""
        self._take_over(self._parameters.changes())

    @torch.no_grad()
    def adopt(self) -> None:
        """Set the masters from the model's parameters after a script has changed the parameters."""
        self.settle()
        self._parameters.refresh()
        self._masters.take_all_over()

    def loaded(self) -> None:
        """After a checkpoint is loaded, set the model's parameters as the end of a step would set them."""
        self._parameters.loaded()

    def _take_over(self, changes: Sequence[tuple[int, slice]]) -> None:
        for index, part in changes:
            self._masters.take_over(index, part)

    def _norm(self) -> torch.Tensor:
        """Return the norm of the whole model's gradients."""
        if self.model_ranks is None:
            return self._reduced.norm()
        if self._counted is None:
            self._counted = [_counted(each, self.model_ranks) for each in self.masters_with_parts()]
        squares = [torch.zeros((), dtype=torch.float64, device=each.device) for each in self._reduced.shards]
        for stretch, gradient, spans in zip(
            self._masters.stretches, self.reduced(), self._counted, strict=True
        ):
            for span in spans:
                squares[stretch.piece] += sum_of_squares(gradient[span])
        return joint_norm(squares, [self._group, *self._model_groups()], self._reduced.norm_dtype)

    @torch.no_grad()
    def _get_norm_groups(self) -> list[torch.Tensor]:
        """Return the norm of each group's reduced, scaled gradients, under DeepSpeed's name.

        All ranks must call this function.
        """
        return [
            sharded_norm([shard], self._group, self._reduced.norm_dtype, [each.ranks])
            for shard, each in zip(self._reduced.shards, self._groups, strict=True)
        ]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the shards with the reduced gradients, and share the shards.

        The step is skipped if a gradient overflowed.
        """
        self._take_over(self._parameters.begin_step())
        self._masters.begin_step()
        shards = self._reduced.shards
        overflow = self._policy.check_overflow and agree_on_overflow(
            any_overflow(shards, shards[0].device), self._group, *self._model_groups()
        )
        if self._used is not None:
            self._used.begin_step() if overflow else self._used.check()
        commit = None
        if self._matrices is not None and not overflow:
            commit = self._matrices.apply(shards, self._scale.value)
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
    """Return the ranges of a master that this rank counts in a norm of the whole model.

    Adjacent ranges are merged.
    """
    spans: list[slice] = []
    for part in sorted(master.parts, key=lambda each: each.offset):
        if not model.counts(part.parameter):
            continue
        begin, end = part.offset, part.offset + part.numel
        if spans and spans[-1].stop == begin:
            begin = spans.pop().start
        spans.append(slice(begin, end))
    return spans
