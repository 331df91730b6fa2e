"""QKClip against scores that are computed by hand, on layouts of all kinds."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hdi_callback import interventions, watch_heads
from hdi_callback.attention import find_attention
from hdi_callback.errors import MisconfigurationError, MonitoringWarning
from hdi_callback.interventions import QKClip
from hdi_callback.monitoring.interventions.qk_clip import clip_heads
from tests.attention.models import Timm
from tests.attention.observe.test_later_readings import Windows
from tests.attention.test_trace import Latent
from tests.experiments.collapse.models import Attention, Shape, rotate

LENGTH, WIDTH = 12, 32


class Torch(nn.Module):
    """`nn.MultiheadAttention` with biases."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        nn.init.normal_(self.attn.in_proj_bias, std=0.3)

    def forward(self, x):
        return self.attn(x, x, x, need_weights=False)[0]

    def queries_and_keys(self, x):
        q, k, _ = F.linear(x, self.attn.in_proj_weight, self.attn.in_proj_bias).chunk(3, -1)
        return [item.unflatten(-1, (4, -1)).transpose(1, 2) for item in (q, k)]


class Separate(nn.Module):
    """Projections of their own, with fewer key heads, rotated or not."""

    def __init__(self, heads=8, key_heads=8, positions="learned"):
        super().__init__()
        self.attn = Attention(Shape(heads=heads, key_heads=key_heads, width=WIDTH, positions=positions))

    def forward(self, x):
        return self.attn(x)

    def queries_and_keys(self, x):
        q = self.attn.q_proj(x).unflatten(-1, (self.attn.num_heads, -1)).transpose(1, 2)
        k = self.attn.k_proj(x).unflatten(-1, (self.attn.num_key_value_heads, -1)).transpose(1, 2)
        if self.attn.is_rotary:
            q, k = rotate(q), rotate(k)
        return q, k.repeat_interleave(self.attn.num_heads // self.attn.num_key_value_heads, 1)


class FusedAttention(nn.Module):
    """One projection for all three, as in vision transformers."""

    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = FusedAttention()
        nn.init.normal_(self.attn.qkv.bias, std=0.3)

    def forward(self, x):
        return self.attn(x)

    def queries_and_keys(self, x):
        return self.attn.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)[:2]


MODELS = {
    "torch, with biases": Torch,
    "separate": Separate,
    "rotary": lambda: Separate(positions="rotary"),
    "grouped": lambda: Separate(8, 2, "rotary"),
    "multi-query": lambda: Separate(4, 1),
    "fused, with biases": Fused,
}


def largest_scores(model, x) -> torch.Tensor:
    """The largest score of each head, of all queries and the keys that they see, by hand."""
    with torch.no_grad():
        q, k = model.queries_and_keys(x)
        scores = q.double() @ k.double().mT / q.shape[-1] ** 0.5
        if getattr(model.attn, "is_causal", False):
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores.movedim(1, 0).flatten(1).amax(-1)


def make(name, seed):
    torch.manual_seed(seed)
    model = MODELS[name]()
    with torch.no_grad():  # heads of sizes of their own
        (layer,) = find_attention(model)
        for role in ("query", "key"):
            weight = layer.weight(role)
            weight *= 0.3 + 3 * torch.rand(len(weight), 1, 1)
    return model, torch.randn(3, LENGTH, WIDTH)


def step(model, x, clip, rate=0.0, steps=1, metrics=("attention_logit_bound",), **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with watch_heads(model, optimizer, interventions=[clip], every_n_steps=1, history=False, verbose=False,
                     metrics=list(metrics), **options) as heads:  # fmt: skip
        for _ in range(steps):
            with heads.step():
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return heads


@pytest.mark.some_slow(quick=4)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_heads_above_the_limit_are_scaled_to_it_and_others_are_unchanged(name, seed):
    model, x = make(name, seed)
    before = largest_scores(model, x)
    limit = float(before.median()) * 0.999
    untouched = copy.deepcopy(model)
    step(model, x, QKClip(limit))
    after = largest_scores(model, x)
    torch.testing.assert_close(after, before.clamp(max=limit), rtol=2e-5, atol=1e-5)
    (layer,), (was,) = find_attention(model), find_attention(untouched)
    below = before <= limit
    assert 0 < int(below.sum()) < len(below)
    assert torch.equal(layer.weight("query")[below], was.weight("query")[below]), "not by a bit"
    group = layer.num_heads // layer.num_key_heads
    some_below = below.view(-1, group).any(1)
    assert torch.equal(layer.weight("key")[some_below], was.weight("key")[some_below])
    for role in ("value", "output"):
        assert torch.equal(layer.weight(role), was.weight(role))


@pytest.mark.some_slow(quick=1)
@pytest.mark.parametrize("over", [1.001, 1.003, 1.02, 2.0])
def test_bfloat16_weights_are_scaled_below_the_limit_even_for_a_small_excess(over):
    model, x = make("separate", 0)
    model, x = model.bfloat16(), x.bfloat16()
    before = largest_scores(model, x)
    limit, was = float(before.max()) / over, copy.deepcopy(model)
    step(model, x, QKClip(limit), steps=2)  # the second for what rounding of the scaled weights adds
    after = largest_scores(model, x)
    assert after.max() <= limit
    assert after.max() >= 0.98 * limit, "by a few roundings of queries and keys at most"
    (layer,), (old,) = find_attention(model), find_attention(was)
    below = before <= limit
    assert torch.equal(layer.weight("query")[below], old.weight("query")[below]), "not by a bit"


def test_layers_whose_optimizer_keeps_its_own_copies_of_the_weights_are_reported_as_not_scaled():
    model, x = make("separate", 0)
    copies = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.0)
    limit = float(largest_scores(model, x).max()) / 2
    watching = watch_heads(
        model, optimizer, interventions=[QKClip(limit)], every_n_steps=1, history=False, verbose=False
    )
    with pytest.warns(MonitoringWarning, match="no optimizer holds its query and key weights") as caught, watching:
        for _ in range(3):
            with watching.step():
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert sum("QKClip leaves `attn` as it is" in str(one.message) for one in caught) == 1


