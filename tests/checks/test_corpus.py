"""The corpus of bugs: every bug runs, and so does its twin, which puts out something else or nothing at all."""

from __future__ import annotations

import pytest
import torch

from tests.checks.corpus import BUGS, VOCABULARY, B, T

SILENT_IN_ITS_OUTPUT = {"frozen keys"}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_runs_and_differs_from_its_twin(bug):
    tokens, padding = bug.batch()
    wrong, right = (bug.build(twin=twin)(tokens, padding) for twin in (False, True))
    assert wrong.shape == right.shape == (B, T, VOCABULARY)
    assert bool(right.isfinite().all())
    assert bug.name in SILENT_IN_ITS_OUTPUT or not torch.allclose(wrong, right)


def test_most_bugs_are_modelled_on_a_public_report():
    assert sum(bool(bug.source) for bug in BUGS) >= 30
    assert len({bug.name for bug in BUGS}) == len(BUGS)
