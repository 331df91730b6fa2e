"""Separate projections: every way to split them, what they are called, what they are given."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, split
from tests.attention.wild.truth import MODEL, WIDTH, Core, H, case, rows, separate


class Four(nn.Module):
    """Four maps and nothing else."""

    def __init__(self, q: int = MODEL, k: int = MODEL, v: int = MODEL, o: int = MODEL) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(MODEL, q), nn.Linear(MODEL, k), nn.Linear(MODEL, v)
        self.o = nn.Linear(o, MODEL)


@case(separate())
class Plain(Four):
    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = (m(x).view(B, N, H, WIDTH).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))


@case(separate())
class CausalByMask(Four):
    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (m(x).view(B, T, H, C // H).transpose(1, 2) for m in (self.q, self.k, self.v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
        att = att.masked_fill(torch.tril(torch.ones(T, T, device=x.device)) == 0, float("-inf"))
        att = F.dropout(F.softmax(att, dim=-1), 0.1, self.training)
        return self.o((att @ v).transpose(1, 2).contiguous().view(B, T, C))


@case(separate())
class CausalByFlag(Four):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        return self.o(join(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


@case(separate(pattern="(d h) c"))
class Strided(Four):
    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = (m(x).view(B, N, C // H, H).permute(0, 3, 1, 2) for m in (self.q, self.k, self.v))
        return self.o(attend(q, k, v).permute(0, 2, 3, 1).reshape(B, N, C))


@case(
    Core(rows("q.weight", "(d h) c"), rows("k.weight", "(d h) c"), rows("v.weight"), rows("o.weight", "c (h d)")),
)
class KeysStridedValuesNot(Four):
    def forward(self, x: Tensor) -> Tensor:
        q, k = (rearrange(m(x), "b n (d h) -> b h n d", h=H) for m in (self.q, self.k))
        v = rearrange(self.v(x), "b n (h d) -> b h n d", h=H)
        return self.o(rearrange(attend(q, k, v), "b h n d -> b n (h d)"))


@case(separate("to_q", "to_k", "to_v", "to_out"))
class Einops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(MODEL, MODEL, bias=False) for _ in range(3))
        self.to_out = nn.Linear(MODEL, MODEL)
        self.heads, self.scale = H, WIDTH**-0.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (rearrange(t(x), "b n (h d) -> b h n d", h=self.heads) for t in (self.to_q, self.to_k, self.to_v))
        sim = torch.einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        out = torch.einsum("b h i j, b h j d -> b h i d", sim.softmax(dim=-1), v)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


@case(separate("to_q", "to_k", "to_v", "to_out", "(d h) c"))
class EinopsStrided(Einops):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (rearrange(t(x), "b n (d h) -> b h n d", h=self.heads) for t in (self.to_q, self.to_k, self.to_v))
        return self.to_out(rearrange(attend(q, k, v), "b h n d -> b n (d h)"))


@case(separate())
class EinsumOverLetters(Four):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (H, WIDTH)) for m in (self.q, self.k, self.v))
        weights = torch.softmax(torch.einsum("bnhd,bmhd->bhnm", q, k) / WIDTH**0.5, -1)
        return self.o(torch.einsum("bhnm,bmhd->bnhd", weights, v).flatten(-2))


@case(separate(scores="b q k h"))
class HeadsLast(Four):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (H, WIDTH)) for m in (self.q, self.k, self.v))
        weights = torch.einsum("bnhd,bmhd->bnmh", q, k).div(WIDTH**0.5).softmax(2)
        return self.o(torch.einsum("bnmh,bmhd->bnhd", weights, v).flatten(-2))


@case(separate(scores="b h k q"))
class KeysBeforeQueries(Four):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        weights = F.softmax(k @ q.mT / WIDTH**0.5, dim=-2)
        return self.o(join(weights.mT @ v))


@case(separate(scores="h b q k"))
class HeadsFirst(Four):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (rearrange(m(x), "b n (h d) -> h b n d", h=H) for m in (self.q, self.k, self.v))
        return self.o(rearrange(attend(q, k, v), "h b n d -> b n (h d)"))


@case(separate())
class StackOfChunks(Four):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.stack(m(x).chunk(H, dim=-1), dim=1) for m in (self.q, self.k, self.v))
        return self.o(torch.cat(attend(q, k, v).unbind(1), dim=-1))


@case(separate(scores="(h b) q k"))
class HeadsInFrontOfTheBatch(Four):
    """As in many re-implementations of the transformer in TensorFlow's manner."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.cat(m(x).split(WIDTH, dim=2), dim=0) for m in (self.q, self.k, self.v))
        weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) / WIDTH**0.5, dim=2)
        return self.o(torch.cat(torch.bmm(weights, v).split(x.shape[0], dim=0), dim=2))


