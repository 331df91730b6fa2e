"""Two checkpoints, or two runs, compared with each other."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

from hdi_callback.audits import compare
from hdi_callback.core import head_diversity
from hdi_callback.errors import MisconfigurationError
from hdi_callback.history import History
from hdi_callback.record import LayerRecord, Record
from tests.audits.models import Encoder, copy_head

NAME = "encoder.layers.1.self_attn"


@pytest.fixture
def two():
    """A model, and the same after head 5 of layer 1 became a copy of head 1 (of eight)."""
    torch.manual_seed(0)
    model = Encoder(2)
    model.encoder.layers[1].self_attn.num_heads, model.encoder.layers[1].self_attn.head_dim = 8, 4
    other = copy.deepcopy(model)
    copy_head(other.encoder.layers[1].self_attn.in_proj_weight[32:64], source=1, target=5, width=4)
    return model, other


def write_run(path: Path, model, step: int) -> None:
    """A history of one reading, with the matrices that a run keeps."""
    facts, layers = [], {}
    for number, layer in enumerate(model.encoder.layers):
        attn = layer.self_attn
        keys = attn.in_proj_weight.detach()[32:64].unflatten(0, (attn.num_heads, attn.head_dim))
        found = head_diversity(keys)
        lens = found.subspace
        name = f"encoder.layers.{number}.self_attn"
        facts.append({"name": name, "num_heads": attn.num_heads, "num_key_heads": attn.num_heads})
        layers[name] = LayerRecord(
            values={"hdi": float(lens.index), "hdi_alignment": float(lens.alignment),
                    "hdi_worst_alignment": float(lens.worst_alignment)},
            heads={"worst_alignment_pair": lens.worst_alignment_pair.tolist()},
            matrices={"pair_alignment": lens.pair_alignment.float()},
        )  # fmt: skip
    history = History(path, facts)
    history.write(Record(step, layers, is_last=True))
    history.close()


def test_nothing_differs_in_a_model_and_itself(two):
    found = compare(two[0], two[0])
    assert found.summary == (
        "The query, key, value and output weights that are in both are equal bit by bit, in 2 layers. All other "
        "parameters are equal."
    )
    assert all(layer.change("hdi") == 0 and layer.most_changed is None for layer in found.layers)


def attention(model):
    return model.encoder.layers[1].self_attn


ROWS = {"query": slice(0, 32), "key": slice(32, 64), "value": slice(64, 96)}


@pytest.mark.parametrize("role", ["query", "key", "value", "output"])
@pytest.mark.parametrize(
    "change",
    [lambda w: w * 10, lambda w: -w, lambda w: w.flip(0), lambda w: w + 1e-4],
    ids=["scale", "sign", "order", "little"],
)
def test_a_change_of_one_head_is_named_whatever_its_role(two, role, change):
    model, other = two[0], copy.deepcopy(two[0])
    with torch.no_grad():
        rows = attention(other).out_proj.weight.T if role == "output" else attention(other).in_proj_weight[ROWS[role]]
        rows[12:16] = change(rows[12:16])  # head 3
        before = attention(model).out_proj.weight.T if role == "output" else attention(model).in_proj_weight[ROWS[role]]
        share = float((rows[12:16] - before[12:16]).norm() / before[12:16].norm())
    found = compare(model, other)
    assert found.layers[0].most_changed == (role, 3, pytest.approx(share, rel=1e-4))
    assert [head for head, of_head in enumerate(found.layers[0].changes[role]) if of_head] == [3]
    assert f"{NAME} changed most: the {role} weights of head 3 by" in found.summary


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("side", ["A", "B"])
def test_what_is_not_finite_or_zero_comes_first_whatever_else_has_changed(two, value, side):
    model, other = two[0], copy.deepcopy(two[1])
    with torch.no_grad():
        attention(model if side == "A" else other).in_proj_weight[64:][12:16] = value
    what = "not finite" if value else "zero"
    assert compare(model, other).summary.startswith(f"{NAME}: the value weights of head 3 are {what} in {side}.")


@pytest.mark.parametrize("name", ["encoder.layers.0.norm1.weight", "encoder.layers.1.self_attn.in_proj_bias"])
def test_parameters_beside_the_heads_are_compared_too(two, name):
    other = copy.deepcopy(two[0])
    with torch.no_grad():
        other.get_parameter(name)[5] += 1
    assert compare(two[0], other).summary.endswith(f"Of the other parameters 1 differ: {name}.")


def test_of_runs_it_says_that_a_history_has_no_weights(two, tmp_path):
    for name in "ab":
        write_run(tmp_path / name / "history.jsonl", two[0], 50)
    summary = "All numbers of these readings agree, in 2 layers. A history has no weights."
    assert compare(tmp_path / "a", tmp_path / "b").summary == summary


def test_the_head_that_became_a_copy_is_named_for_checkpoints(two):
    top = compare(*two).layers[0]
    assert (top.name, top.most_changed[:2], top.pair_after) == (NAME, ("key", 5), (1, 5))


def test_the_pair_of_which_one_became_a_copy_is_named_for_runs(two, tmp_path):
    for name, model in zip("ab", two):
        write_run(tmp_path / name / "history.jsonl", model, 50)
    found = compare(tmp_path / "a", tmp_path / "b")
    top = found.layers[0]
    assert (top.name, top.most_changed, top.pair_after) == (NAME, None, (1, 5))
    assert found.summary.endswith("to 1.00 (heads 1 and 5).")
    assert "changed most" not in str(found).splitlines()[3]


def test_runs_are_compared_up_to_a_step(two, tmp_path):
    for name, model in zip("ab", two):
        write_run(tmp_path / name / "history.jsonl", model, 50)
    with pytest.raises(MisconfigurationError, match="has no reading up to step 20"):
        compare(tmp_path / "a", tmp_path / "b", step=20)


def test_a_run_and_a_model_cannot_be_compared(two, tmp_path):
    write_run(tmp_path / "history.jsonl", two[0], 50)
    with pytest.raises(MisconfigurationError, match="is a run and `Encoder` is not"):
        compare(tmp_path, two[0])


def test_layers_of_one_model_alone_are_named(two):
    found = compare(two[0], Encoder(3))
    assert found.only_in_second == ("encoder.layers.2.self_attn",)
    assert found.summary.endswith(" 1 layer is only in B.")


def test_heads_of_other_shapes_are_not_compared_one_by_one(two):
    found = compare(two[0], Encoder(2))
    assert found.not_compared[f"key of {NAME}"] == "its weights are (8, 4, 32) in A and (4, 8, 32) in B"


def test_a_comparison_is_a_table_of_80_columns_and_plain_data(two):
    found = compare(*two)
    lines = str(found).splitlines()
    assert lines[0].startswith("A  ")
    assert lines[-1] == found.summary
    assert max(map(len, lines[:-1])) <= 80
    assert json.loads(json.dumps(found.to_dict()))["layers"][0]["pair_after"] == [1, 5]


def test_key_heads_are_called_so_where_heads_share_their_keys(two, tmp_path):
    runs = [tmp_path / name / "history.jsonl" for name in "ab"]
    for path, model in zip(runs, two):
        write_run(path, model, 0)
        first, *rest = path.read_text().splitlines(keepends=True)
        path.write_text(
            first.replace('"num_heads": 8', '"num_heads": 32').replace('"num_heads":8', '"num_heads":32')
            + "".join(rest)
        )
    assert compare(*runs).summary.endswith("(key heads 1 and 5).")
