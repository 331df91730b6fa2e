"""Pages are true: every Python block and command runs, tables are those of the classes, links lead somewhere."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from click.testing import CliRunner

from hdi_callback.command.commands import hdi
from hdi_callback.rules import RULES
from hdi_callback.session import Settings
from tests.audits.models import build_encoder
from tests.command.runs import write_run
from tests.versions import needs_dropout_of_tables

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CLAIMS = sorted((ROOT / "docs" / "claims").glob("*.md"))
TARGETS = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.S | re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page.name == "internals.md" and not hasattr(transformers, "GptOssForCausalLM"):
        pytest.skip(
            f"the page follows the operations of newer GPT-2 than that of transformers {transformers.__version__}"
        )
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with everything that the commands of the pages name."""
    folder = tmp_path_factory.mktemp("workplace")
    write_run(folder / "lightning_logs" / "version_0" / "hdi" / "history.jsonl")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=32
    )
    for name in ("path/to/checkpoint", "checkpoint-1000", "checkpoint-2000"):
        transformers.LlamaForCausalLM(config).save_pretrained(folder / name)
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "module.py").write_text("from tests.audits.models import build_encoder as LitGPT\n")
    torch.save({"state_dict": build_encoder().state_dict(), "global_step": 100}, folder / "last.ckpt")
    return folder


def commands(page: Path) -> list[str]:
    """The commands on a page: lines of shell blocks, and code in the text."""
    text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.S)
    blocks_of = re.findall(r"^```shell\n(.*?)^```", text, flags=re.S | re.M)
    lines = [line.split("  #")[0].strip() for block in blocks_of for line in block.splitlines()]
    return list(dict.fromkeys([*filter(None, lines), *re.findall(r"`((?:hdi|python -m) [^`]+)`", text)]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_runs(page, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    for line in commands(page):
        program, *words = shlex.split(line)
        if program == "hdi":
            assert words[0] in hdi.commands, line
            has_placeholder = re.search(r"\b[A-Z]{1,6}\b(?!=)|module:function", line)
            if not has_placeholder and (len(words) > 1 or words == ["explain"]):
                done = CliRunner().invoke(hdi, words, prog_name="hdi")
                assert done.exit_code in {0, 1}, (line, done.output)
        elif line.startswith("python -m pytest"):  # they run in other tests, or are these
            assert all((ROOT / word).exists() for word in words[2:]), line


def test_the_page_lists_the_arguments_that_there_are():
    page = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
    first_column = re.findall(r"^\| (`.*?) \|", page.partition("## Arguments")[2], flags=re.M)
    assert [name for cell in first_column for name in re.findall(r"`(\w+)`", cell)] == [
        field.name for field in dataclasses.fields(Settings)
    ]


@pytest.mark.parametrize("page", [*PAGES, *CLAIMS], ids=lambda page: page.name)
def test_links_files_and_targets_of_a_page_exist(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    for file in re.findall(r"`((?:docs|examples|hdi_callback|tests)/[^` ]*)`(?! there)", text):
        assert (ROOT / file).exists(), file
    for target in re.findall(r"(?:`|^)make ([a-z-]+)", text, flags=re.M):
        assert target in TARGETS, target


def script(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_gallery_shows_what_rules_say_of_the_recorded_trainings_now():
    gallery = script("gallery")
    alerts = gallery.first_alerts()
    assert gallery.page(alerts) == (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert {rule.name for rule in RULES} - alerts.keys() == {"merged values"}
    assert all((ROOT / "docs" / gallery.picture(name)).exists() for name in alerts)


@needs_dropout_of_tables
def test_tables_are_those_of_the_classes():
    module = script("tables")
    for page in module.tables():
        assert (ROOT / "docs" / page).read_text(encoding="utf-8") == module.page_with_tables(page)


def test_the_readme_has_at_most_nine_hundred_words():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900
