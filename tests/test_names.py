"""Every name that a user sees is known where it is looked up."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import hdi_callback
from hdi_callback import METRICS, LayerRecord, MisconfigurationError, Record
from hdi_callback.checks.diagnoses import DIAGNOSES
from hdi_callback.checks.questions import QUESTIONS
from hdi_callback.dashboards import TensorBoard
from hdi_callback.dashboards.names import INTERVENTIONS, look_up
from hdi_callback.rules import RULES


@pytest.mark.slow
def test_a_type_checker_knows_every_public_name_as_what_it_is(tmp_path: Path) -> None:
    functions = [name for name in hdi_callback.__all__ if name[0].islower()]
    program = [f"from hdi_callback import {', '.join(hdi_callback.__all__)}", "import hdi_callback"]
    program += [f"reveal_type({name})\nreveal_type(hdi_callback.{name})" for name in functions]
    (tmp_path / "program.py").write_text("\n".join(program))
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", str(tmp_path), "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    revealed = [line for line in done.stdout.splitlines() if "Revealed type" in line]
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(revealed) == 2 * len(functions)
    assert not [line for line in revealed if "Module" in line and "def (" not in line]


RECORD = Record(
    0,
    {
        name: LayerRecord(
            dict.fromkeys(METRICS, 0.5), {"worst_alignment_pair": [0, 1]}, {"pair_alignment": torch.eye(4)}
        )
        for name in ("blocks.0.attn", "blocks.1.attn")
    },
)


def test_every_curve_and_picture_that_a_dashboard_gets_is_explained_by_the_command(tmp_path) -> None:
    writer = SummaryWriter(str(tmp_path))
    facts = [{"name": name, "num_heads": 4, "num_key_heads": 4} for name in RECORD.layers]
    board = TensorBoard(writer, facts, tuple(METRICS))
    board.write(RECORD)
    board.write(replace(RECORD, step=1))
    writer.close()
    events = EventAccumulator(str(tmp_path), {"scalars": 0, "images": 0})
    events.Reload()
    tags = events.Tags()
    assert len(tags["scalars"]) == 6 + 2 * len(METRICS)
    for tag in tags["scalars"]:
        assert look_up(tag).kind == "curve"
        assert [point.step for point in events.Scalars(tag)] == [0, 1]
    assert tags["images"]
    assert {look_up(tag).kind for tag in tags["images"]} == {"picture"}


@pytest.mark.parametrize("name", [*METRICS, *(rule.name for rule in RULES), *(rule.__name__ for rule in RULES)])
def test_metrics_and_rules_are_explained_however_they_are_written(name: str) -> None:
    assert look_up(name).kind in {"metric", "rule"}
    if name not in METRICS:
        assert look_up(name.replace(" ", "-").upper()) == look_up(name)


@pytest.mark.parametrize("each", [*DIAGNOSES, *QUESTIONS], ids=lambda each: each.__name__)
def test_every_finding_of_a_check_is_explained(each) -> None:
    entry = look_up(each.__name__.replace("_", " "))
    assert entry.kind == ("rule" if entry.text == "later tokens" else "finding of hdi check")
    assert (each.__doc__ in entry.meaning) is (entry.kind != "rule")


def test_every_public_intervention_and_finding_is_explained() -> None:
    public = [getattr(hdi_callback, name) for name in hdi_callback.__all__]
    kinds = [kind for kind in public if isinstance(kind, type) and issubclass(kind, hdi_callback.Intervention)]
    assert {kind.__name__ for kind in kinds} - {"Intervention"} == set(INTERVENTIONS)
    assert all(look_up(name).kind == "intervention" for name in INTERVENTIONS)
    assert {look_up(name).kind for name in ("dead heads", "weights missing")} == {"finding of hdi audit"}


def test_a_name_that_is_none_suggests_the_closest_of_any_kind() -> None:
    for word, close in {"hdi/mim": "hdi/min", "ReviveHead": "ReviveHeads", "worst pairs": "worst pair"}.items():
        with pytest.raises(MisconfigurationError, match=f"Did you mean '{close}'"):
            look_up(word)


def test_type_checkers_and_editors_see_the_names_that_there_are():
    stub = ast.parse(Path(hdi_callback.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imported = {
        alias.name: getattr(importlib.import_module(statement.module), alias.name)
        for statement in stub.body
        if isinstance(statement, ast.ImportFrom) and statement.module.startswith("hdi_callback")
        for alias in statement.names
    }
    assert imported == {name: getattr(hdi_callback, name) for name in hdi_callback.__all__}
