"""What weighs, norms or asks as attention does, and is none: not to be claimed, nor reported as what it is not."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import join, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import MODEL, WIDTH, Core, H, case, rows

_NO_SCORES = "not products|matrix product|no query"
_ONE = Core(None, rows("k.weight", h=1), rows("v.weight", h=1), None, heads=1, proved=())


@case(none=True)
class PointwiseOfAList(nn.Module):
    """HSTU: a SiLU of scores, divided by the length, gated by a fourth part of one map with a SiLU."""

    def __init__(self) -> None:
        super().__init__()
        self.uvqk, self.o = nn.Linear(24, 96), nn.Linear(24, 24)
        self.bias = nn.Parameter(torch.zeros(20))

    def forward(self, x: Tensor) -> Tensor:
        u, v, q, k = torch.split(F.silu(self.uvqk(x)), 24, dim=-1)
        n = x.shape[1]
        at = torch.arange(n)
        scores = torch.einsum("bnhd,bmhd->bhnm", q.unflatten(-1, (H, WIDTH)), k.unflatten(-1, (H, WIDTH)))
        weights = F.silu(scores + self.bias[(at[:, None] - at).clamp(-9, 9) + 9]) / n * (at[:, None] >= at)
        out = torch.einsum("bhnm,bmhd->bnhd", weights, v.unflatten(-1, (H, WIDTH))).flatten(2)
        return self.o(u * F.layer_norm(out, (24,))) + x


@case(none=True)
class ExponentialGates(Four):
    """mLSTM of xLSTM, in parallel: products with sums of logarithmic gates, normed by the size of their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.f = nn.Linear(MODEL, H), nn.Linear(MODEL, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        sums = F.logsigmoid(self.f(x)).mT.cumsum(-1)
        log_d = sums[..., :, None] - sums[..., None, :] + self.i(x).mT[..., None, :]
        log_d = log_d.masked_fill(torch.ones(log_d.shape[-2:], dtype=torch.bool).triu(1), -float("inf"))
        top = log_d.amax(-1, keepdim=True)
        c = q @ (k / WIDTH**0.5).mT * torch.exp(log_d - top)
        norm = torch.maximum(c.sum(-1, keepdim=True).abs(), torch.exp(-top))
        return self.o(join((c / (norm + 1e-6)) @ v))


@case(none=True)
class LearnedFeatureMaps(Four):
    """Hedgehog: softmaxes over the features of queries and of keys, and sums over the past; no scores of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.map_q, self.map_k = nn.Parameter(torch.empty(H, WIDTH, WIDTH)), nn.Parameter(torch.empty(H, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        q, k = (
            torch.cat([(t @ w).softmax(-1), (-t @ w).softmax(-1)], -1) for t, w in ((q, self.map_q), (k, self.map_k))
        )
        kv = torch.einsum("bhnf,bhnd->bhnfd", k, v).cumsum(2)
        out = torch.einsum("bhnf,bhnfd->bhnd", q, kv) / (q * k.cumsum(2)).sum(-1, keepdim=True)
        return self.o(join(out))


@case(none=True)
class StateSpaceDual(nn.Module):
    """Mamba 2 as a product of matrices: scores with decays, and no softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.o = nn.Linear(24, 24 + 2 * 5 + H), nn.Linear(24, 24)
        self.a_log = nn.Parameter(torch.zeros(H))

    def forward(self, u: Tensor) -> Tensor:
        x, B, C, dt = torch.split(self.in_proj(u), [24, 5, 5, H], dim=-1)
        dt = F.softplus(dt)
        sums = (-self.a_log.exp() * dt).mT.cumsum(-1)
        decay = torch.exp(sums[..., :, None] - sums[..., None, :]).tril()
        scores = torch.einsum("bln,bsn->bls", C, B)[:, None] * decay
        return self.o(torch.einsum("bhls,bshp->blhp", scores, x.unflatten(-1, (H, WIDTH)) * dt[..., None]).flatten(2))


@case(none=True)
class FourierMixing(nn.Module):
    """FNet: what is called attention is a Fourier transform."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention, self.query, self.key, self.value = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.self_attention(torch.fft.fft2(x, dim=(-2, -1)).real)


@case(none=True)
class ExpertsByTopK(nn.Module):
    """A mixture of experts: a softmax over five experts, the best two, and sums weighted by it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(24, 5),
            nn.Parameter(torch.empty(5, 24, 12)),
            nn.Parameter(torch.empty(5, 12, 24)),
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        weights, chosen = scores.topk(2, -1)
        full = torch.zeros_like(scores).scatter(-1, chosen, weights / weights.sum(-1, keepdim=True))
        out = torch.einsum("bnef,efc->bnec", F.silu(torch.einsum("bnc,ecf->bnef", x, self.up)), self.down)
        return torch.einsum("bnec,bne->bnc", out, full)


@case(none=True)
class ProductKeys(nn.Module):
    """A large memory: halves of a query choose among learned keys, and learned values are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.keys = nn.Linear(24, 2 * 8), nn.Parameter(torch.empty(2, 5, 8))
        self.values = nn.EmbeddingBag(25, 24, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).view(-1, 2, 8)
        (s1, i1), (s2, i2) = ((q[:, i] @ self.keys[i].t()).topk(3, -1) for i in range(2))
        scores, best = (s1[:, :, None] + s2[:, None]).flatten(1).topk(3, -1)
        index = (i1[:, :, None] * 5 + i2[:, None]).flatten(1).gather(1, best)
        return self.values(index, per_sample_weights=scores.softmax(-1)).view_as(x)


@case(none=True)
class SelectiveKernels(nn.Module):
    """SK-Net: a softmax over two branches for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(24, 24, 3, padding=1), nn.Conv1d(24, 24, 5, padding=2)
        self.query, self.key = nn.Linear(24, 12), nn.Linear(12, 48)

    def forward(self, x: Tensor) -> Tensor:
        branches = torch.stack([self.a(x.mT), self.b(x.mT)], 1)
        weights = self.key(F.relu(self.query(branches.sum(1).mean(-1)))).view(-1, 2, 24).softmax(1)
        return (branches * weights[..., None]).sum(1).mT


@case(none=True, inputs=("b c 5 5",))
class SpatialSoftmax(nn.Module):
    """Key points of a robot's eye: the mean place of each channel, by a softmax over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.value = nn.Conv2d(24, 12, 1), nn.Linear(24, 24)
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        feature = self.conv(x)
        b, c, h, w = feature.shape
        at = torch.stack(torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="xy"), -1).view(
            -1, 2
        )
        attention = F.softmax(feature.view(b * c, h * w) / self.temperature, dim=-1)
        return self.value((attention @ at.to(x.dtype)).view(b, -1))


@case(none=True)
class MatchedByTransport(Four):
    """SuperGlue: descriptors are matched by optimal transport of their products; nothing is averaged."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x.flip(1)).mT / MODEL**0.5
        u, v = torch.zeros_like(scores[..., 0]), torch.zeros_like(scores[:, 0])
        for _ in range(3):
            u = -torch.logsumexp(scores + v[:, None], dim=2)
            v = -torch.logsumexp(scores + u[..., None], dim=1)
        return scores + u[..., None] + v[:, None]


@case(none=True)
class ConditionalRandomField(nn.Module):
    """A CRF: sums over tags of a learned table, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.transitions = nn.Linear(24, 5), nn.Parameter(torch.empty(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        emissions = self.key(x)
        alpha = emissions[:, 0]
        for t in range(1, x.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + self.transitions + emissions[:, t, None], dim=1)
        return torch.logsumexp(alpha, dim=1)


@case(none=True)
class RoutingOfCapsules(nn.Module):
    """Capsules: votes are weighted by a softmax over the five capsules above, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(7, 5, 8, 24))

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("nkdc,bnc->bnkd", self.weight, x)
        logits = torch.zeros_like(votes[..., 0])
        for _ in range(3):
            out = F.normalize((logits.softmax(2)[..., None] * votes).sum(1), dim=-1)
            logits = logits + torch.einsum("bnkd,bkd->bnk", votes, out)
        return out


