"""What several modules by hand have in common: ways to split, to turn and to weigh, as people write them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def split(x: Tensor, heads: int = 4) -> Tensor:
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def join(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, dim=-1) @ v


def softmax_by_hand(scores: Tensor, dim: int = -1) -> Tensor:
    weights = (scores - scores.amax(dim, keepdim=True)).exp()
    return weights / weights.sum(dim, keepdim=True)


def sparsemax(scores: Tensor, dim: int = -1) -> Tensor:
    ordered = scores.sort(dim, descending=True).values
    counts = torch.arange(1, scores.shape[dim] + 1, device=scores.device, dtype=scores.dtype)
    sums = ordered.cumsum(dim) - 1
    support = (counts * ordered > sums).sum(dim, keepdim=True)
    return (scores - sums.gather(dim, support - 1) / support.to(scores.dtype)).clamp_min(0)


def angles(length: int, width: int, like: Tensor) -> Tensor:
    frequencies = 100.0 ** (-torch.arange(0, width, 2, device=like.device) / width)
    return (torch.arange(length, device=like.device)[:, None] * frequencies).to(like.dtype)


def rotate_half(x: Tensor) -> Tensor:
    theta = angles(x.shape[-2], x.shape[-1], x)
    cos, sin = torch.cat([theta, theta], -1).cos(), torch.cat([theta, theta], -1).sin()
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def rotate_pairs(x: Tensor) -> Tensor:
    theta = angles(x.shape[-2], x.shape[-1], x)
    even, odd = x[..., ::2], x[..., 1::2]
    turned = torch.stack([even * theta.cos() - odd * theta.sin(), even * theta.sin() + odd * theta.cos()], -1)
    return turned.flatten(-2)
