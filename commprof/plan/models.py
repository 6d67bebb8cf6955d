"""Determine the parameters of a model from its size, a function, a transformers config, or a recorded run.

The model is never run. Real models are built on torch's meta device, which allocates no memory and reads no
weights.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from commprof.errors import CommprofError, UsageError
from commprof.requested.experts.layers import ExpertLayer
from commprof.requested.memory.sized_models import likely_layers, transformer
from commprof.requested.parameters import Parameter

if TYPE_CHECKING:
    import torch

FORMS: Final = "params:175e9, py:module:function, hf:CONFIG_DIR or run:RUN"
_FACTORS: Final = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_ON_META: Final = "a model is built on the meta device, where tensors have no values"
_CORRECT: Final = "correct the module, or name one that can be imported"
_PAIR: Final = 2  # the length of (model, inputs)
_SHOWN: Final = 200  # maximum number of characters that are shown of an error message from other code

# A function that builds a module on the meta device. Its arguments are the number of samples of a micro-batch and the
# number of tokens of a sequence or None. It returns the module and the inputs of a micro-batch, which are None if they
# are not known.
Builder: TypeAlias = "Callable[[int, int | None], tuple[torch.nn.Module, Any]]"


class Model(NamedTuple):
    """A model whose parameters are known or assumed.

    Attributes:
        parameters: The parameters in model order. A tied parameter occurs once.
        layers: The assumed number of equal layers, or None for a model that was built or recorded.
        source: The source of the parameters, as text for the report.
        build: A function that builds the model again, with inputs. None if only the size or the parameters are
            known.
        experts: The layers with experts of a model that was built, without the number of their tokens.
        from_sequence: Whether the sequence length is the only source of the inputs.
    """

    parameters: list[Parameter]
    layers: int | None
    source: str
    build: Builder | None = None
    experts: tuple[ExpertLayer, ...] = ()
    from_sequence: bool = False

    @property
    def numel(self) -> int:
        """The number of elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)


def read_model(text: str, layers: int | None = None, sequence: int | None = None) -> Model:
    """Return the model that ``--model text`` names.

    Args:
        text: ``params:175e9``, ``py:module:function``, ``hf:CONFIG_DIR`` or ``run:RUN``.
        layers: The number of layers, if only the size of the model is known. With None, a typical number is assumed.
        sequence: The number of tokens of a sequence, for a function that takes it as an argument.

    Raises:
        UsageError: The text does not have one of these forms, or the model cannot be built.
        CommprofError: torch or transformers is not installed, or the run cannot be read.
    """
    kind, colon, rest = text.partition(":")
    if not colon or not rest or kind not in ("params", "py", "hf", "run"):
        raise UsageError(f"--model is {text!r}; expected {FORMS}")
    if kind == "params":
        return sized_model(parse_number(rest, "--model params:N"), layers)
    if layers is not None:
        raise UsageError(f"--layers {layers} is for --model params:N; a {kind}: model has layers of its own")
    if kind == "run":
        return _of_run(text, Path(rest))
    build = _from_function(text, rest) if kind == "py" else _from_transformers(text, Path(rest))
    return _built(text, build, sequence)._replace(from_sequence=kind == "hf")


def sized_model(numel: int, layers: int | None) -> Model:
    """Return a transformer of ``numel`` parameters in ``layers`` equal layers of four matrices.

    Raises:
        RequestedError: There are fewer parameters than the layers need.
    """
    depth = layers or likely_layers(numel)
    source = f"{numel:,} parameters, assumed to be {depth} layers of 4 matrices each (--layers)"
    return Model(transformer(numel, depth), depth, source)


def parse_number(text: str, option: str) -> int:
    """Parse a number of parameters: ``175e9``, ``1.3B`` or ``125M``.

    Raises:
        UsageError: The text is not such a number. The message names ``option``.
    """
    stripped = text.strip().replace("_", "").replace(",", "")
    factor = _FACTORS.get(stripped[-1:].upper(), 1.0)
    digits = stripped[:-1] if factor > 1.0 else stripped
    try:
        numel = float(digits) * factor
    except ValueError:
        numel = float("nan")
    if not 1 <= numel < 1e18:
        raise UsageError(
            f"{option} is {text!r}; expected a number of parameters, such as 175e9, 1.3B or 125M"
        )
    return round(numel)


