"""Names say what they hold."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "hdi_callback").rglob("*.py"))
EMPTY = {"one", "ones", "found", "given", "mine", "kept", "made", "taken", "known", "seen", "said", "asked", "rest"}


def bindings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every variable, field and parameter that is bound in a file, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                yield name, node.lineno


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT / "hdi_callback")))
def test_no_name_is_a_pronoun_or_a_participle(file: Path) -> None:
    assert [f"{name}, line {line}" for name, line in bindings(ast.parse(file.read_text())) if name in EMPTY] == []


def test_a_name_that_says_nothing_would_be_noticed() -> None:
    program = "def f(given):\n    for one in given:\n        found = [kept for kept in one]\n    mine: int = 0\n"
    assert {name for name, _ in bindings(ast.parse(program))} & EMPTY == {"given", "one", "found", "kept", "mine"}


def test_one_name_is_one_class() -> None:
    classes = Counter(
        node.name for file in FILES for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in classes.items() if count > 1] == []
