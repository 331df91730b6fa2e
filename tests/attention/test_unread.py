"""Attention without a softmax is named as not read, whatever mixes its tokens; what multiplies fewer tensors is not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hdi_callback import survey

D, H, d = 32, 4, 8


class Layer(nn.Module):
    """Four heads of eight: `mix` takes the layer, queries, keys, values and the input."""

    def __init__(self, mix):
        super().__init__()
        self.q, self.k, self.v, self.g, self.o = (nn.Linear(D, D) for _ in range(5))
        self.mix = mix

    def forward(self, x):
        q, k, v = (linear(x).unflatten(-1, (H, d)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return self.o(self.mix(self, q, k, v, x).transpose(1, 2).flatten(-2))


def causal(x):
    return torch.ones(x.shape[1], x.shape[1]).tril().bool()


def sigmoid_tril(s, q, k, v, x):
    return torch.sigmoid(q @ k.mT / d**0.5).tril() @ v


def relu_tril(s, q, k, v, x):
    return F.relu(q @ k.mT / d**0.5).tril() @ v


def relu_squared_over_n(s, q, k, v, x):
    return (F.relu(q @ k.mT).square() / x.shape[1]).tril() @ v


def raw_scores_tril(s, q, k, v, x):
    return (q @ k.mT).tril() @ v


def retention(s, q, k, v, x):
    n = torch.arange(x.shape[1])
    m = (0.9 ** (n[:, None] - n).clamp(min=0)).tril()
    return ((q @ k.mT) * m) @ v


def cumsum_einsum(s, q, k, v, x):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    kv = torch.einsum("bhnd,bhne->bhnde", k, v).cumsum(2)
    z = 1 / (torch.einsum("bhnd,bhnd->bhn", q, k.cumsum(2)) + 1e-6)
    return torch.einsum("bhnd,bhnde,bhn->bhne", q, kv, z)


def cumsum_broadcast(s, q, k, v, x):
    kv = (k[..., :, None] * v[..., None, :]).cumsum(2)
    return (q[..., :, None] * kv).sum(-2)


def linear_noncausal(s, q, k, v, x):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return (q @ (k.mT @ v)) / (q @ k.sum(2, keepdim=True).mT)


def recurrent_loop(s, q, k, v, x):
    S = 0
    out = []
    for t in range(x.shape[1]):
        S = 0.9 * S + k[:, :, t, :, None] * v[:, :, t, None, :]
        out.append((q[:, :, t, None, :] @ S)[:, :, 0])
    return torch.stack(out, 2)


def delta_rule(s, q, k, v, x):
    k = F.normalize(k, dim=-1)
    S = torch.zeros(x.shape[0], H, d, d)
    out = []
    for t in range(x.shape[1]):
        kt, vt = k[:, :, t], v[:, :, t]
        S = S + kt[..., :, None] * (vt - (kt[..., None, :] @ S)[..., 0, :])[..., None, :]
        out.append((q[:, :, t, None, :] @ S)[..., 0, :])
    return torch.stack(out, 2)


def sigmoid_where(s, q, k, v, x):
    return torch.where(causal(x), torch.sigmoid(q @ k.mT), 0.0) @ v


def cosine_no_softmax(s, q, k, v, x):
    return (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT).tril() @ v


def topk_relu(s, q, k, v, x):
    a = q @ k.mT
    t = a.topk(3, -1).values[..., -1:]
    return F.relu(a - t) @ v


def softplus_l2(s, q, k, v, x):
    a = F.softplus(q @ k.mT).tril()
    return (a / a.norm(dim=-1, keepdim=True)) @ v


def sigmoid_einsum_bnhd(s, q, k, v, x):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    a = torch.einsum("bnhd,bmhd->bhnm", q, k)
    return torch.einsum("bhnm,bmhd->bnhd", torch.sigmoid(a).tril(), v).transpose(1, 2)


def tanh_scores(s, q, k, v, x):
    return torch.tanh(q @ k.mT) @ v


def gla_gated(s, q, k, v, x):
    a = torch.sigmoid(s.g(x)).unflatten(-1, (H, d)).transpose(1, 2)
    S = torch.zeros(x.shape[0], H, d, d)
    out = []
    for t in range(x.shape[1]):
        S = a[:, :, t, :, None] * S + torch.einsum("bhd,bhe->bhde", k[:, :, t], v[:, :, t])
        out.append(torch.einsum("bhd,bhde->bhe", q[:, :, t], S))
    return torch.stack(out, 2)


def selective_scan(s, q, k, v, x):
    A = -torch.ones(D, 4)
    dt = F.softplus(s.q(x))
    B = s.k(x)[..., :4]
    Cc = s.v(x)[..., :4]
    u = s.g(x)
    h = torch.zeros(x.shape[0], D, 4)
    out = []
    for t in range(x.shape[1]):
        h = torch.exp(dt[:, t, :, None] * A) * h + dt[:, t, :, None] * B[:, t, None, :] * u[:, t, :, None]
        out.append((h * Cc[:, t, None, :]).sum(-1))
    return torch.stack(out, 1).unflatten(-1, (H, d)).transpose(1, 2)


def elu_cumsum_padded(s, q, k, v, x):
    k = F.elu(k) + 1
    kv = torch.einsum("bhnd,bhne->bhnde", k, v)
    kv = F.pad(kv, (0, 0, 0, 0, 1, 0)).cumsum(2)[:, :, 1:]
    return torch.einsum("bhnd,bhnde->bhne", F.elu(q) + 1, kv)


def gated_over_padded_tokens(s, q, k, v, x):
    decay = F.pad(F.logsigmoid(s.g(x)[..., :H]).transpose(1, 2), (0, 3)).cumsum(-1)[..., :-3]
    weights = (decay[..., :, None] - decay[..., None, :]).exp()
    return (q @ k.mT * weights).tril() @ (v * decay.exp()[..., None])


def fourier_mixed(s, q, k, v, x):
    return (torch.fft.fft(q @ k.mT).real) @ v


def by_features(q, k, v):
    return (q @ (k.mT @ v)) / (q @ k.sum(2)[..., None])


def positive(x, directions):
    return torch.exp(x @ directions.mT - x.square().sum(-1, keepdim=True) / 2)


def performer_drawn(s, q, k, v, x):
    directions = torch.randn(16, d)
    return by_features(positive(q, directions), positive(k, directions), v)


def performer_drawn_for_each_head(s, q, k, v, x):
    directions = torch.randn(len(x), H, 16, d)
    return by_features(positive(q, directions), positive(k, directions), v)


def random_features_around_landmarks(s, q, k, v, x):
    directions = q.unflatten(2, (4, 2)).mean(3) + torch.randn(len(x), H, 4, d)
    return by_features(positive(q, directions), positive(k, directions), v)


def performer_causal(s, q, k, v, x):
    directions = torch.randn(16, d)
    q, k = positive(q, directions), positive(k, directions)
    mixed = torch.einsum("bhnm,bhne->bhnme", k, v).cumsum(2)
    return torch.einsum("bhnm,bhnme->bhne", q, mixed) / (q * k.cumsum(2)).sum(-1, keepdim=True)


def exponential_features(s, q, k, v, x):
    return by_features(q.exp(), k.exp(), v)


ATTENTION = [
    performer_drawn,
    performer_drawn_for_each_head,
    random_features_around_landmarks,
    performer_causal,
    exponential_features,
    sigmoid_tril,
    relu_tril,
    relu_squared_over_n,
    raw_scores_tril,
    retention,
    cumsum_einsum,
    cumsum_broadcast,
    linear_noncausal,
    recurrent_loop,
    delta_rule,
    sigmoid_where,
    cosine_no_softmax,
    topk_relu,
    softplus_l2,
    sigmoid_einsum_bnhd,
    tanh_scores,
    gla_gated,
    selective_scan,
    elu_cumsum_padded,
    gated_over_padded_tokens,
    fourier_mixed,
]


def attention_free_simple(s, q, k, v, x):
    return torch.sigmoid(q) * (k.softmax(2) * v).sum(2, keepdim=True)


def swiglu(s, q, k, v, x):
    return F.silu(q) * k


def gate(s, q, k, v, x):
    return torch.sigmoid(q) * v


def cumulative_mean(s, q, k, v, x):
    return v.cumsum(2) / torch.arange(1, x.shape[1] + 1)[:, None]


def lstm_like(s, q, k, v, x):
    c = 0
    out = []
    for t in range(x.shape[1]):
        c = torch.sigmoid(q[:, :, t]) * c + torch.sigmoid(k[:, :, t]) * torch.tanh(v[:, :, t])
        out.append(c.tanh())
    return torch.stack(out, 2)


def moe(s, q, k, v, x):
    r = q.mean(-1, keepdim=True).softmax(1)
    return r * v


def bilinear(s, q, k, v, x):
    return (q * k).sum(-1, keepdim=True).expand_as(v)


def gated_conv(s, q, k, v, x):
    return q * F.conv1d(k.flatten(0, 1).mT, torch.ones(d, 1, 3) / 3, padding=1, groups=d).mT.unflatten(0, (-1, H))


def layer_norm_gates(s, q, k, v, x):
    return F.layer_norm(q, (d,)) * F.silu(k) + v


def gram_loss_free(s, q, k, v, x):
    return v + (q.mean() * k.mean())


def glu_conv(s, q, k, v, x):
    return F.glu(torch.cat([q, k], -1), -1)


def outer_then_linear(s, q, k, v, x):
    return (q[..., :, None] * k[..., None, :]).mean(-1)


def film(s, q, k, v, x):
    return q.mean(2, keepdim=True) * v + k.mean(2, keepdim=True)


def rms_gate(s, q, k, v, x):
    return q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6) * F.silu(k)


def highway(s, q, k, v, x):
    t = torch.sigmoid(q)
    return t * k + (1 - t) * v


def dot_gate(s, q, k, v, x):
    return torch.sigmoid((q * k).sum(-1, keepdim=True)) * v


def softmax_gate_that_is_divided_late(s, q, k, v, x):
    weights = q.exp()
    return (weights * v) / weights.sum(-1, keepdim=True)


def mixture_of_experts(s, q, k, v, x):
    weights = s.g(x)[..., :3].exp()
    experts = torch.stack([q, k, v], -1) * weights[:, None, :, None]
    return experts.sum(-1) / weights.sum(-1)[:, None, :, None]


def normalised_over_tokens(s, q, k, v, x):
    weights = q.exp()
    return weights / weights.sum(2, keepdim=True) + v


OTHERS = [
    softmax_gate_that_is_divided_late,
    mixture_of_experts,
    normalised_over_tokens,
    swiglu,
    gate,
    cumulative_mean,
    lstm_like,
    moe,
    bilinear,
    gated_conv,
    layer_norm_gates,
    gram_loss_free,
    glu_conv,
    outer_then_linear,
    film,
    rms_gate,
    highway,
    dot_gate,
]


def refused(mix):
    torch.manual_seed(0)
    model, x = nn.Sequential(Layer(mix), nn.Linear(D, D)), torch.randn(2, 8, D)
    read = survey(model, lambda: model(x))
    assert not read.layers
    return [(refusal.name, refusal.reason) for refusal in read.refused]


@pytest.mark.parametrize("mix", ATTENTION, ids=lambda mix: mix.__name__)
def test_attention_without_a_softmax_is_named_once_with_its_module(mix):
    ((name, reason),) = refused(mix)
    assert name == "0"
    assert "three computed tensors without a softmax" in reason


def test_weights_that_multiply_values_element_by_element_are_named_as_not_read():
    ((name, reason),) = refused(attention_free_simple)
    assert name == "0"
    assert "multiplied with values element by element" in reason


def test_random_directions_in_place_of_queries_are_no_heads():
    def mix(s, q, k, v, x):
        keys = (k @ torch.randn(d, 16)).exp()
        return q @ torch.ones(d, 16) @ ((keys / keys.sum(2, keepdim=True)).mT @ v)

    ((name, reason),) = refused(mix)
    assert name == "0"
    assert "random features" in reason


@pytest.mark.parametrize("mix", OTHERS, ids=lambda mix: mix.__name__)
def test_what_gates_or_mixes_without_queries_keys_and_values_is_not_called_attention(mix):
    assert refused(mix) == []


class Mixing(nn.Module):
    """Four streams mixed by weights that a router computes from the first, as AltUp of Gemma 3n does."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(d, 16)

    def forward(self, streams):
        weights = torch.tanh(self.router(streams[..., 0])).unflatten(-1, (4, 4))
        return streams + (streams.transpose(0, 1) @ weights.transpose(0, 1)).transpose(0, 1)


def test_streams_that_are_mixed_layer_after_layer_are_no_attention():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), Mixing(), Mixing(), Mixing()), torch.randn(2, 6, d, 4)
    read = survey(model, lambda: model(x))
    assert (read.layers, read.refused) == ((), ())
