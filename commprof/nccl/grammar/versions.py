"""Determines the NCCL version of a log, from its banner or from the releases that print the forms of its lines.

The table of forms is derived from the release tags of NVIDIA/nccl (``src/init.cc``, ``src/enqueue.cc``, ``src/graph/``,
``src/transport/``).
"""

from __future__ import annotations

import re
from typing import Final

from commprof.schema import Op

Release = tuple[int, int, int]

RELEASES: Final[tuple[Release, ...]] = tuple(
    (2, minor, patch)
    for minor, patches in {
        4: (2, 8), 5: (6,), 6: (4,), 7: (3, 8), 8: (3, 4), 9: (6, 9), 10: (3,), 11: (4,), 12: (7, 12), 13: (4,),
        14: (3,), 15: (1, 5), 16: (2, 5), 17: (1,), 18: (1, 3, 6), 19: (3, 4), 20: (3, 5), 21: (5,), 22: (3,), 23: (4,),
        24: (3,), 25: (1,), 26: (2, 6), 27: (3, 7), 28: (3, 7, 9), 29: (2, 3, 7), 30: (3, 4, 7),
    }.items()
    for patch in patches
)  # fmt: skip
_FIRST, _LAST = RELEASES[0], (99, 0, 0)

# For each form of a line, the first and the last release that print it. (99, 0, 0) means that NCCL still prints it.
FORMS: Final[dict[str, tuple[Release, Release]]] = {
    "init_nvml": (_FIRST, (2, 4, 8)),
    "init_bus": ((2, 5, 6), (2, 15, 5)),
    "init_id": ((2, 16, 2), (2, 18, 1)),
    "init_id_nvml": ((2, 18, 3), (2, 20, 5)),
    "init_named": ((2, 21, 5), _LAST),
    "init_api": ((2, 23, 4), _LAST),
    "split_with_id": ((2, 21, 5), (2, 22, 3)),
    "split_without_id": ((2, 23, 4), (2, 23, 4)),
    "split_counted": ((2, 24, 3), (2, 28, 9)),
    "init_marked": ((2, 29, 2), _LAST),
    "call": ((2, 13, 4), _LAST),
    "send_in_sendbuff": ((2, 7, 3), (2, 11, 4)),
    "send_in_recvbuff": ((2, 12, 7), _LAST),
    "single_all_to_all": ((2, 28, 3), _LAST),
    "ring_link": (_FIRST, (2, 6, 4)),
    "channel_net": ((2, 7, 3), (2, 11, 4)),
    "channel_p2p": ((2, 7, 3), (2, 13, 4)),
    "channel_net_indexed": ((2, 12, 7), _LAST),
    "channel_p2p_indexed": ((2, 14, 3), _LAST),
    "p2p_cumem": ((2, 18, 1), _LAST),
    "p2p_mnnvl": ((2, 20, 3), _LAST),
    "net_gdr_mode": ((2, 26, 2), _LAST),
    "shm_both_ends": ((2, 13, 4), _LAST),
    "ring_order_bare": (_FIRST, (2, 4, 8)),
    "ring_order_wide": ((2, 5, 6), (2, 22, 3)),
    "ring_order_narrow": ((2, 23, 4), _LAST),
    "ring_neighbours": ((2, 10, 3), _LAST),
    "tree": ((2, 8, 3), _LAST),
    "trees_from_above": (_FIRST, (2, 4, 8)),
    "trees_up_and_down": ((2, 5, 6), (2, 7, 8)),
    "trees_from_below": ((2, 8, 3), _LAST),
    "connected": ((2, 8, 3), _LAST),
    "connected_pxn": ((2, 24, 3), _LAST),
    "connected_binomial": ((2, 23, 4), _LAST),
    "channels_p2p": ((2, 7, 3), (2, 16, 5)),
    "channels_nvls": ((2, 17, 1), (2, 19, 4)),
    "channels_collnet": ((2, 20, 3), _LAST),
    "launch_mode": (_FIRST, (2, 12, 12)),
    "local_ranks": ((2, 20, 3), _LAST),
    "timings": ((2, 22, 3), (2, 22, 3)),
    "timings_named": ((2, 23, 4), _LAST),
    "git_version": ((2, 29, 2), _LAST),
    "end_complete": ((2, 12, 7), _LAST),
    "abort_start": ((2, 28, 3), _LAST),
    "tuning_bare": ((2, 20, 3), (2, 22, 3)),
    "tuning_numbered": ((2, 23, 4), (2, 23, 4)),
    "tuning_named": ((2, 24, 3), _LAST),
    "tuning_symmetric": ((2, 27, 3), _LAST),
    "tuning_copy_engine": ((2, 29, 2), _LAST),
    "warn_stamped": ((2, 26, 2), _LAST),
    "warn_with_function": ((2, 30, 7), _LAST),
}

