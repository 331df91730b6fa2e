from __future__ import annotations

import pytest

from tests.regimes.ranks import TwoRanks


@pytest.fixture(scope="session")
def two_ranks():
    """Runs a function of a module on two ranks of one process group: ``two_ranks(function, *args)``."""
    ranks = TwoRanks()
    yield ranks
    ranks.stop()
