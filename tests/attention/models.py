"""Small models, and trainings of them that are compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hdi_callback.attention.layer import AttentionLayer, HeadWeight, Term, WeightRows


def blocks(module: nn.Module, name: str, *, heads: int, width: int, start: int = 0, dim: int = 0) -> HeadWeight:
    """Return the weight of heads that are neighbouring blocks of features along a dimension of a matrix."""
    rows, columns = module.get_parameter(name).shape[:2]
    features = start + torch.arange(heads * width).view(heads, width)
    by_feature, by_column, count = (columns, 1, columns) if dim == 0 else (1, columns, rows)
    return HeadWeight((Term((WeightRows(module, (name,), features * by_feature, count, by_column),)),))


class Attention(nn.Module):
    """Packed projections and an output projection that is called; fused or written out."""

    def __init__(self, width: int = 32, heads: int = 4, written: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.written, self.dropout = heads, written, nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.written:
            y = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.out(y.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    """With a buffer that every forward writes, and one that batch norm does."""

    def __init__(self, width: int, heads: int, written: bool) -> None:
        super().__init__()
        self.attention, self.norm = Attention(width, heads, written), nn.LayerNorm(width)
        self.up, self.batch, self.down = (
            nn.Linear(width, 2 * width),
            nn.BatchNorm1d(2 * width),
            nn.Linear(2 * width, width),
        )
        self.register_buffer("mean", torch.zeros(width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        x = x + self.attention(self.norm(x))
        inner = self.batch(self.up(x).flatten(0, 1)).unflatten(0, x.shape[:2])
        return x + self.down(F.gelu(inner))


class Model(nn.Module):
    def __init__(
        self, width: int = 32, heads: int = 4, *, written: bool = False, reentrant: bool | None = None, layers: int = 2
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, written) for _ in range(layers))
        self.head, self.reentrant = nn.Linear(width, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x.requires_grad_(), use_reentrant=self.reentrant)
        return self.head(x)


class Counting(Model):
    """Plain attributes that a forward changes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[int] = []
        self.calls, self.plain = 0, torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        self.calls += 1
        self.plain.add_(1)
        self.last = x.detach().mean()
        return super().forward(x)


def batches(count: int = 3, width: int = 32) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(2, 9, width, generator=generator), torch.randint(3, (2, 9), generator=generator))
        for _ in range(count)
    ]


def train(
    make: Callable[[], nn.Module],
    watch: Callable[[nn.Module], Any] = lambda model: None,
    *,
    call: Callable[[nn.Module], Callable[[Tensor], Tensor]] = lambda model: model,
    before: Callable[[Any, int], None] = lambda watched, step: None,
    after: Callable[[Any, int], None] = lambda watched, step: None,
    dtype: torch.dtype | None = None,
    steps: int = 3,
) -> list[Any]:
    """Train, and return all that has to stay as it is: losses, weights, buffers, gradients, the random state."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    run, watched, kept = call(model), watch(model), []
    for step, (x, y) in enumerate(batches(steps)):
        before(watched, step)
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            out = run(x)
            loss = F.cross_entropy(out.flatten(0, 1).float(), y.flatten())
        loss.backward()
        kept += [out.detach().clone(), loss.item(), *(one.grad.clone() for one in model.parameters())]
        after(watched, step)
        optimizer.step()
        optimizer.zero_grad()
    kept += [*(one.detach().clone() for one in (*model.parameters(), *model.buffers())), torch.get_rng_state()]
    return kept


def is_equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other)
    )


def contradiction(layer: AttentionLayer) -> str | None:
    """Return how the weights of a layer contradict each other, `None` if they do not."""
    expected = {
        "query": (layer.num_heads, layer.head_dim),
        "value": (layer.num_value_heads, layer.value_dim),
        "output": (layer.num_heads, layer.value_dim),
    }
    for role, (heads, width) in expected.items():
        weight = layer.weights.get(role)
        if weight is not None and (weight.heads, weight.width) != (heads, width):
            return f"its {role} weight has {weight.heads} heads of {weight.width}, expected {heads} of {width}"
    if len(layer.value_of) != layer.num_heads or set(layer.key_of) != set(range(layer.num_key_heads)):
        return f"its `key_of` {layer.key_of} and `value_of` {layer.value_of} do not name heads for each query head"
    return None