_LINK = rb"[\d/]{1,9} : \d{1,9}(?:\[\w{1,16}\])? -> \d{1,9}(?:\[\w{1,16}\])? (?:\[\w{4,7}\] )?via "
# Beginnings of messages and their forms. The first match determines the form.
_SHAPES: Final[tuple[tuple[bytes, tuple[tuple[str, re.Pattern[bytes]], ...]], ...]] = tuple(
    (begin, tuple((form, re.compile(pattern)) for form, pattern in shapes))
    for begin, shapes in (
        (b"Ring ", (
            ("ring_link", rb"Ring " + _LINK),
            ("ring_neighbours", rb"Ring \d{1,4} : -?\d{1,9} -> \d{1,9} -> -?\d"),
        )),
        (b"Channel ", (
            ("p2p_cumem", rb"Channel " + _LINK + rb"P\dP/CUMEM"),
            ("p2p_mnnvl", rb"Channel " + _LINK + rb"P\dP/MNNVL"),
            ("shm_both_ends", rb"Channel " + _LINK + rb"SHM/\w{1,8}/\w"),
            ("net_gdr_mode", rb"Channel " + _LINK + rb"NET/[^/]{1,60}/[\d()]{1,20}/GDRDMA\("),
            ("channel_net", rb"Channel \d{1,4} : [^/]{1,60} via NET/"),
            ("channel_net_indexed", rb"Channel \d{1,4}/\d{1,4} : [^/]{1,60} via NET/"),
            ("channel_p2p", rb"Channel \d{1,4} : [^/]{1,60} via P\dP/"),
            ("channel_p2p_indexed", rb"Channel \d{1,4}/\d{1,4} : [^/]{1,60} via P\dP/"),
            ("ring_order_bare", rb"Channel \d{1,4} : +\d{1,9} +\d"),
            ("ring_order_wide", rb"Channel \d{1,4}/\d{1,4} :  +0 "),
            ("ring_order_narrow", rb"Channel \d{1,4}/\d{1,4} : 0 "),
        )),
        (b"Tree ", (("tree", rb"Tree \d{1,4} : -?\d{1,9} -> "),)),
        (b"Trees [", (
            ("trees_up_and_down", rb"Trees \[0\] [-\d/>]{5,80}\|"),
            ("trees_from_below", rb"Trees \[0\] -?\d{1,9}/"),
            ("trees_from_above", rb"Trees \[0\] -?\d{1,9}->\d{1,9}->-?\d{1,9}/"),
        )),
        (b"Connected ", (
            ("connected_pxn", rb"Connected all rings, use ring PXN"),
            ("connected_binomial", rb"Connected binomial trees"),
            ("connected", rb"Connected all (?:rings|trees)\s*$"),
        )),
        (b"Launch mode ", (("launch_mode", rb"Launch mode (?:Group|Parallel)"),)),
        (b"Init timings", (("timings", rb"Init timings: rank"), ("timings_named", rb"Init timings - \w"))),
        (b"NCCL git version ", (("git_version", rb"NCCL git version "),)),
        (b"comm 0x", (
            ("local_ranks", rb"comm 0x[0-9a-f]{1,16} rank \d{1,9} nRanks \d{1,9} nNodes "),
            ("end_complete", rb"comm 0x[0-9a-f]{1,16} rank .{1,160}? - (?:Destroy|Abort) COMPLETE"),
            ("abort_start", rb"comm 0x[0-9a-f]{1,16} rank .{1,160}? - Abort START"),
        )),
    )
)  # fmt: skip
_BEGINNINGS: Final = tuple(begin for begin, _ in _SHAPES)
_ANYWHERE: Final = tuple(
    (form, re.compile(pattern))
    for form, pattern in (
        ("tuning_bare", rb"\d{1,18} Bytes -> Algo \d{1,3} proto \d"),
        ("tuning_numbered", rb"\w{1,40}: \d{1,18} Bytes -> Algo \d{1,3} proto \d"),
        ("tuning_named", rb"\w{1,40}: \d{1,18} Bytes -> Algo [A-Z]"),
        ("tuning_symmetric", rb"\w{1,40} \[Symmetric\]: \d{1,18} Bytes -> "),
        ("tuning_copy_engine", rb"\w{1,40} \[(?:Copy Engine|Hierarchical CE)\]: \d{1,18} Bytes -> "),
        ("channels_p2p", rb"\d{1,9} coll channels, \d{1,9} p\dp channels"),
        ("channels_nvls", rb"\d{1,9} coll channels, \d{1,9} nvls channels"),
        ("channels_collnet", rb"\d{1,9} coll channels, \d{1,9} collnet channels"),
    )
)