def parameters_of(module: torch.nn.Module) -> list[Parameter]:
    """Return the parameters of ``module`` in the form in which the recorder publishes them, in one optimizer group."""
    from commprof.recorder.training import published_models as recorded

    listed = recorded.parameters_of(module)
    rows = recorded.parameter_rows(listed, {key: 0 for each in listed for key in each.keys})
    owners = _owner_types(module)
    sizes = {name: _ep_size(parameter) for name, parameter in module.named_parameters()}
    return [
        Parameter(
            row["name"],
            row["numel"],
            row["dtype"],
            row["param_group"],
            row["requires_grad"],
            row["forward_index"],
            row["shape"],
            owner_types=owners.get(row["name"]),
            ep_size=sizes.get(row["name"]),
        )
        for row in rows
    ]


def _ep_size(parameter: torch.nn.Parameter) -> int | None:
    """Return the number of ranks that share an expert's parameter, or None for any other parameter.

    DeepSpeed's ``MoE`` marks the parameters of experts with ``allreduce = False`` and a group name such as
    ``ep_size_2``.
    """
    size = str(getattr(parameter, "group_name", "")).removeprefix("ep_size_")
    return int(size) if getattr(parameter, "allreduce", True) is False and size.isdecimal() else None


def expert_layers(module: torch.nn.Module) -> Iterable[ExpertLayer]:
    """Return the layers of DeepSpeed's class ``MoE``, and those of zero_runtime, which have the same attributes."""
    for name, child in module.named_modules():
        layer: Any = getattr(child, "deepspeed_moe", None)
        gate: Any = getattr(layer, "gate", None)
        if gate is None:
            continue
        experts, hidden = (int(size) for size in gate.wg.weight.shape)
        yield ExpertLayer(
            name,
            experts,
            int(layer.ep_size),
            int(gate.k),
            float(gate.capacity_factor),
            int(gate.min_capacity),
            bool(gate.drop_tokens),
            hidden,
            tokens=0,
        )


def _owner_types(module: torch.nn.Module) -> dict[str, str]:
    """Return the classes of the modules that own each parameter, in the form of the ``parameters`` table."""
    from torch import nn

    owners: dict[int, list[str]] = {}
    for child in module.modules():
        classes = [each for each in type(child).__mro__ if issubclass(each, nn.Module)]
        names = {each.__name__ for each in classes} - {"Module"}
        # Two kinds of classes get their full name: those that are not the class of torch.nn with the same name, and
        # the class of a module whose forward is replaced.
        others = [each for each in classes if getattr(nn, each.__name__, each) is not each]
        others += [type(child)] if "forward" in vars(child) else []
        names |= {f"{each.__module__}.{each.__qualname__}" for each in others}
        for parameter in child.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(",".join(sorted(names)))
    return {name: ";".join(owners[id(parameter)]) for name, parameter in module.named_parameters()}


def _from_function(text: str, rest: str) -> Builder:
    torch = _torch(text)
    module_name, colon, function_name = rest.rpartition(":")
    if not colon or not module_name or not function_name:
        raise UsageError(f"--model is {text!r}; expected py:module:function, such as py:train:make_model")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        with prints_on_stderr():
            module = import_module(module_name)
    except ModuleNotFoundError as problem:
        if problem.name is None or not f"{module_name}.".startswith(f"{problem.name}."):
            raise _failed(text, f"importing {module_name}", problem, _CORRECT) from None
        raise UsageError(
            f"--model {text}: there is no module {problem.name!r} in {here} or on PYTHONPATH; "
            "start in the directory of the program, or set PYTHONPATH"
        ) from None
    except (Exception, SystemExit) as problem:
        raise _failed(text, f"importing {module_name}", problem, _CORRECT) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        what = "has no such name" if function is None else f"has a {type(function).__name__} of that name"
        raise UsageError(
            f"--model {text}: {module_name} {what}; expected a function {function_name}() that returns the model"
        )

    def build(micro_batch: int, sequence: int | None) -> tuple[Any, Any]:
        sizes = {"micro_batch": micro_batch, "sequence": sequence}
        expected = _named_arguments(function)
        if sequence is None and "sequence" in expected:
            if expected["sequence"].default is inspect.Parameter.empty:
                raise UsageError(
                    f"--model {text}: {function_name}() has a parameter sequence; give --sequence"
                )
            del sizes["sequence"]
        try:
            with torch.device("meta"), prints_on_stderr():
                made = function(**{name: size for name, size in sizes.items() if name in expected})
        except (Exception, SystemExit) as problem:
            raise _failed(text, f"{function_name}()", problem, _ON_META) from None
        module, inputs = made if isinstance(made, tuple) and len(made) == _PAIR else (made, None)
        if not isinstance(module, torch.nn.Module):
            raise UsageError(
                f"--model {text}: {function_name}() returned an object of type {type(module).__name__}; "
                "expected a torch.nn.Module, or (model, inputs)"
            )
        if inputs is None and sequence is not None:
            inputs = torch.zeros(micro_batch, sequence, dtype=torch.int64, device="meta")
        return module, inputs

    return build


