"""Where in the program a collective was issued: the first frame outside torch, and torch's function that it called."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Final

import torch

_TORCH: Final = os.path.dirname(torch.__file__) + os.sep
_DISTRIBUTED: Final = os.path.join(_TORCH, "distributed") + os.sep
_COMMPROF: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# The modules whose public functions a program calls to issue a collective.
_API_FILES: Final = tuple(
    os.path.join(_DISTRIBUTED, *name)
    for name in (("distributed_c10d.py",), ("_functional_collectives.py",), ("nn", "functional.py"))
)
_STANDARD_WRAPPERS: Final = ("contextlib.py", "functools.py", "typing_extensions.py")

PROGRAM: Final = 0
INTERNAL: Final = 1
API: Final = 2

_MOST_CODES: Final = 20_000
_MOST_SITES: Final = 50_000


class CallSites:
    """Interned call sites. Keyed by the address of code objects, which are held so that an address is not reused.

    Args:
        intern: writes one ``site`` row (``call_site``, ``api``) and returns its id.
    """

    def __init__(self, intern: Callable[[dict[str, Any]], int]) -> None:
        self.kinds: dict[int, int] = {}
        self.sites: dict[tuple[int, int, int], int] = {}
        self._codes: list[CodeType] = []
        self._intern = intern

    def classify(self, code: CodeType) -> int:
        """Whether ``code`` is the program's, torch's, or one of the functions of torch.distributed."""
        if len(self._codes) > _MOST_CODES:
            self.kinds.clear()
            self.sites.clear()
            self._codes.clear()
        file = code.co_filename
        if file in _API_FILES:
            kind = API
        elif (
            file.startswith((_TORCH, _COMMPROF))
            or os.path.basename(file) in _STANDARD_WRAPPERS
            or file.startswith("<frozen")
        ):
            kind = INTERNAL
        else:
            kind = PROGRAM
        self._codes.append(code)
        self.kinds[id(code)] = kind
        return kind

    def add(self, frame: FrameType | None, key: tuple[int, int, int], api: CodeType | None) -> int:
        """Intern the site that ``key`` stands for; ``frame`` is the program's, ``None`` when there is none."""
        if len(self.sites) > _MOST_SITES:
            self.sites.clear()
        site = None
        if frame is not None:
            code = frame.f_code
            site = f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}"
        number = self._intern({"call_site": site, "api": None if api is None else api.co_name})
        self.sites[key] = number
        return number
