"""Stop the shared ranks at the end of each test file.

State that a test leaves in the process of a rank can therefore affect only tests of the same file.
"""

from collections.abc import Iterator

import pytest

from support import standing_ranks


@pytest.fixture(scope="module", autouse=True)
def _ranks_end_with_their_file() -> Iterator[None]:
    yield
    standing_ranks.end()
