"""Finds the call site of a collective: the first frame outside torch, and the function of torch that this frame called.

DeepSpeed, zero_runtime, accelerate and Lightning issue collectives in their own modules. The frames of these modules
are also skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import torch

_TORCH: Final = Path(torch.__file__).parent
_INTERNAL_PREFIXES: Final = (f"{_TORCH}/", f"{Path(__file__).parents[2]}/", "<frozen", "<eval_with_key")
_COMPILED: Final = "/torchinductor_"  # part of the path of code that torch's compiler generated
# The modules of frameworks that only forward calls to torch.distributed. The call site is the caller of such a module.
_FRAMEWORKS_DOORS: Final = (
    "/deepspeed/comm/",
    "/deepspeed/utils/nvtx.py",
    "/zero_runtime/comm.py",
    "/zero_runtime/deepspeed_names/ranks/",
    "/zero_runtime/groups/comm_log.py",
    "/accelerate/accelerator.py",
    "/accelerate/data_loader.py",
    "/accelerate/state.py",
    "/accelerate/utils/",
    "/transformers/trainer_pt_utils.py",
    "/lightning/fabric/utilities/",
    "/lightning_fabric/utilities/",
    "/torchmetrics/utilities/",
    "/lightning/fabric/plugins/collectives/",
    "/lightning_fabric/plugins/collectives/",
    "/lightning/fabric/strategies/",
    "/lightning_fabric/strategies/",
    "/lightning/pytorch/strategies/",
    "/pytorch_lightning/strategies/",
    "/lightning_utilities/",
    "/lightning/pytorch/trainer/call.py",
    "/pytorch_lightning/trainer/call.py",
)
# The modules whose functions a program calls to issue a collective.
_API_FILES: Final = frozenset(
    str(_TORCH / "distributed" / name)
    for name in ("distributed_c10d.py", "_functional_collectives.py", "nn/functional.py")
)
_FUNCTIONAL_FILE: Final = str(_TORCH / "distributed" / "_functional_collectives.py")
# The files of the frames between a functional collective and its kernel.
_OPERATOR_FILES: Final = frozenset(str(_TORCH / name) for name in ("_ops.py", "_library/autograd.py"))
_STANDARD_WRAPPERS: Final = frozenset({"contextlib.py", "functools.py", "typing_extensions.py"})

PROGRAM: Final = 0
INTERNAL: Final = 1
API: Final = 2

_MOST_CODES: Final = 20_000
_MOST_SITES: Final = 50_000

# Address of the program's code, offset of the instruction, address of torch's function.
Key = tuple[int, int, int]


def is_of_autograd(frame: FrameType | None) -> bool:
    """Return whether ``frame``, the caller of a functional collective, is the backward pass of a different collective.

    In torch 2.13 such a backward pass is a Python function. If it is a C++ function, the caller is autograd's engine,
    or for a GPU a thread without a Python frame.
    """
    while frame is not None and frame.f_code.co_filename in _OPERATOR_FILES:
        frame = frame.f_back
    if frame is None:
        return True
    code = frame.f_code
    if code.co_filename == _FUNCTIONAL_FILE:
        return code.co_name.endswith("_backward")
    return code.co_name == "_engine_run_backward"


class CallSites:
    """Interned call sites.

    The keys contain the addresses of code objects. References keep these objects alive, so no address is reused.

    Args:
        intern: A function that writes one ``site`` row (``call_site``, ``api``) and returns the id of the row.
    """

    def __init__(self, intern: Callable[[dict[str, Any]], int]) -> None:
        self.kinds: dict[int, int] = {}
        self.sites: dict[Key, int] = {}
        self._codes: list[CodeType] = []
        self._intern = intern

    def find(self, frame: FrameType | None) -> int:
        """Return the id of the call site. ``frame`` is the caller of the ProcessGroup method."""
        api: CodeType | None = None
        key: Key = (0, 0, 0)
        kinds = self.kinds
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(id(code))
            if kind is None:
                kind = self._classify(code)
            if kind == PROGRAM:
                key = (id(code), frame.f_lasti, id(api))
                break
            if kind == API:
                api = code
            frame = frame.f_back
        return self.sites.get(key) or self._add(frame, key, api)

    def _classify(self, code: CodeType) -> int:
        file = code.co_filename
        if file in _API_FILES:
            kind = API
        elif (
            file.startswith(_INTERNAL_PREFIXES)
            or any(part in file for part in (_COMPILED, *_FRAMEWORKS_DOORS))
            or Path(file).name in _STANDARD_WRAPPERS
        ):
            kind = INTERNAL
        else:
            kind = PROGRAM
        if len(self._codes) < _MOST_CODES:
            self._codes.append(code)
            self.kinds[id(code)] = kind
        return kind

    def holds(self, code: CodeType) -> bool:
        """Return whether there is a reference to ``code``, so that its address identifies it."""
        return id(code) in self.kinds

    def is_program(self, code: CodeType) -> bool:
        """Return whether ``code`` belongs to the program, and there is a reference to it."""
        return self.kinds.get(id(code)) == PROGRAM

    def _add(self, frame: FrameType | None, key: Key, api: CodeType | None) -> int:
        site = None
        if frame is not None:
            code = frame.f_code
            site = f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}"
        number = self._intern({"call_site": site, "api": None if api is None else api.co_name})
        is_reusable = frame is not None and self.holds(frame.f_code) and (api is None or self.holds(api))
        if is_reusable and len(self.sites) < _MOST_SITES:
            self.sites[key] = number
        return number
