from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from hdi_callback import watch_heads
from hdi_callback.history import load_history
from hdi_callback.interventions import QKClip
from hdi_callback.monitor import contract
from hdi_callback.monitor.training_step import TrainingStep

ONSET = 130


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 16)
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True), 2)
        self.head = nn.Linear(16, 7)

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))


def trained(
    tmp_path=None, before=None, after=None, steps=200, parts=1, every=5, optimizer=None, backward=None, **settings
):
    """Return the model and the alerts of a training; faults act before and after each step from the onset on."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3) if optimizer is None else optimizer(model)
    heads = None if tmp_path is None else watch_heads(model, optimizer, every, log_dir=tmp_path, **settings)
    for step in range(steps):
        for part in range(parts):
            draw = torch.Generator().manual_seed(step * parts + part)
            tokens = torch.randint(7, (16, 8), generator=draw)

            with heads.step() if heads is not None else torch.enable_grad():
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flip(1).flatten()) / parts
                loss.backward() if backward is None else backward(loss, step)
                if heads is not None:
                    heads.loss = loss
                if part + 1 < parts:
                    continue
                with torch.no_grad():
                    if before is not None and step >= ONSET:
                        before(model)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                    if after is not None and step >= ONSET:
                        after(model, step)
    if heads is None:
        return model, []
    heads.finish()
    return model, load_history(heads.history_path).alerts


def texts(alerts):
    rules = {"contract change", "change with the loss"}
    return [alert.message for alert in alerts if alert.rule in rules and alert.level != "notice"]


def _flip(model):
    for value in model.body.layers[1].self_attn.parameters():
        value.grad.neg_()


def _enlarge(model):
    for value in model.body.layers[1].self_attn.parameters():
        value.grad.mul_(30)


def _shake(model, step):
    if step == ONSET:
        model.head.weight.add_(3 * torch.randn(7, 16))


@pytest.mark.parametrize(
    ("fault", "layer", "says"),
    [
        ({"before": _flip}, "body.layers.1.self_attn", "another gradient of `body.layers.1.self_attn.in_proj_weight`"),
        (
            {"before": _enlarge},
            "body.layers.1.self_attn",
            "a larger gradient of `body.layers.1.self_attn.in_proj_weight`",
        ),
        (
            {"after": _shake, "optimizer": lambda model: torch.optim.AdamW(model.parameters(), 3e-4)},
            None,
            "after this: something else than the optimizer wrote `head.weight` between steps 130",
        ),
    ],
)
def test_what_is_done_to_gradients_and_weights_around_the_step_is_told_with_the_parameters_and_since_when(
    fault, layer, says, tmp_path
):
    _, alerts = trained(tmp_path, **fault)
    (text,) = texts(alerts)
    assert says in text
    (alert,) = (alert for alert in alerts if alert.message == text)
    assert alert.level == "warning"
    assert ONSET <= alert.step <= ONSET + 80
    both = {f"body.layers.{number}.self_attn" for number in (0, 1)}
    assert {*alert.where} == ({layer} if layer else both)


def _mask(model, step):
    if step >= ONSET:
        model.body.layers[1].linear1.weight[::4] = 0


def test_a_mask_that_is_put_on_weights_in_the_middle_is_a_notice(tmp_path):
    _, alerts = trained(tmp_path, after=_mask)
    (alert,) = (alert for alert in alerts if "something else than the optimizer wrote" in alert.message)
    assert alert.level == "notice"
    assert "`body.layers.1.linear1.weight` between steps 130 and 135" in alert.message
    assert texts(alerts) == []


def test_gradients_that_are_no_longer_cleared_add_up_and_are_told_as_that(tmp_path):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    with watch_heads(model, optimizer, 5, log_dir=tmp_path) as heads:
        for step in range(200):
            with heads.step():
                tokens = torch.randint(7, (16, 8))
                nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flip(1).flatten()).backward()
                optimizer.step()
                for name, value in model.named_parameters():
                    if step < ONSET or "layers.0.self_attn" not in name:
                        value.grad = None
    (text,) = texts(load_history(heads.history_path).alerts)
    assert text.startswith("the training step has changed between steps")
    assert "gradients of `body.layers.0.self_attn.in_proj_weight`" in text
    assert "are not cleared: they add up" in text


def _clip_values(model):
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def _swap_and_restore(model, step, mean={}):  # noqa: B006
    mean = mean.setdefault(id(model), copy.deepcopy(model.state_dict()))
    if step % 5 == 0:  # an evaluation of averaged weights
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict(mean)
        model.load_state_dict(own)


def _lbfgs(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"parts": 3},
        {"every": 1, "steps": 60},
        {"before": _clip_values},
        {"after": _swap_and_restore},
        {"optimizer": _lbfgs},
        {"optimizer": lambda model: torch.optim.AdamW(model.parameters(), 3e-3, fused=True)},
        {"interventions": [QKClip(limit=0.5)]},
    ],
    ids=["plain", "accumulation", "each step", "clipped values", "averages evaluated", "SGD", "fused", "QKClip"],
)
def test_accumulation_clipping_weights_that_are_put_back_and_our_own_writes_are_no_change(training, tmp_path):
    assert texts(trained(tmp_path, **training)[1]) == []


def test_training_is_the_same_to_the_bit_while_steps_are_looked_at(tmp_path):
    watched, _ = trained(tmp_path, steps=60, parts=2)
    alone, _ = trained(steps=60, parts=2)
    for first, second in zip(watched.parameters(), alone.parameters()):
        assert torch.equal(first, second)
        assert not first._backward_hooks


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda group, state: group.update(weight_decay=30.0), "`weight_decay of the optimizer` between"),
        (lambda group, state: [each["exp_avg_sq"].mul_(1e-8) for each in state.values()], "`exp_avg_sq of "),
    ],
)
def test_settings_and_states_of_the_optimizer_that_are_changed_are_told_where_the_loss_rises(fault, says, tmp_path):
    made = []

    def optimizer(model):
        made.append(torch.optim.AdamW(model.parameters(), 3e-3))
        return made[0]

    def after(model, step):
        if step == ONSET:
            fault(made[0].param_groups[0], made[0].state)

    (text,) = (text for text in texts(trained(tmp_path, after=after, optimizer=optimizer)[1]) if says in text)
    assert text.startswith("the loss rose from ")


def _closures(model, optimizer, step):
    def closure():
        optimizer.zero_grad()
        loss = _loss(model, step)
        loss.backward()
        return loss

    return optimizer.step(closure)


def _backward_and_step(model, optimizer, step):
    loss = _loss(model, step)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _cleared_without_a_step(model, optimizer, step):
    loss = _loss(model, step)
    loss.backward()
    if step % 3 == 2 or step < 20:
        optimizer.step()
    optimizer.zero_grad()
    return loss


def _gradients_of_something_else(model, optimizer, step):
    loss = _loss(model, step)
    loss.backward()
    if step >= 20:
        torch.autograd.grad(_loss(model, step + 1000), list(model.parameters()))
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _clipped_in_each_part(model, optimizer, step):
    for part in range(6):
        loss = _loss(model, 6 * step + part)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _clipped_in_one_part(model, optimizer, step):
    loss = _loss(model, step) * (0.01 if step < 20 else 1.0)
    loss.backward()
    nn.utils.clip_grad_norm_(model.body.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _decayed_by_hand(model, optimizer, step):
    loss = _loss(model, step) * 0.9**step  # what is added outgrows it
    loss.backward()
    for parameter in model.parameters():
        parameter.grad.add_(parameter.detach(), alpha=1e-4)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _limited(model, optimizer, step):
    loss = _backward_and_step(model, optimizer, step)
    for parameter in model.parameters():
        parameter.data.clamp_(-0.4, 0.4)
    return loss


def _in_turns(model, optimizers, step):
    return _backward_and_step(model, optimizers[step // 10 % 2], step)


def _loss(model, number):
    tokens = torch.randint(7, (8, 8), generator=torch.Generator().manual_seed(number))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flip(1).flatten())


class _Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 16, sparse=True)


class _Odd(Net):
    """With a complex parameter, an empty one, and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(16, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.factor = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens):
        x = torch.fft.ifft(torch.fft.fft(self.embed(tokens)) * self.turn).real
        return self.head(self.body(x * self.factor + self.empty.sum()))


