from __future__ import annotations

from hdi_callback.checks import joined_name
from hdi_callback.dashboards.layer_table import layer_rows, layers_text
from hdi_callback.record import Alert
from tests.dashboards.synthetic import collapsing, facts_of


def test_layers_that_are_alike_are_one_line_of_at_most_80_columns():
    text = layers_text(facts_of(48, 32))
    assert [line.split() for line in text.splitlines()] == [
        ["layer", "heads", "width", "layout"],
        ["model.layers.0-47.self_attn", "32", "64", "separate", "Linear"],
    ]


def test_layers_of_other_shapes_and_layers_with_an_alert_have_lines_of_their_own():
    facts = [*facts_of(4, 8), {**facts_of(1, 8, key_heads=2)[0], "name": "head.attn", "value_dim": 32}]
    alert = Alert(0, "worst pair", "warning", {"model.layers.2.self_attn": (1, 3)}, "m")
    rows = layer_rows(facts, active=[alert])
    assert [(row["layer"], row["heads"], row["width"], row["alert"]) for row in rows] == [
        ("model.layers.0-1,3.self_attn", "8", "64", ""),
        ("model.layers.2.self_attn", "8", "64", "worst pair"),
        ("head.attn", "8 (2 key)", "64 (32 value)", ""),
    ]


def test_a_table_with_numbers_names_the_closest_pair_of_each_line():
    *_, record = collapsing(48, 32, 40, layer=17, pair=(3, 21))
    rows = layer_rows(facts_of(48, 32), record, record.active)
    assert len(rows) == 2
    worst = rows[1]
    assert tuple(worst[column] for column in ("layer", "closest", "pair", "alert")) == (
        "model.layers.17.self_attn", "1.00", "3 and 21", "worst pair",
    )  # fmt: skip
    assert rows[0]["pair"].endswith(tuple(f" of {layer}" for layer in range(48)))
    assert rows[0]["HDI"].startswith("0.9")


def test_long_names_and_reasons_are_wrapped_and_none_is_cut():
    facts = [
        {**one, "name": f"{'wrapper.' * 12}{i}.attn", "kind": "packed " * 10} for i, one in enumerate(facts_of(3, 8))
    ]
    refused = {f"blocks.{i}.mixer": "a sigmoid stands where a softmax would be; " * 3 for i in range(48)}
    text = layers_text(facts, refused)
    assert max(map(len, text.splitlines())) <= 80
    words = "".join(text.split())
    assert "wrapper." * 12 + "0-2.attn" not in text
    assert "notwatched:blocks.0-47.mixer:asigmoidstands" in words
    assert words.count("asigmoid") == 3, "equal reasons are said once"


def test_names_with_brackets_are_shown_as_they_are():
    assert "blocks[/0].attn" in layers_text([{"name": "blocks[/0].attn", "num_heads": 4, "kind": "[red]x"}])


def test_layers_are_named_in_few_words():
    names = [f"layers.{stage}.blocks.{block}" for stage in range(2) for block in range(3)]
    assert joined_name(names) == "layers.0-1.blocks.0-2"
    assert joined_name(names[:-1]) == "layers.0.blocks.0 and 4 more"
    assert joined_name(["a", "b", "c"]) == "a, b, c"
    assert joined_name([]) == ""


def test_the_name_of_a_layer_is_not_broken_in_80_columns_by_what_stands_beside_it():
    *_, record = collapsing(48, 32, 40, layer=17, pair=(3, 21))
    alert = Alert(0, "mean alignment", "warning", {"model.layers.17.self_attn": ()}, "m")
    text = layers_text(facts_of(48, 32), None, record, [alert])
    words = text.split()
    assert {"model.layers.0-16,18-47.self_attn", "model.layers.17.self_attn", "alignment"} <= set(words)
    assert max(map(len, text.splitlines())) <= 80
