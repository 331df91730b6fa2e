"""What attention computes is read again while it trains; a change is told with before and after, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from hdi_callback import HeadDiversityMonitor, load_history, watch_heads
from hdi_callback.monitor import contract
from tests.monitor.changes import CHANGES, HEALTHY, LENGTH, SCHEDULES, START, Change, Model, Ways, batch


@pytest.fixture(autouse=True)
def _each_third_reading(monkeypatch):
    monkeypatch.setattr(contract, "EVERY", 3)
    monkeypatch.setattr(contract, "_FIRST", {1, 2})


def train(change, steps=30, every=3, compiled=False):
    """Train and return the alerts of the contract, with the losses."""
    torch.manual_seed(0)
    ways = Ways(**change.ways)
    model = Model(ways)
    run = torch.compile(model, backend="eager") if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    alerts, losses = [], []
    with HeadDiversityMonitor(model) as monitor:
        for step in range(steps):
            if step >= START:
                change.act(ways, step)
            if step % every == 0:
                monitor.arm()
            loss = run(batch(step, padded=change.padded, lengths=change.lengths))
            loss.backward()
            if step % every == 0:
                alerts += monitor.measure(step).record().alerts
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return alerts, losses


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_told_once_with_before_and_after(name):
    alerts, _ = train(CHANGES[name])
    if not CHANGES[name].tells:
        assert alerts == []
        return
    (alert,) = alerts
    assert CHANGES[name].tells in alert.message
    level = "notice" if name == "documents see each other" else "warning"  # each batch has others, and perhaps one
    assert (alert.rule, alert.level, alert.step) == ("contract change", level, 21)
    assert "between steps 9 and 18:" in alert.message
    assert alert.since == 10


def test_as_many_changes_are_told_as_the_page_says():
    changes = CHANGES.values()
    counts = sum(change.first for change in changes), sum(bool(change.tells) for change in changes), len(changes)
    assert counts == (3, 32, 32)


def test_a_reading_that_is_judged_while_the_model_is_evaluated_tells_what_its_forward_did():
    change = CHANGES["dropout at 0.9"]
    ways = Ways(**change.ways)
    model, alerts = Model(ways), []
    with HeadDiversityMonitor(model) as monitor:
        for step in range(30):
            if step >= START:
                change.act(ways, step)
            monitor.arm()
            model(batch(step)).backward()
            reading = monitor.measure(step)
            model.eval()  # as an evaluation after this step does, while the worker judges
            alerts += reading.record().alerts
            model.train()
    assert [alert.level for alert in alerts] == ["warning"]
    assert change.tells in alerts[0].message


def test_a_reading_that_is_judged_after_a_block_was_removed_is_that_of_its_forward(recwarn):
    model = Model(Ways())
    with HeadDiversityMonitor(model) as monitor:
        for step in range(4):
            monitor.arm()
            model(batch(step)).backward()
            reading = monitor.measure(step)
            layers, model.layers = model.layers, model.layers[:1]
            assert reading.record().alerts == ()
            model.layers = layers
    assert not [each for each in recwarn if "failed" in str(each.message)]


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_told_of_batches_lengths_padding_and_positions_that_change(name):
    assert train(HEALTHY[name])[0] == []


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_changes_from_reading_to_reading_is_a_notice_that_names_it_once(name):
    (alert,) = train(SCHEDULES[name])[0]
    assert alert.level == "notice"
    assert SCHEDULES[name].tells in alert.message
    assert "from reading to reading" in alert.message


def test_a_schedule_that_has_stood_still_is_no_schedule_any_more():
    def anneal(ways, step):
        ways.dropout = 0.9 if step >= 60 else max(0.0, 0.3 - 0.02 * (step - START))

    alerts, _ = train(Change({"dropout": 0.3}, anneal), steps=80)
    assert [alert.level for alert in alerts] == ["notice", "warning"]
    assert alerts[1].message.endswith("between steps 54 and 63: dropout is 0.9, and 0 before")


def test_a_schedule_that_goes_on_is_not_told_again_however_long():
    (alert,) = train(SCHEDULES["a falling temperature"], steps=120)[0]
    assert alert.level == "notice"


def test_a_number_that_drifts_by_less_than_is_told_at_once_is_told_at_last():
    def drift(ways, step):
        ways.scale = 1 + 5e-5 * (step - START)

    (alert,) = train(Change({}, drift), steps=60)[0]
    assert "scores are scaled by 0.35" in alert.message


class Packed(Model):
    """Two documents in each sequence, or one, as positions or the places where they end say."""

    def forward(self, tokens, position_ids=None, cu_seqlens=None):
        return super().forward(tokens)


@pytest.mark.parametrize("says", ["position_ids", "cu_seqlens"])
@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True), (True, True), (False, False)])
def test_packed_documents_that_begin_to_see_each_other_are_told(before, after, says):
    torch.manual_seed(0)
    model, messages = Packed(ways := Ways(documents=before)), []
    with HeadDiversityMonitor(model) as monitor:
        for step in range(30):
            ways.documents = before if step < START else after
            monitor.arm()
            length = 6 if step % 5 else LENGTH  # some batches hold one document
            positions, ends = torch.arange(LENGTH) % length, torch.arange(0, LENGTH + 1, length)
            if says == "position_ids":
                model(batch(step), positions.expand(4, -1)).backward()
            else:
                model(batch(step)[:1], cu_seqlens=ends).backward()
            messages += [alert.message for alert in monitor.measure(step).record().alerts]
    words = {True: "hidden", False: "seen"}
    told = f"by positions that start again, are {words[after]}, and {words[before]} before"
    assert [message.partition("own one, ")[2] for message in messages] == [told] * (before != after)


def test_a_change_that_is_gone_at_the_next_reading_is_not_told():
    def at_once(ways, step):
        ways.scale = 4.0 if step == 18 else 1.0

    change = CHANGES["scores four times as large"]
    assert train(type(change)({}, at_once))[0] == []


def test_a_change_is_not_waited_for_where_the_next_reading_does_not_know(monkeypatch):
    read, readings = contract.facts_of, []

    def facts_of(*claims):
        readings.append(len(readings))
        is_known = len(readings) < 5  # the first four comparisons, of which the fourth sees the change
        return [each if is_known else dataclasses.replace(each, scale=None) for each in read(*claims)]

    monkeypatch.setattr(contract, "facts_of", facts_of)
    assert train(CHANGES["scores four times as large"])[0] == []
    assert len(readings) == 6, "steps 3, 6, 9, 18, 21 and 27"


def test_a_head_that_changes_is_named():
    (alert,) = train(CHANGES["one head does not see the token itself"])[0]
    assert alert.where == {"layers.1": (3,)}


def test_training_is_equal_to_the_bit_where_calls_are_written_down(monkeypatch):
    change = CHANGES["dropout at 0.9"]
    _, watched = train(change)
    monkeypatch.setattr(contract.Contract, "is_due", lambda self: False)
    alerts, plain = train(change)
    assert watched == plain
    assert alerts == []


@pytest.mark.parametrize("name", ["dropout at 0.9", "no token sees itself", "keys and values swapped"])
def test_a_change_is_told_of_compiled_models(name):
    torch._dynamo.reset()
    (alert,) = train(CHANGES[name], compiled=True)[0]
    assert CHANGES[name].tells in alert.message


def gradients_told(model, steps=3):
    """Train a model at a rate of zero, and return what is said of it."""
    messages = []
    with HeadDiversityMonitor(model) as monitor:
        for step in range(steps):
            monitor.arm()
            model(batch(step)).backward()
            messages += [alert.message for alert in monitor.measure(step).record().alerts]
            model.zero_grad()
    return messages


def test_heads_that_get_no_gradient_are_told_at_the_first_readings():
    assert gradients_told(Model(Ways(detached=True))) == [
        "attention in layers.0-1 is so since step 0: queries of heads 0, 1, 2, 3 get exactly no gradient"
    ]


class OnItsOwn(nn.Module):
    """Attention of torch's over what it is given."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0].square().mean()


