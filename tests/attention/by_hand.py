"""Attention as people write it, each in a few lines, with the weights of its heads by construction.

Each function builds a module and says what is true of it: role -> ``(heads, width, features)``, of the output
``(heads, width, features)`` of its columns. All sizes differ, so that none is mixed up.
"""

from __future__ import annotations

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


def between(attention: Callable[..., Tensor], **more: Any) -> Written:
    """Four maps, with a function of the heads' queries, keys and values between them: ``(m, q, k, v)``."""

    def forward(m, x):
        q, k, v = (split(f(x)) for f in (m.q, m.k, m.v))
        return m.o(join(attention(m, q, k, v)))

    return Written(forward, **four(**more))


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
def exponentials_with_a_mask_before_their_sum():
    def attention(m, q, k, v):
        scores = q @ k.mT / D**0.5
        weights = (scores - scores.max(-1, keepdim=True).values).exp() * torch.ones(T, T).tril()
        return (F.dropout(weights, 0.1, m.training) @ v) / (weights.sum(-1, keepdim=True) + 1e-9)

    m = between(attention)
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
    truth = {"query": heads(m.q.weight)[:, :D], "key": k, "value": v, "output": columns(m.o.weight)}
    return m, truth | {"notes": "features of queries that meet no keys of heads"}


# further forms of the same


@case
def maps_from_the_left():
    def forward(m, x):
        q, k, v = ((w @ x.mT).unflatten(1, (H, D)).mT for w in (m.q, m.k, m.v))
        return m.o(join(attend(q, k, v)))

    m = Written(forward, **{name: nn.Parameter(torch.randn(C, C)) for name in "qkv"}, o=linear())
    return m, {"query": heads(m.q), "key": heads(m.k), "value": heads(m.v), "output": columns(m.o.weight)}


@case
def weights_that_are_put_together_for_one_product():
    def forward(m, x):
        q, k, v = (split(one) for one in F.linear(x, torch.cat([m.q.weight, m.k.weight, m.v.weight])).chunk(3, -1))
        return m.o(join(attend(q, k, v)))

    m = Written(forward, **four())
    return m, truth_of_four(m)


@case
def columns_in_another_order():
    def forward(m, x):
        k = F.linear(x, m.k.weight[:, m.at])
        return m.o(join(attend(split(m.q(x)), split(k), split(m.v(x)))))

    m = Written(forward, **four(at=nn.Buffer(torch.randperm(C))))
    return m, truth_of_four(m) | {"key": heads(m.k.weight[:, m.at])}


