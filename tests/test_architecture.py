"""The picture of the rooms in docs/architecture.md, held against the imports as they are."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = "hdi_callback"

# Which rooms each room may import. An arrow that is not here runs the wrong way.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "deprecation": set(),
    "arguments": {"errors"},
    "core": {"errors", "arguments"},
    "attention": {"errors", "arguments"},
    "monitoring": {"errors", "deprecation", "arguments", "core", "attention"},
    "audits": {"errors", "arguments", "core", "attention", "monitoring"},
    "dashboards": {"errors", "arguments", "core", "attention", "monitoring", "audits"},
    "command": {"errors", "arguments", "core", "attention", "monitoring", "audits", "dashboards"},
    "__main__": {"command"},
    "integrations": {"errors", "deprecation", "arguments", "core", "attention", "monitoring", "dashboards"},
    "rules": {"deprecation", "monitoring"},
    "interventions": {"deprecation", "monitoring"},
    "__init__": {
        "errors",
        "core",
        "attention",
        "monitoring",
        "audits",
        "dashboards",
        "integrations",
        "rules",
        "interventions",
    },
}
# What may be imported from outside when a module is loaded; functions may import more when they are called.
OUTSIDE = {
    "errors": set(),
    "deprecation": set(),
    "arguments": set(),
    "core": {"torch"},
    "attention": {"torch", "typing_extensions"},
    "monitoring": {"torch", "typing_extensions"},
    "audits": {"torch"},
    "dashboards": {"torch"},
    "command": {"click"},
    "__main__": set(),
    "integrations": {"torch", "lightning", "transformers", "ignite"},
    "rules": set(),
    "interventions": set(),
    "__init__": set(),
}


def room_of(path: Path, package: Path) -> str:
    return path.relative_to(package).parts[0].removesuffix(".py")


def imported_modules(tree: ast.AST) -> list[str]:
    """Every module that a file imports, wherever and however: statements, and `import_module` with a literal."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(f"{PACKAGE}."):
            found.append(node.value)
    return found


def imported_on_load(tree: ast.Module) -> set[str]:
    """Top-level packages that are loaded with the file: not in functions, not for type checkers alone."""
    found: set[str] = set()
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
        todo += ast.iter_child_nodes(node)
    return found


def wrong_arrows(path: Path, package: Path) -> list[str]:
    room, tree = room_of(path, package), ast.parse(path.read_text())
    wrong = []
    for module in imported_modules(tree):
        parts = module.split(".")
        if module.startswith("."):
            wrong.append(f"{path}: relative import {module}")
        elif parts[0] == PACKAGE and len(parts) > 1 and parts[1] in ARROWS:
            target = parts[1]
            if target != room and target not in ARROWS[room]:
                wrong.append(f"{path}: {room} -> {target} ({module})")
    foreign = imported_on_load(tree) - OUTSIDE[room] - set(sys.stdlib_module_names) - {PACKAGE}
    return wrong + [f"{path}: {room} loads {name}" for name in sorted(foreign)]


def source_files(root: Path) -> list[Path]:
    return sorted((root / PACKAGE).rglob("*.py"))


def test_imports_run_one_way(root):
    files = source_files(root)
    assert {room_of(path, root / PACKAGE) for path in files} == set(ARROWS), "a new room needs its arrows here"
    assert [line for path in files for line in wrong_arrows(path, root / PACKAGE)] == []


@pytest.mark.parametrize(
    "line",
    [
        "import hdi_callback.attention",
        "from hdi_callback import attention",
        "from hdi_callback.attention.heads import AttentionLayer",
        "def later():\n    import hdi_callback.monitoring.monitor",
        "import importlib\nimportlib.import_module('hdi_callback.integrations.lightning')",
        "from ..attention import heads",
        "import numpy",
        "try:\n    import lightning\nexcept ImportError:\n    pass",
    ],
)
def test_an_arrow_that_runs_the_wrong_way_is_noticed(tmp_path, line):
    offender = tmp_path / PACKAGE / "core" / "offender.py"
    offender.parent.mkdir(parents=True)
    offender.write_text(line + "\n")
    assert wrong_arrows(offender, tmp_path / PACKAGE) != []


def test_importing_the_package_loads_no_dashboard_and_no_trainer():
    code = (
        "import sys, hdi_callback\n"
        "heavy = {'wandb', 'tensorboard', 'transformers', 'matplotlib', 'lightning', 'pandas', 'rich'}\n"
        "heavy |= {'plotly', 'click', 'safetensors'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_importing_the_callback_loads_nothing_that_lightning_does_not_load():
    code = (
        "import sys, lightning.pytorch, lightning.pytorch.loggers\n"
        "before = {name.split('.')[0] for name in sys.modules}\n"
        "from hdi_callback import HDICallback\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} - before))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "['hdi_callback']"


@pytest.mark.slow
def test_nothing_in_the_package_uses_a_name_that_is_deprecated(root):
    modules = [".".join(path.relative_to(root).with_suffix("").parts) for path in source_files(root)]
    quiet = (
        "import warnings\nwarnings.simplefilter('ignore')\nimport ignite.engine\nwarnings.filters.pop(0)\n"  # its own
    )
    code = "import importlib\nfor module in {}: importlib.import_module(module.removesuffix('.__init__'))"
    options = ["-W", "error:`:DeprecationWarning"]
    done = subprocess.run(
        [sys.executable, *options, "-c", quiet + code.format(modules)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there():
    import hdi_callback

    missing = [name for name in hdi_callback.__all__ if getattr(hdi_callback, name, None) is None]
    assert missing == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hdi_callback.nothing  # noqa: B018


def test_the_top_level_holds_only_what_a_repository_needs(root):
    tracked = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    top = {line.split("/")[0] for line in tracked if line}
    allowed = {
        "pyproject.toml",
        PACKAGE,
        "examples",
        "tests",
        "docs",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CITATION.cff",
        "Makefile",
    }
    assert {name for name in top if not name.startswith((".", "constraints"))} <= allowed


def test_nothing_that_is_read_is_executed(root):
    """Histories and states are JSON; no call in the package runs what a file says."""
    for path in sorted((root / PACKAGE).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"eval", "exec", "compile"}, (path.name, called)
                if called == "torch.load":  # which executes nothing with this argument alone
                    assert "weights_only=True" in ast.unparse(node), path.name
                assert called.split(".")[0] not in {"pickle", "marshal", "dill", "joblib"}, (path.name, called)
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name.split(".")[0] for alias in node.names} | {(getattr(node, "module", "") or "")}
                assert not names & {"pickle", "marshal", "dill", "joblib"}, path.name
