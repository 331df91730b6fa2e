from __future__ import annotations

import contextlib
import copy
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hdi_callback import watch_heads
from hdi_callback.history import load_history
from hdi_callback.monitor.standstill import STILL, Standstill
from tests.monitor.test_training_step import Net, texts

ONSET = 60


def told(tmp_path, act=lambda model, optimizer, step: None, steps=110, every=5, factor=lambda step: 1.0, change=None):
    """Return the model and the alerts of a training; `act` comes before each forward."""
    torch.manual_seed(0)
    model = Net()
    if change is not None:
        change(model)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    with watch_heads(model, optimizer, every, log_dir=tmp_path) as heads:
        for step in range(steps):
            with heads.step():
                act(model, optimizer, step)
                tokens = torch.randint(7, (4, 8), generator=torch.Generator().manual_seed(step))
                nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flip(1).flatten()).backward()
                for group in optimizer.param_groups:
                    group["lr"] = 3e-3 * factor(step)
                optimizer.step()
                optimizer.zero_grad()
    return model, load_history(heads.history_path).alerts


def _detach(model, optimizer, step):
    linear = model.body.layers[1].linear1
    linear.forward = lambda x: nn.functional.linear(x, linear.weight, linear.bias).detach()


def _replace(model, optimizer, step):
    model.head = copy.deepcopy(model.head)


def _no_grad(model, optimizer, step):
    model.embed.forward = torch.no_grad()(lambda tokens: nn.functional.embedding(tokens, model.embed.weight))


def _leave_out(model, optimizer, step):
    optimizer.param_groups[0]["params"] = [*model.body.parameters(), *model.embed.parameters()]


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        (_detach, "`body.layers.1.linear1.weight` and `body.layers.1.linear1.bias`"),
        (_replace, "`head.weight` and `head.bias`"),
        (_no_grad, "`embed.weight`"),
        (_leave_out, "`head.weight` and `head.bias`"),
    ],
)
def test_what_the_optimizer_moved_and_no_longer_does_is_told_with_the_step_since_when(fault, names, tmp_path):
    def act(model, optimizer, step):
        if step == ONSET:
            fault(model, optimizer, step)

    (text,) = texts(told(tmp_path, act)[1])
    assert f"nothing has moved {names} since step {ONSET}, though it requires a gradient and runs" in text


def _freeze(model, optimizer, step):
    if step == ONSET:
        model.body.layers[1].linear1.requires_grad_(False)
    if step == 2 * ONSET - 20:
        model.body.layers[1].linear1.requires_grad_(True)


def _skip_now_and_then(model, optimizer, step):
    layer = model.body.layers[1]
    draw = torch.rand((), generator=torch.Generator().manual_seed(step)) < 0.5
    layer.forward = (lambda x, **masks: x) if draw else lambda *x, **masks: type(layer).forward(layer, *x, **masks)


def _run_no_more(model, optimizer, step):
    if step == ONSET:
        model.body.layers[1].forward = lambda x, **masks: x


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("act", [_freeze, _skip_now_and_then, _run_no_more])
def test_what_is_frozen_skipped_now_and_then_or_does_not_run_is_not_accused_of_standing_still(act, every, tmp_path):
    _, alerts = told(tmp_path, act, every=every)
    assert [alert.message for alert in alerts if "nothing has moved" in alert.message] == []


def test_what_runs_in_a_block_and_gets_no_gradient_from_the_start_is_told_and_an_unused_output_is_a_notice(tmp_path):
    def change(model):
        _detach(model, None, 0)
        model.unused = nn.Linear(16, 2)
        model.body.register_forward_hook(lambda body, inputs, output: (model.unused(output), output)[1])

    _, alerts = told(tmp_path, change=change, steps=60)
    (alert,) = (alert for alert in alerts if "`body.layers.1.linear1.weight`" in alert.message)
    assert alert.level == "warning"
    assert "no gradient has reached `body.layers.1.linear1.weight` and `body.layers.1.linear1.bias` from step 0 on" in (
        alert.message
    )
    assert "nothing has moved `unused.weight` and `unused.bias` from step 0 on" in alert.message


def test_an_output_that_no_loss_uses_is_a_notice(tmp_path):
    def change(model):
        model.unused = nn.Linear(16, 2)
        model.body.register_forward_hook(lambda body, inputs, output: (model.unused(output), output)[1])

    (alert,) = (alert for alert in told(tmp_path, change=change, steps=60)[1] if "unused" in alert.message)
    assert alert.level == "notice"


def test_a_parameter_of_a_block_that_no_forward_takes_is_a_notice(tmp_path):
    def change(model):
        model.body.layers[1].gains = nn.Parameter(torch.ones(16))

    (alert,) = (alert for alert in told(tmp_path, change=change, steps=60)[1] if "gains" in alert.message)
    assert alert.level == "notice"
    assert "no operation of the forwards that were compared takes `body.layers.1.gains`" in alert.message


def test_a_parameter_that_is_taken_later_and_cut_off_is_a_warning_then(tmp_path):
    def change(model):
        layer = model.body.layers[1]
        layer.gains = nn.Parameter(torch.ones(16))
        layer.register_forward_hook(lambda layer, args, out: out * layer.gains.detach() if layer.late else out)
        layer.late = False

    def act(model, optimizer, step):
        model.body.layers[1].late = step >= 60

    alerts = [alert for alert in told(tmp_path, act, steps=220, change=change)[1] if "gains" in alert.message]
    assert [alert.level for alert in alerts] == ["notice", "warning"]
    assert "no gradient has reached `body.layers.1.gains`" in alerts[1].message


