"""Attention as researchers write it without a thought for who reads names.

Usual names that mean something else, none at all, several attentions in one module, bare parameters, a map for each
head.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.attention.models import D, Grouped, H, Separate, attend


class SwappedNames(Separate):
    """What is called the query is the key."""

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.out_proj(attend(k, q, v))


class TakesADict(Separate):
    """Heads strided, under the usual names, in a forward that nobody makes inputs up for."""

    def forward(self, batch):
        q, k, v = (proj(batch["x"]).unflatten(-1, (-1, H)).mT for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(attend(q, k, v))


class TiledWithOption(Grouped):
    """Groups tiled, and an optional argument whose usual form breaks the forward."""

    def forward(self, x, attention_mask=None):
        if attention_mask is not None:
            attention_mask.this_is_a_structure_of_its_own()
        q, k, v = (proj(x).unflatten(-1, (-1, 8)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1)))


class Joint(nn.Module):
    """Queries, keys and values of two streams side by side, as in Stable Diffusion 3."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(D, D) for _ in range(4))
        self.add_q, self.add_k, self.add_v, self.add_out = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x, context):
        q, k, v = (
            torch.cat([one(x), other(context)], 1).unflatten(-1, (H, 8))
            for one, other in ((self.to_q, self.add_q), (self.to_k, self.add_k), (self.to_v, self.add_v))
        )
        out = attend(q, k, v)
        return self.to_out(out[:, : x.shape[1]]), self.add_out(out[:, x.shape[1] :])


class MapPerHead(nn.Module):
    """A linear map for each head, and a loop."""

    def __init__(self):
        super().__init__()
        self.queries, self.keys, self.values = (nn.ModuleList(nn.Linear(D, 8) for _ in range(H)) for _ in range(3))
        self.mix = nn.Linear(D, D)

    def forward(self, x):
        out = [(q(x) @ k(x).mT / 8**0.5).softmax(-1) @ v(x) for q, k, v in zip(self.queries, self.keys, self.values)]
        return self.mix(torch.cat(out, -1))


class OneHead(nn.Module):
    """A tutorial's single head."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(D, 8, bias=False) for _ in range(3))

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        weights = q @ k.transpose(-2, -1) * 8**-0.5
        weights = weights.masked_fill(torch.ones(x.shape[1], x.shape[1]).tril() == 0, float("-inf"))
        return F.softmax(weights, -1) @ v


class HeadsInAList(nn.Module):
    """A tutorial's heads, each a module."""

    def __init__(self):
        super().__init__()
        self.heads, self.proj = nn.ModuleList(OneHead() for _ in range(H)), nn.Linear(D, D)

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], -1))


class BareParameters(nn.Module):
    """Parameters ``(H, d, d_k)``, multiplied with by einsum."""

    def __init__(self, by_matmul: bool = False):
        super().__init__()
        self.by_matmul = by_matmul
        self.W_Q, self.W_K, self.W_V = (nn.Parameter(torch.randn(H, D, 8)) for _ in range(3))
        self.W_O = nn.Parameter(torch.randn(H, 8, D))

    def forward(self, x):
        if self.by_matmul:
            q, k, v = (x[:, None] @ one for one in (self.W_Q, self.W_K, self.W_V))
        else:
            q, k, v = (torch.einsum("btd,hdk->bhtk", x, one) for one in (self.W_Q, self.W_K, self.W_V))
        out = (q @ k.mT / 8**0.5).softmax(-1) @ v
        return torch.einsum("bhtk,hkd->btd", out, self.W_O)


class TwoInOne(nn.Module):
    """Two attentions in one module, one after the other."""

    def __init__(self):
        super().__init__()
        self.qkv1, self.proj1, self.qkv2, self.proj2 = (
            nn.Linear(*shape) for shape in ((D, 3 * D), (D, D), (D, 3 * D), (D, D))
        )

    def forward(self, x):
        for qkv, proj in ((self.qkv1, self.proj1), (self.qkv2, self.proj2)):
            x = x + proj(attend(*(part.unflatten(-1, (H, 8)) for part in qkv(x).chunk(3, -1))))
        return x


class BesideAChild(nn.Module):
    """An attention of its own beside a child that is attention."""

    def __init__(self):
        super().__init__()
        self.child, self.mine, self.back = Grouped(), nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        x = x + self.child(x)
        return x + self.back(attend(*(part.unflatten(-1, (H, 8)) for part in self.mine(x).chunk(3, -1))))


class NormedByFunction(Separate):
    """A norm on keys that is no module; one that is called `ln_k`; one that is there and not used."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.ln_k = nn.LayerNorm(8)
        self.k_norm = nn.LayerNorm(8)

    def forward(self, x):
        q, k, v = self.heads(x)
        if self.kind == "function":
            k = F.layer_norm(k, (8,))
        elif self.kind == "ln_k":
            k = self.ln_k(k)
        elif self.kind == "by hand":
            k = (k - k.mean(-1, keepdim=True)) / k.std(-1, keepdim=True)
        return self.out_proj(attend(q, k, v))


class ReversedOutputs(Separate):
    """The outputs of heads in reversed order."""

    def forward(self, x):
        return self.out_proj(attend(*self.heads(x)).unflatten(-1, (H, 8)).flip(2).flatten(2))


class Mixer(Separate):
    """Attention whose class says nothing of it."""

    def forward(self, x):
        q, k, v = (part.transpose(1, 2) for part in self.heads(x))
        return self.out_proj(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
