"""Two columns that accompany payload and wire bytes: padding bytes and between-hosts bytes."""

from __future__ import annotations

from typing import Final

from commprof.schema import Column

PADDING: Final = "padding_bytes"  # part of payload_bytes; null if no runtime reports it
BETWEEN_HOSTS: Final = "between_hosts_bytes"  # part of wire_bytes; a sum is known only if all its terms are
_PER_STEP: Final = "_per_step"


def padding(kind: str = "float64", suffix: str = "") -> Column:
    """The column of padding bytes beside ``payload_bytes``."""
    text = f"the padding in payload_bytes{suffix}; null if no runtime reports it"
    return Column(f"{PADDING}{suffix}", kind, text, True, "bytes")


def between_hosts(of: str = "wire_bytes", name: str = BETWEEN_HOSTS) -> Column:
    """The column of between-hosts bytes beside ``wire_bytes`` or ``of``."""
    text = f"the part of {of} in groups and messages with ranks on several hosts; null if hosts are not known"
    return Column(name, "float64", text, True, "bytes")


def between_pairs(of: str, hosts: str = "between ranks on two hosts", name: str = BETWEEN_HOSTS) -> Column:
    """The same beside ``of`` for pairs of ranks: the hosts of each pair decide."""
    return Column(name, "float64", f"the part of {of} {hosts}; null if a host is not known", True, "bytes")


PER_STEP: Final = (
    padding(suffix=_PER_STEP),
    between_hosts(f"wire_bytes{_PER_STEP}", f"{BETWEEN_HOSTS}{_PER_STEP}"),
)
