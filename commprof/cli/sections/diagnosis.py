"""The checks of ``commprof doctor``: what can be recorded on this machine.

Each check is one function. No check changes the system.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

from commprof.cli import entry_point
from commprof.cli.extras import PACKAGES
from commprof.version import __version__

_COLLECTIVE_NAME: Final = re.compile(
    r"reduce|gather|scatter|all_?to_?all|broadcast|barrier|^send|^recv|permute"
)
_NO_COLLECTIVES: Final = re.compile(
    r"^__|supports|coalescing|sequence|enable|timeout|bound|options|backend|_hook"
)


class Level(StrEnum):
    """What a finding means for a recording."""

    OK = "ok"
    NOTE = "note"  # something will be missing from the records
    FAULT = "fault"  # nothing can be recorded


class Finding(NamedTuple):
    """The result of one check."""

    section: str
    level: Level
    text: str


def diagnose() -> list[Finding]:
    """Return all findings in the order of the output."""
    return [
        *_versions(),
        *_entry_point(),
        *_compiled_parts(),
        *_extras(),
        *_interception(),
        *_blind_spots(),
        *_machine(),
    ]


def _versions() -> Iterator[Finding]:
    section = "installed"
    yield Finding(
        section, Level.OK, f"commprof {__version__}, Python {platform.python_version()} ({sys.executable})"
    )
    if importlib.util.find_spec("torch") is None:
        text = "torch is not installed here: there is nothing to record. Install commprof into the environment that trains"
        yield Finding(section, Level.FAULT, text)
        return
    try:
        import torch
    # RuntimeError: an entry point of a package failed. OSError: a library could not be loaded.
    except Exception as error:
        text = f"torch cannot be imported: {type(error).__name__}: {error}{_caused_by(error)}"
        yield Finding(section, Level.FAULT, text)
        return
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    yield Finding(section, Level.OK, f"torch {torch.__version__}, {cuda}")
    import torch.distributed as dist

    if not dist.is_available():
        yield Finding(
            section, Level.FAULT, "this torch was built without torch.distributed: there is nothing to record"
        )
        return
    from commprof.recorder.coverage.trial import newer_torch

    newer = newer_torch(torch.__version__)
    if newer is not None:
        yield Finding(section, Level.NOTE, newer)
    backends = ("gloo", "nccl", "mpi", "ucc", "xccl")
    available = [name for name in backends if getattr(dist, f"is_{name}_available", lambda: False)()]
    yield Finding(
        section, Level.OK, f"torch.distributed with {', '.join(available) or 'no backend of its own'}"
    )


def _caused_by(error: BaseException) -> str:
    cause = error.__cause__
    return "" if cause is None else f" (caused by {type(cause).__name__}: {cause})"


def _entry_point() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is not None:
        check = entry_point.examine()
        yield Finding("installed", Level.OK if check.works else Level.NOTE, check.text)


def _compiled_parts() -> Iterator[Finding]:
    from commprof.compiled import COMPILED_VARIABLE

    again = "install commprof again on a machine with a C compiler and the headers of this Python"
    if os.environ.get(COMPILED_VARIABLE) == "0":
        again = f"because {COMPILED_VARIABLE} is 0"
    if _process_group() is not None:
        from commprof.recorder.process_group import compiled_calls

        text = "the recorder's hot path is compiled"
        if compiled_calls.MODULE is None:
            text = f"the recorder's hot path runs in Python, which costs 1 us more per collective: {again}"
        yield Finding("installed", Level.OK, text)
    if importlib.util.find_spec("pyarrow") is not None:
        from commprof.nccl import scan

        text = "the scanner of NCCL logs is compiled"
        if scan.MODULE is None:
            text = f"NCCL logs are read line by line, which takes many times longer: {again}"
        yield Finding("installed", Level.OK, text)


def _extras() -> Iterator[Finding]:
    for extra, packages in PACKAGES.items():
        if not packages:
            continue
        versions = {package: _version(package) for package in packages.values()}
        missing = [package for package, version in versions.items() if version is None]
        listed = ", ".join(
            f"{package} {version}" for package, version in versions.items() if version is not None
        )
        if missing:
            text = f"[{extra}] without {', '.join(missing)}: pip install 'commprof[{extra}]'"
            yield Finding("installed", Level.NOTE, f"{text}. There: {listed}" if listed else text)
        else:
            yield Finding("installed", Level.OK, f"[{extra}] {listed}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _process_group() -> Any:
    if "torch" not in sys.modules:  # not installed, or its import failed: another finding reports that
        return None
    try:
        from torch._C._distributed_c10d import ProcessGroup
    except ImportError:
        return None
    return ProcessGroup


def _interception() -> Iterator[Finding]:
    from commprof.recorder.process_group.methods import METHODS

    owner = _process_group()
    if owner is None:
        return
    known = {method.name for method in METHODS}
    present = sorted(name for name in known if hasattr(owner, name))
    section = "recorded here"
    if not present:
        text = f"torch's ProcessGroup has none of the {len(known)} methods that are recorded: is this torch older than 2.11?"
        yield Finding(section, Level.FAULT, text)
        return
    yield Finding(section, Level.OK, f"{len(present)} methods of torch's ProcessGroup: {', '.join(present)}")
    unknown = unknown_methods(dir(owner), known)
    if unknown:
        yield Finding(
            section, Level.NOTE, f"unknown methods that look like collectives: {', '.join(unknown)}"
        )
    yield from _operators(section)


def _operators(section: str) -> Iterator[Finding]:
    """Report which operators of torch's dispatcher can be recorded.

    They are necessary for collectives that bypass the methods of ProcessGroup.
    """
    from commprof.recorder.dispatcher.functional import FRAMEWORK, FUNCTIONAL
    from commprof.recorder.dispatcher.issuers import CppIssuers
    from commprof.recorder.dispatcher.operators import C10D, unknown_operators
    from commprof.recorder.dispatcher.registration import Kernels, bind_redispatch, is_operator

    c10d = [name for name in C10D if is_operator(name)]
    functional = [name for name in FUNCTIONAL if is_operator(name)]
    kernels = Kernels()
    try:
        kernels.put(c10d[0], lambda redispatch: redispatch)
        bind_redispatch(c10d[0])
    except Exception as error:
        text = (
            f"this torch accepts no kernel in front of its operators ({type(error).__name__}: {error}): collectives of "
            "DDP's reducer and functional collectives are only counted"
        )
        yield Finding(section, Level.NOTE, text)
        return
    finally:
        kernels.remove()
    yield Finding(
        section,
        Level.OK,
        f"{len(functional)} functional operators (DTensor, torch.compile), by kernels in front of them",
    )
    noticed = CppIssuers.are_known()
    when = (
        "from the first use of DDP's reducer on"
        if noticed
        else "all the time, because the use of DDP's reducer cannot be detected here"
    )
    yield Finding(
        section,
        Level.OK if noticed else Level.NOTE,
        f"{len(c10d)} operators of c10d, for what C++ issues: {when}; all of them with --complete, and once a group has "
        "counted more than was recorded",
    )
    yield Finding(section, Level.OK, f"operators that send outside of c10d: {', '.join(FRAMEWORK)}")
    unknown = unknown_operators()
    if unknown:
        yield Finding(
            section,
            Level.NOTE,
            f"unknown operators of c10d, which are not recorded: {', '.join(unknown)}",
        )


def unknown_methods(names: list[str], known: set[str]) -> list[str]:
    """Return those of the attributes ``names`` of ProcessGroup that look like collectives and are not ``known``.

    >>> unknown_methods(["allreduce", "all_permute", "supports_coalescing", "rank"], {"allreduce"})
    ['all_permute']
    """
    return [
        name
        for name in names
        if _COLLECTIVE_NAME.search(name) and name not in known and not _NO_COLLECTIVES.search(name)
    ]


def _blind_spots() -> Iterator[Finding]:
    if _process_group() is None:
        return
    section = "not recorded"
    without_site = (
        "programs run with python -S: Python then does not import sitecustomize, which starts the recorder"
    )
    if not entry_point.examine().works:
        without_site = (
            "programs run with python -I, -E or -S: they ignore PYTHONPATH or sitecustomize, and no entry point of torch "
            "records them"
        )
    for text in (
        "collectives that bypass all layers above: each step they are counted by the group's sequence number (gloo, NCCL) "
        "and reported as unseen",
        "communication below c10d: torch's symmetric memory, NVSHMEM and DeepEP, pynccl and CuPy, TransformerEngine's "
        "userbuffers; the report says if a run used one of them",
        without_site,
    ):
        yield Finding(section, Level.NOTE, text)


def _machine() -> Iterator[Finding]:
    yield _reservation(Path.cwd())
    yield _clocks()
    yield _supervision()
    yield _gpus()
    yield _counters()
    yield _stacks()


def _reservation(directory: Path) -> Finding:
    """Check that space below ``directory`` can be reserved.

    Without reserved space, a full disk kills a rank that writes to a memory mapping.
    """
    section = "this machine"
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, 1 << 16)
    except PermissionError:
        return Finding(
            section, Level.NOTE, f"{directory} cannot be written to: choose another directory with --out DIR"
        )
    except OSError as error:
        text = f"{directory} cannot reserve space ({error.strerror}): each record takes one system call"
        return Finding(section, Level.NOTE, text)
    free = os.statvfs(directory)
    mebibytes = free.f_bavail * free.f_frsize >> 20
    return Finding(section, Level.OK, f"{directory} can reserve space for records, {mebibytes:,} MiB free")


def _clocks() -> Finding:
    from commprof.recorder.clocks.process_clocks import read_clocks

    uncertainty = read_clocks().uncertainty_ns
    text = f"the monotonic and the real-time clock can be read together to within {uncertainty:,} ns"
    return Finding("this machine", Level.OK, text)


def _supervision() -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        text = "no pidfd (Linux 5.3): if several ranks fail together, the lowest is reported as the first"
        return Finding("this machine", Level.NOTE, text)
    return Finding("this machine", Level.OK, "pidfd: the rank that fails first can be identified")


def _gpus() -> Finding:
    try:
        import pynvml
    except ImportError:
        return Finding(
            "this machine", Level.NOTE, "GPUs: nvidia-ml-py is not installed, so NVML is not queried"
        )
    try:
        pynvml.nvmlInit()
        names = [_gpu_name(pynvml, number) for number in range(pynvml.nvmlDeviceGetCount())]
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        pynvml.nvmlShutdown()
    except Exception as error:
        return Finding(
            "this machine",
            Level.NOTE,
            f"no GPU by NVML ({error}); runs start 2 ranks unless --nproc says otherwise",
        )
    return Finding(
        "this machine", Level.OK, f"{len(names)} GPUs by NVML, driver {driver}: {', '.join(names)}"
    )


def _gpu_name(pynvml: Any, number: int) -> str:
    return _text(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(number)))


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _counters() -> Finding:
    from commprof.recorder.process.counters import InterfaceCounters

    devices = [row["device"] for row in InterfaceCounters().read()]
    if not devices:
        return Finding(
            "this machine", Level.NOTE, "no interface counters in /proc/net/dev: moved bytes are not known"
        )
    return Finding("this machine", Level.OK, f"byte counters of {', '.join(devices)}, of the whole machine")


def _stacks() -> Finding:
    section = "this machine"
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0
    if scope != 0 and os.geteuid() != 0:
        text = (
            f"py-spy is not permitted to read stacks (ptrace_scope {scope}): commprof dump lets the ranks write "
            "them with faulthandler; --sample stacks needs root or ptrace_scope 0"
        )
        return Finding(section, Level.NOTE, text)
    return Finding(section, Level.OK, "py-spy is permitted to read the stacks of ranks")
