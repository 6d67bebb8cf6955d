"""Open checkpoints that DeepSpeed wrote, with the same interface as checkpoints of this runtime."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from zero_runtime.checkpoint.deepspeed import torch_file
from zero_runtime.checkpoint.deepspeed.description import (
    client_values,
    counters,
    loss_scale,
    optimizer_class,
    stage,
    state_name,
)
from zero_runtime.checkpoint.deepspeed.experts import Experts, read_experts
from zero_runtime.checkpoint.deepspeed.flat_partitions import read_partitions
from zero_runtime.checkpoint.deepspeed.folder import Folder, find
from zero_runtime.checkpoint.deepspeed.objects import plain
from zero_runtime.checkpoint.deepspeed.tensor_runs import Run
from zero_runtime.checkpoint.deepspeed.universal import read_universal
from zero_runtime.checkpoint.deepspeed.whole import read_whole, read_whole_of_experts
from zero_runtime.checkpoint.files.checkpoint_manifest import Manifest, ParameterFacts, RankFile
from zero_runtime.checkpoint.opened import OpenCheckpoint, StoredRange
from zero_runtime.errors import CheckpointError
from zero_runtime.optimizer_step.fragments import NumberTensor, Scalar

_EXTRA: Final = "_extra_state"


class Known(NamedTuple):
    """Facts about the loading model that some checkpoints do not record.

    Attributes:
        groups: The names of the parameters that each param group trains, in the optimizer's order.
        frozen: The names of the parameters that no optimizer trains.
        buffers: The names of the persistent buffers.
        aliases: The additional names of tied parameters and shared buffers, with the first name of each.
        optimizer: The class name of the torch optimizer. None without an optimizer.
    """

    groups: tuple[tuple[str, ...], ...]
    frozen: frozenset[str]
    buffers: frozenset[str]
    aliases: Mapping[str, str]
    optimizer: str | None


class DeepSpeedCheckpoint(OpenCheckpoint):
    """A checkpoint that DeepSpeed 0.14 to 0.19 wrote: of any stage, universal, or weights only.

    Tensors stay in their files until they are read.

    Args:
        folder: The files of the checkpoint.
        rounding: The dtype to which ``read_master`` rounds, by parameter. Parameters without an entry are not
            rounded.
        known: The facts about the loading model. None without a model.
        module_suffices: Whether to accept the model's own weights if all files of optimizer states are missing.

    Raises:
        CheckpointError: A file is missing, is damaged, or has a kind that cannot be read.
    """

    def __init__(
        self,
        folder: Folder,
        rounding: Mapping[str, torch.dtype] | None = None,
        known: Known | None = None,
        module_suffices: bool = False,
    ) -> None:
        super().__init__(folder.directory, rounding)
        self._known = known
        self._module_suffices = module_suffices
        self._folder = folder
        self._facts: dict[str, ParameterFacts] = {}
        self._aliases: dict[str, str] = {}
        self._buffers: list[str] = []
        self._extra: dict[str, Any] = {}
        self.manifest = self._weights() if folder.weights else self._training()
        self._check_complete()

    def verify(self, ranks: Iterable[int]) -> None:
        """Compare files with the checksums in them. ``ranks`` are the numbers of the files."""
        for rank in ranks:
            torch_file.verify(self._folder.files[rank])

    # Weights only.

    def _weights(self) -> Manifest:
        tensors: dict[str, torch.Tensor] = {}
        for path in self._folder.weights:
            tensors.update(torch_file.read_weights(path))
        self._take_module(tensors, self._known.buffers if self._known else frozenset())
        return self._manifest({}, {}, None, [], 0)

    # A complete training state.

    def _training(self) -> Manifest:
        paths = self._folder.models
        models = {rank: torch_file.read_dict(path, "module", "global_steps") for rank, path in paths.items()}
        first = models.get(0)
        if first is None or not isinstance(first["module"], dict):
            raise CheckpointError(
                f"{self.directory} lacks the model states of rank 0; copy all files of the checkpoint, or load another tag"
            )
        experts = read_experts(self._folder.experts, first, int(first.get("dp_world_size") or 1))
        module, buffers = {**first["module"], **experts.weights}, frozenset(first.get("buffer_names") or ())
        shapes = first.get("param_shapes")
        sharded = "zero_pp_rank" in paths[0].name
        missing_ranks = (
            sorted(set(range(int(first.get("dp_world_size") or 1))) - set(paths)) if sharded else []
        )
        if missing_ranks and not self._folder.universal:
            missing = paths[0].with_name(paths[0].name.replace("pp_rank_0_", f"pp_rank_{missing_ranks[0]}_"))
            raise CheckpointError(
                f"{missing}, the model states of rank {missing_ranks[0]}, is missing; copy the files of all ranks, or "
                "load another "
                "tag"
            )
        self._aliases.update(first.get("shared_params") or {})
        common: Mapping[str, Any] = {}
        options: list[dict[str, Any]] = []
        if self._folder.universal:
            partitions = read_universal(self._folder, shapes or [])
        elif self._folder.optimizers or (shapes is not None and (sharded or not self._module_suffices)):
            partitions = read_partitions(self._folder, shapes, experts)
        else:
            partitions = None
        trained = None
        if partitions is not None:
            trained = partitions.shapes
            options, common = partitions.options, partitions.common
            for name, shape in trained.items():
                dtype = module[name].dtype if name in module else torch.float32
                self._describe(name, shape, dtype, partitions.groups.get(name))
        self._take_module(module, buffers, trained, sharded)
        self._take_frozen(models)
        for rank, model in models.items():
            if rank:
                self._take_buffers(model["module"], buffers, rank)
        if partitions is not None:
            self._take_runs(partitions.runs)
        elif first.get("optimizer") is not None and self._known is not None and not self._module_suffices:
            common = first["optimizer"]
            options = self._take_unnamed(paths[0], common, self._known.groups, experts)
        config = first.get("ds_config")
        return self._manifest(
            first,
            config if isinstance(config, dict) else {},
            loss_scale(common),
            options,
            stage(common, config),
        )

    # Tensors.

    def _describe(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, group: int | None, trained: bool = True
    ) -> None:
        self._facts[name] = ParameterFacts(tuple(shape), str(dtype).removeprefix("torch."), group, trained)

    def _take_module(
        self,
        module: Mapping[str, Any],
        buffers: frozenset[str],
        trained: Mapping[str, Any] | None = None,
        sharded: bool = False,
    ) -> None:
        """Add the model's own tensors.

        ``trained`` parameters are left out, because the optimizer states contain their values. In a ``sharded``
        model (stage 3) the parameters in the model states are empty.
        """
        self._take_buffers(module, buffers, 0)
        places: dict[tuple[Any, ...], str] = {}
        for name, value in module.items():
            if name.endswith(_EXTRA):
                self._extra[name.removesuffix(_EXTRA).removesuffix(".")] = plain(value)
                continue
            if name in self._buffers or not isinstance(value, torch.Tensor):
                continue
            first = self._first_name(name, value, places)
            if first != name:
                self._aliases[name] = first
                if first in module or first in (trained or ()):
                    continue
            if not sharded and first not in (trained or ()):
                self._describe(first, value.shape, value.dtype, None, trained is None)
                self._add("value", first, _mapped_range(0, value.reshape(-1)))

    def _first_name(self, name: str, value: torch.Tensor, places: dict[tuple[Any, ...], str]) -> str:
        """Return the name under which ``value`` is stored.

        This is the name of the parameter or buffer that ``value`` is tied to, or its own name.
        """
        if name in self._aliases:
            return self._aliases[name]
        if self._known is not None and name in self._known.aliases:
            return self._known.aliases[name]
        if not value.numel():
            return name
        place = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
        return places.setdefault(place, name)

    def _take_buffers(self, module: Mapping[str, Any], buffers: frozenset[str], rank: int) -> None:
        for name in module:
            if name in buffers and isinstance(module[name], torch.Tensor):
                if rank == 0:
                    self._buffers.append(name)
                self._add("buffer", name, _mapped_range(rank, module[name]))

    def _take_frozen(self, models: Mapping[int, Mapping[str, Any]]) -> None:
        """Add the frozen parameters. At stage 3 every rank has a shard of each frozen parameter."""
        shapes = models[0].get("frozen_param_shapes") or {}
        for name, shape in shapes.items():
            if name in self._facts:
                continue
            numel = math.prod(shape)
            start = 0
            for rank in sorted(models):
                fragment = models[rank]["frozen_param_fragments"][name].reshape(-1)
                elements = fragment.narrow(0, 0, min(fragment.numel(), numel - start))
                if start == 0:
                    self._describe(name, shape, fragment.dtype, None, trained=False)
                if elements.numel():
                    self._add("value", name, _mapped_range(start, elements))
                start += elements.numel()

    def _take_runs(self, runs: Sequence[Run]) -> None:
        for name in {run.name for run in runs if run.value is not None}:
            self._ranges.pop(("value", name), None)  # These are the model's own values, in 16 bits.
        for run in runs:
            if run.value is not None:
                self._add("value", run.name, _mapped_range(run.start, run.value))
            for state, tensor in run.state.items():
                self._add(f"state.{state}", run.name, _mapped_range(run.start, tensor))
            for state, tensor in run.whole.items():
                key = f"{run.name}/{state}"
                self._other_state_keys.setdefault(run.name, {})[state] = key
                self._add("whole", key, _mapped_range(0, tensor))
            if run.scalars:
                scalars = {name: self._scalar(name, value) for name, value in run.scalars.items()}
                self._scalars[run.name] = scalars

    def _take_unnamed(
        self, path: Path, optimizer: Mapping[str, Any], known: Sequence[Sequence[str]], experts: Experts
    ) -> list[dict[str, Any]]:
        """Add the state of an optimizer that names no parameters, and return the options of its param groups."""
        missing = [name for names in known for name in names if name not in self._facts]
        if missing:
            raise CheckpointError(
                f"{path} is of another model: it lacks {', '.join(map(repr, missing[:5]))}; pass "
                "load_optimizer_states=False and load_module_strict=False to load what both have"
            )
        shapes = {name: facts.shape for name, facts in self._facts.items()}
        if experts.weights:
            of_ranks = read_whole_of_experts(self._folder, known, shapes, experts)
        else:
            of_ranks = [(known, read_whole(path, optimizer, known, shapes))]
        for groups, states in of_ranks:
            self._take_runs(states.runs)
            for number, names in enumerate(groups):
                for name in names:
                    facts = self._facts[name]
                    self._describe(name, facts.shape, getattr(torch, facts.dtype), number)
        return of_ranks[0][1].options

    def _scalar(self, name: str, value: Any) -> Scalar | NumberTensor:
        if isinstance(value, torch.Tensor):
            return NumberTensor(value.item(), value.dtype, tuple(value.shape))
        value = plain(value)
        kind = self._known.optimizer if self._known else None
        if name == "step" and (kind is None or hasattr(torch.optim, kind)):
            # torch's optimizers count steps in tensors, and DeepSpeed's optimizers count them in integers.
            return NumberTensor(float(value), torch.float32)
        return value  # type: ignore[no-any-return]

    # The manifest.

    def _manifest(
        self,
        first: Mapping[str, Any],
        config: Mapping[str, Any],
        scale: Any,
        options: list[dict[str, Any]],
        stage_number: int,
    ) -> Manifest:
        frozen = self._known.frozen if self._known else frozenset()
        optimizer = self._optimizer(config) if options else None
        self._rename_states(optimizer)
        return Manifest(
            tag=self.directory.name,
            generation=1,
            zero_runtime="",
            torch="",
            stage=stage_number,
            counters=counters(first),
            optimizer=optimizer,
            param_groups=plain(options),
            lr_scheduler=plain(first.get("lr_scheduler")),
            loss_scale=scale,
            client_state=client_values(first),
            parameters=self._facts,
            aliases={alias: name for alias, name in self._aliases.items() if alias not in self._facts},
            buffers=self._buffers,
            extra_state=self._extra,
            # DeepSpeed's exclude_frozen_parameters leaves out frozen parameters and does not record this.
            excluded=sorted(name for name in frozen if name not in self._facts),
            files=tuple(
                RankFile(
                    str(path.relative_to(self.directory)), path.stat().st_size, torch_file.checksum(path)
                )
                for path in self._folder.files
            ),
        )

    def _optimizer(self, config: Mapping[str, Any]) -> str:
        kinds = [
            frozenset(self._states.get(name, ()))
            for name, facts in self._facts.items()
            if facts.requires_grad
        ]
        return optimizer_class(config, kinds, self._known.optimizer if self._known else None)

    def _rename_states(self, optimizer: str | None) -> None:
        for name, states in self._states.items():
            for old in list(states):
                new = state_name(optimizer, old)
                if new != old:
                    ranges, dtype = self._ranges.pop((f"state.{old}", name)), states.pop(old)
                    if new is not None:
                        self._ranges[f"state.{new}", name] = ranges
                        states[new] = dtype


class _Mapped:
    """A tensor whose file is mapped into memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_tensor(self, key: str) -> torch.Tensor:
        return self._tensor.clone()  # The copy stays valid after the mapped file is closed.

    def get_slice(self, key: str) -> torch.Tensor:
        return self._tensor


def _mapped_range(start: int, tensor: torch.Tensor) -> StoredRange:
    tensor = tensor.detach()
    return StoredRange(start, tensor.numel(), tensor.dtype, _Mapped(tensor), "")


def open_folder(
    directory: Path,
    rounding: Mapping[str, torch.dtype] | None = None,
    known: Known | None = None,
    module_suffices: bool = False,
) -> DeepSpeedCheckpoint | None:
    """Return the DeepSpeed checkpoint in ``directory``, or None if there is no such checkpoint.

    The arguments are the same as those of :class:`DeepSpeedCheckpoint`.

    Raises:
        CheckpointError: The checkpoint is damaged, or has a kind that cannot be read.
    """
    folder = find(directory)
    if folder is None:
        return None
    try:
        return DeepSpeedCheckpoint(folder, rounding, known, module_suffices)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{directory} differs from what DeepSpeed 0.14 to 0.19 writes ({type(error).__name__}: "
            f"{str(error)[:200]}); it was "
            "changed, or written by another version: load it with DeepSpeed and save it again, or load another tag"
        ) from error
