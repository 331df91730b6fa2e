"""Two checkpoints or two runs compared with each other."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

from hdi_callback import compare
from hdi_callback.errors import MisconfigurationError
from tests.dashboards.report.synthetic import write_run


@pytest.fixture
def model() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.MultiheadAttention(32, 4) for name in ("a", "b", "c")})


def test_a_model_does_not_differ_from_itself(model):
    found = compare(model, model)
    assert found.summary == "Nothing differs in 3 layers."
    assert all(layer.moved == (0, 0, 0, 0) for layer in found.layers)


def test_the_head_that_moved_is_named_first_with_its_layer(model):
    changed = copy.deepcopy(model)
    with torch.no_grad():
        keys = changed["b"].in_proj_weight[32:64]
        keys[16:24] = keys[0:8]  # head 2 becomes head 0
    found = compare(model, changed)
    first = found.layers[0]
    assert (first.name, first.moved_heads, first.pair_after) == ("b", (2,), (0, 2))
    assert first.after["worst_alignment"] == pytest.approx(1, abs=1e-5)
    assert first.moved[2] > 0.5
    assert found.summary.startswith("b changed most: the alignment of its closest pair went from ")
    assert json.loads(json.dumps(found.to_dict()))["layers"][0]["name"] == "b"


def test_a_change_of_basis_within_a_head_is_not_counted_as_movement(model):
    changed = copy.deepcopy(model)
    with torch.no_grad():
        keys = changed["a"].in_proj_weight[32:64]
        keys[8:16] = torch.linalg.qr(torch.randn(8, 8)).Q @ keys[8:16]
    assert max(next(layer for layer in compare(model, changed).layers if layer.name == "a").moved) < 1e-3


def test_layers_of_only_one_model_are_named(model):
    other = nn.ModuleDict({"a": model["a"], "d": nn.MultiheadAttention(32, 4), "b": nn.MultiheadAttention(32, 2)})
    found = compare(model, other)
    assert found.only_in_first == ("c",)
    assert found.only_in_second == ("d",)
    reason = (found.not_compared or {})["b"]
    assert "its keys are (4, 8, 32) in one and (2, 16, 32) in the other" in reason
    lines = str(found).splitlines()
    assert lines[-4:] == ["only in A: c", "only in B: d", f"not compared: b: {reason}", found.summary]
    assert [line.split()[0] for line in lines[3:-4]] == [layer.name for layer in found.layers]
    assert repr(found).startswith("<Comparison of ModuleDict and ModuleDict: ")


def test_two_runs_are_compared_at_a_step(tmp_path):
    write_run(tmp_path / "x" / "hdi" / "history.jsonl")
    write_run(tmp_path / "y" / "hdi" / "history.jsonl", collapsed=None)
    found = compare(tmp_path / "x", tmp_path / "y")
    assert found.layers[0].name == "model.blocks.2.attn"
    assert found.layers[0].pair_before == (1, 3)
    early = compare(tmp_path / "x", tmp_path / "y", step=0)
    assert early.summary == "Nothing differs in 4 layers."
    with pytest.raises(MisconfigurationError, match="is a run and `Linear` is none"):
        compare(tmp_path / "x", nn.Linear(2, 2))


def test_a_run_is_compared_only_with_runs_and_a_missing_path_is_named(tmp_path):
    write_run(tmp_path / "run" / "history.jsonl", steps=1, collapsed=None)
    with pytest.raises(MisconfigurationError, match=r"There is no file or folder .*nowhere"):
        compare(tmp_path / "run", tmp_path / "nowhere")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(MisconfigurationError, match=r"run` is a run and `.*model` is none"):
        compare(tmp_path / "model", tmp_path / "run")


def test_heads_whose_largest_overlap_changed_are_named_in_a_comparison_of_runs(tmp_path):
    write_run(tmp_path / "x" / "history.jsonl")
    write_run(tmp_path / "y" / "history.jsonl", collapsed=None)
    assert set(compare(tmp_path / "x", tmp_path / "y").layers[0].moved_heads[:2]) == {1, 3}
