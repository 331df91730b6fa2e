"""The small transformer of the held-out trainings, and what a fault may do to it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def rotated(x: Tensor, base: float = 50.0) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * base ** (-torch.arange(half) / half)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos()], -1)


class Attention(nn.Module):
    """Attention with rotary positions, with cosine scores and a bias as in SwinV2, or with neither.

    Of kind "relative" it has a learned bias for each distance, as T5; of kind "slopes" a fixed one, as ALiBi.

    Attributes:
        is_causal: whether later tokens are hidden; a fault may change it while the model trains.
        factor: on the scores; 1 but for faults.
        drop: share of the attention that is dropped; 0 but for faults.
        bias: added to the scores of the first key; 0 but for faults.
        sees_itself_alone: whether a query sees only its own token; only in faults.
        takes_other_keys: whether keys and values are those of the next sample; only in faults.
        takes_earlier_values: whether the value of a token is that of the one before it; only in faults.
        window: how many tokens to each side a query sees, all if 0; only in faults.
        cuts_without_transpose: whether heads are cut from the features of all tokens in a row; only in faults.
        attends_across_batch: whether the first axis of the inputs is taken for their tokens; only in faults.
        base: of rotary positions; 50 but for faults.
        looks_ahead: how many later tokens a causal mask lets through; only in faults.
        sums_over_queries: whether the softmax is over queries in place of keys; only in faults.
        tiles_keys: whether grouped keys and values are repeated as a whole, not each of them; only in faults.
        keeps_cache: whether the keys and values of the call before are attended to as well; only in faults.
        masks_after: whether hidden keys are put to zero after the softmax, not before it; only in faults.
        misreads_values: whether values are read in the order in which they lie in memory; only in faults.
        turns_by_heads: whether rotary positions count heads, not tokens; only in faults.
        distance_sign: on distances; 1 but for faults.
        block: keys and values are filled with zeros, which are seen, to a multiple of it; 0, for not, but for faults.
        mixes_masks: whether masks of samples are repeated for heads as a whole, not each of them; only in faults.
        turns_queries_alone: whether keys have no rotary positions; only in faults.
        crosses_halves: whether queries and keys are both the half of the one and of the other; only in faults.
        sees_own_half: whether a query sees the tokens of its half of the input alone; only in faults.
        first: the keys and values of the first layer, which all layers take; only in faults.
    """

    slopes: Tensor

    def __init__(
        self, width: int, heads: int, *, is_causal: bool, kind: str = "plain", key_heads: int | None = None
    ) -> None:
        super().__init__()
        self.num_heads, self.is_causal, self.kind = heads, is_causal, kind
        self.num_key_value_heads = key_heads or heads
        self.factor, self.drop, self.bias = 1.0, 0.0, 0.0
        self.sees_itself_alone = self.takes_other_keys = self.takes_earlier_values = False
        self.window = 0
        self.cuts_without_transpose = self.attends_across_batch = False
        self.base, self.looks_ahead = 50.0, 0
        self.sums_over_queries = self.tiles_keys = self.keeps_cache = False
        self.masks_after = self.misreads_values = self.turns_by_heads = False
        self.distance_sign, self.block = 1, 0
        self.mixes_masks = self.turns_queries_alone = self.crosses_halves = self.sees_own_half = False
        self.first: dict[str, Tensor] | None = None
        self.cache: tuple[Tensor, Tensor] | None = None
        of_keys = width // heads * self.num_key_value_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(width, size) for size in (width, of_keys, of_keys, width)
        )
        if kind == "relative":
            self.distances = nn.Parameter(torch.zeros(heads, 127))
        if kind == "slopes":
            self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, heads + 1)[:, None, None])
        if kind == "cosine":
            self.logit_scale = nn.Parameter(torch.full((heads, 1, 1), 10.0).log())
            self.bias_table = nn.Parameter(0.02 * torch.randn(heads, 64))

    def forward(self, x: Tensor, visible: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """Attend to `context`, or to `x`; `visible` says which keys are seen, by all queries or by each."""
        is_across = self.attends_across_batch and context is None
        if is_across:
            x, visible = x.transpose(0, 1), None
        seen = x if context is None else context
        q = self._heads(self.q_proj(x), self.num_heads)
        k, v = (self._heads(part(seen), self.num_key_value_heads) for part in (self.k_proj, self.v_proj))
        if self.kind == "rotary":
            if self.turns_by_heads:
                q, k = (rotated(part.transpose(1, 2), self.base).transpose(1, 2) for part in (q, k))
            else:
                q, k = rotated(q, self.base), k if self.turns_queries_alone else rotated(k, self.base)
        if self.crosses_halves:
            half = q.shape[-1] // 2
            q = k = torch.cat([q[..., :half], k[..., half:]], -1)
        if self.first is not None:
            k, v = self.first.setdefault("k", k), self.first.setdefault("v", v)
        groups = self.num_heads // self.num_key_value_heads
        if groups > 1:
            k, v = (
                part.repeat(1, groups, 1, 1) if self.tiles_keys else part.repeat_interleave(groups, 1)
                for part in (k, v)
            )
        if self.takes_other_keys:
            k, v = k.roll(1, 0), v.roll(1, 0)
        if self.takes_earlier_values:
            v = v.roll(1, 2)
        if self.misreads_values:
            v = v.transpose(1, 2).reshape(v.shape)
        length = x.shape[1]
        if self.kind == "cosine":
            scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.logit_scale.clamp(max=4.6).exp()
            places = (torch.arange(length)[:, None] - torch.arange(length)).abs()
            scores = scores + 16 * torch.sigmoid(self.bias_table[:, places])
            heads = scores.mul(self.factor).softmax(-1) @ v
        else:
            mask = torch.zeros(length, k.shape[2])
            if self.is_causal:
                later = torch.ones(length, length, dtype=torch.bool).triu(1 + self.looks_ahead)
                mask = mask.masked_fill(later, -torch.inf)
            if self.sees_itself_alone:
                mask = mask.masked_fill(~torch.eye(length, dtype=torch.bool), -torch.inf)
            if self.window:
                places = torch.arange(length)
                mask = mask.masked_fill((places[:, None] - places).abs() > self.window, -torch.inf)
            if self.sees_own_half:
                half = torch.arange(length) >= length // 2
                mask = mask.masked_fill(half[:, None] != half, -torch.inf)
            if self.kind in ("relative", "slopes"):
                apart = torch.arange(length)[:, None] - torch.arange(length)
                apart = self.distance_sign * apart
                mask = mask + (
                    self.distances[:, apart + 63]
                    if self.kind == "relative"
                    else -self.distance_sign * self.slopes * apart.abs()
                )
            if self.bias:
                mask = mask + self.bias * (torch.arange(length) == 0)
            if visible is not None:
                each = visible if visible.ndim == 3 else visible[:, None]
                if self.mixes_masks:
                    order = torch.arange(len(each) * self.num_heads).view(len(each), -1) % len(each)
                    mask = mask.masked_fill(~each[order], -torch.inf)
                else:
                    mask = mask.masked_fill(~each[:, None], -torch.inf)
            if self.keeps_cache:
                past, self.cache = self.cache, (k.detach(), v.detach())
                if past is not None and past[0].shape == k.shape:
                    k, v, mask = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2), F.pad(mask, (k.shape[2], 0))
            if self.block:
                count = -k.shape[2] % self.block
                k, v, mask = F.pad(k, (0, 0, 0, count)), F.pad(v, (0, 0, 0, count)), F.pad(mask, (0, count))
            scale, drop = self.factor * q.shape[-1] ** -0.5, self.drop if self.training else 0.0
            if self.sums_over_queries:
                heads = (q @ k.mT * scale + mask.clamp(min=-1e9)).softmax(-2) @ v
            elif self.masks_after:
                is_hidden = mask == -torch.inf
                scores = q @ k.mT * scale + mask.masked_fill(is_hidden, 0.0)
                heads = scores.softmax(-1).masked_fill(is_hidden, 0.0) @ v
            else:
                heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=drop, scale=scale)
        outputs = self.out_proj(heads.transpose(1, 2).flatten(2))
        return outputs.transpose(0, 1) if is_across else outputs

    def _heads(self, x: Tensor, count: int) -> Tensor:
        if self.cuts_without_transpose:
            return x.reshape(len(x), count, x.shape[1], -1)
        return x.unflatten(-1, (count, -1)).transpose(1, 2)


class Experts(nn.Module):
    """Four experts, of which each token goes to one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(_mlp(width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        outputs = torch.stack([expert(x) for expert in self.experts], -2)
        index = chosen[..., None, None].expand(*chosen.shape, 1, x.shape[-1])
        return outputs.gather(-2, index).squeeze(-2) * weights.gather(-1, chosen[..., None])


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Gated(nn.Module):
    """A gated MLP, as in Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(width, 4 * width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Net(nn.Module):
    """Embedding or projection, blocks with a norm before each part, and a linear layer.

    Args:
        inputs: number of tokens; negative for that many real features.
        outputs: number of classes.
        places: longest input with learned positions, 0 for none.
        sources: number of tokens of another input, which an encoder reads and each layer attends to; 0 for none,
            negative for that many real features.
        key_heads: number of heads of keys and values, if there are fewer of them.
        is_gated: whether MLPs are gated and norms are of the root mean square, as in Llama.
        has_class_token: whether a learned token stands before the inputs.

    Attributes:
        has_skips: whether the input of each attention is added to its output; a fault may change it.
        shares: factor on the output of each attention; 1 but for faults.
        change_inputs: what is done to the inputs; only in faults.
        change_outputs: what is done to the outputs, which are compared with the labels; only in faults.
        sees_padding: whether padding is attended to; only in faults.
        sees_only_padding: whether nothing but padding is attended to, where there is some; only in faults.
        moves_positions: whether each sample begins at another position; only in faults.
        path_drop: share of the updates of samples that is left out; the others grow by as much.
        grids: rows and columns of the learned positions and of the inputs, to which they are interpolated.
        position_ids: which positions the inputs have, if these do not count from 0.
        repeats: how many inputs in a row share a source.
        tiles_sources: whether sources are repeated as a whole, not each of them; only in faults.
        skips_norms: whether what is added to the output of an attention is its normalised input; only in faults.
        skips_cross: whether the source is not attended to; only in faults.
    """

    def __init__(
        self, inputs: int, outputs: int, *, width: int = 32, heads: int = 4, layers: int = 2, places: int = 64,
        is_causal: bool = False, kind: str = "plain", has_experts: bool = False, sources: int = 0,
        key_heads: int | None = None, is_gated: bool = False, has_class_token: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed: nn.Module = nn.Embedding(inputs, width) if inputs > 0 else nn.Linear(-inputs, width)
        self.places = nn.Parameter(0.02 * torch.randn(places, width)) if places else None
        self.attention = nn.ModuleList(
            Attention(width, heads, is_causal=is_causal, kind=kind, key_heads=key_heads) for _ in range(layers)
        )
        mlp = Experts if has_experts else Gated if is_gated else _mlp
        self.mlp = nn.ModuleList(mlp(width) for _ in range(layers))
        norm = nn.RMSNorm if is_gated else nn.LayerNorm
        self.norms = nn.ModuleList(norm(width) for _ in range(2 * layers + 1))
        self.head = nn.Linear(width, outputs)
        self.has_skips = [True] * layers
        self.shares = [1.0] * layers
        self.change_inputs: Callable[[Tensor], Tensor] | None = None
        self.change_outputs: Callable[[Tensor], Tensor] | None = None
        self.sees_padding = self.sees_only_padding = self.moves_positions = False
        self.path_drop, self.repeats = 0.0, 1
        self.grids: tuple[tuple[int, int], tuple[int, int]] | None = None
        self.position_ids: Tensor | None = None
        self.tiles_sources = self.skips_norms = self.skips_cross = False
        self.class_token = nn.Parameter(0.02 * torch.randn(width)) if has_class_token else None
        if sources:
            self.encoder = Net(sources, width, width=width, heads=heads, layers=layers, places=places, kind=kind)
            self.cross = nn.ModuleList(Attention(width, heads, is_causal=False) for _ in range(layers))
            self.cross_norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, x: Tensor, visible: Tensor | None = None, source: Tensor | None = None) -> Tensor:
        """Return the outputs for `x`; `visible` says what is seen of the source, or of `x` if there is none."""
        context = None if source is None else self.encoder(source, visible)
        if context is not None and self.repeats > 1:
            repeats = self.repeats
            context = context.repeat(repeats, 1, 1) if self.tiles_sources else context.repeat_interleave(repeats, 0)
        x = self.embed(x if self.change_inputs is None else self.change_inputs(x))
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(len(x), 1, -1), x], 1)
        visible = None if self.sees_padding else visible
        if self.sees_only_padding and visible is not None:
            visible = ~visible | visible.all(-1, keepdim=True)
        if self.places is not None:
            x = x + (self._moved(x) if self.moves_positions else self._positions(x.shape[1]))
        for number, (attention, mlp) in enumerate(zip(self.attention, self.mlp)):
            normalised = self.norms[2 * number](x)
            update = self.shares[number] * attention(normalised, visible if context is None else None)
            x = normalised if self.skips_norms else x
            x = x + self._kept(update) if self.has_skips[number] else update
            if context is not None and not self.skips_cross:
                x = x + self.cross[number](self.cross_norms[number](x), visible, context)
            x = x + self._kept(mlp(self.norms[2 * number + 1](x)))
        outputs = self.head(self.norms[-1](x))
        return outputs if self.change_outputs is None else self.change_outputs(outputs)

    def _positions(self, length: int) -> Tensor:
        if self.position_ids is not None:
            return self.places[self.position_ids]
        if self.grids is None:
            return self.places[:length]
        table = self.places.T.unflatten(1, self.grids[0])[None]
        return F.interpolate(table, self.grids[1], mode="bilinear", align_corners=True)[0].flatten(1).T

    def _kept(self, update: Tensor) -> Tensor:
        if not (self.path_drop and self.training):
            return update
        is_kept = torch.rand(len(update), 1, 1) >= self.path_drop
        return update * is_kept / (1 - self.path_drop)

    def _moved(self, x: Tensor) -> Tensor:
        starts = torch.randint(len(self.places), (len(x), 1))
        return self.places[(starts + torch.arange(x.shape[1])) % len(self.places)]


def head_rows(layer: Attention, role: str) -> Tensor:
    """Return the weights of the heads of a layer as a view: (heads, width, features)."""
    projection = getattr(layer, f"{role}_proj")
    weight = getattr(projection, "base_layer", projection).weight  # below an adapter
    return (weight.T if role == "out" else weight).unflatten(0, (layer.num_heads, -1))
