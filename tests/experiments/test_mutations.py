"""The tool that breaks files on purpose: what it changes, and what its page says."""

from __future__ import annotations

import ast

from tests.experiments.mutations import plan
from tests.experiments.mutations.mutate import sample
from tests.experiments.mutations.report import page

SOURCE = '''
"""A module."""


def share(part: int, whole: int = 1) -> float:
    """Divide."""
    if whole == 0:
        raise ValueError(f"{part + 1}")
    return part / whole - 2
'''


def test_every_mutation_changes_one_thing_in_the_code_and_none_in_its_words():
    found = sample(SOURCE, 100, seed=0)
    assert {one.key for one in found} == {
        "5: 1 -> 2",
        "7: if whole == 0: -> if False:",
        "7: whole == 0 -> whole != 0",
        "7: 0 -> 1",
        "9: return part / whole - 2 -> return None",
        "9: part / whole - 2 -> part / whole + 2",
        "9: part / whole -> part * whole",
        "9: 2 -> 3",
    }
    sources = {one.source for one in found}
    assert len(sources) == len(found)
    for source in sources:
        ast.parse(source)
        assert '"""Divide."""' in source
        assert "{part + 1}" in source


def test_a_sample_is_spread_over_the_lines_and_the_same_every_time():
    found = sample(SOURCE, 3, seed=1)
    assert [one.key for one in found] == [one.key for one in sample(SOURCE, 3, seed=1)]
    assert [one.line for one in found] == sorted(one.line for one in found)
    assert len(found) == 3


def test_every_file_that_is_broken_has_tests_that_are_there(root):
    package = root / "hdi_callback"
    chosen = plan.files(package)
    assert len(chosen) > 40
    without = [path.name for path in chosen if not plan.tests_of(path, package, root / "tests")]
    assert without == []


def test_the_page_counts_what_was_noticed_and_lists_what_was_not():
    results = [
        {"file": "core/pairs.py", "change": "9: a | b -> a & b", "outcome": "survived"},
        {"file": "core/pairs.py", "change": "7: 1 -> 2", "outcome": "killed"},
        {"file": "core/chance.py", "change": "3: 1 -> 2", "outcome": "ran out of time"},
        {"file": "core/kernels.py", "change": "3: 1 -> 2", "outcome": "the tests fail without a change"},
    ]
    written = page(results)
    assert "| `core` | 2 | 3 | 2 | 1 |" in written
    assert "| `core/pairs.py` | `9: a \\| b -> a & b` | open |" in written
    assert "7: 1 -> 2" not in written