# AllGather and Broadcast: these releases rewrite the caller's type to int8 and the count to bytes before they print.
BYTE_TYPED: Final = ((2, 7, 3), (2, 21, 5))
BYTE_TYPED_OPS: Final = frozenset({Op.ALL_GATHER, Op.BROADCAST})


def form_of(body: bytes) -> str | None:
    """Return the form of a message that is neither an operation nor an Init line (a key of ``FORMS``).

    The result is None if the form does not depend on the version of NCCL.

    Args:
        body: The text after ``NCCL INFO ``.

    >>> form_of(b"Launch mode Parallel")
    'launch_mode'
    """
    for begin, shapes in _SHAPES if body.startswith(_BEGINNINGS) else ():
        if body.startswith(begin):
            return next((form for form, shape in shapes if shape.match(body)), None)
    if body[:1].isalnum() and (b" Bytes -> " in body[:80] or b" coll channels, " in body[:30]):
        return next((form for form, shape in _ANYWHERE if shape.match(body)), None)
    return None


def between(first: Release, last: Release) -> frozenset[Release]:
    """Return the releases from ``first`` up to and including ``last``."""
    return frozenset(release for release in RELEASES if first <= release <= last)


def parse_version(text: str) -> Release:
    """Return a version such as ``2.23.4`` as a tuple. The third number of a version with two parts is 0.

    >>> parse_version("2.23.4"), parse_version("2.18")
    ((2, 23, 4), (2, 18, 0))
    """
    numbers = [int(number) for number in text.split(".")]
    return (numbers[0], numbers[1], numbers[2] if len(numbers) > 2 else 0)


def candidates(forms: set[str], typed_bytewise_op_seen: bool) -> frozenset[Release]:
    """Return the releases that print all of ``forms``.

    The result is empty if no release prints all of them, because several releases wrote the log.

    Args:
        forms: Keys of :data:`FORMS`.
        typed_bytewise_op_seen: Whether the log has an AllGather or Broadcast with a type other than int8.
    """
    left = frozenset(RELEASES)
    for form in forms:
        left &= between(*FORMS[form])
    if typed_bytewise_op_seen:
        left -= between(*BYTE_TYPED)
    return left


def describe(releases: frozenset[Release]) -> str | None:
    """Return releases as text, such as ``2.21.5..2.22.3 (inferred)``; None if no release or all releases are possible.

    >>> describe(between((2, 21, 5), (2, 22, 3)))
    '2.21.5..2.22.3 (inferred)'
    """
    if not releases or len(releases) == len(RELEASES):
        return None
    runs: list[list[Release]] = []
    for release in RELEASES:
        if release not in releases:
            continue
        if runs and RELEASES.index(release) == RELEASES.index(runs[-1][-1]) + 1:
            runs[-1].append(release)
        else:
            runs.append([release])
    texts = [_text(run[0]) if run[0] == run[-1] else f"{_text(run[0])}..{_text(run[-1])}" for run in runs]
    return f"{' or '.join(texts)} (inferred)"


def _text(release: Release) -> str:
    return ".".join(map(str, release))


def prints_bytes(version: Release | None, possible: frozenset[Release]) -> bool:
    """Return whether int8 on an AllGather or Broadcast line may mean any type.

    Args:
        version: The version in the banner; None without a banner.
        possible: The releases that may have written the log. They are used only without a banner.
    """
    if version is not None:
        return BYTE_TYPED[0] <= version <= BYTE_TYPED[1]
    return not possible or bool(possible & between(*BYTE_TYPED))
