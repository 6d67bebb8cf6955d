"""The two columns beside all payload and wire bytes: padding, and traffic between hosts."""

from __future__ import annotations

from typing import Final

from commprof.schema import Column

PADDING: Final = "padding_bytes"  # of payload_bytes; null where no runtime says it
BETWEEN_HOSTS: Final = "between_hosts_bytes"  # of wire_bytes; not known of a sum unless it is of all
_PER_STEP: Final = "_per_step"


def padding(kind: str = "float64", suffix: str = "") -> Column:
    """The column of padding that stands beside ``payload_bytes``."""
    text = f"of payload_bytes{suffix}, padding; null where no runtime says it"
    return Column(f"{PADDING}{suffix}", kind, text, True, "bytes")


def between_hosts(of: str = "wire_bytes", name: str = BETWEEN_HOSTS) -> Column:
    """The column of traffic between hosts that stands beside ``wire_bytes``, or beside ``of``."""
    text = (
        f"of {of}, of groups and messages with ranks on several hosts; null where their hosts are not known"
    )
    return Column(name, "float64", text, True, "bytes")


def between_pairs(of: str, hosts: str = "between ranks on two hosts", name: str = BETWEEN_HOSTS) -> Column:
    """The same beside ``of``, which is of pairs of ranks, so that the hosts of each pair decide."""
    return Column(name, "float64", f"of {of}, {hosts}; null where a host is not known", True, "bytes")


PER_STEP: Final = (
    padding(suffix=_PER_STEP),
    between_hosts(f"wire_bytes{_PER_STEP}", f"{BETWEEN_HOSTS}{_PER_STEP}"),
)
