"""A launcher with the arguments of ``deepspeed``: ``python -m zero_runtime.launch`` starts the ranks of one host.

::

    python -m zero_runtime.launch --num_gpus 2 train.py --deepspeed_config ds.json

The launcher uses torchrun. In the ranks, ``import deepspeed`` imports this runtime. Each rank gets
``--local_rank=N`` before the arguments of the script, as with DeepSpeed's launcher. With several hosts, run the
launcher on each host with ``--no_ssh``.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from zero_runtime.comm import DEFAULT_PORT
from zero_runtime.errors import ConfigError

EXIT_CODE: Final = 2
_LINE: Final = re.compile(r"^(\S+)\s+slots=(\d+)\s*$")
_HOST: Final = re.compile(r"^([^:@]+)(?::([\d,\s]+))?$")
_THIS_HOST: Final = ("localhost", "127.0.0.1")
_SEVERAL: Final = (
    "ranks on other hosts are not started over ssh; run on each host, with N from 0: python -m zero_runtime.launch --no_ssh "
    "--num_nodes {hosts} --node_rank N --master_addr {address} --num_gpus ... train.py"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The ranks to start on this host.

    Attributes:
        slots: The numbers of the devices, one for each rank.
        hosts: The number of hosts.
        host: The number of this host.
        address: The host of rank 0.
        port: The port of rank 0.
        chooses_devices: Whether ``slots`` is a selection of the visible devices.
    """

    slots: tuple[int, ...]
    hosts: int
    host: int
    address: str
    port: int
    chooses_devices: bool


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments. They have the same names as those of DeepSpeed's launcher."""
    arguments = argparse.ArgumentParser(
        prog="python -m zero_runtime.launch",
        description="Start the ranks of a training on this host.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = arguments.add_argument
    add("-H", "--hostfile", default=None, help="file with a line 'HOST slots=N'; one host")
    add("-i", "--include", default="", help="devices to use: localhost:0,1")
    add("-e", "--exclude", default="", help="devices to leave out: localhost:3")
    add("--num_nodes", type=int, default=-1, help="number of hosts; above 1, needs --no_ssh on each")
    add("--min_elastic_nodes", type=int, default=-1, help=argparse.SUPPRESS)
    add("--max_elastic_nodes", type=int, default=-1, help=argparse.SUPPRESS)
    add(
        "--num_gpus",
        "--num_accelerators",
        type=int,
        default=-1,
        help="ranks of this host; default: its GPUs, else 1",
    )
    add(
        "--master_port",
        type=int,
        default=None,
        help=f"port of rank 0; default: {DEFAULT_PORT}, or a free one if it is taken",
    )
    add("--master_addr", default="", help="host of rank 0")
    add("--node_rank", type=int, default=-1, help="number of this host, with --no_ssh")
    add("--launcher", default="pdsh", help="accepted for one host")
    add("--launcher_args", default="", help=argparse.SUPPRESS)
    add("--module", action="store_true", help="the script is a module: python -m SCRIPT")
    add("--no_python", action="store_true", help="the script is a program, which is run without Python")
    add("--no_local_rank", action="store_true", help="do not pass --local_rank to the script")
    add("--no_ssh", action="store_true", help="start the ranks of this host only")
    add("--no_ssh_check", action="store_true", help=argparse.SUPPRESS)
    add("--force_multi", action="store_true", help=argparse.SUPPRESS)
    add(
        "--save_pid",
        action="store_true",
        help="write the process ID to a file in the directory for temporary files",
    )
    add(
        "--enable_each_rank_log",
        default="None",
        metavar="DIR",
        help="write the output of each rank to its own file in DIR",
    )
    add("--autotuning", default="", choices=["", "tune", "run"], help=argparse.SUPPRESS)
    add("--elastic_training", action="store_true", help=argparse.SUPPRESS)
    add("--bind_cores_to_rank", action="store_true", help="bind each rank to its own cores")
    add("--bind_core_list", default=None, metavar="LIST", help="the cores to bind to: 0-15,32-47")
    add("--ssh_port", type=int, default=None, help=argparse.SUPPRESS)
    add("--venv_script", default=None, help=argparse.SUPPRESS)
    add("--log_level", default="info", help=argparse.SUPPRESS)
    add("-q", "--quiet", action="store_true", help=argparse.SUPPRESS)
    add("user_script", help="the script that each rank runs")
    add("user_args", nargs=argparse.REMAINDER, help="its arguments")
    return arguments


def plan(options: Any, visible: int, hostname: str) -> Plan:
    """Return the plan for parsed arguments.

    Args:
        options: The parsed arguments.
        visible: The number of GPUs that this host can use; 0 for none.
        hostname: The name of this host.

    Raises:
        ConfigError: The arguments contradict each other, or request devices or hosts that do not exist.
    """
    _refuse(options)
    if options.num_gpus == 0 or options.num_gpus < -1 or options.num_nodes == 0 or options.num_nodes < -1:
        raise ConfigError("--num_gpus and --num_nodes are numbers from 1")
    if (options.num_gpus > 0 or options.num_nodes > 0) and (options.include or options.exclude):
        raise ConfigError(
            "--num_gpus and --num_nodes choose by number, --include and --exclude by name; give one of the two"
        )
    pool = read_hosts(options.hostfile)
    # With --no_ssh the number of hosts comes from the hostfile, as in DeepSpeed.
    hosts = options.num_nodes if options.num_nodes > 0 else max(len(pool), 1) if options.no_ssh else 1
    several = hosts > 1 or (len(pool) > 1 and options.num_nodes != 1 and not options.include)
    if several and not options.no_ssh:
        address = options.master_addr or next(iter(pool), "HOST-OF-RANK-0")
        raise ConfigError(_SEVERAL.format(hosts=max(hosts, len(pool)), address=address))
    if options.no_ssh and (options.node_rank < 0 or options.node_rank >= hosts or not options.master_addr):
        raise ConfigError(
            f"--no_ssh needs --num_nodes, --node_rank from 0 to {hosts - 1}, and --master_addr; given are "
            f"{options.num_nodes}, {options.node_rank} and {options.master_addr!r}"
        )
    known = next(iter(pool.values()), visible)
    slots, chosen = _slots(options, known, hostname, next(iter(pool), "localhost"))
    if visible and max(slots) >= visible:
        raise ConfigError(
            f"{len(slots)} ranks ask for GPU {max(slots)}, and this host has {visible}, from 0 to {visible - 1}"
        )
    address = options.master_addr or "127.0.0.1"
    return Plan(slots, hosts, max(options.node_rank, 0), address, options.master_port or DEFAULT_PORT, chosen)


def read_hosts(path: str | None) -> dict[str, int]:
    """Return the number of slots of each host in a hostfile; an empty dictionary if ``path`` is None.

    Raises:
        ConfigError: The file cannot be read, lists no host or lists a host twice, or has a line other than
            ``HOST slots=N``.
    """
    if path is None:
        return {}
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"hostfile {path} cannot be read: {error.strerror}") from None
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        match = _LINE.match(text)
        if match is None:
            raise ConfigError(
                f"hostfile {path}, line {number}: {text!r}; expected a line such as 'localhost slots=4'"
            )
        if match[1] in hosts:
            raise ConfigError(
                f"hostfile {path}, line {number}: host {match[1]} is listed twice; keep one line"
            )
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise ConfigError(f"hostfile {path} names no host; expected a line such as 'localhost slots=4'")
    return hosts