@case
def a_weight_that_is_written_in_parts():
    def forward(m, x):
        weight = torch.empty(C, C)
        weight[: C // 2], weight[C // 2 :] = m.k.weight[C // 2 :], m.k.weight[: C // 2]
        return m.o(join(attend(split(m.q(x)), split(x @ weight.T), split(m.v(x)))))

    m = Written(forward, **four())
    return m, truth_of_four(m) | {"key": heads(m.k.weight.roll(C // 2, 0))}


@case
def rows_that_are_chosen_by_numbers():
    def forward(m, x):
        q, k, v = (split(F.linear(x, m.w[at])) for at in m.at)
        return m.o(join(attend(q, k, v)))

    m = Written(forward, w=nn.Parameter(torch.randn(100, C)), at=nn.Buffer(torch.randperm(100)[:72].view(3, C)),
                o=linear())  # fmt: skip
    q, k, v = (heads(m.w[at]) for at in m.at)
    return m, {"query": q, "key": k, "value": v, "output": columns(m.o.weight)}


@case
def one_query_that_asks_all_tokens():
    def forward(m, x):
        q, k, v = split(m.q(x[:, :1])), split(m.k(x)), split(m.v(x))
        weights = ((q * k).sum(-1) / D**0.5).softmax(-1)
        return m.o((weights[..., None] * v).sum(2).flatten(1))

    m = Written(forward, **four())
    return m, truth_of_four(m)


@case
def one_vector_asks():
    def forward(m, x):
        k, v = m.k(x), m.v(x)
        return m.o((k @ m.q(x.mean(0)) / D**0.5).softmax(0) @ v)

    m = Written(forward, q=linear(D), k=linear(D), v=linear(D), o=linear(C, D))
    truth = {role: one.weight[None] for role, one in (("query", m.q), ("key", m.k), ("value", m.v))}
    return m, truth | {"output": m.o.weight.mT[None]}, torch.randn(T, C)


@case
def heads_among_the_queries_of_one_key_head():
    def forward(m, x):
        q = m.q(x).unflatten(-1, (H, D)).flatten(1, 2)
        return m.o(attend(q, m.k(x), m.v(x)).unflatten(1, (T, H)).flatten(2))

    m = Written(forward, q=linear(), k=linear(D), v=linear(D), o=linear())
    truth = {"query": heads(m.q.weight), "key": m.k.weight[None], "value": m.v.weight[None]}
    return m, truth | {"output": columns(m.o.weight), "key_of": (0, 0, 0, 0)}


@case
def heads_before_sequences():
    def forward(m, x):
        q, k, v = (torch.cat(f(x).chunk(H, -1)) for f in (m.q, m.k, m.v))
        return m.o(torch.cat(attend(q, k, v).chunk(H), -1))

    m = Written(forward, **four())
    return m, truth_of_four(m)


@case
def tokens_before_sequences():
    def forward(m, x):
        q, k, v = (f(x).view(T, B * H, D).transpose(0, 1) for f in (m.q, m.k, m.v))
        return m.o(attend(q, k, v).transpose(0, 1).reshape(T, B, C))

    m = Written(forward, **four())
    return m, truth_of_four(m), torch.randn(T, B, C)


@case
def grouped_keys_in_the_kernel():
    def forward(m, x):
        q, k, v = split(m.q(x)), split(m.k(x), 2), split(m.v(x), 2)
        return m.o(join(F.scaled_dot_product_attention(q, k, v, enable_gqa=True)))

    m = Written(forward, q=linear(), k=linear(2 * D), v=linear(2 * D), o=linear())
    return m, truth_of_four(m) | {"key": heads(m.k.weight, 2), "value": heads(m.v.weight, 2), "key_of": (0, 0, 1, 1)}


@case
def grouped_queries_in_a_dimension_of_their_own():
    def forward(m, x):
        q, k, v = m.q(x).view(B, T, 2, 2, D), m.k(x).view(B, T, 2, D), m.v(x).view(B, T, 2, D)
        weights = (torch.einsum("bqgrd,bkgd->bgrqk", q, k) / D**0.5).softmax(-1)
        return m.o(torch.einsum("bgrqk,bkgd->bqgrd", weights, v).flatten(2))

    m = Written(forward, q=linear(), k=linear(2 * D), v=linear(2 * D), o=linear())
    return m, truth_of_four(m) | {"key": heads(m.k.weight, 2), "value": heads(m.v.weight, 2), "key_of": (0, 0, 1, 1)}


@case
def values_that_are_the_keys():
    m = Written(lambda m, x: m.o(join(attend(split(m.q(x)), split(m.k(x)), split(m.k(x))))),
                q=linear(), k=linear(), o=linear())  # fmt: skip
    key = heads(m.k.weight)
    return m, {"query": heads(m.q.weight), "key": key, "value": key, "output": columns(m.o.weight)}


@case
def learned_queries():
    m = Written(lambda m, x: m.o(join(attend(split(m.q(m.seeds).expand(B, -1, -1)), split(m.k(x)), split(m.v(x))))),
                **four(seeds=nn.Parameter(torch.randn(1, 3, C))))  # fmt: skip
    return m, truth_of_four(m)


# further things between maps and scores


@case
def keys_turned_by_a_constant_matrix():
    m = between(lambda m, q, k, v: attend(q, k @ m.turn, v), turn=nn.Buffer(torch.linalg.qr(torch.randn(D, D))[0]))
    return m, truth_of_four(m)


@case
def keys_pooled_by_a_constant_matrix():
    m = between(lambda m, q, k, v: attend(q, m.p @ k, m.p @ v), p=nn.Buffer(torch.rand(3, T)))
    return m, truth_of_four(m)


@case
def keys_pooled_by_torch():
    def pooled(x):
        return F.avg_pool1d(x.flatten(0, 1).mT, 2).mT.unflatten(0, (B, H))

    m = between(lambda m, q, k, v: attend(q, pooled(k), pooled(v)))
    return m, truth_of_four(m)


@case
def keys_of_the_token_before_too():
    m = between(lambda m, q, k, v: attend(q, k + 0.5 * k.roll(1, 2), v))
    return m, truth_of_four(m)


@case
def keys_padded_in_front():
    m = between(lambda m, q, k, v: attend(q, F.pad(k, (0, 0, 2, 0)), F.pad(v, (0, 0, 2, 0))))
    return m, truth_of_four(m)


@case
def keys_of_chosen_tokens():
    m = between(lambda m, q, k, v: attend(q, k[:, :, m.at], v[:, :, m.at]), at=nn.Buffer(torch.tensor([5, 1, 2])))
    return m, truth_of_four(m)


@case
def a_filter_over_tokens_behind_the_maps():
    def forward(m, x):
        k, v = (split(m.f(one(x).mT).mT) for one in (m.k, m.v))
        return m.o(join(attend(split(m.q(x)), k, v)))

    m = Written(forward, **four(f=nn.Conv1d(C, C, 3, padding=1, groups=C)))
    return m, truth_of_four(m)


@case
def layer_norms_of_heads():
    m = between(lambda m, q, k, v: attend(m.n(q), m.n(k), v), n=nn.LayerNorm(D))
    return m, truth_of_four(m) | {"normed": {"query", "key"}}


@case
def layer_norms_of_all_heads():
    m = Written(lambda m, x: m.o(join(attend(split(m.n(m.q(x))), split(m.n(m.k(x))), split(m.v(x))))),
                **four(n=nn.LayerNorm(C)))  # fmt: skip
    return m, truth_of_four(m) | {"normed": {"query", "key"}}


@case
def layer_norms_written_out():
    def normed(x):
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    m = between(lambda m, q, k, v: attend(normed(q), normed(k), v))
    return m, truth_of_four(m) | {"normed": {"query", "key"}}


@case
def cosines():
    m = between(lambda m, q, k, v: attend(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v))
    return m, truth_of_four(m) | {"normed": {"query", "key"}}


@case
def keys_behind_an_activation():
    m = between(lambda m, q, k, v: attend(q, F.silu(k), v))
    return m, truth_of_four(m) | {"notes": "silu, through which its key passes"}


@case
def keys_of_a_filter_over_tokens():
    m = Written(lambda m, x: m.o(join(attend(split(m.q(x)), split(m.k(x.mT).mT), split(m.v(x))))),
                **four(k=nn.Conv1d(C, C, 3, padding=1)))  # fmt: skip
    truth = truth_of_four(Written(lambda m: m, q=m.q, k=m.q, v=m.v, o=m.o))
    return m, truth | {"key": heads(m.k.weight.flatten(1)), "notes": "its key is a filter over several tokens"}


@case
def positions_in_the_keys():
    def forward(m, x):
        k = m.k(x) + m.p(m.table)
        return m.o(join(attend(split(m.q(x)), split(k), split(m.v(x)))))

    m = Written(forward, **four(p=linear(C, 9), table=nn.Buffer(torch.randn(T, 9))))
    return m, truth_of_four(m)


@case
def a_gain_behind_the_keys():
    m = between(lambda m, q, k, v: attend(q, k * m.g, v), g=nn.Parameter(torch.randn(D)))
    return m, truth_of_four(m) | {"notes": "a gain with which its key is multiplied"}


@case
def a_gate_of_the_keys():
    def forward(m, x):
        return m.o(join(attend(split(m.q(x)), split(m.k(x) * m.g(x).sigmoid()), split(m.v(x)))))

    m = Written(forward, **four(g=linear()))
    return m, truth_of_four(m) | {"notes": "a gate with which its key is multiplied"}


@case
def two_values_of_one_parameter():
    def attention(m, q, k, v):
        weights = (q @ k.mT / D**0.5).softmax(-1)
        return weights @ v[..., :D] + weights @ v[..., D:]

    m = between(attention, v=linear(2 * C))
    value = heads(m.v.weight)[:, :D]
    return m, truth_of_four(m) | {"value": value, "notes": "further values that its weights are multiplied with"}


@case
def two_values_of_two_parameters():
    def forward(m, x):
        weights = (split(m.q(x)) @ split(m.k(x)).mT / D**0.5).softmax(-1)
        return m.o(join(weights @ split(m.v(x)))) + join(weights @ split(m.w(x)))

    m = Written(forward, **four(w=linear()))
    return m, truth_of_four(m) | {"notes": "further values that its weights are multiplied with"}


@case
def a_value_map_that_is_a_sum():
    m = Written(lambda m, x: m.o(join(attend(split(m.q(x)), split(m.k(x)), split(m.v(x) + m.w(x))))),
                **four(w=linear()))  # fmt: skip
    return m, truth_of_four(m) | {"value": heads(m.v.weight + m.w.weight)}


# further softmaxes


@case
def scores_changed_in_place():
    def attention(m, q, k, v):
        scores = q @ k.mT
        scores *= D**-0.5
        scores.masked_fill_(torch.ones(T, T, dtype=torch.bool).triu(1), -1e9)
        return scores.softmax(-1) @ v

    m = between(attention)
    return m, truth_of_four(m)


@case
def exponentials_less_their_logarithm():
    def attention(m, q, k, v):
        scores = q @ k.mT / D**0.5
        return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v

    m = between(attention)
    return m, truth_of_four(m)


@case
def products_added_to_a_mask():
    def attention(m, q, k, v):
        mask = torch.full((T, T), -1e9).triu(1).expand(B * H, T, T)
        scores = torch.baddbmm(mask, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=D**-0.5)
        return (scores.softmax(-1) @ v.flatten(0, 1)).unflatten(0, (B, H))

    m = between(attention)
    return m, truth_of_four(m)


@case
def scores_below_a_cap():
    m = between(lambda m, q, k, v: (5 * (q @ k.mT / 5).tanh()).softmax(-1) @ v)
    return m, truth_of_four(m)


@case
def a_temperature_for_each_head():
    m = between(lambda m, q, k, v: (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * m.t.exp()).softmax(-1) @ v,
                t=nn.Parameter(torch.randn(H, 1, 1)))  # fmt: skip
    return m, truth_of_four(m) | {"normed": {"query", "key"}}


@case
def a_softmax_with_one_more_in_its_sum():
    def attention(m, q, k, v):
        weights = (q @ k.mT / D**0.5).exp()
        return weights / (1 + weights.sum(-1, keepdim=True)) @ v

    m = between(attention)
    return m, truth_of_four(m)


@case
def a_hard_choice_behind_a_softmax():
    m = between(lambda m, q, k, v: F.gumbel_softmax(q @ k.mT, hard=True) @ v)
    return m, truth_of_four(m) | {"notes": "a choice among its weights behind the softmax"}


@case
def keys_in_blocks_with_a_running_sum():
    def attention(m, q, k, v):
        weights = [(q @ one.mT / D**0.5).exp() for one in k.split(4, 2)]
        top = sum(weight @ one for weight, one in zip(weights, v.split(4, 2)))
        return top / sum(weight.sum(-1, keepdim=True) for weight in weights)

    m = between(attention)
    return m, truth_of_four(m)


@case
def values_in_two_halves():
    def attention(m, q, k, v):
        weights = (q @ k.mT / D**0.5).softmax(-1)
        return torch.cat([weights @ one for one in v.chunk(2, -1)], -1)

    m = between(attention)
    first = {"value": heads(m.v.weight)[:, : D // 2], "output": columns(m.o.weight)[:, : D // 2]}
    return m, truth_of_four(m) | first | {"notes": "further values that its weights are multiplied with"}


@case
def memories_beside_the_keys():
    def attention(m, q, k, v):
        k, v = (torch.cat([one.expand(B, -1, -1, -1), of], 2) for one, of in ((m.mk, k), (m.mv, v)))
        return attend(q, k, v)

    m = between(attention, mk=nn.Parameter(torch.randn(H, 3, D)), mv=nn.Parameter(torch.randn(H, 3, D)))
    return m, truth_of_four(m)


@case
def a_router_beside_attention():
    def forward(m, x):
        x = m.o(join(attend(*(split(f(x)) for f in (m.q, m.k, m.v)))))
        return sum(m.r(x).softmax(-1)[..., i, None] * m.e[i](x) for i in range(2))

    m = Written(forward, **four(r=linear(2), e=nn.ModuleList([linear(), linear()])))
    return m, truth_of_four(m)


@case
def hard_choices_with_soft_gradients():
    def attention(m, q, k, v):
        soft = (q @ k.mT / D**0.5).softmax(-1)
        hard = F.one_hot(soft.argmax(-1), T).float()
        return (hard - soft.detach() + soft) @ v

    m = between(attention)
    return m, truth_of_four(m)


# further outputs


@case
def heads_that_are_averaged():
    m = Written(lambda m, x: m.o(attend(*(split(f(x)) for f in (m.q, m.k, m.v))).mean(1)), **four(o=linear(C, D)))
    truth = {role: heads(one.weight) for role, one in (("query", m.q), ("key", m.k), ("value", m.v))}
    return m, truth | {"notes": "the output projection"}


@case
def an_output_that_is_a_filter():
    m = Written(lambda m, x: m.o(join(attend(*(split(f(x)) for f in (m.q, m.k, m.v)))).mT).mT,
                **four(o=nn.Conv1d(C, C, 3, padding=1)))  # fmt: skip
    truth = {role: heads(one.weight) for role, one in (("query", m.q), ("key", m.k), ("value", m.v))}
    return m, truth | {"notes": "the output projection"}


@case
def no_output_map():
    m = Written(lambda m, x: x + join(attend(*(split(f(x)) for f in (m.q, m.k, m.v)))), **four())
    truth = {role: heads(one.weight) for role, one in (("query", m.q), ("key", m.k), ("value", m.v))}
    return m, truth | {"notes": "the output projection"}


@case
def values_added_before_the_output():
    m = between(lambda m, q, k, v: attend(q, k, v) + v)
    return m, truth_of_four(m)


@case
def norms_of_what_heads_give():
    m = between(lambda m, q, k, v: m.n(attend(q, k, v)), n=nn.RMSNorm(D))
    return m, truth_of_four(m)


# further sums and products


@case
def latents_of_each_head():
    def forward(m, x):
        keys = torch.stack([up(down(x)) for up, down in zip(m.up, m.down)], 1)
        return m.o(join(attend(split(m.q(x)), keys, split(m.v(x)))))

    m = Written(forward, q=linear(), v=linear(), o=linear(), up=nn.ModuleList(linear(D, 3) for _ in range(H)),
                down=nn.ModuleList(linear(3) for _ in range(H)))  # fmt: skip
    key = torch.stack([up.weight @ down.weight for up, down in zip(m.up, m.down)])
    return m, {"query": heads(m.q.weight), "key": key, "value": heads(m.v.weight), "output": columns(m.o.weight)}


@case
def latents_of_queries_too():
    def forward(m, x):
        latent = m.down(x)
        return m.o(join(attend(split(m.q(m.n(m.dq(x)))), split(m.k(latent)), split(m.v(latent)))))

    m = Written(forward, q=linear(C, 4), k=linear(C, 5), v=linear(C, 5), dq=linear(4), down=linear(5), n=nn.RMSNorm(4),
                o=linear())  # fmt: skip
    return m, {"query": heads(m.q.weight @ m.dq.weight), "key": heads(m.k.weight @ m.down.weight),
               "value": heads(m.v.weight @ m.down.weight), "output": columns(m.o.weight)}  # fmt: skip


@case
def two_low_rank_updates():
    def forward(m, x):
        k = m.k(x) + 2 * m.b(m.a(x)) - m.d(m.c(x)) / 4
        return m.o(join(attend(split(m.q(x)), split(k), split(m.v(x)))))

    m = Written(forward, **four(a=linear(3), b=linear(C, 3), c=linear(2), d=linear(C, 2)))
    return m, truth_of_four(m) | {"key": heads(m.k.weight + 2 * m.b.weight @ m.a.weight - m.d.weight @ m.c.weight / 4)}


@case
def low_rank_updates_of_the_output():
    def forward(m, x):
        y = join(attend(*(split(f(x)) for f in (m.q, m.k, m.v))))
        return m.o(y) + 0.5 * m.b(m.a(y))

    m = Written(forward, **four(a=linear(3), b=linear(C, 3)))
    return m, truth_of_four(m) | {"output": columns(m.o.weight + 0.5 * m.b.weight @ m.a.weight)}


@case
def an_update_that_the_parent_hands_over():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (linear() for _ in "qkvo")

        def forward(self, x, more):
            return self.o(join(attend(split(self.q(x)), split(self.k(x) + more(x)), split(self.v(x)))))

    m = Written(lambda m, x: m.a(x, m.up), a=Inner(), up=linear())
    return m, truth_of_four(m.a) | {"key": heads(m.a.k.weight + m.up.weight)}


@case
def parametrized_weights():
    m = between(lambda m, q, k, v: attend(q, k, v))
    nn.utils.parametrizations.weight_norm(m.k)
    return m, truth_of_four(m)


# torch's own


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
