"""A seventh round of public reports, spread as those that people meet: heads, masks, softmaxes, windows, positions.

As in `untried`, a report keeps its first result for good. All were written before any of them was checked.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from tests.checks.untried_fifth import N, Own, W, ids, noise

# --- an agent with an episodic memory: one map for the parts of all heads


class MemoryAttention(nn.Module):
    """An observation attends to those before it; each head has a map of its own."""

    def __init__(self, heads=4):
        super().__init__()
        self.num_heads, self.head_size = heads, W // heads
        self.values, self.keys, self.queries = (nn.Linear(W, W) for _ in range(3))
        self.fc_out = nn.Linear(W, W)

    def project(self, part, x):
        return part(x).reshape(len(x), x.shape[1], self.num_heads, self.head_size)

    def forward(self, values, keys, query, mask):
        values, keys = self.project(self.values, values), self.project(self.keys, keys)
        query = self.project(self.queries, query)
        energy = torch.einsum("nqhd,nkhd->nhqk", query, keys).masked_fill(mask[:, None, None] == 0, float("-1e20"))
        attention = torch.softmax(energy / self.head_size**0.5, dim=3)
        out = torch.einsum("nhql,nlhd->nqhd", attention, values)
        return self.fc_out(out.reshape(len(out), out.shape[1], -1))


class MemoryAttentionOneMap(MemoryAttention):
    def __init__(self, heads=4):
        super().__init__(heads)
        self.values, self.keys, self.queries = (nn.Linear(self.head_size, self.head_size) for _ in range(3))

    def project(self, part, x):
        return part(x.reshape(len(x), x.shape[1], self.num_heads, self.head_size))


class MemoryBlock(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention, self.norm1, self.norm2 = attention(), nn.LayerNorm(W), nn.LayerNorm(W)
        self.fc = nn.Sequential(nn.Linear(W, W), nn.ReLU())

    def forward(self, memory, query, mask):
        h = self.norm1(self.attention(memory, memory, query, mask) + query)
        return self.norm2(self.fc(h) + h)


class MemoryAgent(nn.Module):
    attention = MemoryAttention

    def __init__(self):
        super().__init__()
        self.embed, self.pos = nn.Linear(5, W), nn.Parameter(torch.randn(N, W))
        self.blocks = nn.ModuleList(MemoryBlock(self.attention) for _ in range(2))
        self.policy, self.value = nn.Linear(W, 3), nn.Linear(W, 1)

    def forward(self, obs, memories, mask):
        h = F.relu(self.embed(obs))[:, None]
        for at, block in enumerate(self.blocks):
            h = block(memories[:, :, at] + self.pos, h, mask)
        return self.policy(h[:, 0]), self.value(h[:, 0])


class MemoryAgentOneMap(MemoryAgent):
    attention = MemoryAttentionOneMap


def episode():
    return {
        "obs": noise(3, 5),
        "memories": noise(3, N, 2, W),
        "mask": (torch.arange(N) < torch.tensor([[4], [8], [6]])).long(),
    }


# --- heads in a loop of batched products, put together by a view


class BatchedHeads(nn.Module):
    """Each head has three matrices, and heads lie before the batch."""

    def __init__(self, n_head=4, d_k=6):
        super().__init__()
        self.n_head, self.d_k = n_head, d_k
        self.w_qs, self.w_ks, self.w_vs = (nn.Parameter(torch.randn(n_head, W, d_k) * W**-0.5) for _ in range(3))
        self.proj, self.layer_norm, self.dropout = nn.Linear(n_head * d_k, W), nn.LayerNorm(W), nn.Dropout(0.1)

    def put_together(self, outputs, mb_size):
        return torch.cat(torch.split(outputs, mb_size, dim=0), dim=-1)

    def forward(self, x, attn_mask):
        mb_size, length, width = x.shape
        every = x.repeat(self.n_head, 1, 1).view(self.n_head, -1, width)
        q, k, v = (torch.bmm(every, w).view(-1, length, self.d_k) for w in (self.w_qs, self.w_ks, self.w_vs))
        attn = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(self.d_k)
        attn = attn.masked_fill(attn_mask.repeat(self.n_head, 1, 1), -1e9).softmax(-1)
        outputs = self.put_together(torch.bmm(self.dropout(attn), v), mb_size)
        return self.layer_norm(self.dropout(self.proj(outputs)) + x)


class BatchedHeadsViewed(BatchedHeads):
    def put_together(self, outputs, mb_size):
        return outputs.view(mb_size, outputs.shape[1], -1)


class SentenceEncoder(nn.Module):
    attention = BatchedHeads

    def __init__(self):
        super().__init__()
        self.src_word_emb, self.position_enc = nn.Embedding(20, W, padding_idx=0), nn.Embedding(N, W)
        self.layers, self.out = nn.ModuleList(self.attention() for _ in range(2)), nn.Linear(W, 20)

    def forward(self, src_seq):
        x = self.src_word_emb(src_seq) + self.position_enc(torch.arange(src_seq.shape[1]))
        mask = (src_seq == 0)[:, None].expand(-1, src_seq.shape[1], -1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.out(x)


class SentenceEncoderViewed(SentenceEncoder):
    attention = BatchedHeadsViewed


# --- a causal mask of keys that are mixtures of all tokens


class LinearHead(nn.Module):
    """Keys and values may be mixed along the sequence down to a few."""

    dim_k = None

    def __init__(self, dim=6):
        super().__init__()
        self.w_q, self.w_k, self.w_v = (nn.Linear(W, dim, bias=False) for _ in range(3))
        self.E = self.F = nn.Linear(N, self.dim_k) if self.dim_k else nn.Identity()
        self.causal_mask = torch.ones(self.dim_k or N, N).triu().bool().T

    def forward(self, x):
        q, k, v = self.w_q(x), self.w_k(x), self.w_v(x)
        k, v = self.E(k.transpose(1, 2)), self.F(v.transpose(1, 2)).transpose(1, 2)
        p = (q @ k / k.shape[1] ** 0.5).masked_fill(~self.causal_mask, float("-inf"))
        return p.softmax(-1) @ v


class LinearHeadMixed(LinearHead):
    dim_k = 4


class Linformer(nn.Module):
    head = LinearHead

    def __init__(self):
        super().__init__()
        self.emb, self.pos = nn.Embedding(20, W), nn.Parameter(torch.randn(N, W))
        self.heads = nn.ModuleList(nn.ModuleList(self.head() for _ in range(4)) for _ in range(2))
        self.w_o, self.norms = (
            nn.ModuleList(nn.Linear(W, W) for _ in range(2)),
            nn.ModuleList(nn.LayerNorm(W) for _ in range(2)),
        )
        self.to_logits = nn.Linear(W, 20)

    def forward(self, x):
        x = self.emb(x) + self.pos
        for heads, w_o, norm in zip(self.heads, self.w_o, self.norms):
            y = norm(x)
            x = x + w_o(torch.cat([head(y) for head in heads], -1))
        return self.to_logits(x)


class LinformerMixed(Linformer):
    head = LinearHeadMixed


# --- questions about an image: words behind the end of a question take part


class ControlUnit(nn.Module):
    hides = True

    def __init__(self):
        super().__init__()
        self.position_aware, self.control_question, self.attn = (
            nn.Linear(2 * W, W),
            nn.Linear(2 * W, W),
            nn.Linear(W, 1),
        )

    def forward(self, context, question, control, length):
        control_question = self.control_question(torch.cat([control, self.position_aware(question)], 1))
        weight = self.attn(control_question[:, None] * context)
        if self.hides:
            behind = torch.arange(context.shape[1])[None] >= length[:, None]
            weight = weight.masked_fill(behind[..., None], -1e9)
        return (weight.softmax(1) * context).sum(1)


class ControlUnitUnmasked(ControlUnit):
    hides = False


class ReadUnit(nn.Module):
    def __init__(self):
        super().__init__()
        self.mem, self.concat, self.attn = nn.Linear(W, W), nn.Linear(2 * W, W), nn.Linear(W, 1)

    def forward(self, memory, know, control):
        mem = self.mem(memory)[:, None]
        concat = self.concat(torch.cat([mem * know, know], -1))
        return (self.attn(concat * control[:, None]).softmax(1) * know).sum(1)


class MACNetwork(nn.Module):
    control = ControlUnit

    def __init__(self, steps=2):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(20, W), nn.LSTM(W, W, batch_first=True, bidirectional=True)
        self.lstm_proj, self.conv = nn.Linear(2 * W, W), nn.Conv2d(3, W, 3, padding=1)
        self.control_unit, self.read, self.write = self.control(), ReadUnit(), nn.Linear(2 * W, W)
        self.mem_0, self.control_0 = nn.Parameter(torch.randn(W)), nn.Parameter(torch.randn(W))
        self.classifier, self.steps = nn.Sequential(nn.Linear(3 * W, W), nn.ELU(), nn.Linear(W, 6)), steps

    def forward(self, image, question, question_len):
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(question), question_len, True, enforce_sorted=False)
        lstm_out, (h, _) = self.lstm(packed)
        context = self.lstm_proj(nn.utils.rnn.pad_packed_sequence(lstm_out, batch_first=True)[0])
        h, know = h.permute(1, 0, 2).reshape(len(question), -1), self.conv(image).flatten(2).transpose(1, 2)
        control, memory = self.control_0.expand(len(h), -1), self.mem_0.expand(len(h), -1)
        for _ in range(self.steps):
            control = self.control_unit(context, h, control, question_len)
            memory = self.write(torch.cat([memory, self.read(memory, know, control)], 1))
        return self.classifier(torch.cat([memory, h], 1))


class MACNetworkUnmasked(MACNetwork):
    control = ControlUnitUnmasked


def asked():
    return {"image": noise(3, 3, 4, 4), "question": ids(3, N, (3, 0, 2)), "question_len": torch.tensor([5, 8, 6])}


# --- speech: frames are pooled, and a mask of them is added as it is


class AttentivePooling(nn.Module):
    """One vector of an utterance, of frames that are weighted."""

    hides = True

    def __init__(self):
        super().__init__()
        self.projector, self.W_a, self.W = nn.Linear(5, W), nn.Linear(W, W), nn.Linear(W, 1)
        self.act_fn, self.linear = nn.ReLU(), nn.Linear(W, 4)

    def forward(self, features, features_len):
        batch_rep = self.projector(features)
        att_mask = torch.arange(features.shape[1]) < features_len[:, None]
        att_logits = self.W(self.act_fn(self.W_a(batch_rep))).squeeze(-1)
        att_logits = att_logits + (~att_mask * -1e9 if self.hides else att_mask)
        att_w = att_logits.softmax(-1)[..., None]
        return self.linear(torch.sum(batch_rep * att_w, dim=1))


class AttentivePoolingAdded(AttentivePooling):
    hides = False


def utterances():
    features = noise(3, N, 5)
    features[0, 5:], features[2, 6:] = 0, 0
    return {"features": features, "features_len": torch.tensor([5, 8, 6])}


# --- additive attention of linear cost: a softmax over an axis of one


class EfficientAdditiveAttention(nn.Module):
    axis = 1

    def __init__(self):
        super().__init__()
        self.to_query, self.to_key, self.w_g = nn.Linear(W, W), nn.Linear(W, W), nn.Parameter(torch.randn(W, 1))
        self.proj, self.final, self.scale_factor = nn.Linear(W, W), nn.Linear(W, W), W**-0.5

    def forward(self, x):
        query, key = F.normalize(self.to_query(x), dim=-1), F.normalize(self.to_key(x), dim=-1)
        query_weight = query @ self.w_g
        a = torch.softmax(query_weight * self.scale_factor, dim=self.axis)
        g = torch.sum(a * query, dim=1)
        return self.final(self.proj(g[:, None] * key) + query)


class AdditiveOverOne(EfficientAdditiveAttention):
    axis = -1


class SwiftEncoder(nn.Module):
    attention = EfficientAdditiveAttention

    def __init__(self):
        super().__init__()
        self.patch_embed, self.local = nn.Conv2d(3, W, 2, 2), nn.Conv2d(W, W, 3, padding=1, groups=W)
        self.attn, self.linear = (
            self.attention(),
            nn.Sequential(nn.Conv2d(W, 2 * W, 1), nn.GELU(), nn.Conv2d(2 * W, W, 1)),
        )
        self.norm, self.head = nn.BatchNorm2d(W), nn.Linear(W, 5)

    def forward(self, image):
        x = self.patch_embed(image)
        x = x + self.local(x)
        x = x + self.attn(x.flatten(2).transpose(1, 2)).transpose(1, 2).view(x.shape)
        x = x + self.linear(self.norm(x))
        return self.head(x.mean((2, 3)))


class SwiftEncoderOverOne(SwiftEncoder):
    attention = AdditiveOverOne


def picture():
    return {"image": noise(3, 3, 8, 8)}


# --- a notebook about images: each head apart, and a softmax over queries


class NotebookAttention(nn.Module):
    axis = -1

    def __init__(self, heads=4):
        super().__init__()
        self.q, self.k, self.v = (nn.ModuleList(nn.Linear(W, W // heads) for _ in range(heads)) for _ in range(3))
        self.out = nn.Linear(W, W)

    def forward(self, x):
        results = []
        for q, k, v in zip(self.q, self.k, self.v):
            query, key, value = q(x), k(x), v(x)
            scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
            results.append(F.softmax(scores, dim=self.axis) @ value)
        return self.out(torch.cat(results, dim=-1))


class NotebookOverQueries(NotebookAttention):
    axis = 1


class NotebookViT(nn.Module):
    attention = NotebookAttention

    def __init__(self):
        super().__init__()
        self.embed, self.cls, self.pos = (
            nn.Linear(12, W),
            nn.Parameter(torch.randn(W)),
            nn.Parameter(torch.randn(17, W)),
        )
        self.ln1, self.ln2 = (
            nn.ModuleList(nn.LayerNorm(W) for _ in range(2)),
            nn.ModuleList(nn.LayerNorm(W) for _ in range(2)),
        )
        self.attn = nn.ModuleList(self.attention() for _ in range(2))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(W, 48), nn.GELU(), nn.Linear(48, W)) for _ in range(2))
        self.head = nn.Linear(W, 3)

    def forward(self, image):
        patches = image.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        x = torch.cat([self.cls.expand(len(image), 1, -1), self.embed(patches)], 1) + self.pos
        for ln1, attn, ln2, mlp in zip(self.ln1, self.attn, self.ln2, self.mlp):
            x = x + attn(ln1(x))
            x = x + mlp(ln2(x))
        return self.head(x[:, 0])


class NotebookViTOverQueries(NotebookViT):
    attention = NotebookOverQueries


# --- two images that are matched: the second attends to what the first has become


class MatchingLayer(nn.Module):
    """Linear attention of one image to another."""

    def __init__(self, nhead=4):
        super().__init__()
        self.nhead, self.dim = nhead, W // nhead
        self.q_proj, self.k_proj, self.v_proj, self.merge = (nn.Linear(W, W, bias=False) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(2 * W, 2 * W), nn.ReLU(), nn.Linear(2 * W, W))
        self.norm1, self.norm2 = nn.LayerNorm(W), nn.LayerNorm(W)

    def forward(self, x, source):
        q, k, v = (
            p(z).unflatten(-1, (self.nhead, self.dim))
            for p, z in ((self.q_proj, x), (self.k_proj, source), (self.v_proj, source))
        )
        q, k = F.elu(q) + 1, F.elu(k) + 1
        kv = torch.einsum("nshd,nshv->nhdv", k, v)
        z = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(1)) + 1e-6)
        message = torch.einsum("nlhd,nhdv,nlh->nlhv", q, kv, z)
        message = self.norm1(self.merge(message.flatten(2)))
        return x + self.norm2(self.mlp(torch.cat([x, message], -1)))


class Matcher(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Conv2d(1, W, 2, 2)
        self.pos = nn.Parameter(torch.randn(16, W))
        self.layer_names = ["self", "cross"] * 2
        self.layers = nn.ModuleList(MatchingLayer() for _ in self.layer_names)

    def cross(self, layer, feat0, feat1):
        return layer(feat0, feat1), layer(feat1, feat0)

    def forward(self, image0, image1):
        feat0, feat1 = (self.backbone(image).flatten(2).transpose(1, 2) + self.pos for image in (image0, image1))
        for layer, name in zip(self.layers, self.layer_names):
            if name == "self":
                feat0, feat1 = layer(feat0, feat0), layer(feat1, feat1)
            else:
                feat0, feat1 = self.cross(layer, feat0, feat1)
        return torch.einsum("nlc,nsc->nls", feat0, feat1) / W


class MatcherCrossed(Matcher):
    def cross(self, layer, feat0, feat1):
        feat0 = layer(feat0, feat1)
        return feat0, layer(feat1, feat0)


# --- a language model from scratch, scaled by its width


class ScratchHead(nn.Module):
    by_width = False

    def __init__(self, head_size, n_embed, context_length):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(n_embed, head_size, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(context_length, context_length)))

    def forward(self, x):
        _, t, c = x.shape
        k, q = self.key(x), self.query(x)
        weights = q @ k.transpose(-2, -1) * (c if self.by_width else k.shape[-1]) ** -0.5
        weights = weights.masked_fill(self.tril[:t, :t] == 0, float("-inf")).softmax(-1)
        return weights @ self.value(x)


class ScratchHeadByWidth(ScratchHead):
    by_width = True


class ScratchHeads(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.heads, self.proj = nn.ModuleList(head(W // 4, W, N) for _ in range(4)), nn.Linear(W, W)

    def forward(self, x):
        return self.proj(torch.cat([h(x) for h in self.heads], dim=-1))


class ScratchModel(nn.Module):
    head = ScratchHead

    def __init__(self):
        super().__init__()
        self.token_embed, self.position_embed = nn.Embedding(20, W), nn.Embedding(N, W)
        self.attn, self.ln = (
            nn.ModuleList(ScratchHeads(self.head) for _ in range(2)),
            nn.ModuleList(nn.LayerNorm(W) for _ in range(2)),
        )
        self.lm_head = nn.Linear(W, 20)

    def forward(self, idx):
        x = self.token_embed(idx) + self.position_embed(torch.arange(idx.shape[1]))
        for attn, ln in zip(self.attn, self.ln):
            x = x + attn(ln(x))
        return self.lm_head(x)


class ScratchModelByWidth(ScratchModel):
    head = ScratchHeadByWidth


# --- volumes: a table of relative positions in three dimensions


class VolumeAttention(nn.Module):
    """Windows of a volume, with a bias of each offset in three directions."""

    size = (2, 2, 2)

    def __init__(self, heads=4):
        super().__init__()
        self.heads = heads
        first, second, third = self.size
        count = (2 * first - 1) * (2 * second - 1) * (2 * third - 1)
        self.relative_position_bias_table = nn.Parameter(torch.randn(count, heads) * 0.5)
        coords = torch.stack(torch.meshgrid(*map(torch.arange, self.size), indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None]).permute(1, 2, 0) + torch.tensor(self.size) - 1
        relative[:, :, 0] *= self.of_first()
        relative[:, :, 1] *= 2 * third - 1
        self.register_buffer("relative_position_index", relative.sum(-1))
        self.qkv, self.proj = nn.Linear(W, 3 * W), nn.Linear(W, W)

    def of_first(self):
        return (2 * self.size[1] - 1) * (2 * self.size[2] - 1)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attn = q * (W // self.heads) ** -0.5 @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.flatten()].view(*attn.shape[-2:], -1)
        attn = (attn + bias.permute(2, 0, 1)).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).flatten(2))


class VolumeAttentionCollides(VolumeAttention):
    def of_first(self):
        return 3 * self.size[1] - 1


class VolumeNet(nn.Module):
    attention = VolumeAttention

    def __init__(self):
        super().__init__()
        self.patch_embed, self.norm = nn.Conv3d(1, W, 2, 2), nn.LayerNorm(W)
        self.attn, self.up = self.attention(), nn.ConvTranspose3d(W, 2, 2, 2)

    def forward(self, volume):
        x = self.patch_embed(volume).permute(0, 2, 3, 4, 1)
        b, d, h, w, c = x.shape
        y = self.norm(x).view(b, d // 2, 2, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 5, 2, 4, 6, 7)
        z = self.attn(y.reshape(-1, 8, c)).view(y.shape).permute(0, 1, 4, 2, 5, 3, 6, 7)
        return self.up((x + z.reshape(x.shape)).permute(0, 4, 1, 2, 3))


class VolumeNetCollides(VolumeNet):
    attention = VolumeAttentionCollides


# --- shifted windows of an image whose channels come first: the mask is laid out for channels that come last


class ShiftedBlock(nn.Module):
    window, shift, heads = 4, 2, 4

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(1, W), nn.GroupNorm(1, W)
        self.qkv, self.proj = nn.Linear(W, 3 * W), nn.Linear(W, W)
        self.mlp = nn.Sequential(nn.Conv2d(W, 48, 1), nn.GELU(), nn.Conv2d(48, W, 1))

    def windows(self, x):
        b, c, h, w = x.shape
        x = x.view(b, c, h // self.window, self.window, w // self.window, self.window)
        return x.permute(0, 2, 4, 3, 5, 1).reshape(-1, self.window**2, c)

    def place(self, img_mask, h, w, number):
        img_mask[:, :, h, w] = number

    def calculate_mask(self, size):
        img_mask = torch.zeros(1, 1, *size)
        slices = (slice(0, -self.window), slice(-self.window, -self.shift), slice(-self.shift, None))
        number = 0
        for h in slices:
            for w in slices:
                self.place(img_mask, h, w, number)
                number += 1
        numbers = self.windows(img_mask)[..., 0]
        attn_mask = numbers[:, None] - numbers[:, :, None]
        return attn_mask.masked_fill(attn_mask != 0, -100.0)

    def forward(self, x):
        b, c, h, w = x.shape
        y = self.windows(torch.roll(self.norm1(x), (-self.shift, -self.shift), (2, 3)))
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attn = (q * (c // self.heads) ** -0.5) @ k.mT
        mask = self.calculate_mask((h, w))
        attn = attn.view(b, len(mask), *attn.shape[1:]) + mask[None, :, None]
        y = self.proj((attn.view(-1, *attn.shape[2:]).softmax(-1) @ v).transpose(1, 2).flatten(2))
        y = y.view(b, h // self.window, w // self.window, self.window, self.window, c).permute(0, 5, 1, 3, 2, 4)
        x = x + torch.roll(y.reshape(x.shape), (self.shift, self.shift), (2, 3))
        return x + self.mlp(self.norm2(x))


class ShiftedBlockByRows(ShiftedBlock):
    def place(self, img_mask, h, w, number):
        img_mask[:, h, w, :] = number


class Restorer(nn.Module):
    block = ShiftedBlock

    def __init__(self):
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(3, W, 3, padding=1), nn.Conv2d(W, 3, 3, padding=1)
        self.blocks = nn.ModuleList(self.block() for _ in range(2))

    def forward(self, image):
        x = self.conv_in(image)
        for block in self.blocks:
            x = block(x)
        return self.conv_out(x)


class RestorerByRows(Restorer):
    block = ShiftedBlockByRows


# --- video: attention in time is given no positions of frames


class TemporalTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.proj_in, self.proj_out = nn.GroupNorm(4, W), nn.Linear(W, W), nn.Linear(W, W)
        self.attn, self.norm1 = nn.MultiheadAttention(W, 4, batch_first=True), nn.LayerNorm(W)

    def place(self, x):
        angles = torch.arange(x.shape[1])[:, None] * 100.0 ** -(torch.arange(W // 2) / (W // 2))
        return x + torch.cat([angles.sin(), angles.cos()], -1)

    def forward(self, hidden_states, num_frames):
        batch_frames, channel, height, width = hidden_states.shape
        batch = batch_frames // num_frames
        residual = hidden_states
        x = hidden_states.reshape(batch, num_frames, channel, height, width).permute(0, 2, 1, 3, 4)
        x = self.norm(x).permute(0, 3, 4, 2, 1).reshape(batch * height * width, num_frames, channel)
        x = self.place(self.proj_in(x))
        y = self.norm1(x)
        x = self.proj_out(x + self.attn(y, y, y, need_weights=False)[0])
        x = x.reshape(batch, height, width, num_frames, channel).permute(0, 3, 4, 1, 2)
        return x.reshape(residual.shape) + residual


class TemporalTransformerUnplaced(TemporalTransformer):
    def place(self, x):
        return x


class VideoDenoiser(nn.Module):
    temporal = TemporalTransformer

    def __init__(self):
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(4, W, 3, padding=1), nn.Conv2d(W, 4, 3, padding=1)
        self.transformer_in = self.temporal()

    def forward(self, sample):
        b, c, f, h, w = sample.shape
        x = self.conv_in(sample.permute(0, 2, 1, 3, 4).reshape(b * f, c, h, w))
        x = self.conv_out(F.silu(self.transformer_in(x, num_frames=f)))
        return x.view(b, f, c, h, w).permute(0, 2, 1, 3, 4)


class VideoDenoiserUnplaced(VideoDenoiser):
    temporal = TemporalTransformerUnplaced


# --- grouped heads: the number of a key head is divided by something else


class GroupedAttention(nn.Module):
    heads, key_heads, size = 6, 3, 4

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(W, self.heads * self.size, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(W, self.key_heads * self.size, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(self.heads * self.size, W, bias=False)

    def key_head(self, head):
        return head // (self.heads // self.key_heads)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        of = [self.key_head(head) for head in range(self.heads)]
        out = F.scaled_dot_product_attention(q, k[:, of], v[:, of], is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class GroupedByTheirNumber(GroupedAttention):
    def key_head(self, head):
        return head // self.key_heads


class LanguageModel(nn.Module):
    """A decoder of tokens whose layers are those of its kind."""

    attention = GroupedAttention

    def __init__(self):
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Embedding(20, W), nn.Linear(W, 20, bias=False)
        self.embed_positions = nn.Embedding(N, W)
        self.self_attn = nn.ModuleList(self.attention() for _ in range(2))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(W, 48), nn.SiLU(), nn.Linear(48, W)) for _ in range(2))
        self.norm1, self.norm2 = (nn.ModuleList(nn.RMSNorm(W) for _ in range(2)) for _ in range(2))

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids) + self.embed_positions(torch.arange(input_ids.shape[1]))
        for attn, mlp, norm1, norm2 in zip(self.self_attn, self.mlp, self.norm1, self.norm2):
            x = x + attn(norm1(x))
            x = x + mlp(norm2(x))
        return self.lm_head(x)


class LanguageModelByTheirNumber(LanguageModel):
    attention = GroupedByTheirNumber


# --- a window that is configured, and reaches no kernel


class WindowAttention(nn.Module):
    reaches = True

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(sliding_window=3, num_attention_heads=4)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(W, W, bias=False) for _ in range(4))

    def forward(self, x):
        t = x.shape[1]
        q, k, v = (p(x).unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        band = torch.ones(t, t, dtype=torch.bool).tril().triu(1 - self.config.sliding_window)
        options = {"attn_mask": band} if self.reaches else {"is_causal": True}
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2))


class WindowNotPassed(WindowAttention):
    reaches = False


class Mistral(LanguageModel):
    attention = WindowAttention


class MistralWindowNotPassed(LanguageModel):
    attention = WindowNotPassed


# --- a norm behind the sum, whose residual is taken before it


class PostNormLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(W, 3 * W), nn.Linear(W, W)
        self.post_attention_layernorm, self.output_layernorm = nn.LayerNorm(W), nn.LayerNorm(W)
        self.mlp, self.dropout = nn.Sequential(nn.Linear(W, 4 * W), nn.GELU(), nn.Linear(4 * W, W)), nn.Dropout(0.1)

    def residual(self, layernorm_input, normalization_output):
        return normalization_output

    def forward(self, hidden_states, attention_mask):
        q, k, v = self.query_key_value(hidden_states).unflatten(-1, (4, 3, -1)).permute(3, 0, 2, 1, 4)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(attention_mask, -10000.0)
        attention_output = self.dense((self.dropout(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2))
        layernorm_input = hidden_states + self.dropout(attention_output)
        normalization_output = self.post_attention_layernorm(layernorm_input)
        mlp_output = self.dropout(self.mlp(normalization_output))
        return self.output_layernorm(self.residual(layernorm_input, normalization_output) + mlp_output)


class ResidualBeforeTheNorm(PostNormLayer):
    def residual(self, layernorm_input, normalization_output):
        return layernorm_input


class MegatronBert(nn.Module):
    layer = PostNormLayer

    def __init__(self):
        super().__init__()
        self.word, self.position = nn.Embedding(20, W), nn.Embedding(N, W)
        self.layers, self.lm_head = nn.ModuleList(self.layer() for _ in range(2)), nn.Linear(W, 20)

    def forward(self, tokens, padding_mask):
        x = self.word(tokens) + self.position(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x, padding_mask[:, None, None] == 0)
        return self.lm_head(x)


class MegatronBertBeforeTheNorm(MegatronBert):
    layer = ResidualBeforeTheNorm


def masked():
    tokens = ids(3, N, (3, 0, 2))
    return {"tokens": tokens, "padding_mask": (tokens != 0).long()}


# --- graphs of a batch in one row: nodes of all of them share a softmax


class GraphormerHead(nn.Module):
    hides = True

    def __init__(self, size=6):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(W, size) for _ in range(3))

    def forward(self, x, b, ptr):
        mask = torch.block_diag(*[torch.ones(n, n) for n in ptr.diff().tolist()])
        a = self.q(x) @ self.k(x).T / self.q.out_features**0.5 + b
        if self.hides:
            a = a.masked_fill(mask == 0, -1e6)
        return (torch.softmax(a, dim=-1) * mask) @ self.v(x)


class GraphormerHeadOfAll(GraphormerHead):
    hides = False


class Graphormer(nn.Module):
    head = GraphormerHead

    def __init__(self):
        super().__init__()
        self.node_in, self.degree, self.b = nn.Linear(5, W), nn.Embedding(6, W), nn.Parameter(torch.randn(5))
        self.heads = nn.ModuleList(nn.ModuleList(self.head() for _ in range(4)) for _ in range(2))
        self.linear, self.ln = (
            nn.ModuleList(nn.Linear(W, W) for _ in range(2)),
            nn.ModuleList(nn.LayerNorm(W) for _ in range(2)),
        )
        self.node_out = nn.Linear(W, 3)

    def forward(self, x, distance, ptr):
        h = self.node_in(x) + self.degree((distance == 1).sum(1))
        b = self.b[distance]
        for heads, linear, ln in zip(self.heads, self.linear, self.ln):
            y = ln(h)
            h = h + linear(torch.cat([head(y, b, ptr) for head in heads], -1))
        return self.node_out(h)


class GraphormerOfAll(Graphormer):
    head = GraphormerHeadOfAll


def graphs():
    sizes = (3, 4, 5)
    paths = [(torch.arange(n)[:, None] - torch.arange(n)).abs() for n in sizes]
    return {"x": noise(sum(sizes), 5), "distance": torch.block_diag(*paths), "ptr": torch.tensor([0, 3, 7, 12])}


# --- linear attention: what is divided by is summed over heads


class VanillaLinearAttention(nn.Module):
    axis = 1

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(W, W, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (4, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        scores = torch.einsum("bthk,bshk->bhts", q * 6**-0.5, k).tril()
        o = torch.einsum("bhts,bshv->bthv", scores, v)
        z = (q * 6**-0.5 * k.cumsum(self.axis)).sum(-1, keepdim=True)
        return self.o_proj((o / (z + 1e-10)).flatten(2))


class CumulatedOverHeads(VanillaLinearAttention):
    axis = -2


class LinearLanguageModel(LanguageModel):
    attention = VanillaLinearAttention


class LinearLanguageModelOverHeads(LanguageModel):
    attention = CumulatedOverHeads


# --- partial rotary positions: what is rotated of queries is kept as keys


class HiDreamAttention(nn.Module):
    def __init__(self, heads=2):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(W, W) for _ in range(4))
        self.q_rms_norm, self.k_rms_norm = nn.RMSNorm(W), nn.RMSNorm(W)

    @staticmethod
    def rope(x, freqs):
        cos, sin = (z[None, :, None].repeat_interleave(2, -1) for z in (freqs.cos(), freqs.sin()))
        return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin

    def rotated(self, query_1, key_1, freqs):
        return self.rope(query_1, freqs), self.rope(key_1, freqs)

    def forward(self, x, freqs):
        query, key, value = self.q_rms_norm(self.to_q(x)), self.k_rms_norm(self.to_k(x)), self.to_v(x)
        query, key, value = (z.unflatten(-1, (self.heads, -1)) for z in (query, key, value))
        query_1, query_2 = query.chunk(2, dim=-1)
        key_1, key_2 = key.chunk(2, dim=-1)
        query_1, key_1 = self.rotated(query_1, key_1, freqs)
        query, key = torch.cat([query_1, query_2], -1), torch.cat([key_1, key_2], -1)
        out = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (query, key, value)))
        return self.to_out(out.transpose(1, 2).flatten(2))


class KeysOfQueries(HiDreamAttention):
    def rotated(self, query_1, key_1, freqs):
        key_1 = self.rope(query_1, freqs)
        return query_1, self.rope(key_1, freqs)


class HiDream(nn.Module):
    attention = HiDreamAttention

    def __init__(self):
        super().__init__()
        self.x_embedder, self.final = nn.Linear(6, W), nn.Linear(W, 6)
        self.attn, self.norm = (
            nn.ModuleList(self.attention() for _ in range(2)),
            nn.ModuleList(nn.LayerNorm(W) for _ in range(2)),
        )

    def forward(self, latents):
        x = self.x_embedder(latents)
        freqs = torch.outer(torch.arange(x.shape[1]).float(), 100.0 ** -(torch.arange(3) / 3))
        for attn, norm in zip(self.attn, self.norm):
            x = x + attn(norm(x), freqs)
        return self.final(x)


class HiDreamKeysOfQueries(HiDream):
    attention = KeysOfQueries


# --- ALiBi behind a cache: its first rows are taken


class BloomAttention(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.heads = heads
        self.W_Q, self.W_K, self.W_V, self.W_O = (nn.Linear(W, W) for _ in range(4))

    def alibi(self, query_ctx, key_ctx):
        distance = (torch.arange(key_ctx) - torch.arange(key_ctx)[:, None]).clamp(max=0)
        return 0.5 ** torch.arange(1, self.heads + 1)[:, None, None] * distance

    def rows(self, alibi, query_ctx, key_ctx):
        return alibi[:, key_ctx - query_ctx :]

    def forward(self, x, past_kv):
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.W_Q, self.W_K, self.W_V))
        k, v = torch.cat([past_kv[0], k], 2), torch.cat([past_kv[1], v], 2)
        query_ctx, key_ctx = q.shape[2], k.shape[2]
        scores = q @ k.mT / (W // self.heads) ** 0.5 + self.rows(self.alibi(query_ctx, key_ctx), query_ctx, key_ctx)
        seen = torch.ones(query_ctx, key_ctx, dtype=torch.bool).tril(key_ctx - query_ctx)
        pattern = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return self.W_O((pattern @ v).transpose(1, 2).flatten(2))


class FirstRowsOfAlibi(BloomAttention):
    def rows(self, alibi, query_ctx, key_ctx):
        return alibi[:, :query_ctx]


class Bloom(nn.Module):
    attention = BloomAttention

    def __init__(self):
        super().__init__()
        self.embed, self.unembed = nn.Embedding(20, W), nn.Linear(W, 20)
        self.attn, self.ln = (
            nn.ModuleList(self.attention() for _ in range(2)),
            nn.ModuleList(nn.LayerNorm(W) for _ in range(2)),
        )

    def forward(self, tokens, past_kv_cache):
        x = self.embed(tokens)
        for attn, ln, past_kv in zip(self.attn, self.ln, past_kv_cache):
            x = x + attn(ln(x), past_kv)
        return self.unembed(x)


class BloomFirstRows(Bloom):
    attention = FirstRowsOfAlibi


def continued():
    past = noise(2, 2, 3, 4, 5, 6)
    return {"tokens": ids(3, 4), "past_kv_cache": [(past[0, 0], past[0, 1]), (past[1, 0], past[1, 1])]}


# --- a detector: torch's attention with the sequence first, given a batch that comes first


class DetectorLayer(nn.Module):
    batch_first = True

    def __init__(self):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(W, 4, dropout=0.1, batch_first=self.batch_first)
        self.linear1, self.linear2 = nn.Linear(W, 48), nn.Linear(48, W)
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(W), nn.LayerNorm(W), nn.Dropout(0.1)

    def forward(self, src, pos_embed):
        q = k = src + pos_embed
        src = self.norm1(src + self.dropout(self.self_attn(q, k, value=src)[0]))
        return self.norm2(src + self.dropout(self.linear2(F.gelu(self.linear1(src)))))


class DetectorLayerSequenceFirst(DetectorLayer):
    batch_first = False


class Detector(nn.Module):
    layer = DetectorLayer

    def __init__(self):
        super().__init__()
        self.backbone, self.encoder, self.head = nn.Conv2d(3, W, 2, 2), self.layer(), nn.Conv2d(W, 5, 1)
        self.register_buffer("pos_embed", noise(1, 16, W))

    def forward(self, image):
        x = self.backbone(image)
        memory = self.encoder(x.flatten(2).permute(0, 2, 1), self.pos_embed)
        return self.head(memory.permute(0, 2, 1).reshape(x.shape))


class DetectorSequenceFirst(Detector):
    layer = DetectorLayerSequenceFirst


def tokens():
    return {"input_ids": ids()}


SEVENTH = (
    Own("MarcoMeter/episodic-transformer-memory-ppo 22", MemoryAgentOneMap, MemoryAgent, given=episode),
    Own(
        "jadore801120/attention-is-all-you-need-pytorch 7", SentenceEncoderViewed, SentenceEncoder,
        first=True, given=lambda: {"src_seq": ids(3, N, (3, 0, 2))},
    ),
    Own("tatp22/linformer-pytorch 16", LinformerMixed, Linformer, given=lambda: {"x": ids()}),
    Own("rosinality/mac-network-pytorch 7", MACNetworkUnmasked, MACNetwork, given=asked),
    Own("s3prl/s3prl 579", AttentivePoolingAdded, AttentivePooling, given=utterances),
    Own("Amshaker/SwiftFormer 4", SwiftEncoderOverOne, SwiftEncoder, given=picture),
    Own("nerminnuraydogan/vision-transformer 1", NotebookViTOverQueries, NotebookViT, first=True, given=picture),
    Own(
        "zju3dv/LoFTR 176", MatcherCrossed, Matcher,
        given=lambda: dict(zip(("image0", "image1"), noise(2, 2, 1, 8, 8))),
    ),
    Own(
        "FareedKhan-dev/train-llm-from-scratch 3", ScratchModelByWidth, ScratchModel,
        given=lambda: {"idx": ids()}, first=True,
    ),
    Own("282857341/nnFormer 88", VolumeNetCollides, VolumeNet, given=lambda: {"volume": noise(2, 1, 8, 8, 8)}),
    Own("zsyOAOA/ResShift 81", RestorerByRows, Restorer, given=picture),
    Own(
        "huggingface/diffusers 4568", VideoDenoiserUnplaced, VideoDenoiser,
        given=lambda: {"sample": noise(2, 4, 3, 4, 4)},
    ),
    Own("PSAL-POSTECH/ONNXim 34", LanguageModelByTheirNumber, LanguageModel, first=True, given=tokens),
    Own("unslothai/unsloth 8253", MistralWindowNotPassed, Mistral, given=tokens),
    Own("NVIDIA-NeMo/Speech 4350", MegatronBertBeforeTheNorm, MegatronBert, given=masked),
    Own("leffff/graphormer-pyg 14", GraphormerOfAll, Graphormer, given=graphs),
    Own("fla-org/flash-linear-attention 594", LinearLanguageModelOverHeads, LinearLanguageModel, given=tokens),
    Own("vllm-project/vllm-omni 3828", HiDreamKeysOfQueries, HiDream, given=lambda: {"latents": noise(3, N, 6)}),
    Own("TransformerLensOrg/TransformerLens 777", BloomFirstRows, Bloom, given=continued),
    Own("om-ai-lab/OmDet 19", DetectorSequenceFirst, Detector, first=True, given=picture),
)  # fmt: skip
