"""The notebook of the examples, executed by a kernel of its own as a reader does."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_the_alert_the_maps_and_the_table(path, root, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(root))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    alerts = re.findall(r"hdi_callback warning: .*encoder\.layers\.1\.self_attn: heads 1 and 3 are nearly one", printed)
    assert len(alerts) == 1
    shown = [output.data for output in outputs if output.output_type == "execute_result"]
    assert sum("image/png" in data for data in shown) == 2
    (table,) = (data["text/html"] for data in shown if "text/html" in data)
    assert "heads 1 and 3 are nearly one head" in table
    assert "heads 1 and 3" in (tmp_path / "runs" / "notebook" / "hdi" / "report.html").read_text()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_is_stored_with_its_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in shown if output.output_type == "error"]
    assert sum("image/png" in output.get("data", {}) for output in shown) == 2
    for target in re.findall(r"\]\((?!https:)([^)#]+)", "".join(cell.source for cell in notebook.cells)):
        assert (path.parent / target).is_file(), target


def test_the_examples_include_a_notebook():
    assert NOTEBOOKS