@case(separate(scores="(b h) q k"))
class HeadsInTheBatch(Four):
    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape

        def shape(t: Tensor) -> Tensor:
            return t.view(B, N, H, WIDTH).transpose(1, 2).contiguous().view(B * H, N, WIDTH)

        q, k, v = shape(self.q(x)), shape(self.k(x)), shape(self.v(x))
        out = torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)) / WIDTH**0.5, dim=-1), v)
        return self.o(out.view(B, H, N, WIDTH).transpose(1, 2).reshape(B, N, C))


@case(separate(scores="(b h) q k"), inputs=("n b c",))
class LengthFirst(Four):
    def forward(self, x: Tensor) -> Tensor:
        N, B, C = x.shape
        q, k, v = (m(x).contiguous().view(N, B * H, WIDTH).transpose(0, 1) for m in (self.q, self.k, self.v))
        return self.o(attend(q, k, v).transpose(0, 1).contiguous().view(N, B, C))


@case(separate(loop=True))
class LoopOverHeads(Four):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        outputs = []
        for h in range(H):
            at = slice(h * WIDTH, (h + 1) * WIDTH)
            weights = F.softmax(q[..., at] @ k[..., at].transpose(1, 2) / WIDTH**0.5, dim=-1)
            outputs.append(weights @ v[..., at])
        return self.o(torch.cat(outputs, -1))


@case(separate(loop=True))
class LoopOverChunks(Four):
    def forward(self, x: Tensor) -> Tensor:
        heads = zip(self.q(x).chunk(H, -1), self.k(x).chunk(H, -1), self.v(x).chunk(H, -1))
        return self.o(torch.cat([F.scaled_dot_product_attention(*head) for head in heads], -1))


def _of_each(name: str, pattern: str = "d c", heads: int = H) -> tuple[Any, ...]:
    return tuple(rows(name.format(i), pattern, h=1) for i in range(heads))


_BY_HEAD = Core(
    _of_each("q.{}.weight"), _of_each("k.{}.weight"), _of_each("v.{}.weight"), rows("o.weight", "c (h d)"), loop=True
)


@case(_BY_HEAD)
class LinearForEachHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.ModuleList(nn.Linear(MODEL, WIDTH) for _ in range(H)) for _ in range(3))
        self.o = nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        out = [attend(q(x), k(x), v(x)) for q, k, v in zip(self.q, self.k, self.v)]
        return self.o(torch.cat(out, dim=-1))


@case(
    Core(
        _of_each("q.{}.weight"), _of_each("k.{}.weight"), _of_each("v.{}.weight"), rows("o.weight", "c (h d)")
    )
)  # fmt: skip
class LinearForEachHeadStacked(LinearForEachHead):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.stack([m(x) for m in maps], 1) for maps in (self.q, self.k, self.v))
        return self.o(join(attend(q, k, v)))


