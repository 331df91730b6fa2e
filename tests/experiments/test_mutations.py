"""The tool that breaks files on purpose: what it changes, and what its page says."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hdi_callback.core import head_diversity
from hdi_callback.core.chance import chance_of_overlap
from tests.experiments.mutations import plan, reach
from tests.experiments.mutations.mutate import sample, spread
from tests.experiments.mutations.report import BY_HAND, VERDICTS, merged, page, read_verdicts
from tests.experiments.mutations.report import RESULTS as RECORDED
from tests.experiments.mutations.run import read

SOURCE = '''
"""A module."""

from functools import lru_cache


@lru_cache(maxsize=1)
def share(part: int, whole: int = 1) -> int | float:
    """Divide."""
    if whole == 0:
        raise ValueError(f"{part + 1}")
    return part / whole - 2
'''


def test_every_mutation_changes_one_thing_in_the_code_and_none_in_its_words():
    found = sample(SOURCE, 100, seed=0)
    assert {mutation.key for mutation in found} == {
        "8: 1 -> 2",
        "10: if whole == 0: -> if False:",
        "10: whole == 0 -> whole != 0",
        "10: 0 -> 1",
        "12: return part / whole - 2 -> return None",
        "12: part / whole - 2 -> part / whole + 2",
        "12: part / whole -> part * whole",
        "12: 2 -> 3",
    }
    sources = {ast.unparse(mutation.tree) for mutation in found}
    assert len(sources) == len(found)
    for source in sources:
        assert '"""Divide."""' in source
        assert "{part + 1}" in source
        assert "maxsize=1" in source
        assert "-> int | float" in source


def test_a_mutation_lists_the_lines_that_run_with_it_and_its_function():
    found = {mutation.key: mutation for mutation in sample(SOURCE, 100, seed=0)}
    assert found["10: 0 -> 1"].run == (10, 10)
    assert found["10: 0 -> 1"].function == 7  # where the code of the function begins, with its decorator
    default = found["8: 1 -> 2"]
    assert default.run == (8, 12)
    assert default.function is None  # it is evaluated on import


def test_the_first_sampled_mutations_are_far_apart():
    assert spread(8) == [0, 4, 2, 6, 1, 3, 5, 7]
    for count in range(20):
        assert sorted(spread(count)) == list(range(count))


def test_a_sample_is_spread_over_the_lines_and_the_same_every_time():
    found = sample(SOURCE, 3, seed=1)
    assert [mutation.key for mutation in found] == [mutation.key for mutation in sample(SOURCE, 3, seed=1)]
    assert [mutation.line for mutation in found] == sorted(mutation.line for mutation in found)
    assert len(found) == 3


def test_every_file_of_the_folders_is_mutated(root):
    package = root / "hdi_callback"
    chosen = {path.relative_to(package).as_posix() for path in plan.files(package)}
    rooms = ("attention", "audits", "command", "core", "dashboards", "integrations", "monitoring")
    there = {path.relative_to(package).as_posix() for room in rooms for path in (package / room).rglob("*.py")}
    assert {name for name in there if not name.endswith("__init__.py")} == chosen


def test_files_are_tested_by_the_tests_of_their_subject_or_by_all(root):
    package = root / "hdi_callback"
    assert plan.tests("hdi_callback/audits", package) == ["tests/audits", "tests/command"]
    assert set(plan.tests("hdi_callback/audits,core/pairs.py", package)) == {
        "tests/audits",
        "tests/command",
        "tests/core",
    }
    assert plan.tests("core/pairs.py,attention/names.py", package) == plan.TESTS
    assert plan.tests("", package) == plan.TESTS
    assert all((root / test).exists() for tests in [*plan.SUBJECTS.values(), plan.TESTS] for test in tests)
    assert [path.name for path in plan.chosen("core/pairs.py,names.py", package)] == ["names.py", "pairs.py"]
    assert [plan.changes(package / "core" / "pairs.py", package, wished) for wished in (None, 24)] == [8, 24]


def record(path: Path, name: str, run: Callable[[], object]) -> None:
    """Record a test of this name that does nothing but `run`."""
    around = reach.Recorder(path).pytest_runtest_protocol(SimpleNamespace(nodeid=name))
    next(around)
    run()
    with pytest.raises(StopIteration):
        around.send(None)


def test_a_mutation_is_tested_by_the_tests_that_run_its_line_fastest_first(tmp_path):
    bases = torch.linalg.qr(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))[0].mT.view(2, 2, 8)
    heads = torch.cat([bases, bases[:1]])
    record(tmp_path / "found", "slow", lambda: [chance_of_overlap(0.5, ranks=(2, 2), width=8) for _ in range(300)])
    record(tmp_path / "found", "quick", lambda: chance_of_overlap(0.5, ranks=(2, 2), width=8))
    record(tmp_path / "found", "other", lambda: head_diversity(heads))
    found = reach.read(tmp_path / "found")
    own, first = inspect.getsourcelines(chance_of_overlap)
    assert found.tests_of("core/chance.py", first, first + len(own)) == ["quick", "slow"]
    assert found.tests_of("core/diversity.py", 1, 1000) == ["other"]
    assert found.tests_of("core/circuits.py", 1, 1000) == []


RESULTS = [
    {"file": "core/pairs.py", "change": "9: a | b -> a & b", "outcome": "survived", "tests": 2, "of": 3},
    {"file": "core/pairs.py", "change": "11: 1 -> 2", "outcome": "survived", "tests": 3, "of": 3},
    {"file": "core/pairs.py", "change": "7: 1 -> 2", "outcome": "killed"},
    {"file": "core/chance.py", "change": "3: 1 -> 2", "outcome": "ran out of time"},
    {"file": "core/kernels.py", "change": "3: 1 -> 2", "outcome": "the tool failed"},
    {"file": "core/circuits.py", "change": "8: 1 -> 2", "outcome": "survived", "of": 0},
    {"file": "core/circuits.py", "change": "9: 1 -> 2", "outcome": "survived", "of": 1},
]
FOUND = [
    "core/pairs.py\t11: 1 -> 2\tno difference: there is one to spare",
    "core/circuits.py\t9: 1 -> 2\tnoticed by `test_circuits.py::test_what_is_new`",
    "core/chance.py\t3: 1 -> 2\tno difference: of a change that was noticed nothing is said",
]


def test_the_page_counts_detected_mutations_and_lists_survivors():
    written = page(RESULTS, read_verdicts(FOUND))
    assert "| `core` | 3 | 6 | 2 | 1 | 1 | 2 |" in written
    titles = [written.index(f"## What {rest}") for rest in ("is open", "makes no difference", "other tests notice")]
    assert titles[0] < written.index("| `core/pairs.py` | `9: a \\| b -> a & b` | not looked at |") < titles[1]
    assert titles[0] < written.index("`8: 1 -> 2` | no test that was recorded runs it |") < titles[1]
    assert titles[1] < written.index("`11: 1 -> 2` | no difference: there is one to spare |") < titles[2]
    assert titles[2] < written.index("`9: 1 -> 2` | noticed by")
    assert "7: 1 -> 2" not in written
    assert "nothing is said" not in written
    assert "Not broken: `core/kernels.py`." in written


def test_new_mutation_results_replace_only_those_of_the_same_files():
    kept = [{"state": "a", "file": name, "change": "1: 1 -> 2", "outcome": "killed"} for name in ("b/x.py", "b/y.py")]
    failed = {"file": "a/w.py", "change": "5: 1 -> 2", "outcome": "the tool failed"}
    new = {"file": "b/x.py", "change": "4: 1 -> 2", "outcome": "survived", "tests": 3}
    found = merged(kept, [new, failed], "c")
    assert found == [{"state": "c", "file": "b/x.py", "change": "4: 1 -> 2", "outcome": "survived"}, kept[1]]
    written = page([kept[1], {**new, "file": "e/x.py", "state": "d"}], {})
    assert "Lines are numbered as in `a`, of `b`; `d`, of `e`." in written


def test_the_page_of_the_documentation_is_written_from_its_results(root):
    there, mark, by_hand = (root / "docs" / "mutations.md").read_text().partition(BY_HAND)
    assert mark
    assert by_hand.strip()
    assert there == page(read(RECORDED), read_verdicts(VERDICTS.read_text().splitlines()))


def test_every_verdict_is_about_a_survivor_and_names_tests_that_exist(root):
    verdicts = read_verdicts(VERDICTS.read_text().splitlines())
    assert len(verdicts) == len(VERDICTS.read_text().splitlines())
    survived = {(result["file"], result["change"]) for result in read(RECORDED) if result["outcome"] == "survived"}
    assert verdicts.keys() <= survived
    sources: defaultdict[str, str] = defaultdict(str)
    for path in (root / "tests").rglob("test_*.py"):
        sources[path.name] += path.read_text()
    named = [name for verdict in verdicts.values() for name in re.findall(r"`(\w+\.py)::(\w+)", verdict)]
    assert named
    assert [(file, test) for file, test in named if f"def {test}(" not in sources[file]] == []
    claimed = [verdict for verdict in verdicts.values() if verdict.startswith("noticed")]
    assert all("::" in verdict for verdict in claimed)
