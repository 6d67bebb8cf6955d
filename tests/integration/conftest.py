"""Ranks that tests of a file share end with it: what one leaves in their process is met by tests of the same file only."""

from collections.abc import Iterator

import pytest

from support import standing_ranks


@pytest.fixture(scope="module", autouse=True)
def _ranks_end_with_their_file() -> Iterator[None]:
    yield
    standing_ranks.end()
