"""Attention of language models and sequences, 2023 to 2026: what papers added to it, as their repositories write it."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import MODEL, WIDTH, Core, H, case, fused, rows, separate


def _causal(scores: Tensor) -> Tensor:
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(mask, float("-inf"))


@case(separate())
class Forgetting(Four):
    """Forgetting transformer: the sum of the logarithms of gates between two tokens is added to their score."""

    def __init__(self) -> None:
        super().__init__()
        self.forget = nn.Linear(MODEL, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        lengths = F.logsigmoid(x.new_zeros(len(x), x.shape[1], H) + self.forget(x).detach()).mT.cumsum(-1)
        scores = q @ k.mT / WIDTH**0.5 + (lengths[..., :, None] - lengths[..., None, :])
        return self.o(join(_causal(scores).softmax(-1) @ v))


@case(separate(heads_alone=True))
class ForgettingThatLearns(Four):
    """The same with gates that are trained: their map reaches the scores of a head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.forget = nn.Linear(MODEL, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        lengths = F.logsigmoid(self.forget(x).float().to(x.dtype)).mT.cumsum(-1)
        scores = q @ k.mT / WIDTH**0.5 + (lengths[..., :, None] - lengths[..., None, :])
        return self.o(join(_causal(scores).softmax(-1) @ v))


@case(separate(heads_alone=True), may_refuse="not products|sum|several|position")
class PositionsByContext(Four):
    """CoPE: positions are counted by gates of the scores, and looked up between two whole ones."""

    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.randn(1, WIDTH, 6))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        scores = _causal(q @ k.mT)
        at = torch.sigmoid(scores).flip(-1).cumsum(-1).flip(-1).clamp(max=5)
        lower, upper = at.floor().long(), at.ceil().long()
        logits = q @ self.pos
        low, high = logits.gather(-1, lower), logits.gather(-1, upper)
        share = at - lower
        return self.o(join((scores + high * share + low * (1 - share)).softmax(-1) @ v))


@case(separate())
class PositionsByANetwork(Four):
    """FIRE: a small network of the logarithm of distances, relative to the place of the query, biases the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, H))
        self.c, self.long = nn.Parameter(torch.tensor(0.1)), nn.Parameter(torch.tensor(512.0))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        at = torch.arange(x.shape[1], dtype=x.dtype)
        apart = (at[:, None] - at[None]).abs()
        size = torch.max(at, torch.abs(self.long))[:, None] + 1e-6
        normed = torch.log(torch.abs(self.c * apart) + 1) / torch.log(torch.abs(self.c * size) + 1)
        bias = self.mlp(normed.unsqueeze(-1)).permute(2, 0, 1)
        return self.o(join(_causal(q @ k.mT / WIDTH**0.5 + bias).softmax(-1) @ v))


@case(separate())
class KernelOfDistances(Four):
    """KERPLE: two positive numbers for each head shape a logarithm of distances."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.a = nn.Parameter(torch.rand(H, 1, 1)), nn.Parameter(torch.rand(H, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        self.p.data = self.p.data.clamp(min=1e-2)
        self.a.data = self.a.data.clamp(min=1e-2)
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        at = torch.arange(x.shape[1])
        bias = -self.p * torch.log(1 + self.a * (at[:, None] - at[None]).abs())
        return self.o(join(_causal(q @ k.mT / WIDTH**0.5 + bias).softmax(-1) @ v))


