"""The experiment that leaves out of kept readings what wide layers would have had in turn."""

from __future__ import annotations

from tests.experiments.faults.in_turn import count, in_turn, report
from tests.experiments.faults.plan import HEALTHY


def made_up(kind: str = HEALTHY, logits: tuple[float, ...] = (1.0,) * 6) -> dict:
    names = [f"layers.{place}" for place in range(4)]
    values = {
        "hdi": 0.9,
        "circuit_qk_worst": 0.1,
        "attention_logit": 1.0,
        "token_cosine": 0.1,
        "head_movement_min": 0.01,
    }
    arrays = {"attention_logit": [1.0, 1.0], "circuit_qk_norm": [1.0, 1.0], "head_movement": [0.01, 0.01]}
    facts = [
        {"name": name, "num_heads": 2, "num_key_heads": 2, "head_dim": 4, "value_dim": 4, "width": 8} for name in names
    ]
    readings = [
        {
            "step": 5 * place,
            "values": {name: values | {"attention_logit": logit} for name in names},
            "arrays": {name: arrays | {"attention_logit": [logit] * 2} for name in names},
        }
        for place, logit in enumerate(logits)
    ]
    return {"kind": kind, "base": "text", "seed": 0, "facts": facts, "readings": readings, "alerts": []}


def test_rotation_of_a_recorded_run_removes_only_the_metrics_that_were_not_due():
    run = made_up()
    cut = in_turn(run)["readings"]
    for part, name in (("values", "attention_logit"), ("values", "token_cosine"), ("arrays", "attention_logit")):
        found = [[layer for layer, of in reading[part].items() if name in of] for reading in cut]
        assert found == [
            [*run["readings"][0]["values"]],
            ["layers.3"],
            ["layers.2"],
            ["layers.1"],
            ["layers.0"],
            ["layers.3"],
        ]
    seldom = [[layer for layer, of in reading["values"].items() if "circuit_qk_worst" in of] for reading in cut]
    assert [len(one) for one in seldom] == [4, 0, 0, 0, 0, 1]
    assert all(of["hdi"] == 0.9 and of["head_movement_min"] == 0.01 for one in cut for of in one["values"].values())
    assert all("circuit_qk_norm" in of for of in run["readings"][1]["arrays"].values()), "the run itself is as it was"


def test_a_fault_that_all_layers_show_is_reported_in_one_line_and_counted():
    shown = "logits grow"
    runs = [made_up(), made_up(shown, (1.0,) * 5 + (200.0,) * 6)]
    found = count(runs, starts={shown: 25})
    assert (found["faults"], found["reported whole"], found["reported in turn"], found["later"]) == (1, 1, 1, [0.0])
    assert (found["healthy"], found["false whole"], found["false in turn"]) == (1, 0, 0)
    row = report({"again": found})[4]
    assert row.startswith("| again | 1 of 1 | 1 | 1 | 0.0, 0 | 0 of 1 | 0 |")