def test_queries_and_keys_of_a_head_share_the_scaling():
    model, x = make("separate", 0)
    before = largest_scores(model, x)
    limit = float(before.max()) / 4
    was = copy.deepcopy(model)
    step(model, x, QKClip(limit))
    head = int(before.argmax())
    (layer,), (old,) = find_attention(model), find_attention(was)
    for role in ("query", "key"):
        torch.testing.assert_close(layer.weight(role)[head], 0.5 * old.weight(role)[head], rtol=1e-5, atol=1e-8)


def test_a_shared_key_is_scaled_only_if_all_of_its_query_heads_exceed_the_limit():
    model, _ = make("grouped", 0)
    (layer,) = find_attention(model)
    was = layer.weight("key").detach().clone(), layer.weight("query").detach().clone()
    factor = torch.tensor([1.0, 0.25, 0.25, 0.5, 0.25, 0.16, 0.64, 0.25])
    clip_heads(layer, factor)
    keys, queries = layer.weight("key"), layer.weight("query")
    assert torch.equal(keys[0], was[0][0])
    torch.testing.assert_close(keys[1], 0.8 * was[0][1])
    scale = torch.tensor([1.0, 0.25, 0.25, 0.5, 0.25 / 0.8, 0.16 / 0.8, 0.8, 0.25 / 0.8])
    torch.testing.assert_close(queries, scale[:, None, None] * was[1])