@case(
    Core(
        rows("q.weight", h=2 * H), rows("k.weight"), rows("v.weight"), None, heads=2 * H, free=("output",),
        proved=("query", "key"),
    ),
    may_refuse="several heads are summed",
)  # fmt: skip
class DifferentialOfTheSecondKind(nn.Module):
    """Two queries for each key: what the second gives is taken from what the first gives, by a learned share."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(MODEL, w * MODEL) for w in (2, 1, 1, 1))
        self.share = nn.Linear(MODEL, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.q(x), 2 * H), split(self.k(x)), split(self.v(x))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        first, second = out[:, 0::2], out[:, 1::2]
        return self.o(join(first - torch.sigmoid(self.share(x)).mT[..., None] * second))


@case(separate(heads_alone=True))
class DepthwiseBehindMaps(Four):
    """Primer: queries, keys and values of a head pass a causal filter over three tokens, one for each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.ModuleDict({m: nn.Conv1d(MODEL, MODEL, 3, groups=MODEL) for m in "qkv"})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(self.filters[m](F.pad(getattr(self, m)(x).mT, (2, 0))).mT) for m in "qkv")
        return self.o(join(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


@case(
    separate("q1", "k", "v", "o1", number=0, proved=("query", "key")),
    Core(rows("q2.weight", source="o1"), rows("k.weight"), rows("v.weight"), rows("o2.weight", "c (h d)"), number=1,
         heads_alone=True, proved=("query",)),
    may_refuse="share|same maps",
)  # fmt: skip
class KeysOfTheLayerBefore(nn.Module):
    """Cross-layer attention (YOCO): the second layer asks the keys and values of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.q1, self.k, self.v, self.o1, self.q2, self.o2 = (nn.Linear(MODEL, MODEL) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        k, v = split(self.k(x)), split(self.v(x))
        x = self.o1(join(attend(split(self.q1(x)), k, v)))
        return self.o2(join(attend(split(self.q2(x)), k, v)))


@case(separate(keys=2), refused="product|gain|share|mix|not followed|not by a linear map|several maps|sum")
class TensorProducts(Four):
    """TPA: queries and keys are sums of products of two maps, one for heads and one for features."""

    def __init__(self) -> None:
        super().__init__(k=2 * WIDTH, v=2 * WIDTH, q=2 * WIDTH)
        self.a_q, self.a_k, self.a_v = (nn.Linear(MODEL, H * 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        def made(a: nn.Module, b: nn.Module) -> Tensor:
            return torch.einsum("bnhr,bnrd->bhnd", a(x).unflatten(-1, (H, 2)), b(x).unflatten(-1, (2, WIDTH))) / 2

        return self.o(join(attend(made(self.a_q, self.q), made(self.a_k, self.k), made(self.a_v, self.v))))


@case(
    Core(
        rows("q_up.weight", source="q_down", through="q_down.weight"), rows("k.weight", h=1), rows("v.weight", h=1),
        rows("o.weight", "c (h d)"),
    )
)  # fmt: skip
class FactorsOfQueries(nn.Module):
    """MFA: queries through a narrow map, one key head."""

    def __init__(self) -> None:
        super().__init__()
        self.q_down, self.q_up = nn.Linear(MODEL, 10, bias=False), nn.Linear(10, MODEL, bias=False)
        self.k, self.v, self.o = nn.Linear(MODEL, WIDTH), nn.Linear(MODEL, WIDTH), nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.q_up(self.q_down(x))), split(self.k(x), 1), split(self.v(x), 1)
        return self.o(join(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)))


@case(separate(proved=("query", "key", "output")))
class IndexedKeys(Four):
    """DeepSeek's sparse attention: an indexer of its own chooses the keys of each query."""

    def __init__(self) -> None:
        super().__init__()
        self.iq, self.ik, self.iw = nn.Linear(MODEL, 2 * 5), nn.Linear(MODEL, 5), nn.Linear(MODEL, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            said = torch.einsum("bnhd,bmd->bnhm", self.iq(x).unflatten(-1, (2, 5)), self.ik(x)).relu()
            index = (said * self.iw(x)[..., None]).sum(2)
            chosen = index.topk(max(1, x.shape[1] - 1), -1).indices
            mask = torch.full_like(index, float("-inf")).scatter(-1, chosen, 0.0)
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        return self.o(join((q @ k.mT / WIDTH**0.5 + mask[:, None]).softmax(-1) @ v))


@case(
    Core(rows("q.weight"), rows("k_slow.weight"), rows("v_slow.weight"), rows("o.weight", "c (h d)"), number=0,
         heads_alone=True, proved=("query",)),
    Core(rows("q.weight"), rows("k.weight"), rows("v.weight"), rows("o.weight", "c (h d)"), number=1,
         heads_alone=True, proved=("query",)),
    may_refuse="softmaxes|same maps|share|single tokens",
)  # fmt: skip
class CoarseAndNear(Four):
    """NSA without selection: means of blocks and the nearest tokens, by keys and values of their own, gated."""

    def __init__(self) -> None:
        super().__init__()
        self.k_slow, self.v_slow, self.gate = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 2 * H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, far_k, far_v = (split(m(x)) for m in (self.q, self.k, self.v, self.k_slow, self.v_slow))
        far_k, far_v = (F.avg_pool1d(t.flatten(0, 1).mT, 2).mT.unflatten(0, t.shape[:2]) for t in (far_k, far_v))
        at = torch.arange(x.shape[1])
        near = (at[:, None] - at).abs() > 3
        far = attend(q, far_k, far_v)
        scores = (q @ k.mT / WIDTH**0.5).masked_fill(near, float("-inf"))
        gates = self.gate(x).sigmoid().unflatten(-1, (2, H)).permute(2, 0, 3, 1)[..., None]
        return self.o(join(gates[0] * far + gates[1] * (scores.softmax(-1) @ v)))


@case(separate(proved=("query", "key")))
class MemoryBeside(Four):
    """Infini-attention: a linear memory of the same keys and values is mixed in, head by head, before the last map."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.zeros(1, H, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        sq, sk = F.elu(q) + 1, F.elu(k) + 1
        memory = sq @ (sk.mT @ v) / (sq @ sk.sum(-2, keepdim=True).mT)
        local = _causal(q @ k.mT / WIDTH**0.5).softmax(-1) @ v
        gate = self.beta.sigmoid()
        return self.o(join(gate * memory + (1 - gate) * local))


@case(
    Core(
        rows("in_proj.weight", "(r h d) c", n_r=4, r=0), rows("in_proj.weight", "(r h d) c", n_r=4, r=1),
        rows("in_proj.weight", "(r h d) c", n_r=4, r=2), None, free=("output",), proved=("query", "key", "value"),
    )
)  # fmt: skip
class BesideARecurrence(nn.Module):
    """Hymba: one map gives queries, keys, values and the input of a recurrence; both are normed and averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.o = nn.Linear(24, 96), nn.Linear(24, 24)
        self.norm_a, self.norm_s, self.decay = nn.RMSNorm(24), nn.RMSNorm(24), nn.Parameter(torch.rand(24))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, s = self.in_proj(x).split(24, -1)
        out = join(F.scaled_dot_product_attention(*(split(t) for t in (q, k, v)), is_causal=True))
        state, states = torch.zeros_like(s[:, 0]), []
        for t in range(s.shape[1]):
            state = self.decay.sigmoid() * state + s[:, t]
            states.append(state)
        return self.o((self.norm_a(out) + self.norm_s(torch.stack(states, 1))) / 2)


@case(
    Core(rows("q.weight", h=1), rows("q.weight", h=1), rows("v.weight", h=1), None, heads=1, free=("output",),
         scores="b q k", head_axes=""),
    may_refuse="activation", )  # fmt: skip
class GatedUnit(nn.Module):
    """GAU with a softmax: queries and keys are one narrow map with an activation, each with gains and shifts."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v, self.u, self.o = (nn.Linear(24, w) for w in (8, 48, 48, 24))
        self.o = nn.Linear(48, 24)
        self.gamma, self.beta = nn.Parameter(torch.rand(2, 8)), nn.Parameter(torch.rand(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        z = F.silu(self.q(x))
        q, k = (z[..., None, :] * self.gamma + self.beta).unbind(-2)
        weights = (q @ k.mT / 8**0.5).softmax(-1)
        return self.o(F.silu(self.u(x)) * (weights @ F.silu(self.v(x))))


@case(
    separate(heads_alone=True, proved=("query", "key")),
    may_refuse="several maps|experts|sum|share|mix|values|no weight|not followed|not by a linear map|adds",
)
class ExpertsOfValues(Four):
    """SwitchHead: values and outputs are sums over experts that each token weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.ev, self.eo = nn.Parameter(torch.randn(3, H, MODEL, WIDTH)), nn.Parameter(torch.randn(3, H, WIDTH, MODEL))
        self.sv, self.so = nn.Linear(MODEL, 3 * H), nn.Linear(MODEL, 3 * H)

    def forward(self, x: Tensor) -> Tensor:
        q, k = split(self.q(x)), split(self.k(x))
        gv, go = (s(x).sigmoid().unflatten(-1, (3, H)) for s in (self.sv, self.so))
        v = torch.einsum("bnc,ehcd,bneh->bhnd", x, self.ev, gv)
        out = (q @ k.mT / WIDTH**0.5).softmax(-1) @ v
        return torch.einsum("bhnd,ehdc,bneh->bnc", out, self.eo, go)


@case(separate(proved=("value", "output")), may_refuse="which tokens")
class HalfOfTheTokens(Four):
    """Mixture of depths: the tokens that a router ranks first attend, and are added back where they were."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(MODEL, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x)[..., 0].topk(x.shape[1] // 2 + 1, dim=1)
        chosen, order = chosen.sort(1)
        index = chosen[..., None].expand(-1, -1, MODEL)
        y = x.gather(1, index)
        out = self.o(join(attend(split(self.q(y)), split(self.k(y)), split(self.v(y)))))
        return x.scatter_add(1, index, out * weights.gather(1, order)[..., None].sigmoid())


class _Column(nn.Module):
    """A parallel map as in Megatron, on one rank: it gives its bias beside what it gives."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(out, width)), nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return torch.matmul(x, self.weight.t()), self.bias


@case(
    Core(
        *(rows("query_key_value.weight", "(h r d) c", n_r=3, r=r) for r in range(3)), rows("dense.weight", "c (h d)"),
        scores="b h q k",
    ),
    inputs=("n b c",), tokens=7,
)  # fmt: skip
class Megatron(nn.Module):
    """Length first; maps that give a tuple; one product with a buffer for the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.dense = _Column(24, 72), _Column(24, 24)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed, bias = self.query_key_value(hidden)
        mixed = (mixed + bias).view(*mixed.shape[:-1], H, 3 * WIDTH)
        q, k, v = mixed.split(WIDTH, dim=-1)
        length, b = q.shape[:2]
        q, k, v = (t.reshape(length, b * H, WIDTH).transpose(0, 1) for t in (q, k, v))
        scores = torch.baddbmm(torch.zeros(b * H, length, length, dtype=q.dtype), q, k.mT, beta=0.0, alpha=WIDTH**-0.5)
        probs = F.softmax(scores.view(b, H, length, length), dim=-1)
        context = torch.bmm(probs.view(b * H, length, length), v).view(b, H, length, WIDTH).permute(2, 0, 1, 3)
        out, bias = self.dense(context.reshape(length, b, -1))
        return out + bias


class _General(nn.Module):
    """A map with a kernel of three dims, as Flax keeps it."""

    def __init__(self, kernel: tuple[int, ...], axes: int) -> None:
        super().__init__()
        self.kernel, self.axes = nn.Parameter(torch.empty(kernel)), axes

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensordot(x, self.kernel, dims=self.axes)


@case(
    Core(*(rows(f"{m}.kernel", "c h d") for m in ("query", "key", "value")), rows("out.kernel", "h d c")),
)
class FromFlax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (_General((24, H, WIDTH), 1) for _ in range(3))
        self.out = _General((H, WIDTH, 24), 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x) / WIDTH**0.5, self.key(x), self.value(x)
        weights = torch.softmax(torch.einsum("...qhd,...khd->...hqk", q, k), -1)
        return self.out(torch.einsum("...hqk,...khd->...qhd", weights, v))


class _Equalized(nn.Module):
    """Weights are scaled when they are used (StyleGAN)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(24, 24)), nn.Parameter(torch.zeros(24))
        self.scale = 24**-0.5

    def matrix(self) -> Tensor:
        return self.weight * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix(), self.bias)


@case(
    Core(*(rows(f"{m}.weight", computed=m) for m in "qkv"), rows("o.weight", "c (h d)", computed="o")),
    may_refuse="not followed|not by a linear map",
)
class EqualizedMaps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (_Equalized() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(Core(*(rows("w.weight") for _ in range(3)), rows("o.weight", "c (h d)"), proved=("query", "output")))
class OneMapForAllRoles(nn.Module):
    """CRATE: queries, keys and values are the same projection."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.o = nn.Linear(24, 24, bias=False), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        w = rearrange(self.w(x), "b n (h d) -> b h n d", h=H)
        return self.o(rearrange((w @ w.mT * WIDTH**-0.5).softmax(-1) @ w, "b h n d -> b n (h d)"))


@case(
    Core(rows("q.weight"), rows("k.weight"), rows("v.weight"), rows("v.weight", "(h d) c"), proved=("query", "key"),
         free=("output",)),
    may_refuse="`v` and with its transpose",
)  # fmt: skip
class OutputByTheValues(nn.Module):
    """The matrix of the values, transposed, takes the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(24, 24, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out = join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x))))
        return F.linear(out, self.v.weight.t())


