"""What alerts give to paste, run as a user would."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

import hdi_callback
from hdi_callback.rules import RULES
from tests.rules.readings import curve, layer, run
from tests.rules.test_rules import CASES, WAVERING


def watch(arguments: str):
    """Pass arguments to the callback of Lightning, and to the loop of one's own, as a user would."""
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), 1)
    names = {name: getattr(hdi_callback, name) for name in ("HDICallback", "watch_heads", "QKClip")}
    names |= {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    return eval(f"HDICallback({arguments}), watch_heads(model, optimizer, {arguments})", names)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.code], ids=lambda rule: rule.name)
def test_the_arguments_that_a_rule_gives_work(rule):
    callback, session = watch(rule.code)
    assert isinstance(callback, hdi_callback.HDICallback)
    assert isinstance(session, hdi_callback.HeadSession)


def test_the_limit_to_paste_is_of_the_runs_own_scores():
    losses = [1.0, 1.1] * 7 + [2.0, 2.0]
    for scores, code in (([3.0, 2.9] * 7 + [37.0] * 2, "interventions=[QKClip(limit=3)]"), ([30.0, 29.0] * 8, "")):
        readings = [
            layer({"attention_entropy": value, "attention_logit": score})
            for value, score in zip([*WAVERING, 0.1, 0.1], scores)
        ]
        *_, (alert,) = run(readings, losses=losses)
        assert (alert.rule, alert.code) == ("change with the loss", code)
        assert not code or watch(code)
        assert alert.from_dict(asdict(alert)) == alert


def test_a_finding_with_an_action_of_its_own_does_not_take_the_code_of_its_rule():
    values = {"hdi_alignment": 0.1, "hdi_energy_alignment": 0.97}
    *_, (alert,) = run([*curve("hdi_alignment", [0.1], hdi_energy_alignment=0.1), *curve("hdi_alignment", [0.1], **{
        name: value for name, value in values.items() if name != "hdi_alignment"})])  # fmt: skip
    assert alert.rule == "mean alignment"
    assert alert.action == "look at the layer's inputs: one direction outweighs the others there"
    assert alert.code == ""


def test_every_action_is_a_clause_without_a_capital_and_a_full_stop():
    actions = [rule.action for rule in RULES]
    for readings, _, *losses in CASES.values():
        given = run(readings, losses=losses[0] if losses else None)
        actions += [alert.action for alerts in given for alert in alerts if not alert.is_over]
    assert [action for action in actions if action[0].isupper() or action.endswith(".")] == []