@case(none=True)
class VladOfClusters(nn.Module):
    """NetVLAD: a softmax over five clusters, and sums of what is left over."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.centroids = nn.Linear(24, 5), nn.Parameter(torch.empty(5, 24))

    def forward(self, x: Tensor) -> Tensor:
        assign = self.key(x).softmax(-1)
        vlad = torch.einsum("bnk,bnc->bkc", assign, x) - assign.sum(1)[..., None] * self.centroids
        return F.normalize(F.normalize(vlad, dim=-1).flatten(1), dim=-1)


@case(none=True)
class WindowsThatMoveForward(nn.Module):
    """Handwriting synthesis: Gaussians over characters that an LSTM moves forward, without a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.window = nn.LSTMCell(48, 24), nn.Linear(24, 9)

    def forward(self, x: Tensor) -> Tensor:
        state, kappa, w, out = None, torch.zeros(len(x), 3, 1, dtype=x.dtype), x[:, 0], []
        places = torch.arange(x.shape[1], dtype=x.dtype)
        for t in range(x.shape[1]):
            state = self.cell(torch.cat([x[:, t], w], -1), state)
            alpha, beta, step = (one[..., None] for one in self.window(state[0]).exp().chunk(3, -1))
            kappa = kappa + step
            phi = (alpha * torch.exp(-beta * (kappa - places) ** 2)).sum(1)
            w = torch.bmm(phi[:, None], x)[:, 0]
            out.append(w)
        return torch.stack(out, 1)


