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
        run: the first and the last line of which a test runs one, if the change can matter to it.
        before: the code that is changed.
        after: its replacement.
        tree: the whole file with the change; its lines have their numbers still.
        function: the first line of the outermost function whose body is changed; None in what runs on import.
    """

    line: int
    before: str
    after: str
    tree: ast.Module
    run: tuple[int, int]
    function: int | None

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
    return [change for change in drawn if change.before != change.after]


def spread(count: int) -> list[int]:
    """Order numbers below `count` such that the first few of them lie far from each other: 0, the middle, quarters."""
    found: list[int] = []
    for parts in (2**power for power in range(count.bit_length() + 1) if count):
        found += [place for place in (part * count // parts for part in range(parts)) if place not in found]
    return found


def mutation(source: str, place: int) -> Mutation:
    """Make the mutation of a file that has this number."""
    tree = ast.parse(source)
    node, change = next(pair for number, pair in enumerate(_changes(tree)) if number == place)
    before, run, function = _short(node), _run(tree, node), _function(tree, node)
    change()
    return Mutation(node.lineno, before, _short(node), ast.fix_missing_locations(tree), run, function)


def _run(tree: ast.Module, changed: ast.stmt | ast.expr) -> tuple[int, int]:
    """Find the lines that are run with a node: of its statement, or of the function in whose defaults it is."""
    around: ast.stmt | None = None
    for node in ast.walk(tree):  # outer ones first
        if isinstance(node, ast.stmt) and any(inner is changed for inner in ast.walk(node)):
            around = node
    assert around is not None
    if isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return around.lineno, around.end_lineno or around.lineno
    end = around.test.end_lineno if isinstance(around, ast.If | ast.While) else changed.end_lineno
    return around.lineno, end or around.lineno


def _function(tree: ast.Module, changed: ast.AST) -> int | None:
    """Find the outermost function that has a node in its body, by the line that its code begins at."""
    for node in ast.walk(tree):  # outer ones first
        body = node.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else []
        if any(inner is changed for part in body for inner in ast.walk(part)):
            return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])  # type: ignore[attr-defined]
    return None


def _short(node: ast.AST) -> str:
    return ast.unparse(node).split("\n")[0][:100]


def _changes(tree: ast.Module) -> Iterator[tuple[ast.stmt | ast.expr, Callable[[], None]]]:
    """Give every node that can be changed with what changes it, in the order of the file."""
    skipped = {id(inner) for node in ast.walk(tree) for outer in _is_no_code(node) for inner in ast.walk(outer)}
    for node in ast.walk(tree):
        if id(node) not in skipped:
            for change in _changes_of(node):
                yield node, change


def _is_no_code(node: ast.AST) -> list[ast.AST]:
    """Give what is in a node that no test need repeat: annotations, docstrings, decorators, errors and texts."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.arg | ast.Import | ast.ImportFrom):
        return [node]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return [node]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        returned = [] if isinstance(node, ast.ClassDef) or node.returns is None else [node.returns]
        return [*node.decorator_list, *returned]  # such as `frozen=True`: of a record that nobody writes to
    if isinstance(node, ast.AnnAssign):
        return [node.annotation]
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return [node]
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called == "warn":
            return [node]
        return node.args[1:] if called == "isinstance" else []
    return []


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