@pytest.mark.parametrize("kind", ["number", "recurrent", "checkpoint", "autocast", "parametrized"])
def test_what_a_forward_takes_in_any_way_is_cut_off_and_not_unread(kind, tmp_path):
    """Parameters of a block whose results are detached: none is said to be taken by no operation."""

    def change(model):
        layer = model.body.layers[1]
        layer.extra = nn.GRU(16, 16, batch_first=True) if kind == "recurrent" else nn.Linear(16, 16)
        if kind == "number":
            layer.extra = nn.Parameter(torch.ones(1))
        if kind == "parametrized":
            nn.utils.parametrizations.weight_norm(layer.extra)

        def add(layer, inputs, output):
            if kind == "number":
                return output * layer.extra.item()
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                call = partial(checkpoint, use_reentrant=False) if kind == "checkpoint" else lambda module, x: module(x)
                found = call(layer.extra, output)
            return output + (found[0] if kind == "recurrent" else found).detach().to(output.dtype)

        layer.register_forward_hook(add)

    texts = [alert.message for alert in told(tmp_path, change=change, steps=60)[1] if "extra" in alert.message]
    assert texts
    assert all("no gradient has reached" in text and "takes" not in text for text in texts)


def test_weights_that_are_written_through_data_move_although_no_version_counts_it():
    model = Net()
    watch, steps = Standstill(model), range(0, 200, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in steps:
        for hook in watch.arm():
            hook.remove()
        watch._ran = {None, *model.modules()}
        facts = watch.look(step, [*model.parameters()], [optimizer], (), is_new=step == 0)
        terms = facts.terms(*facts.tensors)
        with torch.no_grad():
            model.embed.weight.add_(1)
            model.head.weight.data.add_(1)
            if step < 100:
                model.head.bias.add_(1)
    assert {"head.bias"} <= terms["", 0, STILL].keys()
    assert "head.weight" not in terms["", 0, STILL]


def rates_told(factor, steps, every):
    """Return the first step at which a schedule is told to have run out, `None` for never."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = Standstill(model)
    for step in range(0, steps, every):
        optimizer.param_groups[0]["lr"] = 0.1 * factor(step / steps)
        watch.arm()
        facts = watch.look(step, [*model.parameters()], [optimizer], (), is_new=step == 0)
        if "" in facts.terms(*facts.tensors)["", 0, STILL]:
            return step
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    return None


SCHEDULES = {
    "cosine to zero": lambda t: 0.5 * (1 + math.cos(math.pi * t)),
    "linear to zero": lambda t: 1 - t,
    "cubic to zero": lambda t: (1 - t) ** 3,
    "warm-up from zero": lambda t: min(1.0, 10 * t),
    "cubic warm-up": lambda t: min(1.0, 3 * t) ** 3,
    "warm restarts": lambda t: 0.5 * (1 + math.cos(math.pi * (5 * t % 1))),
    "step decay thrice": lambda t: 0.1 ** int(4 * t),
    "exponential": lambda t: 1e-4**t,
    "warm-up, stable, decay": lambda t: min(1.0, 20 * t, 5 * (1 - t)),
}


@pytest.mark.parametrize(("steps", "every"), [(300, 1), (300, 5), (5000, 10), (5000, 50), (20000, 50)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_sound_schedule_is_told_to_have_run_out(schedule, steps, every):
    assert rates_told(SCHEDULES[schedule], steps, every) is None


@pytest.mark.parametrize(("steps", "every"), [(300, 5), (5000, 50)])
@pytest.mark.parametrize(
    "schedule",
    [
        lambda t: max(0.0, 1 - 2 * t),
        lambda t: 1.0 if t < 0.5 else 1e-6,
        lambda t: 1e-20**t,
        lambda t: 0.5 * (1 + math.cos(math.pi * min(1.0, 2 * t))),
    ],
    ids=["linear to zero at half", "next to nothing from the middle", "exponential each batch", "cosine of one half"],
)
def test_a_schedule_that_runs_out_while_the_training_goes_on_is_told(schedule, steps, every):
    assert rates_told(schedule, steps, every) < 0.7 * steps


def test_a_rate_next_to_nothing_is_told_in_a_training(tmp_path):
    _, alerts = told(tmp_path, factor=lambda step: 1.0 if step < ONSET else 1e-6)
    (text,) = texts(alerts)
    assert "each rate of the optimizer is below a 10,000th of its largest since step" in text


def test_a_training_is_the_same_to_the_bit_while_it_is_looked_at_what_stands_still(tmp_path):
    ends = []
    for is_watched in (True, False):
        with contextlib.ExitStack() as stack:
            if not is_watched:
                stack.enter_context(pytest.MonkeyPatch.context()).setattr(Standstill, "look", None)
                stack.enter_context(pytest.warns(UserWarning, match="what moves failed"))
            model, _ = told(tmp_path / str(is_watched), lambda *at: _detach(*at) if at[2] == ONSET else None)
        ends.append(model.state_dict())
        assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_training_whose_steps_are_skipped_from_then_on_is_warned_of_once(tmp_path):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    with (
        pytest.warns(
            UserWarning, match=r"No optimizer that was passed .* a step in the last 50 of .*, since step 5"
        ) as shown,
        watch_heads(model, optimizer, 5, log_dir=tmp_path) as heads,
    ):
        for part in range(120):
            with heads.step():
                model(torch.randint(7, (2, 8))).square().mean().backward()
                if part % 4 == 3 and part < 20:  # four parts to a step
                    optimizer.step()
    assert len([each for each in shown if "made a step" in str(each.message)]) == 1