@case(separate(heads_alone=True))
class BilinearScores(Four):
    """A matrix of each head between its queries and keys (Luong's general score)."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Parameter(torch.randn(H, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        return self.o(join((q @ self.between @ k.mT).softmax(-1) @ v))


@case(
    Core(None, None, rows("v.weight"), rows("o.weight", "c (h d)"), proved=("value", "output")),  # of two maps each
    may_refuse="are sums of|complex",
)
class ComplexHeads(Four):
    """Scores are the real part of products of complex queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.qi, self.ki = nn.Linear(MODEL, MODEL), nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (torch.complex(split(a(x)), split(b(x))) for a, b in ((self.q, self.qi), (self.k, self.ki)))
        return self.o(join((q @ k.conj().mT).real.softmax(-1) @ split(self.v(x))))


@case(separate())
class SumsOverThreeFactors(Four):
    """A temperature of each head stands in the same einsum as queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.tau = nn.Parameter(torch.rand(H))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (H, WIDTH)) for m in (self.q, self.k, self.v))
        weights = torch.einsum("bqhd,bkhd,h->bhqk", q, k, self.tau).softmax(-1)
        return self.o(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))


@case(separate(), may_refuse="not products")
class CosinesByFunction(Four):
    """`F.cosine_similarity` of all pairs: no matrix product."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        scores = 5 * F.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1)
        return self.o(join(scores.softmax(-1) @ v))


