"""Other code for the same bugs, fused and written out, and right code that looks like one."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from hdi_callback import check
from tests.checks.corpus import VOCABULARY, Attention, D, Full, Fused, Grouped, H, Model, Rotary, causal, rotated


def upper(T: int, diagonal: int = 0):
    return torch.ones(T, T, dtype=torch.bool).triu(diagonal)


class FusedAttention(Attention):
    """torch's fused attention with some options."""

    def options(self, T, padding):
        return {"is_causal": True}

    def forward(self, x, padding=None):
        q, k, v = self.place(*self.project(x))
        options = self.options(x.shape[1], padding)
        return self.out_proj(self.merge(F.scaled_dot_product_attention(q, self.expand(k), self.expand(v), **options)))


def fused(options):
    return type("Fused", (FusedAttention,), {"options": lambda _, T, padding: options(T, padding)})


def written(base=Attention, **methods):
    return type("Written", (base,), methods)


def cut(self, x, heads):
    return x.reshape(x.shape[0], heads, -1, self.d)


def not_transposed(self, x, heads):
    return x.view(*x.shape[:2], heads, self.d)


def flattened(self, heads):
    return heads.flatten(2)


def neighbours(x):
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * 100 ** (-torch.arange(half) / half)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack(
        [even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], -1
    ).flatten(-2)


def complex_numbers(x):
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * 100 ** (-torch.arange(half) / half)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


def alibi(self, scores, padding):
    at = torch.arange(scores.shape[-1])
    slopes = 2.0 ** -torch.arange(1, H + 1)[:, None, None]
    return Attention.mask(self, scores - slopes * (at[:, None] - at).abs(), padding)


def by_einsum(self, x):
    q, k, _ = Attention.project(self, x)
    weight = self.v_proj.weight.T.reshape(D, self.d, H).transpose(1, 2)
    return q, k, torch.einsum("btd,dhe->bhte", x, weight)


VARIANTS = {
    "split, fused": ("split", written(FusedAttention, split=cut)),
    "split, as many tokens as heads": ("split", written(split=cut), 1, 4),
    "split, a multiple of the heads": ("split", written(split=cut), 1, 16),
    "never transposed": ("split", written(Full, split=not_transposed, merge=flattened)),
    "never transposed, fused": (
        "split", written(fused(lambda *_: {}), split=not_transposed, merge=flattened),
    ),
    "merged, fused": (
        "merge",
        written(FusedAttention, merge=lambda m, h: h.contiguous().view(h.shape[0], -1, m.width)),
    ),
    "merged, as many tokens as heads": ("merge", written(merge=lambda m, h: h.reshape(h.shape[0], -1, m.width)), 2, 4),
    "all read head 0 of a packed projection": (
        "gradients", written(Fused, project=lambda m, x: [one[:, :1].expand_as(one) for one in Fused.project(m, x)]),
    ),
    "tiled by cat": ("tiled key heads", written(Grouped, expand=lambda _, k: torch.cat([k, k], 1))),
    "values interleaved by einsum": ("head order", written(project=by_einsum)),
    "inverted, fused": ("mask", fused(lambda T, _: {"attn_mask": upper(T)})),
    "inverted, without itself": ("mask", fused(lambda T, _: {"attn_mask": upper(T, 1)})),
    "next token, fused": ("mask", fused(lambda T, _: {"attn_mask": torch.full((T, T), -math.inf).triu(2)})),
    "numbers, fused": ("mask without effect", fused(lambda T, _: {"attn_mask": (~upper(T, 1)).float()})),
    "scores times a mask": ("mask without effect", written(mask=lambda _, s, p: s * causal(s))),
    "scores filled with 0": ("mask without effect", written(mask=lambda _, s, p: s.masked_fill(~causal(s), 0))),
    "scores filled with 1e-9": ("mask without effect", written(mask=lambda _, s, p: s.masked_fill(~causal(s), 1e-9))),
    "weights filled with 0": (
        "mask without effect",
        written(mask=lambda _, s, p: s, weigh=lambda _, s: s.softmax(-1).masked_fill(~causal(s), 0)),
    ),
    "padding lost, fused": ("padding", fused(lambda *_: {}), 2, 8, True),
    "padding inverted, fused": ("padding", fused(lambda _, padding: {"attn_mask": padding[:, None, None]}), 2, 8, True),
    "scaled in queries too": ("scale", written(FusedAttention, place=lambda m, q, k, v: (q / m.d**0.5, k, v))),
    "softmax over dim 2": ("softmax", written(Full, weigh=lambda _, s: F.softmax(s, dim=2))),
    "neighbours of keys alone": ("rotation", written(Rotary, place=lambda _, q, k, v: (q, neighbours(k), v))),
    # and what is right
    "grouped, fused": (
        "",
        type("G", (FusedAttention, Grouped), {"expand": lambda _, k: k, "options": lambda *_: {"enable_gqa": True}}),
    ),
    "padding, fused": ("", fused(lambda _, padding: {"attn_mask": ~padding[:, None, None]}), 2, 8, True),
    "a window": ("", written(mask=lambda _, s, p: s.masked_fill(~(causal(s) & ~causal(s, -4)), -1e4))),
    "torch.where": ("", written(mask=lambda _, s, p: torch.where(causal(s), s, torch.finfo(s.dtype).min))),
    "in place": ("", written(mask=lambda _, s, p: s.masked_fill_(~causal(s), -math.inf))),
    "weights of hidden keys set to 0 again": (
        "", written(weigh=lambda _, s: s.softmax(-1).masked_fill(~causal(s), 0)),
    ),
    "ALiBi": ("", written(mask=alibi)),
    "neighbours": ("", written(Rotary, place=lambda _, q, k, v: (neighbours(q), neighbours(k), v))),
    "complex numbers": ("", written(Rotary, place=lambda _, q, k, v: (complex_numbers(q), complex_numbers(k), v))),
    "halves of the first features": (
        "",
        written(
            Rotary,
            place=lambda _, q, k, v: (*(torch.cat([rotated(one[..., :4]), one[..., 4:]], -1) for one in (q, k)), v),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_named_or_left_alone(name):
    finding, kind, sequences, tokens, is_padded, *_ = (*VARIANTS[name], *(2, 8, False)[len(VARIANTS[name]) - 2 :])
    torch.manual_seed(0)
    model, batch = Model(kind, kind).eval(), torch.randint(VOCABULARY, (sequences, tokens))
    padding = torch.zeros_like(batch, dtype=torch.bool)
    padding[-1, -2:] = True
    found = check(model, lambda: model(batch, padding if is_padded else None))
    names = {one.name for one in found.findings}
    assert finding in names if finding else not names, str(found)