@pytest.mark.parametrize("tokens", [1, 2])
def test_one_key_gives_queries_and_keys_no_gradient_and_is_no_fault(tokens, tmp_path):
    torch.manual_seed(0)
    model = OnItsOwn()
    optimizer = torch.optim.AdamW(model.parameters())
    with watch_heads(model, optimizer, 1, log_dir=tmp_path) as heads:
        for _ in range(4):
            with heads.step():
                model(torch.randn(8, tokens, 32)).backward()
                rows = model.attention.in_proj_weight.grad[:64]
                assert bool(rows.any()) == (tokens > 1)
                optimizer.step()
                optimizer.zero_grad()
    assert [alert.message for alert in load_history(heads.history_path).alerts] == []


class Turned(nn.Module):
    """Rotary positions of halves, which are multiplied with cosines and sines one by one."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (4, 8)).transpose(1, 2) for each in (self.q, self.k, self.v))
        angles = torch.arange(x.shape[1])[:, None] / 1e4 ** (torch.arange(4) / 4)
        q, k = (self.turn(each, angles) for each in (q, k))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).square().mean()

    @staticmethod
    def turn(x, angles):
        first, second = x.chunk(2, -1)
        turned = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
        return torch.cat(turned, -1)


def test_angles_are_compared_of_each_head_as_those_of_the_first_may_not_be_known():
    read, tell = contract.COMPARED["turns"]
    places, pace = torch.arange(12.0)[:, None], torch.tensor([1.0, 0.3])
    of_tokens = (places * pace).sin().expand(2, -1, -1)
    of_heads = of_tokens[0, :2, None].expand(2, 12, 2)  # zeros, which say nothing, in the first
    by_tokens, by_heads = (read(SimpleNamespace(cosines={"query": table})) for table in (of_tokens, of_heads))
    torch.testing.assert_close(by_tokens["query"], pace.cos().expand(2, -1))
    assert tell(by_tokens, by_heads)
    assert not tell(by_tokens, by_tokens)


def test_rotary_angles_do_not_depend_on_the_length_of_sequences():
    model, alerts = Turned(), []
    with HeadDiversityMonitor(model) as monitor:
        for step in range(12):
            monitor.arm()
            model(torch.randn(4, 32 if step < 6 else 64, 32)).backward()
            alerts += monitor.measure(step).record().alerts
    assert [alert.message for alert in alerts] == []


class Adapted(nn.Module):
    """A frozen projection and an adapter, one matrix of which is cut off the graph."""

    def __init__(self, base, *, is_cut):
        super().__init__()
        self.base, self.is_cut = base.requires_grad_(False), is_cut
        self.a, self.b = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x):
        low = self.a(x)
        return self.base(x) + self.b(low.detach() if self.is_cut else low)


@pytest.mark.parametrize("is_cut", [False, True])
def test_adapters_that_get_no_gradient_are_told(is_cut):
    model = Model(Ways())
    for layer in model.layers:
        layer.q_proj = Adapted(layer.q_proj, is_cut=is_cut)
    messages = gradients_told(model)
    assert [message.partition(": ")[2] for message in messages] == (
        ["q_proj.a.weight gets exactly no gradient"] * is_cut
    )


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "out_proj"])
def test_weights_of_zero_hide_gradients_and_nothing_is_told_of_that(name):
    model = Model(Ways())
    for layer in model.layers:
        nn.init.zeros_(getattr(layer, name).weight)
    assert gradients_told(model) == []


def test_a_comparison_that_fails_is_one_warning_and_training_goes_on(monkeypatch):
    def fail(*_):
        raise ValueError("of a kind that nobody has thought of")

    monkeypatch.setitem(contract.COMPARED, "scale", (fail, contract._tell_value("")))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert train(CHANGES["scores four times as large"])[0] == []
    assert sum("Comparing what attention computes" in str(each.message) for each in caught) == 1


class Alone(nn.Module):
    """A model that is one attention."""

    is_causal = True

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal).transpose(1, 2).flatten(2))


def test_an_attention_that_is_the_model_itself_has_a_name_in_what_is_told(tmp_path):
    torch.manual_seed(0)
    model = Alone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch_heads(model, optimizer, every_n_steps=1, log_dir=tmp_path) as heads:
        for step in range(20):
            model.is_causal = step < 8
            with heads.step():
                model(torch.randn(2, 9, 16)).square().mean().backward()
                optimizer.step()
            optimizer.zero_grad()
    messages = [alert.message for alert in load_history(tmp_path).alerts]
    assert messages
    assert all("attention in the model " in message for message in messages), messages


@pytest.mark.parametrize("every", [10, 1000])
@pytest.mark.parametrize("window", [0, 4])
def test_a_lost_mask_is_told_once_and_what_else_has_changed_at_the_readings_after(every, window, tmp_path, monkeypatch):
    monkeypatch.setattr(contract, "EVERY", every)
    torch.manual_seed(0)
    ways = Ways(dropout=0.0, window=window)
    model = Model(ways)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with watch_heads(model, optimizer, every_n_steps=2, log_dir=tmp_path) as heads:
        for step in range(120):
            if step >= 20:
                ways.mask, ways.scale, ways.window = "none", 1.5, 0
            with heads.step():
                heads.loss = model(batch(step))
                heads.loss.backward()
                optimizer.step()
            optimizer.zero_grad()
    alerts = load_history(tmp_path).alerts
    (later,) = (alert for alert in alerts if alert.rule == "later tokens")
    (change,) = (alert for alert in alerts if alert.rule == contract.NAME)
    assert later.step < change.step, "and without the alert it would have been read at step 2000"
    clauses = ["scores are scaled by 0.5303, and 0.3536 before"]
    clauses += ["each head sees all tokens before, and 4 tokens till then"] * (window > 0)
    assert sorted(change.message.partition(": ")[2].split("; ")) == sorted(clauses)


def resumed(folder, before, after, steps=12):
    """Train, save as plain data, go on in a second run with other ways, and return its alerts of the contract."""
    state, alerts = None, []
    for at, values in enumerate((before, after)):
        torch.manual_seed(0)
        model = Model(Ways(**values))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        with watch_heads(model, optimizer, every_n_steps=2, log_dir=folder / str(at)) as heads:
            heads.load_state_dict(state)
            for step in range(at * steps, (at + 1) * steps):
                with heads.step():
                    heads.loss = model(batch(step, lengths=True))
                    heads.loss.backward()
                    optimizer.step()
                optimizer.zero_grad()
            state = json.loads(json.dumps(heads.state_dict()))
        alerts = [alert for alert in load_history(heads.history_path).alerts if alert.rule == contract.NAME]
    return alerts


@pytest.mark.parametrize(
    ("before", "after", "tells"),
    [
        ({"mask": "causal"}, {"mask": "strict"}, "each head no longer sees the token itself"),
        ({"window": 4}, {}, "each head sees all tokens before, and 4 tokens till then"),
        ({}, {"dropout": 0.9}, "dropout is 0.9, and 0.1 before"),
        ({}, {"scale": 4.0}, "scores are scaled by 1.414, and 0.3536 before"),
        ({"rotary": 100.0, "slope": 0.5}, {"rotary": 1e4, "slope": 0.5}, "another base"),
    ],
)
def test_what_changes_between_a_checkpoint_and_its_resumption_is_told_with_before_and_after(
    before, after, tells, tmp_path
):
    (alert,) = resumed(tmp_path, before, after)
    assert tells in alert.message
    assert "has changed between steps 6 and 12:" in alert.message


@pytest.mark.parametrize("ways", [{}, {"fused": True}, {"rotary": 100.0, "window": 5, "slope": 0.5, "tiled": True}])
def test_nothing_is_told_of_a_resumption_that_changes_nothing(ways, tmp_path):
    assert resumed(tmp_path, ways, ways) == []


class Remembering(nn.Module):
    """Reads a segment behind the one before it, of which it keeps the hidden states; gives logits."""

    def __init__(self, is_fused, leaks):
        super().__init__()
        self.is_fused, self.leaks, self.memory = is_fused, leaks, None
        self.embed, self.qkv, self.out = nn.Embedding(9, 16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.head = nn.Linear(16, 9)

    def forward(self, tokens):
        x = self.embed(tokens)
        both = x if self.memory is None else torch.cat([self.memory, x], 1)
        self.memory = x.detach()
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(both).chunk(3, -1))
        q, past = q[:, :, -tokens.shape[1] :], both.shape[1] - tokens.shape[1]
        seen = torch.ones(q.shape[2], k.shape[2]).tril(past + (self.leaks and past > 0)) > 0
        weights = None if self.is_fused else (q @ k.mT / 8**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        y = F.scaled_dot_product_attention(q, k, v, seen) if weights is None else weights @ v
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("leaks", [False, True])
@pytest.mark.parametrize("is_fused", [False, True])
def test_keys_of_a_memory_that_later_forwards_have_are_no_later_tokens(is_fused, leaks, tmp_path):
    torch.manual_seed(0)
    model = Remembering(is_fused, leaks)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with watch_heads(model, optimizer, 1, log_dir=tmp_path) as heads:
        for _ in range(24):
            with heads.step():
                tokens = torch.randint(9, (4, 8))
                F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
                optimizer.step()
            optimizer.zero_grad()
    rules = [alert.rule for alert in load_history(tmp_path).alerts if alert.level != "notice"]
    assert rules == ["later tokens"] * leaks


class Caching(nn.Module):
    """Attends, once it is told to, to the keys and values of the call before as well; to a memory from the start."""

    def __init__(self, memory):
        super().__init__()
        self.attends, self.is_memory, self.before = memory, memory, None
        self.embed, self.out, self.head = nn.Embedding(9, 16), nn.Linear(16, 16), nn.Linear(16, 9)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = (part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        fresh = k.detach(), v.detach()
        if self.attends and self.before is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(self.before, (k, v)))
        self.before = fresh
        return self.head(x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("memory", [False, True])
def test_keys_that_are_joined_to_those_of_an_earlier_forward_are_told_and_a_memory_from_the_start_is_not(memory):
    torch.manual_seed(0)
    model, told = Caching(memory), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with HeadDiversityMonitor(model) as monitor:
        for step in range(12):
            model.attends = memory or step > 7
            monitor.arm()
            F.cross_entropy(model(torch.randint(9, (4, 8))).flatten(0, 1), torch.randint(9, (32,))).backward()
            told += [(alert.level, alert.message) for alert in monitor.measure(step).record().alerts]
            optimizer.step()
            optimizer.zero_grad()
    what = "tensors from before the forward in keys, and no queries, are 1, and 0 before"
    expected = ("warning", f"attention in the model has changed between steps 6 and 9: {what}")
    assert told == [expected] * (not memory)


class Rounded(nn.Module):
    """Rounds a weight once it is switched on, as training for fewer bits does."""

    is_on = False

    def forward(self, weight):
        return weight + ((64 * weight).round() / 64 - weight).detach() if self.is_on else weight


def test_a_weight_that_is_computed_from_its_own_parameter_from_a_step_on_is_made_by_no_other_map(tmp_path):
    torch.manual_seed(0)
    model, rounded = Model(Ways()), Rounded()
    for layer in model.layers:
        parametrize.register_parametrization(layer.q_proj, "weight", rounded)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with watch_heads(model, optimizer, 1, log_dir=tmp_path) as heads:
        for step in range(24):
            rounded.is_on = step >= 12
            with heads.step():
                model(batch(step)).backward()
                optimizer.step()
            optimizer.zero_grad()
    assert not [alert for alert in load_history(tmp_path).alerts if alert.level != "notice"]
