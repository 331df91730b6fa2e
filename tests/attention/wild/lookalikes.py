"""What has a softmax or the shape of attention, and no heads of queries and keys: to be refused, or not claimed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import join, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import MODEL, WIDTH, Core, H, case, rows, separate

# There are no scores of pairs.
_ONE = Core(None, rows("k.weight", h=1), rows("v.weight", h=1), None, heads=1, proved=())
_NO_SCORES = "not products|matrix product|no query"


@case(separate(), refused=_NO_SCORES + "|features")
class EfficientAttention(Four):
    """Queries are normed over features, keys over tokens: there are no scores of pairs."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        q, k = q.softmax(dim=-1) * WIDTH**-0.5, k.softmax(dim=-2)
        context = torch.einsum("bhnd,bhne->bhde", k, v)
        return self.o(join(torch.einsum("bhde,bhnd->bhne", context, q)))


@case(separate(heads_alone=True), may_refuse="softmaxes")
class Landmarks(Four):
    """Nystrom: three softmaxes with means of queries and keys, and the inverse of the second."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        ql, kl = (F.adaptive_avg_pool1d(t.flatten(0, 1).mT, 3).mT.unflatten(0, t.shape[:2]) for t in (q, k))
        first, middle, last = ((a @ b.mT / WIDTH**0.5).softmax(-1) for a, b in ((q, kl), (ql, kl), (ql, k)))
        return self.o(join(first @ torch.linalg.pinv(middle) @ (last @ v)))


@case(_ONE, may_refuse=_NO_SCORES)
class PooledByOneScore(nn.Module):
    """Pooling by a learned score of each token, and a product with the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.v, self.k = nn.Linear(24, 1), nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        weights = F.softmax(self.score(x), dim=1)
        return torch.bmm(weights.transpose(1, 2), self.v(x)).squeeze(1)


@case(_ONE, may_refuse=_NO_SCORES)
class BagsOfInstances(nn.Module):
    """Gated attention over the instances of a bag (ABMIL)."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.k = nn.Linear(24, 24), nn.Linear(24, 24)
        self.u, self.w = nn.Linear(24, 24), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.w(torch.tanh(self.k(x)) * torch.sigmoid(self.u(x))).transpose(2, 1)
        return torch.matmul(F.softmax(scores, dim=2), self.v(x))


@case(_ONE, may_refuse=_NO_SCORES + "|activation")
class WordsOfADocument(nn.Module):
    """Hierarchical attention: a learned vector asks the tanh of a map."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v, self.context = nn.Linear(24, 24), nn.Linear(24, 24), nn.Parameter(torch.randn(24))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.tanh(self.k(x)).matmul(self.context)
        return (F.softmax(scores, dim=1).unsqueeze(-1) * self.v(x)).sum(1)


