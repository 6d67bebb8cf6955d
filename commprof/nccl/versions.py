"""Which NCCL wrote a log: the banner, or the releases that print lines of the forms that were seen.

The table of forms is read off the release tags of NVIDIA/nccl (``src/init.cc``, ``src/enqueue.cc``).
"""

from __future__ import annotations

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

# Each form of a line: the first and the last release that print it. (99, 0, 0): still printed.
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
}

# AllGather and Broadcast: these releases rewrite the caller's type to int8 and the count to bytes before they print.
BYTE_TYPED: Final = ((2, 7, 3), (2, 21, 5))
BYTE_TYPED_OPS: Final = frozenset({Op.ALL_GATHER, Op.BROADCAST})


def between(first: Release, last: Release) -> frozenset[Release]:
    """The releases from ``first`` up to and including ``last``."""
    return frozenset(release for release in RELEASES if first <= release <= last)


def parse_version(text: str) -> Release:
    """``2.23.4`` as a tuple; a version of two parts counts as its first release.

    >>> parse_version("2.23.4"), parse_version("2.18")
    ((2, 23, 4), (2, 18, 0))
    """
    parts = [int(part) for part in text.split(".")]
    return (parts[0], parts[1], parts[2] if len(parts) > 2 else 0)


def candidates(forms: set[str], typed_bytewise_op_seen: bool) -> frozenset[Release]:
    """The releases that print every one of ``forms``; empty when no single release does (several wrote the log).

    Args:
        forms: keys of :data:`FORMS`.
        typed_bytewise_op_seen: an AllGather or Broadcast of another type than int8 was printed.
    """
    left = frozenset(RELEASES)
    for form in forms:
        left &= between(*FORMS[form])
    if typed_bytewise_op_seen:
        left -= between(*BYTE_TYPED)
    return left


def describe(releases: frozenset[Release]) -> str | None:
    """``2.21.5..2.22.3 (inferred)``; None when nothing, or everything, is possible.

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
    """Whether int8 on an AllGather or Broadcast line may stand for any type.

    Args:
        version: from the banner, None without one.
        possible: the releases that may have written the log, where there is no banner.
    """
    if version is not None:
        return BYTE_TYPED[0] <= version <= BYTE_TYPED[1]
    return not possible or bool(possible & between(*BYTE_TYPED))
