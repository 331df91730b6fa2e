"""A `Mutation`: one small change to the source of one file, such as `<` in place of `<=`."""

from __future__ import annotations

import ast
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATIONS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.MatMult: ast.Add, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Pow: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """One change.

    Attributes:
        line: where it is.
        before: the code that is changed.
        after: what stands in its place.
        source: the whole file with the change.
    """

    line: int
    before: str
    after: str
    source: str

    @property
    def key(self) -> str:
        return f"{self.line}: {self.before} -> {self.after}"


def sample(source: str, count: int, seed: int) -> list[Mutation]:
    """Draw mutations of a file, spread over its lines."""
    nodes = [node for node, _ in _changes(ast.parse(source))]
    every = sorted(range(len(nodes)), key=lambda place: nodes[place].lineno)
    chance, parts = random.Random(seed), min(count, len(every))
    bounds = [len(every) * part // parts for part in range(parts + 1)] if parts else []
    drawn = [mutation(source, every[chance.randrange(low, high)]) for low, high in itertools.pairwise(bounds)]
    return [one for one in drawn if one.before != one.after]


def mutation(source: str, place: int) -> Mutation:
    """Make the mutation of a file that has this number."""
    tree = ast.parse(source)
    node, change = next(one for number, one in enumerate(_changes(tree)) if number == place)
    before = _short(node)
    change()
    return Mutation(node.lineno, before, _short(node), ast.unparse(ast.fix_missing_locations(tree)))


def _short(node: ast.AST) -> str:
    return ast.unparse(node).split("\n")[0][:100]


def _changes(tree: ast.Module) -> Iterator[tuple[ast.stmt | ast.expr, Callable[[], None]]]:
    """Give every node that can be changed with what changes it, in the order of the file."""
    skipped = {id(inner) for outer in ast.walk(tree) if _is_no_code(outer) for inner in ast.walk(outer)}
    for node in ast.walk(tree):
        if id(node) not in skipped:
            for change in _changes_of(node):
                yield node, change


def _is_no_code(node: ast.AST) -> bool:
    """Annotations, docstrings, errors and texts, whose words no test need repeat."""
    no_code = ast.Raise | ast.JoinedStr | ast.AnnAssign | ast.arg | ast.Import | ast.ImportFrom
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_docstring or isinstance(node, no_code)


def _changes_of(node: ast.AST) -> Iterator[Callable[[], None]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield lambda: node.ops.__setitem__(0, COMPARISONS[type(node.ops[0])]())
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS and not _is_text(node.left, node.right):
        yield lambda: setattr(node, "op", OPERATIONS[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield lambda: setattr(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        yield lambda: setattr(node, "value", not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield lambda: setattr(node, "op", ast.UAdd())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield lambda: setattr(node, "operand", ast.UnaryOp(ast.Not(), node.operand))
    elif isinstance(node, ast.IfExp):
        yield lambda: setattr(node, "body", node.orelse)
    elif isinstance(node, ast.If):
        yield lambda: setattr(node, "test", ast.Constant(False))
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield lambda: setattr(node, "value", ast.Constant(None))
    elif isinstance(node, ast.AugAssign) and type(node.op) in OPERATIONS:
        yield lambda: setattr(node, "op", OPERATIONS[type(node.op)]())


def _is_text(*nodes: ast.expr) -> bool:
    return any(
        isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        for node in nodes
    )