@case(separate())
class MaskedAndNormedAgain(Four):
    """AllenNLP: what is masked counts in the softmax, is multiplied away, and the rest normed again."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
        weights = F.softmax(q @ k.mT / WIDTH**0.5 * mask, dim=-1) * mask
        return self.o(join(weights / (weights.sum(dim=-1, keepdim=True) + 1e-13) @ v))


@case(separate(proved=()))
class ByLogarithms(Four):
    """The exponential of a logarithmic softmax; the proof does not see it, which is the softmax of the scores."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        return self.o(join(F.log_softmax(q @ k.mT / WIDTH**0.5, dim=-1).exp() @ v))


@case(separate(proved=()))
class ByLogSumExp(Four):
    """The same with the logarithm of the sum taken from the scores."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        scores = q @ k.mT / WIDTH**0.5
        return self.o(join(torch.exp(scores - scores.logsumexp(-1, keepdim=True)) @ v))


@case(separate(proved=()), may_refuse="softmax|norm|average")
class Sinkhorn(Four):
    """Sinkformer: exponentials are normed over rows and columns in turn."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        scores = q @ k.mT / WIDTH**0.5
        for _ in range(3):
            scores = scores - scores.logsumexp(-2, keepdim=True)
            scores = scores - scores.logsumexp(-1, keepdim=True)
        return self.o(join(scores.exp() @ v))


