"""A sixth round of public reports: images, music, driving, in the order in which a search of issues gave them.

As in `untried`, a report keeps its first result for good. None was read before the fifth round was mended.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.checks.untried_fifth import N, Own, W, ids, noise


class ImageAttention(nn.Module):
    """Each pixel attends to all pixels."""

    def __init__(self):
        super().__init__()
        self.stem, self.to_rgb = nn.Conv2d(3, W, 3, padding=1), nn.Conv2d(W, 3, 1)
        self.f, self.g, self.h = (nn.Conv2d(W, W // c, 1) for c in (4, 4, 1))
        self.gamma = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, image):
        x = self.stem(image)
        return self.to_rgb(x + self.gamma * self.attend(self.f(x), self.g(x), self.h(x)))

    def attend(self, f, g, h):
        s = g.flatten(2).transpose(1, 2) @ f.flatten(2)
        return (h.flatten(2) @ s.softmax(-1).transpose(1, 2)).view(h.shape)


class WithinRowsOfPixels(ImageAttention):
    def attend(self, f, g, h):
        f, g, h = (t.permute(0, 2, 3, 1) for t in (f, g, h))
        s = g @ f.transpose(2, 3)
        beta = s.reshape(len(s), -1, s.shape[-1]).softmax(1).view(s.shape)
        return (beta @ h).permute(0, 3, 1, 2)


class AttentionNotTransposed(ImageAttention):
    def attend(self, f, g, h):
        energy = torch.bmm(g.flatten(2).permute(0, 2, 1), f.flatten(2))
        return torch.bmm(h.flatten(2), energy.softmax(dim=-1).permute(0, 1, 2)).view(h.shape)


class NonLocalBlock(nn.Module):
    projects = True

    def __init__(self):
        super().__init__()
        self.gn = nn.GroupNorm(4, W)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(W, W, 1) for _ in range(4))

    def forward(self, x):
        h = self.gn(x)
        b, c, height, width = h.shape
        q = self.q(h).reshape(b, c, height * width).permute(0, 2, 1)
        k, v = self.k(h).reshape(b, c, height * width), self.v(h).reshape(b, c, height * width)
        attn = F.softmax(torch.bmm(q, k) * int(c) ** -0.5, dim=2).permute(0, 2, 1)
        a = torch.bmm(v, attn).reshape(b, c, height, width)
        return x + (self.proj_out(a) if self.projects else a)


class NonLocalBlockNotProjected(NonLocalBlock):
    projects = False


class ImageDecoder(nn.Module):
    block = NonLocalBlock

    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(3, W, 3, 1, 1), self.block(), nn.GroupNorm(4, W), nn.SiLU(), nn.Conv2d(W, 3, 3, 1, 1)]
        self.model = nn.Sequential(*layers)

    def forward(self, x):
        return self.model(x)


class ImageDecoderNotProjected(ImageDecoder):
    block = NonLocalBlockNotProjected


class PlannerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(W), nn.LayerNorm(W)
        self.attn = nn.MultiheadAttention(W, 4, batch_first=True)
        self.cross_attn = nn.MultiheadAttention(W, 4, batch_first=True)

    def forward(self, x, cross_c, cross_attn_mask):
        y = self.norm1(x)
        x = x + self.attn(y, y, y)[0]
        return x + self.cross_attn(self.norm2(x), cross_c, cross_c, key_padding_mask=cross_attn_mask)[0]


class Planner(nn.Module):
    """Trajectories of agents, beside a scene whose objects that are missing are zero."""

    masks = True

    def __init__(self):
        super().__init__()
        self.agents, self.objects, self.out = nn.Linear(4, W), nn.Linear(6, W), nn.Linear(W, 4)
        self.blocks = nn.ModuleList(PlannerBlock() for _ in range(2))

    def forward(self, sampled_trajectories, neighbors):
        missing = neighbors.abs().sum(-1) == 0
        encoding = self.objects(neighbors)
        if self.masks:
            encoding = encoding * ~missing[..., None]
        x = self.agents(sampled_trajectories)
        for block in self.blocks:
            x = block(x, encoding, missing if self.masks else None)
        return self.out(x)


class PlannerSeesTheMissing(Planner):
    masks = False


def scene():
    neighbors = noise(3, 7, 6)
    neighbors[0, 4:], neighbors[2, 5:] = 0, 0
    return {"sampled_trajectories": noise(3, 5, 4), "neighbors": neighbors}


class Music(nn.Module):
    """A decoder of notes that is given the notes before those it has to tell."""

    shifts = True

    def __init__(self):
        super().__init__()
        self.embedding, self.pos, self.final = nn.Embedding(20, W), nn.Embedding(N, W), nn.Linear(W, 20)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(W, 4, 48, batch_first=True) for _ in range(2))

    def forward(self, notes):
        given, wanted = (notes[:, :-1], notes[:, 1:]) if self.shifts else (notes, notes)
        t = given.shape[1]
        x, later = self.embedding(given) + self.pos.weight[:t], torch.ones(t, t, dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=later)
        logits = self.final(x)
        return F.cross_entropy(logits.transpose(1, 2), wanted), logits


class MusicToldItsNotes(Music):
    shifts = False


class Latents(nn.Module):
    """A fixed number of latents reads a sentence."""

    is_causal = False

    def __init__(self):
        super().__init__()
        self.embed, self.pos = nn.Embedding(20, W), nn.Embedding(N, W)
        self.init_hidden = nn.Parameter(torch.randn(4, W))
        self.cross_att = nn.MultiheadAttention(W, 4, batch_first=True)
        self.self_att = nn.TransformerEncoderLayer(W, 4, 48, batch_first=True)
        self.out = nn.Linear(W, 6)

    def forward(self, encoder_states, encoder_mask):
        x = self.embed(encoder_states) + self.pos.weight[: encoder_states.shape[1]]
        hidden = self.init_hidden.expand(len(x), -1, -1)
        future = torch.ones(4, x.shape[1], dtype=torch.bool).triu(1) if self.is_causal else None
        y, _ = self.cross_att(hidden, x, x, key_padding_mask=encoder_mask == 0, attn_mask=future)
        return self.out(self.self_att(hidden + y))


class LatentsWithFutureMask(Latents):
    is_causal = True


def sentence():
    tokens = ids(3, N, (3, 0, 2))
    return {"encoder_states": tokens, "encoder_mask": (tokens != 0).long()}


class Roads(nn.Module):
    """Latents of a scene attend to segments of roads, some of which are not there."""

    shows_one = True

    def __init__(self):
        super().__init__()
        self.road_pts_lin, self.mode = nn.Linear(3, W), nn.Parameter(torch.randn(4, W))
        self.attn, self.norm, self.out = nn.MultiheadAttention(W, 4, batch_first=True), nn.LayerNorm(W), nn.Linear(W, 5)

    def forward(self, roads, road_segment_mask):
        mask = road_segment_mask.clone()
        if self.shows_one:
            mask[mask.all(-1), 0] = False
        x = self.road_pts_lin(roads)
        latents = self.mode.expand(len(roads), -1, -1)
        return self.out(self.norm(latents + self.attn(latents, x, x, key_padding_mask=mask)[0]))


class RoadsAllHidden(Roads):
    shows_one = False


def roads():
    mask = torch.zeros(3, 6, dtype=torch.bool)
    mask[0], mask[2, 4:] = True, True
    return {"roads": noise(3, 6, 3), "road_segment_mask": mask}


class DoubleAttention(nn.Module):
    """Features are gathered from all places of an image, and then given out to each."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(3, W, 1), nn.GroupNorm(4, W)
        self.convA, self.convB, self.convV = nn.Conv2d(W, W, 1), nn.Conv2d(W, 8, 1), nn.Conv2d(W, 8, 1)
        self.reproject, self.head = nn.Conv2d(W, W, 1), nn.Conv2d(W, 2, 1)

    def forward(self, image):
        x = self.norm(self.conv1(image))
        a, b, v = self.convA(x).flatten(2), self.convB(x).flatten(2), self.convV(x).flatten(2)
        gathered = a @ self.maps(b).transpose(1, 2)
        z = (gathered @ v.softmax(1)).view(x.shape)
        return self.head(x + self.reproject(z))

    def maps(self, b):
        return b.softmax(-1)