@case(_ONE, may_refuse=_NO_SCORES + "|one token|sums of")
class SeparableScores(nn.Module):
    """MobileViT 2: one score for each token, a context vector, and a product with rectified values."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.k, self.v, self.o = nn.Linear(24, 1), nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        scores = F.softmax(self.i(x), dim=1)
        context = (self.k(x) * scores).sum(dim=1, keepdim=True)
        return self.o(F.relu(self.v(x)) * context.expand_as(x))


@case(_ONE, may_refuse=_NO_SCORES + "|sums of single tokens")
class LocationSensitive(nn.Module):
    """Tacotron 2: an LSTM asks, step by step; scores are a tanh of sums with a filter of the weights before."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.query, self.k = nn.LSTMCell(48, 24), nn.Linear(24, 8), nn.Linear(24, 8)
        self.location, self.dense, self.score = nn.Conv1d(2, 4, 3, padding=1), nn.Linear(4, 8), nn.Linear(8, 1)
        self.v = nn.Linear(24, 24)

    def forward(self, memory: Tensor) -> Tensor:
        values, keys = self.v(memory), self.k(memory)
        context, state = torch.zeros_like(memory[:, 0]), None
        weights = total = torch.zeros_like(memory[..., 0])
        out = []
        for t in range(3):
            state = self.rnn(torch.cat([memory[:, t], context], -1), state)
            place = self.dense(self.location(torch.stack([weights, total], 1)).mT)
            energies = self.score(torch.tanh(self.query(state[0])[:, None] + keys + place))[..., 0]
            weights = F.softmax(energies, dim=1)
            total = total + weights
            context = torch.bmm(weights.unsqueeze(1), values)[:, 0]
            out.append(context)
        return torch.stack(out, 1)


@case(
    Core(None, None, None, None, heads=1, free=("query", "key", "value", "output"), proved=()),
    inputs=("b n c", "b m c"), may_refuse=_NO_SCORES + "|distance|values are its inputs",
)  # fmt: skip
class KernelRegression(nn.Module):
    """Nadaraya and Watson, of every course: a softmax of negative squared distances weighs what was observed."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(1))

    def forward(self, queries: Tensor, pairs: Tensor) -> Tensor:
        keys, values = pairs.split([12, 12], -1)
        apart = (queries[:, :, None, :12] - keys[:, None]).norm(dim=-1)
        return torch.bmm(F.softmax(-((apart * self.w) ** 2) / 2, dim=2), values)


@case(
    Core(rows("w_h.weight", h=1), rows("w_s.weight", h=1), None, None, heads=1, proved=(),
         free=("query", "key", "value", "output")),
    inputs=("b n c", "b m c"), may_refuse="values are its inputs|one head|without a projection|" + _NO_SCORES,
)  # fmt: skip
class CopiedFromTheSource(nn.Module):
    """A pointer-generator: weights over the source average its states, and are scattered over the words as well."""

    def __init__(self) -> None:
        super().__init__()
        self.w_h, self.w_s = nn.Linear(24, 24), nn.Linear(24, 24)
        self.words, self.p_gen = nn.Linear(48, 13), nn.Linear(48, 1)

    def forward(self, target: Tensor, source: Tensor) -> Tensor:
        weights = F.softmax(self.w_h(target) @ self.w_s(source).mT, dim=-1)
        both = torch.cat([target, weights @ source], -1)
        p = torch.sigmoid(self.p_gen(both))
        ids = (torch.arange(source.shape[1]) % 13).expand_as(weights)
        return (p * self.words(both).softmax(-1)).scatter_add(-1, ids, (1 - p) * weights)