class _OddState(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.state.update(dict.fromkeys(self.param_groups[0]["params"], torch.ones(1)))


def _adam(model):
    return torch.optim.AdamW(model.parameters(), 3e-3, foreach=False)


def _sgd(model):
    return torch.optim.SGD(model.parameters(), 0.01)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("step_of", "optimizer", "model"),
    [
        (_closures, lambda model: torch.optim.LBFGS(model.parameters(), 0.1, max_iter=5), Net),
        (_closures, lambda model: torch.optim.LBFGS(model.parameters(), 0.1, 5, line_search_fn="strong_wolfe"), Net),
        (_cleared_without_a_step, _adam, Net),
        (_gradients_of_something_else, _adam, Net),
        (_clipped_in_each_part, _adam, Net),
        (_clipped_in_one_part, _adam, Net),
        (_decayed_by_hand, _sgd, Net),
        (_limited, _adam, Net),
        (_in_turns, lambda model: [_adam(model), _sgd(model)], Net),
        (_backward_and_step, _sgd, _Sparse),
        (_backward_and_step, _adam, _Odd),
        (_backward_and_step, lambda model: _OddState(model.parameters(), 0.01), Net),
    ],
)
def test_a_sound_step_of_any_kind_is_no_change_and_the_same_to_the_bit(
    step_of, optimizer, model, tmp_path, monkeypatch
):
    monkeypatch.setattr(contract, "EVERY", 2)
    ends = []
    for is_watched in (False, True):
        torch.manual_seed(0)
        trained_model = model()
        trained_with = optimizer(trained_model)
        heads = watch_heads(trained_model, trained_with, 2, log_dir=tmp_path) if is_watched else None
        for step in range(40):
            with heads.step() if heads is not None else torch.enable_grad():
                step_of(trained_model, trained_with, step)
        ends.append([parameter.detach() for parameter in trained_model.parameters()])
    heads.finish()
    run = load_history(heads.history_path)
    assert len(run.records) > 10
    told = [alert for alert in run.alerts if alert.rule in {"contract change", "change with the loss"}]
    assert [str(alert) for alert in told] == []
    assert all(torch.equal(alone, watched) for alone, watched in zip(*ends))


def test_an_optimizer_that_was_replaced_is_not_kept_alive_by_the_watch():
    model = Net()
    watch = TrainingStep(model)
    optimizer = _adam(model)
    watch.arm([optimizer], (), compares=True)
    _backward_and_step(model, optimizer, 0)
    replaced, optimizer = weakref.ref(optimizer), _adam(model)
    gc.collect()
    assert replaced() is None
    watch.arm([optimizer], (), compares=True)
    _backward_and_step(model, optimizer, 1)
