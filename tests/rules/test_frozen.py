"""What does not train, in real trainings: adapters, queries, gains; and what is unfrozen on purpose."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hdi_callback import load_history, watch_heads
from tests.studies.experiments.held_out.model import Net, head_rows

STEPS = 40


def told(tmp_path, model, optimizer=None, *, after=lambda step: None, forward=None, every=5):
    """Train; return rule, level and message of each alert."""
    optimizer = optimizer or torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 1e-2)
    forward = forward or model
    history = tmp_path / "history.jsonl"
    with watch_heads(model, optimizer, every, history=history) as heads:
        for step in range(STEPS):
            with heads.step():
                x = torch.randint(8, (4, 10))
                loss = nn.functional.cross_entropy(forward(x).flatten(0, 1), x.flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    after(step)
                heads.loss = loss
    return [
        (alert.rule, alert.level, alert.message)
        for record in load_history(history).records
        for alert in record.alerts
        if not alert.is_over
    ]


def adapted(**options) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = Net(8, 8, layers=2)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **options)
    return peft.inject_adapter_in_model(config, model)


def named(model, word):
    return [one for name, one in model.named_parameters() if word in name]


def test_adapters_that_are_both_zero_are_told(tmp_path):
    model = adapted()
    for adapter in named(model, "lora_A"):
        nn.init.zeros_(adapter)
    ((rule, level, message),) = told(tmp_path, model)
    assert (rule, level) == ("frozen weights", "warning")
    assert "`q_proj.lora_A.default.weight`, `q_proj.lora_B.default.weight`" in message


def test_adapters_that_are_not_in_the_optimizer_are_told(tmp_path):
    model = adapted()
    optimizer = torch.optim.AdamW([*model.head.parameters(), *model.mlp.parameters()], 1e-2)
    ((rule, level, message),) = told(tmp_path, model, optimizer)
    assert (rule, level) == ("frozen weights", "warning")
    assert "lora_B" in message


def test_adapters_under_reentrant_checkpointing_that_get_no_gradient_are_told(tmp_path):
    model = adapted()
    model.head.requires_grad_(True)

    def forward(x):
        # The embedding is frozen, so that what is checkpointed takes nothing that requires a gradient.
        hidden = checkpoint(lambda tokens: model.norms[-1](body(tokens)), model.embed(x), use_reentrant=True)
        return model.head(hidden)

    def body(tokens):
        for number, (attention, mlp) in enumerate(zip(model.attention, model.mlp)):
            tokens = tokens + attention(model.norms[2 * number](tokens))
            tokens = tokens + mlp(model.norms[2 * number + 1](tokens))
        return tokens

    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        alerts = told(tmp_path, model, forward=forward)
    assert ("frozen weights", "warning") in {alert[:2] for alert in alerts}


def test_adapters_that_train_are_not_accused(tmp_path):
    assert told(tmp_path, adapted()) == []


@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_a_role_that_stands_still_under_moving_outputs_is_told(tmp_path, role):
    torch.manual_seed(0)
    model = Net(8, 8)
    weight = head_rows(model.attention[1], role)
    begun = weight.detach().clone()
    ((rule, _, message),) = told(tmp_path, model, after=lambda step: weight.copy_(begun))
    assert rule == "frozen weights"
    assert f"the {({'q': 'queries', 'k': 'keys', 'v': 'values'})[role]} of all 4 heads of attention.1" in message


@pytest.mark.parametrize("every", [1, 3, 5])
def test_a_layer_that_is_unfrozen_on_purpose_is_not_accused(tmp_path, every):
    torch.manual_seed(0)
    model = Net(8, 8)
    model.attention[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    assert told(
        tmp_path, model, optimizer, every=every,
        after=lambda step: model.attention[0].requires_grad_(True) if step == 20 else None,
    ) == []  # fmt: skip


def test_the_bias_of_keys_under_plain_descent_is_not_accused(tmp_path):
    torch.manual_seed(0)
    model = Net(8, 8)
    assert told(tmp_path, model, torch.optim.SGD(model.parameters(), 0.1)) == []


@pytest.mark.parametrize(("is_taken", "level"), [(False, "notice"), (True, "warning")])
def test_a_table_of_the_attention_that_its_forward_does_not_take_is_a_notice(is_taken, level, tmp_path):
    torch.manual_seed(0)
    model = Net(8, 8)
    layer = model.attention[1]
    layer.table = nn.Parameter(torch.randn(3, 32))
    if is_taken:
        layer.register_forward_hook(lambda layer, args, out: out + layer.table.detach().sum())
    ((rule, found, message),) = told(tmp_path, model)
    assert (rule, found) == ("frozen weights", level)
    assert "`table` of attention.1 does not move" in message