def parse_filter(text: str, names: Sequence[str]) -> tuple[int, ...] | None:
    """Return the devices in ``--include`` or ``--exclude``; None for all devices of the host.

    Args:
        text: The value of the option, such as ``localhost:0,2``.
        names: The names of this host.

    Raises:
        ConfigError: ``text`` names another host or several hosts, or is not a choice of devices.
    """
    if "@" in text:
        raise ConfigError(
            f"{text!r} names several hosts; {_SEVERAL.format(hosts='N', address='HOST-OF-RANK-0')}"
        )
    match = _HOST.match(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a choice of devices; expected for example localhost:0,1")
    if match[1] not in names:
        raise ConfigError(f"{text!r} names host {match[1]}; this host is {' or '.join(dict.fromkeys(names))}")
    return None if match[2] is None else tuple(sorted({int(each) for each in match[2].split(",")}))


def _slots(options: Any, known: int, hostname: str, listed: str) -> tuple[tuple[int, ...], bool]:
    """Return (the numbers of the devices, whether some devices were chosen by name)."""
    names = (*_THIS_HOST, hostname, listed)
    if options.include:
        chosen = parse_filter(options.include, names)
        return (tuple(range(known or 1)), False) if chosen is None else (chosen, True)
    if options.exclude:
        left_out = parse_filter(options.exclude, names)
        left = tuple(slot for slot in range(known or 1) if left_out is not None and slot not in left_out)
        if not left:
            raise ConfigError(
                f"--exclude {options.exclude} leaves no device of {known or 1}; exclude fewer devices"
            )
        return left, True
    return tuple(range(options.num_gpus if options.num_gpus > 0 else known or 1)), False


def _refuse(options: Any) -> None:
    for name, why in {
        "autotuning": "`commprof sweep --set KEY=V1,V2` tries settings and compares them",
        "elastic_training": "torchrun --max-restarts restarts ranks",
        "force_multi": "ranks are started on this host only",
        "launcher_args": "they are for launchers of several hosts",
        "venv_script": "activate the environment before",
    }.items():
        if getattr(options, name):
            raise ConfigError(f"--{name} is not in this version: {why}; leave it out")
    if options.no_python and options.module:
        raise ConfigError("--no_python and --module contradict each other; give one of them")


def refuse_hosts_of_accelerate(options: Any, environment: Mapping[str, str]) -> None:
    """Refuse a start by ``accelerate launch`` that needs ranks on several hosts.

    Raises:
        ConfigError: accelerate requests such a start. The message names the launcher of accelerate that works.
    """
    if environment.get("ACCELERATE_USE_DEEPSPEED") == "true" and not options.no_ssh:
        raise ConfigError(
            f"accelerate's deepspeed_multinode_launcher {options.launcher} starts ranks on other hosts over ssh, which is "
            "not in this version; set `deepspeed_multinode_launcher: standard` in accelerate's config file, and run "
            "accelerate launch on each host with its --machine_rank"
        )


def torchrun_command(planned: Plan, options: Any) -> list[str]:
    """Return the command that starts the ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={len(planned.slots)}"]
    command += [
        f"--nnodes={planned.hosts}",
        f"--node-rank={planned.host}",
        f"--master-addr={planned.address}",
    ]
    command.append(f"--master-port={planned.port}")
    if options.enable_each_rank_log != "None":
        command += ["--log-dir", options.enable_each_rank_log, "--redirects", "3"]
    command += ["-m", "zero_runtime.launch_rank"]
    kind = "program" if options.no_python else "module" if options.module else "script"
    command.append(f"--kind={kind}")
    if options.no_local_rank:
        command.append("--no-local-rank")
    if options.bind_cores_to_rank or options.bind_core_list:
        command.append(f"--cores={options.bind_core_list or 'all'}")
    return [*command, "--", options.user_script, *options.user_args]


def variables(planned: Plan, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of the ranks."""
    changed = dict(environment)
    changed.setdefault("OMP_NUM_THREADS", "1") if len(planned.slots) > 1 else None
    if planned.chooses_devices:
        visible = [each for each in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
        changed["CUDA_VISIBLE_DEVICES"] = ",".join(
            visible[slot] if slot < len(visible) else str(slot) for slot in planned.slots
        )
    return {
        **changed,
        "CROSS_RANK": str(planned.host),
        "CROSS_SIZE": str(planned.hosts),
        "LOCAL_SIZE": str(len(planned.slots)),
    }


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Replace this process with torchrun, which starts the ranks and returns their exit code."""
    options = parser().parse_args(arguments)
    try:
        refuse_hosts_of_accelerate(options, os.environ)
        planned = plan(options, torch.cuda.device_count(), socket.gethostname())
        if options.master_port is None and planned.hosts == 1:
            planned = _with_free_port(planned)
        if options.save_pid:
            _save_pid()
    except ConfigError as error:
        print(f"zero_runtime: error: {error}", file=sys.stderr)
        sys.exit(EXIT_CODE)
    os.execve(sys.executable, torchrun_command(planned, options), variables(planned, os.environ))


def _with_free_port(planned: Plan) -> Plan:
    from dataclasses import replace

    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", planned.port))
            return planned
        except OSError:
            probe.bind(("127.0.0.1", 0))
            return replace(planned, port=int(probe.getsockname()[1]))


def _save_pid() -> None:
    import tempfile

    path = Path(tempfile.gettempdir()) / f"{os.getpid()}.ds"
    path.write_text(f"{os.getpid()}")
    print(f"zero_runtime: the process ID is in {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
