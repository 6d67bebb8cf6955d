"""``deepspeed.accelerator``: the device on which the training runs, CUDA or CPU, with one set of methods for both.

On a CPU, the methods for devices have substitutes. Streams do nothing, the memory is the resident memory of the
process, and the only device is ``cpu``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch

from zero_runtime.deepspeed_names.devices.host_streams import HostEvent, HostStream
from zero_runtime.errors import ConfigError, UnsupportedError
from zero_runtime.startup.memory_status import memory_in_use


class Accelerator:
    """A device, with methods for queries and settings. Memory is in bytes.

    Args:
        kind: The kind of device: ``cuda`` or ``cpu``.
    """

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._communication_backend_name = "nccl" if self._cuda else "gloo"
        self._compile_backend = "inductor"
        self._resident = 0

    @property
    def _cuda(self) -> bool:
        return self._name == "cuda"

    # Devices.

    def is_available(self) -> bool:
        """Return whether the device can be used."""
        return torch.cuda.is_available() if self._cuda else True

    def device_name(self, device_index: int | None = None) -> str:
        """Return the name of a device: ``cpu``, ``cuda``, or with an index a name such as ``cuda:1``."""
        return self._name if device_index is None or not self._cuda else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """Return a context manager that makes a device the current device."""
        return torch.cuda.device(device_index) if self._cuda else nullcontext()

    def set_device(self, device_index: int) -> None:
        """Make a device the current device."""
        if self._cuda:
            torch.cuda.set_device(device_index)

    def current_device(self) -> int:
        """Return the number of the current device. On a CPU, this is LOCAL_RANK, as in DeepSpeed."""
        return torch.cuda.current_device() if self._cuda else int(os.environ.get("LOCAL_RANK", "0"))

    def current_device_name(self) -> str:
        """Return the name of the current device, such as ``cuda:0`` or ``cpu``."""
        return f"cuda:{torch.cuda.current_device()}" if self._cuda else "cpu"

    def get_current_device(self) -> torch.device:
        """Return the current device."""
        return torch.device(self.current_device_name())

    def device_count(self) -> int:
        """Return the number of devices. On a CPU, this is the number of ranks of this host, or 1."""
        if self._cuda:
            return torch.cuda.device_count()
        return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on this kind of device."""
        return tensor.device.type == self._name

    def communication_backend_name(self) -> str:
        """Return ``nccl`` or ``gloo``. On a CPU, DeepSpeed returns ``ccl`` if its own backend is built."""
        return self._communication_backend_name

    def visible_devices_envs(self) -> list[str]:
        """Return the names of the environment variables that select devices."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[Any]) -> None:
        """Set the variables in ``current_env`` that select devices."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def export_envs(self) -> list[str]:
        """Return the prefixes of the environment variables that are passed to ranks."""
        return ["NCCL", "LD_LIBRARY_PATH", "PATH"] if self._cuda else ["OMP", "LD_LIBRARY_PATH", "PATH"]

    # Capabilities.

    def is_bf16_supported(self) -> bool:
        """Return whether the device can compute in bf16."""
        return torch.cuda.is_bf16_supported() if self._cuda else True

    def is_fp16_supported(self) -> bool:
        """Return whether the device can compute in fp16. On a CPU, fp16 is slow."""
        return torch.cuda.get_device_capability() >= (6, 0) if self._cuda else True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that a model may have."""
        dtypes = [torch.float]
        if self.is_fp16_supported():
            dtypes.append(torch.half)
        if self.is_bf16_supported():
            dtypes.append(torch.bfloat16)
        return dtypes

    def is_triton_supported(self) -> bool:
        """Return whether the device can run Triton's kernels."""
        return self._cuda and torch.cuda.get_device_capability() >= (8, 0)

    def is_synchronized_device(self) -> bool:
        """Return whether calls are synchronous, which is the case on a CPU."""
        return not self._cuda

    def use_host_timers(self) -> bool:
        """Return whether times are measured on the host."""
        return not self._cuda

    def resolves_data_dependency(self) -> bool:
        """Return whether the data is ready when a call returns."""
        return not self._cuda

    def handles_memory_backpressure(self) -> bool:
        """Return whether the device itself handles memory backpressure: true on a CPU, false on CUDA."""
        return not self._cuda

    def amp(self) -> Any:
        """Return the module for automatic mixed precision."""
        return torch.amp

    # Random numbers.

    def random(self) -> Any:
        """Return the module torch.random."""
        return torch.random

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set the state of the generator."""
        if not self._cuda:
            torch.set_rng_state(new_state)
        else:
            torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Return the state of the generator."""
        if not self._cuda:
            return torch.get_rng_state()
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def manual_seed(self, seed: int) -> None:
        """Seed the generator of the current device."""
        if self._cuda:
            torch.cuda.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        if self._cuda:
            torch.cuda.manual_seed_all(seed)
        else:
            torch.manual_seed(seed)

    def initial_seed(self) -> int:
        """Return the initial seed of the generator."""
        return torch.cuda.initial_seed() if self._cuda else torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        """Return the generator of a device."""
        return torch.cuda.default_generators[device_index] if self._cuda else torch.default_generator

    # Streams.

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for the device."""
        if self._cuda:
            torch.cuda.synchronize(device_index)

    @property
    def Stream(self) -> Callable[..., Any]:  # noqa: N802 - DeepSpeed's name
        """The class of streams."""
        return torch.cuda.Stream if self._cuda else HostStream

    @property
    def Event(self) -> Callable[..., Any]:  # noqa: N802 - DeepSpeed's name
        """The class of events."""
        return torch.cuda.Event if self._cuda else HostEvent

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context manager that makes a stream the current stream."""
        return torch.cuda.stream(stream) if self._cuda else nullcontext()

    def current_stream(self, device_index: int | None = None) -> Any:
        """Return the current stream."""
        return torch.cuda.current_stream(device_index) if self._cuda else HostStream()

    def default_stream(self, device_index: int | None = None) -> Any:
        """Return the default stream."""
        return torch.cuda.default_stream(device_index) if self._cuda else HostStream()

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        """Begin a profiler range."""
        if self._cuda:
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: Any = None) -> None:
        """End the current profiler range."""
        if self._cuda:
            torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call ``callback`` when the device is initialized. On a CPU, call it immediately."""
        return torch.cuda._lazy_call(callback) if self._cuda else callback()

    def create_graph(self) -> Any:
        """Return a new CUDA graph; None on a CPU."""
        return torch.cuda.CUDAGraph() if self._cuda else None

    def capture_to_graph(
        self, graph: Any, pool: Any = None, stream: Any = None
    ) -> AbstractContextManager[Any]:
        """Return a context manager that captures the operations issued within it."""
        return torch.cuda.graph(graph, pool=pool, stream=stream) if self._cuda else nullcontext()

    def replay_graph(self, graph: Any) -> None:
        """Run a captured graph."""
        if self._cuda:
            graph.replay()

    # Memory.

    def empty_cache(self) -> None:
        """Return cached memory to the device."""
        if self._cuda:
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes of all tensors. On a CPU, return the resident memory of the process."""
        return torch.cuda.memory_allocated(device_index) if self._cuda else memory_in_use().resident

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the peak of :meth:`memory_allocated`, in bytes."""
        return torch.cuda.max_memory_allocated(device_index) if self._cuda else memory_in_use().peak_resident

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """Reset the peak of the allocated memory. On a CPU, the kernel counts the peak, and this call has no effect."""
        self.reset_peak_memory_stats(device_index)

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        """Reset the peaks in the same way as :meth:`reset_peak_memory_stats`."""
        self.reset_peak_memory_stats(device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Reset all memory peaks. On a CPU, this call has no effect."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Return the bytes that torch's allocator reserves. On a CPU, return the resident memory of the process."""
        return torch.cuda.memory_reserved(device_index) if self._cuda else memory_in_use().resident

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Return the peak of :meth:`memory_reserved`, in bytes."""
        return torch.cuda.max_memory_reserved(device_index) if self._cuda else memory_in_use().peak_resident

    memory_cached = memory_reserved
    max_memory_cached = max_memory_reserved

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        """Return the counters of the allocator. On a CPU, return two values: the resident memory and its peak."""
        if self._cuda:
            return dict(torch.cuda.memory_stats(device_index))
        used = memory_in_use()
        return {"allocated_bytes.all.current": used.resident, "allocated_bytes.all.peak": used.peak_resident}

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the total memory of the device, or of the host on a CPU, in bytes."""
        if self._cuda:
            return int(torch.cuda.get_device_properties(device_index or 0).total_memory)
        return memory_in_use().host

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the free memory of the device, or of the host on a CPU, in bytes."""
        if self._cuda:
            return int(torch.cuda.mem_get_info(device_index)[0])
        used = memory_in_use()
        return used.host - used.host_used

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return ``tensor`` in page-locked memory. Without CUDA, return ``tensor`` itself."""
        return tensor.pin_memory() if self._cuda else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is in page-locked memory."""
        return tensor.is_pinned() if self._cuda else False

    # Tensors of one dtype.

    def _tensor(self, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        return partial(_made, dtype=dtype, device=self._name)

    BFloat16Tensor = property(lambda self: self._tensor(torch.bfloat16))
    ByteTensor = property(lambda self: self._tensor(torch.uint8))
    DoubleTensor = property(lambda self: self._tensor(torch.double))
    FloatTensor = property(lambda self: self._tensor(torch.float))
    HalfTensor = property(lambda self: self._tensor(torch.half))
    IntTensor = property(lambda self: self._tensor(torch.int))
    LongTensor = property(lambda self: self._tensor(torch.long))

    # Compiling.

    def get_compile_backend(self) -> str:
        """Return the backend of torch.compile."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Set the backend of torch.compile."""
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise ConfigError(f"there is no compiler backend {backend!r}; known are {', '.join(known)}")
        self._compile_backend = backend

    def create_op_builder(self, op_name: str) -> Any:
        """Raise UnsupportedError, because there are no kernels to build."""
        raise UnsupportedError(
            f"{op_name} would build a kernel; zero_runtime uses torch's and has none to build"
        )

    get_op_builder = create_op_builder


