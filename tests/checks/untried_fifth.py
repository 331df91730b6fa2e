"""A fifth round of public reports, mostly from small repositories: vision, speech, graphs, cells, items, points.

As in `untried`, a report keeps its first result for good. Each model is written as its authors would, and not on a
common base: what is told must not depend on that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.checks.untried import Report

W, N = 24, 8  # width and tokens


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def ids(rows: int = 3, count: int = N, pads: tuple[int, ...] = (), left: bool = False) -> Tensor:
    table = torch.randint(1, 20, (rows, count), generator=torch.Generator().manual_seed(4))
    for row, many in zip(table, pads):
        if many:
            row[slice(0, many) if left else slice(-many, None)] = 0
    return table


@dataclass(frozen=True)
class Own(Report):
    """A report whose model stands alone, and is given inputs of its own."""

    given: Callable[[], dict[str, object]] = dict

    def build(self, is_twin: bool = False) -> nn.Module:
        torch.manual_seed(0)
        return (self.twin if is_twin else self.kind)().eval()

    def inputs(self) -> dict[str, object]:
        return self.given()


# --- vision: images of a batch in one row, with a mask of blocks


class PixtralAttention(nn.Module):
    def __init__(self, n_heads=3):
        super().__init__()
        self.n_heads = n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(W, W, bias=False) for _ in range(4))

    def forward(self, x, mask=None):
        b, s, _ = x.shape
        xq, xk, xv = (w(x).view(b, s, self.n_heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(xq, xk, xv, attn_mask=mask)
        return self.wo(out.transpose(1, 2).reshape(b, s, -1))


class PixtralBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(W), nn.RMSNorm(W)
        self.attention = PixtralAttention()
        self.feed_forward = nn.Sequential(nn.Linear(W, 48), nn.SiLU(), nn.Linear(48, W))

    def forward(self, x, mask):
        h = x + self.attend(self.attention_norm(x), mask)
        return h + self.feed_forward(self.ffn_norm(h))

    def attend(self, x, mask):
        return self.attention(x, mask=mask)


class PixtralBlockMaskNotPassed(PixtralBlock):
    def attend(self, x, mask):
        return self.attention(x)


class Pixtral(nn.Module):
    block = PixtralBlock

    def __init__(self):
        super().__init__()
        self.patch_conv = nn.Conv2d(3, W, 4, 4, bias=False)
        self.pos = nn.Parameter(torch.randn(4, W))
        self.layers = nn.ModuleList(self.block() for _ in range(2))

    def forward(self, images):
        patches = [self.patch_conv(image[None]).flatten(2).transpose(1, 2) + self.pos for image in images]
        mask = torch.block_diag(*[torch.ones(p.shape[1], p.shape[1]) for p in patches]).bool()
        x = torch.cat(patches, 1)
        for layer in self.layers:
            x = layer(x, mask)
        return x.view(len(images), -1, W)


class PixtralMaskNotPassed(Pixtral):
    block = PixtralBlockMaskNotPassed


# --- diffusion: padding of a prompt is set to zero, and attended to


class Prompted(nn.Module):
    """A denoiser of latents that reads a prompt."""

    zeroes_embeds = False

    def __init__(self):
        super().__init__()
        self.x_embedder, self.caption = nn.Linear(6, W), nn.Linear(10, W)
        self.pos_embed = nn.Parameter(torch.randn(1, 9, W) * 0.2)
        self.attn1 = nn.MultiheadAttention(W, 4, batch_first=True)
        self.attn2 = nn.MultiheadAttention(W, 4, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(W), nn.LayerNorm(W)
        self.proj_out = nn.Linear(W, 6)

    def forward(self, hidden_states, encoder_hidden_states, encoder_attention_mask):
        hidden = self.x_embedder(hidden_states) + self.pos_embed
        ignore = encoder_attention_mask == 0
        if self.zeroes_embeds:
            encoder_hidden_states = encoder_hidden_states * encoder_attention_mask[..., None]
            ignore = None
        text = self.caption(encoder_hidden_states)
        normed = self.norm1(hidden)
        hidden = hidden + self.attn1(normed, normed, normed)[0]
        hidden = hidden + self.attn2(self.norm2(hidden), text, text, key_padding_mask=ignore)[0]
        return self.proj_out(hidden)


class PromptZeroed(Prompted):
    zeroes_embeds = True


def prompt():
    mask = torch.ones(3, 7)
    mask[0, 4:], mask[2, 6:] = 0, 0
    return {
        "hidden_states": noise(3, 9, 6), "encoder_hidden_states": noise(3, 7, 10), "encoder_attention_mask": mask
    }  # fmt: skip


# --- a chat model: the mask is filled over the batch


class SmallCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings, self.wpe = nn.Embedding(20, W), nn.Embedding(N, W)
        self.qkv, self.wo = nn.Linear(W, 3 * W), nn.Linear(W, W)
        self.norm, self.output = nn.LayerNorm(W), nn.Linear(W, 20)

    def forward(self, input_ids, lengths):
        mask = torch.zeros(input_ids.shape, dtype=torch.bool)
        for row, n in enumerate(lengths.tolist()):
            self.fill(mask, row, n)
        x = self.tok_embeddings(input_ids) + self.wpe.weight[: input_ids.shape[1]]
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        hidden = ~mask[:, None, None, :] | torch.ones(N, N).triu(1).bool()
        scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(hidden, torch.finfo(q.dtype).min)
        return self.output(x + self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))

    def fill(self, mask, row, n):
        mask[row, N - n :] = True


class MaskFilledOverTheBatch(SmallCausalLM):
    def fill(self, mask, row, n):
        mask[N - n :] = True


# --- speech: the shift of Transformer-XL in an encoder without a causal mask


class RelPositionalEncoder(nn.Module):
    heads = 4

    def __init__(self):
        super().__init__()
        self.front = nn.Linear(5, W)
        self.linear_q, self.linear_k, self.linear_v, self.linear_out = (nn.Linear(W, W) for _ in range(4))
        self.linear_pos = nn.Linear(W, W, bias=False)
        self.pos_bias_u = nn.Parameter(torch.randn(self.heads, W // self.heads) * 0.3)
        self.pos_bias_v = nn.Parameter(torch.randn(self.heads, W // self.heads) * 0.3)
        self.norm, self.ctc = nn.LayerNorm(W), nn.Linear(W, 11)

    def table(self, at):
        inv = torch.exp(torch.arange(0, W, 2) * -(math.log(10000.0) / W))
        angle = at[:, None] * inv
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)

    def positions(self, t):
        return torch.arange(t - 1, -t, -1)

    def rel_shift(self, x):
        b, h, t, n = x.shape
        x = F.pad(x, (1, 0)).view(b, h, n + 1, t)
        return x[:, :, 1:].view(b, h, t, n)[..., :t]

    def forward(self, speech):
        x = self.front(speech)
        y = self.norm(x)
        d = W // self.heads
        q = self.linear_q(y).unflatten(-1, (self.heads, d))
        k, v = (m(y).unflatten(-1, (self.heads, d)).transpose(1, 2) for m in (self.linear_k, self.linear_v))
        p = self.linear_pos(self.table(self.positions(y.shape[1]))).unflatten(-1, (self.heads, d)).transpose(0, 1)
        ac = (q + self.pos_bias_u).transpose(1, 2) @ k.transpose(-2, -1)
        bd = self.rel_shift((q + self.pos_bias_v).transpose(1, 2) @ p.transpose(-2, -1))
        attn = torch.softmax((ac + bd) / math.sqrt(d), dim=-1)
        return self.ctc(x + self.linear_out((attn @ v).transpose(1, 2).flatten(2)))


class ShiftOfTransformerXL(RelPositionalEncoder):
    """Where a key is later than its query, it gets the position of another query."""

    def positions(self, t):
        return torch.arange(t - 1, -1, -1)


# --- medical images: cross-attention that is not scaled


class SpatialCrossAttention(nn.Module):
    scaled = True

    def __init__(self):
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(1, W, 3, padding=1), nn.Conv2d(W, 1, 1)
        self.norm = nn.GroupNorm(4, W)
        self.to_q, self.to_k, self.to_v = nn.Linear(W, W, bias=False), nn.Linear(7, W, bias=False), nn.Linear(7, W)
        self.to_out = nn.Linear(W, W)
        self.scale = 1 / math.sqrt(W / 3)

    def reshape_heads_to_batch_dim(self, x):
        b, n, _ = x.shape
        return x.reshape(b, n, 3, W // 3).permute(0, 2, 1, 3).reshape(b * 3, n, W // 3)

    def forward(self, x, context):
        x = self.conv_in(x)
        b, c, h, w = x.shape
        seq = self.norm(x).permute(0, 2, 3, 1).reshape(b, h * w, c)
        query, key, value = self.to_q(seq), self.to_k(context), self.to_v(context)
        query, key, value = (self.reshape_heads_to_batch_dim(t) for t in (query, key, value))
        attention_scores = torch.bmm(query, key.transpose(-1, -2))
        if self.scaled:
            attention_scores = attention_scores * self.scale
        out = torch.bmm(attention_scores.softmax(dim=-1), value)
        out = out.reshape(b, 3, h * w, W // 3).permute(0, 2, 1, 3).reshape(b, h * w, c)
        return self.conv_out(x + self.to_out(out).reshape(b, h, w, c).permute(0, 3, 1, 2))


class CrossAttentionUnscaled(SpatialCrossAttention):
    scaled = False


# --- graphs


def edge_softmax(scores: Tensor, index: Tensor, count: int) -> Tensor:
    weights = (scores - scores.max()).exp()
    total = torch.zeros(count, *scores.shape[1:]).index_add(0, index, weights)
    return weights / total[index]


class DotGat(nn.Module):
    """Scores of edges are dot products of their ends."""

    divides_scores = True

    def __init__(self, heads=4):
        super().__init__()
        self.heads, self.d = heads, W // heads
        self.fc_src, self.fc_dst, self.out = nn.Linear(9, W), nn.Linear(9, W), nn.Linear(W, 3)

    def forward(self, feat, edge_index):
        src, dst = edge_index
        from_src = self.fc_src(feat).view(-1, self.heads, self.d)
        to_dst = self.fc_dst(feat).view(-1, self.heads, self.d)
        a = (from_src[src] * to_dst[dst]).sum(-1, keepdim=True)
        if self.divides_scores:
            sa = edge_softmax(a / self.d**0.5, dst, len(feat))
        else:
            sa = edge_softmax(a, dst, len(feat)) / self.d**0.5
        agg = torch.zeros(len(feat), self.heads, self.d).index_add(0, dst, from_src[src] * sa)
        return self.out(agg.flatten(1))


class DotGatDividesWeights(DotGat):
    divides_scores = False


class ChemGAT(nn.Module):
    """Molecules: messages go from sources to targets."""

    grouped_by = 1

    def __init__(self, heads=2):
        super().__init__()
        self.heads = heads
        self.weight_linear = nn.Linear(9, heads * W)
        self.att = nn.Parameter(torch.randn(1, heads, 2 * W) * 0.2)
        self.bond, self.head = nn.Embedding(4, heads * W), nn.Linear(W, 2)

    def forward(self, x, edge_index, edge_attr):
        x = self.weight_linear(x).view(-1, self.heads, W)
        x_j = x[edge_index[0]] + self.bond(edge_attr).view(-1, self.heads, W)
        alpha = (torch.cat([x[edge_index[1]], x_j], dim=-1) * self.att).sum(dim=-1)
        alpha = edge_softmax(F.leaky_relu(alpha, 0.2), edge_index[self.grouped_by], len(x))
        out = torch.zeros_like(x).index_add(0, edge_index[1], x_j * alpha.view(-1, self.heads, 1))
        return self.head(out.mean(dim=1))


class ChemGATBySource(ChemGAT):
    grouped_by = 0


def edges():
    pairs = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 2, 4, 6, 1], [1, 2, 3, 4, 5, 6, 0, 3, 5, 1, 2, 6]])
    return {"feat": noise(7, 9), "edge_index": pairs}


def molecule():
    graph = edges()
    return {"x": graph["feat"], "edge_index": graph["edge_index"], "edge_attr": torch.arange(12) % 4}


class DenseGAT(nn.Module):
    """Additive scores, for all pairs of nodes."""

    def __init__(self, heads=4):
        super().__init__()
        self.heads, self.d = heads, W // heads
        self.lin = nn.Linear(9, W, bias=False)
        self.att_l, self.att_r = (nn.Parameter(torch.randn(heads, self.d)) for _ in range(2))
        self.out = nn.Linear(W, 3)

    def forward(self, x, adj):
        h = self.lin(x).unflatten(-1, (self.heads, self.d))
        alpha_l, alpha_r = self.ends(h)
        e = F.leaky_relu(alpha_l[:, :, None] + alpha_r[:, None], 0.2)
        e = e.masked_fill(adj[..., None] == 0, float("-inf")).softmax(dim=2)
        return self.out(F.elu(torch.einsum("bijh,bjhd->bihd", e, h).flatten(2)))

    def ends(self, h):
        return (h * self.att_l).sum(-1), (h * self.att_r).sum(-1)


class OneVectorForBothEnds(DenseGAT):
    def ends(self, h):
        alpha = (h * self.att_l).sum(-1)
        return alpha, alpha


def dense_graph():
    adj = (noise(2, 7, 7) > 0).float()
    return {"x": noise(2, 7, 9), "adj": adj.maximum(torch.eye(7))}


# --- a mobile runtime: rotary positions with a cache


class LlamaWithCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.norm, self.output = nn.Embedding(20, W), nn.RMSNorm(W), nn.Linear(W, 20, bias=False)
        self.wq, self.wo = nn.Linear(W, W, bias=False), nn.Linear(W, W, bias=False)
        self.wk, self.wv = nn.Linear(W, 12, bias=False), nn.Linear(W, 12, bias=False)
        angles = torch.outer(torch.arange(32), 100 ** (-torch.arange(0, 6, 2) / 6))
        self.register_buffer("freqs", torch.polar(torch.ones_like(angles), angles))

    def rope(self, x, freqs):
        x = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(x * freqs[None, :, None]).flatten(3)

    def place(self, start_pos, seqlen):
        return self.freqs[start_pos : start_pos + seqlen]

    def forward(self, tokens, start_pos, cache_k, cache_v):
        x, (b, t) = self.tok(tokens), tokens.shape
        y = self.norm(x)
        q, k, v = self.wq(y).view(b, t, 4, 6), self.wk(y).view(b, t, 2, 6), self.wv(y).view(b, t, 2, 6)
        freqs = self.place(start_pos, t)
        q, k = self.rope(q, freqs), self.rope(k, freqs)
        k, v = torch.cat([cache_k, k], 1), torch.cat([cache_v, v], 1)
        k, v = (z.repeat_interleave(2, 2).transpose(1, 2) for z in (k, v))
        mask = torch.full((t, start_pos + t), float("-inf")).triu(start_pos + 1)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask)
        return self.output(x + self.wo(out.transpose(1, 2).reshape(b, t, W)))


class RotaryFromZero(LlamaWithCache):
    def place(self, start_pos, seqlen):
        return self.freqs[:seqlen]


def cached():
    keys = noise(2, 3, 3, 2, 6)
    return {"tokens": ids(3, 5), "start_pos": 3, "cache_k": keys[0], "cache_v": keys[1]}


# --- points: one decoder layer in each place of the list


class PointDecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(W, 4, batch_first=True)
        self.cross_attn = nn.MultiheadAttention(W, 4, batch_first=True)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(W) for _ in range(3))
        self.ffn = nn.Sequential(nn.Linear(W, 2 * W), nn.ReLU(), nn.Linear(2 * W, W))

    def forward(self, tgt, memory):
        tgt = self.norm1(tgt + self.self_attn(tgt, tgt, tgt)[0])
        tgt = self.norm2(tgt + self.cross_attn(tgt, memory, memory)[0])
        return self.norm3(tgt + self.ffn(tgt))


class Superquadrics(nn.Module):
    def __init__(self):
        super().__init__()
        self.point_encoder = nn.Sequential(nn.Linear(3, W), nn.ReLU(), nn.Linear(W, W))
        self.queries = nn.Parameter(torch.randn(5, W))
        self.layers = self.stack(3)
        self.head = nn.Linear(W, 8)

    def stack(self, depth):
        return nn.ModuleList([PointDecoderLayer() for _ in range(depth)])

    def forward(self, points):
        memory = self.point_encoder(points)
        x = self.queries.expand(len(points), -1, -1)
        for layer in self.layers:
            x = layer(x, memory)
        return self.head(x)


class OneLayerRepeated(Superquadrics):
    def stack(self, depth):
        layer = PointDecoderLayer()
        return nn.ModuleList([layer for _ in range(depth)])


# --- cells: dropout of something else than the layer's output


class CellBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(W, 4, batch_first=True)
        self.ln1, self.ln2 = nn.LayerNorm(W), nn.LayerNorm(W)
        self.dense, self.drop = nn.Linear(W, W), nn.Dropout(0.1)

    def forward(self, z, mask):
        z = self.ln1(z + self.drop(self.mha(z, z, z, key_padding_mask=mask)[0]))
        z_ = F.silu(self.dense(z))
        return self.ln2(z + self.dropped(z, z_))

    def dropped(self, z, z_):
        return self.drop(z_)


class CellBlockDropsItsInput(CellBlock):
    def dropped(self, z, z_):
        return self.drop(z)


class Conditions(nn.Module):
    block = CellBlock

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(6, W), nn.Linear(W, 10)
        self.layers = nn.ModuleList([self.block(), self.block()])

    def forward(self, perturbations, mask):
        z = self.embed(perturbations)
        for layer in self.layers:
            z = layer(z, mask)
        return self.out(z)


class ConditionsDropTheirInput(Conditions):
    block = CellBlockDropsItsInput


def perturbed():
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[1, 3:] = True
    return {"perturbations": noise(3, 5, 6), "mask": mask}


# --- one-bit weights: what should be the residual is attention's output twice


class BitTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.to_logits = nn.Embedding(20, W), nn.Sequential(nn.RMSNorm(W), nn.Linear(W, 20))
        self.wpe = nn.Embedding(N, W)
        self.layers = nn.ModuleList(nn.MultiheadAttention(W, 4, batch_first=True) for _ in range(3))
        self.ffn_layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(W), nn.Linear(W, 2 * W), nn.GELU(), nn.Linear(2 * W, W)) for _ in range(3)
        )

    def forward(self, x):
        x = self.emb(x) + self.wpe.weight[: x.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for attn, ffn in zip(self.layers, self.ffn_layers):
            y, _ = attn(x, x, x, attn_mask=mask, is_causal=True)
            x = self.add(x, y)
            x = ffn(x) + x
        return self.to_logits(x)

    def add(self, x, y):
        return x + y


class AttentionAddedToItself(BitTransformer):
    def add(self, x, y):
        return y + y


# --- translation: keys and values of the decoder's own tokens


class HeadOfAttention(nn.Module):
    def __init__(self, d_feature):
        super().__init__()
        self.query_tfm, self.key_tfm, self.value_tfm = (nn.Linear(W, d_feature) for _ in range(3))

    def forward(self, queries, keys, values, mask=None):
        Q, K, V = self.query_tfm(queries), self.key_tfm(keys), self.value_tfm(values)
        scores = torch.bmm(Q, K.permute(0, 2, 1)) / Q.size(2) ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        return torch.bmm(F.softmax(scores, dim=-1), V)


class HeadsSideBySide(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_heads = nn.ModuleList([HeadOfAttention(W // 3) for _ in range(3)])
        self.projection = nn.Linear(W, W)

    def forward(self, queries, keys, values, mask=None):
        return self.projection(torch.cat([head(queries, keys, values, mask) for head in self.attn_heads], dim=-1))


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.src_embed, self.tgt_embed, self.pos = nn.Embedding(20, W), nn.Embedding(20, W), nn.Embedding(16, W)
        self.encoder, self.masked_attn_head, self.attn_head = (HeadsSideBySide() for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(W) for _ in range(3))
        self.generator = nn.Linear(W, 20)

    def forward(self, src, tgt):
        enc_out = self.src_embed(src) + self.pos.weight[: src.shape[1]]
        enc_out = self.norms[0](enc_out + self.encoder(enc_out, enc_out, enc_out))
        x = self.tgt_embed(tgt) + self.pos.weight[: tgt.shape[1]]
        x = self.norms[1](x + self.masked_attn_head(x, x, x, torch.ones(tgt.shape[1], tgt.shape[1]).tril()))
        keys = self.keys(x, enc_out)
        return self.generator(self.norms[2](x + self.attn_head(x, keys, keys)))

    def keys(self, x, enc_out):
        return enc_out


class KeysOfTheDecoder(Translator):
    def keys(self, x, enc_out):
        return x


# --- items that are recommended


class SASRec(nn.Module):
    is_causal = True

    def __init__(self):
        super().__init__()
        self.item_emb, self.pos_emb = nn.Embedding(21, W, padding_idx=0), nn.Embedding(N, W)
        self.attention_layernorms = nn.ModuleList(nn.LayerNorm(W, eps=1e-8) for _ in range(2))
        self.attention_layers = nn.ModuleList(nn.MultiheadAttention(W, 2, 0.1, batch_first=True) for _ in range(2))
        self.last_layernorm = nn.LayerNorm(W)

    def log2feats(self, seq):
        seqs = self.item_emb(seq) * W**0.5 + self.pos_emb(torch.arange(seq.shape[1]))
        timeline = seq == 0
        seqs = seqs * ~timeline[..., None]
        later = ~torch.tril(torch.ones(seq.shape[1], seq.shape[1], dtype=torch.bool))
        for norm, attention in zip(self.attention_layernorms, self.attention_layers):
            q = norm(seqs)
            if self.is_causal:
                out, _ = attention(q, seqs, seqs, attn_mask=later)
            else:
                out, _ = attention(q, seqs, seqs)
            seqs = (q + out) * ~timeline[..., None]
        return self.last_layernorm(seqs)

    def forward(self, seq, positive):
        feats = self.log2feats(seq)
        logits = feats @ self.item_emb.weight.T
        return F.cross_entropy(logits.flatten(0, 1), positive.flatten(), ignore_index=0)


class SASRecSeesTheNextItem(SASRec):
    is_causal = False


def items():
    line = ids(3, N + 1, (2, 0, 1), left=True)
    return {"seq": line[:, :-1], "positive": line[:, 1:]}


class MaskOfItems(nn.Module):
    """Padding is told by its numbers in one tower, and by its ids in the twin."""

    def __init__(self):
        super().__init__()
        self.lookup, self.pos = nn.Embedding(21, W, padding_idx=0), nn.Embedding(N, W)
        self.Q, self.K, self.V = nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, W)
        self.ln, self.logits = nn.LayerNorm(W), nn.Linear(W, 21)

    def key_masks(self, keys, items):
        return items != 0

    def forward(self, items):
        t = items.shape[1]
        seq = self.lookup(items) + self.pos.weight[:t]
        queries = self.ln(seq)
        q, k, v = (torch.cat(f(x).split(W // 2, 2), 0) for f, x in ((self.Q, queries), (self.K, seq), (self.V, seq)))
        outputs = q @ k.transpose(1, 2) / (W // 2) ** 0.5
        masks = self.key_masks(seq, items).repeat(2, 1)[:, None]
        outputs = torch.where(masks, outputs, torch.tensor(-(2.0**32) + 1))
        outputs = torch.where(torch.ones(t, t).tril() == 0, torch.tensor(-(2.0**32) + 1), outputs)
        outputs = torch.cat((outputs.softmax(-1) @ v).chunk(2, 0), 2)
        return self.logits(outputs + queries)


class MaskOfNumbers(MaskOfItems):
    def key_masks(self, keys, items):
        return keys.sum(-1).abs().sign() == 1


# --- paraphrases: tokens are pooled, padding and all


class PooledByHeads(nn.Module):
    masks_pool = True

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, W, padding_idx=0)
        self.pos = nn.Embedding(N, W)
        self.encoder = nn.TransformerEncoderLayer(W, 4, 48, batch_first=True, norm_first=True)
        self.linear_keys, self.linear_values, self.final = nn.Linear(W, 4), nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, tokens, padding_mask):
        x = self.embed(tokens) + self.pos.weight[: tokens.shape[1]]
        x = self.encoder(x, src_key_padding_mask=padding_mask)
        scores = self.linear_keys(x).transpose(1, 2)
        if self.masks_pool:
            scores = scores.masked_fill(padding_mask[:, None], -1e18)
        weights = F.softmax(scores, dim=-1)
        values = self.linear_values(x).unflatten(-1, (4, -1)).transpose(1, 2)
        return self.final((weights[:, :, None] @ values).flatten(1))


class PoolsPadding(PooledByHeads):
    masks_pool = False


def padded():
    tokens = ids(3, N, (3, 0, 2))
    return {"tokens": tokens, "padding_mask": tokens == 0}


# --- translation: sines and cosines of two frequencies


class SineTransformer(nn.Module):
    shift = 0

    def __init__(self):
        super().__init__()
        pe = torch.zeros(32, W)
        for pos in range(32):
            for i in range(0, W, 2):
                pe[pos, i] = math.sin(pos / (10000 ** ((2 * i) / W)))
                pe[pos, i + 1] = math.cos(pos / (10000 ** ((2 * (i + self.shift)) / W)))
        self.register_buffer("pe", pe)
        self.embed = nn.Embedding(20, W)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(W, 4, 48, batch_first=True) for _ in range(2))
        self.out = nn.Linear(W, 20)

    def forward(self, src):
        x = self.embed(src) * math.sqrt(W) + self.pe[: src.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class CosineOfTheNextFrequency(SineTransformer):
    shift = 1


# --- a bias of relative positions beside memories


class BiasWithMemories(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_emb, self.norm, self.to_logits = nn.Embedding(20, W), nn.LayerNorm(W), nn.Linear(W, 20)
        self.to_q, self.to_kv, self.to_out = nn.Linear(W, W), nn.Linear(W, 2 * W), nn.Linear(W, W)
        self.relative_attention_bias = nn.Embedding(16, 4)

    def q_positions(self, i, j):
        return torch.arange(j - i, j)

    def forward(self, x, mem):
        x = self.token_emb(x)
        y = self.norm(x)
        i, j = x.shape[1], x.shape[1] + mem.shape[1]
        q, k, v = self.to_q(y), *self.to_kv(torch.cat([mem, y], 1)).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (q, k, v))
        dots = torch.einsum("bhid,bhjd->bhij", q, k) * (W // 4) ** -0.5
        rel = torch.arange(j)[None] - self.q_positions(i, j)[:, None]
        dots = dots + self.relative_attention_bias((-rel).clamp(0, 15)).permute(2, 0, 1)
        dots = dots.masked_fill(torch.ones(i, j).triu(j - i + 1).bool(), -torch.finfo(dots.dtype).max)
        out = torch.einsum("bhij,bhjd->bhid", dots.softmax(-1), v)
        return self.to_logits(x + self.to_out(out.transpose(1, 2).flatten(2)))


class BiasFromZero(BiasWithMemories):
    def q_positions(self, i, j):
        return torch.arange(i)


def memories():
    return {"x": ids(3, N), "mem": noise(3, 4, W)}


# --- a textbook: projections are made, and the raw streams are used


class TextbookHeads(nn.Module):
    def __init__(self, num_heads=3):
        super().__init__()
        d = W // num_heads
        self.query_dense, self.key_dense, self.value_dense = (
            nn.ModuleList(nn.Linear(W, d) for _ in range(num_heads)) for _ in range(3)
        )
        self.output_dense, self.d = nn.Linear(W, W), d

    def forward(self, query, key, value):
        head_outputs = []
        for parts in zip(self.query_dense, self.key_dense, self.value_dense):
            q, k, v = (dense(x) for dense, x in zip(parts, (query, key, value)))
            q, k, v = self.used((q, k, v), (query, key, value))
            scores = torch.softmax(torch.einsum("btd,bsd->bts", q, k) / math.sqrt(self.d), dim=-1)
            head_outputs.append(torch.einsum("bts,bsd->btd", scores, v)[..., : self.d])
        return self.output_dense(torch.cat(head_outputs, dim=-1))

    def used(self, projected, raw):
        return projected


class RawStreams(TextbookHeads):
    def used(self, projected, raw):
        return raw


class Textbook(nn.Module):
    heads = TextbookHeads

    def __init__(self):
        super().__init__()
        self.embed, self.pos = nn.Embedding(20, W), nn.Embedding(N, W)
        self.attend, self.out = self.heads(), nn.Linear(W, 20)

    def forward(self, tokens):
        x = self.embed(tokens) + self.pos.weight[: tokens.shape[1]]
        return self.out(x + self.attend(x, x, x))


class TextbookRaw(Textbook):
    heads = RawStreams


# --- speech from text: dropout behind the residual sum


class TextToSpeech(nn.Module):
    drops_the_sum = False

    def __init__(self):
        super().__init__()
        self.phonemes, self.pos = nn.Embedding(20, W), nn.Embedding(N, W)
        self.selfattn = nn.MultiheadAttention(W, 4, batch_first=True)
        self.w_1, self.w_2 = nn.Conv1d(W, 48, 1), nn.Conv1d(48, W, 1)
        self.dropout, self.layer_norm, self.norm = nn.Dropout(0.1), nn.LayerNorm(W), nn.LayerNorm(W)
        self.mel = nn.Linear(W, 5)

    def forward(self, text):
        x = self.phonemes(text) + self.pos.weight[: text.shape[1]]
        x = self.norm(x + self.selfattn(x, x, x)[0])
        y = self.w_2(torch.relu(self.w_1(x.transpose(1, 2)))).transpose(1, 2)
        x = self.dropout(y + x) if self.drops_the_sum else x + self.dropout(y)
        return self.mel(self.layer_norm(x))


class DropsTheSum(TextToSpeech):
    drops_the_sum = True


FIFTH = (
    Own(
        "mistralai/mistral-inference 218", PixtralMaskNotPassed, Pixtral,
        given=lambda: {"images": noise(3, 3, 8, 8)}, first=True,
    ),
    Own("ostris/ai-toolkit 161", PromptZeroed, Prompted, given=prompt),
    Own(
        "lxtGH/OMG-Seg 24", MaskFilledOverTheBatch, SmallCausalLM,
        given=lambda: {"input_ids": ids(3, N, (3, 0, 2), left=True), "lengths": torch.tensor([5, 8, 6])}, first=True,
    ),
    Own(
        "ZhengkunTian/OpenTransformer 25", ShiftOfTransformerXL, RelPositionalEncoder,
        given=lambda: {"speech": noise(3, N, 5)},
    ),
    Own(
        "Project-MONAI/GenerativeModels 146", CrossAttentionUnscaled, SpatialCrossAttention,
        given=lambda: {"x": noise(2, 1, 4, 4), "context": noise(2, 6, 7)}, first=True,
    ),
    Own("dmlc/dgl 3267", DotGatDividesWeights, DotGat, given=edges),
    Own("snap-stanford/pretrain-gnns 49", ChemGATBySource, ChemGAT, given=molecule),
    Own("pyg-team/pytorch_geometric 1642", OneVectorForBothEnds, DenseGAT, given=dense_graph),
    Own("pytorch/executorch 2010", RotaryFromZero, LlamaWithCache, given=cached),
    Own("elisabettafedele/superdec 2", OneLayerRepeated, Superquadrics, given=lambda: {"points": noise(2, 12, 3)}),
    Own("theislab/CellFlow 296", ConditionsDropTheirInput, Conditions, given=perturbed),
    Own("kyegomez/BitNet 32", AttentionAddedToItself, BitTransformer, given=lambda: {"x": ids()}, first=True),
    Own(
        "keitakurita/Practical_NLP_in_PyTorch 1", KeysOfTheDecoder, Translator,
        given=lambda: {"src": ids(3, 7), "tgt": ids().flip(0)}, first=True,
    ),
    Own("liuqidong07/LLMEmb 2", SASRecSeesTheNextItem, SASRec, given=items, first=True),
    Own(
        "kang205/SASRec 15", MaskOfNumbers, MaskOfItems,
        given=lambda: {"items": ids(3, N, (3, 0, 2), left=True)}, first=True,
    ),
    Own("tomhosking/torchseq 10", PoolsPadding, PooledByHeads, given=padded),
    Own("SamLynnEvans/Transformer 25", CosineOfTheNextFrequency, SineTransformer, given=lambda: {"src": ids()}),
    Own("lucidrains/x-transformers 103", BiasFromZero, BiasWithMemories, given=memories),
    Own("fchollet/deep-learning-with-python-notebooks 267", TextbookRaw, Textbook, given=lambda: {"tokens": ids()}),
    Own("soobinseo/Transformer-TTS 11", DropsTheSum, TextToSpeech, given=lambda: {"text": ids()}),
)  # fmt: skip
