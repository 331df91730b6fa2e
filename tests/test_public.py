"""The door: what is public, and that the reference is made of it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import subprocess
import sys

import pytest

MODULES = (
    "hdi_callback",
    "hdi_callback.rules",
    "hdi_callback.interventions",
    "hdi_callback.core",
    "hdi_callback.errors",
)


def program(root, name: str):
    spec = importlib.util.spec_from_file_location(name, root / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def reference(root):
    return program(root, "reference")


def test_the_picture_of_the_rooms_shows_the_imports_as_they_are(root):
    drawn = (root / "docs" / "images" / "architecture.svg").read_text()
    made = program(root, "picture").picture()
    assert [line for line in drawn.splitlines() if " · " not in line] == [
        line for line in made.splitlines() if " · " not in line
    ], "draw it anew: python docs/picture.py"
    assert drawn.count("<path d=") - 1 == 6, "and one is the head of an arrow"


def test_every_deprecated_name_warns_and_exists_where_the_warning_says(root):
    """Of each module with a table of old names; the policy in the reference says for how long."""
    checked = 0
    for path in sorted((root / "hdi_callback").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "renamed"):
                continue
            old = importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))
            table = node.args[1]
            keys = table.keys if isinstance(table, ast.Dict) else table.generators[0].iter.elts
            for name in [key.value for key in keys]:
                with pytest.warns(DeprecationWarning, match=f"{name}` is deprecated: write `from ") as caught:
                    found = getattr(old, name)
                line = str(caught[0].message).partition("write `")[2].rstrip("`.")
                place, _, new = line.removeprefix("from ").partition(" import ")
                assert getattr(importlib.import_module(place), new) is found
                checked += 1
    assert checked >= 10
    policy = (root / "docs" / "api.md").read_text().partition("## Deprecation")[2]
    assert "two minor versions and six months" in " ".join(policy.split())


def test_the_reference_is_made_from_the_public_lists(root, reference):
    assert (root / "docs" / "api.md").read_text() == reference.page(), "write it anew: python docs/reference.py"
    assert reference.MODULES == MODULES


def test_the_reference_names_everything_that_is_public_once(root):
    import inspect

    page = (root / "docs" / "api.md").read_text()
    public = {
        name: getattr(importlib.import_module(module), name)
        for module in MODULES
        for name in importlib.import_module(module).__all__
    }
    for name, thing in public.items():
        found = [line for line in page.splitlines() if line.startswith(".. auto") and line.endswith(f".{name}")]
        assert len(found) == (0 if inspect.ismodule(thing) else 1), name


@pytest.mark.parametrize("module", MODULES)
def test_every_name_in_a_public_list_exists_and_is_listed_once(module):
    room = importlib.import_module(module)
    assert len(set(room.__all__)) == len(room.__all__)
    assert all(getattr(room, name) is not None for name in room.__all__)


def test_dir_lists_only_public_names():
    for module in MODULES[:3]:
        room = importlib.import_module(module)
        assert set(dir(room)) == set(room.__all__)


def test_rules_and_interventions_can_be_imported_from_the_package():
    import hdi_callback
    from hdi_callback.interventions import StopTraining
    from hdi_callback.rules import MeanAlignment

    assert hdi_callback.rules.MeanAlignment is MeanAlignment
    assert hdi_callback.interventions.StopTraining is StopTraining
    with pytest.warns(DeprecationWarning, match="choose_rules"):
        assert hdi_callback.rules.choose_rules is importlib.import_module("hdi_callback.monitoring.rules").choose_rules


def test_the_import_of_the_package_loads_nothing_else(root):
    """All public names together take longer to load than a line at the top of a script should."""
    code = "import sys; import hdi_callback; print([name for name in sys.modules if name.startswith('hdi_callback')])"
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "['hdi_callback']"


def test_type_checkers_see_the_public_names_of_lazy_imports(root):
    import hdi_callback

    tree = ast.parse((root / "hdi_callback" / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    sources = {alias.name: node.module for node in block.body for alias in node.names}  # type: ignore[attr-defined]
    rooms = {name for name, module in sources.items() if module == "hdi_callback"}
    assert set(sources) == set(hdi_callback.__all__)
    assert {name: module for name, module in sources.items() if name not in rooms} == hdi_callback._MODULES
    assert all(getattr(hdi_callback, name).__name__ == f"hdi_callback.{name}" for name in rooms)