def test_training_below_the_limit_is_bit_identical_to_training_without_qk_clip():
    model, x = make("separate", 0)
    twin, limit = copy.deepcopy(model), 100 * float(largest_scores(model, x).max())
    step(model, x, QKClip(limit), rate=0.1, steps=4)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(4):
        twin(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for left, right in zip(model.parameters(), twin.parameters()):
        assert torch.equal(left, right)


def test_a_layer_whose_score_bound_is_below_the_limit_is_not_observed(monkeypatch):
    model, x = make("separate", 0)
    armed = []
    from hdi_callback.monitoring.interventions import qk_clip

    class Counting(qk_clip.AttentionObserver):
        def arm(self, **options):
            armed.append(0)
            super().arm(**options)

    monkeypatch.setattr(qk_clip, "AttentionObserver", Counting)
    top = float(largest_scores(model, x).max())
    step(model, x, QKClip(100 * top), steps=6)
    assert len(armed) == 1, "before the first reading nothing is known"
    armed.clear()
    step(model, x, QKClip(1.5 * top), steps=6)
    assert len(armed) == 6, "the bound does not clear it"
    armed.clear()
    step(model, x, QKClip(100 * top), steps=6, metrics=["hdi"])
    assert len(armed) == 6, "without a certificate every forward is observed"


def test_steps_at_which_no_score_is_above_the_limit_do_not_count():
    model, x = make("separate", 0)
    limit = float(largest_scores(model, x).max()) * 1.2
    clip = QKClip(limit, at_most=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    largest = []
    with watch_heads(model, optimizer, interventions=[clip], every_n_steps=2, history=False, verbose=False,
                     metrics=["attention_logit_bound"]) as heads:  # fmt: skip
        for number in range(7):
            if number >= 3:
                with torch.no_grad():
                    model.attn.q_proj.weight *= 2
            with heads.step():
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            largest.append(float(largest_scores(model, x).max()))
    assert largest[:5] == pytest.approx([limit / 1.2] * 3 + [limit] * 2, rel=1e-4)
    assert largest[5:] == pytest.approx([2 * limit, 4 * limit], rel=1e-4), "it has acted twice"
    assert clip.count == 2


def test_scores_that_grow_are_kept_at_the_limit():
    model, x = make("separate", 0)
    limit = float(largest_scores(model, x).max()) * 1.2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watch_heads(model, optimizer, interventions=[QKClip(limit)], every_n_steps=4, history=False, verbose=False,
                     metrics=["attention_logit_bound"]) as heads:  # fmt: skip
        for _ in range(30):
            with heads.step():
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                model.attn.q_proj.weight *= 1.05
                model.attn.k_proj.weight *= 1.05
    assert float(largest_scores(model, x).max()) <= limit * 1.05**2 * 1.001, "the growth of one step is beyond it"


def test_the_action_is_in_the_history(tmp_path):
    model, x = make("separate", 0)
    limit = float(largest_scores(model, x).max()) / 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    path = tmp_path / "history.jsonl"
    with watch_heads(
        model, optimizer, interventions=[QKClip(limit)], every_n_steps=1, history=path, verbose=False
    ) as heads:
        for _ in range(3):
            with heads.step():
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (action, *_) = [line for line in lines if line["kind"] == "intervention"]
    assert action["intervention"] == "QKClip"
    assert f"scaled queries and keys of heads whose score exceeds {limit:g} (attn: head " in action["message"]
    assert action["facts"]["attn"]["largest"] == pytest.approx(2 * limit, rel=1e-3)


def test_a_dry_run_of_qk_clip_says_so_and_changes_nothing():
    model, x = make("separate", 0)
    was = copy.deepcopy(model)
    clip = QKClip(float(largest_scores(model, x).max()) / 2, dry_run=True)
    step(model, x, clip)
    for left, right in zip(model.parameters(), was.parameters()):
        assert torch.equal(left, right)


def test_the_largest_score_of_all_micro_batches_counts():
    model, x = make("separate", 0)
    small, top = 0.1 * x, float(largest_scores(model, x).max())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watch_heads(model, optimizer, interventions=[QKClip(top / 2)], every_n_steps=1, history=False, verbose=False,
                     metrics=["attention_logit_bound"]) as heads, heads.step():  # fmt: skip
        for part in (x, small):
            model(part).square().mean().backward()
        optimizer.step()
    assert float(largest_scores(model, x).max()) == pytest.approx(top / 2, rel=1e-4)


def test_a_state_survives_a_resume():
    clip, other = QKClip(50), QKClip(50)
    clip.watched, clip.count = ["blocks.3.attn"], 7
    other.load_state_dict(json.loads(json.dumps(clip.state_dict())))
    assert (other.watched, other.count) == (["blocks.3.attn"], 7)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Timm, "a norm follows its query"),
        (Latent, "cannot be written in place"),
        (lambda: Produced(), "cannot be written in place"),
    ],
    ids=["normed", "latent", "not in place"],
)
def test_layers_that_qk_clip_cannot_scale_are_refused_unless_left_out_by_pattern(model, message):
    built = nn.Sequential(model(), Separate())
    optimizer = torch.optim.SGD(built.parameters(), lr=0.0)
    with pytest.raises(MisconfigurationError, match=message):
        watch_heads(built, optimizer, interventions=[QKClip()], history=False, verbose=False)
    watch_heads(built, optimizer, interventions=[QKClip(layers=["1.*"])], history=False, verbose=False).close()


class Produced(Separate):
    """Query weights that are a product: what is read is no part of a parameter."""

    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.attn.q_proj)


def test_qk_clip_takes_no_alert_options_and_works_without_alerts():
    with pytest.raises(MisconfigurationError, match="takes `layers`, `at_most` and `dry_run`, and not 'rules'"):
        QKClip(rules=["worst pair"])
    model, x = make("separate", 0)
    top = float(largest_scores(model, x).max())
    step(model, x, interventions.QKClip(top / 2), alerts=None)
    assert float(largest_scores(model, x).max()) == pytest.approx(top / 2, rel=1e-4)


@pytest.mark.parametrize(("layout", "heads"), [("windows", 4), ("heads first", 2)])
def test_qk_clip_scales_the_head_with_large_scores_where_windows_or_sequences_lie_beside_the_heads(layout, heads):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(16), Windows(heads, layout))  # of 16 tokens, so four windows
    query, width = model[1].query.weight, 16 // heads
    with torch.no_grad():
        query[width : 2 * width] *= 60
    before = query.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    clip = QKClip(limit=5)
    with watch_heads(model, optimizer, history=False, verbose=False, interventions=[clip]) as watched:
        for _ in range(2):
            with watched.step():
                model(torch.randn(3, 16, 16)).square().mean().backward()
                optimizer.step()
    scaled = (query / before).detach().unflatten(0, (heads, width)).mean((1, 2))
    assert scaled[1] < 0.5
    torch.testing.assert_close(scaled[torch.arange(heads) != 1], torch.ones(heads - 1))
