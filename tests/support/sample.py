"""Selects the cases of a sampled family that `make test` runs. The other cases are part of the long sets.

A family consists of the cases of one parametrized test that has the marker ``sampled``. The selection depends
only on the names of the test and its cases, so that every machine runs the same cases:

1. each case whose name is an argument of the marker, for example one that found a defect; 2. with ``one_in=N``,
each case whose CRC-32 (of both names) is a multiple of N; 3. further cases, until every word that occurs in the
names of two or more cases (a stage, a framework, a reduction) is in
   the name of a selected case.

In `make test`, a property-based test tries a fifth of its examples: see `examples`.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from zlib import crc32

import pytest

EXAMPLES = 100  # the default number of examples of a property-based test
_share = 1


def set_share(config: pytest.Config) -> None:
    """Reduce the examples of property-based tests to a fifth if the long sets are not selected."""
    global _share
    _share = 5 if "not long" in config.option.markexpr else 1


def examples(count: int) -> int:
    """Return the number of examples that a property-based test tries: ``count``, or a fifth without the long sets."""
    return -(-count // _share)


def mark_long(items: Iterable[pytest.Item]) -> None:
    """Add the marker ``long`` to each case of a sampled family that is not in the sample."""
    families: defaultdict[str, dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("long"):
            family, _, case = item.nodeid.partition("[")
            families[family][case.removesuffix("]")] = item
    for family, cases in families.items():
        marker = next(iter(cases.values())).get_closest_marker("sampled")
        for case in set(cases) - sample(family, cases, cases.keys() & marker.args, **marker.kwargs):
            cases[case].add_marker(pytest.mark.long)


def sample(
    family: str, cases: Iterable[str], always: Iterable[str] = (), one_in: int | None = None
) -> set[str]:
    """Return the names of the ``cases`` of ``family`` that `make test` runs.

    The selection depends on the name of the family, so that two tests with the same cases run different samples.
    """
    codes = {case: crc32(f"{family}[{case}]".encode()) for case in cases}
    words = {
        case: set(re.findall(r"\w+", case)) for case in sorted(codes, key=lambda case: (codes[case], case))
    }
    chosen = set(always) | {case for case in words if one_in and codes[case] % one_in == 0}
    occurrences = Counter(word for of_case in words.values() for word in of_case)
    missing = {word for word, count in occurrences.items() if count > 1}.difference(
        *(words[case] for case in chosen)
    )
    while missing or not chosen:
        most = max(words, key=lambda case: len(words[case] & missing))
        chosen.add(most)
        missing -= words[most]
    return chosen
