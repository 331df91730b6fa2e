"""Pages are true: every Python block runs, commands exist, tables are those of the classes, links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from click import Context

from hdi_callback.command.commands import hdi

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.S | re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_exists(page):
    text = page.read_text(encoding="utf-8")
    context = Context(hdi)
    for name in re.findall(r"`hdi ([a-z]+)", text) + re.findall(r"^hdi ([a-z]+)", text, flags=re.M):
        assert hdi.get_command(context, name) is not None, name
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M)
    for name in re.findall(r"`make ([a-z-]+)", text) + re.findall(r"^make ([a-z-]+)", text, flags=re.M):
        assert name in targets, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_tables_are_those_of_the_classes():
    specification = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules["tables"] = module
    specification.loader.exec_module(module)
    for page in module.tables():
        assert (ROOT / "docs" / page).read_text(encoding="utf-8") == module.page_with_table(page)


def test_the_readme_has_at_most_nine_hundred_words():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900
