"""Names, attributes and shapes that say something else than what is computed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import MODEL, WIDTH, Core, H, case, fused, rows, separate


@case(separate())
class SaysEightHeads(Four):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 8, 3

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(separate("q_proj", "k_proj", "v_proj", "out_proj"), call=lambda m, x: m({"x": x}))
class SaysTwoHeadsAndTakesADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(MODEL, MODEL) for _ in range(4))
        self.num_heads, self.embed_dim = 2, MODEL

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        return self.out_proj(join(attend(split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x)))))


@case(separate("k_proj", "q_proj", "v_proj", "out_proj"))
class QueriesAndKeysSwapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(MODEL, MODEL) for _ in range(4))
        self.num_heads = H

    def forward(self, x: Tensor) -> Tensor:
        q, k = split(self.k_proj(x)), split(self.q_proj(x))
        return self.out_proj(join(F.scaled_dot_product_attention(q, k, split(self.v_proj(x)))))


@case(separate("k_proj", "q_proj", "v_proj", "out_proj"), call=lambda m, x: m({"x": x}))
class QueriesAndKeysSwappedOfADict(QueriesAndKeysSwapped):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(batch["x"])


@case(separate("v_proj", "q_proj", "k_proj", "out_proj"))
class AllNamesTurned(QueriesAndKeysSwapped):
    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(join(attend(split(self.v_proj(x)), split(self.q_proj(x)), split(self.k_proj(x)))))


@case(fused("qkv.weight", order="vkq"))
class FusedTheOtherWayRound(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o, self.num_heads = nn.Linear(MODEL, 3 * MODEL), nn.Linear(MODEL, MODEL), H

    def forward(self, x: Tensor) -> Tensor:
        v, k, q = self.qkv(x).chunk(3, dim=-1)
        return self.o(join(attend(split(q), split(k), split(v))))


@case(separate("a", "b", "c", "d"))
class NamelessSelf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(MODEL, MODEL) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.d(join(attend(split(self.a(x)), split(self.b(x)), split(self.c(x)))))


@case(separate("lin1", "lin2", "lin3", "lin4"))
class Mixer(nn.Module):
    """Not called attention anywhere, in a block with a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2, self.lin3, self.lin4 = (nn.Linear(MODEL, MODEL) for _ in range(4))
        self.up, self.down = nn.Linear(MODEL, 40), nn.Linear(40, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lin4(join(attend(split(self.lin1(x)), split(self.lin2(x)), split(self.lin3(x)))))
        return self.down(F.gelu(self.up(x)))


@case(separate(), refused="token|positions|sequence|transpose|rows of|no heads|several")
class ForgottenTranspose(Four):
    """Reshaped as if heads came first: what are called heads are groups of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = (m(x).view(B, H, N, WIDTH) for m in (self.q, self.k, self.v))
        return self.o(attend(q, k, v).reshape(B, N, C))


@case(separate(scores="(b h) q k"), refused="token|positions|sequence|transpose|rows of|no heads|several")
class ForgottenTransposeInTheBatch(Four):
    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = (m(x).reshape(B * H, N, WIDTH) for m in (self.q, self.k, self.v))
        return self.o(attend(q, k, v).reshape(B, N, C))


@case(
    Core(rows("q.weight"), rows("k.weight"), rows("v.weight"), rows("o.weight", "c (h d)")),
)
class UnusedProjections(Four):
    """A second key map that is there and is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query = nn.Linear(MODEL, MODEL), nn.Linear(MODEL, MODEL)
        self.num_attention_heads = H

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(separate("query", "key", "value", "dense"))
class SaysGroups(nn.Module):
    """`num_key_value_heads` is 2; the keys are not grouped."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dense = (nn.Linear(MODEL, MODEL) for _ in range(4))
        self.num_attention_heads, self.num_key_value_heads = H, 2

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(join(attend(split(self.query(x)), split(self.key(x)), split(self.value(x)))))


@case(separate("q_proj", "k_proj", "v_proj", "o_proj"), tokens=6)
class AsManyTokensAsWidth(nn.Module):
    """Tokens, width of a head and model are easily taken for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(MODEL, MODEL) for _ in range(4))
        self.n_heads = 6

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, 6)).transpose(1, 2) for m in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(join(F.scaled_dot_product_attention(q, k, v)))


@case(
    Core(rows("q.weight"), rows("k.weight"), rows("v.weight"), rows("o.weight", "c (h d)")),
    call=lambda m, x: m(x, "attend"),
)
class BranchesOnAString(Four):
    def forward(self, x: Tensor, mode: str) -> Tensor:
        if mode == "attend":
            return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))
        return self.o(self.v(x))


@case(separate())
class OddWidths(Four):
    """Written through slices of the weight itself."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for q, k, v in zip(self.q.weight.split(WIDTH), self.k.weight.split(WIDTH), self.v.weight.split(WIDTH)):
            outputs.append((x @ q.T, x @ k.T, x @ v.T))
        q, k, v = (torch.stack(list(each), 1) for each in zip(*outputs))
        return self.o(join(attend(q, k, v)))
