"""More than one attention, attention over other axes, and weights that are products."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, rotate_half, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import MODEL, Core, H, case, rows, separate


@case(
    separate("q1", "k1", "v1", "o1"),
    Core(
        rows("q2.weight", source="o1"),
        rows("k2.weight", takes=1),
        rows("v2.weight", takes=1),
        rows("o2.weight", "c (h d)"),
        number=1,
    ),
    inputs=("b n c", "b m c"),
    may_refuse="another attention",
)
class SelfThenCross(nn.Module):
    """Two attentions in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.q1, self.k1, self.v1, self.o1 = (nn.Linear(MODEL, MODEL) for _ in range(4))
        self.q2, self.k2, self.v2, self.o2 = (nn.Linear(MODEL, MODEL) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.o1(join(attend(split(self.q1(x)), split(self.k1(x)), split(self.v1(x)))))
        return self.o2(join(attend(split(self.q2(x)), split(self.k2(memory)), split(self.v2(memory)))))


@case(
    separate("a.q", "a.k", "a.v", "a.o", "(h d) c"),
    separate("b.q", "b.k", "b.v", "b.o", "(d h) c", number=1),
)
class TwoBranches(nn.Module):
    """Two attentions on one input, each kept in a dictionary of maps."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.ModuleDict({n: nn.Linear(MODEL, MODEL) for n in "qkvo"}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(self.a[n](x)) for n in "qkv")
        first = self.a["o"](join(attend(q, k, v)))
        q, k, v = (rearrange(self.b[n](x), "b n (d h) -> b h n d", h=H) for n in "qkv")
        return first + self.b["o"](rearrange(attend(q, k, v), "b h n d -> b n (d h)"))


_CHILD = Core(
    *(rows("child.in_proj_weight", "(r h d) c", n_r=3, r=r) for r in range(3)),
    rows("child.out_proj.weight", "c (h d)"),
    scores="(b h) q k",
)


@case(_CHILD, separate(number=1))
class BesideAChild(Four):
    """A child that is attention, and attention of its own beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.MultiheadAttention(MODEL, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        first, _ = self.child(x, x, x)
        return first + self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


class Inner(nn.Module):
    """Computes attention of what another module projected."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return join(F.scaled_dot_product_attention(split(q), split(k), split(v)))


@case(separate())
class KernelAsAChild(Four):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.attention(self.q(x), self.k(x), self.v(x)))


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(MODEL, MODEL) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return split(self.q(x)), split(self.k(x)), split(self.v(x))


@case(separate("project.q", "project.k", "project.v", "out"))
class ProjectionsAsAChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = Projections(), nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(join(attend(*self.project(x))))


@case(
    Core(
        rows("to_q.weight"), rows("to_k.weight"), rows("to_v.weight"), rows("to_out.weight", "c (h d)"), joint=(0, 7)
    ),
    Core(
        rows("add_q.weight", takes=1), rows("add_k.weight", takes=1), rows("add_v.weight", takes=1),
        rows("add_out.weight", "c (h d)"), joint=(7, 16),
    ),
    inputs=("b n c", "b m c"), may_refuse="two|stream|several|join|sum|second",
)  # fmt: skip
class Joint(nn.Module):
    """Two streams that attend to each other as one sequence (Stable Diffusion 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(MODEL, MODEL) for _ in range(4))
        self.add_q, self.add_k, self.add_v, self.add_out = (nn.Linear(MODEL, MODEL) for _ in range(4))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (
            torch.cat([split(a(x)), split(b(context))], dim=2)
            for a, b in ((self.to_q, self.add_q), (self.to_k, self.add_k), (self.to_v, self.add_v))
        )
        out = join(F.scaled_dot_product_attention(q, k, v))
        x, context = out.split([x.shape[1], context.shape[1]], dim=1)
        return torch.cat([self.to_out(x), self.add_out(context)], 1)


@case(
    Core(
        rows("q.weight"),
        rows("k_up.weight", source="down", through="down.weight"),
        rows("v_up.weight", source="down", through="down.weight"),
        rows("o.weight", "c (h d)"),
    )
)
class Latent(nn.Module):
    """Keys and values of one narrow map."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down = nn.Linear(MODEL, MODEL), nn.Linear(MODEL, 10, bias=False)
        self.k_up, self.v_up = nn.Linear(10, MODEL, bias=False), nn.Linear(10, MODEL, bias=False)
        self.o = nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        c = self.down(x)
        return self.o(join(attend(split(self.q(x)), split(self.k_up(c)), split(self.v_up(c)))))


@case(
    Core(
        rows("q_up.weight", source="q_down", through="q_down.weight"),
        rows("kv_up.weight", "(h r d) c", n_r=2, r=0, source="down", through="down.weight"),
        rows("kv_up.weight", "(h r d) c", n_r=2, r=1, source="down", through="down.weight"),
        rows("o.weight", "c (h d)"),
        free=("query",),
    ),
    may_refuse="share|rota|all heads",
)
class LatentWithASharedPart(nn.Module):
    """As DeepSeek: one turned key for all heads beside their own."""

    def __init__(self) -> None:
        super().__init__()
        self.q_down, self.q_up = nn.Linear(MODEL, 10, bias=False), nn.Linear(10, MODEL, bias=False)
        self.q_rope, self.k_rope = nn.Linear(MODEL, H * 4), nn.Linear(MODEL, 4)
        self.down, self.kv_up = nn.Linear(MODEL, 10, bias=False), nn.Linear(10, 2 * MODEL, bias=False)
        self.o = nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        q = torch.cat([split(self.q_up(self.q_down(x))), rotate_half(split(self.q_rope(x)))], -1)
        k, v = split(self.kv_up(self.down(x))).chunk(2, -1)
        shared = rotate_half(self.k_rope(x))[:, None].expand(-1, H, -1, -1)
        return self.o(join(attend(q, torch.cat([k, shared], -1), v)))


@case(
    Core(*(rows(f"{m}.weight", source="shared", through="shared.weight") for m in "qkv"), rows("o.weight", "c (h d)"))
)
class SharedMapInFront(Four):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(MODEL, MODEL, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.shared(x)
        return self.o(join(attend(split(self.q(y)), split(self.k(y)), split(self.v(y)))))


@case(
    Core(rows("q.weight"), rows("k.1.weight", source="k.0", through="k.0.weight"), rows("v.weight"),
         rows("o.weight", "c (h d)"))
)  # fmt: skip
class KeysOfTwoMaps(Four):
    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Sequential(nn.Linear(MODEL, 8, bias=False), nn.Linear(8, MODEL))  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(
    Core(rows("q.weight"), rows("k.2.weight", source="k.1"), rows("v.weight"), rows("o.weight", "c (h d)")),
    may_refuse="activation|gelu|non-?linear|two maps|in a row|between its two projections",
)
class KeysOfATower(Four):
    """Keys of a small network; the last map takes what its activation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Sequential(nn.Linear(MODEL, 8), nn.GELU(), nn.Linear(8, MODEL))  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


# Other axes and windows


@case(separate(scores="(b w) h q k"), tokens=12)
class Windows(Four):
    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        w = x.reshape(B * N // 6, 6, C)
        return self.o(join(attend(split(self.q(w)), split(self.k(w)), split(self.v(w))))).reshape(B, N, C)


@case(separate(scores="b h w q k"), tokens=12)
class Blocks(Four):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)).unflatten(2, (-1, 6)) for m in (self.q, self.k, self.v))
        return self.o(join(attend(q, k, v).flatten(2, 3)))


