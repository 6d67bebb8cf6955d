"""Several simulated hosts on one machine.

Each host is a network namespace with a separate host name, which a veth pair connects to a bridge. This needs
root and ip(8). Nothing outside of the namespaces changes. The namespaces are removed at the end of the block,
also after an error.
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
# The port for the rendezvous of the ranks. The ports of a namespace are separate from the ports of this machine.
PORT = 29_511
# The burst size and the longest queueing time of a link with a limited rate. They are large enough that no
# packet is dropped when three hosts send to one host, as on a switch with buffers.
_BURST = "256kb"
_LATENCY = "100ms"
Rate = str | None | tuple[str | None, str | None]
_FRAME = 1514  # bytes: a packet of 1500 bytes on a veth, and the Ethernet header


class Host(NamedTuple):
    """A network namespace that acts as a host.

    ``name`` is the name of the namespace and of the host. The monotonic clock of the host is ``ahead`` seconds ahead.
    """

    name: str
    address: str
    ahead: int = 0

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command line that runs ``words`` on this host."""
        script = f"hostname {shlex.quote(self.name)} && exec {shlex.join(words)}"
        clock = shifted_clock(self.ahead) if self.ahead else []
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", *clock, "sh", "-c", script]

    def start(self, words: Sequence[str], environment: Mapping[str, str], **options) -> subprocess.Popen:
        """Start the command ``words`` on this host."""
        return subprocess.Popen(self.command(words), env=dict(environment), **options)


def why_impossible() -> str | None:
    """Return the reason why this machine cannot simulate hosts; None if it can."""
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
    """Return the options of unshare(1) that shift the monotonic clock ``seconds`` ahead.

    Only a child process of unshare(1) gets the shifted clock.
    """
    return ["--time", "--monotonic", str(seconds), "--fork", "--kill-child"]


def why_no_shifted_clocks() -> str | None:
    """Return the reason why hosts on this machine cannot have separate clocks; None if they can."""
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
    """Create ``count`` hosts in one network and yield them.

    The addresses start at 10.77.0.1. Each host has an interface ``eth0``.

    Args:
        count: The number of hosts.
        rate: The limit of the links as a rate of tc(8), such as "1gbit". A single rate applies to both directions of
            every host. A sequence contains an entry for each host: a rate, or a pair of rates (sent, received). The
            default is no limit.
        ahead: The number of seconds by which the monotonic clock of each host is ahead. By default, all hosts share
            the clock of the machine.
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
    """Limit the links of ``machines`` to ``rates``, also while programs run on the hosts.

    ``machines`` are all hosts of :func:`hosts`. A link without a rate keeps its current limit.
    """
    for number, (host, rate) in enumerate(zip(machines, rates, strict=True)):
        places = (host.name, INTERFACE), (_switch(), f"port{number}")
        for (namespace, device), limit in zip(places, _both_ways(rate), strict=True):
            if limit is not None:
                _limit(namespace, device, limit)


def environment(machines: Sequence[Host], rank: int, each: int = 1, port: int = PORT) -> dict[str, str]:
    """Return the environment of ``rank`` in a job with ``each`` ranks per host.

    The variables of commprof and NCCL in this process are left out.
    """
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
    """Return the largest number of bytes that ``host`` can have retransmitted.

    The result is TCP's count of retransmitted segments times the frame size of a veth. On a busy machine, TCP
    retransmits data that is only late, and the interfaces count the retransmitted bytes too.
    """
    words = ["ip", "netns", "exec", host.name, "cat", "/proc/net/snmp"]
    read = subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout
    names, counts = (line.split() for line in read.splitlines() if line.startswith("Tcp:"))
    return int(counts[names.index("RetransSegs")]) * _FRAME


def _switch() -> str:
    """Return the name of the namespace of the bridge.

    The process id suffices to identify the bridge, because a process has at most one network at a time.
    """
    return f"commprof-{os.getpid()}-switch"


def _both_ways(rate: Rate) -> tuple[str | None, str | None]:
    """Return the rates at which a host may send and receive."""
    return (rate, rate) if rate is None or isinstance(rate, str) else rate


def _limit(namespace: str, device: str, rate: str) -> None:
    """Limit the rate at which ``device`` sends to ``rate``."""
    bucket = ["tbf", "rate", rate, "burst", _BURST, "latency", _LATENCY]
    words = ["ip", "netns", "exec", namespace, "tc", "qdisc", "replace", "dev", device, "root", *bucket]
    subprocess.run(words, check=True, timeout=20)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=20)
