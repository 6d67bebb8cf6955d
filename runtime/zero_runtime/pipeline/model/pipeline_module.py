"""``PipelineModule``, a model that is a sequence of layers and is partitioned into pipeline stages."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from zero_runtime import comm
from zero_runtime.activation_checkpointing import checkpoint, non_reentrant_checkpoint
from zero_runtime.errors import ConfigError, UsageError
from zero_runtime.groups.process_grid import PIPE, ProcessTopology
from zero_runtime.pipeline import layer_files
from zero_runtime.pipeline.model import stage_partition, ties
from zero_runtime.pipeline.model.layer_specs import (
    Layer,
    LayerSpec,
    TiedLayerSpec,
    checked_layers,
    name_of,
    trained_numel,
)
from zero_runtime.pipeline.model.layer_times import layer_seconds
from zero_runtime.pipeline.model.seeds import LayerSeeds
from zero_runtime.pipeline.stage_grid import PipelineGrid, topology_for, topology_of

DEFAULT_METHOD = "parameters"
_OWN_CHECKPOINTS = (checkpoint, non_reentrant_checkpoint)


class PipelineModule(torch.nn.Module):
    """A sequence of layers, each of which is called with the output of the previous layer.

    A rank builds only the layers of its stage.

    ::

        model = PipelineModule([LayerSpec(Embedding), *[LayerSpec(Block) for _ in range(8)], LayerSpec(Head)],
                               num_stages=2, loss_fn=cross_entropy)
        engine, *_ = zero_runtime.initialize(model=model, config="ds.json")
        loss = engine.train_batch(batches)

    Args:
        layers: A list of modules, ``LayerSpec``s, ``TiedLayerSpec``s and functions of one argument, or a
            ``torch.nn.Sequential``.
        num_stages: The number of stages. Without ``num_stages`` and ``topology``, ``initialize`` assigns and
            builds the layers according to the configuration (``pipeline_parallel.pp_size`` or
            ``pipeline.stages``). Until then the model has no parameters of layers that are not built. The
            same applies if torch.distributed is not initialized yet.
        topology: The axes of all ranks, with an axis ``pipe``, in place of ``num_stages``.
        loss_fn: The loss function, called with (output of the last layer, labels). Without it the output is
            the loss.
        seed_layers: Whether to seed the random generators for each layer, before it is built and before it
            runs.
        seed_fn: A function that is called with a seed. The default seeds all generators.
        base_seed: The seed of layer 0.
        partition_method: The quantity that is balanced between stages: ``uniform`` (the number of layers),
            ``parameters`` (trainable elements), ``type:REGEX`` (layers whose class name matches, ignoring
            case) or ``profile`` (the time of forward and backward passes of each layer, measured on rank 0).
            The default is the method in the configuration, or ``parameters`` if it sets none.
        activation_checkpoint_interval: The number of layers between two activation checkpoints; 0 for none.
        activation_checkpoint_func: The function that checkpoints a call.
        checkpointable_layers: Class names of layers. Only sequences that consist of these layers are
            checkpointed. The default is all sequences with parameters.
        dynamic_shape: Whether shapes and dtypes of activations may change from one micro-batch to the next.
        sample_input: An input of the first layer, for ``profile``. The default is the first batch of the
            training data.
        virtual_stages: The number of chunks of the model on each stage, for the schedule ``interleaved``. The
            chunks are assigned to the stages in turn. The default is the number in the configuration, or 1 if
            it sets none.

    Raises:
        ConfigError: An argument is invalid, there are fewer layers than stages, or the stages do not divide
            the ranks.
    """

    def __init__(  # noqa: PLR0913 - the signature is DeepSpeed's
        self,
        layers: Iterable[Layer],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], object] | None = None,
        base_seed: int = 1234,
        partition_method: str | None = None,
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        sample_input: Any = None,
        virtual_stages: int | None = None,
    ) -> None:
        super().__init__()
        self._layer_specs = checked_layers(layers)
        self.loss_fn = loss_fn
        self.seeds = LayerSeeds(seed_layers, seed_fn, base_seed)
        self.partition_method = partition_method
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = checkpointable_layers
        self.dynamic_shape = dynamic_shape
        self.sample_input = sample_input
        self.grid: PipelineGrid | None = None
        self.parts: list[int] = []
        self.virtual_stages = 1
        self.wanted_virtual_stages = virtual_stages
        self.forward_funcs: list[Callable[[Any], Any]] = []
        self.layer_numbers: list[int] = []  # numbers, in the complete model, of the layers in forward_funcs
        self._layer_ranges: list[range] = []  # indices into forward_funcs, for each chunk
        self.tied_modules = torch.nn.ModuleDict()
        self.ties: list[ties.Tie] = []
        self.wanted: ProcessTopology | int | None = num_stages
        if num_stages is not None and topology is not None:
            raise ConfigError("both num_stages and topology are given to PipelineModule; give one")
        if topology is not None:
            self.wanted = topology_of(topology)
        self._check_arguments()
        unmeasured = self.partition_method == "profile" and sample_input is None
        self.method = partition_method or DEFAULT_METHOD
        if self.wanted is not None and comm.is_initialized() and not unmeasured:
            self.deal(PipelineGrid(self._topology()), self.partition_method, chunks=virtual_stages or 1)
            return
        # Before layers are assigned to stages, scripts can select parameters of modules that already exist.
        for number, layer in enumerate(self._layer_specs):
            if isinstance(layer, torch.nn.Module):
                self.add_module(str(number), layer)

    # Assigning layers to stages.

    def _check_arguments(self) -> None:
        for number, layer in enumerate(self._layer_specs):
            if isinstance(layer, PipelineModule):
                raise ConfigError(
                    f"layer {number} of the pipeline is a pipeline itself; give its layers instead"
                )
        ties.check_ties(self._layer_specs)
        for name, count in (("num_stages", self.wanted), ("virtual_stages", self.wanted_virtual_stages)):
            if not isinstance(count, ProcessTopology | None) and (type(count) is not int or count < 1):
                raise ConfigError(
                    f"{name} of a PipelineModule is {count!r}; expected a whole number of at least 1"
                )
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise ConfigError(
                f"loss_fn of a PipelineModule is {self.loss_fn!r}; expected a function of (output, labels), or None"
            )
        if self.partition_method is not None and not isinstance(self.partition_method, str):
            raise stage_partition.unknown_method(self.partition_method)
        self.set_checkpoint_interval(self.activation_checkpoint_interval)

    def _topology(self) -> ProcessTopology:
        if isinstance(self.wanted, ProcessTopology):
            return self.wanted
        assert self.wanted is not None
        return topology_for(self.wanted, comm.get_world_size())

    @property
    def layers(self) -> list[Layer]:
        """All layers of the model, as they were passed to the constructor."""
        return self._layer_specs

    @property
    def is_dealt(self) -> bool:
        """Whether the layers are assigned to stages and built."""
        return self.grid is not None

    def deal(self, grid: PipelineGrid, method: str | None, sample: Any = None, chunks: int = 1) -> None:
        """Assign the layers to the stages of ``grid``, and build the layers of this rank's stage.

        All ranks must call this method.

        Args:
            grid: The grid of all ranks.
            method: The partition method, or None for the default method.
            sample: An input of the first layer, for ``profile``, if the module has no ``sample_input``.
            chunks: The number of chunks of the model on each stage.

        Raises:
            ConfigError: :meth:`bounds` raises it.
        """
        stages = grid.num_stages
        self.method = method or DEFAULT_METHOD
        bounds = self.bounds(stages * chunks, self.method, sample)
        self._clear()
        self.grid, self.parts, self.virtual_stages = grid, bounds, chunks
        for chunk in range(grid.stage, stages * chunks, stages):
            self._build(bounds[chunk], bounds[chunk + 1])
        self.to(grid.device)
        self.ties = ties.make_ties(self._layer_specs, bounds, dict(self.tied_modules), grid.processes)

    def move_to(self, grid: PipelineGrid) -> None:
        """Replace the grid by one with more axes than stages and replicas. All ranks must call this method.

        Raises:
            ConfigError: This rank would have a different stage in ``grid``.
        """
        assert self.grid is not None
        if (grid.num_stages, grid.stage) != (self.num_stages, self.stage_id):
            raise ConfigError(
                f"this rank was assigned stage {self.stage_id} of {self.num_stages}, but the axes "
                f"{grid.topology.axes} assign it stage {grid.stage} of {grid.num_stages}; give PipelineModule a "
                "topology of these axes"
            )
        self.grid = grid
        self.ties = ties.make_ties(self._layer_specs, self.parts, dict(self.tied_modules), grid.processes)

    def bounds(self, stages: int, method: str, sample: Any = None) -> list[int]:
        """Return the first layer of each of ``stages`` stages or chunks under ``method``, and the end of the last one.

        Raises:
            ConfigError: The method is unknown, no layer matches the pattern, or there are fewer layers than
                stages.
        """
        kind, _, pattern = method.partition(":")
        kind = kind.strip().lower()
        if kind == "uniform":
            return stage_partition.uniform(len(self._layer_specs), stages)
        if kind == "parameters":
            return stage_partition.balanced([trained_numel(layer) for layer in self._layer_specs], stages)
        if kind == "type" and pattern:
            return stage_partition.balanced(self._matches(pattern), stages)
        if kind == "profile":
            sample_input = self.sample_input if self.sample_input is not None else sample
            return stage_partition.balanced(layer_seconds(self._layer_specs, sample_input), stages)
        raise stage_partition.unknown_method(method)

    def _matches(self, pattern: str) -> list[int]:
        try:
            regex = re.compile(pattern, re.IGNORECASE)
        except re.error as error:
            raise ConfigError(f"partition_method type:{pattern} is no regular expression: {error}") from None
        names = [name_of(layer) for layer in self._layer_specs]
        matches = [int(regex.search(name) is not None) for name in names]
        if not any(matches):
            raise ConfigError(
                f"partition_method type:{pattern} matches no layer; the layers are {', '.join(dict.fromkeys(names))}"
            )
        return matches

    def _clear(self) -> None:
        for name in list(self._modules):
            if name != "loss_fn":  # Every stage keeps a loss function that is a module.
                del self._modules[name]
        self.tied_modules = torch.nn.ModuleDict()
        self.forward_funcs, self.layer_numbers, self._layer_ranges = [], [], []

    def _build(self, start: int, stop: int) -> None:
        built_before = len(self.forward_funcs)
        self.layer_numbers += range(start, stop)
        self._layer_ranges.append(range(built_before, built_before + stop - start))
        for number, layer in enumerate(self._layer_specs[start:stop], start):
            self.seeds.before_building(number)
            if isinstance(layer, TiedLayerSpec):
                if layer.key not in self.tied_modules:
                    self.tied_modules[layer.key] = layer.build()
                module = self.tied_modules[layer.key]
                self.forward_funcs.append(
                    module if layer.forward_fn is None else partial(layer.forward_fn, module)
                )
                continue
            built = layer.build() if isinstance(layer, LayerSpec) else layer
            if isinstance(built, torch.nn.Module):
                self.add_module(str(number), built)
            self.forward_funcs.append(built)

    # Running.

    def forward(self, inputs: Any, chunk: int = 0) -> Any:
        """Run the layers of chunk ``chunk`` of this stage. Without virtual stages, chunk 0 is the complete stage."""
        if not self.is_dealt:
            raise UsageError(
                "the layers of this PipelineModule are not assigned to stages yet; zero_runtime.initialize does that"
            )
        number, layers = self.seeds.begin_pass(chunk), self._layer_ranges[chunk]
        interval = self.activation_checkpoint_interval or len(layers)
        for start in range(0, len(layers), interval):
            run = layers[start : start + interval]
            if self.activation_checkpoint_interval and self._is_checkpointable(run):
                inputs = self._checkpointed(run, number, inputs)
            else:
                inputs = self._run(run, number, inputs)
        return inputs

    @property
    def differentiates_inputs(self) -> bool:
        """Whether checkpointed layers get gradients only if their inputs require gradients.

        This is true if the script passes its own checkpoint function.
        """
        return (
            self.activation_checkpoint_interval > 0
            and self.activation_checkpoint_func not in _OWN_CHECKPOINTS
        )

    def _checkpointed(self, layers: range, number: int, inputs: Any) -> Any:
        if self.activation_checkpoint_func in _OWN_CHECKPOINTS:
            return self.activation_checkpoint_func(partial(self._run, layers, number), inputs)
        # Reentrant checkpoints find only tensors that are arguments themselves. So a tuple is passed as several
        # arguments, as in DeepSpeed.
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        return self.activation_checkpoint_func(partial(self._run_arguments, layers, number), *arguments)

    def _run_arguments(self, layers: range, number: int, *inputs: Any) -> Any:
        return self._run(layers, number, inputs[0] if len(inputs) == 1 else inputs)

    def _run(self, layers: range, number: int, inputs: Any) -> Any:
        for layer in layers:
            self.seeds.before_running(self.layer_numbers[layer], number)
            inputs = self.forward_funcs[layer](inputs)
        return inputs

    def _is_checkpointable(self, run: range) -> bool:
        layers = [self.forward_funcs[number] for number in run]
        if self.checkpointable_layers is not None:
            return all(type(layer).__name__ in self.checkpointable_layers for layer in layers)
        modules = (
            getattr(layer, "args", (layer,))[0] if isinstance(layer, partial) else layer for layer in layers
        )
        return any(
            next(each.parameters(), None) is not None for each in modules if isinstance(each, torch.nn.Module)
        )

    def set_checkpoint_interval(self, interval: int) -> None:
        """Change ``activation_checkpoint_interval``."""
        if type(interval) is not int or interval < 0:
            raise ConfigError(
                f"activation_checkpoint_interval is {interval!r}; expected a whole number of at least 0"
            )
        self.activation_checkpoint_interval = interval

    # Queries.

    def _dealt(self) -> PipelineGrid:
        if self.grid is None:
            raise UsageError("the layers are not assigned to stages yet; zero_runtime.initialize does that")
        return self.grid

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self._dealt().num_stages

    @property
    def stage_id(self) -> int:
        """This rank's stage."""
        return self._dealt().stage

    def num_pipeline_stages(self) -> int:
        """Return the number of stages."""
        return self.num_stages

    def partitions(self) -> list[int]:
        """Return the bounds of the stages: stage s has the layers from ``partitions()[s]`` to ``partitions()[s + 1]``.

        With virtual stages the result contains the bounds of all chunks. Stage s has chunk s and then every
        ``num_stages``-th chunk.
        """
        return self.parts

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage that has layer ``layer_idx``."""
        if not 0 <= layer_idx < len(self._layer_specs):
            raise UsageError(f"there is no layer {layer_idx} among {len(self._layer_specs)}")
        return (bisect_right(self.parts, layer_idx) - 1) % self.num_stages

    def topology(self) -> ProcessTopology:
        """Return the axes of all ranks."""
        return self._dealt().topology

    def mpu(self) -> PipelineGrid:
        """Return the ranks and groups along each axis, with the methods of Megatron's model-parallel unit."""
        return self._dealt()

    # Files of layers.

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """Return the path of the file of layer ``local_layer_idx`` of this stage.

        :meth:`save_state_dict` writes this file.
        """
        number = self.layer_numbers[local_layer_idx]
        return str(layer_files.layer_file(ckpt_dir, number, layer_files.slice_name(self.mpu())))

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        """Return the paths of all existing files of layer ``local_layer_idx`` of this stage.

        The files of all tensor-parallel ranks are included.
        """
        paths = layer_files.layer_files(ckpt_dir, self.layer_numbers[local_layer_idx])
        return [str(each) for each in paths]

    def save_state_dict(
        self, save_dir: str, checkpoint_engine: Any = None, exclude_frozen_params: bool = False
    ) -> None:
        """Write a file for each layer of this stage, under DeepSpeed's file names. Only the first replica writes.

        Args:
            save_dir: The folder of the files, which is created if it is missing.
            checkpoint_engine: An object that saves a state dict with ``save(state_dict, path)``. The default is
                torch.save.
            exclude_frozen_params: Whether to leave out frozen parameters.
        """
        layers = zip(self.layer_numbers, self.forward_funcs, strict=True)
        layer_files.save_layers(layers, self.mpu(), save_dir, checkpoint_engine, exclude_frozen_params)

    def load_state_dir(self, load_dir: str, checkpoint_engine: Any = None, strict: bool = True) -> None:
        """Read the files of this stage's layers, which any stages may have written.

        The master weights of an optimizer are not updated.

        Args:
            load_dir: The folder of the files.
            checkpoint_engine: An object that loads a state dict with ``load(path, map_location)``. The
                default is torch.load, weights only.
            strict: Whether to refuse missing and unexpected names.

        Raises:
            CheckpointError: A file is missing.
        """
        layers = zip(self.layer_numbers, self.forward_funcs, strict=True)
        layer_files.load_layers(layers, self.mpu(), load_dir, checkpoint_engine, strict)

    def allreduce_tied_weight_gradients(self) -> None:
        """Sum the gradients of tied parameters over the stages that share them.

        ``train_batch`` calls this method automatically.
        """

        def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            return parameter.grad

        ties.reduce_gradients(self.ties, gradient_of)

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """Return additional losses of the last forward pass by name, or None without additional losses.

        Subclasses can override this method. It is called on the last stage.
        """
        return None

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Compile each layer with torch.compile, to which the arguments are passed."""
        for number, layer in enumerate(self.forward_funcs):
            if isinstance(layer, torch.nn.Module):
                layer.compile(*arguments, **options)
            else:
                self.forward_funcs[number] = torch.compile(layer, *arguments, **options)


def stages_of(module: PipelineModule) -> int | None:
    """Return the number of stages that ``module`` requests, or None if the configuration must set it."""
    if isinstance(module.wanted, ProcessTopology):
        return module.wanted.size(PIPE)
    return module.wanted
