"""Several hosts on one machine: network namespaces, joined by veth pairs to a bridge, each with a host name of its own.

Needs root and ip(8). Nothing outside the namespaces is changed; they are removed when the block is left, whatever happens.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from support.command import WITHOUT_DYNAMO

ROOT = Path(__file__).resolve().parents[2]
INTERFACE = "eth0"
PORT = 29_511  # of the ranks' rendezvous: hosts of their own share no ports with this machine
# What a shaped link holds back: enough that three hosts sending to one lose nothing, as on a switch with buffers.
_BURST = "256kb"
_LATENCY = "100ms"
Rate = str | None | tuple[str | None, str | None]
_FRAME = 1514  # bytes: a veth's packet of 1500, and Ethernet's head


class Host(NamedTuple):
    """A network namespace: its name is the host's name as well. ``ahead`` shifts its monotonic clock, in seconds."""

    name: str
    address: str
    ahead: int = 0

    def command(self, words: Sequence[str]) -> list[str]:
        """``words`` as they are run on this host."""
        script = f"hostname {shlex.quote(self.name)} && exec {shlex.join(words)}"
        clock = shifted_clock(self.ahead) if self.ahead else []
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", *clock, "sh", "-c", script]

    def start(self, words: Sequence[str], environment: Mapping[str, str], **options) -> subprocess.Popen:
        """Start ``words`` on this host."""
        return subprocess.Popen(self.command(words), env=dict(environment), **options)


def why_impossible() -> str | None:
    """Why there can be no such hosts here; None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "unshare", "hostname", "sh") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)}"
    probe = f"commprof-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    try:
        linked = subprocess.run(
            ["ip", "-n", probe, "link", "add", "veth0", "type", "veth", "peer", "name", "veth1"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return f"no veth pair can be made: {linked.stderr.strip()}" if linked.returncode else None
    finally:
        subprocess.run(["ip", "netns", "delete", probe], check=False)


def shifted_clock(seconds: int) -> list[str]:
    """Options of unshare(1) for a monotonic clock of its own, ``seconds`` ahead. Only a child of the caller gets it."""
    return ["--time", "--monotonic", str(seconds), "--fork", "--kill-child"]


def why_no_shifted_clocks() -> str | None:
    """Why hosts cannot have clocks of their own here; None where they can."""
    reason = why_impossible()
    if reason is not None:
        return reason
    tried = subprocess.run(
        ["unshare", *shifted_clock(1), "true"], capture_output=True, text=True, check=False
    )
    return f"no time namespace can be made: {tried.stderr.strip()}" if tried.returncode else None


@contextlib.contextmanager
def hosts(
    count: int,
    rate: str | Sequence[Rate] | None = None,
    ahead: Sequence[int] | None = None,
) -> Iterator[list[Host]]:
    """``count`` hosts in one network, 10.77.0.1 and up, each with interface ``eth0``.

    ``rate``, in the words of tc(8) ("1gbit"), limits each host's link in both directions, or that of each host (a pair: what
    it sends, what it receives); default: no limit. ``ahead`` shifts the monotonic clock of each host by so many seconds;
    default: they share the machine's.
    """
    rates = [rate] * count if rate is None or isinstance(rate, str) else list(rate)
    prefix = f"commprof-{os.getpid()}"
    switch = _switch()
    made = [
        Host(f"{prefix}-{number}", f"10.77.0.{number + 1}", ahead[number] if ahead else 0)
        for number in range(count)
    ]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for number, host in enumerate(made):
            port = f"port{number}"
            _ip("netns", "add", host.name)
            _ip(
                "-n",
                host.name,
                "link",
                "add",
                INTERFACE,
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                switch,
            )
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            _ip("-n", host.name, "link", "set", INTERFACE, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        limit_links(made, rates)
        yield made
    finally:
        for name in (*(host.name for host in made), switch):
            if Path("/run/netns", name).exists():
                subprocess.run(["ip", "netns", "delete", name], check=False)


def limit_links(machines: Sequence[Host], rates: Sequence[Rate]) -> None:
    """Limit the links of all ``machines`` of :func:`hosts` to ``rates``, also while programs run on them.

    A link without a rate keeps the limit that it has.
    """
    for number, (host, rate) in enumerate(zip(machines, rates, strict=True)):
        places = (host.name, INTERFACE), (_switch(), f"port{number}")
        for (namespace, device), limit in zip(places, _both_ways(rate), strict=True):
            if limit is not None:
                _limit(namespace, device, limit)


def environment(machines: Sequence[Host], rank: int, each: int = 1, port: int = PORT) -> dict[str, str]:
    """What ``rank`` finds, of ``each`` ranks on every host; neither commprof nor NCCL is told anything by this process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COMMPROF_", "NCCL_"))}
    return kept | {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(machines) * each),
        "LOCAL_RANK": str(rank % each),
        "LOCAL_WORLD_SIZE": str(each),
        "MASTER_ADDR": machines[0].address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (WITHOUT_DYNAMO, ROOT, ROOT / "runtime"))),
    }


def resent_bytes(host: Host) -> int:
    """At most so many bytes ``host`` has sent a second time: TCP's own count of segments, each as a frame of a veth.

    A machine that is short of time sends again what is only late, and interfaces count what they send.
    """
    words = ["ip", "netns", "exec", host.name, "cat", "/proc/net/snmp"]
    read = subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout
    names, counts = (line.split() for line in read.splitlines() if line.startswith("Tcp:"))
    return int(counts[names.index("RetransSegs")]) * _FRAME


def _switch() -> str:
    """The namespace of the bridge: a process has one network at a time."""
    return f"commprof-{os.getpid()}-switch"


def _both_ways(rate: Rate) -> tuple[str | None, str | None]:
    """What a host may send and what it may receive."""
    return (rate, rate) if rate is None or isinstance(rate, str) else rate


def _limit(namespace: str, device: str, rate: str) -> None:
    """Let ``device`` send at ``rate`` at most."""
    bucket = ["tbf", "rate", rate, "burst", _BURST, "latency", _LATENCY]
    words = ["ip", "netns", "exec", namespace, "tc", "qdisc", "replace", "dev", device, "root", *bucket]
    subprocess.run(words, check=True, timeout=20)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=20)
