"""Attention that is refused, each with its reason as a pattern."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.by_hand import B, C, Case, D, H, T, Written, attend, between, four, join, linear, split

REFUSED: dict[str, tuple[Callable[[], Case], str]] = {}


def refused(reason: str) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    def add(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def build() -> Case:
            torch.manual_seed(0)
            return Case(make(), [], (torch.randn(B, T, C),))

        REFUSED[make.__name__] = build, reason
        return make

    return add


@refused("features of its keys differ|mix")
def split_without_a_transpose():
    def forward(m, x):
        q, k, v = (f(x).view(B, H, T, D) for f in (m.q, m.k, m.v))
        return m.o(join(attend(q, k, v)))

    return Written(forward, **four())


@refused("mixes the scores of heads")
def talking_heads():
    def forward(m, x):
        q, k, v = (split(f(x)) for f in (m.q, m.k, m.v))
        scores = m.talk((q @ k.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return m.o(join(scores.softmax(-1) @ v))

    return Written(forward, **four(talk=linear(H, H)))


@refused("runs over heads")
def softmax_over_heads():
    def forward(m, x):
        q, k, v = (split(f(x)) for f in (m.q, m.k, m.v))
        return m.o(join((q @ k.mT).softmax(1) @ v))

    return Written(forward, **four())


@refused("runs over queries")
def softmax_over_queries():
    def forward(m, x):
        q, k, v = (split(f(x)) for f in (m.q, m.k, m.v))
        return m.o(join((q @ k.mT).softmax(-2) @ v))

    return Written(forward, **four())


@refused("no products of queries and keys")
def additive_scores():
    def forward(m, x):
        q, k, v = (split(f(x)) for f in (m.q, m.k, m.v))
        scores = torch.tanh(q[:, :, :, None] + k[:, :, None]).sum(-1)
        return m.o(join(scores.softmax(-1) @ v))

    return Written(forward, **four())


@refused("another softmax")
def differences_of_softmaxes():
    def forward(m, x):
        (q, r), (k, s) = (split(f(x)).chunk(2, -1) for f in (m.q, m.k))
        return m.o(join(((q @ k.mT).softmax(-1) - 0.5 * (r @ s.mT).softmax(-1)) @ split(m.v(x))))

    return Written(forward, **four(q=linear(2 * C), k=linear(2 * C)))


@refused("product of two computed tensors")
def a_weight_with_noise():
    def forward(m, x):
        k = F.linear(x, m.k.weight * torch.rand(C)[:, None])
        return m.o(join(attend(split(m.q(x)), split(k), split(m.v(x)))))

    return Written(forward, **four())


@refused("own_operation")
def keys_of_an_operation_that_is_not_known():
    return Written(
        lambda m, x: m.o(join(attend(split(m.q(x)), split(torch.ops.by_hand.own_operation(m.k(x))), split(m.v(x))))),
        **four(),
    )


@refused("own_attention")
def attention_of_an_operation_that_is_not_known():
    return Written(
        lambda m, x: m.o(join(torch.ops.by_hand.own_attention(*(split(f(x)) for f in (m.q, m.k, m.v))))), **four()
    )


@refused("input of its own")
def heads_that_take_parts_of_the_features():
    def forward(m, x):
        q, k, v = (torch.einsum("bthd,hde->bhte", x.unflatten(-1, (H, D)), w) for w in (m.q, m.k, m.v))
        return m.o(join(attend(q, k, v)))

    return Written(
        lambda m, x: forward(m, m.i(x)),
        **{n: nn.Parameter(torch.randn(H, D, D)) for n in "qkv"},
        o=linear(),
        i=linear(),
    )


@refused("heads share one map")
def heads_that_take_parts_of_an_embedding():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.o = nn.Embedding(T, C), linear()
            self.q, self.k, self.v = (linear(D, D) for _ in range(3))

        def forward(self, x):
            x = self.tokens(x.argmax(1) % T).unflatten(-1, (H, D))
            return self.o(join(attend(*(f(x).transpose(1, 2) for f in (self.q, self.k, self.v)))))

    return Model()


@refused("without a softmax")
def sigmoids_in_place_of_a_softmax():
    def forward(m, x):
        q, k, v = (split(f(x)) for f in (m.q, m.k, m.v))
        return m.o(join((q @ k.mT / D**0.5).sigmoid() @ v))

    return Written(forward, **four())


@refused("without a softmax")
def linear_attention():
    def forward(m, x):
        q, k, v = (split(f(x)) for f in (m.q, m.k, m.v))
        return m.o(join((F.elu(q) + 1) @ ((F.elu(k) + 1).mT @ v) / math.sqrt(T)))

    return Written(forward, **four())


# scores


@refused("scores of heads|the scores of several heads")
def scores_of_neighbours_that_are_added():
    return between(lambda m, q, k, v: ((s := q @ k.mT) + s.roll(1, 1)).softmax(-1) @ v)


@refused("sum of several products of queries and keys")
def scores_of_two_products():
    def forward(m, x):
        q, k, v, r, s = (split(f(x)) for f in (m.q, m.k, m.v, m.r, m.s))
        return m.o(join((q @ k.mT + r @ s.mT).softmax(-1) @ v))

    return Written(forward, **four(r=linear(), s=linear()))


@refused("scores of several tokens|tokens are pooled|not tokens")
def scores_that_are_pooled():
    return between(lambda m, q, k, v: F.avg_pool1d((q @ k.mT).flatten(0, 1), 7).unflatten(0, (B, H)).softmax(2).mT @ v)


@refused("negative distances|no products of queries and keys")
def distances_in_place_of_products():
    return between(lambda m, q, k, v: (-torch.cdist(q, k)).softmax(-1) @ v)


@refused("no products of queries and keys")
def scores_from_positions_alone():
    return Written(lambda m, x: m.o(join(m.s(x).view(B, T, H, T).transpose(1, 2).softmax(-1) @ split(m.v(x)))),
                   s=linear(H * T), v=linear(), o=linear())  # fmt: skip


@refused("positions are not tokens|does not run over tokens")
def attention_over_channels():
    return between(lambda m, q, k, v: ((q.mT @ k).softmax(-1) @ v.mT).mT)


# behind the softmax


@refused("mixes its weights behind the softmax")
def talking_heads_behind_the_softmax():
    def attention(m, q, k, v):
        weights = m.talk((q @ k.mT).softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return weights @ v

    return between(attention, talk=linear(H, H))


@refused("scores of several heads, or of several queries, are mixed")
def weights_of_neighbours_that_are_added():
    return between(lambda m, q, k, v: ((w := (q @ k.mT).softmax(-1)) + w.roll(1, 1)) @ v)


@refused("element by element")
def weights_times_values_element_by_element():
    return between(lambda m, q, k, v: (q @ k.mT).softmax(-1).diagonal(dim1=2, dim2=3)[..., None] * v)


# without a softmax


@refused("without a softmax")
def the_value_of_the_largest_score():
    return between(lambda m, q, k, v: F.one_hot((q @ k.mT).argmax(-1), T).float() @ v)


@refused("without scores")
def attention_free_of_queries():
    def forward(m, x):
        gate, k, v = m.q(x).sigmoid(), m.k(x).exp(), m.v(x)
        return m.o(gate * (k * v).cumsum(1) / k.cumsum(1))

    return Written(forward, **four())


@refused("without scores")
def attention_free_of_queries_with_a_weight_for_each_pair_of_places():
    def forward(m, x):
        k, w = m.k(x).exp(), m.w.exp()
        return m.o(m.q(x).sigmoid() * (w @ (k * m.v(x))) / (w @ k))

    return Written(forward, **four(w=nn.Parameter(torch.randn(T, T))))


# what adds up to one over keys is read; this does not


@refused("without a softmax")
def weights_that_are_squared():
    return between(lambda m, q, k, v: (q @ k.mT / T).relu().square() @ v)


@refused("without a softmax")
def scores_over_their_sum_some_of_them_negative():
    return between(lambda m, q, k, v: ((s := q @ k.mT) / s.sum(-1, keepdim=True)) @ v)


@refused("without a softmax")
def weights_of_length_one():
    return between(lambda m, q, k, v: F.normalize((q @ k.mT).relu(), dim=-1) @ v)


@refused("runs over queries")
def a_relu_over_its_sum_over_queries():
    return between(lambda m, q, k, v: ((r := (q @ k.mT).relu()) / r.sum(-2, keepdim=True).clamp_min(1e-9)) @ v)


@refused("runs over heads")
def a_relu_over_its_sum_over_heads():
    return between(lambda m, q, k, v: ((r := (q @ k.mT).relu()) / r.sum(1, keepdim=True).clamp_min(1e-9)) @ v)


# heads


@refused("share queries and keys")
def heads_that_differ_in_values_alone():
    def forward(m, x):
        weights = (m.q(x) @ m.k(x).mT).softmax(-1)[:, None].expand(-1, H, -1, -1)
        return m.o(join(weights @ split(m.v(x))))

    return Written(forward, q=linear(D), k=linear(D), v=linear(), o=linear())


@refused("share features")
def heads_that_overlap():
    def forward(m, x):
        q, k, v = (f(x).unfold(-1, D, 3).transpose(1, 2) for f in (m.q, m.k, m.v))
        return m.o(attend(q, k, v).transpose(1, 2).flatten(2))

    return Written(forward, **four(o=linear(C, 7 * D)))


@refused("maps? mixes the heads|mix features of several heads")
def heads_that_are_mixed_before_they_meet():
    return between(lambda m, q, k, v: attend(q, k + k.roll(1, 1), v))


@refused("input of its own")
def heads_in_a_loop_with_parts_of_the_features():
    def forward(m, x):
        parts = m.i(x).chunk(H, -1)
        return m.o(torch.cat([attend(q(p), k(p), v(p)) for p, q, k, v in zip(parts, m.q, m.k, m.v)], -1))

    return Written(forward, **{n: nn.ModuleList(linear(D, D) for _ in range(H)) for n in "qkv"}, o=linear(), i=linear())


@refused("a group of channels|input of its own")
def filters_of_groups():
    def forward(m, x):
        q, k, v = (split(f(x.mT).mT) for f in (m.q, m.k, m.v))
        return m.o(join(attend(q, k, v)))

    return Written(forward, **{name: nn.Conv1d(C, C, 1, groups=H) for name in "qkv"}, o=linear())


@refused("a filter runs over the features")
def a_filter_over_features():
    return between(lambda m, q, k, v: attend(q, m.f(k.flatten(0, 1)).unflatten(0, (B, H)), v),
                   f=nn.Conv1d(T, T, 3, padding=1))  # fmt: skip


@refused("a map mixes the heads")
def a_small_filter_over_features():
    return between(lambda m, q, k, v: attend(q, m.f(k.flatten(0, 2)[:, None])[:, 0].unflatten(0, (B, H, T)), v),
                   f=nn.Conv1d(1, 1, 3, padding=1))  # fmt: skip


# maps


@refused("from no linear map|from a linear map")
def keys_that_are_inputs():
    return Written(lambda m, x: m.o(join(attend(split(m.q(x)), split(x), split(m.v(x))))), **four())


@refused("product of two computed tensors")
def keys_times_keys():
    return Written(lambda m, x: m.o(join(attend(split(m.q(x)), split(m.k(x) * m.s(x)), split(m.v(x))))),
                   **four(s=linear()))  # fmt: skip


@refused("put together from several maps|put together in different ways")
def keys_of_two_maps_side_by_side():
    def forward(m, x):
        q, k, v = split(m.q(x)), torch.cat([split(m.k(x)), split(m.s(x))], -1), split(m.v(x))
        return m.o(join(attend(q, k, v)))

    return Written(forward, q=linear(2 * C), k=linear(), s=linear(), v=linear(), o=linear())


@refused("sum of maps of several inputs")
def keys_of_two_inputs():
    return Written(lambda m, x: m.o(join(attend(split(m.q(x)), split(m.k(x) + m.s(m.i(x).tanh())), split(m.v(x))))),
                   **four(s=linear(), i=linear()))  # fmt: skip


@refused("no plain number")
def an_update_with_a_gate():
    return Written(lambda m, x: m.o(join(attend(split(m.q(x)), split(m.k(x) + m.g * m.s(x)), split(m.v(x))))),
                   **four(s=linear(), g=nn.Parameter(torch.randn(C))))  # fmt: skip


@refused("filters that are computed")
def filters_of_the_data():
    def forward(m, x):
        k = F.conv1d(x.reshape(1, B * T, C), m.f(x).reshape(B * T, C, 1)[:, :1], groups=B * T)
        return m.o(join(attend(split(m.q(x)), split(k.view(B, T, C)), split(m.v(x)))))

    return Written(forward, **four(f=linear()))


@refused("of which two maps make the parts")
def complex_numbers_of_two_maps():
    def forward(m, x):
        q, k = (torch.complex(split(a(x)), split(b(x))) for a, b in ((m.q, m.r), (m.k, m.s)))
        return m.o(join((q @ k.mT.conj()).real.softmax(-1) @ split(m.v(x))))

    return Written(forward, **four(r=linear(), s=linear()))


@refused("tokens with different features are pooled")
def features_that_are_pooled():
    return between(lambda m, q, k, v: attend(q, F.avg_pool1d(k.flatten(0, 1), 3, 1, 1).unflatten(0, (B, H)), v))


@refused("features are summed up by cumsum")
def features_that_are_summed_up():
    return between(lambda m, q, k, v: attend(q, k.cumsum(-1), v))


@refused("torch.jit")
def a_module_of_torch_jit():
    m = between(lambda m, q, k, v: attend(q, k, v))
    m.k = torch.jit.trace(m.k, torch.randn(B, T, C))
    return m


@torch.library.custom_op("by_hand::own_operation", mutates_args=())
def own_operation(x: Tensor) -> Tensor:
    return x + 1


@torch.library.custom_op("by_hand::own_attention", mutates_args=())
def own_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v