def _from_transformers(text: str, directory: Path) -> Builder:
    if not (directory / "config.json").is_file():
        what = "has no config.json" if directory.is_dir() else "is not a directory"
        raise UsageError(
            f"--model {text}: {directory} {what}; name a directory with the config.json of a model"
        )
    torch = _torch(text)
    # These variables prevent downloads. They are set before the import, because transformers reads them there.
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        raise CommprofError(
            f"--model {text}: transformers is not installed; install it with pip install transformers, or use params:N"
        ) from None

    def build(micro_batch: int, sequence: int | None) -> tuple[Any, Any]:
        try:
            config = transformers.AutoConfig.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
            config.use_cache = False
            causal = type(config) in transformers.AutoModelForCausalLM._model_mapping
            kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
            with torch.device("meta"), prints_on_stderr():
                module = kind.from_config(config, trust_remote_code=False)
        except (Exception, SystemExit) as problem:
            raise _failed(text, "transformers", problem, f"check {directory / 'config.json'}") from None
        if sequence is None:
            return module, None
        tokens = torch.zeros(micro_batch, sequence, dtype=torch.int64, device="meta")
        return module, {"input_ids": tokens, **({"labels": tokens} if causal else {})}

    return build


def _of_run(text: str, path: Path) -> Model:
    """Return the model that a run trained, from the parameters that the program of the run published."""
    from commprof.ledger.requests.request import parameters_of as published  # imported here: needs pyarrow
    from commprof.trace.reader import open_run

    run = open_run(path)
    parameters = published(run.table("parameters"))
    if not parameters:
        raise UsageError(
            f"--model {text}: the run published no parameters; expected a run that trains with an engine, DDP or FSDP"
        )
    if any(parameter.ep_size is not None for parameter in parameters):
        raise UsageError(
            f"--model {text}: its model has experts, and a run does not show how many tokens they get in another "
            "job; "
            "use py:module:function"
        )
    numel, number = sum(parameter.numel for parameter in parameters), len(parameters)
    tensors = f"{number:,} tensor{'s' * (number > 1)}"
    return Model(parameters, None, f"The model of {path}, {numel:,} parameters in {tensors}")


def _built(text: str, build: Builder, sequence: int | None) -> Model:
    module, _ = build(1, sequence)
    try:
        parameters = parameters_of(module)
    except Exception as problem:  # for example, sizes of lazy modules are not known before their first pass
        raise _failed(
            text, "reading the parameters", problem, "give all sizes when the model is built"
        ) from None
    if not parameters:
        raise UsageError(
            f"--model {text}: {type(module).__name__} has no parameters; expected a model to train"
        )
    frozen = sum(parameter.numel for parameter in parameters if not parameter.requires_grad)
    numel = sum(parameter.numel for parameter in parameters)
    source = f"{type(module).__name__}, {numel:,} parameters in {len(parameters):,} tensors of {_units(parameters)} modules"
    source += f", {frozen:,} of them frozen" if frozen else ""
    return Model(parameters, None, source, build, tuple(expert_layers(module)))


def prints_on_stderr() -> AbstractContextManager[object]:
    """Return a context in which printed text goes to standard error, for code outside of commprof.

    Standard output is reserved for the answer of the command.
    """
    return redirect_stdout(sys.stderr)


def _named_arguments(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function written in C may have no signature
        return {}


def _units(parameters: Iterable[Parameter]) -> str:
    return f"{len({parameter.module for parameter in parameters}):,}"


def _failed(text: str, what: str, problem: BaseException, hint: str) -> UsageError:
    message = " ".join(str(problem).split())
    if len(message) > _SHOWN:
        message = message[:_SHOWN] + " ..."
    return UsageError(
        f"--model {text}: {what} raised {type(problem).__name__}{': ' if message else ''}{message}; {hint}"
    )


def _torch(text: str) -> Any:
    try:
        return import_module("torch")
    except ImportError:
        raise CommprofError(
            f"--model {text}: torch is needed to build a model, and is not installed; install torch, or use params:N"
        ) from None
