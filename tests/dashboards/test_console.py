from __future__ import annotations

from textwrap import indent

from hdi_callback.dashboards import Console
from tests.dashboards.synthetic import CODE, collapsing, facts_of


def printed(layers=4, heads=6, readings=60, **arguments) -> list[str]:
    lines: list[str] = []
    console = Console(lines.append, facts_of(layers, heads), every_n_steps=50, **arguments)
    for record in collapsing(layers, heads, readings, layer=2, pair=(1, 3)):
        console.write(record)
    console.close()
    return lines


def test_a_run_prints_its_layers_one_alert_one_action_and_the_verdict():
    table, alert, action, end = printed(history="/runs/history.jsonl")
    assert table.splitlines()[0] == "hdi_callback watches 4 attention layers, every 50 optimizer steps"
    assert alert.startswith(
        "hdi_callback warning, step 2000 (hdi explain worst pair): heads 1 and 3 of model.layers.2."
    )
    assert alert.endswith(f"\n{indent(CODE, '  ')}")
    assert action == "hdi_callback, step 2000, save checkpoint: saved the model"
    assert end.startswith("hdi_callback: Since step 2000: heads 1 and 3")
    assert end.endswith("History: /runs/history.jsonl")


def test_what_is_not_watched_is_printed():
    table, *_ = printed(refused={"mixer": "linear attention"})
    assert "not watched: mixer: linear attention" in table


def test_a_run_without_a_reading_says_so_at_its_end():
    lines: list[str] = []
    console = Console(lines.append, facts_of(1, 4), every_n_steps=1)
    console.close()
    assert lines[0].startswith("hdi_callback watches 1 attention layer, at every optimizer step")
    assert lines[1] == "hdi_callback: Nothing to judge: there is no reading yet."


def test_old_readings_are_not_kept_in_memory():
    console = Console(lambda text: None, facts_of(4, 6), every_n_steps=50)
    for record in collapsing(4, 6, 10, layer=2, pair=(1, 3)):
        console.write(record)
    assert [bool(record.layers) for record in console._records] == [False] * 8 + [True, True], "the last has no forward"


def test_the_verdict_of_a_resumed_run_counts_what_was_before():
    first, second, *rest = collapsing(4, 6, 20, layer=2, pair=(1, 3))
    lines: list[str] = []
    console = Console(lines.append, facts_of(4, 6), every_n_steps=50, past=[first, second])
    console.close()
    assert lines[-1].startswith("hdi_callback: No alert in 2 readings of 4 layers. The two closest are heads")
    console.write(rest[0])
    console.close()
    assert lines[-1].startswith("hdi_callback: No alert in 3 readings of 4 layers.")
