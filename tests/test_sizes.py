"""The shells stay thin: code that does not depend on their trainer is elsewhere, once."""

from __future__ import annotations

import ast
import io
import re
import tokenize

import pytest

SHELLS = {
    "lightning": ("lightning.py", "lightning_host.py"),
    "transformers": ("transformers.py", "checkpoint_folder.py"),
    "loop": ("loop.py", "loop_host.py"),
    "ignite": ("ignite.py",),
}
"""Trainer -> the files that know it: what it calls, and what it offers or is asked for."""
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def lines_of_code(source: str) -> int:
    """Count lines, without blank ones, comments, docstrings and imports."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            skipped |= set(range(node.lineno, node.end_lineno + 1))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            found |= set(range(token.start[0], token.end[0] + 1))
    return len(found - skipped)


def test_lines_of_code_are_counted_without_comments_imports_and_docstrings():
    assert (
        lines_of_code(
            '"""A module."""\n\nimport os\n\n\ndef f(a,\n      b):\n    """Add."""\n    # why\n    return a\n'
        )
        == 3
    )


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_is_about_a_hundred_lines_of_code_a_file(root, shell):
    sizes = {name: lines_of_code((root / "hdi_callback" / "integrations" / name).read_text()) for name in SHELLS[shell]}
    assert all(size <= 120 for size in sizes.values()), sizes
    assert sum(sizes.values()) <= 210, sizes


def test_the_sizes_that_the_decision_names_are_those_of_today(root):
    page = (root / "docs" / "decisions" / "one-session.md").read_text()
    named = {name: int(size) for size, name in re.findall(r"(\d+) \(`(\w+\.py)`\)", page)}
    folder = root / "hdi_callback" / "integrations"
    sizes = {name: lines_of_code((folder / name).read_text()) for names in SHELLS.values() for name in names}
    assert named == sizes


def test_the_arguments_that_all_shells_share_are_written_once(root):
    """In `Settings`: no function of a shell spells out more than one of them."""
    for path in (root / "hdi_callback" / "integrations").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                arguments = {item.arg for item in [*node.args.args, *node.args.kwonlyargs]}
                shared = arguments & {"metrics", "include", "exclude", "max_tokens", "rank_tol", "alerts", "thresholds"}
                assert len(shared) <= 1, (path.name, node.name, shared)
