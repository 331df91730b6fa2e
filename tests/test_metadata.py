"""What a package index shows: metadata as the build backend makes them, with an address of the project and without."""

from __future__ import annotations

import re
import shutil
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

RELATIVE = re.compile(r"\]\((?!\w+:|#)[^)]+\)")
FOLDERS = ("hdi_callback",)
FILES = ("README.md", "LICENSE", "pyproject.toml", "hatch_build.py")


def metadata(root: Path, folder: Path, monkeypatch, urls: str = "") -> Message:
    """Build a wheel of a copy of the project, as pip does, and read its metadata."""
    from hatchling.build import build_wheel

    for name in FILES:
        shutil.copy(root / name, folder / name)
    for name in FOLDERS:
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    text = (folder / "pyproject.toml").read_text()
    table = "[project.urls]"
    (folder / "pyproject.toml").write_text(text.replace(table, f"{table}\n{urls}", 1))
    monkeypatch.chdir(folder)
    with zipfile.ZipFile(folder / build_wheel(str(folder))) as wheel:
        (name,) = (one for one in wheel.namelist() if one.endswith(".dist-info/METADATA"))
        return Parser().parsestr(wheel.read(name).decode())


def test_the_readme_on_a_package_index_has_no_relative_links_without_a_project_url(root, tmp_path, monkeypatch):
    shown = metadata(root, tmp_path, monkeypatch)
    text = shown.get_payload()
    assert RELATIVE.search(text) is None
    assert "![" not in text
    assert "(`docs/getting-started.md`)" in text
    assert shown["Description-Content-Type"] == "text/markdown"
    assert shown.get_all("Project-URL") == ["Paper, https://arxiv.org/abs/2605.20271"]
    assert RELATIVE.search((root / "README.md").read_text()), "the check would see them"


def test_with_an_address_links_and_pictures_lead_to_the_tag_of_the_version(root, tmp_path, monkeypatch):
    urls = 'Repository = "https://example.org/them/hdi"\nDocumentation = "https://example.org/docs/"\n'
    shown = metadata(root, tmp_path, monkeypatch, urls)
    text, place = shown.get_payload(), f"https://example.org/them/hdi/{{}}/v{shown['Version']}/"
    assert RELATIVE.search(text) is None
    own = re.findall(r"(!?)\]\((https://example\.org/[^)]+)\)", text)
    paths = re.findall(re.escape(place).replace(r"\{\}", "(blob|raw)") + r"([^)#]+)", text)
    assert len(paths) == len(RELATIVE.findall((root / "README.md").read_text())) == len(own)
    for kind, path in paths:
        assert (root / path).is_file(), path
        assert (kind == "raw") == path.endswith((".png", ".svg")), path


def lower_bounds(root: Path) -> dict[str, str]:
    """Of what users install: the dependencies, and the extras but those of development."""
    text = (root / "pyproject.toml").read_text()
    project = text[text.index("\ndependencies = [") : text.index("\ndev = [")]
    return dict(re.findall(r'"([\w-]+)>=([\d.]+)"', project))


def test_the_oldest_versions_that_are_tried_are_those_that_are_admitted(root):
    tried = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (root / "constraints-lower.txt").read_text(), re.MULTILINE))
    admitted = lower_bounds(root)
    assert {"torch", "lightning", "wandb", "transformers", "pytorch-ignite", "plotly"} <= admitted.keys()
    for name, bound in admitted.items():
        assert name in tried, f"constraints-lower.txt leaves {name} to the resolver"
        assert re.sub(r"(\.0)+$", "", tried[name]) == re.sub(r"(\.0)+$", "", bound), name
