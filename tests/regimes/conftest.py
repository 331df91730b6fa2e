from __future__ import annotations

import pytest

from tests.regimes.ranks import RankPool


@pytest.fixture(scope="session")
def two_ranks():
    """Runs a function of a module on two ranks of one process group: ``two_ranks(function, *args)``."""
    ranks = RankPool(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def four_ranks():
    """The same on four ranks."""
    ranks = RankPool(4)
    yield ranks
    ranks.stop()
