"""Attention as people write it, each in a few lines, with the weights of its heads by construction.

Each function builds a module and says what is true of it: role -> ``(heads, width, features)``, of the output
``(heads, width, features)`` of its columns. All sizes differ, so that none is mixed up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

H, D, C, B, T = 4, 6, 24, 2, 7  # heads, width of a head, width of the model, sequences, tokens

Truth = dict[str, Tensor]


class Case(NamedTuple):
    module: nn.Module
    truth: list[Truth]
    inputs: tuple[Tensor, ...]


class Written(nn.Module):
    """A module whose forward is given as a function."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.written = forward

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.written(self, *inputs)


CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], tuple[Any, ...]]) -> Callable[[], Case]:
    def build() -> Case:
        torch.manual_seed(0)
        module, truth, *inputs = make()
        torch.manual_seed(1)
        return Case(module, truth if isinstance(truth, list) else [truth], tuple(inputs) or (torch.randn(B, T, C),))

    CASES[make.__name__] = build
    return build


def linear(rows: int = C, columns: int = C, bias: bool = True) -> nn.Linear:
    return nn.Linear(columns, rows, bias=bias)


def four(**more: Any) -> dict[str, Any]:
    return {name: linear() for name in "qkvo"} | more


def heads(weight: Tensor, count: int = H) -> Tensor:
    return weight.unflatten(0, (count, -1))


def columns(weight: Tensor, count: int = H) -> Tensor:
    return heads(weight.mT, count)


def truth_of_four(m: nn.Module) -> Truth:
    return {
        "query": heads(m.q.weight),
        "key": heads(m.k.weight),
        "value": heads(m.v.weight),
        "output": columns(m.o.weight),
    }