@case(
    Core(rows("q.weight"), rows("k.weight"), None, None, free=("value", "output"), proved=("query", "key")),
    may_refuse="values|average|weights|no values",
)
class WeightsAreTheAnswer(nn.Module):
    """A pointer network: which token is pointed to, as a mean over heads, and nothing is averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return (split(self.q(x)) @ split(self.k(x)).mT / WIDTH**0.5).softmax(-1).mean(1)


@case(
    separate(proved=("query", "key")),
)
class SkippedAtTimes(Four):
    """LayerDrop: nearly half of the time the layer is passed by."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(()) < 0.45:
            return x
        return x + self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(separate())
class StartsAtZero(Four):
    """ReZero: what attention gives is weighed by a number that is zero in the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.alpha * self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(separate(), convert=lambda m: nn.init.zeros_(m.alpha) is None or m)
class StillAtZero(StartsAtZero):
    """The same, with the number at zero."""


@case(fused("c_attn.weight", output="c_proj.weight", rounds=1, heads_alone=True, proved=("query", "key")),
      inputs=("b n c", "b n c", "b n 3"))  # fmt: skip
class DecisionsOfATrajectory(nn.Module):
    """Decision transformer: returns, states and actions take turns as tokens; the answer is of the states."""

    def __init__(self) -> None:
        super().__init__()
        self.returns, self.states, self.actions = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(3, 24)
        self.ln, self.c_attn, self.c_proj = nn.LayerNorm(24), nn.Linear(24, 72), nn.Linear(24, 24)
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, returns: Tensor, states: Tensor, actions: Tensor) -> Tensor:
        b, n, _ = states.shape
        x = torch.stack((self.returns(returns), self.states(states), self.actions(actions)), dim=1)
        x = x.permute(0, 2, 1, 3).reshape(b, 3 * n, 24)
        q, k, v = (split(t) for t in self.c_attn(self.ln(x)).split(24, dim=2))
        weights = q @ k.transpose(-1, -2) / float(v.size(-1)) ** 0.5
        weights = torch.where(self.bias[:, :, : 3 * n, : 3 * n].bool(), weights, torch.full_like(weights, -1e4))
        x = x + self.c_proj(join(weights.softmax(-1) @ v))
        return x.reshape(b, n, 3, 24).permute(0, 2, 1, 3)[:, 1]


@case(
    Core(
        rows("q_proj.weight"), rows("k_proj.weight"), rows("v_proj.weight"), rows("c_proj.weight", "c (h d)"),
        heads_alone=True, proved=("query", "key"),
    ),
    inputs=("b c x y",), tokens=17, may_refuse="without the weights of its queries",
)  # fmt: skip
class PooledByTheirMean(nn.Module):
    """CLIP's pooling: the mean of pixels asks them, through torch's own function with four matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(17, 24) / 5)
        self.q_proj, self.k_proj, self.v_proj, self.c_proj = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, image: Tensor) -> Tensor:
        x = image.flatten(start_dim=2).permute(2, 0, 1)
        x = torch.cat([x.mean(dim=0, keepdim=True), x], dim=0)
        x = x + self.positions[: len(x), None, :].to(x.dtype)
        x, _ = F.multi_head_attention_forward(
            query=x[:1], key=x, value=x, embed_dim_to_check=24, num_heads=H, q_proj_weight=self.q_proj.weight,
            k_proj_weight=self.k_proj.weight, v_proj_weight=self.v_proj.weight, in_proj_weight=None,
            in_proj_bias=torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias]), bias_k=None, bias_v=None,
            add_zero_attn=False, dropout_p=0.0, out_proj_weight=self.c_proj.weight, out_proj_bias=self.c_proj.bias,
            use_separate_proj_weight=True, training=self.training, need_weights=False,
        )  # fmt: skip
        return x.squeeze(0)


@case(separate(heads_alone=True, scores="v h q k", proved=("value", "output")), inputs=("b 16 3",))
class SeriesInPatches(Four):
    """PatchTST: each variate by itself, in overlapping patches, with positions that are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pos = nn.Linear(4, MODEL), nn.Parameter(torch.randn(7, MODEL))
        self.head = nn.Linear(7 * MODEL, 2)

    def forward(self, series: Tensor) -> Tensor:
        mean, std = series.mean(1, keepdim=True), series.std(1, keepdim=True) + 1e-5
        x = ((series - mean) / std).transpose(1, 2).unfold(-1, 4, 2)
        x = (self.embed(x) + self.pos).flatten(0, 1)
        x = x + self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))
        return self.head(x.flatten(1)).unflatten(0, (len(series), -1)).transpose(1, 2) * std + mean