class MapsOverFeatures(DoubleAttention):
    def maps(self, b):
        return b.softmax(1)


def picture():
    return {"image": noise(2, 3, 5, 5)}


SIXTH = (
    Own("taki0112/Self-Attention-GAN-Tensorflow 3", WithinRowsOfPixels, ImageAttention, given=picture),
    Own("heykeetae/Self-Attention-GAN 11", AttentionNotTransposed, ImageAttention, given=picture, first=True),
    Own(
        "dome272/VQGAN-pytorch 23", ImageDecoderNotProjected, ImageDecoder,
        given=lambda: {"x": noise(2, 3, 5, 5)}, first=True,
    ),
    Own("tier4/Diffusion-Planner 156", PlannerSeesTheMissing, Planner, given=scene),
    Own(
        "COMP6248-Reproducability-Challenge/music-transformer-comp6248 4", MusicToldItsNotes, Music,
        given=lambda: {"notes": ids()},
    ),
    Own("NVIDIA-NeMo/Speech 3314", LatentsWithFutureMask, Latents, given=sentence),
    Own("vita-epfl/UniTraj 6", RoadsAllHidden, Roads, given=roads, first=True),
    Own("gjylt/DoubleAttentionNet 3", MapsOverFeatures, DoubleAttention, given=picture),
)  # fmt: skip
