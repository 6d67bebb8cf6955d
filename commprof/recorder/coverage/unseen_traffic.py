"""Detects libraries that communicate below c10d, where nothing is recorded. The report lists these libraries."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

from torch._C import _distributed_c10d

_SYMMETRIC_MEMORY: Final = "_SymmetricMemory"

# For each module that may communicate below c10d if it is loaded, the name of the library. torch's symmetric memory
# is detected when the program uses it.
LOADED: Final[dict[str, str]] = {
    "deep_ep": "DeepEP (NVSHMEM)",
    "nvshmem.core": "NVSHMEM",
    "vllm.distributed.device_communicators.pynccl_wrapper": "vLLM's own calls of NCCL (pynccl)",
    "sglang.srt.distributed.device_communicators.pynccl_wrapper": "SGLang's own calls of NCCL (pynccl)",
    "cupy_backends.cuda.libs.nccl": "CuPy's own calls of NCCL",
    "flashinfer.comm": "FlashInfer's own all_reduce",
}
# For each module and its attribute that is set once the library communicates below c10d, the name of the library.
SET: Final[dict[tuple[str, str], str]] = {
    ("transformer_engine.pytorch.module.base", "_ub_communicators"): "TransformerEngine's userbuffers",
}


class Beneath:
    """Watches for communication below c10d.

    Args:
        note: A function that writes a note for the reader of the trace.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._noted: set[str] = set()
        self._patched: tuple[Any, Any] | None = None

    def install(self) -> None:
        """Start to detect when the ranks share a buffer of symmetric memory."""
        kind = getattr(_distributed_c10d, _SYMMETRIC_MEMORY, None)
        original = None if kind is None else vars(kind).get("rendezvous")
        if kind is None or original is None:
            return
        share = kind.rendezvous

        def rendezvous(*args: Any, **kwargs: Any) -> Any:
            self._tell("torch's symmetric memory was in use")
            return share(*args, **kwargs)

        kind.rendezvous = staticmethod(rendezvous)
        self._patched = vars(kind)["rendezvous"], original

    def remove(self) -> None:
        """Stop watching, unless other code has wrapped the wrapper since."""
        kind = getattr(_distributed_c10d, _SYMMETRIC_MEMORY, None)
        if (
            self._patched is not None
            and kind is not None
            and vars(kind).get("rendezvous") is self._patched[0]
        ):
            kind.rendezvous = self._patched[1]
        self._patched = None

    def look(self) -> None:
        """Write notes on the libraries that this process has loaded so far."""
        for module, what in LOADED.items():
            if module in sys.modules:
                self._tell(f"{what} was loaded")
        for (module, name), what in SET.items():
            if getattr(sys.modules.get(module), name, None):
                self._tell(f"{what} were in use")

    def _tell(self, what: str) -> None:
        if what not in self._noted:
            self._noted.add(what)
            self._note(f"{what}: communication through it is below c10d and is not recorded")