def _made(*arguments: Any, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return a tensor of values or of a size, in the same way as torch's old constructors."""
    if len(arguments) == 1 and isinstance(arguments[0], list | tuple | torch.Tensor):
        return torch.as_tensor(arguments[0], dtype=dtype, device=device)
    return torch.empty(arguments, dtype=dtype, device=device)


@cache
def get_accelerator() -> Accelerator:
    """Return the accelerator of this process: the one that DS_ACCELERATOR names, else CUDA if available, else the CPU.

    Raises:
        ConfigError: DS_ACCELERATOR names a device other than cuda and cpu.
    """
    wanted = os.environ.get("DS_ACCELERATOR", "").lower()
    if wanted and wanted not in ("cuda", "cpu"):
        raise ConfigError(
            f"DS_ACCELERATOR is {wanted!r}; zero_runtime runs on cuda and cpu; set one of them, or unset it"
        )
    return Accelerator(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))


def set_accelerator(accel_obj: Any) -> None:
    """Check that ``accel_obj`` is the accelerator in use, which cannot be changed here.

    Raises:
        UnsupportedError: ``accel_obj`` is a different accelerator.
    """
    if accel_obj is not get_accelerator():
        raise UnsupportedError(
            "set_accelerator is not in this version; DS_ACCELERATOR=cpu or =cuda chooses one"
        )


def is_current_accelerator_supported() -> bool:
    """Return whether the accelerator can be used."""
    return get_accelerator().is_available()