@case(separate(), refused=_NO_SCORES + "|additive|edge")
class DenseGraph(Four):
    """GAT on a dense graph: scores are sums of a number of each node."""

    def __init__(self) -> None:
        super().__init__()
        self.a1, self.a2 = nn.Parameter(torch.randn(H, WIDTH, 1)), nn.Parameter(torch.randn(H, WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = split(self.v(x))
        scores = F.leaky_relu(torch.matmul(h, self.a1) + torch.matmul(h, self.a2).mT, 0.2)
        return self.o(join(F.elu(scores.softmax(-1) @ h)))


@case(_ONE, may_refuse=_NO_SCORES, inputs=("b n c", "b c"))
class InterestsOfAUser(nn.Module):
    """DIN with a softmax: a network scores the pair of a candidate and each thing that was bought."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = nn.Linear(24, 24), nn.Linear(24, 24)
        self.mlp = nn.Sequential(nn.Linear(96, 16), nn.PReLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor, candidate: Tensor) -> Tensor:
        q = candidate[:, None].expand_as(x)
        scores = self.mlp(torch.cat([q, x, q - x, q * x], -1)).transpose(1, 2)
        return torch.matmul(F.softmax(scores / 24**0.5, -1), self.v(x)).squeeze(1)


@case(separate(proved=()), may_refuse=_NO_SCORES)
class SoftExperts(Four):
    """Soft mixture of experts: learned slots take averages of tokens, tokens averages of slots."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(MODEL, 3, 2))
        self.experts = nn.ModuleList(nn.Linear(MODEL, MODEL) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.einsum("bnd,dep->bnep", x, self.phi)
        slots = torch.einsum("bnd,bnep->bepd", x, logits.softmax(1))
        out = torch.stack([expert(slots[:, i]) for i, expert in enumerate(self.experts)], 1)
        return torch.einsum("bepd,bnep->bnd", out, logits.flatten(2).softmax(-1).view_as(logits))


@case(none=True)
class ContrastOfTwoTowers(nn.Module):
    """CLIP's loss: a softmax over the pairs of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.scale = nn.Linear(24, 24), nn.Linear(24, 24), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        a, b = F.normalize(self.image(x.mean(1)), dim=-1), F.normalize(self.text(x[:, 0]), dim=-1)
        return F.cross_entropy(self.scale.exp() * a @ b.t(), torch.arange(len(x)))


@case(none=True)
class SoftCodebook(nn.Module):
    """Tokens are averages of the entries of a codebook."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.book = nn.Linear(24, 12), nn.Embedding(11, 12)

    def forward(self, x: Tensor) -> Tensor:
        return (self.into(x) @ self.book.weight.t()).softmax(-1) @ self.book.weight


@case(none=True)
class RandomFeatures(Four):
    """Performer: positive random features of queries and keys, and no softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("omega", torch.randn(WIDTH, 13))

    def _features(self, x: Tensor) -> Tensor:
        projected = x * WIDTH**-0.25 @ self.omega
        return torch.exp(projected - x.square().sum(-1, keepdim=True) / 2 / WIDTH**0.5) + 1e-4

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._features(split(self.q(x))), self._features(split(self.k(x))), split(self.v(x))
        scale = 1.0 / torch.einsum("...nd,...d->...n", q, k.sum(-2))
        return self.o(join(torch.einsum("...de,...nd,...n->...ne", torch.einsum("...nd,...ne->...de", k, v), q, scale)))


@case(none=True)
class GatedDelta(Four):
    """Gated DeltaNet, token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.beta, self.decay = nn.Linear(MODEL, H), nn.Linear(MODEL, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        beta, decay = self.beta(x).sigmoid().mT, F.logsigmoid(self.decay(x)).exp().mT
        state, out = q.new_zeros(*q.shape[:2], WIDTH, WIDTH), []
        for t in range(x.shape[1]):
            state = state * decay[:, :, t, None, None]
            error = v[:, :, t] - (state * k[:, :, t, :, None]).sum(-2)
            state = state + k[:, :, t, :, None] * (error * beta[:, :, t, None])[:, :, None]
            out.append((state * q[:, :, t, :, None]).sum(-2))
        return self.o(join(torch.stack(out, 2)))


@case(none=True)
class ChunksOfRetention(Four):
    """Retention in chunks: products with decay within a chunk, a state between chunks."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        state, out = torch.zeros(len(x), H, WIDTH, WIDTH, dtype=x.dtype), []
        for at in range(0, x.shape[1], 3):
            a, b, c = q[:, :, at : at + 3], k[:, :, at : at + 3], v[:, :, at : at + 3]
            out.append((a @ b.mT).tril() @ c + a @ state)
            state = 0.9 * state + b.mT @ c
        return self.o(join(torch.cat(out, 2)))


@case(none=True)
class SquaredRelu(Four):
    """Primer EZ and GAU: squared activations of scores, divided by the number of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        return self.o(join((F.relu(q @ k.mT) ** 2 / x.shape[1]) @ v))


@case(none=True)
class DynamicFilters(nn.Module):
    """Dynamic convolution: a softmax over the taps of a filter that each token gives."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.v, self.o = nn.Linear(24, H * 3), nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        taps = self.weights(x).view(b * n * H, 1, 3).softmax(-1)
        windows = F.unfold(self.v(x).mT[..., None], (3, 1), padding=(1, 0)).view(b, H, WIDTH, 3, n)
        values = windows.permute(0, 4, 1, 3, 2).reshape(b * n * H, 3, WIDTH)
        return self.o(torch.bmm(taps, values).view(b, n, c))


@case(none=True)
class SelectiveState(nn.Module):
    """Mamba's recurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.dt, self.bc, self.o = nn.Linear(24, 48), nn.Linear(24, 24), nn.Linear(24, 10), nn.Linear(24, 24)
        self.a = nn.Parameter(torch.rand(24, 5))

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.into(x).chunk(2, -1)
        dt, (b, c) = F.softplus(self.dt(u)), self.bc(u).chunk(2, -1)
        state, out = torch.zeros(len(x), 24, 5, dtype=x.dtype), []
        for t in range(x.shape[1]):
            state = state * torch.exp(-self.a.exp() * dt[:, t, :, None]) + (dt * u)[:, t, :, None] * b[:, t, None]
            out.append((state * c[:, t, None]).sum(-1))
        return self.o(torch.stack(out, 1) * F.silu(z))


@case(
    Core(rows("general.weight", h=1, source=None), rows("general.weight", h=1), None, None, heads=1,
         free=("query", "value", "output"), proved=()),
    inputs=("b n c", "b m c"), may_refuse="values are its inputs|not followed|not by a linear map|without a projection",
)  # fmt: skip
class RecurrentDecoder(nn.Module):
    """Luong: states of a decoder ask those of an encoder, whose own values they average."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.GRU(24, 24, batch_first=True), nn.LSTM(24, 24, batch_first=True)
        self.general, self.concat = nn.Linear(24, 24, bias=False), nn.Linear(48, 24)

    def forward(self, target: Tensor, source: Tensor) -> Tensor:
        memory, state = self.encoder(source)
        hidden, _ = self.decoder(target, (state, torch.zeros_like(state)))
        weights = F.softmax(hidden.bmm(self.general(memory).transpose(1, 2)), dim=-1)
        return torch.tanh(self.concat(torch.cat([weights.bmm(memory), hidden], -1)))


@case(separate(proved=("query", "key", "value")), may_refuse="second|several|sum|adds|distance|point|other maps")
class InvariantPoints(Four):
    """AlphaFold's structure module, in small: products, distances of points and a bias of pairs, in one softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.qp, self.kp, self.pair = nn.Linear(MODEL, H * 6), nn.Linear(MODEL, H * 6), nn.Linear(MODEL, H)
        self.weight = nn.Parameter(torch.rand(H, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, qp, kp = (split(m(x)) for m in (self.q, self.k, self.v, self.qp.requires_grad_(True), self.kp))
        distance = (qp[:, :, :, None] - kp[:, :, None]).detach().square().sum(-1)
        scores = q @ k.mT / WIDTH**0.5 - F.softplus(self.weight) * distance
        return self.o(join(scores.softmax(-1) @ v))


@case(
    Core(rows("q.weight"), rows("k.weight"), rows("v.weight"), rows("o.weight", "c (h d)"), scores="b i h q k",
         heads_alone=True),
    inputs=("b n n c",), tokens=5,
)  # fmt: skip
class TriangleOfEdges(Four):
    """Edges that start at one node attend to each other, with a bias of the third edge and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.bias, self.gate = nn.LayerNorm(24), nn.Linear(24, H, bias=False), nn.Linear(24, 24)

    def forward(self, z: Tensor) -> Tensor:
        z = self.norm(z)
        bias = self.bias(z.detach()).permute(0, 3, 1, 2).unsqueeze(1)
        q, k, v = (m(z).unflatten(-1, (H, WIDTH)).transpose(-2, -3) for m in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.mT / WIDTH**0.5 + bias, -1)
        out = (weights @ v).transpose(-2, -3)
        return self.o((out * self.gate(z).sigmoid().view_as(out)).flatten(-2))
