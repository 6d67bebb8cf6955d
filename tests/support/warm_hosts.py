"""Runs commands and programs on the hosts of :mod:`support.hosts` in forks of the warm test process.

No interpreter starts. A forked process first enters the namespaces of its host. Use this module for tests of
recordings on several hosts. Tests of the start of interpreters on hosts call ``Host.start`` instead.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from support import warm, warm_programs
from support.hosts import Host, environment
from support.ranks import run_ranks

# Constants of sched.h, which the module os contains from Python 3.12 on.
_NEW_TIME, _NEW_UTS, _NEW_NET = 0x00000080, 0x04000000, 0x40000000
_libc: Final = ctypes.CDLL(None, use_errno=True)


def run_commprof_on_each(
    machines: Sequence[Host], words: Sequence[str], cwd: Path, each: int = 1
) -> list[tuple[str, str]]:
    """Run ``commprof WORDS`` as ``each`` ranks on every host, and return the output and standard error of each rank.

    Raises:
        AssertionError: a command exited with a code other than 0.
    """
    environments = [environment(machines, rank, each) for rank in range(len(machines) * each)]
    return run_commprof(
        [machines[rank // each] for rank in range(len(environments))],
        [words] * len(environments),
        cwd,
        environments,
    )


def run_on_each(machines: Sequence[Host], words: Sequence[str], cwd: Path) -> list[tuple[str, str]]:
    """Run ``python WORDS`` as one rank on every host, and return the output and standard error of each rank.

    Raises:
        AssertionError: a program exited with a code other than 0.
    """
    warm_programs.import_all()
    return _outputs(
        run_ranks(len(machines), _run_program_there, machines, words, cwd, process_group=False, timeout=250)
    )


def run_commprof(
    machines: Sequence[Host],
    commands: Sequence[Sequence[str]],
    cwd: Path,
    environments: Sequence[Mapping[str, str]],
) -> list[tuple[str, str]]:
    """Run several commands of ``commprof`` at the same time, and return the output and standard error of each command.

    Args:
        machines: The host of each command.
        commands: The arguments of each command.
        cwd: The working directory of all commands.
        environments: The environment of each command.

    Raises:
        AssertionError: a command exited with a code other than 0.
    """
    warm.import_all()  # otherwise each of the processes would repeat the imports
    warm_programs.import_all()
    return _outputs(
        run_ranks(
            len(machines), _run_there, machines, commands, cwd, environments, process_group=False, timeout=250
        )
    )


def _outputs(done: Sequence[subprocess.CompletedProcess[str]]) -> list[tuple[str, str]]:
    said = [(each.stdout, each.stderr) for each in done]
    assert [each.returncode for each in done] == [0] * len(done), said
    return said


def _run_program_there(number, _, machines, words, cwd) -> subprocess.CompletedProcess[str]:
    _enter(machines[number])
    command = [sys.executable, *map(str, words)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with warm_programs.Popen(command, cwd=cwd, env=environment(machines, number), **streams) as process:
        out, err = process.communicate(timeout=200)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _run_there(number, _, machines, commands, cwd, environments) -> subprocess.CompletedProcess[str]:
    _enter(machines[number])
    return warm.commprof([*map(str, commands[number])], cwd, dict(environments[number]), 200, None)


def _enter(host: Host) -> None:
    """Move this process to the network of ``host`` and set the host name.

    Later forks of this process also get the clock of ``host``.
    """
    with Path("/run/netns", host.name).open() as namespace:
        _succeed(_libc.setns(namespace.fileno(), _NEW_NET))
    _succeed(_libc.unshare(_NEW_UTS))
    socket.sethostname(host.name)
    if host.ahead:
        _succeed(_libc.unshare(_NEW_TIME))
        Path("/proc/self/timens_offsets").write_text(f"monotonic {host.ahead} 0\n")


def _succeed(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