@case(separate(scores="(b w) h q k"), tokens=12)
class Dilated(Four):
    def forward(self, x: Tensor) -> Tensor:
        x = rearrange(x, "b (n w) c -> (b w) n c", w=2)
        out = self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))
        return rearrange(out, "(b w) n c -> b (n w) c", w=2)


@case(separate(scores="(b w) h q k", rounds=2), inputs=("b x y c",))
class Axial(Four):
    """Along rows, then along columns, with the same maps."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            B, X, Y, C = x.shape
            y = x.reshape(B * X, Y, C)
            y = self.o(join(attend(split(self.q(y)), split(self.k(y)), split(self.v(y)))))
            x = y.reshape(B, X, Y, C).transpose(1, 2)
        return x


@case(separate(scores="(b h) w q k"), inputs=("b x y c",))
class AlongRows(Four):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (rearrange(m(x), "b x y (h d) -> (b h) x y d", h=H) for m in (self.q, self.k, self.v))
        return self.o(rearrange(attend(q, k, v), "(b h) x y d -> b x y (h d)", h=H))


@case(separate(scores="b (h w) q k"), inputs=("b x y c",))
class OverTimeInTheHeads(Four):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (rearrange(m(x), "b x y (h d) -> b (h x) y d", h=H) for m in (self.q, self.k, self.v))
        return self.o(rearrange(attend(q, k, v), "b (h x) y d -> b x y (h d)", h=H))


@case(separate(), tokens=8)
class SlidingWindow(Four):
    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        near = (at[:, None] - at[None]).abs() <= 2
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        return self.o(join(F.scaled_dot_product_attention(q, k, v, attn_mask=near)))


@case(Core(rows("q.weight"), rows("k.weight"), rows("v.weight"), rows("o.weight", "c (h d)"), query_token=0))
class OnlyTheFirstAsks(Four):
    """Class attention (CaiT)."""

    def forward(self, x: Tensor) -> Tensor:
        q = split(self.q(x[:, :1]))
        return torch.cat([self.o(join(attend(q, split(self.k(x)), split(self.v(x))))), x[:, 1:]], 1)


@case(Core(None, rows("k.weight"), rows("v.weight"), rows("o.weight", "c (h d)"), free=("query",)))
class LatentsAsk(Four):
    """Perceiver: learned vectors go through the map of the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, MODEL))

    def forward(self, x: Tensor) -> Tensor:
        q = split(self.q(self.latents.expand(x.shape[0], -1, -1)))
        return self.o(join(attend(q, split(self.k(x)), split(self.v(x)))))


@case(separate(rounds=2))
class CalledTwice(Four):
    """The same maps in two rounds."""

    def once(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))

    def forward(self, x: Tensor) -> Tensor:
        return self.once(x + self.once(x))


@case(separate(), cast=torch.float32)
class UnderCheckpointing(Four):
    def once(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.once, x, use_reentrant=False)  # type: ignore[no-any-return]


@case(
    Core(rows("q.weight"), rows("k.weight"), rows("v.weight"), rows("o.weight", "c (h d)"), scores="h q k"),
    inputs=("n c",), may_refuse="batch|sequence",
)  # fmt: skip
class WithoutABatch(Four):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (rearrange(m(x), "n (h d) -> h n d", h=H) for m in (self.q, self.k, self.v))
        return self.o(rearrange(attend(q, k, v), "h n d -> n (h d)"))


@case(
    Core(
        *(rows("block.attn.in_proj_weight", "(r h d) c", n_r=3, r=r, source="norm") for r in range(3)),
        rows("block.attn.out_proj.weight", "c (h d)"),
    )
)
class BuiltInInABlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(MODEL)
        self.block = nn.ModuleDict({"attn": nn.MultiheadAttention(MODEL, H, batch_first=True, dropout=0.0)})

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.block["attn"](y, y, y, need_weights=False)[0]
