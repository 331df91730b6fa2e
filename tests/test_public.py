"""The door: what is public, and that the reference is made of it."""

from __future__ import annotations

import importlib
import importlib.util

import pytest

MODULES = (
    "hdi_callback",
    "hdi_callback.rules",
    "hdi_callback.interventions",
    "hdi_callback.core",
    "hdi_callback.errors",
)


@pytest.fixture
def reference(root):
    spec = importlib.util.spec_from_file_location("reference", root / "docs" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
def test_everything_in_a_public_list_is_there_and_listed_once(module):
    room = importlib.import_module(module)
    assert len(set(room.__all__)) == len(room.__all__)
    assert all(getattr(room, name) is not None for name in room.__all__)


def test_dir_shows_what_is_public_and_nothing_else():
    for module in MODULES[:3]:
        room = importlib.import_module(module)
        assert set(dir(room)) == set(room.__all__)


def test_rules_and_interventions_can_be_imported_from_the_door():
    import hdi_callback
    from hdi_callback.interventions import StopTraining
    from hdi_callback.rules import MeanAlignment

    assert hdi_callback.rules.MeanAlignment is MeanAlignment
    assert hdi_callback.interventions.StopTraining is StopTraining
    with pytest.warns(DeprecationWarning, match="choose_rules"):
        assert hdi_callback.rules.choose_rules is importlib.import_module("hdi_callback.monitoring.rules").choose_rules
