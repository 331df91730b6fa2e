"""What alerts give to paste, run as a user would."""

from __future__ import annotations

import ast

import pytest
import torch

import hdi_callback
from hdi_callback.rules import RULES, Alerts
from hdi_callback.rules.rule import DOORS, paste
from tests.rules.readings import curve, facts, run
from tests.rules.test_rules import entropy


def run_pasted(code: str):
    """Run code where a model and its optimizer have these names; return what its last expression is."""
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), 1)
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    lines = ast.parse(code)
    *before, last = lines.body
    exec(compile(ast.Module(before, []), "pasted", "exec"), names)
    return eval(compile(ast.Expression(last.value), "pasted", "eval"), names)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.code], ids=lambda rule: rule.name)
def test_what_a_rule_gives_to_paste_runs_under_every_trainer(rule, door):
    made = run_pasted(paste(rule.code, door))
    maker = getattr(hdi_callback, door)
    assert isinstance(made, maker) if isinstance(maker, type) else isinstance(made, hdi_callback.HeadSession)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("readings", "limit"),
    [
        ([entropy(0.9, attention_logit=3.0)[0] for _ in range(20)] + entropy(0.05, attention_logit=37.0), 3),
    ],
    ids=["sharpened"],
)
def test_the_limit_to_paste_is_of_the_runs_own_scores(readings, limit, door):
    *_, given = run(readings, Alerts(layers=[facts()], pretrained=False, door=door))
    (alert,) = given
    assert alert.code == paste(f"interventions=[QKClip(limit={limit})]", door)
    assert f"{door}(" in alert.code
    assert run_pasted(alert.code) is not None
    assert alert.from_dict(alert.to_dict()) == alert


def test_attention_that_sharpened_while_scores_fell_is_given_no_limit_of_scores():
    readings = [entropy(0.9, attention_logit=30.0)[0] for _ in range(20)] + entropy(0.05, attention_logit=7.0)
    *_, (alert,) = run(readings)
    assert alert.rule == "sudden sharpening"
    assert alert.code == ""


def test_a_finding_with_an_action_of_its_own_does_not_take_the_code_of_its_rule():
    values = {"hdi_alignment": 0.1, "hdi_energy_alignment": 0.97}
    *_, (alert,) = run([*curve("hdi_alignment", [0.1], hdi_energy_alignment=0.1), *curve("hdi_alignment", [0.1], **{
        name: value for name, value in values.items() if name != "hdi_alignment"})])  # fmt: skip
    assert alert.rule == "mean alignment"
    assert "inputs" in alert.action
    assert alert.code == ""
