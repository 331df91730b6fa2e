"""Fewer key heads than heads, and where each goes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import WIDTH, Core, H, case, rows, separate

G = 2


class Groups(Four):
    def __init__(self, groups: int = G) -> None:
        super().__init__(k=groups * WIDTH, v=groups * WIDTH)


@case(separate(keys=G))
class GroupsRepeated(Groups):
    def forward(self, x: Tensor) -> Tensor:
        k, v = (split(m(x), G).repeat_interleave(H // G, dim=1) for m in (self.k, self.v))
        return self.o(join(attend(split(self.q(x)), k, v)))


@case(separate(keys=G))
class GroupsExpanded(Groups):
    def forward(self, x: Tensor) -> Tensor:
        B, N, _ = x.shape
        k, v = (
            split(m(x), G)[:, :, None].expand(B, G, H // G, N, WIDTH).reshape(B, H, N, WIDTH) for m in (self.k, self.v)
        )
        return self.o(join(F.scaled_dot_product_attention(split(self.q(x)), k, v, is_causal=True)))


@case(separate(keys=G, groups=(0, 1, 0, 1)))
class GroupsTiled(Groups):
    def forward(self, x: Tensor) -> Tensor:
        k, v = (split(m(x), G).repeat(1, H // G, 1, 1) for m in (self.k, self.v))
        return self.o(join(attend(split(self.q(x)), k, v)))


@case(separate(keys=G, groups=(0, 1, 0, 1)), call=lambda m, x: m(x, (None, 1)))
class GroupsTiledWithAnOddArgument(Groups):
    def forward(self, x: Tensor, cache: tuple[Tensor | None, int]) -> Tensor:
        past, step = cache
        k, v = (split(m(x), G) for m in (self.k, self.v))
        if past is not None:
            k = torch.cat([past, k], 2)
        k, v = (torch.cat([t] * (H // G), 1) for t in (k, v))
        return self.o(join(attend(split(self.q(x)) * step, k, v)))


@case(separate(keys=G, scores="b g r q k", head_axes="g r"))
class GroupsByEinsum(Groups):
    def forward(self, x: Tensor) -> Tensor:
        q = split(self.q(x)).unflatten(1, (G, H // G))
        k, v = split(self.k(x), G), split(self.v(x), G)
        weights = torch.einsum("bgrnd,bgmd->bgrnm", q, k).softmax(-1)
        return self.o(join(torch.einsum("bgrnm,bgmd->bgrnd", weights, v).flatten(1, 2)))


@case(separate(keys=G, groups=(0, 1, 0, 1), scores="b r g q k", head_axes="r g"))
class GroupsTiledByEinsum(Groups):
    def forward(self, x: Tensor) -> Tensor:
        q = split(self.q(x)).unflatten(1, (H // G, G))
        k, v = split(self.k(x), G), split(self.v(x), G)
        weights = torch.einsum("brgnd,bgmd->brgnm", q, k).softmax(-1)
        return self.o(join(torch.einsum("brgnm,bgmd->brgnd", weights, v).flatten(1, 2)))


@case(separate(keys=G))
class GroupsByTheKernel(Groups):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.q(x)), split(self.k(x), G), split(self.v(x), G)
        return self.o(join(F.scaled_dot_product_attention(q, k, v, enable_gqa=True)))


@case(separate(keys=G))
class GroupsThatLie(Groups):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.n_rep = H, H, 1

    def forward(self, x: Tensor) -> Tensor:
        k, v = (split(m(x), G).repeat_interleave(H // G, dim=1) for m in (self.k, self.v))
        return self.o(join(attend(split(self.q(x)), k, v)))


@case(separate(keys=1))
class OneKeyHead(Groups):
    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), self.k(x)[:, None], self.v(x)[:, None])))


@case(separate(keys=1))
class OneKeyHeadByEinsum(OneKeyHead):
    def forward(self, x: Tensor) -> Tensor:
        weights = torch.einsum("bhnd,bmd->bhnm", split(self.q(x)), self.k(x)).softmax(-1)
        return self.o(join(torch.einsum("bhnm,bmd->bhnd", weights, self.v(x))))


@case(separate(keys=1, scores="b (h q) k"))
class OneKeyHeadInOneProduct(OneKeyHead):
    def forward(self, x: Tensor) -> Tensor:
        q = split(self.q(x)).flatten(1, 2)
        out = F.softmax(q @ self.k(x).mT, -1) @ self.v(x)
        return self.o(join(out.unflatten(1, (H, x.shape[1]))))


@case(Core(rows("q.weight"), rows("k.weight", h=1), rows("v.weight"), rows("o.weight", "c (h d)")))
class OneKeyHeadManyValues(Four):
    def __init__(self) -> None:
        super().__init__(k=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), self.k(x)[:, None], split(self.v(x)))))


@case(separate(keys=G))
class GroupsCausal(Groups):
    def forward(self, x: Tensor, past: list[Tensor] | None = None) -> Tensor:
        q, k, v = split(self.q(x)), split(self.k(x), G), split(self.v(x), G)
        if past is not None:
            past.append(k)
        k, v = (t[:, torch.arange(H) // (H // G)] for t in (k, v))
        mask = torch.full((x.shape[1],) * 2, float("-inf"), device=x.device, dtype=x.dtype).triu(1)
        return self.o(join(F.softmax(q @ k.mT / WIDTH**0.5 + mask, dim=-1) @ v))