class OneHead(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(MODEL, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        wei = self.query(x) @ self.key(x).transpose(-2, -1) * WIDTH**-0.5
        wei = wei.masked_fill(torch.ones_like(wei, dtype=torch.bool).triu(1), float("-inf"))
        return F.softmax(wei, dim=-1) @ self.value(x)


_TUTORIAL = Core(
    _of_each("heads.{}.query.weight"), _of_each("heads.{}.key.weight"), _of_each("heads.{}.value.weight"),
    rows("proj.weight", "c (h d)"), loop=True,
)  # fmt: skip


@case(_TUTORIAL, may_refuse="one head|single head|each head|in modules")
class ModuleForEachHead(nn.Module):
    """Heads as in the best known tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([OneHead() for _ in range(H)])
        self.proj = nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([h(x) for h in self.heads], dim=-1))


def _of_modules(name: str, heads: int = H) -> Core:
    return Core(
        *(_of_each(f"{name}.{m}.weight", heads=heads) for m in ("query", "key", "value")),
        rows("proj.weight", "c (h d)", h=heads), heads=heads, loop=True,
    )  # fmt: skip


class _HeadModules(nn.Module):
    heads: Any

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.proj = nn.Linear(heads * WIDTH, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.all_heads()], dim=-1))

    def all_heads(self) -> list[Any]:
        return list(self.heads)


@case(_of_modules("heads.{}", 7))
class SevenHeadModules(_HeadModules):
    def __init__(self) -> None:
        super().__init__(7)
        self.heads = nn.ModuleList(OneHead() for _ in range(7))


@case(_of_modules("head_{}", 6))
class HeadModulesByName(_HeadModules):
    def __init__(self) -> None:
        super().__init__(6)
        for number in range(6):
            self.add_module(f"head_{number}", OneHead())

    def all_heads(self) -> list[Any]:
        return [self.get_submodule(f"head_{number}") for number in range(6)]


class _WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.dropout = OneHead(), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.attention(x))


@case(_of_modules("heads.{}.attention"))
class HeadModulesInModules(_HeadModules):
    def __init__(self) -> None:
        super().__init__(H)
        self.heads = nn.ModuleList(_WithDropout() for _ in range(H))


@case(_of_modules("heads.{}"), call=lambda m, x: m(SimpleNamespace(tokens=x)))
class HeadModulesOfAnObject(_HeadModules):
    def __init__(self) -> None:
        super().__init__(H)
        self.heads = nn.ModuleList(OneHead() for _ in range(H))

    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch.tokens)


@case(_of_modules("heads.{}.attention"), call=lambda m, x: m(SimpleNamespace(tokens=x)))
class HeadModulesInModulesOfAnObject(HeadModulesInModules):
    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch.tokens)


@case(_of_modules("head_{}", 6), call=lambda m, x: m(SimpleNamespace(tokens=x)))
class HeadModulesByNameOfAnObject(HeadModulesByName):
    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch.tokens)


@case(separate())
class HeadsOfOneFeature(Four):
    """As many heads as features, met by `torch.einsum`, which multiplies single features elementwise."""

    def __init__(self) -> None:
        super().__init__(H, H, H, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (H, 1)) for m in (self.q, self.k, self.v))
        weights = F.softmax(torch.einsum("blhe,bshe->bhls", q, k), -1)
        return self.o(torch.einsum("bhls,bshd->blhd", weights, v).flatten(2))


def _of_whole_width(heads: int) -> Core:
    roles = (tuple(rows(f"heads.{i}.{m}.weight", h=1) for i in range(heads)) for m in ("query", "key", "value"))
    return Core(*roles, None, loop=True, heads=heads)


@case(_of_whole_width(5))
class HeadModulesAveraged(nn.Module):
    """Each head gives tokens of the whole width, and the mean of the heads is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(OneHead(MODEL) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads]).mean(0)


@case(_of_whole_width(5))
class HeadModulesWeighedForEachToken(HeadModulesAveraged):
    """A router says how much of each head a token takes."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(MODEL, 5)

    def forward(self, x: Tensor) -> Tensor:
        given = torch.stack([head(x) for head in self.heads], -1)
        return (given * self.router(x).softmax(-1).unsqueeze(-2)).sum(-1)


@case(
    *(Core(*(rows(f"heads.{i}.{m}.weight", h=1) for m in ("query", "key", "value")), None, heads=1, number=i, loop=True)
      for i in range(H)),
    may_refuse="width",
)  # fmt: skip
class HeadModulesOfEveryWidth(_HeadModules):
    def __init__(self) -> None:
        super().__init__(H)
        self.heads = nn.ModuleList(OneHead(width) for width in (3, 4, 7, 10))


@case(Core(rows("q.weight"), rows("k.weight"), rows("v.weight"), None))
class NoOutputProjection(Four):
    def __init__(self) -> None:
        super().__init__()
        del self.o

    def forward(self, x: Tensor) -> Tensor:
        return join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x))))


_REVERSED = tuple(rows("o.weight", "c (j d)", n_j=H, h=1, j=H - 1 - i) for i in range(H))


@case(Core(rows("q.weight"), rows("k.weight"), rows("v.weight"), _REVERSED))
class OutputsReversed(Four):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x))).flip(1)))


@case(Core(rows("q.weight"), rows("k.weight"), rows("v.weight"), rows("o.weight", "c (h d)")))
class ValuesWider(Four):
    def __init__(self) -> None:
        super().__init__(v=H * 10, o=H * 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(Core(rows("q.weight"), rows("k.weight"), rows("v.weight"), rows("o.weight", "c (h d)")))
class HeadsNarrowerThanTheModel(Four):
    def __init__(self) -> None:
        super().__init__(q=H * 3, k=H * 3, v=H * 5, o=H * 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(Core(rows("q.weight"), rows("k.weight"), None, rows("o.weight", "c (h d)")), may_refuse="values are its inputs")
class ValuesAreTheInput(Four):
    def __init__(self) -> None:
        super().__init__()
        del self.v

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(x))))


@case(Core(None, rows("k.weight"), rows("v.weight"), rows("o.weight", "c (h d)")))
class QueriesAreTheInput(Four):
    def __init__(self) -> None:
        super().__init__()
        del self.q

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(x), split(self.k(x)), split(self.v(x)))))


@case(Core(rows("q.weight"), rows("q.weight"), rows("v.weight"), rows("o.weight", "c (h d)")))
class QueriesAreKeys(Four):
    def __init__(self) -> None:
        super().__init__()
        del self.k

    def forward(self, x: Tensor) -> Tensor:
        qk = split(self.q(x))
        return self.o(join(attend(qk, qk, split(self.v(x)))))


@case(Core(rows("q.weight"), rows("k.weight"), rows("k.weight"), rows("o.weight", "c (h d)")))
class ValuesAreKeys(Four):
    def __init__(self) -> None:
        super().__init__()
        del self.v

    def forward(self, x: Tensor) -> Tensor:
        k = split(self.k(x))
        return self.o(join(attend(split(self.q(x)), k, k)))


@case(Core(None, rows("k.weight"), rows("v.weight"), rows("o.weight", "c (h d)")))
class LearnedQueries(Four):
    def __init__(self) -> None:
        super().__init__()
        del self.q
        self.probe = nn.Parameter(torch.randn(1, H, 5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q = self.probe.expand(x.shape[0], -1, -1, -1)
        return self.o(join(attend(q, split(self.k(x)), split(self.v(x)))))


@case(separate())
class OptionalArguments(Four):
    def forward(
        self, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None, need_weights: bool = False
    ) -> Any:
        scores = split(self.q(x)) @ split(self.k(x)).mT / WIDTH**0.5
        if bias is not None:
            scores = scores + bias
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], -1e9)
        weights = scores.softmax(-1)
        out = self.o(join(weights @ split(self.v(x))))
        return (out, weights) if need_weights else (out, None)


@case(separate(), call=lambda m, x: m({"tokens": x}))
class TakesADict(Four):
    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x = batch["tokens"]
        return {"tokens": self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))}


@case(separate(pattern="(d h) c"), call=lambda m, x: m({"x": x, "mask": None}))
class TakesADictStrided(Four):
    def forward(self, batch: dict[str, Any]) -> Tensor:
        q, k, v = (rearrange(m(batch["x"]), "b n (d h) -> b h n d", h=H) for m in (self.q, self.k, self.v))
        return self.o(rearrange(attend(q, k, v), "b h n d -> b n (d h)"))


@case(separate(pattern="(d h) c"), call=lambda m, x: m(SimpleNamespace(feats=x)))
class TakesAnObjectStrided(Four):
    def forward(self, data: Any) -> Tensor:
        q, k, v = (rearrange(m(data.feats), "b n (d h) -> b h n d", h=H) for m in (self.q, self.k, self.v))
        return self.o(rearrange(attend(q, k, v), "b h n d -> b n (d h)"))


@dataclass
class Batch:
    src: Tensor
    lengths: list[int] | None = None


@case(separate(), call=lambda m, x: m(Batch(x)))
class TakesADataclass(Four):
    def forward(self, batch: Batch) -> Batch:
        x = batch.src
        return Batch(self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x))))), batch.lengths)


@case(separate(), call=lambda m, x: m(hidden=x, scale=0.5))
class KeywordsOnly(Four):
    def forward(self, *, hidden: Tensor, scale: float) -> Tensor:
        q, k, v = split(self.q(hidden)), split(self.k(hidden)), split(self.v(hidden))
        return self.o(join(F.scaled_dot_product_attention(q, k, v, scale=scale)))


@case(separate(), call=lambda m, x: m([x, x.mean(1)]))
class TakesAList(Four):
    def forward(self, inputs: list[Tensor]) -> Tensor:
        x, shift = inputs
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x))))) + shift[:, None]


@case(separate(takes=1), inputs=("b n c", "b m c"))
class Cross(Four):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = split(self.q(x)), split(self.k(memory)), split(self.v(memory))
        return self.o(join(attend(q, k, v)))


@case(separate(takes=1), inputs=("b n c", "b m c"), call=lambda m, x, y: m(x, context={"memory": y}))
class CrossFromADict(Four):
    def forward(self, x: Tensor, context: dict[str, Tensor] | None = None) -> Tensor:
        memory = x if context is None else context["memory"]
        return self.o(join(attend(split(self.q(x)), split(self.k(memory)), split(self.v(memory)))))


@case(
    Core(
        rows("query.weight", "(h d) c"),
        rows("context.weight", "(h d) c", takes=1),
        rows("content.weight", "(h d) c", takes=2),
        rows("out.weight", "c (h d)"),
    ),
    inputs=("b n c", "b m c", "b m c"),
)
class ThreeInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.context, self.content, self.out = (nn.Linear(MODEL, MODEL) for _ in range(4))

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return self.out(join(attend(split(self.query(a)), split(self.context(b)), split(self.content(c)))))


@case(separate())
class ChannelsAsSequential(nn.Module):
    """Each projection with a dropout behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(MODEL, MODEL)
        self.k = nn.Linear(MODEL, MODEL)
        self.v = nn.Linear(MODEL, MODEL)
        self.o = nn.Linear(MODEL, MODEL)
        self.drop = nn.Sequential(nn.Dropout(0.1), nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(self.drop(m(x))) for m in (self.q, self.k, self.v))
        return self.o(join(attend(q, k, v)))