def split(x: Tensor, count: int = H) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def join(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def rotated(x: Tensor) -> Tensor:
    angle = torch.arange(x.shape[-2])[:, None] * 0.3 ** torch.arange(x.shape[-1] // 2).repeat(2)
    first, second = x.chunk(2, -1)
    return x * angle.cos() + torch.cat([-second, first], -1) * angle.sin()


# where rows lie


@case
def separate_and_fused():
    m = Written(
        lambda m, x: m.o(join(F.scaled_dot_product_attention(*(split(f(x)) for f in (m.q, m.k, m.v))))), **four()
    )
    return m, truth_of_four(m)


@case
def written_out():
    m = Written(lambda m, x: m.o(join(attend(*(split(f(x)) for f in (m.q, m.k, m.v))))), **four())
    return m, truth_of_four(m)


@case
def packed_in_three_blocks():
    m = Written(
        lambda m, x: m.o(join(attend(*(split(one) for one in m.qkv(x).chunk(3, -1))))), qkv=linear(3 * C), o=linear()
    )
    q, k, v = (heads(one) for one in m.qkv.weight.chunk(3))
    return m, {"query": q, "key": k, "value": v, "output": columns(m.o.weight)}


@case
def packed_head_by_head():
    m = Written(
        lambda m, x: m.o(join(attend(*m.qkv(x).unflatten(-1, (H, 3, D)).transpose(1, 2).unbind(3)))), qkv=linear(3 * C),
        o=linear(),
    )  # fmt: skip
    q, k, v = m.qkv.weight.unflatten(0, (H, 3, D)).unbind(1)
    return m, {"query": q, "key": k, "value": v, "output": columns(m.o.weight)}


@case
def features_before_heads():
    def forward(m, x):
        q, k, v = (f(x).unflatten(-1, (D, H)).permute(0, 3, 1, 2) for f in (m.q, m.k, m.v))
        return m.o(attend(q, k, v).permute(0, 2, 3, 1).flatten(2))

    m = Written(forward, **four())
    q, k, v = (f.weight.unflatten(0, (D, H)).transpose(0, 1) for f in (m.q, m.k, m.v))
    return m, {"query": q, "key": k, "value": v, "output": m.o.weight.mT.unflatten(0, (D, H)).transpose(0, 1)}


@case
def matrices_that_are_multiplied_from_the_right():
    m = Written(
        lambda m, x: join(attend(*(split(one) for one in (x @ m.w).chunk(3, -1)))) @ m.p,
        w=nn.Parameter(torch.randn(C, 3 * C)), p=nn.Parameter(torch.randn(C, C)),
    )  # fmt: skip
    q, k, v = (columns(one) for one in m.w.chunk(3, -1))
    return m, {"query": q, "key": k, "value": v, "output": heads(m.p)}


@case
def three_dimensional_parameters():
    def forward(m, x):
        q, k, v = (torch.einsum("btc,hcd->bhtd", x, w) for w in (m.q, m.k, m.v))
        return torch.einsum("bhtd,hdc->btc", attend(q, k, v), m.o)

    m = Written(forward, **{n: nn.Parameter(torch.randn(H, C, D)) for n in "qkv"}, o=nn.Parameter(torch.randn(H, D, C)))
    return m, {"query": m.q.mT, "key": m.k.mT, "value": m.v.mT, "output": m.o}


@case
def one_module_for_each_head():
    m = Written(
        lambda m, x: m.o(torch.cat([attend(q(x), k(x), v(x)) for q, k, v in zip(m.q, m.k, m.v)], -1)),
        **{name: nn.ModuleList(linear(D) for _ in range(H)) for name in "qkv"}, o=linear(),
    )  # fmt: skip
    q, k, v = (torch.stack([one.weight for one in many]) for many in (m.q, m.k, m.v))
    return m, {"query": q, "key": k, "value": v, "output": columns(m.o.weight)}


@case
def pointwise_convolutions():
    def forward(m, x):
        q, k, v = (f(x).flatten(2).unflatten(1, (H, D)).mT for f in (m.q, m.k, m.v))
        return m.o(attend(q, k, v).mT.flatten(1, 2).unflatten(-1, x.shape[2:]))

    m = Written(forward, **{name: nn.Conv2d(C, C, 1) for name in "qkvo"})
    q, k, v = (heads(f.weight.flatten(1)) for f in (m.q, m.k, m.v))
    return m, {"query": q, "key": k, "value": v, "output": columns(m.o.weight.flatten(1))}, torch.randn(B, C, 3, 5)


@case
def grouped_keys():
    def forward(m, x):
        k, v = (split(f(x), 2).repeat_interleave(2, 1) for f in (m.k, m.v))
        return m.o(join(F.scaled_dot_product_attention(split(m.q(x)), k, v)))

    m = Written(forward, q=linear(), k=linear(2 * D), v=linear(2 * D), o=linear())
    return m, truth_of_four(m) | {"key": heads(m.k.weight, 2), "value": heads(m.v.weight, 2), "key_of": (0, 0, 1, 1)}


@case
def tiled_keys():
    def forward(m, x):
        k, v = (split(f(x), 2).repeat(1, 2, 1, 1) for f in (m.k, m.v))
        return m.o(join(attend(split(m.q(x)), k, v)))

    m = Written(forward, q=linear(), k=linear(2 * D), v=linear(2 * D), o=linear())
    return m, truth_of_four(m) | {"key": heads(m.k.weight, 2), "value": heads(m.v.weight, 2), "key_of": (0, 1, 0, 1)}


@case
def one_key_head():
    m = Written(
        lambda m, x: m.o(join(attend(split(m.q(x)), m.k(x)[:, None], m.v(x)[:, None]))),
        q=linear(), k=linear(D), v=linear(D), o=linear(),
    )  # fmt: skip
    truth = {
        "query": heads(m.q.weight),
        "key": m.k.weight[None],
        "value": m.v.weight[None],
        "output": columns(m.o.weight),
    }
    return m, truth | {"key_of": (0, 0, 0, 0)}


@case
def tied_queries_and_keys():
    m = Written(
        lambda m, x: m.o(join(attend(split(m.q(x)), split(m.q(x)), split(m.v(x))))), q=linear(), v=linear(), o=linear()
    )
    return m, {
        "query": heads(m.q.weight),
        "key": heads(m.q.weight),
        "value": heads(m.v.weight),
        "output": columns(m.o.weight),
    }


@case
def values_of_another_width():
    m = Written(
        lambda m, x: m.o(join(attend(split(m.q(x)), split(m.k(x)), split(m.v(x))))),
        q=linear(), k=linear(), v=linear(H * 5), o=linear(C, H * 5),
    )  # fmt: skip
    return m, truth_of_four(m)


# what lies between


@case
def rotary_positions():
    m = Written(lambda m, x: m.o(join(attend(rotated(split(m.q(x))), rotated(split(m.k(x))), split(m.v(x))))), **four())
    return m, truth_of_four(m)


@case
def rotary_positions_of_complex_numbers():
    def turned(x):
        angle = torch.outer(torch.arange(x.shape[-2]).float(), 0.3 ** torch.arange(D // 2))
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
            torch.ones_like(angle), angle)).flatten(-2)  # fmt: skip

    m = Written(lambda m, x: m.o(join(attend(turned(split(m.q(x))), turned(split(m.k(x))), split(m.v(x))))), **four())
    return m, truth_of_four(m)


@case
def norms_of_queries_and_keys():
    m = Written(
        lambda m, x: m.o(join(attend(m.n(split(m.q(x))), m.n(split(m.k(x))), split(m.v(x))))), **four(n=nn.RMSNorm(D)),
    )  # fmt: skip
    return m, truth_of_four(m) | {"normed": {"query", "key"}}


@case
def norms_written_out():
    def normed(x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    m = Written(lambda m, x: m.o(join(attend(normed(split(m.q(x))), normed(split(m.k(x))), split(m.v(x))))), **four())
    return m, truth_of_four(m) | {"normed": {"query", "key"}}


@case
def relative_positions_in_the_scores():
    def forward(m, x):
        q, k, v = (split(f(x)) for f in (m.q, m.k, m.v))
        scores = q @ k.mT + (q @ m.r(m.table).unflatten(-1, (H, D)).permute(1, 2, 0))
        return m.o(join((scores / D**0.5).softmax(-1) @ v))

    m = Written(forward, **four(r=linear(C, 10), table=nn.Buffer(torch.randn(T, 10))))
    return m, truth_of_four(m)


@case
def scores_of_the_layer_before():
    def forward(m, x):
        scores = 0
        for layer in (m.first, m.second):
            q, k, v = (split(f(x)) for f in (layer["q"], layer["k"], layer["v"]))
            scores = q @ k.mT / D**0.5 + scores
            x = x + layer["o"](join(scores.softmax(-1) @ v))
        return x

    m = Written(forward, first=nn.ModuleDict(four()), second=nn.ModuleDict(four()))
    return m, [truth_of_four(Written(forward, **dict(layer.items()))) for layer in (m.first, m.second)]


@case
def windows():
    def forward(m, x):
        q, k, v = (split(f(x).unflatten(1, (2, 4)).flatten(0, 1)) for f in (m.q, m.k, m.v))
        return m.o(join(attend(q, k, v)).unflatten(0, (-1, 2)).flatten(1, 2))

    m = Written(forward, **four())
    return m, truth_of_four(m), torch.randn(B, 8, C)


@case
def keys_with_a_learned_sink():
    def forward(m, x):
        q, k, v = (split(f(x)) for f in (m.q, m.k, m.v))
        scores = torch.cat([q @ k.mT / D**0.5, m.sink.view(1, H, 1, 1).expand(B, H, T, 1)], -1)
        return m.o(join(scores.softmax(-1)[..., :-1] @ v))

    m = Written(forward, **four(sink=nn.Parameter(torch.randn(H))))
    return m, truth_of_four(m)


@case
def written_into_a_cache():
    def forward(m, x):
        k, v = (torch.zeros(B, H, 10, D) for _ in range(2))
        k[:, :, :T], v[:, :, :T] = split(m.k(x)), split(m.v(x))
        return m.o(join(attend(split(m.q(x)), k[:, :, :T], v[:, :, :T])))

    m = Written(forward, **four())
    return m, truth_of_four(m)


@case
def chunks_of_queries():
    def forward(m, x):
        q, k, v = (split(f(x)) for f in (m.q, m.k, m.v))
        return m.o(join(torch.cat([attend(one, k, v) for one in q.split(3, 2)], 2)))

    m = Written(forward, **four())
    return m, truth_of_four(m)


@case
def one_softmax_for_values_in_a_loop():
    def forward(m, x):
        q, k, v = (split(f(x)) for f in (m.q, m.k, m.v))
        weights, out = (q @ k.mT / D**0.5).softmax(-1), torch.zeros(B, T, C)
        for head in range(H):
            out[..., head * D : (head + 1) * D] = weights[:, head] @ v[:, head]
        return m.o(out)

    m = Written(forward, **four())
    return m, truth_of_four(m)


@case
def softmax_of_exponentials():
    def forward(m, x):
        q, k, v = (split(f(x)) for f in (m.q, m.k, m.v))
        scores = q @ k.mT / D**0.5
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return m.o(join(weights / weights.sum(-1, keepdim=True) @ v))

    m = Written(forward, **four())
    return m, truth_of_four(m)


@case
def exponentials_of_a_log_softmax():
    def forward(m, x):
        q, k, v = (split(f(x)) for f in (m.q, m.k, m.v))
        return m.o(join((q @ k.mT / D**0.5).log_softmax(-1).exp() @ v))

    m = Written(forward, **four())
    return m, truth_of_four(m)


@case
def products_written_as_sums():
    def forward(m, x):
        q, k, v = (split(f(x)) for f in (m.q, m.k, m.v))
        weights = ((q[:, :, :, None] * k[:, :, None]).sum(-1) / D**0.5).softmax(-1)
        return m.o(join((weights[..., None] * v[:, :, None]).sum(3)))

    m = Written(forward, **four())
    return m, truth_of_four(m)


@case
def keys_first():
    def forward(m, x):
        q, k, v = (split(f(x)) for f in (m.q, m.k, m.v))
        weights = (k @ q.mT / D**0.5).softmax(-2)
        return m.o(join((v.mT @ weights).mT))

    m = Written(forward, **four())
    return m, truth_of_four(m)


@case
def a_layer_that_runs_twice():
    m = Written(lambda m, x: m.a(m.a(x)), a=separate_and_fused().module)
    return m, truth_of_four(m.a)


@case
def gated_heads():
    m = Written(
        lambda m, x: m.o(join(attend(*(split(f(x)) for f in (m.q, m.k, m.v)))) * m.g(x).sigmoid()), **four(g=linear())
    )
    return m, truth_of_four(m)


@case
def cross_attention():
    m = Written(
        lambda m, x, y: m.o(join(attend(split(m.q(x)), split(m.k(y)), split(m.v(y))))),
        **four(k=linear(C, 9), v=linear(C, 9)),
    )
    return m, truth_of_four(m), torch.randn(B, T, C), torch.randn(B, 5, 9)


@case
def two_streams_of_tokens():
    def forward(m, x, y):
        q, k, v = (torch.cat([split(a[n](x)), split(b[n](y))], 2) for n, a, b in ((n, m.one, m.two) for n in "qkv"))
        out = join(attend(q, k, v))
        return torch.cat([m.one["o"](out[:, :T]), m.two["o"](out[:, T:])], 1)

    m = Written(forward, one=nn.ModuleDict(four()), two=nn.ModuleDict(four()))
    truths = [truth_of_four(Written(forward, **dict(part.items()))) for part in (m.one, m.two)]
    return m, truths, torch.randn(B, T, C), torch.randn(B, 5, C)


# sums and products


@case
def low_rank_updates():
    def forward(m, x):
        k = m.k(x) + 0.5 * m.b(m.a(F.dropout(x, 0.1)))
        return m.o(join(attend(split(m.q(x)), split(k), split(m.v(x)))))

    m = Written(forward, **four(a=linear(3, C, bias=False), b=linear(C, 3, bias=False)))
    return m, truth_of_four(m) | {"key": heads(m.k.weight + 0.5 * m.b.weight @ m.a.weight)}


@case
def low_rank_updates_of_a_part_in_place():
    def forward(m, x):
        qkv = m.qkv(x)
        qkv[..., :C] += m.b(m.a(x))
        return m.o(join(attend(*(split(one) for one in qkv.chunk(3, -1)))))

    m = Written(forward, qkv=linear(3 * C), a=linear(3, C, bias=False), b=linear(C, 3, bias=False), o=linear())
    q, k, v = (heads(one) for one in m.qkv.weight.chunk(3))
    return m, {"query": q + heads(m.b.weight @ m.a.weight), "key": k, "value": v, "output": columns(m.o.weight)}


@case
def latents():
    def forward(m, x):
        latent = m.n(m.down(x))
        return m.o(join(attend(split(m.q(x)), split(m.k(latent)), split(m.v(latent)))))

    m = Written(forward, **four(k=linear(C, 5), v=linear(C, 5), down=linear(5), n=nn.RMSNorm(5)))
    nn.init.uniform_(m.n.weight)
    k, v = (heads((f.weight * m.n.weight) @ m.down.weight) for f in (m.k, m.v))
    return m, truth_of_four(m) | {"key": k, "value": v}


@case
def latents_with_a_rotary_part_that_heads_share():
    def forward(m, x):
        latent, shared = m.down(x).split([5, 2], -1)
        k = torch.cat([split(m.k(latent)), rotated(shared)[:, None].expand(B, H, T, 2)], -1)
        q = split(m.q(x))
        return m.o(join(attend(torch.cat([q[..., :D], rotated(q[..., D:])], -1), k, split(m.v(latent)))))

    m = Written(forward, q=linear(H * (D + 2)), k=linear(C, 5), v=linear(C, 5), down=linear(7), o=linear())
    k, v = (heads(f.weight @ m.down.weight[:5]) for f in (m.k, m.v))
    return m, {"query": heads(m.q.weight)[:, :D], "key": k, "value": v, "output": columns(m.o.weight)}


@case
def torchs_own_attention():
    m = Written(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(C, H, batch_first=True))
    q, k, v = (heads(one) for one in m.a.in_proj_weight.chunk(3))
    return m, {"query": q, "key": k, "value": v, "output": columns(m.a.out_proj.weight)}


@case
def torchs_own_layer_in_evaluation():
    m = Written(lambda m, x: m.a(x), a=nn.TransformerEncoderLayer(C, H, 32, batch_first=True)).eval()
    q, k, v = (heads(one) for one in m.a.self_attn.in_proj_weight.chunk(3))
    return m, {"query": q, "key": k, "value": v, "output": columns(m.a.self_attn.out_proj.weight)}


# what is refused: a reason, as a pattern

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


@refused("computed from `k.weight` by mul")
def a_weight_that_is_computed():
    def forward(m, x):
        k = F.linear(x, m.k.weight * m.s[:, None])
        return m.o(join(attend(split(m.q(x)), split(k), split(m.v(x)))))

    return Written(forward, **four(s=nn.Parameter(torch.randn(C))))


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


@torch.library.custom_op("by_hand::own_operation", mutates_args=())
def own_operation(x: Tensor) -> Tensor:
    return x + 1


@torch.library.custom_op("by_hand::own_attention", mutates_args=())
def own_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v
